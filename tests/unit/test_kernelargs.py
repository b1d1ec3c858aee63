"""Kernel arguments: the tokenizer, and plans that end in exactly the wanted arguments."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcdaemon.machineconfig.kernelargs import KargsPlan, expected, managed, plan, problem, satisfied, split, split_all

TOKENS = st.lists(st.sampled_from(["a=1", "a=2", "b", 'c="x y"', "d=é"]), max_size=6)
OTHERS = st.lists(st.sampled_from(["root=UUID=1", "rw", "quiet"]), max_size=3, unique=True)


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("", ()),
        ("  \t\n", ()),
        ("a", ("a",)),
        ("a=1 b=2", ("a=1", "b=2")),
        (" baz=test  bar=hello world", ("baz=test", "bar=hello", "world")),
        ('a="b c" d', ('a="b c"', "d")),
        ('"a b"=c', ('"a b"=c',)),
        ('a="b" "c', ('a="b"', '"c')),
        ("hugepagesz=1G hugepages=4\nhugepagesz=2M", ("hugepagesz=1G", "hugepages=4", "hugepagesz=2M")),
        ("a\\ b", ("a\\", "b")),
    ],
)
def test_KARG_02_arguments_are_split_at_blanks_outside_of_quotes(text: str, tokens: tuple[str, ...]) -> None:
    assert split(text) == tokens


@given(TOKENS, st.lists(st.sampled_from([" ", "\t", "  ", "\n"]), min_size=8, max_size=8))
def test_what_is_joined_is_split_again(tokens: list[str], blanks: list[str]) -> None:
    text = blanks[-1] + "".join(token + blank for token, blank in zip(tokens, blanks))
    assert split(text) == tuple(tokens)


@given(st.text(alphabet='ab=" \t', max_size=30))
def test_nothing_but_blanks_is_lost(text: str) -> None:
    tokens = split(text)
    assert all(token and token.strip(" \t") for token in tokens)
    assert "".join(tokens).replace(" ", "").replace("\t", "") == text.replace(" ", "").replace("\t", "")


@pytest.mark.parametrize("entry", ["a", "a=1 b", 'a="x y"', "", "ostreex=1", "root=é"])
def test_an_ordinary_entry_is_no_problem(entry: str) -> None:
    assert problem(entry) is None


@pytest.mark.parametrize(
    "entry", ['a="b', '"', "a=\x00", "a=\x7f", "ostree=/x", "a ostree=/x", "ostree", "mcdaemon.update=x"]
)
def test_an_entry_that_would_break_the_boot_or_the_agent_is_a_problem(entry: str) -> None:
    assert problem(entry)


@pytest.mark.parametrize(
    ("old", "new", "delete", "append"),
    [
        ([], ["hello=world"], "", "hello=world"),
        (["hello=world"], [], "hello=world", ""),
        (["foo", "bar=1", "hello=world"], ["hello=world"], "foo bar=1 hello=world", "hello=world"),
        ([' baz=test bar="hello world"'], [' baz=test bar="hello world"', "foo"],
         'baz=test bar="hello world"', 'baz=test bar="hello world" foo'),
        (["hugepagesz=1G hugepages=4", "hugepagesz=2M hugepages=4"],
         ["hugepagesz=1G hugepages=4", "hugepagesz=2M hugepages=6"],
         "hugepagesz=1G hugepages=4 hugepagesz=2M hugepages=4", "hugepagesz=1G hugepages=4 hugepagesz=2M hugepages=6"),
    ],
)  # fmt: skip
def test_H1_all_old_arguments_are_deleted_and_all_new_appended(
    old: list[str], new: list[str], delete: str, append: str
) -> None:
    former, wanted = split_all(old), split_all(new)
    assert plan(former, wanted, ("rw", *former)) == KargsPlan(split(delete), split(append))


def test_H1_a_list_that_is_only_split_in_another_way_changes_the_rest_alone() -> None:
    former, wanted = split_all(["foo", "bar=1 hello=world", "baz"]), split_all(["foo", "bar=1", "hello=world"])
    change = plan(former, wanted, former)
    assert change == KargsPlan(("foo", "bar=1", "hello=world", "baz"), ("foo", "bar=1", "hello=world"))


@pytest.mark.parametrize(
    ("running", "requested", "differs"),
    [
        ("u l", "u l", False),
        ("u l", "l u", True),
        ("u l", "u l u", True),
        ("u u l", "u l u", True),
        ("u l u", "u l u", False),
    ],
)
def test_H2_order_and_repeats_count(running: str, requested: str, differs: bool) -> None:
    assert satisfied(split(f"rw {running} quiet"), split(requested)) is not differs


@given(TOKENS, TOKENS, OTHERS)
def test_KARG_03_a_plan_ends_in_exactly_the_wanted_arguments(old: list[str], new: list[str], others: list[str]) -> None:
    line = (*others, *old)
    after = expected(line, plan(old, new, line))
    assert managed(after, {*old, *new}) == tuple(new)
    assert managed(after, others) == tuple(others)
    assert satisfied(after, new, old)
    assert not plan(new, new, after)


@given(TOKENS, OTHERS)
def test_KARG_07_equal_lists_ask_for_nothing(tokens: list[str], others: list[str]) -> None:
    change = plan(tokens, tokens, (*others, *tokens))
    assert change == KargsPlan() and not change


@given(TOKENS, TOKENS, OTHERS)
def test_KARG_05_what_the_installer_put_there_is_not_doubled(
    there: list[str], new: list[str], others: list[str]
) -> None:
    line = (*there, *others)
    after = expected(line, plan((), new, line))
    assert managed(after, new) == tuple(new)
    assert [token for token in after if token not in new] == [token for token in line if token not in new]


def test_KARG_13_left_over_arguments_and_a_wrong_order_are_seen() -> None:
    assert not satisfied(split("console=ttyS0 console=tty0"), split("console=tty0 console=ttyS0"))
    assert not satisfied(split("a=1 b"), ("b",), ("a=1",))
    assert satisfied(split("a=1 b"), ("b",))


def test_KARG_14_only_the_very_same_argument_is_deleted() -> None:
    assert plan(("crashkernel=auto",), (), ("crashkernel=1G",)) == KargsPlan()
    assert plan(("a",), (), ("a=1", "a")) == KargsPlan(("a",), ())


def test_an_argument_that_is_there_more_often_than_the_config_had_it_keeps_the_rest() -> None:
    line = ("ip=dhcp", "ip=dhcp")
    change = plan(("ip=dhcp",), (), line)
    assert change.delete_if_present == ("ip=dhcp",) and expected(line, change) == ("ip=dhcp",)
