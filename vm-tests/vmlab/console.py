"""What a machine prints: bytes from a socket, kept in a file and as lines that can be waited for."""

from __future__ import annotations

import re
import socket
import threading
import time
from pathlib import Path
from typing import Optional, Union

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_READ = 65536
PANIC = re.compile(r"Kernel panic - not syncing")


class LineSplitter:
    """Cuts a stream of bytes into lines of text: without carriage returns, colours, and what is no UTF-8."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[str]:
        """The lines that `data` completes."""
        *whole, self._rest = (self._rest + data).split(b"\n")
        return [_clean(line) for line in whole]

    def rest(self) -> str:
        """The begin of a line that has no end yet."""
        return _clean(self._rest)


def _clean(line: bytes) -> str:
    return _ESCAPES.sub("", line.decode(errors="replace")).strip("\r").replace("\0", "")


class Console:
    """The lines that come from `stream`; all bytes are written to `path` at once.

    `changed` is notified after each piece; the machine's other sources share it, so one wait can look at all of them.
    Every reader of `lines` and `open` must hold it.
    """

    def __init__(self, stream: socket.socket, path: Path, changed: threading.Condition) -> None:
        self.path = path
        self.lines: list[str] = []
        self.open = True
        self._stream = stream
        self._changed = changed
        self._splitter = LineSplitter()
        self._thread = threading.Thread(target=self._read, name=f"console {path.name}", daemon=True)
        self._thread.start()

    def mark(self) -> int:
        """The place after what has come so far, for `find` and `wait_for`."""
        with self._changed:
            return len(self.lines)

    def find(self, pattern: Union[str, re.Pattern[str]], since: int = 0) -> Optional[str]:
        """The first line from `since` on in which the pattern is found; also one that has no end yet."""
        expression = re.compile(pattern)
        with self._changed:
            for line in self.lines[since:]:
                if expression.search(line):
                    return line
            rest = self._splitter.rest()
        return rest if expression.search(rest) else None

    def hear(self, pattern: str, timeout: float, since: int = 0) -> Optional[tuple[int, str]]:
        """Wait for a line with the pattern: the place after it and itself; None when the other end closed before.

        Raises TimeoutError after `timeout` seconds.
        """
        expression = re.compile(pattern)
        place = since
        deadline = time.monotonic() + timeout
        with self._changed:
            while True:
                for line in self.lines[place:]:
                    place += 1
                    if expression.search(line):
                        return place, line
                left = deadline - time.monotonic()
                if not self.open:
                    return None
                if left <= 0:
                    raise TimeoutError(f"{pattern!r} did not come within {timeout:.0f} s")
                self._changed.wait(left)

    def text(self) -> str:
        """All that came."""
        with self._changed:
            return "\n".join([*self.lines, self._splitter.rest()])

    def tail(self, count: int = 15) -> str:
        """The last lines, for an error's text."""
        with self._changed:
            return "\n".join([*self.lines[-count:], self._splitter.rest()]).strip()

    def finish(self, timeout: float = 5.0) -> None:
        """Wait until all is read that came before the other end was closed."""
        self._thread.join(timeout)

    def _read(self) -> None:
        with self.path.open("ab", buffering=0) as file:
            while True:
                try:
                    data = self._stream.recv(_READ)
                except OSError:
                    data = b""  # The machine was killed, or this end was closed.
                if not data:
                    break
                file.write(data)
                with self._changed:
                    self.lines += self._splitter.feed(data)
                    self._changed.notify_all()
        self._stream.close()
        with self._changed:
            self.open = False
            self._changed.notify_all()
