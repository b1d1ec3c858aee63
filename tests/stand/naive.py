"""The order of calls that a node agent makes when it does not know better; for the *before* of an incident.

    python3 -m tests.stand.naive '{"set-refspec": "..."}' '{"no-pull-base": true}'

One rpm-ostree transaction as `rpm-ostree update` or `rpm-ostree rebase` would make it: unlocked, to be finalized by the
next shutdown. Prints what rpm-ostree says; exit status 1 when it failed. It shares nothing with mcdaemon.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from gi.repository import Gio, GLib

NAME = "org.projectatomic.rpmostree1"
SYSROOT = "/org/projectatomic/rpmostree1/Sysroot"
TRANSACTION = "org.projectatomic.rpmostree1.Transaction"
TIMEOUT = 60_000


def variant(value: Any) -> Any:
    if isinstance(value, bool):
        return GLib.Variant("b", value)
    if isinstance(value, str):
        return GLib.Variant("s", value)
    return GLib.Variant("as", value)


def transact(modifiers: dict[str, Any], options: dict[str, Any]) -> tuple[bool, str]:
    """UpdateDeployment, followed to its end: (success, text)."""
    arguments = (
        {key: variant(value) for key, value in modifiers.items()},
        {key: variant(value) for key, value in options.items()},
    )
    bus, booted = connect()
    return call(bus, booted, "UpdateDeployment", GLib.Variant("(a{sv}a{sv})", arguments))


def connect() -> tuple[Any, str]:
    """A registered client: its bus, and the path of the booted OS."""
    bus = Gio.bus_get_sync(Gio.BusType.SYSTEM, None)
    _start(bus)
    bus.call_sync(
        NAME,
        SYSROOT,
        f"{NAME}.Sysroot",
        "RegisterClient",
        GLib.Variant("(a{sv})", ({"id": GLib.Variant("s", "naive")},)),
        None,
        0,
        TIMEOUT,
        None,
    )
    booted = bus.call_sync(
        NAME,
        SYSROOT,
        "org.freedesktop.DBus.Properties",
        "Get",
        GLib.Variant("(ss)", (f"{NAME}.Sysroot", "Booted")),
        None,
        0,
        TIMEOUT,
        None,
    ).unpack()[0]
    return bus, str(booted)


def call(bus: Any, booted: str, method: str, arguments: Any) -> tuple[bool, str]:
    """Any transaction, followed to its end: (success, text)."""
    address = bus.call_sync(NAME, booted, f"{NAME}.OS", method, arguments, None, 0, TIMEOUT, None).unpack()[0]
    return _follow(address)


def _start(bus: Any) -> None:
    """Start the service and wait until it owns its name."""
    bus.call_sync(
        "org.freedesktop.systemd1",
        "/org/freedesktop/systemd1",
        "org.freedesktop.systemd1.Manager",
        "StartUnit",
        GLib.Variant("(ss)", ("rpm-ostreed.service", "replace")),
        None,
        0,
        TIMEOUT,
        None,
    )
    loop = GLib.MainLoop()
    Gio.bus_watch_name_on_connection(bus, NAME, Gio.BusNameWatcherFlags.NONE, lambda *_: loop.quit(), None)
    loop.run()


def _follow(address: str) -> tuple[bool, str]:
    peer = Gio.DBusConnection.new_for_address_sync(address, Gio.DBusConnectionFlags.AUTHENTICATION_CLIENT, None, None)
    loop = GLib.MainLoop()
    outcome: list[tuple[bool, str]] = []

    def signalled(_con: Any, _sender: Any, _path: str, _iface: str, signal: str, parameters: Any) -> None:
        if signal == "Message":
            print(parameters.unpack()[0])
        if signal == "Finished":
            outcome.append(parameters.unpack())
            loop.quit()

    def closed(*_arguments: Any) -> None:
        loop.quit()

    peer.signal_subscribe(None, TRANSACTION, None, "/", None, Gio.DBusSignalFlags.NONE, signalled)
    peer.connect("closed", closed)
    peer.call_sync(None, "/", TRANSACTION, "Start", None, None, Gio.DBusCallFlags.NONE, TIMEOUT, None)
    loop.run()
    return outcome[0] if outcome else (False, "rpm-ostreed went away")


def main() -> int:
    success, text = transact(json.loads(sys.argv[1]), json.loads(sys.argv[2]) if len(sys.argv) > 2 else {})
    if not success:
        print(f"error: {text}", file=sys.stderr)
    return 0 if success else 1


if __name__ == "__main__":
    sys.exit(main())
