"""An emulator that waits for ever, which happens once in some hundred boots, costs one more start and no scenario."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from vmlab import guest, tally
from vmlab.guest import Guest, counts
from vmlab.kvm import QEMU, TCG
from vmlab.qemu import Drive, Qemu, Start

pytestmark = pytest.mark.skipif(shutil.which(QEMU) is None, reason=f"needs {QEMU}: make vm-deps")


def _bzimage() -> bytes:
    """What QEMU takes for a kernel (Documentation/arch/x86/boot.rst); it is never run."""
    kernel = bytearray(64 * 1024)
    kernel[0x1F1], kernel[0x211] = 4, 1
    kernel[0x202:0x208] = b"HdrS\x0c\x02"
    kernel[0x22C:0x230] = (0x37FFFFFF).to_bytes(4, "little")
    return bytes(kernel)


def machine(tmp_path: Path, *extra: str) -> Guest:
    """A machine in whose folder QEMU runs, with a disk and a kernel that are none."""
    disk, kernel = tmp_path / "disk.raw", tmp_path / "kernel"
    disk.write_bytes(b"\0" * 1024 * 1024)
    kernel.write_bytes(_bzimage())
    made = Guest(tmp_path / "machine", disk, tmp_path / "cache", extra)
    made._start = Start(Drive(disk), kernel, kernel, "", TCG, extra=extra)
    made._qemu = Qemu(made._start, made._next_folder())
    return made


def test_a_silent_machine_that_does_nothing_is_begun_again_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guest, "STALLED", 0.2)
    monkeypatch.setattr(guest, "_IDLE_FOR", 1.0)
    with machine(tmp_path, "-S") as stalled:
        first = stalled.qemu.pid
        stalled._begin_again_if_stalled()
        assert stalled.qemu.pid != first and stalled.qemu.running
    assert counts(tmp_path / "cache") == {tally.STALLS: 1}


def test_a_silent_machine_that_works_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guest, "STALLED", 0.2)
    monkeypatch.setattr(guest, "_IDLE_FOR", 1.0)
    used = iter((1.0, 2.0))
    monkeypatch.setattr(Qemu, "cpu_seconds", lambda _self: next(used))
    with machine(tmp_path, "-S") as working:
        first = working.qemu.pid
        working._begin_again_if_stalled()
        assert working.qemu.pid == first
    assert counts(tmp_path / "cache") == {}
