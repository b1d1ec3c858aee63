"""The boot loader's part, played from outside: BLS entries of a disk that is off, its kernel and initrd.

Files are read with debugfs, which, like GRUB, does not replay the file system's journal: after a power cut it sees
what a boot loader sees. Entries are sorted as ostree means it, the highest `version` first
(https://uapi-group.org/specifications/specs/boot_loader_specification/).
"""

from __future__ import annotations

import gzip
import hashlib
import lzma
import os
import re
import struct
import subprocess
import tempfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Optional

from tests.stand.sysroot import BootEntry, NoSuchDeployment

_SECTOR = 512
_PIECE = 1 << 20
_TIMEOUT = 60.0
_ENTRIES = "/boot/loader/entries"
_FAST_LINK = re.compile(r'^Fast link dest: "(.*)"$', re.MULTILINE)
_TYPE = re.compile(r"Type: (\w+(?: \w+)*?)\s+Mode:")
# Offsets into a bzImage (Documentation/arch/x86/boot.rst).
_SETUP_SECTS, _MAGIC, _PAYLOAD = 0x1F1, 0x202, 0x248
_LINUX_PARTITION = 0x83


class DiskError(Exception):
    """The disk cannot be read: no partition, no such file, a damaged file system."""


@dataclass(frozen=True)
class BlsEntry(BootEntry):
    """A boot entry with the files that it names, as paths of the disk."""

    linux: str
    initrd: str


@dataclass(frozen=True)
class DiskFiles:
    """The files of the ext4 partition at `offset` bytes of a raw disk that no machine runs on.

    `size` is the partition's, in bytes; 0: up to the end of the disk.
    """

    path: Path
    offset: int
    size: int = 0

    @classmethod
    def open(cls, path: Path) -> DiskFiles:
        """The first Linux partition of a disk with an MBR."""
        with path.open("rb") as disk:
            sector = disk.read(_SECTOR)
        if sector[510:512] != b"\x55\xaa":
            raise DiskError(f"{path} has no partition table")
        for number in range(4):
            kind = sector[446 + 16 * number + 4]
            begin, sectors = struct.unpack_from("<II", sector, 446 + 16 * number + 8)
            if kind == _LINUX_PARTITION:
                return cls(path, begin * _SECTOR, sectors * _SECTOR)
        raise DiskError(f"{path} has no Linux partition")

    @property
    def device(self) -> str:
        """The name by which e2fsprogs' programs know the partition."""
        return f"{self.path}?offset={self.offset}"

    def names(self, folder: str) -> list[str]:
        """The names in a directory, without "." and ".."; none when it is not there."""
        lines = self._debugfs(f"ls -p {_quoted(folder)}").decode(errors="surrogateescape").splitlines()
        fields = [line.split("/") for line in lines if line.startswith("/")]
        return [field[5] for field in fields if len(field) > 5 and field[1] != "0" and field[5] not in (".", "..")]

    def kind(self, path: str) -> Optional[str]:
        """What a path is: "regular", "directory", "symlink", … as debugfs says it; None when it is not there."""
        match = _TYPE.search(self._debugfs(f"stat {_quoted(path)}").decode(errors="replace"))
        return match.group(1) if match else None

    def read(self, path: str) -> bytes:
        """The content of a file. Raises DiskError when it is not there."""
        if self.kind(path) is None:
            raise DiskError(f"{self.path} has no {path}")
        return self._debugfs(f"cat {_quoted(path)}")

    def readlink(self, path: str) -> str:
        """The target of a symbolic link."""
        said = self._debugfs(f"stat {_quoted(path)}").decode(errors="replace")
        match = _FAST_LINK.search(said)
        return match.group(1) if match else self.read(path).decode().rstrip("\0")

    def copy(self, path: str, target: Path) -> None:
        """Copy one file out."""
        if self.kind(path) is None:
            raise DiskError(f"{self.path} has no {path}")
        self._debugfs(f"dump {_quoted(path)} {_quoted(str(target))}")

    def copy_tree(self, path: str, folder: Path) -> None:
        """Copy a directory and all below it into `folder` (modes and owners too, when run by root)."""
        folder.mkdir(parents=True, exist_ok=True)
        self._debugfs(f"rdump {_quoted(path)} {_quoted(str(folder))}")

    def replay_journal(self) -> None:
        """Replay the file system's journal, as a mount would, and repair what is safe.

        Raises DiskError when e2fsck finds damage that it will not repair by itself.
        """
        # Not on the partition in its place: after the replay e2fsck opens the file anew and forgets the offset.
        with tempfile.TemporaryDirectory(dir=self.path.parent, prefix="replay-") as scratch:
            alone = Path(scratch) / "partition"
            size = self.size or self.path.stat().st_size - self.offset
            with self.path.open("rb") as disk, alone.open("w+b") as part:
                part.truncate(size)
                _copy_changed(disk, self.offset, part, 0, size)
            done = subprocess.run(["e2fsck", "-p", str(alone)], stdin=subprocess.DEVNULL, capture_output=True,
                                  text=True, timeout=10 * _TIMEOUT)  # fmt: skip
            if done.returncode & ~3:
                raise DiskError(f"e2fsck of {self.path} ended with {done.returncode}: {done.stdout}{done.stderr}")
            with alone.open("rb") as part, self.path.open("r+b") as disk:
                _copy_changed(part, 0, disk, self.offset, size)

    def _debugfs(self, request: str) -> bytes:
        done = subprocess.run(["debugfs", "-R", request, self.device], stdin=subprocess.DEVNULL, capture_output=True,
                              timeout=_TIMEOUT)  # fmt: skip
        trouble = [line for line in done.stderr.decode(errors="replace").splitlines()[1:]
                   if "File not found" not in line]  # fmt: skip
        if done.returncode != 0 or any("while opening" in line or "not open" in line for line in trouble):
            raise DiskError(f"cannot read {self.path}: {' '.join(trouble)}")
        return done.stdout


def _copy_changed(source: BinaryIO, source_at: int, target: BinaryIO, target_at: int, size: int) -> None:
    """Make `size` bytes of `target` those of `source`; holes of the source are passed over, equal pieces not written.

    A hole's place in `target` must be zero already, or have been copied from there.
    """
    at, end = source_at, source_at + size
    while at < end:
        try:
            at = os.lseek(source.fileno(), at, os.SEEK_DATA)
        except OSError:
            return  # Nothing but a hole up to the end.
        hole = min(end, os.lseek(source.fileno(), at, os.SEEK_HOLE))
        while at < hole:
            piece = os.pread(source.fileno(), min(_PIECE, hole - at), at)
            place = target_at + at - source_at
            if os.pread(target.fileno(), len(piece), place) != piece:
                os.pwrite(target.fileno(), piece, place)
            at += len(piece)


def entries(disk: DiskFiles) -> list[BlsEntry]:
    """The boot entries in the order in which a boot loader offers them; what is no entry is passed over."""
    found = []
    for name in disk.names(_ENTRIES):
        if name.endswith(".conf"):
            entry = parse_entry(f"{_ENTRIES}/{name}", disk.read(f"{_ENTRIES}/{name}").decode(errors="replace"),
                                lambda link: os.path.basename(disk.readlink(link)))  # fmt: skip
            if entry is not None:
                found.append(entry)
    return in_order(found)


def in_order(found: list[BlsEntry]) -> list[BlsEntry]:
    """Highest version first; among equals the name decides, as it does for GRUB."""
    return sorted(found, key=lambda entry: (entry.version, entry.path.name), reverse=True)


def default_entry(disk: DiskFiles) -> BlsEntry:
    """The entry that boots. Raises NoSuchDeployment when there is none that can be read."""
    found = entries(disk)
    if not found:
        raise NoSuchDeployment(f"no boot entry in {_ENTRIES} of {disk.path}")
    return found[0]


def parse_entry(path: str, text: str, resolve: Callable[[str], str]) -> Optional[BlsEntry]:
    """Read a BLS entry, or None when it names no kernel. `resolve` tells the deployment of an `ostree=` link."""
    fields: dict[str, str] = {}
    for line in text.splitlines():
        key, *rest = line.split(None, 1)[:2] or [""]
        value = rest[0] if rest else ""
        if key and not key.startswith("#"):
            fields[key] = f"{fields[key]} {value.strip()}" if key == "options" and key in fields else value.strip()
    if not fields.get("linux"):
        return None
    options = fields.get("options", "")
    link = next((word[len("ostree=") :] for word in options.split() if word.startswith("ostree=")), "")
    version = fields.get("version", "")
    return BlsEntry(Path(path), fields.get("title", ""), int(version) if version.isdecimal() else 0, options,
                    resolve(link) if link else "", fields["linux"], fields.get("initrd", ""))  # fmt: skip


@dataclass(frozen=True)
class Boot:
    """What the boot loader hands over."""

    kernel: Path
    initrd: Optional[Path]
    options: str


def load(disk: DiskFiles, entry: BlsEntry, cache: Path) -> Boot:
    """Fetch an entry's kernel and initrd from the disk, unpacked because a TCG guest takes seconds for that."""
    kernel = _fetch(disk, entry.linux, cache, vmlinux)
    initrd = _fetch(disk, entry.initrd, cache, unpacked) if entry.initrd else None
    return Boot(kernel, initrd, entry.options)


def _fetch(disk: DiskFiles, path: str, cache: Path, unpack: Callable[[bytes], bytes]) -> Path:
    """A file of the disk after `unpack`, kept by the hash of the original."""
    cache.mkdir(parents=True, exist_ok=True)
    # Entries of a disk with one partition have "/boot/…"; with a separate /boot they do not.
    places = [path, f"/boot{path}"]
    place = next((name for name in places if disk.kind(name) == "regular"), None)
    if place is None:
        raise DiskError(f"{disk.path} has no {path}, which a boot entry names")
    packed = disk.read(place)
    target = cache / f"{hashlib.sha256(packed).hexdigest()}.{unpack.__name__}"
    if not target.exists():
        descriptor, fresh = tempfile.mkstemp(dir=cache)
        with open(descriptor, "wb") as file:
            file.write(unpack(packed))
        os.replace(fresh, target)
    return target


def vmlinux(image: bytes) -> bytes:
    """The ELF kernel in a bzImage; an image of another kind is returned as it is."""
    if image[_MAGIC : _MAGIC + 4] != b"HdrS":
        return image
    sectors = image[_SETUP_SECTS] or 4
    offset, length = struct.unpack_from("<II", image, _PAYLOAD)
    begin = (sectors + 1) * _SECTOR + offset
    payload = image[begin : begin + length]
    if payload[:2] == b"\x1f\x8b":
        return zlib.decompressobj(31).decompress(payload)
    # The build appends the unpacked size to all formats that do not carry it.
    return unpacked(payload[:-4])


def unpacked(data: bytes) -> bytes:
    """Data without its compression; what is not compressed, or in another format, is returned as it is."""
    if data[:2] == b"\x1f\x8b":
        return gzip.decompress(data)
    if data[:6] == b"\xfd7zXZ\0":
        return lzma.LZMADecompressor().decompress(data)
    if data[:4] == b"\x28\xb5\x2f\xfd":
        done = subprocess.run(["zstd", "--decompress", "--stdout", "--quiet"], input=data, capture_output=True,
                              timeout=_TIMEOUT)  # fmt: skip
        if done.returncode != 0:
            raise DiskError(f"zstd cannot unpack: {done.stderr.decode(errors='replace')}")
        return done.stdout
    return data


def _quoted(path: str) -> str:
    if '"' in path or "\n" in path:
        raise DiskError(f"debugfs cannot name {path!r}")
    return f'"{path}"'
