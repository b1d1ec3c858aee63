"""The node of the stand: real deployments, boot entries and /etc merges, and nothing of it left on the host."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stand.machine import CommandFailed, Down, Machine, MachineError, minimal_tree

pytestmark = pytest.mark.stand

STAGE = ("ostree", "admin", "deploy", "--stage", "--os=rhcos")
FINALIZE = "ostree-finalize-staged.service"
STAMP = "/boot/ostree/finalize-failure.stamp"


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Machine]:
    """A node with the minimal OS, not booted."""
    with Machine(tmp_path / "node") as machine:
        machine.install_tree(image(tmp_path / "v1", "1"), version="1")
        yield machine


def image(folder: Path, version: str) -> Path:
    """An OS tree whose /etc tells its version."""
    tree = minimal_tree(folder)
    (tree / "usr/etc/version").write_text(f"{version}\n")
    return tree


def new_image(node: Machine, folder: Path) -> str:
    """Commit a second version, with /etc/only-in-2, into the node's repository."""
    tree = image(folder, "2")
    (tree / "usr/etc/only-in-2").write_text("2\n")
    return node.sysroot.commit_tree(tree, "2")


def booted_version(node: Machine) -> str:
    return node.read("/usr/etc/version").strip()


# -- booting ----------------------------------------------------------------------------------------------------------


def test_a_boot_runs_the_default_entry_with_its_kernel_arguments(node: Machine, tmp_path: Path) -> None:
    node.install_tree(image(tmp_path / "v2", "2"), kargs=("quiet",), version="2")
    assert node.boot() == 1
    assert node.read("/proc/cmdline").strip() == node.default_entry().options
    assert "quiet" in node.read("/proc/cmdline").split()
    assert node.booted().name == node.default_entry().deployment
    assert booted_version(node) == "2"


def test_each_boot_has_its_own_boot_id(node: Machine) -> None:
    node.boot()
    first = node.read("/proc/sys/kernel/random/boot_id").strip()
    node.reboot()
    assert node.read("/proc/sys/kernel/random/boot_id").strip() == node.boot_id != first
    assert node.boots == [first, node.boot_id]


def test_a_node_without_a_boot_entry_does_not_boot(tmp_path: Path) -> None:
    with Machine(tmp_path / "node") as machine, pytest.raises(Exception, match="no boot entry"):
        machine.boot()


def test_a_deployment_that_cannot_be_mounted_fails_the_boot_with_its_place(node: Machine) -> None:
    root = node.deployment_root(node.default_entry().deployment)
    node.close()
    (root / "sysroot").rename(root / "not-sysroot")
    with pytest.raises(MachineError, match="sysroot: No such file or directory"):
        node.boot()
    assert not node.up


def test_a_boot_that_hangs_names_the_unit_and_shows_the_log(node: Machine) -> None:
    node.units["stuck.service"] = "[Service]\nType=notify\nExecStart=sh -c 'echo no news; exec sleep 600'\n"
    node.units["multi-user.target.wants/stuck.service"] = ""
    with pytest.raises(MachineError, match=r"hangs at stuck\.service(.|\n)*no news"):
        node.boot(timeout=1.5)


def test_a_unit_that_reboots_during_the_boot_is_followed(node: Machine) -> None:
    script = "test -e /var/once || { touch /var/once; systemctl reboot; }"
    node.units["mcdaemon-early.service"] = f"[Service]\nType=oneshot\nExecStart=sh -c '{script}'\n"
    node.units["multi-user.target.wants/mcdaemon-early.service"] = ""
    assert node.boot() == 2
    assert len(node.boots) == 2


def test_a_node_that_reboots_for_ever_is_given_up(node: Machine) -> None:
    node.units["mcdaemon-early.service"] = "[Service]\nType=oneshot\nExecStart=systemctl reboot\n"
    node.units["multi-user.target.wants/mcdaemon-early.service"] = ""
    with pytest.raises(MachineError, match="rebooted 5 times in a row"):
        node.boot()


# -- what a node looks like -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/usr/x", "/sysroot/x", "/x", "/usr/lib/systemd/system/x"])
def test_places_that_are_read_only_on_a_node_are_so_here(node: Machine, path: str) -> None:
    node.boot()
    with pytest.raises(CommandFailed, match="Read-only file system|Operation not permitted"):
        node.run(["touch", path])


def test_a_private_mount_namespace_may_write_to_the_sysroot_and_nobody_else_sees_it_writable(node: Machine) -> None:
    node.boot()
    node.run(["unshare", "-m", "sh", "-ec", "mount -o remount,rw /sysroot; touch /sysroot/x; rm /sysroot/x"])
    assert node.run(["touch", "/sysroot/x"], check=False).returncode != 0


def test_units_presets_and_kernels_of_the_host_do_not_show_in_the_node(node: Machine) -> None:
    node.boot()
    for folder, allowed in (
        ("lib/systemd/system", []),
        ("lib/systemd/system-preset", []),
        ("lib/modules", ["6.1.0-stand"]),
    ):
        assert node.run(["ls", f"/usr/{folder}"]).stdout.split() == allowed


def test_kernel_settings_of_the_host_cannot_be_changed_from_the_node(node: Machine) -> None:
    node.boot()
    result = node.run(["sh", "-c", "echo 1 > /proc/sys/vm/swappiness"], check=False)
    assert result.returncode != 0 and "Read-only" in result.stderr


def test_the_file_system_of_the_host_cannot_be_frozen_through_boot(node: Machine) -> None:
    """libostree freezes /boot when it swaps boot entries; a power cut in that moment must not hang the host."""
    node.boot()
    result = node.run(["fsfreeze", "--freeze", "/boot"], check=False)
    assert result.returncode != 0 and "not supported" in result.stderr


def test_the_environment_of_the_host_does_not_leak_in(node: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOST_SECRET", "x")
    node.environment["FOR_THE_NODE"] = "y"
    node.boot()
    environment = node.run(["env"], env={"EXTRA": "z"}).stdout.splitlines()
    assert {"FOR_THE_NODE=y", "EXTRA=z"} <= set(environment)
    assert not any(line.startswith(("HOST_SECRET", "PYTHONPATH")) for line in environment)


def test_extra_binds_are_read_only_unless_asked_otherwise(tmp_path: Path, node: Machine) -> None:
    for name in ("ro", "rw"):
        (tmp_path / name).mkdir()
    node.binds = {tmp_path / "ro": "/run/given", tmp_path / "rw": ("/var/shared", "rw")}
    node.boot()
    assert node.run(["touch", "/run/given/x"], check=False).returncode != 0
    node.run(["touch", "/var/shared/x"])
    assert (tmp_path / "rw/x").exists()


def test_podman_works_in_the_node_and_its_storage_survives_a_reboot(node: Machine) -> None:
    node.boot()
    node.run(["sh", "-ec", "cd /tmp; echo data > f; tar c f | podman import - localhost/image:1"])
    node.reboot()
    container = node.run(["podman", "create", "localhost/image:1", "/never-run"]).stdout.strip()
    node.run(["podman", "cp", f"{container}:/f", "/tmp/out"])
    assert node.read("/tmp/out") == "data\n"
    node.run(["podman", "rm", container])
    assert node.run(["podman", "ps", "-aq"]).stdout == ""


# -- commands and files -----------------------------------------------------------------------------------------------


def test_a_failing_command_shows_arguments_status_and_output(node: Machine) -> None:
    node.boot()
    with pytest.raises(CommandFailed, match=r"status 3(.|\n)*'sh', '-c'(.|\n)*to-out(.|\n)*to-err") as raised:
        node.run(["sh", "-c", "echo to-out; echo to-err >&2; exit 3"])
    assert raised.value.result.returncode == 3
    assert node.run(["false"], check=False).returncode == 1


def test_a_command_that_takes_too_long_is_killed_with_its_children(node: Machine) -> None:
    node.boot()
    with pytest.raises(CommandFailed, match="did not end within 0.3 s(.|\n)*begun"):
        node.run(["sh", "-c", "echo begun; sleep 611 & sleep 611"], timeout=0.3)
    assert node.run(["pgrep", "-f", "sleep 611"], check=False).stdout == ""


def test_a_daemon_that_a_command_leaves_behind_does_not_hang_the_test(node: Machine) -> None:
    node.boot()
    with pytest.raises(CommandFailed, match="did not end within 0.2 s(.|\n)*left"):
        node.run(["sh", "-c", "echo left; setsid sleep 611 &"], timeout=0.2)


def test_a_long_running_command_can_be_ended_like_any_other_process(node: Machine) -> None:
    node.boot()
    for number in (signal.SIGTERM, signal.SIGKILL):
        process = node.start(["sh", "-c", "sleep 611 & echo begun; wait"], stdout=subprocess.PIPE)
        assert process.stdout is not None and process.stdout.readline() == "begun\n"
        process.send_signal(number)
        process.communicate(timeout=5)
        assert process.returncode == -number
        assert node.run(["pgrep", "-f", "sleep 611"], check=False).stdout == ""


def test_a_command_gets_its_input(node: Machine) -> None:
    node.boot()
    assert node.run(["tr", "a", "b"], input="aha").stdout == "bhb"


def test_files_are_read_and_written_below_the_node_whatever_its_links_say(node: Machine, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("host")
    node.boot()
    for target in (str(outside), "../" * 30 + str(outside).lstrip("/")):
        node.run(["ln", "-sfn", target, "/etc/trap"])
        assert not node.exists("/etc/trap/file")
        node.run(["mkdir", "-p", str(outside)])
        node.write("/etc/trap/file", "node")
        assert (outside / "file").read_text() == "host"
        assert node.read(f"{outside}/file") == "node"
        assert node.readlink("/etc/trap") == target
        node.run(["rm", f"{outside}/file"])


def test_a_written_file_has_its_mode_and_its_parents(node: Machine) -> None:
    node.boot()
    node.write("/usr/local/bin/deep/tool", "#!/bin/sh\n", 0o755)
    assert oct(node.lstat("/var/usrlocal/bin/deep/tool").st_mode) == "0o100755"
    assert not node.exists("/var/usrlocal/bin/deep/tool/x")


def test_nothing_can_be_run_in_a_node_that_is_down(node: Machine) -> None:
    for action in (lambda: node.run(["true"]), lambda: node.read("/etc/passwd"), node.power_cut):
        with pytest.raises(MachineError, match="the node is down"):
            action()


def test_nothing_is_installed_into_a_node_that_is_up(node: Machine, tmp_path: Path) -> None:
    node.boot()
    with pytest.raises(MachineError, match="the node is up"):
        node.install_tree(tmp_path / "v1")


# -- updates ----------------------------------------------------------------------------------------------------------


def test_a_staged_deployment_boots_after_an_orderly_reboot_with_a_merged_etc(node: Machine, tmp_path: Path) -> None:
    tree = image(tmp_path / "v1", "1")
    for name in ("default", "changed", "removed"):
        (tree / "usr/etc" / name).write_text("1\n")
    node.install_tree(tree)
    node.boot()
    node.write("/etc/mine", "local\n", 0o600)
    node.write("/etc/changed", "local\n")
    node.run(["rm", "/etc/removed"])
    commit = new_image(node, tmp_path / "v2")
    node.run([*STAGE, commit])
    assert [deployment.staged for deployment in node.deployments()][0]
    assert not node.deployments()[0].booted
    node.reboot()
    assert node.booted().checksum == commit
    assert node.read("/etc/mine") == node.read("/etc/changed") == "local\n"
    assert oct(node.lstat("/etc/mine").st_mode & 0o777) == "0o600"
    assert node.read("/etc/only-in-2") == "2\n"
    # An untouched file of the old image and a file that was removed do not come along.
    assert not node.exists("/etc/default") and not node.exists("/etc/removed")


def test_a_staged_deployment_is_lost_in_a_power_cut(node: Machine, tmp_path: Path) -> None:
    node.boot()
    before = node.booted().name
    node.run([*STAGE, new_image(node, tmp_path / "v2")])
    node.power_cut()
    node.boot()
    assert [deployment.name for deployment in node.deployments()] == [before]
    assert booted_version(node) == "1"


def test_a_forced_reboot_loses_the_staged_deployment_too(node: Machine, tmp_path: Path) -> None:
    node.boot()
    node.run([*STAGE, new_image(node, tmp_path / "v2")])
    node.run(["systemctl", "reboot", "--force"], check=False)
    assert node.wait_down() is Down.REBOOT
    node.boot()
    assert booted_version(node) == "1"


def test_stopping_the_finalize_unit_writes_the_boot_entry_while_the_node_is_up(node: Machine, tmp_path: Path) -> None:
    node.boot()
    before = node.default_entry().deployment
    node.write("/etc/early", "merged\n")
    commit = new_image(node, tmp_path / "v2")
    node.run([*STAGE, commit])
    assert node.default_entry().deployment == before
    node.run(["systemctl", "stop", FINALIZE])
    pending = node.default_entry().deployment
    assert pending.startswith(commit)
    assert [(each.pending, each.booted) for each in node.deployments()] == [(True, False), (False, True)]
    assert (node.deployment_root(pending) / "etc/early").read_text() == "merged\n"
    assert not node.exists("/etc/only-in-2"), "the running /etc must not change"
    node.power_cut()
    node.boot()
    assert node.booted().name == pending


def test_a_locked_deployment_is_not_finalized(node: Machine, tmp_path: Path) -> None:
    node.boot()
    node.run([*STAGE, "--lock-finalization", new_image(node, tmp_path / "v2")])
    node.reboot()
    assert booted_version(node) == "1"
    assert len(node.deployments()) == 1


def test_an_etc_that_cannot_be_merged_leaves_the_stamp_and_boots_the_old_deployment(
    node: Machine, tmp_path: Path
) -> None:
    node.boot()
    node.write("/etc/conflict", "a file here\n")
    tree = image(tmp_path / "v2", "2")
    (tree / "usr/etc/conflict").mkdir()
    (tree / "usr/etc/conflict/file").write_text("a directory in the image\n")
    node.run([*STAGE, node.sysroot.commit_tree(tree)])
    # A stop job is done when the unit is not active any more: the failure only shows in the unit's state.
    node.run(["systemctl", "stop", FINALIZE])
    state = node.run(["systemctl", "show", FINALIZE, "-p", "ActiveState,Result"]).stdout.split()
    assert sorted(state) == ["ActiveState=failed", "Result=exit-code"]
    assert "Modified config file newly defaults to directory" in node.read(STAMP)
    node.reboot()
    assert booted_version(node) == "1"
    assert node.run(["systemctl", "is-failed", "ostree-boot-complete.service"]).stdout == "failed\n"
    assert "newly defaults to directory" in node.journal("ostree-boot-complete.service")
    assert not node.exists(STAMP)
    node.reboot()
    assert node.run(["systemctl", "is-failed", "ostree-boot-complete.service"], check=False).stdout == "inactive\n"


def test_after_a_failed_finalization_the_next_one_works(node: Machine, tmp_path: Path) -> None:
    node.boot()
    node.write("/etc/conflict", "x")
    tree = image(tmp_path / "v2", "2")
    (tree / "usr/etc/conflict").mkdir()
    commit = node.sysroot.commit_tree(tree)
    node.run([*STAGE, commit])
    node.run(["systemctl", "stop", FINALIZE])
    node.run(["rm", "/etc/conflict"])
    node.run([*STAGE, commit])
    assert node.run(["systemctl", "is-active", FINALIZE]).stdout == "active\n"
    node.reboot()
    assert booted_version(node) == "2"


def test_kernel_arguments_alone_make_a_deployment_of_their_own(node: Machine) -> None:
    node.boot()
    before = node.booted()
    node.run([*STAGE, "--karg-append=mcdaemon.update=1", before.checksum])
    node.reboot()
    assert node.booted().checksum == before.checksum and node.booted().name != before.name
    assert "mcdaemon.update=1" in node.read("/proc/cmdline").split()


def test_an_origin_file_may_name_a_container_image(node: Machine, tmp_path: Path) -> None:
    reference = "ostree-unverified-registry:127.0.0.1:5000/os@sha256:" + "a" * 64
    commit = new_image(node, tmp_path / "v2")
    node.deploy_commit(commit, origin_text=f"[origin]\ncontainer-image-reference={reference}\n")
    node.boot()
    assert node.booted().checksum == commit
    assert reference in node.read(f"/ostree/deploy/rhcos/deploy/{node.booted().name}.origin")


# -- going down -------------------------------------------------------------------------------------------------------


def test_a_power_cut_loses_run_and_tmp_and_keeps_var_and_etc(node: Machine) -> None:
    node.boot()
    for path in ("/run/x", "/tmp/x", "/var/x", "/etc/x"):
        node.write(path, "x")
    node.power_cut()
    assert not node.up
    node.boot()
    assert [node.exists(path) for path in ("/run/x", "/tmp/x", "/var/x", "/etc/x")] == [False, False, True, True]


def test_the_death_of_pid_1_is_a_crash(node: Machine) -> None:
    node.boot()
    os.kill(outside_pid(node), signal.SIGKILL)
    assert node.wait_down() is Down.CRASH
    assert not node.up


def test_a_poweroff_is_not_taken_for_a_reboot(node: Machine) -> None:
    node.boot()
    node.run(["systemctl", "poweroff"])
    assert node.wait_down() is Down.POWEROFF


def test_a_node_that_nobody_asks_to_go_down_stays_up(node: Machine) -> None:
    node.boot()
    with pytest.raises(MachineError, match="does not go down"):
        node.wait_down(timeout=0.2)
    assert node.run(["true"]).returncode == 0


def test_a_closed_node_leaves_no_mount_and_no_process_and_its_folder_can_be_removed(node: Machine) -> None:
    node.boot()
    runner = node.start(["sleep", "600"])
    pid = outside_pid(node)
    assert mounts_of(node) == []
    node.close()
    assert runner.wait(5) != 0
    assert not Path(f"/proc/{pid}").exists()
    assert mounts_of(node) == []
    shutil.rmtree(node.folder)


def test_a_node_dies_with_the_test_that_started_it(node: Machine) -> None:
    program = (
        "import sys; from pathlib import Path; from tests.stand.machine import Machine\n"
        "m = Machine(Path(sys.argv[1])); m.boot(); print(m._init, flush=True); m.run(['sleep', '600'])"
    )
    tester = subprocess.Popen([sys.executable, "-c", program, str(node.folder)], stdout=subprocess.PIPE, text=True)
    assert tester.stdout is not None
    watched = os.pidfd_open(int(tester.stdout.readline()))
    tester.kill()
    tester.communicate()
    assert wait_gone(watched), "PID 1 of the node survived"
    os.close(watched)
    assert mounts_of(node) == []
    node.boot()


def test_two_nodes_share_nothing_but_the_network(node: Machine, tmp_path: Path) -> None:
    with Machine(tmp_path / "other") as other:
        other.install_tree(tmp_path / "v1")
        for machine, name in ((node, "one"), (other, "two")):
            machine.boot()
            for path in ("/run/x", "/var/x", "/etc/x", "/dev/shm/x", "/boot/x"):
                machine.write(path, name)
            machine.run(["hostname", name])
        for machine, name in ((node, "one"), (other, "two")):
            for path in ("/run/x", "/var/x", "/etc/x", "/dev/shm/x", "/boot/x"):
                assert machine.read(path) == name
            assert machine.run(["hostname"]).stdout.strip() == name
        node.power_cut()
        assert other.run(["systemctl", "is-system-running"]).stdout == "running\n"


def outside_pid(node: Machine) -> int:
    """The host's id of the node's first process, found as an outsider would: by its mount namespace's root."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and _is_first_process(entry, node):
            return int(entry.name)
    raise AssertionError("the node has no first process")


def _is_first_process(entry: Path, node: Machine) -> bool:
    try:
        command = (entry / "cmdline").read_bytes()
        mounted = (entry / "mountinfo").read_text()
    except OSError:
        return False
    return b"tests.stand.systemd1" in command and str(node.folder) in mounted


def mounts_of(node: Machine) -> list[str]:
    """The mounts of this test's own mount namespace that have to do with the node."""
    return [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(node.folder) in line]


def wait_gone(descriptor: int) -> bool:
    """Wait up to 5 s for the process behind a pidfd to end."""
    return bool(select.select([descriptor], [], [], 5)[0])
