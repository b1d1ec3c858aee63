"""Programs are run with a limit that holds, whatever they do, and their last words are kept."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mcdaemon.errors import Broken, Failure, Held, HoldReason, Transient
from mcdaemon.host import process
from tests.component.leftovers import children


def run(*argv: str, timeout: float = 10.0) -> str:
    return process.run(argv, "do it", timeout, Broken)


def shell(script: str, timeout: float = 10.0) -> str:
    return run("sh", "-c", script, timeout=timeout)


def failure_of(script: str, timeout: float = 10.0) -> Failure:
    with pytest.raises(Failure) as caught:
        shell(script, timeout)
    return caught.value


def alive(marker: str) -> bool:
    return subprocess.run(["pgrep", "-f", marker], capture_output=True, timeout=10).returncode == 0


@pytest.fixture
def marker() -> Iterator[str]:
    """A number of seconds that only the processes of one test sleep."""
    number = f"6{os.getpid()}.{time.monotonic_ns() % 10**6}"
    yield number
    for pid in subprocess.run(["pgrep", "-f", f"sleep {number}"], capture_output=True, text=True).stdout.split():
        os.kill(int(pid), signal.SIGKILL)


# -- output -----------------------------------------------------------------------------------------------------------


def test_the_output_is_what_comes_back() -> None:
    assert shell("echo out; echo err >&2") == "out\n"


def test_output_that_is_no_text_does_not_end_the_agent() -> None:
    assert shell(r"printf '\377\000x'") == "\ufffd\0x"
    assert "\ufffd" in str(failure_of(r"printf '\377' >&2; exit 1"))


def test_much_output_on_both_sides_does_not_block() -> None:
    assert len(shell("head -c 300000 /dev/zero; head -c 300000 /dev/zero >&2")) == 300000


def test_a_program_that_reads_gets_nothing_and_does_not_wait() -> None:
    assert shell("cat; echo end") == "end\n"


def test_arguments_are_not_looked_at_by_a_shell() -> None:
    text = "$(id) `id` ; * '\""
    assert run("printf", "%s", text) == text


# -- failures ---------------------------------------------------------------------------------------------------------


def test_the_last_words_of_the_program_are_in_the_sentence() -> None:
    assert failure_of("echo it is broken >&2; exit 3").sentence == "cannot do it: sh: it is broken"


def test_a_program_without_last_words_is_told_by_its_status() -> None:
    assert failure_of("echo not this; exit 77").sentence == "cannot do it: sh ended with exit status 77"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGRTMIN + 3, 63])
def test_a_program_that_was_killed_is_told_so_whatever_the_signal(number: int) -> None:
    assert f"killed by signal {int(number)}" in failure_of(f"kill -{int(number)} $$").sentence


def test_the_caller_says_what_a_failure_means() -> None:
    with pytest.raises(Held) as caught:
        process.run(["false"], "drain", 5.0, lambda sentence: Held(HoldReason.DRAIN, sentence))
    assert caught.value.sentence == "cannot drain: false ended with exit status 1"


@pytest.mark.parametrize("make", ["missing", "plain", "directory", "no interpreter"])
def test_what_cannot_be_run_is_named(tmp_path: Path, make: str) -> None:
    program = tmp_path / "program"
    if make == "plain":
        program.write_text("x")
    if make == "directory":
        program.mkdir()
    if make == "no interpreter":
        program.write_text("#!/no/such/interpreter\n")
        program.chmod(0o755)
    with pytest.raises(Broken, match=f"cannot run {program}: "):
        run(str(program))


# -- time -------------------------------------------------------------------------------------------------------------


def test_a_program_that_hangs_is_ended_with_its_children(marker: str) -> None:
    begin = time.monotonic()
    error = failure_of(f"sleep {marker} & sleep {marker}", 0.3)
    assert isinstance(error, Transient) and "did not end within" in str(error)
    assert time.monotonic() - begin < 3
    assert not alive(f"sleep {marker}")


def test_a_program_that_ignores_signals_is_ended(marker: str) -> None:
    error = failure_of(f"trap '' TERM INT HUP; sleep {marker}; sleep {marker}", 0.3)
    assert isinstance(error, Transient)
    assert not alive(f"sleep {marker}")


def test_a_child_that_left_the_session_and_holds_the_output_does_not_hang_the_agent(marker: str) -> None:
    """conmon and its like: the limit is a limit."""
    begin = time.monotonic()
    error = failure_of(f"setsid sleep {marker} & sleep {marker}", 0.3)
    assert isinstance(error, Transient)
    assert time.monotonic() - begin < 5


def test_a_program_that_closed_its_output_and_goes_on_is_ended_too(marker: str) -> None:
    error = failure_of(f"exec >&- 2>&-; sleep {marker}", 0.3)
    assert isinstance(error, Transient)
    assert not alive(f"sleep {marker}")


def test_a_daemon_with_an_output_of_its_own_may_stay(marker: str) -> None:
    begin = time.monotonic()
    assert shell(f"setsid sleep {marker} >/dev/null 2>&1 & echo started") == "started\n"
    assert time.monotonic() - begin < 3
    assert alive(f"sleep {marker}")


def test_nobody_is_left_as_a_zombie_or_a_descriptor(marker: str) -> None:
    before, others = os.listdir("/proc/self/fd"), children()
    shell("true")
    failure_of("false")
    failure_of(f"setsid sleep {marker} & sleep {marker}", 0.2)
    assert os.listdir("/proc/self/fd") == before
    assert children() <= others


def test_a_signal_to_the_agents_own_group_does_not_reach_the_program() -> None:
    assert int(shell("ps -o pgid= -p $$")) != os.getpgid(0)


def test_while_a_program_runs_the_watchdog_hears_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    beats: list[float] = []
    monkeypatch.setattr(process, "BEAT", 0.05)
    process.on_wait(lambda: beats.append(time.monotonic()))
    try:
        shell("echo first; sleep 0.5")
    finally:
        process.on_wait(lambda: None)
    assert len(beats) >= 4


def test_output_before_a_sign_of_life_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "BEAT", 0.05)
    assert shell("for n in 1 2 3 4 5; do echo $n; sleep 0.1; done").split() == ["1", "2", "3", "4", "5"]
