"""How the end of a command in the guest is noticed."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Sequence
from typing import cast

import pytest
from vmlab.guestagent import ExecStatus
from vmlab.guestprocess import GuestProcess
from vmlab.qemu import Qemu


class _Machine:
    """What a command needs of a machine; it is the guest agent and the journal as well."""

    def __init__(self) -> None:
        self.agent = self.journal = self
        self.changed = threading.Condition()
        self.port_open = True
        self.lines: list[str] = []
        self.asked = 0
        self.argv: list[str] = []

    def mark(self) -> int:
        return len(self.lines)

    def execute(self, argv: Sequence[str], _env: Sequence[str], _stdin: object) -> int:
        self.argv = list(argv)
        return 7

    def status(self, _pid: int) -> ExecStatus:
        self.asked += 1
        return ExecStatus("vmlab: end" in "".join(self.lines[-1:])[:10], 0, 0, b"said", b"")


def test_a_journal_in_which_the_guest_agent_notes_the_command_is_not_its_end() -> None:
    """Otherwise the agent is asked fifty times a second, which keeps an emulated machine from its work."""
    machine = _Machine()
    process = GuestProcess(cast(Qemu, machine), ["true"])
    machine.lines += [
        f'[ 1.0] qemu-ga[9]: info: guest-exec called: "{line}' for line in " ".join(machine.argv).split("\n")
    ]
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.5)
    assert machine.asked <= 2, "at the end of the time limit only"
    machine.lines.append(next(word for word in machine.argv if word.startswith("vmlab: end of ")))
    assert process.wait(10) == 0 and process.result().stdout == "said"
