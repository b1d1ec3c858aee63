"""The metrics: their text, read back by Prometheus' own parser, and the HTTP endpoint, over a real socket."""

from __future__ import annotations

import dataclasses
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Optional

import pytest
import requests
from prometheus_client.parser import text_string_to_metric_families

from mcdaemon.decide import Health, Step
from mcdaemon.errors import Broken, HoldReason, Transient
from mcdaemon.report.endpoint import Endpoint
from mcdaemon.report.metrics import HISTOGRAMS, TABLE, Board, Distribution, Failed, Result, Snapshot, State

NOW = 1_700_000_000.0
AT_REST = Snapshot(
    state=State.DONE,
    state_since=NOW - 600,
    step=Step.REST,
    round_at=NOW - 1,
    current="rendered-worker-1",
    desired="rendered-worker-1",
    os_name="RHCOS",
    os_version="417.94.1",
    node="node-1",
    unsupported_packages=0,
    kubelet_failures=0,
    update_config="MachineConfig: rendered-worker-1",
    update_at=NOW - 700,
)
HELD = dataclasses.replace(
    AT_REST,
    state=State.WORKING,
    step=Step.HOLD,
    desired="rendered-worker-2",
    hold=HoldReason.IMAGE,
    held_since=NOW - 90,
    next_retry=NOW + 30,
    last_error="held-image",
    last_error_at=NOW - 5,
)

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def scrape(snapshot: Snapshot) -> Samples:
    board = Board(clock=lambda: NOW)
    board.publish(snapshot)
    return parse(board.text())


def parse(text: bytes) -> Samples:
    found: Samples = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in found, f"{key} is there twice"
            found[key] = sample.value
    return found


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[name, tuple(sorted(labels.items()))]


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    board = Board()
    board.publish(AT_REST)
    served = Endpoint(board, port=0)
    served.start()
    yield served
    served.stop()


# -- the text


def test_before_the_first_round_there_is_nothing_to_see() -> None:
    assert Board().text() == b""


def test_every_line_of_the_table_is_exposed_under_its_own_name() -> None:
    failed = Failed("rendered-worker-0", "sha256:1", int(NOW))
    busy = dataclasses.replace(HELD, out_of_service_since=NOW, failed=failed, ended={Result.DONE: int(NOW)})
    names = {name for name, _ in scrape(busy)}
    assert {entry.name for entry in TABLE} <= names
    assert {f"{name}_count" for name, _, _ in HISTOGRAMS} <= names


def test_the_table_names_nothing_twice_and_explains_everything() -> None:
    names = [entry.name for entry in TABLE]
    assert len(names) == len(set(names))
    assert all(entry.help.endswith(".") for entry in TABLE)
    assert all(entry.name.endswith("_total") for entry in TABLE if entry.kind == "counter")


def test_exactly_one_state_and_one_step_are_set() -> None:
    samples = scrape(HELD)
    states = {labels: v for (name, labels), v in samples.items() if name == "mcdaemon_state"}
    steps = {labels: v for (name, labels), v in samples.items() if name == "mcdaemon_step"}
    assert (len(states), sum(states.values())) == (len(State), 1)
    assert (len(steps), sum(steps.values())) == (len(Step), 1)
    assert value(samples, "mcdaemon_step", step="hold") == 1


def test_a_hold_shows_why_and_how_long_at_the_moment_of_the_scrape() -> None:
    samples = scrape(HELD)
    assert value(samples, "mcdaemon_held_seconds") == 90
    assert value(samples, "mcdaemon_hold_reason", reason="image") == 1
    assert value(samples, "mcdaemon_hold_reason", reason="registry") == 0
    assert value(samples, "mcdaemon_next_retry_timestamp_seconds") == NOW + 30


def test_the_versions_of_the_hosts_programs_are_labels_and_an_unknown_one_is_empty() -> None:
    host = {"rpm-ostree": "2024.7", "ostree": "2024.8", "podman": "4.9.4", "skopeo": ""}
    samples = scrape(dataclasses.replace(AT_REST, host=host))
    labels = {"rpm_ostree": "2024.7", "ostree": "2024.8", "podman": "4.9.4", "skopeo": ""}
    assert value(samples, "mcdaemon_host_info", **labels) == 1


def test_a_node_that_is_not_held_has_every_reason_at_zero() -> None:
    samples = scrape(AT_REST)
    assert value(samples, "mcdaemon_held_seconds") == 0
    assert all(v == 0 for (name, _), v in samples.items() if name == "mcdaemon_hold_reason")


def test_a_clock_that_was_set_back_makes_no_negative_age() -> None:
    assert value(scrape(dataclasses.replace(HELD, held_since=NOW + 3600)), "mcdaemon_held_seconds") == 0


def test_both_configs_are_named_also_with_quotes_and_line_breaks_in_them() -> None:
    samples = scrape(dataclasses.replace(AT_REST, desired='a"b\\c\nd'))
    assert value(samples, "mcdaemon_config_info", current="rendered-worker-1", desired='a"b\\c\nd') == 1


def test_updates_are_counted_by_result_and_start_at_zero() -> None:
    samples = scrape(dataclasses.replace(AT_REST, updates={Result.ROLLED_BACK: 2}))
    assert value(samples, "mcdaemon_updates_total", result="rolled-back") == 2
    assert value(samples, "mcdaemon_updates_total", result="done") == 0


def test_what_is_not_known_is_left_out_rather_than_zero() -> None:
    names = {name for name, _ in scrape(dataclasses.replace(AT_REST, kubelet_failures=None, os_version="", node=""))}
    unknown = {"mcd_kubelet_state", "mcd_host_os_and_version", "mcd_local_unsupported_packages"}
    assert not names & (unknown | {"mcdaemon_next_retry_timestamp_seconds", "mcdaemon_last_error_timestamp_seconds"})


def test_the_clusters_alerts_find_their_metrics() -> None:
    samples = scrape(dataclasses.replace(AT_REST, reboots_failed=1, pivot_errors=2, kubelet_failures=3))
    assert value(samples, "mcd_reboots_failed_total") == 1
    assert value(samples, "mcd_pivot_errors_total") == 2
    assert value(samples, "mcd_kubelet_state") == 3


def test_mcd_state_carries_the_time_of_the_state_and_a_reason_only_when_failing() -> None:
    assert value(scrape(HELD), "mcd_state", state="Working", reason="") == NOW - 600
    failing = dataclasses.replace(HELD, state=State.DEGRADED, last_error="broken")
    assert value(scrape(failing), "mcd_state", state="Degraded", reason="broken") == NOW - 600


def test_drift_is_a_time_and_zero_without() -> None:
    assert value(scrape(AT_REST), "mcd_config_drift") == 0
    assert value(scrape(dataclasses.replace(AT_REST, drift_at=NOW)), "mcd_config_drift") == NOW


def test_metrics_of_the_python_process_are_not_mixed_in() -> None:
    assert all(name.startswith(("mcdaemon_", "mcd_")) for name, _ in scrape(AT_REST))


# -- durations


def test_a_duration_counts_in_its_bucket_and_in_all_wider_ones() -> None:
    distribution = Distribution((1, 5)).observe(1).observe(3).observe(60)
    samples = scrape(dataclasses.replace(AT_REST, transactions=distribution))
    buckets = {le: value(samples, "mcdaemon_transaction_seconds_bucket", le=le) for le in ("1.0", "5.0", "+Inf")}
    assert buckets == {"1.0": 1, "5.0": 2, "+Inf": 3}
    assert value(samples, "mcdaemon_transaction_seconds_sum") == 64
    assert value(samples, "mcdaemon_transaction_seconds_count") == 3


def test_a_distribution_without_a_duration_is_all_zero() -> None:
    samples = scrape(AT_REST)
    assert value(samples, "mcdaemon_image_check_seconds_bucket", le="+Inf") == 0
    assert value(samples, "mcdaemon_image_check_seconds_sum") == 0


def test_a_negative_duration_counts_as_zero_and_the_old_value_stays_as_it_was() -> None:
    before = Distribution((1,))
    after = before.observe(-3)
    assert (after.total, after.counts) == (0, (1, 0))
    assert before.counts == ()


# -- the endpoint


def get(endpoint: Endpoint, path: str = "/metrics") -> requests.Response:
    return requests.get(f"http://127.0.0.1:{endpoint.port}{path}", timeout=5)


def test_a_scrape_gets_the_text_of_the_newest_snapshot(endpoint: Endpoint) -> None:
    answer = get(endpoint)
    assert (answer.status_code, answer.headers["Content-Type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    assert value(parse(answer.content), "mcdaemon_state", state="Done") == 1


def test_nothing_but_the_metrics_is_served(endpoint: Endpoint) -> None:
    assert get(endpoint, "/../etc/passwd").status_code == 404
    assert requests.post(f"http://127.0.0.1:{endpoint.port}/metrics", data="x", timeout=5).status_code == 501


def test_the_answer_does_not_tell_which_python_runs(endpoint: Endpoint) -> None:
    assert get(endpoint).headers["Server"].strip() == "mcdaemon"


def test_it_listens_on_the_loopback_only(endpoint: Endpoint) -> None:
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    listening = [row[1] for row in rows if row[3] == "0A" and int(row[1].split(":")[1], 16) == endpoint.port]
    assert [address.split(":")[0] for address in listening] == ["0100007F"]


def test_a_client_that_says_nothing_does_not_keep_others_out(endpoint: Endpoint) -> None:
    with socket.create_connection(("127.0.0.1", endpoint.port), timeout=5):
        begun = time.monotonic()
        assert get(endpoint).status_code == 200
    assert time.monotonic() - begun < 4


def test_a_taken_port_is_an_error_that_names_its_owner_and_can_be_tried_again() -> None:
    comm = Path("/proc/self/comm").read_text().strip()
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        endpoint = Endpoint(Board(), port=port)
        with pytest.raises(Transient) as caught:
            endpoint.start()
        assert caught.value.sentence == f"cannot serve metrics at 127.0.0.1:{port}: Address already in use"
        assert f"{comm}, process {os.getpid()} listens there" in caught.value.hint
    endpoint.start()
    assert get(endpoint).status_code == 200
    endpoint.stop()


@pytest.mark.parametrize(("address", "port"), [("192.0.2.1", 0), ("127.0.0.1", 70000)])
def test_an_address_that_this_node_has_not_needs_a_person(address: str, port: int) -> None:
    with pytest.raises(Broken, match="cannot serve metrics at") as caught:
        Endpoint(Board(), address, port).start()
    assert "metrics.listen" in caught.value.hint


def test_stopping_frees_the_port_and_starting_twice_is_once(endpoint: Endpoint) -> None:
    port = endpoint.port
    endpoint.start()
    assert endpoint.port == port
    endpoint.stop()
    endpoint.stop()
    with pytest.raises(requests.ConnectionError):
        requests.get(f"http://127.0.0.1:{port}/metrics", timeout=5)


@pytest.mark.parametrize("verdict", [None, *Health])
def test_the_verdict_on_a_booted_target_is_one_of_its_kinds_or_none(verdict: Optional[Health]) -> None:
    samples = scrape(dataclasses.replace(AT_REST, health=verdict))
    shown = {member: value(samples, "mcdaemon_health", verdict=member.value) for member in Health}
    assert shown == {member: float(member is verdict) for member in Health}


def test_a_failed_target_is_named_with_its_digest_and_gone_when_there_is_none() -> None:
    failed = Failed("rendered-worker-2", "sha256:2", 1_000_000_000)
    name = "mcdaemon_failed_target_timestamp_seconds"
    samples = scrape(dataclasses.replace(AT_REST, failed=failed, ended={Result.ROLLED_BACK: 1_000_000_000}))
    assert value(samples, name, config="rendered-worker-2", digest="sha256:2") == 1_000_000_000
    assert value(samples, "mcdaemon_last_update_timestamp_seconds", result="rolled-back") == 1_000_000_000
    assert name not in {key for key, _labels in scrape(AT_REST)}


def test_an_older_deployment_that_was_chosen_shows() -> None:
    assert value(scrape(AT_REST), "mcdaemon_stood_back") == 0
    assert value(scrape(dataclasses.replace(AT_REST, stood_back=True)), "mcdaemon_stood_back") == 1
