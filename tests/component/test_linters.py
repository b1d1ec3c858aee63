"""The linters, as ordinary tests. A tool that is missing is a failure: `make deps` installs all of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

SHELL = (".ci/run", "systemd/mcdaemon.sh")


def check(*command: str) -> None:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"


def test_ruff_finds_nothing() -> None:
    check(sys.executable, "-m", "ruff", "check", ".")


# Without its cache, on a machine that does other things too, the whole tree takes a minute.
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_types_are_strict_and_right() -> None:
    check(sys.executable, "-m", "mypy", "mcdaemon", "tests", ".zipapp/build.py")


def test_imports_only_point_downwards() -> None:
    check(str(Path(sys.executable).with_name("lint-imports")))


@pytest.mark.parametrize("script", SHELL)
def test_the_shell_scripts_parse(script: str) -> None:
    check("bash", "-n", script)
