"""How the end of a command in the guest is noticed."""

from __future__ import annotations

import subprocess
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest
from vmlab.guestagent import ExecStatus
from vmlab.guestprocess import GuestProcess
from vmlab.qemu import Qemu


class _Guest:
    """A guest agent that counts how often it is asked, and a journal's console."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.argv: list[str] = []
        self.asked = 0
        self.exited = False
        self.port_open = True

    def execute(self, argv: list[str], _env: list[str], _stdin: Any) -> int:
        self.argv = argv
        return 7

    def status(self, _pid: int) -> ExecStatus:
        self.asked += 1
        return ExecStatus(self.exited)

    def qemu(self) -> Qemu:
        journal = SimpleNamespace(lines=self.lines, mark=lambda: 0)
        return cast(Qemu, SimpleNamespace(agent=self, journal=journal, changed=threading.Condition()))


def test_the_agents_own_log_of_a_command_is_not_taken_for_its_end() -> None:
    """Else the guest, which has one processor under emulation, is asked for its end fifty times a second."""
    guest = _Guest()
    process = GuestProcess(guest.qemu(), ["true"])
    token = next(word for word in guest.argv if "end of" in word)
    guest.lines.append(f"[ 1.0] qemu-ga[1]: exit $r vmlab {token} / true")
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.5)
    assert guest.asked < 5
    guest.exited = True
    guest.lines.append(f"{token}\r")
    assert process.wait(10) == 0
