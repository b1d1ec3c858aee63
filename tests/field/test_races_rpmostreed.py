"""rpm-ostreed dies, hangs, sleeps, or fails for reasons of its own, in each phase of a transaction."""

from __future__ import annotations

import pytest

from tests.field.conftest import Aged
from tests.field.evidence import (
    NEW,
    OLD,
    Agent,
    faults,
    fifo,
    fingerprint,
    is_new,
    is_old,
    no_leftovers,
    open_gate,
    rests_on,
    status,
    stop_after,
    through_gate,
    tick,
    transactions,
)
from tests.field.rivals import COUNTED, drains, forget_drains, wait_until
from tests.stand.node import Node

pytestmark = pytest.mark.stand

UNIT = "rpm-ostreed.service"
DROP_IN = f"/run/systemd/system/{UNIT}.d/90-test.conf"
PHASES = ("before-reply", "before-start", "after-start", "after-stage-before-finished")


@pytest.fixture
def node(aged: Aged) -> Node:
    node = aged(OLD, settings=COUNTED)
    forget_drains(node)
    open_gate(node)
    node.desire(first=NEW)
    return node


def arrives(node: Node, drained: str = "du") -> str:
    said = through_gate(node)
    assert node.boots == 1 and drains(node) == drained
    is_new(node)
    rests_on(node, "50-new")
    return said


def unit(node: Node, text: str) -> None:
    node.machine.write(DROP_IN, text)
    node.machine.run(["systemctl", "daemon-reload"])


def is_down(node: Node) -> None:
    wait_until(node, f"systemctl show -p ActiveState {UNIT} | grep -q -e inactive -e failed")


@pytest.mark.parametrize("phase", PHASES[:3])
def test_it_dies_while_kernel_arguments_are_staged(node: Node, phase: str) -> None:
    """TXN-21, rpm-ostree.md 7 rows 10, 11, 53: before the reply, before Start, and while it works."""
    faults(node, crash=phase, methods=["KernelArgs"], once=True)
    said = node.once(expect=3)
    assert "cannot run rpm-ostree's KernelArgs" in said
    assert status(node)["state"] == "Working" and drains(node) == ""
    is_old(node)
    arrives(node)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("step", ["verify-staged", "verify-root"])
def test_it_dies_while_a_withdrawn_update_is_cleaned_up(node: Node, step: str, phase: str) -> None:
    before = fingerprint(node)
    stop_after(node, step)
    node.desire(first=OLD)
    faults(node, crash=phase, methods=["Cleanup"], once=True)
    assert tick(node) == 3
    assert status(node)["state"] == "Working"
    for _round in range(3):
        if tick(node) == 0:
            break
    assert node.boots == 0
    assert fingerprint(node).but_for_rollback() == before.but_for_rollback()
    assert drains(node) == ("du" if step == "verify-root" else "")
    rests_on(node, "50-old")


@pytest.mark.parametrize("phase", PHASES)
def test_it_dies_while_an_unhealthy_target_is_rolled_back(aged: Aged, phase: str) -> None:
    """rpm-ostree's Rollback toggles: done twice, it would boot the target again."""
    node = aged(OLD, settings=COUNTED.replace("timeout_seconds: 20", "timeout_seconds: 1"))
    old = node.machine.booted().name
    node.machine.write("/etc/mcdaemon/health.d/10-no", '#!/bin/sh\ntest "$(cat /etc/app.conf)" = old\n', 0o755)
    open_gate(node)
    node.desire(first=NEW)
    tick(node)
    assert node.boots == 1
    faults(node, crash=phase, methods=["Rollback"], once=True)
    for _round in range(8):
        if node.boots == 2:
            break
        tick(node)
    tick(node)
    assert node.boots == 2 and node.machine.booted().name == old
    is_old(node)
    no_leftovers(node)
    assert status(node)["state"] == "Degraded" and "50-new" in status(node)["failed"]


def test_it_is_killed_between_two_rounds_of_one_agent(node: Node) -> None:
    """The registration is gone with the process (rpm-ostree.md 1.8); nothing has to be said about it."""
    node.machine.run(["rm", "-f", "/run/may-drain"])
    agent = Agent.start(node, "run")
    agent.wait_for("cannot drain")
    node.machine.run(["systemctl", "kill", "--signal=KILL", UNIT])
    is_down(node)
    open_gate(node)
    agent.wait_for("reboot: ")
    node.follow_reboot()
    through_gate(node)
    assert node.boots == 1
    is_new(node)
    rests_on(node, "50-new")


@pytest.mark.slow
def test_it_leaves_when_it_is_idle_and_comes_back_when_it_is_needed(aged: Aged) -> None:
    """rpm-ostree.md 1.8: at rest the agent does not keep it; IdleExitTimeout is a minute, here a second."""
    node = aged(OLD, settings=COUNTED)
    node.machine.write("/etc/rpm-ostreed.conf", "[Daemon]\nIdleExitTimeout=1\n")
    forget_drains(node)
    agent = Agent.start(node, "run")
    agent.wait_for("rest: ")
    is_down(node)
    open_gate(node)
    node.desire(first=NEW)
    agent.wait_for("reboot: ")
    assert f"cannot start {UNIT}" not in agent.text()
    node.follow_reboot()
    arrives(node)


def test_its_start_may_take_longer_than_the_bus_waits_for_an_activated_service(node: Node) -> None:
    """TXN-10: the bus gives up after 25 s; so the unit is started through systemd, which waits as its unit says. Here a
    start takes 3 s, and no call is made before it is up."""
    unit(node, "[Service]\nExecStartPre=/bin/sleep 3\n")
    node.machine.run(["systemctl", "stop", UNIT])
    arrives(node)
    started = [call for call in node.machine.calls(node.machine.boots[-2]) if call["method"] == "StartUnit"]
    assert UNIT in [call["args"][0] for call in started], "by the agent, not by the bus"


def test_a_service_that_was_started_too_often_is_started_again(node: Node) -> None:
    """rpm-ostree.md 7 row 60: `start-limit-hit` stays until somebody resets it."""
    unit(node, "[Unit]\nStartLimitBurst=1\nStartLimitIntervalSec=1000\n")
    node.machine.run(["systemctl", "stop", UNIT])
    for _start in range(2):
        node.machine.run(["systemctl", "start", UNIT], check=False)
        node.machine.run(["systemctl", "kill", "--signal=KILL", UNIT], check=False)
        is_down(node)
    assert "start-limit-hit" in node.machine.run(["systemctl", "show", "-p", "Result", UNIT]).stdout
    arrives(node)


def test_a_service_that_does_not_start_is_waited_for(node: Node) -> None:
    unit(node, "[Service]\nExecStartPre=/bin/false\n")
    node.machine.run(["systemctl", "stop", UNIT])
    said = node.once(expect=3)
    assert f"cannot start {UNIT}: the job ended with 'failed'" in said
    assert status(node)["state"] == "Working" and drains(node) == ""
    unit(node, "")
    arrives(node)


def impatient(aged: Aged) -> Node:
    node = aged(OLD, settings=COUNTED + "rpm_ostree: {idle_timeout_seconds: 1}\n")
    forget_drains(node)
    open_gate(node)
    node.desire(first=NEW)
    return node


def test_a_transaction_without_a_sign_of_life_is_cancelled_and_made_again(aged: Aged) -> None:
    """TXN-48, BOOT-05: silence has an end, progress has none."""
    node = impatient(aged)
    faults(node, hold={"at": "after-start", "fifo": fifo(node)}, once=True)
    said = node.once(expect=3)
    assert "the transaction is cancelled" in said and "Operation was cancelled" in said
    arrives(node)


@pytest.mark.slow
def test_a_transaction_that_cannot_even_be_cancelled_costs_its_service_a_restart(aged: Aged) -> None:
    """rpm-ostree.md 7 row 5: it would hold the lock for ever; only ours is ended so."""
    node = impatient(aged)
    faults(node, hang="after-start", once=True)
    said = node.once(expect=3)
    assert "cannot be cancelled" in said and f"{UNIT} is restarted" in said
    arrives(node)


# -- its failures -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["opening /dev/fuse: Too many open files", "Child process killed by signal 9"])
def test_trouble_of_the_node_itself_is_tried_again_and_not_remembered(node: Node, text: str) -> None:
    faults(node, fail={"at": "after-start", "text": text}, methods=["KernelArgs"])
    for _round in range(3):
        assert text in node.once(expect=3)
        assert status(node)["state"] == "Working" and status(node)["failed"] == ""
    faults(node)
    arrives(node)


@pytest.mark.slow
def test_trouble_of_the_node_itself_does_not_last_for_ever(node: Node) -> None:
    faults(node, fail={"at": "after-start", "text": "fork: Cannot allocate memory"}, methods=["KernelArgs"])
    for _round in range(10):
        node.once(expect=3)
    assert "Cannot allocate memory" in status(node)["failed"] and status(node)["state"] == "Degraded"
    assert transactions(node).count("KernelArgs") == 10
    node.once(expect=3)
    assert transactions(node).count("KernelArgs") == 10
    is_old(node)
    no_leftovers(node)


def test_a_text_that_nobody_knows_is_the_targets_failure_after_the_third_time(node: Node) -> None:
    text = "Frobnicating /usr: the frob is not nice"
    faults(node, fail={"at": "after-start", "text": text}, methods=["KernelArgs"])
    for _round in range(2):
        assert text in node.once(expect=3)
        assert status(node)["state"] == "Working"
    node.once(expect=3)
    assert text in status(node)["failed"] and status(node)["state"] == "Degraded"
    assert drains(node) == ""
    no_leftovers(node)


def test_a_stage_that_somebody_else_changed_meanwhile_is_looked_at_afresh(node: Node) -> None:
    """rpm-ostree.md 7 rows 39, 45, 46: not the target's failure, however often."""
    text = "Expected staged base checksum abc, but found def"
    faults(node, fail={"at": "after-start", "text": text}, methods=["KernelArgs"])
    for _round in range(3):
        assert text in node.once(expect=3)
    assert status(node)["failed"] == ""
    faults(node)
    arrives(node)
