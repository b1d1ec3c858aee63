"""The daemon's objects on the bus: Sysroot, one OS object per stateroot, clients, and the one transaction at a time.

Locks: every transaction has a Sysroot of its own that holds /ostree/lock from the method call until Finished, as with
rpm-ostreed. All libostree work is done in this process on that locked object. The only ostree program started is
``ostree commit`` on the repository, which does not take the sysroot's lock.
"""

from __future__ import annotations

import configparser
import contextlib
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Optional

from tests.stand.introspection import Gio, GLib
from tests.stand.rpmostreed import deployments, errors, faults, interface, methods
from tests.stand.rpmostreed.errors import MethodError, OperationFailed
from tests.stand.rpmostreed.faults import Faults
from tests.stand.rpmostreed.options import Options
from tests.stand.rpmostreed.profiles import Profile
from tests.stand.rpmostreed.sysroot import Sysroot
from tests.stand.rpmostreed.transaction import Call, Transaction, journal
from tests.stand.rpmostreed.work import Client, Work, start_reboot

CONFIG = Path("/etc/rpm-ostreed.conf")
NO_IDLE_EXIT = "RPMOSTREE_DEBUG_DISABLE_DAEMON_IDLE_EXIT"
POLICIES = ("none", "check", "stage", "apply")
BUS_TIMEOUT_MS = 2000
_IDLE_JITTER = 4
_UNCHECKED_SYSROOT = ("Reload", "GetOS")
_UNCHECKED_OS = ("GetDeploymentBootConfig", "ListRepos", "WhatProvides", "GetPackages", "Search")


@dataclass(frozen=True)
class Settings:
    """/etc/rpm-ostreed.conf, as far as it matters here (1.8)."""

    policy: str = "none"
    idle_exit: int = 60
    lock_layering: bool = False


def read_settings(path: Path = CONFIG) -> Settings:
    """The daemon's settings; a missing file is only worth a line. Raises OperationFailed."""
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read_string(path.read_text())
    except FileNotFoundError:
        journal(f"Failed to load {path}: No such file or directory")
        return Settings()
    except configparser.Error as error:
        raise OperationFailed(f"Failed to load {path}: {error}") from error
    if not parser.has_section("Daemon"):
        return Settings()
    section = parser["Daemon"]
    policy = section.get("AutomaticUpdatePolicy", "none")
    if policy not in POLICIES:
        raise OperationFailed(f"Invalid value for AutomaticUpdatePolicy: '{policy}'")
    return Settings(policy, section.getint("IdleExitTimeout", 60), section.getboolean("LockLayering", False))


class Daemon:
    """Exports everything on ``bus``. ``leave`` is called when the daemon exits for idleness."""

    def __init__(self, bus: Any, profile: Profile, leave: Callable[[], None]) -> None:
        self.bus = bus
        self.profile = profile
        self.settings = read_settings()
        self.sysroot = Sysroot()
        self.transaction: Optional[Transaction] = None
        self.rebooting = False
        self._leave = leave
        self._clients: dict[str, tuple[str, int]] = {}
        self._idle_timer = 0
        self._objects: dict[str, list[int]] = {}
        self._values: dict[tuple[str, str], dict[str, Any]] = {}
        self._osnames: dict[str, str] = {}
        self._monitor = Gio.File.new_for_path("/ostree/deploy").monitor_directory(Gio.FileMonitorFlags.NONE, None)

    def start(self) -> None:
        """Exports the objects; GLib.Error and OperationFailed where the sysroot cannot be read."""
        self._export(interface.BASE_PATH, interface.OBJECT_MANAGER, self._on_manager)
        self._export(interface.SYSROOT_PATH, interface.SYSROOT, self._on_sysroot)
        self.publish()
        self._monitor.connect("changed", self._on_deploy_changed)
        self._update_idle()

    # What the bus sees

    def publish(self) -> None:
        """Computes all properties afresh, makes and removes OS objects, and announces what changed."""
        described = deployments.describe_all(self.sysroot)
        names = list(dict.fromkeys(item.get_osname() for item in self.sysroot.deployments))
        for osname in [name for name in self._osnames.values() if name not in names]:
            self._remove_os(osname)
        for osname in names:
            self._set(interface.os_path(osname), interface.OS, self._os_properties(osname))
            if interface.os_path(osname) not in self._osnames:
                self._add_os(osname)
        booted = self.sysroot.booted
        self._set(
            interface.SYSROOT_PATH,
            interface.SYSROOT,
            {
                "Booted": GLib.Variant("o", interface.os_path(booted.get_osname()) if booted else "/"),
                "Path": GLib.Variant("s", "/"),
                "AutomaticUpdatePolicy": GLib.Variant("s", self.settings.policy),
                "Deployments": GLib.Variant("aa{sv}", described),
                **self._transaction_properties(),
            },
        )

    def _transaction_properties(self) -> dict[str, Any]:
        active = self.transaction
        call = (active.call.method, active.call.sender, active.call.object_path) if active else ("", "", "")
        return {
            "ActiveTransaction": GLib.Variant("(sss)", call),
            "ActiveTransactionPath": GLib.Variant("s", active.address if active else ""),
        }

    def _os_properties(self, osname: str) -> dict[str, Any]:
        sysroot = self.sysroot
        booted = sysroot.booted
        mine = booted if booted is not None and booted.get_osname() == osname else None
        described = {
            "BootedDeployment": mine,
            "DefaultDeployment": sysroot.pending(osname) or mine,
            "RollbackDeployment": sysroot.rollback(osname),
        }
        values = {key: GLib.Variant("a{sv}", deployments.describe(sysroot, item)) for key, item in described.items()}
        return {
            **values,
            "CachedUpdate": GLib.Variant("a{sv}", {}),
            "Name": GLib.Variant("s", osname),
            "HasCachedUpdateRpmDiff": GLib.Variant("b", False),
        }

    def _set(self, path: str, name: str, values: dict[str, Any]) -> None:
        known = self._values.setdefault((path, name), {})
        changed = {key: value for key, value in values.items() if key not in known or not known[key].equal(value)}
        fresh = not known
        known.update(values)
        if changed and not fresh:
            self.bus.emit_signal(
                None, path, interface.PROPERTIES, "PropertiesChanged", GLib.Variant("(sa{sv}as)", (name, changed, []))
            )

    def _export(self, path: str, name: str, handler: Callable[..., None]) -> None:
        number = self.bus.register_object(path, interface.info(name), handler, self._on_property, None)
        self._objects.setdefault(path, []).append(number)

    def _add_os(self, osname: str) -> None:
        path = interface.os_path(osname)
        self._osnames[path] = osname
        self._export(path, interface.OS, self._on_os)
        self._export(path, interface.EXPERIMENTAL, self._on_experimental)
        self.bus.emit_signal(
            None,
            interface.BASE_PATH,
            interface.OBJECT_MANAGER,
            "InterfacesAdded",
            GLib.Variant("(oa{sa{sv}})", (path, self._managed(path))),
        )

    def _remove_os(self, osname: str) -> None:
        path = interface.os_path(osname)
        for number in self._objects.pop(path):
            self.bus.unregister_object(number)
        del self._osnames[path]
        del self._values[path, interface.OS]
        self.bus.emit_signal(
            None,
            interface.BASE_PATH,
            interface.OBJECT_MANAGER,
            "InterfacesRemoved",
            GLib.Variant("(oas)", (path, [interface.OS, interface.EXPERIMENTAL])),
        )

    def _managed(self, path: str) -> dict[str, Any]:
        if path == interface.SYSROOT_PATH:
            return {interface.SYSROOT: self._values[path, interface.SYSROOT]}
        return {interface.OS: self._values[path, interface.OS], interface.EXPERIMENTAL: {}}

    def _on_property(self, _bus: Any, _sender: str, path: str, name: str, key: str) -> Any:
        return self._values[path, name][key]

    # Method calls

    def _on_manager(
        self, _bus: Any, _sender: str, _path: str, _name: str, _method: str, _parameters: Any, invocation: Any
    ) -> None:
        managed = {path: self._managed(path) for path in [interface.SYSROOT_PATH, *self._osnames]}
        invocation.return_value(GLib.Variant("(a{oa{sa{sv}}})", (managed,)))

    def _on_sysroot(
        self, _bus: Any, sender: str, _path: str, _name: str, method: str, parameters: Any, invocation: Any
    ) -> None:
        with _answering(invocation):
            if method not in _UNCHECKED_SYSROOT:
                self._authorize(sender, "Sysroot", method)
            if method == "RegisterClient":
                self._register(sender, Options(parameters.get_child_value(0)).text("id") or "")
            elif method == "UnregisterClient":
                self._unregister(sender)
            elif method == "Reload":
                # Low priority, so that a peer connection which the client just closed is dealt with first (1.2).
                GLib.idle_add(self._reload_later, invocation, priority=GLib.PRIORITY_LOW)
                return
            elif method == "ReloadConfig":
                self._reload_config()
            elif method == "GetOS":
                invocation.return_value(GLib.Variant("(o)", (self._find_os(parameters.unpack()[0]),)))
                return
            invocation.return_value(None)

    def _on_os(
        self, _bus: Any, sender: str, path: str, _name: str, method: str, parameters: Any, invocation: Any
    ) -> None:
        with _answering(invocation):
            if method not in _UNCHECKED_OS:
                self._authorize(sender, "OS", method)
            self.reload()
            query = methods.QUERIES.get(method)
            if query is not None:
                invocation.return_value(query(self.sysroot, self._osnames[path], parameters))
                return
            address = self._begin(sender, path, method, parameters, invocation.get_message())
            reply = ("(bs)", (bool(address), address)) if method == "AutomaticUpdateTrigger" else ("(s)", (address,))
            invocation.return_value(GLib.Variant(*reply))

    def _on_experimental(
        self, _bus: Any, _sender: str, _path: str, _name: str, method: str, parameters: Any, invocation: Any
    ) -> None:
        with _answering(invocation):
            if method != "Moo":
                raise MethodError(errors.FAILED, f"stand: {method} is not supported")
            invocation.return_value(GLib.Variant("(s)", (methods.cow(parameters.unpack()[0]),)))

    def _find_os(self, osname: str) -> str:
        if not osname:
            return str(self._values[interface.SYSROOT_PATH, interface.SYSROOT]["Booted"].get_string())
        path = interface.os_path(osname)
        if self._osnames.get(path) != osname:
            raise MethodError(errors.NOT_FOUND, f'OS name "{osname}" not found')
        return path

    def _authorize(self, sender: str, kind: str, method: str) -> None:
        if self._uid(sender) != 0:
            raise MethodError(errors.ACCESS_DENIED, f"rpmostreed {kind} operation {method} not allowed for user")

    def _uid(self, sender: str) -> int:
        try:
            found = self.bus.call_sync(
                "org.freedesktop.DBus",
                "/org/freedesktop/DBus",
                "org.freedesktop.DBus",
                "GetConnectionUnixUser",
                GLib.Variant("(s)", (sender,)),
                GLib.VariantType("(u)"),
                Gio.DBusCallFlags.NONE,
                BUS_TIMEOUT_MS,
                None,
            )
        except GLib.Error as error:
            raise MethodError(errors.FAILED, f"Failed direct authorization: {error.message}") from error
        return int(found.unpack()[0])

    # Transactions

    def _begin(self, sender: str, path: str, method: str, parameters: Any, message: Any) -> str:
        """The address of the transaction for a call: the active one where the call joins it, or a new one."""
        call = Call(method, parameters, sender, path, self._client_description(sender))
        active = self.transaction
        if active is not None:
            if not active.call.same_as(call):
                raise MethodError(
                    errors.BUSY,
                    f"Transaction in progress: {active.title}\n You can cancel the current "
                    "transaction with `rpm-ostree cancel`",
                )
            journal("Client joining existing transaction")
            return active.address
        fault = faults.read(method)
        if self.rebooting or fault.flag("reboot_initiated"):
            raise MethodError(errors.FAILED, "Reboot initiated, cannot start new transaction")
        plan = methods.plan(
            self._osnames[path], method, parameters, message.get_unix_fd_list(), self.settings.policy, self.sysroot
        )
        return self._launch(call, plan, fault) if plan is not None else ""

    def _launch(self, call: Call, plan: methods.Plan, fault: Faults) -> str:
        sysroot = Sysroot()
        journal("Loaded sysroot")
        with faults.foreign_lock(fault.flag("busy")):
            sysroot.lock()
        journal("Locked sysroot")
        work: list[Work] = []

        def operate(output: Any, cancellable: Any) -> None:
            work.append(
                Work(
                    sysroot,
                    self._osnames[call.object_path],
                    self._client(call.sender),
                    self.profile,
                    fault,
                    output,
                    cancellable,
                    lock_layering=self.settings.lock_layering,
                )
            )
            work[0].reach("after-start")
            plan.operation(work[0])
            work[0].faults.reach("after-stage-before-finished", cancellable)

        def executed(success: bool) -> str:
            sysroot.unlock()
            journal("Unlocked sysroot")
            if success and work and work[0].reboot_wanted:
                self.rebooting = True
                GLib.idle_add(start_reboot, priority=GLib.PRIORITY_LOW)
            return self.reload(force=True, report=True)

        try:
            self.transaction = Transaction(
                self.bus,
                call,
                plan.title,
                operate,
                executed,
                self._closed,
                self.profile.abstract_socket,
                fault.force_close_seconds,
            )
        except BaseException:
            sysroot.unlock()
            raise
        self._set(interface.SYSROOT_PATH, interface.SYSROOT, self._transaction_properties())
        self._update_idle()
        return self.transaction.address

    def _closed(self) -> None:
        self.transaction = None
        self._set(interface.SYSROOT_PATH, interface.SYSROOT, self._transaction_properties())
        self._update_idle()

    # Reloading

    def reload(self, force: bool = False, report: bool = False) -> str:
        """Reads the deployments if they changed. On failure the old values stay; with ``report`` the text is returned,
        else raised as MethodError."""
        try:
            if self.sysroot.reload() or force:
                self.publish()
        except (GLib.Error, OperationFailed) as error:
            text = f"Reading deployments: {getattr(error, 'message', '') or error}"
            if not report:
                raise MethodError(errors.FAILED, text) from error
            return text
        return ""

    def _reload_later(self, invocation: Any) -> bool:
        with _answering(invocation, "Handling reload: "):
            self.reload(force=True)
            invocation.return_value(None)
        return False

    def _reload_config(self) -> None:
        try:
            self.settings = read_settings()
        except OperationFailed as error:
            raise MethodError(
                errors.FAILED, f"Handling config reload: Reloading daemon configuration: {error}"
            ) from error
        self.reload(force=True)
        self._update_idle()

    def _on_deploy_changed(self, _monitor: Any, _file: Any, _other: Any, event: Any) -> None:
        if event == Gio.FileMonitorEvent.ATTRIBUTE_CHANGED:
            problem = self.reload(report=True)
            if problem:
                journal(f"Unable to update state: {problem}")

    # Clients and idleness

    def _register(self, sender: str, identity: str) -> None:
        if sender in self._clients:
            return
        watch = Gio.bus_watch_name_on_connection(
            self.bus, sender, Gio.BusNameWatcherFlags.NONE, None, lambda _bus, name: self._unregister(name)
        )
        self._clients[sender] = (identity, watch)
        journal(f"client(id:{identity} dbus:{sender}) added; new total={len(self._clients)}")
        self._update_idle()

    def _unregister(self, sender: str) -> None:
        if sender not in self._clients:
            return
        identity, watch = self._clients.pop(sender)
        Gio.bus_unwatch_name(watch)
        journal(f"client(id:{identity} dbus:{sender}) vanished; remaining={len(self._clients)}")
        self._update_idle()

    def _client_description(self, sender: str) -> str:
        identity = self._clients.get(sender, ("", 0))[0]
        return f"client(id:{identity} dbus:{sender} uid:{self._uid(sender)})" if identity else f"client(dbus:{sender})"

    def _client(self, sender: str) -> Client:
        identity = self._clients.get(sender, ("", 0))[0]
        return Client("" if identity == "cli" else identity, methods.unit_of(self.bus, sender))

    def _update_idle(self) -> None:
        if self._idle_timer:
            GLib.source_remove(self._idle_timer)
            self._idle_timer = 0
        if self._clients or self.transaction or not self.settings.idle_exit or NO_IDLE_EXIT in os.environ:
            return
        seconds = self.settings.idle_exit + random.randint(0, _IDLE_JITTER)
        journal(f"In idle state; will auto-exit in {seconds} seconds")
        self._idle_timer = GLib.timeout_add_seconds(seconds, self._on_idle)

    def _on_idle(self) -> bool:
        self._idle_timer = 0
        self._leave()
        return False


@contextlib.contextmanager
def _answering(invocation: Any, prefix: str = "") -> Iterator[None]:
    """Turns the errors of a method's handler into its D-Bus error."""
    try:
        yield
    except MethodError as error:
        invocation.return_dbus_error(error.name, prefix + error.text)
    except OperationFailed as error:
        invocation.return_dbus_error(errors.FAILED, prefix + str(error))
    except GLib.Error as error:
        invocation.return_dbus_error(errors.FAILED, prefix + error.message)
    except BaseException as error:  # a bug of the stand-in: the client must not wait for an answer
        invocation.return_dbus_error(errors.FAILED, f"stand: internal error: {error!r}")
        raise
