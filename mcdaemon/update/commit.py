"""Committing: a payload is written into a root, and what it replaces outside /etc is kept.

`apply` is the one way in which managed files reach a root: the pending deployment, the booted one (live changes and
the early unit), and the way back, which is the payload of what was there before.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable

from mcdaemon.errors import Broken
from mcdaemon.host import files, users
from mcdaemon.host.files import Entry, Kind
from mcdaemon.host.root import Root
from mcdaemon.update.payload import Payload, Shelf, capture, parents


def apply(payload: Payload, shelf: Shelf, root: Root, chosen: Callable[[str], bool] = lambda path: True) -> None:
    """Write the chosen paths of the payload into `root` and sync. Idempotent; what is right is left alone.

    What a write that was killed has left beside its path goes first; what it has made may not be on the disk yet.
    """
    places = {os.path.dirname(path) for path, _node in payload.entries if chosen(path)}
    files.remove_temporaries(root, places | {"/etc"} if payload.passwords and chosen("/etc/shadow") else places)
    entries = {}
    blocked = []
    directories = payload.implied_directories()
    for path, node in payload.entries:
        if not chosen(path):
            continue
        found = files.read_node(root, path)
        if found != node and not (found.kind is Kind.DIRECTORY and path in directories):
            content = shelf.content(payload.id, node) if node.kind is Kind.FILE else b""
            entries[path] = Entry(node, content)
            if found.kind is Kind.DIRECTORY and node.kind in (Kind.FILE, Kind.LINK):
                blocked.append(path)
    if blocked:
        files.put_all(root, {path: entry for path, entry in entries.items() if entry.node.kind is Kind.ABSENT})
        for path in blocked:
            _prune(root, path)
    files.put_all(root, entries, also=[path for path, _node in payload.entries if chosen(path)])
    for name, secret in payload.passwords:
        if chosen("/etc/shadow"):
            users.set_password_hash(root, name, secret)


def _prune(root: Root, path: str) -> None:
    """Remove the empty directories below `path`: what is left of a config that had files deeper there."""
    for name in files.list_directory(root, path):
        child = f"{path}/{name}"
        if files.read_node(root, child).kind is Kind.DIRECTORY:
            _prune(root, child)
            if not files.list_directory(root, child):
                files.remove(root, child, sync=False)


def remember(payload: Payload, undo: Shelf, root: Root, chosen: Callable[[str], bool]) -> None:
    """Keep what the chosen paths of the payload are now, synced, once: a second call must not record our own work.

    Raises Broken where something stands that could not be made again: better nothing is written then.
    """
    if undo.load(payload.id) is not None:
        return
    if not chosen("/etc/shadow"):
        payload = dataclasses.replace(payload, passwords=())
    paths = {path for path, _node in payload.entries if chosen(path)} | _directories_to_make(payload, root, chosen)
    record, items = capture(payload.id, payload, root, paths)
    for path, node in record.entries:
        if node.kind is Kind.OTHER:
            raise Broken(f"cannot replace {path}: a {node.kind.value} stands there", "remove it")
    undo.save(record, items)


def _directories_to_make(payload: Payload, root: Root, chosen: Callable[[str], bool]) -> set[str]:
    """What is not there yet above the payload's paths: it is made for them, and has to go with them."""
    above = {parent for path, node in payload.entries if node.kind is not Kind.ABSENT for parent in parents(path)}
    return {path for path in above - {"/"} if chosen(path) and files.read_node(root, path).kind is Kind.ABSENT}


def take_back(identity: str, undo: Shelf, root: Root, drop: bool = True) -> None:
    """Put back what `remember` kept, if it kept anything, and forget it (`drop`).

    A directory that was made for the config and got files of somebody else meanwhile (a home, ~/.ssh) stays: it must
    not be what keeps a node from its way back.
    """
    record = undo.load(identity)
    if record is None:
        return
    made = _make_way(record, root)
    apply(record, undo, root, lambda path: path not in made)
    for path in sorted(made, reverse=True):
        if not files.list_directory(root, path):
            files.remove(root, path, sync=False)
    if made:
        files.sync_tree(root, made)
    if drop:
        undo.drop(identity)


def _make_way(record: Payload, root: Root) -> frozenset[str]:
    """Remove what stands where a directory was; returns the directories that stand where nothing was."""
    made = set()
    for path, node in record.entries:
        found = files.read_node(root, path).kind
        if node.kind is Kind.DIRECTORY and found not in (Kind.DIRECTORY, Kind.ABSENT):
            files.remove(root, path)
        elif node.kind is Kind.ABSENT and found is Kind.DIRECTORY:
            made.add(path)
    return frozenset(made)
