"""An even spread of kill points for `make test`; all of them are `make test-crash`.

A test is named by its share of the way ("live-3of8"): how many calls there are is only known when it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest

from tests.crash.everywhere import ground
from tests.crash.killing import Prepared, kill_at, prepare
from tests.crash.scenarios import scenario
from tests.crash.tracer import require_permission

SHARES = 8
Ready = Callable[[str], Prepared]


def shares(names: Sequence[str]) -> list[tuple[str, int]]:
    return [(name, share) for name in names for share in range(SHARES)]


def name_of(value: object) -> str:
    return f"{value + 1}of{SHARES}" if isinstance(value, int) else str(value)


@pytest.fixture(scope="module")
def ready() -> Iterator[Ready]:
    """Scenarios with their disks, each made once. Fails where tracing is not permitted."""
    require_permission()
    made: dict[str, Prepared] = {}
    with ground() as place:

        def get(name: str) -> Prepared:
            if name not in made:
                made[name] = prepare(scenario(name), place)
            return made[name]

        yield get


def kill_at_share(ready: Prepared, share: int) -> None:
    """Kill in the middle of this share of the kill points; the variants take turns."""
    points = ready.points()
    number = points[(2 * share + 1) * len(points) // (2 * SHARES)]
    outcome = kill_at(ready, number, ready.variants[share % len(ready.variants)])
    assert outcome.problems == [], f"{outcome.text()}\n{outcome.said}"
