"""The four incidents that mcdaemon exists for; the stories are told by `tests.stand.incidents`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.stand.incidents import STORIES, Outcome, Stage
from tests.stand.registry import Registry

pytestmark = [pytest.mark.stand, pytest.mark.slow]


@pytest.mark.timeout(180)
@pytest.mark.parametrize("tell", [story for _title, story in STORIES], ids=lambda story: str(story.__name__))
def test_the_incident_has_its_before_and_its_after(tmp_path: Path, tell: Callable[[Stage], Outcome]) -> None:
    with Registry(tmp_path / "registry") as registry:
        outcome = tell(Stage(tmp_path, registry))
    assert outcome.incident and outcome.before and outcome.after
