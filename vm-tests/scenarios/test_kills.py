"""What dies in the middle of an update, with the rest of the node alive: the daemon, rpm-ostreed, the whole system."""

from __future__ import annotations

import json
from collections.abc import Sequence

from vmlab.guest import BOOT
from vmlab.node import LAB, SETTLED, VmNode
from vmlab.osimage import next_image

from scenarios.change import OLD, is_new, new, rests_cleanly
from scenarios.conftest import MakeNode, Push, Record
from tests.stand.images import File
from tests.stand.machine import Down
from tests.stand.rpmostreed import FAULTS_FILE

_STEPS = ("stage-kargs", "verify-staged", "drain", "finalize", "commit-files", "verify-root")
"""The steps of an update whose OS stays, up to the reboot, in their order."""

# In the guest, because a step may take less time than a command from the host: something is done the first time that
# the agent says that it takes a step.
_AT_STEP = r"""
journalctl --follow --lines=1 --output=cat --unit=mcdaemon.service | while read -r line; do
  step=${line%%: *}
  [ -n "$watching" ] || echo "vmlab: watching" >/dev/hvc0
  watching=yes
  case " $STEPS " in *" $step "*) ;; *) continue ;; esac
  read -r _ pid _ </run/mcdaemon/lock
  ACTION
  STEPS=$(echo " $STEPS " | sed "s/ $step / /")
  printf '\nvmlab: struck at %s\n' "$step" >/dev/hvc0
done
"""
_KILL = "kill -9 $pid"
_REBOOT = "reboot -ff"
_GATE = f"{LAB}/gate-is-shut"


def test_the_daemon_is_killed_at_every_step_of_one_update(make_node: MakeNode, record_property: Record) -> None:
    """P4: systemd starts it again each time; it goes on from what it finds, and one reboot is enough."""
    node = make_node(config=OLD)
    machine = node.machine
    machine.write("/run/systemd/system/mcdaemon.service.d/50-vmlab.conf", "[Service]\nRestartSec=1s\n")
    machine.run(["systemctl", "daemon-reload"])
    mark = machine.mark()
    _at_step(node, _STEPS, _KILL)
    node.desire(new())
    for step in _STEPS:
        machine.wait_for(f"^vmlab: struck at {step}$", SETTLED, mark)
    node.until()
    assert node.boots == 1, "one reboot"
    killed = "mcdaemon.service: Main process exited, code=killed, status=9/KILL"
    assert _journal_before(node).count(killed) == len(_STEPS)
    is_new(node)
    rests_cleanly(node, "50-new")
    record_property("numbers", f"kills: the daemon killed {len(_STEPS)} times in one update")


def test_rpm_ostreed_is_killed_in_the_middle_of_both_of_its_transactions(
    make_node: MakeNode, push: Push, record_property: Record
) -> None:
    """P4: with the image half imported, which is asked for again; and with the deployment staged but no answer given,
    which is found as it is."""
    node = make_node(config=OLD)
    machine = node.machine
    target = push(next_image("417.94.2", {"usr/share/hello": File(b"2")}), "os:v2-kills")
    mark = machine.mark()
    _hold(node, "UpdateDeployment", "after-layer-1")
    node.desire(new(target))
    _kill_held(node)
    _hold(node, "KernelArgs", "after-stage-before-finished")
    _kill_held(node)
    node.until("drain: ")
    killed = "rpm-ostreed.service: Main process exited, code=killed, status=9/KILL"
    assert sum(killed in line for line in machine.qemu.journal.lines[mark:]) == 2
    node.until()
    assert node.boots == 1, "one reboot"
    is_new(node)
    assert machine.read("/usr/share/hello") == "2" and "417.94.2" in machine.read("/etc/os-release")
    rests_cleanly(node, "50-new")
    record_property("numbers", "kills: rpm-ostreed killed in UpdateDeployment and in KernelArgs")


def test_the_system_is_rebooted_by_force_before_the_drain_and_again_after_the_commit(
    make_node: MakeNode, record_property: Record
) -> None:
    """P4: what was staged goes with the first `reboot -ff`, and the old config serves; the second one finds the target
    finalized and committed, and boots it whole."""
    node = make_node(config=OLD)
    machine = node.machine
    machine.write(f"{LAB}/drain", f"test ! -e {_GATE}\n", 0o755)
    machine.write(_GATE, "")
    old = machine.booted().name
    node.desire(new())
    node.until("drain: ")
    assert [one.staged for one in machine.deployments()].count(True) == 1
    _forced(node)
    assert machine.booted().name == old and machine.read("/etc/app/app.conf") == "old\n"
    assert machine.read("/usr/local/bin/tool") == "old\n" and not machine.exists("/etc/only-new")
    node.until("drain: ")
    _at_step(node, ["verify-root"], _REBOOT)
    machine.run(["rm", _GATE])
    node.until()
    assert node.boots == 2, "both of them forced, none besides"
    assert "Stopped target multi-user.target" not in _journal_before(node), "it was not the agent's own"
    is_new(node)
    rests_cleanly(node, "50-new")
    record_property("numbers", "kills: `reboot -ff` twice in one update")


def _at_step(node: VmNode, steps: Sequence[str], action: str) -> None:
    """From now on, until a reboot, do this at the begin of these steps, once at each."""
    mark = node.machine.mark()
    script = _AT_STEP.replace("ACTION", action)
    node.machine.start(["sh", "-c", script], env={"STEPS": " ".join(steps)})
    node.machine.wait_for("^vmlab: watching$", BOOT, mark)


def _hold(node: VmNode, method: str, step: str) -> None:
    """The next transaction of this kind waits at this step, which the stand-in knows by name."""
    machine = node.machine
    fifo = f"/run/stand/{method}"
    machine.write(FAULTS_FILE, json.dumps({"methods": [method], "hold": {"at": step, "fifo": fifo}, "once": True}))
    machine.run(["mkfifo", fifo])


def _kill_held(node: VmNode) -> None:
    """Kill rpm-ostreed once it has reached the step at which it was to wait: it opens the FIFO there."""
    script = "for fifo in /run/stand/*; do [ ! -p $fifo ] || exec 3>$fifo; done; rm -f /run/stand/*; "
    script += "kill -9 $(systemctl show --property=MainPID --value rpm-ostreed.service)"
    node.machine.run(["sh", "-c", script], timeout=SETTLED)


def _forced(node: VmNode) -> None:
    """`reboot -ff`: no unit is stopped, nothing unmounted; and the boot after it."""
    node.machine.run(["reboot", "-ff"], check=False)
    assert node.machine.wait_down() is Down.REBOOT
    node.start()


def _journal_before(node: VmNode) -> str:
    """What the machine said before its last boot."""
    runs = sorted(node.machine.folder.glob("run-*"), key=lambda run: int(run.name.rpartition("-")[2]))
    return (runs[-2] / "journal.log").read_text(errors="replace")
