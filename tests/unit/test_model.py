"""The MachineConfig: its own fields, its identity, and that no input gets past with anything but a documented error."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcdaemon.errors import Irreconcilable
from mcdaemon.machineconfig.model import KernelType, parse
from tests.unit.configs import config, core, document, file


def refusal(made: object) -> Irreconcilable:
    with pytest.raises(Irreconcilable) as caught:
        parse(made, "some/file.yaml")
    assert caught.value.sentence.startswith("cannot use some/file.yaml: /")
    return caught.value


def test_everything_of_the_spec_is_read() -> None:
    made = config(
        kernelArguments=["a=1 b=2", 'c="x y"'],
        extensions=["usbguard", "ipsec", "usbguard"],
        osImageURL="quay.io/x@sha256:1",
        baseOSExtensionsContainerImage="quay.io/e@sha256:2",
        kernelType="realtime",
        fips=True,
        labels={"a": "b"},
        annotations={"c": "d"},
    )
    assert made.kernel_arguments == ("a=1", "b=2", 'c="x y"')
    assert made.extensions == ("ipsec", "usbguard")
    assert (made.os_image, made.extensions_image) == ("quay.io/x@sha256:1", "quay.io/e@sha256:2")
    assert made.kernel_type is KernelType.REALTIME and made.fips
    assert (made.labels, made.annotations) == ({"a": "b"}, {"c": "d"})


@pytest.mark.parametrize("spec", [None, {}, {"config": None}, {"extensions": None, "fips": None, "kernelType": ""}])
def test_an_empty_spec_wants_nothing(spec: Any) -> None:
    made = parse({"metadata": {"name": "x"}, "spec": spec}, "x")
    assert (made.kernel_type, made.fips, made.os_image, made.extensions) == (KernelType.DEFAULT, False, "", ())


def test_an_object_without_kind_is_read_since_currentconfig_has_none() -> None:
    made = document()
    del made["kind"], made["apiVersion"]
    assert parse(made, "x").name == "99-test"
    assert parse({**made, "kind": "", "apiVersion": ""}, "x").name == "99-test"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"kind": "MachineConfigPool"}, "/kind"),
        ({"kind": 5}, "/kind"),
        ({"apiVersion": "v1"}, "/apiVersion"),
        ({"metadata": None}, "/metadata/name"),
        ({"metadata": []}, "/metadata"),
        ({"metadata": {"name": ""}}, "/metadata/name"),
        ({"metadata": {"name": "A B"}}, "/metadata/name"),
        ({"metadata": {"name": "../x"}}, "/metadata/name"),
        ({"metadata": {"name": 5}}, "/metadata/name"),
        ({"metadata": {"name": "x", "labels": {"a": 1}}}, "/metadata/labels/a"),
        ({"metadata": {"name": "x", "annotations": ["a"]}}, "/metadata/annotations"),
        ({"spec": []}, "/spec"),
        ({"status": {"phase": "x"}}, "/status/phase"),
        ({"data": "x"}, "/data"),
    ],
)
def test_what_is_no_machineconfig_is_refused(change: Any, field: str) -> None:
    assert refusal({**document(), **change}).field == field


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"osImageUrl": "x"}, "/spec/osImageUrl"),
        ({"baseOSImage": {"url": "x"}}, "/spec/baseOSImage/url"),
        ({"osImageURL": "a b"}, "/spec/osImageURL"),
        ({"osImageURL": "a\n"}, "/spec/osImageURL"),
        ({"osImageURL": ["a"]}, "/spec/osImageURL"),
        ({"baseOSExtensionsContainerImage": 5}, "/spec/baseOSExtensionsContainerImage"),
        ({"kernelType": "Realtime"}, "/spec/kernelType"),
        ({"kernelType": True}, "/spec/kernelType"),
        ({"fips": "true"}, "/spec/fips"),
        ({"fips": 1}, "/spec/fips"),
        ({"extensions": ["usbguard", "usbgard"]}, "/spec/extensions/1"),
        ({"extensions": [None]}, "/spec/extensions/0"),
        ({"extensions": "usbguard"}, "/spec/extensions"),
        ({"extensions": ["kernel-devel"], "kernelType": "realtime"}, "/spec/extensions/0"),
        ({"kernelArguments": "a b"}, "/spec/kernelArguments"),
        ({"kernelArguments": ["fine", 5]}, "/spec/kernelArguments/1"),
        ({"kernelArguments": [None]}, "/spec/kernelArguments/0"),
        ({"kernelArguments": ["fine", 'a="b']}, "/spec/kernelArguments/1"),
        ({"kernelArguments": ["a=\x01"]}, "/spec/kernelArguments/0"),
        ({"kernelArguments": ["quiet ostree=/x"]}, "/spec/kernelArguments/0"),
        ({"kernelArguments": ["mcdaemon.update=1"]}, "/spec/kernelArguments/0"),
    ],
)
def test_a_wrong_value_in_the_spec_is_refused_by_its_pointer(spec: Any, field: str) -> None:
    assert refusal(document(**spec)).field == field


def test_the_name_of_an_unknown_extension_is_in_the_error_with_the_known_ones() -> None:
    error = refusal(document(extensions=["usbgard"]))
    assert "'usbgard'" in error.sentence and "usbguard" in error.hint


@pytest.mark.parametrize("value", [None, 5, "x", [], [{}], True])
def test_what_is_no_mapping_is_refused(value: Any) -> None:
    refusal(value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "\ud800", b"x", object(), {1: 2}, {"\udfff": 1}, (1,)])
def test_what_json_cannot_hold_is_refused(value: Any) -> None:
    made = document()
    made["spec"]["config"]["storage"] = {"files": [{"path": "/etc/x", "extra": value}]}
    refusal(made)


def test_a_document_that_is_too_deep_or_contains_itself_is_refused() -> None:
    made: Any = document()
    made["spec"]["config"]["storage"] = made
    refusal(made)
    deep: Any = []
    for _level in range(100_000):
        deep = [deep]
    refusal(deep)


def test_a_document_with_too_many_values_is_refused() -> None:
    row = [0] * 10_000
    refusal({"metadata": {"name": "x"}, "spec": {"a": [row] * 200}})


def test_the_identity_is_that_of_the_spec_alone() -> None:
    first, second = config("a", files=[file("/etc/x")]), config("b", files=[file("/etc/x")], labels={"x": "y"})
    assert first.identity == second.identity and len(first.identity) == 64
    assert first.identity != config("a", files=[file("/etc/x", b"y")]).identity


def test_the_identity_does_not_depend_on_the_order_of_keys() -> None:
    made = document(files=[file("/etc/x")], fips=False, osImageURL="x")
    turned = json.loads(json.dumps(made), object_pairs_hook=lambda pairs: dict(reversed(pairs)))
    assert parse(made, "x").identity == parse(turned, "x").identity


def test_what_was_written_as_raw_is_read_again_as_the_same_config() -> None:
    made = config(
        files=[file("/etc/x", "é".encode())],
        units=[{"name": "a.service", "contents": "é"}],
        users=[core("k")],
        kernelArguments=["a b"],
        extensions=["ipsec"],
    )
    again = parse(json.loads(json.dumps(made.raw)), "x")
    assert again == made and again.identity == made.identity


def test_the_document_given_is_neither_changed_nor_kept() -> None:
    made = document(files=[file("/etc/x")])
    before = copy.deepcopy(made)
    read = parse(made, "x")
    assert made == before
    made["spec"]["config"]["storage"]["files"].clear()
    assert read.raw["spec"]["config"]["storage"]["files"]


def test_files_and_units_are_found_by_name() -> None:
    made = config(files=[file("/etc/x")], units=[{"name": "a.service"}])
    assert made.file("/etc/x").sha256 == "2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881"
    assert made.unit("a.service").name == "a.service"
    with pytest.raises(KeyError):
        made.file("/etc/y")
    with pytest.raises(KeyError):
        made.unit("b.service")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


def _pointers(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    members = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at] + [found for key, inner in members for found in _pointers(inner, (*at, key))]


WHOLE = document(
    files=[file("/etc/x", user={"id": 0}, mode=420), file("/etc/y", overwrite=True)],
    units=[{"name": "a.service", "contents": "x", "enabled": True, "dropins": [{"name": "a.conf", "contents": "y"}]}],
    users=[core("k", passwordHash="*")],
    kernelArguments=["a b"],
    extensions=["ipsec"],
    osImageURL="x",
    fips=False,
    kernelType="default",
)


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(_pointers(WHOLE)), JSON)
def test_any_value_in_any_place_is_read_or_refused(place: tuple[Any, ...], value: Any) -> None:
    made: Any = copy.deepcopy(WHOLE)
    if not place:
        made = value
    else:
        inner = made
        for key in place[:-1]:
            inner = inner[key]
        inner[place[-1]] = value
    try:
        parse(made, "fuzz").identity  # noqa: B018 - the property has to work, too
    except Irreconcilable as error:
        assert error.sentence.startswith("cannot use fuzz: ")
