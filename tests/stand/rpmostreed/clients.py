"""Who uses the daemon: registered clients, what the bus knows about a caller, and what is left when nobody does."""

from __future__ import annotations

import os
import random
from typing import Any, Callable

from tests.stand.introspection import Gio, GLib
from tests.stand.rpmostreed.errors import FAILED, MethodError
from tests.stand.rpmostreed.interface import PROPERTIES
from tests.stand.rpmostreed.transaction import journal
from tests.stand.rpmostreed.work import Client

NO_IDLE_EXIT = "RPMOSTREE_DEBUG_DISABLE_DAEMON_IDLE_EXIT"
BUS_TIMEOUT_MS = 2000
BUS = "org.freedesktop.DBus"
SYSTEMD = "org.freedesktop.systemd1"
_IDLE_JITTER = 4


class Clients:
    """The registration table, by unique bus name (rpm-ostree.md 1.8). ``changed`` is called when it grew or shrank."""

    def __init__(self, bus: Any, changed: Callable[[], None]) -> None:
        self._bus = bus
        self._changed = changed
        self._table: dict[str, tuple[str, int]] = {}

    def __len__(self) -> int:
        return len(self._table)

    def add(self, sender: str, identity: str) -> None:
        """Registers a client until it leaves the bus; the first id of a name stays."""
        if sender in self._table:
            return
        watch = Gio.bus_watch_name_on_connection(
            self._bus, sender, Gio.BusNameWatcherFlags.NONE, None, lambda _bus, name: self.remove(name)
        )
        self._table[sender] = (identity, watch)
        journal(f"client(id:{identity} dbus:{sender}) added; new total={len(self)}")
        self._changed()

    def remove(self, sender: str) -> None:
        """Forgets a client; nothing where it is not registered."""
        if sender not in self._table:
            return
        identity, watch = self._table.pop(sender)
        Gio.bus_unwatch_name(watch)
        journal(f"client(id:{identity} dbus:{sender}) vanished; remaining={len(self)}")
        self._changed()

    def describe(self, sender: str) -> str:
        """A caller, registered or not, for people."""
        identity = self._table.get(sender, ("", 0))[0]
        return f"client(id:{identity} dbus:{sender} uid:{self.uid(sender)})" if identity else f"client(dbus:{sender})"

    def client(self, sender: str) -> Client:
        """A caller as operations see it; may be called from any thread."""
        identity = self._table.get(sender, ("", 0))[0]
        return Client("" if identity == "cli" else identity, self._unit(sender))

    def uid(self, sender: str) -> int:
        """The user of a bus client. Raises MethodError where the bus does not know."""
        try:
            return int(self._ask(BUS, BUS, "/", "GetConnectionUnixUser", "(s)", sender))
        except GLib.Error as error:
            raise MethodError(FAILED, f"Failed direct authorization: {error.message}") from error

    def _unit(self, sender: str) -> str:
        try:
            pid = self._ask(BUS, BUS, "/", "GetConnectionUnixProcessID", "(s)", sender)
            path = self._ask(SYSTEMD, f"{SYSTEMD}.Manager", "/org/freedesktop/systemd1", "GetUnitByPID", "(u)", pid)
            return str(self._ask(SYSTEMD, PROPERTIES, str(path), "Get", "(ss)", f"{SYSTEMD}.Unit", "Id"))
        except GLib.Error:
            return ""

    def _ask(self, name: str, interface: str, path: str, method: str, signature: str, *arguments: object) -> Any:
        reply = self._bus.call_sync(
            name,
            path,
            interface,
            method,
            GLib.Variant(signature, arguments),
            None,
            Gio.DBusCallFlags.NONE,
            BUS_TIMEOUT_MS,
            None,
        )
        return reply.unpack()[0]


class IdleTimer:
    """Calls ``leave`` once the daemon has been idle for the configured time and up to four seconds more."""

    def __init__(self, leave: Callable[[], None]) -> None:
        self._leave = leave
        self._source = 0

    def update(self, idle: bool, timeout: int) -> None:
        """Starts or stops the timer; ``timeout`` in seconds, 0 for never."""
        if self._source:
            GLib.source_remove(self._source)
            self._source = 0
        if not idle or not timeout or NO_IDLE_EXIT in os.environ:
            return
        seconds = timeout + random.randint(0, _IDLE_JITTER)
        journal(f"In idle state; will auto-exit in {seconds} seconds")
        self._source = GLib.timeout_add_seconds(seconds, self._expire)

    def _expire(self) -> bool:
        self._source = 0
        self._leave()
        return False
