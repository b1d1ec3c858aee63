"""The guard against an OS that is older than the booted one. Pure.

rpm-ostree has none for container images (rpm-ostree.md 7, row 56). The default lets an older OS through and says so:
going back to an older rendered config is how a pool is taken back, and the machine-config-daemon goes there without a
word; a node that refuses is one that stays behind when a bad release is withdrawn. Where an old OS must never come back
(a fixed hole, data of a newer version), the settings refuse it. A rollback by ourselves never passes here.
"""

from __future__ import annotations

import datetime
import re
from typing import Optional

from mcdaemon.errors import Irreconcilable
from mcdaemon.image.description import Description

FIELD = "/spec/osImageURL"

_NUMBERS = re.compile(r"\d+(?:[.-]\d+)*", re.ASCII)


def numbers(version: str) -> Optional[tuple[int, ...]]:
    """A version as numbers, for comparison; None for one of an unknown form.

    RHCOS has 417.94.202410160352-0 and 9.6.20250523-0, FCOS 41.20250105.3.0; both are ordered by their components.
    """
    text = version.strip()
    return tuple(int(part) for part in re.split(r"[.-]", text)) if _NUMBERS.fullmatch(text) else None


def moment(created: str) -> Optional[float]:
    """RFC 3339 as seconds since the epoch; None for anything else."""
    found = re.fullmatch(r"(\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d)(?:\.\d+)?(Z|[+-]\d\d:\d\d)", created.strip())
    if not found:
        return None
    try:
        zone = "+00:00" if found[2] == "Z" else found[2]
        return datetime.datetime.fromisoformat(found[1].replace(" ", "T") + zone).timestamp()
    except ValueError:
        return None


def older(target: Description, version: str, timestamp: float) -> str:
    """Why the target is older than what is booted, "" when it is not or when that cannot be told.

    `version` and `timestamp` (seconds since the epoch, 0 when not known) are the booted deployment's. Versions decide
    where both have one that can be compared; only else the time at which the image was made does, because the same
    version may be built twice, and an older one again.
    """
    new, old = numbers(target.version), numbers(version)
    if new is not None and old is not None and _same_kind(new, old):
        return f"version {target.version} is older than the booted {version}" if new < old else ""
    made = moment(target.created)
    if made is not None and timestamp and made < timestamp:
        return f"it was made at {target.created}, before the booted one ({described('', timestamp).created})"
    return ""


def described(version: str, timestamp: float) -> Description:
    """A deployment as its image would be described."""
    if not timestamp:
        return Description(version)
    made = datetime.datetime.fromtimestamp(timestamp, datetime.timezone.utc)
    return Description(version, made.strftime("%Y-%m-%dT%H:%M:%SZ"))


def refusal(name: str, why: str) -> Irreconcilable:
    """The error for a config `name` that would bring back an older OS."""
    return Irreconcilable(
        f"cannot go to {name}: {FIELD}: the OS would go back: {why}",
        FIELD,
        "os.downgrade in the settings of mcdaemon refuses that",
    )


def incomparable(target: Description, version: str, timestamp: float) -> bool:
    """Whether nothing that both have says which one is older."""
    new, old = numbers(target.version), numbers(version)
    versions = new is not None and old is not None and _same_kind(new, old)
    return not versions and not (moment(target.created) is not None and timestamp)


def _same_kind(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Whether both follow one scheme. RHCOS went from 417.94.DATE to 9.6.DATE, and 41.DATE is Fedora's: between those
    the order of the numbers says nothing about age."""
    return _scheme(one) == _scheme(other)


def _scheme(version: tuple[int, ...]) -> tuple[bool, int]:
    """OpenShift's release has three digits; a date (eight or more) is in the second place or the third."""
    dates = [place for place, number in enumerate(version) if number >= 10_000_000]
    return version[0] >= 400, dates[0] if dates else -1
