"""Payloads: what a config asks for on a root, laid out on the disk so that committing cannot go wrong any more."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import stat
from pathlib import Path
from typing import Any, Optional

import pytest

from mcdaemon.errors import Broken, Failure, Held
from mcdaemon.host import files
from mcdaemon.host.files import Entry, Kind, Node
from mcdaemon.host.root import Root
from mcdaemon.machineconfig.model import MachineConfig
from mcdaemon.update import payload
from mcdaemon.update.payload import AGENT_PATHS, CURRENT_CONFIG, CURRENT_IMAGE, Payload, Shelf
from tests.unit.configs import config, core, file

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: files get owners")

PASSWD = "root:x:0:0:root:/root:/bin/sh\ncore:x:1000:1000:core:/home/core:/bin/sh\napp:x:977:977::/:/bin/false\n"
SECRET = "canary-of-a-pull-secret"


def make_root(place: Path, var: Path, passwd: str = PASSWD) -> Root:
    """A deployment as RHCOS has it: links into /var, users in /etc."""
    for name in ("etc/systemd/system", "usr/etc", "usr/lib/systemd/system", "usr/bin"):
        (place / name).mkdir(parents=True)
    for name in ("usrlocal", "home/core", "roothome"):
        (var / name).mkdir(parents=True, exist_ok=True)
    os.chown(var / "home/core", 1000, 1000)
    (place / "home").symlink_to("var/home")
    (place / "usr/local").symlink_to("../var/usrlocal")
    (place / "etc/passwd").write_text(passwd)
    (place / "etc/group").write_text("root:x:0:\ncore:x:1000:\napp:x:977:\n")
    (place / "etc/shadow").write_text("root:*:1::::::\ncore:$6$by-hand:1::::::\n")
    return Root(place, var)


@pytest.fixture
def running(tmp_path: Path) -> Root:
    return make_root(tmp_path / "running", tmp_path / "var")


@pytest.fixture
def target(tmp_path: Path) -> Root:
    return make_root(tmp_path / "target", tmp_path / "var")


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path / "payload")


def build(
    new: MachineConfig, old: Optional[MachineConfig], target: Root, running: Root
) -> tuple[Payload, dict[str, Entry]]:
    return payload.build("u1", new, old, target, running)


def node_of(load: Payload, path: str) -> Node:
    return load.nodes()[path]


# -- what is in it ----------------------------------------------------------------------------------------------------


def test_files_are_in_it_with_mode_and_owner(running: Root, target: Root) -> None:
    new = config(files=[file("/etc/x", b"x", mode=0o640, user={"name": "app"}, group={"id": 7})])
    load, items = build(new, None, target, running)
    assert node_of(load, "/etc/x") == Node(Kind.FILE, 0o640, 977, 7, hashlib.sha256(b"x").hexdigest())
    assert items["/etc/x"].content == b"x"


def test_a_root_always_says_which_config_it_carries(running: Root, target: Root) -> None:
    new = config("rendered-1")
    load, items = build(new, None, target, running)
    assert json.loads(items[CURRENT_CONFIG].content)["metadata"]["name"] == "rendered-1"
    assert node_of(load, CURRENT_CONFIG).mode == 0o600, "it holds every secret of the config"
    assert node_of(load, CURRENT_IMAGE).kind is Kind.FILE
    assert load.config == new.identity


def test_an_owner_that_only_the_target_has_is_found_there(running: Root, tmp_path: Path) -> None:
    target = make_root(tmp_path / "other", tmp_path / "var", PASSWD + "layered:x:966:966::/:/bin/false\n")
    load, _ = build(config(files=[file("/etc/x", user={"name": "layered"})]), None, target, running)
    assert node_of(load, "/etc/x").uid == 966


def test_an_owner_with_another_number_in_the_target_has_the_running_one(running: Root, tmp_path: Path) -> None:
    """The merge carries the running /etc/passwd over."""
    target = make_root(tmp_path / "other", tmp_path / "var", PASSWD.replace("977", "11"))
    load, _ = build(config(files=[file("/etc/x", user={"name": "app"})]), None, target, running)
    assert node_of(load, "/etc/x").uid == 977


@pytest.mark.parametrize("who", ["user", "group"])
def test_an_owner_that_nobody_knows_is_named(running: Root, target: Root, who: str) -> None:
    with pytest.raises(Broken, match=f"cannot find the {who} 'nobody-knows'"):
        build(config(files=[{**file("/etc/x"), who: {"name": "nobody-knows"}}]), None, target, running)


# -- what the old config managed --------------------------------------------------------------------------------------

OLD = config("old", files=[file("/etc/dropped", b"old")])


def test_what_only_the_old_config_had_goes_away(running: Root, target: Root) -> None:
    load, _ = build(config("new"), OLD, target, running)
    assert node_of(load, "/etc/dropped") == Node(Kind.ABSENT)


def test_what_another_config_has_left_in_shared_places_goes_away_but_not_what_the_new_one_has(
    running: Root, target: Root
) -> None:
    new, left = config(files=[file("/usr/local/bin/both")]), ("/usr/local/bin/both", "/usr/local/bin/left")
    load, _items = payload.build("u1", new, None, target, running, left)
    assert node_of(load, "/usr/local/bin/left").kind is Kind.ABSENT
    assert node_of(load, "/usr/local/bin/both").kind is Kind.FILE


def test_what_only_the_old_config_had_becomes_what_the_new_image_ships(running: Root, target: Root) -> None:
    """Of the target's image: the running one's default is of the past."""
    (running.path / "usr/etc/dropped").write_bytes(b"default of the running image")
    (target.path / "usr/etc/dropped").write_bytes(b"default of the target")
    (target.path / "usr/etc/dropped").chmod(0o751)
    load, items = build(config("new"), OLD, target, running)
    assert items["/etc/dropped"].content == b"default of the target"
    assert node_of(load, "/etc/dropped").mode == 0o751


def test_a_default_that_is_a_link_is_a_link_again(running: Root, target: Root) -> None:
    (target.path / "usr/etc/dropped").symlink_to("../usr/share/x")
    load, _ = build(config("new"), OLD, target, running)
    assert node_of(load, "/etc/dropped") == Node(Kind.LINK, target="../usr/share/x")


def test_a_default_that_is_a_directory_is_left_to_the_image(running: Root, target: Root) -> None:
    (target.path / "usr/etc/dropped").mkdir()
    load, _ = build(config("new"), OLD, target, running)
    assert node_of(load, "/etc/dropped").kind is Kind.ABSENT


@pytest.mark.parametrize("path", ["/var/lib/x", "/usr/local/bin/x", "/home/core/x"])
def test_a_shared_place_has_no_default(running: Root, target: Root, path: str) -> None:
    load, _ = build(config("new"), config("old", files=[file(path)]), target, running)
    assert node_of(load, path).kind is Kind.ABSENT


def test_what_both_configs_manage_is_what_the_new_one_says(running: Root, target: Root) -> None:
    _, items = build(config("new", files=[file("/etc/dropped", b"new")]), OLD, target, running)
    assert items["/etc/dropped"].content == b"new"


def test_a_unit_that_goes_takes_its_dropins_and_links_along(running: Root, target: Root) -> None:
    unit = {"name": "x.service", "enabled": True, "contents": "[Service]\n[Install]\nWantedBy=multi-user.target\n",
            "dropins": [{"name": "10-x.conf", "contents": "[Service]\n"}]}  # fmt: skip
    load, _ = build(config("new"), config("old", units=[unit]), target, running)
    system = "/etc/systemd/system"
    for path in ("x.service", "x.service.d/10-x.conf", "multi-user.target.wants/x.service"):
        assert node_of(load, f"{system}/{path}").kind is Kind.ABSENT


# -- a file becomes a directory, and back -----------------------------------------------------------------------------


def test_fil_13_a_file_that_becomes_a_directory_is_not_expected_to_be_absent(running: Root, target: Root) -> None:
    load, _ = build(config("new", files=[file("/etc/a/b")]), config("old", files=[file("/etc/a")]), target, running)
    assert load.implied_directories() == {"/etc/a"}
    assert "/etc/a" not in load.expected() and "/etc/a/b" in load.expected()


@pytest.mark.parametrize(("old", "new"), [("/etc/a", "/etc/a/b"), ("/etc/a/b", "/etc/a")])
def test_a_default_of_the_image_does_not_stand_where_the_config_needs_the_place(
    running: Root, target: Root, old: str, new: str
) -> None:
    place = target.path / f"usr{old}"
    place.parent.mkdir(exist_ok=True)
    place.write_bytes(b"default")
    load, _ = build(config("new", files=[file(new)]), config("old", files=[file(old)]), target, running)
    assert node_of(load, old).kind is Kind.ABSENT
    assert node_of(load, new).kind is Kind.FILE


def test_a_sibling_with_the_same_beginning_is_no_directory_above(running: Root, target: Root) -> None:
    load, _ = build(config("new", files=[file("/etc/ab")]), config("old", files=[file("/etc/a")]), target, running)
    assert load.implied_directories() == frozenset()


# -- the agent itself -------------------------------------------------------------------------------------------------


def test_incident_4_the_agents_own_files_are_in_every_payload(running: Root, target: Root) -> None:
    system = running.path / "etc/systemd/system"
    (system / "mcdaemon.service").write_text("[Service]\n")
    (system / "multi-user.target.wants").mkdir()
    (system / "multi-user.target.wants/mcdaemon.service").symlink_to("/etc/systemd/system/mcdaemon.service")
    (system / "multi-user.target.wants/other.service").symlink_to("/etc/systemd/system/other.service")
    (running.path / "etc/mcdaemon/health.d").mkdir(parents=True)
    (running.path / "etc/mcdaemon/health.d/10-x").touch(0o755)
    load, _ = build(config(), None, target, running)
    found = load.nodes()
    assert found["/etc/systemd/system/mcdaemon.service"].kind is Kind.FILE
    assert found["/etc/systemd/system/multi-user.target.wants/mcdaemon.service"].kind is Kind.LINK
    assert found["/etc/mcdaemon"].kind is Kind.DIRECTORY
    assert found["/etc/mcdaemon/health.d/10-x"].mode == 0o755
    assert "/etc/systemd/system/multi-user.target.wants/other.service" not in found


def test_a_node_whose_agent_is_in_the_image_has_nothing_of_it_in_etc(running: Root, target: Root) -> None:
    load, _ = build(config(), None, target, running)
    assert not [path for path in load.nodes() if path.startswith(AGENT_PATHS)]


def test_settings_that_a_config_brings_win_over_those_that_are_there(running: Root, target: Root) -> None:
    (running.path / "etc/mcdaemon").mkdir()
    (running.path / "etc/mcdaemon/mcdaemon.yaml").write_text("there")
    _, items = build(config(files=[file("/etc/mcdaemon/mcdaemon.yaml", b"new")]), None, target, running)
    assert items["/etc/mcdaemon/mcdaemon.yaml"].content == b"new"


# -- passwords --------------------------------------------------------------------------------------------------------


def passwords(old: Optional[str], new: Optional[str], target: Root, running: Root) -> tuple[tuple[str, str], ...]:
    def user(secret: Optional[str]) -> MachineConfig:
        return config(users=[core("ssh-ed25519 A", **({"passwordHash": secret} if secret else {}))])

    return build(user(new), user(old), target, running)[0].passwords


def test_only_a_password_that_the_change_touches_is_set(running: Root, target: Root) -> None:
    assert passwords(None, "$6$new", target, running) == (("core", "$6$new"),)
    assert passwords("$6$old", "$6$new", target, running) == (("core", "$6$new"),)
    assert passwords("$6$same", "$6$same", target, running) == ()
    assert passwords(None, None, target, running) == (), "one set by hand is not ours"
    assert passwords("$6$old", None, target, running) == (("core", "*"),)


# -- secrets ----------------------------------------------------------------------------------------------------------

SECRETIVE = config(files=[file("/var/lib/kubelet/config.json", SECRET.encode())],
                   users=[core("ssh-ed25519 A", passwordHash=f"$6${SECRET}")])  # fmt: skip


def test_no_repr_shows_content_or_password_hashes(running: Root, target: Root) -> None:
    load, items = build(SECRETIVE, None, target, running)
    assert dict(load.passwords)
    for value in (load, items, load.entries, load.expected(), SECRETIVE):
        assert SECRET not in repr(value) and SECRET not in str(value)


def test_the_payload_can_be_read_by_root_only(running: Root, target: Root, shelf: Shelf) -> None:
    os.umask(0)
    try:
        shelf.save(*build(SECRETIVE, None, target, running))
    finally:
        os.umask(0o022)
    for place in (shelf.folder, shelf.folder / "u1", shelf.folder / "u1/content"):
        assert stat.S_IMODE(place.stat().st_mode) == 0o700, place
    for place in (shelf.folder / "u1").rglob("*"):
        assert place.is_dir() or stat.S_IMODE(place.stat().st_mode) == 0o600, place


def test_a_payload_directory_that_was_open_is_closed(running: Root, target: Root, shelf: Shelf) -> None:
    (shelf.folder / "u1").mkdir(parents=True)
    shelf.folder.chmod(0o755)
    (shelf.folder / "u1").chmod(0o777)
    shelf.save(*build(SECRETIVE, None, target, running))
    assert stat.S_IMODE((shelf.folder / "u1").stat().st_mode) == stat.S_IMODE(shelf.folder.stat().st_mode) == 0o700


def test_a_dropped_payload_leaves_no_secret(running: Root, target: Root, shelf: Shelf) -> None:
    shelf.save(*build(SECRETIVE, None, target, running))
    shelf.drop("u1")
    assert list(shelf.folder.iterdir()) == [] and shelf.load("u1") is None
    shelf.drop("u1")


# -- on the disk ------------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(running: Root, target: Root, shelf: Shelf) -> Payload:
    load, items = build(
        config(
            files=[file("/etc/x", b"x"), file("/etc/y", b"x")],
            units=[{"name": "x.service", "mask": True}],
            users=[core("ssh-ed25519 A", passwordHash="$6$x")],
        ),
        OLD,
        target,
        running,
    )
    # fmt: skip
    shelf.save(load, items)
    return load


def test_what_was_saved_is_loaded(shelf: Shelf, saved: Payload) -> None:
    loaded = shelf.load("u1")
    assert loaded == saved and loaded is not None and loaded.passwords == saved.passwords
    assert shelf.content("u1", node_of(saved, "/etc/x")) == b"x"
    assert shelf.identities() == ("u1",)


def test_a_payload_that_was_never_completed_is_none(
    running: Root, target: Root, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The list is written last: at any write before it there is no payload."""
    made = build(config(files=[file(f"/etc/{n}", bytes([n])) for n in range(5)]), None, target, running)
    real, left = files.write_atomic, [0]

    def write(path: Path, content: bytes, mode: int = 0o600) -> None:
        if left[0] == 0:
            raise OSError(28, "No space left on device")
        left[0] -= 1
        real(path, content, mode)

    monkeypatch.setattr(files, "write_atomic", write)
    for count in range(7):
        left[0] = count
        with pytest.raises((Failure, OSError)):
            shelf.save(*made)
        assert shelf.load("u1") is None


def test_a_payload_torn_at_any_byte_is_refused(shelf: Shelf, saved: Payload) -> None:
    path = shelf.folder / "u1/payload.json"
    content = path.read_bytes()
    for length in range(0, len(content), 13):
        path.write_bytes(content[:length])
        with pytest.raises(Broken, match="cannot use the payload"):
            shelf.load("u1")
    path.write_bytes(content)
    assert shelf.load("u1") == saved


def test_a_flipped_bit_is_refused_and_not_committed_and_validated_against_itself(shelf: Shelf, saved: Payload) -> None:
    path = shelf.folder / "u1/payload.json"
    content = path.read_bytes()
    for place in range(0, len(content), 11):
        flipped = bytearray(content)
        flipped[place] ^= 1
        path.write_bytes(flipped)
        with pytest.raises(Broken, match="torn or not ours"):
            shelf.load("u1")


@pytest.mark.parametrize("text", [
    b"", b"[]", b"{}", b'{"id": "u1"}', b"[" * 100_000, b'{"id": 1, "config": "", "entries": [[]], "passwords": []}',
    b'{"id": "u1", "config": "", "entries": [["/x", {"kind": "canary"}]], "passwords": []}',
    b'{"id": "u1", "config": "", "entries": [["/x", {"kind": "file", "canary": 1}]], "passwords": []}',
])  # fmt: skip
@pytest.mark.parametrize("signed", [False, True])
def test_what_is_no_payload_is_refused_without_showing_it(shelf: Shelf, text: bytes, signed: bool) -> None:
    (shelf.folder / "u1").mkdir(parents=True)
    checksum = hashlib.sha256(text).hexdigest().encode() + b"\n" if signed else b""
    (shelf.folder / "u1/payload.json").write_bytes(checksum + text)
    with pytest.raises(Broken, match=r"cannot use the payload .*u1/payload\.json") as caught:
        shelf.load("u1")
    assert "canary" not in str(caught.value)


@pytest.mark.parametrize("damage", [b"", b"y", SECRET.encode()])
def test_a_content_that_is_not_what_its_name_says_is_refused(shelf: Shelf, saved: Payload, damage: bytes) -> None:
    node = node_of(saved, "/etc/x")
    (shelf.folder / "u1/content" / node.sha256).write_bytes(damage)
    with pytest.raises(Broken, match="its content is not what its name says") as caught:
        shelf.content("u1", node)
    assert SECRET not in str(caught.value)


def test_a_content_that_is_gone_is_named(shelf: Shelf, saved: Payload) -> None:
    node = node_of(saved, "/etc/x")
    (shelf.folder / "u1/content" / node.sha256).unlink()
    with pytest.raises(Broken, match=f"cannot read .*{node.sha256}: No such file"):
        shelf.content("u1", node)


def test_half_a_removal_does_not_leave_something_that_looks_whole(
    shelf: Shelf, saved: Payload, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.rmtree", lambda *_arguments, **_more: None)
    shelf.drop("u1")
    assert (shelf.folder / "u1/content").exists() and shelf.load("u1") is None


def test_a_full_disk_is_waited_for(
    running: Root, target: Root, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_arguments: Any, **_more: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "mkdir", full)
    with pytest.raises(Held, match="No space left on device"):
        Shelf(tmp_path / "new").save(*build(config(), None, target, running))


# -- the undo record --------------------------------------------------------------------------------------------------


def test_the_undo_record_is_what_is_there_now(running: Root) -> None:
    etc = running.path / "etc"
    (etc / "file").write_bytes(b"before")
    (etc / "file").chmod(0o4711)
    os.chown(etc / "file", 3, 4)
    (etc / "file").chmod(0o4711)
    (etc / "link").symlink_to("somewhere")
    os.lchown(etc / "link", 3, 4)
    (etc / "dir").mkdir(0o1770)
    (etc / "dir").chmod(0o1770)
    paths = ["/etc/file", "/etc/link", "/etc/dir", "/etc/nothing"]
    record, items = payload.capture("u1", Payload("u1", "", (), (("core", "$6$new"), ("app", "$6$x"))), running, paths)
    found = record.nodes()
    assert found["/etc/file"] == Node(Kind.FILE, 0o4711, 3, 4, hashlib.sha256(b"before").hexdigest())
    assert (found["/etc/link"].target, found["/etc/link"].uid) == ("somewhere", 3)
    assert (found["/etc/dir"].kind, found["/etc/dir"].mode) == (Kind.DIRECTORY, 0o1770)
    assert found["/etc/nothing"].kind is Kind.ABSENT
    assert items["/etc/file"].content == b"before"
    assert record.passwords == (("core", "$6$by-hand"),), "who had none before gets none back"


def test_a_payload_is_a_value(saved: Payload) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        saved.id = "other"  # type: ignore[misc]  # that it cannot be set is the point
