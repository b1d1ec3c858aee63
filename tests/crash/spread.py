"""An even spread of kill points for `make test`; all of them are `make test-crash`.

A test is named by its share of the way ("live-3of6"): how many calls there are is only known when it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.crash import everywhere
from tests.crash.killing import Prepared, kill_at, prepare
from tests.crash.scenarios import Ground, scenario
from tests.crash.tracer import require_permission

SHARES = 6


def name_of(share: int) -> str:
    return f"{share + 1}of{SHARES}"


@pytest.fixture(scope="module")
def ground() -> Iterator[Ground]:
    """Fails, and does not skip, where tracing is not permitted."""
    require_permission()
    with everywhere.ground() as place:
        yield place


@pytest.fixture(scope="module")
def ready(request: pytest.FixtureRequest, ground: Ground) -> Prepared:
    """The scenario of the test's parameter with its disk, made once for all of its shares."""
    return prepare(scenario(request.param), ground)


def kill_at_share(ready: Prepared, share: int, record_property: Callable[[str, object], None]) -> None:
    """Kill in the middle of this share of the kill points; the variants take turns."""
    points = ready.points()
    said = f"kills, {ready.scenario.name}: {len(ready.calls)} calls, {len(points)} kill points, {SHARES} of them tried"
    record_property("numbers", said)
    number = points[(2 * share + 1) * len(points) // (2 * SHARES)]
    outcome = kill_at(ready, number, ready.variants[share % len(ready.variants)])
    assert outcome.problems == [], f"{outcome.text()}\n{outcome.said}"
