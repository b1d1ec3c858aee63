"""One QEMU process from power on until it ends; a reboot of the guest ends it, too (-no-reboot).

It has one virtual CPU only: with more, TCG's guests die of `Oops: int3` now and then.
"""

from __future__ import annotations

import enum
import os
import re
import shlex
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Optional, Union

from tests.stand.machine import MachineError
from vmlab.console import PANIC, Console
from vmlab.guestagent import Agent
from vmlab.kvm import CPU, QEMU, TCG
from vmlab.qmp import Qmp, QmpError

AGENT_PORT = "org.qemu.guest_agent.0"
START_TIMEOUT = 60.0
_UNLIMITED = 1 << 40


class Ending(enum.Enum):
    """How a machine ended."""

    REBOOT = "reboot"
    POWEROFF = "poweroff"
    PANIC = "panic"
    KILLED = "killed"
    LOST = "lost"
    """QEMU ended and nobody had asked for it."""


@dataclass(frozen=True)
class Drive:
    """The disk: a raw file. With `log` QEMU's blklogwrites notes there, in order, all writes and flushes.

    `log_sector` is the unit of that log in bytes. A log that is there already is gone on with, so that the boots of a
    machine are one story; after a SIGKILL it lacks what QEMU wrote since the last flush.
    """

    path: Path
    log: Optional[Path] = None
    log_sector: int = 512

    def options(self) -> list[str]:
        """QEMU's options. The cache is write-back, and the guest knows that it must flush."""
        cache = "cache.direct=off,cache.no-flush=off"
        if self.log is None:
            blocks = [f"driver=file,node-name=store,filename={_escaped(self.path)},{cache}",
                      "driver=raw,node-name=disk,file=store"]  # fmt: skip
        else:
            blocks = [f"driver=file,node-name=store,filename={_escaped(self.path)},{cache}",
                      "driver=raw,node-name=rawstore,file=store",
                      f"driver=file,node-name=log,filename={_escaped(self.log)},{cache}",
                      "driver=blklogwrites,node-name=disk,file=rawstore,log=log,"
                      + self._log_begin()]  # fmt: skip
        options = [word for block in blocks for word in ("-blockdev", block)]
        return [*options, "-device", "virtio-blk-pci,drive=disk,write-cache=on"]

    def _log_begin(self) -> str:
        """What another QEMU has begun would be overwritten without `log-append`, which takes no size of sectors."""
        begun = self.log is not None and self.log.is_file() and self.log.stat().st_size > 0
        return "log-append=on" if begun else f"log-sector-size={self.log_sector}"


@dataclass(frozen=True)
class Start:
    """What a machine starts with. `restore` is a file with the RAM of a stopped one with the same devices."""

    drive: Drive
    kernel: Optional[Path] = None
    initrd: Optional[Path] = None
    append: str = ""
    accel: str = TCG
    memory: int = 512
    restore: Optional[Path] = None
    extra: Sequence[str] = ()

    def argv(self, serial: int, journal: int, agent: int, qmp: int) -> list[str]:
        """The command; the numbers are inherited sockets."""
        argv = [QEMU, "-nodefaults", "-no-user-config", "-display", "none", "-machine", "pc", "-cpu", CPU,
                "-accel", self.accel, "-smp", "1", "-m", str(self.memory), "-rtc", "base=utc",
                "-no-reboot"]  # fmt: skip
        if self.kernel is not None:
            argv += ["-kernel", str(self.kernel), "-append", self.append]
        if self.initrd is not None:
            argv += ["-initrd", str(self.initrd)]
        argv += self.drive.options()
        for name, descriptor in (("serial", serial), ("journal", journal), ("agent", agent), ("qmp", qmp)):
            argv += ["-chardev", f"socket,id={name},fd={descriptor}"]
        argv += ["-serial", "chardev:serial", "-mon", "chardev=qmp,mode=control", "-device", "pvpanic",
                 "-netdev", "user,id=net", "-device", "virtio-net-pci,netdev=net,romfile=",
                 "-device", "virtio-serial-pci,max_ports=8", "-device", "virtconsole,chardev=journal,nr=0",
                 "-device", f"virtserialport,chardev=agent,name={AGENT_PORT},nr=1,id=agentport"]  # fmt: skip
        if self.restore is not None:
            argv += ["-incoming", "defer"]
        return [*argv, *self.extra]


class Qemu:
    """A running machine. `folder` gets serial.log, journal.log, qmp.log, qemu.log and the command line.

    `changed` is notified at everything that the machine says or does. All waits raise MachineError when they end
    without success; its text ends with the tail of both logs.
    """

    def __init__(self, start: Start, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.changed = threading.Condition()
        self.ending: Optional[Ending] = None
        self._killed = False
        self._closing = threading.Lock()
        if start.drive.log is not None:
            start.drive.log.touch()
        pairs = [socket.socketpair() for _ in range(4)]
        ours, theirs = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        argv = start.argv(*(end.fileno() for end in theirs))
        (folder / "qemu.sh").write_text(shlex.join(argv) + "\n")
        try:
            with (folder / "qemu.log").open("ab") as log:
                self._process = _spawn(argv, log, [end.fileno() for end in theirs])
        except BaseException:
            for end in ours:
                end.close()
            raise
        finally:
            for end in theirs:
                end.close()
        self.serial = Console(ours[0], folder / "serial.log", self.changed)
        self.journal = Console(ours[1], folder / "journal.log", self.changed)
        self.agent = Agent(ours[2], self.changed)
        self.qmp = Qmp(ours[3], folder / "qmp.log", self.changed)
        self._watch = threading.Thread(target=self._follow_events, name="qemu events", daemon=True)
        self._watch.start()
        try:
            self.qmp.negotiate(START_TIMEOUT)
            if start.restore is not None:
                self._restore(start.restore)
        except BaseException as error:
            self.kill()
            if isinstance(error, QmpError):
                raise MachineError(f"QEMU does not start: {error}{self.tails()}") from None
            raise

    # -- waiting ------------------------------------------------------------------------------------------------------

    def wait(self, done: Callable[[], Any], timeout: float, what: str) -> None:
        """Wait until `done()` holds. `what` says what is missing otherwise: "the guest agent", "a line with …"."""
        with self.changed:
            self.changed.wait_for(lambda: done() or not self.qmp.open, timeout)
            if done():
                return
        if not self.qmp.open:
            how = self.wait_end(10.0)
            raise MachineError(f"the machine ended ({how.value}) before there was {what}{self.tails()}")
        raise MachineError(f"no sign of {what} within {timeout:g} s{self.tails()}")

    def wait_line(self, pattern: Union[str, re.Pattern[str]], timeout: float, since: int = 0) -> str:
        """Wait for a line of the journal."""
        expression = re.compile(pattern)
        place, found = since, ""

        def done() -> bool:
            nonlocal place, found
            while place < len(self.journal.lines) and not found:
                if expression.search(self.journal.lines[place]):
                    found = self.journal.lines[place]
                place += 1
            return bool(found)

        self.wait(done, timeout, f"a line of the journal with {expression.pattern!r}")
        return found

    def wait_agent(self, timeout: float) -> None:
        """Wait until the guest agent has opened its port."""
        self.wait(lambda: self.agent.port_open, timeout, "the guest agent")

    def wait_end(self, timeout: float) -> Ending:
        """Wait until the machine has ended and say how."""
        with self.changed:
            self.changed.wait_for(lambda: not self.qmp.open, timeout)
        if self.qmp.open:
            raise MachineError(f"the machine did not end within {timeout:g} s{self.tails()}")
        return self._reap()

    # -- power --------------------------------------------------------------------------------------------------------

    @property
    def running(self) -> bool:
        """Whether the process is there."""
        return self.ending is None and self.qmp.open

    @property
    def pid(self) -> int:
        """QEMU's process."""
        return self._process.pid

    def cpu_seconds(self) -> float:
        """What QEMU has used of the host's processors so far; 0 once it is gone."""
        try:
            fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        except FileNotFoundError:
            return 0.0
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def kill(self) -> None:
        """SIGKILL. What the guest has written is in the host's page cache and stays; its own caches are lost."""
        self._killed = self._killed or self._process.poll() is None
        self._process.kill()
        self._reap()

    def stop(self) -> None:
        """Halt the virtual CPU."""
        self.qmp.execute("stop")

    def cont(self) -> None:
        """Let the virtual CPU run."""
        self.qmp.execute("cont")

    def save(self, target: Path, timeout: float = 120.0) -> None:
        """Write the RAM of a stopped machine to a file; `cont` lets it run on."""
        self._migrate("migrate", f"exec:cat > {shlex.quote(str(target))}", timeout)

    def _restore(self, source: Path, timeout: float = 120.0) -> None:
        self._migrate("migrate-incoming", f"exec:cat {shlex.quote(str(source))}", timeout)
        self.cont()

    def _migrate(self, command: str, uri: str, timeout: float) -> None:
        self.qmp.execute("migrate-set-capabilities", {"capabilities": [{"capability": "events", "state": True}]})
        self.qmp.execute("migrate-set-parameters", {"max-bandwidth": _UNLIMITED})
        with self.changed:
            since = len(self.qmp.events)
        self.qmp.execute(command, {"uri": uri})

        def status() -> str:
            marks = [event["data"]["status"] for event in self.qmp.events[since:] if event["event"] == "MIGRATION"]
            return str(marks[-1]) if marks else ""

        self.wait(lambda: status() in ("completed", "failed"), timeout, f"the end of `{command}`")
        if status() == "failed":
            raise MachineError(f"cannot {command} {uri}{self.tails()}")

    # -- inside -------------------------------------------------------------------------------------------------------

    def _follow_events(self) -> None:
        """Tell the agent what its port does; in a thread of its own so that nobody need wait for it."""
        place = 0
        while True:
            with self.changed:
                while place >= len(self.qmp.events) and self.qmp.open:
                    self.changed.wait()
                events, place = self.qmp.events[place:], len(self.qmp.events)
                ended = not self.qmp.open
            for event in events:
                if event["event"] == "VSERPORT_CHANGE" and event["data"]["id"] == "agentport":
                    self.agent.set_port(bool(event["data"]["open"]))
            if ended:
                self.agent.set_port(False)
                return

    def _reap(self) -> Ending:
        with self._closing:
            if self.ending is not None:
                return self.ending
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(20)
            self.qmp.close()
            self.serial.finish()
            self.journal.finish()
            self.agent.close()
            self._watch.join(5)
            self.ending = self._judge()
            return self.ending

    def _judge(self) -> Ending:
        shutdown = self.qmp.event("SHUTDOWN")
        reason = shutdown["data"].get("reason") if shutdown else None
        # A kernel without pvpanic's driver only says it on its console before it resets the machine.
        if self.qmp.event("GUEST_PANICKED") or reason == "guest-panic" or self.serial.find(PANIC):
            return Ending.PANIC
        if reason == "guest-reset":
            return Ending.REBOOT
        if reason == "guest-shutdown":
            return Ending.POWEROFF
        return Ending.KILLED if self._killed or reason == "host-signal" else Ending.LOST

    def tails(self) -> str:
        """The end of what the machine said, for an error's text."""
        said = (self.folder / "qemu.log").read_text(errors="replace").strip()[-2000:]
        parts = (("qemu", said), ("serial console", self.serial.tail()), ("journal", self.journal.tail()))
        return f"\nlogs: {self.folder}" + "".join(f"\n--- {name} ---\n{text}" for name, text in parts if text)


def _spawn(argv: Sequence[str], log: IO[bytes], descriptors: Sequence[int]) -> subprocess.Popen[bytes]:
    # setpriv: the machine dies with the thread that started it, however the test ends.
    return subprocess.Popen(
        ["setpriv", "--pdeathsig", "KILL", "--", *argv], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        pass_fds=descriptors, start_new_session=True, env={"PATH": os.environ.get("PATH", os.defpath)},
    )  # fmt: skip


def _escaped(path: Path) -> str:
    return str(path).replace(",", ",,")


def monotonic_left(deadline: float) -> float:
    """Seconds until a deadline of time.monotonic(), not below 0."""
    return max(0.0, deadline - time.monotonic())
