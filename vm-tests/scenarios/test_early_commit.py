"""A power cut between ostree's finalization and the commit of the config: the one moment at which a target can boot
without its files."""

from __future__ import annotations

import json
import re

from vmlab.node import SETTLED

from scenarios.change import OLD, WITNESSES, is_new, new, rests_cleanly, starts
from scenarios.conftest import MakeNode, Record

# The merge and the boot entry are done by then; the agent, which has asked for the stop, waits for its end.
_HELD = "[Service]\nExecStopPost=/bin/sh -c 'echo vmlab: finalized; exec tail -f /dev/null'\n"
_BOOTED = re.compile(r"systemd\[1\]: (?:Starting|Started|Finished|Listening on|Reached target) (\S+)")
_LATER = {"sysinit.target", "network-pre.target", "basic.target", "dbus.socket", "dbus.service", "multi-user.target",
          "systemd-logind.service", "mcdaemon.service", *(unit.name for unit in WITNESSES)}  # fmt: skip


def test_a_power_cut_between_finalization_and_commit_is_completed_before_any_unit_reads_the_old_files(
    make_node: MakeNode, record_property: Record
) -> None:
    """P3, P4: the target boots with the old files; the early unit completes it and reboots before the network, the bus,
    a kubelet without default dependencies or any other unit of the config has started. Exactly two boots."""
    node = make_node(config=OLD)
    machine = node.machine
    before, old = starts(machine), machine.booted().name
    assert before == {(unit.name[: -len(".service")], machine.boot_id, "old") for unit in WITNESSES}
    machine.write("/run/systemd/system/ostree-finalize-staged.service.d/50-vmlab.conf", _HELD)
    machine.run(["systemctl", "daemon-reload"])
    mark = machine.mark()
    node.desire(new())
    machine.wait_for(r"sh\[\d+\]: vmlab: finalized$", SETTLED, mark)
    target = machine.default_entry().deployment
    assert target != old
    etc = f"{machine.deployment_root(target)}/etc"
    assert machine.read(f"{etc}/app/app.conf") == "old\n" and not machine.exists(f"{etc}/only-new")
    machine.power_cut()
    assert machine.default_entry().deployment == target, "that is what the boot loader finds"

    node.start()
    assert node.boots == 2, "the early unit rebooted, once"
    node.until()
    assert node.boots == 2 and machine.booted().name == target
    is_new(node)
    between = _boot_between(node.machine.run(["journalctl", "-b", "-1", "-t", "mcdaemon-early", "-o", "json"]).stdout)
    last = {(name, machine.boot_id, "new") for name, _boot, _config in before}
    assert between != machine.boot_id
    assert starts(machine) == before | last | {("only-new", machine.boot_id, "new")}, "nobody started in between"
    started = set(_BOOTED.findall((machine.folder / "run-2/journal.log").read_text(errors="replace")))
    assert "mcdaemon-early.service" in started and not started & _LATER
    started = set(_BOOTED.findall((machine.folder / "run-3/journal.log").read_text(errors="replace")))
    assert started >= _LATER, "the names are right"
    assert [(turn.what, turn.boot_id) for turn in node.turns()[-2:]] == [
        ("drained", machine.boots[0]),
        ("back", machine.boot_id),
    ]
    rests_cleanly(node, "50-new")
    record_property("numbers", "early commit: power cut after finalization, completed in the first of two boots")


def _boot_between(lines: str) -> str:
    """The id of the boot in which the early unit completed the target, from the journal that it left."""
    entries = [json.loads(line) for line in lines.splitlines()]
    (said,) = [entry for entry in entries if "complete: the target was booted before its files" in entry["MESSAGE"]]
    boot = said["_BOOT_ID"]
    return f"{boot[:8]}-{boot[8:12]}-{boot[12:16]}-{boot[16:20]}-{boot[20:]}"
