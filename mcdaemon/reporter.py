"""Telling on every channel what a round found: the status file and the metrics."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from pathlib import Path
from typing import Any, Optional

from mcdaemon.decide import Booted, Decision, Step
from mcdaemon.errors import Failure, Held, HoldReason, Transient
from mcdaemon.host import files
from mcdaemon.observe import Facts
from mcdaemon.report import status
from mcdaemon.report.metrics import Board, Failed, Result, Snapshot, State
from mcdaemon.report.status import Status
from mcdaemon.update import journal

_RESULTS = {Step.CONFIRM: Result.DONE, Step.DISCARD: Result.DISCARDED, Step.ROLL_BACK: Result.ROLLED_BACK}


class Reporter:
    """Keeps the counts over reboots in `<state>/counters.json` and the last status in /run."""

    def __init__(self, state: Path, runtime: Path, board: Optional[Board] = None, degraded_after: float = 0.0) -> None:
        """`degraded_after`: seconds after which a hold counts as Degraded, 0 for never."""
        self._degraded_after = degraded_after
        self._counters = state / "counters.json"
        self._journal = state / "journal.json"
        self._status = runtime / "status.json"
        self._board = board
        self._counts: Optional[dict[str, int]] = None
        self._held_at: Optional[float] = None
        self._snapshot = Snapshot(State.DONE, time.time(), Step.REST, time.time())

    # -- what the loop tells ----------------------------------------------------------------------------------------

    def decided(self, facts: Facts, decision: Decision, due: float) -> None:
        """A decision was made; `due`: when (monotonic) the next round comes by itself."""
        hold, state = _hold(facts, decision), _state(facts, decision)
        held = decision.step is Step.HOLD
        since = (self._snapshot.held_since or time.time()) if held else None
        # By a clock that nobody sets: a jump of the other one must not degrade a pool (STATE-22).
        self._held_at = (self._held_at or time.monotonic()) if held else None
        if self._held_at and self._degraded_after and time.monotonic() - self._held_at > self._degraded_after:
            state = State.DEGRADED
        self._publish(
            facts,
            decision,
            state=state,
            hold=hold,
            held_since=since,
            next_retry=time.time() + max(0.0, due - time.monotonic()),
        )

    def failed(self, facts: Facts, decision: Decision, error: Failure, due: float) -> None:
        """The step could not be taken."""
        hold = error.reason if isinstance(error, Held) else None
        if decision.step is Step.REBOOT:
            self._count("reboots_failed")
        self._count("retries")
        state = State.WORKING if isinstance(error, (Held, Transient)) else State.DEGRADED
        self._publish(
            facts,
            decision,
            error=str(error),
            state=state,
            hold=hold,
            last_error=error.code,
            last_error_at=time.time(),
            next_retry=time.time() + max(0.0, due - time.monotonic()),
        )

    def performed(self, facts: Facts, decision: Decision, seconds: float) -> None:
        """The step was taken."""
        if decision.step in _RESULTS and not (decision.step is Step.CONFIRM and decision.remember):
            self._count(_RESULTS[decision.step].value)
            self._set(f"{_RESULTS[decision.step].value}_at", int(time.time()))
        if decision.step in (Step.REBOOT, Step.ROLL_BACK):
            self._count("reboots")
        changes: dict[str, Any] = {}
        if decision.step in (Step.STAGE_OS, Step.STAGE_KARGS):
            changes["transactions"] = self._snapshot.transactions.observe(seconds)
        if decision.step is Step.DRAIN:
            changes["out_of_service_since"] = time.time()
        if decision.step in (Step.CONFIRM, Step.DISCARD):
            changes["out_of_service_since"] = None
        self._publish(facts, decision, state=_state(facts, decision), **changes)

    def trouble(self, error: Failure, due: float) -> None:
        """The node could not even be observed."""
        state = State.WORKING if isinstance(error, (Held, Transient)) else State.DEGRADED
        self._snapshot = dataclasses.replace(
            self._snapshot,
            state=state,
            last_error=error.code,
            last_error_at=time.time(),
            round_at=time.time(),
            next_retry=time.time() + max(0.0, due - time.monotonic()),
        )
        if self._board is not None:
            self._board.publish(self._snapshot)
        last = status.load(self._status) or Status(state.value, Step.HOLD.value, "", time.time())
        status.store(
            self._status, dataclasses.replace(last, state=state.value, why=str(error), error=str(error), at=time.time())
        )

    # -- how it is written ------------------------------------------------------------------------------------------

    def _publish(self, facts: Facts, decision: Decision, state: State, error: str = "", **changes: Any) -> None:
        desired, current, failed = facts.desired, facts.current, facts.journal.failed
        now = time.time()
        counts = self._load()
        self._snapshot = dataclasses.replace(
            self._snapshot,
            state=state,
            step=decision.step,
            round_at=now,
            state_since=now if state is not self._snapshot.state else self._snapshot.state_since,
            current=current.name if current else "",
            desired=desired.config.name if desired else "",
            os_overridden=bool(desired and desired.overridden_by),
            updates={result: counts.get(result.value, 0) for result in Result},
            reboots=counts.get("reboots", 0),
            reboots_failed=counts.get("reboots_failed", 0),
            retries=counts.get("retries", 0),
            drift_at=now if facts.observation.drift else None,
            health=facts.observation.health if _arrived(facts) else None,
            stood_back=bool(facts.observation.stood_back),
            failed=Failed(failed.name, failed.digest, failed.at) if failed is not None else None,
            ended={result: counts[f"{result.value}_at"] for result in Result if f"{result.value}_at" in counts},
            host=facts.versions.texts(),
            **changes,
        )
        if self._board is not None:
            self._board.publish(self._snapshot)
        due = self._snapshot.next_retry or 0.0
        told = dataclasses.replace(_told(facts, decision), state=state.value, error=error, next_look=due)
        # As it is after the step, which the facts are from before of.
        status.store(self._status, dataclasses.replace(told, out_of_service=journal.out_of_service(self._journal)))

    def _load(self) -> dict[str, int]:
        if self._counts is None:
            try:
                data = json.loads(self._counters.read_bytes())
                self._counts = {key: value for key, value in data.items() if isinstance(value, int)}
            except (OSError, ValueError, AttributeError):
                self._counts = {}  # counts are not worth a word when they are lost
        return self._counts

    def _count(self, name: str) -> None:
        self._set(name, self._load().get(name, 0) + 1)

    def _set(self, name: str, value: int) -> None:
        counts = self._load()
        counts[name] = value
        # A full disk is told as the failure of a step; that it cannot be counted as well ends no agent.
        with contextlib.suppress(Failure):
            files.write_atomic(self._counters, json.dumps(counts).encode())


def _told(facts: Facts, decision: Decision) -> Status:
    """What people are shown of a decision."""
    desired, current, update = facts.desired, facts.current, facts.update
    failed, confirmed = facts.journal.failed, facts.journal.confirmed
    return Status(
        state=_state(facts, decision).value,
        step=decision.step.value,
        why=decision.why,
        at=time.time(),
        current=current.name if current else "",
        desired=desired.config.name if desired else "",
        update=update.name if update else "",
        os_image=current.os_image if current else "",
        digest=_digest(facts),
        target_digest=update.digest if update else "",
        release_image=desired.release_image if desired else "",
        overridden_by=desired.overridden_by if desired else "",
        hold=facts.observation.hold if decision.step is Step.HOLD else "",
        failed=str(failed) if failed else "",
        failed_config=failed.name if failed else "",
        failed_digest=failed.digest if failed else "",
        failed_at=failed.at if failed else 0,
        health=facts.observation.health.value if _arrived(facts) else "",
        stood_back=bool(facts.observation.stood_back),
        confirmed=confirmed.name if confirmed else "",
        confirmed_at=confirmed.at if confirmed else 0,
        warnings=_warnings(facts),
        host=facts.versions.texts(),
    )


def _state(facts: Facts, decision: Decision) -> State:
    if decision.step is Step.REJECT:
        return State.UNRECONCILABLE
    if decision.step is Step.HOLD and (facts.observation.failed_before or decision.degraded):
        return State.DEGRADED
    if decision.step is Step.REST:
        return State.DEGRADED if decision.degraded else State.DONE
    return State.WORKING


def _digest(facts: Facts) -> str:
    """What the booted OS is pinned to: of a target that is not confirmed yet, what it was staged as."""
    return (facts.update.digest if _arrived(facts) and facts.update else "") or facts.journal.digest


def _arrived(facts: Facts) -> bool:
    """Whether a target is booted that is not confirmed yet."""
    return facts.observation.booted is Booted.TARGET and facts.update is not None


def _warnings(facts: Facts) -> tuple[str, ...]:
    missing = f"{facts.source} is not there" if facts.desired is None and not Path(facts.source).is_dir() else ""
    return tuple(text for text in (facts.alien, missing, _same_image(facts), *facts.notes, *facts.remarks) if text)


def _same_image(facts: Facts) -> str:
    """Another config may well repair what was wrong, so it is tried; but it goes to an image that has failed once."""
    failed, update = facts.journal.failed, facts.update
    if failed is None or update is None or not failed.digest or failed.desired == update.desired:
        return ""
    return (
        f"it goes to {update.digest}, which has failed before, with {failed}" if update.digest == failed.digest else ""
    )


def _hold(facts: Facts, decision: Decision) -> Optional[HoldReason]:
    if decision.step is not Step.HOLD:
        return None
    if facts.observation.failed_before:
        return HoldReason.FAILED_BEFORE
    return facts.held.reason if isinstance(facts.held, Held) else None
