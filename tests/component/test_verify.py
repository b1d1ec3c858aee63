"""A validation sees every way in which a root can differ, and tells people without showing content."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mcdaemon.host.files import Entry, Kind, Node, put_all
from mcdaemon.host.root import Root
from mcdaemon.update.verify import Aspect, Expected, Mismatch, Report, validate

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: files get owners")

ENTRIES = {
    "/etc/app/file": Entry.file(b"canary content", 0o640, 0, 7),
    "/etc/app/link": Entry.link("/usr/lib/target"),
    "/etc/app/dir": Entry.directory(0o750, 7, 0),
    "/etc/app/gone": Entry.absent(),
}
EXPECTED = {path: Expected(entry.node, "the config") for path, entry in ENTRIES.items()}


@pytest.fixture
def root(tmp_path: Path) -> Root:
    (tmp_path / "etc").mkdir()
    (tmp_path / "var").mkdir()
    root = Root(tmp_path, tmp_path / "var")
    put_all(root, ENTRIES)
    return root


def test_a_password_that_is_not_the_configs_is_a_mismatch_that_shows_no_hash(root: Root) -> None:
    (root.path / "etc/passwd").write_text("core:x:1000:1000::/home/core:/bin/sh\n")
    (root.path / "etc/shadow").write_text("core:$6$old:1::::::\n")
    report = validate(root, EXPECTED, [("core", "$6$canary")])
    assert [(found.path, found.aspect) for found in report.mismatches] == [("/etc/shadow", Aspect.CONTENT)]
    assert "core" in report.text() and "canary" not in report.text() and "$6$" not in report.text()
    assert validate(root, EXPECTED, [("core", "$6$old")]).ok
    (root.path / "etc/shadow").unlink()
    assert not validate(root, EXPECTED, [("core", "$6$old")]).ok
    assert not validate(root, EXPECTED, [("nobody", "$6$old")]).ok


def replace(path: Path, make: Callable[[Path], object]) -> None:
    path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
    make(path)


DRIFT: dict[str, tuple[str, Callable[[Path], object], Aspect]] = {
    "content of the same size": ("file", lambda path: path.write_bytes(b"Canary content"), Aspect.CONTENT),
    "content emptied": ("file", lambda path: path.write_bytes(b""), Aspect.CONTENT),
    "mode": ("file", lambda path: path.chmod(0o644), Aspect.MODE),
    "setuid": ("file", lambda path: path.chmod(0o4640), Aspect.MODE),
    "sticky": ("dir", lambda path: path.chmod(0o1750), Aspect.MODE),
    "owner": ("file", lambda path: os.chown(path, 5, -1), Aspect.OWNER),
    "group": ("file", lambda path: os.chown(path, -1, 5), Aspect.OWNER),
    "owner of a directory": ("dir", lambda path: os.chown(path, 0, 0), Aspect.OWNER),
    "owner of a link": ("link", lambda path: os.lchown(path, 5, 5), Aspect.OWNER),
    "file gone": ("file", lambda path: path.unlink(), Aspect.MISSING),
    "link gone": ("link", lambda path: path.unlink(), Aspect.MISSING),
    "directory gone": ("dir", lambda path: path.rmdir(), Aspect.MISSING),
    "link elsewhere": ("link", lambda path: replace(path, lambda p: p.symlink_to("/dev/null")), Aspect.TARGET),
    "file instead of a link": ("link", lambda path: replace(path, Path.touch), Aspect.TYPE),
    "link instead of a file": ("file", lambda path: replace(path, lambda p: p.symlink_to("link")), Aspect.TYPE),
    "directory instead of a file": ("file", lambda path: replace(path, Path.mkdir), Aspect.TYPE),
    "fifo instead of a file": ("file", lambda path: replace(path, os.mkfifo), Aspect.TYPE),
    "file instead of a directory": ("dir", lambda path: replace(path, Path.touch), Aspect.TYPE),
    "file where nothing should be": ("gone", Path.touch, Aspect.UNEXPECTED),
    "dangling link where nothing should be": ("gone", lambda path: path.symlink_to("x"), Aspect.UNEXPECTED),
    "directory where nothing should be": ("gone", Path.mkdir, Aspect.UNEXPECTED),
}


def test_a_root_as_it_should_be_is_reported_so(root: Root) -> None:
    report = validate(root, EXPECTED)
    assert report.ok
    assert report.text() == "all 4 paths are as expected"


@pytest.mark.parametrize("case", DRIFT)
def test_every_kind_of_drift_is_seen_and_named(root: Root, case: str) -> None:
    name, change, aspect = DRIFT[case]
    change(root.path / "etc/app" / name)
    report = validate(root, EXPECTED)
    assert [(mismatch.path, mismatch.aspect) for mismatch in report.mismatches] == [(f"/etc/app/{name}", aspect)]
    assert not report.ok
    assert f"/etc/app/{name}" in report.text()
    assert "[the config]" in report.text()
    assert "anary" not in report.text()


def test_several_aspects_of_one_path_are_all_told(root: Root) -> None:
    path = root.path / "etc/app/file"
    path.write_bytes(b"other")
    path.chmod(0o600)
    os.chown(path, 1, 1)
    report = validate(root, EXPECTED)
    assert report.text().splitlines() == [
        "1 of 4 paths are not as expected:",
        f"  /etc/app/file: content: expected sha256 {ENTRIES['/etc/app/file'].node.sha256[:12]},"
        " found sha256 d9298a10d1b0 [the config]",
        "  /etc/app/file: mode: expected 0640, found 0600 [the config]",
        "  /etc/app/file: owner: expected 0:7, found 1:1 [the config]",
    ]


def test_a_whole_directory_that_is_gone_is_told_for_each_path(root: Root) -> None:
    os.rename(root.path / "etc/app", root.path / "etc/away")
    report = validate(root, EXPECTED)
    assert [mismatch.aspect for mismatch in report.mismatches] == [Aspect.MISSING] * 3
    assert "/etc/app/file: missing, expected file 0640 with sha256 " in report.text()


def test_a_parent_that_a_user_made_a_link_is_not_followed_and_told(root: Root) -> None:
    os.rename(root.path / "etc/app", root.path / "etc/away")
    os.symlink("away", root.path / "etc/app")
    os.lchown(root.path / "etc/app", 1000, 1000)
    report = validate(root, EXPECTED)
    assert {mismatch.aspect for mismatch in report.mismatches} == {Aspect.TYPE}
    assert "is a link that a user could have placed" in report.text()


def test_a_long_report_is_cut_and_says_so() -> None:
    many = tuple(Mismatch(f"/etc/{n:03}", Aspect.MISSING, "file", "nothing") for n in range(100))
    lines = Report(100, many).text(most=5).splitlines()
    assert lines[0] == "100 of 100 paths are not as expected:"
    assert lines[-1] == "  and 95 more"
    assert len(lines) == 7


def test_a_path_with_odd_characters_can_be_printed() -> None:
    text = Report(1, (Mismatch("/etc/\udcff\n", Aspect.MISSING, "file", "nothing"),)).text()
    text.encode("utf-8")
    assert len(text.splitlines()) == 2


def test_nothing_expected_is_nothing_wrong(root: Root) -> None:
    assert validate(root, {}).ok


def test_a_thousand_files_are_validated_fast_and_large_ones_in_little_memory(root: Root) -> None:
    entries = {f"/etc/many/d{n % 20}/f{n}": Entry.file(bytes([n % 256]) * 4096) for n in range(1000)}
    put_all(root, entries)
    expected = {path: Expected(entry.node) for path, entry in entries.items()}
    begin = time.process_time()
    assert validate(root, expected).ok
    # Measured: 0.05 s of CPU time. The limit leaves room for a machine that does other things.
    assert time.process_time() - begin < 1

    with open(root.path / "etc/large", "wb") as large:
        large.truncate(256 * 1024 * 1024)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert not validate(root, {"/etc/large": Expected(Node(Kind.FILE))}).ok
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 16 * 1024
