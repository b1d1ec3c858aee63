"""A whole update in one go, with the node at work until it reboots."""

from __future__ import annotations

from vmlab.node import VmNode
from vmlab.osimage import next_image

from scenarios.conftest import Push, Record
from tests.stand.configs import Unit, machine_config
from tests.stand.images import File
from tests.stand.incidents import FILES, WORKLOAD
from tests.stand.registry import Registry

COUNTER = Unit(
    "counter.service",
    "[Service]\nExecStart=/bin/sh -c 'while :; do date +%%s.%%N >>/var/lib/counted; sleep 1; done'\n"
    "[Install]\nWantedBy=multi-user.target\n",
    True,
)


def test_image_kernel_arguments_package_files_and_units_take_one_reboot_and_work_goes_on_until_it(
    node_at_rest: VmNode,
    base: str,
    extensions: str,
    push: Push,
    registry: Registry,
    record_property: Record,
) -> None:
    """P1, P2, P5: staged while the node works, drained last, one reboot; nothing is pulled out of service."""
    node = node_at_rest
    node.desire(machine_config("50-old", files=FILES, units=[COUNTER], os_image=base))
    node.until()
    target = push(next_image("417.94.2", {"usr/share/hello": File(b"2")}), "os:v2")
    boots = node.boots
    transactions = node.machine.journal("rpm-ostreed.service").count("Initiated txn")
    node.desire(
        machine_config(
            "50-new",
            files={**FILES, "/etc/app/app.conf": ("level = debug\n", 0o640)},
            units=[COUNTER, WORKLOAD],
            os_image=target,
            kernel_arguments=["hugepagesz=2M hugepages=8"],
            extensions=["usbguard"],
            extensions_image=extensions,
        )
    )
    node.until("drain: ")
    said = node.machine.journal("mcdaemon.service")
    asked = len(registry.requests())
    staged = node.machine.journal("rpm-ostreed.service").count("Initiated txn") - transactions
    node.until()
    assert said.rindex("verify-staged: ") > said.rindex("stage-kargs: "), "proved before anybody had to leave"
    assert node.boots == boots + 1, "one reboot"
    assert staged == 2, "the tree, and the kernel arguments"
    assert len(registry.requests()) == asked, "nothing was asked of the registry after the drain"
    _out_of_service(node, record_property)
    _is_there(node)


def _out_of_service(node: VmNode, record_property: Record) -> None:
    drained, back = node.turns()[-2:]
    assert (drained.what, back.what) == ("drained", "back") and drained.boot_id != back.boot_id
    counted = [float(line) for line in node.machine.read("/var/lib/counted").splitlines()]
    before = max(moment for moment in counted if moment <= drained.at)
    assert drained.at - before < 60, "the workload ran until the drain"
    assert [moment for moment in counted if drained.at < moment < back.at], "and on to the reboot"
    record_property("numbers", f"full update: out of service for {back.at - drained.at:.1f} s, nothing pulled in it")


def _is_there(node: VmNode) -> None:
    machine = node.machine
    assert "hugepages=8" in machine.read("/proc/cmdline")
    assert "417.94.2" in machine.read("/etc/os-release") and machine.read("/usr/share/hello") == "2"
    assert machine.run(["usbguard"]).stdout.strip() == "usbguard"
    assert machine.read("/etc/app/app.conf") == "level = debug\n"
    assert machine.run(["systemctl", "is-active", "workload.service", "counter.service"]).returncode == 0
    assert node.mcdaemon("validate").returncode == 0
    assert machine.run(["systemctl", "--failed", "--no-legend"]).stdout == ""
    assert node.status()["state"] == "Done"
