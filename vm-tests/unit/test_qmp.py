"""QEMU's protocol against a peer that fails as QEMU can."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from unit.peer import Answer, Peer, line
from vmlab.qmp import Qmp, QmpError

_GREETING = line({"QMP": {"version": {}, "capabilities": []}})
Connect = Callable[..., "tuple[Qmp, Peer]"]


def _ok(request: dict[str, Any]) -> list[bytes]:
    return [line({"return": {}, "id": request["id"]})]


@pytest.fixture
def connect(tmp_path: Path) -> Iterator[Connect]:
    made: list[tuple[Qmp, Peer]] = []

    def make(answer: Answer = _ok, greeting: bytes = _GREETING) -> tuple[Qmp, Peer]:
        peer = Peer(answer, greeting)
        qmp = Qmp(peer.ours, tmp_path / "qmp.log", threading.Condition())
        made.append((qmp, peer))
        return qmp, peer

    yield make
    for qmp, peer in made:
        peer.close()
        qmp.close()


def test_an_answer_in_pieces_between_events_is_found(connect: Connect) -> None:
    def answer(request: dict[str, Any]) -> list[bytes]:
        text = line({"return": {"status": "running"}, "id": request["id"]})
        return [line({"event": "STOP", "data": {}}), text[:9], text[9:] + b'{"event": "RES', b'UME"}\r\n']

    qmp, _ = connect(answer)
    qmp.negotiate(10)
    assert qmp.execute("query-status", timeout=10) == {"status": "running"}
    with qmp._changed:
        assert qmp._changed.wait_for(lambda: len(qmp.events) == 4, 10)
    assert [event["event"] for event in qmp.events] == ["STOP", "RESUME"] * 2
    assert qmp.event("STOP", since=3) is None


def test_a_refusal_says_what_was_asked_and_why(connect: Connect) -> None:
    qmp, _ = connect(
        lambda request: [line({"error": {"class": "GenericError", "desc": "no such bus"}, "id": request["id"]})]
    )
    with pytest.raises(QmpError, match="refuses qmp_capabilities: no such bus"):
        qmp.negotiate(10)


def test_no_answer_is_an_error_after_the_time_limit(connect: Connect) -> None:
    qmp, _ = connect(lambda request: [])
    with pytest.raises(QmpError, match="did not answer stop"):
        qmp.execute("stop", timeout=0.1)


def test_a_late_answer_is_not_taken_for_the_next_command(connect: Connect) -> None:
    late: list[bytes] = []

    def answer(request: dict[str, Any]) -> list[bytes]:
        reply = line({"return": request["execute"], "id": request["id"]})
        if request["execute"] == "slow":
            late.append(reply)
            return []
        return [*late, reply]

    qmp, _ = connect(answer)
    with pytest.raises(QmpError):
        qmp.execute("slow", timeout=0.1)
    assert qmp.execute("quick", timeout=10) == "quick"


def test_the_end_of_qemu_ends_a_wait_at_once(connect: Connect) -> None:
    qmp, peer = connect(lambda request: [])
    threading.Timer(0.05, peer.close).start()
    with pytest.raises(QmpError, match="QEMU ended during cont"):
        qmp.execute("cont", timeout=50)
    assert not qmp.open
    with pytest.raises(QmpError):
        qmp.execute("cont", timeout=50)


def test_qemu_that_ends_before_its_greeting_is_told_from_a_silent_one(connect: Connect) -> None:
    qmp, peer = connect(greeting=b"")
    with pytest.raises(QmpError, match="did not greet in time"):
        qmp.negotiate(0.1)
    peer.close()
    with pytest.raises(QmpError, match="ended before its greeting"):
        qmp.negotiate(50)


def test_a_line_that_was_cut_by_a_kill_is_only_logged(connect: Connect, tmp_path: Path) -> None:
    qmp, peer = connect()
    qmp.negotiate(10)
    peer.send(b'{"event": "SHUTD\n', line({"event": "STOP"}), b"[1]\n")
    with qmp._changed:
        assert qmp._changed.wait_for(lambda: qmp.events, 10)
    assert [event["event"] for event in qmp.events] == ["STOP"]
    assert '{"event": "SHUTD' in (tmp_path / "qmp.log").read_text()
