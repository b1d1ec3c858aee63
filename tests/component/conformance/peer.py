"""Opens a transaction's socket inside a node for a client outside of it.

``python3 -m tests.component.conformance.peer ADDRESS`` connects, authenticates as D-Bus wants it, and passes the ready
connection over its stdin, which is a unix socket.
"""

from __future__ import annotations

import os
import socket
import struct
import sys

TIMEOUT = 20.0


def connect(address: str) -> socket.socket:
    """A connection to a D-Bus peer at ``unix:path=…`` or ``unix:abstract=…`` after BEGIN. Raises OSError."""
    kind, _, place = address.partition(":")[2].partition(",")[0].partition("=")
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(TIMEOUT)
    connection.connect("\0" + place if kind == "abstract" else place)
    credentials = struct.pack("iII", os.getpid(), os.getuid(), os.getgid())
    connection.sendmsg([b"\0"], [(socket.SOL_SOCKET, socket.SCM_CREDENTIALS, credentials)])
    connection.sendall(f"AUTH EXTERNAL {str(os.getuid()).encode().hex()}\r\n".encode())
    answer = _line(connection)
    if not answer.startswith(b"OK "):
        raise ConnectionRefusedError(f"{address}: {answer!r}")
    connection.sendall(b"BEGIN\r\n")
    connection.setblocking(True)
    return connection


def _line(connection: socket.socket) -> bytes:
    line = b""
    while not line.endswith(b"\r\n"):
        data = connection.recv(1)
        if not data:
            raise ConnectionResetError("the peer closed the connection")
        line += data
    return line


def main() -> None:
    """Connects to the address in argv and hands the connection to stdin's other end."""
    with socket.socket(fileno=os.dup(0)) as handover, connect(sys.argv[1]) as connection:
        socket.send_fds(handover, [b"."], [connection.fileno()])


if __name__ == "__main__":
    main()
