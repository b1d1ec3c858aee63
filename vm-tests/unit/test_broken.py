"""What is broken on purpose can still be broken, and only that."""

from __future__ import annotations

import ast
import io
import zipfile
from pathlib import Path

import pytest

from vmlab.broken import DAMAGES, CannotBreak, broken

PROJECT = Path(__file__).resolve().parents[2]


def packed(sources: dict[str, bytes]) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        for name, content in sources.items():
            archive.writestr(name, content)
    return made.getvalue()


@pytest.mark.parametrize("name", DAMAGES)
def test_each_damage_changes_one_file_of_the_sources_as_they_are_and_it_still_compiles(name: str) -> None:
    sources = {
        str(path.relative_to(PROJECT)): path.read_bytes() for path in sorted((PROJECT / "mcdaemon").rglob("*.py"))
    }
    spoilt = zipfile.ZipFile(io.BytesIO(broken(packed(sources), name)))
    changed = [path for path, content in sources.items() if spoilt.read(path) != content]
    assert changed == [DAMAGES[name].source]
    ast.parse(spoilt.read(changed[0]))


def test_byte_code_of_what_was_changed_does_not_hide_the_change() -> None:
    source = DAMAGES["no-commit"].source
    sources = {source: (PROJECT / source).read_bytes(), source + "c": b"old", "mcdaemon/other.pyc": b"kept"}
    names = zipfile.ZipFile(io.BytesIO(broken(packed(sources), "no-commit"))).namelist()
    assert source in names and source + "c" not in names and "mcdaemon/other.pyc" in names


def test_a_source_that_has_moved_on_is_refused() -> None:
    with pytest.raises(CannotBreak, match="is there 0 times"):
        broken(packed({DAMAGES["no-commit"].source: b"pass\n"}), "no-commit")
