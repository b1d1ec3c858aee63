"""The guest agent's protocol against a peer that fails as it can."""

from __future__ import annotations

import base64
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from unit.peer import Answer, Peer, line
from vmlab.guestagent import Agent, AgentError, AgentGone

Connect = Callable[..., "tuple[Agent, Peer]"]


def _sync(request: dict[str, Any]) -> list[bytes]:
    return [b"\xff" + line({"return": request["arguments"]["id"]})]


def _with_sync(answer: Answer) -> Answer:
    return lambda request: _sync(request) if request["execute"] == "guest-sync-delimited" else answer(request)


@pytest.fixture
def connect() -> Iterator[Connect]:
    made: list[tuple[Agent, Peer]] = []

    def make(answer: Answer = lambda request: [line({"return": {}})], listens: bool = True) -> tuple[Agent, Peer]:
        peer = Peer(_with_sync(answer))
        agent = Agent(peer.ours, threading.Condition())
        agent.set_port(listens)
        made.append((agent, peer))
        return agent, peer

    yield make
    for agent, peer in made:
        peer.close()
        agent.close()


def test_it_gets_in_step_past_the_rest_of_another_conversation(connect: Connect) -> None:
    agent, peer = connect(lambda request: [line({"return": "pong"})])
    peer.send(b'"half": 3}\n', line({"return": 17}))
    assert agent.request("guest-ping", timeout=10) == "pong"
    assert agent.request("guest-ping", timeout=10) == "pong"
    # Once in step it stays so.
    assert [one["execute"] for one in peer.requests] == ["guest-sync-delimited", "guest-ping", "guest-ping"]


def test_the_answer_of_a_request_that_was_given_up_is_not_the_next_ones(connect: Connect) -> None:
    held: list[bytes] = []

    def answer(request: dict[str, Any]) -> list[bytes]:
        if request["execute"] == "guest-fsfreeze-freeze":
            held.append(line({"return": "late"}))
            return []
        return [line({"return": "now"})]

    agent, peer = connect(answer)
    with pytest.raises(AgentError, match="did not answer guest-fsfreeze-freeze in time"):
        agent.request("guest-fsfreeze-freeze", timeout=0.1)
    peer.send(*held)
    assert agent.request("guest-ping", timeout=10) == "now"


def test_a_refusal_is_told_and_the_next_request_works(connect: Connect) -> None:
    def answer(request: dict[str, Any]) -> list[bytes]:
        if request["execute"] == "guest-exec":
            return [line({"error": {"class": "GenericError", "desc": "Failed to execute child"}})]
        return [line({"return": 1})]

    agent, _ = connect(answer)
    with pytest.raises(AgentError, match="refuses guest-exec: Failed to execute child"):
        agent.execute(["/nothing"])
    assert agent.request("guest-ping", timeout=10) == 1


def test_nobody_in_the_guest_is_known_before_anything_is_sent(connect: Connect) -> None:
    agent, peer = connect(listens=False)
    with pytest.raises(AgentGone):
        agent.request("guest-ping", timeout=50)
    assert peer.requests == []


def test_an_agent_that_goes_away_ends_the_wait_even_if_it_comes_back_at_once(connect: Connect) -> None:
    agent: Agent

    def restart(request: dict[str, Any]) -> list[bytes]:
        agent.set_port(False)
        agent.set_port(True)
        return []

    agent, _ = connect(restart)
    with pytest.raises(AgentGone, match="went away during guest-ping"):
        agent.request("guest-ping", timeout=50)


def test_qemus_end_is_the_agents_end(connect: Connect) -> None:
    agent, peer = connect(lambda request: [])
    threading.Timer(0.05, peer.close).start()
    with pytest.raises(AgentGone):
        agent.request("guest-ping", timeout=50)
    assert not agent.open


def test_output_that_the_agent_has_cut_is_an_error_and_not_half_the_truth(connect: Connect) -> None:
    agent, _ = connect(lambda request: [line({"return": {"exited": True, "exitcode": 0, "out-truncated": True}})])
    with pytest.raises(AgentError, match="longer than the guest agent keeps"):
        agent.status(7)


def test_a_signal_is_a_negative_status(connect: Connect) -> None:
    agent, _ = connect(lambda request: [line({"return": {"exited": True, "signal": 9, "out-data": "aGk="}})])
    status = agent.status(7)
    assert (status.returncode, status.out, status.err) == (-9, b"hi", b"")


def test_a_file_is_read_in_pieces_and_closed_also_when_reading_fails(connect: Connect) -> None:
    parts = iter([b"one ", b"two", b""])

    def answer(request: dict[str, Any]) -> list[bytes]:
        if request["execute"] != "guest-file-read":
            return [line({"return": 1000})]
        part = next(parts, None)
        if part is None:
            return [line({"error": {"desc": "Input/output error"}})]
        data = {"count": len(part), "eof": not part, "buf-b64": base64.b64encode(part).decode()}
        text = line({"return": data})
        return [text[:20], text[20:]]

    agent, peer = connect(answer)
    assert agent.read_file("/etc/x") == b"one two"
    with pytest.raises(AgentError, match="Input/output error"):
        agent.read_file("/etc/x")
    assert [one["execute"] for one in peer.requests].count("guest-file-close") == 2


def test_a_file_that_is_not_there_is_told_as_such(connect: Connect) -> None:
    said = {"error": {"desc": "failed to open file '/x' (mode: 'rb'): No such file or directory"}}
    agent, _ = connect(lambda request: [line(said)])
    with pytest.raises(FileNotFoundError):
        agent.read_file("/x")


def test_what_the_agent_writes_only_in_part_is_written_on(connect: Connect) -> None:
    written = b""

    def answer(request: dict[str, Any]) -> list[bytes]:
        nonlocal written
        if request["execute"] != "guest-file-write":
            return [line({"return": 1000})]
        data = base64.b64decode(request["arguments"]["buf-b64"])[:5]
        written += data
        return [line({"return": {"count": len(data), "eof": False}})]

    agent, _ = connect(answer)
    agent.write_file("/x", b"seventeen letters")
    assert written == b"seventeen letters"
