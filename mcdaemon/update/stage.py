"""Staging: the OS and its kernel arguments, and the proof that what is staged is what was asked for."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Optional

from mcdaemon.decide import Staged
from mcdaemon.errors import Broken
from mcdaemon.host.deployments import Machine, StagedDeployment
from mcdaemon.host.root import Root
from mcdaemon.host.rpmostree import Deployment
from mcdaemon.machineconfig import kernelargs
from mcdaemon.plan import Plan
from mcdaemon.update import preflight
from mcdaemon.update.journal import Update
from mcdaemon.update.preflight import Need

MARKER = "mcdaemon.update="
"""Kernel argument that gives an update with an unchanged OS a deployment of its own."""


def title(update: str, attempt: int) -> str:
    """`initiating-command-line`: unique for each transaction, or rpm-ostree would join an old one (2.3)."""
    return f"mcdaemon:{update}:{attempt}"


def kernel_line(existing: str, plan: Plan, update: str) -> str:
    """The kernel arguments to stage: what is there, without what the old config managed, with what the new one does.

    With an unchanged OS the marker of the update makes the line, and so the deployment, a new one.
    """
    line = _unmarked(kernelargs.split(existing))
    change = kernelargs.plan(plan.kargs_from, plan.kargs_to, line)
    marker = [] if plan.os_changes else [MARKER + update]
    return " ".join([*kernelargs.expected(line, change), *marker])


def classify(
    plan: Plan, update: Update, staged: Optional[StagedDeployment], deployments: Sequence[Deployment], booted_line: str
) -> Staged:
    """What the staged deployment is, measured against the target (rpm-ostree.md 7.1: identity of success).

    `booted_line`: the kernel arguments that the booted entry was written with. Ours is locked, until it is about to be
    finalized.
    """
    if staged is None:
        return Staged.NONE
    entry = next((d for d in deployments if d.staged), None)
    booted = next((d for d in deployments if d.booted), None)
    if entry is None or booted is None or entry.name != staged.name:
        return Staged.OTHER
    if not staged.locked and not update.finalizing:
        return Staged.OTHER
    good = {update.image_digest, update.digest} - {""} if plan.image else {booted.digest}
    if entry.digest not in good or not _packages_fit(plan, entry, booted):
        return Staged.OTHER
    wanted = kernelargs.split(kernel_line(booted_line, plan, update.id))
    if _comparable(staged.kernel_arguments, plan) == _comparable(wanted, plan):
        return Staged.READY
    return Staged.OS_ONLY if plan.os_changes else Staged.OTHER


def _comparable(line: Sequence[str], plan: Plan) -> list[str]:
    """Without `ostree=`, which libostree writes at finalization; with another OS an older marker does not matter.

    libostree splits at every blank, also inside of quotes: the line is put together again first.
    """
    words = kernelargs.split(" ".join(line))
    words = tuple(_unmarked(words)) if plan.os_changes else words
    return [word for word in words if not word.startswith("ostree=")]


def _unmarked(line: Sequence[str]) -> list[str]:
    return [word for word in line if not word.startswith(MARKER)]


def _packages_fit(plan: Plan, entry: Deployment, booted: Deployment) -> bool:
    """Exactly what is asked for on top of what is booted: a package more is somebody else's deployment."""
    delta = plan.packages
    return set(entry.requested) == (set(booted.requested) | set(delta.install)) - set(delta.uninstall) and set(
        entry.removals
    ) == (set(booted.removals) | set(delta.remove_base)) - set(delta.reset_base)


def verify(
    machine: Machine,
    staged: StagedDeployment,
    deployments: Sequence[Deployment] = (),
    prunes_boot_early: bool = False,
) -> None:
    """What can be proved of a staged deployment besides its identity: that it has room, and an agent's interpreter.

    Raises Held for want of space, Broken for a target that would strand the agent.
    """
    root = machine.root_of(staged.name)
    if not interpreter(root):
        raise Broken(
            "cannot use this OS image: it has no Python >= 3.9 with gi, which mcdaemon needs to run after the reboot",
            "add python3 and python3-gobject-base to the image",
        )
    needs = [Need(root.path, "the root file system", "the merged /etc and the payload", preflight.DEPLOYMENT)]
    kernel = preflight.kernel_need(machine, staged)
    if kernel is not None:
        needs.append(preflight.less_what_is_dropped(kernel, machine, deployments, prunes_boot_early))
    preflight.require(needs, "finalize")


def interpreter(root: Root) -> Optional[Path]:
    """A Python >= 3.9 of that root that has gi, as the zipapp needs it (design: the agent survives the image)."""
    bindings = [
        path
        for pattern in ("lib/python3*/site-packages", "lib64/python3*/site-packages", "lib/python3/dist-packages")
        for path in root.path.glob(f"usr/{pattern}/gi/__init__.py")
    ]
    link = root.path / "usr/bin/python3"
    if not bindings or not os.path.lexists(link):
        return None
    # A link in that root may be absolute: it is resolved inside it, one step, as distributions make it.
    place = link.parent / os.readlink(link).rsplit("/", 1)[-1] if link.is_symlink() else link
    version = place.name[len("python3") :].lstrip(".")
    if not place.is_file() or not os.access(place, os.X_OK) or (version.isdigit() and int(version) < 9):
        return None
    # Bindings are made for one version of Python; a second interpreter in the image does not see them.
    fitting = (place.name, "python3") if version else [path.parts[-4] for path in bindings]
    return place if any(path.parts[-4] in fitting for path in bindings) else None


def needs_repository(plan: Plan, booted: Optional[Deployment]) -> bool:
    """Whether the transaction reads packages: whenever a new tree is made and some are requested in it.

    rpm-ostree resolves all of them against the repositories then, also those that are layered already; only KernelArgs
    works from its cache (rpm-ostree.md 1.11 step 18, 1.13).
    """
    requested = set(booted.requested if booted else ()) - set(plan.packages.uninstall) | set(plan.packages.install)
    return bool(plan.extensions_image) and plan.os_changes and bool(requested)
