"""The one helper that retries: waits that grow, with jitter, bounded at both ends; tenacity does the arithmetic."""

from __future__ import annotations

import math
import random
from typing import Optional

from tenacity import RetryCallState, Retrying
from tenacity.wait import wait_exponential

_LONGEST_ASKED = 3600.0


class Backoff:
    """How long to wait before something is tried again, per subject.

    Many nodes lose the same image at the same moment: jitter over the whole wait, from the first one on, keeps them
    from asking again at the same moment.
    """

    def __init__(self, least: float, most: float, rng: Optional[random.Random] = None) -> None:
        """`least`, `most`: bounds in seconds."""
        self._least = least
        self._most = most
        # The first window is twice the least wait: a window that ends at the least has no room for jitter.
        self._window = wait_exponential(multiplier=2 * least, max=most)
        self._random = rng or random.Random()
        self._attempts: dict[str, int] = {}

    def next(self, subject: str, asked: Optional[float] = None) -> float:
        """Seconds until the next attempt. `asked`: what the other side asked for (`Retry-After`); it is honoured up to
        an hour and gets jitter on top, never less."""
        attempt = self._attempts.get(subject, 0) + 1
        self._attempts[subject] = attempt
        state = RetryCallState(Retrying(), None, (), {})
        state.attempt_number = attempt
        delay = self._random.uniform(self._least, max(self._least, self._window(state)))
        if asked is not None and not math.isnan(asked):
            return max(delay, min(asked, _LONGEST_ASKED) * (1 + self._random.random() / 4))
        return delay

    def reset(self, subject: str) -> None:
        self._attempts.pop(subject, None)
