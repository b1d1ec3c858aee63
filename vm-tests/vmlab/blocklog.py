"""What a machine wrote to its disk and when it flushed, as QEMU's `blklogwrites` notes it; and the disks that a power
cut may leave at any moment of that.

    -blockdev driver=blklogwrites,node-name=disk,file=raw,log=log,log-sector-size=512
    -device virtio-blk-pci,drive=disk,write-cache=on

The format is that of Linux's dm-log-writes (Documentation/admin-guide/device-mapper/log-writes.rst): a superblock, then
for each request an entry of one sector and its data. All numbers are little-endian, positions are in sectors of the
log. QEMU writes the superblock's count with each flush and every 4096 entries, so of a machine that was killed all that
was flushed is there, and what follows it is not looked at. The guest can place no marks; `count` tells the harness
where a log stands while the machine runs.

A write is noted when QEMU gets it, before it is done. One that was under way when the guest asked for a flush counts
here as flushed, though a real disk may still lose it.

The model of the disk: all that was flushed is there; of the writes since then any subset may be, whatever their order;
a write is done by sectors of 512 bytes, each of them whole. A write with FUA is there, and nothing else with it.
"""

from __future__ import annotations

import enum
import errno
import os
import random
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Optional

SECTOR = 512
"""Bytes that a disk writes as a whole or not at all."""

_MAGIC = 0x6A736677736872
_VERSION = 1
_SUPER = struct.Struct("<QQQI")
_ENTRY = struct.Struct("<QQQQ")
_SECTOR_SIZES = (512, 1024, 2048, 4096)
_PIECE = 1 << 20


class LogError(Exception):
    """The log cannot be used, or does not fit the disk; the text says what is wrong with it."""


class Flag(enum.IntFlag):
    """What a request is; a plain write has none. A flush that carries data comes before it."""

    FLUSH = 1
    FUA = 2
    DISCARD = 4
    MARK = 8


@dataclass(frozen=True)
class Entry:
    """One request. `start` and `size`: bytes on the disk; `at`: where its data is in the log, in bytes."""

    flags: Flag
    start: int
    size: int
    at: int

    @property
    def flushes(self) -> bool:
        return bool(self.flags & Flag.FLUSH)

    @property
    def changes(self) -> bool:
        """Whether the disk may be another one after it."""
        return self.size > 0 and not self.flags & Flag.MARK

    @property
    def sure(self) -> bool:
        """Whether it is on the disk once it is done, without a flush."""
        return bool(self.flags & Flag.FUA)


@dataclass(frozen=True)
class Log:
    """A log that was read. A moment is a number of entries: 0 before the first one, `len(entries)` after the last."""

    path: Path
    sector_size: int
    entries: tuple[Entry, ...]

    @property
    def writes(self) -> int:
        return sum(entry.changes for entry in self.entries)

    def flushes(self) -> tuple[int, ...]:
        """The moments right after each flush that had something to flush."""
        found, dirty = [], False
        for number, entry in enumerate(self.entries, 1):
            if entry.flushes and dirty:
                found.append(number)
                dirty = False
            dirty = dirty or entry.changes
        return tuple(found)

    def flushed(self, moment: int) -> int:
        """The moment of the last flush before this one; 0 when there was none."""
        return next((number for number in range(moment, 0, -1) if self.entries[number - 1].flushes), 0)

    def __str__(self) -> str:
        size = sum(entry.size for entry in self.entries if entry.changes and not entry.flags & Flag.DISCARD)
        flushes = sum(entry.flushes for entry in self.entries)
        return f"{self.writes} writes ({size / (1 << 20):.0f} MiB), {flushes} flushes"


@dataclass(frozen=True)
class Cut:
    """How a power cut went: at which moment, and what became of the `open` writes since the last flush: `kept` of them
    are there, and of the one at `torn` (a number of an entry, -1 for none) some sectors."""

    moment: int
    flushed: int
    open: int
    kept: int
    torn: int = -1

    def __str__(self) -> str:
        if not self.open:
            return f"at the flush {self.moment}"
        torn = f", {self.torn + 1} torn" if self.torn >= 0 else ""
        return f"at entry {self.moment}, {self.kept} of {self.open} writes since the flush {self.flushed} kept{torn}"


# -- reading ----------------------------------------------------------------------------------------------------------


def read(path: Path) -> Log:
    """Read a log, up to what its superblock counts. Raises LogError for one that is none, is torn, or holds nothing."""
    try:
        with open(path, "rb") as file:
            sector_size, count = _superblock(path, file.read(_SUPER.size))
            size = os.fstat(file.fileno()).st_size
            entries = tuple(_entries(path, file.fileno(), sector_size, count, size))
    except OSError as error:
        raise LogError(f"cannot read the write log {path}: {error.strerror}") from error
    if not entries:
        raise LogError(f"cannot use the write log {path}: it has no entries; did the machine run with it?")
    return Log(path, sector_size, entries)


def count(path: Path) -> int:
    """How many entries are surely in the log now, while the machine runs: up to the last flush. Raises LogError."""
    try:
        with open(path, "rb") as file:
            return _superblock(path, file.read(_SUPER.size))[1]
    except OSError as error:
        raise LogError(f"cannot read the write log {path}: {error.strerror}") from error


def _superblock(path: Path, content: bytes) -> tuple[int, int]:
    if len(content) < _SUPER.size:
        raise LogError(f"cannot read the write log {path}: its superblock is cut off after {len(content)} bytes")
    magic, version, number, sector_size = _SUPER.unpack(content)
    if magic != _MAGIC:
        raise LogError(f"cannot read the write log {path}: it begins with {magic:#x}, no log of blklogwrites")
    if version != _VERSION:
        raise LogError(f"cannot read the write log {path}: its format is version {version}, not {_VERSION}")
    if sector_size not in _SECTOR_SIZES:
        raise LogError(f"cannot read the write log {path}: its sectors have {sector_size} bytes")
    return sector_size, number


def _entries(path: Path, descriptor: int, sector_size: int, number: int, size: int) -> Sequence[Entry]:
    found, place = [], sector_size
    for index in range(number):
        head = os.pread(descriptor, _ENTRY.size, place)
        if len(head) < _ENTRY.size:
            raise LogError(f"cannot read the write log {path}: it ends before entry {index + 1} of {number}")
        sector, sectors, bits, _data = _ENTRY.unpack(head)
        if bits & ~0xF:
            raise LogError(f"cannot read the write log {path}: entry {index + 1} has unknown flags {bits:#x}")
        entry = Entry(Flag(bits), sector * sector_size, sectors * sector_size, place + sector_size)
        place = entry.at if entry.flags & Flag.DISCARD else entry.at + entry.size
        if place > size and entry.changes:
            raise LogError(f"cannot read the write log {path}: the data of entry {index + 1} of {number} is cut off")
        found.append(entry)
    return found


# -- what is on the disk ----------------------------------------------------------------------------------------------


def copy(disk: Path, target: Path) -> Path:
    """Make `target` the same, holes kept. What is there already is written over in place, which takes a tenth of the
    time of new pages on tmpfs. Raises LogError."""
    try:
        with (
            open(disk, "rb", buffering=0) as source,
            open(target, "r+b" if target.exists() else "xb", buffering=0) as made,
        ):
            size = os.fstat(source.fileno()).st_size
            made.truncate(size)
            place = 0
            for begin, end in [*_parts(source.fileno(), 0, size), (size, size)]:
                for empty, full in list(_parts(made.fileno(), place, begin)):
                    _fill(None, made.fileno(), empty, full)
                _fill(source.fileno(), made.fileno(), begin, end)
                place = end
    except OSError as error:
        raise LogError(f"cannot copy the disk {disk} to {target}: {error.strerror}") from error
    return target


def _parts(descriptor: int, begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Where a file has data and no hole, between two places."""
    while begin < end:
        try:
            begin = os.lseek(descriptor, begin, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # only a hole follows
                return
            raise
        stop = min(end, os.lseek(descriptor, begin, os.SEEK_HOLE)) if begin < end else end
        if begin < stop:
            yield begin, stop
        begin = stop


def _fill(source: Optional[int], target: int, begin: int, end: int) -> None:
    """Copy a part of a file, or (None) fill it with zeros."""
    while begin < end:
        size = min(_PIECE, end - begin)
        content = bytes(size) if source is None else os.pread(source, size, begin)
        begin += os.pwrite(target, content, begin)


class Walk:
    """The disk `disk`, a copy of the starting disk, taken forward through a log; all that was ever written is on it.

    With room in memory, a place on tmpfs makes it fast. What `copy` and `cut` make is a file of its own.
    """

    def __init__(self, log: Log, start: Path, disk: Path) -> None:
        self.log = log
        self.disk = copy(start, disk)
        self.moment = 0
        self._log = os.open(log.path, os.O_RDONLY | os.O_CLOEXEC)

    def forward(self, moment: int) -> None:
        """Apply what was written up to a moment that is not past. Raises LogError."""
        if not self.moment <= moment <= len(self.log.entries):
            raise LogError(f"cannot take the disk from entry {self.moment} to {moment} of {len(self.log.entries)}")
        self._apply(self.disk, range(self.moment, moment))
        self.moment = moment

    def copy(self, target: Path) -> Path:
        """The disk as it is at this moment, nothing lost."""
        return copy(self.disk, target)

    def cut(self, moment: int, chance: random.Random, target: Path) -> Cut:
        """Make in `target` the disk after a power cut at a moment: what was flushed, and by chance some of the rest.

        The walk goes to the flush before it. Raises LogError where it is past that.
        """
        self.forward(self.log.flushed(moment))
        self.copy(target)
        pending = [number for number in range(self.moment, moment) if self.log.entries[number].changes]
        share = chance.choice((0.1, 0.5, 0.9))
        kept = [number for number in pending if self.log.entries[number].sure or chance.random() < share]
        tearable = [number for number in kept if not self.log.entries[number].sure]
        torn = chance.choice(tearable) if tearable and chance.random() < 0.5 else -1
        if torn >= 0 and self.log.entries[torn].size <= SECTOR:
            torn = -1
        self._apply(target, kept, torn, chance)
        return Cut(moment, self.moment, len(pending), len(kept), torn)

    def _apply(
        self, disk: Path, numbers: Sequence[int], torn: int = -1, chance: Optional[random.Random] = None
    ) -> None:
        with open(disk, "r+b") as file:
            size = os.fstat(file.fileno()).st_size
            for number in numbers:
                entry = self.log.entries[number]
                if not entry.changes:
                    continue
                if entry.start + entry.size > size:
                    raise LogError(f"cannot replay entry {number + 1} of {self.log.path}: it is beyond the disk's end")
                whole = chance is None or number != torn
                for begin in range(0, entry.size, _PIECE if whole else SECTOR):
                    if whole or (chance is not None and chance.random() < 0.5):
                        self._put(file.fileno(), entry, begin, min(_PIECE if whole else SECTOR, entry.size - begin))

    def _put(self, disk: int, entry: Entry, begin: int, size: int) -> None:
        """What was discarded may hold anything; here it is zeros, which nothing takes for what was there."""
        if entry.flags & Flag.DISCARD:
            content = bytes(size)
        else:
            content = os.pread(self._log, size, entry.at + begin)
        os.pwrite(disk, content, entry.start + begin)

    def __enter__(self) -> Walk:
        return self

    def __exit__(
        self, kind: Optional[type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        self.close()

    def close(self) -> None:
        """Remove the walking disk."""
        if self._log >= 0:
            os.close(self._log)
            self._log = -1
        self.disk.unlink(missing_ok=True)


def disk_at(log: Log, start: Path, moment: int, target: Path) -> Path:
    """Make in `target` the disk with all that was written up to a moment. Raises LogError."""
    with Walk(log, start, target.with_name(f"{target.name}.walk")) as walk:
        walk.forward(moment)
        return walk.copy(target)


def disk_after_cut(log: Log, start: Path, moment: int, chance: random.Random, target: Path) -> Cut:
    """Make in `target` a disk that a power cut at a moment may leave. Raises LogError."""
    with Walk(log, start, target.with_name(f"{target.name}.walk")) as walk:
        return walk.cut(moment, chance, target)


# -- where to cut -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Point:
    """Where to cut the power. `seed`: of the chance that decides what is lost; None: exactly at a flush, nothing is."""

    moment: int
    seed: Optional[int] = None

    def __str__(self) -> str:
        return f"flush-{self.moment}" if self.seed is None else f"loss-{self.moment}-seed-{self.seed}"


def points(log: Log, at_flushes: int, losses: int, seed: int, after: int = 0) -> tuple[Point, ...]:
    """Points to cut at, in their order: so many spread evenly over the flushes, and so many by chance anywhere, with
    random losses. The same seed gives the same points. `after`: no point is before that moment."""
    flushes = [moment for moment in log.flushes() if moment >= after]
    many = min(at_flushes, len(flushes))
    even = [Point(flushes[(2 * share + 1) * len(flushes) // (2 * many)]) for share in range(many)]
    chance = random.Random(seed)
    open_ = [moment for moment in range(after, len(log.entries) + 1) if _loses(log, moment)]
    anywhere = [Point(chance.choice(open_), chance.randrange(1 << 31)) for _loss in range(losses if open_ else 0)]
    return tuple(sorted([*even, *anywhere], key=lambda point: (point.moment, point.seed or 0)))


def _loses(log: Log, moment: int) -> bool:
    """Whether a power cut right then may lose something."""
    return moment > 0 and log.entries[moment - 1].changes
