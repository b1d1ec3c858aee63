"""What ostree's merge of /etc will do, said before it does it.

When a deployment is finalized, what differs between the booted deployment's /usr/etc (the old default) and its /etc
(the running one) is carried over to the new deployment's /etc, which starts as a copy of its own /usr/etc. The rules
and their traps are in the rpm-ostree reference 5.3 and 5.4: a managed file that equals the old default and is not in
the new image vanishes, a changed one masks what the new image brings, and one that the new image has as a directory
makes the whole finalization fail. Upstream: merge_configuration_from() in libostree's ostree-sysroot-deploy.c,
ostree-diff.c.

`predict` is pure; it runs the merge on three trees in memory. `scan` reads a tree. Neither looks at extended
attributes: the merge does not compare them, and copies those of what it copies.
"""

from __future__ import annotations

import enum
import os
import posixpath
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from mcdaemon.errors import from_os_error
from mcdaemon.host.files import Kind, Node, node_at

# Absolute paths below /etc, without /etc itself (the merge never touches that one).
Tree = Mapping[str, Node]

TOP = "/etc"

_ABSENT = Node(Kind.ABSENT)
_TOP_NODE = Node(Kind.DIRECTORY, 0o755)
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_MOST_LINKS = 40


class Origin(enum.Enum):
    """Where a path of the merged /etc comes from: KEPT is the running one (of a directory: its mode and owner)."""

    KEPT = "kept"
    NEW = "new"
    ABSENT = "absent"


@dataclass(frozen=True)
class Prediction:
    """The merged /etc, and what in it an update has to care about; all sequences are sorted.

    `merged` is the tree that will be there (paths that nothing is at are not in it), `nodes` says for each path asked
    about where it comes from. `vanish` is what is in the running tree and not in the merged one, although nobody
    deleted it; `replaced` what is untouched and gets another version from the new image; `masked` where the running
    version stays in front of a different one of the new image. `failure` is empty, or a complaint like ostree's: the
    finalization will fail, and the old deployment will boot; `merged` is then what it had done until there. `escapes`
    are paths that the merge reaches through a link of the new tree that leads out of it, to the running system: they
    are not predicted. `special` are the FIFOs, sockets and devices of the running tree.
    """

    merged: Tree
    nodes: Mapping[str, Origin]
    vanish: tuple[str, ...] = ()
    replaced: tuple[str, ...] = ()
    masked: tuple[str, ...] = ()
    failure: str = ""
    escapes: tuple[str, ...] = ()
    special: tuple[str, ...] = ()


def predict(
    old_default: Tree,
    running: Tree,
    new: Tree,
    managed: Optional[Collection[str]] = None,
    skips_special_files: bool = False,
) -> Prediction:
    """Run the merge on three trees, as scanned; `new` is the new deployment's etc, not its usr/etc.

    With `managed` the answer is about these paths only, and then the trees need to hold only them and their parents
    (see scan): cheap, but then neither a failure nor a link elsewhere is seen, and a directory's own mode can be
    another.

    `skips_special_files`: a FIFO, socket or device in a directory that is copied as a whole makes the merge fail before
    libostree 2024.2 and is left out since then (OSTree.check_version(2024, 2); field case TXN-45, ostree pull request
    3143).
    """
    merge = _Merge(running, new, skips_special_files)
    failure = merge.run(_diff(old_default, running))
    paths = {*old_default, *running, *new} if managed is None else set(managed)
    nodes = {path: merge.origin(path) for path in paths}
    gone = [path for path in paths if path in running and nodes[path] is Origin.ABSENT]
    differ = [path for path in paths if path in running and path in new and running[path] != new[path]]
    return Prediction(
        merged=merge.tree(),
        nodes=nodes,
        vanish=tuple(sorted(gone)),
        replaced=tuple(sorted(path for path in differ if nodes[path] is Origin.NEW)),
        masked=tuple(sorted(path for path in differ if nodes[path] is Origin.KEPT)),
        failure=failure,
        escapes=tuple(sorted(merge.escapes)),
        special=tuple(sorted(path for path in paths if path in running and running[path].kind is Kind.OTHER)),
    )


def scan(directory: Path, only: Optional[Collection[str]] = None) -> Tree:
    """Read an etc directory ("/etc", "/usr/etc", "<deployment>/etc"); paths are named as if it stood at /etc.

    With `only`, these paths and their parents instead of everything. What disappears meanwhile is left out. Raises as
    errors.from_os_error says.
    """
    wanted = None if only is None else _with_parents(only)
    try:
        descriptor = os.open(directory, _DIRECTORY)
        try:
            return dict(_scan(descriptor, TOP, wanted))
        finally:
            os.close(descriptor)
    except OSError as error:
        raise from_os_error(error, "read", directory) from error


class _MergeError(Exception):
    """The merge fails here."""


class _EscapeError(Exception):
    """A path leads out of the new tree."""


@dataclass(frozen=True)
class _Diff:
    modified: tuple[str, ...]
    removed: tuple[str, ...]
    added: tuple[str, ...]


class _Merge:
    """The new deployment's etc while the merge works on it: a tree with the few file operations that the merge uses.

    Links of the new tree are followed as the kernel does for ostree: parents always, the last component only where a
    directory is opened.
    """

    def __init__(self, running: Tree, new: Tree, skips_special_files: bool) -> None:
        self._running = running
        self._skips_special_files = skips_special_files
        self._nodes: dict[str, Node] = dict(new)
        self._origins = dict.fromkeys(new, Origin.NEW)
        self.escapes: set[str] = set()

    def run(self, diff: _Diff) -> str:
        """Apply a difference; the complaint where the merge fails, and nothing is done after that."""
        steps = [(self._remove, path) for path in diff.removed]
        steps += [(self._copy, path) for path in (*diff.modified, *diff.added)]
        for step, path in steps:
            try:
                step(path)
            except _EscapeError:
                self.escapes.add(path)
            except _MergeError as error:
                return f"During /etc merge: {error}"
        return ""

    def origin(self, path: str) -> Origin:
        return self._origins.get(path, Origin.ABSENT)

    def tree(self) -> Tree:
        return self._nodes

    def _remove(self, path: str) -> None:
        """glnx_shutil_rm_rf_at(): what is missing is fine."""
        place = self._place(path)
        if place is not None:
            self._drop(place)

    def _copy(self, path: str) -> None:
        """copy_modified_config_file()."""
        parent = posixpath.dirname(path)
        if parent != TOP:
            self._ensure_directory(parent)
        place = self._place(path)
        if place is None:
            raise _MergeError(f"{path}: No such file or directory")
        source = self._running[path]
        if self._node(place).kind is Kind.DIRECTORY:
            if source.kind is not Kind.DIRECTORY:
                relative = path[len(TOP) + 1 :]
                raise _MergeError(f"Modified config file newly defaults to directory '{relative}', cannot merge")
            return
        self._drop(place)
        if source.kind is Kind.DIRECTORY:
            self._copy_tree(path, place)
        elif source.kind is not Kind.OTHER:
            self._set(path, place)

    def _copy_tree(self, path: str, place: str) -> None:
        """copy_dir_recurse(): also what is in there and unchanged."""
        self._set(path, place)
        for child in _below(self._running, path):
            if self._running[child].kind is not Kind.OTHER:
                self._set(child, place + child[len(path) :])
            elif not self._skips_special_files:
                name = posixpath.basename(child)
                raise _MergeError(f"Copying {name}: Cannot copy non-regular/non-symlink file: {name}")

    def _ensure_directory(self, path: str) -> None:
        """ensure_directory_from_template(): make it, with parents; in any case it gets the running one's attributes."""
        place = self._place(path)
        if place is None:
            self._ensure_directory(posixpath.dirname(path))
            place = self._place(path)
        if place is None:
            raise _MergeError(f"{path}: No such file or directory")
        kind = self._node(place).kind
        if kind is Kind.LINK:
            place = self._through(place)
            kind = self._node(place).kind
            if kind is Kind.ABSENT:
                raise _MergeError(f"{path}: No such file or directory")
        if kind not in (Kind.DIRECTORY, Kind.ABSENT):
            raise _MergeError(f"{path}: Not a directory")
        if place != TOP:
            self._set(path, place)

    def _place(self, path: str) -> Optional[str]:
        """Where a path of the running tree is in this one, parents followed; None where a parent is missing."""
        parent = posixpath.dirname(path)
        if parent == TOP:
            return path
        place = self._place(parent)
        if place is None:
            return None
        if self._node(place).kind is Kind.LINK:
            place = self._through(place)
        kind = self._node(place).kind
        if kind is Kind.ABSENT:
            return None
        if kind is not Kind.DIRECTORY:
            raise _MergeError(f"{path}: Not a directory")
        return posixpath.join(place, posixpath.basename(path))

    def _through(self, link: str, depth: int = 0) -> str:
        """Where a link leads, inside of this tree. An absolute one leads to the running system, where ostree runs."""
        if depth > _MOST_LINKS:
            raise _MergeError(f"{link}: Too many levels of symbolic links")
        target = self._nodes[link].target
        place = posixpath.dirname(link)
        for part in target.split("/"):
            place = posixpath.normpath(posixpath.join(place, part))
            if target.startswith("/") or not (place + "/").startswith(TOP + "/"):
                raise _EscapeError(link)
            if self._node(place).kind is Kind.LINK:
                place = self._through(place, depth + 1)
        return place

    def _node(self, place: str) -> Node:
        return _TOP_NODE if place == TOP else self._nodes.get(place, _ABSENT)

    def _set(self, path: str, place: str) -> None:
        self._nodes[place] = self._running[path]
        self._origins[place] = Origin.KEPT

    def _drop(self, place: str) -> None:
        for path in [place, *_below(self._nodes, place)]:
            self._nodes.pop(path, None)
            self._origins.pop(path, None)


def _diff(old: Tree, running: Tree) -> _Diff:
    """ostree_diff_dirs() with OSTREE_DIFF_FLAGS_IGNORE_XATTRS; parents come before what is in them."""
    modified: list[str] = []
    removed: list[str] = []
    added: list[str] = []
    children: dict[str, list[str]] = {}
    for path in sorted({*old, *running}):
        children.setdefault(posixpath.dirname(path), []).append(path)
    pending = [TOP]
    while pending:
        for path in children.get(pending.pop(), ()):
            before, now = old.get(path), running.get(path)
            if now is None:
                removed.append(path)
            elif before is None:
                added += [path, *_below(running, path)]
            else:
                if before != now:
                    modified.append(path)
                if before.kind is now.kind is Kind.DIRECTORY:
                    pending.append(path)
    return _Diff(tuple(modified), tuple(removed), tuple(added))


def _below(tree: Mapping[str, Node], path: str) -> list[str]:
    """Everything under a path of a tree, parents first."""
    return sorted(other for other in tree if other.startswith(path + "/"))


def _scan(directory: int, path: str, wanted: Optional[frozenset[str]]) -> Iterator[tuple[str, Node]]:
    for name in sorted(os.listdir(directory)):
        child = f"{path}/{name}"
        if wanted is not None and child not in wanted:
            continue
        node = node_at(directory, name)
        if node.kind is Kind.ABSENT:
            continue
        yield child, node
        if node.kind is Kind.DIRECTORY:
            try:
                descriptor = os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=directory)
            except (FileNotFoundError, NotADirectoryError):
                continue
            try:
                yield from _scan(descriptor, child, wanted)
            finally:
                os.close(descriptor)


def _with_parents(paths: Collection[str]) -> frozenset[str]:
    wanted = set(paths)
    for path in paths:
        while path not in ("/", ""):
            wanted.add(path)
            path = posixpath.dirname(path)
    return frozenset(wanted)
