"""Ignition configs: what is made, and what Ignition would refuse."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
from vmlab import coreos, ignition
from vmlab.ignition import BadConfig, Config, Directory, File, Link, Unit, User

PROJECT = Path(__file__).resolve().parents[2]
KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA nobody@example"
SERVICE = "[Service]\nExecStart=/bin/true\n"


def first_file(config: Config) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(config.text())["storage"]["files"][0]
    return found


# -- what is made -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content", [b"", b"x", bytes(range(256)), b"a line\n" * 1000, hashlib.shake_128().digest(5000)]
)
def test_a_file_is_a_data_url_that_gives_its_content_back_and_has_its_hash(content: bytes) -> None:
    node = first_file(Config(files=(File("/etc/x", content),)))
    contents = node["contents"]
    assert ignition.content_of(contents["source"], contents.get("compression", "")) == content
    assert contents["verification"]["hash"] == "sha512-" + hashlib.sha512(content).hexdigest()


def test_only_what_gets_smaller_is_compressed() -> None:
    assert first_file(Config(files=(File("/etc/x", b"a line\n" * 100),)))["contents"]["compression"] == "gzip"
    assert "compression" not in first_file(Config(files=(File("/etc/x", b"short"),)))["contents"]


def test_modes_are_decimal_numbers() -> None:
    assert first_file(Config(files=(File("/usr/local/bin/x", b"", 0o755),)))["mode"] == 493
    assert '"mode": 420' in Config(files=(File("/etc/x", b""),)).text()


def test_the_same_config_is_the_same_text() -> None:
    config = Config(files=(File("/etc/x", b"a line\n" * 100),), units=(Unit("x.service", SERVICE),))
    assert config.text() == config.text()


def test_an_empty_config_has_a_version_and_nothing_else() -> None:
    assert json.loads(Config().text()) == {"ignition": {"version": "3.2.0"}}


def test_a_pointer_names_the_config_by_its_hash_and_is_small() -> None:
    text = Config(files=(File("/etc/x", os.urandom(200_000)),)).text()
    pointer = json.loads(ignition.pointer(text, "http://10.0.2.2:1/config.ign"))
    assert ignition.problems(pointer) == []
    source = pointer["ignition"]["config"]["replace"]
    assert source["verification"]["hash"] == "sha512-" + hashlib.sha512(text.encode()).hexdigest()
    assert len(json.dumps(pointer)) < ignition.FW_CFG_LIMIT


# -- a tree -----------------------------------------------------------------------------------------------------------


def test_a_tree_becomes_units_drop_ins_links_files_and_directories(tmp_path: Path) -> None:
    units = tmp_path / "etc/systemd/system"
    (units / "x.service.d").mkdir(parents=True)
    (units / "multi-user.target.wants").mkdir()
    (units / "x.service").write_text(SERVICE)
    (units / "x.service.d/10-more.conf").write_text("[Service]\nNice=1\n")
    (units / "multi-user.target.wants/x.service").symlink_to("/etc/systemd/system/x.service")
    (tmp_path / "etc/secret").write_bytes(b"s")
    (tmp_path / "etc/secret").chmod(0o600)
    (tmp_path / "var/empty").mkdir(parents=True)
    (tmp_path / "var/closed").mkdir(mode=0o700)
    (tmp_path / "var/closed/x").write_bytes(b"")
    assert ignition.from_tree(tmp_path) == Config(
        files=(File("/etc/secret", b"s", 0o600), File("/var/closed/x", b"")),
        directories=(Directory("/var/closed", 0o700), Directory("/var/empty")),
        links=(Link("/etc/systemd/system/multi-user.target.wants/x.service", "/etc/systemd/system/x.service"),),
        units=(Unit("x.service", SERVICE, dropins=(("10-more.conf", "[Service]\nNice=1\n"),)),),
    )


def test_a_unit_with_another_mode_stays_a_file_since_units_are_always_0644(tmp_path: Path) -> None:
    unit = tmp_path / "etc/systemd/system/x.service"
    unit.parent.mkdir(parents=True)
    unit.write_text(SERVICE)
    unit.chmod(0o600)
    config = ignition.from_tree(tmp_path)
    assert config.units == () and config.files == (File("/etc/systemd/system/x.service", SERVICE.encode(), 0o600),)


def test_a_tree_with_a_fifo_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(BadConfig, match="cannot put /fifo"):
        ignition.from_tree(tmp_path)


def test_the_agent_goes_in_as_make_install_lays_it(tmp_path: Path) -> None:
    config = coreos.agent_config(PROJECT) + coreos.harness_config((KEY,))
    document = json.loads(config.text())
    files = {node["path"]: node for node in document["storage"]["files"]}
    archive = files["/usr/local/lib/mcdaemon/mcdaemon.pyz"]
    assert archive["mode"] == 0o755 and files["/usr/local/bin/mcdaemon"]["mode"] == 0o755
    content = ignition.content_of(archive["contents"]["source"], archive["contents"].get("compression", ""))
    assert content == (PROJECT / "dist/mcdaemon.pyz").read_bytes()
    assert {"/etc/mcdaemon/mcdaemon.yaml", "/etc/tmpfiles.d/mcdaemon.conf"} <= files.keys()
    links = {node["path"]: node["target"] for node in document["storage"]["links"]}
    assert links["/etc/systemd/system/sysinit.target.wants/mcdaemon-early.service"].endswith("/mcdaemon-early.service")
    units = {unit["name"]: unit for unit in document["systemd"]["units"]}
    assert units["mcdaemon.service"]["contents"] == (PROJECT / "systemd/mcdaemon.service").read_text()
    assert units["vmlab-shell.service"]["enabled"] and units["zincati.service"]["mask"]


# -- what Ignition would refuse ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "place"),
    [
        (Config(files=(File("etc/x", b""),)), "/storage/files/0/path"),
        (Config(files=(File("/etc/../x", b""),)), "/storage/files/0/path"),
        (Config(files=(File("/etc//x", b""),)), "/storage/files/0/path"),
        (Config(files=(File("/etc/x/", b""),)), "/storage/files/0/path"),
        (Config(files=(File("/", b""),)), "/storage/files/0/path"),
        (Config(files=(File("/etc/x", b""), File("/etc/x", b"1"))), "/storage/files/1/path"),
        (Config(files=(File("/etc/x", b""),), links=(Link("/etc/x", "y"),)), "/storage/links/0/path"),
        (Config(files=(File("/a/b/x", b""),), links=(Link("/a", "/c"),)), "/storage/files/0/path"),
        (Config(files=(File("/etc/x", b"", 0o4755),)), "/storage/files/0/mode"),
        (Config(directories=(Directory("/var/x", 0o1777),)), "/storage/directories/0/mode"),
        (Config(files=(File("/etc/x", b"", -1),)), "/storage/files/0/mode"),
        (Config(links=(Link("/etc/x", ""),)), "/storage/links/0/target"),
        (Config(units=(Unit("x", SERVICE),)), "/systemd/units/0/name"),
        (Config(units=(Unit("../x.service", SERVICE),)), "/systemd/units/0/name"),
        (Config(units=(Unit("x.conf", SERVICE),)), "/systemd/units/0/name"),
        (Config(units=(Unit("x.service", SERVICE), Unit("x.service", SERVICE))), "/systemd/units/1/name"),
        (Config(units=(Unit("x.service", "ExecStart=/bin/true\n"),)), "/systemd/units/0/contents"),
        (Config(units=(Unit("x.service", SERVICE, enabled=True),)), "/systemd/units/0/enabled"),
        (Config(units=(Unit("x.service", SERVICE, mask=True),)), "/systemd/units/0/mask"),
        (Config(units=(Unit("x.service", dropins=(("10", ""),)),)), "/systemd/units/0/dropins/0/name"),
        (Config(units=(Unit("x.service", dropins=(("a.conf", ""),) * 2),)), "/systemd/units/0/dropins/1/name"),
        (Config(files=(File("/etc/systemd/system/x.service", b""),), units=(Unit("x.service", SERVICE),)),
         "/storage/files/0/path"),
        (Config(links=(Link("/etc/systemd/system/x.service", "/y"),), units=(Unit("x.service", mask=True),)),
         "/storage/links/0/path"),
        (Config(users=(User("Core", (KEY,)),)), "/passwd/users/0/name"),
        (Config(users=(User("core", (KEY,)), User("core", ()))), "/passwd/users/1/name"),
        (Config(users=(User("core", ("ssh-ed25519",)),)), "/passwd/users/0/sshAuthorizedKeys/0"),
        (Config(users=(User("core", ("ssh-rsa " + KEY.split()[1],)),)), "/passwd/users/0/sshAuthorizedKeys/0"),
        (Config(users=(User("core", (f"{KEY}\n{KEY}",)),)), "/passwd/users/0/sshAuthorizedKeys/0"),
        (Config(users=(User("core", ("ssh-ed25519 !!!",)),)), "/passwd/users/0/sshAuthorizedKeys/0"),
    ],
)  # fmt: skip
def test_what_ignition_would_refuse_is_refused_here_by_its_place(config: Config, place: str) -> None:
    with pytest.raises(BadConfig, match="^cannot make an Ignition config: ") as caught:
        config.text()
    assert f" {place}: " in str(caught.value)


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"ignition": {"version": "2.2.0"}}, "/ignition/version"),
        ({"ignition": {"version": "3.9.0"}}, "/ignition/version"),
        ({"ignition": {}}, "/ignition/version"),
        ({"storage": {"files": [{"path": "/x", "mode": "0644"}]}}, "/storage/files/0/mode"),
        ({"storage": {"files": [{"path": "/x", "mode": True}]}}, "/storage/files/0/mode"),
        ({"storage": {"files": [{"path": "/x", "filesystem": "root"}]}}, "/storage/files/0/filesystem"),
        ({"storage": {"files": {"path": "/x"}}}, "/storage/files"),
        ({"storage": []}, "/storage"),
        ({"storage": {"files": [{"path": "/x", "overwrite": True}]}}, "/storage/files/0/contents/source"),
        ({"storage": {"files": [{"path": "/x", "contents": {"source": "data:;base64,!"}}]}}, "/contents/source"),
        ({"storage": {"files": [{"path": "/x", "contents": {"source": "data:,a"}}]}}, "/contents/source"),
        ({"storage": {"files": [{"path": "/x", "contents": {"source": "ftp://x"}}]}}, "/contents/source"),
        ({"storage": {"files": [{"path": "/x", "contents": {"source": "data:;base64,eA==", "compression": "xz"}}]}},
         "/contents/compression"),
        ({"storage": {"files": [{"path": "/x", "contents": {"source": "data:;base64,eA==", "compression": "gzip"}}]}},
         "/contents/source"),
        ({"storage": {"files": [{"path": "/x", "contents": {
            "source": "data:;base64,eA==", "verification": {"hash": "sha512-" + "0" * 128}}}]}}, "/verification/hash"),
        ({"storage": {"files": [{"path": "/x", "contents": {"verification": {"hash": "md5-0"}}}]}}, "/hash"),
        ({"systemd": {"units": [{"name": "x.service", "enable": True}]}}, "/systemd/units/0/enable"),
    ],
)  # fmt: skip
def test_a_document_that_is_not_the_spec_s_is_found_out(change: dict[str, Any], place: str) -> None:
    found = ignition.problems({"ignition": {"version": "3.2.0"}, **change})
    assert found and place in found[0]
