"""The parts of the agent that no config may manage: its units, their drop-ins and links, and what keeps them enabled.

After the reboot the agent has to start, or nobody confirms the config or takes it back. Its settings are the one thing
that a config may bring; they are judged by `update/ownsettings.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

from mcdaemon.machineconfig import kernelargs
from mcdaemon.machineconfig.model import MachineConfig
from mcdaemon.machineconfig.paths import canonical
from mcdaemon.machineconfig.specs import UnitSpec

UNITS = ("mcdaemon.service", "mcdaemon-early.service")
# systemd takes the drop-ins of mcdaemon-.service.d for mcdaemon-early.service, too (systemd.unit(5)).
_NAMES = (*UNITS, "mcdaemon-.service")
# Where systemd reads units and presets, and a config can write (systemd.unit(5), systemd.preset(5)).
_UNIT_PLACES = (
    "/etc/systemd/system",
    "/etc/systemd/system.control",
    "/etc/systemd/system.attached",
    "/var/usrlocal/lib/systemd/system",
)
_SINGLE = (
    "/etc/tmpfiles.d/mcdaemon.conf",
    "/etc/systemd/system-preset/50-mcdaemon.preset",
    "/var/usrlocal/lib/tmpfiles.d/mcdaemon.conf",
    "/var/usrlocal/lib/systemd/system-preset/50-mcdaemon.preset",
)
_MASK = "systemd.mask"


def touched(config: MachineConfig) -> Iterator[tuple[str, str]]:
    """(JSON pointer, what it is) for each thing in `config` that would change the agent itself."""
    for unit in config.units:
        if unit.name in _NAMES and _changes(unit):
            yield config.pointer("systemd/units", "name", unit.name), unit.name
    for file in config.files:
        if owns(file.path):
            yield config.pointer("storage/files", "path", file.path), file.path
    for index, entry in enumerate((config.raw.get("spec") or {}).get("kernelArguments") or []):
        for argument in kernelargs.split(entry):
            if _masks(argument):
                yield f"/spec/kernelArguments/{index}", argument


def owns(path: str) -> bool:
    """Whether a file at `path` would be, or change, a part of the agent."""
    real = canonical(path)
    if real in _SINGLE:
        return True
    for place in _UNIT_PLACES:
        if real.startswith(place + "/"):
            first, *rest = real[len(place) + 1 :].split("/")
            return any(first == name or first.startswith(f"{name}.") for name in _NAMES) or rest[:1] in (
                [name] for name in UNITS
            )
    return False


def _changes(unit: UnitSpec) -> bool:
    """Only "enabled: true", which is so anyway, changes nothing."""
    return unit.mask or unit.enabled is False or unit.content is not None or bool(unit.dropins)


def _masks(argument: str) -> bool:
    key, _equals, value = argument.replace('"', "").partition("=")
    return key == _MASK and value.startswith("mcdaemon")
