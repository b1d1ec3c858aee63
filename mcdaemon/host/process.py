"""Running other programs: always with a time limit, never through a shell, and without looking hung to the watchdog."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import Callable, Optional

from mcdaemon.errors import Failure, Transient, from_os_error

BEAT = 2.0
"""Seconds between two signs of life while a program runs."""


def _silent() -> None:
    """Nobody waits for a sign of life."""


_LEFT = 1.0
"""Seconds that a killed program has for its last words."""

_TAIL = 1 << 16
"""Bytes at the end of a script's output that are kept: one that never stops talking must not fill the memory."""

_QUOTED = 500
"""Characters of a script's last line that are quoted at most."""

STOPPED = "told-to-stop"
"""Code of the error of a wait that was given up because the agent has to end."""


def _never() -> bool:
    """Nobody ends this process but by killing it."""
    return False


_sign_of_life: Callable[[], object] = _silent
_has_to_end: Callable[[], bool] = _never


def on_wait(sign_of_life: Callable[[], object], has_to_end: Callable[[], bool] = _never) -> None:
    """Call `sign_of_life` every few seconds while a program runs: the loop waits, it does not hang.

    `has_to_end`: asked as often; when true, the wait is given up: a drain can take an hour, systemd's patience is 90 s.
    """
    global _sign_of_life, _has_to_end  # one process has one watchdog
    _sign_of_life, _has_to_end = sign_of_life, has_to_end


def check_end(doing: str, hint: str = "") -> None:
    """In a wait that may be given up. Raises Transient with the code STOPPED when the agent has to end."""
    if _has_to_end():
        raise Transient(f"cannot {doing}: the agent was told to stop", hint, STOPPED)


def alive() -> bool:
    """Say so, in a wait of another kind. True, so that it can be a GLib source, which then goes on."""
    _sign_of_life()
    return True


def run(
    argv: Sequence[str],
    doing: str,
    timeout: float,
    failed: Callable[[str], Failure],
    environment: Optional[Mapping[str, str]] = None,
    merged: bool = False,
    passed: Sequence[int] = (),
) -> str:
    """The program's standard output.

    `environment`: all that the program gets to see; None: the agent's own. `passed`: descriptors that it inherits.
    `merged`: for a script of an administrator, which complains on either output: errors are part of the output, of
    which the end is kept, and the last line is what a failure quotes; its own end counts, and what it left in its
    process group is killed then.

    `failed` makes the error of a non-zero exit out of the sentence "cannot <doing>: <last words of the program>".
    Raises Transient when it does not end within `timeout` seconds; it and its children are killed then. It ends when
    nobody holds its output any more (not with `merged`); a daemon that it leaves behind has to have an output
    of its own.
    """
    try:
        child = subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if merged else subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
            env=environment,
            pass_fds=passed,
        )
    except OSError as error:
        raise from_os_error(error, "run", argv[0]) from error
    try:
        output, complaint = (_await_script if merged else _await)(child, argv[0], doing, timeout)
    finally:
        if child.poll() is None:
            _end(child)
    if child.returncode != 0:
        raise failed(f"cannot {doing}: {_last_words(argv[0], child.returncode, complaint)}")
    return output


def _await(child: subprocess.Popen[str], program: str, doing: str, timeout: float) -> tuple[str, str]:
    """Its output and complaint at its end. Raises Transient after `timeout` seconds or when the agent has to end."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            return child.communicate(timeout=max(0.0, min(BEAT, deadline - time.monotonic())))
        except subprocess.TimeoutExpired:
            _go_on(program, doing, timeout, deadline)


def _go_on(program: str, doing: str, timeout: float, deadline: float) -> None:
    """Between two waits. Raises Transient when there is to be no further one."""
    _sign_of_life()
    check_end(doing, "it is done again")
    if time.monotonic() >= deadline:
        raise Transient(f"cannot {doing}: {program} did not end within {timeout:.0f} s")


def _await_script(child: subprocess.Popen[str], program: str, doing: str, timeout: float) -> tuple[str, str]:
    """The end of its output, and the last line of that, as soon as it has ended itself. Raises as `_await` does."""
    assert child.stdout is not None
    deadline, beat, output = time.monotonic() + timeout, time.monotonic() + BEAT, child.stdout.fileno()
    os.set_blocking(output, False)
    ended = os.pidfd_open(child.pid)
    try:
        kept, open_ones = b"", [output, ended]
        while True:
            left = min(beat, deadline) - time.monotonic()
            ready = select.select(open_ones, [], [], max(0.0, left))[0]
            if ended in ready:
                break
            if output in ready:
                said = os.read(output, _TAIL)
                kept = (kept + said)[-_TAIL:]
                open_ones = open_ones if said else [ended]
            if time.monotonic() >= min(beat, deadline):
                beat = time.monotonic() + BEAT
                _go_on(program, doing, timeout, deadline)
    finally:
        os.close(ended)
    os.killpg(child.pid, signal.SIGKILL)  # not waited for yet, so the number is still its own
    kept = (kept + _rest(output))[-_TAIL:]
    child.wait()
    child.stdout.close()
    text = kept.decode(errors="replace")
    return text, _last_line(text)


def _rest(output: int) -> bytes:
    """What lies in the pipe now. One that left the group may write on for ever: no more than a pipe can hold."""
    found = b""
    while len(found) < 16 * _TAIL:
        try:
            said = os.read(output, _TAIL)
        except BlockingIOError:
            break
        if not said:
            break
        found += said
    return found


def _last_line(text: str) -> str:
    """The last line with something to read in it; control characters must not reach a terminal or a log."""
    lines = ("".join(c if c.isprintable() else "\ufffd" for c in line) for line in reversed(text.splitlines()))
    return next((line.strip()[:_QUOTED] for line in lines if line.strip("\ufffd \t")), "")


def _end(child: subprocess.Popen[str]) -> None:
    os.killpg(child.pid, signal.SIGKILL)
    try:
        child.communicate(timeout=_LEFT)
    except subprocess.TimeoutExpired:
        # One that left the session still holds the output; it is not waited for.
        for stream in (child.stdout, child.stderr):
            if stream is not None:
                stream.close()
        child.wait()


def _last_words(program: str, status: int, complaint: str) -> str:
    words = complaint.strip()
    if status < 0:
        return f"{program} was killed by signal {-status} ({signal.strsignal(-status) or 'no name'})"
    return f"{program}: {words}" if words else f"{program} ended with exit status {status}"
