"""Boot entries as a boot loader reads them, and what it hands over; disks are real ext4 file systems."""

from __future__ import annotations

import gzip
import lzma
import os
import struct
import subprocess
from pathlib import Path
from typing import Optional

import pytest
from vmlab import bootloader
from vmlab.bootloader import BlsEntry, DiskError, DiskFiles, parse_entry, unpacked, vmlinux

from tests.stand.sysroot import NoSuchDeployment

_LINK = "/ostree/boot.1/rhcos/abc/0"
_CHECKSUM = "94327b5f45ebeb17fac3ac91669c073782c938d9d6e450e3bb94e0dc06c7f2a3"


def _entry(version: str, deployment: str = "d", kernel: str = "/boot/ostree/vmlinuz") -> str:
    return f"title {deployment}\nversion {version}\noptions root=/dev/vda1 rw ostree={_LINK}\nlinux {kernel}\n"


def _parse(text: str, name: str = "ostree-1.conf") -> Optional[BlsEntry]:
    return parse_entry(f"/boot/loader/entries/{name}", text, lambda link: f"of {link}")


def test_an_entry_has_its_kernel_options_and_deployment() -> None:
    entry = _parse(_entry("2") + "initrd /boot/ostree/initramfs.img\naboot /x\n")
    assert entry is not None
    assert (entry.version, entry.linux, entry.initrd) == (2, "/boot/ostree/vmlinuz", "/boot/ostree/initramfs.img")
    assert entry.options == f"root=/dev/vda1 rw ostree={_LINK}"
    assert entry.deployment == f"of {_LINK}"


def test_several_lines_of_options_are_one_command_line() -> None:
    entry = _parse("linux /k\noptions root=x rw\n# a remark\noptions\tquiet\noptions  panic=1 \n")
    assert entry is not None
    assert entry.options == "root=x rw quiet panic=1"
    assert entry.deployment == ""


@pytest.mark.parametrize("text", ["", "\n\n", "title only\nversion 9\n", "linux\n", "\0\0\0\0", "options ostree=/x\n"])
def test_what_names_no_kernel_is_no_entry(text: str) -> None:
    assert _parse(text) is None


@pytest.mark.parametrize("version", ["", "-3", "1.5", "two", "99999999999999999999x"])
def test_a_version_that_is_no_number_comes_last(version: str) -> None:
    odd, first = _parse(_entry(version), "ostree-9.conf"), _parse(_entry("1"))
    assert odd is not None and first is not None
    assert bootloader.in_order([odd, first]) == [first, odd]


def test_versions_are_numbers_and_the_name_decides_between_equals() -> None:
    made = [_parse(_entry(v), n) for v, n in (("9", "a.conf"), ("10", "b.conf"), ("2", "z.conf"), ("9", "c.conf"))]
    ordered = bootloader.in_order([entry for entry in made if entry is not None])
    assert [(entry.version, entry.path.name) for entry in ordered] == [
        (10, "b.conf"), (9, "c.conf"), (9, "a.conf"), (2, "z.conf")]  # fmt: skip


# -- disks ------------------------------------------------------------------------------------------------------------


def _disk(tree: Path, target: Path) -> DiskFiles:
    """A disk with an MBR and one ext4 partition at 1 MiB that has the content of `tree`."""
    mbr = bytearray(512)
    mbr[446 + 4] = 0x83
    struct.pack_into("<II", mbr, 446 + 8, 2048, 14 * 2048)
    mbr[510:512] = b"\x55\xaa"
    with target.open("wb") as file:
        file.write(mbr)
        file.truncate(16 << 20)
    subprocess.run(["mke2fs", "-q", "-t", "ext4", "-d", str(tree), "-E", f"offset={1 << 20}", str(target), "14m"],
                   check=True, capture_output=True, timeout=60)  # fmt: skip
    return DiskFiles.open(target)


def _debugfs(device: Path, requests: str, write: bool = False) -> str:
    done = subprocess.run(["debugfs", *(["-w"] if write else []), "-f", "-", str(device)], input=requests,
                          capture_output=True, text=True, check=True, timeout=60)  # fmt: skip
    return done.stdout


def _block_size(device: Path) -> int:
    return int(_debugfs(device, "stats").partition("Block size:")[2].split()[0])


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A sysroot's boot directory as ostree makes it, with two deployments."""
    root = tmp_path / "tree"
    entries = root / "boot/loader.1/entries"
    entries.mkdir(parents=True)
    (root / "boot/loader").symlink_to("loader.1")
    (entries / "ostree-2.conf").write_text(_entry("2") + "initrd /boot/ostree/initrd\n")
    (entries / "ostree-1.conf").write_text(_entry("1").replace("/0\n", "/1\n"))
    (entries / "junk.conf").write_text("\0" * 100)
    (entries / "ostree-3.conf.tmp").write_text(_entry("3"))
    (root / "boot/ostree").mkdir()
    (root / "boot/ostree/vmlinuz").write_bytes(b"no bzImage" * 1000)
    (root / "boot/ostree/initrd").write_bytes(gzip.compress(b"070701" * 1000))
    links = root / "ostree/boot.1.1/rhcos/abc"
    links.mkdir(parents=True)
    (root / "ostree/boot.1").symlink_to("boot.1.1")
    (links / "0").symlink_to(f"../../../deploy/rhcos/deploy/{_CHECKSUM}.0")
    (links / "1").symlink_to("../../../short.1")
    return root


def test_the_entries_of_a_disk_are_found_through_its_links(tree: Path, tmp_path: Path) -> None:
    disk = _disk(tree, tmp_path / "disk")
    assert [entry.deployment for entry in bootloader.entries(disk)] == [f"{_CHECKSUM}.0", "short.1"]
    assert bootloader.default_entry(disk).version == 2


def test_kernel_and_initrd_are_handed_over_unpacked_and_kept(tree: Path, tmp_path: Path) -> None:
    disk = _disk(tree, tmp_path / "disk")
    boot = bootloader.load(disk, bootloader.default_entry(disk), tmp_path / "cache")
    assert boot.kernel.read_bytes() == b"no bzImage" * 1000
    assert boot.initrd is not None and boot.initrd.read_bytes() == b"070701" * 1000
    before = sorted((tmp_path / "cache").iterdir())
    assert bootloader.load(disk, bootloader.default_entry(disk), tmp_path / "cache") == boot
    assert sorted((tmp_path / "cache").iterdir()) == before


def test_a_kernel_that_is_not_there_is_named(tree: Path, tmp_path: Path) -> None:
    (tree / "boot/ostree/vmlinuz").unlink()
    disk = _disk(tree, tmp_path / "disk")
    with pytest.raises(DiskError, match="has no /boot/ostree/vmlinuz"):
        bootloader.load(disk, bootloader.default_entry(disk), tmp_path / "cache")


def test_without_any_entry_nothing_boots(tree: Path, tmp_path: Path) -> None:
    (tree / "boot/loader").unlink()
    with pytest.raises(NoSuchDeployment):
        bootloader.default_entry(_disk(tree, tmp_path / "disk"))


@pytest.mark.parametrize("damage", ["no table", "no partition", "no file system"])
def test_a_disk_that_cannot_be_read_is_an_error(tree: Path, tmp_path: Path, damage: str) -> None:
    path = _disk(tree, tmp_path / "disk").path
    with path.open("r+b") as file:
        if damage == "no table":
            file.write(bytes(512))
        elif damage == "no partition":
            file.seek(446 + 4)
            file.write(b"\0")
        else:
            file.seek(1 << 20)
            file.write(bytes(1 << 20))
    with pytest.raises(DiskError):
        bootloader.entries(DiskFiles.open(path))


def test_a_tree_is_copied_out_of_a_disk(tree: Path, tmp_path: Path) -> None:
    disk = _disk(tree, tmp_path / "disk")
    disk.copy_tree("/boot/ostree", tmp_path / "out")
    assert (tmp_path / "out/ostree/vmlinuz").read_bytes() == (tree / "boot/ostree/vmlinuz").read_bytes()
    disk.copy("/boot/ostree/initrd", tmp_path / "one")
    assert (tmp_path / "one").read_bytes() == (tree / "boot/ostree/initrd").read_bytes()
    with pytest.raises(DiskError, match="has no /boot/nothing"):
        disk.copy("/boot/nothing", tmp_path / "two")


def test_a_journal_that_waits_is_replayed_and_the_rest_of_the_disk_stays(tree: Path, tmp_path: Path) -> None:
    disk = _disk(tree, tmp_path / "disk")
    with disk.path.open("r+b") as file:
        file.seek(446)
        table = file.read(16)
        file.seek(512)
        file.write(b"a boot loader's code")
    # A transaction that only the journal has: what a power cut leaves.
    alone = tmp_path / "alone"
    alone.write_bytes(disk.path.read_bytes()[disk.offset : disk.offset + disk.size])
    block = int(
        _debugfs(alone, "stat /boot/ostree/vmlinuz").partition("EXTENTS:\n(")[2].partition("):")[2].split("-")[0]
    )
    fresh = tmp_path / "block"
    fresh.write_bytes(b"new".ljust(_block_size(alone), b"\n"))
    _debugfs(alone, f"jo\njw -b {block} {fresh}\njc", write=True)
    with disk.path.open("r+b") as file:
        file.seek(disk.offset)
        file.write(alone.read_bytes())
    assert b"new" not in disk.read("/boot/ostree/vmlinuz")
    disk.replay_journal()
    assert disk.read("/boot/ostree/vmlinuz").startswith(b"new\n")
    with disk.path.open("rb") as file:
        file.seek(446)
        assert file.read(16) == table
        file.seek(512)
        assert file.read(20) == b"a boot loader's code"
    assert "needs_recovery" not in _debugfs(Path(disk.device), "stats")


def test_a_replay_keeps_what_is_there_and_tells_of_damage(tree: Path, tmp_path: Path) -> None:
    disk = _disk(tree, tmp_path / "disk")
    disk.replay_journal()
    assert disk.read("/boot/ostree/vmlinuz") == b"no bzImage" * 1000
    with disk.path.open("r+b") as file:
        file.seek(disk.offset)
        file.write(os.urandom(1 << 20))
    with pytest.raises(DiskError, match="e2fsck"):
        disk.replay_journal()


# -- kernels ----------------------------------------------------------------------------------------------------------


def _bzimage(payload: bytes) -> bytes:
    sectors = 3
    image = bytearray((sectors + 1) * 512 + 100)
    image[0x1F1] = sectors
    image[0x202:0x206] = b"HdrS"
    struct.pack_into("<II", image, 0x248, 100, len(payload))
    return bytes(image) + payload + os.urandom(300)


_ELF = b"\x7fELF" + bytes(range(256)) * 64


def _zstd(data: bytes) -> bytes:
    return subprocess.run(["zstd", "-q", "-c"], input=data, capture_output=True, check=True, timeout=60).stdout


def test_the_kernel_is_taken_out_of_each_kind_of_bzimage() -> None:
    size = struct.pack("<I", len(_ELF))
    assert vmlinux(_bzimage(gzip.compress(_ELF))) == _ELF
    assert vmlinux(_bzimage(_zstd(_ELF) + size)) == _ELF
    assert vmlinux(_bzimage(lzma.compress(_ELF) + size)) == _ELF


def test_a_kernel_that_is_unpacked_already_stays_as_it_is() -> None:
    assert vmlinux(_ELF * 10) == _ELF * 10


def test_a_damaged_payload_is_an_error_and_no_kernel() -> None:
    with pytest.raises(DiskError, match="zstd"):
        vmlinux(_bzimage(_zstd(_ELF)[:40] + b"\0" * 4))


def test_data_in_no_known_format_stays_as_it_is() -> None:
    assert unpacked(b"070701 a cpio") == b"070701 a cpio"
    assert unpacked(b"") == b""
