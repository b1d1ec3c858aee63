"""The stand's disk: a power cut loses what was not synced, and nothing else."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.stand.disk import GIB, MIB, Disk, DiskError
from tests.stand.machine import Machine, minimal_tree

pytestmark = pytest.mark.stand


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    with Disk(tmp_path / "disk.img", tmp_path / "disk", size=64 * MIB) as made:
        yield made


def after_power_cut(disk: Disk, tmp_path: Path) -> dict[str, bytes]:
    """The files of the disk as the next boot finds them; the image is sound then."""
    cut = Disk(disk.snapshot(tmp_path / "cut.img"), tmp_path / "cut")
    with cut:
        found = {path.name: path.read_bytes() for path in cut.folder.iterdir() if path.is_file()}
    assert cut.check() == ""
    return found


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def is_met(attempt: Callable[[], bool]) -> bool:
    """Whether it holds at least once: a sync(2) by somebody else on this host is legal at any moment, and rare."""
    return any(attempt() for _attempt in range(8))


def test_a_power_cut_leaves_what_was_synced_and_nothing_else(disk: Disk, tmp_path: Path) -> None:
    (disk.folder / "synced").write_bytes(b"synced")
    sync(disk.folder / "synced")
    sync(disk.folder)

    def attempt() -> bool:
        (disk.folder / "unsynced").write_bytes(b"unsynced")
        found = after_power_cut(disk, tmp_path)
        (disk.folder / "unsynced").unlink()
        disk.sync()
        assert found["synced"] == b"synced"
        return "unsynced" not in found

    assert is_met(attempt)


def test_a_rename_without_a_sync_of_the_file_can_leave_an_empty_one(disk: Disk, tmp_path: Path) -> None:
    """The sync of anything else brings the rename to ext4's disk, but not the content."""

    def attempt() -> bool:
        (disk.folder / "file").write_bytes(b"old")
        disk.sync()
        (disk.folder / "new").write_bytes(b"new")
        (disk.folder / "new").rename(disk.folder / "file")
        first = after_power_cut(disk, tmp_path)["file"]
        (disk.folder / "other").write_bytes(b"other")
        sync(disk.folder / "other")
        return (first, after_power_cut(disk, tmp_path)["file"]) == (b"old", b"")

    assert is_met(attempt)


def test_a_write_in_place_without_a_sync_is_lost(disk: Disk, tmp_path: Path) -> None:
    def attempt() -> bool:
        (disk.folder / "file").write_bytes(b"old")
        disk.sync()
        (disk.folder / "file").write_bytes(b"new")
        return after_power_cut(disk, tmp_path) != {"file": b"new"}

    assert is_met(attempt)


def test_a_disk_that_was_unmounted_has_everything(tmp_path: Path) -> None:
    with Disk(tmp_path / "disk.img", tmp_path / "disk", size=64 * MIB) as disk:
        (disk.folder / "file").write_bytes(b"written")
    with Disk(tmp_path / "disk.img", tmp_path / "elsewhere") as disk:
        assert (disk.folder / "file").read_bytes() == b"written"
    assert disk.check() == ""


def test_a_frozen_disk_can_be_copied_and_is_thawed_when_it_is_unmounted(tmp_path: Path) -> None:
    with Disk(tmp_path / "disk.img", tmp_path / "disk", size=64 * MIB) as disk:
        (disk.folder / "file").write_bytes(b"frozen")
        subprocess.run(["fsfreeze", "--freeze", str(disk.folder)], check=True)
        assert after_power_cut(disk, tmp_path) == {"file": b"frozen"}
    assert not disk.folder.is_mount() and disk.check() == ""


def test_a_small_disk_is_full_at_its_size(disk: Disk) -> None:
    assert disk.free() < 64 * MIB
    with pytest.raises(OSError) as caught, open(disk.folder / "big", "wb", buffering=0) as file:
        while True:
            file.write(bytes(MIB))
    assert caught.value.errno == errno.ENOSPC
    assert disk.free() < MIB


def test_a_disk_that_is_in_use_is_out_of_the_way_and_says_so(tmp_path: Path) -> None:
    disk = Disk(tmp_path / "disk.img", tmp_path / "disk", size=64 * MIB)
    disk.mount()
    with open(disk.folder / "file", "w"), pytest.raises(DiskError, match="in use"):
        disk.unmount()
    assert not disk.folder.is_mount()


def test_an_image_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "disk.img").write_bytes(bytes(MIB))
    with pytest.raises(DiskError, match="disk.img"), Disk(tmp_path / "disk.img", tmp_path / "disk"):
        pass


def test_a_node_lives_on_its_disk_and_loses_what_it_did_not_sync(tmp_path: Path) -> None:
    disk = Disk(tmp_path / "disk.img", tmp_path / "node/sysroot", size=2 * GIB)
    with disk, Machine(tmp_path / "node", own_disk=True) as machine:
        machine.install_tree(minimal_tree(tmp_path / "tree"))
        disk.sync()
        machine.boot()
        machine.run(["sh", "-c", "echo 1 >/etc/synced; sync -f /etc; echo 1 >/etc/unsynced"])
        disk.snapshot(tmp_path / "cut.img")  # at once: nobody else should sync in between
    with Disk(tmp_path / "cut.img", tmp_path / "after/sysroot"), Machine(tmp_path / "after", own_disk=True) as machine:
        machine.boot()
        assert machine.exists("/etc/synced") and not machine.exists("/etc/unsynced")
        machine.reboot()
        assert machine.exists("/etc/synced")
    for folder in ("node", "after"):
        shutil.rmtree(tmp_path / folder)
