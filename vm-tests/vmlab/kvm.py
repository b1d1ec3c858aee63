"""Which accelerator works here. /dev/kvm may be there and hang, so a real guest must run to its end first."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Optional

QEMU = "qemu-system-x86_64"
# The probe must have the CPU of the real machines: some hosts fail only at the registers that it brings.
CPU = "max"
PROBE_TIMEOUT = 10.0
_ROM_SIZE = 64 * 1024
_RESET_VECTOR = 0xFFF0
# mov al, 0x10; out 0xf4, al; then halt for ever. isa-debug-exit ends QEMU with (0x10 << 1) | 1.
_PROGRAM = bytes([0xB0, 0x10, 0xE6, 0xF4, 0xF4, 0xEB, 0xFD])
_SUCCESS = (0x10 << 1) | 1
TCG = "tcg,thread=multi"
KVM = "kvm"


def accelerator(cache: Path) -> str:
    """The value of QEMU's -accel: KVM where it works, else TCG; asked once per boot of the host, kept in `cache`."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    known = cache / "accelerator.json"
    try:
        found = json.loads(known.read_text())
        if found["boot"] == boot:
            return str(found["accelerator"])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # Not asked yet, or a half-written answer.
    answer = KVM if os.access("/dev/kvm", os.R_OK | os.W_OK) and runs_a_guest(KVM) else TCG
    cache.mkdir(parents=True, exist_ok=True)
    fresh = known.with_suffix(f".{os.getpid()}")
    fresh.write_text(json.dumps({"boot": boot, "accelerator": answer}))
    os.replace(fresh, known)
    return answer


def runs_a_guest(accel: str, timeout: float = PROBE_TIMEOUT) -> bool:
    """Whether a guest of seven bytes runs to its end with this accelerator within `timeout` seconds."""
    program = shutil.which(QEMU)
    if program is None:
        return False
    with tempfile.TemporaryDirectory(prefix="vmlab-probe-") as scratch:
        rom = Path(scratch) / "rom"
        rom.write_bytes(_rom())
        argv = [program, "-accel", accel, "-machine", "pc", "-cpu", CPU, "-nodefaults", "-no-user-config",
                "-display", "none", "-m", "16", "-bios", str(rom),
                "-device", "isa-debug-exit,iobase=0xf4,iosize=1"]  # fmt: skip
        return _status(argv, timeout) == _SUCCESS


def _rom() -> bytes:
    rom = bytearray(b"\xf4" * _ROM_SIZE)
    rom[_RESET_VECTOR : _RESET_VECTOR + len(_PROGRAM)] = _PROGRAM
    return bytes(rom)


def _status(argv: list[str], timeout: float) -> Optional[int]:
    process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        return process.wait(timeout)
    except subprocess.TimeoutExpired:
        return None
    finally:
        process.kill()
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            pass  # It is stuck in the kernel; that is the answer, too.
