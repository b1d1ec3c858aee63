"""logind of a stand node: reboot, power-off and inhibitors (org.freedesktop.login1(5)), on top of a `Shutdown`.

Who may reboot in spite of a "block" inhibitor is the rule of the systemd version that the Machine names:

* 252 (RHEL 9): root is not asked: Reboot() goes through. Only RebootWithFlags() with ROOT_CHECK_INHIBITORS is refused,
  with AccessDenied (logind-dbus.c:verify_shutdown_creds);
* 257 (RHEL 10): block inhibitors hold for root too; Reboot() is refused with BlockedByInhibitorLock unless the flags
  say SKIP_INHIBITORS. Mode "block-weak" is the old rule.

"delay" inhibitors get PrepareForShutdown(true) and up to DELAY_MAX seconds (InhibitDelayMaxSec=) in both.
"""

from __future__ import annotations

import asyncio
import os
import select
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from typing import Any, Callable, Optional

from tests.stand.busobject import BusError, BusObject, Call, Connection, Descriptor, Variant

NAME, ROOT, MANAGER = "org.freedesktop.login1", "/org/freedesktop/login1", "org.freedesktop.login1.Manager"
DELAY_MAX = 5.0
ROOT_CHECK_INHIBITORS, SKIP_INHIBITORS = 1 << 0, 1 << 4
MODES = {252: ("block", "delay"), 257: ("block", "delay", "block-weak")}
LOCKS = ("shutdown", "sleep", "idle", "handle-power-key", "handle-suspend-key", "handle-hibernate-key",
         "handle-lid-switch", "handle-reboot-key")  # fmt: skip

XML = f"""<node><interface name="{MANAGER}">
  <method name="Reboot"><arg name="interactive" type="b" direction="in"/></method>
  <method name="RebootWithFlags"><arg name="flags" type="t" direction="in"/></method>
  <method name="PowerOff"><arg name="interactive" type="b" direction="in"/></method>
  <method name="PowerOffWithFlags"><arg name="flags" type="t" direction="in"/></method>
  <method name="CanReboot"><arg name="result" type="s" direction="out"/></method>
  <method name="CanPowerOff"><arg name="result" type="s" direction="out"/></method>
  <method name="SetWallMessage"><arg name="message" type="s" direction="in"/>
    <arg name="enable" type="b" direction="in"/></method>
  <method name="Inhibit"><arg name="what" type="s" direction="in"/><arg name="who" type="s" direction="in"/>
    <arg name="why" type="s" direction="in"/><arg name="mode" type="s" direction="in"/>
    <arg name="pipe_fd" type="h" direction="out"/></method>
  <method name="ListInhibitors"><arg name="inhibitors" type="a(ssssuu)" direction="out"/></method>
  <signal name="PrepareForShutdown"><arg name="start" type="b"/></signal>
  <property name="BlockInhibited" type="s" access="read"/>
  <property name="DelayInhibited" type="s" access="read"/>
  <property name="PreparingForShutdown" type="b" access="read"/>
  <property name="InhibitDelayMaxUSec" type="t" access="read"/>
</interface></node>"""


@dataclass(frozen=True)
class Inhibitor:
    """One lock, as ListInhibitors reports it; `what` is a colon-separated list."""

    what: str
    who: str
    why: str
    mode: str
    uid: int
    pid: int

    def holds_shutdown(self) -> bool:
        """True when it is about shutdown."""
        return "shutdown" in self.what.split(":")


Shutdown = Callable[[str, int], Awaitable[None]]


class Login:
    """logind's manager object.

    `announce` is called in the moment of a request, `shutdown` ("reboot" or "poweroff", and the process that
    asked) after the delays: it stops everything and ends the node.
    """

    def __init__(
        self,
        connection: Connection,
        loop: asyncio.AbstractEventLoop,
        version: int,
        announce: Callable[[], None],
        shutdown: Shutdown,
        calls: Callable[[Call], None],
    ) -> None:
        self._connection = connection
        self._loop = loop
        self._version = version
        self._announce = announce
        self._shutdown = shutdown
        self._calls = calls
        self._inhibitors: dict[int, Inhibitor] = {}
        self._released = asyncio.Event()
        self._going: Optional[asyncio.Task[None]] = None

    def export(self) -> None:
        """Appear on the bus."""
        self._connection.export(ROOT, BusObject(XML, self._handle, self._properties))
        self._connection.own(NAME)

    async def _handle(self, call: Call) -> object:
        self._calls(call)
        method, arguments = call.method, call.arguments
        if method in ("Reboot", "PowerOff"):
            self._ask(call, 0)
        if method in ("RebootWithFlags", "PowerOffWithFlags"):
            self._ask(call, arguments[0])
        if method in ("CanReboot", "CanPowerOff"):
            return "yes"
        if method == "Inhibit":
            return self._inhibit(call)
        if method == "ListInhibitors":
            return [(i.what, i.who, i.why, i.mode, i.uid, i.pid) for i in self._inhibitors.values()]
        return None  # SetWallMessage: nobody reads it.

    def _properties(self, interface: str) -> Mapping[str, Any]:
        return {
            "BlockInhibited": Variant("s", self._locks("block")), "DelayInhibited": Variant("s", self._locks("delay")),
            "PreparingForShutdown": Variant("b", self._going is not None),
            "InhibitDelayMaxUSec": Variant("t", int(DELAY_MAX * 1e6)),
        }  # fmt: skip

    def _locks(self, mode: str) -> str:
        held = {word for each in self._inhibitors.values() if each.mode == mode for word in each.what.split(":")}
        return ":".join(word for word in LOCKS if word in held)

    # -- inhibitors ---------------------------------------------------------------------------------------------------

    def _inhibit(self, call: Call) -> Descriptor:
        what, who, why, mode = call.arguments
        if not what or any(word not in LOCKS for word in what.split(":")):
            raise BusError("org.freedesktop.DBus.Error.InvalidArgs", f"Invalid what specification {what}")
        if mode not in MODES[self._version]:
            raise BusError("org.freedesktop.DBus.Error.InvalidArgs", f"Invalid mode specification {mode}")
        if self._going is not None:
            text = "The operation inhibition has been requested for is already running"
            raise BusError("org.freedesktop.login1.OperationInProgress", text)
        reader, writer = os.pipe()
        self._inhibitors[reader] = Inhibitor(what, who, why, mode, *self._connection.credentials(call.sender))
        # The lock is the open descriptor: it ends when its last holder closes it or dies.
        self._loop.add_reader(reader, self._release_if_closed, reader)
        self._tell_inhibited()
        return Descriptor(writer)

    def _release_if_closed(self, reader: int) -> None:
        poller = select.poll()
        poller.register(reader, select.POLLIN)
        if not any(event & select.POLLHUP for _, event in poller.poll(0)):
            os.read(reader, 4096)  # Somebody wrote into it: of no meaning.
            return
        self._loop.remove_reader(reader)
        os.close(reader)
        del self._inhibitors[reader]
        self._released.set()
        self._tell_inhibited()

    def _tell_inhibited(self) -> None:
        properties = self._properties(MANAGER)
        changed = {key: properties[key] for key in ("BlockInhibited", "DelayInhibited")}
        self._connection.emit_changed(ROOT, MANAGER, changed)

    # -- shutdown -----------------------------------------------------------------------------------------------------

    def _ask(self, call: Call, flags: int) -> None:
        if self._going is not None:
            text = "There's already a shutdown or sleep operation in progress"
            raise BusError("org.freedesktop.login1.OperationInProgress", text)
        if any(each.mode == "block" and each.holds_shutdown() for each in self._inhibitors.values()):
            self._refuse(flags)
        self._begin("poweroff" if call.method.startswith("PowerOff") else "reboot", call.sender)

    def _refuse(self, flags: int) -> None:
        """Raise what a block inhibitor means for root, if it means anything."""
        if self._version >= 257 and not flags & SKIP_INHIBITORS:
            text = "Operation denied due to active block inhibitor"
            raise BusError("org.freedesktop.login1.BlockedByInhibitorLock", text)
        if self._version < 257 and flags & ROOT_CHECK_INHIBITORS:
            text = "Access denied to root due to active block inhibitor"
            raise BusError("org.freedesktop.DBus.Error.AccessDenied", text)

    def _begin(self, how: str, sender: str) -> None:
        self._announce()
        self._going = self._loop.create_task(self._go(how, self._connection.credentials(sender)[1]))

    async def _go(self, how: str, asker: int) -> None:
        self._connection.emit(ROOT, MANAGER, "PrepareForShutdown", "(b)", True)
        try:
            await asyncio.wait_for(self._delays_gone(), DELAY_MAX)
        except asyncio.TimeoutError:
            pass  # As logind: whoever still delays is not waited for any longer.
        await self._shutdown(how, asker)

    async def _delays_gone(self) -> None:
        while any(each.mode == "delay" and each.holds_shutdown() for each in self._inhibitors.values()):
            self._released.clear()
            await self._released.wait()
