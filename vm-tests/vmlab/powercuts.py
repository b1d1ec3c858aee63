"""One update recorded with all writes of its disk, and machines that go on from what power cuts in it may have left."""

from __future__ import annotations

import os
import random
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Optional

from tests.stand.machine import CommandFailed, MachineError
from tests.stand.sysroot import NoSuchDeployment
from vmlab import blocklog, finaldisk, prefixes, tally
from vmlab.blocklog import Log, Point, Walk
from vmlab.bootloader import DiskError
from vmlab.diskstate import PROGRESS
from vmlab.guest import FOLDER, Guest
from vmlab.node import SETTLED, VmNode

COUNTS = FOLDER / "counts.jsonl"

_BEFORE = {
    "drain: ": "verified",
    "finalize: ": "drained",
    "commit-files: ": "finalizing",
    "verify-root: ": "committed",
    "reboot: ": "proved",
}
"""How each step begins in the agent's words, and how far the journal on the disk has to be then."""


@dataclass(frozen=True)
class Recording:
    """An update from `begin`, when the new config was desired and synced, to a node that rests and is switched off.

    `start` is the disk when the log begins, `reference` the one in the end. `said`: where the log stood, up to the last
    flush, when these sentences of the agent were heard.
    """

    start: Path
    log: Log
    begin: int
    reference: Path
    said: Mapping[str, int]

    def check(self, losses: int, seed: int, fsck: int) -> prefixes.Count:
        """Check the disk at each flush and with so many random losses, without booting."""
        return prefixes.check(self.start, self.log.path, losses, seed, fsck=fsck, after=self.begin)

    def forgotten(self, count: prefixes.Count) -> list[str]:
        """The agent takes a step once the one before is on the disk for good. It says each step when it begins; what
        was flushed by the time that was heard must have the journal of the step before."""
        found = []
        for sentence, moment in self.said.items():
            state = count.flushed(moment)
            if state is None or _reached(state.progress) < _reached(_BEFORE[sentence]):
                now = f"its journal says {state.progress!r}" if state is not None else "nothing was flushed"
                found.append(f"at {sentence!r} {_BEFORE[sentence]!r} was not on the disk: {now}, entry {moment}")
        return found

    def keep(self, folder: Path) -> str:
        """Keep what is needed to check it again; the command that does."""
        folder.mkdir(parents=True, exist_ok=True)
        start, log = blocklog.copy(self.start, folder / "start.img"), folder / "writes.log"
        shutil.copyfile(self.log.path, log)
        return f"PYTHONPATH=vm-tests {sys.executable} -m vmlab.prefixes --after {self.begin} {start} {log}"

    def points(self, many: int, seed: int) -> tuple[Point, ...]:
        """Where to cut: half of them at flushes, half with random losses."""
        return blocklog.points(self.log, many - many // 2, many // 2, seed, self.begin)


def record(node: VmNode, *configs: str) -> Recording:
    """Let a node whose machine has a write log take an update to these configs, and switch it off."""
    machine = node.machine
    assert machine.write_log is not None, "the machine has no write log"
    machine.run(["systemctl", "stop", "mcdaemon.service"])
    node.desire(*configs)
    machine.run(["sync"])
    begin = blocklog.count(machine.write_log)
    mark, said = machine.mark(), {}
    # Without waiting for it: what it says is waited for.
    machine.run(["systemctl", "start", "--no-block", "mcdaemon.service"])
    for sentence in _BEFORE:
        machine.wait_for(rf"mcdaemon\[\d+\]: {sentence}", SETTLED, mark)
        said[sentence] = blocklog.count(machine.write_log)
    node.until()
    machine.power_off()
    log = blocklog.read(machine.write_log)
    return Recording(machine.began_with, log, begin, machine.disk, said)


def _reached(progress: str) -> int:
    return PROGRESS.index(progress) if progress in PROGRESS else -1


@dataclass(frozen=True)
class Outcome:
    """What became of a node after a power cut; `replay`: its boot loader saw an entry only after a replay."""

    cut: str
    boots: int
    replay: bool
    problems: tuple[str, ...]

    def __str__(self) -> str:
        replay = ", after a replay of the journal" if self.replay else ""
        return f"{self.cut}: {self.boots} boots{replay}: {'; '.join(self.problems) or 'fine'}"


def outcomes(
    recording: Recording, points: Sequence[Point], folder: Path, begun: Callable[[Guest], None], kept: Path
) -> Iterator[Outcome]:
    """Boot from the disk of each point, one machine after the other, until the agent rests; then look at all of it.

    `begun` is told each machine. Of one with problems the disk that the cut has left and the logs go to `kept`.
    """
    folder.mkdir()
    cut = folder / "cut.img"
    with Walk(recording.log, recording.start, folder / "walk.img") as walk:
        for number, point in enumerate(points):
            said = prefixes.cut_at(walk, point, cut)
            tally.count(COUNTS, tally.POWER_CUTS)
            guest = Guest.cold(cut, folder / f"machine-{number}")
            begun(guest)
            outcome = _go_on(guest, said, recording.reference)
            if outcome.problems:
                (kept / str(point)).mkdir(parents=True, exist_ok=True)
                blocklog.copy(cut, kept / str(point) / "disk.raw")
                guest.collect(kept / str(point))
            guest.close()
            shutil.rmtree(guest.folder)
            yield outcome
    cut.unlink(missing_ok=True)


def _go_on(guest: Guest, cut: str, reference: Path) -> Outcome:
    node, replay = VmNode(guest), False
    try:
        replay = _replay_if_needed(guest)
        node.start()
        node.until()
        problems = tuple(_problems(node, reference))
    except (MachineError, CommandFailed, NoSuchDeployment, DiskError, prefixes.PrefixError) as error:
        problems = (f"{type(error).__name__}: {error}",)
    return Outcome(cut, node.boots, replay, problems)


def _replay_if_needed(guest: Guest) -> bool:
    """The harness's boot loader reads ext4 as GRUB does. Where that shows no entry, a person would boot a rescue system
    first, which replays the journal."""
    try:
        guest.default_entry()
        return False
    except (NoSuchDeployment, DiskError):
        guest.replay_journal()
        return True


def _problems(node: VmNode, reference: Path) -> Iterator[str]:
    machine = node.machine
    state = node.status()["state"]
    if state != "Done":
        yield f"the state is {state}"
    validated = node.mcdaemon("validate", check=False)
    if validated.returncode != 0:
        yield f"`mcdaemon validate`: {validated.stdout}{validated.stderr}"
    failed = machine.run(["systemctl", "--failed", "--no-legend", "--plain"], check=False).stdout.strip()
    if failed:
        yield f"failed units: {failed}"
    machine.power_off()
    yield from finaldisk.compare(reference, machine.disk)


# -- how many, and which ----------------------------------------------------------------------------------------------


def cuts() -> int:
    """How many disks are booted in all: VMLAB_CUTS."""
    return int(os.environ.get("VMLAB_CUTS") or 8)


def seed() -> int:
    """Of all chance: VMLAB_SEED, else a new one, the same for all workers of a run; it is printed."""
    given: Optional[str] = os.environ.get("VMLAB_SEED") or os.environ.get("PYTEST_XDIST_TESTRUNUID")
    return random.Random(given).randrange(1 << 31) if given is None or not given.isdigit() else int(given)
