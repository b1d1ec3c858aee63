"""All disks that power cuts during a recorded update may leave, checked without booting them.

    PYTHONPATH=vm-tests .venv/bin/python -m vmlab.prefixes start.img writes.log

checks the disk at each flush and with random losses between them (--losses, --seed): the file system's journal is
replayed as a boot does it, then `diskstate` says what boots and whether all is as it must be, then e2fsck has to find
nothing. The disk is checked as a copy in memory; a state costs some tenths of a second. --share 1/2 is the first half
of the work, --fsck N runs `ostree fsck` on each N-th state. Needs root: everything is mounted in a mount namespace of
its own, which ends with the process.

GRUB reads the disk without replay. Where it would see no entry (vm.md 5: the two writes in which ostree swaps
/boot/loader) the state counts as one that needs the replay; that is ostree's, and no trouble.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Optional

from mcdaemon.errors import Failure
from vmlab import blocklog, bootloader, diskstate
from vmlab.blocklog import Log, LogError, Point, Walk
from vmlab.bootloader import DiskError, DiskFiles
from vmlab.diskstate import Boots, Look, Story

_MEMORY = Path("/dev/shm")
_COPIES = 5
"""Disks at the same time: before, in the end, walking, checked, and one to spare."""
_TIMEOUT = 120.0
_LIMIT = 3600.0
_WRONG = 3
"""The status of a check that found something; 1 is Python's own."""


class PrefixError(Exception):
    """The check itself cannot be made; the text says why."""


@dataclass(frozen=True)
class State:
    """One disk that was checked. `moment`: of the power cut, `cut`: how it went; `replay`: without replay of the file
    system's journal a boot loader sees no entry."""

    moment: int
    cut: str
    lossy: bool
    boots: Boots
    progress: str
    replay: bool
    troubles: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.cut}: boots {self.boots.value}, {self.progress}: {'; '.join(self.troubles) or 'fine'}"


@dataclass
class Count:
    """The disks that were checked; its text is for the report."""

    states: list[State] = field(default_factory=list)
    log: str = ""
    seconds: float = 0.0

    @property
    def wrong(self) -> list[State]:
        return [state for state in self.states if state.troubles]

    def flushed(self, moment: int) -> Optional[State]:
        """What a power cut at a moment would surely have left: the state at the last flush that was checked before."""
        found = [state for state in self.states if not state.lossy and state.moment <= moment]
        return found[-1] if found else None

    def __str__(self) -> str:
        exact = [state for state in self.states if not state.lossy]
        lossy = [state for state in self.states if state.lossy]
        replay = sum(state.replay for state in self.states)
        each = self.seconds / max(1, len(self.states))
        return (
            f"{len(exact)} prefixes at flushes checked, {_boots(exact)}; {len(lossy)} random losses, {_boots(lossy)}; "
            f"{replay} need the replay of ext4's journal before a boot loader sees an entry; {self.log}; "
            f"{each:.2f} s each"
        )


def _boots(states: Sequence[State]) -> str:
    number = {kind: sum(state.boots is kind for state in states) for kind in Boots}
    wrong = sum(bool(state.troubles) for state in states)
    return f"{number[Boots.OLD]} of them boot the old, {number[Boots.NEW]} the new, {wrong} wrong"


# -- for tests --------------------------------------------------------------------------------------------------------


def check(
    start: Path, log: Path, losses: int, seed: int, share: tuple[int, int] = (0, 1), fsck: int = 0, after: int = 0
) -> Count:
    """Check the disk at each flush, and after so many random losses. `share` (n, m): the n-th of m parts of the work;
    `after`: the moment when the update began; `fsck`: run `ostree fsck` on each so many-th of them.

    In a process with its own mount namespace. Raises PrefixError when the check cannot be made.
    """
    program = [sys.executable, "-m", "vmlab.prefixes", str(start), str(log), "--json", f"--losses={losses}"]
    program += [f"--seed={seed}", f"--share={share[0] + 1}/{share[1]}", f"--fsck={fsck}", f"--after={after}"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    try:
        done = subprocess.run(program, capture_output=True, text=True, timeout=_LIMIT, env=environment,
                              stdin=subprocess.DEVNULL)  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise PrefixError(f"cannot check the disks of {log}: not done after {_LIMIT:.0f} s") from error
    if done.returncode not in (0, _WRONG):
        raise PrefixError(f"cannot check the disks of {log}: {done.stderr.strip() or done.stdout.strip()}")
    *states, last = (json.loads(line) for line in done.stdout.splitlines())
    found = [State(**{**state, "boots": Boots(state["boots"]), "troubles": tuple(state["troubles"])})
             for state in states]  # fmt: skip
    return Count(found, last["log"], last["seconds"])


def apart(argv: Sequence[str]) -> list[str]:
    """In a mount namespace of its own, and not longer alive than who started us."""
    return ["setpriv", "--pdeathsig", "KILL", "unshare", "--mount", "--propagation", "private", *argv]


# -- one disk ---------------------------------------------------------------------------------------------------------


def examine(image: Path, folder: Path, story: Story, fsck: bool = False) -> tuple[Look, bool]:
    """Check one disk, which is changed by that; and whether a boot loader needs the replay. `folder` is mounted on."""
    files = DiskFiles.open(image)
    replay = not _seen_by_boot_loader(files)
    troubles: list[str] = []
    look = Look(Boots.NOTHING, "", "unknown", ())
    try:
        with mounted(files, folder):
            look = diskstate.look(folder, story)
            troubles += look.troubles
            if fsck:
                troubles += ostree_fsck(folder)
    except (PrefixError, Failure, OSError) as error:
        troubles.append(str(error))
    troubles += unsound(files)
    return Look(look.boots, look.deployment, look.progress, tuple(troubles)), replay


@contextlib.contextmanager
def mounted(disk: DiskFiles, folder: Path) -> Iterator[Path]:
    """Mounted as a boot does it: the journal is replayed, orphans are removed. Raises PrefixError."""
    folder.mkdir(parents=True, exist_ok=True)
    options = f"loop,offset={disk.offset},noatime,nodiscard,noinit_itable"
    done = _run("mount", "-t", "ext4", "-o", options, str(disk.path), str(folder))
    if done.returncode != 0:
        raise PrefixError(f"cannot mount the disk: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        done = _run("umount", str(folder))
        if done.returncode != 0:
            raise PrefixError(f"cannot unmount the disk: {done.stderr.strip()}")


def _seen_by_boot_loader(disk: DiskFiles) -> bool:
    """Whether there is a boot entry on the disk as it lies there: the harness's boot loader does not replay either."""
    try:
        return bool(bootloader.entries(disk))
    except DiskError:
        return False


def unsound(disk: DiskFiles) -> list[str]:
    """What e2fsck finds on a disk that was replayed."""
    done = _run("e2fsck", "-f", "-n", disk.device)
    return [] if done.returncode == 0 else [f"e2fsck: {done.stdout.strip()}"]


def ostree_fsck(top: Path) -> list[str]:
    """What `ostree fsck` finds in the repository of the physical root."""
    done = _run("ostree", "fsck", "--quiet", f"--repo={top}/ostree/repo")
    return [] if done.returncode == 0 else [f"ostree fsck: {done.stderr.strip()}"]


def _run(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT,
                          stdin=subprocess.DEVNULL)  # fmt: skip


# -- all of them ------------------------------------------------------------------------------------------------------


def states(
    start: Path, log: Log, chosen: Iterable[Point], folder: Path, fsck: int = 0, begin: int = 0
) -> Iterator[State]:
    """Check the disks at these points, which are in order, of an update that began at the moment `begin`. Mounts in the
    mount namespace of the caller."""
    before, after = folder / "before.img", folder / "after.img"
    blocklog.disk_at(log, start, begin, before)
    blocklog.disk_at(log, start, len(log.entries), after)
    disks = DiskFiles.open(before), DiskFiles.open(after)
    with mounted(disks[0], folder / "before"), mounted(disks[1], folder / "after"):
        story = Story.of(folder / "before", folder / "after")
        with Walk(log, start, folder / "walk.img") as walk:
            for number, point in enumerate(chosen, 1):
                disk = folder / "check.img"
                cut = cut_at(walk, point, disk)
                look, replay = examine(disk, folder / "check", story, fsck > 0 and number % fsck == 0)
                yield State(point.moment, cut, point.seed is not None, look.boots, look.progress, replay, look.troubles)


def cut_at(walk: Walk, point: Point, disk: Path) -> str:
    """Make the disk of a point; how the power cut went."""
    if point.seed is not None:
        return f"{point}: {walk.cut(point.moment, random.Random(point.seed), disk)}"
    walk.forward(point.moment)
    walk.copy(disk)
    return str(point)


def scratch(disk: Path) -> Path:
    """A new folder for some copies of a disk, in memory where that has room for them."""
    need = _COPIES * disk.stat().st_blocks * 512
    roomy = _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free > 2 * need
    return Path(tempfile.mkdtemp(prefix="vmlab-prefixes-", dir=_MEMORY if roomy else None))


def main(arguments: Optional[Sequence[str]] = None) -> int:
    parser = argparse.ArgumentParser(prog="vmlab.prefixes", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("start", type=Path, help="the disk as it was when the log began")
    parser.add_argument("log", type=Path, help="the log of blklogwrites")
    parser.add_argument("--losses", type=int, default=50, help="how many disks with random losses")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 31))
    parser.add_argument("--share", default="1/1", help="1/2: the first of two parts")
    parser.add_argument("--fsck", type=int, default=0, metavar="N", help="run ostree fsck on each N-th state")
    parser.add_argument("--after", type=int, default=0, metavar="ENTRY", help="the update began after this entry")
    parser.add_argument("--json", action="store_true", help="one object for each state")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if not chosen.inside:
        given = list(sys.argv[1:] if arguments is None else arguments)
        argv = apart([sys.executable, "-m", "vmlab.prefixes", "--inside", *given])
        os.execvp(argv[0], argv)
    try:
        return _check(chosen)
    except (PrefixError, LogError, DiskError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2


def _check(chosen: argparse.Namespace) -> int:
    begun = time.monotonic()
    log = blocklog.read(chosen.log)
    part, parts = map(int, chosen.share.split("/"))
    points = blocklog.points(log, len(log.flushes()), chosen.losses, chosen.seed, chosen.after)[part - 1 :: parts]
    count = Count(log=f"seed {chosen.seed}, {log}")
    folder = scratch(chosen.start)
    try:
        for state in states(chosen.start, log, points, folder, chosen.fsck, chosen.after):
            count.states.append(state)
            if chosen.json:
                print(json.dumps({**asdict(state), "boots": state.boots.value}), flush=True)
            elif state.troubles:
                print(state, flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    count.seconds = time.monotonic() - begun
    print(json.dumps({"log": count.log, "seconds": count.seconds}) if chosen.json else count)
    return _WRONG if count.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
