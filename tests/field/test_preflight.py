"""Pre-flight on a node with a disk of its own: it is too small, for bytes, for inodes or for the kernel. Nothing is
fetched and nothing is drained then, the sentence has both numbers, and the node goes on when there is room."""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest

from tests.field.conftest import FieldNode, MakeNode, Push
from tests.field.evidence import (
    NEW,
    OLD,
    Agent,
    faults,
    fingerprint,
    gated,
    is_new,
    is_old,
    no_leftovers,
    open_gate,
    rests_on,
    settle,
    status,
    through_gate,
    tick,
    transactions,
)
from tests.field.test_rollback import FAILING, HOLD
from tests.stand.configs import machine_config
from tests.stand.disk import MIB, Disk
from tests.stand.images import KERNEL, File, layer_on
from tests.stand.incidents import GATED
from tests.stand.node import Node, base_image, next_image
from tests.stand.registry import Registry

pytestmark = pytest.mark.stand

FILLER = "/sysroot/filler"


class Small(Protocol):
    """A node on a disk of `size` bytes, with a file system of `boot` bytes of its own at /boot (0: none)."""

    def __call__(self, size: int = 1024 * MIB, boot: int = 0, settings: str = GATED) -> Node: ...


@pytest.fixture
def small(tmp_path: Path, base: str) -> Iterator[Small]:
    made: list[tuple[Node, list[Disk]]] = []

    def make(size: int = 1024 * MIB, boot: int = 0, settings: str = GATED) -> Node:
        folder = tmp_path / f"small-{len(made)}"
        disks = [Disk(tmp_path / f"disk-{len(made)}.img", folder / "sysroot", size)]
        disks += [Disk(tmp_path / f"boot-{len(made)}.img", folder / "sysroot/boot", boot)] if boot else []
        mounted: list[Disk] = []
        try:
            for disk in disks:
                disk.mount()
                mounted.append(disk)
            node = FieldNode(folder, base, settings=settings, own_disk=True)
        except BaseException:
            for disk in reversed(mounted):
                disk.unmount()
            raise
        made.append((node, disks))
        return node

    yield make
    for node, disks in made:
        node.close()
        for disk in reversed(disks):
            disk.unmount()
            disk.image.unlink()


def leave(node: Node, free: int, place: str = "") -> Path:
    """Fill the node's disk (or the one at `place` below it), but for `free` bytes; the answer is the file to remove."""
    folder = node.machine.sysroot.path / place
    filler = folder / "filler"
    filler.unlink(missing_ok=True)
    found = os.statvfs(folder)
    with open(filler, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, found.f_bavail * found.f_frsize - free)
    return filler


def noise(count: int) -> bytes:
    """Bytes that do not get smaller."""
    return random.Random(count).randbytes(count)


def large(push: Push, count: int = 20 * MIB) -> str:
    return push(next_image("417.94.40", {"usr/share/stand/large": File(noise(count))}), "os:v40")


def held_for_space(node: Node, *words: str) -> str:
    """One round, which ends held; nothing was staged, nothing drained, and the sentence has these words."""
    before = fingerprint(node)
    done = transactions(node)
    said = node.once(expect=3)
    found = status(node)
    assert (found["state"], found["step"]) == ("Working", "hold"), found
    for word in words:
        assert word in found["hold"], found["hold"]
    assert transactions(node) == done and "drain:" not in said
    assert fingerprint(node) == before
    return str(found["hold"])


# -- bytes ------------------------------------------------------------------------------------------------------------


def test_an_image_that_does_not_fit_is_not_fetched_until_there_is_room(
    small: Small, push: Push, registry: Registry
) -> None:
    """TXN-33, TXN-39, rpm-ostree.md 7 row 35: 20 MiB become 50, 3 % of a GiB stay free, 64 MiB are for the rest."""
    target, node = large(push), small()
    filler = leave(node, 100 * MIB)
    registry.forget_requests()
    node.desire(first=machine_config("50-new", os_image=target))
    open_gate(node)
    held_for_space(
        node, "MiB are needed on /sysroot", "1 of ", "layers of the image", "MiB are free", "podman image prune"
    )
    assert registry.blob_fetches() == (), "only HEAD, and GET for the manifest"
    assert registry.requests(), "it was looked for"
    registry.forget_requests()
    held_for_space(node)
    assert registry.blob_fetches() == ()
    filler.unlink()
    through_gate(node)
    assert node.boots == 1 and node.machine.exists("/usr/share/stand/large")
    rests_on(node, "50-new")


def test_the_agent_looks_again_by_itself_and_goes_on(small: Small, push: Push) -> None:
    """By the backoff for holds, whatever the interval of the loop is."""
    target, node = large(push), small(settings=gated(loop="{interval_seconds: 3600}"))
    filler = leave(node, 100 * MIB)
    node.desire(first=machine_config("50-new", os_image=target))
    agent = Agent.start(node, "run")
    try:
        agent.wait_for("hold: cannot stage 50-new")
        filler.unlink()
        agent.wait_for("drain: staged and verified")
    finally:
        agent.kill()


def test_plan_says_what_is_missing_and_changes_nothing(small: Small, push: Push) -> None:
    target, node = large(push), small()
    leave(node, 100 * MIB)
    node.desire(first=machine_config("50-new", os_image=target))
    done = node.mcdaemon("plan", check=False)
    assert done.returncode == 3 and "are needed on /sysroot" in done.stdout


def test_an_image_that_is_there_already_needs_no_room_for_its_layers(small: Small, push: Push, base: str) -> None:
    """The way back: its layers are the rollback deployment's."""
    target, node = large(push), small()
    settle(node, first=machine_config("50-new", os_image=target))
    leave(node, 90 * MIB)
    settle(node, first=machine_config("50-old", os_image=base))
    assert "417.94.1" in node.machine.read("/etc/os-release")
    rests_on(node, "50-old")


def test_another_config_that_fits_goes_on_while_the_disk_is_full(small: Small, push: Push) -> None:
    """P7."""
    target, node = large(push), small()
    leave(node, 100 * MIB)
    node.desire(first=machine_config("50-large", os_image=target))
    held_for_space(node)
    settle(node, first=OLD)
    is_old(node)
    rests_on(node, "50-old")


def test_files_and_a_reboot_need_a_deployment_and_nothing_more(small: Small) -> None:
    node = small()
    settle(node, first=OLD)
    filler = leave(node, 40 * MIB)
    node.desire(first=NEW)
    open_gate(node)
    held_for_space(node, "the new deployment (64 MiB)")
    is_old(node)
    filler.unlink()
    leave(node, 80 * MIB)
    through_gate(node)
    is_new(node)
    rests_on(node, "50-new")


def test_a_live_change_is_not_measured(small: Small) -> None:
    """No deployment is made: a few KiB are enough."""
    node = small(settings=gated())
    settle(node, first=machine_config("50-app", files={"/etc/app.conf": "x\n"}))
    boots = node.boots
    leave(node, 20 * MIB)
    node.desire(first=machine_config("50-app", files={"/etc/app.conf": "x\n"}, ssh_keys=["ssh-ed25519 AAAA core"]))
    said = node.once()
    assert "apply-live:" in said and node.boots == boots, said
    rests_on(node, "50-app")


def test_a_fetch_that_stands_still_is_cancelled_and_made_again(make_node: MakeNode, push: Push) -> None:
    """IMG-50, IMG-51: no progress for `idle_timeout_seconds`, whatever the reason; the node works on meanwhile."""
    node = make_node(settings=gated(rpm_ostree="{idle_timeout_seconds: 5}"))
    faults(node, delay={"at": "after-manifest", "seconds": 600}, once=True)
    node.desire(first=machine_config("50-new", os_image=newer(push)))
    said = node.once(expect=3)
    assert "no sign of life for 5 s: the transaction is cancelled" in said and "drain:" not in said
    assert status(node)["state"] == "Working" and node.boots == 0
    through_gate(node)
    rests_on(node, "50-new")


# -- inodes -----------------------------------------------------------------------------------------------------------


def test_inodes_run_out_before_the_bytes(small: Small) -> None:
    """TXN-33."""
    node = small(size=144 * MIB)
    settle(node, first=OLD)
    folder = node.machine.sysroot.path / "many"
    folder.mkdir()
    for number in range(os.statvfs(folder).f_favail - 4000):
        (folder / str(number)).touch()
    node.desire(first=NEW)
    open_gate(node)
    held_for_space(node, "4096 inodes are needed on /sysroot; ", "are free")
    subprocess.run(["rm", "-r", str(folder)], check=True, timeout=60)
    through_gate(node)
    is_new(node)
    rests_on(node, "50-new")


# -- /boot ------------------------------------------------------------------------------------------------------------


def with_kernel(push: Push, count: int) -> str:
    changes = {f"usr/lib/modules/{KERNEL}/initramfs.img": File(noise(count))}
    return push(layer_on(base_image(), changes), f"os:kernel-{count}")


def test_a_full_boot_is_seen_before_anything_is_fetched(small: Small, push: Push, registry: Registry) -> None:
    """TXN-39, STATE-21, rpm-ostree.md 7 row 36: a kernel like the booted one would not fit."""
    target, node = with_kernel(push, MIB), small(boot=16 * MIB)
    filler = leave(node, MIB, "boot")
    registry.forget_requests()
    node.desire(first=machine_config("50-new", os_image=target))
    open_gate(node)
    held_for_space(
        node, "are needed on /boot", "a kernel like the booted one", "1 MiB are free", "rpm-ostree cleanup -r"
    )
    assert registry.blob_fetches() == ()
    filler.unlink()
    through_gate(node)
    rests_on(node, "50-new")


def test_a_kernel_larger_than_anybody_thought_is_measured_before_the_drain(small: Small, push: Push) -> None:
    """TXN-46: 6 MiB for a kernel of 4 MiB, because boot entries and directories come with it."""
    target, node = with_kernel(push, 4 * MIB), small(boot=16 * MIB)
    leave(node, 3 * MIB, "boot")
    node.desire(first=machine_config("50-new", os_image=target))
    open_gate(node)
    said = node.once(expect=3)
    found = status(node)
    assert "drain:" not in said and node.boots == 0
    assert "are needed on /boot: the kernel (7 MiB); 3 MiB are free" in found["error"], found
    assert found["state"] == "Working"
    before = fingerprint(node)
    assert node.once(expect=3) and fingerprint(node) == before, "held, and not staged again and again"
    assert transactions(node).count("UpdateDeployment") == 1
    leave(node, 8 * MIB, "boot")
    through_gate(node)
    assert node.boots == 1
    rests_on(node, "50-new")


def test_the_way_back_to_a_kernel_that_is_in_boot_needs_no_room_there(small: Small, push: Push, base: str) -> None:
    """The rollback deployment's; nobody has to remove it for that (TXN-03)."""
    target, node = with_kernel(push, 4 * MIB), small(boot=16 * MIB)
    settle(node, first=machine_config("50-new", os_image=target))
    leave(node, MIB, "boot")
    settle(node, first=machine_config("50-old", os_image=base))
    rests_on(node, "50-old")


@pytest.mark.parametrize("missing", [0, 1])
def test_around_the_limit_the_kernel_either_fits_or_the_node_waits(small: Small, push: Push, missing: int) -> None:
    """TXN-46: what passes the check is finalized by the real libostree; a block less, and nothing is drained."""
    target, node = with_kernel(push, 4 * MIB), small(boot=16 * MIB)
    block = os.statvfs(node.machine.sysroot.path / "boot").f_frsize
    leave(node, 4 * MIB + 2 * MIB + (1 - missing) * block, "boot")  # the kernel, the margin, and the tiny vmlinuz
    node.desire(first=machine_config("50-new", os_image=target))
    open_gate(node)
    said = node.once(expect=3 if missing else 0)
    assert ("\nfinalize:" in said) is (missing == 0)
    if missing:
        assert node.boots == 0 and "drain:" not in said and "are needed on /boot" in status(node)["error"]
        return
    through_gate(node)
    assert node.boots == 1
    rests_on(node, "50-new")


# -- an older OS ------------------------------------------------------------------------------------------------------

REFUSE = gated(os="{downgrade: refuse}")
UNHEALTHY = HOLD + "os: {downgrade: refuse}\nhealth: {timeout_seconds: 1, units: [probe.service]}\n"


def newer(push: Push) -> str:
    return push(next_image("417.94.40"), "os:v40-small")


def test_an_older_os_is_refused_with_its_field_when_the_settings_say_so(
    make_node: MakeNode, push: Push, base: str, registry: Registry
) -> None:
    """rpm-ostree.md 7 row 56: nobody else checks. Of the target only its config is read, which says the version."""
    node = make_node(settings=REFUSE)
    settle(node, first=machine_config("50-new", os_image=newer(push)))
    registry.forget_requests()
    before, done, boots = fingerprint(node), transactions(node), node.boots
    node.desire(first=machine_config("50-old", os_image=base))
    open_gate(node)
    said = node.once(expect=4)
    assert "reject:" in said and "/spec/osImageURL" in said
    assert "version 417.94.1 is older than the booted 417.94.40" in said and "os.downgrade" in said
    assert (fingerprint(node), transactions(node), node.boots) == (before, done, boots)
    assert len(registry.blob_fetches()) <= 1
    assert status(node)["state"] == "Unreconcilable"
    settle(node, first=machine_config("50-new", os_image=newer(push)))
    rests_on(node, "50-new")


def test_an_older_os_is_a_warning_by_default_and_its_config_is_not_read_for_that(
    make_node: MakeNode, push: Push, base: str, registry: Registry
) -> None:
    node = make_node()
    settle(node, first=machine_config("50-new", os_image=newer(push)))
    registry.forget_requests()
    node.desire(first=machine_config("50-old", os_image=base))
    said = node.once(expect=3)  # waits for its drain, staged
    assert "the OS goes back: version 417.94.1 is older than the booted 417.94.40" in said
    node.once(expect=3)
    assert any("the OS goes back" in text for text in status(node)["warnings"])
    through_gate(node)
    assert "417.94.1" in node.machine.read("/etc/os-release")
    rests_on(node, "50-old")
    assert status(node)["warnings"] == []


def test_our_own_way_back_is_never_refused(make_node: MakeNode, push: Push) -> None:
    """The target is not healthy; what it is taken back to is older."""
    node = make_node(settings=UNHEALTHY)
    node.desire(first=machine_config("50-new", os_image=newer(push), units=[FAILING]))
    for _round in range(8):
        if node.boots < 2:
            tick(node)
    assert tick(node) == 3 and node.boots == 2
    assert "417.94.1" in node.machine.read("/etc/os-release")
    assert "probe.service" in status(node)["failed"]
    no_leftovers(node)


def test_the_way_back_from_a_layered_image_is_no_way_to_an_older_os(make_node: MakeNode, push: Push, base: str) -> None:
    """Incident 4: a layer has the version of what it lies on."""
    layered = push(layer_on(base_image(), {"etc/baked": File(b"in")}), "os:layered")
    node = make_node(settings=REFUSE)
    settle(node, first=machine_config("50-layered", os_image=layered))
    settle(node, first=machine_config("50-plain", os_image=base))
    rests_on(node, "50-plain")
