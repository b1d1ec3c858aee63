"""Runs skopeo and podman, the authorities on containers-storage, with a deadline and without mixing their outputs."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Sequence

from mcdaemon.image.findings import Unavailable, Verdict, printable

# Subscripting works at run time since Python 3.9.
Done = subprocess.CompletedProcess[bytes]
_LOGRUS = re.compile(r'level=(?:fatal|error) msg="((?:[^"\\]|\\.)*)"')


def run(argv: Sequence[str], timeout: float) -> Done:
    """Run to the end; `timeout` in seconds. Raises Unavailable(UNREACHABLE) where the program is missing or hangs: a
    local check that fails says nothing about the image, and the next source is asked (IMG-54).
    """
    try:
        return subprocess.run(
            argv,
            check=False,
            timeout=timeout,
            capture_output=True,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "LC_ALL": "C"},
        )
    except FileNotFoundError:
        raise Unavailable(Verdict.UNREACHABLE, f"{argv[0]} is not installed") from None
    except OSError as error:
        raise Unavailable(Verdict.UNREACHABLE, f"{argv[0]} cannot be run: {error.strerror}") from error
    except subprocess.TimeoutExpired:
        raise Unavailable(Verdict.UNREACHABLE, f"{argv[0]} does not finish in {timeout:.0f} s") from None


def listed(done: Done, program: str) -> list[dict[str, object]]:
    """The JSON list of objects that a program printed. Raises Unavailable(UNREACHABLE) where it printed none."""
    if done.returncode != 0:
        raise Unavailable(Verdict.UNREACHABLE, f"{program} fails: {complaint(done)}")
    try:
        value = json.loads(done.stdout or b"null")
    except (ValueError, RecursionError):
        raise Unavailable(Verdict.UNREACHABLE, f"{program} prints no JSON") from None
    # An empty list is "null" in some versions of podman.
    objects = [] if value is None else value
    if not isinstance(objects, list) or not all(isinstance(one, dict) for one in objects):
        raise Unavailable(Verdict.UNREACHABLE, f"{program} prints no list of objects")
    return objects


def complaint(done: Done) -> str:
    """Why a program failed, in its own words: the message of its last fatal line, or its last line."""
    said = done.stderr.decode("utf-8", "replace")
    messages = _LOGRUS.findall(said)
    if messages:
        return printable(re.sub(r"\\(.)", r"\1", messages[-1]))
    lines = [line for line in said.splitlines() if line.strip()]
    return printable(lines[-1].removeprefix("Error: ")) if lines else f"exit status {done.returncode}"
