"""Every field case of groups B (transactions) and H (state) is a test that names it, or is listed here with a reason.

A test names a case by its id in its docstring. `python -m tests.unit.test_field_cases` prints the table.
"""

from __future__ import annotations

import ast
import functools
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
SHARED = Path(os.environ.get("MCDAEMON_SHARED", Path(__file__).parents[3] / "shared"))
CASES = SHARED / "reference/field-cases.md"
_ID = re.compile(r"\b(?:TXN|STATE)-\d+\b")

GROUPS = {
    "TXN": (1, 2, 3, 5, 6, 7, 8, 10, 11, 12, 13, 14, 15, 17, 20, 21, 26, 27, 31, 33, 34, 36, 37, 39, 40, 41, 42, 43, 44,
            45, 46, 48, 50),
    "STATE": (1, 2, 4, 6, 7, 10, 11, 12, 13, 14, 17, 18, 19, 20, 21, 22, 23, 25, 29, 30, 32),
}  # fmt: skip

_FIRST_BOOT = "the first-boot source is not built yet"
_CLUSTER = "the cluster source is not built yet"

NOT_TESTED = {
    "TXN-12": "unit files are read from the root; no listing of systemctl is parsed",
    "TXN-14": "nothing is written below /sys",
    "TXN-15": "the repository's config is never written",
    "TXN-20": "the boot loader on the ESP is not touched; that takes Secure Boot in a machine to try",
    "STATE-06": _CLUSTER + "; the current config is carried by the root itself",
    "STATE-13": "there is no force file; `mcdaemon retry` is tested under TXN-40",
    "STATE-14": _FIRST_BOOT,
    "STATE-18": "configs with links, directories and disks are refused by their field; removing them is issue 5",
    "STATE-19": "a disk section is refused by its field; the override that skips it is issue 5",
    "STATE-23": _CLUSTER,
    "STATE-30": _CLUSTER + "; a directory has no pause",
}


def ids() -> list[str]:
    return [f"{group}-{number:02d}" for group, numbers in GROUPS.items() for number in numbers]


@functools.cache
def named() -> dict[str, list[str]]:
    """Tests (file::name) by the case that their docstring, or their module's, names."""
    found: dict[str, list[str]] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        for name, text in _docstrings(ast.parse(path.read_text())):
            for case in _ID.findall(text):
                found.setdefault(case, []).append(f"{path.relative_to(TESTS)}::{name}")
    return found


def _docstrings(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            yield node.name, ast.get_docstring(node) or ""


@pytest.mark.parametrize("case", ids())
def test_a_field_case_is_a_test_that_names_it_or_has_a_reason(case: str) -> None:
    tests, reason = named().get(case, []), NOT_TESTED.get(case, "")
    assert bool(tests) != bool(reason), f"{case}: tests {tests}, reason {reason!r}"


def test_no_case_is_named_that_does_not_exist() -> None:
    assert (set(named()) | set(NOT_TESTED)) - set(ids()) == set()


def test_the_list_of_cases_is_the_reference() -> None:
    if not CASES.exists():
        pytest.skip(f"the field cases are not here: {CASES}")
    found = re.findall(r"^### ((?:TXN|STATE)-\d+)", CASES.read_text(), re.MULTILINE)
    assert found == ids()


if __name__ == "__main__":
    tests_of = named()
    for one in ids():
        print(one, *(tests_of.get(one) or [NOT_TESTED.get(one, "?")]), sep="\n    ")
