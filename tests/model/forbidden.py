"""What must never be: in no state, after no decision, and at no rest."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Optional

from mcdaemon.decide import Decision, Health, Observation, Staged, Step
from mcdaemon.update.early import MOST_REPAIRS
from tests.model import steps
from tests.model.effects import Effect
from tests.model.facts import arrived, complete, current, stood_back
from tests.model.node import (
    BEFORE,
    CONFIGS,
    DOWN,
    EDITED,
    FOREIGN,
    FORMER,
    MERGED,
    MIXED,
    NOTHING,
    NOW,
    OLD,
    REFUSED,
    SOURCE,
    TARGET,
    UNREADABLE,
    UP,
    Deployment,
    Kind,
    Node,
)

_FORWARD = frozenset({Step.STAGE_OS, Step.STAGE_KARGS, Step.VERIFY_STAGED, Step.DRAIN, Step.FINALIZE,
                      Step.COMMIT_FILES, Step.VERIFY_ROOT, Step.APPLY_LIVE, Step.REBOOT})  # fmt: skip
_WAITING = frozenset({Step.REST, Step.REJECT, Step.HOLD})


def in_state(kind: Kind, node: Node) -> Optional[str]:
    """Why this state must not be, None when it may."""
    return next(_states(kind, node), None)


def _states(kind: Kind, node: Node) -> Iterator[str]:
    if kind.reboot:
        for entry in node.entries:
            if entry.name == SOURCE and not _made_of_half_a_target(entry) and (entry.says != OLD or entry.files not in (OLD, EDITED)):
                yield "the /etc of the old deployment was changed by an update that reboots"
        in_service = node.agent == UP and node.task is None and node.booted == SOURCE and not node.out
        # Who boots the old entry by hand, and whose early unit is killed, has them until the agent's first step.
        u = node.update
        by_hand = u is not None and (u.applied or u.armed == BEFORE or not u.desired)
        if in_service and node.shared != OLD and not by_hand and not node.chosen:
            yield "a node in service runs on the shared files of another config"
    if node.torn:
        return
    if node.update is not None:
        yield from _lies(kind, node)
        yield from _mixtures(node)
    elif node.agent == UP and node.task is None:
        yield from _leftovers(node)


def _lies(kind: Kind, node: Node) -> Iterator[str]:
    """What the journal says of the deployments that exist has to be true."""
    u = node.update
    assert u is not None
    config, pending = u.desired, node.pending
    # Armed in an earlier boot it does not count any more: the old deployment came back.
    if pending and pending in (u.committed, u.proved) and node.agent == UP and u.armed != BEFORE:
        root = node.deployment(pending)
        if (root.says, root.files, node.shared) != (config, config, config) or node.unsynced is not None:
            yield "the journal says that the pending deployment holds the config, and it does not"
    if u.staged and node.staged is not None and node.staged.name == u.staged and node.payload != (u.id, config):
        yield "the journal says that the staged deployment is verified, and there is no payload"
    if u.drained and not node.out and u.desired:
        yield "the journal says that the node is drained, and workloads run"
    if node.out and not u.draining:
        yield "workloads are away, and the journal does not know"
    has = (node.root.says, node.root.files, node.shared)
    if u.live and u.applied and (has != (config, config, config) or node.unsynced is not None):
        yield "the journal says that the change is applied, and it is not"


def _mixtures(node: Node) -> Iterator[str]:
    u = node.update
    assert u is not None
    begun = node.agent in (UP, DOWN) and node.task is None and not node.going_down
    # Who spoils it again before each boot is not answered with a reboot for ever.
    if u.live and begun and node.serves == MIXED and u.repairs <= MOST_REPAIRS and u.desired:
        yield "units have started on a live change that was half written"


def _leftovers(node: Node) -> Iterator[str]:
    if node.out:
        yield "workloads are away, and no update will bring them back"
    if node.payload is not None or node.undo is not None or node.kept not in ("", "left"):
        yield "an update has ended, and its payload, undo record or hold is left"
    if node.staged is not None and node.staged.name == TARGET:
        yield "an update has ended, and its staged deployment is left"
    theirs = node.pending == FORMER and (node.chosen or node.deployment(FORMER).os == FOREIGN)
    if node.pending and not theirs:
        yield "the next boot enters a deployment that nobody wants"
    files = "" if _made_of_half_a_target(node.root) else node.root.files
    if not node.going_down and MIXED in (files, node.shared):
        yield "an update has ended, and files are mixed"


def after_decision(kind: Kind, node: Node, o: Observation, d: Decision) -> Optional[str]:
    """Why this step must not be taken from here, None when it may."""
    return next(_decisions(kind, node, o, d), None)


def _decisions(kind: Kind, node: Node, o: Observation, d: Decision) -> Iterator[str]:
    u = node.update
    if u is None:
        yield from _beginnings(node, o, d)
    elif d.step in _FORWARD:
        if not u.desired:
            yield "the stand-in of a lost record goes on"
        waits_for_reboot = d.step is Step.REBOOT and node.pending and u.armed
        if node.desired != u.desired and not waits_for_reboot and not arrived(node) and node.desired != UNREADABLE:
            yield f"goes on with a superseded update: {d.step.value}"
        if node.failed == u.desired:
            yield "a target that failed is tried again"
    if d.step in _WAITING and node.out and not arrived(node):
        yield "a node that is out of service waits"
    if d.step in (Step.REST, Step.REJECT) and u is not None:
        yield "rests while an update is in flight"
    if d.step is Step.REST and d.degraded != bool(o.drift or o.stood_back):
        yield "what was changed by hand is not told"
    yield from {
        Step.STAGE_OS: _staging,
        Step.STAGE_KARGS: _staging,
        Step.VERIFY_STAGED: _verifying,
        Step.DRAIN: _draining,
        Step.FINALIZE: _finalizing,
        Step.COMMIT_FILES: _committing,
        Step.VERIFY_ROOT: _committing,
        Step.REBOOT: _rebooting,
        Step.CONFIRM: _confirming,
        Step.ROLL_BACK: _going_back,
        Step.DISCARD: _discarding,
        Step.APPLY_LIVE: _applying,
    }.get(d.step, _nothing)(kind, node, o, d)


def _nothing(kind: Kind, node: Node, o: Observation, d: Decision) -> Iterator[str]:
    return iter(())


def _beginnings(node: Node, o: Observation, d: Decision) -> Iterator[str]:
    if d.step in _WAITING:
        if d.step is Step.REJECT and node.desired not in (REFUSED, UNREADABLE):
            yield "refuses what can be reached"
        return
    if d.step not in _FORWARD:
        yield f"{d.step.value} without an update"
    if node.desired not in CONFIGS:
        yield "an update to no config begins"
    if node.desired == current(node):
        yield "an update to what the node has begins"
    if node.desired == node.failed:
        yield "a target that failed is tried again"
    if stood_back(node):
        yield "undoes that somebody has chosen an older deployment"
    if o.hold:
        yield "an update begins while something stands in its way"


def _staging(kind: Kind, node: Node, o: Observation, d: Decision) -> Iterator[str]:
    if not kind.reboot:
        yield "a live change is staged"
    if node.out:
        yield "an rpm-ostree transaction on a drained node"
    if o.hold:
        yield "stages while something stands in the way"
    if kind.os and d.step is Step.STAGE_OS and not node.images:
        yield "stages without an image"
    if d.step is Step.STAGE_OS and not kind.os:
        yield "stages an unchanged OS anew"
    if node.pending and u_pending(node):
        yield "throws a finalized deployment away by staging"


def u_pending(node: Node) -> bool:
    return node.update is not None and node.pending == node.update.staged


def _verifying(kind: Kind, node: Node, o: Observation, d: Decision) -> Iterator[str]:
    if o.staged is not Staged.READY:
        yield "verifies what is not the target"


def _draining(kind: Kind, node: Node, o: Observation, d: Decision) -> Iterator[str]:
    u = node.update
    if not kind.reboot:
        if not kind.drain:
            yield "drains for a change that moves nothing"
        if o.hold:
            yield "drains while something stands in the way"
        return
    if u is None or o.staged is not Staged.READY or not o.update or not o.update.verified:
        yield "drains before all is staged and verified"
    if node.desired == UNREADABLE:
        yield "drains for a config that nobody can read now"


def _finalizing(kind: Kind, node: Node, o: Observation, d: Decision) -> Iterator[str]:
    if not node.out:
        yield "finalizes with workloads running"
    if o.staged is not Staged.READY or not o.update or not o.update.verified:
        yield "finalizes what is not verified"


def _committing(kind: Kind, node: Node, o: Observation, d: Decision) -> Iterator[str]:
    if not u_pending(node):
        yield "commits into no deployment of this update"
    if not node.out:
        yield "files outside /etc change under running workloads"
    if node.update is not None and node.update.armed:
        yield "a target that was left behind is tried again"


def _rebooting(kind: Kind, node: Node, o: Observation, d: Decision) -> Iterator[str]:
    u = node.update
    if u is not None and arrived(node) and u.armed == NOW and u.repairs:
        return  # the early unit was about to
    if u is None or not node.pending:
        yield "reboots for nothing"
        return
    if u.armed and u.proved != node.pending:
        yield "a target that was left behind is tried again"
    root, config = node.deployment(node.pending), u.desired
    if node.pending != u.staged or (root.says, root.files, node.shared) != (config, config, config):
        yield "reboots into a root that is not the target"
    elif u.proved != node.pending:
        yield "reboots into a root that was not proved"
    if _staged_at_the_call(kind, node, o, d):
        yield "reboots into what somebody else has staged"
    if not node.out:
        yield "reboots with workloads running"


def _staged_at_the_call(kind: Kind, node: Node, o: Observation, d: Decision) -> bool:
    """Whether the step, when nobody interferes, asks for a reboot that would finalize what is staged."""
    node = steps.begin(kind, node, o, d)
    while node.task is not None and node.task.effects[0] != Effect.ASK.value:
        node = steps.advance(kind, node)[1]
    return node.staged is not None and not node.locked


def _confirming(kind: Kind, node: Node, o: Observation, d: Decision) -> Iterator[str]:
    u = node.update
    if u is None:
        yield "confirms nothing"
    elif u.live:
        if not u.applied:
            yield "confirms a change that is not applied"
    elif not arrived(node):
        yield "confirms what is not booted"
    elif u.rolled_back and not o.stranded:
        yield "confirms what is being taken back"
    elif d.remember:
        if not u.rolled_back or node.desired == u.desired or o.health is Health.GOOD:
            yield "gives up a target that can be kept"
    elif node.serves != u.desired:
        yield "confirms while services have read other files"
    elif not u.applied and (o.health is not Health.GOOD or not complete(node)):
        yield "confirms what is not healthy"


def _going_back(kind: Kind, node: Node, o: Observation, d: Decision) -> Iterator[str]:
    u = node.update
    if not arrived(node):
        yield "takes back what is not booted"
    elif u is not None and not u.rolled_back and o.health is not Health.BAD:
        yield "takes a target back that is not unhealthy"
    if u is not None and u.applied:
        yield "takes a target back that was validated, with workloads running again"
    if not d.remember and u is not None and not u.rolled_back:
        yield "takes a target back without remembering it"


def _discarding(kind: Kind, node: Node, o: Observation, d: Decision) -> Iterator[str]:
    u = node.update
    assert u is not None
    if arrived(node):
        yield "discards the target that is booted"
    if u.live and u.applied and not u.failure:
        yield "discards what was applied"
    if d.remember and not node.blame:
        yield "remembers a target as failed that only lost a race"
    if u.failure and not d.remember:
        yield "a target that failed is not remembered"
    if o.update is not None and o.update.rebooting and o.pending and node.staged is None and not u.failure:
        yield "drops the target on the way down"


def _applying(kind: Kind, node: Node, o: Observation, d: Decision) -> Iterator[str]:
    if kind.reboot:
        yield "applies a change live that needs a reboot"
    if kind.drain and not node.out:
        yield "moves workloads that were not drained"
    if o.hold:
        yield "applies while something stands in the way"


def at_rest(kind: Kind, node: Node, o: Observation, d: Decision) -> Optional[str]:
    """Why a calm node must not stay here, None when it may."""
    if node.update is not None and _stuck(node, o):
        return None if d.degraded else "that there is no way back is not told"
    if node.update is not None:
        return f"an update stays in flight: {d.step.value}: {d.why}"
    left = next(_leftovers(node), None)
    if left is not None:
        return left
    root, has = node.root, node.root.says
    theirs = _made_of_half_a_target(root)
    read = (has, root.files) if theirs else (has,)
    fits = exact(kind, root._replace(files=has) if theirs else root, has)
    if not fits or (node.shared != has and not node.chosen) or node.serves not in read:
        return "a mixture stays"
    if d.step is Step.REST and not o.stood_back and node.desired not in (has, NOTHING):
        return "rests on something else than the desired config"
    if d.step is Step.HOLD and not (node.failed and node.failed == node.desired):
        return "waits for nothing"
    if d.step is Step.REJECT and node.desired not in (REFUSED, UNREADABLE):
        return "refuses what can be reached"
    return None


def _made_of_half_a_target(root: Deployment) -> bool:
    """Theirs, staged onto a target without all of its files, while that was about to be completed: nobody can tell any
    more what was ours in its /etc. What differs from the config that it says it carries is told."""
    return root.os == FOREIGN and root.files in (MERGED, MIXED)


def _stuck(node: Node, o: Observation) -> bool:
    """A target that is not healthy, and nothing else to boot: only people can help."""
    u = node.update
    return u is not None and u.rolled_back and o.stranded and o.health is Health.BAD and node.desired == u.desired


def exact(kind: Kind, root: Deployment, config: str) -> bool:
    """A root that has all of one config; somebody else's OS fits each."""
    os_fits = root.os in (kind.os_of(config), FOREIGN)
    kargs_fit = root.os == FOREIGN or root.kargs == kind.kargs_of(config)
    return os_fits and kargs_fit and root.files in (config, EDITED if config == OLD else config)
