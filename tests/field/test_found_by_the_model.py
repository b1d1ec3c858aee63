"""What the exploration of the model found wrong in the real steps, on the stand."""

from __future__ import annotations

import pytest

from tests.field.evidence import ARCHIVE, NEW, OLD, STATE, is_old, no_leftovers, stop_after, tick
from tests.field.evidence import journal as record
from tests.stand.node import DESIRED, Node

pytestmark = pytest.mark.stand

UNDRAINED = "/run/undrained"


def test_a_drain_that_was_begun_and_is_not_wanted_any_more_is_taken_back(old: Node) -> None:
    """The hook has cordoned the node and failed on the first workload: nobody else lets them back."""
    old.desire(first=NEW)
    assert tick(old) == 3 and record(old)["update"]["draining"], "the gate is shut: the drain fails"
    old.desire(first=OLD)
    assert tick(old) == 0
    assert old.machine.exists(UNDRAINED)
    is_old(old)
    no_leftovers(old)


def test_a_journal_that_is_damaged_before_a_boot_does_not_leave_the_node_drained(old: Node) -> None:
    """The early unit reads it first; only the agent can take back what is in flight, so it has to find it."""
    old.desire(first=NEW)
    old.machine.write("/run/may-drain", "")
    stop_after(old, "drain")
    old.machine.write(f"{STATE}/journal.json", "torn")
    old.machine.power_cut()
    old.machine.boot()
    old.desire(first=OLD)
    tick(old)
    assert old.machine.exists(UNDRAINED)
    is_old(old)
    no_leftovers(old)


def test_a_journal_that_is_damaged_while_the_agent_runs_does_not_leave_the_node_drained(old: Node) -> None:
    """Between two steps of one run: what was in flight is told by what it left, as at a start."""
    old.machine.write("/run/may-drain", "")
    old.machine.write("/run/damage.py", _DAMAGE)
    old.desire(first=NEW)
    said = old.machine.run(["/usr/bin/python3", "/run/damage.py"], env={"PYTHONPATH": ARCHIVE}, check=False).stderr
    assert "cannot use the journal" in said and "it is kept as" in said and "discard: " in said
    assert old.machine.exists(UNDRAINED) and old.machine.read(f"{STATE}/journal.json.alien-1") == "torn"
    is_old(old)
    no_leftovers(old)


_DAMAGE = f"""
from mcdaemon import cli, perform
def drain(self, *arguments, real=perform.Performer._drain):
    real(self, *arguments)
    open("{STATE}/journal.json", "w").write("torn")
    open("{DESIRED}/first.json", "w").write({OLD!r})
perform.Performer._drain = drain
cli.main(["run", "--once"])
"""
