"""The health gate with real reboots (P6): a target that is not well is taken back once, and not tried again.

Two ways of not being well. The one target comes up, and a unit in it fails: the agent itself takes it back. The other
one does not even reach userspace, so nothing of ours runs in it: **no** agent can come back from there by itself. Who
could is the boot loader, and neither RHCOS' GRUB nor the harness, which plays it, counts boots or falls back to
another entry: the machine panics as often as it is switched on, until a person chooses the older entry. What is proved
is what comes then: the choice is understood, told, and final.
"""

from __future__ import annotations

import json
import re

from vmlab import node, osimage
from vmlab.guest import Guest
from vmlab.guestprocess import Found
from vmlab.initramfs import cpio
from vmlab.node import VmNode
from vmlab.osimage import next_image
from vmlab.qemu import Ending

from scenarios.conftest import Push, Record
from tests.stand.configs import FileText, Unit, machine_config
from tests.stand.images import File
from tests.stand.incidents import FILES, WORKLOAD
from tests.stand.machine import Down

PROBE = Unit(
    "probe.service",
    "[Service]\nType=oneshot\nRemainAfterExit=yes\nExecStart=/bin/grep -qx 'level = info' /etc/app/app.conf\n"
    "[Install]\nWantedBy=multi-user.target\n",
    True,
)
GATE = node.SETTINGS.replace("timeout_seconds: 120,", "timeout_seconds: 20, units: [probe.service],")
UNITS = [WORKLOAD, PROBE]
OLD_FILES: dict[str, FileText] = {**FILES, "/etc/app/only-old": "old\n", "/usr/local/etc/shared": ("old\n", 0o640)}
NEW_FILES: dict[str, FileText] = {
    **FILES,
    "/etc/app/app.conf": ("level = debug\n", 0o600),
    "/etc/app/only-new": "new\n",
    "/usr/local/bin/workload.sh": ("#!/bin/sh\nexec true new\n", 0o700),
    "/usr/local/etc/shared": ("new\n", 0o644),
    "/usr/local/share/only-new/file": "new\n",
}
NEW_KEY = "ssh-ed25519 AAAA new"
OLD = machine_config("50-old", files=OLD_FILES, units=UNITS, ssh_keys=["ssh-ed25519 AAAA old"])
NOT_TRIED_AGAIN = "hold: this config was tried and taken back"
CANNOT_START = cpio({"init": File(b"#!/bin/sh\nexit 1\n", 0o755)})
"""Appended to an initramfs it takes the place of its /init, and PID 1 that ends is a kernel panic."""


def test_a_target_whose_unit_fails_is_taken_back_once_by_itself(node_at_rest: VmNode, record_property: Record) -> None:
    """P6, TXN-40: two reboots, there and back; the old config byte for byte, in and outside /etc; told everywhere; and
    neither time nor a restart of the agent tries it again."""
    machine = node_at_rest.machine
    old = _rests_on_old(node_at_rest)
    machine.write("/etc/mcdaemon/mcdaemon.yaml", GATE)
    machine.run(["systemctl", "restart", "mcdaemon.service"], timeout=300)
    before, boots = _everything(machine), node_at_rest.boots
    node_at_rest.desire(
        machine_config("50-new", files=NEW_FILES, units=UNITS, ssh_keys=[NEW_KEY], kernel_arguments=["vmlab.new"])
    )
    said = node_at_rest.until("roll-back: ")
    assert "probe.service" in said and node_at_rest.boots == boots + 1
    node_at_rest.until(NOT_TRIED_AGAIN)
    assert node_at_rest.boots == boots + 2, "there and back"
    assert machine.booted().name == old and "vmlab.new" not in machine.read("/proc/cmdline")
    assert "Failed with result" in _journal_before(machine, "probe.service"), "it was the target that was booted"
    _is_as_before(machine, before)
    _back_at_work(node_at_rest)
    _told(node_at_rest, "probe.service")
    _not_tried_after_a_restart(node_at_rest)
    assert len(set(machine.boots)) == len(machine.boots) and node_at_rest.boots == boots + 2
    drained, back = node_at_rest.turns()[-2:]
    record_property("numbers", f"failing unit: out of service for {back.at - drained.at:.1f} s, there and back")


def test_a_target_that_does_not_boot_is_given_up_once_a_person_has_chosen_the_old_entry(
    node_at_rest: VmNode, push: Push, record_property: Record
) -> None:
    """P6 at its limit: a kernel panic in the initramfs. No fallback: the default entry panics whenever it is booted.
    The old entry is chosen by hand: its files outside /etc are back before the agent runs, the target counts as
    failed on every channel, is not tried again, and the next boot without a person is the old deployment."""
    machine = node_at_rest.machine
    initramfs = osimage.load(osimage.build()).initramfs
    works = next_image("417.94.9").tree[initramfs]
    assert isinstance(works, File)
    dead = next_image("417.94.9", {initramfs: File(works.content + CANNOT_START, 0o600)})
    target = push(dead, "os:v9")
    old = _rests_on_old(node_at_rest)
    before, boots = _everything(machine), node_at_rest.boots
    node_at_rest.desire(machine_config("50-new", files=NEW_FILES, units=UNITS, ssh_keys=[NEW_KEY], os_image=target))
    node_at_rest.until("reboot: ")
    came_up = list(machine.boots)
    assert machine.wait_down() is Down.REBOOT
    (entry,) = (one for one in machine.entries() if one.deployment == old)
    for _attempt in range(2):
        assert machine.default_entry().deployment != old, "nothing falls back"
        machine.start_boot()
        assert machine.wait_up() is Down.CRASH and machine.last_ending is Ending.PANIC
    assert machine.boots == came_up, "nothing of it came up"

    node_at_rest.start(entry=entry)
    said = node_at_rest.until("discard: ")
    assert "the old deployment was booted instead of the target" in said
    node_at_rest.until(NOT_TRIED_AGAIN)
    assert node_at_rest.boots == boots + 1 and machine.booted().name == old
    _is_as_before(machine, before)
    _back_at_work(node_at_rest)
    _told(node_at_rest, "the old deployment was booted", target.partition("@")[2])
    assert machine.default_entry().deployment == old

    machine.ask_reboot()
    node_at_rest.follow_reboot()
    node_at_rest.until(NOT_TRIED_AGAIN)
    assert machine.booted().name == old and node_at_rest.boots == boots + 2
    assert "stage-" not in machine.journal("mcdaemon.service")
    _is_as_before(machine, before)
    record_property("numbers", "a target that panics: 2 panics, then the old entry by hand")


def _rests_on_old(node: VmNode) -> str:
    """The deployment of OLD, which needs a reboot as every config does."""
    node.desire(OLD)
    node.until()
    assert node.machine.read("/usr/local/etc/shared") == "old\n"
    return node.machine.booted().name


def _everything(machine: Guest) -> dict[str, Found]:
    """/etc of the running root, and what all deployments share and a config can write."""
    return machine.listing("/etc", "/var/usrlocal", "/var/home", "/var/roothome", "/var/opt")


def _is_as_before(machine: Guest, before: dict[str, Found]) -> None:
    after = _everything(machine)
    assert {path: (before.get(path), after.get(path)) for path in before.keys() | after.keys()
            if before.get(path) != after.get(path)} == {}  # fmt: skip


def _back_at_work(node: VmNode) -> None:
    drained, back = node.turns()[-2:]
    assert (drained.what, back.what) == ("drained", "back") and drained.boot_id != back.boot_id == node.machine.boot_id
    active = node.machine.run(["systemctl", "is-active", "workload.service", "probe.service"], check=False)
    assert active.stdout.split() == ["active", "active"]


def _told(node: VmNode, reason: str, digest: str = "") -> None:
    """On every channel: status for programs and for people, systemd, metrics."""
    machine = node.machine
    found = node.status()
    assert (found["state"], found["step"], found["current"], found["desired"]) == (
        "Degraded",
        "hold",
        "50-old",
        "50-new",
    )
    assert found["failed"].startswith("50-new: ") and reason in found["failed"] and found["failed_at"] > 0
    assert (found["failed_config"], found["failed_digest"]) == ("50-new", digest)
    assert "failed target    50-new: " in node.mcdaemon("status").stdout
    shown = machine.run(["systemctl", "show", "--property=StatusText", "mcdaemon.service"]).stdout
    assert "tried and taken back" in shown and reason in shown
    fetch = "import urllib.request as u; print(u.urlopen('http://127.0.0.1:8797/metrics', timeout=60).read().decode())"
    metrics = machine.run(["python3", "-c", fetch]).stdout
    labels = f'{{config="50-new",digest="{digest}"}}'
    failed = re.search(rf"^mcdaemon_failed_target_timestamp_seconds{re.escape(labels)} (\S+)$", metrics, re.MULTILINE)
    assert failed is not None and float(failed.group(1)) == found["failed_at"]
    assert re.search(r'^mcdaemon_state\{state="Degraded"\} 1(\.0)?$', metrics, re.MULTILINE)


def _journal_before(machine: Guest, unit: str) -> str:
    """What a unit said in the boot before this one."""
    return machine.run(["journalctl", "-b", "-1", "--no-pager", "-o", "cat", "-u", unit]).stdout


def _not_tried_after_a_restart(node: VmNode) -> None:
    machine = node.machine
    mark = machine.mark()
    machine.run(["systemctl", "restart", "mcdaemon.service"], timeout=300)
    agent = machine.run(["systemctl", "show", "--property=MainPID", "--value", "mcdaemon.service"]).stdout.strip()
    machine.wait_for(rf"mcdaemon\[{agent}\]: {NOT_TRIED_AGAIN}", since=mark)
    assert not any(deployment.staged or deployment.pending for deployment in machine.deployments())
    assert "stage-" not in machine.journal("mcdaemon.service"), "since the way back"
    assert json.loads(machine.read("/var/lib/mcdaemon/journal.json"))["journal"]["update"] is None
