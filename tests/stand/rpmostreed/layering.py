"""Package layering, small: real RPM files are unpacked over the base tree and a commit is made of the result.

It is not dnf: requirements are names that the base, the request or a repository provides; versions in requirements,
conflicts, scriptlets, triggers and the rpmdb are left out.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.stand import ostree_tree
from tests.stand.introspection import GLib
from tests.stand.rpmostreed import basepackages, pkgcache, repositories, rpm
from tests.stand.rpmostreed.errors import OperationFailed
from tests.stand.rpmostreed.origin import Origin
from tests.stand.rpmostreed.rpm import Package
from tests.stand.rpmostreed.sysroot import CLIENT_LAYER
from tests.stand.rpmostreed.work import Work

CLIENT_LAYER_VERSION = 6
_MODULES = "usr/lib/modules"


@dataclass(frozen=True)
class Layers:
    """What goes on a base: the packages, those of them that were asked for and are not in the base, what is removed."""

    base: str
    packages: tuple[Package, ...] = ()
    active: tuple[str, ...] = ()
    removed: tuple[Package, ...] = ()
    initramfs: str = ""

    @property
    def state(self) -> str:
        """Identity of the result; "" where it is the base itself."""
        if not (self.packages or self.removed or self.initramfs):
            return ""
        facts = [
            self.base,
            sorted(one.nevra for one in self.packages),
            sorted(one.nevra for one in self.removed),
            self.initramfs,
        ]
        return hashlib.sha512(json.dumps(facts).encode()).hexdigest()


def plan(work: Work, base: str, source: Origin, pkgcache_only: bool) -> Layers:
    """Finds every package that ``source`` asks for. Raises OperationFailed with rpm-ostree's texts (section 7).

    With ``pkgcache_only`` (KernelArgs, cache-only) the packages are those that are unpacked already."""
    if not source.layers:
        return Layers(base)
    if work.lock_layering:
        raise OperationFailed("Cannot operate; `LockLayering=true` in configuration.")
    installed = basepackages.read(work.sysroot.repo, base)
    removed = tuple(_removed(installed, name) for name in source.removed)
    kept = {name: one for name, one in installed.items() if one not in removed}
    active = [name for name in source.packages if not any(one.answers(name) for one in kept.values())]
    wanted: list[Package] = []
    if active or source.local_packages:
        cached = pkgcache.packages(work.sysroot.repo)
        pool = cached if pkgcache_only else repositories.available()
        local = pkgcache.local(cached, source.local_packages)
        wanted = _resolve(active, local, pool, kept, bool(installed))
    initramfs = " ".join(["regenerated", *source.initramfs_args]) if source.regenerate_initramfs else ""
    return Layers(base, tuple(wanted), tuple(active), removed, initramfs)


def assemble(work: Work, layers: Layers) -> str:
    """The commit for ``layers``: the base itself, the present commit, or a new one."""
    if not layers.state:
        return layers.base
    sysroot = work.sysroot
    for deployment in sysroot.deployments:
        commit = str(deployment.get_csum())
        state = sysroot.metadata(commit).unpack().get("rpmostree.state-sha512")
        if state == layers.state:
            return commit
    fetch(work, layers)
    work.output.task_begin("Processing packages")
    commit = _commit(work, layers)
    work.output.task_end()
    return commit


def fetch(work: Work, layers: Layers) -> None:
    """Unpacks the packages that the pkgcache lacks."""
    missing = [one for one in layers.packages if not work.sysroot.resolve(one.ref)]
    if not missing:
        return
    size = GLib.format_size(sum(os.path.getsize(one.path) for one in missing))
    work.output.message(f"Will download: {len(missing)} package{'s' if len(missing) > 1 else ''} ({size})")
    work.output.task_begin("Importing packages")
    for package in missing:
        pkgcache.unpack(work.sysroot.repo, package)
    work.output.task_end()


def describe(layers: Layers, previous: Sequence[str]) -> list[str]:
    """The package transaction for people, one message per kind."""
    lines = []
    added = [one for one in layers.packages if one.name not in previous]
    if added:
        lines.append("\n".join(["Installing:", *(f"  {one.nevra} ({one.repository or 'cached'})" for one in added)]))
    if layers.removed:
        lines.append("\n".join(["Removing:", *(f"  {one.nevra}" for one in layers.removed)]))
    return lines


def _removed(installed: dict[str, Package], name: str) -> Package:
    for package in installed.values():
        if name in (package.name, package.nevra):
            return package
    raise OperationFailed(f'Package "{name}" not found')


def _resolve(
    requests: Sequence[str], local: list[Package], pool: list[Package], base: dict[str, Package], base_is_known: bool
) -> list[Package]:
    chosen = {package.name: package for package in local}
    missing = []
    for request in requests:
        package = rpm.best(pool, request)
        if package is None:
            missing.append(request)
        else:
            chosen[package.name] = package
    if missing:
        raise OperationFailed(f"Packages not found: {', '.join(missing)}")
    problems = []
    queue = list(chosen.values())
    while queue:
        package = queue.pop(0)
        _check_kept(package, base)
        for requirement in package.requires:
            if any(one.answers(requirement) for one in [*chosen.values(), *base.values()]):
                continue
            found = rpm.best(pool, requirement)
            if found is not None:
                chosen[found.name] = found
                queue.append(found)
            elif base_is_known:
                problems.append(f"nothing provides {requirement} needed by {package.nevra} from {package.repository}")
    if problems:
        raise OperationFailed(_depsolve_problems(problems))
    return sorted(chosen.values(), key=lambda package: package.nevra)


def _check_kept(package: Package, base: dict[str, Package]) -> None:
    installed = base.get(package.name)
    if installed is not None and package.nevra != installed.nevra:
        raise OperationFailed(f"Some base packages would be replaced\n  {installed.nevra} -> {package.nevra}")


def _depsolve_problems(problems: Sequence[str]) -> str:
    plural = "problem" if len(problems) == 1 else "problems"
    lines = [f"Could not depsolve transaction; {len(problems)} {plural} detected:"]
    for number, problem in enumerate(problems, 1):
        prefix = " Problem:" if len(problems) == 1 else f" Problem {number}:"
        lines.append(f"{prefix} conflicting requests\n  - {problem}")
    return "\n".join(lines)


def _commit(work: Work, layers: Layers) -> str:
    repo = work.sysroot.repo
    repo.prepare_transaction(None)
    try:
        tree = ostree_tree.mutable_tree(repo, layers.base)
        for package in layers.removed:
            for path in (*package.files, basepackages.list_path(package)):
                ostree_tree.remove_path(tree, pkgcache.tree_path(path))
        for package in layers.packages:
            ostree_tree.apply_package(repo, tree, work.sysroot.resolve(package.ref), package.nevra)
        _settle_kernel(repo, tree, layers)
        _, content = repo.write_mtree(tree, None)
        metadata = _layer_metadata(layers)
        timestamp = work.sysroot.timestamp(layers.base)
        _, commit = repo.write_commit_with_time(layers.base, None, None, metadata, content, timestamp, None)
        repo.commit_transaction(None)
    except ostree_tree.TreeConflict as error:
        repo.abort_transaction(None)
        raise OperationFailed(f"Assembling tree: {error}") from error
    except BaseException:
        repo.abort_transaction(None)
        raise
    return str(commit)


def _settle_kernel(repo: Any, tree: Any, layers: Layers) -> None:
    """One kernel only, and an initramfs for it; dracut's part is a marked file here."""
    kernels = [
        name
        for name in ostree_tree.list_directory(tree, _MODULES)
        if "vmlinuz" in ostree_tree.list_directory(tree, f"{_MODULES}/{name}")
    ]
    if len(kernels) > 1:
        raise OperationFailed("Finalizing kernel: Multiple subdirectories found in: usr/lib/modules")
    if not kernels:
        raise OperationFailed(
            "Finalizing kernel: Failed to find kernel in /usr/lib/modules, /usr/lib/ostree-boot or /boot"
        )
    folder = f"{_MODULES}/{kernels[0]}"
    if layers.initramfs or "initramfs.img" not in ostree_tree.list_directory(tree, folder):
        text = f"stand initramfs for {kernels[0]} {layers.initramfs}\n"
        ostree_tree.put_file(repo, tree, f"{folder}/initramfs.img", text.encode(), 0o600)


def _layer_metadata(layers: Layers) -> Any:
    removed = [GLib.Variant("(sstsss)", package.fields) for package in layers.removed]
    return GLib.Variant(
        "a{sv}",
        {
            CLIENT_LAYER: GLib.Variant("b", True),
            "rpmostree.clientlayer_version": GLib.Variant("u", CLIENT_LAYER_VERSION),
            "rpmostree.packages": GLib.Variant("as", sorted(layers.active)),
            "rpmostree.removed-base-packages": GLib.Variant("av", removed),
            "rpmostree.state-sha512": GLib.Variant("s", layers.state),
            "stand.package-refs": GLib.Variant("as", [package.ref for package in layers.packages]),
        },
    )
