"""Changes without a reboot: real files in a root, real D-Bus to a small systemd, and the way back from each failure."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

import pytest

from mcdaemon.errors import Broken, Failure, Transient
from mcdaemon.host import files
from mcdaemon.host.bus import Bus, Systemd
from mcdaemon.host.root import Root
from mcdaemon.machineconfig import disruption
from mcdaemon.machineconfig.disruption import DAEMON_RELOAD, Action, ActionKind, Policy
from mcdaemon.machineconfig.model import MachineConfig
from mcdaemon.plan import make
from mcdaemon.update import commit, live, payload
from mcdaemon.update.payload import Shelf
from tests.component.privatebus import PrivateBus
from tests.component.test_payload import make_root
from tests.unit.configs import config, file

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: files get owners")

APP = "/etc/app.conf"
POLICY = disruption.DEFAULT.merged(Policy(
    files={APP: (Action(ActionKind.RESTART, "app.service"),), "/etc/many": (DAEMON_RELOAD, Action(
        ActionKind.RESTART, "app.service"), Action(ActionKind.RELOAD, "other.service")),
        "/etc/quiet": (disruption.NONE,)},
    units={"app.service": (DAEMON_RELOAD, Action(ActionKind.RESTART, "app.service"))},
))  # fmt: skip
OLD = config("old", files=[file(APP, b"old"), file("/etc/quiet", b"old")])
NEW = config("new", files=[file(APP, b"new"), file("/etc/quiet", b"old")])
UNITS: dict[str, dict[str, Any]] = {"app.service": {}, "other.service": {}, "crio.service": {}}


@dataclass
class Node:
    """A root that carries OLD, its shelves, and its systemd."""

    root: Root
    payloads: Shelf
    undo: Shelf
    bus: PrivateBus
    systemd: Systemd

    def apply(self, new: MachineConfig = NEW, old: Optional[MachineConfig] = OLD) -> None:
        live.apply("u1", new, old, make(old, new, (), (), POLICY), self.root, self.payloads, self.undo, self.systemd)

    def take_back(self, old: Optional[MachineConfig] = OLD) -> None:
        live.take_back("u1", old, POLICY, self.root, self.payloads, self.undo, self.systemd)

    def read(self, path: str = APP) -> Optional[bytes]:
        return files.read_file(self.root, path)


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    root = make_root(tmp_path / "root", tmp_path / "var")
    payloads = Shelf(tmp_path / "payload")
    load, items = payload.build("u0", OLD, None, root, root)
    payloads.save(load, items)
    commit.apply(load, payloads, root)
    payloads.drop("u0")
    (tmp_path / "bus").mkdir()
    with PrivateBus(tmp_path / "bus") as private:
        monkeypatch.setenv("DBUS_SYSTEM_BUS_ADDRESS", private.address)
        private.behave(UNITS)
        private.serve()
        bus = Bus()
        yield Node(root, payloads, Shelf(tmp_path / "undo"), private, Systemd(bus))
        bus.close()


def jobs(node: Node) -> list[str]:
    return [call for call in node.bus.calls() if not call.startswith(("Subscribe", "LoadUnit"))]


# -- forward ----------------------------------------------------------------------------------------------------------


def test_files_are_written_and_then_acted_upon(node: Node) -> None:
    node.apply()
    assert node.read() == b"new"
    assert jobs(node) == ["RestartUnit app.service"]


def test_a_change_that_needs_nothing_asks_systemd_nothing(node: Node) -> None:
    node.apply(config("new", files=[file(APP, b"old"), file("/etc/quiet", b"new")]))
    assert node.read("/etc/quiet") == b"new" and node.bus.calls() == []


def test_units_are_reloaded_before_anything_is_restarted(node: Node) -> None:
    node.apply(config("new", files=[file("/etc/many", b"x")]), config("old"))
    assert jobs(node) == ["Reload", "RestartUnit app.service", "ReloadUnit other.service"]


def test_a_changed_unit_is_reloaded_once(node: Node) -> None:
    unit = {"name": "app.service", "contents": "[Service]\n"}
    node.apply(config("new", units=[unit]), config("old"))
    assert jobs(node) == ["Reload", "RestartUnit app.service"]


def test_a_changed_registries_conf_reloads_crio(node: Node) -> None:
    node.apply(config("new", files=[file("/etc/containers/registries.conf")]), config("old"))
    assert jobs(node) == ["ReloadUnit crio.service"]


def test_applying_twice_writes_nothing_the_second_time(node: Node) -> None:
    """After a crash the step is taken again; what is acted upon is acted upon again."""
    node.apply()
    inode = (node.root.path / APP[1:]).stat().st_ino
    node.apply()
    assert (node.root.path / APP[1:]).stat().st_ino == inode
    record = node.undo.load("u1")
    assert record is not None and node.undo.content("u1", record.nodes()[APP]) == b"old"


# -- failures ---------------------------------------------------------------------------------------------------------

FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "the job fails": ({"app.service": {"result": "failed", "state": "failed"}}, "the job ended with 'failed'"),
    "the job is cancelled": ({"app.service": {"result": "canceled"}}, "the job ended with 'canceled'"),
    "a dependency fails": ({"app.service": {"result": "dependency"}}, "the job ended with 'dependency'"),
    "it dies after the job": ({"app.service": {"state": "failed"}}, "app.service is failed after its restart"),
    "it is restarted again and again": ({"app.service": {"state": "auto-restart"}}, "is auto-restart"),
    "there is no such unit": ({}, "Unit app.service not found"),
}


@pytest.mark.parametrize("case", FAULTS)
def test_a_service_that_does_not_take_the_change_is_broken_and_all_comes_back(node: Node, case: str) -> None:
    units, words = FAULTS[case]
    node.bus.behave(units)
    with pytest.raises(Broken, match=words):
        node.apply()
    node.bus.behave(UNITS)
    node.bus.forget_calls()
    node.take_back()
    assert node.read() == b"old"
    assert jobs(node) == ["RestartUnit app.service"]
    assert node.undo.load("u1") is None


def test_a_systemd_that_does_not_answer_is_a_passing_trouble_and_the_step_can_be_taken_again(node: Node) -> None:
    node.bus.kill_service()
    with pytest.raises(Transient):
        node.apply()
    assert node.read() == b"new"
    node.bus.serve()
    node.apply()
    assert jobs(node) == ["RestartUnit app.service"]


def test_a_file_that_a_service_changes_at_once_did_not_take(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    real = live.act

    def act(*arguments: Any, **options: Any) -> None:
        real(*arguments, **options)
        (node.root.path / APP[1:]).write_bytes(b"the service's own idea")

    monkeypatch.setattr(live, "act", act)
    with pytest.raises(Broken, match=rf"cannot apply new without a reboot: [^\n]*\n *{APP}: content") as caught:
        node.apply()
    assert "own idea" not in str(caught.value)


def test_a_write_that_fails_in_the_middle_can_be_taken_back(node: Node) -> None:
    (node.root.path / "etc/zzz").mkdir()
    (node.root.path / "etc/zzz/mine").touch()
    new = config("new", files=[file(APP, b"new"), file("/etc/zzz", b"x")])
    with pytest.raises(Broken, match="a directory with something in it"):
        node.apply(new)
    assert node.read() == b"new"
    node.take_back()
    assert node.read() == b"old" and (node.root.path / "etc/zzz/mine").exists()


# -- the way back -----------------------------------------------------------------------------------------------------


def test_the_root_says_again_which_config_it_carries(node: Node) -> None:
    before = node.read(payload.CURRENT_CONFIG)
    node.apply()
    assert node.read(payload.CURRENT_CONFIG) != before
    node.take_back()
    assert node.read(payload.CURRENT_CONFIG) == before


def test_what_was_never_written_needs_no_way_back(node: Node) -> None:
    node.take_back()
    assert node.bus.calls() == [] and node.read() == b"old"


def test_taking_back_twice_acts_once(node: Node) -> None:
    node.apply()
    node.bus.forget_calls()
    node.take_back()
    node.take_back()
    assert jobs(node) == ["RestartUnit app.service"]


def test_a_systemd_that_is_away_lets_the_way_back_be_taken_again(node: Node) -> None:
    node.apply()
    node.bus.kill_service()
    with pytest.raises(Failure):
        node.take_back()
    assert node.undo.load("u1") is not None, "or the services would keep what they read"
    node.bus.serve()
    node.bus.forget_calls()
    node.take_back()
    assert jobs(node) == ["RestartUnit app.service"] and node.undo.load("u1") is None


@pytest.mark.parametrize("units", [{}, {"app.service": {"result": "failed"}}, {"app.service": {"state": "failed"}}])
def test_a_unit_that_cannot_be_restarted_does_not_keep_the_node_from_its_way_back(
    node: Node, caplog: pytest.LogCaptureFixture, units: dict[str, Any]
) -> None:
    """It may have come with the config that is taken back, or have been broken all the time."""
    unit = {"name": "app.service", "contents": "[Service]\n"}
    node.apply(config("new", units=[unit]), config("old"))
    node.bus.behave(units)
    with caplog.at_level(logging.WARNING, "mcdaemon"):
        node.take_back(config("old"))
    assert not files.read_file(node.root, "/etc/systemd/system/app.service")
    assert node.undo.load("u1") is None
    assert "app.service" in caplog.text


def test_a_config_of_a_node_that_had_none_is_taken_away_again(node: Node) -> None:
    new = config("first", files=[file("/etc/quiet/new", b"x")])
    files.remove(node.root, "/etc/quiet")
    node.apply(new, None)
    node.take_back(None)
    assert node.read("/etc/quiet/new") is None
