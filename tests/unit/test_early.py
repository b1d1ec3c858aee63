"""The early unit: what it decides, and what it leaves behind when the power goes at any of its writes."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional

import pytest

from mcdaemon.errors import Broken, Failure
from mcdaemon.host import files, users
from mcdaemon.host.deployments import Machine
from mcdaemon.host.files import Entry, Kind
from mcdaemon.host.root import Root
from mcdaemon.update import commit, early, journal
from mcdaemon.update.early import MOST_REPAIRS, Early, Outcome, decide
from mcdaemon.update.journal import FailedTarget, Journal, Update
from mcdaemon.update.payload import Payload, Shelf

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: files get owners")

TARGET, SOURCE = "t" * 64 + ".0", "s" * 64 + ".0"
UPDATE = Update("u1", "desired", "rendered", SOURCE, digest="sha256:1", staged=TARGET, finalizing="boot-0")


# -- the decision -----------------------------------------------------------------------------------------------------


def everything() -> list[tuple[Optional[Update], str, bool, Early]]:
    updates: list[Optional[Update]] = [None]
    for live, finalizing, rolled_back, repairs in itertools.product((False, True), ("", "b"), (False, True), range(4)):
        updates.append(dataclasses.replace(UPDATE, live=live, finalizing=finalizing, rolled_back=rolled_back,
                                           repairs=repairs))  # fmt: skip
    return [(update, booted, complete, decide(update, booted, complete)[0])
            for update, booted, complete in itertools.product(updates, (TARGET, SOURCE, "", "other"), (False, True))]


def test_only_a_live_change_that_is_half_written_is_put_back_and_no_other_minds_the_undo_record() -> None:
    for update, booted, complete, action in everything():
        touched = decide(update, booted, complete, untouched=False)[0]
        assert touched is (Early.PUT_BACK if update is not None and update.live else action)
        if update is not None and update.live:
            applied = dataclasses.replace(update, applied=True)
            assert decide(applied, booted, complete, untouched=False)[0] is Early.NOTHING


def test_every_boot_has_a_decision_and_a_reason() -> None:
    assert {action for _u, _b, _c, action in everything()} == set(Early)
    for update, booted, complete, _action in everything():
        assert decide(update, booted, complete)[1]


def test_a_boot_without_a_finalized_update_is_left_alone() -> None:
    for update, booted, _complete, action in everything():
        if update is None or update.live or (not update.finalizing and booted != update.staged):
            assert action is Early.NOTHING


def test_a_target_that_somebody_else_has_finalized_is_completed_as_well() -> None:
    """Unlocked by another client, merged by an ordinary shutdown: it was verified, so its payload is complete."""
    for update, booted, complete, action in everything():
        if update is not None and not update.live and booted == update.staged and not complete:
            assert action in (Early.COMPLETE, Early.GIVE_UP)


def test_only_the_incomplete_target_is_completed_and_never_more_often_than_said() -> None:
    for update, booted, complete, action in everything():
        if action in (Early.COMPLETE, Early.GIVE_UP):
            assert update is not None and booted == update.staged and not complete
        if action is Early.COMPLETE:
            assert update is not None and update.repairs < MOST_REPAIRS and not update.rolled_back


def test_what_somebody_else_has_made_of_the_target_keeps_the_targets_files() -> None:
    """They staged a package onto the booted target and rebooted before it was confirmed."""
    for update, booted, complete, action in everything():
        found = decide(update, booted, complete, carries=True)[0]
        as_target = decide(update, update.staged if update is not None else "", complete)[0]
        finalized = update is not None and bool(update.finalizing)
        assert found is (as_target if finalized else action)


def test_any_other_deployment_gets_its_shared_files_back() -> None:
    for update, booted, _complete, action in everything():
        if update is not None and not update.live and update.finalizing and booted != update.staged:
            assert action is Early.PUT_BACK


# -- a node -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Node(Machine):
    """A double of the machine in a directory: which deployment is booted is said, not found out; all else is files."""

    name: str = TARGET

    def booted(self) -> tuple[str, str]:
        return "rhcos", self.name

    @property
    def root(self) -> Root:
        return Root.of_deployment(self.sysroot, "rhcos", self.name)

    @property
    def journal(self) -> Path:
        return self.top / "journal.json"

    @property
    def payloads(self) -> Shelf:
        return Shelf(self.top / "payload")

    @property
    def undo(self) -> Shelf:
        return Shelf(self.top / "undo")

    def booting(self, name: str, boot_id: str = "boot-1") -> Node:
        (self.top / "proc/sys/kernel/random/boot_id").write_text(boot_id)
        return dataclasses.replace(self, name=name)

    def early(self) -> Outcome:
        return early.run(self, self.root, self.journal, self.payloads, self.undo)

    def record(self) -> Journal:
        found, alien = journal.load(self.journal)
        assert not alien
        return found

    @property
    def update(self) -> Update:
        found = self.record().update
        assert found is not None
        return found

    def read(self, path: str) -> Optional[bytes]:
        return files.read_file(self.root, path)


ENTRIES = {
    "/etc/new": Entry.file(b"new", 0o640, 0, 5), "/etc/both": Entry.file(b"new"), "/etc/link": Entry.link("new"),
    "/etc/gone": Entry.absent(), "/var/new": Entry.file(b"new"), "/var/both": Entry.file(b"new"),
    "/usr/local/tool": Entry.file(b"new", 0o755),
}  # fmt: skip
LOAD = Payload("u1", "desired", tuple((path, ENTRIES[path].node) for path in sorted(ENTRIES)))


@pytest.fixture
def node(tmp_path: Path) -> Node:
    """The target was finalized and booted, and nothing of its config is there yet."""
    node = Node(tmp_path)
    (tmp_path / "proc/sys/kernel/random").mkdir(parents=True)
    for name in (TARGET, SOURCE):
        place = node.booting(name).root.path
        (place / "etc").mkdir(parents=True)
        (place / "usr").mkdir()
        (place / "usr/local").symlink_to("../var/usrlocal")
        (place / "etc/both").write_bytes(b"old")
        (place / "etc/gone").write_bytes(b"old")
    var = node.root.var
    (var / "usrlocal").mkdir(parents=True)
    (var / "both").write_bytes(b"old")
    node.payloads.save(LOAD, ENTRIES)
    journal.store(node.journal, Journal(UPDATE))
    return node.booting(TARGET)


def is_new(node: Node) -> bool:
    return all(files.read_node(node.root, path) == entry.node for path, entry in ENTRIES.items())


def is_old(node: Node) -> bool:
    shared = [node.read("/var/both"), node.read("/var/new"), node.read("/usr/local/tool")]
    return shared == [b"old", None, None] and node.read("/etc/both") == node.read("/etc/gone") == b"old"


# -- the target booted ------------------------------------------------------------------------------------------------


def test_an_incomplete_target_is_completed_and_booted_again(node: Node) -> None:
    outcome = node.early()
    assert (outcome.action, outcome.reboot) == (Early.COMPLETE, True)
    assert is_new(node)
    assert (node.update.repairs, node.update.armed, node.update.committed, node.update.proved) == (
        1, "boot-1", TARGET, TARGET)  # fmt: skip
    assert node.booting(TARGET, "boot-2").early() == Outcome(Early.NOTHING, "the target is booted and complete")


def test_a_complete_target_is_left_alone(node: Node) -> None:
    commit.apply(LOAD, node.payloads, node.root)
    before = node.journal.read_bytes()
    assert node.early().action is Early.NOTHING
    assert node.journal.read_bytes() == before


@pytest.mark.parametrize("spoil", [
    lambda place: (place / "etc/both").write_bytes(b"odd"), lambda place: (place / "etc/new").chmod(0o644),
    lambda place: (place / "etc/link").unlink(), lambda place: (place / "etc/gone").touch(),
    lambda place: os.chown(place / "etc/new", 0, 0),
], ids=["content", "mode", "link", "left over", "owner"])  # fmt: skip
def test_a_single_thing_that_is_not_right_makes_a_target_incomplete(node: Node, spoil: Callable[[Path], Any]) -> None:
    commit.apply(LOAD, node.payloads, node.root)
    spoil(node.root.path)
    assert node.early().action is Early.COMPLETE
    assert is_new(node)


def test_a_target_with_another_password_than_the_configs_is_incomplete(node: Node) -> None:
    """The power was cut after the files were synced and before the last password was."""
    (node.root.path / "etc/passwd").write_text("core:x:1000:1000::/home/core:/bin/sh\n")
    (node.root.path / "etc/shadow").write_text("core:$6$old:1::::::\n")
    load = dataclasses.replace(LOAD, passwords=(("core", "$6$new"),))
    node.payloads.save(load, ENTRIES)
    commit.apply(LOAD, node.payloads, node.root)
    assert node.early().action is Early.COMPLETE
    assert users.has_password_hash(node.root, "core", "$6$new")
    assert node.booting(TARGET, "boot-2").early().action is Early.NOTHING


def test_a_target_that_does_not_stay_complete_is_given_up_and_remembered(node: Node) -> None:
    for number in range(MOST_REPAIRS):
        assert node.booting(TARGET, f"boot-{number}").early().reboot
        (node.root.path / "etc/both").write_bytes(b"somebody's own")
    outcome = node.early()
    assert (outcome.action, outcome.reboot) == (Early.GIVE_UP, False)
    assert node.update.rolled_back and "still incomplete after 2 repairs" in node.update.failure
    failed = node.record().failed
    assert failed is not None and failed.at > 0
    assert failed == FailedTarget("desired", "sha256:1", node.update.failure, "rendered", failed.at)
    assert node.read("/etc/both") == b"somebody's own"


def drop_payload(node: Node) -> None:
    node.payloads.drop("u1")


def tear_payload(node: Node) -> None:
    path = node.payloads.folder / "u1/payload.json"
    path.write_bytes(path.read_bytes()[:-20])


@pytest.mark.parametrize("lose", [drop_payload, tear_payload])
def test_a_target_whose_payload_is_gone_or_torn_is_given_up(node: Node, lose: Callable[[Node], None]) -> None:
    lose(node)
    outcome = node.early()
    assert (outcome.action, outcome.reboot) == (Early.GIVE_UP, False)
    assert node.update.rolled_back and "payload u1 is gone" in node.update.failure


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"bad")], ids=["gone", "bad"])
def test_a_content_that_is_lost_is_an_error_that_counts_as_an_attempt(
    node: Node, damage: Callable[[Path], Any]
) -> None:
    damage(node.payloads.folder / "u1/content" / hashlib.sha256(b"new").hexdigest())
    for number in range(MOST_REPAIRS):
        with pytest.raises(Broken, match="content"):
            node.early()
        assert node.update.repairs == number + 1
    assert node.early().action is Early.GIVE_UP


# -- the old deployment booted ----------------------------------------------------------------------------------------


def committed(node: Node) -> None:
    """The state between commit and reboot."""
    target = node.booting(TARGET)
    commit.remember(LOAD, node.undo, target.root, target.root.shared)
    commit.apply(LOAD, node.payloads, target.root)
    changed = dataclasses.replace(UPDATE, committed=TARGET, proved=TARGET, armed="boot-0")
    journal.store(node.journal, Journal(changed))


def test_the_old_deployment_gets_its_shared_files_back_as_often_as_it_boots(node: Node) -> None:
    committed(node)
    old = node.booting(SOURCE)
    for _ in range(3):
        assert old.early() == Outcome(Early.PUT_BACK, "the old deployment is booted")
        assert is_old(old)


def test_what_was_put_back_is_not_counted_as_committed_any_more(node: Node) -> None:
    """Or the loop would reboot into a root that lost its shared files since it was proved."""
    committed(node)
    node.booting(SOURCE).early()
    assert (node.update.committed, node.update.proved, node.update.armed) == ("", "", "boot-0")


@pytest.mark.parametrize("lose", [drop_payload, tear_payload])
def test_the_old_deployment_does_not_need_the_payload(node: Node, lose: Callable[[Node], None]) -> None:
    committed(node)
    lose(node)
    assert node.booting(SOURCE).early().action is Early.PUT_BACK
    assert is_old(node.booting(SOURCE))


def test_an_old_deployment_before_the_commit_has_nothing_to_put_back(node: Node) -> None:
    assert node.booting(SOURCE).early().action is Early.PUT_BACK
    assert is_old(node.booting(SOURCE))


def test_a_torn_undo_record_is_an_error_that_names_it(node: Node) -> None:
    committed(node)
    (node.undo.folder / "u1/payload.json").write_bytes(b"{")
    with pytest.raises(Broken, match="undo/u1/payload.json"):
        node.booting(SOURCE).early()


def test_the_target_that_boots_after_all_is_completed(node: Node) -> None:
    committed(node)
    node.booting(SOURCE).early()
    assert node.booting(TARGET, "boot-3").early().action is Early.COMPLETE
    assert is_new(node.booting(TARGET))


# -- nothing of ours --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [b"", b"{", b"[]"])
def test_an_alien_journal_is_reported_and_left_for_the_agent_who_puts_right_what_was_in_flight(
    node: Node, content: bytes
) -> None:
    node.journal.write_bytes(content)
    outcome = node.early()
    assert outcome.action is Early.NOTHING and "cannot use the journal" in outcome.why
    assert node.journal.read_bytes() == content, "the agent has to learn of it as well"
    assert is_old(node)


def test_no_journal_is_nothing_to_do(node: Node) -> None:
    node.journal.unlink()
    assert node.early() == Outcome(Early.NOTHING, "no update is in flight")


def test_a_live_change_in_flight_is_left_to_the_loop(node: Node) -> None:
    journal.store(node.journal, Journal(dataclasses.replace(UPDATE, live=True)))
    assert node.early().action is Early.NOTHING
    assert is_old(node)


# -- a live change ----------------------------------------------------------------------------------------------------


@pytest.fixture
def live(node: Node) -> Node:
    """A change without a reboot whose undo record is there; nothing of it is written yet."""
    node = node.booting(SOURCE)
    journal.store(node.journal, Journal(dataclasses.replace(UPDATE, live=True, staged="", finalizing="")))
    commit.remember(LOAD, node.undo, node.root, lambda path: True)
    return node


def test_a_live_change_that_is_half_written_is_put_back_and_booted_again_once(live: Node) -> None:
    commit.apply(LOAD, live.payloads, live.root, lambda path: path.startswith("/etc/new"))
    outcome = live.early()
    assert outcome.action is Early.PUT_BACK and outcome.reboot and is_old(live) and live.read("/etc/new") is None
    assert live.undo.load("u1") is not None and live.update.live, "the loop goes on from here"
    assert live.early() == Outcome(Early.NOTHING, "no update that reboots is in flight")


def test_a_live_change_that_is_wholly_written_and_not_acted_upon_is_put_back_too(live: Node) -> None:
    commit.apply(LOAD, live.payloads, live.root)
    assert live.early().reboot and is_old(live)


def test_a_live_change_of_which_nothing_is_written_or_that_was_applied_is_no_reason_to_reboot(live: Node) -> None:
    assert live.early().action is Early.NOTHING
    commit.apply(LOAD, live.payloads, live.root)
    journal.store(live.journal, Journal(dataclasses.replace(live.update, applied=True)))
    assert live.early().action is Early.NOTHING and is_new(live)


def test_what_cannot_be_put_back_is_no_reason_to_reboot(live: Node) -> None:
    """A directory that was made for the config holds somebody's file meanwhile: it stays."""
    live.undo.drop("u1")
    made = Payload("u1", "desired", (("/etc/made/file", Entry.file(b"new").node),))
    commit.remember(made, live.undo, live.root, lambda path: True)
    (live.root.path / "etc/made").mkdir()
    (live.root.path / "etc/made/theirs").touch()
    outcome = live.early()
    assert outcome.action is Early.PUT_BACK and not outcome.reboot


def test_what_is_spoilt_again_before_each_boot_does_not_make_a_reboot_loop(live: Node) -> None:
    reboots = 0
    for _boot in range(MOST_REPAIRS + 3):
        commit.apply(LOAD, live.payloads, live.root)
        reboots += live.early().reboot
        assert is_old(live)
    assert reboots == MOST_REPAIRS


def test_a_power_cut_at_any_write_of_putting_a_live_change_back_is_made_good_by_the_next_boot(live: Node) -> None:
    commit.apply(LOAD, live.payloads, live.root)
    total = writes_of(live)
    assert total > 3 and is_old(live)
    for lasts in range(total):
        commit.apply(LOAD, live.payloads, live.root)
        journal.store(live.journal, Journal(dataclasses.replace(live.update, repairs=0)))
        assert cut(live, lasts)
        outcome = live.early()
        assert is_old(live) and (outcome.reboot or outcome.action is Early.NOTHING)


# -- power cuts -------------------------------------------------------------------------------------------------------


class PowerCut(BaseException):
    """Nothing catches it, as nothing catches the real one."""


class Supply:
    """Cuts the power before the n-th write of a file (state files and managed ones alike)."""

    def __init__(self, patch: pytest.MonkeyPatch, lasts: int) -> None:
        self.writes = 0
        self._lasts = lasts
        self._real = {name: getattr(os, name) for name in ("rename", "unlink", "mkdir")}
        for name in self._real:
            patch.setattr(os, name, self._counted(name))

    def _counted(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **more: Any) -> Any:
            if self.writes >= self._lasts:
                raise PowerCut(name)
            self.writes += 1
            return self._real[name](*arguments, **more)

        return call


def cut(node: Node, lasts: int) -> bool:
    """Run the early unit on a supply that lasts for so many writes; False when it was enough."""
    with pytest.MonkeyPatch.context() as patch:
        supply = Supply(patch, lasts)
        try:
            node.early()
        except PowerCut:
            return True
        assert supply.writes <= lasts
        return False


def writes_of(node: Node) -> int:
    with pytest.MonkeyPatch.context() as patch:
        supply = Supply(patch, 10_000)
        node.early()
        return supply.writes


def restore(node: Node, make: Callable[[Node], None]) -> None:
    node.undo.drop("u1")
    for path, entry in {"/etc/both": b"old", "/etc/gone": b"old", "/var/both": b"old"}.items():
        files.write_file(node.root, path, entry, 0o644, 0, 0)
    for path in ("/etc/new", "/etc/link", "/var/new", "/usr/local/tool"):
        files.remove(node.root, path)
    journal.store(node.journal, Journal(UPDATE))
    make(node)


def test_a_power_cut_at_any_write_of_a_completion_ends_complete_or_counted(node: Node) -> None:
    writes_of(node)  # makes the directories, which are there from then on
    restore(node, lambda _node: None)
    total = writes_of(node)
    assert total > 10
    for lasts in range(total):
        restore(node, lambda _node: None)
        assert cut(node, lasts)
        touched = not is_old(node) or node.read("/etc/new") is not None
        assert node.update.repairs >= touched, "written, but not counted before"
        again = node.booting(TARGET, "boot-2")
        assert again.early().action in (Early.COMPLETE, Early.NOTHING)
        assert is_new(again)
        record = node.undo.load("u1")
        assert record is not None and {path: n.kind for path, n in record.entries if path == "/var/both"} == {
            "/var/both": Kind.FILE}  # fmt: skip
        old = node.booting(SOURCE, "boot-3")
        old.early()
        assert (old.read("/var/both"), old.read("/var/new"), old.read("/usr/local/tool")) == (b"old", None, None)


def test_a_power_cut_at_any_write_of_putting_back_is_made_good_by_the_next_boot(node: Node) -> None:
    committed(node)
    total = writes_of(node.booting(SOURCE))
    assert total > 3
    for lasts in range(total):
        restore(node, committed)
        old = node.booting(SOURCE)
        assert cut(old, lasts)
        old.early()
        assert is_old(old)


def test_power_that_goes_in_every_boot_is_given_up_in_the_end(node: Node) -> None:
    for number in range(MOST_REPAIRS):
        # Enough for the journal, not for the files.
        assert cut(node.booting(TARGET, f"boot-{number}"), 6)
    outcome = node.early()
    assert outcome.action is Early.GIVE_UP and node.update.rolled_back


def test_a_disk_that_cannot_be_written_is_an_error_and_not_a_reboot_loop(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_arguments: Any, **_more: Any) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "rename", full)
    with pytest.raises(Failure, match="Read-only file system"):
        node.early()
    assert node.update.repairs == 0
