"""systemd and logind over a real dbus-daemon: answers that come early, late, wrong or never."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mcdaemon.errors import Broken, Failure, Held, HoldReason, Transient
from mcdaemon.host import bus as module
from mcdaemon.host.bus import Bus, Logind, Systemd
from tests.component.privatebus import PrivateBus

UNITS = {"good.service": {}, "bad.service": {"result": "failed", "state": "failed"},
         "fast.service": {"when": "before"}, "silent.service": {"when": "never"}}  # fmt: skip
BLOCK = ("shutdown:sleep", "backup", "nightly backup", "block")


@pytest.fixture
def private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PrivateBus]:
    with PrivateBus(tmp_path) as bus:
        monkeypatch.setenv("DBUS_SYSTEM_BUS_ADDRESS", bus.address)
        yield bus


@pytest.fixture
def served(private: PrivateBus) -> PrivateBus:
    private.behave(UNITS)
    private.serve()
    return private


@pytest.fixture
def bus() -> Iterator[Bus]:
    made = Bus()
    yield made
    made.close()


@pytest.fixture
def systemd(served: PrivateBus, bus: Bus) -> Systemd:
    return Systemd(bus)


# -- jobs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["Start", "Stop", "Restart", "Reload"])
def test_the_result_of_a_job_is_waited_for(served: PrivateBus, systemd: Systemd, verb: str) -> None:
    assert systemd.run_job(verb, "good.service", 5.0) == "done"
    assert served.calls() == ["Subscribe", f"{verb}Unit good.service"]


def test_a_job_that_failed_is_told_in_systemds_words(systemd: Systemd) -> None:
    assert systemd.run_job("Restart", "bad.service", 5.0) == "failed"
    assert systemd.active_state("bad.service") == "failed"


def test_a_job_that_ended_before_its_number_was_known_is_not_waited_for(systemd: Systemd) -> None:
    begin = time.monotonic()
    assert systemd.run_job("Start", "fast.service", 5.0) == "done"
    assert time.monotonic() - begin < 2


def test_a_job_that_never_ends_is_given_up_in_time(systemd: Systemd) -> None:
    begin = time.monotonic()
    with pytest.raises(Transient, match="cannot stop silent.service: no result within"):
        systemd.run_job("Stop", "silent.service", 0.5)
    assert time.monotonic() - begin < 3


def test_a_unit_that_does_not_exist_is_named(systemd: Systemd) -> None:
    with pytest.raises(Broken, match=r"cannot restart no\.service: Unit no\.service not found\."):
        systemd.run_job("Restart", "no.service", 5.0)


def test_signals_are_asked_for_once_and_again_on_a_new_connection(
    served: PrivateBus, systemd: Systemd, bus: Bus
) -> None:
    """systemd refuses a second time on the same connection."""
    for _ in range(3):
        systemd.run_job("Start", "good.service", 5.0)
    assert served.calls().count("Subscribe") == 1
    bus.close()
    assert systemd.run_job("Start", "good.service", 5.0) == "done"
    assert served.calls().count("Subscribe") == 2


def test_a_service_that_dies_in_the_middle_of_a_call_is_a_passing_trouble(served: PrivateBus, systemd: Systemd) -> None:
    served.behave(UNITS, die=("RestartUnit",))
    begin = time.monotonic()
    with pytest.raises(Transient, match=r"cannot restart good\.service"):
        systemd.run_job("Restart", "good.service", 5.0)
    assert time.monotonic() - begin < 3
    served.behave(UNITS)
    served.serve()
    assert systemd.run_job("Restart", "good.service", 5.0) == "done"


def test_a_call_that_is_not_answered_ends_in_time(served: PrivateBus, systemd: Systemd) -> None:
    served.behave(UNITS, hang=("StopUnit",))
    begin = time.monotonic()
    with pytest.raises(Transient, match=r"cannot stop good\.service"):
        systemd.run_job("Stop", "good.service", 0.5)
    assert time.monotonic() - begin < 3


@pytest.mark.parametrize(("name", "kind"), [
    ("org.freedesktop.DBus.Error.AccessDenied", Broken), ("org.freedesktop.DBus.Error.NoReply", Transient),
    ("org.freedesktop.systemd1.UnitMasked", Broken), ("org.freedesktop.DBus.Error.Timeout", Transient),
])  # fmt: skip
def test_an_error_of_the_service_keeps_its_words(
    served: PrivateBus, systemd: Systemd, name: str, kind: type[Failure]
) -> None:
    served.behave(UNITS, errors={"Reload": (name, "in its own words")})
    with pytest.raises(kind) as caught:
        systemd.reload()
    assert type(caught.value) is kind
    assert caught.value.sentence == "cannot reload systemd's units: in its own words"


# -- the bus itself ---------------------------------------------------------------------------------------------------


def test_a_service_that_is_not_there_is_a_passing_trouble(private: PrivateBus, bus: Bus) -> None:
    with pytest.raises(Transient, match="cannot reload systemd's units"):
        Systemd(bus).reload()
    private.serve()
    Systemd(bus).reload()


def test_no_bus_at_all_is_a_passing_trouble(tmp_path: Path, bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DBUS_SYSTEM_BUS_ADDRESS", f"unix:path={tmp_path}/nothing")
    with pytest.raises(Transient, match="cannot connect to the system bus"):
        Systemd(bus).reload()


def test_the_end_of_the_bus_does_not_end_the_agent_and_a_new_one_is_found(
    served: PrivateBus, systemd: Systemd, bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    systemd.reload()
    served.kill_bus()
    with pytest.raises(Transient):
        systemd.reload()
    second = tmp_path / "second"
    second.mkdir()
    with PrivateBus(second) as other:
        monkeypatch.setenv("DBUS_SYSTEM_BUS_ADDRESS", other.address)
        other.behave(UNITS)
        other.serve()
        assert systemd.run_job("Start", "good.service", 5.0) == "done"


def test_a_job_during_which_the_bus_ends_is_given_up_in_time(served: PrivateBus, systemd: Systemd) -> None:
    timer = threading.Timer(0.3, served.kill_bus)
    timer.start()
    with pytest.raises(Transient):
        systemd.run_job("Start", "silent.service", 1.0)
    timer.join()


def test_an_object_that_the_service_does_not_have_is_named(served: PrivateBus, bus: Bus) -> None:
    with pytest.raises(Failure, match="cannot look"):
        bus.get(bus.proxy("org.freedesktop.systemd1", "/no/such/object", "look"), "org.example.X", "Y")


def test_a_method_of_a_newer_version_is_named(served: PrivateBus, bus: Bus) -> None:
    proxy = bus.proxy("org.freedesktop.systemd1", "/org/freedesktop/systemd1", "look")
    with pytest.raises(Broken, match="does not offer org.freedesktop.systemd1.Manager.SoftReboot"):
        bus.call(proxy, "org.freedesktop.systemd1.Manager", "SoftReboot", doing="reboot softly")
    with pytest.raises(Broken, match="does not offer org.example.Missing.X"):
        bus.call(proxy, "org.example.Missing", "X")


def test_closing_gives_the_name_up(served: PrivateBus, bus: Bus) -> None:
    """It is how a transaction that was created too late is let go (rpm-ostree.md 2.10)."""
    first = bus.bus.con.get_unique_name()
    bus.close()
    bus.close()
    assert bus.bus.con.get_unique_name() != first


def test_a_unit_that_was_never_started_is_inactive(systemd: Systemd) -> None:
    assert systemd.active_state("other.service") == "inactive"
    assert systemd.active_state("good.service") in ("active", "inactive")


# -- reboot -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def logind(served: PrivateBus, bus: Bus) -> Logind:
    return Logind(bus)


def test_a_reboot_is_asked_for_after_a_look_at_the_inhibitors(served: PrivateBus, logind: Logind) -> None:
    served.behave(inhibitors=[("shutdown", "ups", "battery", "delay"), ("sleep", "player", "music", "block")])
    logind.reboot()
    assert served.calls() == ["ListInhibitors", "Reboot False"]


@pytest.mark.parametrize("what", ["shutdown", "idle:shutdown", "shutdown:sleep:handle-lid-switch"])
def test_a_blocking_inhibitor_is_waited_for_and_named(served: PrivateBus, logind: Logind, what: str) -> None:
    served.behave(inhibitors=[(what, "backup", "nightly backup", "block"), BLOCK])
    with pytest.raises(Held, match="shutdown is inhibited by backup: nightly backup; backup") as caught:
        logind.reboot()
    assert caught.value.reason is HoldReason.INHIBITED
    assert served.calls() == ["ListInhibitors"]


def test_an_inhibitor_that_ends_lets_the_reboot_through(served: PrivateBus, logind: Logind) -> None:
    served.behave(inhibitors=[BLOCK])
    assert logind.blockers() == ("backup: nightly backup",)
    served.behave()
    logind.reboot()
    assert served.calls()[-1] == "Reboot False"


@pytest.mark.parametrize("method", ["ListInhibitors", "Reboot"])
def test_a_logind_that_dies_leaves_the_update_where_it_is(served: PrivateBus, logind: Logind, method: str) -> None:
    served.behave(die=(method,))
    with pytest.raises(Transient):
        logind.reboot()


def test_a_logind_that_hangs_is_given_up_in_time(
    served: PrivateBus, logind: Logind, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.behave(hang=("ListInhibitors",))
    assert module.CALL_TIMEOUT <= 60.0
    monkeypatch.setattr(module.Bus.call, "__kwdefaults__", {"timeout": 0.5, "doing": ""})
    with pytest.raises(Transient, match="cannot list the inhibitors"):
        logind.reboot()
