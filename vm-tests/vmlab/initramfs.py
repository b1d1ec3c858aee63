"""The machine's initramfs: busybox, ostree-prepare-root with its libraries, and a few modules.

It is written as the kernel reads it (cpio, "newc"; Documentation/driver-api/early-userspace/buffer-format.rst),
uncompressed, because decompression is slow under emulation. What is appended to it is read as well, and wins.
"""

from __future__ import annotations

import lzma
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.stand.images import Directory, Entry, File, Link
from vmlab.programs import CannotBuild, run
from vmlab.rootfs import TIME

PREPARE_ROOT = "usr/lib/ostree/ostree-prepare-root"
BUSYBOX = "usr/bin/busybox"
INIT = Path(__file__).resolve().parents[1] / "initramfs/init"
_APPLETS = ("sh", "mount", "insmod", "cat", "ip", "switch_root")
# Insertion in the order of the names is an order that works: each after those it needs.
_MODULES = ("failover", "net_failover", "virtio_blk", "virtio_net")
_FOLDERS = ("dev", "proc", "sys", "run", "sysroot")
_KINDS = {File: stat.S_IFREG, Link: stat.S_IFLNK, Directory: stat.S_IFDIR}


def initramfs(root: Path, kernel: str) -> bytes:
    """The initramfs for the tree `root` and its kernel version. Raises CannotBuild."""
    tree: dict[str, Entry] = {folder: Directory() for folder in _FOLDERS}
    tree["init"] = File(INIT.read_bytes(), 0o755)
    # ostree-prepare-root only runs where this file is.
    tree["etc/initrd-release"] = File(b'NAME="vmlab initramfs"\n')
    tree["bin/busybox"] = File((root / BUSYBOX).read_bytes(), 0o755)
    tree.update({f"bin/{applet}": Link("busybox") for applet in _APPLETS})
    for path in (PREPARE_ROOT, *libraries(root, PREPARE_ROOT)):
        tree[path] = File((root / path).resolve().read_bytes(), 0o755)
    tree["usr/lib/ostree/prepare-root.conf"] = File((root / "usr/lib/ostree/prepare-root.conf").read_bytes())
    for name in _MODULES:
        tree[f"modules/{name}.ko"] = File(_module(root / "usr/lib/modules" / kernel, name))
    return cpio(tree)


def libraries(root: Path, program: str) -> list[str]:
    """What the dynamic linker of `root` loads for a program there: paths below `root`. Raises CannotBuild."""
    listed = run(f"find the libraries of {program}", ["chroot", str(root), "ldd", f"/{program}"], 60)
    words = [word for line in listed.splitlines() for word in line.split() if word.startswith("/")]
    return sorted({word.lstrip("/").rstrip(":") for word in words})


def cpio(tree: Mapping[str, Entry]) -> bytes:
    """A cpio archive of `tree`, with its parent directories; the same input gives the same bytes."""
    parents = {"/".join(path.split("/")[:depth]) for path in tree for depth in range(1, path.count("/") + 1)}
    whole: dict[str, Entry] = {**{parent: Directory() for parent in parents}, **tree}
    return b"".join(_records(sorted(whole.items())))


def _records(entries: Iterable[tuple[str, Entry]]) -> Iterable[bytes]:
    number = 0
    for number, (path, entry) in enumerate(entries, 1):
        content = entry.content if isinstance(entry, File) else b""
        permissions = 0o777
        if isinstance(entry, Link):
            content = entry.target.encode()
        else:
            permissions = entry.mode
        yield _record(path, number, _KINDS[type(entry)] | permissions, content)
    yield _record("TRAILER!!!", number + 1, 0, b"")


def _record(name: str, number: int, mode: int, content: bytes) -> bytes:
    encoded = name.encode() + b"\0"
    fields = (number, mode, 0, 0, 1, TIME if mode else 0, len(content), 0, 0, 0, 0, len(encoded), 0)
    head = b"070701" + b"".join(b"%08X" % field for field in fields) + encoded
    return _padded(head) + _padded(content)


def _padded(data: bytes) -> bytes:
    return data + b"\0" * (-len(data) % 4)


def _module(folder: Path, name: str) -> bytes:
    for path in folder.rglob(f"{name}.ko*"):
        return lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
    raise CannotBuild(f"cannot make the initramfs: no module {name} in {folder}")
