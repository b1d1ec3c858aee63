"""The status file: what people are shown, and what happens to a file that is not ours."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from mcdaemon.errors import Failure
from mcdaemon.report.status import Status, load, store

REST = Status("Done", "rest", "current and validated", 1000.0)
FULL = Status(
    state="Working", step="hold", why="cannot find the image", at=1000.0, next_look=1060.0, current="rendered-1",
    desired="rendered-2", update="rendered-2", os_image="quay.io/custom/os:1", digest="sha256:1",
    target_digest="sha256:2", release_image="quay.io/release/os:4", overridden_by="99-custom",
    hold="cannot find quay.io/x", error="manifest unknown", failed="rendered-0: kubelet.service is failed",
    warnings=("cannot use the journal: torn",), host={"rpm-ostree": "2024.7", "podman": ""},
)  # fmt: skip


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "status.json"


@pytest.mark.parametrize("status", [REST, FULL])
def test_what_was_stored_is_loaded_and_can_be_read_by_everybody(path: Path, status: Status) -> None:
    store(path, status)
    assert load(path) == status
    assert path.stat().st_mode & 0o777 == 0o644


def test_no_round_in_this_boot_is_no_status(path: Path) -> None:
    assert load(path) is None


GOOD = dataclasses.asdict(REST)
ALIENS = {
    "empty": b"", "torn": json.dumps(GOOD).encode()[:40],
    "list": b"[]", "null": b"null", "text": b'"x"', "number": b"7",
    "binary": b"\xff\xfe\x00", "deep": b"[" * 100_000, "another version's": json.dumps({**GOOD, "more": 1}).encode(),
    "too little": b'{"state": "Done"}', "warnings are null": json.dumps({**GOOD, "warnings": None}).encode(),
}  # fmt: skip


@pytest.mark.parametrize("case", ALIENS)
def test_a_file_that_is_not_ours_is_no_status_and_is_left_alone(path: Path, case: str) -> None:
    path.write_bytes(ALIENS[case])
    assert load(path) is None
    assert path.read_bytes() == ALIENS[case]
    store(path, REST)
    assert load(path) == REST


def test_a_directory_in_its_place_is_named(path: Path) -> None:
    path.mkdir()
    with pytest.raises(Failure, match=rf"cannot read {path}: Is a directory"):
        load(path)


def test_a_status_that_cannot_be_written_leaves_the_old_one(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store(path, REST)

    def full(*_arguments: Any, **_more: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.rename", full)
    with pytest.raises(Failure, match="No space left"):
        store(path, FULL)
    assert load(path) == REST
    assert [place.name for place in path.parent.iterdir()] == [path.name]


def shown(**changes: Any) -> str:
    return "\n".join(dataclasses.replace(REST, **changes).lines())


def test_the_first_line_is_the_sentence() -> None:
    assert FULL.lines()[0] == "Working: cannot find the image"


def test_a_node_without_a_config_says_so() -> None:
    assert "current config   none yet" in shown() and "desired config   none" in shown()


def test_incident_3_an_override_names_itself_and_what_it_hides() -> None:
    image = {"os_image": "quay.io/custom/os:1", "digest": "sha256:1"}
    text = shown(**image, overridden_by="99-custom", release_image="quay.io/r:4")
    assert "quay.io/custom/os:1, pinned to sha256:1" in text
    assert "OS overridden    by 99-custom; it hides the release's image quay.io/r:4" in text


def test_an_override_of_nothing_hides_nothing() -> None:
    assert "hides" not in shown(overridden_by="99-custom")


def test_a_tag_that_was_never_settled_is_not_shown_as_pinned() -> None:
    assert "pinned" not in shown(os_image="quay.io/custom/os:1")


def test_a_target_that_is_what_runs_is_not_news() -> None:
    assert "goes to" not in shown(digest="sha256:1", target_digest="sha256:1")
    assert "goes to          sha256:2" in shown(digest="sha256:1", target_digest="sha256:2")


@pytest.mark.parametrize("field", ["hold", "error", "failed"])
def test_every_trouble_is_shown_in_full(field: str) -> None:
    assert shown(**{field: "because of this"}).count("because of this") == 1


def test_every_warning_has_its_line() -> None:
    assert shown(warnings=("one", "two")).count("warning") == 2


def test_a_failed_target_is_shown_with_its_config_digest_and_time_while_another_one_is_worked_on() -> None:
    found = dataclasses.replace(
        FULL, failed="rendered-0: kubelet.service is failed", failed_config="rendered-0", failed_digest="sha256:0",
        failed_at=1_000_000_000, confirmed="rendered-1", confirmed_at=1_000_000_001,
    ).lines()  # fmt: skip
    assert "  update           rendered-2 (hold)" in found
    assert "  failed target    rendered-0: kubelet.service is failed" in found
    assert "  failed with      sha256:0, 2001-09-09 01:46:40 UTC" in found
    assert "  confirmed        rendered-1, 2001-09-09 01:46:41 UTC" in found


def test_what_an_older_agent_remembered_is_shown_without_what_it_did_not_know() -> None:
    found = dataclasses.replace(REST, failed="it did not boot").lines()
    assert "  failed with      the OS image as it was" in found and not any("confirmed" in line for line in found[1:])
