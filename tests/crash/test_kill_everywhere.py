"""The agent is killed at a call that changes something, started again, and the node ends as if nothing had happened."""

from __future__ import annotations

import pytest

from tests.crash import spread
from tests.crash.spread import Ready, ready

__all__ = ["ready"]

pytestmark = pytest.mark.stand


@pytest.mark.parametrize(("name", "share"), spread.shares(["live", "files", "discard", "early"]), ids=spread.name_of)
def test_a_node_whose_agent_is_killed_ends_in_exactly_one_of_two_configs(ready: Ready, name: str, share: int) -> None:
    """TXN-31."""
    spread.kill_at_share(ready(name), share)
