"""The daemon: answers method calls, runs one transaction at a time, and keeps the published deployments fresh.

Locks: every transaction has a Sysroot of its own that holds /ostree/lock from the method call until Finished, as with
rpm-ostreed. All libostree work is done in this process on that locked object. The only ostree program started is
``ostree commit`` on the repository, which does not take the sysroot's lock.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Callable, Optional

from tests.stand.introspection import Gio, GLib
from tests.stand.rpmostreed import deployments, errors, faults, interface, methods, settings
from tests.stand.rpmostreed.clients import Clients, IdleTimer
from tests.stand.rpmostreed.errors import MethodError, OperationFailed
from tests.stand.rpmostreed.faults import Faults
from tests.stand.rpmostreed.objects import Objects
from tests.stand.rpmostreed.options import Options
from tests.stand.rpmostreed.profiles import Profile
from tests.stand.rpmostreed.sysroot import Sysroot
from tests.stand.rpmostreed.transaction import Call, Transaction, journal
from tests.stand.rpmostreed.work import Work, start_reboot

# Methods that everybody may call (1.7).
_UNCHECKED = frozenset(
    {"Reload", "GetOS", "GetDeploymentBootConfig", "ListRepos", "WhatProvides", "GetPackages", "Search"}
)


class Daemon:
    """Serves ``bus``. ``leave`` is called when the daemon exits for idleness."""

    def __init__(self, bus: Any, profile: Profile, leave: Callable[[], None]) -> None:
        self.profile = profile
        self.settings = settings.read()
        self.sysroot = Sysroot()
        self.transaction: Optional[Transaction] = None
        self.rebooting = False
        self._bus = bus
        self._objects = Objects(bus)
        self._clients = Clients(bus, self._update_idle)
        self._idle = IdleTimer(leave)
        self._monitor = Gio.File.new_for_path("/ostree/deploy").monitor_directory(Gio.FileMonitorFlags.NONE, None)

    def start(self) -> None:
        """Exports the objects; GLib.Error and OperationFailed where the sysroot cannot be read."""
        self._objects.start(self._on_sysroot)
        self.publish()
        self._monitor.connect("changed", self._on_deploy_changed)
        self._update_idle()

    # What the bus sees

    def publish(self) -> None:
        """Computes all properties afresh, makes and removes OS objects, and announces what changed."""
        described = deployments.describe_all(self.sysroot)
        osnames = list(dict.fromkeys(str(item.get_osname()) for item in self.sysroot.deployments))
        self._objects.keep_os(osnames)
        handlers = {interface.OS: self._on_os, interface.EXPERIMENTAL: self._on_experimental}
        for osname in osnames:
            self._objects.set_os(osname, deployments.describe_os(self.sysroot, osname), handlers)
        booted = self.sysroot.booted
        values = {
            "Booted": GLib.Variant("o", interface.os_path(booted.get_osname()) if booted else "/"),
            "Path": GLib.Variant("s", "/"),
            "AutomaticUpdatePolicy": GLib.Variant("s", self.settings.policy),
            "Deployments": GLib.Variant("aa{sv}", described),
        }
        self._objects.set(interface.SYSROOT_PATH, interface.SYSROOT, values)
        self._publish_transaction()

    def _publish_transaction(self) -> None:
        active = self.transaction
        call = (active.call.method, active.call.sender, active.call.object_path) if active else ("", "", "")
        values = {
            "ActiveTransaction": GLib.Variant("(sss)", call),
            "ActiveTransactionPath": GLib.Variant("s", active.address if active else ""),
        }
        self._objects.set(interface.SYSROOT_PATH, interface.SYSROOT, values)

    # Method calls

    def _on_sysroot(
        self, _bus: Any, sender: str, _path: str, _name: str, method: str, parameters: Any, invocation: Any
    ) -> None:
        with _answering(invocation):
            self._authorize(sender, "Sysroot", method)
            if method == "RegisterClient":
                self._clients.add(sender, Options(parameters.get_child_value(0)).text("id") or "")
            elif method == "UnregisterClient":
                self._clients.remove(sender)
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
            self._authorize(sender, "OS", method)
            self.reload()
            query = methods.QUERIES.get(method)
            if query is not None:
                invocation.return_value(query(self.sysroot, self._objects.osnames[path], parameters))
                return
            call = Call(method, parameters, sender, path, self._clients.describe(sender))
            address = self._begin(call, invocation.get_message().get_unix_fd_list())
            reply = ("(bs)", (bool(address), address)) if method == "AutomaticUpdateTrigger" else ("(s)", (address,))
            invocation.return_value(GLib.Variant(*reply))

    def _on_experimental(
        self, _bus: Any, sender: str, _path: str, _name: str, method: str, parameters: Any, invocation: Any
    ) -> None:
        with _answering(invocation):
            self._authorize(sender, "OSExperimental", method)
            if method != "Moo":
                raise MethodError(errors.FAILED, f"stand: {method} is not supported")
            invocation.return_value(GLib.Variant("(s)", (methods.cow(parameters.unpack()[0]),)))

    def _find_os(self, osname: str) -> str:
        if not osname:
            return str(self._objects.get(interface.SYSROOT_PATH, interface.SYSROOT, "Booted"))
        path = interface.os_path(osname)
        if self._objects.osnames.get(path) != osname:
            raise MethodError(errors.NOT_FOUND, f'OS name "{osname}" not found')
        return path

    def _authorize(self, sender: str, kind: str, method: str) -> None:
        if method not in _UNCHECKED and self._clients.uid(sender) != 0:
            raise MethodError(errors.ACCESS_DENIED, f"rpmostreed {kind} operation {method} not allowed for user")

    # Transactions

    def _begin(self, call: Call, passed: Any) -> str:
        """The address of the transaction for a call: the active one where the call joins it, or a new one."""
        active = self.transaction
        if active is not None:
            if not active.call.same_as(call):
                text = f"Transaction in progress: {active.title}\n You can cancel the current transaction with "
                raise MethodError(errors.BUSY, text + "`rpm-ostree cancel`")
            journal("Client joining existing transaction")
            return active.address
        fault = faults.read(call.method)
        fault.reach_early("before-reply")
        if self.rebooting or fault.flag("reboot_initiated"):
            raise MethodError(errors.FAILED, "Reboot initiated, cannot start new transaction")
        osname = self._objects.osnames[call.object_path]
        plan = methods.plan(osname, call.method, call.parameters, passed, self.settings.policy, self.sysroot)
        return self._launch(call, plan, fault) if plan is not None else ""

    def _launch(self, call: Call, plan: methods.Plan, fault: Faults) -> str:
        sysroot = Sysroot()
        journal("Loaded sysroot")
        with faults.foreign_lock(fault.flag("busy")):
            sysroot.lock()
        journal("Locked sysroot")
        osname, forbidden = self._objects.osnames[call.object_path], self.settings.lock_layering
        started: list[Work] = []

        def operate(output: Any, cancellable: Any) -> None:
            client = self._clients.client(call.sender)
            work = Work(sysroot, osname, client, self.profile, fault, output, cancellable, forbidden)
            started.append(work)
            work.reach("after-start")
            plan.operation(work)
            work.faults.reach("after-stage-before-finished", cancellable)

        def executed(success: bool) -> str:
            sysroot.unlock()
            journal("Unlocked sysroot")
            if success and started and started[0].reboot_wanted:
                self.rebooting = True
                GLib.idle_add(start_reboot, priority=GLib.PRIORITY_LOW)
            return self._refresh(force=True)

        abstract, patience = self.profile.abstract_socket, fault.force_close_seconds
        try:
            made = Transaction(self._bus, call, plan.title, operate, executed, self._on_closed, abstract, patience,
                               lambda: fault.reach_early("before-start"))  # fmt: skip
        except BaseException:
            sysroot.unlock()
            raise
        self.transaction = made
        self._publish_transaction()
        self._update_idle()
        return made.address

    def _on_closed(self) -> None:
        self.transaction = None
        self._publish_transaction()
        self._update_idle()

    # Reloading

    def reload(self, force: bool = False) -> None:
        """Reads the deployments if they changed. Raises MethodError; the old values then stay."""
        problem = self._refresh(force)
        if problem:
            raise MethodError(errors.FAILED, problem)

    def _refresh(self, force: bool) -> str:
        try:
            if self.sysroot.reload() or force:
                self.publish()
        except OperationFailed as error:
            return f"Reading deployments: {error}"
        except GLib.Error as error:
            return f"Reading deployments: {error.message}"
        return ""

    def _reload_later(self, invocation: Any) -> bool:
        with _answering(invocation, "Handling reload: "):
            self.reload(force=True)
            invocation.return_value(None)
        return False

    def _reload_config(self) -> None:
        try:
            self.settings = settings.read()
        except OperationFailed as error:
            text = f"Handling config reload: Reloading daemon configuration: {error}"
            raise MethodError(errors.FAILED, text) from error
        self.reload(force=True)
        self._update_idle()

    def _on_deploy_changed(self, _monitor: Any, _file: Any, _other: Any, event: Any) -> None:
        if event == Gio.FileMonitorEvent.ATTRIBUTE_CHANGED:
            problem = self._refresh(force=False)
            if problem:
                journal(f"Unable to update state: {problem}")

    def _update_idle(self) -> None:
        self._idle.update(not self._clients and self.transaction is None, self.settings.idle_exit)


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
