"""`python -m tests.model`: every kind of update explored, as a table; a counterexample as a trace."""

from __future__ import annotations

import sys
import time

from mcdaemon.decide import decide
from tests.model.explore import explore
from tests.model.node import KINDS

FAULTS = 3
"""Disturbances in one history, as many as `make model` takes. Each more is five times the states."""


def main(arguments: list[str]) -> int:
    """Explore the kinds of update whose name holds one of the arguments (default: all), with as many disturbances as a
    number among them says; 1 when something is wrong."""
    names = [word for word in arguments if not word.isdigit()]
    faults = next((int(word) for word in arguments if word.isdigit()), FAULTS)
    wrong = 0
    for kind in KINDS:
        if names and not any(name in kind.name for name in names):
            continue
        started = time.monotonic()
        found = explore(kind, decide, faults)
        seconds = time.monotonic() - started
        counts = f"{found.states:8} states {found.transitions:9} transitions {seconds:6.1f} s"
        print(f"{kind.name:26}{counts}   by disturbances: {found.layers}", flush=True)
        if found.wrong:
            wrong = 1
            print(found.text())
    return wrong


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
