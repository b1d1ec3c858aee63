"""People at work on a node while it updates: edits of /etc, inhibitors, SIGTERM, a clock that jumps, changed minds."""

from __future__ import annotations

import signal
import subprocess

import pytest

from tests.field.conftest import Aged, Push
from tests.field.evidence import (
    ARCHIVE,
    NEW,
    NEWEST,
    OLD,
    STEPS,
    Agent,
    is_new,
    is_old,
    journal,
    no_leftovers,
    open_gate,
    rests_on,
    shut_gate,
    status,
    stop_after,
    through_gate,
    tick,
)
from tests.field.rivals import COUNTED, drains, forget_drains
from tests.stand.configs import machine_config
from tests.stand.machine import Down
from tests.stand.node import Node, ends_in_reboot

pytestmark = pytest.mark.stand

QUIET = "metrics: {listen: ''}\n"
PROMPT = 10


@pytest.fixture
def node(aged: Aged) -> Node:
    node = aged(OLD, settings=COUNTED + QUIET)
    forget_drains(node)
    open_gate(node)
    node.desire(first=NEW)
    return node


def arrives(node: Node, drained: str = "du", boots: int = 1) -> str:
    said = through_gate(node)
    assert node.boots == boots and drains(node) == drained
    is_new(node)
    rests_on(node, "50-new")
    return said


# -- edits of /etc ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", ["stage-kargs", "verify-staged", "drain"])
def test_what_somebody_edits_before_the_merge_is_carried_over_but_not_over_the_config(node: Node, step: str) -> None:
    node.machine.write("/etc/goes", "x\n")
    stop_after(node, step)
    node.machine.write("/etc/by-hand.conf", "by hand\n", 0o640)
    node.machine.write("/etc/app.conf", "by hand\n")
    node.machine.run(["rm", "/etc/goes"])
    node.machine.run(["ln", "-s", "by-hand.conf", "/etc/only-new"])
    arrives(node)
    assert node.machine.read("/etc/by-hand.conf") == "by hand\n" and node.mode("/etc/by-hand.conf") == 0o640
    assert not node.machine.exists("/etc/goes")


@pytest.mark.parametrize("step", ["finalize", "verify-root"])
def test_what_somebody_edits_after_the_merge_is_said_to_be_lost(node: Node, step: str) -> None:
    """The window is seconds, on a drained node; whoever looks for his change finds in the log where it went."""
    stop_after(node, step)
    node.machine.write("/etc/by-hand.conf", "by hand\n")
    node.machine.write("/etc/app.conf", "by hand\n")
    node.machine.run(["sh", "-c", "mkdir /etc/dir.d && echo x >/etc/dir.d/x"])
    said = arrives(node)
    lost = next(line for line in said.splitlines() if "changed after the merge" in line)
    for path in ("/etc/by-hand.conf", "/etc/dir.d/x", "/etc/app.conf"):
        assert path in lost
    assert "hostname" not in lost and "/etc/passwd" not in lost
    assert not node.machine.exists("/etc/by-hand.conf")


def test_an_agent_that_was_restarted_after_the_merge_still_knows_what_was_lost(node: Node) -> None:
    stop_after(node, "finalize")
    node.machine.write("/etc/by-hand.conf", "by hand\n")
    stop_after(node, "commit-files")
    assert "changed after the merge, so not in the new root: /etc/by-hand.conf\n" in arrives(node)


@pytest.mark.slow
def test_files_that_come_and_go_while_ostree_merges_do_no_harm(node: Node) -> None:
    """TXN-34: whatever the merge makes of it, the node ends on the new config with one reboot. (A storm that outlasts
    three merges is a finalization that cannot be had: see test_races_finalize.py.)"""
    stop_after(node, "drain")
    storm = (
        "while test ! -e /run/calm; do for i in 1 2 3 4 5 6 7 8; do echo $i >/etc/storm/$i; done; "
        "rm -f /etc/storm/*; sleep 0.002; done"
    )
    node.machine.run(["mkdir", "/etc/storm"])
    process = node.machine.start(["sh", "-c", storm])
    try:
        said = ""
        for _round in range(6):
            done = node.mcdaemon("run", "--once", check=False)
            said += done.stderr
            if ends_in_reboot(done):
                break
            node.machine.write("/run/calm", "")
            process.wait(10)
        else:
            raise AssertionError(said)
        node.follow_reboot()
    finally:
        process.kill()
        process.wait(10)
    through_gate(node)
    assert node.boots == 1, said
    is_new(node)
    rests_on(node, "50-new")


# -- inhibitors -------------------------------------------------------------------------------------------------------


def inhibit(node: Node, mode: str) -> subprocess.Popen[str]:
    holder = node.machine.start(
        ["systemd-inhibit", "--what=shutdown", f"--mode={mode}", "--who=backup", "--why=it runs", "sleep", "600"]
    )
    node.machine.run(["sh", "-c", "until systemd-inhibit --list | grep -q backup; do :; done"])
    return holder


@pytest.mark.parametrize("step", ["verify-staged", "drain", "finalize", "verify-root"])
def test_a_block_inhibitor_is_waited_for_at_each_step_and_told_by_name(node: Node, step: str) -> None:
    """REBOOT-12: nothing is drained for it, nothing finalized, and nothing is degraded."""
    stop_after(node, step)
    holder = inhibit(node, "block")
    for _round in range(2):
        said = node.once(expect=3)
        assert "backup: it runs" in said
        found = status(node)
        assert (found["state"], found["failed"]) == ("Working", "")
    assert node.boots == 0 and journal(node)["update"]["armed"] == ""
    assert drains(node) == ("" if step == "verify-staged" else "d")
    assert bool(journal(node)["update"]["finalizing"]) == (step in ("finalize", "verify-root"))
    node.machine.stop_process(holder)
    arrives(node)


def test_a_target_can_still_be_withdrawn_while_an_inhibitor_holds_its_reboot(node: Node) -> None:
    """P7."""
    stop_after(node, "verify-root")
    holder = inhibit(node, "block")
    node.once(expect=3)
    node.desire(first=OLD)
    node.once()
    assert node.boots == 0 and drains(node) == "du"
    is_old(node)
    rests_on(node, "50-old")
    node.machine.stop_process(holder)


def test_a_delay_inhibitor_delays_and_the_agent_is_idle_meanwhile(node: Node) -> None:
    """TXN-05: after the request nothing is begun and nothing called an error; kubelet's inhibitor is one of these."""
    inhibit(node, "delay")
    agent = Agent.start(node, "run")
    agent.wait_for("reboot: ")
    node.machine.run(["pkill", "-HUP", "-f", "mcdaemon.pyz run"], check=False)
    assert node.machine.wait_down(30) is Down.REBOOT
    later = agent.text().partition("reboot: ")[2]
    assert "cannot" not in later and "Traceback" not in later, later
    node.boots += node.machine.boot()
    arrives(node)


def test_a_reboot_that_was_asked_for_and_does_not_come_is_said_and_asked_for_again(aged: Aged) -> None:
    """TXN-05: it idles; nothing is degraded, nothing is tried twice but the request."""
    asks = "reboot: {command: [/bin/sh, -c, 'echo asked >>/run/asked'], timeout_seconds: 1}\n"
    node = aged(OLD, settings=COUNTED + QUIET + asks + "loop: {interval_seconds: 1}\n")
    forget_drains(node)
    open_gate(node)
    node.desire(first=NEW)
    agent = Agent.start(node, "run")
    agent.wait_for("cannot reboot: it was asked for 1 s ago and did not come")
    node.machine.run(["sh", "-c", "until test $(wc -l </run/asked) -ge 2; do sleep 0.1; done"])
    assert status(node)["state"] == "Working" and status(node)["failed"] == ""
    assert drains(node) == "d" and agent.text().count("finalize: ") == 1
    node.desire(first=NEWEST)
    node.machine.stop_process(agent.process, signal.SIGTERM, PROMPT)
    node.machine.ask_reboot()
    assert node.machine.wait_down() is Down.REBOOT
    assert node.machine.boot() == 1
    assert node.machine.read("/usr/local/bin/tool") == "new\n", "the one that was armed, whole"


# -- the end of the agent, and what happens while it is away ----------------------------------------------------------


# The agent as it is, which gets its SIGTERM in the middle of a step: sent from outside it could come a step too late.
_SIGTERM_IN = """
import os, signal, sys
from mcdaemon import cli
from mcdaemon.perform import Performer
perform, step = Performer.perform, sys.argv[1]
def told_to_end(self, decision, facts):
    if decision.step.value == step:
        os.kill(os.getpid(), signal.SIGTERM)
    perform(self, decision, facts)
Performer.perform = told_to_end
sys.exit(cli.main(["run"]))
"""


def test_sigterm_in_each_step_ends_the_agent_promptly_and_the_next_one_goes_on(node: Node) -> None:
    """STATE-12: at each step in turn; at most the step that runs is finished."""
    for step in STEPS[:-1]:
        argv = ["/usr/bin/python3", "-c", _SIGTERM_IN, step]
        done = node.machine.run(argv, check=False, env={"PYTHONPATH": ARCHIVE})
        assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
        said = [line.partition(":")[0] for line in done.stderr.splitlines()]
        assert [word for word in said if word in STEPS][-1] == step, "the next step is not begun"
    arrives(node)


def test_a_config_that_changed_while_the_agent_was_away_is_seen_at_its_start(aged: Aged) -> None:
    """STATE-07: with the interval of the loop at an hour."""
    node = aged(OLD, settings=COUNTED + QUIET + "loop: {interval_seconds: 3600}\n")
    agent = Agent.start(node, "run")
    agent.wait_for("rest: ")
    node.machine.stop_process(agent.process, signal.SIGTERM, PROMPT)
    forget_drains(node)
    open_gate(node)
    node.desire(first=NEW)
    Agent.start(node, "run").wait_for("reboot: ")
    node.follow_reboot()
    arrives(node)


def test_a_hold_for_an_image_is_given_up_at_once_when_the_old_config_is_desired_again(aged: Aged, base: str) -> None:
    """STATE-29: waiting for an image that nobody has is no state that has to be sat out."""
    settings = COUNTED.replace("retry_min_seconds: 1,", "retry_min_seconds: 1000,") + QUIET
    node = aged(OLD, settings=settings.replace("max_seconds: 1.1", "max_seconds: 2000"))
    forget_drains(node)
    nowhere = base.partition("@")[0] + "@sha256:" + "0" * 64
    agent = Agent.start(node, "run")
    agent.wait_for("rest: ")
    node.desire(first=machine_config("50-nowhere", os_image=nowhere))
    agent.wait_for("hold: ")
    assert status(node)["state"] == "Working"
    before = len(agent.said)
    node.desire(first=OLD)
    node.machine.run(["sh", "-c", 'until grep -q \'"state": "Done"\' /run/mcdaemon/status.json; do sleep 0.1; done'])
    assert agent.said[before:][-1].startswith("rest: ")
    agent.kill()
    assert drains(node) == "" and node.boots == 0
    no_leftovers(node)


def test_an_agent_that_was_stopped_while_it_held_returns_to_rest_when_the_old_is_desired_again(
    aged: Aged, base: str
) -> None:
    """STATE-29, STATE-07."""
    node = aged(OLD, settings=COUNTED + QUIET)
    nowhere = base.partition("@")[0] + "@sha256:" + "0" * 64
    node.desire(first=machine_config("50-nowhere", os_image=nowhere))
    assert tick(node) == 3
    node.desire(first=OLD)
    assert tick(node) == 0
    rests_on(node, "50-old")


# -- the clock --------------------------------------------------------------------------------------------------------

# The agent with a wall clock that jumps ten years with every look, back and forth.
_JUMPY = """
import sys, time
real, jumps = time.time, [0]
def jumpy():
    jumps[0] += 1
    return real() + (315360000 if jumps[0] % 2 else -315360000)
time.time = jumpy
from mcdaemon import cli
status = cli.main(sys.argv[1:])
assert jumps[0], "nobody has looked"
sys.exit(status)
"""


def jumpy(node: Node) -> subprocess.CompletedProcess[str]:
    argv = ["/usr/bin/python3", "-c", _JUMPY, "run", "--once"]
    return node.machine.run(argv, check=False, env={"PYTHONPATH": ARCHIVE})


def test_a_clock_that_jumps_ten_years_with_every_look_changes_nothing(node: Node) -> None:
    """STATE-22: an update from its begin to its end, health gate included; and nothing is said to be late or lost."""
    shut_gate(node)
    held = jumpy(node)
    assert held.returncode == 3 and "cannot drain" in held.stderr
    open_gate(node)
    done = jumpy(node)
    assert "changed after the merge" not in done.stderr
    node.follow_reboot()
    done = jumpy(node)
    assert done.returncode == 0, done.stderr
    assert node.boots == 1 and drains(node) == "du"
    is_new(node)
    rests_on(node, "50-new")


def test_a_health_gate_is_not_ended_by_a_clock_that_jumps(aged: Aged) -> None:
    """STATE-22: chrony sets the clock of a node with an RTC in 2019 just then."""
    node = aged(OLD, settings=COUNTED)
    script = '#!/bin/sh\ntest -e /run/ok -o "$(cat /etc/app.conf)" = old\n'
    node.machine.write("/etc/mcdaemon/health.d/10-x", script, 0o755)
    forget_drains(node)
    open_gate(node)
    node.desire(first=NEW)
    tick(node)
    assert node.boots == 1
    for _round in range(2):
        done = jumpy(node)
        assert done.returncode == 3 and "waiting for it to become healthy" in done.stderr
    node.machine.write("/run/ok", "")
    assert jumpy(node).returncode == 0
    assert node.boots == 1 and drains(node) == "du"
    rests_on(node, "50-new")


def test_a_hold_is_retried_by_its_own_clock_when_the_wall_clock_jumps_back(node: Node, push: Push) -> None:
    """STATE-22: the waits between attempts are monotonic; a clock set back ten years does not stretch them."""
    shut_gate(node)
    back = "import time\nreal = time.time\nshift = [0.0]\ntime.time = lambda: real() + shift[0]\n"
    script = back + (
        "import sys, threading\nfrom mcdaemon import cli\n"
        "def jump():\n    shift[0] = -315360000.0\nthreading.Timer(2.0, jump).start()\nsys.exit(cli.main(['run']))\n"
    )
    process = node.machine.start(["/usr/bin/python3", "-c", script], env={"PYTHONPATH": ARCHIVE})
    try:
        node.machine.run(["sh", "-c", "until grep -q 'cannot drain' /run/mcdaemon/status.json; do sleep 0.1; done"])
        node.machine.run(["sleep", "2.5"])
        open_gate(node)
        node.follow_reboot()
    finally:
        process.kill()
        process.wait(10)
    arrives(node)
    assert push is not None
