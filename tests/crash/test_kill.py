"""The agent is killed and the power is cut, in and after each step: exactly the old config or exactly the new one."""

from __future__ import annotations

import contextlib
import json

import pytest

from tests.field.conftest import Aged
from tests.field.evidence import (
    NEW,
    OLD,
    STEPS,
    Agent,
    deployment_etc,
    is_new,
    is_old,
    open_gate,
    rests_on,
    stop_after,
    through_gate,
    validated,
)
from tests.stand.machine import MachineError
from tests.stand.node import Node

pytestmark = pytest.mark.stand


def test_an_agent_that_is_killed_in_each_step_in_turn_still_gets_there_with_one_reboot(old: Node) -> None:
    source = old.machine.booted().name
    before = deployment_etc(old, source)
    old.desire(first=NEW)
    open_gate(old)
    for step in STEPS[:-1]:
        agent = Agent.start(old)
        agent.wait_for(f"{step}: ")
        agent.kill()
    boots = old.boots
    through_gate(old)
    assert old.boots - boots == 1
    is_new(old)
    assert deployment_etc(old, source) == before
    rests_on(old, "50-new")


def test_an_agent_that_is_killed_when_it_asks_for_the_reboot_does_not_ask_for_a_second(old: Node) -> None:
    old.desire(first=NEW)
    open_gate(old)
    agent = Agent.start(old)
    agent.wait_for("reboot: ")
    agent.kill()
    boots = old.boots
    with contextlib.suppress(MachineError):
        old.follow_reboot(timeout=1)  # it had asked before the kill
    through_gate(old)
    assert old.boots - boots == 1
    rests_on(old, "50-new")


def test_a_drain_that_nobody_lived_to_note_is_undone_when_its_config_is_withdrawn(aged: Aged) -> None:
    """STATE-10's kind, found by killing at every call: the node stayed drained for ever."""
    drain = "touch /run/drained; kill -9 $PPID"
    undo = "[/usr/bin/rm, -f, /run/drained]"
    node = aged(OLD, settings=f"drain: {{command: [/bin/sh, -c, '{drain}'], undo: {undo}}}\n")
    node.desire(first=NEW)
    assert node.mcdaemon("run", "--once", check=False).returncode in (-9, 137)
    assert node.machine.exists("/run/drained")
    node.desire(first=OLD)
    node.once()
    assert not node.machine.exists("/run/drained")
    is_old(node)
    rests_on(node, "50-old")


def test_temporaries_of_a_killed_agent_go_from_run_as_well(old: Node) -> None:
    left = "/run/mcdaemon/.mcdaemon-0123456789abcdef"
    old.machine.write(left, "half a sta")
    old.once()
    assert not old.machine.exists(left)


@pytest.mark.parametrize("step", STEPS[:-1])
def test_a_power_cut_after_a_step_ends_in_exactly_the_old_or_exactly_the_new(old: Node, step: str) -> None:
    old.desire(first=NEW)
    open_gate(old)
    stop_after(old, step)
    old.machine.power_cut()
    old.machine.boot()
    carried = json.loads(old.machine.read("/etc/machine-config-daemon/currentconfig"))["metadata"]["name"]
    assert carried == ("50-new" if step in ("finalize", "commit-files", "verify-root") else "50-old")
    validated(old)
    (is_new if carried == "50-new" else is_old)(old)
    through_gate(old)
    is_new(old)
    rests_on(old, "50-new")
