"""Other programs that bring this node to an OS or a config of their own: they are named, and nothing is staged beside
them, because there is one place for a staged deployment and one /etc.

`rpm-ostree-countme` only counts, and is none of them. mcdaemon does not register itself as rpm-ostree's driver: that
would overwrite who is registered, fail a transaction whose caller has no unit (1.9), and last only until the reboot.
"""

from __future__ import annotations

import configparser
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from gi.repository import GLib

from mcdaemon.errors import Held, HoldReason
from mcdaemon.host.bus import Systemd

DRIVER = "mcdaemon"
_DRIVER_FILE = "run/rpm-ostree/update-driver.gv"
_POLICY_FILE = "etc/rpm-ostreed.conf"
_HARMLESS = frozenset({"", "none", "check"})
"""Values of AutomaticUpdatePolicy that stage nothing (rpm-ostree.md 1.8, 1.12)."""

_LIVES = frozenset({"active", "activating", "reloading"})
_DRIVES = _LIVES | {"failed"}
"""The states in which rpm-ostree's own commands respect a registered driver (1.9)."""

ZINCATI = "zincati.service"
AUTOMATIC = "rpm-ostreed-automatic.timer"
BOOTC = "bootc-fetch-apply-updates.timer"
MCD = "machine-config-daemon"


@dataclass(frozen=True)
class OtherAgent:
    """Somebody else who drives this node. `how_to_end` is for people; `writes_files`: not only the OS is theirs."""

    name: str
    how_to_end: str
    writes_files: bool = False


def find(systemd: Systemd, top: Path) -> tuple[OtherAgent, ...]:
    """Every other agent that lives: one call to systemd, and a look at /proc. `top` is the root of the node."""
    return (*scheduled(systemd, top), *_machine_config_daemon(top / "proc"))


def scheduled(systemd: Systemd, top: Path) -> tuple[OtherAgent, ...]:
    """Those that systemd knows: cheap enough for a node at rest."""
    driver = _driver(top / _DRIVER_FILE)
    names = [ZINCATI, AUTOMATIC, BOOTC, *([driver[1]] if driver else [])]
    states = systemd.active_states(names)
    found = [
        OtherAgent(unit, f"end it: `systemctl disable --now {unit}`")
        for unit in (ZINCATI, BOOTC)
        if states.get(unit) in _LIVES
    ]
    policy = _policy(top / _POLICY_FILE)
    if states.get(AUTOMATIC) in _LIVES and policy not in _HARMLESS:
        found.append(
            OtherAgent(
                f"{AUTOMATIC} with AutomaticUpdatePolicy={policy}",
                f"end it: `systemctl disable --now {AUTOMATIC}`, or set the policy in /{_POLICY_FILE} to none",
            )
        )
    if driver and states.get(driver[1]) in _DRIVES and driver[1] not in {agent.name for agent in found}:
        found.append(
            OtherAgent(
                f"{driver[0]} ({driver[1]}), the update driver that rpm-ostree knows",
                f"end it: `systemctl disable --now {driver[1]}`; if that is no update agent any more, "
                f"remove /{_DRIVER_FILE}",
            )
        )
    return tuple(found)


def require_none(systemd: Systemd, top: Path, live: bool = False) -> None:
    """Raises Held naming every other agent that lives. `live`: nothing is staged, so that only who writes files too
    stands in the way."""
    found = [agent for agent in find(systemd, top) if agent.writes_files or not live]
    if found:
        names = ", ".join(agent.name for agent in found)
        raise Held(
            HoldReason.OTHER_AGENT,
            f"cannot update this node while another agent drives it: {names}",
            "; ".join(agent.how_to_end for agent in found),
        )


def _driver(path: Path) -> Optional[tuple[str, str]]:
    """(name, unit) of the driver that registered itself, None when it is nobody or ourselves."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    value: Any = GLib.Variant.new_from_bytes(GLib.VariantType("a{sv}"), GLib.Bytes.new(content), False).unpack()
    name, unit = str(value.get("driver-name", "")), str(value.get("driver-sd-unit", ""))
    return (name, unit) if unit and name != DRIVER else None


def _policy(path: Path) -> str:
    """AutomaticUpdatePolicy as the next start of rpm-ostreed reads it. The file, because the service need not run."""
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    try:
        parser.read_string(path.read_text(errors="replace"))
    except (OSError, configparser.Error):
        return ""
    section: Mapping[str, str] = parser["Daemon"] if parser.has_section("Daemon") else {}
    return section.get("AutomaticUpdatePolicy", "").strip()


def _machine_config_daemon(proc: Path) -> tuple[OtherAgent, ...]:
    """By its processes: in a pod or not, the host sees them."""
    for folder in proc.iterdir():
        if not folder.name.isdigit():
            continue
        try:
            # The kernel cuts the name at fifteen characters; only then is the longer one worth reading.
            if (folder / "comm").read_text(errors="replace").strip() != MCD[:15]:
                continue
            program = (folder / "cmdline").read_bytes().split(b"\0", 1)[0].decode(errors="replace")
        except OSError:  # it ended meanwhile
            continue
        if program.rpartition("/")[2] == MCD:
            return (
                OtherAgent(
                    f"{MCD} (process {folder.name})",
                    "take this node away from it first: two agents undo each other's files",
                    writes_files=True,
                ),
            )
    return ()
