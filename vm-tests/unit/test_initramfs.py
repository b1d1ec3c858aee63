"""The initramfs is read by the kernel: other tools must find in it what was put in."""

from __future__ import annotations

import subprocess
from pathlib import Path

from vmlab.initramfs import cpio

from tests.stand.images import Directory, Entry, File, Link

_TREE: dict[str, Entry] = {
    "init": File(b"#!/bin/sh\n", 0o755),
    "bin/busybox": File(b"program", 0o755),
    "bin/sh": Link("busybox"),
    "proc": Directory(0o555),
    "etc/odd length": File(b"12345"),
}


def _unpack(archive: bytes, folder: Path) -> None:
    argv = ["cpio", "--extract", "--quiet", "--make-directories"]
    subprocess.run(argv, input=archive, cwd=folder, check=True, timeout=30, capture_output=True)


def test_another_cpio_unpacks_it_with_modes_links_and_parents(tmp_path: Path) -> None:
    _unpack(cpio(_TREE), tmp_path)
    assert (tmp_path / "init").stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "bin/sh").readlink() == Path("busybox")
    assert (tmp_path / "etc/odd length").read_bytes() == b"12345"
    assert (tmp_path / "proc").stat().st_mode & 0o777 == 0o555


def test_the_order_in_which_files_are_named_makes_no_difference() -> None:
    assert cpio(_TREE) == cpio(dict(reversed(list(_TREE.items()))))


def test_an_appended_archive_begins_where_the_kernel_looks_for_one() -> None:
    # The kernel skips zeros between archives, but a header has to stand at a multiple of four.
    assert len(cpio(_TREE)) % 4 == 0
