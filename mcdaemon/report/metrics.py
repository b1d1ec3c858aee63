"""The agent's metrics: one table, filled from one frozen snapshot.

The loop publishes a `Snapshot` after every round; a scrape reads the newest one and never touches the node. What ends
in `_total` counts over reboots too, because the loop keeps the counts in its state: an update that ends in a reboot
would never be seen by a counter that starts again at zero.

`mcd_*` are the names that the cluster's alerts and dashboards match on (machine-config-daemon's metrics; alerts
MCDRebootError, MCDPivotError, KubeletHealthState). Labels carry names, codes and closed sets only. Sentences of errors
stay in the journal: they are unbounded, and the metrics endpoint has readers that the journal has not.
"""

from __future__ import annotations

import bisect
import enum
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Callable, Optional

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from mcdaemon import __version__
from mcdaemon.decide import Health, Step
from mcdaemon.errors import HoldReason

TEXT_FORMAT = "text/plain; version=0.0.4; charset=utf-8"


class State(enum.Enum):
    """What the node is to the rest of the cluster; the values of the node annotation `state`."""

    DONE = "Done"
    WORKING = "Working"
    DEGRADED = "Degraded"
    UNRECONCILABLE = "Unreconcilable"


class Result(enum.Enum):
    """How an update ended."""

    DONE = "done"
    DISCARDED = "discarded"
    ROLLED_BACK = "rolled-back"
    REJECTED = "rejected"


@dataclass(frozen=True)
class Distribution:
    """How often a duration fell below each of `bounds` (seconds, ascending), as a histogram shows it."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...] = ()  # one per bound and one for what is above all of them; empty: nothing yet
    total: float = 0.0

    def observe(self, seconds: float) -> Distribution:
        """A copy with one more duration. A clock that was set back counts as zero."""
        seconds = max(seconds, 0.0)
        counts = list(self.counts or (0,) * (len(self.bounds) + 1))
        counts[bisect.bisect_left(self.bounds, seconds)] += 1
        return Distribution(self.bounds, tuple(counts), self.total + seconds)

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative counts by upper bound, the last one "+Inf"."""
        counts = self.counts or (0,) * (len(self.bounds) + 1)
        ends = [*(str(float(bound)) for bound in self.bounds), "+Inf"]
        return [(end, float(sum(counts[: place + 1]))) for place, end in enumerate(ends)]


# rpm-ostree takes from seconds (kernel arguments) to most of an hour (a full image over a slow line).
TRANSACTION = Distribution((1, 5, 15, 30, 60, 120, 300, 600, 1200, 2400))
# A check is a few small requests; what is above some seconds is a registry in trouble.
IMAGE_CHECK = Distribution((0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60))


@dataclass(frozen=True)
class Failed:
    """The target that is not tried again by itself: its config, the digest of its image, when it was given up."""

    config: str
    digest: str
    at: int


@dataclass(frozen=True)
class Snapshot:
    """What the loop knows after a round. Times are seconds since the epoch; None leaves the metric out.

    `last_error` is a `Failure.code`, never a sentence. `update_config` is the text that MCD puts into
    `mcd_update_state` ("MachineConfig: NAME / Image: PULLSPEC").
    """

    state: State
    state_since: float
    step: Step
    round_at: float
    current: str = ""
    desired: str = ""
    hold: Optional[HoldReason] = None
    held_since: Optional[float] = None
    next_retry: Optional[float] = None
    out_of_service_since: Optional[float] = None
    last_error: str = ""
    last_error_at: Optional[float] = None
    updates: Mapping[Result, int] = field(default_factory=dict)
    ended: Mapping[Result, int] = field(default_factory=dict)
    health: Optional[Health] = None
    stood_back: bool = False
    failed: Optional[Failed] = None
    reboots: int = 0
    reboots_failed: int = 0
    transactions: Distribution = TRANSACTION
    image_checks: Distribution = IMAGE_CHECK
    mismatches: int = 0
    retries: int = 0
    os_name: str = ""
    os_version: str = ""
    os_overridden: bool = False
    pivot_errors: int = 0
    kubelet_failures: Optional[int] = None
    drift_at: Optional[float] = None
    update_config: str = ""
    update_at: Optional[float] = None
    node: str = ""
    unsupported_packages: Optional[int] = None
    host: Mapping[str, str] = field(default_factory=dict)


HOST_PROGRAMS = ("rpm_ostree", "ostree", "podman", "skopeo")
_FAILING = frozenset({State.DEGRADED, State.UNRECONCILABLE})
_Samples = Iterable[tuple[tuple[str, ...], Optional[float]]]


@dataclass(frozen=True)
class Entry:
    """One line of the table: `read` gives (label values, value) of a snapshot at a time; a None value is left out."""

    name: str
    kind: str
    labels: tuple[str, ...]
    help: str
    read: Callable[[Snapshot, float], _Samples]

    def family(self, snapshot: Snapshot, now: float) -> Metric:
        """The samples of this line. A counter's family is named without the `_total` of its sample."""
        name = self.name[: -len("_total")] if self.kind == "counter" else self.name
        family = Metric(name, self.help, self.kind)
        for values, value in self.read(snapshot, now):
            if value is not None:
                family.add_sample(self.name, dict(zip(self.labels, values)), value)
        return family


def _one(value: Optional[float]) -> _Samples:
    return [((), value)]


def _age(since: Optional[float], now: float) -> _Samples:
    return _one(0.0 if since is None else max(now - since, 0.0))


def _which(chosen: Optional[enum.Enum], members: Iterable[enum.Enum]) -> _Samples:
    return [((str(member.value),), float(member is chosen)) for member in members]


def _named(value: Optional[float], *labels: str) -> _Samples:
    return [(labels, value)] if all(labels) else []


def _failed(failed: Optional[Failed]) -> _Samples:
    return [] if failed is None else [((failed.config, failed.digest), float(failed.at))]


# fmt: off
TABLE: tuple[Entry, ...] = (
    Entry("mcdaemon_build_info", "gauge", ("version",), "1, with the version of the agent.",
          lambda s, now: [((__version__,), 1)]),
    Entry("mcdaemon_host_info", "gauge", HOST_PROGRAMS, "1, with the versions of the host's programs.",
          lambda s, now: [(tuple(s.host.get(name.replace("_", "-"), "") for name in HOST_PROGRAMS), 1)]),
    Entry("mcdaemon_last_round_timestamp_seconds", "gauge", (), "When the loop last finished a round.",
          lambda s, now: _one(s.round_at)),
    Entry("mcdaemon_state", "gauge", ("state",), "1 for the state of the node, 0 for the others.",
          lambda s, now: _which(s.state, State)),
    Entry("mcdaemon_step", "gauge", ("step",), "1 for the step that was decided last, 0 for the others.",
          lambda s, now: _which(s.step, Step)),
    Entry("mcdaemon_config_info", "gauge", ("current", "desired"), "1, with the names of the two configs.",
          lambda s, now: [((s.current, s.desired), 1)]),
    Entry("mcdaemon_os_overridden", "gauge", (), "1 while a custom OS image hides the one of the release.",
          lambda s, now: _one(float(s.os_overridden))),
    Entry("mcdaemon_held_seconds", "gauge", (), "How long the update has waited for something outside; 0: it does not.",
          lambda s, now: _age(s.held_since, now)),
    Entry("mcdaemon_hold_reason", "gauge", ("reason",), "1 for what the update waits for, 0 for everything else.",
          lambda s, now: _which(s.hold, HoldReason)),
    Entry("mcdaemon_next_retry_timestamp_seconds", "gauge", (), "When the agent looks again by itself.",
          lambda s, now: _one(s.next_retry)),
    Entry("mcdaemon_health", "gauge", ("verdict",),
          "1 for the verdict on a booted target that is not confirmed yet; all 0: there is none.",
          lambda s, now: _which(s.health, Health)),
    Entry("mcdaemon_failed_target_timestamp_seconds", "gauge", ("config", "digest"),
          "When the target was given up that is not tried again by itself; left out: there is none.",
          lambda s, now: _failed(s.failed)),
    Entry("mcdaemon_last_update_timestamp_seconds", "gauge", ("result",), "When an update last ended in this way.",
          lambda s, now: [((result.value,), float(at)) for result, at in s.ended.items()]),
    Entry("mcdaemon_stood_back", "gauge", (), "1 while an older deployment than the confirmed one was chosen to boot.",
          lambda s, now: _one(float(s.stood_back))),
    Entry("mcdaemon_out_of_service_seconds", "gauge", (), "How long the update has kept work away; 0: it does not.",
          lambda s, now: _age(s.out_of_service_since, now)),
    Entry("mcdaemon_last_error_timestamp_seconds", "gauge", ("code",), "When the last error happened, by its code.",
          lambda s, now: _named(s.last_error_at, s.last_error)),
    Entry("mcdaemon_updates_total", "counter", ("result",), "Updates that ended, by how.",
          lambda s, now: [((result.value,), s.updates.get(result, 0)) for result in Result]),
    Entry("mcdaemon_reboots_total", "counter", (), "Reboots that the agent asked for.",
          lambda s, now: _one(s.reboots)),
    Entry("mcdaemon_retries_total", "counter", (), "Steps that were tried again after a passing failure.",
          lambda s, now: _one(s.retries)),
    Entry("mcdaemon_validation_mismatches_total", "counter", (), "What validation found not to be as the config asks.",
          lambda s, now: _one(s.mismatches)),
    # For the cluster's own alerts and dashboards; the oddities (a gauge called _total, times as values) are MCD's.
    Entry("mcd_state", "gauge", ("state", "reason"), "When the node entered its state.",
          lambda s, now: [((s.state.value, s.last_error if s.state in _FAILING else ""), s.state_since)]),
    Entry("mcd_update_state", "gauge", ("config", "err"), "When the last update finished.",
          lambda s, now: [((s.update_config, ""), s.update_at)] if s.update_config else []),
    Entry("mcd_host_os_and_version", "gauge", ("os", "version"), "1, with OS and version of the booted deployment.",
          lambda s, now: _named(1, s.os_name, s.os_version)),
    Entry("mcd_config_drift", "gauge", (), "When a managed file was found changed; 0: none is.",
          lambda s, now: _one(s.drift_at or 0)),
    Entry("mcd_pivot_errors_total", "gauge", (), "Failures to move to another image or kernel since the last success.",
          lambda s, now: _one(s.pivot_errors)),
    Entry("mcd_reboots_failed_total", "counter", (), "Reboots that could not be started.",
          lambda s, now: _one(s.reboots_failed)),
    Entry("mcd_kubelet_state", "gauge", (), "Consecutive failures of the kubelet's health endpoint.",
          lambda s, now: _one(s.kubelet_failures)),
    Entry("mcd_local_unsupported_packages", "gauge", ("node",), "Layered packages that no extension asks for.",
          lambda s, now: _named(s.unsupported_packages, s.node)),
)

HISTOGRAMS: tuple[tuple[str, str, Callable[[Snapshot], Distribution]], ...] = (
    ("mcdaemon_transaction_seconds", "Duration of rpm-ostree transactions.", lambda s: s.transactions),
    ("mcdaemon_image_check_seconds", "Duration of checks of an image.", lambda s: s.image_checks),
)
# fmt: on


class Board(Collector):
    """Holds the newest snapshot and turns it into text. `publish` and `text` may be called from different threads."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._snapshot: Optional[Snapshot] = None
        # A registry of its own: the library's global one adds metrics of the Python process that nobody reads.
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def publish(self, snapshot: Snapshot) -> None:
        """Show `snapshot` from now on. One assignment: a scrape sees the old or the new one, never a mixture."""
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        """The families of the newest snapshot; nothing before the first."""
        snapshot, now = self._snapshot, self._clock()
        if snapshot is None:
            return
        for entry in TABLE:
            yield entry.family(snapshot, now)
        for name, text, read in HISTOGRAMS:
            distribution = read(snapshot)
            yield HistogramMetricFamily(name, text, buckets=distribution.buckets(), sum_value=distribution.total)

    def text(self) -> bytes:
        """All metrics in the Prometheus text format (`TEXT_FORMAT`)."""
        return bytes(generate_latest(self._registry))
