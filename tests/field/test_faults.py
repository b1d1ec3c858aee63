"""Things go wrong in the middle of an update: rpm-ostreed, other clients, ostree, the agent itself, the power."""

from __future__ import annotations

import json
import subprocess

import pytest

from tests.field.conftest import MakeNode, Push
from tests.field.evidence import (
    ARCHIVE,
    NEW,
    NEWEST,
    OLD,
    faults,
    fifo,
    fingerprint,
    is_new,
    is_old,
    journal,
    no_leftovers,
    open_gate,
    rests_on,
    settle,
    status,
    stop_after,
    through_gate,
    transactions,
)
from tests.stand.configs import machine_config
from tests.stand.images import Directory, File
from tests.stand.incidents import naive, usbguard
from tests.stand.node import SOURCE, Node, next_image

pytestmark = pytest.mark.stand

# -- rpm-ostreed ------------------------------------------------------------------------------------------------------

IMAGE_STEPS = ("after-manifest", "after-layer-1", "before-stage", "after-stage-before-finished")


def test_rpm_ostreed_dies_after_it_has_staged_and_the_next_round_takes_or_replaces_that(node: Node) -> None:
    """rpm-ostree.md 7 row 10: whether it had worked is not in `Finished`, it never came."""
    faults(node, crash="after-stage-before-finished", once=True)
    node.desire(first=machine_config("50-app", files={"/etc/app.conf": "x"}, kernel_arguments=["nosmt"]))
    said = node.once(expect=3)
    assert "rpm-ostreed went away" in said and status(node)["state"] == "Working"
    through_gate(node)
    assert node.boots == 1
    rests_on(node, "50-app")


@pytest.mark.parametrize("step", IMAGE_STEPS)
def test_rpm_ostreed_dies_while_it_pulls_an_image_and_the_next_round_succeeds(
    make_node: MakeNode, push: Push, step: str
) -> None:
    target = push(next_image("417.94.30", {"usr/share/stand/x": File(b"x" * 1000)}), "os:v30")
    node = make_node()
    before = fingerprint(node)
    faults(node, crash=step, once=True)
    node.desire(first=machine_config("50-app", os_image=target, kernel_arguments=["nosmt"]))
    said = node.once(expect=3)
    assert "rpm-ostreed went away" in said and status(node)["state"] == "Working"
    after = fingerprint(node)
    assert (after.etc, after.shared, after.default) == (before.etc, before.shared, before.default)
    assert not node.machine.exists("/run/undrained")
    through_gate(node)
    assert node.boots == 1 and "417.94.30" in node.machine.read("/etc/os-release")
    rests_on(node, "50-app")


def test_a_foreign_transaction_is_waited_for(node: Node) -> None:
    """TXN-21, rpm-ostree.md 7 row 1: another client is at work; nothing of it is disturbed, then the update goes on."""
    pipe = fifo(node)
    faults(node, hold={"at": "after-start", "fifo": pipe}, once=True)
    foreign = node.machine.start(
        ["/usr/bin/python3", "-m", "tests.stand.naive", "{}", json.dumps({"no-pull-base": True})],
        env={"PYTHONPATH": SOURCE},
    )
    writer = node.machine.start(
        ["sh", "-c", f"exec 9>{pipe}; echo reached; read line"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert writer.stdout is not None
    assert writer.stdout.readline() == "reached\n"
    node.desire(first=machine_config("50-app", kernel_arguments=["nosmt"]))
    said = node.once(expect=3)
    assert "Transaction in progress" in said and status(node)["state"] == "Working"
    assert "another program" in said
    writer.communicate("\n", timeout=10)
    foreign.wait(20)
    through_gate(node)
    rests_on(node, "50-app")


def test_a_lock_that_somebody_else_holds_is_waited_for(node: Node) -> None:
    """rpm-ostree.md 7 row 2: `ostree admin` or bootc has the sysroot."""
    faults(node, busy=True, once=True)
    node.desire(first=machine_config("50-app", kernel_arguments=["nosmt"]))
    said = node.once(expect=3)
    assert "System transaction in progress" in said and status(node)["state"] == "Working"
    through_gate(node)
    rests_on(node, "50-app")


def test_a_permanent_failure_is_dropped_once_and_remembered_until_somebody_says_retry(old: Node) -> None:
    text = "Packages not found: nonsuch"
    faults(old, fail={"at": "after-start", "text": text}, methods=["KernelArgs"])
    old.desire(first=NEW)
    said = old.once(expect=3)
    assert said.count(text) >= 1
    tried = transactions(old).count("KernelArgs")
    found = status(old)
    assert text in found["failed"] and found["state"] == "Degraded" and found["step"] == "hold"
    old.once(expect=3)
    assert transactions(old).count("KernelArgs") == tried == 1, "not tried again by itself (TXN-40)"
    is_old(old)
    no_leftovers(old)
    faults(old)
    old.once(expect=3)
    assert text in old.mcdaemon("retry").stdout
    through_gate(old)
    is_new(old)
    rests_on(old, "50-new")
    assert status(old)["failed"] == ""


def test_after_a_failed_target_another_config_goes_on_by_itself(old: Node) -> None:
    faults(old, fail={"at": "after-start", "text": "Packages not found: nonsuch"}, once=True)
    old.desire(first=NEW)
    old.once(expect=3)
    settle(old, first=NEWEST)
    rests_on(old, "50-newest")


def test_a_failed_target_is_forgotten_when_the_old_config_is_desired_again(old: Node) -> None:
    faults(old, fail={"at": "after-start", "text": "Packages not found: nonsuch"}, once=True)
    old.desire(first=NEW)
    old.once(expect=3)
    old.desire(first=OLD)
    old.once()
    assert status(old)["state"] == "Done"
    is_old(old)


@pytest.mark.parametrize("text", ["cannot fetch: i/o timeout", "No space left on device"])
def test_a_passing_failure_is_held_and_tried_again(node: Node, text: str) -> None:
    faults(node, fail={"at": "after-start", "text": text}, once=True)
    node.desire(first=machine_config("50-app", files={"/etc/app.conf": "x"}))
    assert text in node.once(expect=3)
    assert status(node)["state"] == "Working"
    through_gate(node)
    rests_on(node, "50-app")


# -- other hands on the stage -----------------------------------------------------------------------------------------


def test_what_somebody_else_staged_is_cleaned_up_before_ours(node: Node) -> None:
    """TXN-01, TXN-36: their package would come along."""
    rpm = usbguard(node.machine.folder)
    node.machine.write(f"/var/rpms/{rpm.name}", rpm.read_bytes())
    node.machine.write("/etc/yum.repos.d/hand.repo", "[hand]\nname=hand\nbaseurl=file:///var/rpms/\nenabled=1\n")
    done, text = naive(node, {"install-packages": ["usbguard"]}, {})
    assert done, text
    foreign = [d.name for d in node.machine.deployments() if d.staged]
    settle(node, first=machine_config("50-app", files={"/etc/app.conf": "x"}))
    assert node.boots == 1 and node.machine.booted().name not in foreign
    assert node.machine.run(["sh", "-c", "command -v usbguard"], check=False).returncode != 0
    rests_on(node, "50-app")


@pytest.mark.parametrize("how", ["ostree", "rpm-ostree"])
def test_somebody_cleans_up_our_staged_deployment_while_we_wait_for_the_drain(old: Node, how: str) -> None:
    old.desire(first=NEW)
    old.once(expect=3)
    if how == "ostree":
        old.machine.run(["ostree", "admin", "undeploy", "0"])
    else:
        cleanup_pending(old)
    assert not any(d.staged for d in old.machine.deployments())
    boots = old.boots
    through_gate(old)
    assert old.boots == boots + 1
    is_new(old)
    rests_on(old, "50-new")


def cleanup_pending(node: Node) -> None:
    """What `rpm-ostree cleanup -p` does."""
    script = (
        "from mcdaemon.host.bus import Bus, Systemd\n"
        "from mcdaemon.host.rpmostree import RpmOstree\n"
        "bus = Bus()\n"
        "RpmOstree(bus, Systemd(bus)).cleanup('pending-deploy')\n"
    )
    node.machine.run(["/usr/bin/python3", "-c", script], env={"PYTHONPATH": ARCHIVE})


def test_somebody_stages_over_ours_while_we_wait_for_the_drain(old: Node) -> None:
    """TXN-43: a kernel argument by hand on top of ours; what boots has to be what was asked for."""
    old.desire(first=NEW)
    old.once(expect=3)
    old.machine.run(["ostree", "admin", "deploy", "--stage", "--karg-append=by-hand", old.machine.booted().checksum])
    through_gate(old)
    assert "by-hand" not in old.machine.read("/proc/cmdline")
    is_new(old)
    rests_on(old, "50-new")


# -- a target that cannot be ------------------------------------------------------------------------------------------


def test_an_owner_that_the_target_does_not_know_is_said_with_its_file_before_the_drain(old: Node) -> None:
    before = fingerprint(old)
    document = json.loads(NEW)
    document["spec"]["config"]["storage"]["files"][2]["user"] = {"name": "nobody-knows-me"}
    open_gate(old)
    old.desire(first=json.dumps(document))
    said = old.once(expect=3)
    assert "drain:" not in said
    assert "nobody-knows-me" in status(old)["failed"] and "/etc/only-new" in status(old)["failed"]
    assert fingerprint(old) == before
    no_leftovers(old)


# -- finalization -----------------------------------------------------------------------------------------------------


def test_a_merge_that_would_fail_is_said_before_the_drain_and_nothing_is_drained(
    make_node: MakeNode, push: Push
) -> None:
    """rpm-ostree.md 5.3: a local file where the new image has a directory."""
    target = push(next_image("417.94.31", {"usr/etc/thing": Directory(), "usr/etc/thing/inner": File(b"x")}), "os:v31")
    node = make_node()
    settle(node, first=OLD)
    node.machine.write("/etc/thing", "a file of the administrator\n")
    open_gate(node)
    node.machine.run(["rm", "-f", "/run/undrained"])
    boots = node.boots
    node.desire(first=machine_config("50-new", files={"/etc/app.conf": "new\n"}, os_image=target))
    said = node.once(expect=3)
    assert "/etc/thing" in said or "thing" in said
    assert "drain:" not in said and not node.machine.exists("/run/undrained") and node.boots == boots
    assert "thing" in status(node)["failed"]
    is_old(node)
    no_leftovers(node)
    node.machine.run(["rm", "/etc/thing"])
    node.mcdaemon("retry")
    through_gate(node)
    assert node.machine.read("/etc/thing/inner") == "x"
    rests_on(node, "50-new")


def test_a_finalization_that_really_fails_puts_the_node_back_to_work(old: Node) -> None:
    """TXN-31, STATE-21: seen while the old is up, once, with no reboot for nothing."""
    boots, before = old.boots, fingerprint(old)
    old.desire(first=NEW)
    old.once(expect=3)
    open_gate(old)
    # Between the prediction and the merge somebody makes a FIFO in a directory of /etc that old libostree cannot copy.
    old.machine.run(["sh", "-c", "mkdir /etc/odd && mkfifo /etc/odd/pipe"])
    said = old.once(expect=3)
    assert "cannot finalize" in said, said
    assert old.machine.exists("/run/undrained"), "taken back to work at once"
    old.machine.run(["rm", "/run/undrained"])
    said = old.once(expect=3)
    assert "odd/pipe" in said and "drain:" not in said, "the next verification sees it, before the next drain (TXN-45)"
    found = status(old)
    assert old.boots == boots and found["state"] == "Degraded" and "finalize" in found["failed"]
    assert not old.machine.exists("/run/undrained")
    is_old(old)
    old.machine.run(["rm", "-r", "/etc/odd"])
    assert fingerprint(old) == before
    no_leftovers(old)
    old.mcdaemon("retry")
    through_gate(old)
    is_new(old)
    rests_on(old, "50-new")


# -- a change of mind -------------------------------------------------------------------------------------------------


def test_the_desired_config_goes_back_while_the_node_waits_for_its_drain(old: Node) -> None:
    """STATE-29, REBOOT-17."""
    boots, before = old.boots, fingerprint(old)
    old.desire(first=NEW)
    old.once(expect=3)
    old.desire(first=OLD)
    old.once()
    assert old.boots == boots and fingerprint(old) == before
    rests_on(old, "50-old")


def test_a_newer_config_replaces_the_one_that_waits_for_its_drain(old: Node) -> None:
    boots = old.boots
    old.desire(first=NEW)
    old.once(expect=3)
    old.desire(first=NEWEST)
    through_gate(old)
    assert old.boots == boots + 1, "the one in between costs no reboot"
    assert old.machine.read("/usr/local/bin/tool") == "newest\n" and not old.machine.exists("/etc/only-new")
    rests_on(old, "50-newest")


@pytest.mark.parametrize("step", ["finalize", "verify-root"])
def test_a_change_of_mind_after_the_drain_leaves_no_trace(old: Node, step: str) -> None:
    """P7: the old config is desired again just before the reboot: there is none, and everything is back."""
    boots, before = old.boots, fingerprint(old)
    old.desire(first=NEW)
    open_gate(old)
    stop_after(old, step)
    old.desire(first=OLD)
    old.once()
    assert old.boots == boots
    assert journal(old)["update"] is None
    is_old(old)
    assert fingerprint(old).but_for_rollback() == before.but_for_rollback()
    assert old.machine.exists("/run/undrained")
    rests_on(old, "50-old")


def test_a_blocked_reboot_is_said_and_goes_on_when_the_block_is_gone(node: Node) -> None:
    """REBOOT-12, rpm-ostree.md 7 row 47."""
    blocker = node.machine.start(
        ["systemd-inhibit", "--what=shutdown", "--mode=block", "--who=backup", "--why=a backup runs", "sleep", "600"]
    )
    try:
        open_gate(node)
        node.desire(first=OLD)
        said = node.once(expect=3)
        assert "backup" in said and "a backup runs" in said
        found = status(node)
        assert found["state"] == "Working" and node.boots == 0
    finally:
        node.machine.stop_process(blocker)
    through_gate(node)
    assert node.boots == 1
    rests_on(node, "50-old")
