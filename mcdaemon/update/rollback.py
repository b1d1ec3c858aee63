"""The way back: the deployment from before the update becomes the default again, exactly once."""

from __future__ import annotations

from mcdaemon.errors import Broken
from mcdaemon.host import boot
from mcdaemon.host.deployments import Machine
from mcdaemon.host.rpmostree import RpmOstree


def to_source(machine: Machine, rpmostree: RpmOstree, source: str) -> None:
    """Make `source` the default of the next boot. Idempotent: rpm-ostree's Rollback toggles, so it is only called while
    the entry is not the default yet (rpm-ostree.md 1.16). Raises Broken when the deployment is gone."""
    if _default(machine) == source:
        return
    if all(entry.deployment != source for entry in boot.entries(machine.boot, machine.sysroot)):
        raise Broken(
            f"cannot roll back: the deployment {source} from before the update is gone",
            "repair what is not healthy, or desire another config: it starts from here",
        )
    if machine.staged() is not None:
        rpmostree.cleanup("pending-deploy")  # Rollback refuses while something is staged (row 42)
    rpmostree.roll_back()
    if _default(machine) != source:
        raise Broken(f"cannot roll back: rpm-ostree made {_default(machine) or 'nothing'} the default, not {source}")


def _default(machine: Machine) -> str:
    found = boot.entries(machine.boot, machine.sysroot)
    return found[0].deployment if found else ""
