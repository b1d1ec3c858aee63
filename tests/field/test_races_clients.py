"""Other clients of rpm-ostree at work on the same node, at each point of an update: ours boots, or nothing does."""

from __future__ import annotations

import subprocess

import pytest

from tests.field.conftest import Aged, MakeNode, Push
from tests.field.evidence import (
    NEW,
    OLD,
    deployment_etc,
    fifo,
    is_new,
    is_old,
    open_gate,
    rests_on,
    shut_gate,
    status,
    stop_after,
    through_gate,
)
from tests.field.rivals import COUNTED, LOCK, drains, finalizer, forget_drains, rival
from tests.stand.configs import machine_config
from tests.stand.incidents import usbguard
from tests.stand.node import SOURCE, Node, next_image

pytestmark = pytest.mark.stand


@pytest.fixture
def node(aged: Aged) -> Node:
    node = aged(OLD, settings=COUNTED)
    forget_drains(node)
    open_gate(node)
    node.desire(first=NEW)
    return node


def arrives(node: Node, drained: str) -> str:
    """The new config is reached with one reboot, and with these drains; nothing else has come along."""
    source, before = node.machine.booted().name, deployment_etc(node, node.machine.booted().name)
    said = through_gate(node)
    assert node.boots == 1
    is_new(node)
    assert "by-hand" not in node.machine.read("/proc/cmdline")
    assert drains(node) == drained
    assert deployment_etc(node, source) == before, "the old deployment keeps its own /etc"
    rests_on(node, "50-new")
    return said


@pytest.mark.parametrize("step", ["stage-kargs", "verify-staged"])
@pytest.mark.parametrize("deed", ["kargs by-hand", "cleanup"])
def test_before_the_drain_another_client_costs_no_drain(node: Node, step: str, deed: str) -> None:
    """TXN-01, TXN-36: what they staged on top of ours goes, what they cleaned up is staged again."""
    stop_after(node, step)
    rival(node, *deed.split())
    arrives(node, "du")


@pytest.mark.parametrize("deed", ["kargs by-hand", "cleanup"])
def test_after_the_drain_the_node_goes_back_to_work_and_starts_afresh(node: Node, deed: str) -> None:
    """TXN-36, TXN-43."""
    stop_after(node, "drain")
    rival(node, *deed.split())
    said = arrives(node, "dudu")
    assert "nothing is staged any more; the node goes back to work first" in said


@pytest.mark.parametrize("step", ["finalize", "commit-files", "verify-root"])
def test_a_cleanup_after_finalization_sends_the_node_back_to_work_with_its_old_files(node: Node, step: str) -> None:
    stop_after(node, step)
    rival(node, "cleanup")
    shut_gate(node)
    said = node.once(expect=3)
    assert "goes back to work first" in said
    is_old(node)
    assert drains(node) == "du"
    arrives(node, "dudu")


@pytest.mark.parametrize("step", ["finalize", "verify-root"])
def test_a_rollback_of_our_finalized_deployment_sends_the_node_back_to_work(node: Node, step: str) -> None:
    """`rpm-ostree rollback` with a pending deployment makes the booted one the default again (rpm-ostree.md 1.16)."""
    stop_after(node, step)
    rival(node, "rollback")
    shut_gate(node)
    assert "goes back to work first" in node.once(expect=3)
    is_old(node)
    arrives(node, "dudu")


@pytest.mark.parametrize("step", ["finalize", "verify-root"])
def test_what_is_staged_on_top_of_our_finalized_deployment_does_not_boot_in_its_place(node: Node, step: str) -> None:
    """TXN-36, TXN-43: unlocked, the shutdown would finalize it, without our files, and boot that mixture."""
    stop_after(node, step)
    rival(node, "kargs", "by-hand")
    assert not node.machine.exists(LOCK)
    said = arrives(node, "du")
    assert "another client has staged" in said


def test_a_package_and_an_image_of_somebody_else_do_not_come_along(make_node: MakeNode, push: Push) -> None:
    """TXN-01: staged between our verification and our drain."""
    theirs = push(next_image("417.94.77"), "os:v77")
    node = make_node(settings=COUNTED)
    rpm = usbguard(node.machine.folder)
    node.machine.write(f"/var/rpms/{rpm.name}", rpm.read_bytes())
    node.machine.write("/etc/yum.repos.d/hand.repo", "[hand]\nname=hand\nbaseurl=file:///var/rpms/\nenabled=1\n")
    open_gate(node)
    node.desire(first=machine_config("50-app", files={"/etc/app.conf": "x"}))
    for deed in (("install", "usbguard"), ("rebase", theirs)):
        stop_after(node, "verify-staged")
        rival(node, *deed)
    said = through_gate(node)
    assert "removing the deployment" in said and "another client's?" in said
    assert node.boots == 1 and drains(node) == "du"
    assert "417.94.77" not in node.machine.read("/etc/os-release")
    assert node.machine.run(["sh", "-c", "command -v usbguard"], check=False).returncode != 0
    rests_on(node, "50-app")


def test_an_orphan_that_was_never_started_is_waited_out(node: Node) -> None:
    """TXN-21: a client that hangs between the reply and Start holds the lock as long as it lives."""
    pipe = fifo(node)
    orphan = node.machine.start(
        ["/usr/bin/python3", "-m", "tests.stand.rival", "orphan", pipe],
        env={"PYTHONPATH": SOURCE},
        stdout=subprocess.PIPE,
    )
    assert orphan.stdout is not None and orphan.stdout.readline() == "made\n"
    said = node.once(expect=3)
    assert "Transaction in progress" in said and status(node)["state"] == "Working"
    assert drains(node) == ""
    node.machine.stop_process(orphan)
    arrives(node, "du")


@pytest.mark.parametrize("step", ["verify-staged", "drain"])
def test_a_transaction_of_somebody_else_is_waited_for_before_the_drain_and_before_the_merge(
    node: Node, step: str
) -> None:
    """Between drain and reboot there is no transaction, not even of others; a drain in vain helps nobody."""
    stop_after(node, step)
    pipe = fifo(node)
    orphan = node.machine.start(
        ["/usr/bin/python3", "-m", "tests.stand.rival", "orphan", pipe],
        env={"PYTHONPATH": SOURCE},
        stdout=subprocess.PIPE,
    )
    assert orphan.stdout is not None and orphan.stdout.readline() == "made\n"
    said = node.once(expect=3)
    assert "rpm-ostree's KernelArgs" in said and "is at work" in said
    assert drains(node) == ("" if step == "verify-staged" else "d")
    node.machine.stop_process(orphan)
    arrives(node, "du")


def test_the_lock_of_ostree_itself_is_waited_for_before_the_drain(node: Node) -> None:
    """rpm-ostree.md 2.9: no transaction shows it; a merge would hang on it with the node drained."""
    stop_after(node, "verify-staged")
    script = (
        "from tests.stand.rpmostreed import faults\n"
        "with faults.foreign_lock(True):\n    print('held', flush=True)\n    input()\n"
    )
    # As `ostree admin` does: /sysroot is writable only in a mount namespace of one's own.
    argv = [
        "unshare",
        "--mount",
        "sh",
        "-c",
        'mount -o remount,rw,bind /sysroot; exec /usr/bin/python3 -c "$0"',
        script,
    ]
    environment = {"PYTHONPATH": SOURCE}
    holder = node.machine.start(argv, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    said = node.once(expect=3)
    assert "a program with the lock of ostree is at work" in said
    assert drains(node) == ""
    node.machine.stop_process(holder)
    arrives(node, "du")


def test_what_was_staged_in_the_last_moment_is_not_finalized_for_ours(node: Node) -> None:
    """TXN-36: between the look at the stage and the merge there is always a moment."""
    stop_after(node, "drain")
    deed = f"PYTHONPATH={SOURCE} /usr/bin/python3 -m tests.stand.rival kargs by-hand\n"
    finalizer(node, f"{deed}exec ostree admin finalize-staged\n")
    node.once(expect=3)
    assert node.boots == 0
    is_old(node)
    node.machine.run(["rm", "-rf", "/run/systemd/system/ostree-finalize-staged.service.d"])
    node.machine.run(["systemctl", "daemon-reload"])
    through_gate(node)
    assert node.boots == 1 and "by-hand" not in node.machine.read("/proc/cmdline")
    is_new(node)
    rests_on(node, "50-new")
