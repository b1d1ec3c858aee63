"""The same update under the rpm-ostree versions that differ for a client (rpm-ostree.md 6.3, profiles)."""

from __future__ import annotations

import pytest

from tests.field.conftest import MakeNode, Push
from tests.field.evidence import settle, transactions, validated
from tests.stand.configs import machine_config
from tests.stand.incidents import FILES, WORKLOAD
from tests.stand.node import next_image

pytestmark = pytest.mark.stand


@pytest.mark.parametrize("profile", ["A", "B", "BC", "D"])
def test_an_update_of_image_and_files_takes_one_transaction_and_one_reboot(
    profile: str, make_node: MakeNode, push: Push
) -> None:
    """A: lock in a file. B: lock as a key of the staged deployment. C: known digests are not opened again. D: the
    transaction's socket has another address each time."""
    node = make_node(profile=profile)
    image = push(next_image("417.94.30"), "os:v30")
    boots, boot_id = node.boots, node.machine.boot_id
    settle(node, first=machine_config("50-app", files=FILES, units=[WORKLOAD], os_image=image))
    assert transactions(node, boot_id) == ["UpdateDeployment"]
    assert node.boots == boots + 1
    assert "417.94.30" in node.machine.read("/etc/os-release")
    assert validated(node)
