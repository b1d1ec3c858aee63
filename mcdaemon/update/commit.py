"""Committing: a payload is written into a root, and what it replaces outside /etc is kept.

`apply` is the one way in which managed files reach a root: the pending deployment, the booted one (live changes and
the early unit), and the way back, which is the payload of what was there before.
"""

from __future__ import annotations

from collections.abc import Callable

from mcdaemon.host import files, users
from mcdaemon.host.files import Entry, Kind
from mcdaemon.host.root import Root
from mcdaemon.update.payload import Payload, Shelf, capture


def apply(payload: Payload, shelf: Shelf, root: Root, chosen: Callable[[str], bool] = lambda path: True) -> None:
    """Write the chosen paths of the payload into `root` and sync once. Idempotent; what is right is left alone."""
    entries = {}
    for path, node in payload.entries:
        if chosen(path) and files.read_node(root, path) != node:
            content = shelf.content(payload.id, node) if node.kind is Kind.FILE else b""
            entries[path] = Entry(node, content)
    files.put_all(root, entries)
    for name, secret in payload.passwords:
        if chosen("/etc/shadow"):
            users.set_password_hash(root, name, secret)


def remember(payload: Payload, undo: Shelf, root: Root, chosen: Callable[[str], bool]) -> None:
    """Keep what the chosen paths of the payload are now, synced, once: a second call must not record our own work."""
    if undo.load(payload.id) is None:
        record, items = capture(payload.id, payload, root, [path for path, _node in payload.entries if chosen(path)])
        undo.save(record, items)


def take_back(identity: str, undo: Shelf, root: Root, drop: bool = True) -> None:
    """Put back what `remember` kept, if it kept anything, and forget it (`drop`)."""
    record = undo.load(identity)
    if record is not None:
        apply(record, undo, root)
        if drop:
            undo.drop(identity)
