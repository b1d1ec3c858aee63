"""The health gate on a node: what has to be well before a target is kept, for how long, and who is told what."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.field.conftest import Aged
from tests.field.evidence import NEW, OLD, Agent, boot_by_hand, is_old, journal, rests_on, status, tick
from tests.field.test_metrics_and_notify import Scraped, free_port
from tests.stand.apiserver import ApiServer, node_object
from tests.stand.configs import FileText, Unit, machine_config
from tests.stand.node import Node

pytestmark = pytest.mark.stand

HOLD = "hold: {retry_min_seconds: 1, retry_max_seconds: 2}\nmetrics: {listen: ''}\n"
WANTED_BY = "[Install]\nWantedBy=multi-user.target\n"
RESTARTED = "[Unit]\nStartLimitIntervalSec=0\n[Service]\nRestart=always\n"
FILES: dict[str, FileText] = {
    "/etc/app.conf": "new\n", "/usr/local/bin/tool": ("new\n", 0o755),
    "/etc/only-new": "new\n", "/usr/local/bin/only-new": "new\n",
}  # fmt: skip


def health(**keys: object) -> str:
    return HOLD + "health: {" + ", ".join(f"{key}: {value}" for key, value in keys.items()) + "}\n"


def new(*units: Unit) -> str:
    return machine_config("50-new", files=FILES, units=units)


def arrive(node: Node, config: str = NEW) -> None:
    """Into the target; nothing was looked at yet."""
    node.desire(first=config)
    tick(node)
    assert node.boots == 1 and node.machine.read("/etc/app.conf") == "new\n"


def look_until_the_way_back(node: Node) -> str:
    """Looks at the target until it is taken back; what was said of it last."""
    for _round in range(40):
        why = str(status(node)["why"]) if node.machine.exists("/run/mcdaemon/status.json") else ""
        assert tick(node) in (0, 3, 137)
        if node.boots == 2:
            return why
    raise AssertionError(f"never taken back: {status(node)}")


# -- units ------------------------------------------------------------------------------------------------------------


def test_every_unit_that_is_not_well_is_named_with_what_it_is(aged: Aged) -> None:
    """A masked one, one that this OS does not have, an instance of a template that fails, and a good instance."""
    units = "['work@good.service', 'work@bad.service', gone.service, masked.service]"
    node = aged(OLD, settings=health(timeout_seconds=1, settle_seconds=0, units=units))
    arrive(node, new(
        Unit("work@.service", "[Service]\nType=oneshot\nRemainAfterExit=yes\nExecStart=/usr/bin/test %i = good\n"),
        Unit("pull.service", "[Service]\nType=oneshot\nRemainAfterExit=yes\nExecStart=/usr/bin/systemctl start "
             f"work@good.service work@bad.service\n{WANTED_BY}", True),
        Unit("masked.service", mask=True),
    ))  # fmt: skip
    assert tick(node) == 3
    why = status(node)["why"]
    assert "work@bad.service is failed (failed, exit-code)" in why and "work@good.service" not in why
    assert "gone.service does not exist on this OS" in why and "masked.service is masked" in why
    look_until_the_way_back(node)
    is_old(node)


def test_a_unit_that_is_active_at_every_look_but_never_stays_so_takes_the_target_back(aged: Aged) -> None:
    """It lives for half a second and comes back a moment later: a look at its state alone finds it well."""
    node = aged(OLD, settings=health(timeout_seconds=4, settle_seconds=2, units="[flap.service]"))
    arrive(node, new(Unit("flap.service", f"{RESTARTED}RestartSec=0.01\nExecStart=sleep 0.5\n{WANTED_BY}", True)))
    look_until_the_way_back(node)
    tick(node)
    is_old(node)
    why = status(node)["failed"]
    assert re.search(r"flap.service (was restarted meanwhile|keeps failing|is (de)?activating)", why), why


def test_a_unit_in_a_restart_loop_says_how_often_it_was_restarted(aged: Aged) -> None:
    node = aged(OLD, settings=health(timeout_seconds=1, settle_seconds=0, units="[loop.service]"))
    arrive(node, new(Unit("loop.service", f"{RESTARTED}RestartSec=3600\nExecStart=/bin/false\n{WANTED_BY}", True)))
    tick(node)
    assert "loop.service keeps failing (exit-code); it was restarted 1 times" in status(node)["why"]
    look_until_the_way_back(node)
    is_old(node)


def test_a_target_that_is_well_is_kept_only_after_it_has_stayed_so(aged: Aged) -> None:
    node = aged(OLD, settings=health(timeout_seconds=60, settle_seconds=3600, units="[work.service]"))
    arrive(node, new(Unit("work.service", "[Service]\nType=oneshot\nRemainAfterExit=yes\nExecStart=/bin/true\n"
                          f"{WANTED_BY}", True)))  # fmt: skip
    assert tick(node) == 3 and "has to stay so for 3600 s" in status(node)["why"]
    node.machine.write("/etc/mcdaemon/mcdaemon.yaml", health(settle_seconds=0.2, units="[work.service]"))
    for _round in range(3):
        tick(node)
    rests_on(node, "50-new")


# -- the kubelet and the API server -----------------------------------------------------------------------------------


@pytest.fixture
def api(tmp_path: Path) -> Iterator[ApiServer]:
    with ApiServer(tmp_path / "api") as server:
        yield server


def joined(aged: Aged, api: ApiServer, **keys: object) -> Node:
    """A node whose kubelet has a kubeconfig for the API server."""
    path = "/var/lib/kubelet/kubeconfig"
    node = aged(OLD, settings=health(settle_seconds=0, node_kubeconfig=path, **keys))
    node.machine.run(["mkdir", "-p", "/var/lib/kubelet"])
    node.machine.write(path, api.kubeconfig(), 0o600)
    return node


def test_a_node_is_kept_when_the_api_server_knows_it_as_ready_since_this_boot(aged: Aged, api: ApiServer) -> None:
    """What is known from before the reboot does not count: it stays Ready there for most of a minute."""
    node = joined(aged, api, timeout_seconds=600)
    api.node = node_object(node.machine.boot_id)
    arrive(node)
    assert tick(node) == 3 and "has not reported itself" in status(node)["why"]
    api.node = node_object(node.machine.boot_id, "False", "container runtime network not ready")
    assert tick(node) == 3 and "is not Ready: container runtime network" in status(node)["why"]
    api.node = node_object(node.machine.boot_id)
    assert tick(node) == 0
    rests_on(node, "50-new")


def test_a_target_that_cannot_reach_the_api_server_is_taken_back(aged: Aged, api: ApiServer) -> None:
    """STATE-32: from the node a network that the config broke and a server that is down look the same."""
    node = joined(aged, api, timeout_seconds=1)
    arrive(node)
    api.close()
    look_until_the_way_back(node)
    tick(node)
    is_old(node)
    assert "cannot reach 127.0.0.1" in status(node)["failed"] and status(node)["state"] == "Degraded"


def test_an_outage_of_the_api_server_takes_nothing_back_where_the_settings_say_so(aged: Aged, api: ApiServer) -> None:
    node = joined(aged, api, timeout_seconds=1, unreachable_api="wait")
    arrive(node)
    api.status = 503
    for _round in range(4):
        assert tick(node) == 3 and "answers 503" in status(node)["why"]
    assert node.boots == 1 and status(node)["failed"] == ""
    api.status, api.node = 200, node_object(node.machine.boot_id)
    assert tick(node) == 0
    rests_on(node, "50-new")


def test_a_node_that_is_not_ready_is_taken_back_also_where_an_outage_is_waited_for(aged: Aged, api: ApiServer) -> None:
    node = joined(aged, api, timeout_seconds=1, unreachable_api="wait")
    arrive(node)
    api.node = node_object(node.machine.boot_id, "False", "PLEG is not healthy")
    look_until_the_way_back(node)
    tick(node)
    is_old(node)
    assert "PLEG is not healthy" in status(node)["failed"]


# -- scripts ----------------------------------------------------------------------------------------------------------


CHECKS = "/etc/greenboot/check"


def script(node: Node, path: str, text: str) -> None:
    node.machine.run(["mkdir", "-p", str(Path(path).parent)])
    node.machine.write(path, f"#!/bin/sh\n{text}\n", 0o755)


@pytest.fixture
def greenboot(aged: Aged) -> Node:
    """A node with scripts in greenboot's own folders: one that is only wanted fails."""
    node = aged(OLD, settings=health(timeout_seconds=1, settle_seconds=0, scripts_directories=f"[{CHECKS}]"))
    script(node, f"{CHECKS}/wanted.d/10-nice.sh", "echo nobody dusted; exit 1")
    for colour in ("green", "red"):
        script(node, f"/etc/greenboot/{colour}.d/10-tell.sh", f"echo {colour} >>/var/lib/told")
    return node


def test_a_good_verdict_runs_the_green_scripts_once_and_tells_what_was_only_wanted(greenboot: Node) -> None:
    node = greenboot
    arrive(node)
    done = node.mcdaemon("run", "--once")
    assert "wanted, but not required: " in done.stderr and "nobody dusted" in done.stderr
    tick(node)
    assert node.machine.read("/var/lib/told") == "green\n"
    rests_on(node, "50-new")
    assert any("nobody dusted" in text for text in status(node)["warnings"]), "for as long as this boot lasts"


def test_a_bad_verdict_runs_the_red_scripts_once_before_the_way_back(greenboot: Node) -> None:
    node = greenboot
    script(node, f"{CHECKS}/required.d/10-must.sh", 'echo no heartbeat; test "$(cat /etc/app.conf)" = old')
    script(node, "/etc/greenboot/red.d/00-broken.sh", "exit 1")
    arrive(node)
    look_until_the_way_back(node)
    for _round in range(3):
        tick(node)
    assert node.machine.read("/var/lib/told") == "red\n" and node.boots == 2
    is_old(node)
    assert "no heartbeat" in status(node)["failed"]


def test_a_required_script_that_others_can_write_is_not_run(aged: Aged) -> None:
    node = aged(OLD, settings=health(timeout_seconds=1, settle_seconds=0))
    script(node, "/etc/mcdaemon/health.d/required.d/10.sh", "touch /var/lib/ran")
    node.machine.run(["chmod", "666", "/etc/mcdaemon/health.d/required.d/10.sh"])
    arrive(node)
    look_until_the_way_back(node)
    assert not node.machine.exists("/var/lib/ran")
    tick(node)
    assert "others than root can write it" in status(node)["failed"]


# -- every channel ----------------------------------------------------------------------------------------------------


class Channels(Scraped):
    """A daemon that looks at a target, its metrics, and what it tells systemd."""

    def __init__(self, node: Node, port: int) -> None:
        self.node = node
        self.url = f"http://127.0.0.1:{port}/metrics"
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(f"\0mcdaemon-test-{port}")
        self.socket.settimeout(20)
        self.start()

    def start(self) -> None:
        name = bytes(self.socket.getsockname()).decode().replace("\0", "@")
        self.agent = Agent.start(self.node, "run", env={"NOTIFY_SOCKET": name})

    def told(self, words: str) -> str:
        """The STATUS= with these words that systemd gets."""
        for _message in range(200):
            text = self.socket.recv(65536).decode()
            if "STATUS=" in text and words in text:
                return text
        raise AssertionError(f"systemd is never told {words!r}")

    def verdict(self) -> list[str]:
        return [labels[0] for labels, value in self.samples()["mcdaemon_health"].items() if value == 1]

    def close(self) -> None:
        self.agent.kill()
        self.socket.close()


@pytest.fixture
def channels(aged: Aged) -> Iterator[Channels]:
    """A target is booted whose required script fails until /run/healthy is there."""
    port = free_port()
    settings = health(timeout_seconds=60, settle_seconds=0).replace("''", f"'127.0.0.1:{port}'")
    node = aged(OLD, settings=settings)
    script(node, "/etc/mcdaemon/health.d/10.sh",
           'echo no heartbeat; test -e /run/healthy || test "$(cat /etc/app.conf)" = old')  # fmt: skip
    arrive(node)
    found = Channels(node, port)
    yield found
    found.close()


def shown(node: Node) -> str:
    return node.mcdaemon("status").stdout


def test_a_target_that_is_not_healthy_yet_is_told_on_every_channel_and_so_is_its_confirmation(
    channels: Channels,
) -> None:
    node, agent = channels.node, channels.agent
    assert "no heartbeat" in agent.wait_for("hold: booted into the target; waiting for it to become healthy")
    assert "no heartbeat" in channels.told("waiting for it to become healthy")
    found = status(node)
    assert (found["state"], found["step"], found["health"], found["update"]) == ("Working", "hold", "pending", "50-new")
    assert "no heartbeat" in shown(node) and channels.verdict() == ["pending"]
    node.machine.write("/run/healthy", "")
    agent.wait_for("confirm: ")
    channels.told("current and validated")
    found = status(node)
    assert (found["state"], found["health"], found["confirmed"]) == ("Done", "", "50-new") and found["confirmed_at"]
    assert "confirmed        50-new, 2" in shown(node)
    samples = channels.samples()
    assert channels.verdict() == [] and samples["mcdaemon_updates_total"][("done",)] == 2
    assert samples["mcdaemon_last_update_timestamp_seconds"][("done",)] >= found["confirmed_at"] - 1
    assert node.mcdaemon("run", "--once", check=False).returncode == 1, "one agent per node"
    assert tick_after(channels) == 0


def tick_after(channels: Channels) -> int:
    channels.agent.kill()
    return tick(channels.node)


def test_a_target_that_was_taken_back_is_told_on_every_channel_and_stays_so(channels: Channels) -> None:
    node = channels.node
    channels.agent.wait_for("hold: ")
    channels.agent.kill()
    text = node.machine.read("/etc/mcdaemon/mcdaemon.yaml")
    node.machine.write("/etc/mcdaemon/mcdaemon.yaml", text.replace("timeout_seconds: 60", "timeout_seconds: 1"))
    channels.start()
    assert "no heartbeat" in channels.agent.wait_for("roll-back: booted into the target, which is not healthy")
    assert "no heartbeat" in channels.told("STATUS=roll-back: ")
    node.follow_reboot()
    channels.start()
    assert "no heartbeat" in channels.agent.wait_for("discard: ")
    assert "no heartbeat" in channels.agent.wait_for("hold: this config was tried and taken back")
    channels.told("tried and taken back")
    found = status(node)
    assert (found["state"], found["failed_config"], found["failed_digest"]) == ("Degraded", "50-new", "")
    assert found["failed"].startswith("50-new: booted into the target, which is not healthy: ")
    assert "no heartbeat" in found["failed"] and found["failed_at"] > 0
    assert "failed target    50-new: booted" in shown(node) and "the OS image as it was, 2" in shown(node)
    samples = channels.samples()
    assert samples["mcdaemon_failed_target_timestamp_seconds"] == {("50-new", ""): found["failed_at"]}
    assert samples["mcdaemon_updates_total"][("rolled-back",)] == 1 and channels.verdict() == []
    assert samples["mcdaemon_last_update_timestamp_seconds"][("rolled-back",)] > 0
    assert channels.state() == "Degraded" and tick_after(channels) == 3


def test_an_older_deployment_chosen_by_hand_is_told_on_every_channel(channels: Channels) -> None:
    node = channels.node
    old = next(d.name for d in node.machine.deployments() if not d.booted)
    node.machine.write("/run/healthy", "")
    channels.agent.wait_for("confirm: ")
    channels.told("current and validated")
    assert channels.samples()["mcdaemon_stood_back"] == {(): 0}
    channels.agent.kill()
    node.machine.power_cut()
    assert boot_by_hand(node, old) == 1
    channels.start()
    assert old in channels.agent.wait_for("rest: an older deployment is booted")
    channels.told("older deployment is booted")
    assert channels.samples()["mcdaemon_stood_back"] == {(): 1} and channels.state() == "Degraded"
    assert "older deployment is booted" in shown(node) and status(node)["stood_back"]
    assert journal(node)["failed"] is None and tick_after(channels) == 1


def test_a_failed_target_is_still_named_while_another_config_is_worked_on(aged: Aged) -> None:
    node = aged(OLD, settings=health(timeout_seconds=1, settle_seconds=0))
    script(node, "/etc/mcdaemon/health.d/10.sh", 'test "$(cat /etc/app.conf)" = old')
    arrive(node)
    look_until_the_way_back(node)
    tick(node)
    node.machine.write("/etc/mcdaemon/mcdaemon.yaml", HOLD + "drain: {command: [/bin/false]}\n")
    node.desire(first=machine_config("50-newest", files={"/etc/app.conf": "newest\n"}))
    assert tick(node) == 3
    found = status(node)
    assert (found["update"], found["failed_config"]) == ("50-newest", "50-new")
    assert "50-newest (drain)" in shown(node) and "failed target    50-new: " in shown(node)
