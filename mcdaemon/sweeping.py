"""Before a round: what a crash left behind is put right, and what somebody asked for is forgotten."""

from __future__ import annotations

import dataclasses
import logging

from mcdaemon.context import Context
from mcdaemon.errors import Transient
from mcdaemon.host import files, packages
from mcdaemon.inflight import InFlight
from mcdaemon.update import journal, lost
from mcdaemon.update.journal import Journal

log = logging.getLogger("mcdaemon")


def sweep(context: Context, flying: InFlight) -> str:
    """Remove what a crash left behind and no journal knows: payloads, undo records, holds, a package repository.

    Returns the sentence about a journal that could not be used: who mends it is the only one who learns.
    """
    alien = _mend(context, flying)
    update = flying.record().update
    known = {update.id} if update is not None else set()
    for shelf in (context.payloads, context.undo):
        for identity in shelf.identities():
            if identity not in known:
                shelf.drop(identity)
    if update is not None and update.unfinalized:
        log.warning("ostree could not finalize %s at the last shutdown: %s", update.name, update.unfinalized)
        flying.note(unfinalized="")
    files.remove_temporaries(context.root, (context.settings.state_dir, str(context.runtime)))
    if update is None:
        context.etc_at_merge.unlink(missing_ok=True)
    for left in packages.leftovers(context.root):
        log.warning("removing %s, which an interrupted transaction left behind", left)
        packages.remove(context.root)
    try:
        for hold in context.images.release_unknown(known if update is not None and update.held else set()):
            log.warning("released the hold %s, which no update knows", hold)
    except Transient as error:
        # A node without podman has none; otherwise the next start looks again.
        log.info("%s", error)
    return alien


def _mend(context: Context, flying: InFlight) -> str:
    """Replace a journal that cannot be used by one whose update stands in for what was in flight, in one stroke.

    Returns the sentence about it, "" for one that is in order.
    """
    _record, alien = journal.load(context.journal)
    if not alien:
        return ""
    told = f"{alien}; it is kept as {journal.keep_aside(context.journal)}"
    _osname, booted = context.machine.booted()
    flying.store(Journal(update=lost.stand_in(context.payloads, context.undo, context.root, booted, told)))
    return told


def retry_if_asked(context: Context, flying: InFlight) -> None:
    """Forget the failed target when `mcdaemon retry` asked for it: only the agent writes the journal.

    And which config was confirmed, where an older deployment was booted since: that is what keeps the agent from
    acting. What of it is outside /etc stays known: it is there until the next update.
    """
    if context.retry.exists():
        record = flying.record()
        confirmed = record.confirmed
        if confirmed is not None and confirmed.deployment != context.machine.booted()[1]:
            confirmed = dataclasses.replace(confirmed, desired="")
        flying.store(dataclasses.replace(record, failed=None, confirmed=confirmed))
        context.retry.unlink()
