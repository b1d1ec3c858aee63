"""`make test-crash`: the agent is killed at every call that changes something, in every scenario and variant.

    python -m tests.crash.everywhere [--scenario NAME] [--stride N] [--offset N] [--point N] [--variant NAME]

A stride of 5 takes each fifth kill point, from the offset on; all offsets together are the whole. The numbers of each
scenario are printed; the exit status is 1 when a node did not end as it has to, and what was said is kept.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Optional

from tests.crash.killing import Outcome, Prepared, Variant, kill_at, prepare
from tests.crash.scenarios import SCENARIOS, Ground, Scenario
from tests.crash.tracer import NotPermitted, require_permission
from tests.stand.node import PROJECT
from tests.stand.registry import Registry

REPORTS = PROJECT / "build/crash"

# What a forked worker inherits: a scenario's functions cannot be sent to it.
_ready: Optional[Prepared] = None


@contextmanager
def ground() -> Iterator[Ground]:
    """A registry and a folder on a real disk, removed in the end."""
    folder = Path(tempfile.mkdtemp(prefix="mcdaemon-crash-", dir="/var/tmp"))
    try:
        with Registry(folder / "registry") as registry:
            yield Ground(folder, registry)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _work(number: int, variant: Variant) -> Outcome:
    assert _ready is not None
    return kill_at(_ready, number, variant)


def run(scenario: Scenario, place: Ground, options: argparse.Namespace) -> int:
    """All kills of one scenario; prints its line and returns the number of failures."""
    global _ready
    _ready = ready = prepare(scenario, place)
    points = options.point or ready.points()[options.offset :: options.stride]
    kills = [(n, v) for n in points for v in ready.variants if options.variant in ("", v.value)]
    print(f"{scenario.name}: {len(ready.calls)} calls that change something, {len(ready.points())} kill points; "
          f"{len(points)} of them now, {len(kills)} kills", flush=True)  # fmt: skip
    started = time.monotonic()
    outcomes = []
    context = multiprocessing.get_context("fork")
    with concurrent.futures.ProcessPoolExecutor(options.jobs, mp_context=context) as pool:
        for done in concurrent.futures.as_completed([pool.submit(_work, *kill) for kill in kills]):
            outcomes.append(done.result())
            if outcomes[-1].problems:
                _report(outcomes[-1])
    killed = sum(outcome.killed is not None for outcome in outcomes)
    failures = sum(bool(outcome.problems) for outcome in outcomes)
    print(f"{scenario.name}: {len(points)} kill points, {killed} kills done, {len(outcomes) - killed} ended before, "
          f"{failures} failures, {time.monotonic() - started:.0f} s", flush=True)  # fmt: skip
    return failures


def _report(outcome: Outcome) -> None:
    REPORTS.mkdir(parents=True, exist_ok=True)
    path = REPORTS / f"{outcome.scenario}-{outcome.number}-{outcome.variant.value}.txt"
    path.write_text(f"{outcome.text()}\n\n{outcome.said}")
    print(f"FAILED {outcome.text()}\n  report: {path}", flush=True)


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",") if word]


def main(arguments: Sequence[str]) -> int:
    """The program; see the top of this file."""
    parser = argparse.ArgumentParser(prog="everywhere", description="Kill the agent at every effect.")
    names = [scenario.name for scenario in SCENARIOS]
    parser.add_argument("--scenario", choices=["", *names], default="")
    parser.add_argument("--stride", type=int, default=1, metavar="N")
    parser.add_argument("--offset", type=int, default=0, metavar="N")
    parser.add_argument("--point", type=_numbers, default=[], metavar="N[,N…]", help="these alone")
    parser.add_argument("--variant", choices=["", *(variant.value for variant in Variant)], default="")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args(arguments)
    try:
        require_permission()
    except NotPermitted as error:
        print(error, file=sys.stderr)
        return 1
    with ground() as place:
        failures = sum(run(s, place, options) for s in SCENARIOS if options.scenario in ("", s.name))
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
