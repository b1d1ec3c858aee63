"""What the agent had said before it was on the disk is found; and how many disks are booted can be chosen."""

from __future__ import annotations

from pathlib import Path

import pytest
from vmlab import powercuts
from vmlab.blocklog import Entry, Flag, Log
from vmlab.diskstate import PROGRESS, Boots
from vmlab.powercuts import Recording
from vmlab.prefixes import Count, State

SAID = {"drain: ": 10, "finalize: ": 20, "commit-files: ": 30, "verify-root: ": 40, "reboot: ": 50}


def recording(said: dict[str, int]) -> Recording:
    entries = tuple(
        Entry(Flag.FLUSH if number % 2 else Flag(0), 0, 0 if number % 2 else 512, 0) for number in range(60)
    )
    return Recording(Path("start"), Log(Path("log"), 512, entries), 4, Path("end"), said)


def states(**moments: int) -> Count:
    """Flushes at which the journal says the next thing for the first time; "_" stands for a blank."""
    return Count([State(moment, "", False, Boots.OLD, progress.replace("_", " "), False, ())
                  for progress, moment in moments.items()])  # fmt: skip


def test_each_step_is_on_the_disk_before_the_next_one_begins() -> None:
    count = states(begun=6, verified=9, drained=20, finalizing=28, committed=38, proved=50, confirmed=60)
    assert recording(SAID).forgotten(count) == []


def test_a_step_that_is_on_the_disk_a_flush_too_late_is_found() -> None:
    count = states(begun=6, verified=9, drained=22, finalizing=28, committed=42, proved=48)
    assert recording(SAID).forgotten(count) == [
        "at 'finalize: ' 'drained' was not on the disk: its journal says 'verified', entry 20",
        "at 'verify-root: ' 'committed' was not on the disk: its journal says 'finalizing', entry 40",
    ]


def test_nothing_flushed_at_all_is_found() -> None:
    assert recording({"drain: ": 5}).forgotten(states(verified=6)) == [
        "at 'drain: ' 'verified' was not on the disk: nothing was flushed, entry 5"
    ]


def test_a_journal_that_cannot_be_read_is_nothing_that_was_reached() -> None:
    assert recording({"drain: ": 10}).forgotten(states(unreadable=8)) != []


def test_what_a_random_loss_has_left_does_not_count_as_flushed() -> None:
    lossy = State(9, "", True, Boots.OLD, "verified", False, ())
    assert recording({"drain: ": 10}).forgotten(Count([*states(begun=8).states, lossy])) != []


def test_half_of_the_points_are_flushes_and_none_is_before_the_update() -> None:
    found = recording(SAID).points(5, 1)
    assert [point.seed is None for point in found].count(True) == 3 and len(found) == 5
    assert all(point.moment >= 4 for point in found)


def test_how_many_and_which_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VMLAB_CUTS", "VMLAB_SEED", "PYTEST_XDIST_TESTRUNUID"):
        monkeypatch.delenv(name, raising=False)
    assert powercuts.cuts() == 8
    monkeypatch.setenv("PYTEST_XDIST_TESTRUNUID", "a7b")
    assert powercuts.seed() == powercuts.seed()
    monkeypatch.setenv("VMLAB_CUTS", "60")
    monkeypatch.setenv("VMLAB_SEED", "42")
    assert (powercuts.cuts(), powercuts.seed()) == (60, 42)


def test_the_order_of_the_steps_is_the_journals() -> None:
    assert PROGRESS.index("verified") < PROGRESS.index("drained") < PROGRESS.index("committed")
