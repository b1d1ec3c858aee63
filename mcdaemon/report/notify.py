"""Tell systemd that the agent is ready, what it does, and that its loop still turns: sd_notify(3).

The whole protocol is one datagram of `KEY=value` lines, so no library is needed. Outside systemd nothing is sent.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Optional

_LOG = logging.getLogger(__name__)

# PID 1 reads its socket at once; one that does not within this many seconds must not stop the loop.
_SEND_TIMEOUT = 1.0
# systemd cuts longer status lines itself; a datagram of this size always fits the socket's buffer.
_STATUS_LIMIT = 1024
_MICROSECOND = 1_000_000


@dataclass(frozen=True)
class Notifier:
    """A way to the service manager.

    `address` is the value of NOTIFY_SOCKET: a path, or `@name` for an abstract socket; empty means that nobody listens.
    No method raises: an agent that cannot talk to PID 1 still has a node to look after, so a failure is logged.
    """

    address: str = ""

    @classmethod
    def from_environment(cls, environment: Optional[MutableMapping[str, str]] = None) -> Notifier:
        """Take NOTIFY_SOCKET out of the environment (default: the process's own).

        It is taken out because podman, started as a child with it, would speak to systemd in the agent's name.
        """
        environment = os.environ if environment is None else environment
        address = environment.pop("NOTIFY_SOCKET", "")
        if address and address[0] not in "/@":
            _LOG.warning("cannot notify systemd at %r: only paths and abstract sockets are spoken", address)
            address = ""
        return cls(address)

    def ready(self, status: str = "") -> bool:
        """Start-up, or a reload, is complete. True when the message was sent."""
        return self._send("READY=1", *_status(status))

    def status(self, sentence: str) -> bool:
        """Set the line that `systemctl status` shows."""
        return self._send(*_status(sentence))

    def watchdog(self) -> bool:
        """The loop is alive. Only the loop may say so: another thread would hide that it hangs."""
        return self._send("WATCHDOG=1")

    def reloading(self) -> bool:
        """A reload has begun; `ready` ends it. systemd from 253 on wants the time stamp (Type=notify-reload)."""
        return self._send("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self, status: str = "") -> bool:
        """The agent is about to exit."""
        return self._send("STOPPING=1", *_status(status))

    def extend_timeout(self, seconds: float) -> bool:
        """Ask for `seconds` from now for the start or stop in progress (a commit that must not be cut)."""
        return self._send(f"EXTEND_TIMEOUT_USEC={int(seconds * _MICROSECOND)}")

    def _send(self, *lines: str) -> bool:
        if not self.address or not lines:
            return False
        place = "\0" + self.address[1:] if self.address.startswith("@") else self.address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
                channel.settimeout(_SEND_TIMEOUT)
                channel.sendto("\n".join(lines).encode("utf-8", "replace"), place)
        except OSError as error:
            _LOG.warning("cannot notify systemd at %s: %s", self.address, error)
            return False
        return True


def watchdog_interval(environment: Optional[MutableMapping[str, str]] = None) -> Optional[float]:
    """Seconds between two calls of `Notifier.watchdog`, or None when nobody watches this process.

    Half of WATCHDOG_USEC, as sd_watchdog_enabled(3) advises. WATCHDOG_PID says whom the limit is for. Both are taken
    out of the environment, so that no child believes that it is watched.
    """
    environment = os.environ if environment is None else environment
    limit = environment.pop("WATCHDOG_USEC", "")
    watched = environment.pop("WATCHDOG_PID", "")
    if not limit or (watched and watched != str(os.getpid())):
        return None
    if not (limit.isascii() and limit.isdigit() and int(limit) > 0):
        _LOG.warning("cannot use WATCHDOG_USEC=%r: not a number of microseconds; the watchdog is not served", limit)
        return None
    return int(limit) / _MICROSECOND / 2


def _status(sentence: str) -> tuple[str, ...]:
    # One line only: a line break in an error text would start an assignment of its own, such as MAINPID=.
    line = " ".join(sentence.split())[:_STATUS_LIMIT]
    return (f"STATUS={line}",) if line else ()
