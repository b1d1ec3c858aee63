"""What of a CoreOS machine needs no CoreOS disk: looking at the given file, its overlay, what it is told and says."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import urllib.error
import urllib.request
from contextlib import ExitStack
from pathlib import Path

import pytest
from vmlab import coreos, ignition
from vmlab.coreos import BadImage, DiskImage, check, from_environment, harness_config, served
from vmlab.coreosguest import CoreOs, how_it_ended

from tests.stand.machine import Down, MachineError

SIZE = 2 << 30


def disk(folder: Path, kind: str = "qcow2", size: int = SIZE) -> Path:
    if shutil.which("qemu-img") is None or shutil.which("qemu-system-x86_64") is None:
        pytest.skip("QEMU is not installed: `make vm-deps`")
    path = folder / f"disk.{kind}"
    subprocess.run(["qemu-img", "create", "-q", "-f", kind, str(path), str(size)], check=True, timeout=60)
    return path


# -- the given file ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("environ", [{}, {"VM_IMAGE": ""}, {"VM_IMAGE": "  "}])
def test_without_the_variable_there_is_no_disk(environ: dict[str, str]) -> None:
    assert from_environment(environ) is None


def test_a_qcow2_is_taken_with_its_size(tmp_path: Path) -> None:
    found = from_environment({"VM_IMAGE": str(disk(tmp_path))})
    assert found is not None and (found.format, found.size) == ("qcow2", SIZE)


def test_a_raw_disk_is_taken_when_it_has_a_partition_table(tmp_path: Path) -> None:
    path = disk(tmp_path, "raw")
    with pytest.raises(BadImage, match="neither a qcow2 nor a disk with a partition table"):
        check(path)
    with path.open("r+b") as stream:
        stream.seek(510)
        stream.write(b"\x55\xaa")
    assert check(path).format == "raw"


def test_a_file_that_changes_has_another_key(tmp_path: Path) -> None:
    path = disk(tmp_path)
    before = check(path)
    assert check(path) == before
    subprocess.run(["qemu-img", "resize", "-q", str(path), "+1G"], check=True, timeout=60)
    assert check(path).key != before.key


@pytest.mark.parametrize("name", ["x.qcow2.xz", "x.qcow2.gz"])
def test_a_compressed_disk_is_refused_with_the_command_that_unpacks_it(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\xfd7zXZ")
    with pytest.raises(BadImage, match=r"cannot use VM_IMAGE=.*compressed; unpack it first: `(xz|gzip) -d"):
        check(tmp_path / name)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadImage, match="cannot use VM_IMAGE=.*: there is no such file"):
        check(tmp_path / "none.qcow2")
    with pytest.raises(BadImage, match="it is no file"):
        check(tmp_path)


def test_another_format_is_refused_with_the_command_that_converts_it(tmp_path: Path) -> None:
    with pytest.raises(BadImage, match="its format is vmdk; convert it: `qemu-img convert"):
        check(disk(tmp_path, "vmdk"))


def test_a_disk_too_small_to_be_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadImage, match="which no CoreOS disk has"):
        check(disk(tmp_path, size=1 << 20))


def test_a_torn_qcow2_is_refused_with_qemu_img_s_own_words(tmp_path: Path) -> None:
    path = disk(tmp_path)
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(BadImage, match="cannot use VM_IMAGE=.*qemu-img"):
        check(path)


def test_a_missing_backing_file_is_said_before_a_machine_is_started(tmp_path: Path) -> None:
    base = disk(tmp_path)
    top = coreos.overlay(check(base), tmp_path / "top.qcow2")
    base.unlink()
    with pytest.raises(coreos.ToolFailed, match="qemu-img create"):
        coreos.overlay(check(top), tmp_path / "second.qcow2")


def test_no_qemu_img_is_said_with_what_installs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = disk(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BadImage, match="there is no qemu-img; `make vm-deps` installs it"):
        check(path)


def test_writes_go_to_the_overlay_and_never_to_the_given_disk(tmp_path: Path) -> None:
    path = disk(tmp_path)
    before = hashlib.sha256(path.read_bytes()).hexdigest()
    top = coreos.overlay(check(path), tmp_path / "top.qcow2")
    subprocess.run(["qemu-io", "-c", "write -P 7 0 1M", str(top)], check=True, timeout=60, capture_output=True)
    assert hashlib.sha256(path.read_bytes()).hexdigest() == before
    with pytest.raises(coreos.ToolFailed):
        coreos.overlay(DiskImage(tmp_path / "none", "qcow2", SIZE, ""), tmp_path / "other.qcow2")


# -- what it is told --------------------------------------------------------------------------------------------------


def test_a_small_config_goes_to_fw_cfg_itself() -> None:
    text = harness_config().text()
    assert len(text) < ignition.FW_CFG_LIMIT
    with served(text) as given:
        assert given == text


def test_a_large_config_is_served_as_long_as_it_is_needed_and_fw_cfg_gets_its_address() -> None:
    text = "x" * (ignition.FW_CFG_LIMIT + 1)
    with served(text) as given:
        url = json.loads(given)["ignition"]["config"]["replace"]["source"].replace(coreos.HOST, "127.0.0.1")
        with urllib.request.urlopen(url, timeout=10) as answer:
            assert answer.read().decode() == text
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(url + "x", timeout=10)
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(url, timeout=10)


def test_a_path_that_qemu_would_split_is_refused() -> None:
    with pytest.raises(BadImage, match="comma"):
        coreos.ignition_arguments(Path("/tmp/a,b/config.ign"))


def test_only_boots_before_the_first_that_came_up_see_the_config(tmp_path: Path) -> None:
    machine = CoreOs(check(disk(tmp_path)), tmp_path / "machine", harness_config())
    ends = {"serial": 10, "journal": 11, "shell": 12, "qmp": 13}
    with ExitStack() as undo:
        first = machine._arguments(ends, undo)
        assert f"name=opt/com.coreos/config,file={tmp_path}/machine/config.ign" in first
        written = json.loads((tmp_path / "machine/config.ign").read_text())
        assert ignition.problems(written) == []
    machine.boots.append("a boot")
    with ExitStack() as undo:
        second = machine._arguments(ends, undo)
        assert "-fw_cfg" not in second and "-no-reboot" in second


def test_a_machine_of_an_unbootable_disk_is_given_up_in_time_with_what_it_showed(tmp_path: Path) -> None:
    """A real QEMU with a disk that has nothing on it: the firmware finds nothing to boot and waits."""
    with CoreOs(check(disk(tmp_path)), tmp_path / "machine") as machine:
        with pytest.raises(MachineError, match=r"no root shell answers[\s\S]*serial.log"):
            machine.boot(timeout=2.0)
        assert machine.up
        machine.power_cut()
        assert not machine.up


def test_a_qemu_that_does_not_start_is_said_with_its_own_words(tmp_path: Path) -> None:
    with CoreOs(check(disk(tmp_path)), tmp_path / "machine", more=["-device", "no-such-device"]) as machine:
        with pytest.raises(MachineError, match=r"went down by crash[\s\S]*no-such-device"):
            machine.boot(timeout=60)
        with pytest.raises(MachineError, match="is down"):
            machine.run(["true"])


# -- what it says -----------------------------------------------------------------------------------------------------


def test_a_line_of_the_journal_that_does_not_come_is_said_with_what_came(tmp_path: Path) -> None:
    """A real QEMU with nothing to boot: its journal stays empty."""
    with CoreOs(check(disk(tmp_path)), tmp_path / "machine") as machine:
        machine.start_boot()
        assert machine.mark() == 0 and machine.seen() == []
        with pytest.raises(MachineError, match="the journal did not show 'never' within 0.2 s"):
            machine.wait_for("never", timeout=0.2)


def shutdown(reason: str) -> str:
    return '{"timestamp": {}, "event": "SHUTDOWN", "data": {"guest": true, "reason": "' + reason + '"}}\n'


@pytest.mark.parametrize(
    ("said", "how"),
    [
        ('{"QMP": {}}\n{"return": {}}\n' + shutdown("guest-reset"), Down.REBOOT),
        (shutdown("guest-shutdown"), Down.POWEROFF),
        (shutdown("guest-panic"), Down.CRASH),
        (shutdown("host-signal"), Down.CRASH),
        ('{"QMP": {}}\n{"event": "SHUT', Down.CRASH),
        ("", Down.CRASH),
    ],
)
def test_how_a_machine_went_down_is_read_from_qemu(said: str, how: Down) -> None:
    assert how_it_ended(said) is how
