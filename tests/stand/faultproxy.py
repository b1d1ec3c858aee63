"""A reverse proxy before a real registry that can stall, slow, cut, or answer in its stead, path by path.

What it does not touch it hands on unchanged, Host header included, so that the registry's own redirects come back here.
"""

from __future__ import annotations

import http.client
import re
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Callable, Optional

UPSTREAM_TIMEOUT = 30.0
STALL_LIMIT = 60.0
_CHUNK = 16384
_HOP = frozenset({"connection", "transfer-encoding", "keep-alive", "content-length"})


@dataclass(frozen=True)
class Fault:
    """What to do to a request whose "METHOD path" matches `pattern`.

    `status`: answer this (with `headers`, `body`) and ask nobody. `body` alone: the real answer with another body.
    `cut_after`: break the connection after so many bytes of the body. `bytes_per_second`: slow down.
    `stalled`: hold the answer back after `cut_after or 0` bytes until `release`. `times`: wear off after so many.
    `condition`: only for requests that it is true of.
    """

    pattern: str
    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Optional[bytes] = None
    cut_after: Optional[int] = None
    bytes_per_second: int = 0
    stalled: bool = False
    times: Optional[int] = None
    condition: Optional[Callable[[Seen], bool]] = None


class Gate:
    """A fault that is switched on. `reached` is set when a request meets it; `release` lets it and later ones go."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self.reached = threading.Event()
        self.released = threading.Event()
        self.met = 0

    def release(self) -> None:
        self.released.set()


@dataclass(frozen=True)
class Seen:
    """A request that came to the proxy, `at` in seconds of the monotonic clock."""

    method: str
    path: str
    headers: Mapping[str, str]
    at: float


class FaultProxy:
    """Serves on `host` ("127.0.0.1:PORT") what `upstream` ("127.0.0.1:PORT", plain HTTP) serves, but for faults."""

    def __init__(self, upstream: str) -> None:
        self._upstream = upstream
        self._gates: list[Gate] = []
        self._seen: list[Seen] = []
        self._lock = threading.Lock()
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.proxy = self
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> FaultProxy:
        self._thread.start()
        return self

    def __exit__(
        self, kind: Optional[type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        self.close()

    def close(self) -> None:
        self.clear()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)

    def add(self, fault: Fault) -> Gate:
        """Switch a fault on; later ones are looked at first."""
        gate = Gate(fault)
        with self._lock:
            self._gates.insert(0, gate)
        return gate

    def answer(
        self,
        pattern: str,
        status: int,
        body: bytes = b"",
        headers: Optional[Mapping[str, str]] = None,
        times: Optional[int] = None,
    ) -> Gate:
        return self.add(Fault(pattern, status=status, body=body, headers=headers or {}, times=times))

    def answer_if(self, condition: Callable[[Seen], bool], status: int, headers: Mapping[str, str]) -> Gate:
        return self.add(Fault("", status=status, headers=headers, condition=condition))

    def stall(self, pattern: str, after: int = 0) -> Gate:
        return self.add(Fault(pattern, stalled=True, cut_after=after))

    def cut(self, pattern: str, after: int = 0, times: Optional[int] = None) -> Gate:
        return self.add(Fault(pattern, cut_after=after, times=times))

    def slow(self, pattern: str, bytes_per_second: int) -> Gate:
        return self.add(Fault(pattern, bytes_per_second=bytes_per_second))

    def replace_body(self, pattern: str, body: bytes) -> Gate:
        return self.add(Fault(pattern, body=body))

    def clear(self) -> None:
        """No faults any more; whoever is stalled goes on."""
        with self._lock:
            gates, self._gates = self._gates, []
        for gate in gates:
            gate.release()

    def requests(self) -> tuple[Seen, ...]:
        with self._lock:
            return tuple(self._seen)

    def meet(self, seen: Seen) -> Optional[Gate]:
        """Note a request; the fault that it meets, if it does."""
        with self._lock:
            self._seen.append(seen)
            for gate in self._gates:
                fault = gate.fault
                worn_off = fault.times is not None and gate.met >= fault.times
                elsewhere = fault.condition is not None and not fault.condition(seen)
                if (
                    worn_off
                    or elsewhere
                    or gate.released.is_set()
                    or not re.search(fault.pattern, f"{seen.method} {seen.path}")
                ):
                    continue
                gate.met += 1
                gate.reached.set()
                return gate
        return None

    def ask(self, method: str, path: str, headers: Sequence[tuple[str, str]], body: bytes) -> http.client.HTTPResponse:
        """The real registry's answer. Raises OSError when it is down."""
        connection = http.client.HTTPConnection(self._upstream, timeout=UPSTREAM_TIMEOUT)
        connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        for name, value in headers:
            if name.lower() not in _HOP:
                connection.putheader(name, value)
        if body or method in ("POST", "PUT", "PATCH"):
            connection.putheader("Content-Length", str(len(body)))
        connection.endheaders(body)
        return connection.getresponse()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    proxy: FaultProxy

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that go away in the middle are what this proxy is for."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, format: str, *args: object) -> None:
        """Silent: FaultProxy.requests() is the log."""

    def handle_request(self) -> None:
        body = self._read_body()
        proxy = self.server.proxy
        seen = Seen(self.command, self.path, {k.lower(): v for k, v in self.headers.items()}, time.monotonic())
        gate = proxy.meet(seen)
        fault = gate.fault if gate else Fault("")
        if fault.status:
            self._answer(fault.status, dict(fault.headers), fault.body or b"", gate)
            return
        try:
            response = proxy.ask(self.command, self.path, self.headers.items(), body)
            content = response.read()
        except OSError:
            self.close_connection = True
            self._reset()
            return
        headers = {name: value for name, value in response.getheaders() if name.lower() not in _HOP}
        if fault.body is not None:
            content = fault.body
            headers.pop("Docker-Content-Digest", None)
        length = response.getheader("Content-Length") if self.command == "HEAD" else None
        self._answer(response.status, headers, content, gate, length)

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = handle_request

    def _read_body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while True:
            size = int(self.rfile.readline().split(b";")[0], 16)
            parts.append(self.rfile.read(size))
            self.rfile.readline()
            if not size:
                return b"".join(parts)

    def _answer(
        self, status: int, headers: dict[str, str], content: bytes, gate: Optional[Gate], length: Optional[str] = None
    ) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", length or str(len(content)))
        self.end_headers()
        if self.command == "HEAD":
            content = b""
        for part in self._parts(content, gate):
            self.wfile.write(part)
            self.wfile.flush()

    def _parts(self, content: bytes, gate: Optional[Gate]) -> Iterator[bytes]:
        """The body in pieces, with the pauses and the break that the fault asks for."""
        if gate is None or gate.fault.status:
            yield content
            return
        fault = gate.fault
        first = content if fault.cut_after is None else content[: fault.cut_after]
        if fault.bytes_per_second:
            for start in range(0, len(first), fault.bytes_per_second):
                yield first[start : start + fault.bytes_per_second]
                gate.released.wait(1.0)
        else:
            yield first
        if fault.stalled:
            gate.released.wait(STALL_LIMIT)
            yield content[len(first) :]
        elif fault.cut_after is not None:
            self.close_connection = True
            self._reset()

    def _reset(self) -> None:
        """Break the connection in the client's face."""
        self.wfile.flush()
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
        self.connection.close()
