"""One config and the next, and how to see that a node carries the second one and nothing is left of the way to it."""

from __future__ import annotations

import hashlib
import json
import stat
from collections.abc import Mapping

from vmlab.guest import Guest
from vmlab.guestprocess import Found
from vmlab.node import VmNode

from tests.stand.configs import Unit, machine_config

STARTED = "/var/lib/started"
"""What the witnesses write: a line for each start, with the boot's id and the config that was found."""

_WITNESS = f'#!/bin/sh\necho "$1 $(cat /proc/sys/kernel/random/boot_id) $(cat /etc/app/app.conf)" >>{STARTED}\n'
_STATE = "/var/lib/mcdaemon"


def _witness(name: str, head: str = "", target: str = "multi-user.target") -> Unit:
    body = f"Type=oneshot\nRemainAfterExit=yes\nExecStart=/usr/local/bin/witness {name}\n"
    return Unit(
        f"{name}.service", f"[Unit]\nDescription=A witness\n{head}[Service]\n{body}[Install]\nWantedBy={target}\n", True
    )


_EARLY = "DefaultDependencies=no\nAfter=local-fs.target\n"
WITNESSES = (
    # As some configs have it: only the early unit's own ordering keeps it back.
    _witness("kubelet", _EARLY),
    _witness("network-setup", f"{_EARLY}Wants=network-pre.target\nAfter=network-pre.target\n", "sysinit.target"),
    _witness("workload"),
)
ONLY_NEW = _witness("only-new")

_BOTH = {
    "/etc/kubernetes/ca.crt": ("not a certificate\n", 0o600),
    "/usr/local/bin/witness": (_WITNESS, 0o755),
}
OLD_FILES: Mapping[str, tuple[str, int]] = {
    **_BOTH,
    "/etc/app/app.conf": ("old\n", 0o644),
    "/etc/only-old": ("old\n", 0o644),
    "/usr/local/bin/tool": ("old\n", 0o755),
}
NEW_FILES: Mapping[str, tuple[str, int]] = {
    **_BOTH,
    "/etc/app/app.conf": ("new\n", 0o640),
    "/etc/only-new": ("new\n", 0o600),
    "/etc/sysctl.d/90-new.conf": ("vm.max_map_count = 262144\n", 0o644),
    "/usr/local/bin/tool": ("new\n", 0o700),
    "/usr/local/bin/only-new": ("new\n", 0o755),
    # Many, so that writing them takes a while.
    **{f"/etc/app/conf.d/{number}.conf": (f"new {number}\n", 0o644) for number in range(20)},
}
OLD = machine_config("50-old", files=OLD_FILES, units=WITNESSES)


def new(os_image: str = "") -> str:
    """The config of the update: files, units, a kernel argument, and an image."""
    return machine_config(
        "50-new",
        files=NEW_FILES,
        units=[*WITNESSES, ONLY_NEW],
        kernel_arguments=["vmlab=new"],
        os_image=os_image,
    )


def starts(machine: Guest) -> set[tuple[str, ...]]:
    """Which unit was started, in which boot, on which config."""
    lines = machine.read(STARTED).splitlines()
    assert len(lines) == len(set(lines)), "no unit starts twice in a boot"
    return {tuple(line.split()) for line in lines}


def is_new(node: VmNode) -> None:
    """Files (bytes, modes, owner), units, links, kernel argument and sysctl are those of the new config."""
    machine = node.machine
    units = {f"/etc/systemd/system/{unit.name}": (unit.contents or "", 0o644) for unit in (*WITNESSES, ONLY_NEW)}
    expected = {path: _file(text, mode) for path, (text, mode) in {**NEW_FILES, **units}.items()}
    found = machine.listing(*expected, "/etc/only-old", "/etc/app")
    assert {path: what for path, what in found.items() if what.kind != "d"} == expected
    assert "vmlab=new" in machine.read("/proc/cmdline").split()
    assert machine.read("/proc/sys/vm/max_map_count") == "262144\n", "read in this boot"
    assert ("only-new", machine.boot_id, "new") in starts(machine)


def _file(text: str, mode: int) -> Found:
    return Found("f", f"{stat.S_IMODE(mode):o}", "0:0", hashlib.sha256(text.encode()).hexdigest())


_LEFTOVERS = f"""\
find {_STATE}/payload {_STATE}/undo -mindepth 1
find /etc/yum.repos.d -name '*mcdaemon*' 2>/dev/null
find /etc /var/usrlocal {_STATE} -name '.mcdaemon-*'
podman ps --all --quiet
systemctl --failed --no-legend
"""


def rests_cleanly(node: VmNode, name: str) -> None:
    """The agent rests on this config; no payload, undo record, hold, temporary or repository file, staged or pending
    deployment is left, no unit has failed, and every object of the repository is whole."""
    machine = node.machine
    found = node.status()
    assert (found["state"], found["step"], found["current"]) == ("Done", "rest", name), found
    assert node.mcdaemon("validate", check=False).returncode == 0
    assert machine.run(["sh", "-c", _LEFTOVERS]).stdout == ""
    assert json.loads(machine.read(f"{_STATE}/journal.json"))["journal"]["update"] is None
    assert [one.name for one in machine.deployments() if one.staged or one.pending] == []
    assert machine.default_entry().deployment == machine.booted().name
    machine.run(["ostree", "fsck", "--quiet"], timeout=600)
