"""PID 1 of the stand: unit files really run, links are really made, jobs and errors are those of systemd."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stand.machine import CommandFailed, Down, Machine, minimal_tree
from tests.stand.nodeprocess import NodeProcess

pytestmark = pytest.mark.stand

STAGE = ("ostree", "admin", "deploy", "--stage", "--os=rhcos")
FINALIZE = "ostree-finalize-staged.service"
LOGIN = ("org.freedesktop.login1", "/org/freedesktop/login1", "org.freedesktop.login1.Manager")
SYSTEMD = ("org.freedesktop.systemd1", "/org/freedesktop/systemd1", "org.freedesktop.systemd1.Manager")


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Machine]:
    """A node with the minimal OS, not booted."""
    with Machine(tmp_path / "node") as machine:
        machine.install_tree(minimal_tree(tmp_path / "tree"))
        yield machine


@pytest.fixture
def up(node: Machine) -> Machine:
    """A booted node."""
    node.boot()
    return node


def add_unit(node: Machine, name: str, service: str, install: str = "", unit: str = "") -> None:
    node.write(f"/etc/systemd/system/{name}", f"[Unit]\n{unit}\n[Service]\n{service}\n[Install]\n{install}\n")


def show(node: Machine, name: str, *properties: str) -> list[str]:
    """Values of properties of a unit, in the order asked for."""
    text = node.run(["systemctl", "show", name, *(f"--property={each}" for each in properties)]).stdout
    found = dict(line.split("=", 1) for line in text.splitlines())
    return [found[each] for each in properties]


def start(node: Machine, name: str) -> subprocess.CompletedProcess[str]:
    return node.run(["systemctl", "start", name], check=False, timeout=15)


def call(node: Machine, target: tuple[str, str, str], *arguments: str) -> str:
    """A method call by busctl. Raises CommandFailed with the D-Bus error's text."""
    return node.run(["busctl", "--timeout=15", "call", *target, *arguments]).stdout.strip()


# -- kinds of services ------------------------------------------------------------------------------------------------


def test_a_simple_service_runs_until_it_is_stopped(up: Machine) -> None:
    add_unit(up, "a.service", "ExecStart=sleep 611")
    assert start(up, "a.service").returncode == 0
    assert show(up, "a.service", "ActiveState", "SubState", "Result") == ["active", "running", "success"]
    main = show(up, "a.service", "MainPID")[0]
    assert up.read(f"/proc/{main}/cmdline") == "sleep\000611\000"
    up.run(["systemctl", "stop", "a.service"])
    assert show(up, "a.service", "ActiveState", "MainPID", "Result") == ["inactive", "0", "success"]
    assert not up.exists(f"/proc/{main}")


def test_directories_of_a_service_are_made_and_the_one_in_run_goes_with_it(up: Machine) -> None:
    add_unit(up, "a.service", "RuntimeDirectory=a\nRuntimeDirectoryMode=0700\nStateDirectory=a\nExecStart=sleep 611")
    start(up, "a.service")
    assert oct(up.lstat("/run/a").st_mode & 0o777) == "0o700" and up.exists("/var/lib/a")
    up.run(["systemctl", "stop", "a.service"])
    assert not up.exists("/run/a") and up.exists("/var/lib/a")


@pytest.mark.parametrize(("remain", "state"), [("yes", "active"), ("no", "inactive")])
def test_a_oneshot_runs_all_its_commands_and_remains_only_if_it_says_so(up: Machine, remain: str, state: str) -> None:
    said = (("StartPre", "pre"), ("Start", "one"), ("Start", "two"), ("Stop", "bye"))
    commands = "\n".join(f"Exec{key}=sh -c 'echo {word}'" for key, word in said)
    add_unit(up, "o.service", f"Type=oneshot\nRemainAfterExit={remain}\n{commands}")
    assert start(up, "o.service").returncode == 0
    assert show(up, "o.service", "ActiveState", "Result") == [state, "success"]
    printed = [line for line in up.journal("o.service").splitlines() if not line.startswith("systemd[1]")]
    assert printed[:3] == ["pre", "one", "two"]
    up.run(["systemctl", "stop", "o.service"])
    assert ("bye" in up.journal("o.service").splitlines()) == (remain == "yes")


@pytest.mark.parametrize(
    ("service", "result"),
    [
        ("Type=oneshot\nExecStart=sh -c 'exit 7'", "exit-code"),
        ("Type=oneshot\nExecStart=sh -c 'kill -9 $$$$'", "signal"),
        ("Type=oneshot\nExecStartPre=false\nExecStart=true", "exit-code"),
        ("Type=oneshot\nTimeoutStartSec=200ms\nExecStart=sleep 611", "timeout"),
        ("Type=oneshot\nExecStart=/no/such/program", "exit-code"),
        ("Type=oneshot\nEnvironmentFile=/no/such/file\nExecStart=true", "resources"),
        ("Type=notify\nExecStart=true", "protocol"),
        ("Type=notify\nTimeoutStartSec=200ms\nExecStart=sleep 611", "timeout"),
        ("Type=notify\nExecStart=sh -c 'exit 3'", "exit-code"),
        ("Type=dbus\nBusName=org.example.Never\nTimeoutStartSec=200ms\nExecStart=sleep 611", "timeout"),
    ],
)
def test_a_start_that_fails_says_how(up: Machine, service: str, result: str) -> None:
    add_unit(up, "bad.service", service)
    failed = start(up, "bad.service")
    assert failed.returncode == 1, failed
    assert show(up, "bad.service", "ActiveState", "Result") == ["failed", result]
    assert f"Failed with result '{result}'" in up.journal("bad.service")
    assert up.run(["pgrep", "-f", "sleep 611"], check=False).stdout == ""
    up.run(["systemctl", "reset-failed", "bad.service"])
    assert show(up, "bad.service", "ActiveState") == ["inactive"]


def test_the_status_and_the_exit_code_of_a_failed_service_are_kept(up: Machine) -> None:
    add_unit(up, "bad.service", "Type=oneshot\nExecStart=sh -c 'exit 7'")
    start(up, "bad.service")
    assert show(up, "bad.service", "ExecMainCode", "ExecMainStatus") == ["1", "7"]


def test_a_command_with_a_dash_may_fail(up: Machine) -> None:
    add_unit(
        up, "o.service", "Type=oneshot\nExecStartPre=-false\nExecStart=-sh -c 'exit 4'\nExecStart=sh -c 'echo after'"
    )
    assert start(up, "o.service").returncode == 0
    assert "after" in up.journal("o.service")


def test_a_notify_service_is_up_when_it_says_so_and_its_status_can_be_read(up: Machine) -> None:
    script = (
        "systemd-notify --status=waiting; until test -e /run/go; do read -t 0.05 x < /run/fifo; done; "
        "systemd-notify --ready --status=serving; systemd-notify WATCHDOG=1; exec sleep 611"
    )
    up.run(["mkfifo", "/run/fifo"])
    holder = up.start(["sh", "-c", "exec sleep 611 > /run/fifo < /run/fifo 2>/dev/null"])
    add_unit(up, "n.service", f"Type=notify\nNotifyAccess=all\nWatchdogSec=20\nExecStart=bash -c '{script}'")
    starting = up.start(["systemctl", "start", "n.service"])
    wait_for(up, "n.service", "StatusText", "waiting")
    assert show(up, "n.service", "ActiveState") == ["activating"]
    assert starting.poll() is None
    up.write("/run/go", "")
    assert starting.wait(10) == 0
    wait_for(up, "n.service", "StandWatchdogPings", "1")
    assert show(up, "n.service", "ActiveState", "StatusText", "WatchdogUSec") == ["active", "serving", "20s"]
    up.stop_process(holder)


def test_a_service_that_stops_feeding_its_watchdog_is_killed(up: Machine) -> None:
    add_unit(
        up,
        "w.service",
        "Type=notify\nNotifyAccess=all\nWatchdogSec=300ms\nExecStart=sh -c 'systemd-notify --ready; exec sleep 611'",
    )
    assert start(up, "w.service").returncode == 0
    wait_for(up, "w.service", "ActiveState", "failed")
    assert show(up, "w.service", "Result") == ["watchdog"]


def test_a_dbus_service_is_up_when_its_name_is_owned(up: Machine) -> None:
    program = (
        "from gi.repository import GLib; from pydbus import SystemBus; print('owning', flush=True)\n"
        "SystemBus().request_name('org.example.Late'); GLib.MainLoop().run()"
    )
    up.write("/usr/local/bin/late", f"#!/usr/bin/python3\n{program}\n", 0o755)
    add_unit(up, "d.service", "Type=dbus\nBusName=org.example.Late\nExecStart=/usr/local/bin/late")
    assert start(up, "d.service").returncode == 0
    owner = call(up, ("org.freedesktop.DBus", "/", "org.freedesktop.DBus"), "GetNameOwner", "s", "org.example.Late")
    assert owner.startswith('s ":')


LATE = '''#!/usr/bin/python3
from gi.repository import GLib
from pydbus import SystemBus
class Late:
    """<node><interface name='org.example.Late'>
    <method name='Hello'><arg type='s' direction='out'/></method></interface></node>"""
    def Hello(self):
        return "here"
bus = SystemBus()
bus.publish("org.example.Late", Late())
GLib.MainLoop().run()
'''


def test_a_call_to_a_bus_name_starts_its_unit(node: Machine) -> None:
    node.units["late.service"] = "[Service]\nType=dbus\nBusName=org.example.Late\nExecStart=/usr/local/bin/late\n"
    node.boot()
    node.write("/usr/local/bin/late", LATE, 0o755)
    assert show(node, "late.service", "ActiveState") == ["inactive"]
    late = ("org.example.Late", "/org/example/Late", "org.example.Late")
    assert call(node, late, "Hello") == 's "here"'
    assert show(node, "late.service", "ActiveState") == ["active"]


def test_a_call_to_a_bus_name_whose_unit_fails_gets_an_error(node: Machine) -> None:
    node.units["late.service"] = "[Service]\nType=dbus\nBusName=org.example.Late\nExecStart=false\n"
    node.boot()
    with pytest.raises(CommandFailed, match="Unit late.service failed to start"):
        call(node, ("org.example.Late", "/", "org.example.Late"), "Hello")


def wait_for(node: Machine, unit: str, name: str, value: str) -> None:
    """Wait for a property's value by the bus's own signals: busctl monitors, every signal is a reason to look."""
    with_signals = node.start(
        ["python3", "-c", WAITER, unit, name, value], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    out, _ = with_signals.communicate(timeout=10)
    assert with_signals.returncode == 0, out


WAITER = """
import sys
from gi.repository import GLib
from pydbus import SystemBus
unit, name, value = sys.argv[1:]
loop, bus = GLib.MainLoop(), SystemBus()
manager = bus.get("org.freedesktop.systemd1")
manager.Subscribe()
path = manager.LoadUnit(unit)
def look(*_):
    target = bus.get("org.freedesktop.systemd1", path)
    found = [str(getattr(target["org.freedesktop.systemd1." + kind], name, None)) for kind in ("Unit", "Service")]
    if value in found:
        loop.quit()
    return found
bus.subscribe(object=path, signal="PropertiesChanged", signal_fired=look)
GLib.timeout_add_seconds(8, lambda: sys.exit(f"{unit}: {name} is {look()}"))
if value not in look():
    loop.run()
"""


# -- restarts and stops -----------------------------------------------------------------------------------------------


def test_a_service_that_keeps_failing_is_restarted_up_to_its_limit(up: Machine) -> None:
    add_unit(up, "r.service", "Restart=on-failure\nRestartSec=10ms\nExecStart=sh -c 'echo try; exit 1'",
             unit="StartLimitBurst=3\nStartLimitIntervalSec=60")  # fmt: skip
    start(up, "r.service")
    wait_for(up, "r.service", "Result", "start-limit-hit")
    assert up.journal("r.service").splitlines().count("try") == 3
    assert show(up, "r.service", "ActiveState", "NRestarts") == ["failed", "3"]
    refused = start(up, "r.service")
    assert refused.returncode == 1


def test_restart_on_failure_leaves_a_clean_exit_alone_and_always_does_not(up: Machine) -> None:
    script = "sh -c 'echo run >> /run/%n; test $(wc -l < /run/%n) -lt 2 || exec sleep 611'"
    for name, policy in (("never.service", "on-failure"), ("always.service", "always")):
        add_unit(up, name, f"Restart={policy}\nRestartSec=10ms\nExecStart={script}")
        start(up, name)
    wait_for(up, "always.service", "NRestarts", "1")
    wait_for(up, "always.service", "ActiveState", "active")
    assert show(up, "never.service", "ActiveState", "NRestarts") == ["inactive", "0"]


def test_a_stop_ends_a_service_that_waits_for_its_restart(up: Machine) -> None:
    add_unit(up, "r.service", "Restart=always\nRestartSec=60\nExecStart=true")
    start(up, "r.service")
    wait_for(up, "r.service", "SubState", "auto-restart")
    up.run(["systemctl", "stop", "r.service"])
    assert show(up, "r.service", "ActiveState", "SubState") == ["inactive", "dead"]


def test_a_stop_reaches_children_that_left_the_session(up: Machine) -> None:
    add_unit(up, "s.service", "ExecStart=sh -c 'setsid sleep 612 & exec sleep 611'")
    start(up, "s.service")
    up.run(["systemctl", "stop", "s.service"])
    assert up.run(["pgrep", "-f", "sleep 61"], check=False).stdout == ""


def test_a_service_that_ignores_sigterm_is_killed_and_counts_as_failed(up: Machine) -> None:
    add_unit(up, "s.service", "Type=notify\nNotifyAccess=all\nTimeoutStopSec=200ms\n"
             "ExecStart=bash -c 'trap \"\" TERM; systemd-notify --ready; while :; do sleep 0.05; done'")  # fmt: skip
    assert start(up, "s.service").returncode == 0
    up.run(["systemctl", "stop", "s.service"])
    assert show(up, "s.service", "ActiveState", "Result") == ["failed", "timeout"]


def test_a_stop_job_cancels_the_start_job(up: Machine) -> None:
    add_unit(up, "n.service", "Type=notify\nExecStart=sleep 611")
    starting = up.start(["systemctl", "start", "n.service"], stderr=subprocess.PIPE)
    wait_for(up, "n.service", "SubState", "start")
    up.run(["systemctl", "stop", "n.service"])
    assert starting.communicate(timeout=5)[1].startswith("Job for n.service canceled.")
    assert show(up, "n.service", "ActiveState") == ["inactive"]


def test_reload_runs_exec_reload_and_is_refused_where_there_is_none(up: Machine) -> None:
    add_unit(up, "r.service", "ExecStart=sleep 611\nExecReload=sh -c 'echo reloading $MAINPID'")
    add_unit(up, "n.service", "ExecStart=sleep 611")
    start(up, "r.service")
    start(up, "n.service")
    up.run(["systemctl", "reload", "r.service"])
    assert f"reloading {show(up, 'r.service', 'MainPID')[0]}" in up.journal("r.service")
    refused = up.run(["systemctl", "reload", "n.service"], check=False)
    assert "Job type reload is not applicable" in refused.stderr
    before = show(up, "n.service", "MainPID")
    up.run(["systemctl", "reload-or-restart", "n.service"])
    assert show(up, "n.service", "MainPID") != before


def test_try_restart_leaves_an_inactive_service_alone(up: Machine) -> None:
    add_unit(up, "a.service", "ExecStart=sleep 611")
    up.run(["systemctl", "try-restart", "a.service"])
    assert show(up, "a.service", "ActiveState") == ["inactive"]


# -- unit files -------------------------------------------------------------------------------------------------------


def test_a_masked_unit_is_not_started(up: Machine) -> None:
    add_unit(up, "a.service", "ExecStart=sleep 611")
    up.run(["rm", "/etc/systemd/system/a.service"])
    up.run(["systemctl", "mask", "a.service"])
    assert up.readlink("/etc/systemd/system/a.service") == "/dev/null"
    assert "Unit a.service is masked." in start(up, "a.service").stderr
    assert show(up, "a.service", "LoadState", "UnitFileState") == ["masked", "masked"]


def test_a_unit_that_does_not_exist_has_systemds_errors(up: Machine) -> None:
    assert "Unit no.service not found." in start(up, "no.service").stderr
    assert "Unit no.service not loaded." in up.run(["systemctl", "stop", "no.service"], check=False).stderr
    with pytest.raises(CommandFailed, match="No such file or directory"):
        call(up, SYSTEMD, "GetUnitFileState", "s", "no.service")
    with pytest.raises(CommandFailed, match="Unit name no is not valid"):
        call(up, SYSTEMD, "StartUnit", "ss", "no", "replace")
    with pytest.raises(CommandFailed, match="Unit file no.service does not exist"):
        call(up, SYSTEMD, "EnableUnitFiles", "asbb", "1", "no.service", "false", "false")


def test_a_unit_file_with_a_bad_setting_is_refused(up: Machine) -> None:
    add_unit(up, "bad.service", "Type=forking\nExecStart=true")
    assert "bad unit file setting" in start(up, "bad.service").stderr
    assert show(up, "bad.service", "LoadState") == ["bad-setting"]


def test_drop_ins_apply_in_the_order_of_their_names_and_an_empty_value_resets(up: Machine) -> None:
    add_unit(up, "a.service", "Type=oneshot\nEnvironment=A=1 'B=two words'\nExecStart=sh -c 'echo from the unit'")
    up.write("/run/systemd/system/a.service.d/20-last.conf", "[Service]\nExecStart=sh -c 'echo \"$A-${B}-%n\"'\n")
    up.write(
        "/etc/systemd/system/a.service.d/10-first.conf", "[Service]\nExecStart=\nExecStart=false\nEnvironment=A=2\n"
    )
    up.write("/etc/systemd/system/a.service.d/15-reset.conf", "[Service]\nExecStart=\n")
    start(up, "a.service")
    assert "2-two words-a.service" in up.journal("a.service").splitlines()
    assert "from the unit" not in up.journal("a.service")
    assert show(up, "a.service", "DropInPaths")[0].split() == [
        "/etc/systemd/system/a.service.d/10-first.conf",
        "/etc/systemd/system/a.service.d/15-reset.conf",
        "/run/systemd/system/a.service.d/20-last.conf",
    ]


def test_enabling_makes_the_links_of_install_and_disabling_removes_them(up: Machine) -> None:
    add_unit(
        up, "a.service", "ExecStart=sleep 611", "WantedBy=multi-user.target\nRequiredBy=b.service\nAlias=also-a.service"
    )
    links = ["multi-user.target.wants/a.service", "b.service.requires/a.service", "also-a.service"]
    assert up.run(["systemctl", "is-enabled", "a.service"], check=False).stdout == "disabled\n"
    up.run(["systemctl", "enable", "a.service"])
    for link in links:
        assert up.readlink(f"/etc/systemd/system/{link}") == "/etc/systemd/system/a.service"
    assert up.run(["systemctl", "is-enabled", "a.service"]).stdout == "enabled\n"
    start(up, "also-a.service")
    assert show(up, "a.service", "ActiveState", "Names") == ["active", "a.service also-a.service"]
    up.run(["systemctl", "disable", "a.service"])
    assert not any(up.exists(f"/etc/systemd/system/{link}") for link in links)
    assert not up.exists("/etc/systemd/system/multi-user.target.wants")


def test_enabling_twice_changes_nothing_and_a_unit_without_install_is_static(up: Machine) -> None:
    add_unit(up, "a.service", "ExecStart=true", "WantedBy=multi-user.target")
    add_unit(up, "static.service", "ExecStart=true")
    enable = ("EnableUnitFiles", "asbb", "1", "a.service", "false", "false")
    assert call(up, SYSTEMD, *enable).startswith('ba(sss) true 1 "symlink"')
    assert call(up, SYSTEMD, *enable) == "ba(sss) true 0"
    assert call(up, SYSTEMD, "EnableUnitFiles", "asbb", "1", "static.service", "false", "false") == "ba(sss) false 0"
    assert up.run(["systemctl", "is-enabled", "static.service"]).stdout == "static\n"


def test_presets_decide_when_nobody_says_whether_a_unit_is_enabled(up: Machine) -> None:
    up.write("/etc/systemd/system-preset/10-x.preset", "enable on.service\n# comment\ndisable *\n")
    for name in ("on.service", "off.service"):
        add_unit(up, name, "ExecStart=true", "WantedBy=multi-user.target")
        up.run(["systemctl", "enable" if name == "off.service" else "disable", name])
        up.run(["systemctl", "preset", name])
    assert up.run(["systemctl", "is-enabled", "on.service"]).stdout == "enabled\n"
    assert up.run(["systemctl", "is-enabled", "off.service"], check=False).stdout == "disabled\n"


def test_a_running_unit_keeps_its_old_definition_until_daemon_reload(up: Machine) -> None:
    add_unit(up, "a.service", "Type=oneshot\nRemainAfterExit=yes\nExecStart=sh -c 'echo old'")
    start(up, "a.service")
    add_unit(up, "a.service", "Type=oneshot\nRemainAfterExit=yes\nExecStart=sh -c 'echo new'")
    assert show(up, "a.service", "NeedDaemonReload") == ["yes"]
    up.run(["systemctl", "restart", "a.service"])
    assert "new" not in up.journal("a.service").splitlines()
    up.run(["systemctl", "daemon-reload"])
    assert show(up, "a.service", "NeedDaemonReload") == ["no"]
    up.run(["systemctl", "restart", "a.service"])
    assert "new" in up.journal("a.service").splitlines()


def test_a_condition_that_does_not_hold_skips_the_unit_without_a_failure(up: Machine) -> None:
    for index, condition in enumerate(
        ("ConditionPathExists=/no", "ConditionPathExists=!/etc", "ConditionKernelCommandLine=nope")
    ):
        add_unit(up, f"c{index}.service", "Type=oneshot\nRemainAfterExit=yes\nExecStart=true", unit=condition)
        assert start(up, f"c{index}.service").returncode == 0
        assert show(up, f"c{index}.service", "ActiveState", "ConditionResult") == ["inactive", "no"]
    add_unit(up, "yes.service", "Type=oneshot\nRemainAfterExit=yes\nExecStart=true",
             unit="ConditionPathExists=|/no\nConditionPathExists=|/etc\nConditionKernelCommandLine=ostree")  # fmt: skip
    start(up, "yes.service")
    assert show(up, "yes.service", "ActiveState", "ConditionResult") == ["active", "yes"]


def test_an_instance_of_a_template_knows_its_name(up: Machine) -> None:
    add_unit(up, "t@.service", "Type=oneshot\nRemainAfterExit=yes\nExecStart=sh -c 'echo instance %i of %p'")
    start(up, "t@one.service")
    assert "instance one of t" in up.journal("t@one.service").splitlines()


# -- boot and shutdown ------------------------------------------------------------------------------------------------


def test_enabled_units_are_up_when_the_boot_is_complete_and_a_failed_one_is_recorded(node: Machine) -> None:
    for name, service in (("good.service", "ExecStart=sleep 611"), ("bad.service", "Type=oneshot\nExecStart=false")):
        node.units[name] = f"[Service]\n{service}\n"
        node.units[f"multi-user.target.wants/{name}"] = ""
    node.units["not-enabled.service"] = "[Service]\nExecStart=sleep 611\n"
    node.boot()
    assert [show(node, f"{each}.service", "ActiveState")[0] for each in ("good", "bad", "not-enabled")] == [
        "active", "failed", "inactive",
    ]  # fmt: skip
    assert node.run(["systemctl", "is-system-running"], check=False).stdout == "degraded\n"


def test_the_early_unit_ends_before_anything_else_starts(node: Machine) -> None:
    node.units["mcdaemon-early.service"] = (
        "[Service]\nType=oneshot\nExecStart=sh -c 'sleep 0.2; echo early >> /run/order'\n"
    )
    node.units["a.service"] = "[Service]\nType=oneshot\nExecStart=sh -c 'echo other >> /run/order'\n"
    for name in ("mcdaemon-early.service", "a.service"):
        node.units[f"basic.target.wants/{name}"] = ""
    node.boot()
    assert node.read("/run/order").split() == ["early", "other"]


def test_a_reboot_that_the_early_unit_asks_for_comes_before_anything_else_starts(node: Machine) -> None:
    script = "test -e /var/once || { touch /var/once; systemctl reboot; }"
    node.units["mcdaemon-early.service"] = f"[Service]\nType=oneshot\nExecStart=sh -c '{script}'\n"
    node.units["a.service"] = "[Service]\nType=oneshot\nExecStart=sh -c 'echo started >> /var/log/starts'\n"
    for name in ("mcdaemon-early.service", "a.service"):
        node.units[f"multi-user.target.wants/{name}"] = ""
    assert node.boot() == 2
    assert node.read("/var/log/starts").split() == ["started"]


def test_at_shutdown_units_stop_in_reverse_order_and_finalization_comes_last(node: Machine, tmp_path: Path) -> None:
    node.boot()
    for name in ("first", "second"):
        stop = f"sh -c 'echo {name} >> /var/log/stops; touch /etc/{name}; test -e /run/ostree/staged-deployment'"
        add_unit(node, f"{name}.service", f"Type=oneshot\nRemainAfterExit=yes\nExecStart=true\nExecStop={stop}")
        start(node, f"{name}.service")
    tree = minimal_tree(tmp_path / "v2")
    (tree / "usr/etc/v2").write_text("2")
    node.run([*STAGE, node.sysroot.commit_tree(tree)])
    node.reboot()
    assert node.read("/var/log/stops").split() == ["second", "first"]
    # What the units wrote to /etc while they stopped was still merged.
    assert node.exists("/etc/first") and node.exists("/etc/second") and node.exists("/etc/v2")
    assert "Failed" not in node.journal("first.service")


def test_a_unit_that_reboots_and_is_stopped_for_it_does_not_hold_the_reboot_up(up: Machine) -> None:
    add_unit(up, "r.service", "ExecStart=sh -c 'systemctl reboot; exec sleep 611'")
    start(up, "r.service")
    assert up.wait_down(10) is Down.REBOOT


def test_nothing_starts_any_more_during_the_shutdown(up: Machine) -> None:
    up.write("/usr/local/bin/ask", "#!/bin/sh\nsystemctl start other.service > /var/log/answer 2>&1\n", 0o755)
    add_unit(up, "a.service", "Type=oneshot\nRemainAfterExit=yes\nExecStart=true\nExecStop=/usr/local/bin/ask")
    add_unit(up, "other.service", "ExecStart=sleep 611")
    start(up, "a.service")
    up.reboot()
    assert "is destructive" in up.read("/var/log/answer")


# -- the finalize unit ------------------------------------------------------------------------------------------------


def test_the_finalize_unit_is_active_as_soon_as_something_is_staged(up: Machine) -> None:
    assert up.run(["systemctl", "is-active", FINALIZE], check=False).stdout == "inactive\n"
    up.run([*STAGE, "--karg-append=x", "stand/os"])
    assert up.run(["systemctl", "is-active", FINALIZE]).stdout == "active\n"
    up.run(["ostree", "admin", "undeploy", "0"])


def test_a_stop_of_the_finalize_unit_with_nothing_staged_changes_nothing(up: Machine) -> None:
    before = up.default_entry()
    up.run(["systemctl", "start", FINALIZE])
    up.run(["systemctl", "stop", FINALIZE])
    assert up.default_entry() == before
    assert show(up, FINALIZE, "ActiveState", "Result") == ["inactive", "success"]


# -- logind -----------------------------------------------------------------------------------------------------------


def inhibit(node: Machine, mode: str) -> NodeProcess:
    """Take a shutdown lock that is held until the process is stopped."""
    holder = node.start(
        ["systemd-inhibit", "--what=shutdown", f"--mode={mode}", "--who=test", "--why=because",
         "sh", "-c", "echo held; exec sleep 611"],
        stdout=subprocess.PIPE,
    )  # fmt: skip
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    return holder


def test_a_block_inhibitor_is_listed_and_goes_with_its_process(up: Machine) -> None:
    holder = inhibit(up, "block")
    assert '"shutdown" "test" "because" "block" 0' in call(up, LOGIN, "ListInhibitors")
    blocked = ["busctl", "get-property", *LOGIN, "BlockInhibited"]
    assert up.run(blocked).stdout == 's "shutdown"\n'
    up.stop_process(holder)
    assert up.run(blocked).stdout == 's ""\n'


def test_root_reboots_in_spite_of_a_block_inhibitor_unless_it_asks_for_the_check(up: Machine) -> None:
    inhibit(up, "block")
    with pytest.raises(CommandFailed, match="Access denied"):
        call(up, LOGIN, "RebootWithFlags", "t", "1")
    up.ask_reboot()
    assert up.wait_down(10) is Down.REBOOT


def test_since_systemd_257_a_block_inhibitor_holds_for_root_too(node: Machine) -> None:
    node.logind = 257
    node.boot()
    weak, strong = inhibit(node, "block-weak"), inhibit(node, "block")
    with pytest.raises(CommandFailed, match="denied due to active block inhibitor"):
        node.ask_reboot()
    node.stop_process(strong)
    node.ask_reboot()
    assert node.wait_down(10) is Down.REBOOT
    weak.wait(5)


def test_a_delay_inhibitor_is_told_and_waited_for(up: Machine) -> None:
    program = (
        "import os\nfrom gi.repository import GLib, Gio\n"
        "bus = Gio.bus_get_sync(Gio.BusType.SYSTEM)\nloop = GLib.MainLoop()\n"
        "name, path, iface = 'org.freedesktop.login1', '/org/freedesktop/login1', 'org.freedesktop.login1.Manager'\n"
        "answer, fds = bus.call_with_unix_fd_list_sync(name, path, iface, 'Inhibit', GLib.Variant('(ssss)',"
        " ('shutdown', 'me', 'x', 'delay')), None, 0, 5000, None, None)\n"
        "lock = fds.get(0)\n"
        "def told(*args):\n    open('/var/log/told', 'w').write(str(args[5].unpack()))\n    os.close(lock)\n"
        "fds = None\n"
        "bus.signal_subscribe(name, iface, 'PrepareForShutdown', path, None, 0, told)\n"
        "print('ready', flush=True)\nloop.run()\n"
    )
    up.write("/var/delayer.py", program)
    delayer = up.start(["/usr/bin/python3", "/var/delayer.py"], stdout=subprocess.PIPE)
    assert delayer.stdout is not None and delayer.stdout.readline() == "ready\n"
    up.reboot()
    assert up.read("/var/log/told") == "(True,)"


def test_a_second_reboot_while_one_is_on_its_way_is_refused(up: Machine) -> None:
    add_unit(up, "slow.service", "Type=oneshot\nRemainAfterExit=yes\nExecStart=true\nExecStop=/usr/local/bin/again")
    again = f"busctl call {' '.join(LOGIN)} Reboot b false"
    up.write("/usr/local/bin/again", f"#!/bin/sh\n{again} > /var/log/answer 2>&1\n", 0o755)
    start(up, "slow.service")
    up.reboot()
    assert "already a shutdown or sleep operation in progress" in up.read("/var/log/answer")


# -- the bus ----------------------------------------------------------------------------------------------------------


def test_pydbus_can_drive_it_and_job_results_come_as_signals(up: Machine) -> None:
    add_unit(up, "good.service", "Type=oneshot\nRemainAfterExit=yes\nExecStart=true")
    add_unit(up, "bad.service", "Type=oneshot\nExecStart=false")
    program = """
import json
from gi.repository import GLib
from pydbus import SystemBus
bus, loop, results, jobs = SystemBus(), GLib.MainLoop(), {}, {}
manager = bus.get("org.freedesktop.systemd1")
def removed(number, path, unit, result):
    results[unit] = [path == jobs.get(unit), result]
    if len(results) == 2:
        loop.quit()
manager.JobRemoved.connect(removed)
for unit in ("good.service", "bad.service"):
    jobs[unit] = manager.StartUnit(unit, "replace")
GLib.timeout_add_seconds(5, loop.quit)
loop.run()
unit = bus.get("org.freedesktop.systemd1", manager.GetUnit("good.service"))
print(json.dumps([results, unit.ActiveState, unit.Result, manager.GetUnitFileState("good.service")]))
"""
    answer = json.loads(up.run(["/usr/bin/python3", "-c", program]).stdout)
    assert answer == [{"good.service": [True, "done"], "bad.service": [True, "failed"]}, "active", "success", "static"]


def test_every_call_is_recorded_with_its_arguments(up: Machine) -> None:
    up.run(["systemctl", "daemon-reload"])
    start(up, "no.service")
    recorded = [(entry["method"], entry["args"]) for entry in up.calls()]
    assert ("Reload", []) in recorded and ("StartUnit", ["no.service", "replace"]) in recorded
    assert up.read("/run/stand/systemd-calls.jsonl").count("\n") == len(recorded)
    times = [entry["time"] for entry in up.calls()]
    assert times == sorted(times)


def test_the_death_of_the_system_bus_is_not_taken_for_a_reboot(up: Machine) -> None:
    up.run(["pkill", "-x", "dbus-daemon"])
    assert up.wait_down(5) is Down.CRASH
