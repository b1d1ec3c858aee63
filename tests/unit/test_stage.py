"""Staging: the kernel line that is asked for, and whether what is staged is exactly ours."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Optional

import pytest

from mcdaemon.decide import Staged
from mcdaemon.errors import Broken, Held, HoldReason
from mcdaemon.host import space
from mcdaemon.host.deployments import Machine, StagedDeployment
from mcdaemon.host.root import Root
from mcdaemon.host.rpmostree import Deployment
from mcdaemon.host.space import Room
from mcdaemon.machineconfig.diff import Difference
from mcdaemon.machineconfig.extensions import PackageDelta
from mcdaemon.plan import Plan
from mcdaemon.update import stage
from mcdaemon.update.journal import Update

BASE = "root=UUID=1 rw ostree=/ostree/boot.1/rhcos/b/0 quiet"
OLD, NEW = "sha256:" + "1" * 64, "sha256:" + "2" * 64
BOOTED_NAME, STAGED_NAME = "b" * 64 + ".0", "c" * 64 + ".0"


def plan(image: str = "", old: Sequence[str] = (), new: Sequence[str] = (), **delta: tuple[str, ...]) -> Plan:
    return Plan(image, "", PackageDelta(**delta), tuple(old), tuple(new), (), Difference())


def line(existing: str, change: Plan, update: str = "u1") -> str:
    return stage.kernel_line(existing, change, update)


# -- the kernel line --------------------------------------------------------------------------------------------------


def test_arguments_of_the_base_stay_in_their_places() -> None:
    change = plan("img", new=["a=1", "b"])
    assert line(BASE, change) == f"{BASE} a=1 b"


def test_order_and_repeats_of_the_config_are_kept() -> None:
    change = plan("img", new=["console=tty0", "console=ttyS0", "console=tty0"])
    assert line("rw", change) == "rw console=tty0 console=ttyS0 console=tty0"


def test_quoted_blanks_stay_one_argument() -> None:
    change = plan("img", old=['dyndbg="file a.c +p"'], new=['dyndbg="file b.c +p"'])
    assert line('rw dyndbg="file a.c +p" quiet', change) == 'rw quiet dyndbg="file b.c +p"'


def test_what_the_old_config_wanted_goes_as_often_as_it_had_it() -> None:
    change = plan("img", old=["a", "a"], new=[])
    assert line("a rw a a", change) == "rw a"


def test_a_base_argument_that_the_config_names_too_is_managed_from_then_on() -> None:
    assert line("rw nosmt quiet", plan("img", new=["nosmt"])) == "rw nosmt quiet"
    assert line("rw nosmt quiet", plan("img", old=["nosmt"], new=[])) == "rw quiet"


def test_nothing_to_change_changes_nothing_but_the_marker() -> None:
    assert line("rw a=1 quiet", plan("img", old=["a=1"], new=["a=1"])) == "rw a=1 quiet"
    assert line("rw a=1 quiet", plan(old=["a=1"], new=["a=1"])) == "rw a=1 quiet mcdaemon.update=u1"


def test_the_marker_of_an_earlier_update_is_replaced() -> None:
    assert line("rw mcdaemon.update=u0 quiet", plan()) == "rw quiet mcdaemon.update=u1"
    assert line("mcdaemon.update=a rw mcdaemon.update=b", plan()) == "rw mcdaemon.update=u1"


def test_with_another_os_the_marker_goes() -> None:
    assert line("rw mcdaemon.update=u0 quiet", plan("img")) == "rw quiet"
    assert line("rw mcdaemon.update=u0", plan(install=("usbguard",))) == "rw"


@pytest.mark.parametrize("change", [
    plan(), plan("img"), plan("img", ["a"], ["b", "b"]), plan("", ["a", "b"], ["b", "a"]), plan("", ["x"], []),
])  # fmt: skip
def test_what_was_asked_for_once_is_not_changed_by_asking_again(change: Plan) -> None:
    """A crash between staging and the next look: the second call starts from the staged line."""
    once = line("rw a b mcdaemon.update=u0 quiet", change)
    assert line(once, change) == once


def test_titles_are_never_the_same_twice() -> None:
    assert len({stage.title(update, attempt) for update in ("u1", "u2") for attempt in range(1, 9)}) == 16
    assert stage.title("u1", 1).startswith("mcdaemon:")


# -- what is staged ---------------------------------------------------------------------------------------------------

UPDATE = Update("u1", "d", "rendered", BOOTED_NAME, digest=NEW, image_digest=NEW)
BOOTED = Deployment(BOOTED_NAME, "rhcos", True, False, False, "img", OLD, "", ("strace",), ("kernel",))
ENTRY = dataclasses.replace(BOOTED, name=STAGED_NAME, booted=False, staged=True)
IMAGE = plan("quay.io/os:2", ["a"], ["b"], install=("usbguard",))
FILES = plan("", ["a"], ["b"])
LINE = "root=UUID=1 rw a ostree=/ostree/boot.1/rhcos/b/0"


def staged(words: str, **more: Any) -> StagedDeployment:
    return StagedDeployment(**{"name": STAGED_NAME, "osname": "rhcos", "bootcsum": "", "locked": True,
                               "kernel_arguments": tuple(words.split()), **more})  # fmt: skip


def classify(
    change: Plan, found: Optional[StagedDeployment], entry: Optional[Deployment], update: Update = UPDATE,
    others: Sequence[Deployment] = (BOOTED,), booted_line: str = LINE,
) -> Staged:  # fmt: skip
    deployments = [*([entry] if entry else []), *others]
    return stage.classify(change, update, found, deployments, booted_line)


TARGET = dataclasses.replace(ENTRY, digest=NEW, requested=("strace", "usbguard"))
IMAGE_LINE, FILES_LINE = "root=UUID=1 rw b", "root=UUID=1 rw b mcdaemon.update=u1"


def test_what_is_exactly_ours_is_ready() -> None:
    assert classify(IMAGE, staged(IMAGE_LINE), TARGET) is Staged.READY
    assert classify(FILES, staged(FILES_LINE), ENTRY) is Staged.READY


def test_nothing_staged_is_none() -> None:
    assert classify(IMAGE, None, None) is Staged.NONE
    assert classify(IMAGE, None, TARGET) is Staged.NONE


def test_the_right_os_without_its_arguments_lacks_only_these() -> None:
    assert classify(IMAGE, staged("root=UUID=1 rw a"), TARGET) is Staged.OS_ONLY


DEVIATIONS: dict[str, dict[str, Any]] = {
    "another digest": {"entry": dataclasses.replace(TARGET, digest="sha256:" + "3" * 64)},
    "the digest of the booted one": {"entry": dataclasses.replace(TARGET, digest=OLD)},
    "no digest": {"entry": dataclasses.replace(TARGET, digest="")},
    "a package is missing": {"entry": dataclasses.replace(TARGET, requested=("strace",))},
    "a package more": {"entry": dataclasses.replace(TARGET, requested=("strace", "usbguard", "tcpdump"))},
    "a human's package is gone": {"entry": dataclasses.replace(TARGET, requested=("usbguard",))},
    "a base package is removed": {"entry": dataclasses.replace(TARGET, removals=("kernel", "glibc"))},
    "a removal is taken back": {"entry": dataclasses.replace(TARGET, removals=())},
    "another name": {"entry": dataclasses.replace(TARGET, name="d" * 64 + ".0")},
    "another serial": {"entry": dataclasses.replace(TARGET, name="c" * 64 + ".1")},
    "rpm-ostree does not know it": {"entry": None},
    "not locked": {"found": staged(IMAGE_LINE, locked=False)},
    "nothing is booted": {"others": ()},
}


@pytest.mark.parametrize("case", DEVIATIONS)
def test_a_single_deviation_makes_it_somebody_elses(case: str) -> None:
    arguments: dict[str, Any] = {"found": staged(IMAGE_LINE), "entry": TARGET, **DEVIATIONS[case]}
    assert classify(IMAGE, **arguments) is Staged.OTHER


def test_a_lock_that_is_gone_is_right_only_while_it_is_being_finalized() -> None:
    unlocked = staged(IMAGE_LINE, locked=False)
    assert classify(IMAGE, unlocked, TARGET, dataclasses.replace(UPDATE, finalizing="boot")) is Staged.READY


WRONG_LINES = {
    "order": "root=UUID=1 b rw", "one more": "root=UUID=1 rw b quiet", "one less": "root=UUID=1 b",
    "twice": "root=UUID=1 rw b b",
    "old one left": "root=UUID=1 rw a b", "base gone": "rw b", "empty": "",
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG_LINES)
def test_other_arguments_than_asked_for_are_never_ready(case: str) -> None:
    assert classify(IMAGE, staged(WRONG_LINES[case]), TARGET) is Staged.OS_ONLY
    assert classify(FILES, staged(WRONG_LINES[case] + " mcdaemon.update=u1"), ENTRY) is Staged.OTHER


@pytest.mark.parametrize("marker", ["", " mcdaemon.update=u0", " mcdaemon.update=u11", " mcdaemon.update=u1 x"])
def test_with_an_unchanged_os_only_the_own_marker_makes_it_ours(marker: str) -> None:
    assert classify(FILES, staged("root=UUID=1 rw b" + marker), ENTRY) is Staged.OTHER


def test_with_another_os_an_old_marker_does_not_matter() -> None:
    assert classify(IMAGE, staged(IMAGE_LINE + " mcdaemon.update=u0"), TARGET) is Staged.READY


def test_where_libostree_has_its_own_argument_does_not_matter() -> None:
    found = staged("ostree=/ostree/boot.0/rhcos/c/0 " + IMAGE_LINE)
    assert classify(IMAGE, found, TARGET) is Staged.READY


def test_an_index_is_compared_by_the_manifest_of_this_platform() -> None:
    update = dataclasses.replace(UPDATE, digest="sha256:" + "9" * 64)
    assert classify(IMAGE, staged(IMAGE_LINE), TARGET, update) is Staged.READY


def test_an_origin_without_a_digest_can_still_get_files_and_arguments() -> None:
    """Row 48: rpm-ostree does not always tell."""
    booted = dataclasses.replace(BOOTED, digest="")
    assert classify(FILES, staged(FILES_LINE), dataclasses.replace(ENTRY, digest=""), others=(booted,)) is Staged.READY


# -- what is proved besides -------------------------------------------------------------------------------------------

DEPLOYED = StagedDeployment(STAGED_NAME, "rhcos", "k" * 64, (), True)


class Disk(Machine):
    """A machine whose parts are in a directory; the deployments' own places are real."""

    def root_of(self, name: str) -> Root:
        return Root.of_deployment(self.sysroot, "rhcos", name)


@pytest.fixture
def machine(tmp_path: Path) -> Disk:
    usr = tmp_path / f"sysroot/ostree/deploy/rhcos/deploy/{STAGED_NAME}/usr"
    (usr / "bin").mkdir(parents=True)
    (usr / "lib64/python3.11/site-packages/gi").mkdir(parents=True)
    (usr / "lib64/python3.11/site-packages/gi/__init__.py").touch()
    (usr / "bin/python3.11").touch(0o755)
    (usr / "bin/python3").symlink_to("python3.11")
    (usr / "lib/modules/5.14").mkdir(parents=True)
    (usr / "lib/modules/5.14/vmlinuz").write_bytes(b"x" * 1000)
    (tmp_path / "boot/ostree").mkdir(parents=True)
    return Disk(tmp_path)


def usr(machine: Machine) -> Path:
    return machine.root_of(STAGED_NAME).path / "usr"


def test_a_target_that_can_run_the_agent_and_has_room_is_accepted(machine: Disk) -> None:
    stage.verify(machine, DEPLOYED)


def missing(machine: Machine, name: str) -> None:
    (usr(machine) / name).unlink()


def as_version(machine: Machine, version: str) -> None:
    missing(machine, "bin/python3")
    if version != "3.11":
        (usr(machine) / "lib64/python3.11").rename(usr(machine) / f"lib64/python{version}")
    (usr(machine) / f"bin/python{version}").touch(0o755)
    (usr(machine) / "bin/python3").symlink_to(f"python{version}")


STRANDING: dict[str, Callable[[Machine], object]] = {
    "no python3": lambda machine: missing(machine, "bin/python3"),
    "no gi": lambda machine: missing(machine, "lib64/python3.11/site-packages/gi/__init__.py"),
    "a link that leads nowhere": lambda machine: missing(machine, "bin/python3.11"),
    "not executable": lambda machine: (usr(machine) / "bin/python3.11").chmod(0o644),
    "gi of another": lambda machine: (usr(machine) / "lib64/python3.11").rename(usr(machine) / "lib64/python3.9"),
    "3.6": lambda machine: as_version(machine, "3.6"),
    "3.8": lambda machine: as_version(machine, "3.8"),
}


@pytest.mark.parametrize("case", STRANDING)
def test_a_target_that_would_strand_the_agent_is_refused(machine: Disk, case: str) -> None:
    STRANDING[case](machine)
    with pytest.raises(Broken, match="no Python >= 3.9 with gi"):
        stage.verify(machine, DEPLOYED)


@pytest.mark.parametrize("version", ["3.9", "3.10", "3.13"])
def test_every_python_that_can_run_the_agent_is_accepted(machine: Disk, version: str) -> None:
    as_version(machine, version)
    assert stage.interpreter(machine.root_of(STAGED_NAME)) == usr(machine) / f"bin/python{version}"


def test_an_absolute_link_is_looked_up_in_the_target_and_not_in_the_running_system(machine: Disk) -> None:
    missing(machine, "bin/python3")
    (usr(machine) / "bin/python3").symlink_to("/usr/bin/python3.11")
    assert stage.interpreter(machine.root_of(STAGED_NAME)) == usr(machine) / "bin/python3.11"


MIB = 1 << 20


def disks(monkeypatch: pytest.MonkeyPatch, machine: Disk, root: int, boot: int) -> None:
    """Free bytes of two file systems, in blocks of 4 KiB."""

    def look(place: Path) -> Room:
        on_boot = os.fspath(place).startswith(os.fspath(machine.boot))
        return Room(2 if on_boot else 1, boot if on_boot else root, 100_000, 1 << 40, 4096)

    monkeypatch.setattr(space, "look", look)


@pytest.mark.parametrize(("root", "boot", "what"), [(1 * MIB, 1 << 40, "root file system"), (1 << 40, 0, "/boot")])
def test_a_disk_without_room_is_waited_for_before_anything_is_drained(
    machine: Disk, monkeypatch: pytest.MonkeyPatch, root: int, boot: int, what: str
) -> None:
    disks(monkeypatch, machine, root, boot)
    with pytest.raises(Held, match=what) as caught:
        stage.verify(machine, DEPLOYED)
    assert caught.value.reason is HoldReason.SPACE


def kernel_in_boot(machine: Disk) -> Path:
    folder = machine.boot / f"ostree/rhcos-{DEPLOYED.bootcsum}"
    folder.mkdir()
    (folder / "vmlinuz-5.14").write_bytes(b"x" * 1000)
    return folder


def test_a_kernel_that_is_in_boot_already_needs_no_room_there(machine: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel_in_boot(machine)
    disks(monkeypatch, machine, 1 << 40, 0)
    stage.verify(machine, DEPLOYED)


def test_what_a_full_disk_left_of_a_kernel_in_boot_is_not_the_kernel(
    machine: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TXN-46: the directory is there, the initramfs did not fit the last time."""
    kernel_in_boot(machine)
    (usr(machine) / "lib/modules/5.14/initramfs.img").write_bytes(b"x" * 1000)
    disks(monkeypatch, machine, 1 << 40, 0)
    with pytest.raises(Held, match="needed on /boot"):
        stage.verify(machine, DEPLOYED)


# -- packages need their repository -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("image", "extensions", "install", "requested", "needed"), [
    ("", "ext", ("usbguard",), (), True), ("", "ext", (), ("usbguard",), False), ("os", "ext", (), ("usbguard",), True),
    ("os", "ext", (), (), False), ("os", "", ("usbguard",), ("strace",), False),
])  # fmt: skip
def test_the_extensions_image_is_read_only_when_packages_are(
    image: str, extensions: str, install: tuple[str, ...], requested: tuple[str, ...], needed: bool
) -> None:
    change = dataclasses.replace(plan(image, install=install), extensions_image=extensions)
    assert stage.needs_repository(change, dataclasses.replace(BOOTED, requested=requested)) is needed
