"""Extensions and kernel types as packages (mcd.md 5.5 and 5.2.8; common/helpers.go:SupportedExtensions)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from mcdaemon.machineconfig.specs import KernelType

PACKAGES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "two-node-ha": ("pacemaker", "pcs", "fence-agents-all"),
        "ipsec": ("NetworkManager-libreswan", "libreswan", "openvswitch3.5-ipsec"),
        "usbguard": ("usbguard",),
        "kerberos": ("krb5-workstation", "libkadm5"),
        "kernel-devel": ("kernel-devel", "kernel-headers"),
        "sandboxed-containers": ("kata-containers",),
        "sysstat": ("sysstat",),
    }
)
KERNEL_DEVEL = "kernel-devel"
BASE_KERNEL = ("kernel", "kernel-core", "kernel-modules", "kernel-modules-core", "kernel-modules-extra")
_KERNELS: Mapping[KernelType, tuple[str, ...]] = MappingProxyType(
    {
        KernelType.DEFAULT: (),
        KernelType.REALTIME: ("kernel-rt-core", "kernel-rt-modules", "kernel-rt-modules-extra"),
        KernelType.PAGES_64K: (
            "kernel-64k-core",
            "kernel-64k-modules",
            "kernel-64k-modules-core",
            "kernel-64k-modules-extra",
        ),
    }
)
_EXTENSION_PACKAGES = frozenset(package for packages in PACKAGES.values() for package in packages)
_KERNEL_PACKAGES = frozenset(package for packages in _KERNELS.values() for package in packages)


@dataclass(frozen=True)
class PackageDelta:
    """What one rpm-ostree transaction has to be asked for; all names sorted.

    `remove_base` and `reset_base` are overrides: base packages to remove, and removals to take back.
    """

    install: tuple[str, ...] = ()
    uninstall: tuple[str, ...] = ()
    remove_base: tuple[str, ...] = ()
    reset_base: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.install or self.uninstall or self.remove_base or self.reset_base)


def packages(extensions: Iterable[str], kernel_type: KernelType = KernelType.DEFAULT) -> tuple[str, ...]:
    """The packages that these extensions and this kernel consist of, sorted. Raises KeyError for an unknown name."""
    wanted = {package for name in extensions for package in PACKAGES[name]}
    return tuple(sorted(wanted | set(_KERNELS[kernel_type])))


def delta(
    requested: Iterable[str],
    extensions: Iterable[str],
    kernel_type: KernelType = KernelType.DEFAULT,
    requested_base_removals: Iterable[str] = (),
) -> PackageDelta:
    """From what is really requested on the node to what the config wants (H.6; EXT-01, EXT-05).

    `requested` are the deployment's requested packages, `requested_base_removals` its requested removals from the base.
    Packages that no extension or kernel type knows were layered by somebody else and are left alone (EXT-15).
    """
    present = frozenset(requested)
    wanted = frozenset(packages(extensions, kernel_type))
    known = _EXTENSION_PACKAGES | _KERNEL_PACKAGES
    removed = frozenset(requested_base_removals) & frozenset(BASE_KERNEL)
    to_remove = frozenset() if kernel_type is KernelType.DEFAULT else frozenset(BASE_KERNEL)
    return PackageDelta(
        install=tuple(sorted(wanted - present)),
        uninstall=tuple(sorted((present & known) - wanted)),
        remove_base=tuple(sorted(to_remove - removed)),
        reset_base=tuple(sorted(removed - to_remove)),
    )
