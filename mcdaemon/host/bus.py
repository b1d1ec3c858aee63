"""The system bus: connection, calls with a time limit, systemd and logind.

pydbus makes the proxies. Its shared connection ends the process when the bus goes away, so the daemon opens one of its
own; dropping that one is also the only way to get rid of a transaction that was created after its caller gave up
(reference rpm-ostree.md 2.10, 2.13).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Optional

import pydbus
from gi.repository import Gio, GLib

from mcdaemon.errors import Broken, Failure, Held, HoldReason, Transient
from mcdaemon.host import process

CALL_TIMEOUT = 60.0
"""Seconds that a call may take which only asks or tells."""

_SYSTEMD = "org.freedesktop.systemd1"
_MANAGER = "/org/freedesktop/systemd1"
_LOGIND = "org.freedesktop.login1"


def error_name(error: GLib.Error) -> str:
    """The D-Bus error name behind a Gio error, "" when it has none."""
    return Gio.DBusError.get_remote_error(error) or ""


def error_text(error: GLib.Error) -> str:
    """The remote side's own words."""
    text: str = error.message or str(error)
    prefix = f"GDBus.Error:{error_name(error)}: "
    return text[len(prefix) :] if text.startswith(prefix) else text


def failure(error: GLib.Error, doing: str) -> Failure:
    """Map a D-Bus error met while `doing` something (rpm-ostree.md 2.7, 7)."""
    name, text = error_name(error), error_text(error)
    sentence = f"cannot {doing}: {text}"
    if error.matches(Gio.io_error_quark(), Gio.IOErrorEnum.BUSY) or name.endswith("dquark.Code26"):
        return Held(HoldReason.OTHER_CLIENT, sentence, "another program drives the OS right now")
    if "No space left on device" in text:
        return Held(HoldReason.SPACE, sentence, "free space on the disk")
    if "Reboot initiated" in text:
        return Held(HoldReason.OTHER_CLIENT, sentence, "the machine is about to reboot")
    passing = ("NoReply", "TimedOut", "Timeout", "NameHasNoOwner", "Disconnected", "ServiceUnknown")
    if any(name.endswith(word) for word in passing) or error.matches(Gio.io_error_quark(), Gio.IOErrorEnum.TIMED_OUT):
        return Transient(sentence, "see `journalctl -u rpm-ostreed -u dbus`")
    if error.matches(Gio.io_error_quark(), Gio.IOErrorEnum.CLOSED):
        return Transient(sentence, "the bus connection was lost; it is opened again")
    return Broken(sentence)


class Bus:
    """One private connection to the system bus."""

    def __init__(self) -> None:
        self._bus: Optional[Any] = None

    @property
    def bus(self) -> Any:
        """The pydbus bus, connected. Raises Transient when there is none."""
        if self._bus is None or self._bus.con.is_closed():
            try:
                self._bus = pydbus.connect(Gio.dbus_address_get_for_bus_sync(Gio.BusType.SYSTEM, None))
            except GLib.Error as error:
                raise Transient(f"cannot connect to the system bus: {error_text(error)}") from error
            self._bus.con.set_exit_on_close(False)
        return self._bus

    def close(self) -> None:
        """Drop the connection. Its unique name vanishes, and with it what the other sides keep for it."""
        if self._bus is not None and not self._bus.con.is_closed():
            self._bus.con.close_sync(None)
        self._bus = None

    def proxy(self, name: str, path: str, doing: str) -> Any:
        """The pydbus proxy of an object; introspected, hence bounded by pydbus's own limit for that call."""
        try:
            return self.bus.get(name, path, timeout=CALL_TIMEOUT)
        except GLib.Error as error:
            raise failure(error, doing) from error
        except KeyError as error:
            raise Broken(f"cannot {doing}: {name} has no object {path} ({error.args[0]})") from error

    def call(
        self, proxy: Any, interface: str, method: str, *arguments: Any, timeout: float = CALL_TIMEOUT, doing: str = ""
    ) -> Any:
        """Call a method within `timeout` seconds; errors become `Failure`s that say what was being done."""
        doing = doing or f"call {interface}.{method}"
        try:
            return getattr(proxy[interface], method)(*arguments, timeout=timeout)
        except GLib.Error as error:
            raise failure(error, doing) from error
        except (KeyError, AttributeError) as error:
            raise Broken(
                f"cannot {doing}: the service does not offer {interface}.{method}", "is this version of it supported?"
            ) from error

    def get(self, proxy: Any, interface: str, prop: str) -> Any:
        """Read one property, within the time limit for calls."""
        properties = "org.freedesktop.DBus.Properties"
        return self.call(proxy, properties, "Get", interface, prop, doing=f"read {interface}.{prop}")


@dataclass(frozen=True)
class UnitState:
    """A unit at this moment, in systemd's words.

    :ivar load: "loaded", "not-found", "masked", "bad-setting", "error".
    :ivar active: "active", "activating", "failed", ...; `sub`: the same in the words of the unit's kind.
    :ivar result: of a service, why it ended last ("success", "exit-code", ...); "" for other kinds.
    :ivar restarts: how often systemd has restarted a service by itself since somebody started it.
    :ivar invocation: new with each start, hexadecimal.
    """

    load: str
    active: str
    sub: str
    result: str = ""
    restarts: int = 0
    invocation: str = ""


class Systemd:
    """systemd's manager, as far as an update needs it."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._subscribed: Optional[Any] = None

    def _manager(self, method: str, *arguments: Any, timeout: float = CALL_TIMEOUT, doing: str = "") -> Any:
        proxy = self._bus.proxy(_SYSTEMD, _MANAGER, doing or "reach systemd")
        return self._bus.call(proxy, f"{_SYSTEMD}.Manager", method, *arguments, timeout=timeout, doing=doing)

    def reload(self) -> None:
        """`systemctl daemon-reload`."""
        self._manager("Reload", doing="reload systemd's units")

    def run_job(self, verb: str, unit: str, timeout: float) -> str:
        """Queue `verb` (Start, Stop, Restart, Reload) for `unit`, wait for the job's end; returns its result.

        The result is systemd's word ("done", "failed", "timeout", ...); raises Transient when no result came in
        `timeout` seconds.
        """
        doing = f"{verb.lower()} {unit}"
        context = GLib.MainContext.new()
        context.push_thread_default()
        try:
            return self._await_job(context, verb, unit, timeout, doing)
        finally:
            context.pop_thread_default()

    def _await_job(self, context: Any, verb: str, unit: str, timeout: float, doing: str) -> str:
        results: dict[str, str] = {}
        loop = GLib.MainLoop.new(context, False)
        state: dict[str, Any] = {"job": None, "late": False}

        def removed(_con: Any, _sender: str, _path: str, _iface: str, _signal: str, parameters: Any) -> None:
            _number, job, _unit, result = parameters.unpack()
            results[job] = result
            if job == state["job"]:
                loop.quit()

        def expired() -> bool:
            state["late"] = True
            loop.quit()
            return False

        def lost(*_arguments: Any) -> None:
            state["late"] = True
            loop.quit()

        connection = self._bus.bus.con
        closed = connection.connect("closed", lost)
        subscription = connection.signal_subscribe(
            _SYSTEMD, f"{_SYSTEMD}.Manager", "JobRemoved", _MANAGER, None, Gio.DBusSignalFlags.NONE, removed
        )
        timer = GLib.timeout_source_new(int(timeout * 1000))
        timer.set_callback(lambda *_: expired())
        timer.attach(context)
        pulse = GLib.timeout_source_new_seconds(5)
        pulse.set_callback(lambda *_: process.alive())
        pulse.attach(context)
        try:
            self._subscribe(connection, doing)
            state["job"] = self._manager(f"{verb}Unit", unit, "replace", timeout=timeout, doing=doing)
            while state["job"] not in results and not state["late"]:
                loop.run()
        finally:
            timer.destroy()
            pulse.destroy()
            connection.disconnect(closed)
            connection.signal_unsubscribe(subscription)
        if state["job"] not in results and connection.is_closed():
            raise Transient(f"cannot {doing}: the bus connection was lost", f"see `systemctl status {unit}`")
        if state["job"] not in results:
            raise Transient(f"cannot {doing}: no result within {timeout:.0f} s", f"see `systemctl status {unit}`")
        return results[state["job"]]

    def _subscribe(self, connection: Any, doing: str) -> None:
        """systemd sends no signals before, and refuses a second time on the same connection."""
        if self._subscribed is not connection:
            self._manager("Subscribe", doing=doing)
            self._subscribed = connection

    def active_state(self, unit: str) -> str:
        """`ActiveState` of a unit ("active", "failed", "inactive", ...)."""
        path = self._manager("LoadUnit", unit, doing=f"look at {unit}")
        proxy = self._bus.proxy(_SYSTEMD, path, f"look at {unit}")
        return str(self._bus.get(proxy, f"{_SYSTEMD}.Unit", "ActiveState"))

    def unit_state(self, unit: str) -> UnitState:
        """How a unit is. Raises Failure for a name that no unit can have, or when systemd does not answer."""
        doing = f"look at {unit}"
        path = self._manager("LoadUnit", unit, doing=doing)
        proxy = self._bus.proxy(_SYSTEMD, path, doing)
        properties = "org.freedesktop.DBus.Properties"
        found = self._bus.call(proxy, properties, "GetAll", f"{_SYSTEMD}.Unit", doing=doing)
        service: Any = {}
        if unit.endswith(".service") and found["LoadState"] == "loaded":
            service = self._bus.call(proxy, properties, "GetAll", f"{_SYSTEMD}.Service", doing=doing)
        return UnitState(
            str(found["LoadState"]),
            str(found["ActiveState"]),
            str(found["SubState"]),
            str(service.get("Result", "")),
            int(service.get("NRestarts", 0)),
            bytes(found.get("InvocationID", ())).hex(),
        )

    def forget_start_limit(self, unit: str) -> bool:
        """`systemctl reset-failed` for a unit that failed because it was started too often; False: it did not."""
        if self.unit_state(unit).result != "start-limit-hit":
            return False
        self._manager("ResetFailedUnit", unit, doing=f"forget the failure of {unit}")
        return True

    def active_states(self, units: Sequence[str]) -> dict[str, str]:
        """`ActiveState` of several units, asked for at once; one that does not exist is "inactive"."""
        rows = self._manager("ListUnitsByNames", list(units), doing=f"look at {', '.join(units)}")
        found = {str(row[0]): str(row[3]) for row in rows}
        return {unit: found.get(unit, "inactive") for unit in units}


class Logind:
    """The way to a reboot that honours inhibitors."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    def blockers(self) -> tuple[str, ...]:
        """Who holds a `block` inhibitor on shutdown, and why."""
        proxy = self._bus.proxy(_LOGIND, "/org/freedesktop/login1", "reach logind")
        found = self._bus.call(proxy, f"{_LOGIND}.Manager", "ListInhibitors", doing="list the inhibitors")
        return tuple(
            f"{who}: {why}"
            for what, who, why, mode, _uid, _pid in found
            if mode == "block" and "shutdown" in what.split(":")
        )

    def require_free(self) -> None:
        """Raises Held while an inhibitor blocks a reboot."""
        blockers = self.blockers()
        if blockers:
            raise Held(
                HoldReason.INHIBITED,
                f"cannot reboot: shutdown is inhibited by {'; '.join(blockers)}",
                "the update waits; see `systemd-inhibit --list`",
            )

    def reboot(self) -> None:
        """Ask for an orderly reboot. Raises Held while an inhibitor blocks it."""
        self.require_free()
        proxy = self._bus.proxy(_LOGIND, "/org/freedesktop/login1", "reach logind")
        self._bus.call(proxy, f"{_LOGIND}.Manager", "Reboot", False, doing="reboot")
