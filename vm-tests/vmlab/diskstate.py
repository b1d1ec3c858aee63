"""What must hold on a node's disk at any moment of an update, looked at without booting it.

The tree that is looked at is the physical root, mounted after a power cut. What must hold:

- there is a default boot entry; the kernel and initramfs of every entry are there and whole; every entry's `ostree=`
  leads to a deployment with usr (as complete as it is in the end) and etc, and with its origin;
- mcdaemon's journal can be read and says the truth: after "verified" the payload is complete; after "committed" and
  "proved" the deployment that boots holds every path of it, byte for byte; without an update in flight what boots is
  the old deployment, or the new one with all of the payload;
- whatever else is half done, `mcdaemon.update.early` decides to complete or to put back, and has what that needs;
- the old deployment's /etc never changes.
"""

from __future__ import annotations

import enum
import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Optional

from mcdaemon.errors import Failure
from mcdaemon.host import files
from mcdaemon.host.files import Kind, Node
from mcdaemon.host.root import Root
from mcdaemon.update import journal, lost, verify
from mcdaemon.update.early import Early, decide
from mcdaemon.update.journal import Update
from mcdaemon.update.payload import Payload, Shelf

STATE = "lib/mcdaemon"
"""Below the stateroot's /var."""

PROGRESS = (
    "no update", "begun", "verified", "drained", "finalizing", "committed", "proved", "reboot asked for", "confirmed",
)  # fmt: skip
"""What a journal may say of an update that reboots, in the order of the steps."""

_ENTRIES = "boot/loader/entries"


class Boots(enum.Enum):
    """Which deployment the default boot entry enters."""

    OLD = "old"
    NEW = "new"
    NOTHING = "nothing"


@dataclass(frozen=True)
class BootEntry:
    """A BLS entry. `options`: its kernel command line. `deployment`: name (checksum.serial) of what its `ostree=` leads
    to, "" when that leads nowhere."""

    name: str
    version: int
    linux: str
    initrd: str
    ostree: str
    options: str
    deployment: str


@dataclass(frozen=True)
class Look:
    """What was found. `progress`: how far the journal says the update is (one of PROGRESS, or "unreadable");
    `troubles`: what must not be."""

    boots: Boots
    deployment: str
    progress: str
    troubles: tuple[str, ...]


@dataclass
class Story:
    """What is known of the whole update: the tree before it, and the payload once it was seen complete.

    :ivar before: the physical root as it was before the update, mounted somewhere.
    :ivar old: names of the deployments that could be booted then; `source` is the one that was the default.
    :ivar usr: `fingerprint` of each deployment's usr, in the end or (where it is gone then) before.
    """

    before: Path
    osname: str
    old: frozenset[str]
    source: str
    usr: Mapping[str, str] = field(default_factory=dict)
    payload: Optional[Payload] = None

    @classmethod
    def of(cls, before: Path, after: Path) -> Story:
        """Raises ValueError where that is no node that boots from one stateroot."""
        stateroots = sorted(path.name for path in (before / "ostree/deploy").iterdir())
        found = boot_entries(before)
        if len(stateroots) != 1 or not found or not found[0].deployment:
            raise ValueError(f"cannot tell what {before} boots: stateroots {stateroots}, boot entries {found}")
        osname = stateroots[0]
        usr = {name: fingerprint(deployment_folder(top, osname, name) / "usr")
               for top in (before, after) for name in deployments(top, osname)}  # fmt: skip
        return cls(before, osname, frozenset(entry.deployment for entry in found), found[0].deployment, usr)


def deployments(top: Path, osname: str) -> list[str]:
    """Names of the checkouts that are there."""
    return sorted(path.name for path in (top / "ostree/deploy" / osname / "deploy").iterdir() if path.is_dir())


def deployment_folder(top: Path, osname: str, name: str) -> Path:
    """Where the checkout of a deployment is below the physical root."""
    return top / "ostree/deploy" / osname / "deploy" / name


def fingerprint(folder: Path) -> str:
    """All names in a tree, and what of them are directories and links; what is in them is for `ostree fsck`, because
    they are links to the repository's objects."""
    digest, waiting = hashlib.sha256(), [str(folder)]
    while waiting:
        at = waiting.pop()
        with os.scandir(at) as found:
            names = sorted((entry.name, entry.is_symlink(), entry.is_dir(follow_symlinks=False)) for entry in found)
        digest.update(f"{at[len(str(folder)) :]}{names}\n".encode(errors="surrogateescape"))
        waiting += [f"{at}/{name}" for name, _link, directory in names if directory]
    return digest.hexdigest()


def look(top: Path, story: Story) -> Look:
    """Look at the physical root `top`. What the payload is becomes known to the story on the way."""
    found = boot_entries(top)
    troubles = list(boot_troubles(top, found, story))
    default = found[0].deployment if found else ""
    boots = Boots.NOTHING if not default else Boots.OLD if default in story.old else Boots.NEW
    said = "unknown"
    if default:
        node = _Node(top, story, default)
        troubles += node.troubles()
        said = node.progress()
    return Look(boots, default, said, tuple(troubles))


# -- booting ----------------------------------------------------------------------------------------------------------


def boot_entries(top: Path) -> list[BootEntry]:
    """As a boot loader sorts them: the default first. None where there is no folder of them."""
    try:
        names = sorted(os.listdir(top / _ENTRIES))
    except OSError:
        return []
    found = [_entry(top, name) for name in names if name.endswith(".conf")]
    return sorted(found, key=lambda entry: (-entry.version, entry.name))


def _entry(top: Path, name: str) -> BootEntry:
    text = (top / _ENTRIES / name).read_text(errors="replace")
    fields = dict(pair for pair in (line.split(None, 1) for line in text.splitlines()) if len(pair) == 2)
    words = fields.get("options", "").split()
    argument = next((word[len("ostree=") :] for word in words if word.startswith("ostree=")), "")
    link = top / argument.lstrip("/")
    target = link.resolve().name if argument and link.is_dir() else ""
    version = fields.get("version", "").strip()
    number = int(version) if version.isdigit() else 0
    return BootEntry(name, number, fields.get("linux", ""), fields.get("initrd", ""), argument, " ".join(words), target)


def boot_troubles(top: Path, found: list[BootEntry], story: Story) -> Iterator[str]:
    """What keeps these entries from booting what they should."""
    if not found:
        yield "there is no boot entry"
    for entry in found:
        yield from (f"boot entry {entry.name}: {trouble}" for trouble in _entry_troubles(top, entry, story))


def _entry_troubles(top: Path, entry: BootEntry, story: Story) -> Iterator[str]:
    digest = hashlib.sha256()
    for path in (entry.linux, entry.initrd):
        try:
            digest.update((top / path.lstrip("/")).read_bytes())
        except OSError as error:
            yield f"cannot read {path!r}: {error.strerror}"
    parts = entry.ostree.split("/")  # /ostree/boot.1/<stateroot>/<bootcsum>/<serial>
    if digest.hexdigest() not in parts:
        yield "kernel and initramfs are not those of its bootcsum"
    if not entry.deployment:
        yield f"{entry.ostree} leads nowhere"
        return
    place = deployment_folder(top, story.osname, entry.deployment)
    if not (place / "etc/passwd").is_file():
        yield f"{entry.deployment} has no etc/passwd"
    if not place.with_name(f"{place.name}.origin").is_file():
        yield f"{entry.deployment} has no origin"
    if fingerprint(place / "usr") != story.usr.get(entry.deployment, ""):
        yield f"usr of {entry.deployment} is not what it is in the end"


# -- what mcdaemon promises -------------------------------------------------------------------------------------------


class _Node:
    """The node that would boot the deployment `default` from the disk at `top`."""

    def __init__(self, top: Path, story: Story, default: str) -> None:
        self._story = story
        self._default = default
        self._top = top
        self._root = Root.of_deployment(top, story.osname, default)
        state = self._root.var / STATE
        self._payloads, self._undo = Shelf(state / "payload"), Shelf(state / "undo")
        self._journal, self._alien = journal.load(state / "journal.json")
        self._update = self._journal.update

    def progress(self) -> str:
        update = self._update
        if self._alien:
            return "unreadable"
        if update is None:
            # Before the update it is an earlier one that was confirmed.
            return "no update" if self._default in self._story.old else "confirmed"
        marks = {"reboot asked for": update.armed, "proved": update.proved, "committed": update.committed,
                 "finalizing": update.finalizing, "drained": update.drained, "verified": update.staged}  # fmt: skip
        return next((name for name, mark in marks.items() if mark), "begun")

    def troubles(self) -> Iterator[str]:
        if self._alien:
            yield self._alien
            return
        yield from self._changed_etc()
        update = self._update
        if update is None:
            yield from self._at_rest()
            return
        found = []
        for shelf in (self._payloads, self._undo):
            try:
                found.append(shelf.load(update.id))
                yield from _holes(shelf, found[-1])
            except Failure as error:
                yield f"the {shelf.folder.name} is torn: {error}"
                return
        load, before = found
        if load is not None:
            self._story.payload = load
        if update.staged and load is None:
            yield "the journal says verified, and there is no payload"
        if load is not None:
            yield from self._in_flight(update, load, before)

    def _in_flight(self, update: Update, load: Payload, before: Optional[Payload]) -> Iterator[str]:
        missing = self._missing(load)
        if missing and update.repairs == 0 and self._default in (update.committed, update.proved):
            yield f"the journal says committed, but {missing}"
        carries = lost.carried(self._root) == update.desired and before is not None
        action, _why = decide(update, self._default, not missing, carries=carries)
        if self._default not in self._story.old and missing and action is not Early.COMPLETE:
            yield f"the new deployment boots without its files, and the early unit does {action.value}: {missing}"
        if self._default in self._story.old and self._shared_changes(load):
            if action is not Early.PUT_BACK:
                yield f"files that the old deployment shares are new, and the early unit does {action.value}"
            elif before is None:
                yield "files that the old deployment shares are new, and there is no undo record"

    def _at_rest(self) -> Iterator[str]:
        """Nothing is in flight, so the early unit will do nothing."""
        load = self._story.payload
        if self._default in self._story.old:
            if load is not None and self._shared_changes(load):
                yield "no update is in flight, the old deployment boots, and files that it shares are new"
            return
        confirmed = self._journal.confirmed
        if confirmed is None or confirmed.deployment != self._default:
            yield "no update is in flight, and the new deployment boots that was never confirmed"
        missing = self._missing(load) if load is not None else "its payload was never seen"
        if missing:
            yield f"no update is in flight, and the new deployment boots without its files: {missing}"

    # -- facts --------------------------------------------------------------------------------------------------------

    def _missing(self, load: Payload) -> str:
        """What the default deployment lacks of the payload, "" for nothing. The agent's own files do not count."""
        report = verify.validate(self._root, load.expected(agents=False), load.passwords)
        return "; ".join(map(str, report.mismatches[:3]))

    def _changed_etc(self) -> Iterator[str]:
        """Nobody may write into the old deployment's /etc while an update that reboots is made."""
        load = self._story.payload
        if load is None or (self._update is not None and self._update.live):
            return
        for name in sorted(self._story.old):
            now, then = (Root.of_deployment(top, self._story.osname, name) for top in (self._top, self._story.before))
            if not now.path.is_dir():
                continue  # dropped by the agent once the new one was confirmed
            for path, _node in load.entries:
                if path.startswith("/etc/") and _node_at(now, path) != _node_at(then, path):
                    yield f"{path} of the old deployment {name} was changed"

    def _shared_changes(self, load: Payload) -> list[str]:
        then = Root.of_deployment(self._story.before, self._story.osname, self._story.source)
        paths = [path for path, node in load.entries if self._root.shared(path) and node.kind is not Kind.DIRECTORY]
        return [path for path in paths if _node_at(self._root, path) != _node_at(then, path)]


def _node_at(root: Root, path: str) -> Optional[Node]:
    try:
        return files.read_node(root, path)
    except Failure:
        return None


def _holes(shelf: Shelf, load: Optional[Payload]) -> Iterator[str]:
    """Contents that a list names and that are not there, or are not what their names say."""
    if load is None:
        return
    for path, node in load.entries:
        try:
            if node.kind is Kind.FILE:
                shelf.content(load.id, node)
        except Failure as error:
            yield f"half of the {shelf.folder.name} is there: {path}: {error}"
