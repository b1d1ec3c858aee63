"""The health gate: whether a freshly booted target may be kept.

The verdict is PENDING until every check has been good in two looks that are `settle_seconds` apart, with no unit
restarted in between (a unit that is up now and dead in two seconds is not healthy), and BAD when something is wrong
after the deadline. A GOOD one is final for this boot: what happens later is drift, or trouble, but not the update's.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Optional

from mcdaemon.decide import Health
from mcdaemon.errors import Failure
from mcdaemon.host import files
from mcdaemon.host.bus import Systemd, UnitState
from mcdaemon.host.greenboot import Scripts
from mcdaemon.host.kubelet import Kubelet, Unreachable

RECORD = "health.json"
"""In the runtime directory: what the looks of this boot have found, over restarts of the agent."""


@dataclass(frozen=True)
class Look:
    """What one look has found.

    :ivar trouble: what is not healthy, "" when all is well.
    :ivar starts: per unit a word that changes with each start, by which a restart between two looks shows.
    :ivar wanted: what may be wrong without taking the target back.
    :ivar excused: the trouble is one that never takes the target back (an API server that is away, by the settings).
    """

    trouble: str = ""
    starts: tuple[str, ...] = ()
    wanted: tuple[str, ...] = ()
    excused: bool = False


@dataclass(frozen=True)
class Record:
    """The looks of this boot. Times are monotonic seconds.

    :ivar update: the update whose target is looked at; of another one the record does not count.
    :ivar first: the first look; the deadline counts from there, not from a restart of the agent.
    :ivar good_since: the first of the good looks in a row, None while something is wrong.
    """

    update: str
    first: float
    good_since: Optional[float] = None
    starts: tuple[str, ...] = ()
    good: bool = False
    wanted: tuple[str, ...] = ()


@dataclass(frozen=True)
class Gate:
    """`timeout`: seconds from the first look to the deadline; `settle`: seconds for which all has to stay well."""

    path: Path
    timeout: float
    settle: float
    clock: Callable[[], float] = time.monotonic

    def verdict(self, update: str, look: Callable[[], Look]) -> tuple[Health, str]:
        """(verdict, what is not healthy yet), and the record is brought up to date."""
        record = self._load(update)
        if record.good:
            return Health.GOOD, ""
        found = look()
        now = self.clock()
        flapping = "" if record.good_since is None else _restarted(record.starts, found.starts)
        trouble = found.trouble or flapping
        since = now if flapping or record.good_since is None else record.good_since
        good = not trouble and now - since >= self.settle
        changed = Record(update, record.first, None if found.trouble else since, found.starts, good, found.wanted)
        self._store(changed)
        if good:
            return Health.GOOD, ""
        if not trouble:
            return Health.PENDING, f"all is well for {now - since:.0f} s; it has to stay so for {self.settle:g} s"
        late = now >= record.first + self.timeout and not found.excused
        return (Health.BAD if late else Health.PENDING), trouble

    def _load(self, update: str) -> Record:
        record, now = _read(self.path), self.clock()
        if record is None or record.update != update or not 0 <= record.first <= now:
            record = Record(update, now)
            self._store(record)  # before the first look: the time runs also when that ends the agent
        return record

    def _store(self, record: Record) -> None:
        files.write_atomic(self.path, json.dumps(dataclasses.asdict(record)).encode())


def told(runtime: Path) -> tuple[str, ...]:
    """What the wanted scripts have complained about in this boot: told for as long as it lasts."""
    record = _read(runtime / RECORD)
    return record.wanted if record is not None else ()


def _read(path: Path) -> Optional[Record]:
    """None also for one that is not ours: the time limit starts again, which harms less than no way back."""
    try:
        data = json.loads(path.read_bytes())
        record = Record(**{**data, "starts": tuple(data["starts"]), "wanted": tuple(data["wanted"])})
        return record if math.isfinite(record.first + (record.good_since or 0.0)) else None
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def _restarted(before: Sequence[str], after: Sequence[str]) -> str:
    """Which units were started again between two good looks."""
    named = [new.partition(" ")[0] for old, new in zip(before, after) if old != new]
    return f"{', '.join(named)} was restarted meanwhile" if named and len(before) == len(after) else ""


@dataclass(frozen=True)
class Checks:
    """What has to be well. `kubelet` None: nobody is asked. `api_may_be_away`: that alone takes no target back."""

    systemd: Systemd
    units: Sequence[str]
    scripts: Scripts
    kubelet: Optional[Kubelet] = None
    api_may_be_away: bool = False

    @property
    def exist(self) -> bool:
        """Whether there is something that needs time to show that it is stable."""
        return bool(self.units) or self.kubelet is not None or self.scripts.present()

    def look(self) -> Look:
        """One look at everything, the cheap things first; the rest is not asked while something is wrong."""
        states = [(unit, self._state(unit)) for unit in self.units]
        trouble = "; ".join(filter(None, (complaint(unit, state) for unit, state in states)))
        starts = tuple(
            f"{unit} {state.restarts} {state.invocation}" for unit, state in states if isinstance(state, UnitState)
        )
        if trouble:
            return Look(trouble, starts)
        excused = False
        if self.kubelet is not None:
            try:
                trouble = self.kubelet.trouble()
            except Unreachable as error:
                trouble, excused = str(error), self.api_may_be_away
        if trouble and not excused:
            return Look(trouble, starts)
        failing = self.scripts.required()
        if failing or trouble:
            return Look("; ".join(filter(None, (failing, trouble))), starts, excused=not failing)
        return Look("", starts, self.scripts.wanted())

    def _state(self, unit: str) -> object:
        try:
            return self.systemd.unit_state(unit)
        except Failure as error:
            return error


_LOADED = {
    "not-found": "does not exist on this OS",
    "masked": "is masked",
    "bad-setting": "cannot be loaded: a setting in its files is wrong",
    "error": "cannot be loaded",
}


def complaint(unit: str, state: object) -> str:
    """What is wrong with a unit in this state (or with asking for it), "" when it is well."""
    if not isinstance(state, UnitState):
        return str(state)
    if state.load in _LOADED and state.active != "active":
        return f"{unit} {_LOADED[state.load]}"
    if state.sub == "auto-restart":
        return f"{unit} keeps failing ({state.result}); it was restarted {state.restarts} times"
    if state.active == "active":
        return ""
    why = f", {state.result}" if state.result not in ("", "success") else ""
    return f"{unit} is {state.active} ({state.sub}{why})"
