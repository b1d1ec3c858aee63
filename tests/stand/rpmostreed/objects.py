"""The objects on the bus: exporting them, their properties and the signals about both (rpm-ostree.md 1.1)."""

from __future__ import annotations

from typing import Any, Callable

from tests.stand.introspection import GLib
from tests.stand.rpmostreed import interface

Handler = Callable[..., None]
Values = dict[str, Any]


class Objects:
    """All objects and the last known values of their properties, as variants."""

    def __init__(self, bus: Any) -> None:
        self._bus = bus
        self._registrations: dict[str, list[int]] = {}
        self._values: dict[tuple[str, str], Values] = {}
        self.osnames: dict[str, str] = {}

    def start(self, sysroot_handler: Handler) -> None:
        """Exports the object manager and the Sysroot object."""
        self._export(interface.BASE_PATH, interface.OBJECT_MANAGER, self._on_manager)
        self._export(interface.SYSROOT_PATH, interface.SYSROOT, sysroot_handler)

    def set(self, path: str, name: str, values: Values) -> None:
        """Sets properties and emits PropertiesChanged for those that differ."""
        known = self._values.setdefault((path, name), {})
        changed = {key: value for key, value in values.items() if key not in known or not known[key].equal(value)}
        fresh = not known
        known.update(values)
        if changed and not fresh:
            signal = GLib.Variant("(sa{sv}as)", (name, changed, []))
            self._bus.emit_signal(None, path, interface.PROPERTIES, "PropertiesChanged", signal)

    def get(self, path: str, name: str, key: str) -> Any:
        """The value of one property, unpacked."""
        return self._values[path, name][key].unpack()

    def set_os(self, osname: str, values: Values, handlers: dict[str, Handler]) -> None:
        """Sets the properties of a stateroot's object and exports it, by interface, where it is new."""
        path = interface.os_path(osname)
        self.set(path, interface.OS, values)
        if path in self.osnames:
            return
        self.osnames[path] = osname
        for name, handler in handlers.items():
            self._export(path, name, handler)
        self._announce("InterfacesAdded", GLib.Variant("(oa{sa{sv}})", (path, self._managed(path))))

    def keep_os(self, osnames: list[str]) -> None:
        """Removes the objects of all other stateroots."""
        for path in [path for path, osname in self.osnames.items() if osname not in osnames]:
            for number in self._registrations.pop(path):
                self._bus.unregister_object(number)
            del self.osnames[path]
            del self._values[path, interface.OS]
            self._announce("InterfacesRemoved", GLib.Variant("(oas)", (path, [interface.OS, interface.EXPERIMENTAL])))

    def _export(self, path: str, name: str, handler: Handler) -> None:
        number = self._bus.register_object(path, interface.info(name), handler, self._on_property, None)
        self._registrations.setdefault(path, []).append(number)

    def _announce(self, signal: str, arguments: Any) -> None:
        self._bus.emit_signal(None, interface.BASE_PATH, interface.OBJECT_MANAGER, signal, arguments)

    def _managed(self, path: str) -> dict[str, Values]:
        if path == interface.SYSROOT_PATH:
            return {interface.SYSROOT: self._values[path, interface.SYSROOT]}
        return {interface.OS: self._values[path, interface.OS], interface.EXPERIMENTAL: {}}

    def _on_property(self, _bus: Any, _sender: str, path: str, name: str, key: str) -> Any:
        return self._values[path, name][key]

    def _on_manager(
        self, _bus: Any, _sender: str, _path: str, _name: str, _method: str, _parameters: Any, invocation: Any
    ) -> None:
        managed = {path: self._managed(path) for path in [interface.SYSROOT_PATH, *self.osnames]}
        invocation.return_value(GLib.Variant("(a{oa{sa{sv}}})", (managed,)))
