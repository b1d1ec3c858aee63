"""sd_notify, against real datagram sockets."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from mcdaemon.report.notify import Notifier, watchdog_interval


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
        server.bind(str(tmp_path / "notify"))
        server.settimeout(5)
        yield server


def test_ready_carries_the_status_in_the_same_message(listener: socket.socket) -> None:
    assert Notifier(listener.getsockname()).ready("Rest: the node has rendered-worker-1.")
    assert listener.recv(4096) == b"READY=1\nSTATUS=Rest: the node has rendered-worker-1."


def test_an_abstract_socket_is_reached() -> None:
    name = f"mcdaemon-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
        server.bind("\0" + name)
        server.settimeout(5)
        assert Notifier("@" + name).watchdog()
        assert server.recv(4096) == b"WATCHDOG=1"


def test_a_line_break_in_a_status_cannot_smuggle_another_assignment(listener: socket.socket) -> None:
    Notifier(listener.getsockname()).status("cannot pull:\nMAINPID=1\r\n  x\u2028READY=1")
    assert listener.recv(4096) == b"STATUS=cannot pull: MAINPID=1 x READY=1"


def test_a_very_long_status_still_fits_one_datagram(listener: socket.socket) -> None:
    assert Notifier(listener.getsockname()).status("ä" * 1_000_000)
    assert len(listener.recv(1 << 20)) < 4096


def test_a_status_that_is_no_unicode_does_not_stop_the_agent(listener: socket.socket) -> None:
    assert Notifier(listener.getsockname()).status("file \udcff of a config")
    assert listener.recv(4096) == b"STATUS=file ? of a config"


def test_an_empty_status_sends_nothing(listener: socket.socket) -> None:
    assert not Notifier(listener.getsockname()).status("  \n ")


def test_reloading_tells_when_it_began(listener: socket.socket) -> None:
    Notifier(listener.getsockname()).reloading()
    first, second = listener.recv(4096).decode().split("\n")
    assert first == "RELOADING=1"
    assert int(second[len("MONOTONIC_USEC=") :]) > 0


def test_stopping_and_more_time_are_said(listener: socket.socket) -> None:
    notifier = Notifier(listener.getsockname())
    notifier.stopping("Stopping: told to.")
    notifier.extend_timeout(2.5)
    assert listener.recv(4096) == b"STOPPING=1\nSTATUS=Stopping: told to."
    assert listener.recv(4096) == b"EXTEND_TIMEOUT_USEC=2500000"


def test_outside_systemd_nothing_is_sent_and_nothing_fails() -> None:
    notifier = Notifier.from_environment({})
    assert not notifier.ready("x")
    assert not notifier.watchdog()


def test_the_socket_is_taken_from_the_environment_so_that_podman_cannot_speak_for_the_agent() -> None:
    environment = {"NOTIFY_SOCKET": "/run/x", "PATH": "/usr/bin"}
    assert Notifier.from_environment(environment).address == "/run/x"
    assert environment == {"PATH": "/usr/bin"}


def test_a_socket_that_is_gone_is_logged_and_survived(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert not Notifier(str(tmp_path / "gone")).ready("x")
    assert "cannot notify systemd at" in caplog.text


def test_a_listener_that_never_reads_does_not_block_the_loop(listener: socket.socket) -> None:
    notifier = Notifier(listener.getsockname())
    # The kernel queues a few datagrams (net.unix.max_dgram_qlen); the next one would wait for ever.
    for _ in range(10_000):
        if not notifier.watchdog():
            return
    pytest.fail("the queue of the socket never filled")


@pytest.mark.parametrize("address", ["vsock:2:9999", "relative/path"])
def test_an_address_that_is_not_spoken_is_ignored_with_a_word(address: str, caplog: pytest.LogCaptureFixture) -> None:
    assert Notifier.from_environment({"NOTIFY_SOCKET": address}).address == ""
    assert address in caplog.text


def test_the_watchdog_is_fed_twice_per_limit() -> None:
    environment = {"WATCHDOG_USEC": "300000000", "WATCHDOG_PID": str(os.getpid())}
    assert watchdog_interval(environment) == 150.0
    assert environment == {}


def test_a_watchdog_for_another_process_is_not_ours() -> None:
    assert watchdog_interval({"WATCHDOG_USEC": "1000000", "WATCHDOG_PID": "1"}) is None


@pytest.mark.parametrize("limit", ["", "0", "-5", "soon", "1e6", "²"])
def test_a_watchdog_limit_that_makes_no_sense_is_not_served(limit: str) -> None:
    assert watchdog_interval({"WATCHDOG_USEC": limit}) is None
