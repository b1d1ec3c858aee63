"""The root shell of a guest, with a real bash at the other end of a socket: bytes, no seeking, as a port."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from vmlab import rootshell
from vmlab.rootshell import SCRIPT, Peer, Shell, ShellGone, script_of

from tests.stand.machine import CommandFailed

BYTES = bytes(range(256)) * 3


class Guest:
    """What a guest does: runs the script on its end of a line, and starts it again when it dies, as systemd would."""

    def __init__(self, folder: Path, end: int) -> None:
        self.folder, self.end = folder, end
        self.start()

    def start(self) -> None:
        environment = {"PATH": os.environ["PATH"], "VMLAB_RUN": str(self.folder)}
        self.process = subprocess.Popen(
            ["bash", str(SCRIPT), "-"], stdin=self.end, stdout=self.end, stderr=subprocess.DEVNULL, env=environment,
            start_new_session=True,
        )  # fmt: skip

    def die(self) -> None:
        """As `systemctl kill`: the shell and the commands that did not leave its group; they have left it here."""
        for session in self.folder.glob("rootshell.*/*.pid"):
            self._kill(int(session.read_text()))
        self._kill(self.process.pid)
        self.process.wait(10)

    def _kill(self, group: int) -> None:
        try:
            os.killpg(group, signal.SIGKILL)
        except ProcessLookupError:
            pass


@contextmanager
def line(folder: Path) -> Iterator[tuple[Shell, Guest]]:
    here, there = socket.socketpair()
    guest = Guest(folder, there.fileno())
    shell = Shell(here)
    try:
        yield shell, guest
    finally:
        guest.die()
        shell.close()
        there.close()


@pytest.fixture
def both(tmp_path: Path) -> Iterator[tuple[Shell, Guest]]:
    with line(tmp_path) as made:
        yield made


@pytest.fixture
def shell(both: tuple[Shell, Guest]) -> Shell:
    return both[0]


@pytest.fixture
def raw(tmp_path: Path) -> Iterator[tuple[Shell, socket.socket]]:
    """A shell whose guest is the test itself."""
    here, there = socket.socketpair()
    there.settimeout(10)
    made = Shell(here)
    made.peer = Peer("first", "boot")
    yield made, there
    made.close()
    there.close()


def asked_token(there: socket.socket) -> str:
    data = b""
    while b"@vmlab run " not in data:
        data += there.recv(65536)
    return data.split(b"@vmlab run ")[1].split()[0].decode()


# -- what it must do --------------------------------------------------------------------------------------------------


def test_it_tells_who_answers_and_in_which_boot(shell: Shell) -> None:
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    peer = shell.wait_ready(30)
    assert peer.boot_id == boot_id and shell.wait_ready(30) == peer


def test_output_error_and_status_come_back_apart(shell: Shell) -> None:
    done = shell.run(["bash", "-c", "echo out; echo err >&2; exit 3"], check=False)
    assert (done.stdout, done.stderr, done.returncode) == ("out\n", "err\n", 3)


def test_a_failure_raises_with_all_that_the_command_said(shell: Shell) -> None:
    with pytest.raises(CommandFailed, match="status 7") as caught:
        shell.run(["bash", "-c", "echo why >&2; exit 7"])
    assert caught.value.result.returncode == 7 and caught.value.result.stderr == "why\n"


def test_every_byte_goes_in_and_comes_out(shell: Shell) -> None:
    done = shell.run_bytes(["tee", "/dev/stderr"], input=BYTES)
    assert done.stdout == BYTES and done.stderr == BYTES


@pytest.mark.parametrize("size", [0, 1, 56, 57, 58, 3_000_000])
def test_input_and_output_of_any_size_are_whole(shell: Shell, size: int) -> None:
    data = os.urandom(size)
    assert shell.run_bytes(["cat"], input=data).stdout == data


def test_marks_in_the_output_are_output(shell: Shell) -> None:
    text = "\n@vmlab done 0000000000000000 0 0 0\n\n@vmlab ready x y\n@vmlab hello a b c\n"
    assert shell.run(["cat"], input=text).stdout == text


def test_marks_in_the_input_start_nothing(shell: Shell, tmp_path: Path) -> None:
    shell.run(["cat"], input=f"\n@vmlab run 00000000 0 0\ntouch {tmp_path}/never\n")
    assert not (tmp_path / "never").exists()


@pytest.mark.parametrize(
    "word", ["", " ", "a  b", "'", '"', "$HOME", "`id`", "\\", "*", "a\nb", "é€", "-n", "!", "@vmlab", "~", "#"]
)
def test_words_reach_the_command_as_they_are(shell: Shell, word: str) -> None:
    done = shell.run(["printf", "%s|", word, word], env={"A_WORD": word})
    assert done.stdout == f"{word}|{word}|"
    assert shell.run(["printenv", "A_WORD"], env={"A_WORD": word}).stdout == word + "\n"


def test_a_command_longer_than_an_argument_may_be_is_run(shell: Shell) -> None:
    words = ["word"] * 40_000
    assert shell.run(["bash", "-c", "echo $#", "-", *words]).stdout == "40000\n"


def test_the_working_directory_is_the_one_asked_for(shell: Shell, tmp_path: Path) -> None:
    assert shell.run(["pwd"]).stdout == "/\n"
    assert shell.run(["pwd"], cwd=str(tmp_path)).stdout == f"{tmp_path}\n"
    assert shell.run(["pwd"], cwd=f"{tmp_path}/none", check=False).returncode == 126


def test_a_command_sees_neither_the_line_nor_the_next_commands(shell: Shell) -> None:
    assert shell.run(["cat"]).stdout == ""
    assert shell.run(["bash", "-c", "ls -l /proc/self/fd | grep -c socket"], check=False).stdout == "0\n"


def test_what_has_no_program_is_said_by_its_status(shell: Shell) -> None:
    assert shell.run(["/no/such/program"], check=False).returncode == 127


def test_a_command_that_a_signal_ends_has_the_shell_s_status(shell: Shell) -> None:
    assert shell.run(["bash", "-c", "kill -TERM $$"], check=False).returncode == 128 + signal.SIGTERM


def test_files_are_written_with_their_mode_and_read_back(shell: Shell, tmp_path: Path) -> None:
    path = str(tmp_path / "new folder" / "it's")
    shell.write(path, BYTES, 0o600)
    assert shell.read_bytes(path) == BYTES and os.stat(path).st_mode & 0o7777 == 0o600
    with pytest.raises(CommandFailed, match="cannot read /no/such/file"):
        shell.read_bytes("/no/such/file")
    with pytest.raises(CommandFailed, match="cannot write /proc/none/x"):
        shell.write("/proc/none/x", "")


# -- time and death ---------------------------------------------------------------------------------------------------


def test_a_command_out_of_time_is_killed_and_what_it_said_is_told(shell: Shell) -> None:
    with pytest.raises(CommandFailed, match="did not end within 0.5 s") as caught:
        shell.run(["bash", "-c", "echo before; echo why >&2; exec sleep 1000"], timeout=0.5)
    result = caught.value.result
    assert (result.returncode, result.stdout, result.stderr) == (-signal.SIGKILL, "before\n", "why\n")


def test_its_children_are_killed_with_it(shell: Shell, tmp_path: Path) -> None:
    with pytest.raises(CommandFailed):
        shell.run(["bash", "-c", f"sleep 1000 & echo $! >{tmp_path}/child; wait"], timeout=1.0)
    child = (tmp_path / "child").read_text().strip()
    state = Path(f"/proc/{child}/stat")
    assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"


def test_a_command_that_nobody_waits_for_is_started(shell: Shell, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "told")
    shell.tell(["bash", "-c", f"echo told >{tmp_path}/told"])
    assert (tmp_path / "told").read_text() == "told\n"
    assert shell.run(["echo", "on"]).stdout == "on\n"


def test_a_guest_that_takes_nothing_is_said(raw: tuple[Shell, socket.socket]) -> None:
    shell, _there = raw
    with pytest.raises(ShellGone, match="did not take `echo"):
        shell.tell(["echo", "x" * 2_000_000], timeout=0.3)


def test_two_commands_in_a_row_after_a_time_out_get_their_own_answers(shell: Shell) -> None:
    with pytest.raises(CommandFailed):
        shell.run(["sleep", "1000"], timeout=0.2)
    assert [shell.run(["echo", word]).stdout for word in ("one", "two")] == ["one\n", "two\n"]


def test_a_command_that_ignores_signals_is_killed_as_well(shell: Shell) -> None:
    with pytest.raises(CommandFailed):
        shell.run(["bash", "-c", "trap '' TERM INT HUP; while :; do sleep 0.1; done"], timeout=0.5)
    assert shell.run(["echo", "on"]).stdout == "on\n"


def test_a_command_is_out_of_time_before_it_could_begin(shell: Shell) -> None:
    shell.wait_ready(30)
    with pytest.raises(CommandFailed):
        shell.run(["sleep", "1000"], timeout=0.0)
    assert shell.run(["echo", "on"]).stdout == "on\n"


def test_a_daemon_that_keeps_its_output_open_does_not_hold_the_answer(shell: Shell) -> None:
    done = shell.run(["bash", "-c", "sleep 30 & echo $!"], timeout=20)
    os.kill(int(done.stdout), signal.SIGKILL)


def test_a_late_answer_to_a_command_that_was_given_up_is_passed_over(
    raw: tuple[Shell, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    shell, there = raw
    monkeypatch.setattr(rootshell, "ANSWER_TIMEOUT", 0.1)
    with pytest.raises(CommandFailed, match="does not answer to its kill"):
        shell.run(["one"], timeout=0.1)
    first = asked_token(there)
    answers = threading.Thread(target=_answer_late, args=(there, first))
    answers.start()
    assert shell.run(["two"], timeout=10).stdout == "two"
    answers.join(10)


def _answer_late(there: socket.socket, first: str) -> None:
    second = asked_token(there)
    there.sendall(f"\n@vmlab done {first} 0 4 0\nb25l\n@vmlab done {second} 0 4 0\ndHdv".encode())


def test_a_shell_that_dies_without_a_successor_is_said(both: tuple[Shell, Guest]) -> None:
    shell, guest = both
    shell.wait_ready(30)
    guest.die()
    with pytest.raises(ShellGone, match="no root shell answers"):
        shell.wait_ready(0.5)


def test_a_shell_that_dies_under_a_command_and_is_started_again_is_said_at_once_and_works_on(
    both: tuple[Shell, Guest], tmp_path: Path
) -> None:
    shell, guest = both
    before = shell.wait_ready(30)
    os.mkfifo(tmp_path / "begun")

    def kill() -> None:
        (tmp_path / "begun").read_bytes()
        guest.die()
        guest.start()

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(ShellGone, match="died and was started again"):
        shell.run(["bash", "-c", f"echo >{tmp_path}/begun; exec sleep 1000"], timeout=60)
    killer.join(10)
    assert shell.run(["echo", "on"]).stdout == "on\n"
    assert shell.peer is not None and shell.peer.instance != before.instance


def test_a_line_that_is_closed_is_said(raw: tuple[Shell, socket.socket]) -> None:
    shell, there = raw
    there.close()
    with pytest.raises(ShellGone, match="line to the guest"):
        shell.run(["true"], timeout=30)


def test_an_answer_that_breaks_off_in_the_middle_is_no_answer(raw: tuple[Shell, socket.socket]) -> None:
    shell, there = raw

    def guest() -> None:
        token = asked_token(there)
        there.sendall(f"\n@vmlab done {token} 0 4000 0\nAAAA\n@vmlab ready second boot\n".encode())

    answers = threading.Thread(target=guest)
    answers.start()
    with pytest.raises(ShellGone, match="died and was started again"):
        shell.run(["true"], timeout=30)
    answers.join(10)


@pytest.mark.parametrize(
    "noise",
    [b"\n@vmlab done\n", b"@vmlab done {t} x 4 0\nb25l", b"@vmlab done {t} 0 -4 0\n", b"@vmlab hello\n",
     b"\xff\x00@@\n", b"@vmlab done {t} 0 4 0\n????", b"@vmlab ready first boot\n"],
)  # fmt: skip
def test_noise_on_the_line_is_passed_over(raw: tuple[Shell, socket.socket], noise: bytes) -> None:
    shell, there = raw

    def guest() -> None:
        token = asked_token(there).encode()
        there.sendall(noise.replace(b"{t}", token) + b"\n@vmlab done " + token + b" 5 4 0\nb25l")

    answers = threading.Thread(target=guest)
    answers.start()
    done = shell.run_bytes(["true"], timeout=30)
    answers.join(10)
    assert (done.returncode, done.stdout) == (5, b"one")


def test_a_new_shell_is_not_confused_by_half_a_command_for_its_predecessor(both: tuple[Shell, Guest]) -> None:
    """The rest of a command of which the dead shell had read a part is no command."""
    shell, guest = both
    shell.wait_ready(30)
    shell._say("run 0123456789abcdef 100000 0", b"QUFB" * 25_000)
    shell._unsent = shell._unsent[shell._channel.send(shell._unsent[:1000]) :]
    guest.die()
    guest.start()
    assert shell.wait_ready(30).instance and shell.run(["echo", "on"]).stdout == "on\n"


@pytest.mark.parametrize("argv", [[], ["a\0b"]])
def test_what_cannot_be_a_command_is_refused(argv: list[str]) -> None:
    with pytest.raises(ValueError, match="cannot run"):
        script_of(argv, None, "/")


def test_what_is_no_variable_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot set"):
        script_of(["true"], {"A=B; rm": "x"}, "/")
