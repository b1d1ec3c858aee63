"""The rules by which the crash tests lose what was not synced."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Optional

import pytest

from tests.crash.lossydisk import LossyDisk
from tests.crash.recording import Call, Operation

MANY = 1000


@pytest.fixture
def disk(tmp_path: Path) -> LossyDisk:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/file").write_bytes(b"old")
    return LossyDisk(tmp_path)


def happen(disk: LossyDisk, top: Path, *operations: tuple[Call, str, dict[str, object]]) -> None:
    for call, path, more in operations:
        more = {key: str(top / str(value)) if key == "other" else value for key, value in more.items()}
        disk.apply(Operation(call, str(top / path), **more))  # type: ignore[arg-type]  # fields by name


def contents(disk: LossyDisk, path: str) -> set[Optional[bytes]]:
    """What the path may hold after a power cut now; None: it may be missing."""
    states = disk.states(MANY, random.Random(1))
    return {tree[path].data if path in tree else None for tree in states}


def replaced(disk: LossyDisk, top: Path) -> None:
    happen(
        disk, top,
        (Call.CREATE, "folder/new", {"mode": 0o600}), (Call.WRITE, "folder/new", {"data": b"fresh"}),
    )  # fmt: skip


RENAME: tuple[Call, str, dict[str, object]] = (Call.RENAME, "folder/file", {"other": "folder/new"})


def test_a_file_that_is_renamed_without_any_sync_is_old_new_or_torn(disk: LossyDisk, tmp_path: Path) -> None:
    replaced(disk, tmp_path)
    happen(disk, tmp_path, RENAME)
    assert contents(disk, "folder/file") == {b"old", b"", b"fr", bytes(5), b"fresh"}


def test_a_file_that_is_synced_before_its_rename_is_old_or_new(disk: LossyDisk, tmp_path: Path) -> None:
    replaced(disk, tmp_path)
    happen(disk, tmp_path, (Call.FSYNC, "folder/new", {}), RENAME)
    assert contents(disk, "folder/file") == {b"old", b"fresh"}
    happen(disk, tmp_path, (Call.FSYNC, "folder", {}))
    assert contents(disk, "folder/file") == {b"fresh"} and contents(disk, "folder/new") == {None}


def test_a_sync_of_the_file_system_brings_everything_to_the_disk(disk: LossyDisk, tmp_path: Path) -> None:
    replaced(disk, tmp_path)
    happen(disk, tmp_path, RENAME, (Call.SYNCFS, "", {}))
    assert contents(disk, "folder/file") == {b"fresh"}


def test_another_file_system_is_not_synced_with_it(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/file").write_bytes(b"old")
    disk = LossyDisk(tmp_path, [str(tmp_path / "folder")])
    replaced(disk, tmp_path)
    happen(disk, tmp_path, RENAME, (Call.SYNCFS, "", {}))
    assert b"" in contents(disk, "folder/file")
    happen(disk, tmp_path, (Call.SYNCFS, "folder", {}))
    assert contents(disk, "folder/file") == {b"fresh"}


def test_a_synced_file_in_a_directory_that_was_not_is_lost_with_it(disk: LossyDisk, tmp_path: Path) -> None:
    happen(
        disk, tmp_path, (Call.MKDIR, "made", {"mode": 0o755}), (Call.CREATE, "made/x", {"mode": 0o600}),
        (Call.FSYNC, "made/x", {}), (Call.FSYNC, "made", {}),
    )  # fmt: skip
    assert contents(disk, "made/x") == {None, b""}
    happen(disk, tmp_path, (Call.FSYNC, "", {}))
    assert contents(disk, "made/x") == {b""}


def test_a_removed_file_can_come_back_until_its_directory_is_synced(disk: LossyDisk, tmp_path: Path) -> None:
    happen(disk, tmp_path, (Call.UNLINK, "folder/file", {}))
    assert contents(disk, "folder/file") == {None, b"old"}
    happen(disk, tmp_path, (Call.FSYNC, "folder", {}))
    assert contents(disk, "folder/file") == {None}


def test_mode_and_owner_get_there_with_the_file_and_not_with_its_directory(disk: LossyDisk, tmp_path: Path) -> None:
    before = disk.settled()["folder/file"]
    happen(disk, tmp_path, (Call.CHOWN, "folder/file", {"uid": 7, "gid": 7}),
           (Call.CHMOD, "folder/file", {"mode": 0o640}), (Call.FSYNC, "folder", {}))  # fmt: skip
    found = {(tree["folder/file"].mode, tree["folder/file"].uid) for tree in disk.states(MANY, random.Random(1))}
    assert found == {(before.mode, before.uid), (before.mode, 7), (0o640, 7)}
    happen(disk, tmp_path, (Call.FSYNC, "folder/file", {}))
    assert len(list(disk.states(MANY, random.Random(1)))) == 1


def test_of_too_many_states_the_two_ends_are_tried_first(disk: LossyDisk, tmp_path: Path) -> None:
    for number in range(12):
        happen(disk, tmp_path, (Call.CREATE, f"folder/{number}", {"mode": 0o600}))
    least, greatest = list(disk.states(2, random.Random(1)))
    assert len(least) == 3 and greatest == disk.settled() and len(greatest) == 15
    assert len(list(disk.states(50, random.Random(1)))) > 40
