"""The agent is killed at a call that changes something, started again, and the node ends as if nothing had happened."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.crash import spread
from tests.crash.killing import Prepared
from tests.crash.spread import ground, ready

__all__ = ["ground", "ready"]

# The first share of a scenario makes its disk and sees how it ends unkilled: four nodes, from first boot to rest.
pytestmark = [pytest.mark.stand, pytest.mark.timeout(240)]


@pytest.mark.parametrize("ready", ["live", "files", "discard", "early"], indirect=True)
@pytest.mark.parametrize("share", range(spread.SHARES), ids=spread.name_of)
def test_a_node_whose_agent_is_killed_ends_in_exactly_one_of_two_configs(
    ready: Prepared, share: int, record_property: Callable[[str, object], None]
) -> None:
    """STATE-01, STATE-11: killed in mid-step; STATE-07: every second time another config is desired meanwhile."""
    spread.kill_at_share(ready, share, record_property)
