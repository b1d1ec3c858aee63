"""Extensions and kernel types as packages, against what the node really requests."""

from __future__ import annotations

import pytest

from mcdaemon.machineconfig.extensions import BASE_KERNEL, PACKAGES, PackageDelta, delta, packages
from mcdaemon.machineconfig.specs import KernelType

IPSEC = "NetworkManager-libreswan libreswan openvswitch3.5-ipsec"


@pytest.mark.parametrize(
    ("installed", "wanted", "install", "uninstall"),
    [
        ("", "", "", ""),
        ("", "sysstat", "sysstat", ""),
        ("", "sysstat ipsec", IPSEC + " sysstat", ""),
        ("sysstat", "sysstat", "", ""),
        ("sysstat", "", "", "sysstat"),
        ("sysstat " + IPSEC, "sysstat", "", IPSEC),
        ("sysstat", "ipsec", IPSEC, "sysstat"),
        ("pacemaker sysstat", "two-node-ha usbguard", "fence-agents-all pcs usbguard", "sysstat"),
        ("random-package another-package", "sysstat", "sysstat", ""),
        ("random-package", "", "", ""),
    ],
)
def test_H6_the_delta_is_taken_against_the_node(installed: str, wanted: str, install: str, uninstall: str) -> None:
    found = delta(installed.split(), wanted.split())
    assert (set(found.install), set(found.uninstall)) == (set(install.split()), set(uninstall.split()))


def test_H6_all_seven_extensions_are_thirteen_packages() -> None:
    assert len(delta([], PACKAGES).install) == 13 and len(PACKAGES) == 7


def test_EXT_01_a_package_that_joined_an_extension_is_installed() -> None:
    assert delta(["NetworkManager-libreswan", "libreswan"], ["ipsec"]).install == ("openvswitch3.5-ipsec",)


def test_EXT_05_a_package_that_was_removed_by_hand_comes_back() -> None:
    assert delta([], ["usbguard"]).install == ("usbguard",)


def test_no_change_is_no_delta() -> None:
    assert not delta(["kata-containers"], ["sandboxed-containers"]) and delta([], []) == PackageDelta()


@pytest.mark.parametrize(
    ("kind", "first", "count"),
    [(KernelType.REALTIME, "kernel-rt-core", 3), (KernelType.PAGES_64K, "kernel-64k-core", 4)],
)
def test_another_kernel_is_installed_and_the_base_kernel_removed(kind: KernelType, first: str, count: int) -> None:
    found = delta([], [], kind)
    assert found.install[0] == first and len(found.install) == count
    assert set(found.remove_base) == set(BASE_KERNEL)
    assert not delta(found.install, [], kind, found.remove_base)


def test_the_default_kernel_comes_back() -> None:
    found = delta(packages([], KernelType.REALTIME), [], KernelType.DEFAULT, BASE_KERNEL)
    assert found.uninstall == packages([], KernelType.REALTIME) and set(found.reset_base) == set(BASE_KERNEL)
    assert not found.install and not found.remove_base


def test_removals_of_somebody_else_are_left_alone() -> None:
    assert not delta([], [], KernelType.DEFAULT, ["nano", "firefox"])


def test_an_unknown_extension_is_an_error() -> None:
    with pytest.raises(KeyError):
        packages(["nope"])
