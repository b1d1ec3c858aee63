"""A node in a virtual machine, as its operator and its workloads see it: what the scenarios are written with.

mcdaemon runs there by itself, as a service. A scenario says what is desired, waits for a sentence of the journal or for
rest, and looks. Reboots are followed as a machine room does it: what goes down for a reboot is started again.
"""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.stand.machine import Down, MachineError
from vmlab.guest import Guest

DESIRED = "/var/lib/mcdaemon/machineconfigs"
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

SETTLED = 900.0
"""Seconds until a node must have come to rest: ten times what a whole update takes on a quiet machine."""

_BOOTS = 6
_PATIENT = re.compile(r"mcdaemon\[\d+\]: (rest|hold|reject): ")


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
    guest.run(["systemctl", "restart", "mcdaemon.service"], timeout=SETTLED)


class VmNode:
    """One node. `boots` counts the reboots that were followed."""

    def __init__(self, guest: Guest) -> None:
        self.machine = guest
        self.boots = 0

    # -- what a person does -----------------------------------------------------------------------------------------

    def desire(self, *configs: str) -> None:
        """Make these MachineConfigs (their texts) the desired ones, and no others, in one stroke."""
        self.machine.write(f"{DESIRED}/.new", "\n---\n".join(configs), 0o600)
        self.machine.run(["mv", f"{DESIRED}/.new", f"{DESIRED}/desired.yaml"])

    def shut_gate(self) -> None:
        """From now on nothing can be drained; until the next boot, or `open_gate`."""
        self.machine.write(GATE, "")

    def open_gate(self) -> None:
        self.machine.run(["rm", "-f", GATE])

    def mcdaemon(self, *arguments: str, check: bool = True, timeout: float = 300.0) -> subprocess.CompletedProcess[str]:
        return self.machine.run(["mcdaemon", *arguments], timeout=timeout, check=check)

    def settle(self, timeout: float = SETTLED) -> None:
        """Follow the node through its reboots until the agent has nothing to do now, or waits for something.

        Raises MachineError when that does not come in time, or the node goes down in another way.
        """
        deadline = time.monotonic() + timeout
        mark = 0
        for _round in range(_BOOTS):
            if self.machine.up and self.patient(mark, deadline - time.monotonic()):
                return
            self.follow_reboot(deadline - time.monotonic())
            mark = 0
        raise MachineError(f"no rest after {_BOOTS} boots")

    def follow_reboot(self, timeout: float = SETTLED) -> None:
        how = self.machine.wait_down(timeout)
        if how is not Down.REBOOT:
            raise MachineError(f"the node went down by {how.value} instead of a reboot")
        self.boots += self.machine.boot(timeout)

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
