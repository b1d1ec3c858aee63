"""A disk of its own for a node: an ext4 file system in an image file, so that a power cut loses what was not synced.

    with Disk(tmp_path / "disk.img", tmp_path / "node/sysroot", size=2 * GIB) as disk:
        ...a node lives there and is stopped in the middle of something...
        disk.snapshot(tmp_path / "cut.img")
    with Disk(tmp_path / "cut.img", tmp_path / "after/sysroot"):
        ...the node after the power cut...

A snapshot is a copy of the image file: exactly what ext4 has handed to the block device so far, which is what a power
cut leaves. Dirty pages and running journal transactions are in the kernel's memory and are not in it. They get there by

- fsync, fdatasync, syncfs, sync, O_SYNC: what the tests are about;
- ext4's commit timer, here once a day (`commit=`);
- the kernel's flusher threads, for pages that have been dirty for vm.dirty_expire_centisecs (30 s) or when more than
  vm.dirty_background_ratio of the memory is dirty. Nothing of that is changed, it is the host's; a test's update takes
  less, and what the flusher does write early only makes another state that is just as legal;
- shortness of memory, as above.

So a snapshot never has less than what is durable, and seldom more. What the file system itself does early is switched
off: `noauto_da_alloc`, or ext4 would write a file's data when it is renamed over another one, which hides a missing
fsync; XFS does not do that. The device's own cache counts as written: ext4 flushes it in each commit (barriers), and
the loop driver has none.

An fsync on ext4 commits the whole running transaction, so every rename before it as well. That is stricter than what
the interface promises; the rules themselves are in tests/crash/lossydisk.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Optional

MIB = 1 << 20
GIB = 1 << 30

# ioctl_fs(2): FITHAW is _IOWR('X', 120, int).
_FITHAW = 0xC0045878
_OPTIONS = ("loop", "noatime", "commit=86400", "noauto_da_alloc", "noinit_itable", "nodiscard")
_TIMEOUT = 60.0
_QUIET_TIMEOUT = 10.0


class DiskError(Exception):
    """The disk cannot be made, mounted or copied; the text is that of the program that failed."""


class Disk:
    """An ext4 file system in the file `image`, mounted at `folder` while the context is open.

    `size` in bytes: the image is made, sparse, with an empty file system; 0: it is there. `options` are further mount
    options. Mounting an image that was not unmounted replays ext4's journal, as the boot after a power cut does. Needs
    root. A node on it wants `Machine(..., own_disk=True)`, so that it syncs /boot as on a real one.
    """

    def __init__(self, image: Path, folder: Path, size: int = 0, options: Sequence[str] = ()) -> None:
        self.image = image
        self.folder = folder
        self._options = ",".join([*_OPTIONS, *options])
        if size:
            image.parent.mkdir(parents=True, exist_ok=True)
            with open(image, "xb") as file:
                file.truncate(size)
            # -m 0: "full" is the same for everybody; the inode tables of a sparse file are zero already.
            _run("mkfs.ext4", "-q", "-F", "-m", "0", "-E", "lazy_itable_init=1,lazy_journal_init=1", str(image))

    def mount(self) -> None:
        """Mount it. Raises DiskError."""
        self.folder.mkdir(parents=True, exist_ok=True)
        _run("mount", "-t", "ext4", "-o", self._options, str(self.image), str(self.folder))

    def unmount(self) -> None:
        """Unmount it; everything is written then. A file system that somebody froze is thawed first.

        Raises DiskError when something still uses it; it is out of the way even so.
        """
        if not self.folder.is_mount():
            return
        self._thaw()
        self.sync()
        done = subprocess.run(["umount", str(self.folder)], capture_output=True, text=True, timeout=_TIMEOUT)
        if done.returncode != 0:
            _run("umount", "--lazy", str(self.folder))
            raise DiskError(f"the disk {self.image} is still in use: {done.stderr.strip()}")

    def sync(self) -> None:
        """Bring everything to the block device, as an installer does before it is done."""
        with self._opened() as descriptor:
            if ctypes.CDLL(None, use_errno=True).syncfs(descriptor) != 0:
                raise DiskError(f"cannot sync {self.folder}: {os.strerror(ctypes.get_errno())}")

    def snapshot(self, target: Path) -> Path:
        """Copy what the block device has now; what a power cut at this moment would leave. The answer is `target`.

        Whoever writes to the disk should stand still (stopped processes, a frozen file system): the copy is made again
        until no write came in meanwhile. Raises DiskError when that does not happen in time.
        """
        deadline = time.monotonic() + _QUIET_TIMEOUT
        while True:
            before = self.writes()
            _run("cp", "--sparse=auto", str(self.image), str(target))
            if before is not None and before == self.writes():
                return target
            if time.monotonic() > deadline:
                raise DiskError(f"cannot copy {self.image}: it is written to all the time")

    def free(self) -> int:
        """Bytes that are free."""
        found = os.statvfs(self.folder)
        return found.f_bavail * found.f_frsize

    def check(self) -> str:
        """What e2fsck finds in a copy of the image, "" when it is sound.

        A copy, because somebody's mount namespace may still keep the file system. The journal is replayed first; that
        and counts of free blocks, which ext4 writes at unmount only, are what `-p` repairs and no damage.
        """
        copy = self.image.with_suffix(".check")
        _run("cp", "--sparse=auto", str(self.image), str(copy))
        try:
            done = subprocess.run(["e2fsck", "-f", "-p", str(copy)], capture_output=True, text=True, timeout=_TIMEOUT)
        finally:
            copy.unlink()
        return "" if done.returncode in (0, 1) else done.stdout + done.stderr

    def __enter__(self) -> Disk:
        self.mount()
        return self

    def __exit__(
        self, kind: Optional[type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        self.unmount()

    def writes(self) -> Optional[tuple[str, ...]]:
        """Counters of the writes that the block device has had; None while one is under way. While they stay the same,
        so does what a power cut leaves. Fields as in Documentation/block/stat.rst of Linux.
        """
        device = self.folder.stat().st_dev
        fields = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/stat").read_text().split()
        return (fields[4], fields[6]) if fields[8] == "0" else None

    def _thaw(self) -> None:
        with self._opened() as descriptor, contextlib.suppress(OSError):  # EINVAL: it is not frozen
            fcntl.ioctl(descriptor, _FITHAW, 0)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        descriptor = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            yield descriptor
        finally:
            os.close(descriptor)


def _run(*argv: str) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=_TIMEOUT, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        raise DiskError(f"`{' '.join(argv)}` failed: {done.stderr.strip()}")
