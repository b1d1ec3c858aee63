"""The journal: a torn or alien one is never used and never lost, and a write replaces all of it or nothing."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from mcdaemon.errors import Broken, Failure, Held, HoldReason
from mcdaemon.update.journal import Confirmed, FailedTarget, Journal, Update, decode, encode, keep_aside, load, store

UPDATE = Update(
    id="0123456789ab", desired="d" * 64, name="rendered-worker-1", source="s" * 64 + ".0", previous="rendered-worker-0",
    digest="sha256:" + "1" * 64, attempt=2, staged="t" * 64 + ".0", drained=True, finalizing="boot-1",
    committed="t" * 64 + ".0", armed="boot-1",
)  # fmt: skip
FULL = Journal(UPDATE, FailedTarget("f" * 64, "", "it did not boot"), "sha256:" + "2" * 64)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.json"


def signed(inner: Any, **outer: Any) -> bytes:
    """A journal with a right checksum, whatever is in it."""
    text = json.dumps(inner, sort_keys=True, separators=(",", ":")).encode()
    return json.dumps({"format": 1, "sha256": hashlib.sha256(text).hexdigest(), "journal": inner, **outer}).encode()


def members(**update: Any) -> dict[str, Any]:
    return {"update": {**dataclasses.asdict(UPDATE), **update}, "failed": None, "digest": ""}


def refused(content: bytes) -> str:
    with pytest.raises(ValueError) as caught:
        decode(content)
    return str(caught.value)


# -- a journal that is ours -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("journal", [Journal(), FULL, Journal(update=UPDATE), Journal(digest="sha256:1")])
def test_what_was_stored_is_loaded(path: Path, journal: Journal) -> None:
    store(path, journal)
    assert load(path) == (journal, "")
    assert path.stat().st_mode & 0o777 == 0o600


def test_no_journal_is_an_empty_one(path: Path) -> None:
    assert load(path) == (Journal(), "")
    path.symlink_to("nowhere")
    assert load(path) == (Journal(), "")


def test_a_failure_with_any_characters_survives(path: Path) -> None:
    odd = Journal(dataclasses.replace(UPDATE, failure='line\n"quoted" \u2028 \\ é \x00'))
    store(path, odd)
    assert load(path) == (odd, "")


def test_members_that_a_newer_version_added_to_ours_have_their_defaults() -> None:
    inner = members()
    for name in ("repairs", "failure", "armed"):
        del inner["update"][name]
    update = decode(signed(inner)).update
    assert update is not None and (update.repairs, update.failure, update.armed) == (0, "", "")


# -- torn -------------------------------------------------------------------------------------------------------------


def test_a_journal_torn_at_any_byte_is_refused() -> None:
    content = encode(FULL)
    assert decode(content.rstrip()) == FULL
    for length in range(len(content.rstrip())):
        refused(content[:length])


def test_a_journal_whose_tail_was_never_written_is_refused() -> None:
    content = encode(FULL)
    for length in range(0, len(content) - 1, 7):
        refused(content[:length] + b"\0" * (len(content) - length))


def test_a_flipped_bit_anywhere_is_refused_or_changes_nothing() -> None:
    content = encode(FULL)
    survived = 0
    for place in range(len(content)):
        for bit in (0, 5, 7):
            flipped = bytearray(content)
            flipped[place] ^= 1 << bit
            try:
                assert decode(bytes(flipped)) == FULL, (place, bit)
                survived += 1
            except ValueError:
                continue
    # Blanks between the members are the only bytes that say nothing.
    assert survived < len(content) // 3


def test_two_journals_written_over_each_other_are_refused() -> None:
    first, second = encode(FULL), encode(Journal())
    refused(second + first[len(second) :])
    refused(first + second)


# -- alien ------------------------------------------------------------------------------------------------------------

ALIENS = {
    "empty": b"", "blank": b"  \n", "null": b"null", "list": b"[]", "number": b"1", "text": b'"journal"',
    "object": b"{}", "binary": bytes(range(256)), "utf-16": '{"format": 1}'.encode("utf-16"),
    "deep": b"[" * 200_000, "deep and closed": b"[" * 50_000 + b"]" * 50_000, "not a number": b'{"format": NaN}',
    "the mcd's": b'{"metadata": {"name": "rendered"}}', "yaml": b"format: 1\n",
    "another format": signed(members(), format=2), "format as text": signed(members(), format="1"),
    "one member more": signed(members(), more=1), "checksum of another": signed(members(), sha256="0" * 64),
    "checksum is no text": signed(members(), sha256=None), "inner is null": signed(None), "inner is a list": signed([]),
    "inner has no digest": signed({"update": None, "failed": None}),
    "inner has one more": signed({"update": None, "failed": None, "digest": "", "more": 1}),
    "digest is null": signed({"update": None, "failed": None, "digest": None}),
    "update is a list": signed({"update": [], "failed": None, "digest": ""}),
    "update is empty": signed({"update": {}, "failed": None, "digest": ""}),
    "failed is text": signed({"update": None, "failed": "x", "digest": ""}),
    "failed lacks its reason": signed({"update": None, "failed": {"desired": "", "digest": ""}, "digest": ""}),
}  # fmt: skip


@pytest.mark.parametrize("case", ALIENS)
def test_what_is_no_journal_is_refused_with_a_reason_and_kept_aside(path: Path, case: str) -> None:
    assert refused(ALIENS[case])
    path.write_bytes(ALIENS[case])
    journal, sentence = load(path)
    assert journal == Journal()
    assert sentence.startswith(f"cannot use the journal {path}: ")
    assert len(sentence) < 600 and sentence.isprintable()
    aside = keep_aside(path)
    assert aside == path.with_name("journal.json.alien-1") and aside.read_bytes() == ALIENS[case]
    assert path.read_bytes() == ALIENS[case], "without one, nothing would be known to be in flight"
    assert load(path) == (journal, sentence)
    store(path, FULL)
    assert load(path) == (FULL, "") and aside.read_bytes() == ALIENS[case]


WRONG: dict[type, list[Any]] = {
    str: [None, 1, True, [], {}, 1.5], bool: [None, 0, 1, "true", "", []], int: [None, "1", True, 1.0, [], 1e400],
}  # fmt: skip


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Update)])
def test_a_member_of_the_wrong_type_is_named(field: str) -> None:
    for value in WRONG[type(getattr(UPDATE, field))]:
        assert f"/journal/update/{field}: expected " in refused(signed(members(**{field: value}))), value


@pytest.mark.parametrize("field", ["id", "desired", "name", "source"])
def test_a_member_that_must_be_there_is_missed(field: str) -> None:
    inner = members()
    del inner["update"][field]
    assert field in refused(signed(inner))


def test_a_member_of_another_version_is_named() -> None:
    """STATE-25, for what this agent itself has written."""
    assert "/journal/update/soft_reboot: not a member of this format" in refused(signed(members(soft_reboot=True)))


def test_a_huge_file_is_not_swallowed(path: Path) -> None:
    with open(path, "wb") as stream:
        stream.write(encode(FULL))
        stream.truncate(1 << 36)
    journal, sentence = load(path)
    assert journal == Journal() and "larger than" in sentence
    keep_aside(path)
    assert path.with_name("journal.json.alien-1").stat().st_size == 1 << 36


# -- kept aside -------------------------------------------------------------------------------------------------------


def test_what_was_kept_aside_is_never_overwritten(path: Path) -> None:
    for number in range(1, 5):
        path.write_text(f"torn {number}")
        assert keep_aside(path).name == f"journal.json.alien-{number}"
        path.unlink()
    path.with_name("journal.json.alien-5").symlink_to("nowhere")
    path.write_text("torn 6")
    assert keep_aside(path).name == "journal.json.alien-6"
    path.unlink()
    kept = {place.name: place.read_text() for place in path.parent.iterdir() if not place.is_symlink()}
    assert kept == {f"journal.json.alien-{number}": f"torn {number}" for number in (1, 2, 3, 4, 6)}


def test_who_was_killed_after_keeping_it_aside_does_not_keep_it_twice(path: Path) -> None:
    path.with_name("journal.json.alien-1").write_text("another")
    path.write_text("torn")
    assert keep_aside(path) == keep_aside(path) == path.with_name("journal.json.alien-2")
    assert len(list(path.parent.iterdir())) == 3


def test_when_too_many_were_kept_aside_a_human_is_asked_and_nothing_is_lost(path: Path) -> None:
    for number in range(1, 1000):
        path.with_name(f"journal.json.alien-{number}").touch()
    path.write_text("torn")
    with pytest.raises(Broken, match="too many of them"):
        keep_aside(path)
    assert path.read_text() == "torn"


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo], ids=["directory", "fifo"])
def test_what_is_no_file_is_kept_aside_too_and_does_not_hang_the_agent(path: Path, make: Any) -> None:
    make(path)
    journal, sentence = load(path)
    assert journal == Journal() and "not a regular file" in sentence
    assert keep_aside(path).exists()
    store(path, FULL)
    assert load(path) == (FULL, "")


def test_a_directory_with_something_in_it_is_kept_aside_as_a_whole(path: Path) -> None:
    path.mkdir()
    (path / "mine").write_text("x")
    keep_aside(path)
    assert (path.with_name("journal.json.alien-1") / "mine").read_text() == "x"


# -- storing is all or nothing ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["rename", "fsync", "write"])
def test_a_store_that_fails_leaves_the_old_journal_and_nothing_else(
    path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    store(path, FULL)

    def full(*_arguments: Any, **_more: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        with pytest.raises(Held) as caught:
            store(path, Journal())
    assert caught.value.reason is HoldReason.SPACE and str(path) in str(caught.value)
    assert load(path) == (FULL, "")
    assert os.listdir(path.parent) == [path.name]


def test_the_content_is_on_the_disk_before_the_name_and_the_name_before_the_return(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut may come between any two calls."""
    events: list[str] = []
    real_fsync, real_rename = os.fsync, os.rename

    def fsync(descriptor: int) -> None:
        place = os.readlink(f"/proc/self/fd/{descriptor}")
        events.append("directory" if place == str(path.parent) else "content")
        real_fsync(descriptor)

    def rename(source: Any, target: Any, **more: Any) -> None:
        events.append("rename")
        real_rename(source, target, **more)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    store(path, FULL)
    assert events == ["content", "rename", "directory"]


def test_a_directory_that_is_gone_is_named(path: Path) -> None:
    with pytest.raises(Failure, match=r"cannot write .*missing/journal\.json: No such file"):
        store(path.parent / "missing/journal.json", FULL)


def test_two_writers_never_mix(path: Path) -> None:
    """`mcdaemon retry` beside the agent: the last one wins, and it is whole."""
    journals = [Journal(), FULL]
    children = []
    for journal in journals:
        child = os.fork()
        if child == 0:
            try:
                for _ in range(40):
                    store(path, journal)
            finally:
                os._exit(0)
        children.append(child)
    store(path, FULL)
    for _ in range(200):
        assert load(path)[0] in journals and not path.with_name("journal.json.alien-1").exists()
    for child in children:
        os.waitpid(child, 0)


# -- what of it still holds -------------------------------------------------------------------------------------------

TARGET = UPDATE.staged


def test_what_was_done_to_one_deployment_is_void_for_another() -> None:
    update = dataclasses.replace(UPDATE, proved=TARGET)
    same, other = update.progress("boot-1", TARGET, TARGET), update.progress("boot-1", "x.0", "x.0")
    assert (same.verified, same.committed, same.proved) == (True, True, True)
    assert (other.verified, other.committed, other.proved) == (False, False, False)


def test_without_a_deployment_nothing_was_done_to_it() -> None:
    empty = Update("i", "d", "n", "s")
    progress = empty.progress("boot-1", "", "")
    assert not (progress.verified or progress.committed or progress.proved or progress.rebooting or progress.came_back)


@pytest.mark.parametrize(
    ("armed", "rebooting", "came_back"), [("", False, False), ("b1", True, False), ("b0", False, True)]
)
def test_a_reboot_that_was_asked_for_is_told_from_one_that_came(armed: str, rebooting: bool, came_back: bool) -> None:
    progress = dataclasses.replace(UPDATE, armed=armed).progress("b1", "", "")
    assert (progress.rebooting, progress.came_back) == (rebooting, came_back)


# -- what the record says of this boot --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "pending", "came_back"),
    [
        ({}, "", False),
        ({"finalizing": "boot-2"}, "t", False),
        ({"finalizing": "boot-1"}, "t", True),
        ({"finalizing": "boot-1"}, "", False),
        ({"finalizing": "boot-1", "applied": True}, "", True),
        ({"finalizing": "boot-1"}, "another", False),
        ({"finalizing": "boot-1", "staged": ""}, "", False),
        ({"armed": "boot-2", "finalizing": "boot-2"}, "t", False),
        ({"armed": "boot-1", "finalizing": "boot-1"}, "", True),
    ],
)
def test_an_old_root_has_come_back_when_this_boot_should_have_entered_the_target(
    changes: dict[str, Any], pending: str, came_back: bool
) -> None:
    """STATE-02: every mark has the boot id in which it was made; one of this boot says nothing of the last."""
    update = Update(**{"id": "u", "desired": "d", "name": "n", "source": "s", "staged": "t", **changes})
    assert update.progress("boot-2", "", pending).came_back is came_back


def test_the_shared_files_of_what_was_confirmed_matter_while_an_older_deployment_is_booted() -> None:
    confirmed = Confirmed("d", "n", "t.0", 7, "/var/a b\0/usr/local/bin/t")
    assert confirmed.outside("t.0") == ()
    assert confirmed.outside("older.0") == ("/var/a b", "/usr/local/bin/t")
    assert decode(encode(Journal(confirmed=confirmed))).confirmed == confirmed


def test_a_journal_from_before_there_was_a_confirmed_one_is_ours() -> None:
    assert decode(signed(members())).confirmed is None
    confirmed = Journal(confirmed=Confirmed("d" * 64, "rendered-worker-1", "t.0", 7))
    assert decode(encode(confirmed)) == confirmed
    assert confirmed.confirmed is not None and confirmed.confirmed.outside("older.0") == ()
    brokens: list[Any] = [{"desired": "d"}, {"desired": "d", "name": "n", "deployment": 5}, [], "x"]
    for broken in brokens:
        assert "/journal/confirmed" in refused(signed({**members(), "confirmed": broken}))


def test_a_failed_target_of_an_older_agent_is_remembered_without_its_name() -> None:
    inner = {**members(), "failed": {"desired": "d", "digest": "", "reason": "it did not boot"}}
    assert decode(signed(inner)).failed == FailedTarget("d", "", "it did not boot")
    assert str(FailedTarget("d", "", "why", "rendered-1")) == "rendered-1: why"
