"""The log of disk writes is read as QEMU writes it, and what is made of it are the disks that a power cut may leave."""

from __future__ import annotations

import random
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from unit import writelog
from unit.writelog import FLUSH, Request, superblock
from vmlab import blocklog
from vmlab.blocklog import Flag, Log, LogError, Point, Walk

DISK = 64 * 1024


def record(folder: Path, *commands: str, sector_size: int = 512) -> tuple[Path, Path]:
    """Let QEMU write to an empty disk; the disk as it was before, and the log. It flushes once more at its end."""
    start, disk, log = folder / "start.img", folder / "disk.img", folder / "writes.log"
    for path, size in ((start, DISK), (disk, DISK), (log, 0)):
        with open(path, "wb") as file:
            file.truncate(size)
    options = f"driver=blklogwrites,file.driver=file,file.filename={disk},log.driver=file,log.filename={log}"
    options += f",log-sector-size={sector_size}"
    arguments = [word for command in commands for word in ("-c", command)]
    subprocess.run(["qemu-io", *arguments, "--image-opts", options], check=True, capture_output=True, timeout=30)
    return start, log


def written(folder: Path, *requests: Request) -> tuple[Path, Path]:
    """The same without QEMU."""
    start = folder / "start.img"
    start.write_bytes(bytes(DISK))
    return start, writelog.write(folder / "writes.log", requests)


def sectors(disk: Path, count: int = 8) -> str:
    """The first byte of each of the first sectors, as a digit."""
    content = disk.read_bytes()
    return "".join(str(content[number * 512]) for number in range(count))


def digit(number: int, count: int = 1) -> bytes:
    return bytes([number]) * 512 * count


@pytest.mark.parametrize("sector_size", [512, 4096])
def test_what_qemu_has_logged_makes_the_disk_that_qemu_wrote(tmp_path: Path, sector_size: int) -> None:
    commands = ["write -P 1 0 16k", "flush", "write -P 2 4k 4k", "write -z 8k 4k", "write -P 3 60k 4k", "flush"]
    start, path = record(tmp_path, *commands, sector_size=sector_size)
    log = blocklog.read(path)
    assert log.sector_size == sector_size and log.writes == 4
    blocklog.disk_at(log, start, len(log.entries), tmp_path / "end.img")
    assert (tmp_path / "end.img").read_bytes() == (tmp_path / "disk.img").read_bytes()


def test_a_moment_is_everything_up_to_it_and_nothing_after(tmp_path: Path) -> None:
    start, path = written(tmp_path, (Flag(0), 0, digit(1)), FLUSH, (Flag(0), 1, digit(2)), (Flag(0), 0, digit(3)))
    log = blocklog.read(path)
    found = [sectors(blocklog.disk_at(log, start, moment, tmp_path / "at.img"), 2) for moment in range(5)]
    assert found == ["00", "10", "10", "12", "32"]


def test_checking_a_state_does_not_change_the_disk_that_walks(tmp_path: Path) -> None:
    start, path = written(tmp_path, (Flag(0), 0, digit(1)), FLUSH, (Flag(0), 1, digit(2)), FLUSH)
    with Walk(blocklog.read(path), start, tmp_path / "walk.img") as walk:
        walk.forward(2)
        walk.copy(tmp_path / "one.img").write_bytes(b"destroyed")
        walk.forward(4)
        assert sectors(walk.copy(tmp_path / "two.img"), 2) == "12"
    assert not (tmp_path / "walk.img").exists()
    assert start.read_bytes() == bytes(DISK)


def test_a_copy_over_another_disk_is_the_same_with_all_of_its_holes(tmp_path: Path) -> None:
    block, size = 64 * 1024, 12 * 64 * 1024
    source, target = tmp_path / "source", tmp_path / "target"
    for path, blocks, content in ((source, (1, 4, 5, 9), b"s"), (target, (0, 1, 5, 6, 10, 11), b"t")):
        with open(path, "wb") as file:
            file.truncate(size if path is source else size - block)
            for number in blocks:
                file.seek(number * block)
                file.write(content * block)
    blocklog.copy(source, target)
    assert target.read_bytes() == source.read_bytes()
    blocklog.copy(source, tmp_path / "new")
    assert (tmp_path / "new").read_bytes() == source.read_bytes()
    assert (tmp_path / "new").stat().st_blocks == source.stat().st_blocks < size // 512


def test_a_walk_never_goes_back(tmp_path: Path) -> None:
    start, path = written(tmp_path, (Flag(0), 0, digit(1)), FLUSH)
    with Walk(blocklog.read(path), start, tmp_path / "walk.img") as walk:
        walk.forward(2)
        with pytest.raises(LogError, match="cannot take the disk from entry 2 to 1 of 2"):
            walk.forward(1)
        with pytest.raises(LogError, match="to 3 of 2"):
            walk.forward(3)


def test_a_power_cut_leaves_what_was_flushed_and_any_subset_of_the_rest(tmp_path: Path) -> None:
    start, path = written(
        tmp_path, (Flag(0), 0, digit(1)), FLUSH, (Flag(0), 0, digit(2)), (Flag(0), 1, digit(3)), (Flag(0), 2, digit(4))
    )
    log = blocklog.read(path)
    seen = set()
    for seed in range(100):
        blocklog.disk_after_cut(log, start, 5, random.Random(seed), tmp_path / "cut.img")
        seen.add(sectors(tmp_path / "cut.img", 3))
    assert seen == {first + second + third for first in "12" for second in "03" for third in "04"}


def test_a_write_that_was_under_way_is_torn_between_sectors_and_never_in_one(tmp_path: Path) -> None:
    start, path = written(tmp_path, (Flag(0), 0, digit(1, 4)), FLUSH, (Flag(0), 0, digit(2, 4)))
    log = blocklog.read(path)
    seen = set()
    for seed in range(200):
        cut = blocklog.disk_after_cut(log, start, 3, random.Random(seed), tmp_path / "cut.img")
        content = (tmp_path / "cut.img").read_bytes()
        assert all(len(set(content[place : place + 512])) == 1 for place in range(0, 2048, 512))
        assert cut.torn >= 0 or sectors(tmp_path / "cut.img", 4) in ("1111", "2222")
        seen.add(sectors(tmp_path / "cut.img", 4))
    assert {"1111", "2222", "1222", "2111", "2112"} <= seen


def test_a_write_with_fua_is_there_and_brings_nothing_else_along(tmp_path: Path) -> None:
    start, path = written(tmp_path, (Flag(0), 0, digit(1)), (Flag.FUA, 1, digit(2)))
    log = blocklog.read(path)
    seen = set()
    for seed in range(50):
        blocklog.disk_after_cut(log, start, 2, random.Random(seed), tmp_path / "cut.img")
        seen.add(sectors(tmp_path / "cut.img", 2))
    assert seen == {"02", "12"}


def test_a_flush_that_carries_data_flushes_what_came_before_it_only(tmp_path: Path) -> None:
    start, path = written(tmp_path, (Flag(0), 0, digit(1)), (Flag.FLUSH, 1, digit(2)), FLUSH)
    log = blocklog.read(path)
    assert log.flushes() == (2, 3)
    cut = blocklog.disk_after_cut(log, start, 2, random.Random(1), tmp_path / "cut.img")
    assert sectors(tmp_path / "cut.img", 1) == "1" and cut.flushed == 2


def test_what_was_discarded_is_not_what_was_there(tmp_path: Path) -> None:
    start, path = record(tmp_path, "write -P 1 0 16k", "flush", "discard 4k 4k", "write -P 2 12k 4k", "flush")
    log = blocklog.read(path)
    blocklog.disk_at(log, start, len(log.entries), tmp_path / "end.img")
    content = (tmp_path / "end.img").read_bytes()
    assert [content[place] for place in range(0, 16384, 4096)] == [1, 0, 1, 2]


def test_flushes_with_nothing_to_flush_are_no_moments_of_their_own(tmp_path: Path) -> None:
    _start, path = written(tmp_path, FLUSH, (Flag(0), 0, digit(1)), FLUSH, FLUSH, (Flag(0), 1, digit(2)), FLUSH)
    log = blocklog.read(path)
    assert log.flushes() == (3, 6)
    assert [log.flushed(moment) for moment in (0, 2, 3, 5, 6)] == [0, 1, 3, 4, 6]


def test_the_same_seed_cuts_at_the_same_points_and_loses_the_same(tmp_path: Path) -> None:
    requests = [request for number in range(20) for request in ((Flag(0), number, digit(1)), FLUSH)]
    start, path = written(tmp_path, *requests, (Flag(0), 0, digit(2)), (Flag(0), 1, digit(3)))
    log = blocklog.read(path)
    assert blocklog.points(log, 4, 3, 7) == blocklog.points(log, 4, 3, 7) != blocklog.points(log, 4, 3, 8)
    cuts = []
    for name in ("one", "two"):
        cuts.append(blocklog.disk_after_cut(log, start, 42, random.Random(5), tmp_path / name))
    assert cuts[0] == cuts[1] and (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_points_are_spread_over_all_flushes_and_come_in_order(tmp_path: Path) -> None:
    requests = [request for number in range(20) for request in ((Flag(0), number, digit(1)), FLUSH)]
    log = blocklog.read(written(tmp_path, *requests)[1])
    assert blocklog.points(log, 4, 0, 1) == tuple(Point(moment) for moment in (6, 16, 26, 36))
    found = blocklog.points(log, 100, 5, 1, after=20)
    moments = [point.moment for point in found]
    assert len(found) == 11 + 5 and moments == sorted(moments) and moments[0] >= 20


def test_the_log_of_a_killed_machine_ends_where_its_superblock_says(tmp_path: Path) -> None:
    """What was written after the last flush is in the file, half of the last entry, too."""
    _start, path = written(tmp_path, (Flag(0), 0, digit(1)), FLUSH)
    path.write_bytes(path.read_bytes() + struct.pack("<QQQQ", 5, 8, 0, 0).ljust(512, b"\0") + b"half")
    assert len(blocklog.read(path).entries) == 2 == blocklog.count(path)


FAULTS: Sequence[tuple[str, bytes, str]] = [
    ("empty", b"", r"cannot read the write log .*: its superblock is cut off after 0 bytes"),
    ("alien", b"QFI\xfb" * 128, r"cannot read the write log .*: it begins with 0x\w+, no log of blklogwrites"),
    ("newer", superblock(1, version=2), r"cannot read the write log .*: its format is version 2, not 1"),
    ("odd", superblock(1, sector_size=520), r"cannot read the write log .*: its sectors have 520 bytes"),
    ("nothing", superblock(0), r"cannot use the write log .*: it has no entries; did the machine run with it\?"),
    ("cut off", superblock(1), r"cannot read the write log .*: it ends before entry 1 of 1"),
    (
        "data cut off",
        superblock(1) + struct.pack("<QQQQ", 0, 8, 0, 0).ljust(512, b"\0") + b"half",
        r"cannot read the write log .*: the data of entry 1 of 1 is cut off",
    ),
    (
        "not an entry",
        superblock(1) + b"\xff" * 512,
        r"cannot read the write log .*: entry 1 has unknown flags 0xf+",
    ),
]


@pytest.mark.parametrize(("content", "sentence"), [fault[1:] for fault in FAULTS], ids=[fault[0] for fault in FAULTS])
def test_a_log_that_cannot_be_used_is_refused_with_the_reason(tmp_path: Path, content: bytes, sentence: str) -> None:
    (tmp_path / "log").write_bytes(content)
    with pytest.raises(LogError, match=sentence):
        blocklog.read(tmp_path / "log")


def test_a_log_that_is_not_there_is_a_sentence_too(tmp_path: Path) -> None:
    for look in (blocklog.read, blocklog.count):
        with pytest.raises(LogError, match="cannot read the write log .*/none: No such file or directory"):
            look(tmp_path / "none")


def test_a_log_of_another_disk_is_refused(tmp_path: Path) -> None:
    start, path = written(tmp_path, (Flag(0), DISK // 512, digit(1)), FLUSH)
    with pytest.raises(LogError, match="cannot replay entry 1 of .*: it is beyond the disk's end"):
        blocklog.disk_at(blocklog.read(path), start, 1, tmp_path / "at.img")
    with pytest.raises(LogError, match="cannot copy the disk"):
        blocklog.disk_at(blocklog.read(path), tmp_path / "none", 1, tmp_path / "at.img")


def test_a_log_tells_its_size(tmp_path: Path) -> None:
    log: Log = blocklog.read(written(tmp_path, (Flag(0), 0, digit(1, 4096 // 512)), FLUSH)[1])
    assert str(log) == "1 writes (0 MiB), 1 flushes"
