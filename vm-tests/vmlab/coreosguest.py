"""A machine that boots itself from a disk image: firmware, the disk's boot loader, the disk's Ignition. See `coreos`.

It has the same public surface as `tests.stand.machine.Machine`, as far as that makes sense for a disk which nobody
looks into from outside: its file systems (XFS) are the guest's own matter. Commands go through `rootshell`.
"""

from __future__ import annotations

import json
import re
import socket
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Optional, Union

from tests.stand.machine import Down, MachineError
from tests.stand.sysroot import Deployment, NoSuchDeployment, Sysroot
from vmlab import coreos, rootshell
from vmlab.bootmarks import HOPELESS, BootMarks, Seen
from vmlab.console import Console
from vmlab.ignition import Config
from vmlab.kvm import CPU, KVM, QEMU, TCG
from vmlab.rootshell import Shell, ShellGone

MEMORY = 3072
"""MiB; RHCOS' initramfs and rpm-ostree's imports need it."""

BOOT_TIMEOUT = 1800.0
"""Seconds: five times what a first boot takes under emulation, Ignition and its SELinux relabelling included."""

BOOTS_IN_A_ROW = 5
_TAIL = 40


class CoreOs:
    """One machine. `folder` keeps its overlay, its Ignition config and its logs; `config` is for the first boot.

    `accel` is QEMU's (`kvm.accelerator`). `more` are further arguments for QEMU, at every boot.
    """

    def __init__(
        self,
        image: coreos.DiskImage,
        folder: Path,
        config: Optional[Config] = None,
        accel: str = TCG,
        more: Sequence[str] = (),
    ) -> None:
        self.folder, self.accel, self.config = folder.resolve(), accel, config
        self.folder.mkdir(parents=True, exist_ok=True)
        self.disk = coreos.overlay(image, self.folder / "disk.qcow2")
        self.boots: list[str] = []
        self._more = list(more)
        self._process: Optional[subprocess.Popen[bytes]] = None
        self._changed = threading.Condition()
        self._while_up = ExitStack()

    # -- up and down --------------------------------------------------------------------------------------------------

    @property
    def up(self) -> bool:
        """True from a boot's begin until its end was seen."""
        return self._process is not None

    @property
    def boot_id(self) -> str:
        """The id of this boot."""
        if not self.boots:
            raise MachineError("the machine has never been booted")
        return self.boots[-1]

    def boot(self, timeout: float = BOOT_TIMEOUT, follow: bool = True) -> int:
        """Boot what the disk's boot loader chooses and wait until systemd has started all; the answer counts the boots.

        Ignition's own reboot (kernel arguments), and the early unit's, are followed. Raises MachineError.
        """
        for count in range(1, BOOTS_IN_A_ROW + 1):
            self.start_boot()
            how = self.wait_up(timeout)
            if how is None:
                return count
            if how is not Down.REBOOT or not follow:
                raise MachineError(f"the machine went down by {how.value} while it booted{self._tail()}")
        raise MachineError(f"the machine rebooted {BOOTS_IN_A_ROW} times in a row while it booted{self._tail()}")

    def start_boot(self) -> None:
        """Begin to boot and return at once; `wait_up` tells how it ends."""
        if self.up:
            raise MachineError("the machine is up; reboot() or power_cut() it first")
        with ExitStack() as undo:
            serial = self.folder / "serial.log"
            self._begin = serial.stat().st_size if serial.exists() else 0
            ends = {name: self._pair(undo) for name in ("serial", "journal", "shell", "qmp")}
            argv = self._arguments({name: theirs.fileno() for name, (_, theirs) in ends.items()}, undo)
            log = undo.enter_context((self.folder / "qemu.log").open("ab"))
            self._process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                pass_fds=[theirs.fileno() for _, theirs in ends.values()],
            )  # fmt: skip
            for _, theirs in ends.values():
                theirs.close()
            self.serial, self._journal, self._qmp = (
                Console(ends[name][0], self.folder / f"{name}.log", self._changed)
                for name in ("serial", "journal", "qmp")
            )
            for console in (self.serial, self._journal, self._qmp):
                undo.callback(console.finish)
            self.shell = Shell(ends["shell"][0])
            undo.callback(self._kill)
            with suppress(BrokenPipeError):  # QEMU has ended already; `wait_up` says so.
                ends["qmp"][0].sendall(b'{"execute": "qmp_capabilities"}\n')
            self._while_up = undo.pop_all()

    @staticmethod
    def _pair(undo: ExitStack) -> tuple[socket.socket, socket.socket]:
        ours, theirs = socket.socketpair()
        undo.callback(theirs.close)
        undo.callback(ours.close)
        return ours, theirs

    def _arguments(self, ends: Mapping[str, int], undo: ExitStack) -> list[str]:
        chardevs = [word for name, end in ends.items() for word in ("-chardev", f"socket,id={name},fd={end}")]
        return [
            QEMU, "-nodefaults", "-no-user-config", "-M", "pc", "-accel", self.accel, "-cpu", CPU,
            # One CPU under emulation: with more the guest dies of `Oops: int3` now and then.
            "-smp", "2" if self.accel == KVM else "1", "-m", str(MEMORY), "-display", "none", "-no-reboot",
            "-drive", f"file={self.disk},format=qcow2,if=none,id=disk,cache=writeback,discard=unmap",
            "-device", "virtio-blk-pci,drive=disk",
            "-netdev", "user,id=net", "-device", "virtio-net-pci,netdev=net", "-device", "virtio-rng-pci",
            *chardevs, "-mon", "chardev=qmp,mode=control", "-serial", "chardev:serial",
            "-device", "virtio-serial-pci,max_ports=8", "-device", "virtconsole,chardev=journal,nr=0",
            "-device", f"virtserialport,chardev=shell,name={rootshell.PORT},nr=2",
            *self._ignition(undo), *self._more,
        ]  # fmt: skip

    def _ignition(self, undo: ExitStack) -> list[str]:
        """Before the first boot that came up; until then Ignition may ask again."""
        if self.boots or self.config is None:
            return []
        path = self.folder / "config.ign"
        path.write_text(undo.enter_context(coreos.served(self.config.text())))
        return coreos.ignition_arguments(path)

    def wait_up(self, timeout: float = BOOT_TIMEOUT) -> Optional[Down]:
        """Wait until the boot is complete; the answer is None, or how the machine went down instead.

        Raises MachineError at once when the console shows that nothing will come any more.
        """
        deadline = time.monotonic() + timeout
        while True:
            try:
                peer = self.shell.wait_ready(min(5.0, max(0.1, deadline - time.monotonic())))
                break
            except ShellGone as error:
                if not self.serial.open:
                    return self.wait_down(30)
                hopeless = [seen for seen in self.seen() if seen.mark in HOPELESS]
                if hopeless:
                    raise MachineError(
                        f"the boot failed: {hopeless[0].mark.value}: {hopeless[0].line}{self._tail()}"
                    ) from error
                if time.monotonic() >= deadline:
                    raise MachineError(
                        f"{error}; the console came as far as: {self._reached()}{self._tail()}"
                    ) from error
        self.boots.append(peer.boot_id)
        try:
            # Its status tells of failed units; those are for who looks.
            left = max(1.0, deadline - time.monotonic())
            self.run(["systemctl", "is-system-running", "--wait"], left, check=False)
        except ShellGone:
            return self.wait_down(60)
        return None

    def wait_down(self, timeout: float = 600.0) -> Down:
        """Wait until the machine has gone down by itself and say how. Raises MachineError after `timeout`."""
        if self._process is None:
            raise MachineError("the machine is down already")
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise MachineError(
                f"the machine does not go down within {timeout:g} s: {self._reached()}{self._tail()}"
            ) from None
        qmp = self._qmp
        self._while_up.close()
        return how_it_ended(qmp.text())

    def ask_reboot(self) -> None:
        """Ask for an orderly reboot and return at once."""
        self.shell.tell(["systemctl", "reboot"])

    def reboot(self, timeout: float = BOOT_TIMEOUT) -> None:
        """An orderly reboot and the boot after it."""
        self.ask_reboot()
        how = self.wait_down(timeout)
        if how is not Down.REBOOT:
            raise MachineError(f"the machine should have rebooted, but it went down by {how.value}{self._tail()}")
        self.boot(timeout)

    def power_off(self, timeout: float = 600.0) -> None:
        """An orderly end."""
        self.shell.tell(["systemctl", "poweroff"])
        how = self.wait_down(timeout)
        if how is not Down.POWEROFF:
            raise MachineError(f"the machine should be off, but it went down by {how.value}{self._tail()}")

    def power_cut(self) -> None:
        """Kill QEMU: all that the guest did not flush may be lost; what QEMU wrote is in the host's page cache."""
        if not self.up:
            raise MachineError("the machine is down already")
        self._while_up.close()

    def close(self) -> None:
        """Kill the machine if it is up; its folder stays."""
        self._while_up.close()

    def __enter__(self) -> CoreOs:
        return self

    def __exit__(
        self, kind: Optional[type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        self.close()

    # -- inside -------------------------------------------------------------------------------------------------------

    def run(
        self,
        argv: Sequence[str],
        timeout: float = 120.0,
        check: bool = True,
        env: Optional[Mapping[str, str]] = None,
        input: Optional[str] = None,
        cwd: str = "/",
    ) -> subprocess.CompletedProcess[str]:
        """See `rootshell.Shell.run`."""
        if not self.up:
            raise MachineError("the machine is down")
        return self.shell.run(argv, timeout, check, env, input, cwd)

    def read(self, path: str) -> str:
        """The text of a file of the guest."""
        return self.shell.read_bytes(path).decode()

    def read_bytes(self, path: str) -> bytes:
        """The content of a file of the guest."""
        return self.shell.read_bytes(path)

    def write(self, path: str, text: Union[str, bytes], mode: int = 0o644) -> None:
        """Write a file in the guest, in place; parents are made."""
        self.shell.write(path, text, mode)

    def exists(self, path: str) -> bool:
        """True when the path, its last link not followed, exists in the guest."""
        return self.run(["stat", "--", path], check=False).returncode == 0

    def journal(self, unit: str = "") -> str:
        """What the journal kept of `unit`, or of all units, over all boots."""
        only = ["--unit", unit] if unit else []
        return self.run(["journalctl", "--no-pager", "--output=short-monotonic", *only]).stdout

    def mark(self) -> int:
        """The place after what this boot's journal said so far."""
        return self._journal.mark()

    def hear(self, pattern: str, timeout: float = BOOT_TIMEOUT, since: int = 0) -> Optional[tuple[int, str]]:
        """As `guest.Guest.hear`."""
        try:
            return self._journal.hear(pattern, timeout, since)
        except TimeoutError as error:
            raise MachineError(f"{error}{self._tail()}") from None

    def wait_for(self, pattern: Union[str, re.Pattern[str]], timeout: float = BOOT_TIMEOUT, since: int = 0) -> str:
        """Wait for a line of this boot's journal, as hvc0 shows it; `since` is a place from `mark`.

        Raises MachineError when it does not come in time, or the machine goes down before.
        """
        deadline = time.monotonic() + timeout
        with self._changed:
            while True:
                open_yet = self._journal.open
                line = self._journal.find(pattern, since)
                left = deadline - time.monotonic()
                if line is not None:
                    return line
                if not open_yet or left <= 0:
                    break
                since = max(since, self._journal.mark())
                self._changed.wait(left)
        raise MachineError(f"the journal did not show {pattern!r} within {timeout:g} s{self._tail()}")

    def seen(self) -> list[Seen]:
        """What this boot's console told so far."""
        with (self.folder / "serial.log").open("rb") as log:
            log.seek(self._begin)
            return BootMarks().feed(log.read())

    def deployments(self) -> list[Deployment]:
        """What `ostree admin status` says, in its order."""
        return Sysroot.parse_status(self.run(["ostree", "admin", "status"]).stdout)

    def booted(self) -> Deployment:
        """The deployment that the machine runs. Raises NoSuchDeployment."""
        for deployment in self.deployments():
            if deployment.booted:
                return deployment
        raise NoSuchDeployment("no deployment is booted")

    # -- what is said of a failure ------------------------------------------------------------------------------------

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait(20)

    def _reached(self) -> str:
        seen = self.seen()
        return seen[-1].line if seen else "nothing that could be recognized"

    def _tail(self) -> str:
        parts = [f"\n--- end of {console.path} ---\n{console.tail(_TAIL)}" for console in (self.serial, self._journal)]
        qemu = (self.folder / "qemu.log").read_text(errors="replace")
        return "".join(parts) + (f"\n--- QEMU ---\n{qemu[-4000:]}" if qemu else "")


def how_it_ended(qmp: str) -> Down:
    """How a guest went down, by the SHUTDOWN event that QEMU sent last (`-no-reboot` makes a reset end QEMU, too)."""
    reason = ""
    for line in qmp.splitlines():
        try:
            event: Any = json.loads(line)
        except ValueError:
            continue  # QEMU was killed in the middle of it.
        if isinstance(event, dict) and event.get("event") == "SHUTDOWN":
            reason = str(event.get("data", {}).get("reason"))
    return {"guest-reset": Down.REBOOT, "guest-shutdown": Down.POWEROFF}.get(reason, Down.CRASH)
