"""The client-visible quirks of rpm-ostreed, one by one: the checklist of rpm-ostree.md 6.4."""

from __future__ import annotations

import os

import pytest

from tests.component.conformance import samples
from tests.component.conformance.client import BUSY, FAILED, Peer, RemoteError, RpmOstree, iterate_until, variants
from tests.component.conformance.conftest import Node
from tests.stand.introspection import GLib
from tests.stand.machine import Down

pytestmark = pytest.mark.stand

BOTH = "(a{sv}a{sv})"


def held_update(node: Node) -> tuple[Peer, str, int]:
    """An update that waits before it stages; its peer, its address, and a descriptor whose end lets it go on."""
    node.machine.run(["mkfifo", "/var/tmp/fifo"])
    node.faults(hold={"at": "before-stage", "fifo": "/var/tmp/fifo"}, once=True)
    arguments = variants({"set-refspec": node.reference(samples.following())})
    address = str(node.client.os("UpdateDeployment", BOTH, arguments, variants({"initiating-command-line": "one"}))[0])
    peer = node.client.connect(address)
    assert peer.start()
    return peer, address, os.open(node.machine.sysroot.stateroot / "var/tmp/fifo", os.O_WRONLY)


def test_start_is_false_for_whoever_joins_and_finished_comes_again_for_them(node: Node) -> None:
    peer, address, gate = held_update(node)
    arguments = variants({"set-refspec": node.reference(samples.following())})
    again = node.client.os("UpdateDeployment", BOTH, arguments, variants({"initiating-command-line": "one"}))[0]
    assert again == address
    joined = node.client.connect(again)
    assert not joined.start()
    os.close(gate)
    assert peer.wait() == joined.wait() == (True, "")
    late = node.client.connect(node.client.get("ActiveTransactionPath"))
    assert late.finished == []
    assert not late.start()
    assert late.wait() == (True, "")
    assert not late.start()
    assert iterate_until(lambda: len(late.finished) == 2)
    for one in (peer, joined, late):
        one.close()
    node.client.wait_idle()


def test_the_transaction_path_is_a_constant_string(node: Node) -> None:
    address = "unix:path=/run/rpm-ostree-transaction.sock"
    for number in range(2):
        given = node.client.os("RefreshMd", "(a{sv})", {})[0]
        assert given == address == node.client.get("ActiveTransactionPath"), number
        peer = node.client.connect(given)
        peer.start()
        peer.wait()
        peer.close()
        node.client.wait_idle()


def test_a_transaction_is_active_before_it_is_started(node: Node) -> None:
    address = node.client.os("Cleanup", "(as)", ["repomd"])[0]
    method, sender, path = node.client.get("ActiveTransaction")
    assert (method, sender, path) == ("Cleanup", node.client.bus.get_unique_name(), node.client.os_path)
    peer = node.client.connect(address)
    assert peer.start()
    peer.wait()
    assert node.client.get("ActiveTransaction")[0] == "Cleanup", "it stays active until its peers are gone"
    peer.close()
    node.client.wait_idle()
    assert node.client.get("ActiveTransaction") == ("", "", "")


def test_deployments_come_staged_first_then_in_boot_order(node: Node) -> None:
    node.client.update({"set-refspec": node.reference(samples.following())})
    node.reboot()
    node.client.update({"set-refspec": node.reference(samples.base())})
    flags = [(one["staged"], one["booted"]) for one in node.client.get("Deployments")]
    assert flags == [(True, False), (False, True), (False, False)]


def test_the_title_changes_after_start(node: Node) -> None:
    arguments = variants({"set-refspec": node.reference(samples.following())})
    address = node.client.os("UpdateDeployment", BOTH, arguments, variants({"initiating-command-line": "mine:1"}))[0]
    peer = node.client.connect(address)
    assert peer.property("Title") == "new-deployment"
    peer.start()
    peer.wait()
    assert peer.property("Title") == "mine:1"
    peer.close()


def test_a_no_op_succeeds_and_leaves_every_id_as_it_was(node: Node) -> None:
    before = [one["id"] for one in node.client.get("Deployments")]
    upgrade = node.client.run("Upgrade", "(a{sv})", {})
    update = node.client.update({"set-revision": samples.base().digest})
    kargs = node.client.kargs()
    assert [one.finished for one in (upgrade, update, kargs)] == [[(True, "")]] * 3
    assert upgrade.messages[-1] == "No upgrade available."
    assert update.messages[-1] == "No change."
    assert kargs.messages[-1] == "No changes."
    assert [one["id"] for one in node.client.get("Deployments")] == before


def test_a_booted_container_deployment_has_no_origin_key(rpmostreed: RpmOstree) -> None:
    booted = rpmostreed.os_get("BootedDeployment")
    if "container-image-reference" not in booted:
        pytest.skip("the host's booted deployment is not from a container image")
    assert "origin" not in booted
    assert booted["container-image-reference-digest"].startswith("sha256:")


def test_the_lock_flag_is_true_or_absent(node: Node) -> None:
    reference = node.reference(samples.following())
    node.client.update({"set-refspec": reference}, {"lock-finalization": True})
    assert node.client.os_get("DefaultDeployment")["finalization-locked"] is True
    node.client.kargs({"append-if-missing": ["x=1"]})
    staged = node.client.os_get("DefaultDeployment")
    assert staged["staged"]
    assert "finalization-locked" not in staged, "the lock is not inherited"


def test_options_of_a_wrong_type_are_ignored(node: Node) -> None:
    wrong = {
        "lock-finalization": GLib.Variant("i", 1),
        "reboot": GLib.Variant("s", "true"),
        "no-such-option": GLib.Variant("b", True),
    }
    modifiers = {
        "set-refspec": node.reference(samples.following()),
        "install-packages": GLib.Variant("s", "usbguard"),
        "uninstall-packages": GLib.Variant("as", []),
    }
    assert node.client.update(modifiers, wrong).finished == [(True, "")]
    staged = node.client.os_get("DefaultDeployment")
    assert "finalization-locked" not in staged
    assert staged["requested-packages"] == []
    assert node.machine.up


def test_the_option_is_allow_inactive_and_not_what_the_documentation_says(node: Node) -> None:
    documented = {"no-pull-base": True, "allow-inactive-requests": True}
    refused = node.client.update({"install-packages": ["tools"]}, documented).finished[0]
    assert refused[0] is False
    assert refused[1].startswith('"tools" is already provided by: tools-2-1.')
    assert refused[1].endswith("Use --allow-inactive to explicitly require it.")
    asked = {"no-pull-base": True, "allow-inactive": True}
    assert node.client.update({"install-packages": ["tools"]}, asked).finished == [(True, "")]
    staged = node.client.os_get("DefaultDeployment")
    assert (staged["requested-packages"], staged["packages"]) == (["tools"], [])


def test_a_boot_config_is_asked_for_by_index(rpmostreed: RpmOstree) -> None:
    count = len(rpmostreed.get("Deployments"))
    booted = [index for index, one in enumerate(rpmostreed.get("Deployments")) if one["booted"]][0]
    config = rpmostreed.os("GetDeploymentBootConfig", "(sb)", str(booted), False)[0]
    assert set(config) == {"staged", "title", "linux", "initrd", "options", "version"}
    assert "ostree=" in config["options"]
    for index, text in (
        ("-1", "Invalid deployment index -1, must be a number and >= 0"),
        (rpmostreed.os_get("Name"), f"Invalid deployment index {rpmostreed.os_get('Name')}, must be a number and >= 0"),
        (str(count), f"Out of range deployment index {count}, expected < {count}"),
    ):
        with pytest.raises(RemoteError) as refused:
            rpmostreed.os("GetDeploymentBootConfig", "(sb)", index, False)
        assert (refused.value.name, refused.value.text) == ("org.projectatomic.rpmostreed.Error.Failed", text)


def test_the_boot_config_of_a_staged_deployment_has_options_only(node: Node) -> None:
    node.client.kargs({"append-if-missing": ["x=1"]})
    config = node.client.os("GetDeploymentBootConfig", "(sb)", "", True)[0]
    assert set(config) == {"staged", "options"}
    assert config["staged"] is True
    assert config["options"].split()[-1] == "x=1"
    assert node.client.os("GetDeploymentBootConfig", "(sb)", "", False)[0]["staged"] is False


def test_the_busy_text_has_two_lines_and_names_the_title(node: Node) -> None:
    peer, _, gate = held_update(node)
    with pytest.raises(RemoteError) as refused:
        node.client.os("RefreshMd", "(a{sv})", {})
    assert refused.value.name == BUSY
    assert refused.value.text == (
        "Transaction in progress: one\n You can cancel the current transaction with `rpm-ostree cancel`"
    )
    os.close(gate)
    peer.wait()
    with pytest.raises(RemoteError, match="Transaction in progress: one"):
        node.client.os("RefreshMd", "(a{sv})", {})
    peer.close()
    node.client.sysroot("Reload")
    node.client.run("Cleanup", "(as)", ["base"])


def test_an_inhibitor_makes_a_text_of_three_lines_and_leaves_the_deployment_staged(node: Node) -> None:
    blocker = node.machine.start(
        ["systemd-inhibit", "--what=shutdown", "--who=tester", "--why=because", "--mode=block", "cat"], stdin=-1
    )
    assert blocker.stdin is not None
    inhibitors = [
        "busctl",
        "call",
        "org.freedesktop.login1",
        "/org/freedesktop/login1",
        "org.freedesktop.login1.Manager",
    ]
    assert iterate_until(lambda: "tester" in node.machine.run([*inhibitors, "ListInhibitors"]).stdout or _tick())
    outcome = node.client.update({"set-refspec": node.reference(samples.following())}, {"reboot": True}).finished
    text = "Reboot blocked by a systemd inhibitor lock in `block` mode\nHeld by: tester\nReason: because"
    assert outcome == [(False, text)]
    assert node.client.os_get("DefaultDeployment")["staged"]
    blocker.stdin.close()
    blocker.wait(10)


def _tick() -> bool:
    """Lets the main context, which has nothing to do, come back soon."""
    GLib.timeout_add(50, lambda: False)
    return False


def test_a_message_may_have_several_lines(node: Node) -> None:
    node.offer(*samples.PACKAGES)
    peer = node.client.run("PkgChange", "(a{sv}asas)", {}, ["usbguard"], [])
    table = [text for text in peer.messages if text.startswith("Installing:")]
    assert table == ["Installing:\n  libusb-1.0-1.noarch (extensions)\n  usbguard-1.0-1.noarch (extensions)"]


def test_rollback_takes_effect_without_staging(node: Node) -> None:
    node.client.update({"set-refspec": node.reference(samples.following())})
    node.reboot()
    entry = node.machine.default_entry().deployment
    peer = node.client.run("Rollback", "(a{sv})", {})
    assert peer.finished == [(True, "")]
    assert node.machine.default_entry().deployment != entry
    assert not node.machine.exists("/run/ostree/staged-deployment")
    flags = [(one["booted"], one["staged"], one["version"]) for one in node.client.get("Deployments")]
    assert flags == [(False, False, "1"), (True, False, "2")]
    node.client.run("Rollback", "(a{sv})", {})
    assert node.machine.default_entry().deployment == entry, "a second one takes the first back"


def test_cleanup_of_the_rollback_rewrites_the_boot_entries_at_once(node: Node) -> None:
    node.client.update({"set-refspec": node.reference(samples.following())})
    node.reboot()
    assert len(node.machine.sysroot.entries()) == 2
    assert node.client.run("Cleanup", "(as)", ["rollback-deploy"]).finished == [(True, "")]
    assert len(node.machine.sysroot.entries()) == 1
    assert node.client.os_get("RollbackDeployment") == {}
    again = node.client.run("Cleanup", "(as)", ["rollback-deploy"])
    assert again.messages == ["Deployments unchanged."]


def test_finalizing_reports_success_first_and_then_refuses_everything(node: Node) -> None:
    node.client.update({"set-refspec": node.reference(samples.following())}, {"lock-finalization": True})
    blocker = node.machine.start(
        ["systemd-inhibit", "--what=shutdown", "--who=tester", "--why=because", "--mode=delay", "cat"], stdin=-1
    )
    assert blocker.stdin is not None
    checksum = variants({"checksum": samples.following().digest})
    peer = node.client.connect(node.client.os("FinalizeDeployment", "(a{sv})", checksum)[0])
    peer.start()
    assert peer.wait() == (True, "")
    peer.close()
    node.client.wait_idle()
    with pytest.raises(RemoteError) as refused:
        node.client.os("RefreshMd", "(a{sv})", {})
    assert (refused.value.name, refused.value.text) == (FAILED, "Reboot initiated, cannot start new transaction")
    node.client.vanish()
    blocker.stdin.close()
    assert node.machine.wait_down() is Down.REBOOT
    node.machine.boot()
    node.client = node.connect()
    assert node.client.os_get("BootedDeployment")["version"] == "2"
    assert node.machine.read("/etc/version") == "2\n"
