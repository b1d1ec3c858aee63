"""qemu-guest-agent seen from the host (qemu: docs/interop/qemu-ga-ref): JSON lines over a virtio-serial port."""

from __future__ import annotations

import base64
import itertools
import json
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Optional

_READ = 1 << 20
CHUNK = 1 << 20
# A byte that no JSON contains: the agent forgets a half-read request and marks its answer with it.
_SENTINEL = b"\xff"


class AgentError(Exception):
    """The agent refused a request, or did not answer in time."""


class AgentGone(AgentError):
    """The agent is not there (any more): the guest goes down, or the agent was stopped."""


@dataclass(frozen=True)
class ExecStatus:
    """What guest-exec-status says. `signal` is 0 for a command that ended by itself."""

    exited: bool
    code: int = 0
    signal: int = 0
    out: bytes = b""
    err: bytes = b""

    @property
    def returncode(self) -> int:
        """As subprocess has it: negative for a signal."""
        return -self.signal if self.signal else self.code


class Agent:
    """Requests one after the other; safe to use from several threads.

    Whether somebody listens in the guest is known from outside: `set_port` is told what QEMU's VSERPORT_CHANGE says.
    `changed` is notified at everything that happens.
    """

    def __init__(self, stream: socket.socket, changed: threading.Condition) -> None:
        self._stream = stream
        self._changed = changed
        self._lock = threading.Lock()
        self._lines: list[bytes] = []
        self._ids = itertools.count(int(time.time()))
        self._in_step = False
        self.port_open = False
        self.closings = 0
        self.open = True
        self._thread = threading.Thread(target=self._read, name="guest agent", daemon=True)
        self._thread.start()

    def set_port(self, is_open: bool) -> None:
        """Tell whether the guest has the port open."""
        with self._changed:
            if self.port_open and not is_open:
                self.closings += 1
                self._in_step = False
            self.port_open = is_open
            self._changed.notify_all()

    def request(self, command: str, arguments: Optional[Mapping[str, Any]] = None, timeout: float = 20.0) -> Any:
        """One request. Raises AgentGone when the agent goes away before it has answered, AgentError otherwise."""
        deadline = time.monotonic() + timeout
        with self._lock:
            if not self._in_step:
                self._synchronize(deadline)
            message: dict[str, Any] = {"execute": command}
            if arguments:
                message["arguments"] = dict(arguments)
            self._in_step = False
            self._send(json.dumps(message).encode() + b"\n")
            answer = self._answer(command, deadline)
            self._in_step = True
        if "error" in answer:
            raise AgentError(f"the guest agent refuses {command}: {answer['error'].get('desc', answer['error'])}")
        return answer.get("return")

    def execute(self, argv: Sequence[str], env: Sequence[str] = (), stdin: Optional[bytes] = None) -> int:
        """Start a command in the guest with its output captured; returns its pid. `env` has NAME=value."""
        arguments: dict[str, Any] = {"path": argv[0], "arg": list(argv[1:]), "capture-output": True}
        if env:
            arguments["env"] = list(env)
        if stdin is not None:
            arguments["input-data"] = base64.b64encode(stdin).decode()
        return int(self.request("guest-exec", arguments)["pid"])

    def status(self, pid: int, timeout: float = 60.0) -> ExecStatus:
        """How a command from `execute` is; the agent forgets it once it was told that it has ended."""
        answer = self.request("guest-exec-status", {"pid": pid}, timeout)
        if not answer["exited"]:
            return ExecStatus(False)
        if answer.get("out-truncated") or answer.get("err-truncated"):
            raise AgentError(f"the output of process {pid} is longer than the guest agent keeps; redirect it to a file")
        out, err = (base64.b64decode(answer.get(key, "")) for key in ("out-data", "err-data"))
        return ExecStatus(True, answer.get("exitcode", 0), answer.get("signal", 0), out, err)

    def read_file(self, path: str) -> bytes:
        """A file of the guest. Raises FileNotFoundError when it is not there."""
        handle = self._open(path, "rb")
        parts = []
        try:
            while True:
                answer = self.request("guest-file-read", {"handle": handle, "count": CHUNK}, 60)
                parts.append(base64.b64decode(answer["buf-b64"]))
                if answer["eof"] or not answer["count"]:
                    return b"".join(parts)
        finally:
            self.request("guest-file-close", {"handle": handle})

    def write_file(self, path: str, data: bytes) -> None:
        """Write a file of the guest in place; its folder must be there."""
        handle = self._open(path, "wb")
        try:
            for begin in range(0, len(data), CHUNK):
                self._write(handle, data[begin : begin + CHUNK])
        finally:
            self.request("guest-file-close", {"handle": handle})

    def close(self) -> None:
        """End the connection."""
        try:
            self._stream.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # QEMU was quicker.
        self._thread.join(5)

    def _write(self, handle: int, data: bytes) -> None:
        while data:
            piece = {"handle": handle, "buf-b64": base64.b64encode(data).decode()}
            data = data[self.request("guest-file-write", piece, 60)["count"] :]

    def _open(self, path: str, mode: str) -> int:
        try:
            return int(self.request("guest-file-open", {"path": path, "mode": mode}))
        except AgentGone:
            raise
        except AgentError as error:
            if "No such file or directory" in str(error):
                raise FileNotFoundError(path) from None
            raise

    def _synchronize(self, deadline: float) -> None:
        """Get in step: whatever the agent still has to say to an earlier request is dropped."""
        number = next(self._ids)
        request = {"execute": "guest-sync-delimited", "arguments": {"id": number}}
        self._send(_SENTINEL + json.dumps(request).encode() + b"\n")
        while self._answer("guest-sync-delimited", deadline).get("return") != number:
            pass

    def _send(self, data: bytes) -> None:
        if not self.port_open:
            raise AgentGone("the guest agent is not there")
        try:
            self._stream.sendall(data)
        except OSError as error:
            raise AgentGone(f"the guest agent cannot be reached: {error}") from None

    def _answer(self, command: str, deadline: float) -> dict[str, Any]:
        with self._changed:
            closings = self.closings
        while True:
            with self._changed:
                left = max(0.0, deadline - time.monotonic())
                self._changed.wait_for(lambda: self._lines or self._gone_since(closings), left)
                if not self._lines:
                    if self._gone_since(closings):
                        raise AgentGone(f"the guest agent went away during {command}")
                    raise AgentError(f"the guest agent did not answer {command} in time")
                line = self._lines.pop(0)
            answer = _parse(line)
            if answer is not None:
                return answer

    def _gone_since(self, closings: int) -> bool:
        return not self.port_open or self.closings != closings

    def _read(self) -> None:
        buffer = b""
        while True:
            try:
                data = self._stream.recv(_READ)
            except OSError:
                data = b""
            if not data:
                break
            *lines, buffer = (buffer + data).split(b"\n")
            with self._changed:
                self._lines += lines
                self._changed.notify_all()
        with self._changed:
            self.open = self.port_open = False
            self._changed.notify_all()
        self._stream.close()


def _parse(line: bytes) -> Optional[dict[str, Any]]:
    """An answer, or None for the rest of one that was cut."""
    try:
        message = json.loads(line.rsplit(_SENTINEL, 1)[-1])
    except ValueError:
        return None
    return message if isinstance(message, dict) else None
