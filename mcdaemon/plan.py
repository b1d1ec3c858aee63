"""What an update changes, as a value: computed once from two configs and what is requested on the node. Pure.

The deltas are taken against what the node really requests (its packages, its image), never against what the old config
says it should request: the two differ after a human's or another agent's hand (mcd.md 5.5, field case EXT-01).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Optional

from mcdaemon.machineconfig import disruption, extensions
from mcdaemon.machineconfig.diff import Difference, diff
from mcdaemon.machineconfig.model import MachineConfig


@dataclass(frozen=True)
class Plan:
    """Everything that one update does to the node.

    :ivar image: pullspec to move to, "" when the base stays as it is (then its source is never read).
    :ivar packages: what to ask rpm-ostree for: packages to request, to drop, base packages to remove or to reset.
    :ivar kargs_from: managed kernel arguments, in order and with repeats, that are taken out.
    :ivar kargs_to: managed kernel arguments, in order and with repeats, that are put in.
    :ivar actions: what has to happen after the files are in place (node disruption policy); contains REBOOT when the
        node has to boot into the new config.
    """

    image: str
    extensions_image: str
    packages: extensions.PackageDelta
    kargs_from: tuple[str, ...]
    kargs_to: tuple[str, ...]
    actions: tuple[disruption.Action, ...]
    difference: Difference

    @property
    def os_changes(self) -> bool:
        """Whether image or packages differ, so that rpm-ostree has to make a new tree."""
        return bool(self.image or self.packages)

    @property
    def kargs_change(self) -> bool:
        return self.kargs_from != self.kargs_to

    @property
    def reboot(self) -> bool:
        return self.os_changes or self.kargs_change or disruption.reboots(self.actions)

    @property
    def drain(self) -> bool:
        """Whether workloads have to leave (mcd.md 3.8). Special is a change of registries.conf."""
        moving = {disruption.ActionKind.DRAIN, disruption.ActionKind.SPECIAL}
        return self.reboot or any(action.kind in moving for action in self.actions)

    def lines(self) -> list[str]:
        """For people: one line for each thing that changes; names only, never contents."""
        delta = self.packages
        found = [f"OS image: {self.image}"] if self.image else []
        for verb, names in (
            ("install", delta.install),
            ("uninstall", delta.uninstall),
            ("remove from the base", delta.remove_base),
            ("put back into the base", delta.reset_base),
        ):
            found += [f"{verb}: {' '.join(names)}"] if names else []
        if self.kargs_change:
            found.append(
                f"kernel arguments: {' '.join(self.kargs_from) or '(none)'} -> {' '.join(self.kargs_to) or '(none)'}"
            )
        found += [f"file: {path}" for path in sorted(self.difference.files)]
        found += [f"unit: {name}" for name in sorted(self.difference.units)]
        found += ["users: keys or password"] if self.difference.users else []
        actions = [str(action) for action in self.actions if action != disruption.NONE]
        found.append("reboot: one" if self.reboot else f"no reboot: {', '.join(actions) or 'files only'}")
        return found


def same_base(plan: Plan, old: Optional[MachineConfig], new: MachineConfig, policy: disruption.Policy) -> Plan:
    """The plan when its image proves to be the booted one under another name: that alone is no change."""
    difference = replace(plan.difference, os_image=False)
    return replace(plan, image="", difference=difference, actions=disruption.actions(difference, old, new, policy))


def make(
    old: Optional[MachineConfig],
    new: MachineConfig,
    requested: Sequence[str],
    removed: Sequence[str],
    policy: disruption.Policy = disruption.DEFAULT,
) -> Plan:
    """The plan from `old` (None on a node that no config was applied to yet) to `new`.

    `requested` and `removed`: packages that the booted deployment requests, and base packages that it leaves out.
    """
    difference = diff(old, new)
    return Plan(
        image=new.os_image if new.os_image != (old.os_image if old else "") else "",
        extensions_image=new.extensions_image,
        packages=extensions.delta(requested, new.extensions, new.kernel_type, removed),
        kargs_from=old.kernel_arguments if old else (),
        kargs_to=new.kernel_arguments,
        actions=disruption.actions(difference, old, new, policy),
        difference=difference,
    )
