"""A target that reaches userspace and is not healthy is taken back once, by itself (P6)."""

from __future__ import annotations

import pytest

from tests.field.conftest import Aged
from tests.field.evidence import (
    Agent,
    boot_by_hand,
    fingerprint,
    journal,
    no_leftovers,
    rests_on,
    status,
    tick,
    transactions,
    validated,
)
from tests.stand.configs import Unit, machine_config
from tests.stand.node import Node

pytestmark = pytest.mark.stand


def config(text: str, *units: Unit) -> str:
    return machine_config(f"50-{text}", units=units, files={
        "/etc/app.conf": f"{text}\n", "/usr/local/bin/tool": (f"{text}\n", 0o755),
        **({"/usr/local/bin/only-new": "x"} if text == "new" else {})})  # fmt: skip


HOLD = "hold: {retry_min_seconds: 1, retry_max_seconds: 5}\n"
SHORT = HOLD + "health: {timeout_seconds: 1, settle_seconds: 0}\n"
PATIENT = HOLD + "health: {timeout_seconds: 60, settle_seconds: 0}\n"
CHECK = "/etc/mcdaemon/health.d/10-check.sh"
FAILING = Unit("probe.service", "[Service]\nType=oneshot\nExecStart=/bin/false\n"
               "[Install]\nWantedBy=multi-user.target\n", True)  # fmt: skip
OLD, NEW, NEWEST = config("old"), config("new"), config("newest")


def until(node: Node, boots: int) -> None:
    """Rounds until the node has rebooted so often, and one more that settles it."""
    for _round in range(8):
        if node.boots >= boots:
            break
        tick(node)
    assert node.boots == boots
    tick(node)


def is_back(node: Node, deployment: str) -> None:
    assert node.machine.booted().name == deployment
    assert node.machine.read("/etc/app.conf") == "old\n" and node.machine.read("/usr/local/bin/tool") == "old\n"
    assert not node.machine.exists("/usr/local/bin/only-new")
    assert node.machine.default_entry().deployment == deployment
    validated(node)


def test_an_unhealthy_unit_takes_the_target_back_once(aged: Aged) -> None:
    node = aged(OLD, settings=HOLD + "health: {timeout_seconds: 1, units: [probe.service]}\n")
    old = node.machine.booted().name
    node.desire(first=config("new", FAILING))
    until(node, 2)
    is_back(node, old)
    found = status(node)
    assert found["state"] == "Degraded" and "probe.service" in found["failed"] and "50-new" in found["failed"]
    assert "probe.service" in node.mcdaemon("status").stdout
    assert tick(node) == 3 and node.boots == 2, "not tried again by itself (TXN-40)"
    no_leftovers(node)


def test_a_failing_health_script_takes_the_target_back_and_a_later_config_goes_on(aged: Aged) -> None:
    node = aged(OLD, settings=SHORT)
    old = node.machine.booted().name
    script = "#!/bin/sh\ntest ! -e /usr/local/bin/only-new || { echo 'only-new is in the way' >&2; exit 1; }\n"
    node.machine.write(CHECK, script, 0o755)
    node.desire(first=NEW)
    until(node, 2)
    is_back(node, old)
    assert "only-new is in the way" in status(node)["failed"], "the script's own words are the reason"
    node.desire(first=NEWEST)
    until(node, 3)
    rests_on(node, "50-newest")
    assert status(node)["failed"] == ""


def test_a_target_that_becomes_healthy_in_time_is_kept(aged: Aged) -> None:
    node = aged(OLD, settings=PATIENT)
    node.machine.write(CHECK, '#!/bin/sh\ntest -e /run/healthy || test "$(cat /etc/app.conf)" = old\n', 0o755)
    node.desire(first=NEW)
    tick(node)
    assert node.boots == 1
    assert tick(node) == 3
    found = status(node)
    assert (found["state"], found["step"]) == ("Working", "hold") and "healthy" in found["why"]
    assert "10-check.sh" in found["why"] + found["hold"], "it says what is not healthy"
    node.machine.write("/run/healthy", "")
    assert tick(node) == 0
    assert node.boots == 1
    rests_on(node, "50-new")


def test_files_that_are_damaged_after_the_reboot_take_the_target_back(aged: Aged) -> None:
    """P5: what is on disk is proved again after the reboot; here something changes a file while the node boots."""
    node = aged(OLD, settings=SHORT)
    old = node.machine.booted().name
    vandal = Unit("vandal.service", "[Service]\nType=oneshot\nExecStart=/bin/sh -c 'echo x >>/etc/app.conf'\n"
                  "[Install]\nWantedBy=multi-user.target\n", True)  # fmt: skip
    node.desire(first=config("new", vandal))
    until(node, 2)
    is_back(node, old)
    assert "/etc/app.conf" in status(node)["failed"]


def test_retry_tries_a_target_again_that_was_taken_back(aged: Aged) -> None:
    node = aged(OLD, settings=SHORT)
    node.machine.write(CHECK, '#!/bin/sh\ntest -e /var/lib/repaired || test "$(cat /etc/app.conf)" = old\n', 0o755)
    node.desire(first=NEW)
    until(node, 2)
    node.machine.write("/var/lib/repaired", "")
    assert "will be tried again" in node.mcdaemon("retry").stdout
    until(node, 3)
    rests_on(node, "50-new")


def test_a_power_cut_in_the_way_back_ends_in_the_old_config(aged: Aged) -> None:
    node = aged(OLD, settings=SHORT)
    old = node.machine.booted().name
    node.machine.write(CHECK, '#!/bin/sh\ntest "$(cat /etc/app.conf)" = old\n', 0o755)
    node.desire(first=NEW)
    tick(node)
    assert node.boots == 1
    for _round in range(8):
        agent = Agent.start(node)
        line = agent.wait_for("")  # the first sentence is the decision
        if line.startswith("roll-back: "):
            break
        assert line.startswith("hold: ") and agent.wait() == 3
    node.machine.power_cut()
    node.machine.boot()
    for _round in range(20):
        if journal(node)["update"] is None:
            break
        tick(node)
    is_back(node, old)
    assert "50-new" in status(node)["failed"]


@pytest.fixture
def chosen(aged: Aged) -> tuple[Node, str, str]:
    """A node that confirmed NEW, and on which somebody booted the old entry then; the names of both deployments."""
    node = aged(OLD, settings=SHORT)
    old = node.machine.booted().name
    node.desire(first=NEW)
    tick(node)
    tick(node)
    rests_on(node, "50-new")
    new = node.machine.booted().name
    node.machine.power_cut()
    assert boot_by_hand(node, old) == 1
    return node, old, new


def test_an_old_entry_chosen_by_hand_after_the_target_was_confirmed_is_only_told(
    chosen: tuple[Node, str, str],
) -> None:
    """The operator has decided. Nothing is staged, put back or rebooted."""
    node, old, new = chosen
    before = fingerprint(node)
    for _round in range(2):
        assert tick(node) == 1
    assert fingerprint(node) == before and node.machine.booted().name == old
    assert transactions(node) == [] and journal(node)["update"] is None and journal(node)["failed"] is None
    found = status(node)
    assert (found["state"], found["step"]) == ("Degraded", "rest")
    assert (found["current"], found["desired"]) == ("50-old", "50-new")
    assert found["stood_back"] and "older deployment" in found["why"] and old in found["why"] and new in found["why"]
    assert any("/usr/local/bin/tool" in text for text in found["warnings"]), "what is shared is of the newer config"
    assert "older deployment is booted" in node.mcdaemon("status").stdout


def test_the_confirmed_deployment_booted_again_is_at_rest_as_before(chosen: tuple[Node, str, str]) -> None:
    node, _old, new = chosen
    tick(node)
    node.machine.power_cut()
    node.machine.boot()
    assert node.machine.booted().name == new and tick(node) == 0
    rests_on(node, "50-new")
    assert not status(node)["stood_back"]


def test_retry_brings_a_node_forward_again_on_which_an_old_entry_was_chosen(chosen: tuple[Node, str, str]) -> None:
    node, _old, _new = chosen
    assert tick(node) == 1
    assert "50-new" in node.mcdaemon("retry").stdout
    node.update()
    rests_on(node, "50-new")
    assert not status(node)["stood_back"]


def test_another_desired_config_brings_a_node_forward_on_which_an_old_entry_was_chosen(
    chosen: tuple[Node, str, str],
) -> None:
    node, _old, _new = chosen
    assert tick(node) == 1
    node.desire(first=NEWEST)
    node.update()
    rests_on(node, "50-newest")


def test_an_old_root_whose_newer_deployment_is_gone_was_not_chosen(chosen: tuple[Node, str, str]) -> None:
    """A node that was restored or installed anew with its /var kept has nothing to go back to: it is updated."""
    node, _old, new = chosen
    node.machine.run(["ostree", "admin", "undeploy", "0"])
    assert new not in [deployment.name for deployment in node.machine.deployments()]
    node.update()
    rests_on(node, "50-new")


def test_the_old_entry_chosen_by_hand_before_the_target_was_confirmed_is_kept(aged: Aged) -> None:
    node = aged(OLD, settings=PATIENT)
    old = node.machine.booted().name
    node.machine.write(CHECK, '#!/bin/sh\ntest "$(cat /etc/app.conf)" = old\n', 0o755)
    node.desire(first=NEW)
    tick(node)
    assert node.boots == 1 and node.machine.read("/usr/local/bin/tool") == "new\n"
    node.machine.power_cut()
    assert boot_by_hand(node, old) == 1
    assert node.machine.read("/usr/local/bin/tool") == "old\n", "before the agent has run"
    assert tick(node) == 3
    is_back(node, old)
    found = status(node)
    assert found["state"] == "Degraded" and "old deployment was booted" in found["failed"]
    no_leftovers(node)
