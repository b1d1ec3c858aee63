"""The health gate: whether a freshly booted target may be kept."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from mcdaemon.decide import Health
from mcdaemon.errors import Broken, Failure
from mcdaemon.host import process
from mcdaemon.host.bus import Systemd

SCRIPT_TIMEOUT = 60.0
"""Seconds that one health script may take."""


def check(systemd: Systemd, required: Sequence[str], scripts: Path, deadline: float) -> tuple[Health, str]:
    """(verdict, what is not healthy). `deadline`: on the monotonic clock; until then the answer is PENDING, not BAD."""
    trouble = _units(systemd, required) or _scripts(scripts)
    if not trouble:
        return Health.GOOD, ""
    return (Health.PENDING if time.monotonic() < deadline else Health.BAD), trouble


def _units(systemd: Systemd, required: Sequence[str]) -> str:
    for unit in required:
        try:
            state = systemd.active_state(unit)
        except Failure as error:
            return str(error)
        if state != "active":
            return f"{unit} is {state}"
    return ""


def _scripts(folder: Path) -> str:
    """Run the executables in `folder` by name (the layout of greenboot's required.d); the first failure counts."""
    try:
        found = sorted(path for path in folder.iterdir() if os.access(path, os.X_OK) and path.is_file())
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f"the health scripts in {folder} cannot be listed: {error.strerror}"
    for script in found:
        try:
            process.run([os.fspath(script)], f"pass the health script {script}", SCRIPT_TIMEOUT, Broken)
        except Failure as error:
            if error.code == process.STOPPED:
                raise  # no verdict: it was not the script that failed
            return str(error)
    return ""
