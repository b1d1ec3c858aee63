"""Whether a node can be brought from one config to another (mcd.md 4).

Most of the rules there are kept by the parser: what cannot be changed on an installed node cannot be read at all.
Here are the rules that need both configs, or facts of the node.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

from mcdaemon.errors import Irreconcilable
from mcdaemon.machineconfig import agentparts
from mcdaemon.machineconfig.diff import diff
from mcdaemon.machineconfig.model import KernelType, MachineConfig


@dataclass(frozen=True)
class Facts:
    """What the node says of itself: `/proc/sys/crypto/fips_enabled` (None: no such file), `uname -m` ("": unknown)."""

    fips: Optional[bool] = None
    architecture: str = ""


def reconcile(old: Optional[MachineConfig], new: MachineConfig, facts: Facts) -> None:
    """Return if the node can go from `old` (None: never managed) to `new`; raises Irreconcilable with the field."""
    _fips(old, new, facts)
    if new.kernel_type is KernelType.PAGES_64K and facts.architecture not in ("", "aarch64"):
        raise _refusal(
            new,
            "/spec/kernelType",
            f"64k-pages exists for aarch64 only, this node is {facts.architecture}",
            "use default or realtime",
        )
    _login(old, new)
    _agent(new)


def _fips(old: Optional[MachineConfig], new: MachineConfig, facts: Facts) -> None:
    """Rules 15 and 16: FIPS mode is decided by the installer, before the first key is made."""
    hint = "reinstall the node to change FIPS mode"
    if old is not None and old.fips != new.fips:
        raise _refusal(new, "/spec/fips", f"FIPS mode cannot change from {old.fips} to {new.fips}", hint)
    if facts.fips is not None and facts.fips != new.fips:
        state = "on" if facts.fips else "off"
        wanted = "on" if new.fips else "off"
        raise _refusal(new, "/spec/fips", f"the config wants FIPS mode {wanted}, on this node it is {state}", hint)


def _agent(new: MachineConfig) -> None:
    """A config cannot change the agent that applies it: nobody might be left to confirm it, or to take it back."""
    for field, what in agentparts.touched(new):
        raise _refusal(
            new,
            field,
            f"{what} belongs to the agent that would have to confirm this config, or to take it back",
            "leave it out; change mcdaemon with `make install`, or stop it by hand",
        )


def _login(old: Optional[MachineConfig], new: MachineConfig) -> None:
    """Rule 5: a user that is given without key and password could not log in any more."""
    difference = diff(old, new)
    if not difference.users:
        return
    for index, user in enumerate(new.users):
        if not user.ssh_keys and not user.password_hash:
            raise _refusal(
                new,
                f"/spec/config/passwd/users/{index}",
                f"the user {user.name} would have neither an ssh key nor a password",
                "give one, or leave the user out",
            )


def _refusal(new: MachineConfig, field: str, problem: str, hint: str) -> Irreconcilable:
    return Irreconcilable(f"cannot go to {new.name}: {field}: {problem}", field, hint)
