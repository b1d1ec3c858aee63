"""Rendering: the controller's merge rules, and which image is the release's."""

from __future__ import annotations

import gzip
import itertools
from typing import Any, Optional

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcdaemon.errors import Irreconcilable
from mcdaemon.machineconfig.model import KernelType, MachineConfig, Owner, parse
from mcdaemon.machineconfig.render import GENERATED_BY, ROLE, render
from tests.unit.configs import base64_url, config, core, document, file

RELEASE = {GENERATED_BY: "abc"}


def role(name: str) -> dict[str, str]:
    return {ROLE: name}


def merged(*configs: MachineConfig, pool: str = "worker") -> MachineConfig:
    """Rendered, and found to be the same whatever the order of the input (KARG-08)."""
    results = [render(order, pool) for order in itertools.permutations(configs)]
    assert all(result == results[0] for result in results)
    assert len({result.config.identity for result in results}) == 1
    return results[0].config


def test_a_single_config_is_taken_as_it_is() -> None:
    only = config("rendered-worker-abc", files=[file("/etc/x")], annotations=RELEASE, osImageURL="img")
    found = render([only])
    assert found.config is only and (found.release_image, found.overridden_by) == ("img", "")


def test_files_units_and_lists_of_all_configs_are_there() -> None:
    one = config(
        "00-a",
        files=[file("/etc/a")],
        units=[{"name": "a.service"}],
        kernelArguments=["x=1", "y"],
        extensions=["ipsec"],
    )
    two = config(
        "99-b",
        files=[file("/etc/b")],
        units=[{"name": "b.service"}],
        kernelArguments=["y", "x=2"],
        extensions=["usbguard"],
    )
    found = merged(one, two)
    assert [made.path for made in found.files] == ["/etc/a", "/etc/b"]
    assert [made.name for made in found.units] == ["a.service", "b.service"]
    assert found.kernel_arguments == ("x=1", "y", "y", "x=2") and found.extensions == ("ipsec", "usbguard")


def test_a_later_file_replaces_an_earlier_one_and_keeps_what_it_leaves_unsaid() -> None:
    one = config("00-a", files=[file("/etc/x", b"one", mode=0o600, user={"id": 5, "name": "five"}, group={"id": 6})])
    two = config("99-b", files=[file("/etc/x", b"two", user={"id": 7})])
    found = merged(one, two).files[0]
    assert (found.content, found.mode, found.user, found.group) == (b"two", 0o600, Owner(7), Owner(6))


def test_a_later_file_without_contents_keeps_the_earlier_ones() -> None:
    packed = {"source": base64_url(gzip.compress(b"one", mtime=0)), "compression": "gzip"}
    one = config("00-a", files=[{"path": "/etc/x", "contents": packed}])
    found = merged(one, config("99-b", files=[{"path": "/etc/x", "mode": 0o755}])).files[0]
    assert (found.content, found.mode) == (b"one", 0o755)


def test_compression_and_hash_of_an_earlier_file_are_not_those_of_the_later() -> None:
    packed = {
        "source": base64_url(gzip.compress(b"x", mtime=0)),
        "compression": "gzip",
        "verification": {"hash": "sha256-2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881"},
    }
    one = config("00-a", files=[{"path": "/etc/x", "contents": packed}])
    assert merged(one, config("99-b", files=[file("/etc/x", b"two")])).files[0].content == b"two"


@pytest.mark.parametrize(
    ("later", "content", "enabled", "mask"),
    [
        ({}, b"one", True, False),
        ({"contents": "two"}, b"two", True, False),
        ({"contents": ""}, None, True, False),
        ({"enabled": False}, b"one", False, False),
        ({"enabled": False, "mask": True}, b"one", False, True),
    ],
)
def test_a_later_unit_replaces_what_it_says(later: Any, content: Any, enabled: bool, mask: bool) -> None:
    one = config("00-a", units=[{"name": "a.service", "contents": "one", "enabled": True}])
    found = merged(one, config("99-b", units=[{"name": "a.service", **later}])).units[0]
    assert (found.content, found.enabled, found.mask) == (content, enabled, mask)


def test_drop_ins_are_merged_by_name() -> None:
    def dropins(*pairs: tuple[str, str]) -> Any:
        return [{"name": "a.service", "dropins": [{"name": name, "contents": text} for name, text in pairs]}]

    one = config("00-a", units=dropins(("a.conf", "1"), ("b.conf", "1")))
    found = merged(one, config("99-b", units=dropins(("b.conf", "2"), ("c.conf", "2")))).units[0]
    assert [(dropin.name, dropin.content) for dropin in found.dropins] == [
        ("a.conf", b"1"),
        ("b.conf", b"2"),
        ("c.conf", b"2"),
    ]


def test_keys_are_added_once_and_the_later_password_counts() -> None:
    one = config("00-a", users=[core("k", "l", passwordHash="*")])
    found = merged(one, config("99-b", users=[core("l", "m", passwordHash="!")])).users
    assert found[0].ssh_keys == ("k", "l", "m") and found[0].password_hash == "!"
    assert merged(one, config("99-b", users=[core("m")])).users[0].password_hash == "*"


@pytest.mark.parametrize(
    ("kinds", "result"),
    [
        ([None, None], KernelType.DEFAULT),
        (["realtime", None], KernelType.REALTIME),
        (["realtime", "default"], KernelType.REALTIME),
        (["realtime", "64k-pages"], KernelType.PAGES_64K),
        (["64k-pages", "realtime", "default"], KernelType.REALTIME),
    ],
)
def test_the_last_kernel_type_that_is_not_the_default_counts(kinds: list[Optional[str]], result: KernelType) -> None:
    found = merged(*(config(f"{number}-a", kernelType=kind) for number, kind in enumerate(kinds)))
    assert found.kernel_type is result and found.raw["spec"]["kernelType"] == result.value


def test_fips_is_on_when_any_config_says_so() -> None:
    assert merged(config("00-a", fips=True), config("99-b", fips=False)).fips
    assert not merged(config("00-a"), config("99-b")).fips


def test_the_last_override_of_the_image_wins_and_the_release_image_is_kept_beside_it() -> None:
    configs = [
        config("00-worker", annotations=RELEASE, osImageURL="release:1"),
        config("50-layered", osImageURL="custom:1"),
        config("60-layered", osImageURL="custom:2"),
        config("99-generated", annotations=RELEASE),
    ]
    found = render(configs)
    assert found.config.os_image == "custom:2"
    assert (found.release_image, found.overridden_by) == ("release:1", "60-layered")


def test_incident_3_a_new_release_changes_the_hidden_image_and_not_the_custom_one() -> None:
    custom = config("99-custom", osImageURL="custom:tag")
    one = render([config("00-worker", annotations=RELEASE, osImageURL="release:1"), custom])
    two = render([config("00-worker", annotations=RELEASE, osImageURL="release:2"), custom])
    assert one.config == two.config and one.config.identity == two.config.identity
    assert (one.release_image, two.release_image) == ("release:1", "release:2")
    assert two.overridden_by == "99-custom"


def test_an_override_wins_even_when_the_generated_config_sorts_behind_it() -> None:
    found = render(
        [config("00-custom", osImageURL="custom"), config("99-worker", annotations=RELEASE, osImageURL="release")]
    )
    assert (found.config.os_image, found.release_image, found.overridden_by) == ("custom", "release", "00-custom")


@pytest.mark.parametrize(
    ("configs", "image", "release", "by"),
    [
        ([], "", "", ""),
        ([("99-a", {}, "custom")], "custom", "", ""),
        ([("00-a", RELEASE, "release")], "release", "release", ""),
        ([("00-a", RELEASE, "same"), ("99-a", {}, "same")], "same", "same", ""),
        ([("00-a", RELEASE, "r1"), ("01-a", RELEASE, "r2")], "r2", "r2", ""),
    ],
)
def test_an_image_that_hides_nothing_is_no_override(configs: list[Any], image: str, release: str, by: str) -> None:
    made = [config(name, annotations=notes, osImageURL=url) for name, notes, url in configs]
    found = render([*made, config("98-other")])
    assert (found.config.os_image, found.release_image, found.overridden_by) == (image, release, by)


def test_the_extensions_image_follows_the_same_rule() -> None:
    found = merged(
        config("00-custom", baseOSExtensionsContainerImage="custom"),
        config("99-worker", annotations=RELEASE, baseOSExtensionsContainerImage="release"),
    )
    assert found.extensions_image == "custom"


def test_the_pool_decides_which_configs_count() -> None:
    configs = [
        config("00-m", labels=role("master"), files=[file("/etc/m")]),
        config("00-w", labels=role("worker"), files=[file("/etc/w")]),
        config("00-i", labels=role("infra"), files=[file("/etc/i")]),
        config("00-x", files=[file("/etc/x")]),
    ]

    def paths(pool: str) -> set[str]:
        return {made.path for made in merged(*configs, pool=pool).files}

    assert paths("worker") == {"/etc/w", "/etc/x"}
    assert paths("master") == {"/etc/m", "/etc/x"}
    assert paths("infra") == {"/etc/i", "/etc/w", "/etc/x"}


def test_a_custom_pool_lays_its_own_configs_over_the_workers() -> None:
    worker = config("99-w", labels=role("worker"), files=[file("/etc/x", b"worker")])
    infra = config("00-i", labels=role("infra"), files=[file("/etc/x", b"infra")])
    assert merged(worker, infra, pool="infra").files[0].content == b"infra"


def test_a_rendered_config_is_the_base_of_those_beside_it() -> None:
    base = document("rendered-worker-abc", files=[file("/etc/x", b"rendered")], annotations=RELEASE)
    base["metadata"]["ownerReferences"] = [{"kind": "MachineConfigPool", "name": "worker"}]
    rendered = parse(base, "x")
    assert merged(rendered, config("50-mine", files=[file("/etc/x", b"mine")])).files[0].content == b"mine"
    with pytest.raises(Irreconcilable, match="rendered configs already"):
        render([rendered, parse({**base, "metadata": {**base["metadata"], "name": "rendered-worker-def"}}, "x")])


def test_the_name_is_made_of_the_pool_and_what_the_config_says() -> None:
    one, two = config("00-a", files=[file("/etc/a")]), config("99-b")
    first, second = merged(one, two), merged(one, config("99-b", fips=False))
    assert first.name == second.name and first.name.startswith("rendered-worker-")
    assert first.name != merged(one, config("99-b", files=[file("/etc/b")])).name
    assert merged(one, two, pool="infra").name.startswith("rendered-infra-")


def test_files_say_overwrite_as_the_controller_writes_them() -> None:
    found = merged(config("00-a", files=[file("/etc/a")]), config("99-b", files=[file("/etc/b", overwrite=False)]))
    assert [entry["overwrite"] for entry in found.raw["spec"]["config"]["storage"]["files"]] == [True, False]


def test_the_newest_ignition_version_is_that_of_the_result() -> None:
    old = document("00-a", files=[file("/etc/a")])
    old["spec"]["config"]["ignition"]["version"] = "3.1.0"
    found = merged(parse(old, "x"), config("99-b", files=[file("/etc/b")]))
    assert found.raw["spec"]["config"]["ignition"]["version"] == "3.4.0"


def test_configs_without_ignition_can_be_merged() -> None:
    plain = parse({"metadata": {"name": "00-a"}, "spec": {"kernelArguments": ["a"]}}, "x")
    other = parse({"metadata": {"name": "01-a"}, "spec": {"kernelArguments": ["b"], "config": {"ignition": {}}}}, "x")
    assert merged(plain, other).kernel_arguments == ("a", "b")
    assert merged(plain, config("99-b", files=[file("/etc/b")])).files


def test_no_config_for_the_pool_is_refused_with_the_label_to_set() -> None:
    with pytest.raises(Irreconcilable, match="pool worker: none") as caught:
        render([config("00-m", labels=role("master"))])
    assert ROLE in caught.value.hint
    with pytest.raises(Irreconcilable):
        render([])


def test_two_configs_with_one_name_are_refused() -> None:
    with pytest.raises(Irreconcilable, match="two MachineConfigs have the name 00-a"):
        render([config("00-a"), config("00-a")])


@pytest.mark.parametrize(
    ("one", "two", "field"),
    [
        ({"extensions": ["kernel-devel"]}, {"kernelType": "realtime"}, "/spec/extensions/0"),
        ({"files": [file("/etc/x")]}, {"files": [file("/etc/x/y")]}, "/spec/config/storage/files/1/path"),
        ({"files": [file("/etc/systemd/system/a.service")]}, {"units": [{"name": "a.service"}]},
         "/spec/config/systemd/units/0/name"),
        ({"units": [{"name": "a.service", "enabled": True}]}, {"units": [{"name": "a.service", "mask": True}]},
         "/spec/config/systemd/units/0/enabled"),
    ],
)  # fmt: skip
def test_configs_that_contradict_each_other_are_refused_with_their_names(one: Any, two: Any, field: str) -> None:
    with pytest.raises(Irreconcilable, match="rendered from 00-a, 99-b") as caught:
        render([config("00-a", **one), config("99-b", **two)])
    assert caught.value.field == field


PARTS = st.fixed_dictionaries(
    {},
    optional={
        "files": st.lists(st.sampled_from("abc"), unique=True).map(
            lambda names: [file(f"/etc/{name}", name.encode()) for name in names]
        ),
        "units": st.lists(st.sampled_from("abc"), unique=True).map(
            lambda names: [{"name": f"{name}.service"} for name in names]
        ),
        "kernelArguments": st.lists(st.sampled_from(["a", "b c", "a=1"]), max_size=3),
        "extensions": st.lists(st.sampled_from(["ipsec", "usbguard"]), max_size=2),
        "osImageURL": st.sampled_from(["", "one", "two"]),
        "kernelType": st.sampled_from(["", "default", "realtime"]),
        "annotations": st.sampled_from([{}, RELEASE]),
    },
)


@settings(max_examples=60, deadline=None)
@given(st.lists(PARTS, min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_the_order_of_the_input_does_not_matter(parts: list[Any], random: Any) -> None:
    configs = [config(f"{number:02}-x", **part) for number, part in enumerate(parts)]
    shuffled = list(configs)
    random.shuffle(shuffled)
    assert render(configs) == render(shuffled)
    assert render(configs).config.identity == render(shuffled).config.identity
