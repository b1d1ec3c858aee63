"""The agent's own settings: on a root that is about to boot, and in a config."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from mcdaemon import settings
from mcdaemon.errors import Broken, Held, HoldReason, Irreconcilable
from mcdaemon.host.root import Root
from mcdaemon.settings import Settings
from mcdaemon.update import ownsettings
from tests.unit.configs import config, file

STATE = "/var/lib/mcdaemon"


@pytest.fixture
def root(tmp_path: Path) -> Root:
    (tmp_path / "etc/mcdaemon").mkdir(parents=True)
    (tmp_path / "var/lib/configs").mkdir(parents=True)
    return Root(tmp_path, tmp_path / "var")


def place(root: Root) -> Path:
    return root.path / settings.PATH[1:]


def test_a_root_without_settings_has_the_defaults(root: Root) -> None:
    ownsettings.require_usable(root, STATE)
    with pytest.raises(Broken, match="state_dir"):
        ownsettings.require_usable(root, "/var/lib/other")


def test_a_link_is_followed_inside_of_the_root(root: Root) -> None:
    place(root).symlink_to("/etc/real.yaml")
    with pytest.raises(Broken, match="no such file"):
        ownsettings.require_usable(root, STATE)
    (root.path / "etc/real.yaml").write_text("loop: {interval_seconds: 5}\n")
    ownsettings.require_usable(root, STATE)
    (root.path / "etc/real.yaml").write_text("helth: {}\n")
    with pytest.raises(Broken, match="helth"):
        ownsettings.require_usable(root, STATE)
    place(root).unlink()
    place(root).symlink_to("mcdaemon.yaml")
    with pytest.raises(Broken, match="too many links"):
        ownsettings.require_usable(root, STATE)


@pytest.mark.parametrize(
    ("text", "mode", "said"),
    [("helth: {}\n", 0o644, "helth: unknown key"), ("a: b: c\n", 0o644, "line 1"), ("{}\n", 0o666, "cannot trust"),
     ("state_dir: /var/lib/other\n", 0o644, "cannot move the state of an update in flight")],
)  # fmt: skip
def test_settings_that_the_agent_could_not_go_on_with_hold_the_update(
    root: Root, text: str, mode: int, said: str
) -> None:
    place(root).write_text(text)
    place(root).chmod(mode)
    with pytest.raises(Held, match=said) as caught:
        ownsettings.require_before_reboot(root, STATE, "50-new")
    assert caught.value.reason is HoldReason.SETTINGS
    assert os.fspath(place(root)) in str(caught.value) and caught.value.hint


def check(root: Root, text: str, **more: Any) -> None:
    files = [file("/var/z"), file(settings.PATH, text.encode(), **more)]
    ownsettings.check(config("new", files=files), Settings(), root)


@pytest.mark.parametrize(
    ("text", "more", "pointer", "said"),
    [
        ("helth: {}\n", {}, "", "these settings cannot be used"),
        ("{}\n", {"mode": 0o666}, "/mode", "others than root can write"),
        ("{}\n", {"mode": 0o664}, "/mode", "others than root can write"),
        ("{}\n", {"user": {"name": "core"}}, "/user", "file of core"),
        ("{}\n", {"user": {"id": 1000}}, "/user", "file of 1000"),
        ("state_dir: /var/lib/other\n", {}, "", "cannot move the state of an update in flight"),
        ("source: {directory: {path: /var/lib/nowhere}}\n", {}, "", "no directory /var/lib/nowhere"),
    ],
)
def test_settings_in_a_config_are_refused_by_their_place(
    root: Root, text: str, more: dict[str, Any], pointer: str, said: str
) -> None:
    with pytest.raises(Irreconcilable, match=said) as caught:
        check(root, text, **more)
    assert caught.value.field == f"/spec/config/storage/files/1{pointer}"


def test_settings_in_a_config_that_can_be_used_are_taken(root: Root) -> None:
    check(root, "loop: {interval_seconds: 5}\n", mode=0o640, group={"name": "wheel"})
    check(root, "source: {directory: {path: /var/lib/configs}}\n")
    check(root, f"state_dir: {STATE}\n", user={"name": "root"})
