"""Programs that build: each has a time limit, and one that fails says what could not be done and its last words."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Optional

_TAIL = 2000


class CannotBuild(Exception):
    """A part cannot be built; the text says which and ends with the last words of the program that failed."""


def run(
    what: str,
    argv: Sequence[str],
    timeout: float,
    cwd: Optional[Path] = None,
    env: Optional[Mapping[str, str]] = None,
) -> str:
    """Run a program that does `what` ("make the file system") and return what it printed.

    `env` is added to the environment, `timeout` is in seconds. Raises CannotBuild.
    """
    try:
        done = subprocess.run(
            argv, cwd=cwd, env={**os.environ, **(env or {})}, timeout=timeout, capture_output=True, text=True,
            errors="replace", stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except FileNotFoundError as error:
        raise CannotBuild(f"cannot {what}: no program {error.filename} (run `make vm-deps`)") from error
    except subprocess.TimeoutExpired as error:
        said = error.stderr or b""
        tail = (said.decode(errors="replace") if isinstance(said, bytes) else said)[-_TAIL:]
        raise CannotBuild(f"cannot {what}: `{argv[0]}` did not end within {timeout:.0f} s\n{tail}") from error
    if done.returncode != 0:
        tail = (done.stdout + done.stderr)[-_TAIL:]
        raise CannotBuild(f"cannot {what}: `{' '.join(argv)[:300]}` ended with {done.returncode}\n{tail}")
    return done.stdout
