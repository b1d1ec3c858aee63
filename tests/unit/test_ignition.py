"""Ignition: what is honoured is decoded exactly, everything else is refused by its JSON pointer."""

from __future__ import annotations

import base64
import gzip
import hashlib
from typing import Any, Optional

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcdaemon.errors import Irreconcilable
from mcdaemon.machineconfig import dataurl
from mcdaemon.machineconfig.model import Limits, Owner, parse
from tests.unit.configs import base64_url, config, core, document, file, percent

FILE = "/spec/config/storage/files/0"
UNIT = "/spec/config/systemd/units/0"
USER = "/spec/config/passwd/users/0"


def refusal(**parts: Any) -> Irreconcilable:
    with pytest.raises(Irreconcilable) as caught:
        parse(document(**parts), "test.yaml")
    assert caught.value.sentence.startswith("cannot use test.yaml: /")
    assert caught.value.field in caught.value.sentence
    return caught.value


def content_of(contents: Any, limits: Optional[Limits] = None) -> bytes:
    files = [{"path": "/etc/x", "contents": contents}]
    return parse(document(files=files), "test.yaml", limits or Limits()).files[0].content


# --- contents


@given(st.binary(max_size=300))
def test_percent_encoding_gives_the_bytes_back(content: bytes) -> None:
    assert dataurl.decode(percent(content), 1000) == content


@given(st.binary(max_size=300))
def test_base64_gives_the_bytes_back(content: bytes) -> None:
    assert dataurl.decode(base64_url(content), 1000) == content


@given(st.binary(max_size=300), st.integers(1, 3))
def test_gzip_of_several_members_gives_the_bytes_back(content: bytes, members: int) -> None:
    assert dataurl.gunzip(gzip.compress(content, mtime=0) * members, 1000) == content * members


@given(st.text(max_size=60))
def test_a_url_of_any_text_is_decoded_or_refused(text: str) -> None:
    for url in (text, "data:" + text, "data:;base64," + text, "data:," + text):
        try:
            dataurl.decode(url, 1000)
        except dataurl.Undecodable:
            pass


@pytest.mark.parametrize(
    ("source", "content"),
    [
        ("data:,", b""),
        ("data:,a%20b+c", b"a b+c"),
        ("data:;base64,YQ==", b"a"),
        ("data:text/plain,hi", b"hi"),
        ("data:text/plain;charset=iso-8859-1,%E9", b"\xe9"),
        ('data:text/plain;charset="utf-8";base64,w6k=', "é".encode()),
        ("data:application/x-thing;a=b;c=d,x", b"x"),
        ("data:;charset=utf-8,x", b"x"),
        ("data:,;base64,YQ==", b";base64,YQ=="),
        ("data:,a?b&c=d:/@!$'()*,", b"a?b&c=d:/@!$'()*,"),
        (None, b""),
        ("", b""),
    ],
)
def test_data_urls_are_decoded(source: Any, content: bytes) -> None:
    assert content_of({"source": source}) == content


@pytest.mark.parametrize(
    "source",
    [
        "data:",
        "data:text/plain",
        "data:plain,x",
        "data:;base64",
        "data:;base65,YQ==",
        "data:;base64,YQ",
        "data:;base64,YQ=",
        "data:;base64,YQ==YQ==",
        "data:;base64,Y Q==",
        "data:;base64,YQ==\n",
        "data:;base64,-_-_",
        "data:;base64,%59Q==",
        "data:,%",
        "data:,%4",
        "data:,%zz",
        "data:,a b",
        "data:,a\nb",
        "data:,é",
        "data:,{}",
        'data:,"x"',
        "DATA:,x",
        "hello",
        "/etc/passwd",
        "https://example.com/file",
        "http://example.com/file",
        "s3://bucket/file",
        "tftp://host/file",
    ],
)
def test_a_source_that_is_no_data_url_is_refused_at_the_source(source: str) -> None:
    error = refusal(files=[{"path": "/etc/x", "contents": {"source": source}}])
    assert error.field == FILE + "/contents/source"


def test_a_refused_source_does_not_show_its_content() -> None:
    error = refusal(files=[{"path": "/etc/x", "contents": {"source": "data:,TOP SECRET"}}])
    assert "TOP" not in str(error) and "SECRET" not in str(error)


def test_FILE_02_gzip_is_decompressed() -> None:
    url = base64_url(gzip.compress(b"hello", mtime=0))
    assert content_of({"source": url, "compression": "gzip"}) == b"hello"
    packed = gzip.compress(b"hello", mtime=0)
    assert content_of({"source": base64_url(packed), "compression": ""}) == packed
    assert content_of({"source": percent(gzip.compress(b"", mtime=0)), "compression": "gzip"}) == b""


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"plain text",
        gzip.compress(b"hello", mtime=0)[:-1],
        gzip.compress(b"hello", mtime=0)[:5],
        gzip.compress(b"hello", mtime=0) + b"x",
        gzip.compress(b"hello", mtime=0)[:-8] + b"\0" * 8,
        b"\x1f\x8b",
    ],
)
def test_FILE_02_what_is_not_whole_gzip_is_refused(data: bytes) -> None:
    error = refusal(files=[{"path": "/etc/x", "contents": {"source": percent(data), "compression": "gzip"}}])
    assert error.field == FILE + "/contents/source"


@pytest.mark.parametrize("compression", ["xz", "GZIP", "zstd", " "])
def test_FILE_02_an_unknown_compression_is_refused_by_name(compression: str) -> None:
    error = refusal(files=[{"path": "/etc/x", "contents": {"source": "data:,x", "compression": compression}}])
    assert error.field == FILE + "/contents/compression" and repr(compression) in error.sentence


def test_a_small_gzip_that_becomes_large_is_refused_without_being_unpacked() -> None:
    bomb = base64_url(gzip.compress(b"\0" * 50_000_000, mtime=0))
    with pytest.raises(Irreconcilable, match="larger than 100000 bytes when decompressed"):
        content_of({"source": bomb, "compression": "gzip"}, Limits(file_bytes=100_000))


@pytest.mark.parametrize("size", [1000, 1001, 1002, 5000])
@pytest.mark.parametrize("encode", [percent, base64_url])
def test_a_file_may_be_as_large_as_the_limit_and_not_larger(size: int, encode: Any) -> None:
    limits = Limits(file_bytes=1000)
    if size <= 1000:
        assert len(content_of({"source": encode(b"a" * size)}, limits)) == size
    else:
        with pytest.raises(Irreconcilable, match="larger than 1000 bytes"):
            content_of({"source": encode(b"a" * size)}, limits)


def test_all_files_together_have_a_limit() -> None:
    files = [file(f"/etc/{number}", b"a" * 400) for number in range(3)]
    with pytest.raises(Irreconcilable, match="1200 bytes, more than 1000"):
        parse(document(files=files), "test.yaml", Limits(1000, 1000))


@pytest.mark.parametrize("kind", ["sha256", "sha512"])
def test_contents_with_their_hash_are_taken(kind: str) -> None:
    digest = hashlib.new(kind, b"x").hexdigest()
    assert content_of({"source": "data:,x", "verification": {"hash": f"{kind}-{digest}"}}) == b"x"
    assert content_of({"source": "data:,x", "verification": {"hash": f"{kind}-{digest.upper()}"}}) == b"x"


def test_the_hash_is_of_the_decompressed_contents() -> None:
    wanted = {"hash": "sha256-" + hashlib.sha256(b"hello").hexdigest()}
    source = base64_url(gzip.compress(b"hello", mtime=0))
    assert content_of({"source": source, "compression": "gzip", "verification": wanted}) == b"hello"


@pytest.mark.parametrize(
    "value",
    [
        "sha256-" + "0" * 64,
        "sha512-" + "0" * 128,
        "sha256-" + "0" * 63,
        "sha512-" + hashlib.sha256(b"x").hexdigest(),
        "md5-" + hashlib.md5(b"x").hexdigest(),
        "sha256:" + hashlib.sha256(b"x").hexdigest(),
        "sha256-",
        "x",
    ],
)
def test_contents_with_another_hash_are_refused(value: str) -> None:
    error = refusal(files=[{"path": "/etc/x", "contents": {"source": "data:,x", "verification": {"hash": value}}}])
    assert error.field == FILE + "/contents/verification/hash"


# --- files


def test_a_file_has_the_defaults_of_ignition() -> None:
    found = config(files=[{"path": "/etc/x"}]).files[0]
    assert (found.content, found.mode, found.user, found.group) == (b"", 0o644, Owner(0), Owner(0))


@pytest.mark.parametrize("overwrite", [True, False, None])
def test_overwrite_is_about_the_first_boot_and_changes_nothing(overwrite: Any) -> None:
    assert config(files=[file("/etc/x", overwrite=overwrite)]).files == config(files=[file("/etc/x")]).files


@pytest.mark.parametrize(
    ("owner", "meant"),
    [
        ({"id": 1000}, Owner(1000)),
        ({"name": "core"}, Owner(None, "core")),
        ({"id": 7, "name": "core"}, Owner(7)),
        ({"id": 0, "name": "core"}, Owner(0)),
        ({"name": "root"}, Owner(0)),
        ({}, Owner(0)),
        (None, Owner(0)),
    ],
)
def test_FILE_36_owners_are_by_id_or_name_each_for_itself(owner: Any, meant: Owner) -> None:
    found = config(files=[file("/etc/x", user=owner), file("/etc/y", group=owner)]).files
    assert (found[0].user, found[0].group) == (meant, Owner(0))
    assert (found[1].user, found[1].group) == (Owner(0), meant)


@pytest.mark.parametrize(
    ("owner", "below"),
    [
        ({"id": -1}, "/id"),
        ({"id": 2**32 - 1}, "/id"),
        ({"id": "0"}, "/id"),
        ({"id": True}, "/id"),
        ({"name": "a b"}, "/name"),
        ({"name": "a:b"}, "/name"),
        ({"name": "../x"}, "/name"),
        ({"name": 5}, "/name"),
        ({"uid": 5}, "/uid"),
        ("core", ""),
    ],
)
def test_an_owner_that_is_none_is_refused(owner: Any, below: str) -> None:
    assert refusal(files=[file("/etc/x", user=owner)]).field == FILE + "/user" + below


@pytest.mark.parametrize("mode", [0, 0o600, 0o644, 0o755, 0o777, None])
def test_a_mode_of_permission_bits_is_taken(mode: Any) -> None:
    assert config(files=[file("/etc/x", mode=mode)]).files[0].mode == (0o644 if mode is None else mode)


@pytest.mark.parametrize("mode", [0o4755, 0o2755, 0o1777, 0o1000, 644])
def test_FILE_19_special_mode_bits_are_refused_by_name(mode: int) -> None:
    error = refusal(files=[file("/etc/x", mode=mode)])
    assert error.field == FILE + "/mode"
    assert "setuid" in error.sentence or mode == 644


@pytest.mark.parametrize("mode", [-1, 0o10000, 10**30, "0644", 1.5, True, [420]])
def test_what_is_no_mode_is_refused(mode: Any) -> None:
    assert refusal(files=[file("/etc/x", mode=mode)]).field == FILE + "/mode"


@pytest.mark.parametrize(
    "path",
    [
        "etc/x",
        "./etc/x",
        "../x",
        "/etc/../../x",
        "/etc/../etc/x",
        "/etc//x",
        "/etc/./x",
        "/etc/x/",
        "//etc/x",
        "/",
        "",
        "/etc/a\0b",
        "/etc/a\nb",
        "/etc/" + "a" * 256,
        "/etc" + "/abcdefg" * 600,
    ],
)
def test_FILE_03_and_FILE_04_a_path_that_is_not_absolute_and_clean_is_refused(path: str) -> None:
    assert refusal(files=[file(path)]).field == FILE + "/path"


@pytest.mark.parametrize(
    "path",
    [
        "/etc/x",
        "/var/lib/kubelet/config.json",
        "/usr/local/bin/x",
        "/home/core/x",
        "/root/.bashrc",
        "/opt/x",
        "/srv/x",
        "/mnt/x/y",
        "/var/usrlocal/bin/x",
        "/etc/runtime",
        "/var/running/x",
        "/etc/ünïcode-☃",
        "/etc/with blank",
        "/etc/machine-config-daemon/generate_podman_policy_args.sh",
        "/etc/...",
    ],
)
def test_a_path_that_the_node_keeps_is_taken(path: str) -> None:
    assert config(files=[file(path)]).files[0].path == path


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("/usr/bin/x", "OS image"),
        ("/usr/localx", "OS image"),
        ("/usr/lib/systemd/system/x.service", "OS image"),
        ("/boot/loader/x", "boot loader"),
        ("/sysroot/x", "ostree"),
        ("/ostree/x", "ostree"),
        ("/run/x", "empty after each boot"),
        ("/var/run/x", "empty after each boot"),
        ("/tmp/x", "empty after each boot"),
        ("/run/machine-config-daemon-force", "force file"),
        ("/dev/x", "kernel"),
        ("/proc/sys/vm/x", "kernel"),
        ("/sys/x", "kernel"),
        ("/x", "only in /etc, /var"),
        ("/bin/x", "only in /etc, /var"),
        ("/etc", "directory of the system"),
        ("/usr/local", "directory of the system"),
        ("/var/lib/mcdaemon/journal.json", "mcdaemon itself"),
        ("/etc/machine-config-daemon/currentconfig", "daemon itself"),
        ("/etc/machine-config-daemon/orig/etc/x", "daemon itself"),
    ],
)
def test_a_path_that_an_ostree_node_cannot_hold_is_refused_with_the_reason(path: str, reason: str) -> None:
    error = refusal(files=[file(path)])
    assert error.field == FILE + "/path" and reason in error.sentence and path in error.sentence


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("/etc/x", "/etc/x"),
        ("/usr/local/bin/x", "/var/usrlocal/bin/x"),
        ("/home/core/x", "/var/home/core/x"),
        ("/root/x", "/var/roothome/x"),
        ("/etc/x", "/etc/x/y"),
        ("/etc/x/y", "/etc/x"),
        ("/opt/x", "/var/opt/x/y"),
    ],
)
def test_FILE_03_and_FILE_15_two_files_that_are_in_each_others_way_are_refused(first: str, second: str) -> None:
    error = refusal(files=[file("/etc/other"), file(first), file(second)])
    assert error.field in ("/spec/config/storage/files/1/path", "/spec/config/storage/files/2/path")


@pytest.mark.parametrize(
    "unit",
    [
        {"name": "a.service", "dropins": [{"name": "20.conf", "contents": "x"}]},
        {"name": "a.service.d", "contents": "x"},
    ],
)
def test_FILE_13_a_file_in_the_place_of_a_drop_in_is_refused(unit: Any) -> None:
    refusal(files=[file("/etc/systemd/system/a.service.d/20.conf")], units=[unit])


def test_a_file_in_the_place_of_a_unit_is_refused() -> None:
    error = refusal(files=[file("/etc/systemd/system/a.service")], units=[{"name": "a.service", "enabled": True}])
    assert error.field == UNIT + "/name" and FILE in error.sentence


@pytest.mark.parametrize(
    ("more", "below"),
    [
        ({"append": [{"source": "data:,x"}]}, "/append/0"),
        ({"contents": {"source": "data:,x", "httpHeaders": [{"name": "a"}]}}, "/contents/httpHeaders/0"),
        ({"contents": {"sources": "data:,x"}}, "/contents/sources"),
        ({"contents": "data:,x"}, "/contents"),
        ({"contents": {"source": 5}}, "/contents/source"),
        ({"filesystem": "root"}, "/filesystem"),
        ({"owner~/x": 1}, "/owner~0~1x"),
        ({"overwrite": "yes"}, "/overwrite"),
    ],
)
def test_a_part_of_a_file_that_is_not_honoured_is_refused(more: Any, below: str) -> None:
    assert refusal(files=[{"path": "/etc/x", **more}]).field == FILE + below


# --- units


def test_a_unit_is_read_with_its_drop_ins_in_order_of_their_names() -> None:
    unit = config(
        units=[
            {
                "name": "crio.service",
                "contents": "[Unit]\n",
                "enabled": True,
                "dropins": [{"name": "20-b.conf", "contents": "b"}, {"name": "10-a.conf", "contents": "a"}],
            }
        ]
    ).unit("crio.service")
    assert (unit.content, unit.enabled, unit.mask) == (b"[Unit]\n", True, False)
    assert [(dropin.name, dropin.content) for dropin in unit.dropins] == [("10-a.conf", b"a"), ("20-b.conf", b"b")]
    assert unit.path == "/etc/systemd/system/crio.service"
    assert unit.dropin_path(unit.dropins[0]) == "/etc/systemd/system/crio.service.d/10-a.conf"


@pytest.mark.parametrize("contents", [{}, {"contents": None}, {"contents": ""}])
def test_UNIT_07_empty_contents_are_no_contents(contents: Any) -> None:
    unit = config(units=[{"name": "a.service", **contents, "dropins": [{"name": "a.conf", **contents}]}]).units[0]
    assert unit.content is None and unit.dropins[0].content is None


def test_UNIT_05_a_masked_unit_may_have_contents() -> None:
    unit = config(units=[{"name": "a.service", "mask": True, "contents": "x", "enabled": False}]).units[0]
    assert unit.mask and unit.content == b"x"


def test_a_unit_that_is_masked_and_enabled_is_refused() -> None:
    assert refusal(units=[{"name": "a.service", "mask": True, "enabled": True}]).field == UNIT + "/enabled"


@pytest.mark.parametrize(
    "name",
    [
        "a@.service",
        "a@b.service",
        "a-b_c.d.timer",
        "dev-disk-by\\x2did.swap",
        "getty@tty1.service",
        "a.target",
        "x.slice",
    ],
)
def test_the_names_of_systemd_are_taken(name: str) -> None:
    assert config(units=[{"name": name}]).units[0].name == name


@pytest.mark.parametrize(
    "name",
    ["", "a", "a.conf", ".service", "@.service", "@x.service", "a/b.service", "../a.service", "a b.service",
     "a.service.d", "ä.service", "a\n.service", "a" * 250 + ".service", None, 5],
)  # fmt: skip
def test_what_is_no_name_of_a_unit_is_refused(name: Any) -> None:
    assert refusal(units=[{"name": name}]).field == UNIT + "/name"


@pytest.mark.parametrize("name", ["", "a", "a.service", ".conf", ".a.conf", "a/b.conf", "../a.conf", "a b.conf", None])
def test_what_is_no_name_of_a_drop_in_is_refused(name: Any) -> None:
    error = refusal(units=[{"name": "a.service", "dropins": [{"name": name, "contents": "x"}]}])
    assert error.field == UNIT + "/dropins/0/name"


@pytest.mark.parametrize(
    ("unit", "below"),
    [
        ({"enable": True}, "/enable"),
        ({"enabled": "true"}, "/enabled"),
        ({"mask": 1}, "/mask"),
        ({"contents": ["x"]}, "/contents"),
        ({"contents": "a\0b"}, "/contents"),
        ({"dropins": {"name": "a.conf"}}, "/dropins"),
        ({"dropins": [{"name": "a.conf", "contents": 5}]}, "/dropins/0/contents"),
        ({"dropins": [{"name": "a.conf", "content": "x"}]}, "/dropins/0/content"),
        ({"dropins": [{"name": "a.conf"}, {"name": "a.conf"}]}, "/dropins/1/name"),
    ],
)
def test_a_part_of_a_unit_that_is_not_honoured_is_refused(unit: Any, below: str) -> None:
    assert refusal(units=[{"name": "a.service", **unit}]).field == UNIT + below


def test_a_unit_that_is_given_twice_is_refused() -> None:
    assert refusal(units=[{"name": "a.service"}, {"name": "a.service"}]).field == "/spec/config/systemd/units/1/name"


# --- users

HASH = "$6$salt$" + "a" * 86


def test_core_is_read_with_keys_and_hash() -> None:
    user = config(
        users=[core("ssh-ed25519 AAAA a", " ssh-rsa BBBB \n", "ssh-ed25519 AAAA a", passwordHash=HASH)]
    ).users[0]
    assert user.ssh_keys == ("ssh-ed25519 AAAA a", "ssh-rsa BBBB") and user.password_hash == HASH


@pytest.mark.parametrize("value", [HASH, "$y$j9T$abc$def", "$5$rounds=5000$a$b", "*", "!"])
def test_the_forms_of_crypt_are_taken(value: str) -> None:
    assert config(users=[core(passwordHash=value)]).users[0].password_hash == value


@pytest.mark.parametrize("value", ["", "hunter2", "$6$a:b$c", "$6$a\nb$c", "$", "a b"])
def test_an_empty_or_plain_password_is_refused_and_not_shown(value: str) -> None:
    error = refusal(users=[core("k", passwordHash=value)])
    assert error.field == USER + "/passwordHash"
    assert "hunter2" not in str(error)


@pytest.mark.parametrize("key", ["", "  ", "a\nb", "a\0b", None, 5])
def test_an_ssh_key_that_is_not_one_line_is_refused(key: Any) -> None:
    assert refusal(users=[core("fine", key)]).field == USER + "/sshAuthorizedKeys/1"


@pytest.mark.parametrize("name", ["root", "admin", "", None])
def test_H9_another_user_than_core_is_refused(name: Any) -> None:
    assert refusal(users=[{"name": name, "sshAuthorizedKeys": ["k"]}]).field == USER + "/name"


def test_H9_a_second_user_is_refused() -> None:
    assert refusal(users=[core("k"), {"name": "other"}]).field == "/spec/config/passwd/users/1/name"
    assert refusal(users=[core("k"), core("l")]).field == "/spec/config/passwd/users/1"


@pytest.mark.parametrize(
    ("more", "below"),
    [
        ({"homeDir": "/x"}, "/homeDir"),
        ({"groups": ["wheel"]}, "/groups/0"),
        ({"uid": 5}, "/uid"),
        ({"shell": "/bin/sh"}, "/shell"),
        ({"system": True}, "/system"),
        ({"shouldExist": False}, "/shouldExist"),
        ({"noCreateHome": True}, "/noCreateHome"),
    ],
)
def test_H9_other_fields_of_core_are_refused(more: Any, below: str) -> None:
    assert refusal(users=[core("k", **more)]).field == USER + below


def test_fields_of_core_with_their_default_ask_for_nothing() -> None:
    assert config(users=[core("k", shouldExist=True, system=False, groups=[], homeDir="")]).users


def test_secrets_do_not_show_in_a_repr() -> None:
    made = config(files=[file("/etc/x", b"SECRET")], units=[{"name": "a.service", "contents": "SECRET"}],
                  users=[core("k", passwordHash="$6$SECRET$x")])  # fmt: skip
    assert "SECRET" not in repr(made)


# --- the rest of Ignition


@pytest.mark.parametrize(
    ("ignition", "field"),
    [
        ({"storage": {"links": [{"path": "/etc/x", "target": "/y"}]}}, "/storage/links/0"),
        ({"storage": {"directories": [{"path": "/etc/x"}]}}, "/storage/directories/0"),
        ({"storage": {"disks": [{"device": "/dev/sda"}]}}, "/storage/disks/0"),
        ({"storage": {"raid": [{"name": "md0"}]}}, "/storage/raid/0"),
        ({"storage": {"filesystems": [{"device": "/dev/sda1"}]}}, "/storage/filesystems/0"),
        ({"storage": {"luks": [{"name": "x"}]}}, "/storage/luks/0"),
        ({"storage": {"future": True}}, "/storage/future"),
        ({"storage": {"future": False}}, "/storage/future"),
        ({"storage": {"future": 0}}, "/storage/future"),
        ({"passwd": {"groups": [{"name": "g"}]}}, "/passwd/groups/0"),
        ({"systemd": {"defaults": {"a": {"b": "c"}}}}, "/systemd/defaults/a/b"),
        ({"kernelArguments": {"shouldExist": ["a"]}}, "/kernelArguments/shouldExist/0"),
        ({"kernelArguments": {"shouldNotExist": ["a"]}}, "/kernelArguments/shouldNotExist/0"),
        ({"ignition": {"version": "3.4.0", "config": {"merge": [{"source": "https://x"}]}}},
         "/ignition/config/merge/0"),
        ({"ignition": {"version": "3.4.0", "config": {"replace": {"source": "https://x"}}}},
         "/ignition/config/replace/source"),
        ({"ignition": {"version": "3.4.0", "security": {"tls": {"certificateAuthorities": [{"source": "data:,"}]}}}},
         "/ignition/security/tls/certificateAuthorities/0"),
        ({"ignition": {"version": "3.4.0", "timeouts": {"httpTotal": 5}}}, "/ignition/timeouts/httpTotal"),
        ({"ignition": {"version": "3.4.0", "proxy": {"httpProxy": "http://x"}}}, "/ignition/proxy/httpProxy"),
        ({"networkd": {"units": [{"name": "x"}]}}, "/networkd/units/0"),
        ({"storage": []}, "/storage"),
        ({"storage": {"files": {}}}, "/storage/files"),
        ({"storage": {"files": ["/etc/x"]}}, "/storage/files/0/path"),
        ({"ignition": "3.4.0"}, "/ignition"),
    ],
)  # fmt: skip
def test_what_is_not_honoured_is_refused_by_its_pointer(ignition: Any, field: str) -> None:
    whole = {"ignition": {"version": "3.4.0"}, **ignition}
    document_ = document()
    document_["spec"]["config"] = whole
    with pytest.raises(Irreconcilable) as caught:
        parse(document_, "test.yaml")
    assert caught.value.field == "/spec/config" + field


@pytest.mark.parametrize(
    "ignition",
    [
        None,
        {},
        {"ignition": {"version": ""}},
        {"ignition": {"version": "3.0.0"}},
        {"ignition": {"version": "3.5.0", "config": {"replace": {"verification": {}}}, "security": {"tls": {}},
                      "timeouts": {}, "proxy": {}}, "passwd": {}, "storage": {"links": [], "disks": None},
         "systemd": {}, "kernelArguments": {}},
    ],
)  # fmt: skip
def test_an_empty_config_wants_nothing(ignition: Any) -> None:
    document_ = document()
    document_["spec"]["config"] = ignition
    made = parse(document_, "test.yaml")
    assert (made.files, made.units, made.users) == ((), (), ())


@pytest.mark.parametrize("version", ["3.0.0", "3.1.0", "3.2.0", "3.3.0", "3.4.0", "3.5.0"])
def test_the_versions_of_ignition_3_are_read(version: str) -> None:
    document_ = document(files=[file("/etc/x")])
    document_["spec"]["config"]["ignition"]["version"] = version
    assert parse(document_, "test.yaml").files


@pytest.mark.parametrize(
    ("version", "word"),
    [
        ("2.2.0", "older"),
        ("3.6.0", "newer"),
        ("3.6.0-experimental", "experimental"),
        ("3.5.0-experimental", "experimental"),
        ("4.0.0", "newer"),
        ("3.10.0", "newer"),
        ("1.0.0", "older"),
        ("3", "not a version"),
        ("", "missing"),
        ("3.4.0\n", "not a version"),
        ("latest", "not a version"),
    ],
)
def test_H9_another_version_of_ignition_is_refused_by_name(version: str, word: str) -> None:
    document_ = document(files=[file("/etc/x")])
    document_["spec"]["config"]["ignition"]["version"] = version
    with pytest.raises(Irreconcilable, match=word) as caught:
        parse(document_, "test.yaml")
    assert caught.value.field == "/spec/config/ignition/version"


def test_base64_of_a_limit_is_checked_before_it_is_decoded() -> None:
    data = base64.b64encode(b"a" * 1001).decode()
    with pytest.raises(dataurl.Undecodable, match="larger than 1000"):
        dataurl.decode("data:;base64," + data, 1000)
