"""A root shell in a guest over one byte stream, for systems that have no guest agent that may run commands.

Fedora CoreOS ships no qemu-guest-agent (fedora-coreos-tracker issue 74). RHCOS does (openshift/os, common.yaml), but
SELinux confines it there (virt_qemu_ga_selinux(8)). bash and a second virtio serial port are everywhere, so
`rootshell.sh` is all that a guest needs, and Ignition puts it there.

What is said, each frame on a line of its own that begins with the mark:

    host:   @vmlab hello TOKEN
            @vmlab run TOKEN N M          then N and M characters of base64: a bash script, its standard input
            @vmlab kill TOKEN
    guest:  @vmlab ready INSTANCE BOOT-ID                    once, when it starts
            @vmlab hello TOKEN INSTANCE BOOT-ID
            @vmlab done TOKEN STATUS N M  then N and M characters of base64: standard output and error

Output never looks like a mark, since base64 has no "@". Tokens are random: an answer to a command that was given up
earlier is passed over. Each shell process has its own INSTANCE: a "ready" with another one means that the shell that
had the command has died.
"""

from __future__ import annotations

import base64
import binascii
import re
import secrets
import select
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Optional, Union

from tests.stand.machine import CommandFailed, MachineError

PORT = "org.mcdaemon.vmlab.shell"
SCRIPT = Path(__file__).with_suffix(".sh")
ANSWER_TIMEOUT = 30.0
"""Seconds within which a guest that works answers to a hello or a kill: a thousand times what it takes."""

_CHUNK = 65536
_HELLO_AGAIN = 2.0
_FRAME = re.compile(rb"@vmlab (ready|hello|done) ([^\n]*)\n")


class ShellGone(MachineError):
    """The guest's end of the shell died or was cut off; what became of a command that ran is unknown."""


@dataclass(frozen=True)
class Peer:
    """Who answers in the guest: one shell process in one boot."""

    instance: str
    boot_id: str


@dataclass(frozen=True)
class _Frame:
    verb: str
    words: tuple[str, ...]
    out: bytes = b""
    err: bytes = b""


class Shell:
    """Runs commands as root over `channel`, a connected socket whose other end is a guest's port. One at a time."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._channel.setblocking(False)
        self._received = bytearray()
        self._unsent = b""
        self._payload = 0
        self.peer: Optional[Peer] = None

    def wait_ready(self, timeout: float) -> Peer:
        """Wait until a shell answers in the guest, and tell which. Raises ShellGone when none does in time."""
        deadline = time.monotonic() + timeout
        token = _token()
        while True:
            # What was half sent to a shell that has died must not be taken for a command by the next one.
            self._say(f"hello {token}", b"")
            until = min(deadline, time.monotonic() + _HELLO_AGAIN)
            frame = self._next(until)
            while frame is not None:
                if frame.verb == "hello" and frame.words[0] == token:
                    self.peer = Peer(frame.words[1], frame.words[2])
                    return self.peer
                frame = self._next(until)
            if time.monotonic() >= deadline:
                raise ShellGone(f"no root shell answers in the guest within {timeout:g} s (is its unit running?)")

    def run(
        self,
        argv: Sequence[str],
        timeout: float = 60.0,
        check: bool = True,
        env: Optional[Mapping[str, str]] = None,
        input: Optional[str] = None,
        cwd: str = "/",
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in the guest as root. Raises CommandFailed when it fails (`check`) or exceeds `timeout`.

        stdout and stderr are captured as text. On a timeout the command and its children are killed. A command that a
        signal ends has status 128 + its number, as in any shell. Raises ShellGone when the shell dies meanwhile.
        """
        data = None if input is None else input.encode()
        done = self.run_bytes(argv, timeout, env, data, cwd)
        result = _as_text(list(argv), done.returncode, done.stdout, done.stderr)
        if check and done.returncode != 0:
            raise CommandFailed(result, f"command failed with status {done.returncode}")
        return result

    def run_bytes(
        self,
        argv: Sequence[str],
        timeout: float = 60.0,
        env: Optional[Mapping[str, str]] = None,
        input: Optional[bytes] = None,
        cwd: str = "/",
    ) -> subprocess.CompletedProcess[bytes]:
        """As `run`, with bytes, and never judging the status."""
        if self.peer is None:
            self.wait_ready(ANSWER_TIMEOUT)
        token = _token()
        script = base64.b64encode(script_of(argv, env, cwd).encode())
        stdin = base64.b64encode(input or b"")
        deadline = time.monotonic() + timeout
        self._say(f"run {token} {len(script)} {len(stdin)}", script + stdin)
        frame = self._answer(token, deadline)
        if frame is None:
            raise self._give_up(list(argv), token, timeout)
        return subprocess.CompletedProcess(list(argv), int(frame.words[1]), frame.out, frame.err)

    def tell(self, argv: Sequence[str], timeout: float = ANSWER_TIMEOUT) -> None:
        """Start a command in the guest and do not ask what becomes of it: for one that ends this shell."""
        script = base64.b64encode(script_of(argv, None, "/").encode())
        self._say(f"run {_token()} {len(script)} 0", script)
        deadline = time.monotonic() + timeout
        while self._unsent and time.monotonic() < deadline:
            self._next(min(deadline, time.monotonic() + 0.1))
        if self._unsent:
            raise ShellGone(f"the guest did not take `{shlex.join(argv)}` within {timeout:g} s")

    def read_bytes(self, path: str, timeout: float = 120.0) -> bytes:
        """The content of a file of the guest. Raises CommandFailed."""
        done = self.run_bytes(["cat", "--", path], timeout)
        if done.returncode != 0:
            raise CommandFailed(_as_text(done.args, done.returncode, b"", done.stderr), f"cannot read {path}")
        return done.stdout

    def write(self, path: str, content: Union[str, bytes], mode: int = 0o644, timeout: float = 120.0) -> None:
        """Write a file in the guest as an administrator would with an editor: in place, parents are made."""
        data = content.encode() if isinstance(content, str) else content
        place = shlex.quote(path)
        text = f'mkdir -p -- "$(dirname -- {place})" && cat >{place} && chmod {mode:o} -- {place}'
        done = self.run_bytes(["bash", "-c", text], timeout, input=data)
        if done.returncode != 0:
            raise CommandFailed(_as_text(done.args, done.returncode, b"", done.stderr), f"cannot write {path}")

    def close(self) -> None:
        self._channel.close()

    # -- the line -----------------------------------------------------------------------------------------------------

    def _give_up(self, argv: list[str], token: str, timeout: float) -> CommandFailed:
        """Kill the command; the answer is the error to raise, with what the command has printed."""
        self._say(f"kill {token}", b"")
        why = f"command did not end within {timeout:g} s"
        frame = self._answer(token, time.monotonic() + ANSWER_TIMEOUT)
        if frame is None:
            result = subprocess.CompletedProcess(argv, -signal.SIGKILL, "", "")
            return CommandFailed(result, f"{why}, and the guest does not answer to its kill")
        return CommandFailed(_as_text(argv, -signal.SIGKILL, frame.out, frame.err), why)

    def _answer(self, token: str, deadline: float) -> Optional[_Frame]:
        """The end of the command `token`, or None at the deadline."""
        while True:
            frame = self._next(deadline)
            if frame is None or (frame.verb == "done" and frame.words[0] == token):
                return frame
            if frame.verb == "ready" and self.peer is not None and frame.words[0] != self.peer.instance:
                self.peer = None
                raise ShellGone("the guest's root shell died and was started again while a command ran")

    def _say(self, words: str, payload: bytes) -> None:
        """Queue a frame; `_next` sends it. What is unsent of an earlier one goes first, so that lengths stay true."""
        self._unsent += f"\n@vmlab {words}\n".encode() + payload

    def _next(self, deadline: float) -> Optional[_Frame]:
        """The next frame of the guest, or None at the deadline (monotonic seconds)."""
        while True:
            frame = self._take_frame()
            if frame is not None:
                return frame
            left = deadline - time.monotonic()
            writing = [self._channel] if self._unsent else []
            ready, writable, _ = select.select([self._channel], writing, [], max(0.0, left))
            if not ready and not writable and left <= 0:
                return None
            try:
                if writable:
                    self._unsent = self._unsent[self._channel.send(self._unsent[:_CHUNK]) :]
                data = self._channel.recv(_CHUNK) if ready else None
            except BlockingIOError:
                continue
            except OSError as error:
                raise ShellGone(f"the line to the guest's root shell broke: {error}") from error
            if data == b"":
                raise ShellGone("the line to the guest's root shell was closed (has the guest's QEMU ended?)")
            self._received += data or b""

    def _take_frame(self) -> Optional[_Frame]:
        """Cut the first whole frame off what was received; what cannot be one is dropped."""
        while True:
            head = _FRAME.search(self._received)
            if head is None:
                # A head that may still grow into a frame stays.
                at = self._received.rfind(b"@")
                del self._received[: at if at >= 0 else len(self._received)]
                return None
            verb, words = head[1].decode(), tuple(head[2].decode(errors="replace").split())
            if verb == "done":
                sizes = [int(word) for word in words[2:] if word.isdigit()]
                if len(words) == 4 and len(sizes) == 2 and re.fullmatch(r"\d+", words[1]):
                    whole = self._whole_answer(head.end(), sizes)
                    if whole is None:
                        return None
                    if whole:
                        return _Frame(verb, words, *whole)
            elif len(words) == (2 if verb == "ready" else 3):
                del self._received[: head.end()]
                return _Frame(verb, words)
            self._drop(head.end())

    def _whole_answer(self, start: int, sizes: list[int]) -> Optional[tuple[bytes, ...]]:
        """Standard output and error of the answer whose payload begins at `start`; None while they are not all there.

        () when it never will be: the shell died in the middle of it, and another frame begins inside.
        """
        end = start + sum(sizes)
        if self._received.find(b"@", max(start, self._payload), end) >= 0:
            return ()
        self._payload = len(self._received)
        if len(self._received) < end:
            return None
        middle = start + sizes[0]
        try:
            whole = tuple(_decode(part) for part in (self._received[start:middle], self._received[middle:end]))
        except binascii.Error:
            return ()
        self._drop(end)
        return whole

    def _drop(self, end: int) -> None:
        del self._received[:end]
        self._payload = 0


def script_of(argv: Sequence[str], env: Optional[Mapping[str, str]], cwd: str) -> str:
    """The bash script that becomes `argv`. Raises ValueError for what no program can be given."""
    words = [*argv, *(env or {}), *(env or {}).values(), cwd]
    if not argv or any("\0" in word for word in words):
        raise ValueError(f"cannot run {list(argv)!r}: no command, or a NUL in it")
    if any(not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) for name in env or {}):
        raise ValueError(f"cannot set {sorted(env or {})!r}: not all are names of variables")
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in (env or {}).items())
    return f"cd -- {shlex.quote(cwd)} || exit 126\n{exports}exec {shlex.join(argv)}\n"


def _decode(lines: bytearray) -> bytes:
    return base64.b64decode(lines.replace(b"\n", b""), validate=True)


def _token() -> str:
    return secrets.token_hex(8)


def _as_text(argv: list[str], status: int, out: bytes, err: bytes) -> subprocess.CompletedProcess[str]:
    return subprocess.CompletedProcess(argv, status, out.decode(errors="replace"), err.decode(errors="replace"))
