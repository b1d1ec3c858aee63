"""Writes to managed places: old or new, never both, never through somebody else's link."""

from __future__ import annotations

import ctypes
import os
import re
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Callable

import pytest

from mcdaemon.errors import Broken, Failure, Held
from mcdaemon.host import selinux
from mcdaemon.host.files import (
    Entry,
    Kind,
    Node,
    check_place,
    list_directory,
    make_directory,
    put,
    put_all,
    read_file,
    read_node,
    read_nodes,
    remove,
    remove_temporaries,
    sync_tree,
    write_atomic,
    write_file,
    write_link,
)
from mcdaemon.host.root import Root

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: files get owners")

USER = 1234


@pytest.fixture
def root(tmp_path: Path) -> Root:
    (tmp_path / "etc").mkdir()
    (tmp_path / "var/home/core").mkdir(parents=True)
    (tmp_path / "home").symlink_to("var/home")
    os.chown(tmp_path / "var/home/core", USER, USER)
    return Root(tmp_path, tmp_path / "var")


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Root]:
    """A root on a file system of its own, of 256 KiB."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "mcdaemon-test", tmp_path], check=True, timeout=10)
    try:
        (tmp_path / "etc").mkdir()
        (tmp_path / "var").mkdir()
        yield Root(tmp_path, tmp_path / "var")
    finally:
        subprocess.run(["umount", "-l", tmp_path], check=True, timeout=10)


def leftovers(root: Root) -> list[str]:
    return [path.name for path in root.path.rglob(".mcdaemon-*")]


def write(root: Root, path: str, content: bytes = b"new") -> None:
    write_file(root, path, content, 0o644, 0, 0)


# -- what is written


@pytest.mark.parametrize("mode", [0o644, 0o600, 0o000, 0o4755, 0o2755, 0o1777, 0o7777])
def test_a_file_gets_content_mode_and_owner_whatever_the_umask(root: Root, mode: int) -> None:
    """Field cases FILE-19 and FILE-36."""
    before = os.umask(0o077)
    try:
        write_file(root, "/etc/new/deep/x", b"content", mode, USER, 7)
    finally:
        os.umask(before)
    node = read_node(root, "/etc/new/deep/x")
    assert node == Entry.file(b"content", mode, USER, 7).node
    for parent in ("/etc/new", "/etc/new/deep"):
        assert read_node(root, parent) == Node(Kind.DIRECTORY, 0o755)


def test_a_parent_made_in_a_setgid_directory_is_still_roots(root: Root) -> None:
    os.chown(root.path / "etc", 0, 7)
    (root.path / "etc").chmod(0o2755)
    write(root, "/etc/d/x")
    assert read_node(root, "/etc/d") == Node(Kind.DIRECTORY, 0o755)
    assert read_node(root, "/etc/d/x").gid == 0


def test_an_empty_and_a_large_file_are_written_whole(root: Root) -> None:
    for content in (b"", os.urandom(3 * 1024 * 1024)):
        write(root, "/etc/x", content)
        assert read_file(root, "/etc/x") == content


def test_a_link_is_what_it_says(root: Root) -> None:
    write_link(root, "/etc/a/link", "../b")
    assert read_node(root, "/etc/a/link") == Node(Kind.LINK, target="../b")
    write_link(root, "/etc/a/link", "/elsewhere")
    assert os.readlink(root.path / "etc/a/link") == "/elsewhere"


def test_a_directory_that_is_there_gets_mode_and_owner_and_keeps_its_files(root: Root) -> None:
    write(root, "/etc/d/x")
    make_directory(root, "/etc/d", 0o700, USER, USER)
    assert read_node(root, "/etc/d") == Node(Kind.DIRECTORY, 0o700, USER, USER)
    assert read_file(root, "/etc/d/x") == b"new"


def test_a_path_below_var_is_written_to_the_shared_var(tmp_path: Path) -> None:
    deployment, var = tmp_path / "deployment", tmp_path / "var"
    for directory in (deployment / "var", deployment / "usr", var):
        directory.mkdir(parents=True)
    (deployment / "usr/local").symlink_to("../var/usrlocal")
    root = Root(deployment, var)
    put_all(root, {"/usr/local/bin/x": Entry.file(b"x", 0o755), "/var/lib/y": Entry.file(b"y")})
    assert (var / "usrlocal/bin/x").read_bytes() == b"x"
    assert (var / "lib/y").read_bytes() == b"y"
    assert list((deployment / "var").iterdir()) == []


# -- what stands there already


@pytest.mark.parametrize("kind", ["file", "link", "dangling link", "fifo", "socket", "device", "empty directory"])
def test_what_stands_in_the_place_is_replaced_and_not_followed(root: Root, kind: str) -> None:
    victim, place = root.path / "etc/victim", root.path / "etc/x"
    victim.write_bytes(b"victim")
    server = socket.socket(socket.AF_UNIX)
    if kind == "file":
        place.write_bytes(b"old")
    elif kind == "link":
        place.symlink_to("victim")
    elif kind == "dangling link":
        place.symlink_to("nowhere")
    elif kind == "fifo":
        os.mkfifo(place)
    elif kind == "socket":
        server.bind(os.path.relpath(place))
    elif kind == "device":
        os.mknod(place, stat.S_IFCHR | 0o600, os.makedev(1, 3))
    else:
        place.mkdir()
    write(root, "/etc/x")
    server.close()
    assert read_node(root, "/etc/x") == Entry.file(b"new").node
    assert victim.read_bytes() == b"victim"
    assert not (root.path / "etc/nowhere").exists()


def test_the_other_names_of_a_hardlink_keep_the_old_content(root: Root) -> None:
    (root.path / "etc/x").write_bytes(b"old")
    os.link(root.path / "etc/x", root.path / "etc/other")
    write(root, "/etc/x")
    assert (root.path / "etc/other").read_bytes() == b"old"


@pytest.mark.parametrize("make", [write, lambda root, path: write_link(root, path, "t")], ids=["file", "link"])
def test_a_directory_with_something_in_it_is_left_alone_and_named(root: Root, make: object) -> None:
    (root.path / "etc/d").mkdir()
    (root.path / "etc/d/precious").write_bytes(b"x")
    assert callable(make)
    with pytest.raises(Broken, match="cannot write /etc/d: a directory with something in it stands there"):
        make(root, "/etc/d")
    assert (root.path / "etc/d/precious").read_bytes() == b"x"
    assert leftovers(root) == []


@pytest.mark.parametrize("kind", ["file", "link to a directory", "fifo"])
def test_a_directory_is_not_made_where_something_else_stands(root: Root, kind: str) -> None:
    place = root.path / "etc/d"
    if kind == "file":
        place.write_bytes(b"x")
    elif kind == "fifo":
        os.mkfifo(place)
    else:
        place.symlink_to("/etc")
    with pytest.raises(Broken, match="cannot make the directory /etc/d: something else stands there"):
        make_directory(root, "/etc/d", 0o755, 0, 0)


def test_a_parent_that_is_a_file_is_named_before_and_when_it_is_written(root: Root) -> None:
    """Field case FILE-15: the check finds it without a change; after the config goes back, all is well again."""
    (root.path / "var/home/core/test").write_bytes(b"mine")
    for attempt in (check_place, write):
        with pytest.raises(Broken, match="cannot reach /home/core/test/test: /var/home/core/test is not a directory"):
            attempt(root, "/home/core/test/test")
    remove(root, "/home/core/test/test")
    assert (root.path / "var/home/core/test").read_bytes() == b"mine"


def test_the_check_of_a_place_changes_nothing(root: Root) -> None:
    (root.path / "etc/full").mkdir()
    (root.path / "etc/full/x").write_bytes(b"x")
    (root.path / "etc/empty").mkdir()
    before = sorted(root.path.rglob("*"))
    for path in ("/etc/new/deep/x", "/etc/x", "/etc/empty", "/etc/full/x"):
        check_place(root, path)
    with pytest.raises(Broken, match="cannot write /etc/full: a directory"):
        check_place(root, "/etc/full")
    assert sorted(root.path.rglob("*")) == before


# -- who wants to lead us astray


@pytest.mark.parametrize("target", ["/etc", "../../../etc", "/"])
def test_a_link_that_a_user_placed_in_his_home_is_not_followed(root: Root, target: str) -> None:
    os.symlink(target, root.path / "var/home/core/.ssh")
    os.lchown(root.path / "var/home/core/.ssh", USER, USER)
    (root.path / "etc/shadow").write_bytes(b"secret")
    for attempt in (
        lambda path: write(root, path),
        lambda path: write_link(root, path, "t"),
        lambda path: make_directory(root, path, 0o777, USER, USER),
        lambda path: remove(root, path),
        lambda path: read_node(root, path),
        lambda path: read_file(root, path),
        lambda path: check_place(root, path),
    ):
        with pytest.raises(Broken, match="is a link that a user could have placed"):
            attempt("/home/core/.ssh/shadow")
    assert (root.path / "etc/shadow").read_bytes() == b"secret"


def test_a_users_link_in_the_last_place_is_replaced_and_its_target_stays(root: Root) -> None:
    (root.path / "etc/shadow").write_bytes(b"secret")
    os.symlink("/etc/shadow", root.path / "var/home/core/keys")
    os.lchown(root.path / "var/home/core/keys", USER, USER)
    write_file(root, "/home/core/keys", b"new", 0o600, USER, USER)
    assert read_node(root, "/home/core/keys") == Entry.file(b"new", 0o600, USER, USER).node
    assert (root.path / "etc/shadow").read_bytes() == b"secret"
    assert (root.path / "etc/shadow").stat().st_uid == 0


def test_a_user_who_swaps_directory_and_link_all_the_time_never_gets_a_file_elsewhere(root: Root) -> None:
    """The race that a check by path would lose."""
    home = root.path / "var/home/core"
    (home / "dir").mkdir()
    os.symlink("/etc", home / "other")
    os.lchown(home / "other", USER, USER)
    stop = threading.Event()
    attacker = threading.Thread(target=exchange, args=(home / "dir", home / "other", stop))
    attacker.start()
    written = refused = 0
    try:
        while (not written or not refused or written + refused < 500) and written + refused < 50_000:
            try:
                write_file(root, "/home/core/dir/x", b"x", 0o644, 0, 0, sync=False)
                written += 1
            except Broken:
                refused += 1
    finally:
        stop.set()
        attacker.join()
    assert written
    assert refused
    assert list((root.path / "etc").iterdir()) == []


def exchange(one: Path, other: Path, stop: threading.Event) -> None:
    """Swap two names as fast as the kernel can, renameat2(2) with RENAME_EXCHANGE."""
    libc = ctypes.CDLL(None, use_errno=True)
    while not stop.is_set():
        assert libc.renameat2(-100, os.fsencode(one), -100, os.fsencode(other), 2) == 0


# -- what can go wrong


def test_no_space_leaves_the_old_file_and_nothing_else(small: Root) -> None:
    write(small, "/etc/x", b"old")
    with pytest.raises(Held, match="cannot write /etc/x: No space left on device"):
        write(small, "/etc/x", b"n" * 1024 * 1024)
    assert read_file(small, "/etc/x") == b"old"
    assert leftovers(small) == []
    write(small, "/etc/x", b"smaller")
    assert read_file(small, "/etc/x") == b"smaller"


def test_no_space_for_a_parent_is_told_too(small: Root) -> None:
    subprocess.run(["mount", "-o", "remount,nr_inodes=6", small.path], check=True, timeout=10)
    with pytest.raises(Held, match="cannot reach /etc/a/b/c/d/x: No space left on device"):
        write(small, "/etc/a/b/c/d/x")
    assert leftovers(small) == []


def test_a_read_only_file_system_is_told(small: Root) -> None:
    write(small, "/etc/x", b"old")
    subprocess.run(["mount", "-o", "remount,ro", small.path], check=True, timeout=10)
    attempts: dict[str, Callable[[], None]] = {
        "write": lambda: write(small, "/etc/x"),
        "link": lambda: write_link(small, "/etc/x", "t"),
        "remove": lambda: remove(small, "/etc/x"),
    }
    for doing, attempt in attempts.items():
        with pytest.raises(Broken, match=f"cannot {doing} /etc/x: Read-only file system .*see the kernel log"):
            attempt()
    assert read_file(small, "/etc/x") == b"old"


@pytest.mark.parametrize("what", ["etc/x", "etc"])
def test_an_immutable_file_or_directory_is_told_with_the_way_to_see_it(root: Root, what: str) -> None:
    """Field case FILE-20."""
    write(root, "/etc/x", b"old")
    done = subprocess.run(["chattr", "+i", root.path / what], check=False, capture_output=True, timeout=10)
    if done.returncode != 0:
        pytest.skip("the file system of the tests has no immutable flag")
    try:
        with pytest.raises(Broken, match="cannot write /etc/x: Operation not permitted .*immutable; see lsattr"):
            write(root, "/etc/x")
        with pytest.raises(Broken, match="cannot remove /etc/x: Operation not permitted"):
            remove(root, "/etc/x")
        assert leftovers(root) == []
    finally:
        subprocess.run(["chattr", "-i", root.path / what], check=True, timeout=10)
    assert read_file(root, "/etc/x") == b"old"


def test_a_mount_point_in_the_place_of_a_file_does_not_lose_it(root: Root) -> None:
    write(root, "/etc/x", b"old")
    write(root, "/etc/over", b"mounted")
    subprocess.run(["mount", "--bind", root.path / "etc/over", root.path / "etc/x"], check=True, timeout=10)
    try:
        with pytest.raises(Failure, match="cannot write /etc/x: Device or resource busy"):
            write(root, "/etc/x")
        assert leftovers(root) == []
    finally:
        subprocess.run(["umount", root.path / "etc/x"], check=True, timeout=10)


def test_a_name_that_is_too_long_is_told(root: Root) -> None:
    with pytest.raises(Broken, match="File name too long"):
        write(root, "/etc/" + "n" * 300)
    with pytest.raises(Broken, match="File name too long"):
        write(root, "/etc/" + "n" * 300 + "/x")


def test_content_is_in_no_error_and_no_repr(root: Root) -> None:
    """Field case FILE-25."""
    (root.path / "etc/d").mkdir()
    (root.path / "etc/d/x").write_bytes(b"x")
    with pytest.raises(Broken) as caught:
        put(root, "/etc/d", Entry.file(b"canary"))
    assert "canary" not in str(caught.value) + repr(Entry.file(b"canary"))


def test_a_process_killed_in_the_middle_leaves_old_or_new_and_a_temporary_that_is_found(root: Root) -> None:
    write(root, "/etc/x", b"a" * 100_000)
    code = (
        "import sys; from pathlib import Path; from mcdaemon.host.root import Root; from mcdaemon.host.files import *\n"
        "root = Root(Path(sys.argv[1]), Path(sys.argv[1]) / 'var')\n"
        "print('ready', flush=True)\n"
        "while True:\n"
        "    for letter in (b'a', b'b'): write_file(root, '/etc/x', letter * 100_000, 0o644, 0, 0, sync=False)\n"
    )
    for number in range(6):
        command = [sys.executable, "-c", code, str(root.path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]) as process:
            assert process.stdout is not None
            process.stdout.readline()
            threading.Event().wait(0.01 * number)
            process.kill()
        content = read_file(root, "/etc/x") or b""
        assert len(content) == 100_000
        assert len(set(content)) == 1
    (root.path / "etc/.mcdaemon-0123456789abcdef").write_bytes(b"half")
    (root.path / "etc/.mcdaemon-mine").write_bytes(b"no temporary")
    removed = remove_temporaries(root, ["/etc", "/missing"])
    assert "/etc/.mcdaemon-0123456789abcdef" in removed
    assert leftovers(root) == [".mcdaemon-mine"]


# -- reading


@pytest.mark.parametrize("kind", ["missing", "parent missing", "parent is a file"])
def test_what_is_not_there_is_absent(root: Root, kind: str) -> None:
    (root.path / "etc/file").write_bytes(b"x")
    path = {"missing": "/etc/x", "parent missing": "/etc/a/x", "parent is a file": "/etc/file/x"}[kind]
    assert read_node(root, path) == Node(Kind.ABSENT)
    assert read_file(root, path) is None
    remove(root, path)


def test_a_fifo_does_not_hang_a_reader(root: Root) -> None:
    os.mkfifo(root.path / "etc/x")
    assert read_node(root, "/etc/x").kind is Kind.OTHER
    with pytest.raises(Broken, match="cannot read /etc/x: it is not a regular file"):
        read_file(root, "/etc/x")


def test_a_link_is_not_read_through(root: Root) -> None:
    (root.path / "etc/x").symlink_to("/etc/shadow")
    with pytest.raises(Broken, match="cannot read /etc/x"):
        read_file(root, "/etc/x")


def test_a_file_larger_than_allowed_is_not_read(root: Root) -> None:
    write(root, "/etc/x", b"12345")
    assert read_file(root, "/etc/x", most=5) == b"12345"
    with pytest.raises(Broken, match="cannot read /etc/x: it is larger than 4 bytes"):
        read_file(root, "/etc/x", most=4)


def test_many_paths_are_read_and_one_that_cannot_be_does_not_stop_the_others(root: Root) -> None:
    os.symlink("/etc", root.path / "var/home/core/evil")
    os.lchown(root.path / "var/home/core/evil", USER, USER)
    write(root, "/etc/d/a", b"a")
    write(root, "/etc/d/b", b"b")
    found = dict(read_nodes(root, ["/etc/d/b", "/home/core/evil/x", "/etc/d/a", "relative", "/home", "/gone/x"]))
    assert found["/etc/d/a"] == Entry.file(b"a").node
    assert found["/etc/d/b"] == Entry.file(b"b").node
    assert found["/gone/x"] == Node(Kind.ABSENT)
    assert isinstance(found["/home/core/evil/x"], Broken)
    assert isinstance(found["relative"], Broken)
    home = found["/home"]
    assert isinstance(home, Node)
    assert home.kind is Kind.DIRECTORY


def test_a_directory_that_is_not_there_lists_as_empty(root: Root) -> None:
    """Field case FILE-24."""
    write(root, "/etc/d/b")
    write(root, "/etc/d/a")
    assert list_directory(root, "/etc/d") == ("a", "b")
    assert list_directory(root, "/etc/docker/certs.d") == ()
    assert list_directory(root, "/etc/d/a") == ()


# -- many at once


def test_a_path_can_turn_from_file_to_directory_and_back(root: Root) -> None:
    """Field cases FILE-13 and FILE-15: one config has /etc/x, the other /etc/x/y."""
    one = {"/etc/x": Entry.file(b"1"), "/etc/x/y": Entry.absent(), "/etc/x/z/w": Entry.absent()}
    other = {"/etc/x": Entry.absent(), "/etc/x/y": Entry.file(b"2"), "/etc/x/z": Entry.directory(0o700)}
    for _ in range(2):
        put_all(root, one)
        assert read_file(root, "/etc/x") == b"1"
        put_all(root, {**other, "/etc/x/q": Entry.link("t")})
        assert read_file(root, "/etc/x/y") == b"2"
        put_all(root, {"/etc/x/q": Entry.absent(), "/etc/x/y": Entry.absent(), "/etc/x/z": Entry.absent()})


def test_a_special_file_is_never_made(root: Root) -> None:
    with pytest.raises(Broken, match="cannot make /etc/x: a special file is never made"):
        put(root, "/etc/x", Entry(Node(Kind.OTHER)))


def test_a_directory_with_something_in_it_is_not_removed(root: Root) -> None:
    write(root, "/etc/d/x")
    with pytest.raises(Broken, match="cannot remove /etc/d: Directory not empty"):
        remove(root, "/etc/d")
    remove(root, "/etc/d/x")
    remove(root, "/etc/d")
    remove(root, "/etc/d")
    assert read_node(root, "/etc/d").kind is Kind.ABSENT


def test_a_commit_of_a_thousand_files_is_synced_twice(root: Root) -> None:
    code = (
        "import sys; from pathlib import Path; from mcdaemon.host.root import Root; from mcdaemon.host.files import *\n"
        "root = Root(Path(sys.argv[1]), Path(sys.argv[1]) / 'var')\n"
        "put_all(root, {f'/etc/d{n % 10}/f{n}': Entry.file(b'x' * 4096) for n in range(1000)})\n"
    )
    log = root.path / "strace"
    command = ["strace", "-f", "-o", str(log), "-e", "trace=fsync,fdatasync,sync,syncfs", sys.executable, "-c", code]
    subprocess.run([*command, str(root.path)], check=True, timeout=50, cwd=Path(__file__).parents[2])
    calls = re.findall(r"(fsync|fdatasync|sync|syncfs)\(", log.read_text())
    assert calls == ["syncfs", "syncfs"], "before the renames, and after them"
    assert len(list((root.path / "etc").rglob("f*"))) == 1000


def test_no_file_of_a_commit_gets_its_name_before_all_content_is_on_the_disk(root: Root) -> None:
    """Or a power cut leaves an empty file under the name (delayed allocation)."""
    code = (
        "import sys; from pathlib import Path; from mcdaemon.host.root import Root; from mcdaemon.host.files import *\n"
        "root = Root(Path(sys.argv[1]), Path(sys.argv[1]) / 'var')\n"
        "put_all(root, {'/etc/a': Entry.file(b'a'), '/etc/b': Entry.file(b'b'), '/etc/l': Entry.link('a')})\n"
        "put_all(root, {'/etc/l': Entry.link('b'), '/etc/a': Entry.absent()})\n"
    )
    log = root.path / "strace"
    command = ["strace", "-o", str(log), "-e", "trace=write,syncfs,rename,renameat,renameat2", sys.executable]
    subprocess.run([*command, "-c", code, str(root.path)], check=True, timeout=50, cwd=Path(__file__).parents[2])
    calls = re.findall(r"^(write|syncfs|rename)", log.read_text(), re.MULTILINE)
    assert calls == ["write"] * 2 + ["syncfs"] + ["rename"] * 3 + ["syncfs"] + ["rename", "syncfs"]


def test_a_commit_that_fails_leaves_the_old_files_and_no_temporaries(root: Root) -> None:
    """What cannot be written is found before the first rename."""
    write_file(root, "/etc/a", b"old", 0o644, 0, 0)
    write_file(root, "/etc/b", b"a file where a directory is wanted", 0o644, 0, 0)
    with pytest.raises(Broken, match="/etc/b"):
        put_all(root, {"/etc/a": Entry.file(b"new"), "/etc/b/c": Entry.file(b"new")})
    assert read_file(root, "/etc/a") == b"old"
    assert [path.name for path in (root.path / "etc").iterdir() if path.name.startswith(".mcdaemon")] == []


def test_a_single_write_syncs_the_file_before_the_rename_and_the_directory_after_it(root: Root) -> None:
    code = (
        "import sys; from pathlib import Path; from mcdaemon.host.root import Root; from mcdaemon.host.files import *\n"
        "root = Root(Path(sys.argv[1]), Path(sys.argv[1]) / 'var')\n"
        "write_file(root, '/etc/x', b'x', 0o644, 0, 0)\n"
        "write_atomic(Path(sys.argv[1]) / 'state', b'x')\n"
    )
    log = root.path / "strace"
    command = ["strace", "-o", str(log), "-e", "trace=fsync,rename,renameat,renameat2", sys.executable, "-c", code]
    subprocess.run([*command, str(root.path)], check=True, timeout=50, cwd=Path(__file__).parents[2])
    calls = re.findall(r"^(fsync|rename)", log.read_text(), re.MULTILINE)
    assert calls == ["fsync", "rename", "fsync"] * 2


def test_syncing_a_root_that_lacks_a_directory_is_no_error(root: Root) -> None:
    (root.path / "etc").rmdir()
    sync_tree(root, ["/etc/gone/x", "/var/home/core/x"])


# -- state files


def test_a_state_file_is_private_and_replaced_at_once(tmp_path: Path) -> None:
    write_atomic(tmp_path / "journal", b"1")
    write_atomic(tmp_path / "journal", b"2")
    assert (tmp_path / "journal").read_bytes() == b"2"
    assert stat.S_IMODE((tmp_path / "journal").stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [tmp_path / "journal"]


def test_a_state_file_that_cannot_be_written_leaves_the_old_one(small: Root) -> None:
    state = small.path / "journal"
    write_atomic(state, b"old")
    with pytest.raises(Held, match="cannot write .*/journal: No space left"):
        write_atomic(state, b"n" * 1024 * 1024)
    with pytest.raises(Broken, match="cannot write .*/missing/journal: No such file"):
        write_atomic(small.path / "missing/journal", b"x")
    assert state.read_bytes() == b"old"
    assert leftovers(small) == []


# -- labels


CONTEXTS = """\
/.*                           system_u:object_r:default_t:s0
/etc(/.*)?                    system_u:object_r:etc_t:s0
/etc/systemd/system(/.*)?     system_u:object_r:systemd_unit_file_t:s0
/etc/only-links          -l   system_u:object_r:link_t:s0
/usr/local/bin(/.*)?          system_u:object_r:bin_t:s0
/etc/unlabelled          --   <<none>>
"""


def give_policy(
    root: Root, contexts: str = CONTEXTS, config: str = "SELINUX=enforcing\nSELINUXTYPE=targeted\n"
) -> None:
    files = root.path / "etc/selinux/targeted/contexts/files"
    files.mkdir(parents=True, exist_ok=True)
    (root.path / "etc/selinux/config").write_text(config)
    (files / "file_contexts").write_text(contexts)
    (files / "file_contexts.subs_dist").write_text("/var/usrlocal /usr/local\n")


def label(path: Path) -> str:
    return os.getxattr(path, selinux.ATTRIBUTE, follow_symlinks=False).decode().rstrip("\0").split(":")[2]


def test_what_is_made_has_the_label_of_the_roots_own_policy(root: Root) -> None:
    """Field case FILE-05."""
    (root.path / "usr").mkdir()
    (root.path / "usr/local").symlink_to("../var/usrlocal")
    give_policy(root)
    write(root, "/etc/systemd/system/a.service")
    write_link(root, "/etc/only-links", "t")
    write_link(root, "/etc/x", "t")
    make_directory(root, "/etc/systemd/system/a.service.d", 0o755, 0, 0)
    write_file(root, "/usr/local/bin/tool", b"x", 0o755, 0, 0)
    etc = root.path / "etc"
    assert label(etc / "systemd") == "etc_t"
    assert label(etc / "systemd/system") == "systemd_unit_file_t"
    assert label(etc / "systemd/system/a.service") == "systemd_unit_file_t"
    assert label(etc / "systemd/system/a.service.d") == "systemd_unit_file_t"
    assert label(etc / "only-links") == "link_t"
    assert label(etc / "x") == "etc_t"
    assert label(root.var / "usrlocal/bin/tool") == "bin_t"


def test_two_roots_with_two_policies_label_each_its_own_way(root: Root, tmp_path: Path) -> None:
    other = Root(tmp_path / "other", tmp_path / "other/var")
    (tmp_path / "other/var").mkdir(parents=True)
    give_policy(root)
    give_policy(other, CONTEXTS.replace("etc_t", "newer_etc_t"))
    for each in (root, other, root):
        write(each, "/etc/x")
    assert label(root.path / "etc/x") == "etc_t"
    assert label(other.path / "etc/x") == "newer_etc_t"


def test_a_policy_that_is_replaced_is_read_again(root: Root) -> None:
    give_policy(root)
    write(root, "/etc/x")
    contexts = root.path / "etc/selinux/targeted/contexts/files/file_contexts"
    contexts.unlink()
    give_policy(root, CONTEXTS.replace("etc_t", "newer_etc_t"))
    write(root, "/etc/x")
    assert label(root.path / "etc/x") == "newer_etc_t"
    selinux.forget_policies()
    write(root, "/etc/y")
    assert label(root.path / "etc/y") == "newer_etc_t"


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (None, "the root has no /etc/selinux/config"),
        ("SELINUX=disabled\n", "SELINUX=disabled in the root's /etc/selinux/config"),
        ("# SELINUX=x\nSELINUX=permissive\nSELINUXTYPE=mls\n", "the root has no file contexts for its policy 'mls'"),
    ],
)
def test_without_a_policy_nothing_is_labelled_and_it_says_why(root: Root, config: str, why: str) -> None:
    if config is not None:
        give_policy(root, config=config)
    assert selinux.policy_of(root).off == why
    write(root, "/etc/x")
    assert selinux.ATTRIBUTE not in os.listxattr(root.path / "etc/x")


def test_a_path_that_the_policy_leaves_alone_is_left_alone(root: Root) -> None:
    give_policy(root)
    write(root, "/etc/unlabelled")
    assert selinux.ATTRIBUTE not in os.listxattr(root.path / "etc/unlabelled")


def test_a_policy_that_cannot_be_read_stops_the_write_and_leaves_the_old_file(root: Root) -> None:
    write(root, "/etc/x", b"old")
    give_policy(root, "/etc/x( system_u:object_r:etc_t:s0\n/etc/y\n")
    with pytest.raises(Broken, match="SELinux"):
        write(root, "/etc/x")
    assert read_file(root, "/etc/x") == b"old"
    assert leftovers(root) == []
