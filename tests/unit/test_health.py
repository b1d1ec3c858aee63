"""The verdict on a booted target: what is good has to stay so, and the time for it runs over restarts of the agent."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional

import pytest

from mcdaemon.decide import Health
from mcdaemon.errors import Transient
from mcdaemon.host.bus import UnitState
from mcdaemon.update.health import RECORD, Gate, Look, complaint, told

GOOD, BAD, PENDING = Health.GOOD, Health.BAD, Health.PENDING
WELL = Look(starts=("a.service 0 1",))
ILL = Look("a.service is failed", ("a.service 0 1",))


class Boot:
    """One boot of a node with a clock that only moves when told to."""

    def __init__(self, folder: Path, timeout: float = 60, settle: float = 5) -> None:
        self.now = 100.0
        self.looks = 0
        self.gate = Gate(folder / RECORD, timeout, settle, lambda: self.now)

    def at(self, now: float, found: Look, update: str = "u") -> tuple[Health, str]:
        def look() -> Look:
            self.looks += 1
            return found

        self.now = 100.0 + now
        return self.gate.verdict(update, look)

    def verdicts(self, *looks: tuple[float, Look]) -> list[Health]:
        return [self.at(now, found)[0] for now, found in looks]


@pytest.fixture
def boot(tmp_path: Path) -> Boot:
    return Boot(tmp_path)


# -- good has to hold -------------------------------------------------------------------------------------------------


def test_what_is_good_once_is_not_confirmed_before_it_has_stayed_so(boot: Boot) -> None:
    assert boot.verdicts((0, WELL), (4.9, WELL), (5, WELL)) == [PENDING, PENDING, GOOD]


def test_the_sentence_says_how_long_it_still_has_to_stay_well(boot: Boot) -> None:
    boot.at(0, WELL)
    assert boot.at(3, WELL)[1] == "all is well for 3 s; it has to stay so for 5 s"


def test_without_a_time_to_settle_one_look_is_enough(tmp_path: Path) -> None:
    assert Boot(tmp_path, settle=0).verdicts((0, WELL)) == [GOOD]


def test_a_bad_look_in_between_starts_the_time_anew(boot: Boot) -> None:
    looks = ((0, WELL), (2, ILL), (4, WELL), (6, WELL), (9, WELL))
    assert boot.verdicts(*looks) == [PENDING, PENDING, PENDING, PENDING, GOOD]


def test_a_unit_that_was_restarted_between_two_good_looks_is_not_well(boot: Boot) -> None:
    """Active now, dead in two seconds, active again at the next look: only its number of starts tells."""
    boot.at(0, WELL)
    verdict, why = boot.at(5, Look(starts=("a.service 1 2",)))
    assert verdict is PENDING and why == "a.service was restarted meanwhile"
    assert boot.at(9, Look(starts=("a.service 1 2",)))[0] is PENDING
    assert boot.at(10, Look(starts=("a.service 1 2",)))[0] is GOOD


def test_a_unit_that_flaps_for_ever_is_bad_in_the_end(boot: Boot) -> None:
    verdicts = [boot.at(second, Look(starts=(f"a.service {second} x",)))[0] for second in range(0, 64, 2)]
    assert verdicts[-1] is BAD and set(verdicts[:30]) == {PENDING}


def test_a_good_verdict_is_final_for_this_boot_and_nobody_looks_again(boot: Boot) -> None:
    """STATE-10: the way back to work may be refused for long; what fails meanwhile is not the update's."""
    boot.verdicts((0, WELL), (5, WELL))
    looks = boot.looks
    assert boot.verdicts((600, ILL), (601, WELL)) == [GOOD, GOOD] and boot.looks == looks


# -- the deadline -----------------------------------------------------------------------------------------------------


def test_what_is_wrong_until_the_deadline_is_waited_for_and_bad_after_it(boot: Boot) -> None:
    assert boot.verdicts((0, ILL), (59.9, ILL), (60, ILL)) == [PENDING, PENDING, BAD]
    assert boot.at(61, ILL)[1] == "a.service is failed"


def test_the_deadline_counts_from_the_first_look_also_when_the_agent_was_restarted(tmp_path: Path) -> None:
    Boot(tmp_path).at(0, ILL)
    assert Boot(tmp_path).at(60, ILL)[0] is BAD


def test_the_time_runs_also_when_the_first_look_ended_the_agent(tmp_path: Path) -> None:
    first = Boot(tmp_path)

    def die() -> Look:
        raise Transient("cannot go on: the agent was told to stop")

    with pytest.raises(Transient):
        first.gate.verdict("u", die)
    assert Boot(tmp_path).at(60, ILL)[0] is BAD


def test_what_is_well_at_the_deadline_may_still_settle_but_only_once(boot: Boot) -> None:
    assert boot.verdicts((58, ILL), (59, WELL), (61, WELL), (64, WELL)) == [PENDING, PENDING, PENDING, GOOD]


def test_what_breaks_again_after_the_deadline_is_bad(boot: Boot) -> None:
    assert boot.verdicts((0, ILL), (59, WELL), (61, ILL)) == [PENDING, PENDING, BAD]


def test_an_excused_trouble_is_waited_for_without_end(boot: Boot) -> None:
    away = Look("cannot reach the API server", excused=True)
    assert boot.verdicts((0, away), (6000, away), (6002, WELL), (6007, WELL)) == [PENDING, PENDING, PENDING, GOOD]
    assert told(boot.gate.path.parent) == ()


def test_the_record_of_another_update_or_another_boot_does_not_count(tmp_path: Path) -> None:
    boot = Boot(tmp_path)
    boot.verdicts((0, WELL), (5, WELL))
    assert boot.at(6, WELL, "another")[0] is PENDING
    boot.now = 0  # a monotonic clock begins anew with the boot
    assert Boot(tmp_path).at(-90, ILL, "another")[0] is PENDING


ALIENS: dict[str, Callable[[dict[str, Any]], object]] = {
    "empty": lambda data: None, "a list": lambda data: [], "nan": lambda data: {**data, "first": float("nan")},
    "text": lambda data: {**data, "first": "soon"}, "more": lambda data: {**data, "more": 1},
    "less": lambda data: {"update": "u"}, "null": lambda data: {**data, "first": None},
    "endless": lambda data: {**data, "first": float("-inf")},
}  # fmt: skip


@pytest.mark.parametrize("name", ALIENS)
def test_a_record_that_is_not_ours_starts_the_time_again(boot: Boot, name: str) -> None:
    boot.at(0, ILL)
    path = boot.gate.path
    changed = ALIENS[name](json.loads(path.read_text()))
    path.write_text("" if changed is None else json.dumps(changed))
    assert boot.verdicts((61, ILL), (122, ILL)) == [PENDING, BAD]


def test_what_was_only_wanted_is_told_for_the_rest_of_the_boot(boot: Boot, tmp_path: Path) -> None:
    assert told(tmp_path) == ()
    boot.verdicts((0, Look(wanted=("x",))), (5, Look(wanted=("cannot pass 10-nice.sh",))))
    assert told(tmp_path) == ("cannot pass 10-nice.sh",)


# -- units ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (UnitState("loaded", "active", "running"), ""),
        (UnitState("loaded", "active", "exited"), ""),
        (UnitState("loaded", "active", "waiting"), ""),
        (UnitState("masked", "active", "running"), ""),
        (UnitState("loaded", "activating", "start"), "u.service is activating (start)"),
        (UnitState("loaded", "inactive", "dead", "success"), "u.service is inactive (dead)"),
        (UnitState("loaded", "failed", "failed", "exit-code"), "u.service is failed (failed, exit-code)"),
        (UnitState("loaded", "reloading", "reload"), "u.service is reloading (reload)"),
        (
            UnitState("loaded", "activating", "auto-restart", "exit-code", 7),
            "u.service keeps failing (exit-code); it was restarted 7 times",
        ),
        (UnitState("masked", "inactive", "dead"), "u.service is masked"),
        (UnitState("not-found", "inactive", "dead"), "u.service does not exist on this OS"),
        (UnitState("bad-setting", "inactive", "dead"), "u.service cannot be loaded: a setting in its files is wrong"),
        (UnitState("error", "inactive", "dead"), "u.service cannot be loaded"),
        (Transient("cannot look at u.service: no answer"), "cannot look at u.service: no answer"),
    ],
)
def test_a_unit_is_well_when_it_is_active_and_says_what_it_is_otherwise(state: object, said: Optional[str]) -> None:
    assert complaint("u.service", state) == said
