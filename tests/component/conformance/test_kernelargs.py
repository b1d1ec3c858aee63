"""KernelArgs and FinalizeDeployment on real boot entries (rpm-ostree.md 1.13, 1.18, 3.3, 3.7)."""

from __future__ import annotations

from typing import Any

import pytest

from tests.component.conformance import samples
from tests.component.conformance.client import variants
from tests.component.conformance.conftest import Node
from tests.stand.introspection import GLib

pytestmark = pytest.mark.stand

METHOD = "(sasasasa{sv})"
Words = tuple[str, ...]


def options(node: Node) -> list[str]:
    """The pending kernel arguments."""
    return str(node.client.os("GetDeploymentBootConfig", "(sb)", "", True)[0]["options"]).split()


def patch(
    node: Node, existing: str, added: Words = (), replaced: Words = (), removed: Words = (), **given: Any
) -> tuple[bool, str]:
    arguments = (existing, added, replaced, removed, variants(given))
    return node.client.run("KernelArgs", METHOD, *arguments).finished[0]


def test_arguments_are_in_the_boot_entry_after_the_reboot(node: Node) -> None:
    assert patch(node, " ".join(options(node)), ("a=1", "b"), append_if_missing=["rw", "c=3"]) == (True, "")
    assert options(node)[-3:] == ["a=1", "b", "c=3"]
    node.reboot()
    assert node.machine.read("/proc/cmdline").split()[-3:] == ["a=1", "b", "c=3"]
    existing = " ".join(options(node))
    assert patch(node, existing, (), ("a=2",), ("b",), delete_if_present=["c=3", "d"]) == (True, "")
    assert options(node)[-1] == "a=2"
    assert "b" not in options(node)


def test_the_clients_own_string_is_what_counts(node: Node) -> None:
    patch(node, "root=/dev/x rw", ("a=1",))
    assert options(node) == ["root=/dev/x", "rw", "a=1"]
    node.reboot()
    cmdline = node.machine.read("/proc/cmdline").split()
    assert [one for one in cmdline if not one.startswith("ostree=")] == ["root=/dev/x", "rw", "a=1"]
    assert len(cmdline) == 4


def test_final_arguments_replace_everything(node: Node) -> None:
    existing = " ".join(options(node))
    assert patch(node, existing, ("ignored",), final_kernel_args="root=/dev/y rw") == (True, "")
    assert options(node) == ["root=/dev/y", "rw"]


@pytest.mark.parametrize(
    ("replaced", "removed", "text"),
    [
        ((), ("nothing",), "No key 'nothing' found"),
        ((), ("c=9",), "No karg 'c=9' found"),
        ((), ("c",), "Multiple values for key 'c' found"),
        (("c=3",), (), "Multiple values for key 'c' found"),
        (("c=9=3",), (), "No karg 'c=9' found"),
        (("nothing=1",), (), "No key 'nothing' found"),
    ],
)
def test_what_cannot_be_patched_is_said_in_libostrees_words(
    resting_node: Node, replaced: tuple[str, ...], removed: tuple[str, ...], text: str
) -> None:
    assert patch(resting_node, "root=/dev/x c=1 c=2", (), replaced, removed) == (False, text)
    assert len(resting_node.client.get("Deployments")) == 1


def test_kernel_arguments_stack_on_what_is_staged_and_a_rebase_keeps_them(node: Node) -> None:
    node.client.update({"set-refspec": node.reference(samples.following())})
    node.client.kargs({"append-if-missing": ["a=1"]})
    staged = node.client.os_get("DefaultDeployment")
    assert staged["version"] == "2"
    assert len(node.client.get("Deployments")) == 2
    node.client.update({"set-refspec": node.reference(samples.base())})
    assert options(node)[-1] == "a=1"


def test_an_etc_merge_happens_at_the_reboot(node: Node) -> None:
    node.client.update({"set-refspec": node.reference(samples.following())})
    node.machine.write("/etc/mine", "mine\n")
    node.reboot()
    assert node.machine.read("/etc/mine") == "mine\n"
    assert node.machine.read("/etc/version") == "2\n"


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({}, "Missing expected checksum"),
        ({"checksum": "sha256:0"}, f"Expected staged base checksum sha256:0, but found {samples.following().digest}"),
        ({"allow-missing-checksum": True}, "Staged deployment already unlocked"),
    ],
)
def test_finalizing_checks_what_is_staged(node: Node, given: dict[str, object], text: str) -> None:
    finalize = ("FinalizeDeployment", "(a{sv})", variants(given))
    assert node.client.run(*finalize).finished == [(False, "No pending staged deployment found")]
    node.client.update({"set-refspec": node.reference(samples.following())})
    assert node.client.run(*finalize).finished == [(False, text)]


@pytest.mark.parametrize("profile", ["AC", "BC"])
def test_a_locked_deployment_is_not_finalized(node: Node, profile: str) -> None:
    node.client.update({"set-refspec": node.reference(samples.following())}, {"lock-finalization": True})
    staged = node.client.os_get("DefaultDeployment")
    assert ("finalization-locked" in staged) is (profile == "AC"), "since 2024.6 it does not show on D-Bus"
    assert node.machine.exists("/run/ostree/staged-deployment-locked") is (profile == "AC")
    node.reboot()
    assert node.client.os_get("BootedDeployment")["version"] == "1"


@pytest.mark.parametrize("profile", ["AC", "BC"])
def test_an_unlocked_deployment_is_finalized_by_stopping_the_unit(node: Node, profile: str) -> None:
    node.client.update({"set-refspec": node.reference(samples.following())}, {"lock-finalization": True})
    unlock = ["/usr/bin/python3", "-m", "tests.stand.rpmostreed.lockkey", "unlock"]
    node.machine.run(unlock, env={"PYTHONPATH": "/run/stand/lib"})
    node.machine.run(["systemctl", "stop", "ostree-finalize-staged.service"])
    assert not node.machine.exists("/run/ostree/staged-deployment")
    assert [one["staged"] for one in node.client.get("Deployments")] == [False, False]
    assert node.client.os_get("DefaultDeployment")["version"] == "2"


def test_a_staged_deployment_stands_in_the_way_of_a_rollback(node: Node) -> None:
    assert node.client.run("Rollback", "(a{sv})", {}).finished == [(False, "No rollback deployment found")]
    node.client.kargs({"append-if-missing": ["a=1"]})
    refused = node.client.run("Rollback", "(a{sv})", {}).finished
    assert refused == [(False, "Staged deployment (remove with cleanup -p)")]


def test_cleanup_discards_a_locked_staged_deployment_with_its_lock(node: Node) -> None:
    node.client.update({"set-refspec": node.reference(samples.following())}, {"lock-finalization": True})
    assert node.client.run("Cleanup", "(as)", ["pending-deploy"]).finished == [(True, "")]
    assert len(node.client.get("Deployments")) == 1
    assert not node.machine.exists("/run/ostree/staged-deployment")
    node.client.update({"set-refspec": node.reference(samples.following())})
    assert not node.machine.exists("/run/ostree/staged-deployment-locked")


def test_cleanup_discards_a_finalized_deployment_too(node: Node) -> None:
    entry = node.machine.default_entry().deployment
    node.client.update({"set-refspec": node.reference(samples.following())})
    node.machine.run(["systemctl", "stop", "ostree-finalize-staged.service"])
    node.client.sysroot("Reload")
    assert node.machine.default_entry().deployment != entry
    assert node.client.run("Cleanup", "(as)", ["pending-deploy"]).finished == [(True, "")]
    assert node.machine.default_entry().deployment == entry


def test_an_automatic_update_stages_or_does_nothing(node: Node) -> None:
    assert node.client.os("AutomaticUpdateTrigger", "(a{sv})", variants({"mode": "auto"})) == (False, "")
    enabled, address = node.client.os("AutomaticUpdateTrigger", "(a{sv})", variants({"mode": "stage"}))
    assert enabled
    peer = node.client.connect(address)
    peer.start()
    assert peer.wait() == (True, "")
    assert peer.property("Title") == "automatic (stage)"
    peer.close()


DRIVER = """
from tests.component.conformance.client import RpmOstree, variants
from tests.component.conformance.node import BUS_ADDRESS
peer = RpmOstree(BUS_ADDRESS).run("Deploy", "(sa{sv})", "", variants({"register-driver": "tester"}))
print(peer.finished, peer.messages)
"""
DRIVER_UNIT = """
[Service]
Type=oneshot
Environment=PYTHONPATH=/run/stand/lib
ExecStart=/usr/bin/python3 /run/driver.py
"""


def test_a_driver_is_recorded_only_for_a_unit(node: Node) -> None:
    outcome = node.client.run("Deploy", "(sa{sv})", "", variants({"register-driver": "tester"})).finished
    assert outcome == [(False, "could not find caller systemd unit")]
    assert not node.machine.exists("/run/rpm-ostree/update-driver.gv")
    node.machine.write("/run/driver.py", DRIVER)
    node.machine.write("/run/systemd/system/driver.service", DRIVER_UNIT)
    node.machine.run(["systemctl", "daemon-reload"])
    node.machine.run(["systemctl", "start", "driver.service"])
    said = "[(True, '')] ['Empty string revision found; registering update driver only']"
    assert said in node.machine.journal("driver.service")
    record = GLib.Bytes.new(node.machine.read_bytes("/run/rpm-ostree/update-driver.gv"))
    assert GLib.Variant.new_from_bytes(GLib.VariantType("a{sv}"), record, False).unpack() == {
        "driver-name": "tester",
        "driver-sd-unit": "driver.service",
    }
    assert len(node.client.get("Deployments")) == 1
