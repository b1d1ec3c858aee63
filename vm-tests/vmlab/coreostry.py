"""Try a CoreOS disk, or make one that scenarios can start from: `python -m vmlab.coreostry`; see vm-tests/README.md.

It boots VM_IMAGE, puts mcdaemon in by Ignition, says what it finds, reboots in order, cuts the power, boots again. With
`--rebase` the OS is replaced first by that image; with `--output` the result is written as a disk of its own.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Optional, Protocol

from tests.stand.machine import MachineError
from vmlab import coreos
from vmlab.coreosguest import CoreOs
from vmlab.kvm import accelerator

PROJECT = Path(__file__).resolve().parents[2]
REBASE_TIMEOUT = 3600.0
"""Seconds: a whole OS image is fetched and imported."""

_CONVERT_TIMEOUT = 1800.0
_LOOKS = {
    "OS": ["sh", "-c", '. /etc/os-release; echo "$PRETTY_NAME, $(uname -r), systemd $(systemctl --version | head -1)"'],
    "rpm-ostree": ["sh", "-c", "rpm-ostree --version | sed -n 's/ *Version: //p'; ostree --version | sed -n 2p"],
    "SELinux": ["sh", "-c", "getenforce; id -Z"],
    "agent": ["sh", "-c", "systemctl is-active mcdaemon.service; systemctl is-failed mcdaemon-early.service"],
    "failed units": ["systemctl", "--failed", "--plain", "--no-legend"],
    "deployments": ["rpm-ostree", "status", "--booted"],
}
_RUNTIME = ["/usr/bin/python3", "-c", "from gi.repository import Gio, GLib"]


class Machine(Protocol):
    """What is needed of a `CoreOs`."""

    def boot(self, timeout: float = ...) -> int: ...
    def reboot(self, timeout: float = ...) -> None: ...
    def power_cut(self) -> None: ...
    def power_off(self, timeout: float = ...) -> None: ...
    def run(self, argv: Sequence[str], timeout: float = ..., check: bool = ...) -> subprocess.CompletedProcess[str]: ...


def walk(machine: Machine, rebase: str, say: Callable[[str], None]) -> None:
    """Through everything that a disk must be able to do. Raises MachineError at the first thing that it cannot."""
    say(f"first boot: up after {machine.boot()} boots of QEMU")
    if rebase:
        machine.run(["rpm-ostree", "rebase", "--bypass-driver", f"ostree-unverified-registry:{rebase}"], REBASE_TIMEOUT)
        machine.reboot()
        say(f"rebased to {rebase}")
    for name, argv in _LOOKS.items():
        done = machine.run(argv, check=False)
        say(f"{name}: {' / '.join((done.stdout + done.stderr).split(chr(10))).strip(' /') or 'none'}")
    if machine.run(_RUNTIME, check=False).returncode != 0:
        raise MachineError("cannot run mcdaemon there: no /usr/bin/python3 with gi; rebase to an image that has them")
    machine.reboot()
    say("an orderly reboot: up again")
    machine.power_cut()
    machine.boot()
    say("a power cut: up again")
    machine.power_off()
    say("powered off")


def main(arguments: Optional[Sequence[str]] = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m vmlab.coreostry", description=__doc__)
    parser.add_argument("--rebase", default="", metavar="IMAGE", help="replace the OS: 10.0.2.2:5000/os@sha256:…")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the disk as it is in the end")
    parser.add_argument("--key", type=Path, metavar="FILE", help="a public ssh key for the user core")
    given = parser.parse_args(arguments)
    begin = time.monotonic()
    try:
        image = coreos.from_environment()
        if image is None:
            raise coreos.BadImage(f"cannot try a disk: {coreos.VARIABLE} names none")
        keys = (given.key.read_text().strip(),) if given.key else ()
        config = coreos.harness_config(keys) + coreos.agent_config(PROJECT)
        folder = Path(tempfile.mkdtemp(prefix="vmlab-coreos-", dir="/var/tmp"))
        print(f"logs and disk: {folder}")
        with CoreOs(image, folder, config, accelerator(PROJECT / "dist" / "vm")) as machine:
            walk(machine, given.rebase, lambda text: print(f"{time.monotonic() - begin:7.1f} s  {text}", flush=True))
        if given.output:
            coreos.copy(machine.disk, given.output, _CONVERT_TIMEOUT)
            print(f"VM_IMAGE={given.output} starts from here")
    except (coreos.BadImage, coreos.ToolFailed, MachineError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
