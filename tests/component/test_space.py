"""What of an image is there already, against a repository that a real import has filled; libostree's own limit; the
real numbers of a real file system."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mcdaemon.host import space
from tests.component.test_ostree_import import importer, pushed
from tests.stand.disk import MIB, Disk
from tests.stand.images import File, layer_on, os_image
from tests.stand.introspection import Gio, OSTree
from tests.stand.registry import Registry

pytestmark = pytest.mark.stand

ONE = os_image(version="417.94.1")
TWO = layer_on(ONE, {"usr/share/two": File(b"two")})


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    with Registry(tmp_path / "registry") as running:
        yield running


@pytest.fixture
def repo(tmp_path: Path) -> Any:
    made = OSTree.Repo.new(Gio.File.new_for_path(str(tmp_path / "repo")))
    made.create(OSTree.RepoMode.BARE, None)
    return made


@pytest.fixture
def root(tmp_path: Path) -> Path:
    policy = tmp_path / "root/etc/containers/policy.json"
    policy.parent.mkdir(parents=True)
    policy.write_text('{"default": [{"type": "insecureAcceptAnything"}]}')
    return tmp_path / "root"


def test_layers_are_there_once_they_are_imported_and_not_before(
    registry: Registry, repo: Any, root: Path, tmp_path: Path
) -> None:
    """rpm-ostree.md 4.3 step 9, 4.4."""
    layers = [layer.digest for layer in TWO.layers]
    assert space.not_imported(tmp_path / "repo", layers) == set(layers)
    importer(repo, pushed(registry, ONE), root).run()
    assert space.not_imported(tmp_path / "repo", layers) == {layers[-1]}
    importer(repo, pushed(registry, TWO), root).run()
    assert space.not_imported(tmp_path / "repo", layers) == set()


def test_a_layer_that_was_pruned_is_missing_again(registry: Registry, repo: Any, root: Path, tmp_path: Path) -> None:
    importer(repo, pushed(registry, ONE), root).run()
    (ref,) = (tmp_path / "repo/refs/heads/ostree/container/blob").iterdir()
    subprocess.run(["ostree", f"--repo={tmp_path}/repo", "refs", "--delete", f"ostree/container/blob/{ref.name}"],
                   check=True, timeout=20)  # fmt: skip
    assert space.not_imported(tmp_path / "repo", [ONE.layers[0].digest]) == {ONE.layers[0].digest}


def test_a_repository_without_any_image_lacks_all(tmp_path: Path) -> None:
    assert space.not_imported(tmp_path / "nothing", ["sha256:" + "1" * 64]) == {"sha256:" + "1" * 64}
    assert space.not_imported(tmp_path / "nothing", []) == set()


@pytest.mark.parametrize(("option", "kept"), [("min-free-space-size=30MB", 30 * MIB), ("min-free-space-percent=50", 0)])
def test_libostree_refuses_at_the_limit_that_we_count_with(tmp_path: Path, option: str, kept: int) -> None:
    """rpm-ostree.md 5.9: with the real library, on a disk of 64 MiB."""
    with Disk(tmp_path / "disk.img", tmp_path / "disk", size=64 * MIB) as disk:
        repo = disk.folder / "repo"
        _ostree("init", f"--repo={repo}", "--mode=bare-user")
        with open(repo / "config", "a") as config:
            config.write(f"{option}\n")
        room = space.look(repo)
        limit = space.kept_free(repo, room.total)
        assert limit == (kept or room.total // 2)
        content = tmp_path / "content"
        content.mkdir()
        (content / "file").write_bytes(os.urandom(room.bytes - limit + 4 * MIB))
        refused = _ostree("commit", f"--repo={repo}", "--branch=b", str(content), check=False)
        assert refused.returncode != 0 and "would be exceeded" in refused.stderr
        (content / "file").write_bytes(os.urandom(room.bytes - limit - 8 * MIB))
        _ostree("commit", f"--repo={repo}", "--branch=b", str(content))


def _ostree(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ostree", *arguments], check=check, capture_output=True, text=True, timeout=60)


def test_what_a_file_system_reserves_for_root_is_not_counted(tmp_path: Path) -> None:
    """TXN-46: mke2fs keeps five percent by default; /boot of CoreOS has them."""
    with Disk(tmp_path / "disk.img", tmp_path / "disk", size=64 * MIB) as disk:
        before = space.look(disk.folder).bytes
    subprocess.run(["tune2fs", "-m", "20", str(disk.image)], check=True, capture_output=True, timeout=20)
    with disk:
        room = space.look(disk.folder)
        assert before - room.bytes == pytest.approx(64 * MIB // 5, rel=0.1)
        assert room.inodes is not None and room.inodes > 1000


@pytest.mark.parametrize("sizes", [[1], [1023, 1024, 1025], [4096] * 50, [3 * MIB + 1, 5]])
def test_files_take_no_more_than_was_counted_for_them(tmp_path: Path, sizes: list[int]) -> None:
    """TXN-46: block rounding, against what the file system says afterwards."""
    with Disk(tmp_path / "disk.img", tmp_path / "disk", size=32 * MIB) as disk:
        disk.sync()
        before = space.look(disk.folder)
        for number, size in enumerate(sizes):
            (disk.folder / str(number)).write_bytes(os.urandom(size))
        disk.sync()
        used = before.bytes - space.look(disk.folder).bytes
        counted = space.rounded(sizes, before.block)
        assert sum(sizes) <= counted and used <= counted + 64 * 1024, "extents and the directory are the margin's"
