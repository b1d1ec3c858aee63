"""The early unit: what it makes of a root that was booted at the wrong moment, before anything else has started."""

from __future__ import annotations

import json

import pytest

from tests.field.conftest import Aged
from tests.field.evidence import (
    ARCHIVE,
    STATE,
    boot_by_hand,
    journal,
    no_leftovers,
    open_gate,
    rests_on,
    status,
    stop_after,
    through_gate,
    tick,
    validated,
)
from tests.stand.configs import FileText, Unit, machine_config
from tests.stand.machine import Down
from tests.stand.node import Node

pytestmark = pytest.mark.stand

SCRIPT = "#!/bin/sh\ncat /etc/app.conf >>/run/workload-saw\n"
UNIT = Unit("workload.service", "[Service]\nType=oneshot\nRemainAfterExit=yes\nExecStart=/usr/local/bin/workload\n"
            "[Install]\nWantedBy=multi-user.target\n", True)  # fmt: skip


def config(text: str) -> str:
    files: dict[str, FileText] = {"/etc/app.conf": f"{text}\n", "/usr/local/bin/tool": (f"{text}\n", 0o755)}
    return machine_config(f"50-{text}", files={**files, "/usr/local/bin/workload": (SCRIPT, 0o755)}, units=[UNIT])


@pytest.fixture
def finalized(aged: Aged) -> Node:
    """A node whose update was finalized by ostree; the files of the new config are not in it yet."""
    node = aged(config("old"))
    node.desire(first=config("new"))
    open_gate(node)
    stop_after(node, "finalize")
    assert node.machine.default_entry().deployment == journal(node)["update"]["staged"] != node.machine.booted().name
    return node


def started(node: Node, boot_id: str) -> set[str]:
    """The units that PID 1 says it has started in a boot."""
    lines = node.machine.journal("", boot_id).splitlines()
    return {line.rpartition("Started ")[2].rstrip(".") for line in lines if "systemd[1]: Started " in line}


def test_a_power_cut_between_finalization_and_commit_is_completed_before_anything_starts(finalized: Node) -> None:
    node = finalized
    node.machine.power_cut()
    assert node.machine.boot() == 2, "the early unit rebooted, once"
    first, second = node.machine.boots[-2:]
    assert "early: complete" in node.machine.journal("mcdaemon-early.service", first)
    assert "early: nothing" in node.machine.journal("mcdaemon-early.service", second)
    assert not started(node, first) - {"mcdaemon-early.service"}, "nothing else had started"
    assert "workload.service" in started(node, second)
    assert node.machine.read("/run/workload-saw") == "new\n"
    validated(node)
    tick(node)
    rests_on(node, "50-new")


def test_broken_settings_do_not_keep_the_early_unit_from_its_work(finalized: Node) -> None:
    node = finalized
    pending = node.machine.deployment_root(journal(node)["update"]["staged"])
    node.machine.power_cut()
    (pending / "etc/mcdaemon/mcdaemon.yaml").write_text("no_such_group: {}\n")
    assert node.machine.boot() == 2, "the early unit completed the root and rebooted"
    assert "no_such_group" in node.machine.journal("mcdaemon-early.service", node.machine.boots[-2])
    through_gate(node)
    rests_on(node, "50-new")


def test_an_orderly_reboot_by_somebody_else_between_finalization_and_commit_is_completed_too(finalized: Node) -> None:
    node = finalized
    node.machine.ask_reboot()
    node.machine.wait_down()
    assert node.machine.boot() == 2
    tick(node)
    rests_on(node, "50-new")


def test_a_power_cut_while_the_early_unit_completes_is_completed_again(finalized: Node) -> None:
    """It counts its attempts before it makes them; half of the files are there, and a torn temporary."""
    node = finalized
    node.machine.power_cut()
    etc = node.machine.deployment_root(node.machine.default_entry().deployment) / "etc"
    (etc / "app.conf").write_text("new\n")
    (etc / ".mcdaemon-0123456789abcdef").write_text("half a fi")
    assert node.machine.boot() == 2
    assert not node.machine.exists("/etc/.mcdaemon-0123456789abcdef")
    tick(node)
    rests_on(node, "50-new")


def test_the_old_root_gets_its_shared_files_back_before_anything_starts(aged: Aged) -> None:
    """/usr/local is /var: committed for the new root, and the old one is chosen in the boot menu."""
    node = aged(config("old"))
    old = node.machine.booted().name
    node.desire(first=config("new"))
    open_gate(node)
    stop_after(node, "commit-files")
    assert node.machine.read("/usr/local/bin/tool") == "new\n"
    node.machine.power_cut()
    assert boot_by_hand(node, old) == 1
    assert "early: put-back" in node.machine.journal("mcdaemon-early.service", node.machine.boot_id)
    assert node.machine.read("/usr/local/bin/tool") == "old\n" and node.machine.read("/etc/app.conf") == "old\n"
    assert node.machine.read("/run/workload-saw") == "old\n"
    validated(node)
    assert tick(node) == 3, "the target counts as failed: somebody, or the boot loader, has passed it over"
    assert "old deployment was booted" in status(node)["failed"] and journal(node)["update"] is None
    node.mcdaemon("retry")
    through_gate(node)
    assert node.machine.read("/usr/local/bin/tool") == "new\n"
    rests_on(node, "50-new")


def test_a_target_that_does_not_stay_complete_is_given_up_after_two_repairs(finalized: Node) -> None:
    """Each boot finds the files gone again, whatever the reason: no reboot loop, and the old root comes back."""
    node, machine = finalized, finalized.machine
    old, target = machine.booted().name, journal(node)["update"]["staged"]
    machine.power_cut()
    outcomes = []
    for _boot in range(6):
        (machine.deployment_root(target) / "etc/app.conf").write_text("torn")
        machine.start_boot()
        outcomes.append(machine.wait_up())
        if outcomes[-1] is None:
            break
    assert outcomes == [Down.REBOOT, Down.REBOOT, None]
    assert "early: give-up: the target is still incomplete after 2 repairs" in machine.journal(
        "mcdaemon-early.service", machine.boot_id
    )
    found = journal(node)
    assert found["update"]["rolled_back"] and found["failed"]["name"] == "50-new" and found["failed"]["at"] > 0
    tick(node)
    assert machine.booted().name == old and node.boots == 1
    assert tick(node) == 3
    validated(node)
    assert machine.read("/etc/app.conf") == "old\n" and machine.read("/usr/local/bin/tool") == "old\n"
    assert "incomplete after 2 repairs" in status(node)["failed"] and status(node)["failed_config"] == "50-new"
    assert tick(node) == 3 and node.boots == 1


def test_a_target_whose_payload_is_gone_is_given_up_and_the_old_root_comes_back(finalized: Node) -> None:
    node = finalized
    old = node.machine.booted().name
    node.machine.power_cut()
    for path in (node.machine.sysroot.stateroot / STATE.lstrip("/") / "payload").glob("*/payload.json"):
        path.unlink()
    assert node.machine.boot() == 1, "there is nothing to complete it with, so no reboot for nothing"
    assert "early: give-up" in node.machine.journal("mcdaemon-early.service", node.machine.boot_id)
    tick(node)
    assert node.machine.booted().name == old, "the agent has taken the way back"
    tick(node)
    validated(node)
    assert node.machine.read("/etc/app.conf") == "old\n" and node.machine.read("/usr/local/bin/tool") == "old\n"
    found = status(node)
    assert found["state"] == "Degraded" and "payload" in found["failed"]
    assert journal(node)["update"] is None


def test_a_payload_that_is_torn_is_not_committed(finalized: Node) -> None:
    node = finalized
    old = node.machine.booted().name
    node.machine.power_cut()
    for path in (node.machine.sysroot.stateroot / STATE.lstrip("/") / "payload").glob("*/payload.json"):
        path.write_bytes(path.read_bytes()[:-40])
    node.machine.boot()
    tick(node)
    tick(node)
    assert node.machine.booted().name == old
    validated(node)
    assert status(node)["state"] == "Degraded" and journal(node)["update"] is None


POLICY = "/etc/mcdaemon/policy.yaml"
_CUT_IN_THE_MIDDLE = """
import os
from mcdaemon import assembly, cli, settings
from mcdaemon.agent import Agent, make_places
from mcdaemon.context import RUNTIME
from mcdaemon.host import files
from mcdaemon.report.notify import Notifier
from mcdaemon.reporter import Reporter
from mcdaemon.update import commit
def apply(*arguments, real=commit.apply):
    def rename(*renamed, rename=files._rename, **named):
        rename(*renamed, **named)
        if renamed[2] == "/etc/app.conf":
            os._exit(0)
    files._rename = rename
    real(*arguments)
commit.apply = apply
cli._log_to_stderr(False)
context = assembly.assemble(settings.load())
make_places(context)
agent = Agent(context, Reporter(context.journal.parent, RUNTIME), Notifier())
while True:
    agent.round()
"""


def test_a_power_cut_in_the_middle_of_a_live_change_shows_no_unit_the_mixture(aged: Aged) -> None:
    """It is put back from what was kept before the first write, and what PID 1 has read of it meanwhile is read anew."""
    node = aged(config("old"), settings=f"disruption: {{policy_file: {POLICY}}}\n")
    paths = ("/etc/app.conf", "/usr/local/bin/tool", "/usr/local/bin/workload")
    node.machine.write(POLICY, json.dumps({"files": [{"path": path, "actions": [{"type": "None"}]} for path in paths]}))
    node.desire(first=config("new"))
    node.machine.run(["/usr/bin/python3", "-c", _CUT_IN_THE_MIDDLE], env={"PYTHONPATH": ARCHIVE})
    assert node.machine.read("/etc/app.conf") == "new\n" and node.machine.read("/usr/local/bin/tool") == "old\n"
    node.machine.power_cut()
    assert node.machine.boot() == 2, "the early unit rebooted, once"
    first, second = node.machine.boots[-2:]
    assert "early: put-back" in node.machine.journal("mcdaemon-early.service", first)
    assert "early: nothing" in node.machine.journal("mcdaemon-early.service", second)
    assert not started(node, first) - {"mcdaemon-early.service"}, "nothing else had started"
    assert node.machine.read("/run/workload-saw") == "old\n" and node.machine.read("/usr/local/bin/tool") == "old\n"
    assert tick(node) == 0
    rests_on(node, "50-new")
    assert node.machine.read("/usr/local/bin/tool") == "new\n"
    no_leftovers(node)


def test_a_boot_with_no_update_in_flight_is_left_alone(aged: Aged) -> None:
    node = aged(config("old"))
    assert "early: nothing: no update is in flight" in node.machine.journal(
        "mcdaemon-early.service", node.machine.boot_id
    )
