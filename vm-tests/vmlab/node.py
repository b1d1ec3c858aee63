"""A node in a virtual machine, as its operator and its workloads see it: what the scenarios are written with.

mcdaemon runs there by itself, as a service. A scenario says what is desired, waits for a sentence of the journal or for
rest, and looks. Reboots are followed: what goes down for a reboot is switched on again.
"""

from __future__ import annotations

import json
import subprocess
import time
from dataclasses import dataclass
from typing import Any, Optional

from tests.stand.machine import Down, MachineError
from tests.stand.sysroot import BootEntry
from vmlab.broken import broken
from vmlab.guest import Guest

DESIRED = "/var/lib/mcdaemon/machineconfigs"
ARCHIVE = "/usr/local/lib/mcdaemon/mcdaemon.pyz"
LAB = "/var/lib/vmlab"
GATE = "/run/vmlab-gate-is-shut"
SETTINGS = f"""\
hold: {{retry_min_seconds: 2, retry_max_seconds: 10}}
health: {{timeout_seconds: 120, settle_seconds: 0}}
drain: {{command: [/bin/sh, {LAB}/drain], undo: [/bin/sh, {LAB}/undrain]}}
"""
_SERVICE = f"{LAB}/service"
_HOOKS = {
    "drain": f"test ! -e {GATE} && echo drained $(date +%s.%N) $(cat /proc/sys/kernel/random/boot_id) >>{_SERVICE}\n",
    "undrain": f"echo back $(date +%s.%N) $(cat /proc/sys/kernel/random/boot_id) >>{_SERVICE}\n",
}

VERSION = 1
"""Of what `prepare` does: part of the key of the kept snapshot."""

SETTLED = 900.0
"""Seconds until a node must have come to rest: ten times what a whole update takes on a quiet machine."""

_BOOTS = 6


@dataclass(frozen=True)
class Turn:
    """A line of the drain hooks: `drained` or `back`, when (seconds since the epoch), in which boot."""

    what: str
    at: float
    boot_id: str


def prepare(guest: Guest) -> None:
    """The settings of these nodes and the hooks that note when the node leaves service; the agent starts anew."""
    guest.run(["mkdir", "-p", LAB, DESIRED])
    for name, text in _HOOKS.items():
        guest.write(f"{LAB}/{name}", text, 0o755)
    guest.write("/etc/mcdaemon/mcdaemon.yaml", SETTINGS)
    mark = guest.mark()
    guest.run(["systemctl", "restart", "mcdaemon.service"], timeout=SETTLED)
    guest.wait_for(r"mcdaemon\[\d+\]: rest: ", SETTLED, mark)


def break_agent(guest: Guest, name: str) -> None:
    """Put a daemon in its place that has this damage (see `broken`)."""
    guest.write(ARCHIVE, broken(guest.read_bytes(ARCHIVE), name), 0o755)


class VmNode:
    """One node. `boots` counts the boots that were followed, the early unit's among them."""

    def __init__(self, guest: Guest) -> None:
        self.machine = guest
        self.boots = 0
        self._mark = guest.mark() if guest.up else 0

    # -- what a person does -----------------------------------------------------------------------------------------

    def desire(self, *configs: str) -> None:
        """Make these MachineConfigs (their texts) the desired ones, and no others, in one stroke."""
        self._mark = self.machine.mark()
        self.machine.write(f"{DESIRED}/.new", "\n---\n".join(configs), 0o600)
        self.machine.run(["mv", f"{DESIRED}/.new", f"{DESIRED}/desired.yaml"])

    def shut_gate(self) -> None:
        """From now on nothing can be drained; until the next boot, or `open_gate`."""
        self.machine.write(GATE, "")

    def open_gate(self) -> None:
        self.machine.run(["rm", "-f", GATE])

    def mcdaemon(self, *arguments: str, check: bool = True, timeout: float = 300.0) -> subprocess.CompletedProcess[str]:
        return self.machine.run(["mcdaemon", *arguments], timeout=timeout, check=check)

    def until(self, said: str = "rest: ", timeout: float = SETTLED) -> str:
        """Follow the node, through its reboots, until the agent says a sentence that begins like this (a pattern), and
        return it. What was said before `desire`, or before an `until` that came true, does not count.

        Raises MachineError when that does not come in time, or the node goes down in another way.
        """
        deadline = time.monotonic() + timeout
        for _boot in range(_BOOTS):
            line = self._said(rf"mcdaemon\[\d+\]: ({said})", deadline - time.monotonic())
            if line is not None:
                return line
            self.follow_reboot(max(60.0, deadline - time.monotonic()))
        raise MachineError(f"{said!r} was not said in {_BOOTS} boots")

    def _said(self, pattern: str, timeout: float) -> Optional[str]:
        """None when the machine went down instead."""
        heard = self.machine.hear(pattern, timeout, self._mark)
        if heard is None:
            return None
        self._mark, line = heard
        return line

    def follow_reboot(self, timeout: float = SETTLED) -> None:
        how = self.machine.wait_down(timeout)
        if how is not Down.REBOOT:
            raise MachineError(f"the node went down by {how.value} instead of a reboot")
        self.start(timeout)

    def start(self, timeout: float = SETTLED, entry: Optional[BootEntry] = None) -> None:
        """Switch on a node that is down, with the default entry or `entry`, and wait until all is up."""
        self._mark = 0
        self.boots += self.machine.boot(timeout, entry=entry)

    # -- what a person sees -----------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.mcdaemon("status", "--json").stdout)
        return found

    def turns(self) -> list[Turn]:
        """When the node left service and came back, from the beginning."""
        if not self.machine.exists(_SERVICE):
            return []
        lines = (line.split() for line in self.machine.read(_SERVICE).splitlines())
        return [Turn(what, float(at), boot) for what, at, boot in lines]
