"""The other end of a socket that speaks JSON lines, as QEMU and its guest agent do, or as they do when they fail."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from typing import Any

Answer = Callable[[dict[str, Any]], "list[bytes]"]


class Peer:
    """Answers each request with the pieces that `answer` gives for it, each sent by itself."""

    def __init__(self, answer: Answer, greeting: bytes = b"") -> None:
        self.ours, self._theirs = socket.socketpair()
        self.requests: list[dict[str, Any]] = []
        self._answer = answer
        if greeting:
            self.send(greeting)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def send(self, *pieces: bytes) -> None:
        for piece in pieces:
            self._theirs.sendall(piece)

    def close(self) -> None:
        """Go away as a killed process does."""
        try:
            self._theirs.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # The other end was closed first.
        self._thread.join(10)

    def _serve(self) -> None:
        buffer = b""
        while True:
            try:
                data = self._theirs.recv(65536)
            except OSError:
                data = b""
            if not data:
                break
            *lines, buffer = (buffer + data).split(b"\n")
            for line in lines:
                request = json.loads(line.lstrip(b"\xff"))
                self.requests.append(request)
                self.send(*self._answer(request))
        self._theirs.close()


def line(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\r\n"
