"""What every operation is given, and what all that deploy have in common: staging, locking, rebooting, cleaning up."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Optional

from tests.stand import ostree_images
from tests.stand.introspection import Gio, GLib, OSTree
from tests.stand.rpmostreed import lockkey, origin
from tests.stand.rpmostreed.errors import Cancelled, OperationFailed
from tests.stand.rpmostreed.faults import Faults
from tests.stand.rpmostreed.options import Options
from tests.stand.rpmostreed.origin import Origin
from tests.stand.rpmostreed.profiles import Profile
from tests.stand.rpmostreed.sysroot import Sysroot, identity
from tests.stand.rpmostreed.transaction import Output, journal

DEPLOYED = "9bddbda177cd44d891b1b561a8a0ce9e"
BUS_TIMEOUT_MS = 25000
REBOOT_TIMEOUT = 60


@dataclass(frozen=True)
class Client:
    """Who asked: the agent id (``""`` where unregistered or ``cli``) and its systemd unit, if any."""

    agent: str
    unit: str


@dataclass
class Work:
    """One running operation on a locked sysroot."""

    sysroot: Sysroot
    osname: str
    client: Client
    profile: Profile
    faults: Faults
    output: Output
    cancellable: Any
    lock_layering: bool = False
    reboot_wanted: bool = False

    def reach(self, step: str) -> None:
        """A step where a fault may strike and a cancellation is noticed."""
        self.faults.reach(step, self.cancellable)
        if self.cancellable.is_cancelled():
            raise Cancelled

    def merge_deployment(self) -> Any:
        """Where origin and kernel arguments come from. Raises OperationFailed."""
        found = self.sysroot.origin_merge(self.osname)
        if found is None:
            raise OperationFailed(f"No previous deployment for OS '{self.osname}'")
        return found

    def retitle(self, options: Options, otherwise: str = "") -> str:
        """Sets the title from ``initiating-command-line``; that line, or ``""``."""
        line = options.text("initiating-command-line") or ""
        if line or otherwise:
            self.output.title(line or otherwise)
        return line

    def stage(self, commit: str, source: Origin, arguments: Sequence[str], lock: bool, command_line: str = "") -> None:
        """Stages ``commit``; the previous staged deployment goes. Then cleans up as rpm-ostree does."""
        self.reach("before-stage")
        self.output.task_begin("Staging deployment")
        if lock and not self.profile.lock_key:
            # Before staging, so that a shutdown in between does not finalize it.
            lockkey.lock(by_key=False)
        merge = self.sysroot.config_merge(self.osname)
        _, staged = self.sysroot.ostree.stage_tree(
            self.osname, commit, origin.write(source), merge, list(arguments), self.cancellable
        )
        self._settle_lock(lock)
        self.sysroot.reload()
        self.output.task_end()
        journal(
            f"Created new deployment /{self.sysroot.ostree.get_deployment_dirpath(staged)}",
            MESSAGE_ID=DEPLOYED,
            DEPLOYMENT_CHECKSUM=commit,
            COMMAND_LINE=command_line,
            AGENT=self.client.agent,
            AGENT_SD_UNIT=self.client.unit,
        )
        self.clean_base()

    def _settle_lock(self, lock: bool) -> None:
        if not lock:
            lockkey.unlock()
        elif not lockkey.locked():
            lockkey.lock(self.profile.lock_key)

    def clean_base(self) -> None:
        """rpmostree_syscore_cleanup: undeployed trees, base refs, unused package and image refs, objects (1.17)."""
        ostree = self.sysroot.ostree
        repo = self.sysroot.repo
        ostree.prepare_cleanup(None)
        regenerate_base_refs(self.sysroot)
        branches = self._drop_packages()
        origins = [self.sysroot.origin(item).image for item in self.sysroot.deployments]
        images, layers = ostree_images.prune_images(repo, [source for source in origins if source])
        if images or layers:
            self.output.message(f"Pruned images: {images} (layers: {layers})")
        _, _, _, freed = repo.prune(OSTree.RepoPruneFlags.REFS_ONLY, 0, None)
        if freed or branches:
            self.output.message(f"Freed: {GLib.format_size(freed)} (pkgcache branches: {branches})")

    def _drop_packages(self) -> int:
        used = {ref for item in self.sysroot.deployments for ref in package_refs(self.sysroot, item.get_csum())}
        unused = [ref for ref in ostree_images.list_refs(self.sysroot.repo, "rpmostree/pkg/") if ref not in used]
        for ref in unused:
            self.sysroot.repo.set_ref_immediate(None, ref, None, None)
        return len(unused)

    def reboot(self) -> None:
        """Checks inhibitors; the daemon then reboots after Finished. Raises OperationFailed where one blocks."""
        check_inhibitors()
        self.reboot_wanted = True


def regenerate_base_refs(sysroot: Sysroot) -> None:
    """Keeps the base commits of layered deployments, which no boot entry names."""
    repo = sysroot.repo
    for ref in ostree_images.list_refs(repo, "rpmostree/base/"):
        repo.set_ref_immediate(None, ref, None, None)
    layered = [item.get_csum() for item in sysroot.deployments if sysroot.is_layered(item.get_csum())]
    for number, base in enumerate(dict.fromkeys(sysroot.base(commit) for commit in layered)):
        repo.set_ref_immediate(None, f"rpmostree/base/{number}", base, None)


def package_refs(sysroot: Sysroot, commit: str) -> list[str]:
    """The pkgcache refs that a layered commit was made from."""
    found = sysroot.metadata(commit).lookup_value("stand.package-refs", GLib.VariantType("as"))
    return list(found.unpack()) if found is not None else []


def check_inhibitors() -> None:
    """Raises OperationFailed where logind has a blocking shutdown inhibitor (RO:daemon/rpmostreed-utils.cxx)."""
    try:
        bus = Gio.bus_get_sync(Gio.BusType.SYSTEM, None)
        found = bus.call_sync(
            "org.freedesktop.login1",
            "/org/freedesktop/login1",
            "org.freedesktop.login1.Manager",
            "ListInhibitors",
            None,
            GLib.VariantType("(a(ssssuu))"),
            Gio.DBusCallFlags.NONE,
            BUS_TIMEOUT_MS,
            None,
        )
    except GLib.Error as error:
        raise OperationFailed(f"Checking systemd inhibitor locks: {error.message}") from error
    for what, who, why, mode, _, _ in found.unpack()[0]:
        if mode == "block" and "shutdown" in what.split(":"):
            raise OperationFailed(
                f"Reboot blocked by a systemd inhibitor lock in `block` mode\nHeld by: {who}\nReason: {why}"
            )


def start_reboot() -> None:
    """Queues ``systemctl reboot``."""
    journal("Initiating reboot requested from transaction")
    subprocess.Popen(["systemctl", "reboot"], stdin=subprocess.DEVNULL)


def drop_deployments(work: Work, pending: bool, rollback: bool) -> bool:
    """Removes pending and rollback deployments of this osname, never booted or pinned ones. Whether any went."""
    sysroot = work.sysroot
    victims: list[str] = []
    if pending:
        for item in sysroot.deployments:
            if sysroot.is_booted(item):
                break
            if item.get_osname() == work.osname and not item.is_pinned():
                victims.append(identity(item))
    old: Optional[Any] = sysroot.rollback(work.osname) if rollback else None
    if old is not None and not old.is_pinned():
        victims.append(identity(old))
    kept = [item for item in sysroot.deployments if identity(item) not in victims]
    if not victims or len(kept) == len(sysroot.deployments):
        work.output.message("Deployments unchanged.")
        return False
    sysroot.ostree.write_deployments(kept, work.cancellable)
    lockkey.unlock()
    sysroot.reload()
    return True
