"""Committing a payload into a root and taking it back: idempotent, exact, and never stuck half-way."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from mcdaemon.errors import Broken, Failure
from mcdaemon.host import files, packages, users
from mcdaemon.host.files import Entry, Kind, Node
from mcdaemon.host.root import Root
from mcdaemon.update import commit, payload, verify
from mcdaemon.update.payload import Payload, Shelf
from tests.component.test_payload import make_root
from tests.unit.configs import config, core, file

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: files get owners")

Tree = Mapping[str, Node]


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return make_root(tmp_path / "root", tmp_path / "var")


@pytest.fixture
def payloads(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path / "payload")


@pytest.fixture
def undo(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path / "undo")


def everywhere(_path: str) -> bool:
    return True


def save(payloads: Shelf, entries: Mapping[str, Entry], passwords: tuple[tuple[str, str], ...] = ()) -> Payload:
    load = Payload("u1", "new", tuple((path, entries[path].node) for path in sorted(entries)), passwords)
    payloads.save(load, entries)
    return load


def tree(root: Root) -> Tree:
    """Everything below /etc and /var, as nodes."""
    found = {}
    for top, place in (("/etc", root.path / "etc"), ("/var", root.var)):
        for folder, folders, names in os.walk(place):
            for name in (*folders, *names):
                path = top + os.path.join(folder, name)[len(os.fspath(place)) :]
                found[path] = files.read_node(root, path)
    return found


def inodes(root: Root) -> dict[str, tuple[int, int]]:
    found = {}
    for place in (*(root.path / "etc").rglob("*"), *root.var.rglob("*")):
        status = place.lstat()
        found[os.fspath(place)] = (status.st_ino, status.st_ctime_ns)
    return found


FIRST: dict[str, Entry] = {
    "/etc/file": Entry.file(b"1", 0o640, 977, 0), "/etc/deep/in/file": Entry.file(b"1"), "/etc/link": Entry.link("a"),
    "/etc/dir": Entry.directory(0o750, 977, 977), "/etc/gone": Entry.absent(), "/var/lib/x": Entry.file(b"1"),
    "/usr/local/bin/x": Entry.file(b"1", 0o755), "/home/core/x": Entry.file(b"1", 0o600, 1000, 1000),
}  # fmt: skip


# -- writing ----------------------------------------------------------------------------------------------------------


def test_what_was_committed_is_what_validation_expects(root: Root, payloads: Shelf) -> None:
    (root.path / "etc/gone").touch()
    load = save(payloads, FIRST)
    commit.apply(load, payloads, root)
    assert verify.validate(root, load.expected()).ok
    assert (root.var / "usrlocal/bin/x").read_bytes() == b"1"
    assert (root.var / "home/core/x").stat().st_uid == 1000


def test_a_second_commit_changes_nothing_at_all(root: Root, payloads: Shelf) -> None:
    load = save(payloads, FIRST, (("core", "$6$new"),))
    commit.apply(load, payloads, root)
    before = inodes(root)
    commit.apply(load, payloads, root)
    after = inodes(root)
    lock = os.fspath(root.path / "etc/.pwd.lock")
    assert {k: v for k, v in after.items() if k != lock} == {k: v for k, v in before.items() if k != lock}


def test_what_is_right_already_keeps_its_inode(root: Root, payloads: Shelf) -> None:
    files.put_all(root, {"/etc/file": FIRST["/etc/file"]})
    before = (root.path / "etc/file").stat().st_ino
    commit.apply(save(payloads, FIRST), payloads, root)
    assert (root.path / "etc/file").stat().st_ino == before


def instead(make: Callable[[Path], object]) -> Callable[[Path], None]:
    """Put something else in a file's place."""

    def change(place: Path) -> None:
        place.unlink()
        make(place)

    return change


@pytest.mark.parametrize("change", [
    lambda place: place.chmod(0o644), lambda place: os.chown(place, 0, 0), lambda place: place.write_bytes(b"2"),
    instead(lambda place: place.symlink_to("a")), instead(Path.mkdir), instead(os.mkfifo),
], ids=["mode", "owner", "content", "link", "directory", "fifo"])  # fmt: skip
def test_whatever_stands_in_a_files_place_is_put_right(
    root: Root, payloads: Shelf, change: Callable[[Path], Any]
) -> None:
    load = save(payloads, FIRST)
    commit.apply(load, payloads, root)
    change(root.path / "etc/file")
    commit.apply(load, payloads, root)
    assert verify.validate(root, load.expected()).ok


def test_only_the_chosen_paths_are_written(root: Root, payloads: Shelf) -> None:
    before = tree(root)
    commit.apply(save(payloads, FIRST, (("core", "$6$new"),)), payloads, root, root.shared)
    changed = {path for path, node in tree(root).items() if before.get(path) != node}
    assert changed == {"/var/lib", "/var/lib/x", "/var/usrlocal/bin", "/var/usrlocal/bin/x", "/var/home/core/x"}
    assert users.password_hash(root, "core") == "$6$by-hand"


def test_a_crash_after_any_file_is_made_good_by_the_next_commit(
    root: Root, payloads: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = save(payloads, FIRST)
    written = sum(entry.node.kind in (Kind.FILE, Kind.LINK) for entry in FIRST.values())

    # Each is written beside its path first, and renamed later.
    for lasts in range(len(FIRST) + written):
        left = [lasts]

        def counted(real: Callable[..., None], left: list[int] = left) -> Callable[..., None]:
            def call(*arguments: Any, **more: Any) -> None:
                if left[0] == 0:
                    raise KeyboardInterrupt
                left[0] -= 1
                real(*arguments, **more)

            return call

        with monkeypatch.context() as patch:
            for name in ("put", "_prepare", "_rename"):
                patch.setattr(files, name, counted(getattr(files, name)))
            with pytest.raises(KeyboardInterrupt):
                commit.apply(load, payloads, root)
        commit.apply(load, payloads, root)
        assert verify.validate(root, load.expected()).ok
        files.put_all(root, {path: Entry.absent() for path in FIRST if path != "/etc/dir"} | {
            "/etc/dir": Entry.absent(), "/etc/gone": Entry.file(b"old")})  # fmt: skip


def test_a_content_that_is_lost_stops_the_commit_before_anything_is_written(root: Root, payloads: Shelf) -> None:
    load = save(payloads, FIRST)
    (payloads.folder / "u1/content" / FIRST["/var/lib/x"].node.sha256).unlink()
    before = tree(root)
    with pytest.raises(Broken, match="cannot read"):
        commit.apply(load, payloads, root)
    assert tree(root) == before


def test_a_users_link_on_the_way_is_not_followed(root: Root, payloads: Shelf, tmp_path: Path) -> None:
    (root.var / "home/core/dir").symlink_to(tmp_path)
    os.lchown(root.var / "home/core/dir", 1000, 1000)
    load = save(payloads, {"/home/core/dir/x": Entry.file(b"1")})
    with pytest.raises(Broken, match="a link that a user could have placed"):
        commit.apply(load, payloads, root)
    assert not (tmp_path / "x").exists()


# -- from one config to the next --------------------------------------------------------------------------------------

SHAPES: dict[str, dict[str, list[dict[str, Any]]]] = {
    "file": {"files": [file("/etc/a", b"file")]},
    "directory": {"files": [file("/etc/a/b", b"b"), file("/etc/a/c", b"c")]},
    "deeper": {"files": [file("/etc/a/b/c/d", b"d")]},
    "nothing": {},
    "mask": {"units": [{"name": "a.service", "mask": True}]},
    "unit": {"units": [{"name": "a.service", "contents": "[Service]\n"}]},
    "dropin": {"units": [{"name": "a.service", "dropins": [{"name": "a.conf", "contents": "[Service]\n"}]}]},
}


@pytest.mark.parametrize("old", SHAPES)
@pytest.mark.parametrize("new", SHAPES)
def test_every_shape_can_follow_every_other_and_be_taken_back(
    root: Root, payloads: Shelf, undo: Shelf, old: str, new: str
) -> None:
    """FIL-13: a path can be a file in one config and a directory of files in the next."""
    first, second = config("old", **SHAPES[old]), config("new", **SHAPES[new])
    load, items = payload.build("u0", first, None, root, root)
    payloads.save(load, items)
    commit.apply(load, payloads, root)
    before = tree(root)

    load, items = payload.build("u1", second, first, root, root)
    payloads.save(load, items)
    commit.remember(load, undo, root, everywhere)
    for _ in range(2):
        commit.apply(load, payloads, root)
        assert verify.validate(root, load.expected()).ok
    assert not [path for path, node in tree(root).items() if node.kind is Kind.FILE and path not in load.nodes()
                and path.startswith("/etc/a")]  # fmt: skip

    commit.take_back("u1", undo, root)
    after = tree(root)
    assert {path: node for path, node in after.items() if path in before} == before
    assert all(node.kind is Kind.DIRECTORY for path, node in after.items() if path not in before)


# -- the undo record --------------------------------------------------------------------------------------------------


def test_everything_comes_back_as_it_was(root: Root, payloads: Shelf, undo: Shelf) -> None:
    etc = root.path / "etc"
    (etc / "file").symlink_to("elsewhere")
    (etc / "link").write_bytes(b"before")
    (etc / "link").chmod(0o2755)
    (etc / "dir").mkdir(0o1777)
    (etc / "dir").chmod(0o1777)
    (etc / "gone").write_bytes(b"before")
    os.chown(etc / "gone", 977, 977)
    (etc / "gone").chmod(0o604)
    before = tree(root)
    load = save(payloads, FIRST, (("core", "$6$new"),))
    commit.remember(load, undo, root, everywhere)
    commit.apply(load, payloads, root)
    assert users.password_hash(root, "core") == "$6$new"
    commit.take_back("u1", undo, root)
    after = tree(root)
    shadow = {"/etc/shadow", "/etc/.pwd.lock"}
    assert {p: n for p, n in after.items() if p in before and p not in shadow} == {
        p: n for p, n in before.items() if p not in shadow}  # fmt: skip
    assert users.password_hash(root, "core") == "$6$by-hand"
    assert undo.load("u1") is None


def test_the_record_is_written_once(root: Root, payloads: Shelf, undo: Shelf) -> None:
    """A second call comes after a crash: it must not record our own work."""
    (root.path / "etc/file").write_bytes(b"before")
    load = save(payloads, FIRST)
    commit.remember(load, undo, root, everywhere)
    kept = (undo.folder / "u1/payload.json").read_bytes()
    commit.apply(load, payloads, root)
    commit.remember(load, undo, root, everywhere)
    assert (undo.folder / "u1/payload.json").read_bytes() == kept
    commit.take_back("u1", undo, root)
    assert (root.path / "etc/file").read_bytes() == b"before"


def test_a_record_that_was_never_completed_is_made_anew(root: Root, payloads: Shelf, undo: Shelf) -> None:
    (root.path / "etc/file").write_bytes(b"before")
    (undo.folder / "u1/content").mkdir(parents=True)
    (undo.folder / "u1/content" / ("0" * 64)).write_bytes(b"half")
    load = save(payloads, FIRST)
    commit.remember(load, undo, root, everywhere)
    commit.apply(load, payloads, root)
    commit.take_back("u1", undo, root)
    assert (root.path / "etc/file").read_bytes() == b"before"


def test_only_what_all_deployments_share_is_remembered_for_a_reboot(root: Root, payloads: Shelf, undo: Shelf) -> None:
    """The old deployment keeps its own /etc, and its passwords: somebody may change one before the way back."""
    load = save(payloads, FIRST, (("core", "$6$new"),))
    commit.remember(load, undo, root, root.shared)
    record = undo.load("u1")
    assert record is not None
    files_of_it = {"/var/lib/x", "/usr/local/bin/x", "/home/core/x"}
    assert set(record.nodes()) == {*files_of_it, "/var/lib", "/usr/local/bin"}, "and the directories they come with"
    assert record.passwords == ()
    users.set_password_hash(root, "core", "$6$changed-meanwhile")
    commit.take_back("u1", undo, root)
    assert users.password_hash(root, "core") == "$6$changed-meanwhile"


def test_directories_that_came_with_a_file_go_with_it_and_others_stay(root: Root, payloads: Shelf, undo: Shelf) -> None:
    (root.path / "etc/was-there").mkdir()
    before = tree(root)
    load = save(
        payloads, {path: Entry.file(b"x", 0o644, 0, 0) for path in ("/etc/a/b/x", "/etc/was-there/x", "/var/v/x")}
    )
    commit.remember(load, undo, root, everywhere)
    commit.apply(load, payloads, root)
    commit.take_back("u1", undo, root)
    assert tree(root) == before


def test_nothing_remembered_is_nothing_to_take_back(root: Root, undo: Shelf) -> None:
    before = tree(root)
    commit.take_back("u1", undo, root)
    assert tree(root) == before


def test_taking_back_twice_is_taking_back_once(root: Root, payloads: Shelf, undo: Shelf) -> None:
    before = tree(root)
    load = save(payloads, FIRST)
    commit.remember(load, undo, root, everywhere)
    commit.apply(load, payloads, root)
    for _ in range(2):
        commit.take_back("u1", undo, root, drop=False)
    assert {path: node for path, node in tree(root).items() if path in before} == before
    assert undo.load("u1") is not None


def test_half_a_commit_is_taken_back_too(root: Root, payloads: Shelf, undo: Shelf) -> None:
    before = tree(root)
    load = save(payloads, FIRST)
    commit.remember(load, undo, root, everywhere)
    for part in list(FIRST)[::2]:
        commit.apply(load, payloads, root, lambda path, part=part: path == part)  # type: ignore[misc]  # a default
    commit.take_back("u1", undo, root)
    assert {path: node for path, node in tree(root).items() if path in before} == before


# -- the way back is never blocked ------------------------------------------------------------------------------------


def test_a_home_that_a_user_moved_into_meanwhile_stays_and_does_not_block_the_way_back(
    root: Root, payloads: Shelf, undo: Shelf
) -> None:
    """The node of a failed update would otherwise never leave it: somebody logged in to look."""
    (root.var / "home/core").rmdir()
    new = config(users=[core("ssh-ed25519 A a")])
    load, items = payload.build("u1", new, None, root, root)
    payloads.save(load, items)
    commit.remember(load, undo, root, root.shared)
    commit.apply(load, payloads, root)
    (root.var / "home/core/.bash_history").write_text("journalctl")
    (root.var / "home/core/.ssh/known_hosts").write_text("x")
    commit.take_back("u1", undo, root)
    found = {path for path in tree(root) if path.startswith("/var/home/core")}
    assert found == {"/var/home/core", "/var/home/core/.bash_history", "/var/home/core/.ssh",
                     "/var/home/core/.ssh/known_hosts"}  # fmt: skip


def test_a_home_that_nobody_used_goes_away_again(root: Root, payloads: Shelf, undo: Shelf) -> None:
    (root.var / "home/core").rmdir()
    load, items = payload.build("u1", config(users=[core("ssh-ed25519 A a")]), None, root, root)
    payloads.save(load, items)
    commit.remember(load, undo, root, root.shared)
    commit.apply(load, payloads, root)
    commit.take_back("u1", undo, root)
    assert not (root.var / "home/core").exists()


@pytest.mark.parametrize("make", [os.mkfifo, lambda place: os.mknod(place, 0o020600, os.makedev(1, 3))],
                         ids=["fifo", "device"])  # fmt: skip
def test_what_could_not_be_made_again_is_refused_before_anything_is_written(
    root: Root, payloads: Shelf, undo: Shelf, make: Callable[[Path], Any]
) -> None:
    make(root.path / "etc/file")
    before = tree(root)
    with pytest.raises(Broken, match="cannot replace /etc/file: a special file stands there"):
        commit.remember(save(payloads, FIRST), undo, root, everywhere)
    assert undo.load("u1") is None and tree(root) == before


def test_a_record_that_is_torn_is_refused_and_nothing_is_guessed(root: Root, payloads: Shelf, undo: Shelf) -> None:
    load = save(payloads, FIRST)
    commit.remember(load, undo, root, everywhere)
    commit.apply(load, payloads, root)
    before = tree(root)
    path = undo.folder / "u1/payload.json"
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(Failure, match="cannot use the payload"):
        commit.take_back("u1", undo, root)
    assert tree(root) == before


def test_empty_directories_of_an_earlier_config_do_not_stand_in_the_way_and_others_do(
    root: Root, payloads: Shelf
) -> None:
    (root.path / "etc/file/was/deep").mkdir(parents=True)
    (root.path / "etc/link/was/deep").mkdir(parents=True)
    (root.path / "etc/link/was/mine").touch()
    load = save(payloads, FIRST)
    with pytest.raises(Broken, match="cannot write /etc/link: a directory with something in it") as caught:
        commit.apply(load, payloads, root)
    assert caught.value.code == "directory-in-place"
    assert (root.path / "etc/file").is_file() and (root.path / "etc/link/was/mine").exists()


def test_what_a_killed_change_of_a_password_left_in_etc_goes_with_the_next_try(root: Root, payloads: Shelf) -> None:
    """Also where no managed file stands beside the shadow file."""
    load = save(payloads, {"/usr/local/bin/x": Entry.file(b"x")}, passwords=(("core", "$6$new"),))
    left = root.path / "etc/.mcdaemon-0123456789abcdef"
    left.write_text("core:$6$torn")
    commit.apply(load, payloads, root)
    assert not left.exists() and users.has_password_hash(root, "core", "$6$new")


def test_what_a_killed_transaction_left_of_its_repository_is_found_and_goes(root: Root) -> None:
    """Killed while the file was written there is only a temporary, with whatever a repository may need to log in."""
    folder = root.path / "etc/yum.repos.d"
    folder.mkdir()
    (folder / ".mcdaemon-0123456789abcdef").write_text("[coreos-extensions]\n")
    (folder / "redhat.repo").write_text("[redhat]\n")
    assert packages.leftovers(root) == (packages.REPOSITORY,)
    packages.remove(root)
    assert packages.leftovers(root) == () and [path.name for path in folder.iterdir()] == ["redhat.repo"]
