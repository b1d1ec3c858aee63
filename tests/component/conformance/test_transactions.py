"""The transaction socket: owners, joiners, locks, cancellation, and a daemon that dies (rpm-ostree.md section 2)."""

from __future__ import annotations

import os
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.component.conformance import samples
from tests.component.conformance.client import BUSY, Peer, RemoteError, iterate_until, variants
from tests.component.conformance.conftest import Node
from tests.component.conformance.node import UNIT
from tests.stand.introspection import Gio, GLib
from tests.stand.rpmostreed.faults import take_lock

pytestmark = pytest.mark.stand

BOTH = "(a{sv}a{sv})"
FIFO = "/var/tmp/gate"


@contextmanager
def held(node: Node, step: str) -> Iterator[Peer]:
    """An update to the following image that waits at ``step`` until the block is left; started, not finished."""
    node.machine.run(["mkfifo", FIFO])
    node.faults(hold={"at": step, "fifo": FIFO}, once=True)
    modifiers = variants({"set-refspec": node.reference(samples.following())})
    peer = node.client.connect(node.client.os("UpdateDeployment", BOTH, modifiers, variants({}))[0])
    assert peer.start()
    gate = os.open(f"{node.machine.sysroot.stateroot}{FIFO}", os.O_WRONLY)
    try:
        yield peer
    finally:
        os.close(gate)


def lock_is_free(node: Node) -> bool:
    """Whether libostree's lock could be taken; asked from outside, without waiting."""
    path = node.machine.sysroot.path / "ostree/lock"
    with open(path, "a") as file:
        try:
            take_lock(file.fileno())
        except BlockingIOError:
            return False
        path.unlink()
        return True


def test_an_owner_that_leaves_before_start_takes_the_transaction_along(node: Node) -> None:
    other = node.connect()
    other.os("Cleanup", "(as)", ["repomd"])
    assert node.client.get("ActiveTransaction")[0] == "Cleanup"
    assert not lock_is_free(node)
    other.vanish()
    node.client.wait_idle()
    assert lock_is_free(node)
    assert "client disconnected before calling Start; cancelling transaction" in node.machine.journal(UNIT)


def test_an_owner_that_leaves_after_start_changes_nothing(node: Node) -> None:
    other = node.connect()
    modifiers = variants({"set-refspec": node.reference(samples.following())})
    peer = other.connect(other.os("UpdateDeployment", BOTH, modifiers, variants({}))[0])
    peer.start()
    peer.close()
    other.vanish()
    node.client.wait_idle()
    assert node.client.os_get("DefaultDeployment")["staged"]


def test_anybody_may_start_a_transaction_before_its_owner_does(node: Node) -> None:
    address = node.client.os("Cleanup", "(as)", ["repomd"])[0]
    owner, other = node.client.connect(address), node.client.connect(address)
    assert other.start()
    assert other.wait() == (True, "")
    assert not owner.start()
    assert owner.wait() == (True, "")
    owner.close()
    other.close()


def test_a_call_with_other_parameters_does_not_join(node: Node) -> None:
    address = node.client.os("Cleanup", "(as)", ["repomd"])[0]
    assert node.client.os("Cleanup", "(as)", ["repomd"])[0] == address
    for elements in (["base"], ["repomd", "base"]):
        with pytest.raises(RemoteError) as refused:
            node.client.os("Cleanup", "(as)", elements)
        assert refused.value.name == BUSY
    with pytest.raises(RemoteError, match="Transaction in progress: cleanup"):
        node.client.os("ClearRollbackTarget", "(a{sv})", {})


def test_a_repeated_call_gets_the_old_failure_as_long_as_a_peer_stays(node: Node) -> None:
    first = node.client.connect(node.client.os("RefreshMd", "(a{sv})", {})[0])
    first.start()
    assert first.wait() == (False, "No enabled repositories")
    node.offer(*samples.PACKAGES)
    again = node.client.connect(node.client.os("RefreshMd", "(a{sv})", {})[0])
    assert not again.start()
    assert again.wait() == (False, "No enabled repositories")
    first.close()
    again.close()
    node.client.wait_idle()
    assert node.client.run("RefreshMd", "(a{sv})", {}).finished == [(True, "")]


def test_a_peer_that_stays_too_long_is_cut_off(node: Node) -> None:
    node.faults(force_close_seconds=1)
    peer = node.client.connect(node.client.os("Cleanup", "(as)", ["repomd"])[0])
    peer.start()
    peer.wait()
    assert iterate_until(lambda: peer.closed, 5)
    node.client.wait_idle()
    assert "Forcibly closing transaction due to timeout" in node.machine.journal(UNIT)


def test_the_lock_is_held_from_the_call_until_finished(node: Node) -> None:
    peer = node.client.connect(node.client.os("Cleanup", "(as)", ["repomd"])[0])
    assert not lock_is_free(node)
    peer.start()
    peer.wait()
    assert lock_is_free(node), "free although the peer is still there"
    peer.close()


def test_a_lock_held_by_another_process_is_busy_at_once(node: Node) -> None:
    with open(node.machine.sysroot.path / "ostree/lock", "a") as file:
        take_lock(file.fileno())
        with pytest.raises(RemoteError) as refused:
            node.client.os("Cleanup", "(as)", ["base"])
    assert (refused.value.name, refused.value.text) == (BUSY, "System transaction in progress")
    assert node.client.get("ActiveTransactionPath") == ""
    assert node.client.run("Cleanup", "(as)", ["base"]).finished == [(True, "")]


def test_ostree_waits_for_a_running_transaction(node: Node) -> None:
    with held(node, "before-stage") as peer:
        process = node.machine.start(["ostree", "admin", "undeploy", "0"], stderr=-1, stdout=-1)
        assert process.stdout is not None
        assert "Waiting for sysroot lock" in process.stdout.readline()
    assert peer.wait() == (True, "")
    peer.close()
    assert process.wait(20) == 0
    assert len(node.machine.deployments()) == 1


def test_cancel_ends_a_pull_and_keeps_the_layers_it_has(node: Node) -> None:
    blobs = ["ostree", "refs", "--repo=/ostree/repo", "--list", "ostree/container/blob"]
    with held(node, "before-layer-2") as peer:
        peer.cancel()
        assert peer.wait() == (False, "Operation was cancelled")
    peer.close()
    node.client.sysroot("Reload")
    assert len(node.client.get("Deployments")) == 1
    assert len(node.machine.run(blobs).stdout.split()) == 2
    node.registry.forget_requests()
    again = node.client.update({"set-refspec": node.reference(samples.following())})
    assert "ostree chunk layers already present: 1" in again.messages
    assert "custom layers already present: 1" in again.messages


def test_a_cancel_after_staging_fails_and_leaves_it_staged(node: Node) -> None:
    with held(node, "after-stage-before-finished") as peer:
        peer.cancel()
    assert peer.wait() == (False, "Operation was cancelled")
    peer.close()
    node.client.sysroot("Reload")
    assert node.client.os_get("DefaultDeployment")["staged"], "cancelled, and staged all the same"


def test_a_daemon_that_dies_closes_the_peer_without_finished(node: Node) -> None:
    node.faults(crash="after-layer-1", once=True)
    modifiers = variants({"set-refspec": node.reference(samples.following())})
    peer = node.client.connect(node.client.os("UpdateDeployment", BOTH, modifiers, variants({}))[0])
    peer.start()
    assert iterate_until(lambda: peer.closed and node.client.lost_owner)
    assert peer.finished == []
    assert lock_is_free(node)
    node.machine.run(["systemctl", "start", UNIT])
    assert node.client.get("ActiveTransactionPath") == ""
    assert len(node.client.get("Deployments")) == 1
    again = node.client.update({"set-refspec": node.reference(samples.following())})
    assert again.finished == [(True, "")]
    assert "custom layers already present: 1" in again.messages


def test_a_daemon_that_dies_between_staging_and_finished_leaves_it_staged(node: Node) -> None:
    node.faults(crash="after-stage-before-finished", once=True)
    modifiers = variants({"set-refspec": node.reference(samples.following())})
    peer = node.client.connect(node.client.os("UpdateDeployment", BOTH, modifiers, variants({}))[0])
    peer.start()
    assert iterate_until(lambda: peer.closed and node.client.lost_owner)
    node.machine.run(["systemctl", "start", UNIT])
    assert node.client.os_get("DefaultDeployment")["staged"]


def test_a_task_begins_and_ends_for_each_layer_and_for_staging(node: Node) -> None:
    peer = node.client.update({"set-refspec": node.reference(samples.following())})
    tasks = [(name, str(values[0])[:14]) for name, values in peer.signals if name.startswith("Task")]
    end = ("TaskEnd", "done")
    assert tasks == [("TaskBegin", "[1/2] Fetching"), end, ("TaskBegin", "[2/2] Fetching"), end,
                     ("TaskBegin", "Staging deploy"), end]  # fmt: skip
    assert peer.signals[-1] == ("Finished", (True, ""))


def test_two_clients_that_race_get_one_transaction(node: Node) -> None:
    arguments = GLib.Variant(BOTH, (variants({"set-refspec": node.reference(samples.following())}), variants({})))
    answers: list[str] = []

    def answered(_bus: Any, result: Any, client: Any) -> None:
        answers.append(client.bus.call_finish(result).unpack()[0])

    clients = [node.client, node.connect()]
    for client in clients:
        client.bus.call("org.projectatomic.rpmostree1", node.client.os_path, "org.projectatomic.rpmostree1.OS",
                        "UpdateDeployment", arguments, None, Gio.DBusCallFlags.NONE, 30000, None, answered,
                        client)  # fmt: skip
    assert iterate_until(lambda: len(answers) == 2)
    assert answers[0] == answers[1]
    peers = [node.client.connect(answers[0]) for _ in clients]
    assert sorted(peer.start() for peer in peers) == [False, True]
    for peer in peers:
        assert peer.wait() == (True, "")
        peer.close()
    clients[1].vanish()
    assert len(node.client.get("Deployments")) == 2


def test_the_peer_can_be_introspected_and_asked_for_its_title(node: Node) -> None:
    peer = node.client.connect(node.client.os("Cleanup", "(as)", ["repomd"])[0])
    assert ElementTree.fromstring(peer.introspect()).findall("interface")
    assert peer.property("Title") == "cleanup"
    peer.close()
