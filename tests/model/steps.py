"""Which effects a step has, in which order, and how each of them may end: as `perform.py`, `early.py` and the sweep at
the agent's start do it."""

from __future__ import annotations

from collections.abc import Iterator

from mcdaemon.decide import Decision, Observation, Staged, Step
from mcdaemon.update.early import MOST_REPAIRS, Early
from mcdaemon.update.early import decide as decide_early
from tests.model.effects import Effect, apply
from tests.model.facts import complete, untouched
from tests.model.node import DOWN, TARGET, UP, Kind, Node, Task

E = Effect
_WRITE = (E.WRITE_SOME, E.WRITE_REST, E.SYNC)
_PUT_BACK = (E.PUT_SOME_BACK, E.PUT_REST_BACK, E.SYNC)

Outcome = tuple[str, Node]
"""What happened, in words, and the node after it."""


def begin(kind: Kind, node: Node, o: Observation, decision: Decision) -> Node:
    """The node with the step's effects ahead."""
    effects = tuple(effect.value for effect in _effects(kind, node, o, decision.step))
    if not effects:
        return node
    config = node.update.desired if node.update is not None else node.desired
    # A step that writes into the booted root names none.
    pending = node.pending if decision.step in (Step.COMMIT_FILES, Step.VERIFY_ROOT) else ""
    return node._replace(task=Task(decision.step.value, effects, decision.remember, config, pending))


def _effects(kind: Kind, node: Node, o: Observation, step: Step) -> Iterator[Effect]:
    update = node.update
    if update is None and step in (Step.STAGE_OS, Step.STAGE_KARGS, Step.DRAIN, Step.APPLY_LIVE):
        yield E.BEGIN
    if step is Step.STAGE_OS:
        yield from _cleared(node)
        yield from (E.NOTE_HOLD, E.HOLD_IMAGE, E.NOTE_STAGING, E.STAGE_TREE)
    elif step is Step.STAGE_KARGS:
        if o.staged is not Staged.OS_ONLY:
            yield from _cleared(node)
        yield from (E.NOTE_STAGING, E.STAGE_LINE)
    elif step is Step.VERIFY_STAGED:
        yield from (E.DROP_PAYLOAD, E.LAY_OUT)
        if update is not None and update.held:
            yield E.RELEASE_IMAGE
        yield E.NOTE_VERIFIED
    elif step is Step.COMMIT_FILES:
        yield from (*_barred(node), E.KEEP_SHARED, *_WRITE, E.NOTE_COMMITTED)
    elif step is Step.REBOOT:
        yield from _barred(node)
        yield from () if node.asked else (E.ARM, E.ASK)
    elif step is Step.CONFIRM:
        yield from _confirmed(node)
    elif step is Step.ROLL_BACK:
        assert update is not None
        yield from () if update.rolled_back else (E.NOTE_ROLLED_BACK,)
        yield from (E.DEFAULT_BACK, *_barred(node), E.ASK)
    elif step is Step.DISCARD:
        yield from _discarded(node)
    else:
        yield from {
            Step.DRAIN: (E.NOTE_DRAINING, E.DRAIN, E.NOTE_DRAINED),
            Step.FINALIZE: (E.NOTE_FINALIZING, E.UNLOCK, E.FINALIZE),
            Step.VERIFY_ROOT: (E.NOTE_PROVED,),
            Step.APPLY_LIVE: (E.LAY_OUT, E.KEEP_ALL, *_WRITE, E.RESTART, E.NOTE_APPLIED),
        }.get(step, ())


def _cleared(node: Node) -> tuple[Effect, ...]:
    return (E.CLEAR_STAGE,) if node.staged is not None or node.pending else ()


def _barred(node: Node) -> tuple[Effect, ...]:
    return (E.LOCK,) if node.staged is not None and not node.locked else ()


def _has_undo(node: Node) -> bool:
    return node.undo is not None and node.update is not None and node.undo.id == node.update.id


def _back_to_work(node: Node) -> Iterator[Effect]:
    assert node.update is not None
    if node.update.draining:
        yield from (E.NOTE_RETURNING, E.UNDRAIN, E.NOTE_BACK)


def _confirmed(node: Node) -> Iterator[Effect]:
    assert node.update is not None
    yield E.NOTE_APPLIED
    yield from _back_to_work(node)
    yield E.NOTE_CONFIRMED
    yield from (E.DROP_PAYLOAD, E.DROP_UNDO)
    if node.update.held:
        yield E.RELEASE_IMAGE


def _discarded(node: Node) -> Iterator[Effect]:
    update = node.update
    assert update is not None
    if not update.live and (node.staged is not None or node.pending):
        yield E.CLEAR_STAGE
    if _has_undo(node) and (update.live or node.root.says != update.desired):
        yield from _PUT_BACK
        if update.live:
            yield from (E.RESTART, E.DROP_UNDO)
    elif _has_undo(node) and node.payload is not None and node.payload[0] == update.id:
        yield from _WRITE
    if not update.live and update.attempt and node.staged is None and not node.pending:
        yield E.CLEAR_LOST
    yield from _back_to_work(node)
    yield E.NOTE_DISCARDED
    yield from (E.DROP_PAYLOAD, E.DROP_UNDO)
    if update.held:
        yield E.RELEASE_IMAGE


# -- without the loop -------------------------------------------------------------------------------------------------


def start(node: Node) -> Node:
    """The agent starts: what no journal knows is swept."""
    effects = []
    if node.torn:
        effects.append(E.STAND_IN)
    known = node.update.id if node.update is not None else ""
    if node.payload is not None and (node.torn or node.payload[0] != known):
        effects.append(E.SWEEP_PAYLOAD)
    if node.undo is not None and (node.torn or node.undo.id != known):
        effects.append(E.SWEEP_UNDO)
    held = node.update is not None and node.update.held
    if node.kept and (node.torn or not held or node.kept != known):
        effects.append(E.SWEEP_HOLD)
    return _go(node._replace(agent=DOWN), "start", effects) if effects else node._replace(agent=UP)


def settle(node: Node) -> Node:
    """The early unit, with its own `decide`."""
    update = node.update
    if node.torn or update is None:
        return node._replace(agent=DOWN)
    load = node.payload is not None and node.payload[0] == update.id
    carries = node.root.says == update.desired and _has_undo(node)
    action, _why = decide_early(update, node.booted, load and complete(node), untouched(node), carries)
    if action is Early.PUT_BACK and update.live:
        reboot = [E.REBOOT_AT_ONCE] if update.repairs < MOST_REPAIRS else []
        return _go(node, "early", [E.NOTE_REPAIR, *_PUT_BACK, *reboot])
    if action is Early.COMPLETE and load:
        return _go(node, "early", [E.NOTE_REPAIR, E.KEEP_SHARED, *_WRITE, E.REBOOT_AT_ONCE])
    if action in (Early.COMPLETE, Early.GIVE_UP):
        return _go(node, "early", [E.NOTE_GIVEN_UP])
    if action is Early.PUT_BACK:
        void = [E.VOID_PROOF] if update.committed or update.proved or update.applied else []
        back = list(_PUT_BACK) if _has_undo(node) else []
        return _go(node, "early", [*void, *back]) if void or back else node._replace(agent=DOWN)
    return node._replace(agent=DOWN)


def _go(node: Node, step: str, effects: list[Effect]) -> Node:
    config = node.update.desired if node.update is not None else ""
    return node._replace(task=Task(step, tuple(effect.value for effect in effects), False, config, ""))


# -- one effect -------------------------------------------------------------------------------------------------------

_CALLS = frozenset({E.CLEAR_STAGE, E.HOLD_IMAGE, E.STAGE_TREE, E.STAGE_LINE, E.RELEASE_IMAGE, E.LAY_OUT, E.DRAIN,
                    E.FINALIZE, E.ASK, E.UNDRAIN, E.DEFAULT_BACK, E.SWEEP_HOLD})  # fmt: skip
"""Effects for which somebody else is needed, who may be away."""

_CAN_BREAK = frozenset({E.STAGE_TREE, E.STAGE_LINE, E.LAY_OUT, E.WRITE_SOME, E.NOTE_PROVED, E.RESTART})
"""Effects that may show, in a step that is about the target, that the target is impossible."""

_ABOUT_THE_TARGET = frozenset(
    step.value for step in (Step.APPLY_LIVE, Step.STAGE_OS, Step.STAGE_KARGS, Step.VERIFY_STAGED, Step.FINALIZE,
                            Step.COMMIT_FILES, Step.VERIFY_ROOT)
)  # fmt: skip


_OUT_OF_SERVICE = frozenset({Step.FINALIZE.value, Step.COMMIT_FILES.value, Step.VERIFY_ROOT.value})
_NEED_ROOM = frozenset({E.FINALIZE, E.KEEP_SHARED, E.WRITE_SOME, E.WRITE_REST})
"""Effects that a full disk ends, and the steps in which it is not waited for."""


def advance(kind: Kind, node: Node) -> Outcome:
    """The next effect, as it goes when all is well: that the ground has moved meanwhile is seen."""
    task = node.task
    assert task is not None
    effect = Effect(task.effects[0])
    words = f"{task.step}: {effect.value}"
    if _stands_in_the_way(kind, node, task, effect):
        return f"{words}: it cannot be done now", _give_up_for_now(node)
    if effect is E.FINALIZE and (node.staged is None or node.staged.name != TARGET):
        return f"{words}: it is not what was verified", _not_finalized(apply(kind, node, effect))
    if effect is E.NOTE_PROVED:
        root, config = node.deployment(task.pending), task.config
        if (root.says, root.files, node.shared) != (config, config, config):
            return f"{words}: it is not what was asked for", _broken(node)
    return words, _done(apply(kind, node, effect), task)


def faults(kind: Kind, node: Node) -> Iterator[Outcome]:
    """The other ways in which the next effect may end, while the agent lives on."""
    task = node.task
    assert task is not None
    effect = Effect(task.effects[0])
    if effect in _CALLS:
        yield f"{task.step}: {effect.value}: fails for now", _give_up_for_now(node)
    if effect in _CAN_BREAK and task.step in _ABOUT_THE_TARGET:
        yield f"{task.step}: {effect.value}: the target is impossible", _broken(node)._replace(blame=True)
    gone = node._replace(staged=None, locked=False)
    if effect is E.FINALIZE:
        yield "finalize: it fails", _not_finalized(gone)
        yield "finalize: it fails, and what is staged stays", _not_finalized(node)
        yield "finalize: it fails for the last time", _not_finalized(gone, E.NOTE_FAILURE)._replace(blame=True)
    if effect in _NEED_ROOM and task.step in _OUT_OF_SERVICE:
        yield f"{task.step}: {effect.value}: the disk is full", _retreat(gone if effect is E.FINALIZE else node)


def _done(node: Node, task: Task) -> Node:
    left = task.effects[1:]
    if left and node.going_down and task.step == "early":
        return node._replace(task=None)
    if left:
        return node._replace(task=task._replace(effects=left))
    if task.step == "early":
        return node._replace(task=None, agent=node.agent if node.going_down else DOWN)
    return node._replace(task=None, agent=UP)


def _give_up_for_now(node: Node) -> Node:
    task = node.task
    assert task is not None
    effect = Effect(task.effects[0])
    if task.step == "start":
        return _done(node._replace(kept="left"), task)  # the next start finds it
    if effect is E.ASK and task.step == Step.REBOOT.value:
        return node._replace(task=task._replace(effects=(E.DISARM.value,)), held=True)
    if effect is E.DRAIN:
        node = node._replace(out=True)  # half of them may be gone
    if effect is E.RELEASE_IMAGE and node.update is None:
        node = node._replace(kept="left")  # until the next start
    return node._replace(task=None, held=True)


def _broken(node: Node) -> Node:
    assert node.task is not None
    return node._replace(task=node.task._replace(effects=(E.NOTE_FAILURE.value,)))


def _not_finalized(node: Node, *more: Effect) -> Node:
    """The node goes back to work (`Performer._finalization_failed`)."""
    assert node.task is not None
    lock = (E.LOCK,) if node.staged is not None else ()
    effects = (*lock, *_back_to_work(node), E.NOTE_UNVERIFIED, *more)
    return node._replace(task=node.task._replace(effects=tuple(effect.value for effect in effects)), held=True)


def _retreat(node: Node) -> Node:
    """A node does not wait out of service for room (`Performer._retreat`)."""
    assert node.task is not None
    back = _back_to_work(node) if node.task.step == Step.FINALIZE.value else ()
    effects = tuple(effect.value for effect in (*back, *_discarded(node)))
    return node._replace(task=Task(Step.DISCARD.value, effects, False, node.task.config, ""), held=True)


def _stands_in_the_way(kind: Kind, node: Node, task: Task, effect: Effect) -> bool:
    """What somebody else did since the step was decided."""
    if effect in (E.HOLD_IMAGE, E.STAGE_TREE):
        return not node.images
    if effect is E.LAY_OUT:
        return task.step == Step.VERIFY_STAGED.value and node.staged is None
    if effect is E.NOTE_FINALIZING:
        return node.staged is None or node.staged.name != TARGET
    if effect is E.DEFAULT_BACK:
        assert node.update is not None
        return all(entry.name != node.update.source for entry in node.entries)
    if task.pending:
        return node.pending != task.pending
    return False
