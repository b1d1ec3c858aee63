"""What a second newcomer found: damaged local copies, holds, slow looks at health, drains for nothing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.field.conftest import MakeNode, Push
from tests.field.evidence import settle, through_gate
from tests.stand.configs import machine_config
from tests.stand.images import File
from tests.stand.incidents import FILES
from tests.stand.node import Node, next_image

pytestmark = pytest.mark.stand

DRAINED = "drain: {command: [/usr/bin/touch, /run/drained], undo: [/usr/bin/touch, /run/undrained]}\n"


def config(image: str) -> str:
    return machine_config("50-app", files=FILES, os_image=image)


def test_a_damaged_local_copy_leads_to_the_registry_over_restarts_and_leaves_no_hold(
    make_node: MakeNode, base: str, push: Push
) -> None:
    node = make_node(settings="hold: {retry_min_seconds: 1, retry_max_seconds: 2}\n")
    node.desire(first=config(base))
    node.update()
    target = push(next_image("417.94.90", {"usr/share/stand/damaged": File(b"x" * 5000)}), "os:v90")
    node.machine.run(["podman", "pull", "--quiet", target])
    node.machine.run(["sh", "-c", "rm $(find /var/lib/containers/storage/overlay -path '*diff*' -name damaged)"])
    node.desire(first=config(target))
    assert "from the registry next" in node.once(expect=3)
    node.update()
    assert "417.94.90" in node.machine.read("/etc/os-release")
    assert node.machine.run(["podman", "ps", "--all", "--quiet"]).stdout == ""


def test_a_package_repository_that_somebody_else_wrote_is_left_alone(node: Node, base: str) -> None:
    path = "/etc/yum.repos.d/coreos-extensions.repo"
    node.machine.write(path, "[mine]\nname=mine\nenabled=0\n")
    settle(node, first=machine_config("50-app", files={**FILES, "/etc/yum.repos.d/own.repo": ("[a]\n", 0o644)}))
    assert "[mine]" in node.machine.read(path)
    node.desire(first=machine_config("50-app", files={"/etc/yum.repos.d/mcdaemon-extensions.repo": "[a]\n"}))
    assert "/spec/config/storage/files/0/path" in node.once(expect=4)
    assert base


def test_a_target_that_becomes_healthy_goes_back_to_work_long_before_the_next_round(
    make_node: MakeNode, base: str
) -> None:
    """The node is out of service only for its reboot; the interval of the loop has nothing to do with that."""
    settings = DRAINED + "loop: {interval_seconds: 3600}\nmetrics: {listen: ''}\n"
    settings += "health: {timeout_seconds: 60, settle_seconds: 1}\n"
    node = make_node(settings=settings, daemon=True)
    node.machine.write("/etc/mcdaemon/health.d/10-ok", "#!/bin/sh\ntest -e /run/ok\n", 0o755)
    node.machine.run(["systemctl", "restart", "mcdaemon.service"])
    node.desire(first=config(base))
    node.follow_reboot()
    wait = "until grep -q 'waiting for it to become healthy' /run/mcdaemon/status.json; do sleep 0.2; done"
    node.machine.run(["sh", "-c", wait])
    node.machine.write("/run/ok", "")
    node.machine.run(["sh", "-c", "until test -e /run/undrained; do sleep 0.2; done"])
    node.machine.run(["sh", "-c", "until grep -q '\"Done\"' /run/mcdaemon/status.json; do sleep 0.2; done"])
    assert json.loads(node.machine.read("/run/mcdaemon/status.json"))["step"] == "rest"


def test_a_node_is_not_drained_while_somebody_holds_its_reboot_up(make_node: MakeNode, base: str) -> None:
    node = make_node(settings="hold: {retry_min_seconds: 1, retry_max_seconds: 2}\n" + DRAINED)
    holder = node.machine.start(
        ["systemd-inhibit", "--what=shutdown", "--mode=block", "--who=backup", "--why=runs", "sleep", "600"]
    )
    node.machine.run(["sh", "-c", "until systemd-inhibit --list | grep -q backup; do :; done"])
    node.desire(first=config(base))
    assert "backup" in node.once(expect=3)
    assert not node.machine.exists("/run/drained")
    node.machine.stop_process(holder)
    through_gate(node)
    assert node.status()["state"] == "Done"


class _InterruptedNode(Node):
    def _install_agent(self, settings: str) -> None:
        raise KeyboardInterrupt


def test_a_node_that_is_interrupted_while_it_is_made_leaves_a_folder_that_can_be_removed(
    tmp_path: Path, base: str
) -> None:
    """ostree makes deployments immutable, so that not even root can remove them; Ctrl-C in the demo left such a one."""
    with pytest.raises(KeyboardInterrupt):
        _InterruptedNode(tmp_path / "node", base)
    shutil.rmtree(tmp_path / "node")
    assert not (tmp_path / "node").exists()


def test_settings_broken_by_hand_hold_the_update_until_they_are_repaired(make_node: MakeNode, base: str) -> None:
    """The running agent has the old ones in memory; after the reboot it could not start, and nobody would go back."""
    path = "/etc/mcdaemon/mcdaemon.yaml"
    settings = "hold: {retry_min_seconds: 1, retry_max_seconds: 2}\nloop: {interval_seconds: 1}\n" + DRAINED
    node = make_node(settings=settings, daemon=True)
    node.machine.run(["systemctl", "restart", "mcdaemon.service"])
    node.machine.run(["sh", "-c", "until test -e /run/mcdaemon/status.json; do sleep 0.1; done"])
    node.machine.write(path, settings + "helth: {}\n")
    node.desire(first=config(base))
    await_word(node, "helth: unknown key")
    assert not node.machine.exists("/run/drained")
    node.machine.write(path, settings)
    node.follow_reboot()
    await_word(node, '"Done"')
    assert node.machine.read(path) == settings


def test_settings_broken_while_the_node_was_drained_bring_it_back_to_work(make_node: MakeNode, base: str) -> None:
    """After a way back the old root would have them, and no agent that starts."""
    node = make_node(settings=DRAINED.replace("/usr/bin/touch, /run/drained", "/usr/local/bin/drain"))
    path = "/etc/mcdaemon/mcdaemon.yaml"
    settings = node.machine.read(path)
    node.machine.write("/usr/local/bin/drain", f"#!/bin/sh\ntest -e /run/fine || chmod 666 {path}\n", 0o755)
    node.desire(first=config(base))
    assert "cannot trust" in node.once(expect=3)
    assert node.machine.exists("/run/undrained")
    node.machine.run(["chmod", "644", path])
    node.machine.write("/run/fine", "")
    node.update()
    assert (node.status()["state"], node.machine.read(path)) == ("Done", settings)


def test_an_image_with_settings_that_cannot_be_used_is_not_booted(make_node: MakeNode, base: str, push: Push) -> None:
    """No file of the node stands above the image's."""
    node = make_node(settings="")
    node.machine.run(["rm", "-f", "/etc/mcdaemon/mcdaemon.yaml"])
    settle(node, first=config(base))
    target = push(next_image("417.94.91", {"usr/etc/mcdaemon/mcdaemon.yaml": File(b"helth: {}\n")}), "os:v91")
    node.desire(first=config(target))
    assert "helth: unknown key" in node.once(expect=3)
    assert "helth" in node.status()["failed"]
    assert "417.94.91" not in node.machine.read("/etc/os-release")


def await_word(node: Node, word: str) -> None:
    """Wait until the running daemon's status has it."""
    limit = "i=$((i+1)); test $i -lt 150 || exit 1; sleep 0.1"
    node.machine.run(["sh", "-c", f"i=0; until grep -q '{word}' /run/mcdaemon/status.json; do {limit}; done"])
