"""Updates that go well: what changes, where, in how many reboots and transactions, and what stays as it was."""

from __future__ import annotations

import base64
import json
import os
import shlex
import stat
from pathlib import Path
from typing import Any

import pytest

from tests.field.conftest import MakeNode, Push
from tests.field.evidence import (
    deployment_etc,
    open_gate,
    rests_on,
    settle,
    shut_gate,
    through_gate,
    transactions,
    validated,
)
from tests.stand.configs import FileText, Unit, machine_config
from tests.stand.images import File
from tests.stand.incidents import FILES, UNIT_TEXT, WORKLOAD
from tests.stand.node import SETTINGS, Node, next_image
from tests.stand.registry import Registry

pytestmark = pytest.mark.stand

SYSTEM = "/etc/systemd/system"
SHARED = Path(os.environ.get("MCDAEMON_SHARED", Path(__file__).parents[3] / "shared"))
CLUSTER = SHARED / "data" / "cluster"


@pytest.fixture(scope="module")
def with_hosts(push: Push) -> str:
    """An OS with a default of its own for /etc/hosts."""
    return push(next_image("417.94.19", {"usr/etc/hosts": File(b"127.0.0.1 localhost\n")}), "os:v19")


def kernel_line(node: Node) -> list[str]:
    return shlex.split(node.machine.read("/proc/cmdline"))


def managed_kargs(node: Node) -> list[str]:
    """The command line without what belongs to the installation, to libostree and to the agent's marker."""
    own = ("ostree=", "root=", "rw", "mcdaemon.update=")
    return [word for word in kernel_line(node) if not word.startswith(own)]


# -- files and units --------------------------------------------------------------------------------------------------


def test_files_and_units_arrive_with_one_reboot_in_the_new_deployment_only(node: Node) -> None:
    old = node.machine.booted().name
    before = deployment_etc(node, old)
    settle(node, first=machine_config("50-app", files=FILES, units=[WORKLOAD]))
    assert node.boots == 1 and node.machine.booted().name != old
    for path, (text, mode) in FILES.items():
        found = node.machine.lstat(path)
        assert (node.machine.read(path), stat.S_IMODE(found.st_mode)) == (text, mode)
        assert (found.st_uid, found.st_gid) == (0, 0)
    link = f"{SYSTEM}/multi-user.target.wants/workload.service"
    assert node.machine.readlink(link) == f"{SYSTEM}/workload.service"
    assert "LimitNOFILE" in node.machine.read(f"{SYSTEM}/workload.service.d/10-limits.conf")
    assert deployment_etc(node, old) == before, "the old deployment keeps its own /etc, byte for byte"
    rests_on(node, "50-app")


def test_the_workload_that_a_config_enables_runs_after_the_reboot(node: Node) -> None:
    settle(node, first=machine_config("50-app", files=FILES, units=[WORKLOAD]))
    state = node.machine.run(["systemctl", "show", "--property=ActiveState", "workload.service"]).stdout
    assert state.strip() == "ActiveState=active"


def test_a_file_that_leaves_the_config_goes_back_to_the_image_or_away(make_node: MakeNode, with_hosts: str) -> None:
    node = make_node(with_hosts)
    hosts = node.machine.read("/etc/hosts")
    both: dict[str, FileText] = {
        "/etc/hosts": ("10.0.0.1 registry\n", 0o600), "/etc/app.conf": "x\n", "/etc/stays": "stays\n",
        "/usr/local/bin/tool": ("#!/bin/sh\n", 0o755),
    }  # fmt: skip
    settle(node, first=machine_config("50-a", files=both))
    assert node.machine.read("/etc/hosts") == "10.0.0.1 registry\n" and node.machine.exists("/usr/local/bin/tool")
    settle(node, first=machine_config("50-b", files={"/etc/stays": "stays\n"}))
    assert node.machine.read("/etc/hosts") == hosts and node.mode("/etc/hosts") == 0o644
    assert not node.machine.exists("/etc/app.conf") and not node.machine.exists("/usr/local/bin/tool")
    assert node.machine.read("/etc/stays") == "stays\n"
    rests_on(node, "50-b")
    assert len([word for word in kernel_line(node) if word.startswith("mcdaemon.update=")]) == 1


def test_units_are_masked_disabled_and_removed_again(node: Node) -> None:
    other = Unit("other.service", UNIT_TEXT, True)
    settle(node, first=machine_config("50-a", files=FILES, units=[WORKLOAD, other]))
    masked = Unit("workload.service", mask=True)
    settle(node, first=machine_config("50-b", files=FILES, units=[masked, Unit("other.service", UNIT_TEXT, False)]))
    assert node.machine.readlink(f"{SYSTEM}/workload.service") == "/dev/null"
    assert not node.machine.exists(f"{SYSTEM}/workload.service.d/10-limits.conf")
    assert node.machine.exists(f"{SYSTEM}/other.service")
    wants = f"{SYSTEM}/multi-user.target.wants"
    assert not node.machine.exists(f"{wants}/other.service") and not node.machine.exists(f"{wants}/workload.service")
    validated(node)
    settle(node, first=machine_config("50-c", files=FILES))
    for name in ("workload.service", "other.service"):
        assert not node.machine.exists(f"{SYSTEM}/{name}"), name
    rests_on(node, "50-c")


def test_owners_by_name_and_by_number_are_exact(node: Node) -> None:
    files: dict[str, FileText] = {"/etc/tool": ("#!/bin/sh\n", 0o711), "/etc/k": ("k", 0o400)}
    config = json.loads(machine_config("50-owners", files=files))
    config["spec"]["config"]["storage"]["files"][1] |= {"user": {"name": "core"}, "group": {"id": 10}}
    settle(node, first=json.dumps(config))
    assert node.mode("/etc/tool") == 0o711
    found = node.machine.lstat("/etc/k")
    assert (stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid) == (0o400, 1000, 10)
    rests_on(node, "50-owners")


def test_unmanaged_changes_of_etc_are_carried_over_as_ostree_does(node: Node) -> None:
    node.machine.write("/etc/by-hand.conf", "kept\n")
    node.machine.write("/etc/hostname", "worker-0\n")
    settle(node, first=machine_config("50-app", files=FILES))
    assert node.machine.read("/etc/by-hand.conf") == "kept\n" and node.machine.read("/etc/hostname") == "worker-0\n"


def test_a_config_file_that_equals_the_old_default_survives_an_image_with_another_default(
    make_node: MakeNode, push: Push, with_hosts: str
) -> None:
    """TXN-17: ostree takes such a file for unchanged and brings the new image's default."""
    other = push(next_image("417.94.20", {"usr/etc/hosts": File(b"0.0.0.0 from-the-new-image\n")}), "os:v20")
    node = make_node(with_hosts)
    hosts = {"/etc/hosts": node.machine.read("/etc/hosts")}
    settle(node, first=machine_config("50-a", files=hosts))
    settle(node, first=machine_config("50-b", files=hosts, os_image=other))
    assert node.machine.read("/etc/hosts") == hosts["/etc/hosts"]
    rests_on(node, "50-b")


# -- kernel arguments -------------------------------------------------------------------------------------------------


def test_kernel_arguments_come_change_and_go_in_order_and_with_repeats(make_node: MakeNode) -> None:
    node = make_node(kargs=["quiet"])
    wanted = ["console=tty0", "console=ttyS0", "hugepagesz=1G", "hugepages=4", "hugepagesz=2M", "hugepages=512"]
    settle(node, first=machine_config("50-a", kernel_arguments=wanted))
    assert managed_kargs(node) == ["quiet", *wanted]
    changed = ["console=ttyS0", "hugepagesz=2M", "hugepages=256", "hugepagesz=1G", "hugepages=4"]
    settle(node, first=machine_config("50-b", kernel_arguments=changed))
    assert managed_kargs(node) == ["quiet", *changed]
    rests_on(node, "50-b")
    settle(node, first=machine_config("50-c"))
    assert managed_kargs(node) == ["quiet"]
    rests_on(node, "50-c")


# -- packages and images ----------------------------------------------------------------------------------------------


def test_an_extension_comes_and_goes_without_a_read_of_the_base(
    node: Node, extensions: str, registry: Registry
) -> None:
    registry.forget_requests()
    settle(node, first=machine_config("50-ext", extensions=["usbguard"], extensions_image=extensions))
    assert node.machine.run(["usbguard"]).stdout == "usbguard\n"
    assert [request.path for request in registry.requests() if "/os/" in request.path] == []
    rests_on(node, "50-ext")
    settle(node, first=machine_config("50-none", extensions_image=extensions))
    assert node.machine.run(["sh", "-c", "command -v usbguard"], check=False).returncode != 0
    rests_on(node, "50-none")


def test_a_change_of_everything_takes_one_reboot_and_two_transactions(
    make_node: MakeNode, push: Push, extensions: str
) -> None:
    """STATE-20: the image that was booted is read and compared, and the node rests."""
    node = make_node()
    settle(node, first=machine_config("50-a", files=FILES))
    target = push(next_image("417.94.21"), "os:v21")
    boots, boot = node.boots, node.machine.boot_id
    everything = machine_config(
        "50-b",
        files={**FILES, "/etc/new": "n"},
        units=[WORKLOAD],
        os_image=target,
        kernel_arguments=["nosmt"],
        extensions=["usbguard"],
        extensions_image=extensions,
    )
    settle(node, first=everything)
    assert node.boots == boots + 1
    assert transactions(node, boot) == ["UpdateDeployment", "KernelArgs"]
    assert "417.94.21" in node.machine.read("/etc/os-release") and "nosmt" in kernel_line(node)
    assert node.machine.run(["usbguard"]).stdout == "usbguard\n" and node.machine.read("/etc/new") == "n"
    rests_on(node, "50-b")


def test_without_kernel_arguments_one_transaction_is_enough(make_node: MakeNode, push: Push, extensions: str) -> None:
    node = make_node()
    boot = node.machine.boot_id
    target = push(next_image("417.94.22"), "os:v22")
    settle(
        node,
        first=machine_config(
            "50-b", files=FILES, os_image=target, extensions=["usbguard"], extensions_image=extensions
        ),
    )
    assert node.boots == 1 and transactions(node, boot) == ["UpdateDeployment"]
    rests_on(node, "50-b")


def test_nothing_is_pulled_and_no_transaction_runs_between_drain_and_reboot(
    make_node: MakeNode, push: Push, registry: Registry, extensions: str
) -> None:
    node = make_node()
    target = push(next_image("417.94.23"), "os:v23")
    node.desire(
        first=machine_config(
            "50-b",
            files=FILES,
            os_image=target,
            kernel_arguments=["nosmt"],
            extensions=["usbguard"],
            extensions_image=extensions,
        )
    )
    node.once(expect=3)
    assert [d.staged for d in node.machine.deployments()].count(True) == 1
    boot, before = node.machine.boot_id, transactions(node)
    registry.forget_requests()
    open_gate(node)
    node.once()
    assert node.machine.boot_id != boot, "the node has rebooted"
    assert transactions(node, boot) == before
    assert list(registry.requests()) == []


def test_a_second_config_for_the_same_image_under_another_name_changes_no_base(
    node: Node, base: str, registry: Registry
) -> None:
    """TXN-08: what is booted already is no change."""
    digest = base.partition("@")[2]
    boot = node.machine.boot_id
    settle(node, first=machine_config("50-a", files=FILES, os_image=f"{registry.host}/os:v1"))
    assert transactions(node, boot) == ["KernelArgs"], "a tag that names what is booted needs no rebase (TXN-08)"
    assert node.status()["digest"] == digest


# -- nodes that were not always ours ----------------------------------------------------------------------------------


def test_a_node_without_currentconfig_is_adopted(node: Node) -> None:
    """The files that the config wants may be there already, with wrong modes and contents among them."""
    node.machine.write("/etc/app/app.conf", "something else\n", 0o600)
    node.machine.write("/etc/kubernetes/ca.crt", FILES["/etc/kubernetes/ca.crt"][0], 0o666)
    settle(node, first=machine_config("50-app", files=FILES, units=[WORKLOAD]))
    assert node.mode("/etc/kubernetes/ca.crt") == 0o600
    rests_on(node, "50-app")


@pytest.mark.parametrize("loss", ["removed", "emptied"])
def test_a_node_that_lost_its_currentconfig_gets_it_back(node: Node, loss: str) -> None:
    """STATE-04."""
    settle(node, first=machine_config("50-app", files=FILES))
    path = "/etc/machine-config-daemon/currentconfig"
    if loss == "removed":
        node.machine.run(["rm", path])
    else:
        node.machine.write(path, "")
    settle(node, first=machine_config("50-app", files=FILES))
    rests_on(node, "50-app")


def test_nothing_desired_means_nothing_done(node: Node) -> None:
    assert "no config is desired" in node.once()
    assert node.boots == 0 and transactions(node) == []
    settle(node, first=machine_config("50-app", files=FILES))
    node.desire()
    node.once()
    assert node.machine.exists("/etc/app/app.conf"), "an empty directory takes nothing away"


def test_a_change_by_hand_is_said_and_not_undone_behind_the_back(node: Node) -> None:
    settle(node, first=machine_config("50-app", files=FILES))
    node.machine.write("/etc/app/app.conf", "level = trace\n")
    node.once(expect=1)
    status = node.status()
    assert status["state"] == "Degraded" and "/etc/app/app.conf" in status["why"]
    assert node.mcdaemon("validate", check=False).returncode == 1
    assert node.machine.read("/etc/app/app.conf") == "level = trace\n"


def test_plan_says_what_an_update_would_do_and_does_none_of_it(node: Node, push: Push) -> None:
    target = push(next_image("417.94.24"), "os:v24")
    node.desire(
        first=machine_config("50-app", files=FILES, units=[WORKLOAD], os_image=target, kernel_arguments=["nosmt"])
    )
    said = node.mcdaemon("plan").stdout
    for word in (target.partition("@")[2], "nosmt", "/etc/app/app.conf", "workload.service", "reboot: one"):
        assert word in said, f"{word} is not in:\n{said}"
    assert transactions(node) == [] and not node.machine.exists("/etc/app/app.conf")


# -- the real thing ---------------------------------------------------------------------------------------------------


def rendered(letter: str, os_image: str, extensions_image: str) -> str:
    """A config captured from a real controller, with images that the stand has."""
    document: dict[str, Any] = json.loads((CLUSTER / f"rendered-worker-{letter}.json").read_text())
    document["spec"] |= {"osImageURL": os_image, "baseOSExtensionsContainerImage": extensions_image}
    # The capture has a word in place of the pull secret; a real one is base64.
    return json.dumps(document).replace("MCC-PULL-SECRET", base64.b64encode(b"user:secret").decode())


def test_real_rendered_configs_are_applied_one_after_the_other(
    make_node: MakeNode, push: Push, base: str, extensions: str
) -> None:
    if not CLUSTER.is_dir():
        reason = f"no captured configs in {CLUSTER}; set MCDAEMON_SHARED to the folder that has them"
        print(reason)
        pytest.skip(reason)
    target = push(next_image("417.94.25"), "os:v25")
    node = make_node(settings=SETTINGS)
    # The captured config brings a registries.conf of its own, which does not know the stand's registry.
    trust = '[[registry]]\nlocation = "127.0.0.1"\ninsecure = true\n'
    node.machine.write("/etc/containers/registries.conf.d/stand.conf", trust)
    for letter, image in (("a", base), ("b", target)):
        text = rendered(letter, image, extensions)
        boots = node.boots
        node.desire(rendered=text)
        node.update()
        assert node.boots == boots + 1
        rests_on(node, json.loads(text)["metadata"]["name"])
    assert "417.94.25" in node.machine.read("/etc/os-release")


def test_an_update_waits_at_the_gate_with_everything_ready_and_nothing_changed(node: Node) -> None:
    before = deployment_etc(node, node.machine.booted().name)
    node.desire(first=machine_config("50-app", files=FILES))
    said = node.once(expect=3)
    assert "drain" in said and node.status()["state"] == "Working"
    assert deployment_etc(node, node.machine.booted().name) == before
    assert not node.machine.exists("/usr/local/bin/workload.sh"), "shared places are written after the drain only"
    through_gate(node)
    shut_gate(node)
    rests_on(node, "50-app")
