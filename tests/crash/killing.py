"""One kill: a node from a scenario's disk, killed at one of its calls, started again, and looked at when it rests."""

from __future__ import annotations

import contextlib
import enum
import fcntl
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Optional

from tests.crash import picture
from tests.crash.scenarios import Ground, Resumed, Scenario
from tests.crash.tracer import Action, AtStop, Stop, Traced, trace
from tests.field.evidence import status
from tests.stand.node import Node

ROUNDS = 12
_EARLY_DROPIN = "mcdaemon-early.service.d/50-traced.conf"
_EARLY_COMMAND = "/usr/bin/python3 -IB -X faulthandler /usr/local/lib/mcdaemon/mcdaemon.pyz early"
_EARLY_REPORT = "early-calls"
_OUTPUT_PIPE = 1 << 20
# The agent's directories get their modes at each start; what is said goes to the log.
_PLACES = re.compile(r"/(var/lib|run)/mcdaemon(/settled|/\.mcdaemon-\w+)?$|/run/stand/log/")
_F_SETPIPE_SZ = 1031  # fcntl has the name only since Python 3.10


class Variant(enum.Enum):
    """What comes after the kill."""

    STAYS = "stays"  # the same config is desired: the node ends on it
    WITHDRAWN = "withdrawn"  # the other config is desired: the node ends on that
    CUT = "cut"  # the early unit only: the power is cut as well, and the same config is desired


@dataclass(frozen=True)
class Call:
    """A counted call of an unkilled run, without what differs from run to run."""

    program: str
    call: str
    path: str


@dataclass
class Prepared:
    """A scenario with its disk, the calls of an unkilled run, and how that ends.

    `target`: the desired config; `withdrawn`: the other one, the first having never been there; `returned`: the other
    one after the first was confirmed, by an update like any other. A target that is withdrawn after it was booted is
    confirmed first, so that it ends like that (what differs: directories that the first made stay, empty).
    """

    scenario: Scenario
    ground: Ground
    disk: Path
    calls: list[Call] = field(default_factory=list)
    target: picture.Picture = field(default_factory=dict)
    withdrawn: picture.Picture = field(default_factory=dict)
    returned: picture.Picture = field(default_factory=dict)
    _runs: int = 0

    @property
    def variants(self) -> Sequence[Variant]:
        return tuple(Variant) if self.scenario.early else (Variant.STAYS, Variant.WITHDRAWN)

    def points(self) -> list[int]:
        """The numbers of the calls that are killed at, those left out that are provably like another (`_Alike`)."""
        alike = _Alike()
        return [number for number, call in enumerate(self.calls, 1) if not alike(call)]

    @contextlib.contextmanager
    def node(self, early: int = 0) -> Iterator[Resumed]:
        """A node from the disk, up; where the early unit is the one to be killed, it was, at that call (0: nowhere)."""
        self._runs += 1
        folder = self.ground.folder / f"run-{self.scenario.name}-{os.getpid()}-{self._runs}"
        node = Resumed(self.disk, folder, _traced_early(early) if self.scenario.early else None)
        try:
            yield node
        finally:
            node.discard()


@dataclass
class Outcome:
    """What became of a node that was killed at call `number`; no `problems`: it is exactly what it should be."""

    scenario: str
    number: int
    variant: Variant
    killed: Optional[str] = None
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0
    said: str = ""

    def text(self) -> str:
        """The problems, where it was killed, and how to do just this again."""
        again = f"make test-crash SCENARIO={self.scenario} POINT={self.number} VARIANT={self.variant.value}"
        lines = "\n".join(f"  {problem}" for problem in self.problems)
        return f"{self.scenario}: killed at {self.killed}; {self.variant.value}:\n{lines}\n  again: {again}"


# -- making ready -----------------------------------------------------------------------------------------------------


def prepare(scenario: Scenario, ground: Ground) -> Prepared:
    """Make the disk, and see how it ends when nobody is killed. Raises AssertionError when that does not go well."""
    disk, at_rest = scenario.make_disk(ground)
    ready = Prepared(scenario, ground, disk)
    with ready.node(early=0) as node:
        scenario.begin(ground, node)
        node.desire(first=scenario.desired(ground))
        ready.calls = _early_calls(node) if scenario.early else []
        stops = _run_traced(node, 0) if not scenario.early else _Run()
        ready.calls += [Call(stop.program, stop.call, stop.path) for stop in stops.stops]
        assert ready.calls, f"{scenario.name}: nothing was seen that changes anything"
        to_rest(node)
        ready.target = picture.picture(node)
        node.desire(first=scenario.instead(ground))
        to_rest(node)
        ready.returned = picture.picture(node)
    if scenario.early:
        ready.withdrawn = at_rest  # this disk's next boot completes the target; it never rests on the old config again
        return ready
    with ready.node() as node:
        scenario.begin(ground, node)
        node.desire(first=scenario.instead(ground))
        to_rest(node)
        ready.withdrawn = picture.picture(node)
    return ready


def _traced_early(kill_at: int) -> Mapping[str, str]:
    """The early unit under the tracer; /run/stand/log is the host's and outlives the boot."""
    command = (
        f"/usr/bin/python3 -m tests.crash.tracer --kill-at {kill_at} --report /run/stand/log/{_EARLY_REPORT} -- "
        f"{_EARLY_COMMAND}"
    )
    environment = "Environment=PYTHONPATH=/run/stand/lib PYTHONDONTWRITEBYTECODE=1"
    return {_EARLY_DROPIN: f"[Service]\n{environment}\nExecStart=\nExecStart={command}\n"}


def _early_calls(node: Node) -> list[Call]:
    """The calls of the first boot's early unit, which completes; the second has nothing to do and changes nothing."""
    reports = sorted(node.machine.logs.glob(f"boot-*/{_EARLY_REPORT}"))
    assert len(reports) == 2, "the early unit completes, and looks once more after the reboot"
    idle = [line for line in reports[1].read_text().splitlines() if not _PLACES.search(line)]
    assert idle == [], "a boot with nothing to do changes nothing"
    return [Call(*line.split("\t")[1:4]) for line in reports[0].read_text().splitlines()]


# -- killing ----------------------------------------------------------------------------------------------------------


@dataclass
class _Run:
    """The traced runs of the agent on a node, until one of them was killed or it rests; counted over all of them."""

    stops: list[Stop] = field(default_factory=list)
    killed: Optional[Stop] = None
    said: str = ""


def _run_traced(node: Node, kill_at: int) -> _Run:
    """`mcdaemon run --once` under the tracer, through reboots; 0 kills nowhere."""
    run = _Run()
    for _round in range(ROUNDS):
        before = len(run.stops)

        def at_stop(stop: Stop, before: int = before) -> Action:
            return Action.KILL if before + stop.number == kill_at else Action.GO

        traced, said = _traced_agent(node, at_stop)
        run.stops += traced.stops
        run.said += said
        run.killed = traced.killed
        if run.killed is not None:
            return run
        if not _leave_or_rest(node):
            return run
    raise AssertionError(f"no rest after {ROUNDS} rounds:\n{run.said}")


def _traced_agent(node: Node, at_stop: AtStop) -> tuple[Traced, str]:
    argv, env = node.machine.entering(["mcdaemon", "run", "--once"])
    reader, writer = os.pipe()
    try:
        fcntl.fcntl(writer, _F_SETPIPE_SZ, _OUTPUT_PIPE)  # holds all that is said: nobody reads meanwhile
        traced = trace(argv, at_stop, env, writer, writer)
        os.close(writer)
        writer = -1
        return traced, os.read(reader, _OUTPUT_PIPE).decode(errors="replace")
    finally:
        os.close(reader)
        if writer >= 0:
            os.close(writer)


def to_rest(node: Node) -> str:
    """Rounds of the agent until there is nothing left to do, through reboots; returns what it said."""
    said = ""
    for _round in range(ROUNDS):
        done = node.mcdaemon("run", "--once", check=False)
        said += done.stderr
        if not _leave_or_rest(node):
            return said
    raise AssertionError(f"no rest after {ROUNDS} rounds:\n{said}")


def _leave_or_rest(node: Node) -> bool:
    """True: another round is due (also after the reboot, which is followed). False: the node rests."""
    if any(call["method"] in ("Reboot", "RebootWithFlags") for call in node.machine.calls()):
        node.follow_reboot()
        return True
    if not node.machine.exists("/run/mcdaemon/status.json"):
        return True
    found = status(node)
    return not (found["step"] in ("rest", "reject") or (found["step"] == "hold" and found["state"] == "Degraded"))


def kill_at(ready: Prepared, number: int, variant: Variant) -> Outcome:
    """Kill at the counted call `number`, start again, and compare the end."""
    outcome = Outcome(ready.scenario.name, number, variant)
    started = time.monotonic()
    try:
        with ready.node(early=number) as node:
            _kill(ready, node, outcome)
            desired = ready.scenario.instead if variant is Variant.WITHDRAWN else ready.scenario.desired
            _desire_from_outside(node, desired(ready.ground))
            outcome.said += to_rest(node)
            _look(ready, node, outcome)
    except (AssertionError, RuntimeError, OSError) as error:
        outcome.problems.append(f"{type(error).__name__}: {error}")
    outcome.seconds = time.monotonic() - started
    return outcome


def _kill(ready: Prepared, node: Resumed, outcome: Outcome) -> None:
    if not ready.scenario.early:
        ready.scenario.begin(ready.ground, node)
        node.desire(first=ready.scenario.desired(ready.ground))
        run = _run_traced(node, outcome.number)
        outcome.said, stop = run.said, run.killed
        outcome.killed = f"{outcome.number} ({stop.program}: {stop.call} {stop.path})" if stop else None
        return
    (report, *_rest) = sorted(node.machine.logs.glob(f"boot-*/{_EARLY_REPORT}"))
    lines = report.read_text().splitlines()
    outcome.killed = lines[-1].replace("\t", " ") if len(lines) == outcome.number else None
    del node.machine.units[_EARLY_DROPIN]
    if outcome.variant is Variant.CUT:
        node.machine.power_cut()
        node.machine.boot()


def _desire_from_outside(node: Node, text: str) -> None:
    """The node may be on its way into a reboot."""
    folder = node.machine.sysroot.stateroot / "var/lib/mcdaemon/machineconfigs"
    (folder / "first.json").write_text(text)


def _look(ready: Prepared, node: Node, outcome: Outcome) -> None:
    found = picture.picture(node)
    wanted = ready.target
    if outcome.variant is Variant.WITHDRAWN:
        confirmed = any(line.startswith("confirm: ") for line in outcome.said.splitlines())
        wanted = ready.returned if confirmed else ready.withdrawn
    problems = picture.differences(found, wanted)
    outcome.problems += problems
    done = node.mcdaemon("validate", check=False)
    if done.returncode != 0:
        outcome.problems.append(f"`mcdaemon validate` finds: {done.stdout}{done.stderr}")


class _Alike:
    """Says of the calls of a run, one after the other, which leave the same as one that is killed at anyway.

    * Between its creation and its rename nobody reads a temporary of ours (.mcdaemon-*), and each is removed unread by
      the next start: one kill, before the rename, stands for its writes, its owner and its mode.
    * Each podman and skopeo makes and removes directories with random names to probe what overlay file systems can do
      here, and files with random names in /var/tmp; no later process reads them: one kill stands for all calls in a row
      on such a place.
    * Writes in a row of one program to one file, but for the first and the last.
    """

    _PROBE = re.compile(r"/overlay/(compat|metacopy-check|opaque-bug-check)|^/var/tmp/\d")

    def __init__(self) -> None:
        self._place = ""

    def __call__(self, call: Call) -> bool:
        before, self._place = self._place, ""
        probe = self._PROBE.search(call.path)
        if probe is not None:
            self._place = f"{call.program} {probe.group(1) or 'var/tmp'}"
            return self._place == before
        name = call.path.rpartition("/")[2]
        if name.startswith(".mcdaemon-"):
            return call.call in ("write", "fchown", "fchmod")
        if call.call in ("write", "pwrite64"):
            self._place = f"{call.program} {call.path}"
            return self._place == before
        return False
