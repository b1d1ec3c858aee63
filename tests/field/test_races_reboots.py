"""Somebody else reboots the node, or cuts its power, at each step: exactly the old config runs, or exactly the new one.

A witness, a unit of both configs that starts with every boot, writes down what a workload would have seen.
"""

from __future__ import annotations

import pytest

from tests.field.conftest import Aged, MakeNode, Push
from tests.field.evidence import is_new, is_old, open_gate, rests_on, stop_after, through_gate
from tests.field.rivals import (
    COUNTED,
    NEW_SIGHT,
    OLD_SIGHT,
    WATCHED_NEW,
    WATCHED_OLD,
    drains,
    forget_drains,
    forget_sights,
    orderly_reboot,
    sights,
    unlock,
)
from tests.stand.configs import machine_config
from tests.stand.images import File
from tests.stand.node import Node, next_image

pytestmark = pytest.mark.stand

BEFORE = ("stage-kargs", "verify-staged", "drain")
AFTER = ("finalize", "commit-files", "verify-root")


@pytest.fixture
def node(aged: Aged) -> Node:
    node = aged(WATCHED_OLD, settings=COUNTED)
    forget_drains(node)
    forget_sights(node)
    open_gate(node)
    node.desire(first=WATCHED_NEW)
    return node


def reboot(node: Node, how: str) -> int:
    """Reboot as somebody else does; the boots that came of it, the early unit's included."""
    if how == "orderly":
        return orderly_reboot(node)
    node.machine.power_cut()
    return node.machine.boot()


def arrived(node: Node) -> None:
    is_new(node)
    assert sights(node)[-1] == NEW_SIGHT
    rests_on(node, "50-new")


@pytest.mark.parametrize("step", BEFORE)
def test_a_reboot_before_finalization_boots_the_old_and_the_update_starts_afresh(node: Node, step: str) -> None:
    """TXN-02, TXN-06: our deployment is locked, so the shutdown leaves it alone; nothing half made boots."""
    stop_after(node, step)
    assert orderly_reboot(node) == 1
    is_old(node)
    assert sights(node) == [OLD_SIGHT]
    through_gate(node)
    arrived(node)
    assert node.boots == 1 and drains(node) == ("dudu" if step == "drain" else "du")
    assert sights(node) == [OLD_SIGHT, NEW_SIGHT]


@pytest.mark.parametrize("step", AFTER)
def test_a_reboot_after_finalization_boots_the_new_and_only_the_new(node: Node, step: str) -> None:
    """Before the files were committed the early unit writes them and boots once more, before any workload starts."""
    stop_after(node, step)
    assert orderly_reboot(node) == (2 if step == "finalize" else 1)
    assert sights(node) == [NEW_SIGHT]
    through_gate(node)
    arrived(node)
    assert node.boots == 0, "no reboot for nothing"
    assert drains(node) == "du" and sights(node) == [NEW_SIGHT]


@pytest.mark.parametrize("step", ["verify-staged", "drain"])
def test_an_unlocked_deployment_that_was_verified_is_completed_when_somebody_reboots(node: Node, step: str) -> None:
    """The shutdown finalizes it without our files; the early unit has them, and no workload sees the mixture."""
    stop_after(node, step)
    unlock(node)
    assert orderly_reboot(node) == 2
    assert sights(node) == [NEW_SIGHT]
    through_gate(node)
    arrived(node)
    assert node.boots == 0 and sights(node) == [NEW_SIGHT]
    assert drains(node) == ("du" if step == "drain" else ""), "what was not drained does not go back to work"


@pytest.mark.parametrize("step", BEFORE)
def test_the_power_goes_with_an_unlocked_deployment(node: Node, step: str) -> None:
    """TXN-02: what is staged is in /run, and lost; the old boots."""
    stop_after(node, step)
    unlock(node)
    assert reboot(node, "power cut") == 1
    assert sights(node) == [OLD_SIGHT]
    is_old(node)
    through_gate(node)
    arrived(node)
    assert node.boots == 1 and sights(node) == [OLD_SIGHT, NEW_SIGHT]


def test_an_unlocked_deployment_that_nobody_had_verified_ends_the_update_and_a_new_one_begins(node: Node) -> None:
    """Unlocked in the moment between staging and verification: its OS part boots, as whoever unlocked it wanted; what
    the agent makes of it is a new update that begins there, and not one whose way back leads nowhere."""
    stop_after(node, "stage-kargs")
    unlock(node)
    assert orderly_reboot(node) == 1
    is_old(node)
    booted = node.machine.booted().name
    said = through_gate(node)
    assert "another deployment was booted" in said
    arrived(node)
    assert node.boots == 1 and drains(node) == "du"
    assert booted in [deployment.name for deployment in node.machine.deployments()], "the way back is there"


def test_a_new_config_that_is_withdrawn_while_a_reboot_happens_leaves_nothing(node: Node) -> None:
    """P7, over a reboot by somebody else: the target boots, is confirmed, and then left by an update of its own."""
    stop_after(node, "verify-root")
    node.desire(first=WATCHED_OLD)
    assert orderly_reboot(node) == 1
    assert sights(node) == [NEW_SIGHT]
    through_gate(node)
    is_old(node)
    assert sights(node) == [NEW_SIGHT, OLD_SIGHT]
    rests_on(node, "50-old")


@pytest.mark.parametrize("how", ["locked", "unlocked", "power cut"])
def test_an_image_update_that_somebody_reboots_into_or_away_from(make_node: MakeNode, push: Push, how: str) -> None:
    image = push(next_image("417.94.60", {"usr/share/stand/reboots": File(b"x")}), "os:v60")
    node = make_node(settings=COUNTED)
    open_gate(node)
    node.desire(first=machine_config("50-app", files={"/etc/app.conf": "new\n"}, os_image=image))
    stop_after(node, "verify-staged")
    if how == "unlocked":
        unlock(node)
    boots = reboot(node, how if how == "power cut" else "orderly")
    assert ("417.94.60" in node.machine.read("/etc/os-release")) == (how == "unlocked")
    assert node.machine.exists("/etc/app.conf") == (how == "unlocked")
    assert boots == (2 if how == "unlocked" else 1)
    through_gate(node)
    assert node.boots == (0 if how == "unlocked" else 1)
    assert "417.94.60" in node.machine.read("/etc/os-release") and node.machine.read("/etc/app.conf") == "new\n"
    rests_on(node, "50-app")
