"""The walk through a CoreOS disk, with a machine that only notes what is asked of it."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

import pytest
from vmlab import coreostry

from tests.stand.machine import MachineError


class Noted:
    """Runs nothing. `lacks`: a word; commands that have it fail."""

    def __init__(self, lacks: str = "no such word") -> None:
        self.lacks = lacks
        self.did: list[str] = []

    def boot(self, timeout: float = 1.0) -> int:
        self.did.append("boot")
        return 2

    def reboot(self, timeout: float = 1.0) -> None:
        self.did.append("reboot")

    def power_cut(self) -> None:
        self.did.append("cut")

    def power_off(self, timeout: float = 1.0) -> None:
        self.did.append("off")

    def run(self, argv: Sequence[str], timeout: float = 1.0, check: bool = True) -> subprocess.CompletedProcess[str]:
        status = int(any(self.lacks in word for word in argv))
        if argv[0] == "rpm-ostree" and argv[1] == "rebase":
            self.did.append(argv[-1])
        return subprocess.CompletedProcess(list(argv), status, "some\nwords\n", "")


def test_a_disk_is_rebased_rebooted_and_cut() -> None:
    machine, said = Noted(), list[str]()
    coreostry.walk(machine, "10.0.2.2:5000/os@sha256:0", said.append)
    image = "ostree-unverified-registry:10.0.2.2:5000/os@sha256:0"
    assert machine.did == ["boot", image, "reboot", "reboot", "cut", "boot", "off"]
    assert "OS: some / words" in said and said[0].endswith("2 boots of QEMU")


def test_a_disk_without_an_interpreter_for_the_agent_is_said_before_it_is_rebooted() -> None:
    machine = Noted(lacks="gi.repository")
    with pytest.raises(MachineError, match="no /usr/bin/python3 with gi"):
        coreostry.walk(machine, "", lambda text: None)
    assert machine.did == ["boot"]


@pytest.mark.parametrize("value", ["", "/no/such.qcow2"])
def test_without_a_disk_it_ends_with_a_sentence(
    value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VM_IMAGE", value)
    assert coreostry.main([]) == 1
    assert capsys.readouterr().err.startswith("cannot ")
