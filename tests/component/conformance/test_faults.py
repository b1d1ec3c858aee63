"""The stand-in's own faults and profiles; nothing here is about a real rpm-ostreed."""

from __future__ import annotations

import os

import pytest

from tests.component.conformance import samples
from tests.component.conformance.client import BUSY, FAILED, RemoteError, iterate_until, variants
from tests.component.conformance.conftest import Node
from tests.component.conformance.node import UNIT
from tests.stand.rpmostreed import FAULTS_FILE, profiles, unit_text

pytestmark = pytest.mark.stand


def test_a_text_of_the_tests_choice_ends_a_transaction_before_anything_changes(node: Node) -> None:
    node.faults(fail={"at": "after-start", "text": "No space left on device"}, once=True)
    refused = node.client.update({"set-refspec": node.reference(samples.following())})
    assert refused.finished == [(False, "No space left on device")]
    assert not node.machine.exists("/run/stand/rpmostreed-faults.json"), "once"
    assert node.client.update({"set-refspec": node.reference(samples.following())}).finished == [(True, "")]


def test_a_failure_after_staging_leaves_the_deployment_there(node: Node) -> None:
    node.faults(fail={"at": "after-stage-before-finished", "text": "inhibitor"})
    refused = node.client.update({"set-refspec": node.reference(samples.following())})
    assert refused.finished == [(False, "inhibitor")]
    assert node.client.os_get("DefaultDeployment")["staged"]


def test_faults_can_be_for_one_method_only(node: Node) -> None:
    node.faults(methods=["KernelArgs"], fail={"at": "after-start", "text": "no"})
    assert node.client.update({"set-refspec": node.reference(samples.following())}).finished == [(True, "")]
    assert node.client.kargs({"append-if-missing": ["a=1"]}).finished == [(False, "no")]


def test_busy_and_rebooting_are_refused_as_the_real_ones(node: Node) -> None:
    node.faults(busy=True)
    with pytest.raises(RemoteError) as refused:
        node.client.os("Cleanup", "(as)", ["base"])
    assert (refused.value.name, refused.value.text) == (BUSY, "System transaction in progress")
    node.faults(reboot_initiated=True)
    with pytest.raises(RemoteError) as refused:
        node.client.os("Cleanup", "(as)", ["base"])
    assert (refused.value.name, refused.value.text) == (FAILED, "Reboot initiated, cannot start new transaction")


def test_a_hanging_transaction_ignores_cancel_and_ends_with_the_daemon(node: Node) -> None:
    node.faults(hang="after-start", once=True)
    peer = node.client.connect(node.client.os("Cleanup", "(as)", ["base"])[0])
    peer.start()
    peer.cancel()
    assert not iterate_until(lambda: bool(peer.finished), 0.5)
    node.machine.run(["systemctl", "restart", UNIT])
    assert iterate_until(lambda: peer.closed)
    assert node.client.run("Cleanup", "(as)", ["base"]).finished == [(True, "")]


def test_a_delay_is_over_by_itself_or_by_cancel(node: Node) -> None:
    node.faults(delay={"at": "before-layer-1", "seconds": 0.2})
    assert node.client.update({"set-refspec": node.reference(samples.following())}).finished == [(True, "")]
    node.client.run("Cleanup", "(as)", ["pending-deploy"])
    node.faults(delay={"at": "before-layer-1", "seconds": 60})
    arguments = variants({"set-refspec": node.reference(samples.following())})
    peer = node.client.connect(node.client.os("UpdateDeployment", "(a{sv}a{sv})", arguments, {})[0])
    peer.start()
    peer.cancel()
    assert peer.wait(10) == (False, "Operation was cancelled")
    peer.close()


def test_a_hold_tells_when_it_is_reached_and_what_happens_meanwhile_counts(node: Node) -> None:
    node.machine.run(["mkfifo", "/var/tmp/gate"])
    node.faults(hold={"at": "before-layer-2", "fifo": "/var/tmp/gate"}, once=True)
    arguments = variants({"set-refspec": node.reference(samples.following())})
    peer = node.client.connect(node.client.os("UpdateDeployment", "(a{sv}a{sv})", arguments, {})[0])
    peer.start()
    gate = os.open(node.machine.sysroot.stateroot / "var/tmp/gate", os.O_WRONLY)
    node.registry.delete_blob("os", samples.following().layers[2].digest)
    os.close(gate)
    success, text = peer.wait()
    peer.close()
    assert not success
    assert samples.following().layers[2].digest in text


@pytest.mark.parametrize("text", ["{", "[]", '{"crsh": "after-start"}', '{"crash": "sometime"}', '{"busy": "yes"}'])
def test_faults_that_are_not_understood_are_refused_loudly(resting_node: Node, text: str) -> None:
    resting_node.machine.write(FAULTS_FILE, text)
    with pytest.raises(RemoteError, match=f"stand: cannot read faults in {FAULTS_FILE}"):
        resting_node.client.os("Cleanup", "(as)", ["base"])
    resting_node.faults()


@pytest.mark.parametrize("profile", ["ACD"])
def test_before_2023_the_socket_was_abstract_and_new_each_time(node: Node) -> None:
    addresses = []
    for _ in range(2):
        addresses.append(str(node.client.os("Cleanup", "(as)", ["repomd"])[0]))
        peer = node.client.connect(addresses[-1])
        peer.start()
        assert peer.wait() == (True, "")
        peer.close()
        node.client.wait_idle()
    assert addresses[0] != addresses[1]
    assert all(address.startswith("unix:abstract=/tmp/dbus-") for address in addresses)


@pytest.mark.parametrize("letters", ["Z", "AB", "a"])
def test_an_unknown_profile_is_refused(letters: str) -> None:
    with pytest.raises(ValueError, match="profile"):
        profiles.parse(letters)


def test_the_unit_names_its_source_and_profile() -> None:
    text = unit_text("/somewhere", "BC")
    assert "PYTHONPATH=/somewhere" in text
    assert text.splitlines()[-3] == "ExecStart=/usr/bin/python3 -m tests.stand.rpmostreed --profile=BC"
