"""YAML and JSON as plain data, with lines; nothing in the text decides how much reading it costs."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from mcdaemon.document import MAX_VALUES, Malformed, read_json, read_yaml


def only(text: str) -> Any:
    documents = read_yaml(text)
    assert len(documents) == 1
    return documents[0].data


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0644", 0o644), ("0o644", 0o644), ("420", 420), ("0x1F", 31), ("0b11", 3), ("-7", -7), ("+7", 7), ("0", 0),
        ("1.5", 1.5), ("1e3", 1000.0), (".5", 0.5),
        ("true", True), ("no", False), ("On", True), ("~", None), ("", None), ("null", None),
        ("'true'", "true"), ('"0644"', "0644"), ("!!str 5", "5"), ("! 5", "5"),
        ("2026-11-30T16:48:13Z", "2026-11-30T16:48:13Z"), ("2026-11-30", "2026-11-30"), ("1:20", "1:20"),
        ("0_7", "0_7"), ("089", "089"), ("y", "y"), ("=", "="), ("a:b", "a:b"), ("1.2.3", "1.2.3"),
        ("|\n  a\n  b\n", "a\nb\n"), ("'é☃'", "é☃"),
    ],
)  # fmt: skip
def test_scalars_are_what_the_cluster_takes_them_for(text: str, value: Any) -> None:
    found = only(f"k: {text}")["k"]
    assert found == value and type(found) is type(value)


def test_keys_are_text_whatever_they_look_like() -> None:
    assert only("on: 1\n5: 2\nnull: 3\n") == {"on": 1, "5": 2, "null": 3}


def test_documents_are_read_in_order_and_empty_ones_left_out() -> None:
    assert [document.data for document in read_yaml("---\na: 1\n---\n---\n# nothing\n---\n- b\n...\n")] == [
        {"a": 1},
        ["b"],
    ]
    assert read_yaml("") == read_yaml("# x\n") == []


def test_every_value_has_its_line() -> None:
    document = read_yaml("a:\n  - x\n  - b/c: 1\n    d~: |\n      text\ne: {f: 2}\n")[0]
    assert document.line("/a") == 2 and document.line("/a/1") == 3 and document.line("/a/1/b~1c") == 3
    assert document.line("/a/1/d~0") == 4 and document.line("/e/f") == 6
    assert document.line("/a/1/missing/x") == 3 and document.line("/nothing") == 1


def test_aliases_are_read_as_what_they_stand_for() -> None:
    assert only("a: &x [1, {b: 2}]\nc: *x\n") == {"a": [1, {"b": 2}], "c": [1, {"b": 2}]}
    assert only("- &x word\n- *x\n") == ["word", "word"]


@pytest.mark.parametrize(
    ("text", "line", "word"),
    [
        ("a: 1\nb: [", 2, ""),
        ("a: 1\n\tb: 2", 2, ""),
        ("a: b: c", 1, ""),
        ("a: 1\nb: 1\na: 2\n", 3, "twice"),
        ("a:\n  b: 1\n  b: 2\n", 3, "twice"),
        ("a: &x 1\nb:\n  <<: *x\n", 3, "merge keys"),
        ("a: &x [*x]\n", 1, "before its anchor"),
        ("a: *x\n", 1, ""),
        ("a: !!python/object/apply:os.system [id]\n", 1, "tag"),
        ("a: !!binary eA==\n", 1, "tag"),
        ("a: 1\nb: !mine x\n", 2, "tag"),
        ("? [a]\n: 1\n", 1, "key has to be text"),
        ("a: &x y\n? *x\n: 1\n", 2, "key has to be text"),
        ("a: " + "9" * 5000, 1, "too long"),
        ("a: 1\nb: " + "[" * 100 + "]" * 100, 2, "deep"),
        ("a: 'x", 1, ""),
        ("%YAML 3.0\n---\na: 1", 0, ""),
    ],
)
def test_what_is_not_plain_yaml_is_refused_with_its_line(text: str, line: int, word: str) -> None:
    with pytest.raises(Malformed) as caught:
        read_yaml(text)
    assert word in caught.value.problem and (not line or caught.value.line in (line, line + 1))
    assert len(str(caught.value)) < 300


def test_a_control_character_is_refused() -> None:
    with pytest.raises(Malformed, match="not YAML"):
        read_yaml("a: \x01")


def test_aliases_that_multiply_are_refused_before_they_cost_anything() -> None:
    lines = ["a0: &a0 [x,x,x,x,x,x,x,x,x,x]"]
    lines += [f"a{level}: &a{level} [{','.join([f'*a{level - 1}'] * 10)}]" for level in range(1, 30)]
    with pytest.raises(Malformed, match=str(MAX_VALUES)):
        read_yaml("\n".join(lines))


def test_deep_json_and_yaml_end_in_an_error_and_not_in_a_crash() -> None:
    with pytest.raises(Malformed):
        read_json("[" * 200_000)
    with pytest.raises(Malformed):
        read_yaml("[" * 20_000)
    with pytest.raises(Malformed):
        read_yaml("- " * 5_000)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", 1),
        ("{", 1),
        ('{"a": 1,\n "b": }', 2),
        ('{"a": 1, "a": 2}', 0),
        ("NaN", 0),
        ('{"a": -Infinity}', 0),
        ("[1] x", 1),
        ("[" + "9" * 5000 + "]", 0),
    ],
)
def test_what_is_not_json_is_refused(text: str, line: int) -> None:
    with pytest.raises(Malformed) as caught:
        read_json(text)
    assert caught.value.line == line


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**9), 10**9)
    | st.text(st.characters(blacklist_categories=("Cs", "Cc")), max_size=12),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text("abc/~0", max_size=4), inner, max_size=4),
    max_leaves=12,
)


@settings(deadline=None)
@given(PLAIN)
def test_what_was_written_is_read_again(value: Any) -> None:
    assert read_json(json.dumps(value)).data == value
    # PyYAML quotes what it would itself take for a date; it does not know that 0o7 is a number here.
    if value is not None and "0o" not in json.dumps(value):
        assert only(yaml.safe_dump(value, default_style='"' if isinstance(value, str) else None)) == value


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="ab: -[]{}&*!|>'\"\n\t#%?,<~0189.x", max_size=60))
def test_any_text_is_read_or_refused(text: str) -> None:
    for read in (read_yaml, read_json):
        try:
            read(text)
        except Malformed:
            pass
