"""A transaction: an operation in a thread, watched and steered through a private D-Bus socket (rpm-ostree.md 2).

Everything but the operation itself runs in the daemon's main loop.
"""

from __future__ import annotations

import os
import secrets
import sys
import threading
from dataclasses import dataclass
from enum import Enum
from typing import Any, Callable, Optional

from tests.stand.introspection import Gio, GLib
from tests.stand.rpmostreed import interface
from tests.stand.rpmostreed.errors import CANCELLED_TEXT, FAILED, MethodError, OperationFailed

SOCKET_PATH = "/run/rpm-ostree-transaction.sock"
INITIATED = "d5bea37a8fc84ff59dbcfd79177b7df8"


class State(Enum):
    """The life of a transaction; the sysroot lock is held until EXECUTED."""

    CREATED = "created"
    EXECUTING = "executing"
    EXECUTED = "executed"
    CLOSED = "closed"


@dataclass(frozen=True)
class Call:
    """The method call that made a transaction."""

    method: str
    parameters: Any
    sender: str
    object_path: str
    client: str

    def same_as(self, other: Call) -> bool:
        """Whether ``other`` would join: method and parameters alone count (2.3)."""
        return self.method == other.method and bool(self.parameters.equal(other.parameters))


class Output:
    """What an operation tells its clients. May be used from any thread; order is kept."""

    def __init__(self, emit: Callable[[str, Any], bool], retitle: Callable[[str], bool]) -> None:
        self._emit = emit
        self._retitle = retitle

    def message(self, text: str) -> None:
        self._later("Message", GLib.Variant("(s)", (text,)))

    def task_begin(self, text: str) -> None:
        self._later("TaskBegin", GLib.Variant("(s)", (text,)))

    def task_end(self) -> None:
        self._later("TaskEnd", GLib.Variant("(s)", ("done",)))

    def percent(self, text: str, percentage: int) -> None:
        self._later("PercentProgress", GLib.Variant("(su)", (text, percentage)))

    def progress_end(self) -> None:
        self._later("ProgressEnd", None)

    def title(self, text: str) -> None:
        GLib.idle_add(self._retitle, text, priority=GLib.PRIORITY_DEFAULT)

    def _later(self, signal: str, arguments: Any) -> None:
        GLib.idle_add(self._emit, signal, arguments, priority=GLib.PRIORITY_DEFAULT)


class Transaction:
    """``work`` is run with the output and a cancellable after ``Start``; it raises OperationFailed or GLib.Error.

    ``executed`` is called with the success in the main loop before Finished is sent and returns an error text or "";
    ``closed`` when the last peer has gone, ``connected`` when one has come."""

    def __init__(
        self,
        bus: Any,
        call: Call,
        title: str,
        work: Callable[[Output, Any], None],
        executed: Callable[[bool], str],
        closed: Callable[[], None],
        abstract: bool,
        force_close_seconds: int,
        connected: Callable[[], None] = lambda: None,
    ) -> None:
        self.call = call
        self.title = title
        self._bus = bus
        self._work = work
        self._executed = executed
        self._closed = closed
        self._connected = connected
        self._state = State.CREATED
        self._cancellable = Gio.Cancellable()
        self._peers: list[Any] = []
        self._result: Optional[Any] = None
        self._timer = 0
        self._force_close_seconds = force_close_seconds
        self._server = _listen(abstract)
        self._server.connect("new-connection", self._on_connection)
        self._server.start()
        if not abstract:
            os.chmod(SOCKET_PATH, 0o666)
        self._watch = Gio.bus_watch_name_on_connection(
            bus, call.sender, Gio.BusNameWatcherFlags.NONE, None, self._on_owner_vanished
        )
        journal(f"Initiated txn {call.method} for {call.client}: {call.object_path}", MESSAGE_ID=INITIATED)

    @property
    def address(self) -> str:
        return str(self._server.get_client_address())

    @property
    def active(self) -> bool:
        return self._state is not State.CLOSED

    def _on_connection(self, _server: Any, connection: Any) -> bool:
        connection.connect("closed", self._on_peer_closed)
        connection.register_object("/", interface.info(interface.TRANSACTION), self._on_method, self._on_property, None)
        self._peers.append(connection)
        journal("Process connected to transaction progress")
        self._connected()
        return True

    def _on_peer_closed(self, connection: Any, _vanished: bool, _error: Any) -> None:
        if connection in self._peers:
            self._peers.remove(connection)
            journal("Process disconnected from transaction progress")
        self._maybe_close()

    def _on_owner_vanished(self, _bus: Any, _name: str) -> None:
        if self._state is State.CREATED:
            journal("client disconnected before calling Start; cancelling transaction")
            self._state = State.EXECUTED
            self._executed(False)
            self._close()

    def _on_method(
        self, connection: Any, _sender: str, _path: str, _interface: str, method: str, _parameters: Any, invocation: Any
    ) -> None:
        if method == "Start":
            fresh = self._state is State.CREATED
            if fresh:
                self._state = State.EXECUTING
                threading.Thread(target=self._run, name=self.call.method, daemon=True).start()
            invocation.return_value(GLib.Variant("(b)", (fresh,)))
            if self._result is not None:
                _emit(connection, "Finished", self._result)
        elif method == "Cancel":
            self._cancellable.cancel()
            invocation.return_value(None)

    def _on_property(self, _connection: Any, _sender: str, _path: str, _interface: str, name: str) -> Any:
        return GLib.Variant("s", self.title if name == "Title" else self.call.client)

    def _run(self) -> None:
        # A bug in the stand-in must end in the client's Finished too, so this is what stays when it raises.
        success, text = False, "stand: internal error, see the daemon's stderr"
        try:
            self._work(Output(self._emit_all, self._set_title), self._cancellable)
            success, text = True, ""
        except OperationFailed as error:
            success, text = False, str(error)
        except GLib.Error as error:
            cancelled = error.matches(Gio.io_error_quark(), Gio.IOErrorEnum.CANCELLED)
            success, text = False, CANCELLED_TEXT if cancelled else error.message
        finally:
            GLib.idle_add(self._on_executed, success, text, priority=GLib.PRIORITY_DEFAULT)

    def _on_executed(self, success: bool, text: str) -> bool:
        problem = self._executed(success)
        if success and problem:
            success, text = False, f"During txn completion: Sysroot reload: {problem}"
        outcome = "successful" if success else f"failed: {text}"
        journal(f"Txn {self.call.method} on {self.call.object_path} {outcome}")
        self._result = GLib.Variant("(bs)", (success, text))
        self._state = State.EXECUTED
        self._emit_all("Finished", self._result)
        self._timer = GLib.timeout_add_seconds(self._force_close_seconds, self._on_force_close)
        self._maybe_close()
        return False

    def _on_force_close(self) -> bool:
        journal("Forcibly closing transaction due to timeout")
        self._timer = 0
        for peer in list(self._peers):
            journal("Disconnecting process")
            peer.close(None, None)
        self._peers.clear()
        self._maybe_close()
        return False

    def _maybe_close(self) -> None:
        if self._state is State.EXECUTED and not self._peers:
            self._close()

    def _close(self) -> None:
        self._state = State.CLOSED
        if self._timer:
            GLib.source_remove(self._timer)
            self._timer = 0
        Gio.bus_unwatch_name(self._watch)
        self._server.stop()
        self._closed()

    def _set_title(self, text: str) -> bool:
        self.title = text
        changed = GLib.Variant("(sa{sv}as)", (interface.TRANSACTION, {"Title": GLib.Variant("s", text)}, []))
        for peer in self._peers:
            _emit(peer, "PropertiesChanged", changed, interface.PROPERTIES)
        return False

    def _emit_all(self, signal: str, arguments: Any) -> bool:
        for peer in self._peers:
            _emit(peer, signal, arguments)
        return False


def _listen(abstract: bool) -> Any:
    if abstract:
        address = f"unix:abstract=/tmp/dbus-{secrets.token_hex(5)}"
    else:
        address = f"unix:path={SOCKET_PATH}"
        try:
            os.unlink(SOCKET_PATH)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise MethodError(FAILED, f"Failed to unlink {SOCKET_PATH}: {error.strerror}") from error
    return Gio.DBusServer.new_sync(address, Gio.DBusServerFlags.NONE, Gio.dbus_generate_guid(), None, None)


def _emit(connection: Any, signal: str, arguments: Any, name: str = interface.TRANSACTION) -> None:
    try:
        connection.emit_signal(None, "/", name, signal, arguments)
    except GLib.Error as error:  # a peer that is just going away
        journal(f"Failed to emit {signal}: {error.message}")


def journal(text: str, **fields: str) -> None:
    """One line to stderr, with fields as the journal would have them."""
    extra = "".join(f" {key}={value}" for key, value in fields.items())
    print(f"rpm-ostreed: {text}{extra}", file=sys.stderr, flush=True)
