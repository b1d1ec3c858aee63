"""A disk as the machines have it, small."""

from __future__ import annotations

import subprocess
from pathlib import Path

from vmlab.bootloader import DiskFiles

PARTITION = 1 << 20
"""Where the partition begins, in bytes."""
_SIZE = 12 << 20


def make_disk(path: Path, content: Path) -> DiskFiles:
    """A disk with an MBR and one ext4 partition that holds a tree."""
    part = path.with_suffix(".part")
    with open(part, "wb") as file:
        file.truncate(_SIZE)
    options = ["-O", "^64bit,^metadata_csum", "-J", "size=4", "-d", str(content)]
    subprocess.run(["mke2fs", "-q", "-F", "-t", "ext4", *options, str(part)], check=True, timeout=60)
    entry = bytes([0x80, 0, 0, 0, 0x83, 0, 0, 0]) + (PARTITION // 512).to_bytes(4, "little")
    entry += (_SIZE // 512).to_bytes(4, "little")
    path.write_bytes((bytes(446) + entry).ljust(510, b"\0") + b"\x55\xaa" + bytes(PARTITION - 512) + part.read_bytes())
    part.unlink()
    return DiskFiles.open(path)
