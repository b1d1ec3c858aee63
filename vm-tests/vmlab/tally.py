"""Numbers for the report of a run: one line per event in a file that all workers append to."""

from __future__ import annotations

import json
import os
from pathlib import Path

BOOTS, POWER_CUTS, PANICS, REPLAYS, RESTORES = "boots", "power cuts", "panics", "journal replays", "restores"
STALLS = "stalled emulators"


def count(file: Path, what: str, seconds: float = 0.0) -> None:
    """Add one; a line this short is written in one piece."""
    file.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps({"what": what, "seconds": round(seconds, 3)}) + "\n"
    descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)


def totals(file: Path) -> dict[str, tuple[int, float]]:
    """How often each thing happened since the file was last removed, and the seconds that it took."""
    found: dict[str, tuple[int, float]] = {}
    for line in file.read_text().splitlines() if file.exists() else ():
        try:
            entry = json.loads(line)
        except ValueError:
            continue  # A worker was killed while it wrote.
        number, seconds = found.get(entry["what"], (0, 0.0))
        found[entry["what"]] = (number + 1, seconds + entry["seconds"])
    return found
