"""The settings of a service and the conditions of its start, read from its unit file (systemd.service(5))."""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Callable

from tests.stand.unitfile import BadSetting, Command, UnitFile, expand_specifiers

# systemd's default is 90 s; a test that meets it has failed anyway.
DEFAULT_TIMEOUT = 20.0
SUPPORTED_TYPES = ("simple", "exec", "oneshot", "notify", "dbus")
_COMMAND_KEYS = ("ExecStartPre", "ExecStart", "ExecStartPost", "ExecReload", "ExecStop", "ExecStopPost")


@dataclass
class Settings:
    """A service's settings, read once when the unit is loaded."""

    type: str
    commands: dict[str, list[Command]]
    unit: UnitFile
    specifiers: Mapping[str, str]
    bus_name: str
    remain: bool
    restart: str
    restart_delay: float
    timeout_start: float
    timeout_stop: float
    watchdog: float
    limit: tuple[int, float]

    @classmethod
    def read(cls, unit: UnitFile, specifiers: Mapping[str, str]) -> Settings:
        """Raises BadSetting for what systemd or the stand cannot run."""
        bus_name = expand_specifiers(unit.last("Service", "BusName"), specifiers)
        kind = unit.last("Service", "Type", "dbus" if bus_name else "simple")
        commands = {
            key: [Command.parse(line, specifiers) for line in unit.all("Service", key)] for key in _COMMAND_KEYS
        }
        if kind not in SUPPORTED_TYPES:
            raise BadSetting(f"Type={kind} is not one that the stand can run")
        if kind == "dbus" and not bus_name:
            raise BadSetting("Type=dbus without BusName=")
        if kind != "oneshot" and len(commands["ExecStart"]) != 1:
            raise BadSetting("a service that is not oneshot needs exactly one ExecStart=")
        timeout = unit.seconds("Service", "TimeoutSec", DEFAULT_TIMEOUT)
        start_default = float("inf") if kind == "oneshot" else timeout
        return cls(
            kind, commands, unit, specifiers, bus_name, unit.flag("Service", "RemainAfterExit"),
            unit.last("Service", "Restart", "no"), unit.seconds("Service", "RestartSec", 0.1),
            unit.seconds("Service", "TimeoutStartSec", start_default) or float("inf"),
            unit.seconds("Service", "TimeoutStopSec", timeout) or float("inf"),
            unit.seconds("Service", "WatchdogSec", 0.0),
            (int(unit.last("Unit", "StartLimitBurst", "5")), unit.seconds("Unit", "StartLimitIntervalSec", 10.0)),
        )  # fmt: skip


def conditions_hold(unit: UnitFile, specifiers: Mapping[str, str]) -> bool:
    """The Condition…= settings about paths and the kernel command line; others count as met (systemd.unit(5))."""
    needed, alternatives = True, []
    for key, test in _CONDITIONS.items():
        for value in unit.all("Unit", key):
            marks = value[: len(value) - len(value.lstrip("|!"))]
            met = test(expand_specifiers(value[len(marks) :], specifiers)) != ("!" in marks)
            if "|" in marks:
                alternatives.append(met)
            else:
                needed = needed and met
    return needed and (not alternatives or any(alternatives))


def _on_command_line(word: str) -> bool:
    words = Path("/proc/cmdline").read_text().split()
    return word in words or ("=" not in word and any(each.startswith(f"{word}=") for each in words))


_CONDITIONS: Mapping[str, Callable[[str], bool]] = {
    "ConditionPathExists": os.path.exists,
    "ConditionPathExistsGlob": lambda pattern: bool(glob.glob(pattern)),
    "ConditionPathIsDirectory": os.path.isdir,
    "ConditionPathIsSymbolicLink": os.path.islink,
    "ConditionDirectoryNotEmpty": lambda path: os.path.isdir(path) and bool(os.listdir(path)),
    "ConditionFileNotEmpty": lambda path: os.path.isfile(path) and os.path.getsize(path) > 0,
    "ConditionFileIsExecutable": lambda path: os.path.isfile(path) and os.access(path, os.X_OK),
    "ConditionKernelCommandLine": _on_command_line,
}
