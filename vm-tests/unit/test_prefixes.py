"""Every disk that a power cut may leave of a recorded update is checked, and one that is wrong is found."""

from __future__ import annotations

import dataclasses
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Optional

import pytest
from unit import writelog
from unit.nodetree import STEPS, NodeTree
from unit.smalldisk import PARTITION, make_disk
from unit.writelog import Request
from vmlab import prefixes
from vmlab.bootloader import DiskFiles
from vmlab.diskstate import Boots
from vmlab.prefixes import PrefixError

from tests.crash.offline import NEW


@dataclasses.dataclass(frozen=True)
class Recorded:
    """The disk at first, and for each step the writes that it took. The file system's own flushes in between are not
    known, so what is lost between two of these flushes may be more than it can stand."""

    start: Path
    steps: list[list[Request]]

    def log(self, path: Path, without: int = -1) -> Path:
        """The log of all of it; `without`: one of these groups of writes got lost in spite of its flush."""
        kept = [[] if number == without else requests for number, requests in enumerate(self.steps)]
        return writelog.write(path, [request for requests in kept for request in [*requests, writelog.FLUSH]])


def record(folder: Path, damage: Optional[Callable[[NodeTree], None]] = None) -> Recorded:
    """Take the steps of an update on a disk; each is synced, and the file system is not unmounted before the end."""
    tree = NodeTree(folder / "node")
    disk = make_disk(folder / "disk.img", tree.sysroot)
    start = folder / "start.img"
    start.write_bytes(disk.path.read_bytes())
    seen, steps = start.read_bytes(), []
    with prefixes.mounted(disk, tree.sysroot):
        for step in STEPS:
            getattr(tree, step)()
            if step == "commit" and damage is not None:
                damage(tree)
            subprocess.run(["sync", "--file-system", str(tree.sysroot)], check=True, timeout=60)
            now = disk.path.read_bytes()
            steps.append(writelog.difference(seen, now))
            seen = now
    return Recorded(start, steps)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorded]:
    yield record(tmp_path_factory.mktemp("recorded"))


def test_all_prefixes_of_an_update_are_checked_and_counted(tmp_path: Path, recorded: Recorded) -> None:
    count = prefixes.check(recorded.start, recorded.log(tmp_path / "log"), losses=0, seed=1, fsck=0)
    assert [str(state) for state in count.wrong] == []
    assert [state.progress for state in count.states] == list(STEPS.values())
    assert [state.boots for state in count.states] == [Boots.OLD] * 2 + [Boots.NEW] * 4
    assert "6 prefixes at flushes checked, 2 of them boot the old, 4 the new, 0 wrong; 0 random losses" in str(count)
    assert f"{sum(map(len, recorded.steps))} writes" in str(count) and "6 flushes" in str(count)


def test_parts_of_the_work_are_the_whole(tmp_path: Path, recorded: Recorded) -> None:
    log = recorded.log(tmp_path / "log")
    whole = prefixes.check(recorded.start, log, losses=4, seed=3)
    parts = [prefixes.check(recorded.start, log, losses=4, seed=3, share=(part, 2)) for part in range(2)]
    assert sorted(state.cut for part in parts for state in part.states) == sorted(state.cut for state in whole.states)
    assert sum(state.lossy for state in whole.states) == 4


def test_the_disk_that_was_first_is_not_touched(tmp_path: Path, recorded: Recorded) -> None:
    before = recorded.start.read_bytes()
    prefixes.check(recorded.start, recorded.log(tmp_path / "log"), losses=2, seed=1)
    assert recorded.start.read_bytes() == before


def test_writes_that_were_lost_in_spite_of_a_flush_are_found(tmp_path: Path, recorded: Recorded) -> None:
    """A disk that lies: the payload's blocks never arrive."""
    log = recorded.log(tmp_path / "log", without=list(STEPS).index("verify"))
    assert prefixes.check(recorded.start, log, losses=0, seed=1).wrong


def test_a_journal_that_says_committed_too_early_is_found(tmp_path: Path) -> None:
    def damage(tree: NodeTree) -> None:
        (tree.deployment(NEW) / "etc/app.conf").write_bytes(b"")

    found = prefixes.check(*_of(record(tmp_path, damage), tmp_path), losses=0, seed=1)
    said = [trouble for state in found.wrong for trouble in state.troubles]
    assert any("the journal says committed, but /etc/app.conf: content" in trouble for trouble in said), said
    assert {state.progress for state in found.wrong} == {"committed", "reboot asked for", "confirmed"}


def _of(recorded: Recorded, folder: Path) -> tuple[Path, Path]:
    return recorded.start, recorded.log(folder / "log")


def test_a_damaged_file_system_is_found(tmp_path: Path, recorded: Recorded) -> None:
    """The bitmap of blocks that are in use, which no mount looks at."""
    disk = tmp_path / "disk.img"
    disk.write_bytes(recorded.start.read_bytes())
    files = DiskFiles.open(disk)
    said = subprocess.run(["dumpe2fs", files.device], capture_output=True, text=True, check=True, timeout=60).stdout
    block = int(said.split("Block bitmap at ")[1].split()[0])
    size = int(said.split("Block size:")[1].split()[0])
    with open(disk, "r+b") as file:
        file.seek(PARTITION + block * size)
        file.write(bytes(64))
    requests = writelog.difference(recorded.start.read_bytes(), disk.read_bytes())
    log = writelog.write(tmp_path / "log", [*requests, writelog.FLUSH])
    (state,) = prefixes.check(recorded.start, log, losses=0, seed=1).states
    assert any(trouble.startswith("e2fsck: ") for trouble in state.troubles), state


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "cannot check the disks of .*: cannot read the write log .*: its superblock is cut off"),
        (writelog.superblock(0), "cannot check the disks of .*: cannot use the write log .*: it has no entries"),
    ],
    ids=["empty", "nothing"],
)
def test_a_log_that_cannot_be_used_is_said(tmp_path: Path, recorded: Recorded, content: bytes, sentence: str) -> None:
    (tmp_path / "log").write_bytes(content)
    with pytest.raises(PrefixError, match=sentence):
        prefixes.check(recorded.start, tmp_path / "log", losses=0, seed=1)


def test_a_disk_that_is_none_is_said(tmp_path: Path) -> None:
    start = tmp_path / "start.img"
    start.write_bytes(bytes(1 << 20))
    log = writelog.write(tmp_path / "log", [writelog.FLUSH])
    with pytest.raises(PrefixError, match="cannot check the disks of .*: .*has no partition table"):
        prefixes.check(start, log, losses=0, seed=1)


def test_nothing_is_mounted_and_nothing_left_after_it(tmp_path: Path, recorded: Recorded) -> None:
    before = set(Path("/dev/shm").glob("vmlab-prefixes-*"))
    prefixes.check(recorded.start, recorded.log(tmp_path / "log"), losses=0, seed=1)
    assert "vmlab-prefixes" not in Path("/proc/mounts").read_text()
    assert set(Path("/dev/shm").glob("vmlab-prefixes-*")) <= before
