"""The same updates under the rpm-ostree versions that differ for a client (rpm-ostree.md 6.3, profiles), and under
those that report success and do nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.field.conftest import MakeNode, Push
from tests.field.evidence import (
    NEW,
    faults,
    fingerprint,
    is_old,
    journal,
    open_gate,
    rests_on,
    settle,
    status,
    through_gate,
    transactions,
    validated,
)
from tests.field.test_kernel_type import kernels, realtime, with_kernel_packages
from tests.stand.configs import machine_config
from tests.stand.images import KERNEL, extensions_image
from tests.stand.incidents import FILES, WORKLOAD
from tests.stand.node import Node, next_image

pytestmark = pytest.mark.stand

PROFILES = {
    "A": "2024.5",  # the lock is a file, and a key on D-Bus
    "B": "2024.8",  # ... or a key of the staged deployment
    "BC": "2025.10",  # known digests are not opened again
    "D": "2022.19",  # the transaction's socket has another address each time
    "BCE": "2026.1",  # no check of the base for installs; empty package transactions pass
}


def moved(push: Push, extensions: str, kernel_arguments: Sequence[str] = ()) -> str:
    image = push(next_image("417.94.30"), "os:v30")
    return machine_config(
        "50-new",
        os_image=image,
        extensions=["usbguard"],
        extensions_image=extensions,
        kernel_arguments=kernel_arguments,
    )


@pytest.mark.parametrize("profile", PROFILES)
def test_an_update_of_image_and_files_takes_one_transaction_and_one_reboot(
    profile: str, make_node: MakeNode, push: Push
) -> None:
    node = make_node(profile=profile)
    image = push(next_image("417.94.30"), "os:v30")
    boots, boot_id = node.boots, node.machine.boot_id
    settle(node, first=machine_config("50-app", files=FILES, units=[WORKLOAD], os_image=image))
    assert transactions(node, boot_id) == ["UpdateDeployment"]
    assert node.boots == boots + 1
    assert "417.94.30" in node.machine.read("/etc/os-release")
    assert validated(node)
    assert status(node)["host"]["rpm-ostree"] == PROFILES[profile]


@pytest.mark.parametrize("profile", PROFILES)
def test_image_package_and_arguments_take_two_transactions_and_one_reboot(
    profile: str, make_node: MakeNode, push: Push, extensions: str
) -> None:
    node = make_node(profile=profile)
    boots, boot_id = node.boots, node.machine.boot_id
    settle(node, first=moved(push, extensions, kernel_arguments=["nosmt", "console=ttyS0"]))
    assert (node.boots, transactions(node, boot_id)) == (boots + 1, ["UpdateDeployment", "KernelArgs"])
    assert node.machine.exists("/usr/bin/usbguard") and "nosmt console=ttyS0" in node.machine.read("/proc/cmdline")
    assert "417.94.30" in node.machine.read("/etc/os-release")
    rests_on(node, "50-new")


def test_a_host_without_podman_has_no_local_copies_and_goes_on(node: Node, push: Push) -> None:
    node.machine.run(["mount", "--bind", "/dev/null", "/usr/bin/podman"])
    image = push(next_image("417.94.30"), "os:v30")
    node.desire(first=machine_config("50-app", os_image=image))
    said = node.once(expect=3)
    assert "drain:" in said and "rpm-ostree: Pulling manifest: ostree-unverified-registry:" in said
    host = status(node)["host"]
    assert host["podman"] == "" and host["skopeo"]
    through_gate(node)
    rests_on(node, "50-app")
    assert status(node)["host"]["podman"], "another boot, and it is asked again"


# -- success that is none ---------------------------------------------------------------------------------------------


def test_an_update_that_did_nothing_is_found_out_by_its_digest_and_made_in_other_calls(
    node: Node, push: Push, extensions: str
) -> None:
    """TXN-26, rpm-ostree.md 7 row 14: Finished(true), "No upgrade available.", and nothing is staged."""
    faults(node, no_op=True, methods=["UpdateDeployment"], once=True)
    boot_id = node.machine.boot_id
    node.desire(first=moved(push, extensions))
    said = node.once(expect=3)
    assert "reports success, but staged nothing" in said and "drain:" not in said
    assert status(node)["state"] == "Working" and journal(node)["update"]["misses"] == 1
    through_gate(node)
    assert transactions(node, boot_id) == ["UpdateDeployment", "Rebase", "UpdateDeployment"]
    assert node.boots == 1 and node.machine.exists("/usr/bin/usbguard")
    assert "417.94.30" in node.machine.read("/etc/os-release")
    rests_on(node, "50-new")


def test_a_rebase_that_works_where_an_update_never_does_is_enough_for_an_image(node: Node, push: Push) -> None:
    """TXN-26: this rpm-ostree answers every UpdateDeployment with a false no-op."""
    faults(node, no_op=True, methods=["UpdateDeployment"])
    node.desire(first=machine_config("50-new", os_image=push(next_image("417.94.30"), "os:v30")))
    node.once(expect=3)
    through_gate(node)
    assert node.boots == 1 and "417.94.30" in node.machine.read("/etc/os-release")
    rests_on(node, "50-new")


def test_one_that_never_does_anything_is_given_up_after_three_attempts_and_nothing_was_drained(
    node: Node, push: Push
) -> None:
    """Counted in the journal: each of these is another process."""
    before = fingerprint(node)
    faults(node, no_op=True)
    open_gate(node)
    node.desire(first=machine_config("50-new", os_image=push(next_image("417.94.30"), "os:v30")))
    said = "".join(node.once(expect=3) for _round in range(5))
    assert said.count("staged nothing") >= 3 and "drain:" not in said
    assert transactions(node).count("UpdateDeployment") == 1 and transactions(node).count("Rebase") == 2
    found, after = status(node), fingerprint(node)
    assert found["state"] == "Degraded" and "staged nothing" in found["failed"]
    assert node.boots == 0 and (after.default, after.deployments) == (before.default, before.deployments)


def test_arguments_that_were_not_staged_are_found_out_too(old: Node) -> None:
    faults(old, no_op=True, once=True)
    before = fingerprint(old)
    old.desire(first=NEW)
    assert "staged nothing" in old.once(expect=3)
    assert fingerprint(old) == before
    is_old(old)
    through_gate(old)
    rests_on(old, "50-new")


def test_base_packages_that_were_not_put_back_are_found_out_and_nothing_is_drained(
    make_node: MakeNode, push: Push, tmp_path: Path
) -> None:
    """TXN-27: resetting overrides does nothing. For a kernel that leaves a tree without any, which libostree refuses; a
    quieter one is told by the requested sets (tests/unit/test_stage.py)."""
    image, packages = push(with_kernel_packages(), "os:kernels"), push(extensions_image(realtime(tmp_path)), "ext:rt")
    node = make_node(image)
    common: dict[str, Any] = {"os_image": image, "extensions_image": packages}
    settle(node, first=machine_config("50-rt", kernel_type="realtime", **common))
    booted = kernels(node)
    faults(node, ignore_resets=True, once=True)
    boots = node.boots
    open_gate(node)
    node.desire(first=machine_config("50-plain", **common))
    said = node.once(expect=3)
    assert "drain:" not in said and node.boots == boots and kernels(node) == booted, said
    assert status(node)["state"] == "Degraded" and "kernel" in status(node)["failed"]
    node.mcdaemon("retry")
    through_gate(node)
    assert kernels(node) == {KERNEL} and node.boots == boots + 1
    rests_on(node, "50-plain")
