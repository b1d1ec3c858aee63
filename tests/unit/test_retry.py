"""Waits between attempts: they grow, they are bounded, and no two nodes wait for the same time."""

from __future__ import annotations

import math
import random

import pytest

from mcdaemon.retry import Backoff


def waits(seed: int, count: int, least: float = 15.0, most: float = 600.0) -> list[float]:
    backoff = Backoff(least, most, random.Random(seed))
    return [backoff.next("image") for _ in range(count)]


def test_every_wait_is_within_its_bounds() -> None:
    for seed in range(200):
        assert all(15.0 <= wait <= 600.0 for wait in waits(seed, 30))


def test_waits_grow_from_the_least_to_the_most() -> None:
    columns = list(zip(*(waits(seed, 12) for seed in range(400))))
    means = [sum(column) / len(column) for column in columns]
    assert means[0] < means[1] < means[2] < means[3] < means[4]
    assert means[0] < 30 and means[-1] > 250
    assert max(columns[0]) <= 30


@pytest.mark.parametrize("attempt", range(6))
def test_nodes_that_lost_an_image_together_do_not_ask_for_it_together(attempt: int) -> None:
    """From the first wait on: a pool of a hundred nodes spreads over the window."""
    column = [waits(seed, attempt + 1)[attempt] for seed in range(100)]
    window = max(column) - min(column)
    assert len({round(wait, 3) for wait in column}) > 90
    assert window > 10
    assert sum(wait == 15.0 for wait in column) == 0


def test_the_same_seed_gives_the_same_waits() -> None:
    assert waits(1, 10) == waits(1, 10) != waits(2, 10)


def test_thousands_of_attempts_do_not_overflow() -> None:
    backoff = Backoff(0.1, 600.0)
    last = [backoff.next("image") for _ in range(5000)][-1]
    assert 0.1 <= last <= 600.0


def test_bounds_that_are_equal_leave_no_choice() -> None:
    assert waits(1, 5, 10.0, 10.0) == [10.0] * 5


def test_subjects_do_not_share_their_attempts() -> None:
    backoff = Backoff(1.0, 1000.0, random.Random(1))
    for _ in range(20):
        backoff.next("a")
    assert backoff.next("b") <= 2.0
    backoff.reset("a")
    assert backoff.next("a") <= 2.0


def test_a_reset_of_what_was_never_tried_is_fine() -> None:
    Backoff(1.0, 2.0).reset("never")


@pytest.mark.parametrize("asked", [0.0, 1.0, 100.0, 700.0, 3600.0])
def test_what_the_other_side_asked_for_is_never_undercut_and_gets_jitter(asked: float) -> None:
    found = [Backoff(1.0, 600.0, random.Random(seed)).next("x", asked) for seed in range(100)]
    assert all(wait >= max(asked, 1.0) for wait in found)
    assert all(wait <= max(asked * 1.25, 2.0) for wait in found)
    assert len(set(found)) > 90


@pytest.mark.parametrize("asked", [3601.0, 1e9, math.inf])
def test_an_absurd_request_counts_as_an_hour(asked: float) -> None:
    assert 3600.0 <= Backoff(1.0, 600.0).next("x", asked) <= 4500.0


@pytest.mark.parametrize("asked", [-5.0, -math.inf, math.nan])
def test_a_request_that_is_none_changes_nothing(asked: float) -> None:
    assert 1.0 <= Backoff(1.0, 600.0).next("x", asked) <= 2.0
