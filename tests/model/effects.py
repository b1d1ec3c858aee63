"""The effects of the steps, each a pure function on the abstract node: what `perform.py` and `early.py` do, in their
order, split wherever a crash could fall between two durable things.

Each is paired with the test on the stand that shows the real one (`tests/field/test_effects.py`).
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from typing import Any, Optional, TypeVar

from mcdaemon.update.journal import Update
from tests.model.facts import arrived
from tests.model.node import (
    CONFIGS,
    MERGED,
    MIXED,
    NOW,
    STRANGER,
    TARGET,
    Deployment,
    Kind,
    Lost,
    Node,
    Task,
    Undo,
    with_root,
)


class Effect(enum.Enum):
    """One durable thing that a step does."""

    BEGIN = "journal: an update begins"
    CLEAR_STAGE = "rpm-ostree: Cleanup(pending-deploy)"
    NOTE_HOLD = "journal: there may be a hold on the image"
    HOLD_IMAGE = "a container keeps the local image"
    NOTE_STAGING = "journal: nothing staged is verified any more"
    STAGE_TREE = "rpm-ostree: UpdateDeployment, locked"
    STAGE_LINE = "rpm-ostree: KernelArgs, locked"
    DROP_PAYLOAD = "the payload goes"
    LAY_OUT = "the payload is laid out and synced"
    RELEASE_IMAGE = "the container that keeps the image goes"
    NOTE_VERIFIED = "journal: this staged deployment is verified"
    NOTE_DRAINING = "journal: the node may leave service from here on"
    DRAIN = "the drain hook: workloads go"
    NOTE_DRAINED = "journal: drained"
    NOTE_FINALIZING = "journal: finalization was asked for"
    UNLOCK = "the staged deployment is unlocked"
    LOCK = "what is staged is locked"
    NOTE_UNVERIFIED = "journal: it was not finalized, and is verified again"
    FINALIZE = "ostree merges /etc and writes the boot entry"
    KEEP_SHARED = "undo record of the files outside /etc, synced"
    KEEP_ALL = "undo record of all files, synced"
    WRITE_SOME = "some files of the payload are written"
    WRITE_REST = "the rest of the payload is written"
    SYNC = "what was written is synced"
    NOTE_COMMITTED = "journal: the pending deployment holds the payload"
    NOTE_PROVED = "journal: ... and was read back"
    ARM = "journal: the reboot is about to be asked for"
    ASK = "logind: Reboot"
    DISARM = "journal: the reboot was not to be had"
    RESTART = "services are reloaded or restarted"
    NOTE_APPLIED = "journal: applied and validated"
    NOTE_RETURNING = "journal: not drained any more, workloads may still be away"
    UNDRAIN = "the undrain hook: workloads may come"
    NOTE_BACK = "journal: the node is back in service"
    NOTE_CONFIRMED = "journal: no update, the target is what the node has; or, remembered as failed, cannot be left"
    NOTE_ROLLED_BACK = "journal: the way back is taken, the target is remembered as failed"
    DEFAULT_BACK = "rpm-ostree: Rollback"
    PUT_SOME_BACK = "some files of the undo record are put back"
    PUT_REST_BACK = "the rest of the undo record is put back"
    DROP_UNDO = "the undo record goes"
    CLEAR_LOST = "rpm-ostree: Cleanup(base), of what was staged before a power cut"
    NOTE_DISCARDED = "journal: no update; remembered when it failed"
    NOTE_FAILURE = "journal: the target cannot be reached"
    NOTE_REPAIR = "journal: the early unit completes the root, counted"
    REBOOT_AT_ONCE = "the early unit reboots"
    NOTE_GIVEN_UP = "journal: the early unit gives the target up"
    VOID_PROOF = "journal: the pending root is not proved any more"
    STAND_IN = "journal: an update to discard stands in for the lost record"
    SWEEP_PAYLOAD = "a payload that no journal knows goes"
    SWEEP_UNDO = "an undo record that no journal knows goes"
    SWEEP_HOLD = "a hold that no journal knows goes"
    FORGET_FAILED = "journal: the failed target may be tried again"


def apply(kind: Kind, node: Node, effect: Effect) -> Node:
    """The node after the effect; the task, if any, has been taken one on by the caller."""
    return _EFFECTS[effect](kind, node)


def _task(node: Node) -> Task:
    assert node.task is not None
    return node.task


def _note(node: Node, **changes: Any) -> Node:
    assert node.update is not None, "a note without an update"
    return node._replace(update=dataclasses.replace(node.update, **changes))


def _update(node: Node) -> Update:
    assert node.update is not None
    return node.update


# -- journal ----------------------------------------------------------------------------------------------------------


def _begin(kind: Kind, node: Node) -> Node:
    assert node.desired in CONFIGS, f"an update to {node.desired} begins"
    taken = {node.payload[0] if node.payload else "", node.undo.id if node.undo else "", node.kept}
    identity = next(name for name in ("u1", "u2", "u3", "u4") if name not in taken)
    # Only a desire of this moment: nothing was observed before that could be older.
    update = Update(identity, _task(node).config, "", node.booted, live=not kind.reboot)
    return node._replace(update=update, blame=False)


def _forget_failed(kind: Kind, node: Node) -> Node:
    """And that an older deployment was chosen."""
    left = node.confirmed is not None and node.confirmed[1] != node.booted
    return node._replace(failed="", confirmed=None if left else node.confirmed)


def _note_verified(kind: Kind, node: Node) -> Node:
    return _note(node, staged=TARGET, source=node.booted, committed="", proved="")


def _note_rolled_back(kind: Kind, node: Node) -> Node:
    return _note(node, rolled_back=True, failure="not healthy")._replace(failed=_update(node).desired)


def _note_confirmed(kind: Kind, node: Node) -> Node:
    failed, confirmed = ("", (_update(node).desired, node.booted))
    if _task(node).remember:
        failed, confirmed = node.failed, node.confirmed
    return node._replace(update=None, failed=failed, confirmed=confirmed, blame=False, chosen=False)


def _note_discarded(kind: Kind, node: Node) -> Node:
    failed = _update(node).desired if _task(node).remember else node.failed
    return node._replace(update=None, failed=failed, blame=False)


def _note_repair(kind: Kind, node: Node) -> Node:
    if _update(node).live:
        return _note(node, repairs=_update(node).repairs + 1)
    return _note(node, repairs=_update(node).repairs + 1, committed=node.booted, proved=node.booted, armed=NOW)


def _note_given_up(kind: Kind, node: Node) -> Node:
    node = _note(node, rolled_back=True, failure="incomplete")
    return node._replace(failed=_update(node).desired, blame=True)


def _arm(kind: Kind, node: Node) -> Node:
    """From here on what comes back instead of the target counts as its failure; also if somebody was faster."""
    late = node.staged is not None or node.pending != _update(node).staged
    return _note(node, armed=NOW)._replace(blame=node.blame or late)


def _void_proof(kind: Kind, node: Node) -> Node:
    update = _update(node)
    left = update.armed or (update.finalizing if update.applied else "")
    return _note(node, committed="", proved="", applied=False, armed=left)


def _stand_in(kind: Kind, node: Node) -> Node:
    """As `lost.stand_in`."""
    load, undo = node.payload, node.undo
    live = undo is not None and bool(undo.says)
    left = sorted({load[0] if load else "", undo.id if undo else ""} - {""})
    if load is not None and load[1] == node.root.says and not live:
        left.remove(load[0])
        node = node._replace(undo=None if undo and undo.id == load[0] else undo)
    update = Update(left[0] if left else "lost", "", "", node.booted, live=live, draining=True, failure="lost")
    return node._replace(torn=False, update=update, failed="", confirmed=None, blame=True)


# -- rpm-ostree and ostree --------------------------------------------------------------------------------------------


def _cleanup(kind: Kind, node: Node) -> Node:
    at = next(index for index, entry in enumerate(node.entries) if entry.name == node.booted)
    return node._replace(staged=None, locked=False, entries=node.entries[at:])


def _stage_tree(kind: Kind, node: Node) -> Node:
    root = node.staged or node.root
    tree = Deployment(TARGET, kind.os_of(_task(node).config), root.kargs, "", "")
    return node._replace(staged=tree, locked=True)


def _stage_line(kind: Kind, node: Node) -> Node:
    root = node.staged or node.root
    tree = Deployment(TARGET, root.os, kind.kargs_of(_task(node).config), "", "")
    return node._replace(staged=tree, locked=True)


def finalize(kind: Kind, node: Node) -> Node:
    """ostree's finalization: the staged deployment becomes the default, with a copy of the booted root's /etc."""
    staged = node.staged
    if staged is None or node.locked:
        return node
    # What somebody else makes differs from the booted OS in a package or two; a target may ship any of our files.
    says, files = node.root.says, node.root.files if staged.name == STRANGER else MERGED
    entry = staged._replace(says=says, files=files)
    return node._replace(staged=None, entries=(entry, node.root))


def _default_back(kind: Kind, node: Node) -> Node:
    source = _update(node).source
    if node.entries[0].name == source or all(entry.name != source for entry in node.entries):
        return node
    if node.staged is not None:
        node = _cleanup(kind, node)
    return node._replace(entries=tuple(sorted(node.entries, key=lambda entry: entry.name != source)))


# -- files ------------------------------------------------------------------------------------------------------------


def _keep(node: Node, says: str, files: str) -> Node:
    identity = _update(node).id
    if node.undo is not None and node.undo.id == identity:
        return node
    return node._replace(undo=Undo(identity, says, files, node.shared))


def _keep_all(kind: Kind, node: Node) -> Node:
    return _keep(node, node.root.says, node.root.files)


def _write(node: Node, says: str, files: str, shared: str) -> Node:
    """Into the root of the task; until it is synced a power cut may bring back what was there before."""
    name = _task(node).pending or node.booted
    root = node.deployment(name)
    lost = node.unsynced or Lost(name, root.says, root.files, node.shared)
    return with_root(node, name, says, files)._replace(shared=shared, unsynced=lost)


def _mixture(before: str, after: str) -> str:
    return before if before == after else MIXED


def _write_some(kind: Kind, node: Node) -> Node:
    assert node.payload is not None, "the payload is gone"
    root, config = node.deployment(_task(node).pending or node.booted), node.payload[1]
    return _write(node, config, _mixture(root.files, config), _mixture(node.shared, config))


def _write_rest(kind: Kind, node: Node) -> Node:
    assert node.payload is not None
    config = node.payload[1]
    return _write(node, config, config, config)


def _put_some_back(kind: Kind, node: Node) -> Node:
    root, undo = node.root, node.undo
    if undo is None or undo.id != _update(node).id:
        return node
    if undo.says:
        return _write(node, root.says, _mixture(root.files, undo.files), _mixture(node.shared, undo.shared))
    return _write(node, root.says, root.files, _mixture(node.shared, undo.shared))


def _put_rest_back(kind: Kind, node: Node) -> Node:
    root, undo = node.root, node.undo
    if undo is None or undo.id != _update(node).id:
        return node
    return _write(node, undo.says or root.says, undo.files or root.files, undo.shared)


_Thing = TypeVar("_Thing")


def _known(node: Node, thing: Optional[_Thing], name: Callable[[_Thing], str]) -> Optional[_Thing]:
    """What belongs to the update that the journal names; all else is swept."""
    return thing if thing and node.update is not None and name(thing) == node.update.id else None


def _sweep_hold(kind: Kind, node: Node) -> Node:
    held = node.update is not None and node.update.held
    return node._replace(kept=(_known(node, node.kept, str) or "") if held else "")


def _boot_name(node: Node) -> str:
    return _task(node).pending


_EFFECTS: dict[Effect, Callable[[Kind, Node], Node]] = {
    Effect.BEGIN: _begin,
    Effect.CLEAR_STAGE: _cleanup,
    Effect.NOTE_HOLD: lambda kind, node: _note(node, held=True),
    Effect.HOLD_IMAGE: lambda kind, node: node._replace(kept=_update(node).id),
    Effect.NOTE_STAGING: lambda kind, node: _note(node, attempt=1, staged="", finalizing="", armed=""),
    Effect.STAGE_TREE: _stage_tree,
    Effect.STAGE_LINE: _stage_line,
    Effect.DROP_PAYLOAD: lambda kind, node: node._replace(payload=None),
    Effect.LAY_OUT: lambda kind, node: node._replace(payload=(_update(node).id, _task(node).config)),
    Effect.RELEASE_IMAGE: lambda kind, node: node._replace(kept=""),
    Effect.NOTE_VERIFIED: _note_verified,
    Effect.NOTE_DRAINING: lambda kind, node: _note(node, draining=True),
    Effect.DRAIN: lambda kind, node: node._replace(out=True),
    Effect.NOTE_DRAINED: lambda kind, node: _note(node, drained=True),
    Effect.NOTE_FINALIZING: lambda kind, node: _note(node, finalizing=NOW),
    Effect.UNLOCK: lambda kind, node: node._replace(locked=False),
    Effect.LOCK: lambda kind, node: node._replace(locked=node.staged is not None),
    Effect.NOTE_UNVERIFIED: lambda kind, node: _note(node, staged=""),
    Effect.FINALIZE: finalize,
    Effect.KEEP_SHARED: lambda kind, node: _keep(node, "", ""),
    Effect.KEEP_ALL: _keep_all,
    Effect.WRITE_SOME: _write_some,
    Effect.WRITE_REST: _write_rest,
    Effect.SYNC: lambda kind, node: node._replace(unsynced=None),
    Effect.NOTE_COMMITTED: lambda kind, node: _note(node, committed=_boot_name(node)),
    Effect.NOTE_PROVED: lambda kind, node: _note(node, proved=_boot_name(node)),
    Effect.ARM: _arm,
    Effect.ASK: lambda kind, node: node._replace(going_down=True, asked=_task(node).step == "reboot"),
    Effect.DISARM: lambda kind, node: _note(node, armed=NOW if arrived(node) else ""),
    Effect.RESTART: lambda kind, node: node._replace(serves=node.root.says),
    Effect.NOTE_APPLIED: lambda kind, node: _note(node, applied=True),
    Effect.UNDRAIN: lambda kind, node: node._replace(out=False),
    Effect.NOTE_RETURNING: lambda kind, node: _note(node, draining=True, drained=False),
    Effect.NOTE_BACK: lambda kind, node: _note(node, draining=False),
    Effect.NOTE_CONFIRMED: _note_confirmed,
    Effect.NOTE_ROLLED_BACK: _note_rolled_back,
    Effect.DEFAULT_BACK: _default_back,
    Effect.PUT_SOME_BACK: _put_some_back,
    Effect.PUT_REST_BACK: _put_rest_back,
    Effect.DROP_UNDO: lambda kind, node: node._replace(undo=None),
    Effect.CLEAR_LOST: lambda kind, node: node,
    Effect.NOTE_DISCARDED: _note_discarded,
    Effect.NOTE_FAILURE: lambda kind, node: _note(node, failure="broken"),
    Effect.NOTE_REPAIR: _note_repair,
    Effect.REBOOT_AT_ONCE: lambda kind, node: node._replace(going_down=True),
    Effect.NOTE_GIVEN_UP: _note_given_up,
    Effect.VOID_PROOF: _void_proof,
    Effect.STAND_IN: _stand_in,
    Effect.SWEEP_PAYLOAD: lambda kind, node: node._replace(payload=_known(node, node.payload, lambda load: load[0])),
    Effect.SWEEP_UNDO: lambda kind, node: node._replace(undo=_known(node, node.undo, lambda undo: undo.id)),
    Effect.SWEEP_HOLD: _sweep_hold,
    Effect.FORGET_FAILED: _forget_failed,
}
