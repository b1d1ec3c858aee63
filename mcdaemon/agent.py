"""The loop: observe, decide, perform; then wait until something happens or it is time to look again.

There is only one thread that does anything to the node, this one. After a crash at any point the next round observes
and decides afresh; there is no resume code. Every round ends in one sentence: what was decided and why.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Optional

from gi.repository import Gio, GLib

from mcdaemon.context import Context
from mcdaemon.decide import Booted, Decision, Step, decide
from mcdaemon.errors import Broken, Failure, Held, Transient, from_os_error
from mcdaemon.host import files, process, turns
from mcdaemon.observe import Facts, Observer
from mcdaemon.perform import TARGET_FAILED, Performer
from mcdaemon.report.notify import Notifier, watchdog_interval
from mcdaemon.reporter import Reporter
from mcdaemon.retry import Backoff
from mcdaemon.update import early, journal
from mcdaemon.update.early import Outcome

log = logging.getLogger("mcdaemon")

_PATIENT = frozenset({Step.REST, Step.REJECT, Step.HOLD})
"""Steps without an effect: the next round waits for an event or the timer."""

_HEALTH_SECONDS = 2.0
"""Between two looks at a freshly booted target: the node is out of service until it is found healthy."""

_REBOOTING = frozenset({Step.REBOOT, Step.ROLL_BACK})
"""Steps after which the machine goes down."""


class Agent:
    """One node's agent."""

    def __init__(self, context: Context, reporter: Reporter, notifier: Notifier) -> None:
        self._context = context
        self._reporter = reporter
        self._notifier = notifier
        self._observer = Observer(context)
        self._performer = Performer(context)
        hold = context.settings.hold
        self._backoff = Backoff(hold.retry_min_seconds, hold.retry_max_seconds)
        self._held: Optional[Failure] = None
        self._arriving = False
        self._next = 0.0
        self._look_again: Optional[float] = None
        self._said = ""

    # -- rounds -----------------------------------------------------------------------------------------------------

    def round(self) -> Optional[Decision]:
        """One round; None when the node could not even be observed. Never raises a Failure: it is reported."""
        if self._held is not None and time.monotonic() >= self._next:
            self._held = None
        try:
            self._mend()
            self._performer.retry_if_asked()
            facts = self._observer.observe(self._held)
        except Failure as error:
            self._put_off("observe", error)
            if self._performer.leaving:
                # The machine goes down, and its services with it: that is no trouble.
                self._say(str(error), logging.DEBUG)
                return None
            self._reporter.trouble(error, self._next)
            self._say(str(error), logging.ERROR)
            return None
        decision = decide(facts.observation)
        self._arriving = facts.observation.booted is Booted.TARGET and decision.step is Step.HOLD
        self._look_again = self._when_to_look(facts, decision)
        self._reporter.decided(facts, decision, self._next_look(facts))
        self._say(f"{decision.step.value}: {decision.why}", _level(decision))
        self._perform(decision, facts)
        return decision

    def _mend(self) -> None:
        """A journal can be damaged at any time, by a disk or by hand: as at the start, what was in flight is told by
        what it left."""
        if journal.load(self._context.journal)[1]:
            self._sweep()

    def _perform(self, decision: Decision, facts: Facts) -> None:
        """Take the step; a failure puts the next round off, but a target that proved impossible is dropped at once."""
        started = time.monotonic()
        try:
            self._performer.perform(decision, facts)
        except Failure as error:
            if error.code != TARGET_FAILED:
                self._put_off(decision.step.value, error)
            self._reporter.failed(facts, decision, error, self._next)
            self._say(str(error), logging.WARNING if isinstance(error, (Held, Transient)) else logging.ERROR)
            return
        if decision.step not in _PATIENT:
            self._backoff.reset(decision.step.value)
            self._reporter.performed(facts, decision, time.monotonic() - started)

    def _put_off(self, subject: str, error: Failure) -> None:
        """Do not try again before it makes sense."""
        asked = error.retry_after if isinstance(error, (Held, Transient)) else None
        self._held = error
        self._next = time.monotonic() + self._backoff.next(subject, asked)
        if isinstance(error, (Held, Transient)):
            self._context.images.forget()

    def _when_to_look(self, facts: Facts, decision: Decision) -> Optional[float]:
        """When (monotonic) to look again at what was seen to stand in the way: too little room, another agent. A step
        that failed, and an image that is missing, have their own times."""
        seen = decision.step is Step.HOLD and facts.held is not None
        if not seen or self._held is not None or self._context.images.next_look() is not None:
            self._backoff.reset("look")
            return None
        return time.monotonic() + self._backoff.next("look")

    def _next_look(self, facts: Facts) -> float:
        """When (monotonic seconds) the next round is due by itself."""
        due = [time.monotonic() + (_HEALTH_SECONDS if self._arriving else self._context.settings.loop.interval_seconds)]
        if self._held is not None:
            due.append(self._next)
        if self._look_again is not None:
            due.append(self._look_again)
        looking = self._context.images.next_look()
        if looking is not None and facts.observation.hold:
            due.append(looking)
        return max(time.monotonic(), min(due))

    def _say(self, sentence: str, level: int) -> None:
        """One sentence per round; the same one again only says nothing new."""
        self._notifier.status(sentence)
        if sentence != self._said:
            log.log(level, sentence)
            self._said = sentence

    # -- once, and for ever -----------------------------------------------------------------------------------------

    def run_once(self) -> tuple[Optional[Decision], Optional[Failure]]:
        """Rounds until there is nothing to do now: at rest, held, rejected, or on the way into a reboot.

        Raises KeyboardInterrupt after the step during which Ctrl-C, SIGTERM or SIGHUP (a terminal that is gone) came.
        """
        self._prepare()
        with _interrupts_noted() as noted:
            process.on_wait(self._notifier.watchdog, lambda: bool(noted))
            while True:
                decision = self.round()
                if noted:
                    raise KeyboardInterrupt
                if decision is None:
                    return None, self._held
                if decision.step in _PATIENT or decision.step in _REBOOTING or self._held is not None:
                    return decision, self._held

    def run(self, before_waiting: Callable[[], None] = lambda: None) -> None:
        """Rounds until SIGTERM. `before_waiting` is called whenever there is nothing to do for now."""
        self._prepare()
        waker = _Waker(Path(self._context.settings.source.directory.path), self._notifier)
        process.on_wait(self._notifier.watchdog, waker.has_to_end)
        try:
            self._notifier.ready("started")
            while not waker.stopped:
                decision = self.round()
                waker.beat()
                if decision is not None and decision.step not in _PATIENT | _REBOOTING and self._held is None:
                    continue
                if decision is not None and decision.step is Step.REST:
                    # At rest nothing of ours keeps rpm-ostreed in memory.
                    with contextlib.suppress(Transient):
                        self._context.rpmostree.disconnect()
                before_waiting()
                waker.wait(self._due() - time.monotonic())
        finally:
            self._notifier.stopping()
            waker.close()

    def _due(self) -> float:
        interval = _HEALTH_SECONDS if self._arriving else self._context.settings.loop.interval_seconds
        due = time.monotonic() + interval
        if self._look_again is not None:
            due = min(due, self._look_again)
        looking = self._context.images.next_look()
        return min(due, self._next if self._held is not None else due, looking if looking is not None else due)

    def _prepare(self) -> None:
        process.on_wait(self._notifier.watchdog)
        make_places(self._context)
        self._settle()
        self._sweep()

    def _sweep(self) -> None:
        alien = self._performer.sweep()
        if alien:
            self._observer.alien = alien
            log.error(alien)

    def _settle(self) -> None:
        """The early unit may have been killed, or be switched off: what it had to do is done now, and the reboot that
        it would have asked for comes by itself, because services have read files that are replaced only here."""
        if self._context.settled.exists():
            return
        try:
            outcome = settle(self._context)
        except Failure as error:
            log.error(str(error))
        else:
            log.log(logging.WARNING if outcome.reboot else logging.INFO, "%s: %s", outcome.action.value, outcome.why)


@contextlib.contextmanager
def _interrupts_noted() -> Iterator[list[int]]:
    """Signals that ask for the end are noted, and honoured between steps and inside of long waits: raised wherever they
    happen to arrive, they would leave children behind."""
    noted: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _frame: noted.append(number))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Waker:
    """Waits in GLib's main loop: for the timer, a signal, a change of the source, and the watchdog's beat."""

    def __init__(self, source: Path, notifier: Notifier) -> None:
        self.stopped = False
        self._woken = False
        self._notifier = notifier
        self._loop = GLib.MainLoop()
        # Not GLib's own signal sources: those are told by a thread, so that a signal could be noticed a step too late.
        self._before = {
            signal.SIGTERM: signal.signal(signal.SIGTERM, self._stop),
            signal.SIGINT: signal.signal(signal.SIGINT, self._stop),
            signal.SIGHUP: signal.signal(signal.SIGHUP, self._reload),
        }
        interval = watchdog_interval()
        self._beat = GLib.timeout_add(int(interval * 500), self.beat) if interval else 0
        self._monitor = Gio.File.new_for_path(os.fspath(source)).monitor_directory(Gio.FileMonitorFlags.NONE, None)
        self._monitor.connect("changed", lambda *_: self._wake())

    def wait(self, seconds: float) -> None:
        """Return after `seconds`, or earlier when something happened."""
        timer = GLib.timeout_add(max(1, int(seconds * 1000)), self._expired)
        self._expiry = timer
        if not self.stopped and not self._woken:
            self._loop.run()
        self._woken = False
        if self._expiry:
            GLib.source_remove(timer)

    def has_to_end(self) -> bool:
        """Whether SIGTERM has come, also while a step waits for something."""
        return self.stopped

    def beat(self) -> bool:
        self._notifier.watchdog()
        return True

    def close(self) -> None:
        self._monitor.cancel()
        if self._beat:
            GLib.source_remove(self._beat)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _expired(self) -> bool:
        self._expiry = 0
        self._loop.quit()
        return False

    def _wake(self) -> bool:
        self._woken = True  # may come while a step waits for D-Bus, and must not be lost then
        self._loop.quit()
        return False

    def _stop(self, *_signal: object) -> None:
        self.stopped = True
        self._reload()

    def _reload(self, *_signal: object) -> None:
        # A source, not the quit itself: a signal may come just before the loop begins to run, and must end it then.
        GLib.idle_add(self._wake, priority=GLib.PRIORITY_DEFAULT)


def _level(decision: Decision) -> int:
    return logging.WARNING if decision.step in (Step.HOLD, Step.REJECT, Step.DISCARD, Step.ROLL_BACK) else logging.INFO


def settle(context: Context) -> Outcome:
    """The early unit's work on this boot, and the note that it was done. Raises Failure."""
    outcome = early.run(context.machine, context.root, context.journal, context.payloads, context.undo)
    files.write_atomic(context.settled, b"")
    return outcome


def make_places(context: Context) -> None:
    for folder in (Path(context.settings.state_dir), context.runtime):
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            folder.chmod(0o700)  # somebody may have made it by hand, for the configs in it
            files.sync_directory(folder.parent)  # or the journal in it could be lost as a whole
        except OSError as error:
            raise from_os_error(error, "make the directory", folder) from error


@contextlib.contextmanager
def only_one(folder: Path) -> Iterator[None]:
    """Hold the lock that keeps a second agent off this node. Raises Broken naming the first."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise from_os_error(error, "open the lock in", folder) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            first = os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "another process"
            raise Broken(
                f"cannot start: mcdaemon already runs on this node as {first}",
                "use `mcdaemon status`, or stop mcdaemon.service first",
            ) from error
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} (`{_command()}`)\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def wake(folder: Path) -> bool:
    """Let the agent that runs look again at once; False when none runs."""
    try:
        with only_one(folder):
            return False
    except Broken:
        text, first = _named(folder / "lock")
        with contextlib.suppress(ProcessLookupError):
            if first and "--once" not in text:  # which looks before each step, and SIGHUP would end it
                os.kill(first, signal.SIGHUP)
        return True


def runs(folder: Path) -> bool:
    """Whether an agent holds the lock. Only looks: to try the lock could make an agent fail that starts just now.

    True also where that cannot be known: the lock was removed, or the question is an ordinary user's.
    """
    lock = folder / "lock"
    try:
        first = _named(lock)[1]
        held = lock.stat()
    except OSError:
        return True
    try:
        return first > 0 and any(os.path.samestat(held, other) for other in turns.open_in(first))
    except PermissionError:
        return True
    except OSError:
        return False


def _named(lock: Path) -> tuple[str, int]:
    """What the lock says, and the process that it names, 0 when none."""
    text = lock.read_text(errors="replace")
    words = text.split()
    return text, int(words[1]) if words[:1] == ["process"] and words[1:2] and words[1].isdigit() else 0


def _command() -> str:
    try:
        words = Path("/proc/self/cmdline").read_bytes().split(b"\0")
    except OSError:
        return "mcdaemon"
    return b" ".join(words).decode(errors="replace").strip()[:150]
