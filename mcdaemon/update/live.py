"""Changes that need no reboot: written, acted upon, checked; undone as a whole when any of that fails."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from typing import Optional

from mcdaemon.errors import Broken, Failure
from mcdaemon.host.bus import Systemd
from mcdaemon.host.root import Root
from mcdaemon.machineconfig import disruption
from mcdaemon.machineconfig.diff import diff
from mcdaemon.machineconfig.disruption import CRIO, Action, ActionKind, Policy
from mcdaemon.machineconfig.model import MachineConfig
from mcdaemon.plan import Plan
from mcdaemon.update import commit, payload, verify
from mcdaemon.update.payload import Shelf

_log = logging.getLogger("mcdaemon")

JOB_TIMEOUT = 300.0
"""Seconds that a restart or reload may take."""

_JOBS = {ActionKind.RESTART: "Restart", ActionKind.RELOAD: "Reload"}


def apply(
    update: str,
    new: MachineConfig,
    old: Optional[MachineConfig],
    plan: Plan,
    root: Root,
    payloads: Shelf,
    undo: Shelf,
    systemd: Systemd,
    outside: Iterable[str] = (),
) -> None:
    """Bring the running root to `new`. Idempotent; raises Broken when it did not take, the caller then undoes it.
    `outside`: see `payload.build`."""
    load, entries = payload.build(update, new, old, root, root, outside)
    payloads.save(load, entries)
    commit.remember(load, undo, root, lambda _path: True)
    commit.apply(load, payloads, root)
    act(plan.actions, bool(plan.difference.units), systemd, removed=plan.difference.removed_units)
    report = verify.validate(root, load.expected(), load.passwords)
    if report.mismatches:
        raise Broken(f"cannot apply {new.name} without a reboot: {report.text()}")


def take_back(
    update: str,
    old: Optional[MachineConfig],
    policy: Policy,
    root: Root,
    payloads: Shelf,
    undo: Shelf,
    systemd: Systemd,
) -> None:
    """Put everything back and let the services see it. Idempotent.

    What has to be acted upon follows from the two configs of this update, not from what is desired meanwhile.
    """
    if undo.load(update) is None:
        return  # nothing was written yet, or all of it is back already
    commit.take_back(update, undo, root, drop=False)
    try:
        new = payload.carried(update, payloads)
    except Failure as error:
        _log.warning("cannot tell what to reload after taking %s back: %s", update, error)
        new = None
    if new is not None:
        difference = diff(old, new)
        act(disruption.actions(difference, old, new, policy), bool(difference.units), systemd, _log.warning)
    undo.drop(update)


def act(
    actions: tuple[Action, ...],
    units_changed: bool,
    systemd: Systemd,
    complain: Optional[Callable[[str, Broken], object]] = None,
    removed: Collection[str] = (),
) -> None:
    """Do what the disruption policy says, in its order, and check that it had an effect.

    `removed`: units that the change takes away; they are stopped, whatever the policy does to them otherwise.

    `complain`: told of what is broken instead of raising it. On the way back a unit may be gone with its config, or
    have been broken before; going on trying would keep the node from everything else.
    """
    kinds = {action.kind for action in actions}
    if units_changed and ActionKind.DAEMON_RELOAD not in kinds:
        systemd.reload()
    for action in actions:
        if action.kind is ActionKind.DAEMON_RELOAD:
            systemd.reload()
        elif action.kind is ActionKind.SPECIAL or action.kind in _JOBS:
            try:
                verb = "Stop" if action.unit in removed else _JOBS.get(action.kind, "Reload")
                _job(systemd, verb, action.unit or CRIO)
            except Broken as error:
                if complain is None:
                    raise
                complain("%s", error)


def _job(systemd: Systemd, verb: str, unit: str) -> None:
    result = systemd.run_job(verb, unit, JOB_TIMEOUT)
    if result != "done":
        raise Broken(f"cannot {verb.lower()} {unit}: the job ended with {result!r}", f"see `journalctl -u {unit}`")
    state = systemd.active_state(unit)
    if state in ("failed", "auto-restart"):
        raise Broken(
            f"cannot use the new config: {unit} is {state} after its {verb.lower()}", f"see `journalctl -u {unit}`"
        )
