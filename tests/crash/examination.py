"""What has to hold in a state that a power cut left, and after the recovery from it."""

from __future__ import annotations

import contextlib
import enum
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mcdaemon.decide import Step
from mcdaemon.errors import Failure
from mcdaemon.host import files
from mcdaemon.host.files import Kind, Node
from mcdaemon.host.root import Root
from mcdaemon.update.journal import Journal, Update, decode
from mcdaemon.update.payload import Shelf
from tests.crash import offline, recording
from tests.crash.lossydisk import LossyDisk, Tree, materialise
from tests.crash.offline import NEW, NEW_CONFIG, OLD, OLD_CONFIG, Offline
from tests.crash.recording import Call, Operation

_ABSENT = Node(Kind.ABSENT)
# What may be there besides: the lock of passwd(1), and directories on the way to a managed file, which stay.
_BESIDES = frozenset({"/etc/.pwd.lock", "/var/usrlocal/share/deep"})
_SHADOWS = {OLD_CONFIG.identity: "$6$old", NEW_CONFIG.identity: "$6$new"}


class Phase(enum.Enum):
    """What a power cut leads to: which deployment boots. The values are the marks of `offline`."""

    SOURCE = "source"
    PENDING = "pending"
    TARGET = "target"


class Counterexample(AssertionError):
    """A state that must not be; the text has the operations that led to it."""


@dataclass
class Numbers:
    """How much was looked at."""

    operations: int = 0
    prefixes: int = 0
    states: int = 0
    recoveries: int = 0

    def __str__(self) -> str:
        return (
            f"{self.operations} operations, {self.prefixes} prefixes, {self.states} different states, "
            f"{self.recoveries} recoveries"
        )


@dataclass
class Recording:
    """A story as it was recorded, the disk before it, and the folder to try states in."""

    operations: list[Operation]
    disk: LossyDisk
    top: Path
    place: Path


def recorded(story: str, scratch: Path, fault: str = "", var_apart: bool = False) -> Recording:
    """Let a process take the steps of a story. `var_apart`: /var is a file system of its own."""
    top = scratch / "node"
    var = offline.var(top)
    var.mkdir(parents=True)
    with _mounted(var) if var_apart else contextlib.nullcontext():
        offline.lay_out(top)
        disk = LossyDisk(top, [str(var)] if var_apart else [])
        # /sysroot has to be a mount: `with_writable` mounts it again.
        script = 'mount --rbind "$1/sysroot" "$1/sysroot" && shift && exec "$@"'
        program = [sys.executable, "-m", "tests.crash.offline", story, str(top), *([fault] if fault else [])]
        argv = ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh", str(top), *program]
        operations = recording.record(argv, top, scratch / "strace.log")
    return Recording(operations, disk, top, scratch / "place")


@contextlib.contextmanager
def _mounted(place: Path) -> Iterator[None]:
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(place)], check=True, timeout=10)
    try:
        yield
    finally:
        subprocess.run(["umount", str(place)], check=True, timeout=10)


def examine(story: Recording, most: int, thorough: bool, seed: int) -> Numbers:
    """Look at every prefix of the operations, at most `most` states of each. Raises Counterexample.

    `thorough`: all recoveries from each state, not one by chance.
    """
    chance, numbers, seen = random.Random(seed), Numbers(len(story.operations)), set()
    phase = Phase.SOURCE
    path = str(offline.var(story.top) / "lib/mcdaemon/journal.json")
    stored = 0
    journals = _journals(story, path)
    for count in range(len(story.operations) + 1):
        if count:
            operation = story.operations[count - 1]
            story.disk.apply(operation)
            if operation.call is Call.MARK:
                stored += operation.path == "stored"
                phase = Phase(operation.path) if operation.path != "stored" else phase
        numbers.prefixes += 1
        allowed = journals[stored : stored + 2]
        for tree in story.disk.states(most, chance):
            key = (frozenset(tree.items()), phase, stored)
            if key in seen:
                continue
            seen.add(key)
            numbers.states += 1
            ways = list(_ways(phase))
            for way in ways if thorough else [chance.choice(ways)]:
                numbers.recoveries += 1
                _try(story, count, tree, phase, allowed, way)
    return numbers


def _journals(story: Recording, path: str) -> list[Journal]:
    """All that were ever stored, the empty one first; from the recording itself."""
    disk = LossyDisk.of(story.disk)
    found = [Journal()]
    for operation in story.operations:
        disk.apply(operation)
        if operation.call is Call.MARK and operation.path == "stored":
            found.append(decode(disk.read(path) or b""))
    return found


@dataclass(frozen=True)
class _Way:
    """What happens after the power cut: which deployment boots, and whether the target is still wanted and healthy."""

    booted: str
    forward: bool


def _ways(phase: Phase) -> Iterator[_Way]:
    if phase is not Phase.SOURCE:
        yield _Way(NEW, True)
        yield _Way(NEW, False)
    yield _Way(OLD, True)
    yield _Way(OLD, False)


def _try(story: Recording, count: int, tree: Tree, phase: Phase, allowed: list[Journal], way: _Way) -> None:
    shutil.rmtree(story.place, ignore_errors=True)
    materialise(tree, story.place)
    try:
        _look(Offline(story.place, way.booted), phase, allowed)
        node = _recover(story.place, way, phase)
        _exact(node)
        _nothing_left(node)
    except (AssertionError, Failure, LookupError, OSError) as error:
        last = "\n".join(
            f"  {str(op).replace(str(story.top), '')}" for op in story.operations[max(0, count - 30) : count]
        )
        kept = _differences(tree, story)
        raise Counterexample(
            f"{type(error).__name__}: {error}\nafter {count} operations, phase {phase.value}, {way}; the last ones:\n"
            f"{last}\nthe disk, where it is not what processes saw:\n{kept}"
        ) from error


def _differences(tree: Tree, story: Recording) -> str:
    seen = story.disk.settled()
    lines = []
    for path in sorted({*tree, *seen}):
        if tree.get(path) != seen.get(path):
            lines.append(f"  /{path}: {tree.get(path)}, seen: {seen.get(path)}"[:300])
    return "\n".join(lines)


# -- before the recovery ----------------------------------------------------------------------------------------------


def _look(node: Offline, phase: Phase, allowed: list[Journal]) -> None:
    """The journal is one of the two that it can be and says the truth; no file is torn."""
    record = node.record()
    assert record in allowed, f"the journal is {record}, none of {allowed}"
    for name in (OLD, NEW):
        _each_old_or_new(node.machine.root_of(name))
    if record.update is None:
        booted = NEW if phase is Phase.TARGET else OLD
        _exact(Offline(node.machine.top, booted))
        return
    _says_the_truth(node, record.update, phase)


def _says_the_truth(node: Offline, update: Update, phase: Phase) -> None:
    if update.staged:
        assert _complete(node.payloads, update.id), "the journal says verified, and the payload is not complete"
    for shelf in (node.payloads, node.undo):
        # A list that is there has all of its contents, whatever the journal says.
        assert shelf.load(update.id) is None or _complete(shelf, update.id), f"half of {shelf.folder.name} is there"
    # The early unit counts its attempt before it is made; the booted root is compared again in each boot.
    if phase is Phase.PENDING and update.repairs == 0 and NEW in (update.committed, update.proved):
        assert _is(NEW_CONFIG.identity, node.machine.root_of(NEW)) == "", "the journal says committed"
    if update.applied:
        root = node.root if update.live else node.machine.root_of(NEW)
        assert _is(NEW_CONFIG.identity, root) == "", "the journal says applied"


def _complete(shelf: Shelf, identity: str) -> bool:
    load = shelf.load(identity)
    if load is None:
        return False
    for _path, node in load.entries:
        if node.kind is Kind.FILE:
            shelf.content(identity, node)
    return True


def _each_old_or_new(root: Root) -> None:
    old, new = offline.nodes(OLD_CONFIG), offline.nodes(NEW_CONFIG)
    for path in sorted({*old, *new}):
        found = files.read_node(root, path)
        wanted = [nodes[path] for nodes in (old, new) if path in nodes]
        if found.kind is Kind.FILE or len(wanted) == 2:
            assert found in wanted, f"{path} is neither old nor new: {found}"
    shadow = files.read_file(root, "/etc/shadow") or b""
    assert [line.split(b":")[0] for line in shadow.splitlines()] == [b"root", b"core"], "/etc/shadow is torn"
    assert _password(root) in {"*", *_SHADOWS.values()}


def _password(root: Root) -> str:
    shadow = (files.read_file(root, "/etc/shadow") or b"").decode()
    return next((line.split(":")[1] for line in shadow.splitlines() if line.startswith("core:")), "")


# -- the recovery -----------------------------------------------------------------------------------------------------


def _recover(place: Path, way: _Way, phase: Phase) -> Offline:
    """What the early unit and the agent do after the power cut, until the node rests."""
    if Offline(place, OLD).record().update is None:
        # After Confirm, an old entry chosen by hand is somebody's wish and no failed target: it is only reported.
        return _boot(place, OLD if phase is Phase.SOURCE else NEW)
    node = _boot(place, way.booted)
    update = node.record().update
    if update is None:
        return node
    if way.booted == NEW:
        assert update.rolled_back or _is(NEW_CONFIG.identity, node.root) == "", "the early unit has not completed it"
        if update.applied or (way.forward and not update.rolled_back):
            node.take(Step.CONFIRM)
            return node
        node.take(Step.ROLL_BACK, "not healthy", remember=True)
        node = _boot(place, OLD)
        node.take(Step.DISCARD, "back on the previous deployment", remember=True)
    elif update.live and (update.applied or (way.forward and not update.failure)):
        if not update.applied:
            node.take(Step.APPLY_LIVE)
        node.take(Step.CONFIRM)
    else:
        node.take(Step.DISCARD, "another config is desired now")
    return node


def _boot(place: Path, booted: str) -> Offline:
    for _boot_number in range(4):
        node = Offline(place, booted)
        if not node.early().reboot:
            break
    else:
        raise AssertionError("the early unit reboots for ever")
    node.performer.sweep()
    return node


# -- after it ---------------------------------------------------------------------------------------------------------


def _exact(node: Offline) -> None:
    """The booted root, and what is shared, is exactly the old config or exactly the new one."""
    wrong = {name: _is(name, node.root) for name in (OLD_CONFIG.identity, NEW_CONFIG.identity)}
    assert "" in wrong.values(), f"neither old ({wrong[OLD_CONFIG.identity]}) nor new ({wrong[NEW_CONFIG.identity]})"


def _is(identity: str, root: Root) -> str:
    """What keeps a root from being exactly that config, "" for nothing."""
    load = OLD_CONFIG if identity == OLD_CONFIG.identity else NEW_CONFIG
    wanted = offline.nodes(load)
    for path, node in wanted.items():
        found = files.read_node(root, path)
        if found != node:
            return f"{path} is {found}"
    if _password(root) != _SHADOWS[identity]:
        return f"the password is {_password(root)}"
    present = {path for path, node in wanted.items() if node.kind is not Kind.ABSENT}
    present |= {root.canonical(path) for path in present}
    extra = sorted(path for path in _names(root) - present - _BESIDES if not _was_there(path, present))
    return f"there is also {extra}" if extra else ""


def _was_there(path: str, present: set[str]) -> bool:
    """Part of every stand of the disk: a directory above a managed path, or what `lay_out` has made."""
    if any(other.startswith(path + "/") for other in present):
        return True
    made = ("/etc/passwd", "/etc/group", "/etc/shadow", "/etc/systemd", "/var/home", "/var/roothome", "/var/lib",
            "/var/usrlocal", "/var/usrlocal/share", "/etc/systemd/system")  # fmt: skip
    return path in made


def _names(root: Root) -> set[str]:
    found = set()
    for top, place in (("/etc", root.path / "etc"), ("/var", root.var)):
        found |= {top + str(path)[len(str(place)) :] for path in place.rglob("*")}
    return {path for path in found if not path.startswith("/var/lib/mcdaemon")}


def _nothing_left(node: Offline) -> None:
    record = node.record()
    assert record.update is None, f"still in flight: {record.update}"
    assert node.payloads.identities() == () == node.undo.identities(), "a payload or an undo record is left"
    state = node.journal.parent
    left = {path.name for path in state.iterdir()} - {"journal.json", "payload", "undo"}
    assert not left, f"left in {state.name}: {left}"
