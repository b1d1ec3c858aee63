"""What is free on the node's file systems, and what of a target is on them already. Nothing here writes."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from mcdaemon.errors import from_os_error
from mcdaemon.host import boot

_BLOB_REFS = "refs/heads/ostree/container/blob"
_PERCENT = 3
"""libostree's default for `min-free-space-percent` (rpm-ostree.md 5.9)."""

_SIZE = re.compile(r"(\d+)([MGT])B")
_UNITS = {"M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_KERNELS = ("vmlinuz", "initramfs.img")


@dataclass(frozen=True)
class Room:
    """What is free at a place, for everybody: the blocks that a file system reserves for root are not counted, though
    root could take them (TXN-46: an estimate with them in it was wrong).

    :ivar device: two places with the same one share their room.
    :ivar bytes: free bytes; `total` is the size of the file system, `block` its block size.
    :ivar inodes: free inodes, None where the file system has no fixed number of them (btrfs).
    """

    device: int
    bytes: int
    inodes: Optional[int]
    total: int
    block: int


def look(place: Path) -> Room:
    """The room at `place`, or at the next directory above it that is there."""
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        found = os.statvfs(place)
        device = place.stat().st_dev
    except OSError as error:
        raise from_os_error(error, "look for free space at", place) from error
    inodes = found.f_favail if found.f_files else None
    return Room(device, found.f_bavail * found.f_frsize, inodes, found.f_blocks * found.f_frsize, found.f_frsize)


# -- the repository ---------------------------------------------------------------------------------------------------


def not_imported(repo: Path, layers: Iterable[str]) -> frozenset[str]:
    """The layers (digests) that rpm-ostree would fetch: those without a ref of their own (rpm-ostree.md 4.3, step 9).

    libostree keeps every local ref as a file of its name, so that a look is one call for each layer. The name is the
    digest escaped as ostree-ext does it (4.4): a colon is `_3A_`.
    """
    folder = repo / _BLOB_REFS
    return frozenset(digest for digest in layers if not os.path.lexists(folder / digest.replace(":", "_3A_")))


def kept_free(repo: Path, total: int) -> int:
    """Bytes that libostree leaves free on a file system of `total` bytes: content beyond it is refused."""
    try:
        text = (repo / "config").read_text(errors="replace")
    except FileNotFoundError:
        text = ""
    except OSError as error:
        raise from_os_error(error, "read", repo / "config") from error
    return parse_kept_free(text, total)


def parse_kept_free(text: str, total: int) -> int:
    """`core.min-free-space-size`, which wins, or `core.min-free-space-percent`, or its default.

    A value that libostree would refuse is none of ours to judge: the default counts.
    """
    values, section = {}, ""
    for line in (line.strip() for line in text.splitlines()):
        if line.startswith("["):
            section = line
        elif section == "[core]" and "=" in line and not line.startswith("#"):
            key, _equals, value = line.partition("=")
            values[key.strip()] = value.strip()
    size = _SIZE.fullmatch(values.get("min-free-space-size", ""))
    if size and int(size[1]):
        return int(size[1]) * _UNITS[size[2]]
    percent = values.get("min-free-space-percent", "")
    valid = percent.isascii() and percent.isdigit() and int(percent) < 100
    return total * (int(percent) if valid else _PERCENT) // 100


# -- kernels ----------------------------------------------------------------------------------------------------------


def kernel_files(root: Path) -> dict[str, int]:
    """What a deployment brings to /boot: name there -> bytes (rpm-ostree.md 5.6)."""
    found: dict[str, int] = {}
    for folder in sorted((root / "usr/lib/modules").glob("*/")):
        kernel, initramfs = (folder / name for name in _KERNELS)
        for path, name in ((kernel, f"vmlinuz-{folder.name}"), (initramfs, f"initramfs-{folder.name}.img")):
            if path.is_file():
                found[name] = path.stat().st_size
        for path in sorted((folder / "dtb").rglob("*")):
            if path.is_file():
                found[f"dtb/{path.relative_to(folder / 'dtb')}"] = path.stat().st_size
    return found


def rounded(sizes: Iterable[int], block: int) -> int:
    """Bytes that files of these sizes take in blocks of `block` bytes."""
    return sum(-(-size // block) * block for size in sizes)


def prunable_kernels(boot_folder: Path, sysroot: Path, osname: str, keep: Iterable[str]) -> int:
    """Bytes of kernels on /boot that only deployments use which a finalization drops: those that are not in `keep`.

    `keep`: names of deployments (checksum.serial). Other OSes on the same machine are left alone.
    """
    kept, wanted = set(), set(keep)
    for entry in boot.entries(boot_folder, sysroot):
        if entry.osname != osname or entry.deployment in wanted:
            argument = boot.ostree_argument(entry.options) or ""
            kept.add(f"{entry.osname}-{argument.split('/')[-2]}")
    gone = [path for path in (boot_folder / "ostree").glob(f"{osname}-*") if path.name not in kept]
    return sum(path.stat().st_size for folder in gone for path in folder.rglob("*") if path.is_file())
