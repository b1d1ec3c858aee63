"""From every state that disturbances lead the abstract node to: nothing forbidden, and rest when the world is calm."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from mcdaemon.decide import Decision, Observation, Step, decide
from tests.model.explore import Exploration, explore
from tests.model.guards import Guard, counterexample, guards, without
from tests.model.node import KINDS, Kind

FEW, MANY = 2, 3
"""Disturbances in one history."""

DEEP = 3
"""Disturbances without which the guards of the rarest states are not missed."""


Record = Callable[[str, object], None]


def all_is_well(found: Exploration, faults: int, record: Record) -> None:
    counts = f"{found.states} states, {found.transitions} transitions"
    record("numbers", f"model, {found.kind.name}, up to {faults} disturbances: {counts}")
    assert not found.wrong, found.text()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_no_two_disturbances_lead_to_a_forbidden_state_or_keep_a_node_from_rest(
    kind: Kind, record_property: Record
) -> None:
    found = explore(kind, decide, FEW)
    all_is_well(found, FEW, record_property)
    assert found.states > 1_000 and found.transitions > found.states


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", KINDS[:3], ids=lambda kind: kind.name)
def test_no_three_disturbances_do_either(kind: Kind, record_property: Record) -> None:
    """The kinds with another OS take a minute: `make model`."""
    all_is_well(explore(kind, decide, MANY), MANY, record_property)


def test_every_step_of_the_policy_is_taken_by_the_model() -> None:
    taken: set[Step] = set()

    def noting(o: Observation) -> Decision:
        decision = decide(o)
        taken.add(decision.step)
        return decision

    for kind in KINDS:
        explore(kind, noting, 1)
    assert taken == set(Step)


@pytest.mark.parametrize("guard", guards(), ids=lambda guard: f"{guard.line}-{re.sub(r'[^a-z_.]+', '-', str(guard))}")
def test_without_this_guard_something_goes_wrong(guard: Guard) -> None:
    found = counterexample(without(guard), DEEP)
    assert found is not None, f"nothing is missed without `{guard}`"
    print(f"{guard}: {found.kind.name}: {found.wrong}")


def test_what_takes_the_guards_away_leaves_the_rest_as_it_is() -> None:
    """Otherwise a counterexample would tell nothing about the guard."""
    whole = Guard("decide", 0, 0, "", False)
    with pytest.raises(AssertionError):
        without(whole)
    only = next(guard for guard in guards() if guard.text == "o.drift")
    mutant = without(only)
    differ = [o for o in (Observation("old", "old"), Observation("new", "old"), Observation("old", "old", drift="x"))
              if mutant(o) != decide(o)]  # fmt: skip
    assert differ == [Observation("old", "old", drift="x")]


def test_a_counterexample_is_a_numbered_trace_that_says_what_changed() -> None:
    guard = next(guard for guard in guards() if guard.text == "not u.proved")
    found = counterexample(without(guard), 1)
    assert found is not None
    lines = found.text().splitlines()
    assert lines[0] == "files or kernel arguments: reboots into a root that was not proved"
    assert "  1. desired is new now" in lines and "       desired: new" in lines
    steps = [line for line in lines if re.match(r" +\d+\. ", line)]
    assert [int(line.split(".")[0]) for line in steps] == list(range(len(steps)))
    assert steps[-1].endswith("commit-files: journal: the pending deployment holds the payload")
