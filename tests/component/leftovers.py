"""What a test must not leave behind in its own process, whatever other tests have there."""

from __future__ import annotations

import os
from pathlib import Path


def children() -> set[int]:
    """The process ids of this process's children, zombies too."""
    found: set[int] = set()
    for task in Path(f"/proc/{os.getpid()}/task").iterdir():
        found.update(int(pid) for pid in (task / "children").read_text().split())
    return found
