"""Finalization that fails, once or for ever, or does not happen: no reboot comes of it, and no endless drains."""

from __future__ import annotations

import pytest

from tests.field.conftest import Aged
from tests.field.evidence import (
    NEW,
    OLD,
    Agent,
    fingerprint,
    is_new,
    is_old,
    no_leftovers,
    open_gate,
    rests_on,
    status,
    stop_after,
    through_gate,
)
from tests.field.rivals import (
    COUNTED,
    FINALIZER,
    STAMP,
    drains,
    fails_times,
    finalizer,
    forget_drains,
    orderly_reboot,
    unlock,
)
from tests.stand.node import Node

pytestmark = pytest.mark.stand


@pytest.fixture
def node(aged: Aged) -> Node:
    node = aged(OLD, settings=COUNTED)
    forget_drains(node)
    open_gate(node)
    node.desire(first=NEW)
    return node


def until_rest(node: Node, rounds: int = 8) -> str:
    """Rounds until the agent neither goes on nor says something new."""
    said = ""
    for _round in range(rounds):
        boots = node.boots
        done = node.mcdaemon("run", "--once", check=False)
        said += done.stderr
        if "reboot: " in done.stderr:
            node.follow_reboot()
        elif node.boots == boots and (done.returncode == 0 or status(node)["state"] == "Degraded"):
            return said
    raise AssertionError(f"no end after {rounds} rounds:\n{said}")


def test_a_file_that_is_there_only_while_ostree_merges_costs_a_second_drain_and_no_reboot(node: Node) -> None:
    """TXN-34, TXN-45: the real libostree fails on it once; the node is back at work in between."""
    finalizer(node, fails_times(1))
    said = until_rest(node)
    assert said.count("cannot finalize") == 1 and "the node is back at work" in said
    assert node.boots == 1 and drains(node) == "dudu"
    is_new(node)
    rests_on(node, "50-new")


def test_a_finalization_that_always_fails_is_given_up_after_three_drains_and_never_reboots(node: Node) -> None:
    """TXN-31: no reboot loop, and no drain loop either; remembered until somebody asks for it."""
    before = fingerprint(node)
    finalizer(node, fails_times(1000))
    said = until_rest(node)
    found = status(node)
    assert found["state"] == "Degraded" and "so it went 3 times" in found["failed"], said
    assert "Cannot copy non-regular/non-symlink file: pipe" in found["failed"], "the words of libostree"
    assert node.boots == 0 and drains(node) == "dududu"
    is_old(node)
    no_leftovers(node)
    assert fingerprint(node).but_for_rollback() == before.but_for_rollback()
    for _round in range(2):
        node.once(expect=3)
    assert drains(node) == "dududu" and node.boots == 0, "not tried again by itself"
    node.machine.run(["rm", "-rf", f"/run/systemd/system/{FINALIZER}.d"])
    node.machine.run(["systemctl", "daemon-reload"])
    node.mcdaemon("retry")
    through_gate(node)
    assert node.boots == 1
    rests_on(node, "50-new")


def test_our_own_failed_finalization_leaves_no_stamp_that_fails_a_unit_of_the_next_boot(node: Node) -> None:
    """TXN-44: ostree-boot-complete.service would say of the target that it had failed."""
    finalizer(node, fails_times(1))
    until_rest(node)
    assert node.boots == 1 and not node.machine.exists(STAMP)
    state = node.machine.run(["systemctl", "show", "--property=ActiveState", "ostree-boot-complete.service"]).stdout
    assert state.strip() == "ActiveState=inactive"


def test_a_stale_stamp_is_not_blamed(node: Node) -> None:
    """TXN-44: somebody's trace of another failure; it is neither told as ours nor removed."""
    node.machine.run(["sh", "-c", f"mount -o remount,rw /boot; mkdir -p /boot/ostree; echo old-trouble >{STAMP}"])
    finalizer(node, "rm -f /run/ostree/staged-deployment; exit 1\n")
    said = until_rest(node)
    assert "cannot finalize" in said and "old-trouble" not in said
    assert "old-trouble" not in status(node)["failed"]
    assert node.machine.read(STAMP) == "old-trouble\n"


@pytest.mark.parametrize("layout", ["masked", "without a stop", "fails at once"])
def test_a_finalizing_unit_that_does_not_do_its_work_is_done_without(node: Node, layout: str) -> None:
    """TXN-07, TXN-41: masked, absent, or not (yet) active because its .path unit is late: its program is run."""
    if layout == "masked":
        node.machine.run(["systemctl", "mask", "--runtime", FINALIZER])
    else:
        finalizer(node, "exit 0\n" if layout == "without a stop" else "exit 3\n")
    said = through_gate(node)
    assert node.boots == 1 and drains(node) == "du", said
    is_new(node)
    rests_on(node, "50-new")


def test_a_success_without_a_boot_entry_is_no_success(node: Node) -> None:
    """The staged deployment is gone, nothing is pending, the unit says it went well."""
    finalizer(node, "rm -f /run/ostree/staged-deployment; exit 0\n")
    said = until_rest(node)
    assert "so it went 3 times" in status(node)["failed"], said
    assert node.boots == 0 and drains(node) == "dududu"
    is_old(node)
    no_leftovers(node)


def test_a_deployment_that_is_locked_again_in_the_last_moment_is_tried_again(node: Node) -> None:
    """libostree then does nothing, and calls that success (rpm-ostree.md 5.2, step 2)."""
    lock = "test -e /run/stand/locked || touch /run/stand/locked /run/ostree/staged-deployment-locked\n"
    finalizer(node, lock + "exec ostree admin finalize-staged\n")
    said = until_rest(node)
    assert "left the deployment staged" in said
    assert node.boots == 1 and drains(node) == "dudu"
    rests_on(node, "50-new")


@pytest.mark.parametrize("unlocked", [False, True])
def test_a_shutdown_that_cannot_finalize_is_told_with_the_words_of_ostree(node: Node, unlocked: bool) -> None:
    """STATE-21, TXN-42: somebody reboots; the old one comes back; the trace in /boot goes soon, its text does not."""
    stop_after(node, "drain")
    if unlocked:
        unlock(node)
        node.machine.run(["sh", "-c", "mkdir /etc/odd && mkfifo /etc/odd/pipe"])
    orderly_reboot(node)
    is_old(node)
    node.machine.run(["rm", "-rf", "/etc/odd"])
    agent = Agent.start(node)
    agent.wait()
    told = "ostree could not finalize 50-new at the last shutdown" in agent.text()
    assert told is unlocked, agent.text()
    if unlocked:
        assert "pipe" in agent.text() and "could not finalize" in node.machine.journal("mcdaemon-early.service")
    through_gate(node)
    is_new(node)
    rests_on(node, "50-new")
