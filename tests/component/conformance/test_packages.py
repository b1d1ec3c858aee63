"""Layered packages, overrides and the pkgcache (rpm-ostree.md 1.11, 1.13, 3.4, and section 7 for the texts)."""

from __future__ import annotations

import pytest

from tests.component.conformance import samples
from tests.component.conformance.client import variants
from tests.component.conformance.conftest import Node
from tests.stand.images import KERNEL, layer_on
from tests.stand.machine import NODE_LIBRARY

pytestmark = pytest.mark.stand

NO_PULL = {"no-pull-base": True}


def change(node: Node, added: list[str], removed: list[str], **options: object) -> tuple[bool, str]:
    """A whole PkgChange; its outcome."""
    return node.client.run("PkgChange", "(a{sv}asas)", variants(dict(options)), added, removed).finished[0]


def test_an_installed_package_is_in_the_tree_and_in_the_dictionaries(node: Node) -> None:
    node.offer(*samples.PACKAGES)
    assert change(node, ["usbguard"], []) == (True, "")
    staged = node.client.os_get("DefaultDeployment")
    assert (staged["packages"], staged["requested-packages"]) == (["usbguard"], ["usbguard"])
    assert staged["base-checksum"] == node.client.os_get("BootedDeployment")["checksum"] != staged["checksum"]
    assert staged["layered-commit-meta"]["rpmostree.clientlayer"] is True
    assert "rpmostree.packages" not in staged["layered-commit-meta"]
    assert staged["container-image-reference-digest"] == samples.base().digest
    node.reboot()
    assert node.machine.read("/usr/bin/usbguard") == "usbguard 1.0\n"
    assert node.machine.read("/usr/lib64/libusb.so") == "so\n", "what it requires came along"
    assert node.machine.lstat("/etc/usbguard/rules.conf").st_mode & 0o7777 == 0o600
    origin = node.machine.read(f"{_deployment(node)}.origin")
    assert "[packages]\nrequested=usbguard;\n" in origin


def _deployment(node: Node) -> str:
    booted = node.client.os_get("BootedDeployment")
    return f"/ostree/deploy/{booted['osname']}/deploy/{booted['checksum']}.{booted['serial']}"


def test_uninstalling_the_last_package_brings_the_base_back(node: Node) -> None:
    node.offer(*samples.PACKAGES)
    change(node, ["usbguard"], [])
    node.reboot()
    assert change(node, [], ["usbguard"]) == (True, "")
    staged = node.client.os_get("DefaultDeployment")
    assert staged["checksum"] == node.client.os_get("BootedDeployment")["base-checksum"]
    assert "layered-commit-meta" not in staged


def test_a_package_may_be_asked_for_by_what_it_provides(node: Node) -> None:
    node.offer(*samples.PACKAGES)
    assert change(node, ["guard"], []) == (True, "")
    assert node.client.os_get("DefaultDeployment")["packages"] == ["guard"]


def test_repeated_requests_are_errors_unless_they_may_be_repeated(node: Node) -> None:
    node.offer(*samples.PACKAGES)
    change(node, ["usbguard"], [])
    before = node.client.os_get("DefaultDeployment")["id"]
    assert change(node, ["usbguard"], [], **{"initiating-command-line": "2"}) == (
        False, "Package/capability 'usbguard' is already requested",
    )  # fmt: skip
    assert change(node, [], ["libusb"]) == (False, "Package/capability 'libusb' is not currently requested")
    assert change(node, ["usbguard"], ["libusb"], **{"idempotent-layering": True}) == (True, "")
    assert node.client.os_get("DefaultDeployment")["id"] == before


def test_absent_packages_are_all_named(node: Node) -> None:
    node.offer(samples.LIBUSB)
    assert change(node, ["usbguard", "libusb", "nothing"], []) == (False, "Packages not found: usbguard, nothing")
    assert len(node.client.get("Deployments")) == 1


def test_a_disabled_repository_offers_nothing(node: Node) -> None:
    node.offer(*samples.PACKAGES)
    node.client.run("ModifyYumRepo", "(sa{ss})", "extensions", {"enabled": "0"})
    assert change(node, ["usbguard"], []) == (False, "Packages not found: usbguard")
    assert [one["is-enabled"] for one in node.client.os("ListRepos")[0]] == [False]


def test_a_repository_that_is_not_there_is_named(node: Node) -> None:
    node.offer(*samples.PACKAGES)
    node.machine.run(["rm", "-rf", "/var/lib/repo"])
    success, text = change(node, ["usbguard"], [])
    assert not success
    assert text.startswith("Updating rpm-md repo 'extensions': cannot update repo 'extensions': ")


def test_what_nobody_provides_is_a_depsolve_problem(node: Node) -> None:
    node.offer(*samples.PACKAGES)
    assert change(node, ["lonely"], []) == (
        False,
        "Could not depsolve transaction; 1 problem detected:\n Problem: conflicting requests\n"
        "  - nothing provides nowhere needed by lonely-1.0-1.noarch from extensions",
    )


def test_a_package_over_a_file_of_the_base_is_refused(node: Node) -> None:
    node.offer(*samples.PACKAGES)
    success, text = change(node, ["clash"], [])
    assert not success
    assert "clash-1.0-1.noarch" in text
    assert "usr/bin/tool" in text


def test_kernel_arguments_of_a_layered_deployment_need_no_repository(node: Node) -> None:
    node.offer(*samples.PACKAGES)
    change(node, ["usbguard"], [])
    node.reboot()
    node.withdraw()
    layered = node.client.os_get("BootedDeployment")["checksum"]
    assert node.client.kargs({"append-if-missing": ["x=1"]}).finished == [(True, "")]
    assert node.client.os_get("DefaultDeployment")["checksum"] == layered


def test_a_layered_package_is_laid_on_the_next_base_too(node: Node) -> None:
    node.offer(*samples.PACKAGES)
    change(node, ["usbguard"], [])
    node.reboot()
    assert node.client.update({"set-refspec": node.reference(samples.following())}).finished == [(True, "")]
    root = node.staged_root()
    assert node.machine.read(f"{root}/usr/bin/usbguard") == "usbguard 1.0\n"
    assert node.machine.read(f"{root}/usr/etc/version") == "2\n"


def test_a_rebase_of_a_layered_deployment_resolves_its_packages_anew(node: Node) -> None:
    node.offer(*samples.PACKAGES)
    change(node, ["usbguard"], [])
    node.reboot()
    node.withdraw()
    refused = node.client.update({"set-refspec": node.reference(samples.following())})
    assert refused.finished == [(False, "Packages not found: usbguard")]
    cached = {"cache-only": True, "initiating-command-line": "2"}
    accepted = node.client.update({"set-refspec": node.reference(samples.following())}, cached)
    assert accepted.finished == [(True, "")], "from the pkgcache"


def test_image_and_packages_change_in_one_transaction(node: Node) -> None:
    node.offer(*samples.PACKAGES)
    modifiers = {"set-refspec": node.reference(samples.following()), "install-packages": ["usbguard"]}
    assert node.client.update(modifiers).finished == [(True, "")]
    staged = node.client.os_get("DefaultDeployment")
    assert (staged["base-version"], staged["packages"]) == ("2", ["usbguard"])
    assert len(node.client.get("Deployments")) == 2


def test_a_newer_package_is_taken_when_it_is_offered(node: Node) -> None:
    node.offer(*samples.PACKAGES)
    change(node, ["usbguard"], [])
    node.reboot()
    node.offer(samples.usbguard("1.10"), samples.usbguard("1.9"), samples.LIBUSB)
    assert node.client.run("Upgrade", "(a{sv})", {}).finished == [(True, "")]
    assert node.machine.read(f"{node.staged_root()}/usr/bin/usbguard") == "usbguard 1.10\n"


def test_a_kernel_is_replaced_by_another(node: Node) -> None:
    node.offer(*samples.PACKAGES)
    modifiers = {"override-remove-packages": ["kernel"], "install-packages": ["kernel-rt"]}
    assert node.client.update(modifiers, NO_PULL).finished == [(True, "")]
    staged = node.client.os_get("DefaultDeployment")
    assert staged["requested-base-removals"] == ["kernel"]
    assert [one[1] for one in staged["base-removals"]] == ["kernel"]
    root = node.staged_root()
    assert node.machine.run(["ls", f"{root}/usr/lib/modules"]).stdout.split() == [samples.RT_KERNEL]
    node.reboot()
    assert samples.RT_KERNEL in node.machine.default_entry().path.read_text()
    again = node.client.update({"override-remove-packages": ["kernel"]}, NO_PULL)
    assert again.finished == [(False, "Override already exists for package 'kernel'")]
    modifiers = {"override-reset-packages": ["kernel"], "uninstall-packages": ["kernel-rt"]}
    assert node.client.update(modifiers, NO_PULL).finished == [(True, "")]
    root = node.staged_root()
    assert node.machine.run(["ls", f"{root}/usr/lib/modules"]).stdout.split() == [KERNEL]


def test_two_kernels_are_one_too_many(node: Node) -> None:
    node.offer(*samples.PACKAGES)
    success, text = change(node, ["kernel-rt"], [])
    assert not success
    assert "Multiple subdirectories found in: usr/lib/modules" in text


def test_a_dry_run_says_what_it_would_do_and_does_nothing(node: Node) -> None:
    node.offer(*samples.PACKAGES)
    peer = node.client.update({"install-packages": ["usbguard"]}, {**NO_PULL, "dry-run": True})
    assert peer.finished == [(True, "")]
    assert any("usbguard-1.0-1.noarch" in text for text in peer.messages)
    assert len(node.client.get("Deployments")) == 1


def test_a_download_leaves_the_deployments_alone(node: Node) -> None:
    node.offer(*samples.PACKAGES)
    modifiers = {"set-refspec": node.reference(samples.following()), "install-packages": ["usbguard"]}
    peer = node.client.update(modifiers, {"download-only": True})
    assert peer.messages[-1] == "Update downloaded."
    assert len(node.client.get("Deployments")) == 1


HAND_OVER = """
import os, sys
from tests.component.conformance.client import NAME, OS, RpmOstree, variants
from tests.component.conformance.node import BUS_ADDRESS
from tests.stand.introspection import Gio, GLib
client = RpmOstree(BUS_ADDRESS)
passed = Gio.UnixFDList()
passed.append(os.open(sys.argv[1], os.O_RDONLY))
modifiers = {"install-local-packages": GLib.Variant("ah", [0])}
arguments = GLib.Variant("(a{sv}a{sv})", (modifiers, variants({"no-pull-base": True})))
reply, _ = client.bus.call_with_unix_fd_list_sync(NAME, client.os_path, OS, "UpdateDeployment", arguments, None,
                                                  Gio.DBusCallFlags.NONE, 30000, passed, None)
peer = client.connect(reply.unpack()[0])
peer.start()
print(*peer.wait())
"""


def test_a_local_package_is_handed_over_as_a_descriptor(node: Node) -> None:
    node.offer(samples.LIBUSB)
    node.machine.run(["mv", "/var/lib/repo/libusb-1.0-1.noarch.rpm", "/run/libusb.rpm"])
    script = ["/usr/bin/python3", "-c", HAND_OVER, "/run/libusb.rpm"]
    assert node.machine.run(script, env={"PYTHONPATH": NODE_LIBRARY}).stdout.strip() == "True"
    staged = node.client.os_get("DefaultDeployment")
    assert staged["requested-local-packages"] == ["libusb-1.0-1.noarch"]
    assert node.machine.read(f"{node.staged_root()}/usr/lib64/libusb.so") == "so\n"


def test_layering_can_be_forbidden(node: Node) -> None:
    node.offer(*samples.PACKAGES)
    node.machine.write("/etc/rpm-ostreed.conf", "[Daemon]\nLockLayering=true\n")
    node.client.sysroot("ReloadConfig")
    assert change(node, ["usbguard"], []) == (False, "Cannot operate; `LockLayering=true` in configuration.")


@pytest.mark.parametrize("profile", ["ACE"])
def test_a_package_of_the_base_may_be_requested_since_2026(node: Node) -> None:
    assert change(node, ["tools"], []) == (True, "")
    assert node.client.os_get("DefaultDeployment")["requested-packages"] == ["tools"]


def test_a_requested_package_of_the_base_becomes_active_where_the_base_lacks_it(node: Node) -> None:
    node.offer(*samples.PACKAGES, samples.TOOLS)
    change(node, ["tools"], [], **{"allow-inactive": True})
    node.reboot()
    bare = layer_on(samples.base(), {}, ["usr/bin/tool", "usr/share/stand/base-packages/tools.list"])
    assert node.client.update({"set-refspec": node.reference(bare)}).finished == [(True, "")]
    assert node.client.os_get("DefaultDeployment")["packages"] == ["tools"]


def test_a_clean_origin_comes_with_no_layering_and_new_packages(node: Node) -> None:
    node.offer(*samples.PACKAGES)
    change(node, ["usbguard"], [])
    options = {**NO_PULL, "no-layering": True, "no-overrides": True}
    assert node.client.update({"install-packages": ["libusb"]}, options).finished == [(True, "")]
    assert node.client.os_get("DefaultDeployment")["requested-packages"] == ["libusb"]


def test_an_initramfs_is_made_anew_and_left_alone_again(node: Node) -> None:
    def regenerate(wanted: bool) -> tuple[bool, str]:
        return node.client.run("SetInitramfsState", "(basa{sv})", wanted, [], {}).finished[0]

    assert regenerate(False) == (False, "initramfs regeneration state is already disabled")
    assert regenerate(True) == (True, "")
    staged = node.client.os_get("DefaultDeployment")
    assert staged["regenerate-initramfs"] is True
    assert staged["initramfs-args"] == []
    assert regenerate(False) == (True, "")
    assert node.client.os_get("DefaultDeployment")["regenerate-initramfs"] is False


def test_only_files_of_etc_go_into_the_initramfs(node: Node) -> None:
    def track(*paths: str) -> tuple[bool, str]:
        return node.client.run("InitramfsEtc", "(asasbba{sv})", paths, [], False, False, {}).finished[0]

    assert track("/usr/x") == (False, "Path outside /etc forbidden: /usr/x")
    assert track("/etc/crypttab") == (True, "")
    assert node.client.os_get("DefaultDeployment")["initramfs-etc"] == ["/etc/crypttab"]
