"""What the host's programs can do, by version; an unknown version takes the careful path."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from mcdaemon.host.versions import Probe, Version, Versions, parse

SAID = [
    ("rpm-ostree:\n Version: '2024.7'\n Git: f6e72\n Features:\n  - rust\n", (2024, 7)),
    ("libostree:\n Version: '2022.7'\n Features:\n  - libcurl\n", (2022, 7)),
    ("libostree:\n Version: 2025.2\n", (2025, 2)),
    ("podman version 4.3.1\n", (4, 3, 1)),
    ("podman version 5.2.0-rc1\n", (5, 2, 0)),
    ("skopeo version 1.9.3\n", (1, 9, 3)),
    ("skopeo version 1.16.1-dev commit: abc\n", (1, 16, 1)),
    ("", ()), ("segmentation fault", ()), ("Version: unknown", ()), ("version 7", ()),
]  # fmt: skip


@pytest.mark.parametrize(("said", "version"), SAID)
def test_versions_are_read_as_each_program_prints_them(said: str, version: Version) -> None:
    assert parse(said) == version


CAPABILITIES = [
    ("prunes_boot_early", "ostree", (2023, 7), (2023, 8)),
    ("skips_special_files", "ostree", (2024, 1), (2024, 2)),
    ("has_false_no_ops", "rpm_ostree", (2025, 11), (2025, 12)),
]


@pytest.mark.parametrize(("name", "program", "before", "since"), CAPABILITIES)
def test_a_capability_begins_with_its_version(name: str, program: str, before: Version, since: Version) -> None:
    assert not getattr(Versions(**{program: before}), name)
    assert getattr(Versions(**{program: since}), name)
    assert not getattr(Versions(), name), "an unknown version can do nothing"


def test_the_false_no_ops_end_with_the_version_that_repaired_them() -> None:
    """TXN-26: rpm-ostree commit 24290328, in 2026.2."""
    assert Versions(rpm_ostree=(2026, 1)).has_false_no_ops and not Versions(rpm_ostree=(2026, 2)).has_false_no_ops


@pytest.mark.parametrize(("podman", "skopeo", "usable"), [
    ((4, 2), (1, 9), True), ((), (1, 9), False), ((4, 2), (), False), ((), (), False),
])  # fmt: skip
def test_local_copies_need_both_programs(podman: Version, skopeo: Version, usable: bool) -> None:
    assert Versions(podman=podman, skopeo=skopeo).local_copies is usable


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that is the whole PATH, but for the shell's."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}")
    return folder


def program(folder: Path, name: str, script: str) -> None:
    new = folder / f"{name}.new"
    new.write_text(f"#!/bin/sh\necho x >>{folder.parent}/asked-{name}\n{script}\n")
    new.chmod(0o755)
    new.rename(folder / name)


def asked(folder: Path, name: str) -> int:
    path = folder.parent / f"asked-{name}"
    return len(path.read_text().splitlines()) if path.exists() else 0


def test_each_program_is_asked_once_in_a_boot_also_by_another_process(programs: Path, tmp_path: Path) -> None:
    program(programs, "podman", "echo podman version 4.2.0")
    probe = Probe(tmp_path)
    assert probe.versions("a.0").podman == probe.versions("a.0").podman == (4, 2, 0)
    assert Probe(tmp_path).versions("a.0").podman == (4, 2, 0)
    assert asked(programs, "podman") == 1
    assert Probe(tmp_path).versions("b.0").podman == (4, 2, 0)
    assert asked(programs, "podman") == 2, "another deployment has its own programs"


def test_a_program_that_was_replaced_is_asked_again(programs: Path, tmp_path: Path) -> None:
    program(programs, "podman", "echo podman version 4.2.0")
    probe = Probe(tmp_path)
    probe.versions("a.0")
    program(programs, "podman", "echo podman version 5.0.0")
    assert probe.versions("a.0").podman == (5, 0, 0)
    (programs / "podman").unlink()
    assert probe.versions("a.0").podman == ()


def test_programs_that_are_missing_or_broken_have_no_version(programs: Path, tmp_path: Path) -> None:
    program(programs, "podman", "exit 125")
    program(programs, "skopeo", "echo gibberish")
    program(programs, "ostree", "kill -9 $$")
    assert Probe(tmp_path).versions("a.0") == Versions()
    assert Probe(tmp_path).versions("a.0").texts() == dict.fromkeys(("rpm-ostree", "ostree", "podman", "skopeo"), "")


@pytest.mark.parametrize("kept", [b"", b"[]", b"{}", b'{"key": 1}', b"\xff", b'{"key": {}, "versions": 7}'])
def test_what_is_kept_and_cannot_be_read_is_asked_for_again(programs: Path, tmp_path: Path, kept: bytes) -> None:
    program(programs, "podman", "echo podman version 4.2.0")
    (tmp_path / "versions.json").write_bytes(kept)
    assert Probe(tmp_path).versions("a.0").podman == (4, 2, 0)
    assert json.loads((tmp_path / "versions.json").read_bytes())["versions"]["podman"] == [4, 2, 0]


def test_a_place_that_is_not_there_yet_is_not_made(programs: Path, tmp_path: Path) -> None:
    """Somebody who only looks (`mcdaemon plan` before the first run) leaves nothing."""
    assert Probe(tmp_path / "run").versions("a.0") == Versions()
    assert not os.path.lexists(tmp_path / "run")
