"""What an update does to a node, computed from two configs and what the node really requests."""

from __future__ import annotations

from typing import Any, Optional

import pytest

from mcdaemon.machineconfig import disruption
from mcdaemon.machineconfig.disruption import Action, ActionKind, Policy
from mcdaemon.machineconfig.model import MachineConfig
from mcdaemon.plan import Plan, make
from tests.unit.configs import config, core, file

OLD_IMAGE, NEW_IMAGE = "quay.io/os@sha256:" + "1" * 64, "quay.io/os@sha256:" + "2" * 64
LIVE = "/etc/containers/policy.json"
REGISTRIES = "/etc/containers/registries.conf"


def plan(
    old: Optional[MachineConfig], new: MachineConfig, requested: tuple[str, ...] = (), removed: tuple[str, ...] = (),
    policy: Policy = disruption.DEFAULT,
) -> Plan:  # fmt: skip
    return make(old, new, requested, removed, policy)


def between(old: dict[str, Any], new: dict[str, Any], **more: Any) -> Plan:
    return plan(config("old", **old), config("new", **new), **more)


# -- the image --------------------------------------------------------------------------------------------------------


def test_an_image_that_stays_is_never_read() -> None:
    found = between({"osImageURL": OLD_IMAGE}, {"osImageURL": OLD_IMAGE, "files": [file("/etc/x")]})
    assert (found.image, found.os_changes) == ("", False)


def test_another_image_is_moved_to_and_reboots() -> None:
    found = between({"osImageURL": OLD_IMAGE}, {"osImageURL": NEW_IMAGE})
    assert (found.image, found.os_changes, found.reboot, found.drain) == (NEW_IMAGE, True, True, True)


def test_a_config_without_an_image_leaves_the_one_that_is_there() -> None:
    found = between({"osImageURL": OLD_IMAGE}, {})
    assert (found.image, found.os_changes, found.reboot) == ("", False, False)


def test_the_first_config_of_a_node_brings_its_image() -> None:
    assert plan(None, config(osImageURL=NEW_IMAGE)).image == NEW_IMAGE
    assert plan(None, config()).image == ""


def test_another_extensions_image_alone_is_no_reason_to_touch_a_node() -> None:
    key = "baseOSExtensionsContainerImage"
    found = between({key: "quay.io/e:1"}, {key: "quay.io/e:2"})
    assert (found.os_changes, found.reboot, found.drain) == (False, False, False)
    assert found.extensions_image == "quay.io/e:2"


# -- packages: what the node has, not what the old config says --------------------------------------------------------


def test_an_extension_is_installed_and_one_that_goes_is_removed_in_one_transaction() -> None:
    found = between({"extensions": ["usbguard"]}, {"extensions": ["kerberos"]}, requested=("usbguard",))
    assert found.packages.install == ("krb5-workstation", "libkadm5")
    assert found.packages.uninstall == ("usbguard",)
    assert found.os_changes and found.reboot


def test_what_a_human_removed_is_installed_again_by_the_next_update() -> None:
    """EXT-01: the old config says that it is there."""
    found = between({"extensions": ["usbguard"]}, {"extensions": ["usbguard"], "files": [file("/etc/x")]})
    assert found.packages.install == ("usbguard",) and found.os_changes


def test_what_is_there_already_is_not_asked_for_again() -> None:
    found = between({}, {"extensions": ["usbguard"]}, requested=("usbguard",))
    assert not found.packages and not found.os_changes


def test_a_package_that_a_human_layered_stays() -> None:
    """EXT-15."""
    found = between({"extensions": ["usbguard"]}, {}, requested=("usbguard", "strace"))
    assert found.packages.uninstall == ("usbguard",)


def test_another_kernel_takes_the_base_one_out_and_the_way_back_puts_it_in() -> None:
    there = between({}, {"kernelType": "realtime"})
    assert "kernel-rt-core" in there.packages.install and "kernel-core" in there.packages.remove_base
    back = between({"kernelType": "realtime"}, {}, requested=there.packages.install, removed=there.packages.remove_base)
    assert set(back.packages.uninstall) == set(there.packages.install)
    assert set(back.packages.reset_base) == set(there.packages.remove_base)


# -- kernel arguments -------------------------------------------------------------------------------------------------


def test_kernel_arguments_keep_their_order_and_repeats() -> None:
    old, new = ["a=1 b", "a=2"], ["a=2", "a=2", 'c="x y"']
    found = between({"kernelArguments": old}, {"kernelArguments": new})
    assert (found.kargs_from, found.kargs_to) == (("a=1", "b", "a=2"), ("a=2", "a=2", 'c="x y"'))
    assert found.kargs_change and found.reboot and not found.os_changes


def test_the_same_arguments_in_another_order_are_a_change() -> None:
    assert between({"kernelArguments": ["a", "b"]}, {"kernelArguments": ["b", "a"]}).reboot


def test_the_same_arguments_written_in_another_way_are_none() -> None:
    found = between({"kernelArguments": ["a b"]}, {"kernelArguments": ["a", "b"]})
    assert not found.kargs_change and not found.reboot


# -- reboot and drain -------------------------------------------------------------------------------------------------


def test_a_file_without_a_policy_reboots() -> None:
    found = between({}, {"files": [file("/etc/x")]})
    assert (found.reboot, found.drain, found.os_changes) == (True, True, False)


def test_a_file_with_a_policy_does_neither() -> None:
    found = between({}, {"files": [file(LIVE)]})
    assert (found.reboot, found.drain) == (False, False)


def test_a_changed_registries_conf_drains_and_does_not_reboot() -> None:
    found = between({}, {"files": [file(REGISTRIES)]})
    assert (found.reboot, found.drain) == (False, True)


def test_one_file_without_a_policy_makes_the_whole_change_a_reboot() -> None:
    assert between({}, {"files": [file(LIVE), file("/etc/x")]}).reboot


def test_a_policy_that_only_drains_drains() -> None:
    policy = Policy(files={"/etc/x": (Action(ActionKind.DRAIN),)})
    found = between({}, {"files": [file("/etc/x")]}, policy=policy)
    assert (found.reboot, found.drain) == (False, True)


def test_a_policy_cannot_keep_an_image_from_rebooting() -> None:
    policy = Policy(files={"/": (disruption.NONE,)})
    assert between({}, {"osImageURL": NEW_IMAGE}, policy=policy).reboot


def test_a_key_needs_no_reboot_and_a_removed_file_does() -> None:
    assert not between({}, {"users": [core("ssh-ed25519 AAAA a")]}).reboot
    assert between({"files": [file("/etc/x")]}, {}).reboot


def test_two_configs_that_say_the_same_change_nothing() -> None:
    found = between({"files": [file("/etc/x")]}, {"files": [file("/etc/x")]})
    assert not found.difference and not found.reboot and not found.drain


# -- for people -------------------------------------------------------------------------------------------------------


def test_the_lines_name_everything_that_changes_and_no_content() -> None:
    old = {"osImageURL": OLD_IMAGE, "kernelArguments": ["a"], "extensions": ["usbguard"]}
    new = {
        "osImageURL": NEW_IMAGE, "kernelArguments": ["b"], "extensions": ["kerberos"],
        "files": [file("/etc/pull-secret", b"canary")],
        "units": [{"name": "x.service", "enabled": True, "contents": "[Service]\nExecStart=/bin/canary\n"}],
        "users": [core("ssh-ed25519 canary", passwordHash="$6$canary")],
    }  # fmt: skip
    lines = between(old, new, requested=("usbguard",)).lines()
    text = "\n".join(lines)
    assert "canary" not in text
    for part in (f"OS image: {NEW_IMAGE}", "install: krb5-workstation libkadm5", "uninstall: usbguard",
                 "kernel arguments: a -> b", "file: /etc/pull-secret", "unit: x.service", "users: keys or password",
                 "reboot: one"):  # fmt: skip
        assert part in lines


def test_no_kernel_arguments_are_called_so() -> None:
    assert "kernel arguments: a -> (none)" in between({"kernelArguments": ["a"]}, {}).lines()


def test_a_plan_without_a_reboot_says_what_is_done_instead() -> None:
    assert between({}, {"files": [file(LIVE)]}).lines()[-1] == "no reboot: Reload crio.service"


@pytest.mark.parametrize("part", ["difference", "kargs_to"])
def test_no_plan_shows_content_in_its_repr(part: str) -> None:
    found = between({}, {"files": [file("/etc/x", b"canary")], "users": [core("ssh-ed25519 canary")]})
    assert "canary" not in repr(getattr(found, part)) and "canary" not in repr(found)
