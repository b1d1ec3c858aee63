"""Operations on the boot order and on kernel arguments: KernelArgs, Rollback, Cleanup, FinalizeDeployment
(rpm-ostree.md 1.13 to 1.18)."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.stand.introspection import GLib
from tests.stand.rpmostreed import layering, lockkey
from tests.stand.rpmostreed.errors import DAEMON_FAILED, FAILED, MethodError, OperationFailed
from tests.stand.rpmostreed.kernelargs import KernelArguments
from tests.stand.rpmostreed.options import Options
from tests.stand.rpmostreed.sysroot import Sysroot
from tests.stand.rpmostreed.transaction import journal
from tests.stand.rpmostreed.work import Work, check_inhibitors, drop_deployments

CACHE = Path("/var/cache/rpm-ostree")
CLEANUP_ELEMENTS = ("base", "pending-deploy", "rollback-deploy", "repomd")


def kernel_arguments(
    work: Work, existing: str, added: Sequence[str], replaced: Sequence[str], removed: Sequence[str], options: Options
) -> None:
    """KernelArgs: patches the client's ``existing`` string and stages the whole origin again, from the pkgcache."""
    line = work.retitle(options, "kargs")
    patched = _patch(existing, added, replaced, removed, options)
    if patched is None or work.faults.flag("no_op"):
        work.output.message("No changes.")
        return
    redeploy(work, patched, options, line, pkgcache_only=True)


def redeploy(
    work: Work, arguments: Sequence[str], options: Options, line: str, pkgcache_only: bool, **changes: Any
) -> None:
    """Stages the merge deployment's origin (with ``changes``) again without reading its base's source."""
    merge = work.merge_deployment()
    source = replace(work.sysroot.origin(merge), **changes)
    layers = layering.plan(work, work.sysroot.base(merge.get_csum()), source, pkgcache_only)
    commit = layering.assemble(work, layers)
    work.stage(commit, source, arguments, options.boolean("lock-finalization"), line)
    if options.boolean("reboot"):
        work.reboot()


def _patch(
    existing: str, added: Sequence[str], replaced: Sequence[str], removed: Sequence[str], options: Options
) -> list[str] | None:
    final = options.text("final-kernel-args")
    if final is not None:
        return None if final == existing else final.split()
    arguments = KernelArguments(existing)
    original = existing.split()
    for argument in removed:
        arguments.delete(argument)
    for argument in replaced:
        arguments.replace(argument)
    for argument in added:
        arguments.append(argument)
    changed = bool(added or replaced or removed)
    for argument in options.texts("append-if-missing"):
        if argument not in arguments.items:
            arguments.append(argument)
            changed = True
    for argument in options.texts("delete-if-present"):
        if argument in original:
            arguments.delete(argument)
            changed = True
    return arguments.items if changed else None


def boot_config(sysroot: Sysroot, osname: str, deployment_index: str, pending: bool) -> dict[str, Any]:
    """GetDeploymentBootConfig: by index in the boot order, or the pending or merge deployment. MethodError."""
    if deployment_index:
        found = sysroot.deployments[_index(deployment_index, len(sysroot.deployments))]
    else:
        found = sysroot.origin_merge(osname) if pending else sysroot.config_merge(osname)
    if found is None:
        raise MethodError(FAILED, f"No deployments found for os {osname}")
    config = found.get_bootconfig()
    keys = ["options"] if found.is_staged() else ["title", "linux", "initrd", "options", "version"]
    result = {key: GLib.Variant("s", config.get(key) or "") for key in keys}
    result["staged"] = GLib.Variant("b", found.is_staged())
    return result


def _index(text: str, count: int) -> int:
    if not text.isdigit():
        raise MethodError(DAEMON_FAILED, f"Invalid deployment index {text}, must be a number and >= 0")
    if int(text) >= count:
        raise MethodError(DAEMON_FAILED, f"Out of range deployment index {int(text)}, expected < {count}")
    return int(text)


def rollback(work: Work, options: Options) -> None:
    """Rollback: puts the rollback deployment first (or the booted one again), at once and without staging."""
    sysroot = work.sysroot
    pending = sysroot.pending(work.osname)
    if pending is not None and pending.is_staged():
        raise OperationFailed("Staged deployment (remove with cleanup -p)")
    target = sysroot.booted if pending is not None else sysroot.rollback(work.osname)
    if target is None:
        raise OperationFailed("No rollback deployment found")
    work.output.message(f"Moving '{target.get_csum()}.{target.get_deployserial()}' to be first deployment")
    others = [item for item in sysroot.deployments if not item.equal(target)]
    sysroot.ostree.write_deployments([target, *others], work.cancellable)
    sysroot.reload()
    if options.boolean("reboot"):
        work.reboot()


def clear_rollback_target(work: Work) -> None:
    """ClearRollbackTarget: removes the rollback deployment."""
    if drop_deployments(work, pending=False, rollback=True):
        work.clean_base()


def cleanup(work: Work, elements: Sequence[str]) -> None:
    """Cleanup; works on a locked staged deployment too."""
    pending, old = "pending-deploy" in elements, "rollback-deploy" in elements
    dropped = (pending or old) and drop_deployments(work, pending, old)
    if dropped or "base" in elements:
        work.clean_base()
    if "repomd" in elements and CACHE.exists():
        for item in CACHE.iterdir():
            if item.is_dir():
                shutil.rmtree(item)
            else:
                item.unlink()


def check_cleanup(elements: Sequence[str]) -> None:
    """Raises MethodError for an element that Cleanup does not know."""
    for element in elements:
        if element not in CLEANUP_ELEMENTS:
            raise MethodError(FAILED, f"Invalid cleanup type: {element}")


def finalize(work: Work, options: Options) -> None:
    """FinalizeDeployment: unlocks what is staged and reboots (1.18)."""
    work.retitle(options, "finalize-deployment")
    sysroot = work.sysroot
    if not sysroot.deployments:
        raise OperationFailed("No deployments found")
    staged = sysroot.deployments[0]
    if not staged.is_staged():
        raise OperationFailed("No pending staged deployment found")
    if staged.get_osname() != work.osname:
        raise OperationFailed(f"Staged deployment is not for osname '{work.osname}'")
    _check_expected(sysroot, staged, options)
    check_inhibitors()
    if not lockkey.locked() and not options.boolean("allow-unlocked"):
        raise OperationFailed("Staged deployment already unlocked")
    try:
        lockkey.unlock()
    except OSError as error:
        raise OperationFailed(f"Failed to unlock finalization of staged deployment: {error.strerror}") from error
    journal(f"Finalized deployment; rebooting into {staged.get_csum()}")
    work.reboot_wanted = True


def _check_expected(sysroot: Sysroot, staged: Any, options: Options) -> None:
    expected = options.text("checksum")
    if expected is None:
        if not options.boolean("allow-missing-checksum"):
            raise OperationFailed("Missing expected checksum")
        return
    base = sysroot.base(staged.get_csum())
    found = base
    if sysroot.origin(staged).image:
        found = str(sysroot.metadata(base).unpack().get("ostree.manifest-digest", base))
    if found != expected:
        raise OperationFailed(f"Expected staged base checksum {expected}, but found {found}")


def initramfs_state(work: Work, regenerate: bool, arguments: Sequence[str], options: Options) -> None:
    """SetInitramfsState. There is no dracut here: the regenerated initramfs is a marked copy (1.15)."""
    line = work.retitle(options, "initramfs")
    merge = work.merge_deployment()
    source = work.sysroot.origin(merge)
    if source.regenerate_initramfs == regenerate and not source.initramfs_args and not arguments:
        state = "enabled" if regenerate else "disabled"
        raise OperationFailed(f"initramfs regeneration state is already {state}")
    redeploy(
        work,
        work.sysroot.kernel_arguments(merge).split(),
        options,
        line,
        pkgcache_only=False,
        regenerate_initramfs=regenerate,
        initramfs_args=tuple(arguments),
    )


def initramfs_etc(
    work: Work, track: Sequence[str], untrack: Sequence[str], flags: tuple[bool, bool], options: Options
) -> None:
    """InitramfsEtc; ``flags`` are untrack_all and force_sync. The files are recorded in the origin only."""
    line = work.retitle(options, "initramfs-etc")
    for path in track:
        if not path.startswith("/etc/"):
            raise OperationFailed(f"Path outside /etc forbidden: {path}")
    untrack_all, force_sync = flags
    merge = work.merge_deployment()
    before = work.sysroot.origin(merge).initramfs_etc
    kept: list[str] = [] if untrack_all else [path for path in before if path not in untrack]
    tracked = tuple(dict.fromkeys([*kept, *track]))
    if tracked == before and not force_sync:
        work.output.message("No changes.")
        return
    redeploy(
        work, work.sysroot.kernel_arguments(merge).split(), options, line, pkgcache_only=False, initramfs_etc=tracked
    )
