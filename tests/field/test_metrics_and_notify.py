"""Metrics over HTTP: what a monitoring system sees of a node that rests, waits, is refused or has failed."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator

import pytest
import requests
from prometheus_client.parser import text_string_to_metric_families

from tests.field.conftest import Aged, Push
from tests.field.evidence import Agent, faults
from tests.stand.configs import FileText, machine_config
from tests.stand.incidents import GATED
from tests.stand.node import DESIRED, Node, next_image

pytestmark = pytest.mark.stand

OLD = machine_config("50-old", files={"/etc/app.conf": "old\n", "/etc/secret": ("hunter2\n", 0o600)})
NEW = machine_config("50-new", files={"/etc/app.conf": "new\n"})


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Scraped:
    """A daemon on a node that rests on OLD, with its metrics at `url`."""

    def __init__(self, node: Node, port: int) -> None:
        self.node = node
        self.url = f"http://127.0.0.1:{port}/metrics"
        self.agent = Agent.start(node, "run")
        self.agent.wait_for("rest: ")

    def text(self) -> str:
        answer = requests.get(self.url, timeout=5)
        assert answer.status_code == 200 and answer.headers["Content-Type"].startswith("text/plain")
        return answer.text

    def samples(self) -> dict[str, dict[tuple[str, ...], float]]:
        """Values by name and label values."""
        found: dict[str, dict[tuple[str, ...], float]] = {}
        for family in text_string_to_metric_families(self.text()):
            for sample in family.samples:
                found.setdefault(sample.name, {})[tuple(sample.labels.values())] = sample.value
        return found

    def state(self) -> str:
        return next(labels[0] for labels, value in self.samples()["mcdaemon_state"].items() if value == 1)


@pytest.fixture
def scraped(aged: Aged) -> Iterator[Scraped]:
    port = free_port()
    found = Scraped(aged(OLD, settings=GATED + f"metrics: {{listen: '127.0.0.1:{port}'}}\n"), port)
    yield found
    found.agent.kill()


def test_a_node_at_rest_is_done(scraped: Scraped) -> None:
    samples = scraped.samples()
    assert scraped.state() == "Done" and sum(samples["mcdaemon_state"].values()) == 1
    assert samples["mcdaemon_step"][("rest",)] == 1
    assert ("50-old", "50-old") in samples["mcdaemon_config_info"]
    assert samples["mcdaemon_updates_total"][("done",)] == 1 and samples["mcdaemon_reboots_total"][()] == 1
    assert "hunter2" not in scraped.text()


def test_a_node_that_waits_says_for_what_and_since_when(scraped: Scraped, push: Push) -> None:
    scraped.node.desire(first=machine_config("50-new", os_image="127.0.0.1:1/os@sha256:" + "0" * 64))
    scraped.agent.wait_for("hold: ")
    samples = scraped.samples()
    assert scraped.state() == "Working" and samples["mcdaemon_step"][("hold",)] == 1
    assert [labels for labels, value in samples["mcdaemon_hold_reason"].items() if value == 1] == [("registry",)]
    assert samples["mcdaemon_next_retry_timestamp_seconds"][()] > samples["mcdaemon_last_round_timestamp_seconds"][()]


def test_a_drain_that_does_not_come_is_working_and_counted_as_retries(scraped: Scraped) -> None:
    scraped.node.desire(first=NEW)
    scraped.agent.wait_for("cannot drain")
    samples = scraped.samples()
    assert scraped.state() == "Working"
    assert [labels for labels, value in samples["mcdaemon_hold_reason"].items() if value == 1] == [("drain",)]
    assert samples["mcdaemon_transaction_seconds_count"][()] == 1


def test_a_config_that_is_refused_is_unreconcilable(scraped: Scraped) -> None:
    scraped.node.machine.write(f"{DESIRED}/first.json", "{", 0o600)
    scraped.agent.wait_for("reject: ")
    assert scraped.state() == "Unreconcilable"


def test_a_target_that_failed_is_degraded(scraped: Scraped) -> None:
    faults(scraped.node, fail={"at": "after-start", "text": "Packages not found: nonsuch"}, once=True)
    scraped.node.desire(first=NEW)
    scraped.agent.wait_for("hold: this config was tried")
    samples = scraped.samples()
    assert scraped.state() == "Degraded" and samples["mcdaemon_updates_total"][("discarded",)] == 1
    assert [labels for labels, value in samples["mcdaemon_hold_reason"].items() if value == 1] == [("failed-before",)]


def test_a_change_by_hand_shows(scraped: Scraped) -> None:
    scraped.node.machine.write("/etc/app.conf", "by hand\n")
    scraped.node.machine.run(["pkill", "-HUP", "-f", "mcdaemon.pyz run"])
    scraped.agent.wait_for("rest: current, but changed")
    assert scraped.state() == "Degraded"


def test_an_image_that_overrides_the_release_shows(scraped: Scraped, push: Push) -> None:
    release, custom = push(next_image("417.94.41"), "os:v41"), push(next_image("417.94.42"), "os:v42")
    files: dict[str, FileText] = {"/etc/app.conf": "old\n", "/etc/secret": ("hunter2\n", 0o600)}
    scraped.node.desire(
        release=machine_config("00-worker", files=files, os_image=release, generated=True),
        custom=machine_config("99-custom", os_image=custom),
    )
    scraped.agent.wait_for("cannot drain")
    assert scraped.samples()["mcdaemon_os_overridden"][()] == 1


def test_a_port_that_is_taken_stops_no_update(aged: Aged) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        node = aged(OLD, settings=GATED + f"metrics: {{listen: '127.0.0.1:{port}'}}\n")
        agent = Agent.start(node, "run")
        agent.wait_for("rest: ")
        assert re.search(rf"cannot .*{port}", agent.text())
        agent.kill()
