"""How the objects of systemd look on the bus: interfaces, signatures, object paths (org.freedesktop.systemd1(5))."""

from __future__ import annotations

import re

NAME, ROOT = "org.freedesktop.systemd1", "/org/freedesktop/systemd1"
UNIT_ROOT = f"{ROOT}/unit"
MANAGER, UNIT, SERVICE = f"{NAME}.Manager", f"{NAME}.Unit", f"{NAME}.Service"


def _arguments(names: str, direction: str) -> str:
    pairs = [word.split(":") for word in names.split()]
    return "".join(f'<arg name="{name}" type="{kind}" direction="{direction}"/>' for name, kind in pairs)


# method -> (in arguments, out arguments), from org.freedesktop.systemd1(5)
_START = ("name:s mode:s", "job:o")
METHODS = {
    "StartUnit": _START, "StopUnit": _START, "RestartUnit": _START, "TryRestartUnit": _START, "ReloadUnit": _START,
    "ReloadOrRestartUnit": _START, "ReloadOrTryRestartUnit": _START,
    "GetUnit": ("name:s", "unit:o"), "LoadUnit": ("name:s", "unit:o"), "GetUnitByPID": ("pid:u", "unit:o"),
    "KillUnit": ("name:s whom:s signal:i", ""), "ResetFailedUnit": ("name:s", ""), "ResetFailed": ("", ""),
    "ListUnits": ("", "units:a(ssssssouso)"), "ListUnitsByNames": ("names:as", "units:a(ssssssouso)"),
    "ListUnitsFiltered": ("states:as", "units:a(ssssssouso)"),
    "ListUnitsByPatterns": ("states:as patterns:as", "units:a(ssssssouso)"),
    "ListJobs": ("", "jobs:a(usssoo)"), "Subscribe": ("", ""), "Unsubscribe": ("", ""),
    "Reload": ("", ""), "Reexecute": ("", ""), "Reboot": ("", ""), "PowerOff": ("", ""),
    "ListUnitFiles": ("", "files:a(ss)"), "GetUnitFileState": ("file:s", "state:s"),
    "GetDefaultTarget": ("", "name:s"),
    "EnableUnitFiles": ("files:as runtime:b force:b", "carries:b changes:a(sss)"),
    "EnableUnitFilesWithFlags": ("files:as flags:t", "carries:b changes:a(sss)"),
    "DisableUnitFiles": ("files:as runtime:b", "changes:a(sss)"),
    "DisableUnitFilesWithFlags": ("files:as flags:t", "changes:a(sss)"),
    "DisableUnitFilesWithFlagsAndInstallInfo": ("files:as flags:t", "carries:b changes:a(sss)"),
    "MaskUnitFiles": ("files:as runtime:b force:b", "changes:a(sss)"),
    "UnmaskUnitFiles": ("files:as runtime:b", "changes:a(sss)"),
    "PresetUnitFiles": ("files:as runtime:b force:b", "carries:b changes:a(sss)"),
}  # fmt: skip
SIGNALS = {
    "JobNew": "id:u job:o unit:s", "JobRemoved": "id:u job:o unit:s result:s", "UnitNew": "id:s unit:o",
    "UnitRemoved": "id:s unit:o", "Reloading": "active:b", "UnitFilesChanged": "",
}  # fmt: skip
MANAGER_PROPERTIES = {"Version": "s", "Features": "s", "Tainted": "s", "SystemState": "s", "NNames": "u",
                      "NFailedUnits": "u", "NJobs": "u", "Environment": "as", "UnitPath": "as",
                      "Virtualization": "s", "ShowStatus": "b", "Progress": "d"}  # fmt: skip
UNIT_PROPERTIES = {
    "Id": "s", "Names": "as", "Description": "s", "LoadState": "s", "ActiveState": "s", "SubState": "s",
    "FragmentPath": "s", "SourcePath": "s", "DropInPaths": "as", "UnitFileState": "s", "NeedDaemonReload": "b",
    "Following": "s", "Job": "(uo)", "CanStart": "b", "CanStop": "b", "CanReload": "b", "ConditionResult": "b",
    "LoadError": "(ss)", "InvocationID": "ay", "StateChangeTimestamp": "t", "ActiveEnterTimestamp": "t",
    "InactiveEnterTimestamp": "t", "Transient": "b", "RefuseManualStart": "b", "Documentation": "as",
    "TriggeredBy": "as", "Triggers": "as",
}  # fmt: skip
SERVICE_PROPERTIES = {
    "Type": "s", "Restart": "s", "MainPID": "u", "ControlPID": "u", "BusName": "s", "StatusText": "s",
    "StatusErrno": "i", "Result": "s", "ReloadResult": "s", "NRestarts": "u", "RemainAfterExit": "b",
    "ExecMainPID": "u", "ExecMainCode": "i", "ExecMainStatus": "i", "WatchdogUSec": "t", "TimeoutStopUSec": "t",
    # Not systemd's: how many WATCHDOG=1 have come since the start.
    "StandWatchdogPings": "u",
}  # fmt: skip


def _interface(
    name: str, methods: dict[str, tuple[str, str]], signals: dict[str, str], properties: dict[str, str]
) -> str:
    parts = [
        f'<method name="{key}">{_arguments(i, "in")}{_arguments(o, "out")}</method>' for key, (i, o) in methods.items()
    ]
    parts += [f'<signal name="{key}">{_arguments(value, "out")}</signal>' for key, value in signals.items()]
    parts += [f'<property name="{key}" type="{value}" access="read"/>' for key, value in properties.items()]
    return f'<interface name="{name}">{"".join(parts)}</interface>'


MANAGER_XML = f"<node>{_interface(MANAGER, METHODS, SIGNALS, MANAGER_PROPERTIES)}</node>"
_UNIT_METHODS = {"Start": ("mode:s", "job:o"), "Stop": ("mode:s", "job:o"), "Restart": ("mode:s", "job:o"),
                 "Reload": ("mode:s", "job:o"), "ResetFailed": ("", "")}  # fmt: skip


def unit_xml(name: str) -> str:
    """The description of a unit's object."""
    service = _interface(SERVICE, {}, {}, SERVICE_PROPERTIES) if name.endswith(".service") else ""
    return f"<node>{_interface(UNIT, _UNIT_METHODS, {}, UNIT_PROPERTIES)}{service}</node>"


def object_path(name: str) -> str:
    """The object path of a unit: everything but letters and digits, and a digit in front, becomes _xx."""
    escaped = "".join(
        char if char.isascii() and char.isalpha() or (char.isdigit() and index) else f"_{ord(char):02x}"
        for index, char in enumerate(name)
    )
    return f"{UNIT_ROOT}/{escaped}"


def unit_name(path: str) -> str:
    """The unit whose object path it is."""
    return re.sub(r"_([0-9a-f]{2})", lambda match: chr(int(match.group(1), 16)), path[len(UNIT_ROOT) + 1 :])
