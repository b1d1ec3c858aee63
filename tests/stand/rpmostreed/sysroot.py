"""The booted sysroot through libostree, in a mount namespace of this process's own.

/sysroot and /boot are mounted read-only in the node; rpm-ostreed remounts them for itself (MountFlags=slave). Doing
so before libostree opens anything keeps it from holding descriptors of the old mount (vm.md section 3).
"""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path
from typing import Any, Optional

from tests.stand.introspection import GLib, OSTree
from tests.stand.rpmostreed import errors, origin
from tests.stand.rpmostreed.errors import MethodError

_CLONE_NEWNS = 0x20000
_MS_REMOUNT, _MS_BIND, _MS_REC, _MS_SLAVE = 32, 4096, 1 << 14, 1 << 19
CLIENT_LAYER = "rpmostree.clientlayer"


def enter_mount_namespace() -> None:
    """Gives this process a mount namespace in which /sysroot and /boot are writable. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    _check(libc.unshare(_CLONE_NEWNS), "unshare")
    _check(libc.mount(None, b"/", None, _MS_REC | _MS_SLAVE, None), "mount /")
    for place in ("/sysroot", "/boot"):
        remounted = libc.mount(None, place.encode(), None, _MS_REMOUNT | _MS_BIND, None)
        _check(remounted, f"mount {place}", errno.EINVAL)  # EINVAL: it is no mount point


def _check(result: int, what: str, harmless: int = 0) -> None:
    number = ctypes.get_errno() if result != 0 else 0
    if number not in (0, harmless):
        raise OSError(number, f"{what}: {os.strerror(number)}")


class Sysroot:
    """An OSTree.Sysroot with the questions that rpm-ostree asks it. GLib.Error comes from libostree."""

    def __init__(self) -> None:
        self.ostree = OSTree.Sysroot.new_default()
        self.ostree.set_mount_namespace_in_use()
        self.ostree.initialize()
        self.ostree.load(None)

    @property
    def repo(self) -> Any:
        return self.ostree.repo()

    @property
    def booted(self) -> Optional[Any]:
        return self.ostree.get_booted_deployment()

    @property
    def deployments(self) -> list[Any]:
        return list(self.ostree.get_deployments())

    def reload(self) -> bool:
        """Reads the deployments again if they changed on disk; whether they did."""
        _, changed = self.ostree.load_if_changed(None)
        return bool(changed)

    def lock(self) -> None:
        """Takes /ostree/lock, or raises MethodError BUSY at once: rpm-ostreed never waits for it."""
        _, acquired = self.ostree.try_lock()
        if not acquired:
            raise MethodError(errors.BUSY, "System transaction in progress")

    def unlock(self) -> None:
        self.ostree.unlock()

    def pending(self, osname: str) -> Optional[Any]:
        """The staged or otherwise first deployment of ``osname`` before the booted one."""
        for deployment in self.deployments:
            if deployment.get_osname() != osname:
                continue
            return None if self.is_booted(deployment) or self.booted is None else deployment
        return None

    def rollback(self, osname: str) -> Optional[Any]:
        """The deployment after the booted one for ``osname``; the second one where none is booted."""
        mine = [item for item in self.deployments if item.get_osname() == osname]
        for index, deployment in enumerate(mine):
            if self.is_booted(deployment):
                return mine[index + 1] if index + 1 < len(mine) else None
        return mine[1] if len(mine) > 1 else None

    def origin_merge(self, osname: str) -> Optional[Any]:
        """Where the next operation takes origin and kernel arguments from (3.7)."""
        return self.pending(osname) or self.config_merge(osname)

    def config_merge(self, osname: str) -> Optional[Any]:
        """Where the next deployment takes /etc from."""
        return self.ostree.get_merge_deployment(osname)

    def is_booted(self, deployment: Any) -> bool:
        return self.booted is not None and bool(deployment.equal(self.booted))

    def root(self, deployment: Any) -> Path:
        """The deployment's directory."""
        return Path("/", str(self.ostree.get_deployment_dirpath(deployment)))

    def origin(self, deployment: Any) -> origin.Origin:
        return origin.read(deployment.get_origin())

    def kernel_arguments(self, deployment: Any) -> str:
        """The ``options`` of its boot entry, with ``ostree=``; for a staged one, as it will be."""
        config = deployment.get_bootconfig()
        return str(config.get("options") or "") if config else ""

    def base(self, commit: str) -> str:
        """The base commit of a client-side layered commit, and any other commit itself."""
        return str(self.parent(commit)) if self.is_layered(commit) else commit

    def is_layered(self, commit: str) -> bool:
        return self.metadata(commit).lookup_value(CLIENT_LAYER, GLib.VariantType("b")) is not None

    def metadata(self, commit: str) -> Any:
        """The metadata of a commit, an a{sv} variant."""
        _, variant, _ = self.repo.load_commit(commit)
        return variant.get_child_value(0)

    def parent(self, commit: str) -> str:
        _, variant, _ = self.repo.load_commit(commit)
        return str(OSTree.commit_get_parent(variant) or "")

    def timestamp(self, commit: str) -> int:
        _, variant, _ = self.repo.load_commit(commit)
        return int(OSTree.commit_get_timestamp(variant))

    def resolve(self, ref: str) -> str:
        """The commit of a ref, or ``""``."""
        _, commit = self.repo.resolve_rev(ref, True)
        return str(commit or "")


def identity(deployment: Any) -> str:
    """The ``id`` of a deployment."""
    return f"{deployment.get_osname()}-{deployment.get_csum()}.{deployment.get_deployserial()}"
