"""Every way in which mcdaemon can fail, and the one place that maps foreign errors to them.

Four classes, because the agent can do four things about a failure: try again soon (`Transient`), keep the node as it is
and wait (`Held`), refuse the target (`Irreconcilable`), or ask a human (`Broken`). Each carries a code for machines, a
sentence that begins with "cannot", and a hint what to do.
"""

from __future__ import annotations

import enum
import errno
from typing import Optional


class HoldReason(enum.Enum):
    """Why a node keeps its current config although another one is desired."""

    IMAGE = "image"
    CREDENTIALS = "credentials"
    REGISTRY = "registry"
    POLICY = "policy"
    SPACE = "space"
    OTHER_CLIENT = "other-client"
    OTHER_AGENT = "other-agent"
    DRAIN = "drain"
    INHIBITED = "inhibited"
    FAILED_BEFORE = "failed-before"
    SETTINGS = "settings"
    DESIRED_UNREADABLE = "desired-unreadable"


class Failure(Exception):
    """Base of all errors raised on purpose.

    `sentence` begins with "cannot" and names the place, `hint` says what to do, `code` is stable for machines.
    """

    code = "failure"

    def __init__(self, sentence: str, hint: str = "", code: str = "") -> None:
        super().__init__(sentence)
        self.sentence = sentence
        self.hint = hint
        if code:
            self.code = code

    def __str__(self) -> str:
        return f"{self.sentence} ({self.hint})" if self.hint else self.sentence


class Transient(Failure):
    """May succeed when tried again; `retry_after` (seconds) is what the other side asked for, if it did."""

    code = "transient"

    def __init__(self, sentence: str, hint: str = "", code: str = "", retry_after: Optional[float] = None) -> None:
        super().__init__(sentence, hint, code)
        self.retry_after = retry_after


class Held(Failure):
    """The node keeps serving on its current config until something outside changes."""

    code = "held"

    def __init__(self, reason: HoldReason, sentence: str, hint: str = "", retry_after: Optional[float] = None) -> None:
        super().__init__(sentence, hint, f"held-{reason.value}")
        self.reason = reason
        self.retry_after = retry_after


class Irreconcilable(Failure):
    """The desired config cannot be reached from the current one, or cannot be understood; `field` is a JSON pointer."""

    code = "irreconcilable"

    def __init__(self, sentence: str, field: str = "", hint: str = "") -> None:
        super().__init__(sentence, hint)
        self.field = field


class Broken(Failure):
    """Neither waiting nor trying again helps; a human, or a rollback, has to."""

    code = "broken"


# What the kernel says when a disk is full or failing for now; everything else needs a human.
_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})
_PASSING = frozenset({errno.EAGAIN, errno.EBUSY, errno.EINTR, errno.ETIMEDOUT, errno.ENOMEM})


def from_os_error(error: OSError, doing: str, place: object) -> Failure:
    """Map an OSError met while `doing` something at `place` ("cannot write /etc/x: No space left on device")."""
    sentence = f"cannot {doing} {place}: {error.strerror or error}"
    if error.errno in _SPACE:
        return Held(HoldReason.SPACE, sentence, "free space there; then it is tried again")
    if error.errno in _PASSING:
        return Transient(sentence)
    if error.errno == errno.EROFS:
        return Broken(sentence, "the file system is read-only; see the kernel log")
    return Broken(sentence)
