"""When a hold counts as Degraded."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from mcdaemon.decide import Decision, Observation, Step
from mcdaemon.observe import Facts
from mcdaemon.report import status
from mcdaemon.reporter import Reporter
from mcdaemon.update.journal import Journal

HELD = Decision(Step.HOLD, "an image is missing")
RESTING = Decision(Step.REST, "current and validated")


class Clocks:
    """The wall clock and the one that nobody sets; both move only when a test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wall, self.steady = 1_700_000_000.0, 1000.0
        monkeypatch.setattr(time, "time", lambda: self.wall)
        monkeypatch.setattr(time, "monotonic", lambda: self.steady)


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    return Clocks(monkeypatch)


def state(reporter: Reporter, folder: Path, decision: Decision) -> str:
    reporter.decided(Facts(None, None, Journal(), "a.0", "boot", Observation(None, None), "/nowhere"), decision, 0.0)
    found = status.load(folder / "status.json")
    assert found is not None
    return found.state


@pytest.mark.parametrize("years", [-10, 10])
def test_a_jump_of_the_wall_clock_makes_no_hold_a_long_one(clocks: Clocks, tmp_path: Path, years: int) -> None:
    """STATE-22."""
    reporter = Reporter(tmp_path, tmp_path, degraded_after=60.0)
    assert state(reporter, tmp_path, HELD) == "Working"
    clocks.wall += years * 365 * 86400
    clocks.steady += 59
    assert state(reporter, tmp_path, HELD) == "Working"
    clocks.steady += 2
    assert state(reporter, tmp_path, HELD) == "Degraded"


def test_a_hold_that_ended_starts_afresh(clocks: Clocks, tmp_path: Path) -> None:
    reporter = Reporter(tmp_path, tmp_path, degraded_after=60.0)
    state(reporter, tmp_path, HELD)
    clocks.steady += 61
    assert state(reporter, tmp_path, RESTING) == "Done"
    assert state(reporter, tmp_path, HELD) == "Working"


def test_without_a_limit_a_hold_stays_working(clocks: Clocks, tmp_path: Path) -> None:
    reporter = Reporter(tmp_path, tmp_path)
    state(reporter, tmp_path, HELD)
    clocks.steady += 1e6
    assert state(reporter, tmp_path, HELD) == "Working"
