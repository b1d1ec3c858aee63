"""All states that can be reached, breadth first, so that a counterexample is as short as can be."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Optional, Union

from mcdaemon.decide import Decision, Observation
from tests.model import forbidden, world
from tests.model.facts import observation
from tests.model.node import UP, Kind, Node, start, words
from tests.model.steps import Outcome
from tests.model.world import PATIENT, Decide


@dataclass
class Exploration:
    """What was found. `trace`: the way to what is wrong, as (what happened, node); empty when all is well. `layers`:
    how many states up to no, one, two … disturbances lead to."""

    kind: Kind
    states: int = 0
    transitions: int = 0
    wrong: str = ""
    trace: list[tuple[str, Node]] = field(default_factory=list)
    layers: list[int] = field(default_factory=list)

    def text(self) -> str:
        """The trace for people: what happened, and what was different after it."""
        lines = [f"{self.kind.name}: {self.wrong}"]
        before: dict[str, str] = {}
        for number, (what, node) in enumerate(self.trace):
            now = words(node)
            lines.append(f"{number:3}. {what}")
            lines += [f"       {key}: {value}" for key, value in now.items() if before.get(key) != value]
            before = now
        return "\n".join(lines)


def explore(kind: Kind, decide: Decide, faults: int) -> Exploration:
    """Visit every state of this kind of update that so many disturbances lead to; stops at the first wrong one."""
    return _Explorer(kind, decide).run(faults)


def visited(kind: Kind, decide: Decide, faults: int) -> tuple[Node, ...]:
    """All of the states that `explore` looks at."""
    explorer = _Explorer(kind, decide)
    explorer.run(faults)
    return tuple(explorer.parents)


class _Explorer:
    def __init__(self, kind: Kind, decide: Decide) -> None:
        self._kind = kind
        self._plain = decide
        self.parents: dict[Node, tuple[Optional[Node], str]] = {}
        self._calm: set[Node] = set()
        self._found = Exploration(kind)
        self._decided: dict[Observation, Decision] = {}

    def run(self, faults: int) -> Exploration:
        """One layer for each number of disturbances; a state counts in the first that it is met in."""
        layer: dict[Node, tuple[Optional[Node], str]] = {world.normal(start(self._kind)): (None, "at rest")}
        for disturbed in range(faults + 1):
            # Only now: what a disturbance leads to may be met in this layer without it.
            fresh = [node for node in layer if node not in self.parents]
            self.parents.update((node, layer[node]) for node in fresh)
            queue, layer = deque(fresh), {}
            while queue:
                node = queue.popleft()
                why, way = self._wrong(node)
                if why:
                    return self._counterexample(why, self._path(node) + way)
                for what, after in self._outcomes(world.ordinary(self._kind, node, self._decide)):
                    if after not in self.parents:
                        self.parents[after] = (node, what)
                        queue.append(after)
                if disturbed < faults:
                    for what, after in self._outcomes(world.disturbances(self._kind, node)):
                        layer.setdefault(after, (node, what))
            self._found.layers.append(len(self.parents))
        self._found.states = len(self.parents)
        return self._found

    def _outcomes(self, outcomes: Iterable[Outcome]) -> Iterator[Outcome]:
        for what, after in outcomes:
            self._found.transitions += 1
            yield what, world.normal(after)

    def _wrong(self, node: Node) -> tuple[str, list[tuple[str, Node]]]:
        why = self._look(node)
        return (why, []) if why else self._settles(node) or ("", [])

    def _decide(self, o: Observation) -> Decision:
        if o not in self._decided:
            self._decided[o] = self._plain(o)
        return self._decided[o]

    def _look(self, node: Node) -> str:
        """Why this state, or the step that is decided in it, must not be."""
        why = forbidden.in_state(self._kind, node)
        if why or node.agent != UP or node.task is not None or node.torn:
            return why or ""
        o = observation(self._kind, node)
        try:
            decision = self._decide(o)
        except AttributeError as error:
            return f"decide is not total: {error}"
        return forbidden.after_decision(self._kind, node, o, decision) or ""

    def _settles(self, node: Node) -> Optional[tuple[str, list[tuple[str, Node]]]]:
        """From here to rest when nothing more goes wrong; what is wrong and the way there, None when all is well."""
        if node in self._calm:
            return None
        way, ahead = [("", node)], [self._following(node)]
        on_the_way = {node}
        while ahead:
            step = next(ahead[-1], None)
            if step is None:
                ahead.pop()
                done = way.pop()[1]
                on_the_way.discard(done)
                self._calm.add(done)
                continue
            what, after = step
            if isinstance(after, str):
                return after, way[1:]
            if after in on_the_way:
                return "the node never comes to rest, though nothing goes wrong any more", [*way[1:], (what, after)]
            if after not in self._calm:
                way.append((what, after))
                on_the_way.add(after)
                ahead.append(self._following(after))
        return None

    def _following(self, node: Node) -> Iterator[tuple[str, Union[Node, str]]]:
        """What happens next in a calm world, or why the node must not stay as it is."""
        try:
            following = world.calm(self._kind, node, self._decide)
            wrong = "" if following else self._stays(node)
        except AttributeError as error:
            following, wrong = [], f"decide is not total: {error}"
        if wrong:
            yield "", wrong
        for what, after in following:
            yield what, world.normal(after)

    def _stays(self, node: Node) -> str:
        o = observation(self._kind, node)
        decision = self._decide(o)
        why = forbidden.after_decision(self._kind, node, o, decision)
        if not why and decision.step in PATIENT:
            why = forbidden.at_rest(self._kind, node, o, decision)
        elif not why:
            why = f"{decision.step.value} has no effect"
        return why or ""

    def _path(self, node: Node) -> list[tuple[str, Node]]:
        path = []
        at: Optional[Node] = node
        while at is not None:
            before, what = self.parents[at]
            path.append((what, at))
            at = before
        return path[::-1]

    def _counterexample(self, why: str, trace: list[tuple[str, Node]]) -> Exploration:
        self._found.states = len(self.parents)
        self._found.wrong, self._found.trace = why, trace
        return self._found
