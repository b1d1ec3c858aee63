"""PID 1 of a stand node: a stand-in for systemd that runs real unit files. It is NOT systemd.

It has systemd's D-Bus names, signatures, error names and job rules for what mcdaemon and rpm-ostree clients use, and it
really runs services (see `service`) and really makes enablement links (see `unitstore`). It has no dependency solver:

* at boot `ostree-boot-complete.service` comes first, then `mcdaemon-early.service` when it is enabled, and nothing else
  starts before that has ended; when it asked for a reboot, that happens at once. Then everything that stands in the
  .wants and .requires directories of manager.BOOT_TARGETS starts in parallel; After= and Requires= are not looked at;
* at shutdown units stop in the reverse order of their start, ostree-finalize-staged.service last;
* targets, paths, timers, sockets and mounts have a state and no effect. One path unit is emulated:
  ostree-finalize-staged.service is active as soon as /run/ostree/staged-deployment exists (libostree 2022.7 leaves that
  to ostree-finalize-staged.path). A real one may be a moment late (OCPBUGS-51150); this one never is;
* Manager.Reboot() is what `systemctl reboot --force` calls: the node ends at once, nothing is stopped or finalized.

Every call of a method is recorded in /run/stand/systemd-calls.jsonl.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Callable, Optional

from tests.stand import bus
from tests.stand.busobject import BusError, BusObject, Call, Connection, Variant
from tests.stand.init import BootPlan, report
from tests.stand.interfaces import (
    MANAGER,
    MANAGER_PROPERTIES,
    MANAGER_XML,
    NAME,
    ROOT,
    SERVICE,
    SERVICE_PROPERTIES,
    UNIT,
    UNIT_PROPERTIES,
    UNIT_ROOT,
    object_path,
    unit_name,
    unit_xml,
)  # fmt: skip
from tests.stand.login1 import Login
from tests.stand.manager import UNIT_LOGS, Manager, UnitError, open_log, write_built_in_units
from tests.stand.process import kill, members
from tests.stand.unitfile import valid_name
from tests.stand.units import Job, Unit, service_facts, unit_facts
from tests.stand.unitstore import SEARCH_PATH, Change, LoadState, UnitMasked, UnitStore

CALLS = Path("/run/stand/log/calls.jsonl")
POWER_TARGETS = {"reboot.target": "reboot", "poweroff.target": "poweroff", "halt.target": "poweroff"}
VERBS = {"StartUnit": "start", "StopUnit": "stop", "RestartUnit": "restart", "TryRestartUnit": "try-restart",
         "ReloadUnit": "reload", "ReloadOrRestartUnit": "reload-or-restart",
         "ReloadOrTryRestartUnit": "reload-or-try-restart"}  # fmt: skip
UNIT_VERBS = {"Start": "start", "Stop": "stop", "Restart": "restart", "Reload": "reload"}
ASKER_GRACE = 1.0
FLAG_RUNTIME, FLAG_FORCE = 1, 2  # UnitFileFlags of the …WithFlags methods


class Bus:
    """The bus as audience of the manager: exports units and sends systemd's signals."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.manager: Manager
        self.subscribers: set[str] = set()
        self.calls: Callable[[Call], None] = lambda call: None

    def unit_object(self, path: str) -> Optional[BusObject]:
        """What stands at a unit's path. As with systemd a look at the path loads the unit, whether it exists or not."""
        name = unit_name(path)
        if not valid_name(name):
            return None

        async def handle(call: Call) -> object:
            self.calls(call)
            if call.method == "ResetFailed":
                reset_failed([self.manager.load(name)])
                return None
            return request_job(self.manager, UNIT_VERBS[call.method], name)

        return BusObject(unit_xml(name), handle, lambda interface: self._facts(name, interface))

    def loaded(self, unit: Unit) -> None:
        """Send UnitNew."""
        self.signal("UnitNew", "(so)", unit.name, object_path(unit.name))

    def _facts(self, name: str, interface: str) -> dict[str, Any]:
        manager = self.manager
        manager.look_for_staged()
        unit = manager.load(name)
        if interface == UNIT:
            names = [each for each, other in manager.units.items() if other is unit]
            values = unit_facts(unit, names, file_state(manager, unit.name), manager.outdated(unit))
            return typed(UNIT_PROPERTIES, values)
        return typed(SERVICE_PROPERTIES, service_facts(unit)) if interface == SERVICE else {}

    def changed(self, unit: Unit) -> None:
        """Send PropertiesChanged to whoever has subscribed."""
        if not self.subscribers:
            return
        path = object_path(unit.name)
        state = {"ActiveState": Variant("s", unit.active), "SubState": Variant("s", unit.sub)}
        self.connection.emit_changed(path, UNIT, state)
        if unit.service is not None:
            values = typed(SERVICE_PROPERTIES, service_facts(unit))
            keys = ("MainPID", "Result", "ExecMainCode", "ExecMainStatus", "NRestarts", "StatusText")
            self.connection.emit_changed(path, SERVICE, {key: values[key] for key in keys})

    def job_new(self, job: Job) -> None:
        """Send JobNew."""
        self.signal("JobNew", "(uos)", job.number, job.path, job.unit.name)

    def job_removed(self, job: Job) -> None:
        """Send JobRemoved; systemd sends it to the job's client even when nobody has subscribed."""
        arguments = (job.number, job.path, job.unit.name, job.result)
        self.connection.emit(ROOT, MANAGER, "JobRemoved", "(uoss)", *arguments)

    def signal(self, name: str, signature: str, *arguments: object) -> None:
        """Send a manager signal while somebody has subscribed (org.freedesktop.systemd1(5), Subscribe)."""
        if self.subscribers:
            self.connection.emit(ROOT, MANAGER, name, signature, *arguments)

    def owner(self, name: str) -> str:
        """The owner of a bus name."""
        return self.connection.owner(name)

    def watch(self, name: str, changed: Callable[[str], None]) -> None:
        """Watch a bus name."""
        self.connection.watch(name, changed)

    def unwatch(self, name: str, changed: Callable[[str], None]) -> None:
        """End a watch."""
        self.connection.unwatch(name, changed)


class Systemd:
    """systemd's manager object: each method of the interface is a method `_do_<Name>` here."""

    def __init__(self, manager: Manager, audience: Bus, power: Callable[[str, bool], None]) -> None:
        self._manager = manager
        self._bus = audience
        self._power = power

    def export(self) -> None:
        """Appear on the bus."""
        self._bus.connection.export(ROOT, BusObject(MANAGER_XML, self._handle, self._properties))
        self._bus.connection.export_below(UNIT_ROOT, self._bus.unit_object)
        self._bus.connection.own(NAME)

    async def _handle(self, call: Call) -> object:
        self._bus.calls(call)
        if call.method in VERBS:
            return self._job(call)
        try:
            return getattr(self, f"_do_{call.method}")(call, *call.arguments)
        except UnitError as error:
            raise BusError(error.name, str(error)) from error

    def _properties(self, interface: str) -> dict[str, Any]:
        failed = sum(unit.active == "failed" for unit in set_of_units(self._manager))
        values = {
            "Version": "252 (stand)", "Features": "", "Tainted": "", "Environment": [], "UnitPath": list(SEARCH_PATH),
            "SystemState": "stopping" if self._manager.going_down else ("degraded" if failed else "running"),
            "NNames": len(self._manager.units), "NFailedUnits": failed, "NJobs": len(self._manager.jobs),
            "Virtualization": "container-other", "ShowStatus": False, "Progress": 1.0,
        }  # fmt: skip
        return typed(MANAGER_PROPERTIES, values)

    # -- jobs ---------------------------------------------------------------------------------------------------------

    def _job(self, call: Call) -> str:
        name = call.arguments[0]
        if call.method == "StartUnit" and name in POWER_TARGETS:
            self._power(POWER_TARGETS[name], False)
            return f"{ROOT}/job/0"
        return request_job(self._manager, VERBS[call.method], name)

    def _do_ListJobs(self, call: Call) -> list[tuple[object, ...]]:
        jobs = self._manager.jobs.values()
        return [(j.number, j.unit.name, j.kind, "running", j.path, object_path(j.unit.name)) for j in jobs]

    def _do_KillUnit(self, call: Call, name: str, whom: str, number: int) -> None:
        service = self._loaded(name).service
        if service is not None and service.status.invocation:
            main = service.status.main_pid
            pids = {main} if whom == "main" else members(service.status.invocation, main or None)
            kill(pids - {0}, number)

    def _do_ResetFailedUnit(self, call: Call, name: str) -> None:
        reset_failed([self._loaded(name)])

    def _do_ResetFailed(self, call: Call) -> None:
        reset_failed(set_of_units(self._manager))

    # -- units --------------------------------------------------------------------------------------------------------

    def _loaded(self, name: str) -> Unit:
        self._manager.look_for_staged()
        unit = self._manager.units.get(name) or self._manager.load(name)
        if unit.source.state is LoadState.NOT_FOUND and unit.active == "inactive":
            raise UnitError(f"{NAME}.NoSuchUnit", f"Unit {name} not loaded.")
        return unit

    def _do_GetUnit(self, call: Call, name: str) -> str:
        return object_path(self._loaded(name).name)

    def _do_LoadUnit(self, call: Call, name: str) -> str:
        self._manager.look_for_staged()
        return object_path(self._manager.load(name).name)

    def _do_GetUnitByPID(self, call: Call, pid: int) -> str:
        for unit in set_of_units(self._manager):
            status = unit.service.status if unit.service is not None else None
            if status and status.invocation and pid in members(status.invocation, status.main_pid or None):
                return object_path(unit.name)
        raise UnitError(f"{NAME}.NoUnitForPID", f"PID {pid} does not belong to any loaded unit.")

    def _do_ListUnits(self, call: Call) -> list[tuple[object, ...]]:
        return self._list(lambda unit: True)

    def _do_ListUnitsFiltered(self, call: Call, states: Sequence[str]) -> list[tuple[object, ...]]:
        return self._list(lambda unit: _in_states(unit, states))

    def _do_ListUnitsByPatterns(
        self, call: Call, states: Sequence[str], patterns: Sequence[str]
    ) -> list[tuple[object, ...]]:
        def wanted(unit: Unit) -> bool:
            return _in_states(unit, states) and (not patterns or any(fnmatchcase(unit.name, p) for p in patterns))

        return self._list(wanted)

    def _do_ListUnitsByNames(self, call: Call, names: Sequence[str]) -> list[tuple[object, ...]]:
        wanted = {self._manager.load(name).name for name in names}
        return self._list(lambda unit: unit.name in wanted)

    def _list(self, wanted: Callable[[Unit], bool]) -> list[tuple[object, ...]]:
        self._manager.look_for_staged()
        rows: list[tuple[object, ...]] = []
        for unit in sorted(set_of_units(self._manager), key=lambda each: each.name):
            if wanted(unit):
                job = (unit.job.number, unit.job.kind, unit.job.path) if unit.job else (0, "", "/")
                description = unit.file.last("Unit", "Description", unit.name)
                rows.append((unit.name, description, unit.load_state, unit.active, unit.sub, "",
                             object_path(unit.name), *job))  # fmt: skip
        return rows

    def _do_Subscribe(self, call: Call) -> None:
        if call.sender in self._bus.subscribers:
            raise UnitError(f"{NAME}.AlreadySubscribed", "Client is already subscribed.")
        self._bus.subscribers.add(call.sender)

        def changed(owner: str) -> None:
            self._bus.subscribers.discard(call.sender)
            self._bus.connection.unwatch(call.sender, changed)

        self._bus.connection.watch(call.sender, changed)

    def _do_Unsubscribe(self, call: Call) -> None:
        if call.sender not in self._bus.subscribers:
            raise UnitError(f"{NAME}.NotSubscribed", "Client is not subscribed.")
        self._bus.subscribers.discard(call.sender)

    def _do_Reload(self, call: Call) -> None:
        self._bus.signal("Reloading", "(b)", True)
        self._manager.reload()
        self._bus.signal("Reloading", "(b)", False)

    _do_Reexecute = _do_Reload

    def _do_Reboot(self, call: Call) -> None:
        self._power("reboot", True)

    def _do_PowerOff(self, call: Call) -> None:
        self._power("poweroff", True)

    # -- unit files ---------------------------------------------------------------------------------------------------

    def _do_GetDefaultTarget(self, call: Call) -> str:
        return "multi-user.target"

    def _do_ListUnitFiles(self, call: Call) -> list[tuple[str, str]]:
        store, rows = self._manager.store, []
        for name in store.names():
            source = store.find(name)
            folder = next(base for base in SEARCH_PATH if os.path.lexists(f"{base}/{name}"))
            rows.append((source.fragment or f"{folder}/{name}", file_state(self._manager, name) or "bad"))
        return rows

    def _do_GetUnitFileState(self, call: Call, name: str) -> str:
        try:
            return self._manager.store.state(name)
        except FileNotFoundError as error:
            raise UnitError("org.freedesktop.DBus.Error.FileNotFound", "No such file or directory") from error

    def _do_EnableUnitFiles(self, call: Call, names: Sequence[str], runtime: bool, force: bool) -> object:
        return self._change(names, lambda name: self._manager.store.enable(name, runtime, force))

    def _do_EnableUnitFilesWithFlags(self, call: Call, names: Sequence[str], flags: int) -> object:
        return self._do_EnableUnitFiles(call, names, bool(flags & FLAG_RUNTIME), bool(flags & FLAG_FORCE))

    def _do_PresetUnitFiles(self, call: Call, names: Sequence[str], runtime: bool, force: bool) -> object:
        return self._change(names, lambda name: self._manager.store.preset(name, runtime, force))

    def _do_DisableUnitFiles(self, call: Call, names: Sequence[str], runtime: bool) -> object:
        return self._change(names, lambda name: (True, self._manager.store.disable(name, runtime)))[1]

    def _do_DisableUnitFilesWithFlags(self, call: Call, names: Sequence[str], flags: int) -> object:
        return self._do_DisableUnitFiles(call, names, bool(flags & FLAG_RUNTIME))

    def _do_DisableUnitFilesWithFlagsAndInstallInfo(self, call: Call, names: Sequence[str], flags: int) -> object:
        return True, self._do_DisableUnitFiles(call, names, bool(flags & FLAG_RUNTIME))

    def _do_MaskUnitFiles(self, call: Call, names: Sequence[str], runtime: bool, force: bool) -> object:
        return self._change(names, lambda name: (True, self._manager.store.mask(name, runtime, force)))[1]

    def _do_UnmaskUnitFiles(self, call: Call, names: Sequence[str], runtime: bool) -> object:
        return self._change(names, lambda name: (True, self._manager.store.unmask(name, runtime)))[1]

    def _change(
        self, names: Sequence[str], change: Callable[[str], tuple[bool, list[Change]]]
    ) -> tuple[bool, list[tuple[str, str, str]]]:
        """Apply a change to each unit; what was changed before an error stays, as with systemd."""
        carries, changes = False, []
        for name in names:
            try:
                found, more = change(name)
            except FileNotFoundError as error:
                text = f"Unit file {os.path.basename(name)} does not exist."
                raise UnitError("org.freedesktop.DBus.Error.FileNotFound", text) from error
            except UnitMasked as error:
                raise UnitError(f"{NAME}.UnitMasked", f"Unit file {name} is masked.") from error
            except FileExistsError as error:
                text = f"File {error} already exists."
                raise UnitError("org.freedesktop.DBus.Error.FileExists", text) from error
            carries = carries or found
            changes += [(each.kind, each.path, each.target) for each in more]
        if changes:
            self._bus.signal("UnitFilesChanged", "()")
        return carries, changes


def request_job(manager: Manager, verb: str, name: str) -> str:
    """Make a job and answer its path."""
    try:
        job = manager.request(verb, name)
    except UnitError as error:
        raise BusError(error.name, str(error)) from error
    return job.path


def reset_failed(units: Sequence[Unit]) -> None:
    """Forget the failures of services."""
    for unit in units:
        if unit.service is not None:
            unit.service.reset_failed()


def set_of_units(manager: Manager) -> list[Unit]:
    """Every loaded unit once, whatever aliases it has."""
    return list({id(unit): unit for unit in manager.units.values()}.values())


def file_state(manager: Manager, name: str) -> str:
    """UnitFileState, "" for a unit without a file."""
    try:
        return manager.store.state(name)
    except FileNotFoundError:
        return ""


def typed(types: dict[str, str], values: dict[str, Any]) -> dict[str, Any]:
    """Variants of the properties that have a value."""
    return {key: Variant(kind, values[key]) for key, kind in types.items() if key in values}


def _in_states(unit: Unit, states: Sequence[str]) -> bool:
    return not states or bool({unit.active, unit.sub, unit.load_state} & set(states))


class Node:
    """PID 1: the bus, systemd and logind together, from the first moment to the exit."""

    def __init__(self, plan: BootPlan, loop: asyncio.AbstractEventLoop, pipe: int) -> None:
        self._plan = plan
        self._loop = loop
        self._pipe = pipe
        output = open_log("dbus-daemon")
        self._bus_process = bus.start(Path("/run/dbus"), UnitStore().bus_names(), output)
        os.close(output)
        self._connection = Connection(bus.ADDRESS, loop)
        audience = Bus(self._connection)
        self._manager = audience.manager = Manager(plan, loop, audience, self._progress)
        self._manager.processes.adopt(self._bus_process)
        calls = os.open(CALLS, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC)
        audience.calls = lambda call: record(calls, call)
        announce, version = self._manager.announce_down, int(plan.options["logind"])
        self._login = Login(self._connection, loop, version, announce, self._shut_down, audience.calls)
        self._systemd = Systemd(self._manager, audience, self._power)
        self._connection.serve_activation(self._activate)
        self._tasks = [loop.create_task(self._boot()), loop.create_task(self._watch_bus())]
        # SIGINT is what Ctrl-Alt-Del sends to PID 1; here it is one more way to reboot.
        loop.add_signal_handler(signal.SIGINT, self._power, "reboot", False)
        # The pipe's write end is only ever "readable" when its reader is gone: the Machine's process has died.
        loop.add_reader(pipe, os._exit, 1)

    async def _boot(self) -> None:
        self._systemd.export()
        self._login.export()
        if await self._manager.boot():
            self._progress(event="ready")

    async def _watch_bus(self) -> None:
        await self._manager.processes.exited(self._bus_process)
        self._progress(event="error", text="the system bus has died")
        os._exit(1)

    async def _activate(self, name: str) -> None:
        """Start a unit for the bus. Raises BusError, which the bus gives to whoever called the name."""
        try:
            job = self._manager.request("start", name)
        except UnitError as error:
            raise BusError(error.name, str(error)) from error
        await job.done.wait()
        if job.result != "done":
            raise BusError("org.freedesktop.DBus.Error.Spawn.ChildExited", f"Unit {name} failed to start.")

    def _progress(self, **facts: object) -> None:
        report(self._pipe, **facts)

    def _power(self, how: str, force: bool) -> None:
        """Go down without logind: at once, or after all units have stopped."""
        if force:
            # After the answer to who asked, as PID 1 does it: else `systemctl` may still say that it cannot reboot.
            self._loop.call_soon(self._exit, how)
        elif not self._manager.down_requested:
            self._manager.announce_down()
            self._tasks.append(self._loop.create_task(self._shut_down(how, 0)))

    async def _shut_down(self, how: str, asker: int) -> None:
        if self._manager.going_down:
            return
        await self._manager.stop_everything(how)
        # A real shutdown takes seconds. This one may be over before the program that asked for it has read the answer.
        try:
            await asyncio.wait_for(self._manager.processes.all_gone([asker] if asker else []), ASKER_GRACE)
        except asyncio.TimeoutError:
            pass  # It waits for something else; it ends with the node.
        self._exit(how)

    def _exit(self, how: str) -> None:
        """End the node; the kernel kills whatever is left in its PID namespace."""
        self._connection.flush()
        self._progress(event="down", how=how)
        os._exit(0)


def record(descriptor: int, call: Call) -> None:
    """Add a call to the call log (JSON lines; `time` in seconds since the epoch)."""
    entry = {"time": time.time(), "sender": call.sender, "interface": call.interface, "method": call.method,
             "path": call.path, "args": call.arguments}  # fmt: skip
    os.write(descriptor, (json.dumps(entry) + "\n").encode())


def main(pipe: int) -> None:
    """Be PID 1 until the node goes down."""
    os.set_inheritable(pipe, False)
    plan = BootPlan.read(Path("/run/stand/plan.json"))
    UNIT_LOGS.mkdir(exist_ok=True)
    Path("/run/stand/systemd-calls.jsonl").symlink_to(CALLS)
    write_built_in_units()
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    node = Node(plan, loop, pipe)
    loop.run_forever()
    del node


if __name__ == "__main__":
    main(int(sys.argv[1]))
