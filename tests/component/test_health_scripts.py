"""Health scripts, really run: greenboot's layout, what they see, and what becomes of those that misbehave."""

from __future__ import annotations

import os
import select
from pathlib import Path

import pytest

from mcdaemon.errors import Broken, Failure
from mcdaemon.host import process
from mcdaemon.host.greenboot import GREEN, RED, Scripts

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to somebody else")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "health.d"
    made.mkdir()
    return made


def write(path: Path, text: str, mode: int = 0o755) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(mode)
    return path


def scripts(*folders: Path, limit: float = 10.0) -> Scripts:
    return Scripts(folders, limit)


def test_no_folder_and_an_empty_one_have_no_scripts(folder: Path, tmp_path: Path) -> None:
    found = scripts(tmp_path / "absent", folder)
    assert not found.present() and found.required() == "" and found.wanted() == () and found.verdict(GREEN) == ()


def test_required_scripts_run_by_name_folder_by_folder_until_one_fails(folder: Path, tmp_path: Path) -> None:
    other, log = tmp_path / "other", tmp_path / "log"
    for path in (folder / "required.d/20", folder / "required.d/10", folder / "30", other / "required.d/00"):
        write(path, f'echo "$0" >>{log}')
    write(folder / "required.d/25", f'echo "$0" >>{log}; echo "no database" >&2; exit 3')
    said = scripts(folder, other).required()
    assert said == f"cannot pass the health script {folder}/required.d/25: {folder}/required.d/25: no database"
    assert [line.rpartition("/")[2] for line in log.read_text().splitlines()] == ["30", "10", "20", "25"]
    (folder / "required.d/25").unlink()
    assert scripts(folder, other).required() == ""
    assert log.read_text().splitlines()[-1] == f"{other}/required.d/00"


def test_the_last_line_is_the_reason_wherever_it_was_written(folder: Path) -> None:
    write(folder / "10", "echo first; echo second >&2; echo the reason; exit 1")
    assert scripts(folder).required().endswith(": the reason")
    write(folder / "10", "exit 4")
    assert scripts(folder).required().endswith("ended with exit status 4")
    write(folder / "10", "kill -SEGV $$")
    assert "killed by signal 11" in scripts(folder).required()


def test_all_wanted_scripts_run_and_all_complaints_are_told(folder: Path, tmp_path: Path) -> None:
    write(folder / "wanted.d/10", "echo one; exit 1")
    write(folder / "wanted.d/20", f"touch {tmp_path}/ran")
    write(folder / "wanted.d/30", "echo three; exit 1")
    found = scripts(folder)
    assert [said.rpartition(": ")[2] for said in found.wanted()] == ["one", "three"]
    assert (tmp_path / "ran").exists() and found.required() == "" and found.present()


def test_greenboots_own_folders_have_the_scripts_for_the_verdict_beside_check(tmp_path: Path) -> None:
    write(tmp_path / "greenboot/check/required.d/10.sh", "exit 0")
    write(tmp_path / "greenboot/green.d/10.sh", f"echo green >>{tmp_path}/log")
    write(tmp_path / "greenboot/red.d/10.sh", f"echo red >>{tmp_path}/log; exit 1")
    found = scripts(tmp_path / "greenboot/check")
    assert found.verdict(GREEN) == () and "10.sh ended with exit status 1" in found.verdict(RED)[0]
    assert (tmp_path / "log").read_text() == "green\nred\n"


def test_a_shell_script_that_is_not_executable_is_run_as_greenboot_does_it(folder: Path) -> None:
    write(folder / "required.d/10-check.sh", "echo it ran; exit 1", 0o644)
    assert scripts(folder).required().endswith("it ran")


def test_what_is_no_script_is_left_alone(folder: Path) -> None:
    write(folder / "README", "exit 1", 0o644)
    write(folder / ".10-hidden.sh", "exit 1")
    (folder / "wanted.d").mkdir()
    (folder / "dangling").symlink_to("nowhere")
    assert scripts(folder).required() == "" and not scripts(folder).present()


def test_a_script_that_never_ends_is_killed_with_its_children_and_fails(folder: Path) -> None:
    write(folder / "10", "sleep 600 & sleep 600")
    assert "did not end within 1 s" in scripts(folder, limit=1.0).required()


def test_a_script_sees_nothing_of_the_agent(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", "/run/x")
    monkeypatch.setenv("SECRET", "hunter2")
    write(folder / "10", f"env >{tmp_path}/env; read line && echo heard >>{tmp_path}/env; true")
    assert scripts(folder).required() == ""
    text = (tmp_path / "env").read_text()
    assert "SECRET" not in text and "NOTIFY" not in text and "heard" not in text and "PATH=" in text


@pytest.mark.parametrize("mode", [0o775, 0o757])
def test_a_script_that_others_can_write_is_not_run_and_fails(folder: Path, tmp_path: Path, mode: int) -> None:
    write(folder / "10", f"touch {tmp_path}/ran", mode)
    assert "others than root can write it" in scripts(folder).required()
    assert not (tmp_path / "ran").exists()


def test_a_script_in_a_folder_that_others_can_write_is_not_run(folder: Path, tmp_path: Path) -> None:
    write(folder / "required.d/10", f"touch {tmp_path}/ran")
    (folder / "required.d").chmod(0o777)
    assert f"cannot trust {folder}/required.d" in scripts(folder).required()
    assert not (tmp_path / "ran").exists()


def test_a_link_leads_to_no_script_that_others_can_write(folder: Path, tmp_path: Path) -> None:
    write(tmp_path / "open", f"touch {tmp_path}/ran", 0o777)
    (folder / "10").symlink_to(tmp_path / "open")
    assert "cannot trust" in scripts(folder).required() and not (tmp_path / "ran").exists()


@as_root
def test_a_script_of_somebody_else_is_not_run(folder: Path, tmp_path: Path) -> None:
    os.chown(write(folder / "10", f"touch {tmp_path}/ran"), 1000, 1000)
    assert "cannot trust" in scripts(folder).required() and not (tmp_path / "ran").exists()


def test_a_file_in_the_place_of_the_folder_is_a_sentence_and_counts_as_a_check(tmp_path: Path) -> None:
    (tmp_path / "health.d").write_text("")
    found = scripts(tmp_path / "health.d")
    assert found.present()
    assert found.required() == f"cannot list the health scripts in {tmp_path}/health.d: Not a directory"


def test_an_interpreter_that_is_gone_is_a_failure(folder: Path) -> None:
    (folder / "10").write_text("#!/nonexistent\n")
    (folder / "10").chmod(0o755)
    assert "cannot run" in scripts(folder).required()


def test_an_agent_that_has_to_end_gives_no_verdict(folder: Path) -> None:
    write(folder / "10", "sleep 600")
    process.on_wait(lambda: None, lambda: True)
    try:
        with pytest.raises(Failure) as caught:
            scripts(folder, limit=30.0).required()
        assert caught.value.code == process.STOPPED and not isinstance(caught.value, Broken)
    finally:
        process.on_wait(lambda: None)


def test_a_script_that_leaves_a_child_with_its_output_is_judged_by_its_own_end(folder: Path, tmp_path: Path) -> None:
    """And what it left is gone: nobody else would ever end it."""
    write(folder / "10", f"sleep 600 & echo $! >{tmp_path}/pid; echo fine")
    assert scripts(folder, limit=3.0).required() == ""
    ended(int((tmp_path / "pid").read_text()))
    write(folder / "10", "sleep 600 & echo the reason; exit 1")
    assert scripts(folder, limit=3.0).required().endswith(": the reason")


def test_a_child_that_left_the_group_and_talks_for_ever_does_not_change_the_verdict(
    folder: Path, tmp_path: Path
) -> None:
    write(folder / "10", f"setsid sh -c 'echo $$ >{tmp_path}/pid; exec yes' & until test -s {tmp_path}/pid; do :; done")
    try:
        assert scripts(folder, limit=3.0).required() == ""
    finally:
        ended(int((tmp_path / "pid").read_text()))  # nobody reads any more: SIGPIPE


def test_a_script_that_never_ends_is_told_so_whatever_it_says(folder: Path) -> None:
    for text in ("exec yes", "exec >&- 2>&-; sleep 600"):
        write(folder / "10", text)
        assert "did not end within 1 s" in scripts(folder, limit=1.0).required()


def test_what_is_quoted_of_a_script_is_one_short_printable_line(folder: Path) -> None:
    write(folder / "10", r"printf 'a\n\033[31mred\n\000\n\n'; exit 1")
    assert scripts(folder).required().endswith(": \ufffd[31mred")
    write(folder / "10", "head -c 200000 /dev/urandom; exit 1")
    said = scripts(folder).required()
    assert said.isprintable() and len(said) < 1000
    write(folder / "10", r"printf '\000\000'; exit 4")
    assert scripts(folder).required().endswith("ended with exit status 4")


def ended(pid: int) -> None:
    """Wait for the end of a process that is nobody's child here."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        gone = bool(select.select([descriptor], [], [], 5)[0])
    finally:
        os.close(descriptor)
    if not gone:
        os.kill(pid, 9)
    assert gone, f"process {pid} lives on"
