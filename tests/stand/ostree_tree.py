"""Overlaying ostree commits in a mutable tree: layers with whiteouts, and packages on a base.

Upper commits are walked object by object, so nothing is checked out or hashed again.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

from tests.stand.introspection import GLib, OSTree

WHITEOUT = ".wh."
OPAQUE = ".wh..wh..opq"


class TreeConflict(Exception):
    """Two trees cannot be merged; the text names the path."""


def mutable_tree(repo: Any, commit: str) -> Any:
    """A mutable tree with a commit's content (read lazily)."""
    contents, metadata = _root(repo, commit)
    return OSTree.MutableTree.new_from_checksum(repo, contents, metadata)


def apply_layer(repo: Any, tree: Any, commit: str) -> None:
    """Applies an image layer's commit on ``tree`` with OCI whiteout semantics."""
    contents, metadata = _root(repo, commit)
    _apply_directory(repo, tree, contents, metadata)


def apply_package(repo: Any, tree: Any, commit: str, package: str) -> None:
    """Adds a package's commit to ``tree``; a file that is there with another content is a TreeConflict."""
    contents, _ = _root(repo, commit)
    _add_directory(repo, tree, contents, package, "")


def strip_whiteouts(repo: Any, tree: Any) -> None:
    """Removes whiteout markers that a lowest layer carries by mistake."""
    for name in list(tree.get_files()):
        if name.startswith(WHITEOUT):
            tree.remove(name, True)


def remove_path(tree: Any, path: str) -> bool:
    """Removes one path and the directories that it leaves empty. False where it is not there."""
    parents: list[tuple[Any, str]] = []
    node = tree
    *directories, leaf = [part for part in path.split("/") if part]
    for name in directories:
        child = _subdirectory(node, name)
        if child is None:
            return False
        parents.append((node, name))
        node = child
    if not _exists(node, leaf):
        return False
    node.remove(leaf, False)
    for parent, name in reversed(parents):
        if node.get_files() or node.get_subdirs():
            break
        parent.remove(name, True)
        node = parent
    return True


def list_directory(tree: Any, path: str) -> dict[str, Any]:
    """Names in a directory of a mutable tree; empty where it does not exist."""
    node = tree
    for name in [part for part in path.split("/") if part]:
        node = _subdirectory(node, name)
        if node is None:
            return {}
    return {**node.get_files(), **node.get_subdirs()}


def ensure_directory(repo: Any, tree: Any, path: str) -> Any:
    """The directory ``path`` of ``tree``, made with root:root 0755 where missing."""
    node = tree
    for name in [part for part in path.split("/") if part]:
        fresh = _subdirectory(node, name) is None
        _, node = node.ensure_dir(name)
        if fresh:
            node.set_metadata_checksum(_default_directory(repo))
    return node


def put_file(repo: Any, tree: Any, path: str, content: bytes, mode: int = 0o644) -> None:
    """Writes a root-owned regular file into ``tree``."""
    directory, _, name = path.rpartition("/")
    checksum = repo.write_regfile_inline(None, 0, 0, 0o100000 | mode, None, content, None)
    ensure_directory(repo, tree, directory).replace_file(name, checksum)


def _default_directory(repo: Any) -> str:
    metadata = GLib.Variant("(uuua(ayay))", (0, 0, socket.htonl(0o40755), []))
    _, raw = repo.write_metadata(OSTree.ObjectType.DIR_META, None, metadata, None)
    return str(OSTree.checksum_from_bytes(raw))


def _root(repo: Any, commit: str) -> tuple[str, str]:
    _, variant, _ = repo.load_commit(commit)
    return _checksum(variant.get_child_value(6)), _checksum(variant.get_child_value(7))


def _checksum(variant: Any) -> str:
    return str(OSTree.checksum_from_bytes_v(variant))


def _files(repo: Any, contents: str) -> Iterator[tuple[str, str]]:
    _, variant = repo.load_variant(OSTree.ObjectType.DIR_TREE, contents)
    files = variant.get_child_value(0)
    for index in range(files.n_children()):
        entry = files.get_child_value(index)
        yield entry.get_child_value(0).get_string(), _checksum(entry.get_child_value(1))


def _directories(repo: Any, contents: str) -> Iterator[tuple[str, str, str]]:
    _, variant = repo.load_variant(OSTree.ObjectType.DIR_TREE, contents)
    directories = variant.get_child_value(1)
    for index in range(directories.n_children()):
        entry = directories.get_child_value(index)
        name = entry.get_child_value(0).get_string()
        yield name, _checksum(entry.get_child_value(1)), _checksum(entry.get_child_value(2))


def _subdirectory(tree: Any, name: str) -> Any:
    return tree.get_subdirs().get(name)


def _exists(tree: Any, name: str) -> bool:
    return name in tree.get_files() or name in tree.get_subdirs()


def _apply_directory(repo: Any, tree: Any, contents: str, metadata: str) -> None:
    tree.set_metadata_checksum(metadata)
    files = dict(_files(repo, contents))
    if OPAQUE in files:
        for name in [*tree.get_files(), *tree.get_subdirs()]:
            tree.remove(name, True)
    for name in files:
        if name.startswith(WHITEOUT) and name != OPAQUE and _exists(tree, name[len(WHITEOUT) :]):
            tree.remove(name[len(WHITEOUT) :], True)
    for name, checksum in files.items():
        if name.startswith(WHITEOUT):
            continue
        if _subdirectory(tree, name) is not None:
            tree.remove(name, True)
        tree.replace_file(name, checksum)
    for name, sub_contents, sub_metadata in _directories(repo, contents):
        if name in tree.get_files():
            tree.remove(name, True)
        _, child = tree.ensure_dir(name)
        _apply_directory(repo, child, sub_contents, sub_metadata)


def _add_directory(repo: Any, tree: Any, contents: str, package: str, where: str) -> None:
    present = tree.get_files()
    for name, checksum in _files(repo, contents):
        if _subdirectory(tree, name) is not None or present.get(name, checksum) != checksum:
            raise TreeConflict(f"Checkout {package}: Hardlinking {where}{name}: File exists")
        tree.replace_file(name, checksum)
    for name, sub_contents, sub_metadata in _directories(repo, contents):
        if name in present:
            raise TreeConflict(f"Checkout {package}: mkdirat({where}{name}): Not a directory")
        fresh = _subdirectory(tree, name) is None
        _, child = tree.ensure_dir(name)
        if fresh:
            child.set_metadata_checksum(sub_metadata)
        _add_directory(repo, child, sub_contents, package, f"{where}{name}/")
