"""When the journal is lost: what was in flight is told by what it left on the shelves.

The node must not stay drained, or boot into a config that nobody remembers wanting. So an update stands in for the one
whose record was lost; `decide` discards it like any other that failed, and the desired config starts afresh.
"""

from __future__ import annotations

import json

from mcdaemon.errors import Failure
from mcdaemon.host import files
from mcdaemon.host.root import Root
from mcdaemon.machineconfig import model
from mcdaemon.update.journal import Update
from mcdaemon.update.payload import CURRENT_CONFIG, Shelf


def stand_in(payloads: Shelf, undo: Shelf, root: Root, booted: str, why: str) -> Update:
    """The update to discard. What was booted into already (the running root carries its config) is not put back; a live
    change is, wherever it had got to: nobody knows which services have seen it."""
    carries = carried(root)
    left = sorted({*payloads.identities(), *undo.identities()})
    live = [identity for identity in left if _is_live(undo, identity)]
    pending = []
    for identity in left:
        if identity in live or _config(payloads, identity) != carries:
            pending.append(identity)
        else:
            undo.drop(identity)
    return Update(
        id=pending[0] if pending else "lost",
        desired="",
        name="an update whose record was lost",
        source=booted,
        live=bool(pending) and pending[0] in live,
        draining=True,  # nobody knows; taking a node back to work that never left it does no harm
        failure=why,
    )


def _config(payloads: Shelf, identity: str) -> str:
    try:
        load = payloads.load(identity)
    except Failure:
        return ""
    return load.config if load is not None else ""


def _is_live(undo: Shelf, identity: str) -> bool:
    """Only a live change keeps what was in /etc."""
    try:
        record = undo.load(identity)
    except Failure:
        return False
    return record is not None and CURRENT_CONFIG in record.nodes()


def carried(root: Root) -> str:
    """Identity of the config that the root says it carries, "none", or "unknown" where that cannot be read."""
    try:
        content = files.read_file(root, CURRENT_CONFIG)
        return model.parse(json.loads(content), CURRENT_CONFIG).identity if content else "none"
    except (ValueError, Failure):
        return "unknown"
