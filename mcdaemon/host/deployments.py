"""The deployments as they lie on the disk: the staged one and its lock, the pending one, and access to their trees.

Read from the disk, not over D-Bus, because the early unit and the window between finalization and reboot have no
rpm-ostreed that could be asked, and because D-Bus does not tell the lock (rpm-ostree.md 3.3).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from gi.repository import GLib

from mcdaemon.errors import Broken, Failure, Held, HoldReason, Transient, from_os_error
from mcdaemon.host import boot, process
from mcdaemon.host.bus import Systemd
from mcdaemon.host.namespace import with_writable
from mcdaemon.host.root import Root

FINALIZE_UNIT = "ostree-finalize-staged.service"
FINALIZE_TIMEOUT = 330.0
"""Seconds; the unit's own TimeoutStopSec is five minutes (rpm-ostree.md 5.2)."""

_STAGED = "run/ostree/staged-deployment"
_LOCK_FILE = "run/ostree/staged-deployment-locked"
_TIGHT = 1 << 20
"""Bytes; with less free than this a failed finalization is put down to want of space."""

_SYSROOT_LOCK = "ostree/lock"
_F_OFD_GETLK = 36
_TIMEOUT = 60.0


@dataclass(frozen=True)
class StagedDeployment:
    """What libostree keeps of a staged deployment until it is finalized."""

    name: str
    osname: str
    bootcsum: str
    kernel_arguments: tuple[str, ...]
    locked: bool


@dataclass(frozen=True)
class Machine:
    """Where the parts of an ostree machine are; a test may put them elsewhere."""

    top: Path = Path("/")

    @property
    def sysroot(self) -> Path:
        return self.top / "sysroot"

    @property
    def boot(self) -> Path:
        return self.top / "boot"

    # -- facts ------------------------------------------------------------------------------------------------------

    def booted(self) -> tuple[str, str]:
        """(osname, name) of the booted deployment.

        Found as libostree finds it, by the identity of the root directory: the boot link on the command line is
        removed as soon as another deployment is finalized. On composefs the root is not the deployment's directory;
        then ostree-prepare-root left its identity in /run/ostree-booted.
        """
        wanted = {_device_and_inode(self.top), _backing_root(self.top / "run/ostree-booted")}
        for folder in sorted(self.sysroot.glob("ostree/deploy/*/deploy/*")):
            if folder.is_dir() and _device_and_inode(folder) in wanted:
                return folder.parent.parent.name, folder.name
        return boot.deployment_of(boot.command_line(self.top / "proc"), self.sysroot)

    def pending(self) -> str:
        """Name of the finalized deployment that the next boot enters and this one did not, "" when there is none."""
        osname, booted = self.booted()
        found = boot.entries(self.boot, self.sysroot)
        if not found or found[0].osname != osname or found[0].deployment == booted:
            return ""
        return found[0].deployment

    def options_of(self, name: str) -> str:
        """The kernel command line that the boot entry of a deployment has, "" when it has none."""
        found = boot.entries(self.boot, self.sysroot)
        return next((entry.options for entry in found if entry.deployment == name), "")

    def staged(self) -> Optional[StagedDeployment]:
        """The staged deployment. Raises Broken when libostree's file cannot be understood."""
        path = self.top / _STAGED
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise from_os_error(error, "read", path) from error
        try:
            value: dict[str, Any] = GLib.Variant.new_from_bytes(
                GLib.VariantType("a{sv}"), GLib.Bytes.new(content), False
            ).unpack()
            target = value["target"]
            locked = bool(value.get("locked", False)) or (self.top / _LOCK_FILE).exists()
            return StagedDeployment(
                target["name"], target["osname"], target.get("bootcsum", ""), tuple(value.get("kargs", ())), locked
            )
        except (KeyError, TypeError) as error:
            raise Broken(
                f"cannot understand the staged deployment in {path}: {error!r}", "`rpm-ostree cleanup -p` removes it"
            ) from error

    def root_of(self, name: str) -> Root:
        """The tree of a deployment, and the /var that it shares with the others: the stateroot's, unless another file
        system is mounted there."""
        osname, _booted = self.booted()
        root = Root.of_deployment(self.sysroot, osname, name)
        mounted = self.top / "var"
        return Root(root.path, mounted) if os.path.ismount(mounted) else root

    def origin_of(self, name: str) -> str:
        """The container image reference in a deployment's origin file, "" when it has none."""
        osname, _booted = self.booted()
        path = self.sysroot / "ostree/deploy" / osname / "deploy" / f"{name}.origin"
        try:
            lines = path.read_text(errors="replace").splitlines()
        except OSError as error:
            raise from_os_error(error, "read", path) from error
        key = "container-image-reference="
        return next((line[len(key) :].strip() for line in lines if line.startswith(key)), "")

    # -- effects ----------------------------------------------------------------------------------------------------

    def unlock(self) -> None:
        """Let the staged deployment be finalized; both places where a lock can be are looked at (3.3)."""
        staged = self.staged()
        if staged is None or not staged.locked:
            return
        with contextlib.suppress(FileNotFoundError):
            (self.top / _LOCK_FILE).unlink()
        staged = self.staged()
        if staged is not None and staged.locked:
            _run(["ostree", "admin", "lock-finalization", "--unlock"], "unlock the staged deployment")
        staged = self.staged()
        if staged is not None and staged.locked:
            raise Broken(
                "cannot unlock the staged deployment: it is still locked",
                "try `ostree admin lock-finalization --unlock`",
            )

    def lock(self) -> None:
        """Keep the next shutdown from finalizing what is staged: both kinds of libostree honour the file (3.3)."""
        path = self.top / _LOCK_FILE
        try:
            path.touch(mode=0o640)
        except OSError as error:
            raise from_os_error(error, "lock the staged deployment with", path) from error

    def busy(self) -> bool:
        """Whether somebody (ostree, bootc, rpm-ostreed) holds the sysroot's lock; it is not one of flock(2) (2.9)."""
        try:
            with open(self.top / _SYSROOT_LOCK, "rb") as file:
                query = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
                answer = fcntl.fcntl(file.fileno(), _F_OFD_GETLK, query)
        except OSError:  # it is there only while somebody holds it
            return False
        return bool(struct.unpack("hhqqi4x", answer)[0] != fcntl.F_UNLCK)

    def finalize(self, systemd: Systemd, name: str) -> None:
        """Merge /etc and write the boot entry of `name` now, with the node up: the unit's stop does it (vm.md 10).

        Raises Broken with libostree's own text when it failed, Held for want of room: the staged deployment is gone
        then (5.2, step 5).
        """
        before = self.stamp()
        result = self._stop_finalizer(systemd)
        if self.pending() == name:
            return
        text = boot.finalize_failure(self.boot) if self.stamp() != before else ""
        if text:
            self._forget_failure()
        self._announce()
        self._check_room(text or f"the job ended with {result!r}")
        if self.staged() is not None:
            raise Transient(
                f"cannot finalize: {FINALIZE_UNIT} stopped with {result!r} and left the deployment staged",
                f"see `journalctl -u {FINALIZE_UNIT}`",
            )
        raise Broken(
            f"cannot finalize the staged deployment: {text or f'the job ended with {result!r}'}",
            f"see `journalctl -u {FINALIZE_UNIT}`",
        )

    def _stop_finalizer(self, systemd: Systemd) -> str:
        """What the end of the job was. Where there is no such unit, or it was not active (it is masked, or started late
        by its .path unit; TXN-07, TXN-41), its program is run."""
        try:
            result = systemd.run_job("Stop", FINALIZE_UNIT, FINALIZE_TIMEOUT)
        except Broken as error:
            result = error.sentence
        if self.staged() is not None and not self.pending():
            try:
                process.run(["ostree", "admin", "finalize-staged"], "finalize", FINALIZE_TIMEOUT, Broken)
            except Broken as error:
                result = error.sentence
        return result

    def _check_room(self, text: str) -> None:
        """On a full disk libostree cannot even leave its words (5.6). Raises Held with the numbers."""
        for place in (self.boot, self.sysroot):
            found = os.statvfs(place)
            left = found.f_bavail * found.f_frsize
            if left < _TIGHT or (found.f_files and not found.f_favail):
                raise Held(
                    HoldReason.SPACE,
                    f"cannot finalize: {text}; {left >> 10} KiB and {found.f_favail} inodes are free on {place}",
                    "make room there",
                )

    def _announce(self) -> None:
        """rpm-ostreed takes what is gone for staged until it sees a new time stamp there, which libostree writes only
        after a success: the next transaction would build on it, or change nothing."""
        place = self.sysroot / "ostree/deploy"
        with contextlib.suppress(Failure):
            with_writable(self.sysroot, lambda: os.utime(place))

    def stamp(self) -> str:
        """What tells the trace of one failed finalization from the next one's, "" where there is none (TXN-44)."""
        try:
            found = (self.boot / boot.FINALIZE_FAILURE).stat()
        except OSError:
            return ""
        return f"{found.st_ino}:{found.st_mtime_ns}"

    def _forget_failure(self) -> None:
        """Ours was seen and told. Left where it is, it would fail ostree-boot-complete.service after the next boot,
        which may be that of the target (TXN-44)."""
        stamp = self.boot / boot.FINALIZE_FAILURE
        with contextlib.suppress(Failure):
            with_writable(self.boot if os.path.ismount(self.boot) else self.sysroot, stamp.unlink)


def _device_and_inode(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_dev, found.st_ino


def _backing_root(path: Path) -> Optional[tuple[int, int]]:
    """Device and inode of the deployment below a composefs root (ostree-prepare-root, `backing-root-device-inode`)."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    if not content:
        return None
    value = GLib.Variant.new_from_bytes(GLib.VariantType("a{sv}"), GLib.Bytes.new(content), False).unpack()
    found = value.get("backing-root-device-inode")
    return (int(found[0]), int(found[1])) if found else None


def _run(argv: list[str], doing: str) -> None:
    process.run(argv, doing, _TIMEOUT, Broken)
