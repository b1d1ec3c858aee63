"""A target that reaches userspace and is not healthy is taken back once, by itself (P6)."""

from __future__ import annotations

import json

import pytest

from tests.field.conftest import Aged, Push
from tests.field.evidence import (
    ARCHIVE,
    STATE,
    Agent,
    boot_by_hand,
    deployment_etc,
    faults,
    fingerprint,
    journal,
    no_leftovers,
    rests_on,
    status,
    stop_after,
    tick,
    transactions,
    tree,
    validated,
)
from tests.stand.configs import FileText, Unit, machine_config
from tests.stand.node import Node, next_image

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
    assert "not desired" in node.mcdaemon("retry").stdout, "nothing is promised that is not done"
    node.update()
    rests_on(node, "50-newest")
    assert node.machine.read("/usr/local/bin/tool") == "newest\n"
    assert not node.machine.exists("/usr/local/bin/only-new"), "of the config whose deployment is not booted"


def test_the_config_of_an_old_entry_that_was_chosen_is_told_apart_from_the_files_of_the_newer_one(
    chosen: tuple[Node, str, str],
) -> None:
    """Nobody changed them by hand, and `retry` would not change them; the newer entry is the way to all of it."""
    node, _old, new = chosen
    node.desire(first=OLD)
    before = fingerprint(node)
    assert tick(node) == 1 and fingerprint(node) == before
    found = status(node)
    assert found["state"] == "Degraded"
    assert "still those of 50-new" in found["why"] and new in found["why"] and "/usr/local/bin/tool" in found["why"]
    said = node.mcdaemon("retry").stdout
    assert "not desired" in said and "will be tried" not in said
    node.machine.power_cut()
    node.machine.boot()
    node.update()
    rests_on(node, "50-old")
    assert node.machine.read("/usr/local/bin/tool") == "old\n" and not node.machine.exists("/usr/local/bin/only-new")


# -- a target that cannot be dropped ----------------------------------------------------------------------------------

DRAINED = SHORT + "drain: {command: [/usr/bin/touch, /var/drained], undo: [/bin/rm, -f, /var/drained]}\n"


@pytest.fixture
def pinned(aged: Aged) -> tuple[Node, str]:
    """A node whose target was proved, then pinned, then is not desired any more; and the target's deployment."""
    node = aged(OLD, settings=DRAINED)
    node.desire(first=NEW)
    stop_after(node, "verify-root")
    node.machine.run(["ostree", "admin", "pin", "0"])
    target = node.machine.default_entry().deployment
    node.desire(first=OLD)
    assert tick(node) == 3
    return node, target


def test_a_pinned_target_keeps_its_files_and_the_node_works_until_it_is_unpinned(pinned: tuple[Node, str]) -> None:
    """rpm-ostree's cleanup reports success and keeps it; half a config must not be what boots next."""
    node, target = pinned
    assert node.machine.default_entry().deployment == target and node.machine.read("/usr/local/bin/tool") == "new\n"
    assert journal(node)["update"]["proved"] == target and not node.machine.exists("/var/drained")
    found = status(node)
    assert found["state"] != "Done" and target in found["error"] and "ostree admin pin --unpin 0" in found["error"]
    node.machine.run(["ostree", "admin", "pin", "--unpin", "0"])
    node.update()
    rests_on(node, "50-old")
    assert node.boots == 0 and node.machine.read("/usr/local/bin/tool") == "old\n"
    assert not node.machine.exists("/usr/local/bin/only-new")


def test_a_reboot_into_a_pinned_target_finds_all_of_it_and_leads_back(pinned: tuple[Node, str]) -> None:
    node, target = pinned
    node.machine.reboot()
    assert node.machine.booted().name == target
    assert node.machine.read("/etc/app.conf") == node.machine.read("/usr/local/bin/tool") == "new\n"
    validated(node)
    node.update()
    rests_on(node, "50-old")
    assert node.machine.read("/usr/local/bin/tool") == "old\n" and not node.machine.exists("/usr/local/bin/only-new")


def test_a_pinned_target_that_is_desired_again_is_drained_for_before_its_reboot(pinned: tuple[Node, str]) -> None:
    node, target = pinned
    node.desire(first=NEW)
    stop_after(node, "reboot")
    assert node.machine.exists("/var/drained")
    node.follow_reboot()
    tick(node)
    assert node.machine.booted().name == target and not node.machine.exists("/var/drained")
    rests_on(node, "50-new")


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


# -- what comes back --------------------------------------------------------------------------------------------------


def everything(node: Node) -> dict[str, str]:
    """/etc of the running root and all that is shared by the deployments, but for the agent's own state and logs."""
    var = node.machine.sysroot.stateroot / "var"
    found = {f"etc/{path}": what for path, what in deployment_etc(node, node.machine.booted().name).items()}
    for folder in ("usrlocal", "roothome", "home", "opt"):
        found.update({f"{folder}/{path}": what for path, what in tree(var / folder).items()})
    return found


def test_the_way_back_restores_modes_links_directories_removed_and_new_files_and_passwords(aged: Aged) -> None:
    """What was outside /etc is shared with the target, and so was overwritten; all of it is as before, bit for bit."""
    before = machine_config("50-old", files={
        "/etc/app.conf": "old\n", "/usr/local/bin/tool": ("old\n", 0o755), "/usr/local/etc/deep/er/old.conf": "old\n",
        "/usr/local/share/secret": ("old\n", 0o600), "/usr/local/share/same": "same\n"})  # fmt: skip
    after = machine_config("50-new", ssh_keys=["ssh-ed25519 AAAA new"], files={
        "/etc/app.conf": "new\n", "/usr/local/bin/tool": ("new\n", 0o700), "/usr/local/bin/only-new": "x",
        "/usr/local/share/secret/inside": "x", "/usr/local/share/same": ("same\n", 0o666), "/usr/local/link": "x",
        "/usr/local/new/directory/file": "x"})  # fmt: skip
    with_password = json.loads(after)
    with_password["spec"]["config"]["passwd"]["users"][0]["passwordHash"] = "$6$new"
    node = aged(before, settings=SHORT)
    machine, old = node.machine, node.machine.booted().name
    machine.run(["sh", "-c", "ln -s bin/tool /usr/local/link; chown 7:7 /usr/local/share/same"])
    machine.run(["chmod", "4711", "/usr/local/bin/tool"])
    machine.run(["rm", "/usr/local/share/secret"])
    machine.run(["mkdir", "-m", "1750", "/usr/local/share/secret"])
    machine.write("/usr/local/share/secret/mine", "mine\n")
    machine.write(CHECK, '#!/bin/sh\ntest "$(cat /etc/app.conf)" = old\n', 0o755)
    was, shadow = everything(node), machine.read("/etc/shadow")
    node.desire(first=json.dumps(with_password))
    tick(node)
    assert node.boots == 1 and machine.read("/usr/local/link") == "x" and "$6$new" in machine.read("/etc/shadow")
    assert machine.exists("/usr/local/share/secret/inside") and machine.exists("/usr/local/new/directory/file")
    until(node, 2)
    assert machine.booted().name == old
    assert everything(node) == was and machine.read("/etc/shadow") == shadow
    no_leftovers(node)


# -- the way back itself is interrupted -------------------------------------------------------------------------------

# The way back as the agent takes it, ended without a word at one of its effects.
_STOP_IN_THE_WAY_BACK = """
import os, sys
from pathlib import Path
from mcdaemon import assembly, cli, settings
from mcdaemon.agent import Agent, make_places
from mcdaemon.perform import Performer
from mcdaemon.report.notify import Notifier
from mcdaemon.reporter import Reporter
from mcdaemon.update import rollback
point = sys.argv[1]
def after(owner, name):
    real = getattr(owner, name)
    def stopped(*arguments, **named):
        real(*arguments, **named)
        os._exit(0)
    setattr(owner, name, stopped)
if point == "noted":
    rollback.to_source = lambda *arguments: os._exit(0)
elif point == "switched":
    after(rollback, "to_source")
else:
    Performer._ask_for_reboot = lambda self: os._exit(0)
cli._log_to_stderr(False)
context = assembly.assemble(settings.load())
make_places(context)
Performer(context).sweep()
agent = Agent(context, Reporter(Path(context.settings.state_dir), context.runtime), Notifier())
while True:
    agent.round()
"""


@pytest.mark.parametrize("end", ["power-cut", "kill"])
@pytest.mark.parametrize("point", ["noted", "switched", "about-to-ask"])
def test_a_way_back_that_is_interrupted_at_any_of_its_effects_ends_in_the_old_config_once(
    aged: Aged, point: str, end: str
) -> None:
    node = aged(OLD, settings=SHORT)
    old = node.machine.booted().name
    node.machine.write(CHECK, '#!/bin/sh\ntest "$(cat /etc/app.conf)" = old\n', 0o755)
    node.desire(first=NEW)
    tick(node)
    assert node.boots == 1 and node.machine.read("/usr/local/bin/tool") == "new\n"
    script = ["/usr/bin/python3", "-c", _STOP_IN_THE_WAY_BACK, point]
    node.machine.run(script, env={"PYTHONPATH": ARCHIVE})
    assert journal(node)["update"]["rolled_back"], "what is about to be done is on the disk before it is done"
    if end == "power-cut":
        node.machine.power_cut()
        node.machine.boot()
        here = "new" if point == "noted" else "old"
        assert node.machine.read("/usr/local/bin/tool") == f"{here}\n", "before the agent has run"
    for _round in range(4):
        if journal(node)["update"] is None:
            break
        tick(node)
    is_back(node, old)
    found = status(node)
    assert found["state"] == "Degraded" and found["failed_config"] == "50-new" and "10-check.sh" in found["failed"]
    boots = node.boots
    assert tick(node) == 3 and node.boots == boots
    no_leftovers(node)


def test_an_old_config_that_is_not_healthy_either_is_not_left_again(aged: Aged) -> None:
    """No ping-pong: the gate is for targets. The node stays where it was, says so, and waits for a decision."""
    node = aged(OLD, settings=SHORT)
    old = node.machine.booted().name
    node.machine.write(CHECK, "#!/bin/sh\nexit 1\n", 0o755)
    node.desire(first=NEW)
    until(node, 2)
    for _round in range(3):
        assert tick(node) == 3
    assert node.boots == 2
    is_back(node, old)
    assert status(node)["state"] == "Degraded"


# -- the way back is barred -------------------------------------------------------------------------------------------


def test_a_way_back_whose_deployment_is_gone_is_told_and_the_node_stays_up(aged: Aged) -> None:
    """Somebody has removed the rollback entry. No reboot loop, and another config starts from where the node is."""
    node = aged(OLD, settings=SHORT)
    old = node.machine.booted().name
    node.machine.write(CHECK, '#!/bin/sh\ntest "$(cat /etc/app.conf)" != new\n', 0o755)
    node.desire(first=NEW)
    tick(node)
    tick(node)
    node.machine.run(["ostree", "admin", "undeploy", "1"])
    for _round in range(8):
        said = node.mcdaemon("run", "--once", check=False)
        if "cannot roll back" in said.stderr:
            break
    assert old in said.stderr and said.returncode == 1 and status(node)["state"] == "Degraded"
    for _round in range(2):
        assert tick(node) == 3
        found = status(node)
        assert (found["state"], found["step"], found["failed_config"]) == ("Degraded", "hold", "50-new")
        assert "no way back" in found["why"] and "10-check.sh" in found["why"]
    assert node.boots == 1 and node.machine.read("/etc/app.conf") == "new\n"
    node.desire(first=NEWEST)
    until(node, 2)
    for _round in range(2):
        tick(node)
    rests_on(node, "50-newest")


def test_a_failed_target_without_a_way_back_that_becomes_healthy_is_kept(aged: Aged) -> None:
    node = aged(OLD, settings=SHORT)
    node.machine.write(CHECK, '#!/bin/sh\ntest -e /run/repaired || test "$(cat /etc/app.conf)" = old\n', 0o755)
    node.desire(first=NEW)
    tick(node)
    tick(node)
    node.machine.run(["ostree", "admin", "undeploy", "1"])
    for _round in range(8):
        if "no way back" in node.mcdaemon("run", "--once", check=False).stderr:
            break
    node.machine.write("/run/repaired", "")
    assert tick(node) == 0
    rests_on(node, "50-new")
    assert status(node)["failed"] == "" and node.boots == 1


@pytest.mark.parametrize("fault", ["fail", "crash"])
def test_a_way_back_that_rpm_ostree_refuses_is_tried_until_it_succeeds(aged: Aged, fault: str) -> None:
    node = aged(OLD, settings=SHORT)
    old = node.machine.booted().name
    node.machine.write(CHECK, '#!/bin/sh\ntest "$(cat /etc/app.conf)" = old\n', 0o755)
    node.desire(first=NEW)
    tick(node)
    at = "after-start" if fault == "crash" else {"at": "after-start", "text": "No space left on device"}
    faults(node, methods=["Rollback"], **{fault: at})
    for _round in range(8):
        said = node.mcdaemon("run", "--once", check=False)
        if "roll-back: " in said.stderr:
            break
    assert said.returncode in (1, 3) and node.boots == 1 and node.machine.booted().name != old
    assert status(node)["error"] and journal(node)["update"]["rolled_back"]
    assert node.mcdaemon("run", "--once", check=False).returncode in (1, 3)
    found = status(node)
    assert "Rollback" in found["error"] and found["failed_config"] == "50-new" and node.boots == 1
    faults(node)
    until(node, 2)
    is_back(node, old)


def test_a_payload_that_is_torn_when_the_target_has_booted_takes_it_back(aged: Aged) -> None:
    """Without it nobody can tell whether the target is what was asked for."""
    node = aged(OLD, settings=PATIENT)
    old = node.machine.booted().name
    node.desire(first=NEW)
    tick(node)
    for path in (node.machine.sysroot.stateroot / STATE.lstrip("/") / "payload").glob("*/payload.json"):
        path.write_bytes(path.read_bytes()[:-40])
    until(node, 2)
    is_back(node, old)
    assert "payload" in status(node)["failed"] and status(node)["failed_config"] == "50-new"


# -- remembered by config and digest ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_failed_image_is_remembered_by_config_and_digest_and_a_moved_tag_is_not_tried_by_itself(
    aged: Aged, push: Push
) -> None:
    """TXN-40. A tag that was moved is a new target only when somebody says so; another config with the same image may
    repair what was wrong, so it is tried, and it is said that this image has failed before."""
    first = push(next_image("417.94.61"), "health:rolling")
    host, _at, digest = first.partition("@")
    node = aged(OLD, settings=SHORT)
    old = node.machine.booted().name
    node.machine.write(CHECK, "#!/bin/sh\n! grep -q 417.94.61 /usr/lib/os-release || test -e /etc/repair\n", 0o755)
    wish: dict[str, FileText] = {"/etc/app.conf": "old\n", "/usr/local/bin/tool": ("old\n", 0o755)}
    node.desire(first=machine_config("50-image", files=wish, os_image=f"{host}:rolling"))
    until(node, 2)
    assert node.machine.booted().name == old
    found = status(node)
    assert (found["failed_config"], found["failed_digest"]) == ("50-image", digest)
    assert digest in node.mcdaemon("status").stdout
    push(next_image("417.94.62"), "health:rolling")
    assert tick(node) == 3 and node.boots == 2 and status(node)["failed_digest"] == digest
    node.desire(first=machine_config("50-repair", files={**wish, "/etc/repair": ""}, os_image=first))
    warned = until_warned(node, digest)
    assert f"50-repair goes to {digest}, which has failed before, with 50-image: " in warned
    until(node, 3)
    rests_on(node, "50-repair")


def until_warned(node: Node, digest: str) -> str:
    """The warning while the update goes to that digest; taken from the log of the run that leads into the reboot."""
    agent = Agent.start(node)
    agent.wait_for("verify-staged: ")
    agent.wait()
    node.follow_reboot()
    assert digest in agent.text()
    return agent.text()


# -- back to work -----------------------------------------------------------------------------------------------------

UNDO = "drain: {command: [/bin/true], undo: [/bin/sh, -c, 'test -e /run/api && echo >>/var/lib/undone']}\n"


def test_a_node_is_taken_back_to_work_until_that_is_acknowledged_after_a_good_verdict(aged: Aged) -> None:
    """STATE-10: the API server is away for long; what fails meanwhile does not take a target back that was well."""
    node = aged(OLD, settings=SHORT + UNDO)
    node.desire(first=NEW)
    tick(node)
    assert node.boots == 1
    for _round in range(2):
        assert tick(node) == 3
        found = journal(node)["update"]
        assert found is not None and found["draining"] and status(node)["state"] == "Working"
        assert "cannot take the node back to work" in status(node)["error"]
    node.machine.write(CHECK, '#!/bin/sh\ntest "$(cat /etc/app.conf)" = old\n', 0o755)
    for _round in range(4):  # beyond the deadline of the gate: what would be BAD now was GOOD before
        assert tick(node) == 3 and node.boots == 1
    node.machine.write("/run/api", "")
    assert tick(node) == 0
    rests_on(node, "50-new")
    assert node.machine.read("/var/lib/undone") == "\n", "once"


def test_a_power_cut_while_the_way_back_to_work_is_barred_forgets_nothing(aged: Aged) -> None:
    node = aged(OLD, settings=SHORT + UNDO)
    node.desire(first=NEW)
    tick(node)
    assert tick(node) == 3
    node.machine.power_cut()
    node.machine.boot()
    assert tick(node) == 3 and journal(node)["update"]["draining"]
    node.machine.write("/run/api", "")
    assert tick(node) == 0
    rests_on(node, "50-new")


def test_a_node_whose_update_is_discarded_is_taken_back_to_work_until_that_is_acknowledged(aged: Aged) -> None:
    """STATE-02, STATE-10: the reboot fails after it was noted, the config is withdrawn, and the API server is away."""
    node = aged(OLD, settings=SHORT + UNDO + "reboot: {command: [/bin/false]}\n")
    node.desire(first=NEW)
    assert tick(node) == 3
    found = journal(node)["update"]
    assert found["armed"] == "" and found["draining"], "a reboot that was refused is not waited for"
    node.desire(first=OLD)
    for _round in range(2):
        assert tick(node) == 3
        assert journal(node)["update"]["draining"] and "back to work" in status(node)["error"]
    node.machine.write("/run/api", "")
    assert tick(node) == 0
    rests_on(node, "50-old")
    assert node.machine.read("/var/lib/undone") == "\n" and node.boots == 0
