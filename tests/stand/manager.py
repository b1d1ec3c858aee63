"""Units and jobs of the systemd stand-in: loading, starting, stopping, boot and shutdown; `systemd1` has the rules."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from pathlib import Path
from typing import Callable, Optional, Protocol

from tests.stand.init import BootPlan, service_environment
from tests.stand.interfaces import NAME
from tests.stand.process import Processes
from tests.stand.service import Service, Surroundings
from tests.stand.servicesettings import Settings
from tests.stand.unitfile import BadSetting, UnitFile, specifiers, valid_name
from tests.stand.units import Job, Unit
from tests.stand.unitstore import BUILT_IN, LoadState, Source, UnitStore

UNIT_LOGS = Path("/run/stand/log/units")
STAGED = Path("/run/ostree/staged-deployment")
EARLY = "mcdaemon-early.service"
FINALIZE, FINALIZE_PATH = "ostree-finalize-staged.service", "ostree-finalize-staged.path"
BOOT_COMPLETE = "ostree-boot-complete.service"
BOOT_TARGETS = ("sysinit.target", "basic.target", "network-online.target", "multi-user.target", "default.target",
                "graphical.target")  # fmt: skip

# ostree's own unit files (src/boot), as far as the stand-in understands them. Debian has them in another package, and
# an image of the stand may bring its own.
BUILT_IN_UNITS = {
    FINALIZE: """[Unit]
Description=OSTree Finalize Staged Deployment
ConditionPathExists=/run/ostree-booted
[Service]
Type=oneshot
RemainAfterExit=yes
ExecStop=/usr/bin/ostree admin finalize-staged
TimeoutStopSec=5m
""",
    FINALIZE_PATH: """[Unit]
Description=OSTree Monitor Staged Deployment
ConditionPathExists=/run/ostree-booted
[Path]
PathExists=/run/ostree/staged-deployment
""",
    BOOT_COMPLETE: """[Unit]
Description=OSTree Complete Boot
ConditionPathExists=/boot/ostree/finalize-failure.stamp
[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/usr/bin/ostree admin boot-complete
""",
}


class UnitError(Exception):
    """What cannot be done with a unit; `name` is the D-Bus error name."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(text)
        self.name = name


class Audience(Protocol):
    """Who is told about what happens to units; on a node that is the bus."""

    def loaded(self, unit: Unit) -> None:
        """A unit is known from now on."""

    def changed(self, unit: Unit) -> None:
        """A unit's state may differ."""

    def job_new(self, job: Job) -> None:
        """A job was made."""

    def job_removed(self, job: Job) -> None:
        """A job has ended."""

    def owner(self, name: str) -> str:
        """The owner of a bus name now, "" for none."""

    def watch(self, name: str, changed: Callable[[str], None]) -> None:
        """Tell `changed` about new owners of a bus name."""

    def unwatch(self, name: str, changed: Callable[[str], None]) -> None:
        """End a watch."""


class Manager:
    """The units of the node and their jobs. `progress` gets facts for the Machine (see `init.report`)."""

    def __init__(self, plan: BootPlan, loop: asyncio.AbstractEventLoop, audience: Audience,
                 progress: Callable[..., None]) -> None:  # fmt: skip
        self._plan = plan
        self._loop = loop
        self._audience = audience
        self._progress = progress
        self.processes = Processes(loop)
        self.store = UnitStore()
        self.units: dict[str, Unit] = {}
        self.jobs: dict[int, Job] = {}
        self.going_down = ""
        self.down_requested = False
        self._job_count = 0
        self._started: list[str] = []
        self._referenced: set[str] = set()
        self._surroundings = Surroundings(
            self.processes, service_environment(plan), open_log, self._changed, self._restart, self._wait_owner
        )

    # -- units --------------------------------------------------------------------------------------------------------

    def load(self, name: str) -> Unit:
        """The unit, read from its files when it is not loaded or when systemd would have dropped it meanwhile.

        Raises UnitError for an impossible name; a unit without files is a Unit too (LoadState not-found).
        """
        if not valid_name(name):
            raise UnitError("org.freedesktop.DBus.Error.InvalidArgs", f"Unit name {name} is not valid.")
        unit = self.units.get(name)
        if unit is not None and not self._collectable(unit):
            return unit
        source = self.store.find(name)
        if source.names[0] != name and source.state is LoadState.LOADED:
            self.units[name] = self.load(source.names[0])
            return self.units[name]
        if unit is None:
            unit = self.units[name] = Unit(name, source, UnitFile())
            self._read(unit, source)
            self._audience.loaded(unit)
        elif source != unit.source:
            self._read(unit, source)
        return unit

    def _collectable(self, unit: Unit) -> bool:
        """systemd forgets units that are idle and that nothing refers to; the next use reads them afresh."""
        return unit.job is None and unit.active == "inactive" and unit.name not in self._referenced

    def _read(self, unit: Unit, source: Source) -> None:
        """(Re)read a unit's files; a service that runs goes on and uses the new settings from its next step on."""
        unit.source, unit.error, unit.file = source, "", self.store.read(source)
        if not unit.name.endswith(".service") or source.state is not LoadState.LOADED:
            return
        table = specifiers(unit.name, self._plan.boot_id, socket.gethostname())
        try:
            settings = Settings.read(unit.file, table)
        except (BadSetting, ValueError) as error:
            unit.error = str(error)
            return
        if unit.service is None:
            unit.service = Service(unit.name, settings, self._surroundings)
        else:
            unit.service.settings = settings

    def reload(self) -> None:
        """daemon-reload: read all units afresh."""
        self._referenced = set(self._enabled())
        for name, unit in list(self.units.items()):
            source = self.store.find(name)
            if unit.name == name:
                self._read(unit, source)

    def outdated(self, unit: Unit) -> bool:
        """NeedDaemonReload: the files are not those that were read."""
        return self.store.find(unit.name) != unit.source

    def look_for_staged(self) -> None:
        """Emulate ostree-finalize-staged.path: PathExists= starts the service whenever it is not active."""
        if self.going_down or not STAGED.exists():
            return
        unit = self.load(FINALIZE)
        if unit.service is not None and unit.job is None and unit.active in ("inactive", "failed"):
            unit.service.become_active()
            self._note_started(FINALIZE)

    # -- jobs ---------------------------------------------------------------------------------------------------------

    def request(self, verb: str, name: str) -> Job:
        """Make the job that a verb (start, stop, restart, try-restart, reload, reload-or-restart,
        reload-or-try-restart) means for a unit in its present state.

        Raises UnitError.
        """
        self.look_for_staged()
        unit = self.load(name)
        if verb == "stop":
            if unit.source.state is LoadState.NOT_FOUND and unit.active == "inactive":
                raise UnitError(f"{NAME}.NoSuchUnit", f"Unit {unit.name} not loaded.")
            return self._submit("stop", unit)
        self._must_be_startable(unit)
        if "try" in verb and not unit.running:
            return self._submit("nop", unit)
        if verb.startswith("reload-or"):
            return self._submit("reload" if unit.can_reload and unit.running else "restart", unit)
        if verb == "reload":
            self._must_be_reloadable(unit)
        return self._submit(verb.replace("try-", ""), unit)

    def _must_be_startable(self, unit: Unit) -> None:
        if self.going_down:
            text = (f"Transaction for {unit.name}/start is destructive (shutdown.target has 'start' job queued, but "
                    "'stop' is included in transaction).")  # fmt: skip
            raise UnitError(f"{NAME}.TransactionIsDestructive", text)
        error, text = unit.load_error()
        if error:
            raise UnitError(error, text)

    def _must_be_reloadable(self, unit: Unit) -> None:
        if not unit.can_reload:
            text = f"Job type reload is not applicable for unit {unit.name}."
            raise UnitError(f"{NAME}.JobTypeNotApplicable", text)
        if not unit.running:
            raise UnitError(f"{NAME}.UnitInactive", f"Unit {unit.name} is inactive.")

    def _submit(self, kind: str, unit: Unit) -> Job:
        """Queue a job. One of the same kind is joined, another one of the unit is cancelled (mode "replace")."""
        previous = unit.job
        if previous is not None and previous.kind == kind:
            return previous
        self._job_count += 1
        job = unit.job = self.jobs[self._job_count] = Job(self._job_count, kind, unit)
        self._audience.job_new(job)
        job.task = self._loop.create_task(self._run(job, previous))
        return job

    async def _run(self, job: Job, previous: Optional[Job]) -> None:
        try:
            if previous is not None and previous.task is not None:
                previous.task.cancel()
                await previous.done.wait()
            job.result = await self._perform(job)
        except asyncio.CancelledError:
            job.result = "canceled"
        finally:
            self.jobs.pop(job.number, None)
            if job.unit.job is job:
                job.unit.job = None
            job.done.set()
            self._audience.job_removed(job)

    async def _perform(self, job: Job) -> str:
        """Do what the job says. A stop is "done" also when the unit has failed in it (systemd, job.c:job_process)."""
        unit, service = job.unit, job.unit.service
        if job.kind == "nop":
            return "done"
        if service is None:
            unit.plain_active = job.kind != "stop"
            self._audience.changed(unit)
            return "done"
        if job.kind in ("stop", "restart"):
            await service.stop()
        if job.kind in ("start", "restart"):
            self._note_started(unit.name)
            return "done" if await service.start() else "failed"
        if job.kind == "reload":
            return "done" if await service.reload() else "failed"
        return "done"

    def _note_started(self, name: str) -> None:
        if name in self._started:
            self._started.remove(name)
        self._started.append(name)

    # -- what services need -------------------------------------------------------------------------------------------

    def _changed(self, name: str) -> None:
        unit = self.units.get(name)
        if unit is not None:
            self._audience.changed(unit)

    def _restart(self, name: str) -> None:
        unit = self.units[name]
        if not self.going_down and unit.job is None:
            self._submit("start", unit)

    async def _wait_owner(self, name: str) -> None:
        owned = asyncio.Event()

        def changed(owner: str) -> None:
            if owner:
                owned.set()

        self._audience.watch(name, changed)
        try:
            if not self._audience.owner(name):
                await owned.wait()
        finally:
            self._audience.unwatch(name, changed)

    # -- boot and shutdown --------------------------------------------------------------------------------------------

    async def boot(self) -> bool:
        """Start what is enabled; True when all start jobs have ended, False when a shutdown was asked for meanwhile."""
        self._referenced = set(self._enabled())
        # The early unit is before sysinit.target; what has default dependencies, as BOOT_COMPLETE has, is after it.
        enabled = self._enabled()
        rest = [name for name in enabled if name not in (EARLY, BOOT_COMPLETE, FINALIZE_PATH)]
        for names in ([FINALIZE_PATH], [EARLY] if EARLY in enabled else [], [BOOT_COMPLETE, *rest]):
            for job in [job for job in map(self._boot_job, names) if job is not None]:
                self._progress(event="waiting", text=job.unit.name)
                await job.done.wait()
            if self.down_requested:
                return False
        return True

    def _boot_job(self, name: str) -> Optional[Job]:
        try:
            return self.request("start", name)
        except UnitError as error:
            os.write(sys.stderr.fileno(), f"{name} does not start: {error}\n".encode())
            return None

    def _enabled(self) -> list[str]:
        names = [name for target in BOOT_TARGETS for name in self.store.wanted_by(target)]
        return [name for name in dict.fromkeys(names) if not name.endswith(".target")]

    def announce_down(self) -> None:
        """Somebody has asked to go down: a boot that is not complete yet goes no further."""
        self.down_requested = True

    async def stop_everything(self, how: str) -> None:
        """Stop all units, in the reverse order of their start, the finalization of a staged deployment last."""
        self.look_for_staged()
        self.going_down, self.down_requested = how, True
        for job in list(self.jobs.values()):
            if job.task is not None and job.kind != "stop":
                job.task.cancel()
        names = [name for name in reversed(self._started) if name != FINALIZE]
        for name in [*names, FINALIZE]:
            unit = self.units.get(name)
            if unit is not None and unit.active not in ("inactive", "failed"):
                self._progress(event="waiting", text=f"the stop of {name}")
                await self._submit("stop", unit).done.wait()


def open_log(name: str) -> int:
    """A descriptor that appends to a unit's log; the caller closes it."""
    return os.open(UNIT_LOGS / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)


def write_built_in_units() -> None:
    """Put ostree's units where UnitStore looks last."""
    folder = Path(BUILT_IN)
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in BUILT_IN_UNITS.items():
        (folder / name).write_text(text)
