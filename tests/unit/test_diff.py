"""Differences by meaning."""

from __future__ import annotations

import dataclasses
import gzip
from typing import Any

import pytest

from mcdaemon.machineconfig.diff import Difference, diff, needs_extensions_image
from tests.unit.configs import base64_url, config, core, file


@pytest.mark.parametrize(
    "other",
    [
        {"path": "/etc/x", "contents": {"source": base64_url(b"hello")}},
        {"path": "/etc/x", "contents": {"source": base64_url(gzip.compress(b"hello", mtime=0)), "compression": "gzip"}},
        {"path": "/etc/x", "contents": {"source": "data:,%68%65%6C%6C%6F"}, "mode": 420, "overwrite": False},
        file("/etc/x", b"hello", user={"id": 0}, group={"name": "root"}),
    ],
)
def test_the_same_file_in_another_form_is_no_change(other: Any) -> None:
    assert not diff(config(files=[file("/etc/x", b"hello")]), config(files=[other]))


@pytest.mark.parametrize(
    "other",
    [file("/etc/x", b"y"), file("/etc/x", mode=0o600), file("/etc/x", user={"id": 1}), file("/etc/x", group={"id": 1})],
)
def test_contents_mode_and_owners_of_a_file_are_changes(other: Any) -> None:
    found = diff(config(files=[file("/etc/x")]), config(files=[other]))
    assert found == Difference(files=frozenset({"/etc/x"})) and found


def test_added_and_removed_files_and_units_are_named() -> None:
    old = config(files=[file("/etc/a"), file("/etc/b")], units=[{"name": "a.service"}, {"name": "b.service"}])
    new = config(files=[file("/etc/b"), file("/etc/c")], units=[{"name": "b.service"}, {"name": "c.service"}])
    found = diff(old, new)
    assert found.files == {"/etc/a", "/etc/c"} and found.units == {"a.service", "c.service"}
    assert found.added_files == {"/etc/c"} and found.removed_files == {"/etc/a"}
    assert found.added_units == {"c.service"} and found.removed_units == {"a.service"}


def test_the_order_of_files_units_and_drop_ins_is_no_change() -> None:
    dropins = [{"name": "a.conf", "contents": "a"}, {"name": "b.conf", "contents": "b"}]
    old = config(
        files=[file("/etc/a"), file("/etc/b")], units=[{"name": "a.service", "dropins": dropins}, {"name": "b.service"}]
    )
    new = config(
        files=[file("/etc/b"), file("/etc/a")],
        units=[{"name": "b.service"}, {"name": "a.service", "dropins": dropins[::-1]}],
    )
    assert not diff(old, new)


@pytest.mark.parametrize(
    "other",
    [
        {"contents": "y"},
        {"contents": "x", "enabled": True},
        {"contents": "x", "enabled": False},
        {"contents": "x", "mask": True},
        {"contents": "x", "dropins": [{"name": "a.conf", "contents": "x"}]},
        {"contents": "x", "dropins": [{"name": "a.conf"}]},
        {},
    ],
)
def test_every_part_of_a_unit_is_a_change_of_the_unit(other: Any) -> None:
    found = diff(config(units=[{"name": "a.service", "contents": "x"}]), config(units=[{"name": "a.service", **other}]))
    assert found == Difference(units=frozenset({"a.service"}))


@pytest.mark.parametrize(
    ("old", "new", "flags"),
    [
        ({}, {"kernelArguments": ["a"]}, {"kernel_arguments"}),
        ({"kernelArguments": ["a", "b"]}, {"kernelArguments": ["b", "a"]}, {"kernel_arguments"}),
        ({"kernelArguments": ["a", "a"]}, {"kernelArguments": ["a"]}, {"kernel_arguments"}),
        ({"kernelArguments": ["a b"]}, {"kernelArguments": ["a", "b"]}, set()),
        ({"kernelArguments": None}, {"kernelArguments": []}, set()),
        ({"extensions": ["ipsec", "usbguard"]}, {"extensions": ["usbguard", "ipsec"]}, set()),
        ({"extensions": ["ipsec"]}, {"extensions": []}, {"extensions"}),
        ({"osImageURL": "a"}, {"osImageURL": "b"}, {"os_image"}),
        ({"osImageURL": "a"}, {}, set()),
        ({}, {"osImageURL": "a"}, {"os_image"}),
        ({"kernelType": "default"}, {}, set()),
        ({"kernelType": "realtime"}, {}, {"kernel_type"}),
        ({"fips": False}, {}, set()),
        ({"fips": True}, {}, {"fips"}),
    ],
)
def test_flags_of_the_spec(old: Any, new: Any, flags: set[str]) -> None:
    found = diff(config(**old), config(**new))
    assert {field.name for field in dataclasses.fields(found) if getattr(found, field.name)} == flags
    assert found.system is bool(flags)


def test_another_extensions_image_alone_is_no_reason_to_touch_a_node() -> None:
    found = diff(config(baseOSExtensionsContainerImage="a"), config(baseOSExtensionsContainerImage="b"))
    assert found.extensions_image and not found


def test_H7_keys_and_password_are_changes_of_the_users() -> None:
    one, two = config(users=[core("k")]), config(users=[core("k", "l")])
    assert diff(one, two) == Difference(ssh_keys=True) and diff(one, two).users
    assert diff(one, config(users=[core("k", passwordHash="*")])) == Difference(password=True)
    assert diff(one, config()).ssh_keys


def test_a_config_against_itself_is_no_difference() -> None:
    made = config(
        files=[file("/etc/x")], units=[{"name": "a.service"}], users=[core("k")], osImageURL="x", extensions=["ipsec"]
    )
    assert diff(made, made) == Difference()


def test_a_node_that_was_never_managed_differs_by_everything_that_is_wanted() -> None:
    made = config(files=[file("/etc/x")], units=[{"name": "a.service"}], users=[core("k")])
    found = diff(None, made)
    assert (
        found.files == found.added_files == {"/etc/x"}
        and found.units == {"a.service"}
        and found.users
        and not found.system
    )


@pytest.mark.parametrize(
    ("old", "new", "needed"),
    [
        ({}, {}, False),
        ({"extensions": ["ipsec"]}, {}, True),
        ({}, {"extensions": ["ipsec"]}, True),
        ({"kernelType": "realtime"}, {}, True),
        ({}, {"kernelType": "64k-pages"}, True),
    ],
)
def test_EXT_04_the_extensions_image_is_needed_only_for_packages_or_a_kernel(old: Any, new: Any, needed: bool) -> None:
    assert needs_extensions_image(config(**old), config(**new)) is needed
    assert needs_extensions_image(None, config(**new)) is bool(new)
