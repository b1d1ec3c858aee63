"""What a machine prints, in the pieces in which it comes."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest
from vmlab.console import PANIC, Console, LineSplitter


def test_a_line_that_comes_in_pieces_is_one_line() -> None:
    splitter = LineSplitter()
    assert splitter.feed(b"Kernel pa") == []
    assert splitter.rest() == "Kernel pa"
    assert splitter.feed(b"nic\r\nnext\r") == ["Kernel panic"]
    assert splitter.feed(b"\n\n") == ["next", ""]


def test_a_character_cut_in_two_is_whole_and_no_utf8_does_not_stop_it() -> None:
    splitter = LineSplitter()
    assert splitter.feed(b"caf\xc3") == []
    assert splitter.feed(b"\xa9\n\xff\xfe\n") == ["café", "\ufffd\ufffd"]


def test_colours_and_nul_bytes_are_taken_out() -> None:
    assert LineSplitter().feed(b"[\x1b[0;32m  OK  \x1b[0m] \0Started\x1b[K\n") == ["[  OK  ] Started"]


def test_what_comes_is_kept_byte_for_byte_and_its_end_is_told(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    changed = threading.Condition()
    console = Console(ours, tmp_path / "serial.log", changed)
    theirs.sendall(b"one\r\n\x1b[31mKernel panic - not syncing: no init")
    theirs.close()
    console.finish()
    assert not console.open
    assert (tmp_path / "serial.log").read_bytes() == b"one\r\n\x1b[31mKernel panic - not syncing: no init"
    # The last line has no end: a machine that resets does not print it.
    assert console.find(PANIC) == "Kernel panic - not syncing: no init"
    assert console.find("one", since=1) is None
    assert console.tail() == "one\nKernel panic - not syncing: no init"


def test_a_waiter_wakes_at_the_line_and_not_before(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    changed = threading.Condition()
    console = Console(ours, tmp_path / "journal.log", changed)
    theirs.sendall(b"mcdaemon[7]: rest: old\n")
    with changed:
        assert changed.wait_for(lambda: len(console.lines) == 1, 30)
    mark = console.mark()
    threading.Timer(0.05, theirs.sendall, [b"mcdaemon[7]: rest: new\n"]).start()
    with changed:
        assert changed.wait_for(lambda: console.find("rest: ", mark), 30)
    assert console.find("rest: ", mark) == "mcdaemon[7]: rest: new"
    theirs.close()
    console.finish()


def test_what_is_heard_comes_with_the_place_after_it_and_only_once(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    console = Console(ours, tmp_path / "journal.log", threading.Condition())
    theirs.sendall(b"mcdaemon[1]: drain: now\nmcdaemon[1]: rest: done\n")
    assert console.hear("drain: ", 30) == (1, "mcdaemon[1]: drain: now")
    assert console.hear(r"\]: ", 30, 1) == (2, "mcdaemon[1]: rest: done")
    with pytest.raises(TimeoutError, match="'reject: ' did not come within 0 s"):
        console.hear("reject: ", 0.05)
    theirs.close()
    assert console.hear("reject: ", 30) is None, "it will never come"
    console.finish()
