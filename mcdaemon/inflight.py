"""The update in flight, on the disk: the only place where the agent's steps read and change their journal."""

from __future__ import annotations

import dataclasses
import logging
import secrets
from pathlib import Path
from typing import Any

from mcdaemon.errors import Transient
from mcdaemon.observe import Facts
from mcdaemon.plan import Plan
from mcdaemon.update import journal
from mcdaemon.update.journal import Journal, Update

log = logging.getLogger("mcdaemon")


class InFlight:
    """The journal at `path`. Every change is on the disk when the method returns."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def record(self) -> Journal:
        """What the journal says. Raises Transient for one that cannot be used."""
        record, alien = journal.load(self._path)
        if alien:
            raise Transient(alien, "the next round puts right what was in flight")
        return record

    def store(self, record: Journal) -> None:
        """Replace the journal."""
        journal.store(self._path, record)

    def note(self, **changes: Any) -> Update:
        """Change the update in flight, on the disk."""
        record = self.record()
        assert record.update is not None
        update = dataclasses.replace(record.update, **changes)
        self.store(dataclasses.replace(record, update=update))
        return update

    def begin(self, facts: Facts) -> Update:
        """The update in flight; a new one when there is none: from here on the node knows what it is about to do."""
        assert facts.desired is not None and facts.plan is not None
        if facts.update is not None:
            return facts.update
        config = facts.desired.config
        update = Update(
            id=secrets.token_hex(6),
            desired=config.identity,
            name=config.name,
            source=facts.booted,
            previous=facts.current.name if facts.current else "",
            live=not facts.plan.reboot,
        )
        if facts.resolution is not None and facts.plan.image:
            update = dataclasses.replace(
                update, digest=facts.resolution.digest, image_digest=facts.resolution.image_digest
            )
        record = self.record()
        self.store(dataclasses.replace(record, update=update))
        if record.failed is not None and update.digest and update.digest == record.failed.digest:
            log.warning("%s goes to %s, which has failed before, with %s", update.name, update.digest, record.failed)
        return update


def plan_of(facts: Facts) -> Plan:
    assert facts.plan is not None, "a step that needs a plan was decided without one"
    return facts.plan


def update_of(facts: Facts) -> Update:
    assert facts.update is not None, "a step of an update was decided without one"
    return facts.update
