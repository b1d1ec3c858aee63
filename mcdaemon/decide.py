"""The whole policy of the daemon: one observation in, one step out. Pure and total; read `decide` top to bottom."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Optional


class Step(enum.Enum):
    """What the agent does next; in the order of an update."""

    REST = "rest"
    REJECT = "reject"
    HOLD = "hold"
    APPLY_LIVE = "apply-live"
    STAGE_OS = "stage-os"
    STAGE_KARGS = "stage-kargs"
    VERIFY_STAGED = "verify-staged"
    DRAIN = "drain"
    FINALIZE = "finalize"
    COMMIT_FILES = "commit-files"
    VERIFY_ROOT = "verify-root"
    REBOOT = "reboot"
    CONFIRM = "confirm"
    ROLL_BACK = "roll-back"
    DISCARD = "discard"


class Staged(enum.Enum):
    """What the staged deployment is, measured against the target of the update in flight."""

    NONE = "none"
    OTHER = "other"
    OS_ONLY = "os-only"  # the right tree, the kernel arguments still to come
    READY = "ready"


class Booted(enum.Enum):
    """Which deployment runs, measured against the update in flight."""

    SOURCE = "source"
    TARGET = "target"
    OTHER = "other"  # neither: somebody booted what no update of ours has proved


class Health(enum.Enum):
    """Verdict of the health gate on the booted target."""

    PENDING = "pending"
    GOOD = "good"
    BAD = "bad"


@dataclass(frozen=True)
class Progress:
    """What the journal says of the update in flight. Facts that no other place on the node can tell; each is tied to
    the deployment it was true of, so that a re-stage makes it void by itself."""

    desired: str
    live: bool = False
    verified: bool = False  # the staged deployment was verified, its payload is complete and synced
    drained: bool = False
    committed: bool = False  # the pending deployment holds the payload
    proved: bool = False  # ... and was validated, file by file
    applied: bool = False  # live: written, acted upon, validated
    rebooting: bool = False  # the reboot was asked for, in this boot
    came_back: bool = False  # the reboot was asked for in an earlier boot
    rolled_back: bool = False  # the health gate failed and the way back was taken
    failure: str = ""  # why this target cannot be reached
    draining: bool = False  # the drain was begun: workloads may be away


@dataclass(frozen=True)
class Observation:
    """Every fact that a decision rests on, read afresh for each round."""

    desired: Optional[str]
    current: Optional[str]
    update: Optional[Progress] = None
    booted: Booted = Booted.SOURCE
    staged: Staged = Staged.NONE
    pending: bool = False  # the target is finalized: the next boot enters it
    reboot: bool = True  # the way from current to desired needs one
    drain: bool = True  # ... and the node out of service
    os_changes: bool = False  # ... and image or packages differ
    refusal: str = ""  # why desired cannot be reached from current
    failed_before: str = ""  # why desired was taken back the last time
    stranded: bool = False  # the deployment from before the update is gone: there is no way back
    stood_back: str = ""  # desired was confirmed, and then somebody chose to boot an older deployment
    hold: str = ""  # what stands in the way right now
    drift: str = ""  # what differs from current on the booted root
    health: Health = Health.PENDING


@dataclass(frozen=True)
class Decision:
    """A step and the sentence for the log.

    `remember`: the target failed and is not tried again by itself. `degraded`: there is nothing to do, but the node is
    not as the config says.
    """

    step: Step
    why: str
    remember: bool = False
    degraded: bool = False


def decide(o: Observation) -> Decision:
    """The step that `o` calls for. Every observation has exactly one."""
    u = o.update
    if u is None:
        if o.desired is None:
            return _rest(o, "no config is desired; the node keeps what it has")
        if o.current == o.desired:
            return _rest(o, "current and validated")
        if o.refusal:
            return Decision(Step.REJECT, o.refusal)
        if o.stood_back:
            return Decision(Step.REST, o.stood_back, degraded=True)
        if o.failed_before:
            return Decision(Step.HOLD, f"this config was tried and taken back: {o.failed_before}")
        if o.hold:
            return Decision(Step.HOLD, o.hold)
        if o.reboot:
            return _stage(o)
        return _apply_live(o)

    if o.booted is Booted.TARGET:
        if u.applied:
            return Decision(Step.CONFIRM, "the target was validated and is kept")
        if u.rolled_back and o.stranded and o.health is not Health.GOOD:
            if o.desired != u.desired:
                return Decision(Step.CONFIRM, "not healthy, but where another config starts from", remember=True)
            return Decision(Step.HOLD, f"there is no way back; repair it or desire another: {u.failure}", degraded=True)
        if u.rolled_back and not o.stranded:
            return Decision(Step.ROLL_BACK, f"the way back is not complete: {u.failure}")
        if u.rebooting:
            return Decision(Step.REBOOT, "the early unit completed the files, and services have read the older ones")
        if o.health is Health.BAD:
            return Decision(Step.ROLL_BACK, f"booted into the target, which is not healthy: {u.failure}", remember=True)
        if o.health is Health.PENDING:
            return Decision(Step.HOLD, f"booted into the target; waiting for it to become healthy: {u.failure}")
        return Decision(Step.CONFIRM, "booted into the target; validated and healthy")

    if u.failure:
        return Decision(Step.DISCARD, u.failure, remember=True)
    if u.live:
        if u.applied:
            return Decision(Step.CONFIRM, "applied and validated without a reboot")
        if o.desired != u.desired:
            return Decision(Step.DISCARD, "another config is desired now")
        if o.hold:
            return Decision(Step.DISCARD, f"drained or half written, but it has to wait: {o.hold}")
        return _apply_live(o)

    if o.booted is Booted.OTHER:
        return Decision(Step.DISCARD, "another deployment was booted than that of before the update and its target")
    if u.came_back:
        return Decision(Step.DISCARD, "the old deployment was booted instead of the target", remember=True)
    if u.rebooting and o.pending:
        return Decision(Step.REBOOT, "the reboot was asked for; waiting for it")
    if o.desired != u.desired:
        return Decision(Step.DISCARD, "another config is desired now")
    if o.pending:
        if not u.committed:
            return Decision(Step.COMMIT_FILES, "finalized; the config goes into the deployment that will boot")
        if not u.proved:
            return Decision(Step.VERIFY_ROOT, "committed; the real root is read back")
        return Decision(Step.REBOOT, "the root that will boot is what was asked for")
    if o.staged is Staged.READY and u.verified:
        if not u.drained:
            return Decision(Step.DRAIN, "staged and verified; workloads leave last")
        return Decision(Step.FINALIZE, "drained; ostree has to merge /etc and to write the boot entry")
    if u.draining:
        return Decision(Step.DISCARD, "drained, but nothing is staged any more; the node goes back to work first")
    if o.staged is Staged.READY:
        return Decision(Step.VERIFY_STAGED, "staged; proved before anything is drained")
    if o.hold:
        return Decision(Step.HOLD, o.hold)
    return _stage(o)


def _rest(o: Observation, why: str) -> Decision:
    if o.drift:
        return Decision(Step.REST, f"current, but changed: {o.drift}", degraded=True)
    return Decision(Step.REST, why)


def _stage(o: Observation) -> Decision:
    if o.os_changes and o.staged is not Staged.OS_ONLY:
        return Decision(Step.STAGE_OS, "image or packages differ")
    return Decision(Step.STAGE_KARGS, "kernel arguments differ, or the OS stays and the update gets its own deployment")


def _apply_live(o: Observation) -> Decision:
    if o.drain and not (o.update and o.update.drained):
        return Decision(Step.DRAIN, "live change that moves workloads")
    return Decision(Step.APPLY_LIVE, "nothing in this change needs a reboot")
