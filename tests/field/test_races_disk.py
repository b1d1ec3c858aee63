"""The disk fills up before each step of an update: no torn file, a clear word, the node in service, and on by itself.

The node lives on an ext4 file system of its own. "Full" is a file that leaves a few bytes, which is removed later, or
as many empty files as there are inodes.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.field.conftest import Copy
from tests.field.evidence import (
    NEW,
    OLD,
    Agent,
    fingerprint,
    is_new,
    is_old,
    journal,
    no_leftovers,
    open_gate,
    rests_on,
    status,
    stop_after,
    through_gate,
    tick,
)
from tests.field.rivals import COUNTED, DRAINS, drains, finalizer
from tests.stand.disk import MIB, Disk
from tests.stand.node import Node, ends_in_reboot

pytestmark = pytest.mark.stand

BALLAST = "/var/ballast"
INODES = 16384
DRAINED = "/run/drains"
"""Written down where there is room; it is lost with a reboot."""
STEPS = ("", "stage-kargs", "verify-staged", "drain", "finalize", "commit-files", "verify-root")


@pytest.fixture
def node(tmp_path: Path, disks: Callable[[str], Path]) -> Iterator[Node]:
    """A node that rests on OLD, wants NEW, and has 150 MiB left."""
    folder = tmp_path / "node"
    image = tmp_path / "disk.img"
    with open(image, "xb") as file:
        file.truncate(1024 * MIB)
    # As `Disk` makes it, but with as few inodes as can be used up in no time.
    subprocess.run(["mkfs.ext4", "-q", "-F", "-m", "0", "-N", str(INODES), image], check=True, timeout=60)
    with Disk(image, folder / "sysroot") as disk:
        node = SmallNode(disks(OLD), folder, COUNTED.replace(DRAINS, DRAINED))
        try:
            open_gate(node)
            node.desire(first=NEW)
            node.machine.run(["fallocate", "-l", str(disk.free() - 150 * MIB), "/var/other"])
            yield node
        finally:
            node.close()
    shutil.rmtree(folder, ignore_errors=True)


class SmallNode(Copy):
    """A copy onto the file system that is mounted at its sysroot."""

    def _make_folder(self, folder: Path) -> None:
        """It is there, with the disk in it."""


def free(node: Node) -> int:
    found = os.statvfs(node.machine.folder / "sysroot")
    return found.f_bavail * found.f_frsize


def fill(node: Node, left: int) -> None:
    """Leave about so many bytes free."""
    node.machine.run(["fallocate", "-l", str(max(4096, free(node) - left)), BALLAST], check=False)
    if left == 0:
        for _time in range(3):  # what fallocate has left over, and what the file system has kept for its own use
            node.machine.run(["sh", "-c", f"cat /dev/zero >>{BALLAST}; sync -f /var"], check=False)
    assert free(node) <= left + 128 * 1024


def take_inodes(node: Node) -> None:
    folder = node.machine.folder / "sysroot" / "inodes"
    folder.mkdir()
    try:
        for number in range(2 * INODES):
            os.mknod(folder / str(number))
    except OSError:
        return
    raise AssertionError("the disk has too many inodes")


def make_room(node: Node) -> None:
    node.machine.run(["rm", "-f", BALLAST])
    shutil.rmtree(node.machine.folder / "sysroot" / "inodes", ignore_errors=True)


def whole(node: Node) -> None:
    """Nothing is torn: the journal can be read, and every managed file is one config's or the other's, in full."""
    journal(node)
    assert node.machine.read("/etc/app.conf") == "old\n"
    carried = json.loads(node.machine.read("/etc/machine-config-daemon/currentconfig"))
    assert carried["metadata"]["name"] == "50-old"
    assert node.machine.read("/usr/local/bin/tool") in ("old\n", "new\n")
    left = node.machine.run(["find", "/etc", "/var/usrlocal", "-name", ".mcdaemon-*"], check=False).stdout
    assert left == ""


def in_service(node: Node) -> None:
    """On the old config, all of it, and not drained."""
    whole(node)
    is_old(node)
    assert drains(node, DRAINED)[-1:] != "d"


def some_rounds(node: Node) -> str:
    """Rounds on a full disk, until it reboots all the same; the agent survives them."""
    said = ""
    for _round in range(3):
        done = node.mcdaemon("run", "--once", check=False)
        said += done.stderr
        assert "Traceback" not in done.stderr, said
        if ends_in_reboot(done):
            node.follow_reboot()
            return said
        assert done.returncode in (0, 3), said
    return said


def arrives(node: Node) -> None:
    make_room(node)
    through_gate(node)
    assert node.boots == 1 and drains(node, DRAINED)[-1] == "u"
    is_new(node)
    rests_on(node, "50-new")


@pytest.mark.parametrize("left", [0, 300 * 1024])
@pytest.mark.parametrize("step", STEPS)
def test_a_disk_that_is_full_before_a_step_is_told_and_waited_for_with_the_node_in_service(
    node: Node, step: str, left: int
) -> None:
    """TXN-33, TXN-39: `step` was the last one before; space is missing at the next, unless it needs none."""
    if step:
        stop_after(node, step)
    fill(node, left)
    said = some_rounds(node)
    if node.boots == 0:
        assert "No space left on device" in said or "MiB are free" in said, said
        assert status(node)["failed"] == "" and status(node)["state"] == "Working"
        # From the commit on shared files are the target's: without a byte to put them back the node stays drained.
        (whole if step in ("commit-files", "verify-root") or (step == "finalize" and left == 0) else in_service)(node)
    arrives(node)


@pytest.mark.parametrize("step", ["", "verify-staged", "finalize"])
def test_a_disk_without_inodes_is_a_full_disk(node: Node, step: str) -> None:
    """TXN-33: hundreds of megabytes are free, and no file can be made."""
    if step:
        stop_after(node, step)
    take_inodes(node)
    said = some_rounds(node)
    assert "No space left on device" in said or "inodes" in said, said
    assert node.boots == 0 and status(node)["failed"] == ""
    (whole if step == "finalize" else in_service)(node)
    arrives(node)


@pytest.mark.parametrize("step", ["verify-staged", "verify-root"])
def test_a_withdrawn_update_can_be_discarded_on_a_full_disk_as_soon_as_there_is_room(node: Node, step: str) -> None:
    before = fingerprint(node)
    stop_after(node, step)
    node.desire(first=OLD)
    fill(node, 0)
    some_rounds(node)
    assert node.boots == 0
    journal(node)
    make_room(node)
    for _round in range(3):
        if tick(node) == 0:
            break
    is_old(node)
    assert fingerprint(node).but_for_rollback() == before.but_for_rollback()
    assert drains(node, DRAINED)[-1:] in ("", "u")
    rests_on(node, "50-old")


def test_an_unhealthy_target_is_rolled_back_on_a_full_disk_as_soon_as_there_is_room(node: Node) -> None:
    settings = node.machine.read("/etc/mcdaemon/mcdaemon.yaml").replace("timeout_seconds: 20", "timeout_seconds: 1")
    node.machine.write("/etc/mcdaemon/mcdaemon.yaml", settings)
    node.machine.write("/etc/mcdaemon/health.d/10-no", '#!/bin/sh\ntest "$(cat /etc/app.conf)" = old\n', 0o755)
    old = node.machine.booted().name
    tick(node)
    assert node.boots == 1
    fill(node, 0)
    for _round in range(3):
        done = node.mcdaemon("run", "--once", check=False)
        assert "Traceback" not in done.stderr, done.stderr
        if "roll-back: " in done.stderr and done.returncode != 3:
            break
    if node.machine.up:
        make_room(node)
    for _round in range(8):
        if node.boots == 2:
            break
        tick(node)
    tick(node)
    make_room(node)
    tick(node)
    assert node.boots == 2 and node.machine.booted().name == old
    is_old(node)
    assert status(node)["state"] == "Degraded" and "50-new" in status(node)["failed"]
    no_leftovers(node)


def test_the_early_unit_on_a_full_disk_does_not_keep_the_node_from_booting(node: Node) -> None:
    """It cannot complete the target, and cannot write down that it tried; with room the agent finds one way or the
    other to an end that is whole."""
    settings = node.machine.read("/etc/mcdaemon/mcdaemon.yaml").replace("timeout_seconds: 20", "timeout_seconds: 1")
    node.machine.write("/etc/mcdaemon/mcdaemon.yaml", settings)
    stop_after(node, "finalize")
    take_inodes(node)
    node.machine.power_cut()
    node.machine.boot()
    assert "No space left on device" in node.machine.journal("mcdaemon-early.service")
    agent = Agent.start(node)
    agent.wait()
    assert "Traceback" not in agent.text()
    make_room(node)
    for _round in range(12):
        boots = node.boots
        if tick(node) in (0, 3) and node.boots == boots and journal(node)["update"] is None:
            break
    carried = json.loads(node.machine.read("/etc/machine-config-daemon/currentconfig"))["metadata"]["name"]
    (is_new if carried == "50-new" else is_old)(node)
    no_leftovers(node)


# -- /boot ------------------------------------------------------------------------------------------------------------


def test_space_that_runs_out_in_finalization_puts_the_node_back_to_work(node: Node) -> None:
    """TXN-46, TXN-39: the check had passed; the numbers are told, nothing reboots, the old boot entry stays."""
    before = fingerprint(node)
    fills = f"fallocate -l $(($(stat -f -c '%a*%S' /var)-4096)) {BALLAST}; cat /dev/zero >>{BALLAST} 2>/dev/null; "
    finalizer(node, f"{fills} ostree admin finalize-staged\n")
    said = some_rounds(node)
    assert "KiB and" in said and "inodes are free on /boot" in said, said
    assert node.boots == 0 and status(node)["failed"] == ""
    assert drains(node, DRAINED).count("d") == 1, "not drained again"
    in_service(node)
    assert fingerprint(node).default == before.default
    node.machine.run(["rm", "-rf", "/run/systemd/system/ostree-finalize-staged.service.d"])
    node.machine.run(["systemctl", "daemon-reload"])
    arrives(node)
