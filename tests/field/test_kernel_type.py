"""Another kernel: base packages removed and others installed, in the one transaction of the update, and back."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.field.conftest import MakeNode, Push
from tests.field.evidence import settle, transactions, validated
from tests.stand import images
from tests.stand.configs import machine_config
from tests.stand.images import KERNEL, File, extensions_image, layer_on
from tests.stand.incidents import FILES
from tests.stand.node import Node, base_image
from tests.stand.packages import Package, build

pytestmark = pytest.mark.stand

BASE = ("kernel", "kernel-core", "kernel-modules", "kernel-modules-core", "kernel-modules-extra")
REALTIME = ("kernel-rt-core", "kernel-rt-modules", "kernel-rt-modules-extra")
_RT = "6.1.0-stand.rt"


def with_kernel_packages() -> images.Image:
    """The base image with a package database that knows which files its kernel consists of."""
    owned = {"kernel-core": (f"/usr/lib/modules/{KERNEL}/vmlinuz", f"/usr/lib/modules/{KERNEL}/initramfs.img")}
    return layer_on(
        base_image(),
        {f"usr/share/stand/base-packages/{name}.list": File("\n".join(owned.get(name, ())).encode()) for name in BASE},
    )


def realtime(folder: Path) -> list[Path]:
    kernel = {
        f"/usr/lib/modules/{_RT}/vmlinuz": File(b"realtime kernel", 0o755),
        f"/usr/lib/modules/{_RT}/initramfs.img": File(b"realtime initramfs"),
    }
    return [build(Package(name, files=kernel if name == "kernel-rt-core" else {}), folder) for name in REALTIME]


@pytest.fixture
def on_packages(make_node: MakeNode, push: Push) -> tuple[Node, str]:
    image = push(with_kernel_packages(), "os:kernels")
    return make_node(image), image


def kernels(node: Node) -> set[str]:
    """Which kernels the booted deployment holds, read from outside (the host's /usr is below it)."""
    root = node.machine.deployment_root(node.machine.booted().name)
    return {path.parent.name for path in root.glob("usr/lib/modules/*/vmlinuz")}


def test_a_realtime_kernel_comes_in_one_transaction_and_goes_again(
    on_packages: tuple[Node, str], push: Push, tmp_path: Path
) -> None:
    """TXN-37: overrides are put back in the transaction that changes the base."""
    node, image = on_packages
    extensions = push(extensions_image(realtime(tmp_path)), "extensions:rt")
    boots, boot_id = node.boots, node.machine.boot_id
    settle(
        node,
        first=machine_config("50-rt", files=FILES, os_image=image, kernel_type="realtime", extensions_image=extensions),
    )
    assert kernels(node) == {_RT}
    assert node.boots == boots + 1
    assert transactions(node, boot_id) == ["UpdateDeployment"]
    assert validated(node)

    settle(node, first=machine_config("50-rt", files=FILES, os_image=image, extensions_image=extensions))
    assert kernels(node) == {KERNEL}
    assert validated(node)


def test_a_kernel_that_the_base_does_not_have_in_packages_is_given_up_and_the_node_serves_on(
    node: Node, push: Push, base: str, tmp_path: Path
) -> None:
    extensions = push(extensions_image(realtime(tmp_path)), "extensions:rt")
    settle(node, first=machine_config("50-app", files=FILES, os_image=base))
    node.desire(
        first=machine_config("50-rt", files=FILES, os_image=base, kernel_type="realtime", extensions_image=extensions)
    )
    said = node.once(expect=3)
    assert "not found" in said
    assert kernels(node) == {KERNEL}
    assert not any(deployment.staged for deployment in node.machine.deployments())
    assert node.status()["state"] == "Degraded"
