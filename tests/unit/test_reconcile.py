"""What a node cannot be brought to."""

from __future__ import annotations

from typing import Any, Optional

import pytest

from mcdaemon.errors import Irreconcilable
from mcdaemon.machineconfig.reconcile import Facts, reconcile
from tests.unit.configs import config, core, file


def refusal(old: Optional[Any], new: Any, facts: Facts) -> Irreconcilable:
    with pytest.raises(Irreconcilable) as caught:
        reconcile(None if old is None else config("old", **old), config("new", **new), facts)
    assert caught.value.sentence.startswith("cannot go to new: /spec/")
    return caught.value


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({}, {}),
        (None, {"files": [file("/etc/x")]}),
        ({"files": [file("/etc/x")]}, {}),
        ({}, {"users": [core("k", "l")]}),
        ({"users": [core("k")]}, {}),
        ({"users": [core("k")]}, {"users": [core(passwordHash="*")]}),
        ({"users": [core()]}, {"users": [core()], "files": [file("/etc/x")]}),
        ({"osImageURL": "a"}, {"osImageURL": "b", "kernelType": "realtime", "extensions": ["ipsec"]}),
    ],
)
def test_H9_ordinary_changes_can_be_reached(old: Any, new: Any) -> None:
    before = None if old is None else config("old", **old)
    for facts in (Facts(), Facts(fips=False, architecture="x86_64"), Facts(architecture="aarch64")):
        reconcile(before, config("new", **new), facts)


@pytest.mark.parametrize(("old", "new"), [(False, True), (True, False)])
@pytest.mark.parametrize("node", [None, False, True])
def test_H9_fips_cannot_be_flipped(old: bool, new: bool, node: Optional[bool]) -> None:
    assert refusal({"fips": old}, {"fips": new}, Facts(fips=node)).field == "/spec/fips"


@pytest.mark.parametrize("old", [None, {"fips": True}])
def test_fips_has_to_be_what_the_node_booted_with(old: Any) -> None:
    """STATE-17."""
    error = refusal(old, {"fips": True}, Facts(fips=False))
    assert error.field == "/spec/fips" and "reinstall" in error.hint
    assert refusal(None, {}, Facts(fips=True)).field == "/spec/fips"


@pytest.mark.parametrize("architecture", ["x86_64", "s390x", "ppc64le"])
def test_large_pages_are_for_one_architecture_only(architecture: str) -> None:
    error = refusal({}, {"kernelType": "64k-pages"}, Facts(architecture=architecture))
    assert error.field == "/spec/kernelType" and architecture in error.sentence
    reconcile(config(), config(kernelType="64k-pages"), Facts(architecture="aarch64"))
    reconcile(config(), config(kernelType="64k-pages"), Facts())


def test_H9_core_without_key_and_password_would_be_locked_out() -> None:
    error = refusal({"users": [core("k")]}, {"users": [core()]}, Facts())
    assert error.field == "/spec/config/passwd/users/0"
