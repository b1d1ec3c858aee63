"""The policy: total over a broad product of facts, never a forbidden step, and the order of whole updates."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Optional

import pytest

from mcdaemon.decide import Booted, Decision, Health, Observation, Progress, Staged, Step, decide

YES_NO = (False, True)
EFFECTS = frozenset(Step) - {Step.REST, Step.REJECT, Step.HOLD}
Pair = tuple[Observation, Decision]


def without_update() -> Iterator[Observation]:
    fields: dict[str, Iterable[Any]] = {
        "desired": (None, "new", "old"), "current": (None, "old"), "staged": Staged, "pending": YES_NO,
        "reboot": YES_NO, "drain": YES_NO, "os_changes": YES_NO, "refusal": ("", "refused"),
        "failed_before": ("", "failed"), "hold": ("", "held"), "drift": ("", "drift"),
        "stood_back": ("", "older"),
    }  # fmt: skip
    for values in itertools.product(*fields.values()):
        yield Observation(**dict(zip(fields, values)))


def with_reboot() -> Iterator[Observation]:
    flags = [
        Progress("new", False, verified, drained, committed, proved, False, rebooting, came_back, rolled_back,
                 failure or "taken back" * rolled_back, drained)
        for verified, drained, committed, proved, rebooting, came_back, rolled_back, failure in itertools.product(
            YES_NO, YES_NO, YES_NO, YES_NO, YES_NO, YES_NO, YES_NO, ("", "broken"))
    ]  # fmt: skip
    for update, desired, booted, staged, pending, os_changes, hold, health in itertools.product(
        flags, ("new", "other"), Booted, Staged, YES_NO, YES_NO, ("", "held"), Health
    ):
        yield Observation(desired, "old", update, booted, staged, pending, os_changes=os_changes, hold=hold,
                          health=health)  # fmt: skip


def live() -> Iterator[Observation]:
    for desired, drained, applied, failure, staged, pending, drain, hold in itertools.product(
        ("new", "old", None), YES_NO, YES_NO, ("", "broken"), Staged, YES_NO, YES_NO, ("", "held")
    ):
        update = Progress("new", True, drained=drained, applied=applied, failure=failure, draining=drained)
        yield Observation(desired, "old", update, Booted.SOURCE, staged, pending, reboot=False, drain=drain, hold=hold)


@functools.lru_cache(maxsize=1)
def everything() -> tuple[Pair, ...]:
    return tuple((o, decide(o)) for o in itertools.chain(without_update(), with_reboot(), live()))


def moving(steps: frozenset[Step]) -> list[tuple[Observation, Progress, Decision]]:
    """All decisions for one of the steps while an update is in flight."""
    return [(o, o.update, d) for o, d in everything() if d.step in steps and o.update is not None]


def only(*steps: Step) -> frozenset[Step]:
    return frozenset(steps)


# -- over all observations --------------------------------------------------------------------------------------------


def test_every_observation_has_exactly_one_decision_and_a_reason() -> None:
    assert len(everything()) > 50_000
    for o, d in everything():
        assert isinstance(d.step, Step) and d.why.strip(), o


def test_a_decision_depends_on_nothing_but_the_observation() -> None:
    assert all(decide(o) == d for o, d in everything()[::17])


def test_every_step_is_reachable() -> None:
    assert {d.step for _o, d in everything()} == set(Step)


def test_nothing_is_finalized_that_is_not_staged_verified_and_drained() -> None:
    found = moving(only(Step.FINALIZE))
    assert found
    for o, u, _d in found:
        assert o.staged is Staged.READY and u.verified and u.drained and not o.pending, o


def test_no_reboot_into_anything_but_a_committed_and_proved_root() -> None:
    found = moving(only(Step.REBOOT))
    assert found
    for o, u, _d in found:
        assert u.rebooting or (o.pending and u.committed and u.proved), o


def test_the_root_is_proved_only_after_it_was_committed_and_both_only_while_it_is_pending() -> None:
    for o, u, d in moving(only(Step.COMMIT_FILES, Step.VERIFY_ROOT)):
        assert o.pending and u.committed == (d.step is Step.VERIFY_ROOT) and not u.proved * u.committed, o


def test_no_node_is_drained_for_a_reboot_before_its_update_is_staged_and_verified() -> None:
    for o, d in everything():
        if d.step is Step.DRAIN and (o.update is None or not o.update.live):
            assert not o.reboot if o.update is None else o.staged is Staged.READY and o.update.verified, o


def test_nobody_is_drained_twice() -> None:
    for o, u, _d in moving(only(Step.DRAIN)):
        assert not u.drained, o


def test_a_hold_has_no_effect_on_a_node_where_nothing_is_staged() -> None:
    """But for the ends of an update: going back to work, keeping what booted, taking back what failed."""
    ends = only(Step.DISCARD, Step.CONFIRM, Step.ROLL_BACK)
    for o, d in everything():
        if not o.hold or o.staged is not Staged.NONE or o.pending:
            continue
        waits_for_reboot = o.update is not None and o.update.rebooting and d.step is Step.REBOOT
        assert d.step not in EFFECTS - ends or waits_for_reboot, o


def test_a_drained_node_never_waits_for_something_outside() -> None:
    for o, u, _d in moving(only(Step.HOLD)):
        assert o.booted is Booted.TARGET or not u.drained, o


def test_a_deployment_that_is_neither_old_nor_target_ends_the_update_without_blame() -> None:
    """Somebody booted something else in the middle: from there the desired config is a new update."""
    for o, d in everything():
        u = o.update
        if u is None or u.live or o.booted is not Booted.OTHER or u.failure or u.rolled_back:
            continue
        assert d.step is Step.DISCARD and not d.remember, o


def test_a_superseded_update_goes_no_further() -> None:
    forward = only(Step.STAGE_OS, Step.STAGE_KARGS, Step.VERIFY_STAGED, Step.DRAIN, Step.FINALIZE, Step.COMMIT_FILES,
                   Step.VERIFY_ROOT, Step.REBOOT, Step.APPLY_LIVE)  # fmt: skip
    for o, u, d in moving(forward):
        assert o.desired == u.desired or (d.step is Step.REBOOT and u.rebooting), o


def test_a_booted_target_is_only_kept_waited_for_or_taken_back() -> None:
    for o, d in everything():
        if o.booted is Booted.TARGET and o.update is not None:
            early = d.step is Step.REBOOT and o.update.rebooting  # the early unit wrote its files after the start
            assert d.step in (Step.CONFIRM, Step.HOLD, Step.ROLL_BACK) or early, o


def test_only_a_healthy_target_is_kept() -> None:
    for o, u, _d in moving(only(Step.CONFIRM)):
        if u.live:
            assert u.applied and not u.failure and not u.rolled_back, o
        else:
            assert o.booted is Booted.TARGET and o.health is Health.GOOD and not u.rolled_back, o


def test_only_a_booted_target_is_rolled_back() -> None:
    for o, u, _d in moving(only(Step.ROLL_BACK)):
        assert o.booted is Booted.TARGET and not u.live, o
        assert u.rolled_back or o.health is Health.BAD, o


def test_a_drained_node_with_nothing_to_boot_goes_back_to_work() -> None:
    for o, d in everything():
        u = o.update
        if u is None or u.live or o.booted is Booted.TARGET or u.rebooting:
            continue
        if u.drained and o.staged is Staged.NONE and not o.pending:
            assert d.step is Step.DISCARD, o


def test_a_failure_is_always_remembered_and_ends_the_update() -> None:
    for o, d in everything():
        u = o.update
        if u is None or (o.booted is Booted.TARGET and not u.live):
            continue
        if u.failure or u.rolled_back or (u.came_back and not u.live and o.booted is Booted.SOURCE):
            assert d.step is Step.DISCARD and d.remember, o


def test_an_unhealthy_target_is_remembered_when_it_is_taken_back() -> None:
    for o, u, d in moving(only(Step.ROLL_BACK)):
        assert d.remember or u.rolled_back, o


def test_a_target_that_only_lost_a_race_is_not_remembered_as_failed() -> None:
    for o, u, d in moving(only(Step.DISCARD)):
        if not (u.failure or u.rolled_back or u.came_back):
            assert not d.remember, o


def test_nothing_happens_to_a_node_that_is_where_it_should_be() -> None:
    for o, d in everything():
        if o.update is None and (o.desired is None or o.desired == o.current):
            assert d.step is Step.REST, o


def test_no_update_begins_that_was_refused_failed_before_or_has_to_wait() -> None:
    for o, d in everything():
        if o.update is None and d.step in EFFECTS:
            assert not (o.refusal or o.failed_before or o.hold or o.stood_back), o


def test_an_unchanged_os_is_never_staged_anew() -> None:
    for o, d in everything():
        if d.step is Step.STAGE_OS:
            assert o.os_changes, o


def test_a_live_change_never_stages_finalizes_or_reboots() -> None:
    for _o, u, d in moving(frozenset(Step)):
        if u.live:
            assert d.step in (Step.DRAIN, Step.APPLY_LIVE, Step.CONFIRM, Step.DISCARD, Step.HOLD)


# -- single cases that were wrong once --------------------------------------------------------------------------------


def test_a_live_change_that_has_to_wait_is_put_back_first() -> None:
    """Nobody may be drained for it meanwhile, and what is half written does not stay."""
    o = Observation("new", "old", Progress("new", live=True), reboot=True, drain=True, hold="unreadable")
    assert decide(o).step is Step.DISCARD and not decide(o).remember


def test_a_drained_live_change_that_has_to_wait_gives_the_node_back() -> None:
    update = Progress("new", live=True, drained=True, draining=True)
    d = decide(Observation("new", "old", update, reboot=False, hold="no space"))
    assert d.step is Step.DISCARD and not d.remember and "no space" in d.why


# -- whole updates ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Change:
    """What is different between the configs of a walk."""

    os: bool = False
    kargs: bool = False
    reboot: bool = True
    drain: bool = True


CHANGES = {
    "image and kernel arguments": Change(os=True, kargs=True),
    "packages only": Change(os=True),
    "files only": Change(),
    "live": Change(reboot=False, drain=False),
    "live with drain": Change(reboot=False),
}
TAIL = (Step.VERIFY_STAGED, Step.DRAIN, Step.FINALIZE, Step.COMMIT_FILES, Step.VERIFY_ROOT, Step.REBOOT, Step.CONFIRM)
ORDERS = {
    "image and kernel arguments": (Step.STAGE_OS, Step.STAGE_KARGS, *TAIL),
    "packages only": (Step.STAGE_OS, *TAIL),
    "files only": (Step.STAGE_KARGS, *TAIL),
    "live": (Step.APPLY_LIVE, Step.CONFIRM),
    "live with drain": (Step.DRAIN, Step.APPLY_LIVE, Step.CONFIRM),
}


class Node:
    """An abstract node: what each step leaves behind, and nothing else."""

    def __init__(self, change: Change) -> None:
        self.change = change
        self.desired: Optional[str] = "new"
        self.current = "old"
        self.files = "old"
        self.update: Optional[Progress] = None
        self.booted = Booted.SOURCE
        self.staged = Staged.NONE
        self.pending = False
        self.health = Health.GOOD
        self.drained = False
        self.failed: dict[str, str] = {}
        self.reboots = 0

    def observe(self) -> Observation:
        wish = self.desired or ""
        return Observation(
            self.desired, self.current, self.update, self.booted, self.staged, self.pending, self.change.reboot,
            self.change.drain, self.change.os, failed_before=self.failed.get(wish, ""), health=self.health,
        )  # fmt: skip

    def step(self, fails: Optional[Step] = None) -> Decision:
        decision = decide(self.observe())
        if decision.step is fails:
            self.note(failure=f"{fails.value} failed")
        elif decision.step in EFFECTS:
            self.effect(decision)
        return decision

    def note(self, **changes: Any) -> None:
        update = self.update or Progress(self.desired or "", live=not self.change.reboot)
        self.update = dataclasses.replace(update, **changes)

    def effect(self, decision: Decision) -> None:
        effects: dict[Step, Callable[[], None]] = {
            Step.STAGE_OS: lambda: self.stage(Staged.OS_ONLY if self.change.kargs else Staged.READY),
            Step.STAGE_KARGS: lambda: self.stage(Staged.READY),
            Step.VERIFY_STAGED: lambda: self.note(verified=True),
            Step.DRAIN: self.drain,
            Step.FINALIZE: self.finalize,
            Step.COMMIT_FILES: lambda: self.note(committed=True),
            Step.VERIFY_ROOT: lambda: self.note(proved=True),
            Step.REBOOT: self.reboot,
            Step.APPLY_LIVE: self.apply,
            Step.CONFIRM: lambda: self.end(self.update.desired if self.update else ""),
            Step.ROLL_BACK: self.roll_back,
            Step.DISCARD: lambda: self.discard(decision),
        }
        effects[decision.step]()

    def stage(self, state: Staged) -> None:
        self.note(verified=False, committed=False, proved=False)
        self.staged, self.pending = state, False

    def drain(self) -> None:
        self.note(draining=True, drained=True)
        self.drained = True

    def finalize(self) -> None:
        self.staged, self.pending = Staged.NONE, True
        self.note(verified=False)

    def reboot(self) -> None:
        self.reboots += 1
        self.note(rebooting=False, came_back=True, committed=False, proved=False)
        self.booted = Booted.TARGET if self.pending else Booted.SOURCE
        self.pending = False

    def apply(self) -> None:
        self.note(applied=True)
        self.files = "new"

    def roll_back(self) -> None:
        self.reboots += 1
        self.note(rolled_back=True, failure="unhealthy")
        self.failed["new"] = "unhealthy"
        self.booted = Booted.SOURCE

    def discard(self, decision: Decision) -> None:
        assert self.update is not None
        if decision.remember:
            self.failed[self.update.desired] = decision.why
        self.files = "old"
        self.end(self.current)

    def end(self, current: str) -> None:
        self.current = self.files = current
        self.update, self.booted, self.staged, self.pending, self.drained = (
            None, Booted.SOURCE, Staged.NONE, False, False)  # fmt: skip

    def walk(self, fails: Optional[Step] = None) -> list[Step]:
        """Steps until nothing happens any more."""
        taken: list[Step] = []
        while len(taken) < 40:
            step = self.step(fails).step
            if step not in EFFECTS:
                return [*taken, step]
            taken.append(step)
        raise AssertionError(f"it never comes to rest: {taken}")


STEPS = [(name, number) for name, order in ORDERS.items() for number in range(len(order))]


@pytest.mark.parametrize("name", CHANGES)
def test_a_clean_update_takes_its_steps_in_order_and_comes_to_rest(name: str) -> None:
    node = Node(CHANGES[name])
    assert tuple(node.walk()) == (*ORDERS[name], Step.REST)
    assert (node.current, node.drained) == ("new", False)
    assert node.reboots == (1 if CHANGES[name].reboot else 0)


@pytest.mark.parametrize(("name", "number"), [(name, n) for name, n in STEPS if n > 0])
@pytest.mark.parametrize("wish", ["old", "other", None])
def test_a_change_of_mind_after_any_step_wins(name: str, number: int, wish: Optional[str]) -> None:
    """What is booted or applied already is kept first, so that each way begins at a whole config."""
    node = Node(CHANGES[name])
    for _ in range(number):
        node.step()
    reboots, kept = node.reboots, ORDERS[name][number] is Step.CONFIRM
    node.desired = wish
    steps = node.walk()
    assert steps[0] is (Step.CONFIRM if kept else Step.DISCARD)
    assert (node.update, node.drained, node.failed) == (None, False, {})
    assert node.current == (wish or ("new" if kept else "old"))
    assert node.reboots - reboots == (1 if CHANGES[name].reboot and node.current != ("new" if kept else "old") else 0)


@pytest.mark.parametrize(
    ("name", "number"), [(name, n) for name, n in STEPS if ORDERS[name][n] not in (Step.CONFIRM, Step.REBOOT)]
)
def test_a_step_that_proves_the_target_impossible_leaves_the_old_config_and_is_not_tried_again(
    name: str, number: int
) -> None:
    node = Node(CHANGES[name])
    steps = node.walk(fails=ORDERS[name][number])
    assert steps[-2:] == [Step.DISCARD, Step.HOLD]
    assert (node.current, node.files, node.drained, node.reboots) == ("old", "old", False, 0)
    assert ORDERS[name][number].value in node.failed["new"]
    assert node.walk() == [Step.HOLD]


def test_another_config_may_follow_one_that_failed() -> None:
    node = Node(CHANGES["packages only"])
    node.walk(fails=Step.STAGE_OS)
    node.desired = "other"
    assert node.walk()[-2:] == [Step.CONFIRM, Step.REST]
    assert node.current == "other"


def test_an_unhealthy_target_is_taken_back_once_and_held() -> None:
    node = Node(CHANGES["files only"])
    node.health = Health.BAD
    assert node.walk()[-4:] == [Step.REBOOT, Step.ROLL_BACK, Step.DISCARD, Step.HOLD]
    assert (node.current, node.reboots) == ("old", 2)


def test_a_target_that_is_still_waking_up_is_waited_for() -> None:
    node = Node(CHANGES["files only"])
    node.health = Health.PENDING
    assert node.walk()[-2:] == [Step.REBOOT, Step.HOLD]
    node.health = Health.GOOD
    assert node.walk() == [Step.CONFIRM, Step.REST]


def test_a_reboot_that_ends_in_the_old_deployment_is_not_repeated() -> None:
    node = Node(CHANGES["image and kernel arguments"])
    while node.step().step is not Step.REBOOT:
        pass
    node.booted = Booted.SOURCE  # somebody chose the other boot entry
    node.pending = True
    assert node.walk() == [Step.DISCARD, Step.HOLD]
    assert node.reboots == 1


def test_an_older_deployment_that_was_chosen_after_the_target_was_confirmed_is_only_told() -> None:
    o = Observation("new", "old", stood_back="an older deployment is booted")
    d = decide(o)
    assert (d.step, d.degraded, d.remember) == (Step.REST, True, False) and "older deployment" in d.why
    assert decide(dataclasses.replace(o, hold="an image is missing")).step is Step.REST, "nothing is waited for"
    assert decide(dataclasses.replace(o, refusal="/spec/fips")).step is Step.REJECT


def test_an_older_deployment_with_an_update_in_flight_is_the_updates_matter() -> None:
    o = Observation("new", "old", Progress("new", came_back=True), stood_back="an older deployment is booted")
    assert decide(o).step is Step.DISCARD


@pytest.mark.parametrize("health", Health)
@pytest.mark.parametrize("desired", ["new", "old", None])
def test_a_failed_target_without_a_way_back_is_held_until_it_is_well_or_another_config_is_desired(
    health: Health, desired: Optional[str]
) -> None:
    update = Progress("new", rolled_back=True, failure="kubelet.service is failed")
    d = decide(Observation(desired, "new", update, Booted.TARGET, health=health, stranded=True))
    if health is Health.GOOD:
        assert d == Decision(Step.CONFIRM, d.why)
    elif desired == "new":
        assert (d.step, d.degraded) == (Step.HOLD, True) and "kubelet.service is failed" in d.why
    else:
        assert (d.step, d.remember) == (Step.CONFIRM, True)


def test_the_way_back_is_tried_once_before_it_counts_as_gone() -> None:
    o = Observation("new", "new", Progress("new"), Booted.TARGET, health=Health.BAD, stranded=True)
    assert (decide(o).step, decide(o).remember) == (Step.ROLL_BACK, True)


@pytest.mark.parametrize("state", [Staged.NONE, Staged.OTHER, Staged.OS_ONLY])
def test_what_is_staged_and_changed_by_somebody_else_after_the_drain_gives_the_node_back_first(state: Staged) -> None:
    node = Node(CHANGES["packages only"])
    while node.step().step is not Step.DRAIN:
        pass
    node.staged = state
    steps = node.walk()
    assert steps[0] is Step.DISCARD
    assert (node.current, node.reboots) == ("new", 1)


@pytest.mark.parametrize("state", [Staged.NONE, Staged.OTHER])
def test_what_is_staged_and_lost_before_the_drain_is_staged_again(state: Staged) -> None:
    node = Node(CHANGES["packages only"])
    while node.step().step is not Step.VERIFY_STAGED:
        pass
    node.staged = state
    assert node.walk() == [*ORDERS["packages only"], Step.REST]


@pytest.mark.parametrize("why", ["refusal", "hold", "failed_before"])
def test_the_sentence_says_what_stands_in_the_way(why: str) -> None:
    changes: dict[str, Any] = {why: "because of this"}
    o = dataclasses.replace(Observation("new", "old"), **changes)
    assert "because of this" in decide(o).why


def test_drift_is_told_at_rest() -> None:
    assert "/etc/x: missing" in decide(Observation("old", "old", drift="/etc/x: missing")).why
