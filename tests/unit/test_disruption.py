"""Node disruption policies: what has to be done, in which order, and policies from a file."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from mcdaemon.errors import Broken
from mcdaemon.machineconfig.diff import Difference, diff
from mcdaemon.machineconfig.disruption import (
    DEFAULT,
    NONE,
    REBOOT,
    Action,
    ActionKind,
    Policy,
    actions,
    drains,
    read_policy,
    reboots,
)
from tests.unit.configs import config, core, file

NEW = config()
CA = "/etc/pki/ca-trust/source/anchors/openshift-config-user-ca-bundle.crt"


def names(difference: Difference, policy: Policy = DEFAULT) -> list[str]:
    return [str(action) for action in actions(difference, None, NEW, policy)]


def changed(*paths: str) -> Difference:
    return Difference(files=frozenset(paths))


@pytest.mark.parametrize(
    ("difference", "expected"),
    [
        (Difference(), ["None"]),
        (changed("/etc/random-reboot-file"), ["Reboot"]),
        (changed("/var/lib/kubelet/config.json"), ["None"]),
        (Difference(ssh_keys=True), ["None"]),
        (Difference(password=True), ["None"]),
        (changed("/etc/containers/registries.conf"), ["Special"]),
        (changed("/etc/kubernetes/kubelet-ca.crt"), ["Reboot"]),
        (changed("/etc/containers/registries.conf", "/var/lib/kubelet/config.json"), ["Special"]),
        (Difference(files=frozenset({"/etc/containers/registries.conf"}), ssh_keys=True, os_image=True), ["Reboot"]),
        (Difference(files=frozenset({"/var/lib/kubelet/config.json"}), kernel_arguments=True), ["Reboot"]),
        (changed("/etc/containers/policy.json"), ["Reload crio.service"]),
        (changed("/etc/machine-config-daemon/no-reboot/containers-gpg.pub"), ["Reload crio.service"]),
        (changed("/etc/containers/registries.d/a/b.yaml"), ["Reload crio.service"]),
        (changed(CA), ["Restart coreos-update-ca-trust.service", "Restart crio.service"]),
        (changed(CA, "/etc/containers/policy.json"),
         ["Restart coreos-update-ca-trust.service", "Restart crio.service"]),
        (changed("/etc/kubernetes/credential-providers/x"), ["Restart kubelet.service"]),
        (changed("/etc/systemd/system/kubelet.service.d/40-kubelet-crio-image-credential-provider.conf"),
         ["DaemonReload", "Restart kubelet.service"]),
        (changed("/etc/nmstate/openshift/x", "/etc/iri-registry/x"), ["Restart iri-registry.service"]),
        (Difference(units=frozenset({"iri-registry.service"})), ["DaemonReload", "Restart iri-registry.service"]),
        (Difference(units=frozenset({"kubelet.service"})), ["Reboot"]),
        (Difference(files=frozenset({CA}), units=frozenset({"kubelet.service"})), ["Reboot"]),
        (Difference(fips=True), ["Reboot"]),
        (Difference(extensions=True), ["Reboot"]),
        (Difference(kernel_type=True), ["Reboot"]),
        (Difference(extensions_image=True), ["None"]),
    ],
)  # fmt: skip
def test_H4_the_built_in_policy(difference: Difference, expected: list[str]) -> None:
    assert names(difference) == expected


def test_a_difference_of_two_configs_leads_to_actions() -> None:
    old = config(files=[file("/etc/containers/policy.json", b"a"), file("/etc/crio/policies/x")], users=[core("k")])
    new = config(files=[file("/etc/containers/policy.json", b"b")], users=[core("l")])
    assert [str(action) for action in actions(diff(old, new), old, new)] == ["Reload crio.service"]


@pytest.mark.parametrize(
    ("path", "policies", "expected"),
    [
        ("/etc/mco/test", ["/etc/example"], None),
        ("/etc/mco/test1", ["/etc/mco/test1", "/etc/mco/test2"], "/etc/mco/test1"),
        ("/etc/mco/f1/f2/example", ["/etc/mco/f1", "/etc/mco/f1/f2", "/etc/mco/f1/f2/f3"], "/etc/mco/f1/f2"),
        ("/etc/mco/f1/f2/f3", ["/etc/mco/f1", "/etc/mco/f1/f2", "/etc/mco/f1/f2/f3"], "/etc/mco/f1/f2/f3"),
        ("/etc/mco/f1/f2/f3", ["/etc/mco/f1/test", "/etc/mco/f1/f2/test", "/etc/mco/f1/f2/f3/f4"], None),
        ("/etc/foobar", ["/etc/foo"], None),
        ("/etc/foo/x", ["/etc/foo/"], "/etc/foo/"),
        ("/etc/foo", ["/etc/foo/"], None),
        ("/etc/foo/x", ["/"], "/"),
        ("/etc/foo/x", [], None),
    ],
)
def test_H5_the_closest_policy_counts(path: str, policies: list[str], expected: Any) -> None:
    marks = {policy: (Action(ActionKind.RESTART, f"u{number}.service"),) for number, policy in enumerate(policies)}
    for order in itertools.permutations(policies):
        policy = Policy(files={entry: marks[entry] for entry in order})
        assert policy.for_path(path) == (marks[expected] if expected else None)


def restart(unit: str) -> Action:
    return Action(ActionKind.RESTART, unit)


def test_UNIT_13_a_restart_swallows_the_reload_of_the_same_unit_only() -> None:
    policy = Policy(
        {
            "/etc/a": (Action(ActionKind.RELOAD, "x.service"),),
            "/etc/b": (restart("x.service"),),
            "/etc/c": (Action(ActionKind.RELOAD, "y.service"),),
        }
    )
    assert names(changed("/etc/a", "/etc/b", "/etc/c"), policy) == ["Restart x.service", "Reload y.service"]


def test_UNIT_13_a_reboot_swallows_everything() -> None:
    policy = Policy({"/etc/a": (restart("x.service"),), "/etc/b": (REBOOT,)})
    assert names(changed("/etc/a", "/etc/b"), policy) == ["Reboot"]


def test_actions_have_no_doubles_and_keep_the_order_of_their_policy() -> None:
    policy = Policy(
        {"/etc/a": (restart("crio.service"),), "/etc/b": (restart("trust.service"), restart("crio.service"))}
    )
    assert names(changed("/etc/a", "/etc/b"), policy) == ["Restart trust.service", "Restart crio.service"]


def test_units_are_loaded_before_anything_is_restarted_wherever_the_policy_says_so() -> None:
    policy = Policy(
        {"/etc/a": (restart("x.service"), Action(ActionKind.DAEMON_RELOAD)), "/etc/b": (Action(ActionKind.DRAIN),)}
    )
    assert names(changed("/etc/a", "/etc/b"), policy) == ["Drain", "DaemonReload", "Restart x.service"]


def test_policies_that_want_opposite_orders_get_the_fixed_one() -> None:
    a, b = restart("a.service"), restart("b.service")
    policy = Policy({"/etc/1": (b, a), "/etc/2": (a, b)})
    assert names(changed("/etc/1", "/etc/2"), policy) == ["Restart a.service", "Restart b.service"]


def test_a_policy_for_ssh_keys_counts() -> None:
    assert names(Difference(ssh_keys=True), Policy(ssh_keys=(restart("sshd.service"),))) == ["Restart sshd.service"]


@pytest.mark.parametrize(
    ("kind", "drain"),
    [("Reboot", True), ("Drain", True), ("Special", True), ("None", False), ("DaemonReload", False)],
)
def test_what_needs_a_drain(kind: str, drain: bool) -> None:
    assert drains([NONE, Action(ActionKind(kind))]) is drain
    assert reboots([Action(ActionKind(kind))]) is (kind == "Reboot")
    assert not drains([restart("a.service")])


def test_a_policy_is_read_and_laid_over_the_built_in_one() -> None:
    policy = read_policy(
        {
            "files": [
                {
                    "path": "/etc/app",
                    "actions": [{"type": "Drain"}, {"type": "Restart", "restart": {"serviceName": "app.service"}}],
                },
                {"path": "/etc/containers/registries.conf", "actions": [{"type": "None"}]},
            ],
            "units": [
                {
                    "name": "app.service",
                    "actions": [{"type": "DaemonReload"}, {"type": "Reload", "reload": {"serviceName": "app.service"}}],
                }
            ],
            "sshkey": {"actions": [{"type": "Reboot"}]},
        },
        "policy.yaml",
    )
    assert names(changed("/etc/app/x"), policy) == ["Drain", "Restart app.service"]
    assert names(changed("/etc/containers/registries.conf"), policy) == ["None"]
    assert names(changed("/etc/containers/policy.json"), policy) == ["Reload crio.service"]
    assert names(Difference(units=frozenset({"app.service"})), policy) == ["DaemonReload", "Reload app.service"]
    assert names(Difference(ssh_keys=True), policy) == ["Reboot"]
    assert read_policy({}, "x") == DEFAULT.merged(Policy())


def entry(*found: Any) -> Any:
    return {"files": [{"path": "/etc/x", "actions": list(found)}]}


@pytest.mark.parametrize(
    ("mapping", "place"),
    [
        (None, "p.yaml:"),
        ([], "p.yaml:"),
        ({"file": []}, "'file'"),
        ({"files": {}}, "files"),
        ({"files": [5]}, "files[0]"),
        ({"files": [{"actions": [{"type": "None"}]}]}, "files[0].path"),
        ({"files": [{"path": "etc/x", "actions": [{"type": "None"}]}]}, "files[0].path"),
        ({"files": [{"path": "/etc/../x", "actions": [{"type": "None"}]}]}, "files[0].path"),
        ({"files": [{"path": "/etc/x"}]}, "files[0].actions"),
        ({"files": [{"path": "/etc/x", "actions": []}]}, "files[0].actions"),
        ({"files": [{"path": "/etc/x", "actions": [{"type": "None"}], "x": 1}]}, "files[0]"),
        ({"units": [{"name": "app", "actions": [{"type": "None"}]}]}, "units[0].name"),
        ({"units": [{"name": None, "actions": [{"type": "None"}]}]}, "units[0].name"),
        ({"sshkey": []}, "sshkey"),
        ({"sshkey": {}}, "sshkey.actions"),
        ({"files": [{"path": "/x", "actions": [{"type": "None"}]}] * 51}, "files: 51 entries"),
        (entry({"type": "Special"}), "files[0].actions[0].type"),
        (entry({"type": "reboot"}), "files[0].actions[0].type"),
        (entry({}), "files[0].actions[0].type"),
        (entry("Reboot"), "files[0].actions[0]"),
        (entry({"type": "Restart"}), "files[0].actions[0].restart"),
        (entry({"type": "Restart", "restart": {}}), "files[0].actions[0].restart.serviceName"),
        (entry({"type": "Restart", "restart": {"serviceName": "x; rm -rf /"}}), "serviceName"),
        (entry({"type": "Restart", "reload": {"serviceName": "x.service"}}), "files[0].actions[0].reload"),
        (entry({"type": "Reboot", "restart": {"serviceName": "x.service"}}), "files[0].actions[0].restart"),
        (entry({"type": "None"}, {"type": "Drain"}), "alone"),
        (entry({"type": "Drain"}, {"type": "Reboot"}), "alone"),
        (entry(*[{"type": "Drain"}] * 11), "actions: 11 entries"),
    ],
)
def test_a_wrong_policy_is_refused_with_its_place(mapping: Any, place: str) -> None:
    with pytest.raises(Broken) as caught:
        read_policy(mapping, "p.yaml")
    assert caught.value.sentence.startswith("cannot use p.yaml") and place in caught.value.sentence + caught.value.hint
