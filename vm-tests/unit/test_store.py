"""What is built is kept as long as nothing that it was made from has changed, and never half made."""

from __future__ import annotations

from pathlib import Path

import pytest
from vmlab import store


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "FOLDER", tmp_path / "kept")


def _make(folder: Path) -> None:
    (folder / "made").touch()


def test_what_is_there_with_the_same_key_is_not_made_again() -> None:
    made: list[Path] = []
    for _time in range(2):
        store.part("disk", "a" * 64, made.append)
    assert len(made) == 1


def test_a_build_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").touch()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.part("disk", "a" * 64, fail)
    assert [path.name for path in (tmp_path / "kept").iterdir()] == [".disk.lock"]


def test_a_part_of_another_key_is_made_and_the_oldest_forgotten(tmp_path: Path) -> None:
    folders = [store.part("disk", letter * 64, _make) for letter in "abc"]
    assert [folder.exists() for folder in folders] == [False, True, True]


def test_parts_of_another_name_are_kept() -> None:
    system = store.part("os", "a" * 64, _make)
    for letter in "abc":
        store.part("disk", letter * 64, _make)
    assert system.exists()


@pytest.mark.parametrize("change", ["content", "mode", "name", "link"])
def test_the_key_changes_with_each_thing_that_a_tree_is_made_of(tmp_path: Path, change: str) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "file").write_text("text")
    (tree / "link").symlink_to("file")
    before = store.key_of(["version"], [tree])
    assert store.key_of(["version"], [tree]) == before
    if change == "content":
        (tree / "file").write_text("test")
    elif change == "mode":
        (tree / "file").chmod(0o755)
    elif change == "name":
        (tree / "file").rename(tree / "other")
    else:
        (tree / "link").unlink()
        (tree / "link").symlink_to("elsewhere")
    assert store.key_of(["version"], [tree]) != before


def test_byte_code_beside_the_sources_does_not_count(tmp_path: Path) -> None:
    before = store.key_of([], [tmp_path])
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__/module.pyc").touch()
    assert store.key_of([], [tmp_path]) == before
