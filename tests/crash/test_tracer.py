"""The tracer sees each call that changes something, none that does not, and leaves nobody alive."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.crash.tracer import KILLED, NOT_PERMITTED, Action, Stop, Traced, require_permission, trace

PYTHON = ["/usr/bin/python3", "-IBc"]
_TRACER = [sys.executable, "-m", "tests.crash.tracer"]


def go(_stop: Stop) -> Action:
    return Action.GO


def calls(traced: Traced, folder: Path) -> list[tuple[str, str]]:
    """What was done below `folder`."""
    inside = f"{folder}/"
    return [(s.call, s.path[len(inside) :]) for s in traced.stops if s.path.startswith(inside)]


def test_each_change_of_a_shell_and_of_its_programs_is_seen_in_its_order(tmp_path: Path) -> None:
    script = f"cd {tmp_path}; mkdir d; echo x >d/a; mv d/a d/b; ln -s b d/c; rm d/c; chmod 600 d/b"
    done = trace(["/bin/sh", "-c", script], go)
    assert done.status == 0 and done.killed is None
    names = [(call.rstrip("at2"), path) for call, path in calls(done, tmp_path)]
    assert names == [("mkdir", "d"), ("open", "d/a"), ("write", "d/a"), ("rename", "d/b"), ("symlink", "d/c"),
                     ("unlink", "d/c"), ("fchmod", "d/b")]  # fmt: skip


def test_what_changes_nothing_is_no_stop(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("x")
    text = f"""
import os
os.chdir({os.fspath(tmp_path)!r})
descriptor = os.open("there", os.O_RDWR | os.O_CREAT)
os.fsync(descriptor)
os.read(descriptor, 1)
reader, writer = os.pipe()
os.write(writer, b"x")
os.makedirs(".", exist_ok=True)
try:
    os.unlink("not-there")
except FileNotFoundError:
    pass
os.write(os.open(".", os.O_TMPFILE | os.O_RDWR), b"without a name")
open("/dev/null", "w").write("x")
"""
    assert trace([*PYTHON, text], go).stops == []
    assert [stop.call for stop in trace([*PYTHON, text], go, syncs=True).stops] == ["fsync"]


def test_threads_and_grandchildren_count_together(tmp_path: Path) -> None:
    text = f"""
import subprocess, threading
def work(name):
    subprocess.run(["/bin/sh", "-c", f"( : >{tmp_path}/{{name}} )"], check=True)
threads = [threading.Thread(target=work, args=(str(i),)) for i in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""
    done = trace([*PYTHON, text], go)
    assert sorted(path for _call, path in calls(done, tmp_path)) == ["0", "1", "2", "3"]
    assert [stop.number for stop in done.stops] == [1, 2, 3, 4]


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_a_kill_comes_before_its_call_and_nobody_survives_it(tmp_path: Path, number: int) -> None:
    script = f"cd {tmp_path}; setsid sleep 300 & for i in 1 2 3 4; do : >$i; done; wait"
    pids: set[int] = set()

    def at_stop(stop: Stop) -> Action:
        pids.add(stop.pid)
        return Action.KILL if stop.number == number else Action.GO

    done = trace(["/bin/sh", "-c", script], at_stop)
    assert done.killed is not None and done.killed.path == f"{tmp_path}/{number}"
    assert sorted(path.name for path in tmp_path.iterdir()) == [str(i) for i in range(1, number)]
    sleeping = subprocess.run(["pgrep", "-f", f"cd {tmp_path}"], capture_output=True, text=True, timeout=10).stdout
    assert sleeping == "" and not any(os.path.exists(f"/proc/{pid}") for pid in pids)


def test_an_error_of_who_looks_on_ends_the_tree(tmp_path: Path) -> None:
    def at_stop(_stop: Stop) -> Action:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        trace(["/bin/sh", "-c", f": >{tmp_path}/a"], at_stop)
    assert list(tmp_path.iterdir()) == []


def test_signals_and_stops_of_the_program_go_their_way() -> None:
    script = 'trap "exit 7" TERM; sh -c "kill -STOP \\$\\$" & sleep 0.1; kill -CONT $!; wait $!; kill -TERM $$; sleep 9'
    assert trace(["/bin/sh", "-c", script], go).status == 7


def test_the_program_says_where_it_killed_by_its_status_and_its_report(tmp_path: Path) -> None:
    report = tmp_path / "report"
    argv = [*_TRACER, "--kill-at", "2", "--report", str(report), "--", "/bin/sh", "-c",
            f": >{tmp_path}/a; : >{tmp_path}/b"]  # fmt: skip
    assert subprocess.run(argv, timeout=30).returncode == KILLED
    assert [line.split("\t")[0] for line in report.read_text().splitlines()] == ["1", "2"]
    assert (tmp_path / "a").exists() and not (tmp_path / "b").exists()


def test_where_tracing_is_not_permitted_it_fails_with_a_sentence() -> None:
    """A process has one tracer only, so that within a traced one there can be no second."""
    require_permission()
    done = subprocess.run([*_TRACER, "--", *_TRACER, "--", "true"], capture_output=True, text=True, timeout=30)
    assert done.returncode == NOT_PERMITTED
    assert "cannot trace: ptrace is not permitted here" in done.stderr
