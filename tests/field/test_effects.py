"""Every effect of the model beside the real one: the same things change on a node, and nothing else."""

from __future__ import annotations

import pytest

from tests.field.conftest import Aged
from tests.field.effects import SETTINGS, Walk, desiring_new, walking
from tests.field.evidence import NEW, OLD
from tests.model import world
from tests.model.effects import Effect, finalize
from tests.model.node import KINDS
from tests.model.node import Node as Abstract
from tests.stand.node import Node

pytestmark = pytest.mark.stand

E = Effect
FILES = next(kind for kind in KINDS if kind.name.startswith("files"))


def rebooted(walk: Walk) -> Abstract:
    """After the agent has asked: the node comes up again, and so does the abstract one."""
    walk.go_on()
    walk.node.follow_reboot()
    return world.boot(finalize(walk.kind, walk.abstract))._replace(agent="up", task=None)


def test_an_update_of_files_has_the_effects_of_the_model(aged: Aged) -> None:
    node = aged(OLD, settings=SETTINGS)
    node.desire(first=NEW)
    with walking(node, FILES, desiring_new(FILES)) as walk:
        walk.until("reboot")
        seen, abstract = walk.seen, rebooted(walk)
    with walking(node, FILES, abstract._replace(health="good")) as walk:
        walk.until("confirm")
    assert seen + walk.seen == [
        E.BEGIN, E.NOTE_STAGING, E.STAGE_LINE, E.DROP_PAYLOAD, E.LAY_OUT, E.NOTE_VERIFIED, E.NOTE_DRAINING, E.DRAIN,
        E.NOTE_DRAINED, E.NOTE_FINALIZING, E.UNLOCK, E.FINALIZE, E.KEEP_SHARED, E.WRITE_SOME, E.WRITE_REST, E.SYNC,
        E.NOTE_COMMITTED, E.NOTE_PROVED, E.ARM, E.ASK, E.NOTE_APPLIED, E.NOTE_RETURNING, E.UNDRAIN, E.NOTE_BACK,
        E.NOTE_CONFIRMED, E.DROP_PAYLOAD, E.DROP_UNDO,
    ]  # fmt: skip
