"""The agent as a process: one per node, ended by a signal, kept alive by its watchdog, a daemon that does it all."""

from __future__ import annotations

import signal
import time

import pytest

from tests.field.conftest import Aged, MakeNode, Push
from tests.field.evidence import Agent, faults, open_gate, rests_on, status
from tests.stand.configs import machine_config
from tests.stand.incidents import FILES, GATED, WORKLOAD
from tests.stand.node import DESIRED, SETTINGS, Node, next_image

pytestmark = pytest.mark.stand

OLD = machine_config("50-old", files={"/etc/app.conf": "old\n"})
NEW = machine_config("50-new", files={"/etc/app.conf": "new\n"})
QUIET = "metrics: {listen: ''}\n"
PROMPT = 8.0
"""Seconds within which SIGTERM has to be honoured; systemd would wait for 90 (TimeoutStopSec)."""


def run_daemon(node: Node) -> Agent:
    agent = Agent.start(node, "run")
    agent.wait_for("rest: ")
    return agent


def terminate(agent: Agent) -> float:
    """SIGTERM to the agent itself, as systemd with KillMode=mixed sends it; seconds until it has ended."""
    started = time.monotonic()
    agent.node.machine.run(["pkill", "-TERM", "-f", "mcdaemon.pyz run"])
    agent.wait(60)
    return time.monotonic() - started


def test_a_second_agent_refuses_to_start_and_names_the_first(aged: Aged) -> None:
    node = aged(OLD, settings=GATED + QUIET)
    first = run_daemon(node)
    pid = node.machine.run(["pgrep", "-f", "mcdaemon.pyz run"]).stdout.split()[0]
    for command in (("run",), ("run", "--once")):
        second = node.mcdaemon(*command, check=False)
        assert second.returncode == 1
        assert f"process {pid} " in second.stderr and "mcdaemon.pyz run" in second.stderr, second.stderr
        assert len(second.stderr.splitlines()) == 1
    assert node.mcdaemon("status").returncode == 0, "looking is always possible"
    assert terminate(first) < PROMPT
    assert node.mcdaemon("run", "--once").returncode == 0, "the lock went with its process"


def test_a_killed_agent_leaves_no_lock(aged: Aged) -> None:
    node = aged(OLD, settings=GATED + QUIET)
    run_daemon(node).kill()
    assert node.mcdaemon("run", "--once").returncode == 0


def test_sigterm_at_rest_ends_the_agent_at_once_and_cleanly(aged: Aged) -> None:
    node = aged(OLD, settings=GATED + QUIET)
    agent = run_daemon(node)
    assert terminate(agent) < 3
    assert "Traceback" not in agent.text()


def test_sigterm_while_rpm_ostree_works_is_honoured_in_time_and_the_next_agent_goes_on(aged: Aged) -> None:
    """STATE-12; the transaction goes on without its client (rpm-ostree.md 7 row 4) and is found again."""
    node = aged(OLD, settings=GATED + QUIET)
    agent = run_daemon(node)
    faults(node, delay={"at": "before-stage", "seconds": 12}, once=True)
    node.desire(first=NEW)
    agent.wait_for("stage-kargs: ")
    assert terminate(agent) < PROMPT, agent.text()
    open_gate(node)
    node.update()
    assert node.boots == 1
    rests_on(node, "50-new")


def test_sigterm_while_the_node_drains_is_honoured_in_time(aged: Aged) -> None:
    slow = SETTINGS + QUIET + "drain: {command: [/usr/bin/sleep, '300'], undo: [/usr/bin/touch, /run/undrained]}\n"
    node = aged(OLD, settings=slow)
    agent = run_daemon(node)
    node.desire(first=NEW)
    agent.wait_for("drain: ")
    assert terminate(agent) < PROMPT, agent.text()
    assert node.machine.run(["pgrep", "-x", "sleep"], check=False).stdout == "", "its child went with it"
    assert node.machine.read("/etc/app.conf") == "old\n"


SLOW_DRAIN = f"""{SETTINGS}{QUIET}drain:
  command: [/bin/sh, -c, 'echo begun >/run/begun; read x </run/let-go; echo drained >>/run/order']
  undo: [/bin/sh, -c, 'echo undone >>/run/order']
"""


def test_the_undo_of_a_killed_drain_comes_after_its_end(aged: Aged) -> None:
    """The drain lives on in a session of its own; an undo before its end would leave the node drained for ever."""
    node = aged(OLD, settings=SLOW_DRAIN)
    node.machine.run(["rm", "-f", "/run/order", "/run/begun"])
    node.machine.run(["mkfifo", "/run/let-go"])
    drained_and(node, "KILL")
    node.desire()
    held = node.mcdaemon("run", "--once", check=False)
    assert held.returncode == 3 and "still runs as process" in held.stderr, held.stderr
    assert not node.machine.exists("/run/order") and status(node)["out_of_service"] is True
    shown = node.mcdaemon("status")
    assert "the node is out of service (drained)" in shown.stdout and "no agent is running" in shown.stderr
    node.machine.run(["sh", "-c", "echo go >/run/let-go; until test -s /run/order; do :; done"], timeout=20)
    assert node.mcdaemon("run", "--once").returncode == 0
    assert node.machine.read("/run/order") == "drained\nundone\n"
    assert status(node)["out_of_service"] is False
    rests_on(node, "50-old")


def test_a_terminal_that_goes_away_in_a_drain_ends_run_once_and_its_drain(aged: Aged) -> None:
    node = aged(OLD, settings=SLOW_DRAIN)
    node.machine.run(["rm", "-f", "/run/order", "/run/begun"])
    node.machine.run(["mkfifo", "/run/let-go"])
    agent = drained_and(node, "HUP")
    assert agent.wait(20) == 130
    node.desire()
    assert node.mcdaemon("run", "--once").returncode == 0
    assert node.machine.read("/run/order") == "undone\n", "its drain went with it"
    rests_on(node, "50-old")


def drained_and(node: Node, signal: str) -> Agent:
    """`run --once`, and alone that process, gets the signal in the middle of its drain."""
    node.desire(first=NEW)
    agent = Agent.start(node)
    agent.wait_for("drain: ")
    node.machine.run(["sh", "-c", "until test -s /run/begun; do :; done"], timeout=20)
    node.machine.run(["pkill", f"-{signal}", "-f", "mcdaemon.pyz run"])
    agent.process.wait(20)
    return agent


def test_sighup_makes_the_agent_look_again_at_once(aged: Aged) -> None:
    node = aged(OLD, settings=GATED + QUIET + "loop: {interval_seconds: 3600}\n")
    agent = run_daemon(node)
    node.machine.write("/etc/app.conf", "by hand\n")
    node.machine.run(["pkill", "-HUP", "-f", "mcdaemon.pyz run"])
    assert "/etc/app.conf" in agent.wait_for("rest: current, but changed", 5)
    assert terminate(agent) < PROMPT


def test_a_new_config_wakes_the_agent_and_a_rename_too(aged: Aged) -> None:
    """Programs that write configs make a temporary and rename it."""
    node = aged(OLD, settings=GATED + QUIET + "loop: {interval_seconds: 3600}\n")
    agent = run_daemon(node)
    node.machine.write(f"{DESIRED}/.first.tmp", NEW, 0o600)
    node.machine.run(["mv", f"{DESIRED}/.first.tmp", f"{DESIRED}/first.json"])
    agent.wait_for("drain: ", 10)
    agent.kill()


@pytest.fixture
def daemon(make_node: MakeNode) -> Node:
    """A node on which mcdaemon.service runs by itself."""
    return make_node(daemon=True, settings=SETTINGS + QUIET)


def show(node: Node, *properties: str) -> dict[str, str]:
    argv = ["systemctl", "show", *(f"--property={name}" for name in properties), "mcdaemon.service"]
    lines = node.machine.run(argv).stdout.splitlines()
    return dict(line.split("=", 1) for line in lines)


def await_status(node: Node, state: str, current: str, timeout: float = 15.0) -> None:
    """Wait until the running daemon reports it; the status file is replaced with every round."""
    node.machine.run(["sh", "-c", f"i=0; until grep -q '\"state\": \"{state}\"' /run/mcdaemon/status.json && "
                      f"grep -q '\"current\": \"{current}\"' /run/mcdaemon/status.json; do "
                      "i=$((i+1)); test $i -lt 150 || exit 1; sleep 0.1; done"], timeout=timeout + 5)  # fmt: skip


def test_the_daemon_updates_its_node_all_by_itself(daemon: Node) -> None:
    node = daemon
    node.machine.run(["systemctl", "start", "mcdaemon.service"])
    found = show(node, "ActiveState", "Type", "StatusText")
    assert (found["ActiveState"], found["Type"]) == ("active", "notify"), "READY was said"
    assert found["StatusText"], "systemctl status says what it does"
    node.desire(first=machine_config("50-app", files=FILES, units=[WORKLOAD]))
    node.follow_reboot(timeout=20)
    await_status(node, "Done", "50-app")
    assert node.boots == 1
    found = show(node, "ActiveState", "StatusText", "NRestarts")
    assert found == {"ActiveState": "active", "StatusText": "rest: current and validated", "NRestarts": "0"}
    text = node.machine.journal("mcdaemon.service", node.machine.boots[-2])
    assert "reboot: " in text and "Traceback" not in text
    assert "confirm: " in node.machine.journal("mcdaemon.service", node.machine.boot_id)


def pings(node: Node) -> int:
    found = node.machine.run(["busctl", "get-property", "org.freedesktop.systemd1",
                              "/org/freedesktop/systemd1/unit/mcdaemon_2eservice", "org.freedesktop.systemd1.Service",
                              "StandWatchdogPings"]).stdout  # fmt: skip
    return int(found.split()[1])


@pytest.mark.slow
def test_the_watchdog_is_fed_at_rest_and_while_a_long_transaction_runs(make_node: MakeNode, push: Push) -> None:
    """STATE-11: a long pull is not a hang."""
    node = make_node(daemon=True, settings=GATED + QUIET)
    target = push(next_image("417.94.40"), "os:v40")
    node.machine.write("/run/systemd/system/mcdaemon.service.d/60-watchdog.conf", "[Service]\nWatchdogSec=8\n")
    node.machine.run(["systemctl", "daemon-reload"])
    faults(node, delay={"at": "before-stage", "seconds": 10}, once=True)
    node.desire(first=machine_config("50-app", os_image=target))
    node.machine.run(["systemctl", "start", "mcdaemon.service"])
    node.machine.run(
        ["sh", "-c", 'until grep -q \'"step": "drain"\' /run/mcdaemon/status.json; do sleep 0.1; done'], timeout=30
    )
    assert show(node, "NRestarts", "ActiveState") == {"NRestarts": "0", "ActiveState": "active"}
    assert pings(node) >= 2
    assert "Watchdog timeout" not in node.machine.journal("mcdaemon.service")


def test_an_agent_that_hangs_is_restarted_and_goes_on(make_node: MakeNode) -> None:
    node = make_node(daemon=True, settings=GATED + QUIET)
    node.machine.write(
        "/run/systemd/system/mcdaemon.service.d/60-watchdog.conf", "[Service]\nWatchdogSec=1\nRestartSec=0.1\n"
    )
    node.machine.run(["systemctl", "daemon-reload"])
    node.machine.run(["systemctl", "start", "mcdaemon.service"])
    node.machine.run(["pkill", "-STOP", "-f", "mcdaemon.pyz run"])
    log = "/run/stand/log/units/mcdaemon.service.log"
    node.machine.run(["sh", "-c", f"until grep -q 'Watchdog timeout' {log}; do sleep 0.1; done"], timeout=15)
    # The stand's PID 1 sends no SIGKILL after the SIGABRT, which a stopped process takes when it goes on.
    node.machine.run(["pkill", "-CONT", "-f", "mcdaemon.pyz run"])
    node.machine.run(["sh", "-c", "until systemctl show -p NRestarts mcdaemon.service | grep -qx NRestarts=1; "
                      "do sleep 0.1; done"], timeout=15)  # fmt: skip
    assert show(node, "ActiveState")["ActiveState"] in ("active", "activating")


def test_a_config_that_is_refused_leaves_the_daemon_running(daemon: Node) -> None:
    node = daemon
    node.machine.run(["systemctl", "start", "mcdaemon.service"])
    node.machine.write(f"{DESIRED}/first.json", "{", 0o600)
    node.machine.run(
        ["sh", "-c", "until grep -q Unreconcilable /run/mcdaemon/status.json; do sleep 0.1; done"], timeout=10
    )
    assert show(node, "ActiveState")["ActiveState"] == "active"
    assert "first.json" in show(node, "StatusText")["StatusText"]
    assert "first.json" in status(node)["why"]


def test_wrong_settings_end_the_daemon_with_the_place_in_its_log(daemon: Node) -> None:
    node = daemon
    node.machine.write("/etc/mcdaemon/mcdaemon.yaml", "metrics:\n  lisen: x\n")
    done = node.machine.run(["systemctl", "start", "mcdaemon.service"], check=False)
    assert done.returncode != 0
    assert "metrics.lisen" in node.machine.journal("mcdaemon.service")


def test_systemd_stops_the_service_in_time(daemon: Node) -> None:
    node = daemon
    node.machine.run(["systemctl", "start", "mcdaemon.service"])
    started = time.monotonic()
    node.machine.run(["systemctl", "stop", "mcdaemon.service"])
    assert time.monotonic() - started < 3
    assert show(node, "ActiveState", "Result") == {"ActiveState": "inactive", "Result": "success"}


def test_ctrl_c_ends_a_round_by_hand(aged: Aged) -> None:
    node = aged(OLD, settings=SETTINGS + QUIET + "drain: {command: [/usr/bin/sleep, '300']}\n")
    node.desire(first=NEW)
    agent = Agent.start(node)
    agent.wait_for("drain: ")
    node.machine.stop_process(agent.process, signal.SIGINT, 10)
    agent.wait()
    assert "Traceback" not in agent.text()
    assert node.machine.run(["pgrep", "-x", "sleep"], check=False).stdout == "", "its child went with it"
