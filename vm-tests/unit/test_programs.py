"""A build that fails says what could not be done, and with whose words."""

from __future__ import annotations

import pytest
from vmlab.programs import CannotBuild, run


def test_a_program_that_fails_is_quoted_with_its_last_words() -> None:
    with pytest.raises(CannotBuild, match=r"(?s)cannot make it: `sh -c .*` ended with 3\n.*no room"):
        run("make it", ["sh", "-c", "echo no room >&2; exit 3"], 30)


def test_a_program_that_hangs_is_ended() -> None:
    with pytest.raises(CannotBuild, match="cannot make it: `sleep` did not end within 0 s"):
        run("make it", ["sleep", "60"], 0.1)


def test_a_program_that_is_not_installed_is_named_with_what_to_do() -> None:
    with pytest.raises(CannotBuild, match="no program no-such-program.*make vm-deps"):
        run("make it", ["no-such-program"], 30)
