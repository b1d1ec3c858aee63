"""What the last round found and did, as one small file that `mcdaemon status` shows; it lives in /run."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

from mcdaemon.errors import from_os_error
from mcdaemon.host import files

OUT_OF_SERVICE = "the node is out of service (drained)"


@dataclass(frozen=True)
class Status:
    """Names and sentences only, no secrets. Times are seconds since the epoch.

    :ivar overridden_by: the config whose OS image hides `release_image`, "" when none does (incident 3).
    :ivar health: verdict on a target that is booted and not confirmed yet, "" when there is none.
    :ivar failed: the target that is not tried again by itself, and why; also while another config is worked on.
    :ivar stood_back: somebody chose to boot an older deployment than the confirmed one.
    :ivar confirmed: the config of the last update that was kept.
    :ivar host: version of each program of the host that an update goes through, "" where it is not known.
    :ivar out_of_service: workloads are away, or on their way: the node drains, is drained, or did not come back yet.
    :ivar digest: what the booted OS was confirmed to be; `target_digest`: what the update in flight goes to.
    """

    state: str
    step: str
    why: str
    at: float
    next_look: float = 0.0
    current: str = ""
    desired: str = ""
    update: str = ""
    os_image: str = ""
    digest: str = ""
    target_digest: str = ""
    release_image: str = ""
    overridden_by: str = ""
    hold: str = ""
    error: str = ""
    failed: str = ""
    failed_config: str = ""
    failed_digest: str = ""
    failed_at: int = 0
    health: str = ""
    stood_back: bool = False
    confirmed: str = ""
    confirmed_at: int = 0
    out_of_service: bool = False
    warnings: tuple[str, ...] = field(default=())
    host: Mapping[str, str] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """For people: what, why, and what is wrong."""
        found = [f"{self.state}: {self.why}"]
        found.append(f"  current config   {self.current or 'none yet'}")
        found.append(f"  desired config   {self.desired or 'none'}")
        if self.update:
            found.append(f"  update           {self.update} ({self.step})")
        if self.out_of_service:
            found.append(f"  {OUT_OF_SERVICE}")
        if self.os_image:
            pinned = f", pinned to {self.digest}" if self.digest else ""
            found.append(f"  OS image         {self.os_image}{pinned}")
        if self.overridden_by:
            hidden = f"; it hides the release's image {self.release_image}" if self.release_image else ""
            found.append(f"  OS overridden    by {self.overridden_by}{hidden}")
        if self.target_digest and self.target_digest != self.digest:
            found.append(f"  goes to          {self.target_digest}")
        if self.confirmed:
            found.append(f"  confirmed        {self.confirmed}{_when(self.confirmed_at)}")
        for title, text in (("waits for", self.hold), ("last error", self.error), ("failed target", self.failed)):
            if text:
                found.append(f"  {title:<16} {text}")
        if self.failed:
            found.append(f"  failed with      {self.failed_digest or 'the OS image as it was'}{_when(self.failed_at)}")
        return found + [f"  warning          {text}" for text in self.warnings]


def _when(moment: int) -> str:
    """ ", DATE TIME" in UTC, "" where it is not known."""
    return time.strftime(", %Y-%m-%d %H:%M:%S UTC", time.gmtime(moment)) if moment else ""


def store(path: Path, status: Status) -> None:
    files.write_atomic(path, json.dumps(dataclasses.asdict(status), indent=1).encode() + b"\n", 0o644)


def load(path: Path) -> Optional[Status]:
    """The last status, None when no round was made in this boot or the file is not ours."""
    try:
        data: Any = json.loads(path.read_bytes())
        return Status(**{**data, "warnings": tuple(data.get("warnings", ()))})
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, AttributeError, RecursionError):
        return None
    except OSError as error:
        raise from_os_error(error, "read", path) from error
