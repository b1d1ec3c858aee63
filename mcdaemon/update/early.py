"""The early unit: before network, CRI-O and kubelet, the booted root is compared with the journal.

It has no bus and no rpm-ostreed; it needs neither. What it does is decided here in the same way as the loop's steps:
from facts, once, and idempotent.
"""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from mcdaemon.errors import Broken
from mcdaemon.host import boot
from mcdaemon.host.deployments import Machine
from mcdaemon.host.root import Root
from mcdaemon.update import commit, journal, lost, verify
from mcdaemon.update.journal import FailedTarget, Journal, Update
from mcdaemon.update.payload import Payload, Shelf

MOST_REPAIRS = 2
"""How often an incomplete target is completed and rebooted into before it is given up."""


class Early(enum.Enum):
    """What has to be done before anything else starts."""

    NOTHING = "nothing"
    COMPLETE = "complete"  # the target was booted without (all of) its files: write them, reboot
    PUT_BACK = "put-back"  # the old root runs: files outside /etc are put back; or all of a live change, half written
    GIVE_UP = "give-up"  # the target cannot be completed: the way back


@dataclass(frozen=True)
class Outcome:
    """What was done and whether the machine has to reboot now."""

    action: Early
    why: str
    reboot: bool = False


def decide(
    update: Optional[Update], booted: str, complete: bool, untouched: bool = True, carries: bool = False
) -> tuple[Early, str]:
    """The whole policy of the early unit. `complete`: the booted root holds all of the payload. `untouched`: or all of
    the undo record of a live change, if there is one. `carries`: it says that it has the target's config, and some of
    that was written."""
    if update is not None and update.live and not update.applied and not untouched:
        return Early.PUT_BACK, "a change without a reboot was interrupted while it was written"
    if update is None or update.live:
        return Early.NOTHING, "no update that reboots is in flight"
    if not update.staged or (booted != update.staged and not update.finalizing):
        return Early.NOTHING, "the update in flight was not finalized"
    if booted != update.staged and not carries:
        return Early.PUT_BACK, "the old deployment is booted"
    # The target, or what somebody else has made of it once it was booted: the files outside /etc belong to both.
    # Finalized by us, or by a shutdown after somebody else had unlocked it: verified it was, or it had no name here.
    if complete:
        return Early.NOTHING, "the target is booted and complete"
    if update.rolled_back or update.repairs >= MOST_REPAIRS:
        return Early.GIVE_UP, f"the target is still incomplete after {update.repairs} repairs"
    return Early.COMPLETE, "the target was booted before its files were in place"


def run(machine: Machine, root: Root, path: Path, payloads: Shelf, undo: Shelf) -> Outcome:
    """Look at the booted root and do what has to be done. Raises Failure when the disk cannot be read or written."""
    # Left where it is: the agent has to find it, for it alone can put right what was in flight.
    record, alien = journal.load(path)
    if alien or record.update is None:
        return Outcome(Early.NOTHING, alien or "no update is in flight")
    update = record.update
    _osname, booted = machine.booted()
    update = _told_by_stamp(machine, update, booted)
    if update != record.update:
        # ostree-boot-complete.service removes the trace soon, and the agent comes after it (STATE-21).
        record = dataclasses.replace(record, update=update)
        journal.store(path, record)
    if update.live:
        return _settle_live(record, update, booted, root, path, undo)
    load = _payload(payloads, update.id)
    complete = load is not None and verify.validate(root, load.expected(), load.passwords).ok
    # Without an undo record nothing was written yet: then it is an older deployment with the same config.
    carries = lost.carried(root) == update.desired and _payload(undo, update.id) is not None
    action, why = decide(update, booted, complete, carries=carries)
    if action is Early.COMPLETE and load is not None:
        # Counted before it is tried: a power cut in the middle counts too.
        changed = dataclasses.replace(
            update,
            repairs=update.repairs + 1,
            committed=booted,
            proved=booted,
            armed=boot.boot_id(machine.top / "proc"),
        )
        journal.store(path, dataclasses.replace(record, update=changed))
        _complete(load, payloads, undo, root)
        return Outcome(action, why, reboot=True)
    if action is Early.COMPLETE:
        action, why = Early.GIVE_UP, f"{why}, and the payload {update.id} is gone"
    if action is Early.GIVE_UP:
        # The way back needs rpm-ostree, which is not up yet: the loop takes it first thing.
        failed = FailedTarget.of(update, why)
        changed = dataclasses.replace(update, rolled_back=True, failure=why)
        journal.store(path, dataclasses.replace(record, update=changed, failed=failed))
    if action is Early.PUT_BACK:
        # The pending root is not what was proved any more: should it boot after all, its shared files come first. And
        # one that was validated has been left: that counts as if its reboot had ended here.
        if update.committed or update.proved or update.applied:
            left = update.armed or (update.finalizing if update.applied else "")
            changed = dataclasses.replace(update, committed="", proved="", applied=False, armed=left)
            journal.store(path, dataclasses.replace(record, update=changed))
        commit.take_back(update.id, undo, root, drop=False)
    return Outcome(action, f"{why}; ostree could not finalize: {update.unfinalized}" if update.unfinalized else why)


def _settle_live(record: Journal, update: Update, booted: str, root: Root, path: Path, undo: Shelf) -> Outcome:
    """No unit of this boot may run on a mixture of the old and the new files. The undo record stays: the loop goes on
    from it. PID 1, generators, udev and sysctl have read the mixture, so the boot is made again, but only where
    something was really put back, and not for ever."""
    before = _payload(undo, update.id)
    found = _differs(root, before)
    action, why = decide(update, booted, False, not found)
    if before is None or action is not Early.PUT_BACK:
        return Outcome(action, why)
    changed = dataclasses.replace(update, repairs=update.repairs + 1)
    journal.store(path, dataclasses.replace(record, update=changed))
    commit.take_back(update.id, undo, root, drop=False)
    return Outcome(action, why, reboot=update.repairs < MOST_REPAIRS and _differs(root, before) != found)


def _differs(root: Root, load: Optional[Payload]) -> tuple[verify.Mismatch, ...]:
    return tuple(verify.validate(root, load.expected(), load.passwords).mismatches) if load is not None else ()


def _told_by_stamp(machine: Machine, update: Update, booted: str) -> Update:
    """With libostree's words about a finalization that failed since the update was verified; an older trace is not its
    (TXN-44)."""
    if not update.staged or booted == update.staged or machine.stamp() in ("", update.stamp):
        return update
    return dataclasses.replace(update, unfinalized=boot.finalize_failure(machine.boot))


def _payload(payloads: Shelf, identity: str) -> Optional[Payload]:
    """None also for a torn one: it can complete nothing, and must not keep the old root from its files."""
    try:
        return payloads.load(identity)
    except Broken:
        return None


def _complete(load: Payload, payloads: Shelf, undo: Shelf, root: Root) -> None:
    commit.remember(load, undo, root, root.shared)
    commit.apply(load, payloads, root)
