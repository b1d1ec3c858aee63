"""The predicted merge of /etc, compared with the one that libostree makes in a scratch sysroot.

`ostree admin deploy` without --stage runs the same merge code as a finalization, and needs no booted system (rpm-ostree
reference 6.3).
"""

from __future__ import annotations

import functools
import os
import random
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

import pytest

from mcdaemon.errors import Broken
from mcdaemon.host.etc_merge import Origin, Prediction, Tree, predict, scan
from mcdaemon.host.files import Kind, Node
from tests.stand.sysroot import admin_command

pytestmark = [
    pytest.mark.skipif(shutil.which("ostree") is None, reason="needs ostree"),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: owners are part of the merge"),
]


@dataclass(frozen=True)
class F:
    """A regular file of a test's tree."""

    content: str = "default"
    mode: int = 0o644
    uid: int = 0


@dataclass(frozen=True)
class L:
    """A symbolic link of a test's tree."""

    target: str


@dataclass(frozen=True)
class D:
    """A directory of a test's tree; parents need not be listed."""

    mode: int = 0o755
    uid: int = 0


@dataclass(frozen=True)
class P:
    """A FIFO of a test's tree."""


Thing = object
Shape = Mapping[str, Thing]


def build(directory: Path, shape: Shape) -> None:
    """Make the content of an etc directory exactly a shape."""
    for entry in directory.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
    for path in sorted(shape):
        thing, place = shape[path], directory / path
        place.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(thing, F):
            place.write_text(thing.content)
            os.chown(place, thing.uid, thing.uid)
            place.chmod(thing.mode)
        elif isinstance(thing, L):
            place.symlink_to(thing.target)
        elif isinstance(thing, P):
            os.mkfifo(place)
        elif isinstance(thing, D):
            place.mkdir()
            os.chown(place, thing.uid, thing.uid)
            place.chmod(thing.mode)


class Sysroot:
    """A scratch sysroot with one stateroot, in which `old` is deployed and then `new`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / "sysroot"
        self._tree = folder / "tree"
        self._path.mkdir(parents=True)
        for name in ("usr/etc", "usr/lib/modules/6.1", "boot", "sysroot", "proc", "var"):
            (self._tree / name).mkdir(parents=True)
        (self._tree / "usr/lib/modules/6.1/vmlinuz").write_text("kernel")
        (self._tree / "usr/lib/modules/6.1/initramfs.img").write_text("initramfs")
        (self._tree / "usr/lib/os-release").write_text("ID=test\n")
        self._run("ostree", "admin", "init-fs", str(self._path))
        self._run("ostree", "admin", "os-init", f"--sysroot={self._path}", "test")
        self._run("ostree", f"--repo={self._path}/ostree/repo", "config", "set", "sysroot.bootloader", "none")

    def deploy(self, etc: Shape) -> tuple[Optional[Path], str]:
        """Commit and deploy a tree with this /usr/etc; the deployment, or None and what ostree said."""
        build(self._tree / "usr/etc", etc)
        repo = f"--repo={self._path}/ostree/repo"
        self._run("ostree", repo, "commit", "--disable-fsync", "--branch=test", f"--tree=dir={self._tree}")
        before = set(self._deployments())
        with tempfile.TemporaryDirectory(dir=self._folder) as scratch:
            deploy = admin_command(self._path, Path(scratch), "deploy", f"--sysroot={self._path}", "--os=test", "test")
            done = subprocess.run(deploy, capture_output=True, text=True, timeout=30, check=False)
        if done.returncode != 0:
            return None, done.stderr.strip()
        (made,) = set(self._deployments()) - before
        return made, ""

    def close(self) -> None:
        """libostree makes the top of a deployment immutable."""
        for deployment in self._deployments():
            subprocess.run(["chattr", "-i", str(deployment)], check=False, timeout=10, capture_output=True)
        shutil.rmtree(self._folder)

    def _deployments(self) -> list[Path]:
        deployed = self._path / "ostree/deploy/test/deploy"
        return [path for path in deployed.iterdir() if path.is_dir()] if deployed.is_dir() else []

    @staticmethod
    def _run(*command: str) -> None:
        subprocess.run(command, check=True, capture_output=True, timeout=30)


@functools.lru_cache(maxsize=1)
def skips_special_files() -> bool:
    done = subprocess.run(["ostree", "--version"], capture_output=True, text=True, timeout=10, check=True)
    version = re.search(r"Version: '(\d+)\.(\d+)", done.stdout)
    assert version is not None
    return (int(version[1]), int(version[2])) >= (2024, 2)


def foresee(trees: list[Tree]) -> Prediction:
    old, running, new = trees
    return predict(old, running, new, skips_special_files=skips_special_files())


@dataclass(frozen=True)
class Outcome:
    """What was said before a merge, and what it did. `error` is ostree's own complaint."""

    prediction: Prediction
    merged: Tree
    error: str


def merge(folder: Path, old: Shape, running: Shape, new: Shape) -> Outcome:
    """Predict a merge, let libostree make it, and hold the two against each other."""
    sysroot = Sysroot(folder)
    try:
        booted, error = sysroot.deploy(old)
        assert booted is not None, error
        build(booted / "etc", running)
        new_etc = folder / "new-etc"
        new_etc.mkdir()
        build(new_etc, new)
        prediction = foresee([scan(booted / "usr/etc"), scan(booted / "etc"), scan(new_etc)])
        deployed, error = sysroot.deploy(new)
        if deployed is None:
            assert prediction.failure, f"ostree failed, which was not foreseen: {error}"
            return Outcome(prediction, {}, error)
        merged = scan(deployed / "etc")
        assert prediction.failure == ""
        assert prediction.merged == merged
        for path, origin in prediction.nodes.items():
            assert (origin is Origin.ABSENT) == (path not in merged), path
        return Outcome(prediction, merged, "")
    finally:
        sysroot.close()


# The tables of rpm-ostree.md 5.3 and vm.md 3: old default, running, new default -> where the path comes from.
# None is: not there.
TABLE: dict[str, tuple[Optional[Thing], Optional[Thing], Optional[Thing], Origin]] = {
    "untouched, removed": (F(), F(), None, Origin.ABSENT),
    "untouched, same": (F(), F(), F(), Origin.NEW),
    "untouched, changed": (F(), F(), F("new"), Origin.NEW),
    "content changed, removed": (F(), F("mine"), None, Origin.KEPT),
    "content changed, changed": (F(), F("mine"), F("new"), Origin.KEPT),
    "content changed to what is new": (F(), F("new"), F("new"), Origin.KEPT),
    "mode changed, removed": (F(), F(mode=0o600), None, Origin.KEPT),
    "mode changed, changed": (F(), F(mode=0o600), F("new"), Origin.KEPT),
    "setuid set, changed": (F(), F(mode=0o4644), F("new"), Origin.KEPT),
    "owner changed, removed": (F(), F(uid=7), None, Origin.KEPT),
    "owner changed, changed": (F(), F(uid=7), F("new"), Origin.KEPT),
    "deleted, same": (F(), None, F(), Origin.ABSENT),
    "deleted, changed": (F(), None, F("new"), Origin.ABSENT),
    "deleted, removed": (F(), None, None, Origin.ABSENT),
    "added, absent": (None, F("mine"), None, Origin.KEPT),
    "added, the same added": (None, F("new"), F("new"), Origin.KEPT),
    "added, another added": (None, F("mine"), F("new"), Origin.KEPT),
    "only new": (None, None, F("new"), Origin.NEW),
    "link untouched, changed": (L("a"), L("a"), L("b"), Origin.NEW),
    "link untouched, removed": (L("a"), L("a"), None, Origin.ABSENT),
    "link retargeted, changed": (L("a"), L("mine"), L("b"), Origin.KEPT),
    "link retargeted, removed": (L("a"), L("mine"), None, Origin.KEPT),
    "link deleted, changed": (L("a"), None, L("b"), Origin.ABSENT),
    "link added, another added": (None, L("mine"), L("b"), Origin.KEPT),
    "link replaced by a file, changed": (L("a"), F("mine"), L("b"), Origin.KEPT),
    "file replaced by a link, changed": (F(), L("mine"), F("new"), Origin.KEPT),
    "file replaced by a link, removed": (F(), L("mine"), None, Origin.KEPT),
    "file replaced by a directory, changed": (F(), D(), F("new"), Origin.KEPT),
    "file untouched, now a directory": (F(), F(), D(), Origin.NEW),
    "file untouched, now a link": (F(), F(), L("a"), Origin.NEW),
    "file changed, now a link": (F(), F("mine"), L("a"), Origin.KEPT),
    "empty directory added": (None, D(0o700, 7), None, Origin.KEPT),
    "empty directory untouched, removed": (D(), D(), None, Origin.ABSENT),
    "directory mode changed, still there": (D(), D(0o700), D(), Origin.NEW),
    "directory mode changed, removed": (D(), D(0o700), None, Origin.KEPT),
    "directory deleted, still there": (D(), None, D(), Origin.ABSENT),
    "directory added, directory added": (None, D(0o700), D(), Origin.NEW),
    "directory replaced by a file, removed": (D(), F("mine"), None, Origin.KEPT),
    "directory replaced by a file, now a file": (D(), F("mine"), F("new"), Origin.KEPT),
    "fifo added": (None, P(), None, Origin.ABSENT),
    "fifo in the place of a file": (F(), P(), F("new"), Origin.ABSENT),
}


def column(index: int, prefix: str) -> Shape:
    cases = enumerate(TABLE.values())
    return {f"{prefix}case{number}": case[index] for number, case in cases if case[index] is not None}


@pytest.mark.parametrize("prefix", ["", "dir/"], ids=["at the top", "in a directory"])
def test_every_row_of_the_tables_of_the_reference_is_foreseen(tmp_path: Path, prefix: str) -> None:
    outcome = merge(tmp_path / "m", column(0, prefix), column(1, prefix), column(2, prefix))
    for number, (title, case) in enumerate(TABLE.items()):
        origin = outcome.prediction.nodes.get(f"/etc/{prefix}case{number}", Origin.ABSENT)
        assert origin is case[3], title


def test_a_baked_in_config_vanishes_on_the_way_back_to_the_plain_image(tmp_path: Path) -> None:
    baked: Shape = {
        "systemd/system/a.service": F("unit"),
        "systemd/system/multi-user.target.wants/a.service": L("/etc/systemd/system/a.service"),
        "app.conf": F("config", 0o600),
        "other.conf": F(),
    }
    plain: Shape = {"other.conf": F("newer"), "systemd/system": D()}
    prediction = merge(tmp_path / "m", baked, baked, plain).prediction
    assert prediction.vanish == (
        "/etc/app.conf",
        "/etc/systemd/system/a.service",
        "/etc/systemd/system/multi-user.target.wants",
        "/etc/systemd/system/multi-user.target.wants/a.service",
    )
    assert prediction.replaced == ("/etc/other.conf",)
    assert prediction.masked == ()


def test_an_old_file_that_masks_the_new_one_is_named(tmp_path: Path) -> None:
    prediction = merge(
        tmp_path / "m", {"a": F()}, {"a": F(mode=0o600), "b": F("mine")}, {"a": F("new"), "b": F("new")}
    ).prediction
    assert prediction.masked == ("/etc/a", "/etc/b")
    assert prediction.merged["/etc/a"].mode == 0o600


def test_what_was_put_into_the_new_etc_before_the_merge_survives_where_nothing_local_differs() -> None:
    """rpm-ostree.md 5.4, way (a): the merge never reads the new usr/etc, only the new etc."""
    file = Node(Kind.FILE, sha256="1")
    prediction = predict({"/etc/a": file}, {"/etc/a": file}, {"/etc/a": Node(Kind.FILE, sha256="placed")})
    assert prediction.nodes["/etc/a"] is Origin.NEW
    assert prediction.vanish == ()


DIRECTORIES: dict[str, tuple[Shape, Shape, Shape]] = {
    "directory deleted, more in it": ({"d/a": F()}, {"x": F()}, {"d/a": F(), "d/b": F()}),
    "unmodified directory with one more file, removed": (
        {"d/a": F(), "d/e/b": F()},
        {"d/a": F(), "d/e/b": F(), "d/e/mine": F()},
        {"x": F()},
    ),
    "directory with another mode and one more file": (
        {"d": D(), "d/a": F()},
        {"d": D(0o750, 7), "d/a": F(), "d/mine": F()},
        {"d/a": F()},
    ),
    "directory with another mode, and a file deeper": (
        {"d": D(), "d/e/a": F()},
        {"d": D(0o750), "d/e": D(0o700), "d/e/a": F(), "d/e/mine": F()},
        {"d/e/a": F()},
    ),
    "directory with another mode, removed": (
        {"d/a": F(), "d/e/b": F()},
        {"d": D(0o700), "d/a": F(), "d/e/b": F()},
        {"x": F()},
    ),
    "directory replaced by a link": ({"d/a": F()}, {"d": L("e"), "e/a": F()}, {"x": F()}),
    "changed directory with a fifo in it": ({"d/a": F()}, {"d/p": P(), "d/a": F("mine")}, {"d/a": F()}),
    "added directory where a file is new": ({"x": F()}, {"d/a": F("mine")}, {"d": F("new")}),
    "added directory where a link is new": ({"x": F()}, {"d/a": F("mine")}, {"d": L("e"), "e/b": F()}),
    "local file below what is now a link": ({"d/a": F()}, {"d/a": F(), "d/mine": F()}, {"d": L("e"), "e/b": F()}),
    "local file below what is now a link with dots": (
        {"s/d/a": F()},
        {"s/d/a": F("mine")},
        {"s/d": L("../e/f"), "e/f/b": F()},
    ),
    "deleted below what is now a link": ({"d/a": F()}, {"d": D()}, {"d": L("e"), "e/a": F()}),
    "names that begin alike": (
        {"d/a": F(), "d.conf": F(), "d-x/a": F()},
        {"d.conf": F(), "d-x/a": F()},
        {"d/a": F(), "d.conf": F(), "d-x/a": F()},
    ),
    "names that are not UTF-8": ({"x": F()}, {"d/\udcff\udcfe": F("mine")}, {"x": F()}),
}


@pytest.mark.parametrize("case", DIRECTORIES)
def test_directories_are_merged_as_foreseen(tmp_path: Path, case: str) -> None:
    assert merge(tmp_path / "m", *DIRECTORIES[case]).error == ""


FAILURES: dict[str, tuple[Shape, Shape, Shape]] = {
    "changed file, now a directory": ({"d": F()}, {"d": F("mine")}, {"d/a": F()}),
    "added file, now a directory": ({"x": F()}, {"x": F(), "d": F("mine")}, {"x": F(), "d": D()}),
    "directory replaced by a link, the image unchanged": (
        {"t/d/a": F()},
        {"t/d": L("e"), "t/e/a": F()},
        {"t/d/a": F()},
    ),
    "directory replaced by a fifo": ({"d/a": F()}, {"d": P()}, {"d/a": F()}),
    "local file below what is now a file": ({"d/a": F()}, {"d/a": F(), "d/mine": F()}, {"d": F()}),
    "local file two below what is now a file": ({"d/e/a": F()}, {"d/e/a": F("mine")}, {"d": F()}),
    "deleted file below what is now a file": ({"d/a": F()}, {"d": D()}, {"d": F()}),
    "local file below what is now a dangling link": ({"d/a": F()}, {"d/a": F("mine")}, {"d": L("nowhere")}),
    "local file below what is now a link to a file": ({"d/a": F()}, {"d/a": F("mine")}, {"d": L("f"), "f": F()}),
    "local file below what is now a circle": ({"d/a": F()}, {"d/a": F("mine")}, {"d": L("e"), "e": L("d")}),
}


@pytest.mark.parametrize("case", FAILURES)
def test_a_merge_that_fails_is_said_to_fail(tmp_path: Path, case: str) -> None:
    outcome = merge(tmp_path / "m", *FAILURES[case])
    assert outcome.error != ""
    if "newly defaults to directory" in outcome.error:
        assert outcome.error == f"error: {outcome.prediction.failure}"


def test_a_link_that_leads_out_of_the_new_etc_is_reported_and_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    link = os.path.relpath(outside, "/etc")
    for target in (str(outside), f"../../{link}"):
        new: Tree = {"/etc/d": Node(Kind.LINK, target=target)}
        running: Tree = {"/etc/d": Node(Kind.DIRECTORY, 0o755), "/etc/d/mine": Node(Kind.FILE)}
        prediction = predict({"/etc/d": Node(Kind.DIRECTORY, 0o755)}, running, new)
        assert prediction.escapes == ("/etc/d/mine",)
        assert prediction.nodes["/etc/d/mine"] is Origin.ABSENT


def test_a_fifo_in_an_added_directory_is_left_out_or_fails_by_the_version_of_libostree(tmp_path: Path) -> None:
    """Field case TXN-45."""
    outcome = merge(tmp_path / "m", {"x": F()}, {"d/a": F(), "d/e/p": P()}, {"x": F()})
    if not skips_special_files():
        assert outcome.error == f"error: {outcome.prediction.failure}"
    node = Node(Kind.DIRECTORY)
    running = {"/etc/d": node, "/etc/d/a": Node(Kind.FILE), "/etc/d/p": Node(Kind.OTHER)}
    assert predict({}, running, {}, skips_special_files=True).vanish == ("/etc/d/p",)
    assert "Cannot copy non-regular" in predict({}, running, {}, skips_special_files=False).failure


def test_random_trees_are_merged_as_foreseen(tmp_path: Path) -> None:
    """As many rounds as fit into some seconds; every entry of every merge has to be as predicted.

    A round merges many small worlds at once, each in a directory of its own, and one that is said to fail by itself.
    """
    seed = int(os.environ.get("MCDAEMON_SEED", "0")) or random.SystemRandom().randrange(1, 2**32)
    print(f"seed {seed}: run again with MCDAEMON_SEED={seed}")
    generator = random.Random(seed)
    end = time.monotonic() + float(os.environ.get("MCDAEMON_RANDOM_SECONDS", "4"))
    worlds = failures = entries = 0
    while time.monotonic() < end:
        fine, failing = random_worlds(generator, tmp_path / "scratch")
        outcome = merge(tmp_path / "m", *fine)
        assert outcome.error == ""
        worlds += len({path.partition("/")[0] for shape in fine for path in shape})
        entries += len(outcome.merged)
        if failing is not None:
            assert merge(tmp_path / "m", *failing).error
            failures += 1
    print(f"{worlds} worlds with {entries} entries merged as predicted, {failures} refused by ostree as predicted")
    assert worlds


Worlds = tuple[dict[str, Thing], dict[str, Thing], dict[str, Thing]]


def random_worlds(generator: random.Random, scratch: Path) -> tuple[Worlds, Optional[Worlds]]:
    """The old, running and new tree of some worlds side by side, and of one that is said to fail."""
    fine: Worlds = ({}, {}, {})
    failing: Optional[Worlds] = None
    for number in range(20):
        old = random_shape(generator)
        world = (old, mutated(generator, old, fifos=True), mutated(generator, old))
        trees: list[Tree] = []
        for shape in world:
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.mkdir()
            build(scratch, shape)
            trees.append(scan(scratch))
        if foresee(trees).failure:
            failing = failing or world
            continue
        for side, shape in zip(fine, world):
            side.update({f"world{number}": D(), **{f"world{number}/{path}": thing for path, thing in shape.items()}})
    return fine, failing


def random_thing(generator: random.Random, fifos: bool = False) -> Thing:
    kind = generator.random()
    if kind < 0.55:
        return F(generator.choice("xy"), generator.choice([0o644, 0o644, 0o600]), generator.choice([0, 0, 7]))
    if kind < 0.7:
        return L(generator.choice(["a", "b", "c", "./d", "e/a"]))
    if fifos and kind < 0.73:
        return P()
    return D(generator.choice([0o755, 0o755, 0o700]), generator.choice([0, 0, 7]))


def random_shape(generator: random.Random) -> dict[str, Thing]:
    shape: dict[str, Thing] = {}
    for _ in range(generator.randrange(4, 40)):
        add(generator, shape)
    return shape


def add(generator: random.Random, shape: dict[str, Thing], fifos: bool = False) -> None:
    """Put something new into a directory of the shape."""
    parents = ["", *(f"{path}/" for path, thing in shape.items() if isinstance(thing, D) and path.count("/") < 3)]
    path = generator.choice(parents) + generator.choice("abcdefgh")
    if path not in shape:
        shape[path] = random_thing(generator, fifos)


def mutated(generator: random.Random, old: Shape, fifos: bool = False) -> dict[str, Thing]:
    shape = dict(old)
    # Mostly small differences: a merge with many of them nearly always fails.
    for _ in range(generator.choice([0, 1, 2, 3, 5, 8])):
        add(generator, shape, fifos)
    for _ in range(generator.choice([0, 1, 2, 3, 5])):
        path = generator.choice(sorted(shape)) if shape else ""
        thing = shape.pop(path, None)
        if isinstance(thing, D) and generator.random() < 0.5:
            shape[path] = D(generator.choice([0o700, 0o711]), thing.uid)
            continue
        for below in [other for other in shape if other.startswith(path + "/")]:
            del shape[below]
        if path and generator.random() < 0.6:
            shape[path] = random_thing(generator, fifos)
    return shape


def test_the_answer_about_managed_paths_needs_only_them(tmp_path: Path) -> None:
    old, running, new = (tmp_path / name for name in ("old", "running", "new"))
    shapes: list[Shape] = [
        {"d/a": F(), "d/b": F(), "e": F(), "f": F()},
        {"d/a": F(), "d/b": F("mine"), "e": F(), "f": F(), "g/h": F("mine")},
        {"d/b": F("new"), "e": F("new"), "f": F()},
    ]
    for directory, shape in zip((old, running, new), shapes):
        directory.mkdir()
        build(directory, shape)
    managed = ["/etc/d/a", "/etc/d/b", "/etc/e", "/etc/f", "/etc/g/h", "/etc/not/there"]
    whole = predict(scan(old), scan(running), scan(new))
    part = predict(scan(old, managed), scan(running, managed), scan(new, managed), managed)
    assert {path: whole.nodes.get(path, Origin.ABSENT) for path in managed} == part.nodes
    assert part.vanish == ("/etc/d/a",)
    assert part.masked == ("/etc/d/b",)
    assert part.replaced == ("/etc/e",)
    assert set(scan(running, ["/etc/d/a"])) == {"/etc/d", "/etc/d/a"}


def test_an_etc_that_is_not_there_cannot_be_scanned(tmp_path: Path) -> None:
    with pytest.raises(Broken, match="cannot read .*/etc: No such file or directory"):
        scan(tmp_path / "etc")


@pytest.fixture(autouse=True)
def _no_deployments_left(tmp_path: Path) -> Iterator[None]:
    yield
    assert not list(tmp_path.glob("*/sysroot"))
