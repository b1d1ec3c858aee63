"""A client of rpm-ostreed for the conformance suite: plain Gio, no policy, nothing retried.

It talks to a daemon on any system bus by its address. In a stand's node ``open_socket`` makes the connections from
inside, because the node has paths of its own and GLib refuses credentials from another PID namespace.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Callable, Optional

from tests.stand.introspection import Gio, GLib

NAME = "org.projectatomic.rpmostree1"
BASE = "/org/projectatomic/rpmostree1"
SYSROOT_PATH = f"{BASE}/Sysroot"
SYSROOT, OS, TRANSACTION = f"{NAME}.Sysroot", f"{NAME}.OS", f"{NAME}.Transaction"
PROPERTIES = "org.freedesktop.DBus.Properties"
TIMEOUT = 30.0
_CODE = "org.gtk.GDBus.UnmappedGError.Quark._g_2dio_2derror_2dquark.Code"
BUSY, NOT_FOUND, FAILED = _CODE + "26", _CODE + "1", _CODE + "0"


class RemoteError(Exception):
    """A D-Bus error reply."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(f"{name}: {text}")
        self.name = name
        self.text = text


def iterate_until(condition: Callable[[], bool], timeout: float = TIMEOUT) -> bool:
    """Runs the main context until ``condition`` holds; whether it came to hold in time."""
    context = GLib.MainContext.default()
    expired: list[bool] = []
    timer = GLib.timeout_add(int(timeout * 1000), lambda: expired.append(True))
    try:
        while not condition() and not expired:
            context.iteration(True)
    finally:
        if not expired:
            GLib.source_remove(timer)
    return condition()


@dataclass
class Peer:
    """A connection to a transaction's socket, and all that came over it."""

    connection: Any
    signals: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)
    closed: bool = False

    @property
    def finished(self) -> list[tuple[bool, str]]:
        return [(bool(arguments[0]), str(arguments[1])) for name, arguments in self.signals if name == "Finished"]

    @property
    def messages(self) -> list[str]:
        return [str(arguments[0]) for name, arguments in self.signals if name == "Message"]

    def start(self) -> bool:
        return bool(self._call("Start", "(b)")[0])

    def cancel(self) -> None:
        self._call("Cancel", None)

    def wait(self, timeout: float = TIMEOUT) -> tuple[bool, str]:
        """The first Finished. AssertionError when none comes or the connection ends."""
        iterate_until(lambda: bool(self.finished) or self.closed, timeout)
        assert self.finished, f"no Finished; closed={self.closed} signals={self.signals}"
        return self.finished[0]

    def close(self) -> None:
        if not self.closed:
            self.connection.close_sync(None)

    def property(self, name: str) -> Any:
        arguments = GLib.Variant("(ss)", (TRANSACTION, name))
        return self._call("Get", "(v)", arguments, PROPERTIES)[0]

    def introspect(self) -> str:
        return str(self._call("Introspect", "(s)", None, "org.freedesktop.DBus.Introspectable")[0])

    def _call(self, method: str, reply: Optional[str], arguments: Any = None, interface: str = TRANSACTION) -> Any:
        kind = GLib.VariantType(reply) if reply else None
        return call(self.connection, None, "/", interface, method, arguments, kind).unpack()


class RpmOstree:
    """A client on the bus with a connection of its own (so that it can vanish)."""

    def __init__(self, address: str, open_socket: Optional[Callable[[str], int]] = None) -> None:
        self._open_socket = open_socket
        self.bus = self._connect(address, Gio.DBusConnectionFlags.MESSAGE_BUS_CONNECTION)
        self.bus.set_exit_on_close(False)
        self.changes: list[tuple[str, dict[str, Any]]] = []
        self.lost_owner = False
        name = "org.freedesktop.DBus"
        self.bus.signal_subscribe(name, name, "NameOwnerChanged", None, NAME, Gio.DBusSignalFlags.NONE, self._on_owner)
        self.bus.signal_subscribe(
            NAME, PROPERTIES, "PropertiesChanged", None, None, Gio.DBusSignalFlags.NONE, self._on_changed
        )

    def _on_owner(self, *event: Any) -> None:
        self.lost_owner = self.lost_owner or not event[5].unpack()[2]

    def _on_changed(self, _bus: Any, _sender: str, path: str, _interface: str, _signal: str, arguments: Any) -> None:
        self.changes.append((path, arguments.unpack()[1]))

    def owner(self) -> str:
        """The unique name of the daemon, or ``""``; does not start it."""
        name = "org.freedesktop.DBus"
        try:
            reply = call(self.bus, name, "/", name, "GetNameOwner", GLib.Variant("(s)", (NAME,)), None)
        except RemoteError:
            return ""
        return str(reply.unpack()[0])

    def vanish(self) -> None:
        """Leaves the bus."""
        self.bus.close_sync(None)

    def sysroot(self, method: str, signature: str = "()", *arguments: Any) -> Any:
        return call(self.bus, NAME, SYSROOT_PATH, SYSROOT, method, GLib.Variant(signature, arguments), None).unpack()

    def os(self, method: str, signature: str = "()", *arguments: Any) -> Any:
        """Calls a method of the booted OS object. Raises RemoteError."""
        return call(self.bus, NAME, self.os_path, OS, method, GLib.Variant(signature, arguments), None).unpack()

    def get(self, name: str, interface: str = SYSROOT, path: str = SYSROOT_PATH) -> Any:
        arguments = GLib.Variant("(ss)", (interface, name))
        return call(self.bus, NAME, path, PROPERTIES, "Get", arguments, GLib.VariantType("(v)")).unpack()[0]

    @property
    def os_path(self) -> str:
        return str(self.get("Booted"))

    def os_get(self, name: str) -> Any:
        return self.get(name, OS, self.os_path)

    def register(self, identity: str = "conformance") -> None:
        self.sysroot("RegisterClient", "(a{sv})", {"id": GLib.Variant("s", identity)})

    def connect(self, address: str) -> Peer:
        """Opens a transaction's socket and subscribes to everything on it."""
        connection = self._connect(address, Gio.DBusConnectionFlags.DELAY_MESSAGE_PROCESSING)
        connection.set_exit_on_close(False)
        peer = Peer(connection)
        connection.connect("closed", lambda *_: setattr(peer, "closed", True))
        connection.signal_subscribe(
            None,
            TRANSACTION,
            None,
            "/",
            None,
            Gio.DBusSignalFlags.NONE,
            lambda *event: peer.signals.append((event[4], event[5].unpack())),
        )
        connection.start_message_processing()
        return peer

    def _connect(self, address: str, flags: Any) -> Any:
        if self._open_socket is None:
            flags |= Gio.DBusConnectionFlags.AUTHENTICATION_CLIENT
            return Gio.DBusConnection.new_for_address_sync(address, flags, None, None)
        # Authenticated already, so no authentication flag here.
        stream = Gio.Socket.new_from_fd(self._open_socket(address)).connection_factory_create_connection()
        return Gio.DBusConnection.new_sync(stream, None, flags, None, None)

    def run(self, method: str, signature: str, *arguments: Any, timeout: float = TIMEOUT) -> Peer:
        """A whole transaction: call, connect, Start, Finished, close, Reload. The closed peer with its signals."""
        peer = self.connect(self.os(method, signature, *arguments)[-1])
        try:
            peer.start()
            peer.wait(timeout)
        finally:
            peer.close()
        self.sysroot("Reload")
        return peer

    def update(
        self,
        modifiers: Optional[dict[str, Any]] = None,
        options: Optional[dict[str, Any]] = None,
        timeout: float = TIMEOUT,
    ) -> Peer:
        """A whole UpdateDeployment; keys with underscores for dashes."""
        return self.run("UpdateDeployment", "(a{sv}a{sv})", variants(modifiers), variants(options), timeout=timeout)

    def kargs(self, options: Optional[dict[str, Any]] = None, added: tuple[str, ...] = ()) -> Peer:
        """A whole KernelArgs on the pending arguments."""
        existing = self.os("GetDeploymentBootConfig", "(sb)", "", True)[0]["options"]
        return self.run("KernelArgs", "(sasasasa{sv})", existing, added, (), (), variants(options))

    def wait_idle(self) -> None:
        """Waits until no transaction is active."""
        deadline = time.monotonic() + TIMEOUT
        while self.get("ActiveTransactionPath"):
            self.changes.clear()
            iterate_until(lambda: bool(self.changes), max(0.1, deadline - time.monotonic()))
            assert time.monotonic() < deadline, "the transaction stays active"


def variants(values: Optional[dict[str, Any]]) -> dict[str, Any]:
    """Python values as the variants that rpm-ostree wants: bool, str, list of str; variants as they are."""
    kinds = {bool: "b", str: "s", list: "as", tuple: "as"}
    return {
        key.replace("_", "-"): value if isinstance(value, GLib.Variant) else GLib.Variant(kinds[type(value)], value)
        for key, value in (values or {}).items()
    }


def call(
    connection: Any, name: Optional[str], path: str, interface: str, method: str, arguments: Any, reply: Any
) -> Any:
    """A D-Bus call. Raises RemoteError for an error reply."""
    try:
        return connection.call_sync(
            name, path, interface, method, arguments, reply, Gio.DBusCallFlags.NONE, int(TIMEOUT * 1000), None
        )
    except GLib.Error as error:
        remote = Gio.DBusError.get_remote_error(error)
        if remote is None:
            raise
        # Gio.DBusError.strip_remote_error changes a copy only when called from Python.
        raise RemoteError(remote, error.message.replace(f"GDBus.Error:{remote}: ", "", 1)) from error
