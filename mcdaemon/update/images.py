"""The images that an update will read: checked before anything changes, and held while they are needed.

A failed check is remembered with the moment when the next one is due, so that a node that waits for an image asks the
registry rarely and with jitter, however often the loop runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Optional

from mcdaemon.errors import Failure, Held, Transient
from mcdaemon.image.resolve import Resolution, Resolver, Source
from mcdaemon.image.storage import Storage
from mcdaemon.retry import Backoff

_MARGIN = 0.05
"""Seconds by which a timer may be early and the look still be due."""


@dataclass(frozen=True)
class Waiting:
    """Why an image cannot be used now, and when (monotonic seconds) it is looked for again."""

    error: Failure
    until: float


class Images:
    """Checks and holds, with a memory for what was found out."""

    def __init__(
        self, resolver: Resolver, storage: Storage, backoff: Backoff, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._resolver = resolver
        self._storage = storage
        self._backoff = backoff
        self._clock = clock
        self._found: dict[str, Resolution] = {}
        self._without_storage = False
        self._waiting: dict[str, Waiting] = {}
        self.seconds = 0.0

    def check(self, pullspec: str, digest: str = "") -> Resolution:
        """Where `pullspec` (pinned to `digest`, when that was settled before) is complete.

        Raises Held, with the time of the next look, when it is complete nowhere; the answer, good or bad, is kept
        until it is due again or `forget` is called.
        """
        key = f"{pullspec}@{digest}"
        if key in self._found:
            return self._found[key]
        waiting = self._waiting.get(key)
        if waiting is not None and self._clock() < waiting.until:
            # The same error is raised in every round: without this its traceback grows, and keeps all their frames.
            raise waiting.error.with_traceback(None)
        started = self._clock()
        try:
            resolution = self._resolver.resolve(pullspec, digest, without_storage=self._without_storage)
            if not resolution.complete:
                raise resolution.held()
        except (Held, Transient) as error:
            delay = self._backoff.next(key, error.retry_after)
            self._waiting[key] = Waiting(error, self._clock() + delay)
            raise
        finally:
            self.seconds = self._clock() - started
        self._waiting.pop(key, None)
        self._backoff.reset(key)
        self._found[key] = resolution
        return resolution

    def next_look(self) -> Optional[float]:
        """The earliest moment (monotonic seconds) at which a missing image is looked for again.

        To be asked after a round. What was due before its end and was not looked for is not wanted any more (another
        config is desired): it is no reason to wake up.
        """
        now = self._clock()
        return min((waiting.until + _MARGIN for waiting in self._waiting.values() if waiting.until > now), default=None)

    def forget(self) -> None:
        """Look again at everything: a stage failed, the desired config changed, or somebody asked."""
        self._resolver.forget()
        self._found.clear()
        self._waiting.clear()

    def hold(self, pullspec: str, digest: str, update: str) -> Resolution:
        """Check again with the local copy held, so that garbage collection cannot win between check and use.

        Raises Held when nobody has the image any more.
        """
        self.forget()
        resolution = self.check(pullspec, digest)
        chosen = resolution.chosen
        if chosen is None or chosen.source is not Source.STORAGE:
            return resolution
        try:
            self._storage.hold(resolution.reference, resolution.digest, update)
        except Failure:
            # It went away in between, or podman is broken: who else has it?
            self.distrust_storage()
        self.forget()
        return self.check(pullspec, resolution.digest)

    def distrust_storage(self) -> None:
        """From now on the local copies do not count: staging from one failed, or it could not be held."""
        if not self._without_storage:
            self._without_storage = True
            self.forget()

    def trust_storage(self) -> None:
        """Another update: local copies count again."""
        self._without_storage = False

    def release(self, update: str) -> None:
        self._storage.release(update)

    def release_unknown(self, known: set[str]) -> tuple[str, ...]:
        """Drop holds that no journal knows (a crash between hold and journal is impossible, a lost journal is not)."""
        return tuple(str(hold) for hold in self._storage.release_unknown(known))
