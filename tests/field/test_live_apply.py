"""Changes that need no reboot: written, acted upon, proved; undone as a whole when any of that fails."""

from __future__ import annotations

import pytest

from tests.field.conftest import Aged
from tests.field.evidence import (
    Agent,
    fingerprint,
    journal,
    no_leftovers,
    open_gate,
    rests_on,
    status,
    stop_after,
    tick,
    transactions,
)
from tests.stand.configs import FileText, machine_config
from tests.stand.node import Node

pytestmark = pytest.mark.stand

POLICY = "/etc/containers/policy.json"
GOOD = '{"default": [{"type": "insecureAcceptAnything"}]}\n'
BETTER = '{"default": [{"type": "insecureAcceptAnything"}], "transports": {}}\n'
BAD = '{"default": []} this makes crio fail\n'
REGISTRIES = "/etc/containers/registries.d"
FILES: dict[str, FileText] = {
    POLICY: (GOOD, 0o640), f"{REGISTRIES}/gone.yaml": "docker: {}\n", "/etc/app.conf": "stays\n",
}  # fmt: skip
OLD = machine_config("50-old", files=FILES)
# A reload records itself, and fails for a policy that it cannot read or while somebody says so.
CRIO = """\
[Service]
Type=simple
ExecStart=/bin/sleep 100000
ExecReload=/bin/sh -c 'echo reload >>/run/reloads; test ! -e /run/refuse'
ExecReload=/bin/sh -c '! grep -q "makes crio fail" /etc/containers/policy.json'
"""


@pytest.fixture
def node(aged: Aged) -> Node:
    """A node that rests on OLD, with a crio.service whose reloads are recorded."""
    made = aged(OLD)
    made.machine.write("/run/systemd/system/crio.service", CRIO)
    made.machine.run(["systemctl", "daemon-reload"])
    made.machine.run(["systemctl", "start", "crio.service"])
    return made


def reloads(node: Node) -> int:
    return len(node.machine.read("/run/reloads").splitlines()) if node.machine.exists("/run/reloads") else 0


def changed(policy: str) -> str:
    """OLD with another policy, one file less and one more."""
    return machine_config(
        "50-new", files={POLICY: (policy, 0o644), f"{REGISTRIES}/new.yaml": "docker: {}\n", "/etc/app.conf": "stays\n"}
    )


def test_a_policy_file_changes_with_a_reload_and_nothing_else(node: Node) -> None:
    boot, counters = node.machine.boot_id, node.machine.read("/var/lib/mcdaemon/counters.json")
    node.desire(first=changed(BETTER))
    assert tick(node) == 0
    assert node.machine.boot_id == boot and transactions(node) == []
    assert (node.machine.read(POLICY), node.mode(POLICY)) == (BETTER, 0o644) and reloads(node) == 1
    assert not node.machine.exists(f"{REGISTRIES}/gone.yaml")
    assert not node.machine.exists("/run/undrained"), "no workload had to move"
    assert counters.count("reboots") == node.machine.read("/var/lib/mcdaemon/counters.json").count("reboots")
    rests_on(node, "50-new")


def test_a_path_that_disturbs_nobody_is_written_without_any_action(node: Node) -> None:
    files: dict[str, FileText] = {**FILES, "/var/lib/kubelet/config.json": ('{"auths": {}}\n', 0o600)}
    node.desire(first=machine_config("50-new", files=files, ssh_keys=["ssh-ed25519 AAAA one@stand"]))
    assert tick(node) == 0
    assert node.boots == 0 and reloads(node) == 0 and node.mode("/var/lib/kubelet/config.json") == 0o600
    assert (
        "one@stand"
        in node.machine.run(
            ["sh", "-c", "cat /var/home/core/.ssh/authorized_keys*/* /var/home/core/.ssh/authorized_keys 2>/dev/null"],
            check=False,
        ).stdout
    )
    rests_on(node, "50-new")


def test_a_reload_that_fails_undoes_everything(node: Node) -> None:
    """TXN-11: the end of the job is waited for, and its result counts."""
    before = fingerprint(node)
    node.desire(first=changed(BAD))
    assert tick(node) == 3
    assert fingerprint(node) == before, "content, mode, new files and removed files are as they were"
    assert reloads(node) == 2, "crio has seen the old policy again"
    found = status(node)
    assert found["state"] == "Degraded" and "crio.service" in found["failed"]
    no_leftovers(node)
    assert tick(node) == 3 and reloads(node) == 2, "not tried again by itself"
    node.desire(first=changed(BETTER))
    assert tick(node) == 0
    rests_on(node, "50-new")


def test_a_service_that_can_never_reload_does_not_keep_the_node_from_its_way_back(node: Node) -> None:
    before = fingerprint(node)
    node.machine.write("/run/refuse", "")
    node.desire(first=changed(BETTER))
    assert tick(node) == 3
    assert fingerprint(node) == before
    assert journal(node)["update"] is None
    no_leftovers(node)
    node.desire(first=OLD)
    assert tick(node) == 0
    rests_on(node, "50-old")


def test_a_reload_of_a_unit_that_is_not_there_is_said(aged: Aged) -> None:
    bare = aged(OLD)
    before = fingerprint(bare)
    bare.desire(first=changed(BETTER))
    assert tick(bare) == 3
    assert "crio.service" in status(bare)["failed"]
    assert fingerprint(bare) == before


def test_a_change_that_moves_workloads_waits_for_the_drain_before_it_writes(node: Node) -> None:
    """registries.conf: Special (mcd.md 3.8)."""
    text = 'unqualified-search-registries = ["other.invalid"]\n'
    files: dict[str, FileText] = {**FILES, "/etc/containers/registries.conf": text}
    before = fingerprint(node)
    node.desire(first=machine_config("50-new", files=files))
    assert tick(node) == 3 and status(node)["state"] == "Working"
    assert fingerprint(node) == before
    open_gate(node)
    assert tick(node) == 0
    assert node.boots == 0 and node.machine.exists("/run/undrained") and reloads(node) == 1
    rests_on(node, "50-new")


def test_the_desired_config_goes_back_while_a_live_change_waits_for_its_drain(node: Node) -> None:
    files: dict[str, FileText] = {**FILES, "/etc/containers/registries.conf": "\n"}
    before = fingerprint(node)
    node.desire(first=machine_config("50-new", files=files))
    assert tick(node) == 3
    node.desire(first=OLD)
    assert tick(node) == 0
    assert fingerprint(node) == before and reloads(node) == 0
    rests_on(node, "50-old")


def test_an_agent_that_is_killed_in_a_live_change_completes_it(node: Node) -> None:
    node.desire(first=changed(BETTER))
    agent = Agent.start(node)
    agent.wait_for("apply-live: ")
    agent.kill()
    assert tick(node) == 0
    assert reloads(node) >= 1
    rests_on(node, "50-new")


def test_a_power_cut_after_a_live_change_was_applied_confirms_it_after_the_boot(node: Node) -> None:
    node.desire(first=changed(BETTER))
    stop_after(node, "apply-live")
    node.machine.power_cut()
    assert node.machine.boot() == 1
    assert node.machine.read(POLICY) == BETTER
    assert tick(node) == 0
    rests_on(node, "50-new")


def test_a_change_of_mind_in_the_middle_of_a_live_change_takes_it_back(node: Node) -> None:
    before = fingerprint(node)
    node.desire(first=changed(BETTER))
    agent = Agent.start(node)
    agent.wait_for("apply-live: ")
    agent.kill()
    node.desire(first=OLD)
    assert tick(node) == 0
    assert fingerprint(node) == before
    rests_on(node, "50-old")
