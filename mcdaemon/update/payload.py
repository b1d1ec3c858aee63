"""The payload of an update: for every path that the old or the new config manages, what it has to be.

A payload is a directory of its own (0700, it holds secrets): one list of entries and the contents by their hash. It is
written and synced before anything is drained, so that committing is a copy that cannot fail for want of anything but
space. The record of what was there before (`undo`) has the same shape: taking back is committing it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Optional

from mcdaemon.errors import Broken, Failure, from_os_error
from mcdaemon.host import files, units, users
from mcdaemon.host.files import Entry, Kind, Node
from mcdaemon.host.root import Root
from mcdaemon.machineconfig import model
from mcdaemon.machineconfig.model import MachineConfig, Owner
from mcdaemon.update.verify import Expected

CURRENT_CONFIG = "/etc/machine-config-daemon/currentconfig"
"""Where a root says which config it carries; the MCD's own place and form (mcd.md 0.3, appendix D)."""
CURRENT_IMAGE = "/etc/machine-config-daemon/currentimage"
"""Empty, as the MCD leaves it outside on-cluster layering."""

AGENT_PATHS = (
    "/etc/systemd/system/mcdaemon.service",
    "/etc/systemd/system/mcdaemon-early.service",
    "/etc/systemd/system-preset/50-mcdaemon.preset",
    "/etc/tmpfiles.d/mcdaemon.conf",
    "/etc/mcdaemon",
)
"""The agent's own files in /etc: implicit in every payload, or the way back from an image that has them would lose the
agent itself (incident 4). Its enablement links are found by looking for links to its units."""

_AGENT_UNITS = ("mcdaemon.service", "mcdaemon-early.service")


@dataclass(frozen=True)
class Payload:
    """Entries by path, in the order in which they are written; `passwords` are (user, hash) pairs for /etc/shadow."""

    id: str
    config: str
    entries: tuple[tuple[str, Node], ...]
    passwords: tuple[tuple[str, str], ...] = field(default=(), repr=False)

    def nodes(self) -> Mapping[str, Node]:
        return dict(self.entries)

    def expected(self, agents: bool = True) -> Mapping[str, Expected]:
        """What a root that holds this payload looks like. `agents`: with the agent's own files, which an administrator
        may change at any time; that is no reason to take an update back."""
        left_out = self.implied_directories()
        if not agents:
            left_out |= {path for path, _node in self.entries if _is_agents(path)}
        return {path: Expected(node) for path, node in self.entries if path not in left_out}

    def implied_directories(self) -> frozenset[str]:
        """Paths that were a file in the old config and are a directory in the new one: the file has to go, and then
        something else of the payload is below (field case FILE-13)."""
        above = {parent for path, node in self.entries if node.kind is not Kind.ABSENT for parent in parents(path)}
        return frozenset(path for path, node in self.entries if node.kind is Kind.ABSENT and path in above)


# -- what a config asks for -----------------------------------------------------------------------------------------


def wanted(config: MachineConfig, root: Root, running: Root, going: Iterable[str] = ()) -> dict[str, Entry]:
    """Every path that `config` manages on `root`, and what it has to be there. `going`: unit files about to go.

    Names of users are looked up in the running system first: the target's own /etc/passwd is the image's default until
    ostree merges it. Raises Broken when a file's owner does not exist.
    """
    items: dict[str, Entry] = {}
    for spec in config.files:
        try:
            owner = _user(spec.user, root, running), _group(spec.group, root, running)
        except Broken as error:
            raise Broken(f"cannot give {spec.path} its owner: {error.sentence}", error.hint) from error
        items[spec.path] = Entry.file(spec.content, spec.mode, *owner)
    items.update(_units(config, root, going).entries)
    for user in config.users:
        items.update(users.authorized_keys_nodes(running, user.name, user.ssh_keys))
    record = json.dumps(config.raw, sort_keys=True, separators=(",", ":")).encode()
    # The config holds pull secrets and keys; the MCD writes 0644, nobody but root has to read it.
    items[CURRENT_CONFIG] = Entry.file(record, 0o600)
    items[CURRENT_IMAGE] = Entry.file(b"", 0o644)
    return items


def _units(config: MachineConfig, root: Root, going: Iterable[str] = ()) -> units.Expectation:
    wishes = [
        units.Unit(
            unit.name,
            unit.content,
            unit.enabled,
            unit.mask,
            tuple((dropin.name, dropin.content) for dropin in unit.dropins),
        )
        for unit in config.units
    ]
    managed = [spec.path for spec in config.files] + [unit.path for unit in config.units] + list(going)
    return units.expected_nodes(
        wishes, units.vendor_units(root, managed), lambda name: units.enablement_links(root, name)
    )


def notes(config: MachineConfig, root: Root) -> tuple[str, ...]:
    """What of the config's units cannot be done on that root, and why: for the log."""
    return tuple(_units(config, root).notes)


def _user(owner: Owner, root: Root, running: Root) -> int:
    if owner.id is not None:
        return owner.id
    if not owner.name:
        return 0
    try:
        return users.lookup_user(running, owner.name).uid
    except Broken:
        return users.lookup_user(root, owner.name).uid


def _group(owner: Owner, root: Root, running: Root) -> int:
    if owner.id is not None:
        return owner.id
    if not owner.name:
        return 0
    try:
        return users.lookup_group(running, owner.name)
    except Broken:
        return users.lookup_group(root, owner.name)


def _is_agents(path: str) -> bool:
    own = any(path == place or path.startswith(place + "/") for place in AGENT_PATHS)
    return own or path.rpartition("/")[2] in _AGENT_UNITS


def agent_items(running: Root) -> dict[str, Entry]:
    """The agent's own files, settings and enablement links, as they are on the running root."""
    items: dict[str, Entry] = {}
    for path in AGENT_PATHS:
        for found in _tree(running, path):
            _capture_into(items, running, found)
    system = running.locate("/etc/systemd/system")
    for link in sorted(system.glob("*.*/mcdaemon*.service")):
        if link.is_symlink() and link.name in _AGENT_UNITS:
            _capture_into(items, running, f"/etc/systemd/system/{link.parent.name}/{link.name}")
    return items


def _tree(root: Root, path: str) -> list[str]:
    """`path` and all below it, without following links."""
    place = root.locate(path)
    if not os.path.lexists(place):
        return []
    found = [path]
    if place.is_dir() and not place.is_symlink():
        for folder, folders, names in os.walk(place):
            found += [path + os.path.join(folder, name)[len(os.fspath(place)) :] for name in folders + names]
    return sorted(found)


def _capture_into(items: dict[str, Entry], root: Root, path: str) -> None:
    node = files.read_node(root, path)
    content = files.read_file(root, path) if node.kind is Kind.FILE else None
    items[path] = Entry(node, content or b"")


# -- a payload ------------------------------------------------------------------------------------------------------


def build(
    identity: str,
    new: MachineConfig,
    old: Optional[MachineConfig],
    target: Root,
    running: Root,
    outside: Iterable[str] = (),
) -> tuple[Payload, dict[str, Entry]]:
    """What has to be written into `target` to bring it from whatever /etc ostree merges to `new`.

    A path that only `old` manages goes back to what the *target's* image ships, or away. `outside`: further
    paths that another config than `old` has left in shared places; the same goes for them.
    """
    going = [unit.path for unit in old.units] if old else []
    items = {**agent_items(running), **wanted(new, target, running, going)}
    before = [*(wanted(old, running, running) if old else {}), *outside]
    for path in before:
        if path not in items:
            items[path] = Entry.absent() if _in_the_way(path, items) else image_default(target, path)
    return _payload(identity, new.identity, items, _passwords(new, old)), items


def parents(path: str) -> list[str]:
    return [os.fspath(parent) for parent in PurePosixPath(path).parents]


def _in_the_way(path: str, items: Mapping[str, Entry]) -> bool:
    """Whether something of the config stands below the path, or a file or link of it above: no default fits there."""
    present = {other: entry.node.kind for other, entry in items.items() if entry.node.kind is not Kind.ABSENT}
    return any(other.startswith(path + "/") for other in present) or any(
        present.get(parent) in (Kind.FILE, Kind.LINK) for parent in parents(path)
    )


def _passwords(new: MachineConfig, old: Optional[MachineConfig]) -> tuple[tuple[str, str], ...]:
    """Hashes that the change touches; a password that somebody set by hand is not ours (mcd.md 3.11).

    A hash that the new config does not have is locked, also when the whole user is gone from it: never left valid, and
    never emptied, which would let everybody in.
    """
    before = {user.name: user.password_hash for user in old.users} if old else {}
    after: dict[str, Optional[str]] = dict.fromkeys(before)
    after.update({user.name: user.password_hash for user in new.users})
    return tuple(
        (name, secret or users.NO_PASSWORD) for name, secret in sorted(after.items()) if secret != before.get(name)
    )


def image_default(root: Root, path: str) -> Entry:
    """What the root's image ships at `path`: the file or link in its usr/etc, else nothing. Shared places have none."""
    if path.startswith("/etc/"):
        items: dict[str, Entry] = {}
        _capture_into(items, root, f"/usr{path}")
        entry = items[f"/usr{path}"]
        if entry.node.kind in (Kind.FILE, Kind.LINK):
            return entry
    return Entry.absent()


def capture(identity: str, payload: Payload, root: Root, paths: Iterable[str]) -> tuple[Payload, dict[str, Entry]]:
    """The undo record: what is at `paths` of `root` now, in the shape of a payload."""
    items: dict[str, Entry] = {}
    for path in paths:
        _capture_into(items, root, path)
    before = [(name, users.password_hash(root, name)) for name, _hash in payload.passwords]
    passwords = tuple((name, secret) for name, secret in before if secret is not None)
    return _payload(identity, "", items, passwords), items


def _payload(identity: str, config: str, items: Mapping[str, Entry], passwords: tuple[tuple[str, str], ...]) -> Payload:
    # Directories before what is in them, files before the links that name them: the sorted path does both.
    return Payload(identity, config, tuple((path, items[path].node) for path in sorted(items)), passwords)


def carried(identity: str, shelf: Shelf) -> Optional[MachineConfig]:
    """The config that a payload (or an undo record) puts in place, None when it has none."""
    load = shelf.load(identity)
    node = load.nodes().get(CURRENT_CONFIG) if load is not None else None
    if node is None or node.kind is not Kind.FILE:
        return None
    return model.parse(json.loads(shelf.content(identity, node)), CURRENT_CONFIG)


# -- on disk --------------------------------------------------------------------------------------------------------


class Shelf:
    """Where payloads lie: `<folder>/<id>/`. One for payloads, one for undo records."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save(self, payload: Payload, items: Mapping[str, Entry]) -> None:
        """Write the payload; it is complete and synced on return, or not there (the list is written last)."""
        place = self.folder / payload.id
        contents = place / "content"
        try:
            contents.mkdir(parents=True, exist_ok=True, mode=0o700)
            os.chmod(self.folder, 0o700)
            os.chmod(place, 0o700)
        except OSError as error:
            raise from_os_error(error, "make the directory", contents) from error
        for entry in items.values():
            if entry.node.kind is Kind.FILE:
                files.write_atomic(contents / entry.node.sha256, entry.content)
        # Before the list: it must not outlive what it lists, nor be lost together with the way to it.
        for folder in (contents, place, self.folder, self.folder.parent):
            files.sync_directory(folder)
        files.write_atomic(place / "payload.json", _encode(payload))

    def load(self, identity: str) -> Optional[Payload]:
        """The payload, None when there is none (or it was never completed). Raises Broken when it is torn."""
        path = self.folder / identity / "payload.json"
        try:
            return _decode(path.read_bytes())
        except FileNotFoundError:
            return None
        except OSError as error:
            raise from_os_error(error, "read", path) from error
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            # Not its text: that can hold what was read.
            raise Broken(
                f"cannot use the payload {path}: it is torn or not ours ({type(error).__name__})",
                "it is made anew when the update starts over",
            ) from error

    def content(self, identity: str, node: Node) -> bytes:
        path = self.folder / identity / "content" / node.sha256
        try:
            data = path.read_bytes()
        except OSError as error:
            raise from_os_error(error, "read", path) from error
        if hashlib.sha256(data).hexdigest() != node.sha256:
            raise Broken(f"cannot use {path}: its content is not what its name says", "the disk may be failing")
        return data

    def drop(self, identity: str) -> None:
        """Remove a payload and the secrets in it; the list first, and for good: half a payload must not look like a
        whole one, also not after a power cut."""
        with contextlib.suppress(OSError, Failure):
            os.unlink(self.folder / identity / "payload.json")
            files.sync_directory(self.folder / identity)
        shutil.rmtree(self.folder / identity, ignore_errors=True)

    def identities(self) -> tuple[str, ...]:
        try:
            return tuple(sorted(path.name for path in self.folder.iterdir()))
        except (FileNotFoundError, NotADirectoryError):
            return ()


def _encode(payload: Payload) -> bytes:
    text = json.dumps(
        {
            "id": payload.id,
            "config": payload.config,
            "entries": [[path, {**asdict(node), "kind": node.kind.value}] for path, node in payload.entries],
            "passwords": [list(pair) for pair in payload.passwords],
        },
        indent=1,
    ).encode()
    # A changed bit in a mode or a path would be committed, and then validated against itself.
    return hashlib.sha256(text).hexdigest().encode() + b"\n" + text


def _decode(content: bytes) -> Payload:
    checksum, _, text = content.partition(b"\n")
    if hashlib.sha256(text).hexdigest().encode() != checksum:
        raise ValueError("the checksum does not fit")
    data = json.loads(text)
    return Payload(
        data["id"],
        data["config"],
        tuple((path, Node(**{**node, "kind": Kind(node["kind"])})) for path, node in data["entries"]),
        tuple((name, secret) for name, secret in data["passwords"]),
    )
