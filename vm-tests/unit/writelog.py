"""Logs of disk writes as QEMU's blklogwrites writes them, made without QEMU."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

from vmlab.blocklog import Flag

Request = tuple[Flag, int, bytes]
"""Flags, the first sector, and the data; sectors have 512 bytes."""

FLUSH: Request = (Flag.FLUSH, 0, b"")
_BLOCK = 4096


def superblock(entries: int, magic: int = 0x6A736677736872, version: int = 1, sector_size: int = 512) -> bytes:
    return struct.pack("<QQQI", magic, version, entries, sector_size).ljust(512, b"\0")


def write(path: Path, requests: Sequence[Request]) -> Path:
    content = superblock(len(requests))
    for flags, sector, data in requests:
        content += struct.pack("<QQQQ", sector, len(data) // 512, flags, 0).ljust(512, b"\0") + data
    path.write_bytes(content)
    return path


def difference(before: bytes, after: bytes) -> list[Request]:
    """The writes that make one disk of another, by blocks of a file system."""
    places = range(0, len(after), _BLOCK)
    return [(Flag(0), place // 512, after[place : place + _BLOCK]) for place in places
            if before[place : place + _BLOCK] != after[place : place + _BLOCK]]  # fmt: skip
