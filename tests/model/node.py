"""The abstract node: what of a machine matters to `decide`, small enough that all of its states can be visited.

Configs are "old" (what the node has), "new" and "other". A deployment is told by whose OS, kernel arguments and files
it has. What the model leaves out: which files there are (a root's are all of one config's, what ostree merged, or a
mixture), images' digests, and time, which is the events "it is due again" and "the time limit is over".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Optional

from mcdaemon.update.journal import Update

OLD, NEW, OTHER = "old", "new", "other"
CONFIGS = (OLD, NEW, OTHER)
NOTHING, REFUSED, UNREADABLE = "nothing", "refused", "unreadable"
"""What may be desired instead of a config: none, one that cannot be reached, one that cannot be parsed."""

MIXED, MERGED, EDITED = "mixed", "merged", "edited"
"""Files that are no config's: half written; as ostree merged them; the old ones, changed by hand."""

HALF = "half"
"""What services have read when the early unit was killed, and nobody could keep a mixture from them."""

FOREIGN = "foreign"
"""An OS that somebody else's rpm-ostree transaction made; it fits every config."""

SAME = "same"
"""An OS or kernel arguments that no config of this kind of update changes."""

SOURCE, TARGET, STRANGER, FORMER = "s", "t", "f", "o"
"""Names of deployments: what was booted, what our stagings make (again and again the same), somebody else's, and at
rest the one that is not booted."""

NOW, BEFORE = "now", "before"
"""Boot ids: of this boot, of any earlier one."""

PENDING, GOOD, BAD = "pending", "good", "bad"

DOWN, UP, SETTLING = "down", "up", "settling"
"""The agent: not running; running; the early unit at work, before anything else runs."""


@dataclass(frozen=True)
class Kind:
    """A kind of update: what is different between any two configs."""

    name: str
    reboot: bool = True
    os: bool = False
    kargs: bool = False
    drain: bool = True

    def os_of(self, config: str) -> str:
        return config if self.os else SAME

    def kargs_of(self, config: str) -> str:
        """An update with an unchanged OS has its own marker in the kernel arguments."""
        return config if self.kargs or (self.reboot and not self.os) else SAME


KINDS = (
    Kind("live", reboot=False, drain=False),
    Kind("live with drain", reboot=False),
    Kind("files or kernel arguments"),
    Kind("OS", os=True),
    Kind("OS and kernel arguments", os=True, kargs=True),
)


class Deployment(NamedTuple):
    """A root. `says`: the config that its currentconfig names; `files`: whose files its /etc has."""

    name: str
    os: str
    kargs: str
    says: str
    files: str


class Undo(NamedTuple):
    """What was there before; etc only for a live change. `says` and `files` are "" when /etc is not in it."""

    id: str
    says: str
    files: str
    shared: str


class Task(NamedTuple):
    """A step under way: the effects still to come, and what was observed when it was decided."""

    step: str
    effects: tuple[str, ...]
    remember: bool
    config: str  # the config that goes into a root, or is desired
    pending: str


class Lost(NamedTuple):
    """Written, but not synced: what a power cut may bring back."""

    root: str
    says: str
    files: str
    shared: str


class Node(NamedTuple):
    """Everything. Named tuples, because some hundred thousand of them are made and hashed.

    :ivar torn: the journal on the disk is not readable.
    :ivar entries: deployments that can be booted, the default first.
    :ivar staged: in /run, so gone after a power cut; `locked` belongs to it.
    :ivar payload: (id, config) of the complete payload on the shelf.
    :ivar out: workloads are (or may be) away; `kept`: a container keeps the image from garbage collection.
    :ivar serves: the config whose files the running services have read.
    :ivar held: the agent's memory of a step that failed and is not due again; `asked`: ... of its call for a reboot.
    :ivar confirmed: (config, deployment) of the last update that was kept.
    :ivar blame: there was a reason to write the target off; no part of the node, only for the check.
    :ivar chosen: somebody chose to boot an older deployment, with shared files that are not its own; for the check.
    """

    desired: str = OLD
    update: Optional[Update] = None
    failed: str = ""
    torn: bool = False
    confirmed: Optional[tuple[str, str]] = None
    entries: tuple[Deployment, ...] = ()
    booted: str = SOURCE
    staged: Optional[Deployment] = None
    locked: bool = False
    shared: str = OLD
    payload: Optional[tuple[str, str]] = None
    undo: Optional[Undo] = None
    out: bool = False
    kept: str = ""
    serves: str = OLD
    images: bool = True
    health: str = PENDING
    agent: str = UP
    task: Optional[Task] = None
    held: bool = False
    asked: bool = False
    going_down: bool = False
    unsynced: Optional[Lost] = None
    blame: bool = False
    chosen: bool = False

    @property
    def root(self) -> Deployment:
        """The booted deployment."""
        return self.deployment(self.booted)

    def deployment(self, name: str) -> Deployment:
        return next(entry for entry in self.entries if entry.name == name)

    @property
    def pending(self) -> str:
        """As `Machine.pending`: the default entry when it is not the booted one."""
        return "" if self.entries[0].name == self.booted else self.entries[0].name


def start(kind: Kind) -> Node:
    """A node at rest on the old config."""
    return Node(entries=(Deployment(SOURCE, kind.os_of(OLD), kind.kargs_of(OLD), OLD, OLD),))


def with_root(node: Node, name: str, says: str, files: str) -> Node:
    """The node with other files in one of its deployments."""
    entries = tuple(
        entry._replace(says=says, files=files) if entry.name == name else entry for entry in node.entries
    )
    return node._replace(entries=entries)


def words(node: Node) -> dict[str, str]:
    """The node for people: one short phrase for each thing."""
    update = node.update
    record = "none"
    if update is not None:
        told = ("live", "held", "draining", "drained", "applied", "rolled_back", "staged", "finalizing", "committed",
                "proved", "armed", "failure", "repairs")  # fmt: skip
        values = ((name, getattr(update, name)) for name in told)
        flags = [name if value is True else f"{name}={value}" for name, value in values if value]
        record = f"to {update.desired}: {', '.join(flags) or 'begun'}"
    return {
        "desired": node.desired,
        "journal": "torn" if node.torn else record,
        "failed target": node.failed or "none",
        "confirmed": " on ".join(node.confirmed) if node.confirmed else "none",
        "boot entries": ", ".join(_deployment(entry) for entry in node.entries),
        "booted": node.booted,
        "staged": f"{_deployment(node.staged)}{' locked' if node.locked else ''}" if node.staged else "nothing",
        "shared files": node.shared,
        "payload": f"{node.payload[0]} of {node.payload[1]}" if node.payload else "none",
        "undo record": str(tuple(node.undo)) if node.undo else "none",
        "workloads": "away" if node.out else "running",
        "services": node.serves,
        "image": ("there" if node.images else "gone") + (f", kept for {node.kept}" if node.kept else ""),
        "health": node.health,
        "agent": node.agent + (", waits" if node.held else "") + (", has asked for the reboot" if node.asked else ""),
        "machine": "going down" if node.going_down else "up",
        "not synced": str(tuple(node.unsynced)) if node.unsynced else "nothing",
    }


def _deployment(entry: Deployment) -> str:
    return f"{entry.name}(os {entry.os}, kargs {entry.kargs}, files {entry.files}, says {entry.says})"
