"""The real steps beside the abstract ones: the agent on a node stops after each of its effects, and is looked at.

The agent runs in one process whose effects are wrapped: after each it names it and waits. Meanwhile the node is read
from outside, and compared with the abstract node that has had the same effects. So a step has the effects that the
model says, in its order, and each changes what the model says and nothing else.
"""

from __future__ import annotations

import functools
import json
import select
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Optional

from mcdaemon.decide import decide
from tests.field.evidence import ARCHIVE, STATE, journal
from tests.model import steps
from tests.model.effects import Effect, apply
from tests.model.facts import observation
from tests.model.node import MERGED, MIXED, NEW, NOW, OLD, Kind, start
from tests.model.node import Node as Abstract
from tests.stand.node import Node

_TIMEOUT = 40.0

OUT = "/var/lib/workloads-are-away"
SETTINGS = f"""\
hold: {{retry_min_seconds: 1, retry_max_seconds: 5}}
health: {{timeout_seconds: 1}}
drain: {{command: [/usr/bin/touch, {OUT}], undo: [/usr/bin/rm, -f, {OUT}]}}
"""

_PROBE = """
import functools, os, sys
from mcdaemon import assembly, cli, perform, settings
from mcdaemon.agent import Agent, make_places
from mcdaemon.context import RUNTIME
from mcdaemon.host import bus, deployments, files, rpmostree
from mcdaemon.perform import Performer
from mcdaemon.report.notify import Notifier
from mcdaemon.reporter import Reporter
from mcdaemon.update import commit, early, images, journal, live, merge, payload

def stop(name):
    print(name, flush=True)
    if not os.read(0, 1):
        os._exit(1)

def wrap(owner, name, label):
    real = getattr(owner, name)
    def wrapped(*arguments, **named):
        result = real(*arguments, **named)
        stop(label(*arguments))
        return result
    setattr(owner, name, wrapped)

wrap(journal, "store", lambda *_: "journal")
for name in ("cleanup", "update", "kernel_args", "roll_back"):
    wrap(rpmostree.RpmOstree, name, lambda *_, name=name: name)
wrap(payload.Shelf, "save", lambda shelf, *_: shelf.folder.name + " saved")
wrap(payload.Shelf, "drop", lambda shelf, *_: shelf.folder.name + " dropped")
wrap(perform, "_run_hook", lambda _argv, _timeout, doing, *_: doing.split()[0] + " hook")
wrap(deployments.Machine, "unlock", lambda *_: "unlocked")
wrap(deployments.Machine, "lock", lambda *_: "locked")
wrap(deployments.Machine, "finalize", lambda *_: "finalized")
wrap(live, "act", lambda *_: "services")
wrap(images.Images, "hold", lambda *_: "image held")
wrap(images.Images, "release", lambda *_: "image released")
def release_unknown(*arguments, real=images.Images.release_unknown):
    released = real(*arguments)
    if released:
        stop("holds swept")
    return released
images.Images.release_unknown = release_unknown
wrap(bus.Logind, "reboot", lambda *_: "asked")

writing, placing = [], []
def pre_place(*arguments, real=merge.pre_place):
    placing.append(0)  # in the staged root, which is nobody's yet: no effect of its own
    real(*arguments)
    placing.pop()
merge.pre_place = pre_place
def apply(*arguments, real=commit.apply):
    if placing:
        return real(*arguments)
    writing.append(0)
    real(*arguments)
    writing.pop()
    stop("synced")
def written(*arguments, real, **named):
    real(*arguments, **named)
    if writing and not writing[-1]:
        writing[-1] = 1
        stop("some written")
files.put = functools.partial(written, real=files.put)
files._rename = functools.partial(written, real=files._rename)
def sync_tree(root, paths, real=files.sync_tree):
    if writing and isinstance(paths, set):  # the first sync is of the temporaries
        stop("rest written")
    real(root, paths)
commit.apply, files.sync_tree = apply, sync_tree

cli._log_to_stderr(False)
context = assembly.assemble(settings.load())
make_places(context)
if sys.argv[1] == "early":
    if early.run(context.machine, context.root, context.journal, context.payloads, context.undo).reboot:
        stop("rebooted")
    os._exit(0)
performer = Performer(context)
performer.sweep()
agent = Agent(context, Reporter(context.journal.parent, RUNTIME), Notifier())
while True:
    stop("round")
    if agent.round() is None:
        os._exit(1)
"""

E = Effect
BOUNDARY: dict[Effect, str] = {
    **{effect: "journal" for effect in Effect if effect.value.startswith("journal: ")},
    E.CLEAR_STAGE: "cleanup", E.STAGE_TREE: "update", E.STAGE_LINE: "kernel_args", E.DEFAULT_BACK: "roll_back",
    E.HOLD_IMAGE: "image held", E.RELEASE_IMAGE: "image released",
    E.LAY_OUT: "payload saved", E.DROP_PAYLOAD: "payload dropped", E.SWEEP_PAYLOAD: "payload dropped",
    E.KEEP_SHARED: "undo saved", E.KEEP_ALL: "undo saved", E.DROP_UNDO: "undo dropped", E.SWEEP_UNDO: "undo dropped",
    E.DRAIN: "drain hook", E.UNDRAIN: "take hook", E.UNLOCK: "unlocked",
    E.LOCK: "locked", E.CLEAR_LOST: "cleanup", E.FINALIZE: "finalized",
    E.WRITE_SOME: "some written", E.PUT_SOME_BACK: "some written",
    E.WRITE_REST: "rest written", E.PUT_REST_BACK: "rest written", E.SYNC: "synced",
    E.SWEEP_HOLD: "holds swept", E.RESTART: "services", E.ASK: "asked", E.REBOOT_AT_ONCE: "rebooted",
}  # fmt: skip
"""Where the agent stops after each effect."""

_FLAGS = ("live", "draining", "drained", "applied", "rolled_back", "repairs")
_NAMED = ("staged", "committed", "proved", "failure")


@dataclass
class Walk:
    """The agent on the node, and the abstract node that goes with it."""

    node: Node
    kind: Kind
    abstract: Abstract
    process: subprocess.Popen[str]
    seen: list[Effect]
    before: dict[str, Any]
    patient: bool = False

    def step(self) -> str:
        """One round of the agent, effect by effect; returns the step that was taken."""
        step = self.begin()
        self.effects()
        return step

    def begin(self) -> str:
        """The decision of one round, with its effects still to come."""
        o = observation(self.kind, self.abstract)
        decision = decide(o)
        self.abstract = steps.begin(self.kind, self.abstract, o, decision)
        self.stopped_at("round")
        self.go_on()
        return decision.step.value

    def told(self, effect: Effect) -> None:
        """An effect that is no part of a step."""
        self.stopped_at(BOUNDARY[effect])
        self.abstract = apply(self.kind, self.abstract, effect)
        self.seen.append(effect)
        self.same(effect)

    def effects(self) -> None:
        """All effects of the task; after the last one the agent waits at it."""
        while self.abstract.task is not None:
            self.effect()

    def effect(self) -> Effect:
        """One effect of both, compared."""
        task = self.abstract.task
        assert task is not None
        effect = Effect(task.effects[0])
        after = steps.advance(self.kind, self.abstract)[1]
        if effect in (E.SWEEP_PAYLOAD, E.SWEEP_UNDO) and of_model(after) == of_model(self.abstract):
            self.abstract = after  # it belongs to the update in flight
            return effect
        if effect is E.PUT_SOME_BACK and of_model(after) == of_model(self.abstract):
            self.abstract = after  # all of it is back already
            return effect
        self.stopped_at(BOUNDARY[effect])
        self.abstract = after
        self.seen.append(effect)
        if effect is E.ASK or self.abstract.going_down:
            return effect  # the node goes down: there is nothing to look at
        self.same(effect)
        self.go_on()
        return effect

    def same(self, effect: Effect) -> None:
        """The real node has the facts that the abstract one has."""
        real, said = of_node(self.node), of_model(self.abstract)
        if self.kind.os:
            real["kept"], said["kept"] = holds(self.node), bool(self.abstract.kept)
        half = effect in (E.WRITE_SOME, E.PUT_SOME_BACK)
        for name in real:
            if half and name in ("roots", "shared"):
                continue  # which of the files were first is not the model's
            assert real[name] == said[name], f"after {effect.name}: {name}: {real[name]}, in the model {said[name]}"
        if half:
            assert real != self.before, f"{effect.name} has written nothing"
        self.before = real

    def line(self) -> str:
        """Where the agent stands."""
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], _TIMEOUT)
        return self.process.stdout.readline().strip() if ready else "nothing"

    def stopped_at(self, name: str) -> None:
        assert self.process.stderr is not None
        line, deadline = self.line(), time.monotonic() + _TIMEOUT
        while self.patient and line == "round" != name and time.monotonic() < deadline:
            self.go_on()  # it waits for the time limit of the health gate
            line = self.line()
        if line != name:
            self.process.kill()
            said = self.process.stderr.read()
            raise AssertionError(f"the agent stopped at {line!r}, not at {name!r}, after {self.seen[-3:]}:\n{said}")

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def until(self, step: str) -> None:
        """Rounds up to and including this step."""
        for _round in range(12):
            if self.step() == step:
                return
        raise AssertionError(f"{step} was never decided")


@contextmanager
def walking(node: Node, kind: Kind, abstract: Abstract, mode: str = "rounds") -> Iterator[Walk]:
    """Start the agent that stops after each effect; it is killed at the end."""
    argv = ["/usr/bin/python3", "-c", _PROBE, mode]
    process = node.machine.start(argv, env={"PYTHONPATH": ARCHIVE}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                 stderr=subprocess.PIPE)  # fmt: skip
    try:
        yield Walk(node, kind, abstract, process, [], of_node(node))
    finally:
        if node.machine.up:
            node.machine.stop_process(process)
        process.kill()
        process.wait(10)


# -- the facts of both ------------------------------------------------------------------------------------------------


def of_model(node: Abstract) -> dict[str, Any]:
    """What of the abstract node can be seen on a real one."""
    u, record = node.update, None
    if u is not None and not node.torn:
        record = {name: getattr(u, name) for name in _FLAGS}
        record.update({name: bool(getattr(u, name)) for name in _NAMED})
        record.update({name: {"": "", NOW: "now"}.get(getattr(u, name), "before") for name in ("armed", "finalizing")})
    return {
        "journal": record,
        "failed": bool(node.failed),
        "booted is default": node.entries[0].name == node.booted,
        "roots": [(entry.says, OLD if entry.files == MERGED else entry.files) for entry in node.entries],
        "staged": None if node.staged is None else "locked" if node.locked else "unlocked",
        "shared": node.shared,
        "payload": node.payload is not None,
        "undo": node.undo is not None,
        "out": node.out,
    }


def of_node(node: Node) -> dict[str, Any]:
    """The same of a real one, read from outside."""
    machine = node.machine
    try:
        found = journal(node)
    except (FileNotFoundError, ValueError):  # none, or damaged
        found = {"update": None, "failed": None}
    u, record = found["update"], None
    if u is not None:
        record = {name: u[name] for name in _FLAGS}
        record.update({name: bool(u[name]) for name in _NAMED})
        boots = {"": "", machine.boot_id: "now"}
        record.update({name: boots.get(u[name], "before") for name in ("armed", "finalizing")})
    booted = _booted(node, machine.boot_id)
    entries = sorted(machine.sysroot.entries(), key=lambda entry: -entry.version)
    locked = machine.exists("/run/ostree/staged-deployment-locked")
    return {
        "journal": record,
        "failed": found["failed"] is not None,
        "booted is default": entries[0].deployment == booted,
        "roots": [root for root in (_root(node, entry.deployment) for entry in entries) if root],
        "staged": None if not machine.exists("/run/ostree/staged-deployment") else "locked" if locked else "unlocked",
        "shared": _files(machine.root / "var/usrlocal/bin", "tool", "only-new"),
        "payload": _shelved(node, "payload"),
        "undo": _shelved(node, "undo"),
        "out": machine.exists(OUT),
    }


def holds(node: Node) -> bool:
    """Whether a container keeps an image; it is only asked where images play a part, because it takes podman's time."""
    return bool(node.machine.run(["podman", "ps", "--all", "--quiet"]).stdout.strip())


def _root(node: Node, deployment: str) -> Optional[tuple[str, str]]:
    """None for the one of the installation, which carries no config and plays no part."""
    etc = node.machine.deployment_root(deployment) / "etc"
    if not (etc / "machine-config-daemon/currentconfig").exists():
        return None
    says = json.loads((etc / "machine-config-daemon/currentconfig").read_text())["metadata"]["name"]
    return says.partition("-")[2], _files(etc, "app.conf", "only-new")


def _files(folder: Any, changed: str, added: str) -> str:
    """Whose the files are: one is in both configs, one only in the new."""
    text, there = (folder / changed).read_text().strip(), (folder / added).exists()
    return text if there == (text == NEW) else MIXED


def _shelved(node: Node, shelf: str) -> bool:
    return any((node.machine.root / STATE.lstrip("/") / shelf).glob("*/payload.json"))


@functools.cache
def _booted(node: Node, _boot_id: str) -> str:
    """Asked once in each boot, because it takes a process."""
    return node.machine.booted().name


def early_by_hand(node: Node) -> None:
    """From the next boot on the early unit does nothing by itself."""
    text = "[Service]\nType=oneshot\nRemainAfterExit=yes\nExecStart=\nExecStart=/bin/true\n"
    node.machine.units["mcdaemon-early.service.d/50-by-hand.conf"] = text


def desiring_new(kind: Kind) -> Abstract:
    """The abstract node for one that rests on the old config and is to go to the new one."""
    return start(kind)._replace(desired=NEW)
