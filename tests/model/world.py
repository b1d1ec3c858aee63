"""What else may happen to the node: between any two effects, or while the agent waits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from mcdaemon.decide import Decision, Health, Observation, Step
from tests.model import steps
from tests.model.effects import Effect, apply, finalize
from tests.model.facts import arrived, observation
from tests.model.node import (
    BAD,
    BEFORE,
    DOWN,
    EDITED,
    FOREIGN,
    FORMER,
    GOOD,
    HALF,
    MIXED,
    NEW,
    NOTHING,
    NOW,
    OLD,
    OTHER,
    PENDING,
    REFUSED,
    SETTLING,
    SOURCE,
    STRANGER,
    UNREADABLE,
    UP,
    Deployment,
    Kind,
    Node,
    Undo,
    with_root,
)
from tests.model.steps import Outcome

Decide = Callable[[Observation], Decision]

PATIENT = frozenset({Step.REST, Step.REJECT, Step.HOLD})


def ordinary(kind: Kind, node: Node, decide: Decide) -> Iterator[Outcome]:
    """What happens when nothing gets in the way; at rest, also what people want next."""
    if node.task is not None:
        yield steps.advance(kind, node)
    elif node.agent == UP and node.torn:
        yield "the agent finds the journal damaged", steps.start(node)
    elif node.agent == UP:
        yield from _round(kind, node, decide)
        yield from _meanwhile(kind, node)
        if node.update is None:
            yield from _wishes(node)
    elif node.agent == DOWN:
        yield "the agent starts", steps.start(node)
    if node.going_down:
        yield "the machine reboots", boot(finalize(kind, node))


def disturbances(kind: Kind, node: Node) -> Iterator[Outcome]:
    """What gets in the way, at any moment."""
    if node.task is not None:
        yield from steps.faults(kind, node)
    elif node.agent == UP and not node.torn:
        if node.update is not None:
            yield from _wishes(node)
        if kind.os:
            what = "the image vanishes" if node.images else "the image comes back"
            yield what, node._replace(images=not node.images)
        if arrived(node) and node.health != BAD:
            yield "not healthy, and the time limit is over", node._replace(health=BAD, blame=True)
        if node.going_down:
            yield "the reboot is called off", node._replace(going_down=False)
    yield from _accidents(kind, node)
    yield from _strangers(kind, node)


def _round(kind: Kind, node: Node, decide: Decide) -> Iterator[Outcome]:
    o = observation(kind, node)
    decision = decide(o)
    if decision.step in PATIENT:
        return
    if decision.step is Step.REBOOT and node.asked and (node.staged is None or node.locked):
        if not node.going_down:
            yield "the reboot does not come in time", node._replace(asked=False, held=True)
        return
    yield f"decided: {decision.step.value}: {decision.why}", steps.begin(kind, node, o, decision)


def _wishes(node: Node) -> Iterator[Outcome]:
    # In flight, what is not the target is all the same to the update: another config stands for it.
    for wish in (OLD, NEW, OTHER, UNREADABLE, *((NOTHING, REFUSED) if node.update is None else ())):
        if wish != node.desired:
            yield f"desired is {wish} now", node._replace(desired=wish)


def _meanwhile(kind: Kind, node: Node) -> Iterator[Outcome]:
    if node.held:
        yield "it is due again", node._replace(held=False)
    if arrived(node) and node.health != GOOD:
        yield "all is healthy", node._replace(health=GOOD)
    if node.failed:
        yield "retry is called", apply(kind, node, Effect.FORGET_FAILED)
    if node.update is None and node.desired == node.root.says:
        if node.root.files == node.root.says:
            yield "a managed file is changed by hand", with_root(node, node.booted, node.root.says, EDITED)
        elif node.root.files == EDITED:
            yield "the change is undone by hand", with_root(node, node.booted, node.root.says, node.root.says)


def _accidents(kind: Kind, node: Node) -> Iterator[Outcome]:
    if node.agent != DOWN or node.task is not None:
        killed = node._replace(agent=DOWN, task=None, held=False, asked=False)
        if node.agent == SETTLING and node.serves == MIXED:
            killed = killed._replace(serves=HALF)
        yield "the agent is killed", killed
    idle = node.agent in (DOWN, UP) and node.task is None
    if idle and not node.torn and node.booted == SOURCE and not node.pending and (node.staged is None or node.locked):
        # Together with a reboot into what is finalized nothing tells any more what belongs to whom.
        yield "the journal is damaged", node._replace(torn=True, held=False)
    yield from power_cut(node)
    # Nor with another root: a record that was lost says nothing of who belongs to which.
    if node.update is not None and node.update.desired and not node.torn and len(node.entries) > 1:
        for words, cut in power_cut(node, hand=True):
            yield f"{words}; somebody chooses the other boot entry", cut
    if node.update is None and node.task is None and node.agent == UP and not node.torn and node.confirmed:
        for words, cut in power_cut(node, hand=True) if len(node.entries) > 1 else ():
            yield f"{words}; somebody chooses the other boot entry", cut


def power_cut(node: Node, hand: bool = False) -> Iterator[Outcome]:
    """/run is lost, and of what was not synced any part."""
    lost = node.unsynced
    if lost is None:
        yield "power cut", boot(node, hand)
        return
    shared = {node.shared, lost.shared} | ({MIXED} if node.shared != lost.shared else set())
    etc = {(lost.says, lost.files)}
    there = any(entry.name == lost.root for entry in node.entries)  # a cleanup may have taken it away
    if there:
        root = node.deployment(lost.root)
        etc |= {(root.says, root.files)}
        etc |= {(says, MIXED) for says in (root.says, lost.says) if root.files != lost.files}
    for says, files in sorted(etc):
        for outside in sorted(shared):
            torn = node._replace(shared=outside)
            words = f"power cut, of what was not synced {says}/{files}/{outside} is left"
            yield words, boot(with_root(torn, lost.root, says, files) if there else torn, hand)


def _strangers(kind: Kind, node: Node) -> Iterator[Outcome]:
    if not kind.reboot or node.agent == SETTLING:
        return
    # A cleanup in the instant between our last look and the finalization cannot be told from a failure of the target.
    instant = node.task is not None and node.task.effects[0] in (Effect.UNLOCK.value, Effect.FINALIZE.value)
    blame = node.blame or instant or bool(node.update and node.update.armed)
    # One of theirs for each update is enough: a second takes the first's place.
    theirs = STRANGER in {node.staged and node.staged.name, *(entry.name for entry in node.entries)}
    if not theirs:
        tree = Deployment(STRANGER, FOREIGN, (node.staged or node.root).kargs, "", "")
        yield "somebody else stages", node._replace(staged=tree, locked=False, blame=blame)
    if arrived(node) and len(node.entries) > 1:
        yield "somebody else removes the deployment to go back to", node._replace(entries=(node.root,))
    if node.staged is not None or node.pending:
        yield "somebody else calls Cleanup", apply(kind, node, Effect.CLEAR_STAGE)._replace(blame=blame)
    if not node.going_down:
        yield "somebody else reboots", boot(finalize(kind, node))


def boot(node: Node, hand: bool = False) -> Node:
    """The machine comes up, up to the early unit's first effect."""
    update = node.update
    if update is not None:
        past = {NOW: BEFORE}
        armed, finalizing = past.get(update.armed, update.armed), past.get(update.finalizing, update.finalizing)
        update = dataclasses.replace(update, armed=armed, finalizing=finalizing)
    entry = node.entries[1] if hand else node.entries[0]
    return steps.settle(
        node._replace(
            update=update,
            booted=entry.name,
            staged=None,
            locked=False,
            health=PENDING,
            agent=SETTLING,
            task=None,
            held=False,
            asked=False,
            going_down=False,
            unsynced=None,
            serves=entry.says if entry.files in (entry.says, EDITED) else entry.files,
            blame=node.blame or hand,
            chosen=node.chosen or entry.name == FORMER,
        )
    )


def calm(kind: Kind, node: Node, decide: Decide) -> list[Outcome]:
    """What happens next when nothing more goes wrong; none: it rests. Two only for the verdict on the target."""
    if node.going_down:
        return [("the machine reboots", boot(finalize(kind, node)))]
    if node.task is not None:
        return [steps.advance(kind, node)]
    if node.agent == DOWN or node.torn:
        return [("the agent starts", steps.start(node))]
    if not node.images:
        return [("the image comes back", node._replace(images=True))]
    if node.held:
        return [("it is due again", node._replace(held=False))]
    if node.desired == UNREADABLE and node.update is not None:
        return [("desired is new now", node._replace(desired=NEW))]
    if arrived(node) and node.health != BAD and observation(kind, node).health is Health.PENDING:
        over = ("not healthy, and the time limit is over", node._replace(health=BAD, blame=True))
        return [("all is healthy", node._replace(health=GOOD)), over] if node.health == PENDING else [over]
    return list(_round(kind, node, decide))


def normal(node: Node) -> Node:
    """The same node under one name. Without an update in flight the booted deployment is "s", what else could be booted
    plays a part only as long as one of both was confirmed, the config that is carried is "old", and the one that is
    desired instead is "new"."""
    if node.update is not None or node.task is not None or node.agent != UP or node.torn:
        return node
    names = [entry.name for entry in node.entries]
    kept = node.confirmed is not None and len(names) > 1 and node.confirmed[1] in names
    if not kept and node.pending:
        return node
    if kept and node.confirmed is not None:
        config, there = node.confirmed
        confirmed = (config, SOURCE if there == node.booted else FORMER)
        entries = tuple(
            entry._replace(name=SOURCE if entry.name == node.booted else FORMER) for entry in node.entries
        )
        node = node._replace(entries=entries, booted=SOURCE, confirmed=confirmed, health=PENDING)
    else:
        root = node.root._replace(name=SOURCE)
        node = node._replace(entries=(root,), booted=SOURCE, confirmed=None, health=PENDING)
    node = _swapped(node, node.root.says, OLD)
    return _swapped(node, OTHER, NEW) if node.desired == OTHER else node


def _swapped(node: Node, one: str, other: str) -> Node:
    if one == other:
        return node
    swap = {one: other, other: one}

    def renamed(value: str) -> str:
        return swap.get(value, value)

    return node._replace(
        desired=renamed(node.desired),
        failed=renamed(node.failed),
        confirmed=node.confirmed and (renamed(node.confirmed[0]), node.confirmed[1]),
        entries=tuple(Deployment(*(renamed(value) for value in entry)) for entry in node.entries),
        staged=node.staged and Deployment(*(renamed(value) for value in node.staged)),
        shared=renamed(node.shared),
        serves=renamed(node.serves),
        payload=node.payload and (node.payload[0], renamed(node.payload[1])),
        undo=node.undo and Undo(*(renamed(value) for value in node.undo)),
    )
