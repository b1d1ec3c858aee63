"""Users of a root come from that root's own files; keys and hashes get where only their user can touch them."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from mcdaemon.errors import Broken, Transient
from mcdaemon.host.files import Entry, Kind, put_all, read_node
from mcdaemon.host.root import Root
from mcdaemon.host.users import (
    NO_PASSWORD,
    Account,
    authorized_keys_nodes,
    has_password_hash,
    lookup_group,
    lookup_user,
    set_password_hash,
)

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: files get owners")

HASH = "$6$salt$canary.hash/of.a.password"


@pytest.fixture
def root(tmp_path: Path) -> Root:
    etc, lib = tmp_path / "etc", tmp_path / "usr/lib"
    for directory in (etc, lib, tmp_path / "var/home/core", tmp_path / "var/roothome"):
        directory.mkdir(parents=True)
    (tmp_path / "home").symlink_to("var/home")
    os.chown(tmp_path / "var/home/core", 1000, 1000)
    (etc / "passwd").write_text("root:x:0:0:root:/root:/bin/bash\ncore:x:1000:1001:CoreOS:/home/core:/bin/bash\n")
    (lib / "passwd").write_text("root:x:9:9::/:/bin/sh\nchrony:x:993:990::/var/lib/chrony:/sbin/nologin\n")
    (etc / "group").write_text("root:x:0:\ncore:x:1001:\n\nbroken line\nodd:x:notanumber:\n")
    (lib / "group").write_text("chrony:x:990:\nodd:x:44:\n")
    (etc / "shadow").write_text("root:*:18000:0:99999:7:::\ncore:!!:18001:1:90:7:30::\nlast:x:1:0:99999:7:::\n")
    (etc / "shadow").chmod(0o640)
    os.chown(etc / "shadow", 0, 42)
    return Root(tmp_path, tmp_path / "var")


# -- names


def test_users_and_groups_are_found_in_both_files_and_etc_wins(root: Root) -> None:
    assert lookup_user(root, "core") == Account(1000, 1001, "/home/core")
    assert lookup_user(root, "chrony") == (993, 990, "/var/lib/chrony")
    assert lookup_user(root, "root").uid == 0
    assert lookup_group(root, "chrony") == 990
    assert lookup_group(root, "odd") == 44


@pytest.mark.parametrize("name", ["nobody-here", "", "core:x", "1000", "cor"])
def test_a_user_of_the_running_system_or_of_nowhere_is_refused_by_name(root: Root, name: str) -> None:
    with pytest.raises(Broken, match=re.escape(f"cannot find the user {name!r}")) as caught:
        lookup_user(root, name)
    assert caught.value.code == "no-such-user"
    with pytest.raises(Broken, match=re.escape(f"cannot find the group {name!r}")) as caught:
        lookup_group(root, name)
    assert caught.value.code == "no-such-group"


def test_a_user_that_only_the_running_system_has_is_not_found(root: Root) -> None:
    with pytest.raises(Broken):
        lookup_user(root, "daemon")


def test_a_root_without_user_files_has_no_users(tmp_path: Path) -> None:
    with pytest.raises(Broken, match="cannot find the user 'core'"):
        lookup_user(Root(tmp_path, tmp_path), "core")


# -- keys


def test_keys_get_the_files_and_owners_that_sshd_wants(root: Root) -> None:
    nodes = authorized_keys_nodes(root, "core", ["ssh-ed25519 AAAA one", " ssh-rsa BBBB two \n"])
    assert nodes == {
        "/home/core/.ssh": Entry.directory(0o700, 1000, 1001),
        "/home/core/.ssh/authorized_keys.d": Entry.directory(0o700, 1000, 1001),
        "/home/core/.ssh/authorized_keys.d/ignition": Entry.file(
            b"ssh-ed25519 AAAA one\nssh-rsa BBBB two\n", 0o600, 1000, 1001
        ),
    }
    put_all(root, nodes)
    for path, entry in nodes.items():
        assert read_node(root, path) == entry.node


def test_no_keys_make_an_empty_file(root: Root) -> None:
    assert authorized_keys_nodes(root, "core", [])["/home/core/.ssh/authorized_keys.d/ignition"].content == b""


def test_a_home_that_is_missing_becomes_the_users_own(root: Root) -> None:
    """Field case USER-03."""
    os.rmdir(root.path / "var/home/core")
    put_all(root, authorized_keys_nodes(root, "core", ["key"]))
    assert read_node(root, "/home/core") == Entry.directory(0o700, 1000, 1001).node


@pytest.mark.parametrize("owner", [0, 4321])
def test_an_ssh_directory_of_somebody_else_is_taken_over_with_what_is_in_it(root: Root, owner: int) -> None:
    """Field case USER-03; the MCD deletes it."""
    ssh = root.path / "var/home/core/.ssh"
    ssh.mkdir(mode=0o755)
    (ssh / "authorized_keys").write_text("mine")
    os.chown(ssh, owner, owner)
    put_all(root, authorized_keys_nodes(root, "core", ["key"]))
    assert read_node(root, "/home/core/.ssh") == Entry.directory(0o700, 1000, 1001).node
    assert (ssh / "authorized_keys").read_text() == "mine"


def test_an_ssh_directory_that_is_a_link_of_the_user_is_refused(root: Root) -> None:
    os.symlink("/etc", root.path / "var/home/core/.ssh")
    os.lchown(root.path / "var/home/core/.ssh", 1000, 1000)
    with pytest.raises(Broken, match="cannot make the directory /home/core/.ssh"):
        put_all(root, authorized_keys_nodes(root, "core", ["key"]))
    assert not (root.path / "etc/authorized_keys.d").exists()


@pytest.mark.parametrize("key", ["one\ntwo", "a\0b"])
def test_a_key_that_is_more_than_one_line_is_refused_without_showing_it(root: Root, key: str) -> None:
    with pytest.raises(Broken, match="cannot use ssh key 1 of 'core': it is not one line") as caught:
        authorized_keys_nodes(root, "core", ["good", key])
    assert "two" not in str(caught.value)


def test_keys_of_an_unknown_user_are_refused_with_a_code(root: Root) -> None:
    """Field case USER-04: whoever calls decides whether that matters."""
    with pytest.raises(Broken) as caught:
        authorized_keys_nodes(root, "gone", ["key"])
    assert caught.value.code == "no-such-user"


# -- hashes


def test_a_hash_replaces_the_old_one_and_nothing_else(root: Root) -> None:
    assert set_password_hash(root, "core", HASH, today=20000)
    assert (root.path / "etc/shadow").read_text() == (
        f"root:*:18000:0:99999:7:::\ncore:{HASH}:20000:1:90:7:30::\nlast:x:1:0:99999:7:::\n"
    )
    assert read_node(root, "/etc/shadow").mode == 0o640
    assert read_node(root, "/etc/shadow").gid == 42
    assert has_password_hash(root, "core", HASH)


def test_a_user_of_the_image_without_a_line_gets_one(root: Root) -> None:
    assert set_password_hash(root, "chrony", HASH, today=20000)
    assert (root.path / "etc/shadow").read_text().endswith(f"\nchrony:{HASH}:20000:0:99999:7:::\n")


def test_a_root_without_a_shadow_file_gets_one_that_nobody_can_read(root: Root) -> None:
    (root.path / "etc/shadow").unlink()
    assert set_password_hash(root, "core", HASH)
    assert stat.S_IMODE((root.path / "etc/shadow").stat().st_mode) == 0


def test_the_same_hash_again_writes_nothing(root: Root) -> None:
    """Field case USER-05."""
    assert set_password_hash(root, "core", HASH)
    before = (root.path / "etc/shadow").stat()
    assert not set_password_hash(root, "core", HASH, today=30000)
    after = (root.path / "etc/shadow").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def test_no_hash_locks_the_password_and_never_empties_it(root: Root) -> None:
    assert set_password_hash(root, "core", None)
    assert f"\ncore:{NO_PASSWORD}:" in (root.path / "etc/shadow").read_text()
    assert has_password_hash(root, "core", None)


@pytest.mark.parametrize("text", ["", "a:b", "a\nroot::", "a\0", "pässword"])
def test_what_is_no_hash_is_refused_and_not_shown(root: Root, text: str) -> None:
    before = (root.path / "etc/shadow").read_bytes()
    with pytest.raises(
        Broken, match="cannot set the password of 'core': what is given is not a password hash"
    ) as caught:
        set_password_hash(root, "core", text)
    assert not text or text not in str(caught.value)
    assert (root.path / "etc/shadow").read_bytes() == before


def test_an_unknown_user_gets_no_line(root: Root) -> None:
    before = (root.path / "etc/shadow").read_bytes()
    with pytest.raises(Broken, match="cannot find the user 'gone'") as caught:
        set_password_hash(root, "gone", HASH)
    assert HASH not in str(caught.value)
    assert (root.path / "etc/shadow").read_bytes() == before


def test_while_another_program_changes_passwords_it_is_to_be_tried_again(root: Root) -> None:
    code = (
        "import fcntl, sys\n"
        "lock = open(sys.argv[1], 'w')\n"
        "fcntl.lockf(lock, fcntl.LOCK_EX)\n"
        "print('locked', flush=True)\n"
        "sys.stdin.read()\n"
    )
    lock = root.path / "etc/.pwd.lock"
    command = [sys.executable, "-c", code, str(lock)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        with pytest.raises(Transient, match="another program holds /etc/.pwd.lock"):
            set_password_hash(root, "core", HASH)
        process.kill()
    assert set_password_hash(root, "core", HASH)


@pytest.mark.parametrize("line", ["core", "core:", "core::", "core:x:1"])
def test_a_torn_line_is_made_whole(root: Root, line: str) -> None:
    (root.path / "etc/shadow").write_text(f"root:*:1::::::\n{line}\n")
    set_password_hash(root, "core", HASH, today=7)
    (fields,) = [
        text.split(":") for text in (root.path / "etc/shadow").read_text().splitlines() if text.startswith("c")
    ]
    assert fields[:3] == ["core", HASH, "7"]
    assert len(fields) == 9


def test_a_shadow_file_that_is_a_link_is_not_written_through(root: Root) -> None:
    os.rename(root.path / "etc/shadow", root.path / "etc/elsewhere")
    (root.path / "etc/shadow").symlink_to("elsewhere")
    with pytest.raises(Broken, match="cannot read /etc/shadow"):
        set_password_hash(root, "core", HASH)
    assert read_node(root, "/etc/shadow").kind is Kind.LINK
