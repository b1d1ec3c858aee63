"""One hook at a time, whatever became of the agent that began it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mcdaemon.errors import Broken, Failure, Held, HoldReason
from mcdaemon.host import process, turns
from mcdaemon.perform import _run_hook

_AGENT = """
import sys
from pathlib import Path
from mcdaemon.perform import _run_hook
_run_hook(("sh", "-c", sys.argv[2]), 60.0, "drain the node", Path(sys.argv[1]))
"""


def hook(runtime: Path, script: str = "true") -> None:
    _run_hook(("sh", "-c", script), 10.0, "take the node back to work", runtime)


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Path]:
    """A fifo that a hook waits at; it is let go at the end."""
    path = tmp_path / "gate"
    os.mkfifo(path)
    yield path
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
    except OSError:
        return


@pytest.fixture
def orphan(tmp_path: Path, gate: Path) -> int:
    """The process of a drain whose agent was killed."""
    said, script = tmp_path / "said", f"echo $$ >{tmp_path}/said; read x <{gate}; echo end >>{tmp_path}/order"
    os.mkfifo(said)
    agent = subprocess.Popen([sys.executable, "-c", _AGENT, str(tmp_path / "run"), script])
    pid = int(said.read_text())
    agent.send_signal(signal.SIGKILL)
    agent.wait(10)
    return pid


def test_the_hook_of_a_killed_agent_is_waited_for(tmp_path: Path, gate: Path, orphan: int) -> None:
    with pytest.raises(Held) as caught:
        hook(tmp_path / "run", f"echo undo >>{tmp_path}/order")
    assert caught.value.reason is HoldReason.DRAIN and caught.value.hint
    assert caught.value.sentence == (
        "cannot take the node back to work: an earlier program of drain.command, drain.undo or reboot.command still "
        f"runs as process {orphan}"
    )
    gate.write_text("go\n")
    subprocess.run(["tail", f"--pid={orphan}", "-f", "/dev/null"], timeout=10, check=True)
    hook(tmp_path / "run", f"echo undo >>{tmp_path}/order")
    assert (tmp_path / "order").read_text() == "end\nundo\n"


def test_a_removed_runtime_directory_and_one_that_cannot_be_made_hold_nothing_up(tmp_path: Path) -> None:
    hook(tmp_path / "gone", f"touch {tmp_path}/first; rm -r {tmp_path}/gone")
    hook(tmp_path / "gone", f"touch {tmp_path}/second")
    (tmp_path / "file").write_text("")
    hook(tmp_path / "file/run", f"touch {tmp_path}/third")
    assert all((tmp_path / name).exists() for name in ("first", "second", "third"))


def test_a_daemon_that_a_hook_left_behind_keeps_no_later_one_off(tmp_path: Path) -> None:
    hook(tmp_path, f"setsid sleep 600 >/dev/null 2>&1 & echo $! >{tmp_path}/pid")
    try:
        hook(tmp_path)
    finally:
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)


def test_a_hook_that_failed_lets_the_next_one_go(tmp_path: Path) -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(Failure):
        hook(tmp_path, "exit 1")
    hook(tmp_path)
    assert os.listdir("/proc/self/fd") == before


def test_the_lock_is_handed_to_its_own_program_only(tmp_path: Path) -> None:
    with turns.taken(tmp_path / "hook.lock", "drain") as (descriptor,):
        listing = ["sh", "-c", f"test -e /proc/self/fd/{descriptor} && echo has || echo none"]
        assert process.run(listing, "list", 5.0, Broken) == "none\n"
        assert process.run(listing, "list", 5.0, Broken, passed=(descriptor,)) == "has\n"
