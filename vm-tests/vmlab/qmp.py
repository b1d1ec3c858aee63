"""QEMU's machine protocol: commands and events as JSON lines over a socket (qemu: docs/interop/qmp-spec.txt)."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Optional

_READ = 65536


class QmpError(Exception):
    """QEMU refused a command, or did not answer."""


class Qmp:
    """One connection, from the greeting on. All traffic is written to `log`.

    `events` holds every event so far, oldest first; readers hold `changed`, which is notified at each new one and when
    the connection ends (`open` is False then: QEMU has gone).
    """

    def __init__(self, stream: socket.socket, log: Path, changed: threading.Condition) -> None:
        self.events: list[dict[str, Any]] = []
        self.open = True
        self._stream = stream
        self._changed = changed
        self._answers: dict[int, dict[str, Any]] = {}
        self._greeting: Optional[dict[str, Any]] = None
        self._next = 0
        self._log = log.open("a", encoding="utf-8")
        self._begin = time.monotonic()
        self._thread = threading.Thread(target=self._read, name="qmp", daemon=True)
        self._thread.start()

    def negotiate(self, timeout: float) -> None:
        """Take the greeting and leave capability negotiation, as every session begins."""
        with self._changed:
            self._changed.wait_for(lambda: self._greeting is not None or not self.open, timeout)
            if self._greeting is None:
                raise QmpError("QEMU ended before its greeting" if not self.open else "QEMU did not greet in time")
        self.execute("qmp_capabilities", timeout=timeout)

    def execute(self, command: str, arguments: Optional[Mapping[str, Any]] = None, timeout: float = 20.0) -> Any:
        """Run a command and return what it returns. Raises QmpError when it fails or no answer comes in time."""
        with self._changed:
            self._next += 1
            number = self._next
        request = {"execute": command, "id": number, **({"arguments": dict(arguments)} if arguments else {})}
        self._note("->", json.dumps(request))
        try:
            self._stream.sendall(json.dumps(request).encode() + b"\n")
        except OSError as error:
            raise QmpError(f"cannot ask QEMU for {command}: {error}") from None
        with self._changed:
            self._changed.wait_for(lambda: number in self._answers or not self.open, timeout)
            answer = self._answers.pop(number, None)
        if answer is None:
            raise QmpError(f"QEMU {'ended during' if not self.open else 'did not answer'} {command}")
        if "error" in answer:
            raise QmpError(f"QEMU refuses {command}: {answer['error'].get('desc', answer['error'])}")
        return answer.get("return")

    def event(self, name: str, since: int = 0) -> Optional[dict[str, Any]]:
        """The first event `name` from the place `since` on."""
        with self._changed:
            return next((event for event in self.events[since:] if event["event"] == name), None)

    def close(self) -> None:
        """End the connection; QEMU stays as it is."""
        try:
            self._stream.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # QEMU was quicker.
        self._thread.join(5)

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
            for line in lines:
                if line.strip():
                    self._take(line)
        with self._changed:
            self.open = False
            self._changed.notify_all()
        self._stream.close()
        self._log.close()

    def _take(self, line: bytes) -> None:
        self._note("<-", line.decode(errors="replace").strip())
        try:
            message = json.loads(line)
        except ValueError:
            return  # A line that QEMU cut when it was killed; it is in the log.
        if not isinstance(message, dict):
            return
        with self._changed:
            if "QMP" in message:
                self._greeting = message
            elif "event" in message:
                self.events.append(message)
            elif "id" in message:
                self._answers[message["id"]] = message
            self._changed.notify_all()

    def _note(self, arrow: str, text: str) -> None:
        try:
            self._log.write(f"{time.monotonic() - self._begin:9.3f} {arrow} {text}\n")
            self._log.flush()
        except ValueError:
            pass  # The connection ended meanwhile and the log with it.
