"""The command line against bad input: one clear sentence that names the place, an exit status, and nothing changed."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Optional

import pytest

from mcdaemon import assembly, cli
from mcdaemon import settings as settings_file
from mcdaemon.agent import only_one, wake
from mcdaemon.errors import Broken
from mcdaemon.perform import Performer
from mcdaemon.report.status import Status
from mcdaemon.report.status import store as store_status
from mcdaemon.update import journal
from mcdaemon.update.journal import FailedTarget, Journal, Update
from tests.stand.isolation import private

ROOT = Path(__file__).resolve().parents[2]
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: a mount namespace, another user")
DIGEST = "sha256:" + "1" * 64
FAILED_TARGET = Journal(failed=FailedTarget("d", "", "rendered-1: kubelet.service is failed"))


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level


@pytest.fixture
def settings(tmp_path: Path) -> Path:
    """Settings of a node that keeps everything in a directory of the test."""
    (tmp_path / "state").mkdir()
    path = tmp_path / "mcdaemon.yaml"
    path.write_text(f"state_dir: {tmp_path}/state\nsource:\n  directory:\n    path: {tmp_path}/configs\n"
                    "images:\n  timeout_seconds: 1\n")  # fmt: skip
    return path


def run(settings: Path, *arguments: str) -> int:
    return cli.main(["--settings", str(settings), *arguments])


def in_a_namespace(
    tmp_path: Path, *arguments: str, before: str = "true", timeout: float = 30.0
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """mcdaemon with a /run and a /var/lib of its own; second: the files that are there afterwards."""
    listing = tmp_path / "listing"
    script = f'{before}; "$@"; status=$?; find /run /var/lib -type f >{listing}; exit $status'
    argv = ["sh", "-c", script, "sh", sys.executable, "-m", "mcdaemon.cli", *arguments]
    done = subprocess.run(private(argv), cwd=ROOT, capture_output=True, text=True, timeout=timeout)
    return done, listing.read_text().split()


# -- settings ---------------------------------------------------------------------------------------------------------

BAD_SETTINGS = {
    "unknown key": ("hold:\n  retry_min_second: 3\n", "line 2: hold.retry_min_second: unknown key"),
    "unknown group": ("metric: {}\n", "line 1: metric: unknown key"),
    "wrong type": ("loop:\n  interval_seconds: soon\n", "line 2: loop.interval_seconds: expected a number"),
    "a relative program": ("drain:\n  command: [drain.sh]\n", "line 2: drain.command[0]: expected the absolute path"),
    "no yaml": ("a: [\n", "line "), "two documents": ("a: 1\n---\nb: 2\n", "line "),
    "a list": ("- a\n", "expected a mapping"), "binary": ("\0", "cannot use"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_SETTINGS)
@pytest.mark.parametrize("command", [["plan"], ["validate"], ["retry"], ["resolve", "quay.io/x:1"]])
def test_bad_settings_end_every_command_with_one_sentence(
    settings: Path, capsys: pytest.CaptureFixture[str], case: str, command: Sequence[str]
) -> None:
    text, words = BAD_SETTINGS[case]
    settings.write_text(text)
    assert run(settings, *command) == cli.FAILED
    said = capsys.readouterr()
    assert said.out == "" and len(said.err.splitlines()) == 1
    assert said.err.startswith(f"mcdaemon: cannot use {settings}") and words in said.err
    assert list((settings.parent / "state").iterdir()) == []


def test_settings_that_others_can_write_are_not_trusted(settings: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings.chmod(0o666)
    assert run(settings, "retry") == cli.FAILED
    assert f"cannot trust {settings}" in capsys.readouterr().err


@as_root
@pytest.mark.parametrize("command", ["run", "plan"])
def test_bad_settings_leave_nothing_on_the_node(tmp_path: Path, settings: Path, command: str) -> None:
    settings.write_text("nonsense: true\n")
    done, left = in_a_namespace(tmp_path, "--settings", str(settings), command)
    assert done.returncode == cli.FAILED
    assert done.stderr.splitlines() == [
        f"mcdaemon: cannot use {settings}: line 1: nonsense: unknown key ({done.stderr.partition('(')[2].strip()}"
    ]
    assert not [path for path in left if not path.endswith("/run/mcdaemon/lock")]  # fmt: skip


# -- usage ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [[], ["no-such-command"], ["resolve"], ["run", "--twice"], ["resolve", "a", "b"]])
def test_wrong_usage_is_told(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == cli.USAGE and "usage: mcdaemon" in capsys.readouterr().err


@as_root
@pytest.mark.parametrize("command", ["run", "plan", "validate", "retry", "early"])
def test_an_ordinary_user_is_told_to_be_root(tmp_path: Path, command: str) -> None:
    done = subprocess.run([sys.executable, "-m", "mcdaemon.cli", "--settings", "/no/such/file", command], cwd=ROOT,
                          capture_output=True, text=True, timeout=30, user=65534, group=65534)  # fmt: skip
    assert done.returncode == cli.FAILED and done.stdout == ""
    assert done.stderr == "mcdaemon: cannot do this as an ordinary user (run it as root)\n"


# -- resolve ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pullspec", ["", "quay.io/UPPER:1", "quay.io/x@sha256:short", "quay.io/x:", "a b",
                                      "quay.io/x@md5:1", "http://quay.io/x"])  # fmt: skip
def test_a_reference_that_is_none_is_refused(settings: Path, capsys: pytest.CaptureFixture[str], pullspec: str) -> None:
    assert run(settings, "resolve", pullspec) == cli.REFUSED
    said = capsys.readouterr()
    assert said.out == "" and len(said.err.splitlines()) == 1
    assert said.err.startswith("mcdaemon: cannot ") and "Traceback" not in said.err


@as_root
@pytest.mark.parametrize("json_wanted", [False, True])
def test_an_image_that_nobody_has_is_waited_for_and_every_source_is_named(
    tmp_path: Path, settings: Path, json_wanted: bool
) -> None:
    name = f"127.0.0.1:1/no/such@{DIGEST}"
    done, left = in_a_namespace(tmp_path, "--settings", str(settings), "resolve", name, *["--json"][: int(json_wanted)])
    assert done.returncode == cli.HELD
    assert "Traceback" not in done.stderr
    if json_wanted:
        answer = json.loads(done.stdout)
        assert (answer["complete"], answer["digest"], answer["origin"]) == (False, DIGEST, "")
        assert {source["source"] for source in answer["sources"]} == {"containers-storage", "registry"}
    else:
        assert done.stdout.startswith(f"{name}: complete nowhere\n") and "127.0.0.1:1" in done.stdout
    assert not [path for path in left if "mcdaemon" in path]


# -- status -----------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "runtime"
    path.mkdir()
    monkeypatch.setattr(cli, "RUNTIME", path)
    return path


ALIEN_STATUS: dict[str, Optional[bytes]] = {
    "none": None, "empty": b"", "torn": b'{"state": "Do', "binary": b"\xff\0", "alien": b'{"apiVersion": "v1"}',
    "deep": b"[" * 99999,
}  # fmt: skip


@pytest.mark.parametrize("case", ALIEN_STATUS)
@pytest.mark.parametrize("arguments", [[], ["--json"]])
def test_no_usable_status_says_what_to_do(
    settings: Path, runtime: Path, capsys: pytest.CaptureFixture[str], case: str, arguments: list[str]
) -> None:
    content = ALIEN_STATUS[case]
    if content is not None:
        (runtime / "status.json").write_bytes(content)
    assert run(settings, "status", *arguments) == cli.FAILED
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1
    assert said.err.startswith("mcdaemon: no round was made") and "mcdaemon run --once" in said.err


def test_a_status_that_cannot_be_read_is_named(
    settings: Path, runtime: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (runtime / "status.json").mkdir()
    assert run(settings, "status") == cli.FAILED
    assert f"cannot read {runtime}/status.json: Is a directory" in capsys.readouterr().err


def test_the_status_is_for_people_and_for_programs(
    settings: Path, runtime: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store_status(runtime / "status.json", Status("Working", "hold", "it waits", 1.0, warnings=("a warning",)))
    assert run(settings, "status") == cli.OK
    assert "Working: it waits" in capsys.readouterr().out
    assert run(settings, "status", "--json") == cli.OK
    assert json.loads(capsys.readouterr().out)["warnings"] == ["a warning"]


def test_a_status_whose_agent_is_gone_says_so_beside_the_answer(
    settings: Path, runtime: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store_status(runtime / "status.json", Status("Working", "drain", "it drains", 1.0))
    with only_one(runtime):
        assert run(settings, "status") == cli.OK
        assert capsys.readouterr().err == ""
    assert run(settings, "status", "--json") == cli.OK
    said = capsys.readouterr()
    assert said.err == "mcdaemon: no agent is running; this is what the last one said\n"
    assert json.loads(said.out)["state"] == "Working"
    for text in ("", "process 0 ", "process", f"process {os.getppid()} (`mcdaemon run`)", "process 99999999 "):
        (runtime / "lock").write_text(text)
        assert run(settings, "status") == cli.OK
        assert "no agent is running" in capsys.readouterr().err, text
    (runtime / "lock").unlink()
    assert run(settings, "status") == cli.OK
    assert capsys.readouterr().err == "", "removed by hand: nobody knows"


@pytest.mark.parametrize("how", [{"draining": True}, {"drained": True}, {}])
def test_the_status_says_whether_the_node_is_out_of_service(
    settings: Path, runtime: Path, capsys: pytest.CaptureFixture[str], how: dict[str, Any]
) -> None:
    """Also when the agent was killed before it could."""
    journal.store(journal_of(settings), Journal(dataclasses.replace(Update("u", "d", "n", "s"), **how)))
    assert run(settings, "status") == cli.FAILED
    said = capsys.readouterr()
    assert ("the node is out of service (drained)" in said.err) == bool(how)
    store_status(runtime / "status.json", Status("Working", "drain", "it drains", 1.0))
    assert run(settings, "status") == cli.OK
    assert ("the node is out of service (drained)" in capsys.readouterr().out) == bool(how)
    assert run(settings, "status", "--json") == cli.OK
    assert json.loads(capsys.readouterr().out)["out_of_service"] is bool(how)


def test_right_after_a_boot_the_status_names_what_is_in_flight_and_what_to_start(
    settings: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    journal.store(journal_of(settings), Journal(Update("u", "d", "rendered-2", "s")))
    assert run(settings, "status") == cli.FAILED
    assert capsys.readouterr().err == (
        "mcdaemon: no round was made since this boot, and an update to rendered-2 is in flight; start "
        "mcdaemon.service, which goes on with it, or use `mcdaemon run --once`\n"
    )


# -- retry ------------------------------------------------------------------------------------------------------------


def journal_of(settings: Path) -> Path:
    return settings.parent / "state/journal.json"


@as_root
def test_a_target_that_failed_may_be_tried_again(settings: Path, capsys: pytest.CaptureFixture[str]) -> None:
    update = Update("u", "d", "n", "s")
    journal.store(journal_of(settings), Journal(update, FAILED_TARGET.failed, DIGEST))
    assert run(settings, "retry") == cli.OK
    assert "kubelet.service is failed" in capsys.readouterr().out
    assert journal.load(journal_of(settings))[0].failed, "only the agent writes the journal"
    performer = Performer(assembly.assemble(settings_file.load(str(settings))))
    performer.retry_if_asked()
    assert journal.load(journal_of(settings)) == (Journal(update, None, DIGEST), "")
    journal.store(journal_of(settings), Journal(update, FAILED_TARGET.failed, DIGEST))
    performer.retry_if_asked()
    assert journal.load(journal_of(settings))[0].failed, "asked once, tried once"


@as_root
def test_nothing_failed_is_nothing_to_retry(settings: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(settings, "retry") == cli.OK
    assert "no target is remembered as failed" in capsys.readouterr().out
    assert not journal_of(settings).exists()


@as_root
@pytest.mark.parametrize("content", [b"", b"{}", b"\0" * 100, journal.encode(FAILED_TARGET)[:-40]])
def test_a_torn_or_alien_journal_is_reported_and_left_for_the_agent(
    settings: Path, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    """It alone can put right what was in flight; set aside by another, it would never learn of it."""
    journal_of(settings).write_bytes(content)
    run(settings, "retry")
    said = capsys.readouterr().err
    assert f"cannot use the journal {journal_of(settings)}" in said
    assert journal_of(settings).read_bytes() == content, "who moves it away is the only one who learns of it"


# -- on a machine that is none ----------------------------------------------------------------------------------------


@as_root
@pytest.mark.parametrize("command", [["run", "--once"], ["plan"], ["plan", "--json"]])
def test_a_machine_without_ostree_is_told_so(tmp_path: Path, settings: Path, command: list[str]) -> None:
    done, _left = in_a_namespace(tmp_path, "--settings", str(settings), *command)
    assert done.returncode == cli.FAILED, done
    assert done.stdout == "" and "Traceback" not in done.stderr
    assert "cannot tell which deployment is booted" in done.stderr and "is this an ostree machine?" in done.stderr


@as_root
def test_a_root_that_carries_no_config_cannot_be_validated(tmp_path: Path, settings: Path) -> None:
    done, _left = in_a_namespace(tmp_path, "--settings", str(settings), "validate")
    assert done.returncode == cli.FAILED
    assert done.stderr == "mcdaemon: this root carries no config yet\n"


# -- one agent --------------------------------------------------------------------------------------------------------


def holder(folder: Path) -> subprocess.Popen[str]:
    """Another process that holds the lock."""
    program = ("import sys, time; from pathlib import Path; from mcdaemon.agent import only_one\n"
               "with only_one(Path(sys.argv[1])): print('held', flush=True); time.sleep(60)")  # fmt: skip
    argv = [sys.executable, "-c", program, str(folder)]
    process = subprocess.Popen(argv, cwd=ROOT, text=True, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def ended(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def test_a_second_agent_refuses_and_names_the_first(tmp_path: Path) -> None:
    first = holder(tmp_path)
    try:
        named = f"mcdaemon already runs on this node as process {first.pid} "
        with pytest.raises(Broken, match=named), only_one(tmp_path):
            pass
    finally:
        ended(first)


def test_the_lock_of_an_agent_that_was_killed_is_free(tmp_path: Path) -> None:
    ended(holder(tmp_path))
    with only_one(tmp_path):
        assert f"process {os.getpid()} " in (tmp_path / "lock").read_text()
    with only_one(tmp_path):
        pass


def test_a_lock_without_a_name_is_a_lock_all_the_same(tmp_path: Path) -> None:
    first = holder(tmp_path)
    try:
        (tmp_path / "lock").write_text("")
        with pytest.raises(Broken, match="as another process"), only_one(tmp_path):
            pass
    finally:
        ended(first)


@pytest.mark.parametrize("make", [Path.touch, lambda place: (place / "lock").mkdir(parents=True)])
def test_a_place_for_the_lock_that_is_none_is_named(tmp_path: Path, make: Any) -> None:
    make(tmp_path / "run")
    with pytest.raises(Broken, match="cannot open the lock in"), only_one(tmp_path / "run"):
        pass


# -- output that nobody reads -----------------------------------------------------------------------------------------


def test_a_reader_that_went_away_is_no_traceback(settings: Path, runtime: Path) -> None:
    store_status(runtime / "status.json", Status("Done", "rest", "x" * 200_000, 1.0))
    program = ("import sys; from pathlib import Path; from mcdaemon import cli; cli.RUNTIME = Path(sys.argv[1])\n"
               "sys.exit(cli.main(['--settings', sys.argv[2], 'status']))")  # fmt: skip
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-c", program, str(runtime), str(settings)], cwd=ROOT, stdout=writer,
                          stderr=subprocess.PIPE, text=True, timeout=30)  # fmt: skip
    os.close(writer)
    assert done.returncode == cli.FAILED and done.stderr == ""


@as_root
@pytest.mark.parametrize("command, woken", [("run", True), ("run --once", False)])
def test_a_retry_wakes_the_agent_that_waits_and_does_not_end_the_one_that_runs_once(
    settings: Path, runtime: Path, command: str, woken: bool
) -> None:
    """SIGHUP ends the latter, which looks for what was asked before each step anyway."""
    heard: list[int] = []
    before = signal.signal(signal.SIGHUP, lambda number, _frame: heard.append(number))
    try:
        with only_one(runtime):
            (runtime / "lock").write_text(f"process {os.getpid()} (`mcdaemon {command}`)\n")
            assert wake(runtime)
        assert bool(heard) == woken
    finally:
        signal.signal(signal.SIGHUP, before)
