"""D-Bus objects with asynchronous handlers: GDBus in a thread of its own, all handlers in one asyncio loop.

So the code of the stand-in services needs no locks: everything happens in the loop. Only this module knows GLib.
"""

from __future__ import annotations

import asyncio
import threading
import traceback
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Callable, Optional

import gi

gi.require_version("Gio", "2.0")
from gi.repository import Gio, GLib  # noqa: E402 (the version has to be chosen before)

Variant = GLib.Variant
BUS_NAME, BUS_PATH = "org.freedesktop.DBus", "/org/freedesktop/DBus"
PROPERTIES = "org.freedesktop.DBus.Properties"
ACTIVATOR = "org.freedesktop.systemd1.Activator"
_TIMEOUT_MS = 10_000


# GDBus's own implementation refuses GetAll(""), all properties of all interfaces, which systemctl asks for.
_PROPERTIES_INTERFACE = Gio.DBusNodeInfo.new_for_xml(f"""<node><interface name="{PROPERTIES}">
  <method name="Get"><arg type="s" direction="in"/><arg type="s" direction="in"/><arg type="v" direction="out"/>
  </method>
  <method name="GetAll"><arg type="s" direction="in"/><arg type="a{{sv}}" direction="out"/></method>
  <method name="Set"><arg type="s" direction="in"/><arg type="s" direction="in"/><arg type="v" direction="in"/></method>
  <signal name="PropertiesChanged"><arg type="s"/><arg type="a{{sv}}"/><arg type="as"/></signal>
</interface></node>""").interfaces[0]


class BusError(Exception):
    """A D-Bus error answer with its name and text."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(text)
        self.name = name
        self.text = text


@dataclass(frozen=True)
class Call:
    """A method call: who calls which method of which object with what (unpacked) arguments."""

    sender: str
    path: str
    interface: str
    method: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class Descriptor:
    """A file descriptor as the only answer of a method ("h"); it is duplicated into the message and then closed."""

    number: int


Handler = Callable[[Call], Awaitable[object]]
PropertySource = Callable[[str], Mapping[str, Any]]


class BusObject:
    """What is exported at one path: an XML description, a handler for all methods, a source of properties.

    The handler answers None, the tuple of out arguments, a single out argument, or a Descriptor, or raises BusError.
    The source gets an interface and gives Variants by name.
    """

    def __init__(self, xml: str, handler: Handler, properties: PropertySource) -> None:
        self.node = Gio.DBusNodeInfo.new_for_xml(xml)
        self.handler = handler
        self.properties = properties


class Connection:
    """The connection of a stand-in service to the system bus."""

    def __init__(self, address: str, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        context = GLib.MainLoop()
        threading.Thread(target=context.run, name="bus", daemon=True).start()
        flags = Gio.DBusConnectionFlags.AUTHENTICATION_CLIENT | Gio.DBusConnectionFlags.MESSAGE_BUS_CONNECTION
        self._connection = Gio.DBusConnection.new_for_address_sync(address, flags, None, None)
        self._tasks: set[asyncio.Task[None]] = set()
        self._watched: dict[str, list[Callable[[str], None]]] = {}
        self._connection.signal_subscribe(
            BUS_NAME, BUS_NAME, "NameOwnerChanged", BUS_PATH, None, Gio.DBusSignalFlags.NONE, self._owner_changed
        )

    def own(self, name: str) -> None:
        """Own a bus name. Raises RuntimeError when somebody else has it."""
        flag_do_not_queue = 4
        if self._ask_bus("RequestName", Variant("(su)", (name, flag_do_not_queue))) != (1,):
            raise RuntimeError(f"{name} has an owner already")

    def export(self, path: str, target: BusObject) -> None:
        """Serve `target` at `path`."""
        for interface in (*target.node.interfaces, _PROPERTIES_INTERFACE):
            self._connection.register_object(path, interface, self._receiver(target), None, None)

    def export_below(self, prefix: str, factory: Callable[[str], Optional[BusObject]]) -> None:
        """Serve what `factory` makes for a path below `prefix` when that is called for the first time.

        A look at each incoming message comes before GDBus looks for the object; its own way (register_subtree) cannot
        be used from Python. PyGObject leaks these messages: nothing that matters for the life of a test's node.
        """
        seen: set[str] = set()

        def look(_: Any, message: Any, incoming: bool, *rest: object) -> Any:
            path = message.get_path()
            if incoming and path and path.startswith(f"{prefix}/") and path not in seen:
                target = factory(path)
                if target is not None:
                    seen.add(path)
                    self.export(path, target)
            return message

        self._connection.add_filter(look)

    def serve_activation(self, activate: Callable[[str], Awaitable[None]]) -> None:
        """Start units for the bus (dbus-daemon --systemd-activation); `activate` raises BusError when it cannot."""

        def requested(*given: Any) -> None:
            self._loop.call_soon_threadsafe(self._begin_activation, activate, given[5].unpack()[0])

        self._connection.signal_subscribe(
            None, ACTIVATOR, "ActivationRequest", BUS_PATH, None, Gio.DBusSignalFlags.NONE, requested
        )

    def _begin_activation(self, activate: Callable[[str], Awaitable[None]], unit: str) -> None:
        async def run() -> None:
            try:
                await activate(unit)
            except BusError as error:
                failure = Variant("(sss)", (unit, error.name, error.text))
                self._connection.emit_signal(
                    BUS_NAME, "/org/freedesktop/systemd1", ACTIVATOR, "ActivationFailure", failure
                )

        task = self._loop.create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def emit(self, path: str, interface: str, signal: str, signature: str, *arguments: object) -> None:
        """Broadcast a signal."""
        self._connection.emit_signal(None, path, interface, signal, Variant(signature, arguments))

    def emit_changed(self, path: str, interface: str, changed: Mapping[str, Any]) -> None:
        """Broadcast PropertiesChanged."""
        self.emit(path, PROPERTIES, "PropertiesChanged", "(sa{sv}as)", interface, dict(changed), [])

    def flush(self) -> None:
        """Send everything that is queued."""
        self._connection.flush_sync(None)

    def owner(self, name: str) -> str:
        """The unique name of a name's owner, "" without one."""
        try:
            return str(self._ask_bus("GetNameOwner", Variant("(s)", (name,)))[0])
        except GLib.Error:
            return ""

    def credentials(self, sender: str) -> tuple[int, int]:
        """The user and process id behind a unique name, (0, 0) when it has left the bus."""
        try:
            uid = self._ask_bus("GetConnectionUnixUser", Variant("(s)", (sender,)))[0]
            pid = self._ask_bus("GetConnectionUnixProcessID", Variant("(s)", (sender,)))[0]
        except GLib.Error:
            return 0, 0
        return int(uid), int(pid)

    def watch(self, name: str, changed: Callable[[str], None]) -> None:
        """Call `changed` (in the loop) with the new owner, "" for none, whenever the owner of `name` changes."""
        self._watched.setdefault(name, []).append(changed)

    def unwatch(self, name: str, changed: Callable[[str], None]) -> None:
        """End a watch."""
        self._watched.get(name, []).remove(changed)

    def _ask_bus(self, method: str, arguments: Any) -> tuple[Any, ...]:
        answer = self._connection.call_sync(
            BUS_NAME, BUS_PATH, BUS_NAME, method, arguments, None, Gio.DBusCallFlags.NONE, _TIMEOUT_MS, None
        )
        return tuple(answer.unpack())

    def _owner_changed(self, *signal: Any) -> None:
        name, _, owner = signal[5].unpack()
        self._loop.call_soon_threadsafe(self._tell_watchers, name, owner)

    def _tell_watchers(self, name: str, owner: str) -> None:
        for changed in list(self._watched.get(name, [])):
            changed(owner)

    def _receiver(self, target: BusObject) -> Callable[..., None]:
        def receive(_: Any, sender: str, path: str, interface: str, method: str, given: Any, invocation: Any) -> None:
            call = Call(sender or "", path, interface, method, tuple(given.unpack()))
            self._loop.call_soon_threadsafe(self._begin, target, call, invocation)

        return receive

    def _begin(self, target: BusObject, call: Call, invocation: Any) -> None:
        task = self._loop.create_task(self._answer(target, call, invocation))
        self._tasks.add(task)
        task.add_done_callback(lambda done: self._ended(done, invocation))

    def _ended(self, task: asyncio.Task[None], invocation: Any) -> None:
        """A mistake in a handler becomes an answer too, so that the caller does not wait for its timeout."""
        self._tasks.discard(task)
        error = task.exception()
        if error is not None:
            traceback.print_exception(type(error), error, error.__traceback__)
            invocation.return_dbus_error("org.freedesktop.DBus.Error.Failed", f"the stand failed: {error!r}")

    async def _answer(self, target: BusObject, call: Call, invocation: Any) -> None:
        try:
            if call.interface == PROPERTIES:
                result: object = _property_answer(target, call)
            else:
                result = await target.handler(call)
        except BusError as error:
            invocation.return_dbus_error(error.name, error.text)
            return
        if isinstance(result, Descriptor):
            descriptors = Gio.UnixFDList.new_from_array([result.number])  # Owns the number from here on.
            invocation.return_value_with_unix_fd_list(Variant("(h)", (0,)), descriptors)
            return
        invocation.return_value(_pack(invocation.get_method_info(), result))


def _pack(method: Any, result: object) -> Any:
    if isinstance(result, Variant):
        return result
    out = [argument.signature for argument in method.out_args] if method is not None else []
    if not out:
        return None
    values: Sequence[object] = result if len(out) > 1 and isinstance(result, (tuple, list)) else [result]
    return Variant(f"({''.join(out)})", tuple(values))


def _property_answer(target: BusObject, call: Call) -> Any:
    if call.method == "GetAll":
        wanted = [call.arguments[0]] if call.arguments[0] else [each.name for each in target.node.interfaces]
        found = {name: value for interface in wanted for name, value in target.properties(interface).items()}
        return Variant("(a{sv})", (found,))
    interface, name = call.arguments[0], call.arguments[1]
    properties = target.properties(interface)
    if call.method == "Set":
        raise BusError("org.freedesktop.DBus.Error.PropertyReadOnly", f"Property {name} is not writable.")
    if name not in properties:
        text = f"Unknown interface {interface} or property {name}."
        raise BusError("org.freedesktop.DBus.Error.UnknownProperty", text)
    return Variant("(v)", (properties[name],))
