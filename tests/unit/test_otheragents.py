"""Other agents on the node, by what they leave: units, a registered driver, a policy, a process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Optional

import pytest
from gi.repository import GLib

from mcdaemon.errors import Held, HoldReason
from mcdaemon.host import otheragents
from mcdaemon.host.bus import Systemd


class Units(Systemd):
    """systemd, as far as somebody asks it for the states of units."""

    def __init__(self, states: Mapping[str, str]) -> None:
        self.states = states
        self.calls = 0

    def active_states(self, units: Sequence[str]) -> dict[str, str]:
        self.calls += 1
        return {unit: self.states.get(unit, "inactive") for unit in units}


@pytest.fixture
def top(tmp_path: Path) -> Path:
    for folder in ("proc", "run/rpm-ostree", "etc"):
        (tmp_path / folder).mkdir(parents=True)
    return tmp_path


def driver(top: Path, **values: Any) -> None:
    entries = {key.replace("_", "-"): GLib.Variant("s", value) for key, value in values.items()}
    content = GLib.Variant("a{sv}", entries).get_data_as_bytes().get_data()
    (top / "run/rpm-ostree/update-driver.gv").write_bytes(content or b"")


def process(top: Path, pid: int, comm: str, cmdline: Optional[bytes]) -> None:
    folder = top / f"proc/{pid}"
    folder.mkdir()
    (folder / "comm").write_text(f"{comm}\n")
    if cmdline is not None:
        (folder / "cmdline").write_bytes(cmdline)


ZINCATI, AUTOMATIC, BOOTC = otheragents.ZINCATI, otheragents.AUTOMATIC, otheragents.BOOTC


def found(top: Path, states: Mapping[str, str]) -> list[str]:
    return [agent.name for agent in otheragents.find(Units(states), top)]


@pytest.mark.parametrize("unit", [ZINCATI, BOOTC])
@pytest.mark.parametrize(("state", "lives"), [
    ("active", True), ("activating", True), ("reloading", True), ("inactive", False), ("failed", False),
    ("deactivating", False),
])  # fmt: skip
def test_a_unit_counts_while_it_lives(top: Path, unit: str, state: str, lives: bool) -> None:
    assert found(top, {unit: state}) == ([unit] if lives else [])


@pytest.mark.parametrize(("text", "drives"), [
    ("[Daemon]\nAutomaticUpdatePolicy=stage\n", True), ("[Daemon]\nAutomaticUpdatePolicy = apply\n", True),
    ("[Daemon]\nAutomaticUpdatePolicy=check\n", False), ("[Daemon]\nAutomaticUpdatePolicy=none\n", False),
    ("[Daemon]\n#AutomaticUpdatePolicy=stage\n", False), ("[Daemon]\n", False), ("", False), (None, False),
    ("[Other]\nAutomaticUpdatePolicy=stage\n", False), ("no ini file", False), ("[Daemon\n%%%", False),
])  # fmt: skip
def test_automatic_updates_count_when_their_policy_stages(top: Path, text: Optional[str], drives: bool) -> None:
    if text is not None:
        (top / "etc/rpm-ostreed.conf").write_text(text)
    assert len(found(top, {AUTOMATIC: "active"})) == drives
    assert found(top, {AUTOMATIC: "inactive"}) == [], "a policy without its timer does nothing"


@pytest.mark.parametrize(("state", "drives"), [("active", True), ("failed", True), ("inactive", False)])
def test_a_registered_driver_counts_as_rpm_ostree_itself_counts_it(top: Path, state: str, drives: bool) -> None:
    """rpm-ostree.md 1.9: also while its unit is failed."""
    driver(top, driver_name="Fleet", driver_sd_unit="fleet.service")
    agents = otheragents.find(Units({"fleet.service": state}), top)
    assert len(agents) == drives
    assert not drives or ("Fleet (fleet.service)" in agents[0].name and "fleet.service" in agents[0].how_to_end)


def test_zincati_is_named_once_although_it_registers_too(top: Path) -> None:
    driver(top, driver_name="Zincati", driver_sd_unit=ZINCATI)
    assert found(top, {ZINCATI: "active"}) == [ZINCATI]


@pytest.mark.parametrize("values", [
    {"driver_name": "mcdaemon", "driver_sd_unit": "x.service"}, {"driver_name": "Fleet"}, {},
])  # fmt: skip
def test_ourselves_and_nobody_are_no_other_agent(top: Path, values: dict[str, str]) -> None:
    driver(top, **values)
    assert found(top, {"x.service": "active"}) == []


@pytest.mark.parametrize("content", [b"", b"\xff" * 40, b"not a variant"])
def test_a_torn_registration_is_none(top: Path, content: bytes) -> None:
    (top / "run/rpm-ostree/update-driver.gv").write_bytes(content)
    assert found(top, {}) == []


PROCESSES = [
    ("machine-config-", b"/usr/bin/machine-config-daemon\0start\0", True),
    ("machine-config-", b"machine-config-daemon\0start\0", True),
    ("machine-config-", b"/usr/bin/machine-config-server\0", False),
    ("machine-config-", None, False),  # it ended meanwhile
    ("machine-config-", b"", False),
    ("vi", b"vi\0machine-config-daemon\0", False),
    ("bash", b"/usr/bin/machine-config-daemon\0", False),
]


@pytest.mark.parametrize(("comm", "cmdline", "counts"), PROCESSES)
def test_a_machine_config_daemon_is_known_by_its_program(
    top: Path, comm: str, cmdline: Optional[bytes], counts: bool
) -> None:
    process(top, 1, "systemd", b"/sbin/init\0")
    process(top, 4711, comm, cmdline)
    assert found(top, {}) == (["machine-config-daemon (process 4711)"] if counts else [])


def test_a_live_change_waits_only_for_who_writes_files_too(top: Path) -> None:
    busy = Units({ZINCATI: "active"})
    otheragents.require_none(busy, top, live=True)
    with pytest.raises(Held, match=r"another agent drives it: zincati\.service \(end it: `systemctl disable --now"):
        otheragents.require_none(busy, top)
    process(top, 4711, "machine-config-", b"/usr/bin/machine-config-daemon\0")
    with pytest.raises(Held, match="machine-config-daemon") as caught:
        otheragents.require_none(busy, top, live=True)
    assert caught.value.reason is HoldReason.OTHER_AGENT


def test_all_of_them_are_named_at_once(top: Path) -> None:
    process(top, 4711, "machine-config-", b"/usr/bin/machine-config-daemon\0")
    with pytest.raises(Held) as caught:
        otheragents.require_none(Units({ZINCATI: "active", BOOTC: "active"}), top)
    assert all(name in str(caught.value) for name in (ZINCATI, BOOTC, "machine-config-daemon"))


def test_units_are_asked_for_in_one_call(top: Path) -> None:
    driver(top, driver_name="Fleet", driver_sd_unit="fleet.service")
    units = Units({})
    otheragents.find(units, top)
    assert units.calls == 1
