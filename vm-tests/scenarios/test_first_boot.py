"""The very first boot of an installed disk: nobody has logged in, restarted or prepared anything."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
from vmlab.bootloader import DiskFiles
from vmlab.disk import STATEROOT
from vmlab.guest import Guest
from vmlab.image import Built
from vmlab.node import DESIRED, VmNode

from scenarios.conftest import Record
from tests.stand.configs import Unit, machine_config
from tests.stand.incidents import FILES, WORKLOAD

VAR = f"/ostree/deploy/{STATEROOT}/var"
UNITS = "etc/systemd/system"
ENABLED = (f"{UNITS}/multi-user.target.wants/mcdaemon.service", f"{UNITS}/sysinit.target.wants/mcdaemon-early.service")
PROBE = Unit(
    "probe.service",
    "[Service]\nType=oneshot\nRemainAfterExit=yes\nExecStart=/bin/cp /etc/app/app.conf /var/seen-by-probe\n"
    "[Install]\nWantedBy=multi-user.target\n",
    True,
)


@pytest.fixture
def installed(tmp_path: Path, built: Built, machines: list[Guest]) -> Guest:
    """A machine that is off and was never on."""
    guest = Guest.cold(built.disk, tmp_path / "machine")
    machines.append(guest)
    return guest


def test_the_agent_starts_by_itself_in_a_first_boot_that_only_presets_have_told_of_it(
    installed: Guest, built: Built
) -> None:
    """As an image brings it that has no machine-id (as CoreOS') and where nobody ran `systemctl enable`: to systemd
    this is a first boot, and it follows the presets, for the early unit too. Nothing is desired: the agent rests.

    Debian's default is to enable everything, so the last preset is made CoreOS' here: what none names stays off.
    """
    deployment = installed.deployment_root(f"{built.commit}.0")
    unlink = [f'rm "{deployment}/{path}"' for path in ("etc/machine-id", *ENABLED)]
    change(installed.disk_files(), unlink)
    put(installed, {f"{deployment}/etc/systemd/system-preset/99-default-disable.preset": "disable *\n"})
    assert all(installed.disk_files().kind(f"{deployment}/{path}") is None for path in ENABLED)
    node = VmNode(installed)
    node.start()
    assert "no config is desired" in node.until()
    assert installed.boots and node.boots == 1
    assert re.fullmatch("[0-9a-f]{32}\n", installed.read("/etc/machine-id"))
    for path in ENABLED:
        assert installed.readlink(f"/{path}") == f"/{UNITS}/{path.rpartition('/')[2]}"
    active = installed.run(["systemctl", "is-active", "mcdaemon.service", "mcdaemon-early.service"], check=False)
    assert active.stdout.split() == ["active", "active"]
    assert installed.run(["systemctl", "--failed", "--no-legend"]).stdout == ""
    assert [one.booted for one in installed.deployments()] == [True]
    found = node.status()
    assert (found["state"], found["step"], found["desired"]) == ("Done", "rest", "")


def test_a_config_that_is_on_the_disk_before_the_first_boot_is_applied_to_its_end(
    installed: Guest, record_property: Record
) -> None:
    """P1, P3, P5: as an installer leaves it. One reboot, then at rest, validated; the machine keeps its identity."""
    files = {**FILES, "/usr/local/etc/shared": ("first\n", 0o640)}
    config = machine_config("50-first", files=files, units=[WORKLOAD, PROBE], kernel_arguments=["vmlab.first"])
    put(installed, {f"{VAR}{DESIRED[len('/var') :]}/first.yaml": config})
    node = VmNode(installed)
    node.start()
    node.until("rest: current and validated")
    assert node.boots == 2, "the first boot, and the reboot of the update"
    assert "vmlab.first" in installed.read("/proc/cmdline").split()
    for path, text in files.items():
        content, mode = text if isinstance(text, tuple) else (text, 0o644)
        assert installed.read(path) == content and installed.lstat(path).st_mode & 0o7777 == mode
    assert installed.read("/var/seen-by-probe") == FILES["/etc/app/app.conf"][0], "in force in the first boot with it"
    assert node.mcdaemon("validate").returncode == 0
    found = node.status()
    assert (found["state"], found["current"], found["desired"]) == ("Done", "50-first", "50-first")
    assert installed.run(["systemctl", "--failed", "--no-legend"]).stdout == ""
    machine_id = installed.read("/etc/machine-id").strip()
    boots = installed.run(["journalctl", "--list-boots", "--quiet", "--no-pager"]).stdout.splitlines()
    assert len(boots) == 2, "both boots are in one machine's journal"
    assert installed.run(["ls", "/var/log/journal"]).stdout.split() == [machine_id], "the same over the reboot"
    record_property("numbers", "first boot: a config on the installed disk took 1 reboot")


def put(machine: Guest, files: Mapping[str, str]) -> None:
    """Write files onto the disk of a machine that is off, for root alone, and the directories that they need."""
    disk = machine.disk_files()
    requests = []
    folders: set[str] = set()
    for number, (path, text) in enumerate(files.items()):
        source = machine.folder / f"put-{number}"
        source.write_text(text)
        for parent in [str(one) for one in reversed(Path(path).parents)]:
            if parent not in folders and disk.kind(parent) is None:
                requests += [f'mkdir "{parent}"', f'sif "{parent}" mode 040755']
                folders.add(parent)
        requests += [f'write "{source}" "{path}"', f'sif "{path}" mode 0100600']
        requests += [f'sif "{path}" {field} 0' for field in ("uid", "gid")]
    change(disk, requests)


def change(disk: DiskFiles, requests: list[str]) -> None:
    """Let debugfs change the file system, and make sure that it is a sound one afterwards."""
    for request in requests:
        done = subprocess.run(["debugfs", "-w", "-R", request, disk.device], stdin=subprocess.DEVNULL,
                              capture_output=True, text=True, timeout=60, check=True)  # fmt: skip
        said = [line for line in done.stderr.splitlines()[1:] if line]
        assert not said, f"debugfs cannot {request}: {said}"
    done = subprocess.run(["e2fsck", "-fn", disk.device], stdin=subprocess.DEVNULL, capture_output=True, text=True,
                          timeout=300)  # fmt: skip
    assert done.returncode == 0, done.stdout
