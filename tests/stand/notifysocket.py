"""The receiving end of sd_notify(3). Every process may send, whatever NotifyAccess= says."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Callable


class NotifySocket:
    """The socket behind NOTIFY_SOCKET (sd_notify(3)); `received` gets the fields of each message, in the loop."""

    def __init__(self, name: str, received: Callable[[Mapping[str, str]], None]) -> None:
        self.path = f"/run/systemd/notify/{name}"
        self._received = received
        Path(self.path).unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        self._socket.bind(self.path)
        os.chmod(self.path, 0o777)
        asyncio.get_running_loop().add_reader(self._socket.fileno(), self._receive)

    def _receive(self) -> None:
        data, descriptors, _, _ = socket.recv_fds(self._socket, 65536, 16)
        # A client that sends BARRIER=1 waits until its descriptor is closed here.
        for descriptor in descriptors:
            os.close(descriptor)
        lines = data.decode(errors="replace").split("\n")
        self._received({key: value for key, _, value in (line.partition("=") for line in lines) if key})

    def close(self) -> None:
        """Remove the socket."""
        asyncio.get_running_loop().remove_reader(self._socket.fileno())
        self._socket.close()
        Path(self.path).unlink(missing_ok=True)
