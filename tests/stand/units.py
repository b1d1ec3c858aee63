"""Loaded units and their jobs, and the facts about them that the bus shows."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Optional

from tests.stand.interfaces import NAME, ROOT
from tests.stand.service import Service
from tests.stand.unitfile import UnitFile
from tests.stand.unitstore import LoadState, Source


@dataclass
class Unit:
    """A loaded unit: its files, and a Service when it is one, else only a state."""

    name: str
    source: Source
    file: UnitFile
    service: Optional[Service] = None
    error: str = ""
    plain_active: bool = False
    job: Optional[Job] = None

    @property
    def active(self) -> str:
        """ActiveState."""
        if self.service is not None:
            return self.service.status.active
        return "active" if self.plain_active else "inactive"

    @property
    def sub(self) -> str:
        """SubState."""
        if self.service is not None:
            return self.service.status.sub
        if not self.plain_active:
            return "dead"
        return "waiting" if self.name.endswith((".path", ".timer")) else "active"

    @property
    def load_state(self) -> str:
        """LoadState."""
        return LoadState.BAD.value if self.error else self.source.state.value

    @property
    def running(self) -> bool:
        """True for what systemd's Try… and …OrRestart verbs take as active."""
        return self.active in ("active", "reloading", "activating")

    @property
    def can_reload(self) -> bool:
        """True when there is an ExecReload."""
        return self.service is not None and self.service.can_reload()

    def load_error(self) -> tuple[str, str]:
        """The D-Bus error (name, text) that a start of this unit gives, two empty strings for none."""
        return {
            LoadState.NOT_FOUND.value: (f"{NAME}.NoSuchUnit", f"Unit {self.name} not found."),
            LoadState.MASKED.value: (f"{NAME}.UnitMasked", f"Unit {self.name} is masked."),
            LoadState.BAD.value: (f"{NAME}.BadUnitSetting", f"Unit {self.name} has a bad unit file setting."),
        }.get(self.load_state, ("", ""))


@dataclass
class Job:
    """A job of a unit; `kind` is start, stop, restart, reload or nop, `result` what JobRemoved says."""

    number: int
    kind: str
    unit: Unit
    task: Optional[asyncio.Task[None]] = None
    done: asyncio.Event = field(default_factory=asyncio.Event)
    result: str = ""

    @property
    def path(self) -> str:
        """The job's object path."""
        return f"{ROOT}/job/{self.number}"


def unit_facts(unit: Unit, names: Sequence[str], file_state: str, outdated: bool) -> dict[str, Any]:
    """Plain values of the properties in interfaces.UNIT_PROPERTIES."""
    loaded = unit.load_state == LoadState.LOADED.value
    status = unit.service.status if unit.service else None
    entered = status.entered if status else {}
    service_name, path_name = f"{unit.name.rpartition('.')[0]}.service", f"{unit.name.rpartition('.')[0]}.path"
    return {
        "Id": unit.name, "Names": list(names), "Following": "", "Transient": False, "RefuseManualStart": False,
        "Description": unit.file.last("Unit", "Description", unit.name), "LoadState": unit.load_state,
        "ActiveState": unit.active, "SubState": unit.sub, "UnitFileState": file_state, "NeedDaemonReload": outdated,
        "FragmentPath": unit.source.fragment, "SourcePath": "", "DropInPaths": list(unit.source.drop_ins),
        "Job": (unit.job.number, unit.job.path) if unit.job else (0, "/"),
        "CanStart": loaded, "CanStop": loaded, "CanReload": loaded and unit.can_reload,
        "ConditionResult": bool(status and status.condition), "LoadError": unit.load_error(),
        "InvocationID": bytes.fromhex(status.invocation) if status else b"",
        "StateChangeTimestamp": _usec(max(entered.values(), default=0.0)),
        "ActiveEnterTimestamp": _usec(entered.get("active", 0.0)),
        "InactiveEnterTimestamp": _usec(max(entered.get("inactive", 0.0), entered.get("failed", 0.0))),
        "Documentation": unit.file.words("Unit", "Documentation"),
        "TriggeredBy": [path_name] if unit.name == "ostree-finalize-staged.service" else [],
        "Triggers": [service_name] if unit.name.endswith(".path") else [],
    }  # fmt: skip


def service_facts(unit: Unit) -> dict[str, Any]:
    """Plain values of the properties in interfaces.SERVICE_PROPERTIES; none for a unit that is not loaded."""
    if unit.service is None:
        return {}
    settings, status = unit.service.settings, unit.service.status
    return {
        "Type": settings.type, "Restart": settings.restart, "BusName": settings.bus_name,
        "RemainAfterExit": settings.remain, "MainPID": status.main_pid, "ControlPID": 0, "StatusText": status.text,
        "StatusErrno": 0, "Result": status.result, "ReloadResult": "success", "NRestarts": status.restarts,
        "ExecMainPID": status.exec_pid, "ExecMainCode": status.exec_code, "ExecMainStatus": status.exec_status,
        "WatchdogUSec": _usec(settings.watchdog), "TimeoutStopUSec": _usec(min(settings.timeout_stop, 1e9)),
        "StandWatchdogPings": status.watchdog_pings,
    }  # fmt: skip


def _usec(seconds: float) -> int:
    return int(seconds * 1_000_000)
