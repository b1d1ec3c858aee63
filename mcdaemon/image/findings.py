"""What was found at one source of an image, in closed classes, and the error that carries such a class."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Optional

from mcdaemon.errors import Failure
from mcdaemon.image.description import Description

_SAID_LIMIT = 300


class Source(enum.Enum):
    """Where an image may come from, in the order in which it is looked for."""

    STORAGE = "containers-storage"
    MIRROR = "mirror"
    REGISTRY = "registry"


class Verdict(enum.Enum):
    """What a source amounts to. Only COMPLETE can be staged from."""

    COMPLETE = "complete"
    ABSENT = "absent"
    UNAUTHORIZED = "unauthorized"
    RATE_LIMITED = "rate-limited"
    UNREACHABLE = "unreachable"
    TLS = "tls"
    POLICY = "rejected by policy"
    INCOMPLETE = "incomplete"
    MALFORMED = "malformed"


@dataclass(frozen=True)
class Blob:
    """A config or a layer. `size` in bytes, as the manifest says. `elsewhere`: it comes from URLs outside the
    registry. `compressed`: it grows when it is unpacked.
    """

    digest: str
    size: int
    elsewhere: bool = False
    compressed: bool = True


@dataclass(frozen=True)
class Contents:
    """An image that a source holds completely: `digest` as asked for, `image_digest` for this platform, `size` in
    bytes, `layers` from the base up.
    """

    digest: str
    image_digest: str
    size: int
    layers: tuple[Blob, ...] = ()
    description: Description = Description()


@dataclass(frozen=True)
class Finding:
    """One source's answer. `reason` is for people: why not, or what to know about a complete one.

    `digest` is the manifest that was asked for; `image_digest` the one for this platform (the same unless `digest` is
    an index). `retry_after` in seconds, where the source asked for patience. `size` in bytes: config and layers.
    `contents`: of a complete one.
    """

    source: Source
    place: str
    verdict: Verdict
    reason: str = ""
    digest: str = ""
    retry_after: Optional[float] = None
    image_digest: str = ""
    size: int = 0
    contents: Optional[Contents] = None

    @property
    def complete(self) -> bool:
        return self.verdict is Verdict.COMPLETE

    def __str__(self) -> str:
        where = self.source.value if self.place in ("", self.source.value) else f"{self.source.value} {self.place}"
        return f"{where}: {self.verdict.value}" + (f" ({self.reason})" if self.reason else "")


class Unavailable(Failure):
    """A source does not hold the image, in the class `verdict`.

    `opened`: its manifest could be read, so that containers/image would stay with this source and fail there, instead
    of going on to the next one (docker_image_src.go: only opening falls through).
    """

    code = "image-unavailable"

    def __init__(
        self, verdict: Verdict, reason: str, retry_after: Optional[float] = None, opened: bool = False
    ) -> None:
        super().__init__(f"cannot use this source: {reason}")
        self.verdict = verdict
        self.reason = reason
        self.retry_after = retry_after
        self.opened = opened


def printable(said: str) -> str:
    """What a foreign program or server said, fit for one line of a log: bounded, no control characters."""
    one_line = "".join(c if c.isprintable() else " " for c in said).strip()
    return one_line if len(one_line) <= _SAID_LIMIT else one_line[:_SAID_LIMIT] + "..."
