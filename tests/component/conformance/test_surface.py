"""The bus side: names, signatures, properties, clients and errors (rpm-ostree.md section 1)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pydbus.bus
import pytest

from tests.component.conformance import samples
from tests.component.conformance.client import (
    BASE,
    FAILED,
    NAME,
    NOT_FOUND,
    OS,
    SYSROOT,
    SYSROOT_PATH,
    RemoteError,
    RpmOstree,
    call,
    iterate_until,
)
from tests.component.conformance.conftest import Node
from tests.component.conformance.node import UNIT
from tests.stand.introspection import GLib

pytestmark = pytest.mark.stand

SYSROOT_METHODS = {
    "RegisterClient": ("a{sv}", ""), "UnregisterClient": ("a{sv}", ""), "Reload": ("", ""), "ReloadConfig": ("", ""),
    "GetOS": ("s", "o"),
}  # fmt: skip
OS_METHODS = {
    "AutomaticUpdateTrigger": ("a{sv}", "bs"), "GetDeploymentsRpmDiff": ("ss", "a(sua{sv})"),
    "Deploy": ("sa{sv}", "s"), "GetCachedDeployRpmDiff": ("sas", "a(sua{sv})a{sv}"),
    "DownloadDeployRpmDiff": ("sas", "s"),
    "Upgrade": ("a{sv}", "s"), "GetCachedUpdateRpmDiff": ("s", "a(sua{sv})a{sv}"), "DownloadUpdateRpmDiff": ("", "s"),
    "Rollback": ("a{sv}", "s"), "ClearRollbackTarget": ("a{sv}", "s"), "Rebase": ("a{sv}sas", "s"),
    "GetCachedRebaseRpmDiff": ("sas", "a(sua{sv})a{sv}"), "DownloadRebaseRpmDiff": ("sas", "s"),
    "PkgChange": ("a{sv}asas", "s"), "SetInitramfsState": ("basa{sv}", "s"), "InitramfsEtc": ("asasbba{sv}", "s"),
    "KernelArgs": ("sasasasa{sv}", "s"), "GetDeploymentBootConfig": ("sb", "a{sv}"), "Cleanup": ("as", "s"),
    "RefreshMd": ("a{sv}", "s"), "ModifyYumRepo": ("sa{ss}", "s"), "ListRepos": ("", "aa{sv}"),
    "UpdateDeployment": ("a{sv}a{sv}", "s"), "FinalizeDeployment": ("a{sv}", "s"), "WhatProvides": ("as", "aa{sv}"),
    "GetPackages": ("as", "aa{sv}"), "Search": ("as", "aa{sv}"),
}  # fmt: skip
SYSROOT_PROPERTIES = {
    "Booted": "o", "Path": "s", "ActiveTransaction": "(sss)", "ActiveTransactionPath": "s",
    "AutomaticUpdatePolicy": "s", "Deployments": "aa{sv}",
}  # fmt: skip
OS_PROPERTIES = {
    "BootedDeployment": "a{sv}", "DefaultDeployment": "a{sv}", "RollbackDeployment": "a{sv}", "CachedUpdate": "a{sv}",
    "HasCachedUpdateRpmDiff": "b", "Name": "s",
}  # fmt: skip
TRANSACTION_SIGNALS = {
    "Finished": "bs", "Message": "s", "TaskBegin": "s", "TaskEnd": "s", "PercentProgress": "su",
    "DownloadProgress": "(tt)(uu)(uuu)(uuut)(uu)(tt)", "SignatureProgress": "avs", "ProgressEnd": "",
}  # fmt: skip


def introspect(client: RpmOstree, path: str) -> ElementTree.Element:
    reply = call(client.bus, NAME, path, "org.freedesktop.DBus.Introspectable", "Introspect", None, None)
    return ElementTree.fromstring(reply.unpack()[0])


def interface(node: ElementTree.Element, name: str) -> ElementTree.Element:
    found = node.find(f"interface[@name='{name}']")
    assert found is not None, name
    return found


def signature(member: ElementTree.Element, direction: str = "") -> str:
    arguments = [arg for arg in member.findall("arg") if not direction or arg.get("direction", "in") == direction]
    return "".join(arg.get("type", "") for arg in arguments)


def methods(found: ElementTree.Element) -> dict[str, tuple[str, str]]:
    return {one.get("name", ""): (signature(one, "in"), signature(one, "out")) for one in found.findall("method")}


def properties(found: ElementTree.Element) -> dict[str, str]:
    return {one.get("name", ""): one.get("type", "") for one in found.findall("property")}


def test_the_sysroot_object_has_exactly_its_methods_and_properties(rpmostreed: RpmOstree) -> None:
    found = interface(introspect(rpmostreed, SYSROOT_PATH), SYSROOT)
    assert methods(found) == SYSROOT_METHODS
    assert properties(found) == SYSROOT_PROPERTIES


def test_the_os_object_has_exactly_its_methods_and_properties(rpmostreed: RpmOstree) -> None:
    found = interface(introspect(rpmostreed, rpmostreed.os_path), OS)
    assert methods(found) == OS_METHODS
    assert properties(found) == OS_PROPERTIES


def test_the_transaction_object_is_on_the_peer_with_its_signals(node: Node) -> None:
    peer = node.client.connect(node.client.os("Cleanup", "(as)", ["repomd"])[0])
    found = interface(ElementTree.fromstring(peer.introspect()), f"{NAME}.Transaction")
    assert {one.get("name", ""): signature(one) for one in found.findall("signal")} == TRANSACTION_SIGNALS
    assert methods(found) == {"Start": ("", "b"), "Cancel": ("", "")}
    assert peer.property("InitiatingClientDescription").startswith("client(id:conformance dbus:")
    peer.close()


def test_pydbus_builds_proxies_from_the_introspection(rpmostreed: RpmOstree) -> None:
    bus = pydbus.bus.Bus(rpmostreed.bus)
    sysroot = bus.get(NAME, SYSROOT_PATH)
    assert sysroot.Path == "/"
    assert bus.get(NAME, sysroot.Booted)[OS].Name == rpmostreed.os_get("Name")
    assert bus.get(NAME, sysroot.Booted)[OS].GetDeploymentBootConfig("", True)["options"]


def test_the_object_manager_knows_every_object_and_its_properties(rpmostreed: RpmOstree) -> None:
    reply = call(rpmostreed.bus, NAME, BASE, "org.freedesktop.DBus.ObjectManager", "GetManagedObjects", None, None)
    objects = reply.unpack()[0]
    assert set(objects) >= {SYSROOT_PATH, rpmostreed.os_path}
    assert set(objects[SYSROOT_PATH][SYSROOT]) == set(SYSROOT_PROPERTIES)
    assert set(objects[rpmostreed.os_path][OS]) == set(OS_PROPERTIES)


def test_an_os_is_found_by_name_and_the_booted_one_without(rpmostreed: RpmOstree) -> None:
    assert rpmostreed.sysroot("GetOS", "(s)", rpmostreed.os_get("Name"))[0] == rpmostreed.os_path
    with pytest.raises(RemoteError) as refused:
        rpmostreed.sysroot("GetOS", "(s)", "no-such-os")
    assert (refused.value.name, refused.value.text) == (NOT_FOUND, 'OS name "no-such-os" not found')


def test_an_unknown_cleanup_element_is_refused_at_once(rpmostreed: RpmOstree) -> None:
    with pytest.raises(RemoteError) as refused:
        rpmostreed.os("Cleanup", "(as)", ["base", "everything"])
    assert (refused.value.name, refused.value.text) == (FAILED, "Invalid cleanup type: everything")
    assert rpmostreed.get("ActiveTransactionPath") == ""


def test_moo_is_a_sign_of_life(rpmostreed: RpmOstree) -> None:
    arguments = GLib.Variant("(b)", (True,))
    reply = call(rpmostreed.bus, NAME, rpmostreed.os_path, f"{NAME}.OSExperimental", "Moo", arguments, None)
    assert reply.unpack()[0]


def test_deployment_dictionaries_have_all_that_is_always_there(rpmostreed: RpmOstree) -> None:
    always = {
        "id", "osname", "checksum", "serial", "booted", "staged", "pinned", "unlocked", "base-commit-meta", "packages",
        "base-removals", "base-local-replacements", "base-remote-replacements", "requested-packages",
        "requested-local-packages", "requested-local-fileoverride-packages", "requested-base-removals",
        "requested-base-local-replacements", "regenerate-initramfs", "timestamp",
    }  # fmt: skip
    for one in rpmostreed.get("Deployments"):
        assert always <= set(one)
        assert one["id"] == f"{one['osname']}-{one['checksum']}.{one['serial']}"
    assert rpmostreed.os_get("BootedDeployment")["booted"] is True


def test_a_client_is_registered_once_and_gone_when_it_leaves(node: Node) -> None:
    node.client.register("another")
    second = node.connect()
    second.vanish()
    node.client.sysroot("UnregisterClient", "(a{sv})", {})
    assert iterate_until(lambda: "remaining=0" in node.machine.journal(UNIT) or _ping(node))
    lines = re.findall(r"client\((.*?) dbus:\S+\) (\w+); (.*)", node.machine.journal(UNIT))
    assert sorted(lines) == [
        ("id:conformance", "added", "new total=1"), ("id:conformance", "added", "new total=2"),
        ("id:conformance", "vanished", "remaining=0"), ("id:conformance", "vanished", "remaining=1"),
    ]  # fmt: skip


def _ping(node: Node) -> bool:
    """A round trip, so that the daemon has had its turn."""
    node.client.get("Path")
    GLib.timeout_add(20, lambda: False)
    return False


def test_it_leaves_when_nobody_is_registered_and_can_be_started_again(node: Node) -> None:
    node.machine.write("/etc/rpm-ostreed.conf", "[Daemon]\nIdleExitTimeout=1\nAutomaticUpdatePolicy=check\n")
    node.client.sysroot("ReloadConfig")
    assert node.client.get("AutomaticUpdatePolicy") == "check"
    owner = node.client.owner()
    node.client.sysroot("UnregisterClient", "(a{sv})", {})
    assert iterate_until(lambda: node.client.lost_owner, 8)
    node.machine.run(["systemctl", "start", UNIT])
    assert node.client.owner() not in ("", owner)
    assert node.client.get("Path") == "/"


def test_a_registered_client_holds_it(node: Node) -> None:
    node.machine.write("/etc/rpm-ostreed.conf", "[Daemon]\nIdleExitTimeout=1\n")
    node.client.sysroot("ReloadConfig")
    assert "will auto-exit in" not in node.machine.journal(UNIT).rpartition("added; new total=1")[2]


def test_a_bad_policy_is_refused_and_the_old_one_kept(node: Node) -> None:
    node.machine.write("/etc/rpm-ostreed.conf", "[Daemon]\nAutomaticUpdatePolicy=sometimes\n")
    with pytest.raises(RemoteError, match="Handling config reload: Reloading daemon configuration: "):
        node.client.sysroot("ReloadConfig")
    assert node.client.get("AutomaticUpdatePolicy") == "none"


def test_others_than_root_may_look_but_not_touch(node: Node) -> None:
    user = ["setpriv", "--reuid=1000", "--clear-groups", "busctl", "--timeout=20"]
    seen = node.machine.run([*user, "get-property", NAME, SYSROOT_PATH, SYSROOT, "Booted"])
    assert node.client.os_path in seen.stdout
    touched = node.machine.run(
        [*user, "call", NAME, node.client.os_path, OS, "Cleanup", "as", "1", "base"], check=False
    )
    assert "Access denied" in touched.stderr
    assert node.client.get("ActiveTransactionPath") == ""


def test_a_change_by_ostree_itself_is_noticed_without_a_reload(node: Node) -> None:
    node.client.update({"set-refspec": node.reference(samples.following())})
    assert len(node.client.get("Deployments")) == 2
    node.client.changes.clear()
    node.machine.run(["ostree", "admin", "undeploy", "0"])
    assert iterate_until(lambda: len(node.client.get("Deployments")) == 1 or _ping(node))
    assert iterate_until(lambda: any("Deployments" in values for _, values in node.client.changes))


def test_the_deployments_are_announced_before_finished(node: Node) -> None:
    node.client.changes.clear()
    peer = node.client.update({"set-refspec": node.reference(samples.following())})
    assert peer.finished == [(True, "")]
    assert node.client.get("Deployments")[0]["staged"]
    assert iterate_until(lambda: any("Deployments" in values for _, values in node.client.changes))
    defaults = [values["DefaultDeployment"] for _, values in node.client.changes if "DefaultDeployment" in values]
    assert [one["staged"] for one in defaults] == [True]


def test_the_suite_can_be_pointed_at_another_daemon(resting_node: Node) -> None:
    bus = f"unix:path=/proc/{resting_node.machine._init}/root/run/dbus/system_bus_socket"
    environment = {**os.environ, "MCDAEMON_REAL_RPMOSTREED": "1", "DBUS_SYSTEM_BUS_ADDRESS": bus}
    argv = [sys.executable, "-m", "pytest", "-q", str(Path(__file__)), str(Path(__file__).with_name("test_quirks.py"))]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stdout
    assert re.search(r"\d+ passed, \d+ skipped", done.stdout), done.stdout
    assert "MCDAEMON_REAL_RPMOSTREED=1: this test needs a node of the stand" in done.stdout
