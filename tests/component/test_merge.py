"""What the /etc merge would do to managed files is said before the drain and put right (incident 4)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mcdaemon.errors import Broken
from mcdaemon.host.files import Entry
from mcdaemon.host.root import Root
from mcdaemon.update import commit, merge
from mcdaemon.update.merge import MergeReport
from mcdaemon.update.payload import Payload, Shelf

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: files get owners")

NEW_OSTREE, OLD_OSTREE = True, False


class Node:
    """A running root and a staged one, with their images' defaults."""

    def __init__(self, folder: Path) -> None:
        self.running, self.target = (Root(folder / name, folder / "var") for name in ("running", "target"))
        (folder / "var").mkdir()
        for root in (self.running, self.target):
            (root.path / "etc").mkdir(parents=True)
            (root.path / "usr/etc").mkdir(parents=True)
        self.payloads = Shelf(folder / "payload")

    def file(self, root: Root, where: str, name: str, content: str, mode: int = 0o644) -> None:
        place = root.path / where / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(content)
        place.chmod(mode)

    def shipped(self, root: Root, name: str, content: str) -> None:
        """In the image: its usr/etc, and the etc that is made of it."""
        self.file(root, "usr/etc", name, content)
        self.file(root, "etc", name, content)

    def payload(self, **entries: Entry) -> Payload:
        items = {f"/etc/{name}": entry for name, entry in entries.items()}
        load = Payload("u1", "c", tuple((path, items[path].node) for path in sorted(items)))
        self.payloads.save(load, items)
        return load

    def predict(self, load: Payload, skips_special_files: bool = NEW_OSTREE) -> MergeReport:
        return merge.predict(self.running, self.target, load, skips_special_files)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


A = Entry.file(b"a")


def test_incident_4_a_file_that_equals_the_old_images_would_be_dropped(node: Node) -> None:
    node.shipped(node.running, "x", "a")
    report = node.predict(node.payload(x=A))
    assert (report.dropped, report.replaced, report.kept) == (("/etc/x",), (), ())
    assert "/etc/x would have been dropped" in report.lines()[0]


def test_a_file_that_equals_the_old_images_and_has_another_default_would_be_replaced(node: Node) -> None:
    node.shipped(node.running, "x", "a")
    node.shipped(node.target, "x", "b")
    assert node.predict(node.payload(x=A)).replaced == ("/etc/x",)


def test_a_file_that_the_merge_keeps_is_no_news(node: Node) -> None:
    node.file(node.running, "etc", "x", "a")
    assert node.predict(node.payload(x=A)) == MergeReport()


def test_what_is_new_in_this_update_is_not_lost(node: Node) -> None:
    assert node.predict(node.payload(x=A)) == MergeReport()


def test_what_this_update_changes_anyway_is_not_lost(node: Node) -> None:
    node.file(node.running, "etc", "x", "old")
    assert node.predict(node.payload(x=A)) == MergeReport()


def test_what_is_to_go_and_would_be_carried_over_is_told(node: Node) -> None:
    node.file(node.running, "etc", "x", "old")
    assert node.predict(node.payload(x=Entry.absent())).kept == ("/etc/x",)


def test_places_outside_of_etc_are_not_merged(node: Node) -> None:
    (node.running.path / "usr").mkdir(exist_ok=True)
    (node.running.path / "usr/local").symlink_to("../var/usrlocal")
    load = Payload("u1", "c", (("/var/x", A.node), ("/usr/local/x", A.node)))
    assert node.predict(load) == MergeReport()


def test_a_file_where_the_new_image_has_a_directory_makes_the_whole_merge_fail(node: Node) -> None:
    """Known before the drain, not at the shutdown."""
    node.file(node.running, "etc", "x", "by hand")
    (node.target.path / "etc/x").mkdir()
    with pytest.raises(Broken, match="cannot finalize: During /etc merge: .*newly defaults to directory 'x'"):
        node.predict(node.payload(y=A))


def test_a_link_of_the_new_image_that_leads_out_of_etc_is_refused(node: Node) -> None:
    node.shipped(node.running, "d/x", "a")
    node.file(node.running, "etc", "d/x", "changed")
    (node.target.path / "etc/d").symlink_to("/usr/share/d")
    with pytest.raises(Broken, match="a link leads out of /etc"):
        node.predict(node.payload(y=A))


def test_a_fifo_fails_the_merge_of_an_old_libostree_only(node: Node) -> None:
    """Field case TXN-45."""
    (node.running.path / "etc/new").mkdir()
    os.mkfifo(node.running.path / "etc/new/fifo")
    assert node.predict(node.payload(y=A), NEW_OSTREE) == MergeReport()
    with pytest.raises(Broken, match="cannot finalize"):
        node.predict(node.payload(y=A), OLD_OSTREE)


def test_an_etc_that_cannot_be_read_is_named(node: Node) -> None:
    (node.running.path / "usr/etc").rmdir()
    with pytest.raises(Broken, match="cannot read .*usr/etc"):
        node.predict(node.payload(y=A))


def test_what_would_be_dropped_is_there_before_a_reboot_that_somebody_else_orders(node: Node) -> None:
    node.shipped(node.running, "x", "a")
    node.shipped(node.running, "y", "a")
    load = node.payload(x=A, y=A, z=A)
    report = node.predict(load)
    merge.pre_place(report, node.target, load, node.payloads)
    assert sorted(os.listdir(node.target.path / "etc")) == ["x", "y"]
    assert node.predict(load) == MergeReport(), "the merge leaves it alone there"


def test_nothing_to_place_writes_nothing(node: Node) -> None:
    load = node.payload(x=A)
    merge.pre_place(MergeReport(), node.target, load, node.payloads)
    assert os.listdir(node.target.path / "etc") == []


def test_a_report_names_paths_and_no_content(node: Node) -> None:
    node.shipped(node.running, "x", "canary")
    assert "canary" not in "\n".join(node.predict(node.payload(x=Entry.file(b"canary"))).lines())


# -- late changes -----------------------------------------------------------------------------------------------------


def await_next_time_stamp(probe: Path, since: float) -> None:
    """File systems count time in steps of some milliseconds: write until a file is newer than `since`."""
    probe.touch()
    while probe.stat().st_ctime <= since:
        probe.write_bytes(b"x")


def test_late_changes_are_told_whatever_the_clock_says(node: Node) -> None:
    """STATE-22: nothing is compared for being later, so a clock that jumps hides nothing and adds nothing."""
    etc = node.running.path / "etc"
    for name in ("early", "mode", "content", "gone", "replaced"):
        node.file(node.running, "etc", name, "a")
    node.file(node.running, "etc", "deep/stays", "a")
    before = merge.snapshot(etc)
    assert merge.late_changes(before, merge.snapshot(etc)) == ()
    await_next_time_stamp(node.running.path / "probe", max(path.lstat().st_ctime for path in etc.iterdir()))
    (etc / "mode").chmod(0o600)
    (etc / "content").write_text("b")
    os.utime(etc / "content", (0, 0))
    (etc / "gone").unlink()
    node.file(node.running, "etc", "deep/new", "a")
    (etc / "link").symlink_to("nowhere")
    (etc / "dir").mkdir()
    (etc / "other").write_text("a")
    (etc / "other").rename(etc / "replaced")
    found = [path[len(os.fspath(etc)) :] for path in merge.late_changes(before, merge.snapshot(etc))]
    assert found == ["/content", "/deep/new", "/dir", "/gone", "/link", "/mode", "/replaced"]


def test_a_snapshot_of_nothing_is_empty(node: Node) -> None:
    assert merge.snapshot(node.running.path / "gone") == {}


def test_a_commit_after_the_merge_puts_every_kind_right(node: Node) -> None:
    node.shipped(node.running, "dropped", "a")
    node.shipped(node.target, "replaced", "b")
    node.file(node.target, "etc", "kept", "old")
    load = node.payload(dropped=A, replaced=A, kept=Entry.absent())
    commit.apply(load, node.payloads, node.target)
    etc = node.target.path / "etc"
    assert [(etc / name).read_text() for name in ("dropped", "replaced")] == ["a", "a"]
    assert not (etc / "kept").exists()
