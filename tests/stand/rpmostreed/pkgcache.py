"""Unpacked packages, kept as commits under ``rpmostree/pkg/…`` so that a tree can be made again without repository."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.stand import ostree_images
from tests.stand.introspection import Gio, GLib, OSTree
from tests.stand.rpmostreed.errors import OperationFailed
from tests.stand.rpmostreed.rpm import Package

PREFIX = "rpmostree/pkg/"
UNPACK_TIMEOUT = 120
# Directories of an RPM's payload that are links into /usr in an ostree tree, and /etc, which is /usr/etc in a commit.
MOVED = ("bin", "sbin", "lib", "lib64", "etc")
_METADATA_KEY = "stand.package"


def packages(repo: Any) -> list[Package]:
    """All unpacked packages."""
    found = []
    for ref in ostree_images.list_refs(repo, PREFIX):
        facts = json.loads(ostree_images.commit_metadata(repo, ostree_images.resolve(repo, ref))[_METADATA_KEY])
        provides, requires, files = (tuple(facts.pop(key)) for key in ("provides", "requires", "files"))
        found.append(Package(provides=provides, requires=requires, files=files, **facts))
    return found


def local(cached: Sequence[Package], requested: Sequence[str]) -> list[Package]:
    """The packages of an origin's ``requested-local`` items. Raises OperationFailed for one that is gone."""
    by_nevra = {package.nevra: package for package in cached}
    found = []
    for item in requested:
        nevra = item.rpartition(":")[2]
        if nevra not in by_nevra:
            raise OperationFailed(f"Failed to find package '{nevra}' in pkgcache")
        found.append(by_nevra[nevra])
    return found


def unpack(repo: Any, package: Package) -> None:
    """Commits an RPM file's content under its pkgcache ref. Raises OperationFailed where it cannot be unpacked."""
    with tempfile.TemporaryDirectory(prefix="import-", dir="/var/tmp") as folder:
        root = Path(folder)
        converter = subprocess.Popen(["rpm2cpio", package.path], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        try:
            done = subprocess.run(
                ["cpio", "--extract", "--make-directories", "--no-absolute-filenames", "--quiet"],
                cwd=root,
                stdin=converter.stdout,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                timeout=UNPACK_TIMEOUT,
            )
        finally:
            converter.kill()
            converter.communicate(timeout=UNPACK_TIMEOUT)
        if done.returncode != 0:
            raise OperationFailed(f"Importing package '{package.nevra}': {done.stderr.strip()}")
        _move(root)
        _commit(repo, root, package)


def tree_path(path: str) -> str:
    """Where a path of a package is in a commit's tree."""
    first, _, rest = path.strip("/").partition("/")
    return f"usr/{first}/{rest}" if first in MOVED else path.strip("/")


def _move(root: Path) -> None:
    """Moves what an RPM ships to where a commit has it; /var is not shipped (rpm-ostree makes it tmpfiles)."""
    for name in ("var", "run"):
        shutil.rmtree(root / name, ignore_errors=True)
    for name in MOVED:
        source, target = root / name, root / "usr" / name
        if not source.is_dir() or source.is_symlink():
            continue
        target.parent.mkdir(exist_ok=True)
        if target.exists():
            shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True)
            shutil.rmtree(source)
        else:
            source.rename(target)


def _commit(repo: Any, root: Path, package: Package) -> None:
    modifier = OSTree.RepoCommitModifier.new(OSTree.RepoCommitModifierFlags.SKIP_XATTRS, None, None)
    facts = dataclasses.asdict(dataclasses.replace(package, path=""))
    metadata = {
        _METADATA_KEY: GLib.Variant("s", json.dumps(facts)),
        "rpmostree.nevra": GLib.Variant("(sstsss)", package.fields),
        "rpmostree.repo": GLib.Variant("s", package.repository),
    }
    repo.prepare_transaction(None)
    try:
        tree = OSTree.MutableTree()
        repo.write_directory_to_mtree(Gio.File.new_for_path(str(root)), tree, modifier, None)
        _, content = repo.write_mtree(tree, None)
        _, commit = repo.write_commit_with_time(None, None, None, GLib.Variant("a{sv}", metadata), content, 0, None)
        repo.transaction_set_ref(None, package.ref, commit)
        repo.commit_transaction(None)
    except BaseException:
        repo.abort_transaction(None)
        raise
