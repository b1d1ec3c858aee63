"""The abstract node observed, as `observe.py` observes a real one."""

from __future__ import annotations

from mcdaemon.decide import Booted, Health, Observation, Staged
from tests.model.node import (
    BAD,
    CONFIGS,
    GOOD,
    NOTHING,
    NOW,
    REFUSED,
    STRANGER,
    UNREADABLE,
    Kind,
    Node,
)

_HEALTH = {GOOD: Health.GOOD, BAD: Health.BAD}


def current(node: Node) -> str:
    """The config that the node carries; of a live change in flight, the one before (`Observer._current`)."""
    update, undo = node.update, node.undo
    if update is not None and update.live and undo is not None and undo.id == update.id:
        return undo.says
    return node.root.says


def arrived(node: Node) -> bool:
    """Whether the booted root is the target of the update in flight."""
    update = node.update
    return update is not None and not update.live and node.booted == update.staged


def observation(kind: Kind, node: Node) -> Observation:
    """What `decide` sees."""
    update, has = node.update, current(node)
    wish = None if node.desired == NOTHING else node.desired
    if node.desired == UNREADABLE and update is not None and not update.live:
        wish = update.desired
    progress = None
    if update is not None:
        progress = update.progress(NOW, node.staged.name if node.staged else "", node.pending)
    elif wish in (None, has):
        drift = "something was changed" if node.root.files != has or node.shared != has else ""
        return Observation(wish, has, drift=drift)
    elif stood_back(node):
        return Observation(wish, has, stood_back="an older deployment was chosen")
    elif node.desired == UNREADABLE:
        return Observation(wish, has, refusal="cannot be parsed")
    if arrived(node):
        stranded = all(entry.name != update.source for entry in node.entries) if update is not None else False
        return Observation(wish, has, progress, Booted.TARGET, health=_health(node), stranded=stranded)
    other = update is not None and not update.live and node.booted != update.source
    planned = node.desired in CONFIGS
    changes = planned and has != node.desired
    staged = Staged.NONE if node.staged is None else Staged.OTHER
    if planned and update is not None:
        staged = classify(kind, node)
    return Observation(
        wish,
        has,
        progress,
        Booted.OTHER if other else Booted.SOURCE,
        staged=staged,
        pending=update is not None and bool(node.pending) and node.pending == update.staged,
        reboot=kind.reboot and changes if planned else True,
        drain=kind.drain and changes if planned else True,
        os_changes=kind.os and changes,
        refusal="cannot be reached" if node.desired == REFUSED else "",
        failed_before="it failed" if node.failed and node.failed == wish else "",
        hold=_hold(kind, node),
    )


def _health(node: Node) -> Health:
    update = node.update
    assert update is not None
    if node.payload is None or node.payload[0] != update.id:
        return Health.BAD
    if not complete(node):
        return Health.BAD if node.health == BAD else Health.PENDING
    return _HEALTH.get(node.health, Health.PENDING)


def complete(node: Node) -> bool:
    """Whether the booted root holds all of the payload."""
    if node.payload is None:
        return False
    config = node.payload[1]
    return (node.root.says, node.root.files, node.shared) == (config, config, config)


def untouched(node: Node) -> bool:
    """Whether the booted root holds all of the undo record of the update in flight, if there is one."""
    undo = node.undo
    if undo is None or node.update is None or undo.id != node.update.id:
        return True
    return (node.root.says, node.root.files, node.shared) == (undo.says, undo.files, undo.shared)


def stood_back(node: Node) -> bool:
    """As `Observer._stood_back`."""
    confirmed = node.confirmed
    if node.update is not None or confirmed is None or confirmed[0] != node.desired or confirmed[1] == node.booted:
        return False
    return any(entry.name == confirmed[1] for entry in node.entries)


def _hold(kind: Kind, node: Node) -> str:
    update = node.update
    if node.desired in (REFUSED, UNREADABLE):
        return "the desired config cannot be used"
    if node.desired == NOTHING or (update is not None and update.desired != node.desired):
        return ""
    there = (node.pending, node.staged.name if node.staged is not None else "")
    if update is not None and update.staged and update.staged in there:
        return "it is not due again" if node.held else ""  # no image is read any more
    if kind.os and not node.images:
        return "the image is complete nowhere"
    return "it is not due again" if node.held else ""


def classify(kind: Kind, node: Node) -> Staged:
    """As `stage.classify`."""
    update, staged = node.update, node.staged
    if staged is None:
        return Staged.NONE
    assert update is not None
    os_changes = kind.os and current(node) != node.desired
    if not node.locked and not update.finalizing:
        return Staged.OTHER
    if staged.name == STRANGER:
        return Staged.OTHER  # it has a package more
    if staged.os != (node.desired if os_changes else node.root.os):
        return Staged.OTHER
    if staged.kargs == kind.kargs_of(node.desired):
        return Staged.READY
    return Staged.OS_ONLY if os_changes else Staged.OTHER
