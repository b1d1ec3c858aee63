"""Serves the metrics over HTTP, for a scraper on the same machine.

`start` may fail, most often because machine-config-daemon still holds the port while a node is taken over. The agent
then works on without metrics and calls `start` again in a later round: a node must not miss an update, and never a
rollback, for want of a port.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Callable, Optional

from mcdaemon.errors import Broken, Failure, Transient
from mcdaemon.report.metrics import TEXT_FORMAT, Board

# Where kube-rbac-proxy and the cluster's ServiceMonitor expect a node's config daemon.
ADDRESS = "127.0.0.1"
PORT = 8797

_LOG = logging.getLogger(__name__)

# A scraper on the same machine sends its request at once; requests are served one after the other, so that no number of
# connections costs a root daemon more than one thread. A slow one is cut after this many seconds.
_CLIENT_TIMEOUT = 2.0
_STOP_TIMEOUT = 5.0


class Endpoint:
    """The HTTP server in a thread of its own. `board` supplies the text; nothing else of the agent is reachable."""

    def __init__(self, board: Board, address: str = ADDRESS, port: int = PORT) -> None:
        self._board = board
        self._address = address
        self._port = port
        self._server: Optional[HTTPServer] = None
        self._thread: Optional[threading.Thread] = None

    @property
    def running(self) -> bool:
        return self._server is not None

    @property
    def port(self) -> int:
        """The port that is served; the one asked for, unless that was 0 (any)."""
        return int(self._server.server_address[1]) if self._server else self._port

    def start(self) -> None:
        """Listen and serve; does nothing when it already does.

        Raises Transient when the port is taken (the text names the process), Broken when the address cannot be used.
        """
        if self._server is not None:
            return
        try:
            self._server = HTTPServer((self._address, self._port), _handler(self._board.text))
        except (OSError, OverflowError) as error:
            raise _unavailable(error, self._address, self._port) from error
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop serving and free the port."""
        server, thread = self._server, self._thread
        self._server = self._thread = None
        if server is not None and thread is not None:
            server.shutdown()
            server.server_close()
            thread.join(_STOP_TIMEOUT)


def _handler(text: Callable[[], bytes]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = _CLIENT_TIMEOUT
        server_version = "mcdaemon"
        sys_version = ""

        def do_GET(self) -> None:
            if self.path.split("?", 1)[0] != "/metrics":
                self.send_error(404, explain="metrics are at /metrics")
                return
            body = text()
            self.send_response(200)
            self.send_header("Content-Type", TEXT_FORMAT)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            # The request line is a stranger's text; %r keeps its control characters out of the log.
            _LOG.debug("metrics: %r", format % args)

    return Handler


def _unavailable(error: Exception, address: str, port: int) -> Failure:
    sentence = f"cannot serve metrics at {address}:{port}: {getattr(error, 'strerror', None) or error}"
    if getattr(error, "errno", None) != errno.EADDRINUSE:
        return Broken(sentence, "correct metrics.listen in the settings", "metrics")
    holder = _holder(port)
    owner = f"{holder} listens there; stop it" if holder else f"find its owner with `ss -ltnp sport = :{port}`"
    return Transient(sentence, f"{owner} or change metrics.listen; the agent works on without metrics", "metrics")


def _holder(port: int, proc: Path = Path("/proc")) -> str:
    """Which process listens on TCP `port` ("machine-config-daemon, process 812"), or "" where that cannot be seen."""
    sockets = {f"socket:[{inode}]" for table in ("tcp", "tcp6") for inode in _listeners(proc / "net" / table, port)}
    for process in proc.glob("[0-9]*"):
        try:
            if any(os.readlink(descriptor) in sockets for descriptor in (process / "fd").iterdir()):
                return f"{(process / 'comm').read_text().strip()}, process {process.name}"
        except OSError:
            continue  # it ended meanwhile, or is not ours to look at
    return ""


def _listeners(table: Path, port: int) -> list[str]:
    """Inodes of the sockets in a table of proc_pid_net(5) that listen (state 0A) on `port`."""
    try:
        rows = [line.split() for line in table.read_text("ascii").splitlines()[1:]]
    except OSError:
        return []
    return [row[9] for row in rows if len(row) > 9 and row[3] == "0A" and int(row[1].rpartition(":")[2], 16) == port]
