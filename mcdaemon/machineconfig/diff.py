"""What differs between two configs, by meaning: decoded contents, split arguments, resolved defaults.

A file in another encoding, another order of files, or `overwrite` said or unsaid is no change; the MCD compares the
encoded structures and reboots for them (mcd.md 2.3, 3.6.1).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Optional, TypeVar

from mcdaemon.machineconfig.model import FileSpec, KernelType, MachineConfig, UnitSpec, UserSpec

_Spec = TypeVar("_Spec", FileSpec, UnitSpec)


@dataclass(frozen=True)
class Difference:
    """Paths and unit names that are added, changed or removed (a drop-in counts as its unit); flags for the rest."""

    files: frozenset[str] = frozenset()
    added_files: frozenset[str] = frozenset()
    removed_files: frozenset[str] = frozenset()
    units: frozenset[str] = frozenset()
    added_units: frozenset[str] = frozenset()
    removed_units: frozenset[str] = frozenset()
    ssh_keys: bool = False
    password: bool = False
    kernel_arguments: bool = False
    extensions: bool = False
    os_image: bool = False
    kernel_type: bool = False
    fips: bool = False
    # Only where packages come from. On its own it is no reason to touch a node (mcd.md 2.1).
    extensions_image: bool = False

    @property
    def users(self) -> bool:
        """Whether keys or password of a user differ."""
        return self.ssh_keys or self.password

    @property
    def system(self) -> bool:
        """Whether something differs that only a new deployment can bring."""
        return self.kernel_arguments or self.extensions or self.os_image or self.kernel_type or self.fips

    def __bool__(self) -> bool:
        """Whether anything differs that a node has to be changed for."""
        return bool(self.files or self.units or self.users or self.system)


def diff(old: Optional[MachineConfig], new: MachineConfig) -> Difference:
    """Compare two configs; `old` None: a node that was never managed, which is a config that wants nothing.

    Against None an image, or arguments, are a difference only when `new` wants some.
    """
    old = old or MachineConfig(name="")
    old_files, new_files = {file.path: file for file in old.files}, {file.path: file for file in new.files}
    old_units, new_units = {unit.name: unit for unit in old.units}, {unit.name: unit for unit in new.units}
    old_users, new_users = _users(old.users), _users(new.users)
    return Difference(
        files=_changed(old_files, new_files),
        added_files=frozenset(new_files.keys() - old_files.keys()),
        removed_files=frozenset(old_files.keys() - new_files.keys()),
        units=_changed(old_units, new_units),
        added_units=frozenset(new_units.keys() - old_units.keys()),
        removed_units=frozenset(old_units.keys() - new_units.keys()),
        ssh_keys={name: user.ssh_keys for name, user in old_users.items() if user.ssh_keys}
        != {name: user.ssh_keys for name, user in new_users.items() if user.ssh_keys},
        password={name: user.password_hash for name, user in old_users.items() if user.password_hash}
        != {name: user.password_hash for name, user in new_users.items() if user.password_hash},
        kernel_arguments=old.kernel_arguments != new.kernel_arguments,
        extensions=set(old.extensions) != set(new.extensions),
        # An empty osImageURL asks for no image; it is no change away from the one that is there.
        os_image=bool(new.os_image) and old.os_image != new.os_image,
        kernel_type=old.kernel_type is not new.kernel_type,
        fips=old.fips != new.fips,
        extensions_image=bool(new.extensions_image) and old.extensions_image != new.extensions_image,
    )


def needs_extensions_image(old: Optional[MachineConfig], new: MachineConfig) -> bool:
    """Whether the extensions image may be read for this change: packages or another kernel before or after (EXT-04)."""
    return any(
        config is not None and (config.extensions or config.kernel_type is not KernelType.DEFAULT)
        for config in (old, new)
    )


def _changed(old: Mapping[str, _Spec], new: Mapping[str, _Spec]) -> frozenset[str]:
    return frozenset(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))


def _users(users: Iterable[UserSpec]) -> dict[str, UserSpec]:
    return {user.name: user for user in users}
