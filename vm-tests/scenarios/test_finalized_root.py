"""Finalized with the node up: the root that will boot is made and proved, or dropped, while the old one serves.

The merge of /etc, the boot entries and the finalizing unit are libostree's and systemd's own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

import pytest
from vmlab.guestprocess import Found
from vmlab.node import LAB, SETTINGS, SETTLED, VmNode
from vmlab.osimage import next_image

from scenarios.conftest import Push, Record
from tests.stand.configs import FileText, Unit, machine_config
from tests.stand.images import Entry, File
from tests.stand.sysroot import Deployment

STATE = "/var/lib/mcdaemon"
STAMP = "/boot/ostree/finalize-failure.stamp"
FINALIZER = "ostree-finalize-staged.service"

# What OLD has is applied without a reboot; the second one is shared by all deployments.
APP, SHARED = "/etc/nmstate/openshift/app.yml", "/var/lib/kubelet/config.json"
OLD = machine_config("50-old", files={APP: "old\n", SHARED: ("{}\n", 0o600)})

SYSCTL, SECRET, TOOL = "/etc/sysctl.d/90-app.conf", "/etc/app/secret", "/usr/local/bin/tool"
NEW_FILES: dict[str, FileText] = {
    APP: "new\n",
    SHARED: ('{"auths": {}}\n', 0o600),
    SYSCTL: "vm.swappiness = 7\n",
    SECRET: ("secret\n", 0o600),
    TOOL: ("#!/bin/sh\necho new\n", 0o755),
}
_LOOK = (
    "[Service]\nType=oneshot\nRemainAfterExit=yes\n"
    "ExecStart=/bin/sh -c 'cd /proc/sys; echo $$(cat vm/swappiness) $$(cat kernel/random/boot_id) >>/var/lib/{}'\n"
    "[Install]\nWantedBy={}\n"
)
EARLY = Unit(
    "early-look.service",
    "[Unit]\nDefaultDependencies=no\nAfter=local-fs.target systemd-remount-fs.service systemd-sysctl.service\n"
    "Before=sysinit.target\n" + _LOOK.format("seen-early", "sysinit.target"),
    True,
)
LATE = Unit("late-look.service", _LOOK.format("seen-late", "multi-user.target"), True)
LINKS = (
    "/etc/systemd/system/sysinit.target.wants/early-look.service",
    "/etc/systemd/system/multi-user.target.wants/late-look.service",
)

GATE = "/run/vmlab-reboot-is-barred"
_REBOOT = f"if test -e {GATE}; then echo the reboot is barred >&2; exit 1; fi; exec systemctl reboot\n"


@pytest.fixture
def node(node_at_rest: VmNode) -> VmNode:
    """Rests on OLD, which came without a reboot."""
    node_at_rest.desire(OLD)
    node_at_rest.until()
    assert node_at_rest.status()["current"] == "50-old" and node_at_rest.boots == 0
    return node_at_rest


def new(os_image: str, files: Mapping[str, FileText] = NEW_FILES) -> str:
    return machine_config("50-new", files=files, units=[EARLY, LATE], os_image=os_image)


def etc(node: VmNode, root: str = "") -> dict[str, Found]:
    """All of the /etc of the running root, or of another one."""
    # podman makes its lock for networks there whatever it is asked for.
    found = node.machine.listing(f"{root}/etc", without=[f"{root}/etc/cni"])
    return {path[len(root) :]: one for path, one in found.items()}


@dataclass(frozen=True)
class Roots:
    """What a node boots: its deployments, and deployment and arguments of each boot entry, the default first."""

    deployments: list[Deployment]
    entries: list[tuple[str, list[str]]]


def roots(node: VmNode) -> Roots:
    # ostree= names one of two lists of links, which take turns.
    entries = [(one.deployment, [word for word in one.options.split() if not word.startswith("ostree=")])
               for one in node.machine.entries()]  # fmt: skip
    return Roots(node.machine.deployments(), entries)


def differing(before: Mapping[str, Found], after: Mapping[str, Found]) -> set[str]:
    return {path for path in {*before, *after} if before.get(path) != after.get(path)}


def service(node: VmNode) -> list[str]:
    """How often the node left service in this boot, and came back."""
    return [turn.what for turn in node.turns() if turn.boot_id == node.machine.boot_id]


def kept(node: VmNode) -> set[str]:
    """What the agent keeps of an update."""
    found = node.machine.listing(f"{STATE}/payload", f"{STATE}/undo")
    return {path for path, one in found.items() if one.kind == "f"}


def nothing_in_flight(node: VmNode) -> None:
    assert kept(node) == set()
    assert json.loads(node.machine.read(f"{STATE}/journal.json"))["journal"]["update"] is None


def finalizer(node: VmNode, script: str) -> None:
    """Let the finalizing unit's stop run this instead, until the next boot."""
    node.machine.write("/run/vmlab-finalizer.sh", script)
    drop_in = "[Service]\nReadOnlyPaths=\nExecStop=\nExecStop=/bin/sh /run/vmlab-finalizer.sh\n"
    node.machine.write(f"/run/systemd/system/{FINALIZER}.d/90-vmlab.conf", drop_in)
    node.machine.run(["systemctl", "daemon-reload"])


def own_finalizer(node: VmNode) -> None:
    node.machine.run(["rm", "-r", f"/run/systemd/system/{FINALIZER}.d"])
    node.machine.run(["systemctl", "daemon-reload"])


# -- done and undone --------------------------------------------------------------------------------------------------


def test_up_to_the_reboot_only_the_new_deployment_has_changed_and_it_can_be_dropped_without_a_trace(
    node: VmNode, push: Push, record_property: Record
) -> None:
    """P3, P5, P7: finalized, committed and proved with the node up, the old root is as it was to the byte; then the
    desired config goes back, and so does all that deployments share, and the boot entry."""
    _bar_reboots(node)
    target = push(next_image("417.94.2"), "os:v2")
    before, shown = etc(node), roots(node)
    node.desire(new(target))
    assert "the reboot is barred" in node.until("cannot |rest: ")
    _all_is_in_the_new_root(node, before, shown, record_property)
    node.desire(OLD)
    node.until()
    _dropped(node, before, shown)


def _bar_reboots(node: VmNode) -> None:
    machine = node.machine
    machine.write(f"{LAB}/reboot", _REBOOT)
    machine.write(GATE, "")
    machine.write("/etc/mcdaemon/mcdaemon.yaml", SETTINGS + f"reboot: {{command: [/bin/sh, {LAB}/reboot]}}\n")
    mark = machine.mark()
    machine.run(["systemctl", "restart", "mcdaemon.service"], timeout=SETTLED)
    machine.wait_for(r"mcdaemon\[\d+\]: rest: ", SETTLED, mark)


def _all_is_in_the_new_root(node: VmNode, before: Mapping[str, Found], shown: Roots, record: Record) -> None:
    machine = node.machine
    assert differing(before, etc(node)) == set(), "the old deployment's /etc, to the byte"
    assert machine.read("/proc/sys/vm/swappiness") != "7\n"
    (pending,) = [one for one in machine.deployments() if one.pending]
    assert machine.entries()[0].deployment == pending.name
    assert roots(node).entries[1:] == shown.entries, "the old one is offered as before"
    merged = etc(node, machine.deployment_root(pending.name))
    changed = differing(before, merged)
    units = {f"/etc/systemd/system/{unit.name}" for unit in (EARLY, LATE)}
    files = {APP, SYSCTL, SECRET, *units, *LINKS}
    assert changed == files | {"/etc/app", "/etc/machine-config-daemon/currentconfig"}
    assert (merged[SECRET].mode, merged[SECRET].owner) == ("600", "0:0")
    assert [merged[link].kind for link in LINKS] == ["l", "l"]
    assert machine.read(f"{machine.deployment_root(pending.name)}{APP}") == "new\n"
    assert machine.read(SHARED) == '{"auths": {}}\n' and machine.exists(TOOL), "shared files are the target's by now"
    held = kept(node)
    assert [one for one in held if "/payload/" in one] and [one for one in held if "/undo/" in one]
    assert service(node) == ["drained"] and node.boots == 0
    record("numbers", f"finalized root: {len(changed)} paths of /etc differ in the new deployment, 0 in the old one")


def _dropped(node: VmNode, before: Mapping[str, Found], shown: Roots) -> None:
    machine = node.machine
    assert node.boots == 0 and service(node) == ["drained", "back"]
    assert roots(node) == shown
    assert differing(before, etc(node)) == set()
    assert machine.read(SHARED) == "{}\n" and not machine.exists(TOOL)
    assert machine.run(["ls", f"/ostree/deploy/{shown.deployments[0].osname}/deploy"]).stdout.split() == [
        name for one in shown.deployments for name in (one.name, f"{one.name}.origin")
    ], "no directory of the dropped one"
    nothing_in_flight(node)
    status = node.status()
    assert (status["state"], status["current"]) == ("Done", "50-old")


# -- the merge --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Clash:
    """A file of the image's /etc. `image`: what the new image has there (None: it drops it, "=": the same); `local`:
    what somebody did on the node, likewise; `managed`: what the config has; `ends`: what has to be there at the end."""

    image: str = "="
    local: str = "="
    managed: str = ""
    ends: str = "="


_DROPPED, _DEFAULT = "-", "="
CLASHES: Mapping[str, Clash] = {
    # What is nobody's follows ostree's own rules.
    "/etc/issue": Clash(image="new image\n", local="by hand\n", ends="by hand\n"),
    "/etc/issue.net": Clash(image="new image\n", local=_DROPPED, ends=_DROPPED),
    "/etc/magic": Clash(image="new image\n", ends="new image\n"),
    "/etc/magic.mime": Clash(image=_DROPPED, ends=_DROPPED),
    "/etc/bindresvport.blacklist": Clash(image=_DROPPED, local="by hand\n", ends="by hand\n"),
    # What the config has is as the config says, whatever the image and the merge make of it.
    "/etc/networks": Clash(image=_DROPPED, managed=_DEFAULT),
    "/etc/ethertypes": Clash(image="new image\n", managed=_DEFAULT),
    "/etc/inputrc": Clash(image="new image\n", local="by hand\n", managed="config\n", ends="config\n"),
    "/etc/gai.conf": Clash(local=_DROPPED, managed=_DEFAULT),
    "/etc/e2scrub.conf": Clash(image="config\n", managed="config\n", ends="config\n"),
    "/etc/libaudit.conf": Clash(image=_DROPPED, local=_DROPPED, managed="config\n", ends="config\n"),
}


def test_whatever_hands_and_images_made_of_etc_the_config_is_in_force_in_the_first_boot_and_the_old_entry_has_the_old(
    node: VmNode, push: Push, record_property: Record
) -> None:
    """P3, P5, incident 4, TXN-45: local edits, deleted and dropped defaults, managed files like the image's, FIFOs.

    What the merge alone would lose is told before the drain. The first boot has read the config's sysctl and started
    its units; the old entry, booted by hand, has the old /etc to the byte.
    """
    machine = node.machine
    default = {path: machine.read(f"/usr{path}") for path in CLASHES}
    managed: dict[str, FileText] = {
        path: default[path] if clash.managed == _DEFAULT else clash.managed
        for path, clash in CLASHES.items()
        if clash.managed
    }
    target = _clashing_image(push)
    _odd_hands(node)
    before = etc(node)
    node.desire(new(target, {**NEW_FILES, **managed}))
    told = node.until("/etc/.* would have been dropped|drain: |cannot ")
    assert "/etc/networks would have been dropped by ostree's /etc merge" in told, "before the drain"
    assert "/etc/ethertypes would have had other content" in node.until("/etc/.* would have |drain: |cannot ")
    node.until()
    assert node.boots == 1 and service(node) == ["back"]
    assert "417.94.3" in machine.read("/etc/os-release")
    for path, clash in CLASHES.items():
        ends = default[path] if clash.ends == _DEFAULT else clash.ends
        found = machine.read(path) if machine.exists(path) else _DROPPED
        assert found == ends, f"{path}: {clash}"
    assert machine.read("/etc/odd/file") == "kept\n"
    assert not machine.exists("/etc/pipe") and not machine.exists("/etc/odd/pipe"), "libostree 2025 leaves them out"
    _in_force_in_the_first_boot(node)
    _old_entry_boots_the_old_config(node, before)
    record_property("numbers", f"merge of /etc: {len(CLASHES)} clashes, {len(managed)} on managed files, all right")


def _clashing_image(push: Push) -> str:
    changes: dict[str, Entry] = {
        path[1:]: File(clash.image.encode())
        for path, clash in CLASHES.items()
        if clash.image not in (_DROPPED, _DEFAULT)
    }
    gone = [path[1:] for path, clash in CLASHES.items() if clash.image == _DROPPED]
    return push(next_image("417.94.3", changes, gone), "os:v3")


def _odd_hands(node: VmNode) -> None:
    script = ["mkfifo /etc/pipe; mkdir /etc/odd; mkfifo /etc/odd/pipe; echo kept >/etc/odd/file"]
    for path, clash in CLASHES.items():
        if clash.local == _DROPPED:
            script.append(f"rm {path}")
        elif clash.local != _DEFAULT:
            script.append(f"printf %s '{clash.local}' >{path}")
    node.machine.run(["sh", "-ec", "; ".join(script)])


def _in_force_in_the_first_boot(node: VmNode) -> None:
    machine = node.machine
    assert machine.read("/var/lib/seen-early") == f"7 {machine.boot_id}\n", "one boot, and sysctl had read it"
    assert machine.read("/var/lib/seen-late") == f"7 {machine.boot_id}\n"
    shown = machine.run(["systemctl", "show", "--value", "-p", "ActiveEnterTimestampMonotonic", "early-look.service",
                         "sysinit.target", "late-look.service"]).stdout.split()  # fmt: skip
    early, sysinit, late = (int(text) for text in shown)
    assert 0 < early <= sysinit <= late, "started with the boot, before what comes after sysinit.target"
    assert machine.read(APP) == "new\n" and machine.run([TOOL]).stdout == "new\n"
    assert node.mcdaemon("validate").returncode == 0
    nothing_in_flight(node)


def _old_entry_boots_the_old_config(node: VmNode, before: Mapping[str, Found]) -> None:
    machine = node.machine
    machine.ask_reboot()
    machine.wait_down()
    newer, older = machine.entries()
    assert machine.boot(entry=older) == 1
    machine.wait_for(r"mcdaemon\[\d+\]: rest: an older deployment is booted", SETTLED)
    assert machine.booted().name == older.deployment
    assert differing(before, etc(node)) == set(), "exactly the old config"
    assert machine.read("/proc/sys/vm/swappiness") != "7\n"
    assert machine.read(SHARED) == '{"auths": {}}\n' and machine.exists(TOOL), "README: shared files stay the newer's"
    assert node.status()["state"] == "Degraded"
    assert machine.entries()[0].deployment == newer.deployment, "a person's choice is for one boot"


# -- it cannot be finalized -------------------------------------------------------------------------------------------

CONFLICT = "/etc/conflict.d"


def test_a_finalization_that_fails_is_told_three_times_and_never_reboots_the_node(
    node: VmNode, push: Push, record_property: Record
) -> None:
    """TXN-31, TXN-44: libostree's own "newly defaults to directory": foreseen, the node is not even drained; met in the
    merge itself, the node is back at work each time, and the old config runs."""
    machine = node.machine
    before, shown, boot_id = etc(node), roots(node), machine.boot_id
    target = push(next_image("417.94.4", {f"{CONFLICT[1:]}/given.conf": File(b"given\n")}), "os:v4")
    machine.write(CONFLICT, "by hand\n")
    node.desire(new(target))
    assert "newly defaults to directory 'conflict.d'" in node.until("cannot finalize|drain: ")
    node.until("hold: this config was tried")
    assert service(node) == [], "not drained"
    machine.run(["rm", CONFLICT])
    # It comes between the look and the merge, and is gone after it.
    finalizer(node, f"touch {CONFLICT}; ostree admin finalize-staged; s=$?; rm {CONFLICT}; exit $s\n")
    node.mcdaemon("retry")
    node.until("hold: this config was tried")
    failed = node.status()["failed"]
    assert "newly defaults to directory" in failed and "so it went 3 times" in failed, failed
    assert service(node) == ["drained", "back"] * 3
    assert machine.read("/proc/sys/kernel/random/boot_id").strip() == boot_id and node.boots == 0
    assert roots(node) == shown
    assert differing(before, etc(node)) == set() and machine.read(SHARED) == "{}\n"
    assert not machine.exists(STAMP), "no unit of the next boot fails for it"
    assert node.status()["state"] == "Degraded" and node.status()["current"] == "50-old"
    nothing_in_flight(node)
    record_property("numbers", "failing finalization: 1 foreseen, 3 met, 0 reboots")


# -- no room ----------------------------------------------------------------------------------------------------------

BALLAST = "/var/ballast"


def test_without_room_for_the_target_or_for_its_kernel_the_node_serves_and_goes_on_when_there_is_some(
    node: VmNode, push: Push, record_property: Record
) -> None:
    """TXN-33, TXN-39, TXN-46: /boot is on the disk that is full, first before anything is fetched, then to the last
    block while ostree copies the kernel."""
    machine = node.machine
    shown = roots(node)
    machine.run(["sh", "-c", f"fallocate -l $(($(stat -f -c '%a*%S' /var) - 33554432)) {BALLAST}"])
    target = push(next_image("417.94.2"), "os:v2")
    node.desire(new(target))
    held = node.until("hold: |drain: ")
    assert "are needed on /sysroot" in held and "MiB are free" in held
    assert service(node) == [] and roots(node) == shown
    # Not even root's own blocks are left.
    fill = f"fallocate -l $(($(stat -f -c '%f*%S' /var) - 8192)) {BALLAST}; cat /dev/zero >>{BALLAST}\n"
    finalizer(node, f"{fill} exec ostree admin finalize-staged\n")
    machine.run(["rm", BALLAST])
    said = node.until("cannot (finalize|reboot)|rest: ")
    assert "inodes are free on" in said, said
    node.until("hold: |stage-")
    assert service(node) == ["drained", "back"], "back in service, and not drained again"
    assert node.boots == 0 and machine.read(APP) == "old\n"
    assert roots(node).entries == shown.entries
    own_finalizer(node)
    machine.run(["rm", "-f", BALLAST])
    node.until()
    assert node.boots == 1 and service(node) == ["back"]
    assert machine.read(APP) == "new\n" and machine.read("/var/lib/seen-early") == f"7 {machine.boot_id}\n"
    assert node.mcdaemon("validate").returncode == 0
    nothing_in_flight(node)
    record_property("numbers", "no room: held once before the fetch, once in the finalization; 1 reboot")
