"""Commands in the guest: a session of their own each, its end told on the journal's console."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Optional
from uuid import uuid4

from tests.stand.machine import CommandFailed, MachineError
from vmlab.guestagent import AgentError, AgentGone, ExecStatus
from vmlab.qemu import Qemu, monotonic_left

ENVIRONMENT = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root",
               "USER": "root", "LANG": "C.UTF-8"}  # fmt: skip
# The agent has no event for the end of a command; a line on the console is one. It is asked now and then all the same,
# for guests without that console.
_CONSOLE = "/dev/hvc0"
_ASK_EVERY = 2.0
# The line comes a moment before the shell that prints it has ended.
_ASK_AFTER_LINE = 0.02
_SCRIPT = f"""\
t=$1; cd "$2" || exit 125; k=$3; shift 3
if [ -n "$k" ]; then mkdir -p "${{k%/*}}"; "$@" >"$k.out" 2>"$k.err"; else "$@"; fi; r=$?
[ -c {_CONSOLE} ] && printf '\\n%s\\n' "$t" >{_CONSOLE}
exit $r
"""
_KILL = "kill -s {number} -- -{pid}"


class GuestProcess:
    """A command that runs in the guest. `pid` is the guest's, and the id of its session and process group."""

    def __init__(self, qemu: Qemu, argv: Sequence[str], env: Optional[Mapping[str, str]] = None, cwd: str = "/",
                 stdin: Optional[bytes] = None, keep: str = "") -> None:  # fmt: skip
        self.args = list(argv)
        self.returncode: Optional[int] = None
        self.out = self.err = b""
        self.gone = False
        self.keep = keep
        self._qemu = qemu
        self._token = f"vmlab: end of {uuid4()}"
        self._place = qemu.journal.mark()
        self._told = False
        words = ["/usr/bin/setsid", "/bin/sh", "-c", _SCRIPT, "vmlab", self._token, cwd, keep, *argv]
        environment = {**ENVIRONMENT, **(env or {})}
        try:
            self.pid = qemu.agent.execute(words, [f"{name}={value}" for name, value in environment.items()], stdin)
        except AgentGone:
            raise
        except AgentError as error:
            raise MachineError(f"cannot run {self.args!r} in the guest: {error}{qemu.tails()}") from None

    def poll(self) -> Optional[int]:
        """The status if it has ended. When the guest goes down with it, that counts as a SIGKILL; `gone` tells."""
        if self.returncode is None:
            try:
                self._take(self._qemu.agent.status(self.pid))
            except AgentGone:
                self.gone, self.returncode = True, -signal.SIGKILL
            except AgentError as error:
                raise MachineError(f"cannot ask for {self.args!r}: {error}{self._qemu.tails()}") from None
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Wait for the end. Raises subprocess.TimeoutExpired."""
        deadline = time.monotonic() + timeout
        while True:
            left = monotonic_left(deadline)
            with self._qemu.changed:
                if self._told:
                    self._qemu.changed.wait_for(lambda: not self._qemu.agent.port_open, min(left, _ASK_AFTER_LINE))
                else:
                    self._qemu.changed.wait_for(self._may_have_ended, min(left, _ASK_EVERY))
            status = self.poll()
            if status is not None:
                return status
            if left <= 0:
                raise subprocess.TimeoutExpired(self.args, timeout)

    def send_signal(self, number: int) -> None:
        """Signal the command and its children (not those that left its process group)."""
        if self.poll() is None:
            killer = GuestProcess(self._qemu, ["sh", "-c", _KILL.format(number=int(number), pid=self.pid)])
            said = killer.finish(60, check=False)
            if said.returncode != 0 and self.poll() is None:
                raise MachineError(f"cannot signal {self.args!r} in the guest: {said.stderr}")

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def result(self) -> subprocess.CompletedProcess[str]:
        """What subprocess.run() would return."""
        texts = (data.decode(errors="replace") for data in (self.out, self.err))
        return subprocess.CompletedProcess(self.args, self.returncode or 0, *texts)

    def finish(self, timeout: float, check: bool) -> subprocess.CompletedProcess[str]:
        """Wait for it as `Machine.run` does. Raises CommandFailed; after `timeout` it is killed first."""
        try:
            self.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            self.wait(60)
            raise CommandFailed(self.result(), f"command did not end within {timeout:g} s") from None
        if check and self.returncode != 0:
            why = "the guest went down during the command" if self.gone else f"status {self.returncode}"
            raise CommandFailed(self.result(), f"command failed: {why}")
        return self.result()

    def _may_have_ended(self) -> bool:
        lines = self._qemu.journal.lines
        while self._place < len(lines):
            # Alone: the agent itself logs each command that it runs, with this word among the rest.
            self._told = self._told or lines[self._place].strip() == self._token
            self._place += 1
        return self._told or not self._qemu.agent.port_open

    def _take(self, status: ExecStatus) -> None:
        if not status.exited:
            return
        # The shell in between reports a signal as 128 + number.
        self.returncode = 128 - status.returncode if status.returncode > 128 else status.returncode
        self.out, self.err = status.out, status.err
        if self.keep:
            self.out, self.err = (self._qemu.agent.read_file(f"{self.keep}.{end}") for end in ("out", "err"))


@dataclass(frozen=True)
class Found:
    """One path of a listing. `content` is a file's SHA-256, a link's target, else empty."""

    kind: str
    mode: str
    owner: str
    content: str


# Two programs for a whole tree: starting one is what TCG is slowest at.
LISTING = r"""
find "$@" -printf '%y\0%m\0%U:%G\0%l\0%p\0' 2>/dev/null; printf '\0files\0'
find "$@" -type f -print0 2>/dev/null | xargs -0r sha256sum -z --
"""


def parse_listing(data: bytes) -> dict[str, Found]:
    """Read what LISTING prints."""
    head, _, tail = data.partition(b"\0files\0")
    hashes = {}
    for line in tail.decode(errors="surrogateescape").split("\0"):
        if line:
            digest, _, path = line.partition("  ")
            hashes[path] = digest
    words = head.decode(errors="surrogateescape").split("\0")
    found = {}
    for at in range(0, len(words) - 4, 5):
        kind, mode, owner, target, path = words[at : at + 5]
        found[path] = Found(kind, mode, owner, hashes.get(path, "") if kind == "f" else target)
    return found
