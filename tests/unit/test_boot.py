"""What was booted and what will be: boot entries, links and stamps, whole and torn."""

from __future__ import annotations

from pathlib import Path

import pytest

from mcdaemon.errors import Broken
from mcdaemon.host import boot

CSUM = "b" * 64
TARGET, SOURCE = "1" * 64 + ".0", "2" * 64 + ".1"


@pytest.fixture
def top(tmp_path: Path) -> Path:
    """/boot and /sysroot of a machine with two deployments, the first the default."""
    for serial, name in enumerate((TARGET, SOURCE)):
        place = tmp_path / f"sysroot/ostree/deploy/rhcos/deploy/{name}"
        place.mkdir(parents=True)
        link = tmp_path / argument(serial)[len("ostree=/") :].join(("sysroot/", ""))
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(f"../../../deploy/rhcos/deploy/{name}")
    (tmp_path / "boot/loader.1/entries").mkdir(parents=True)
    (tmp_path / "boot/loader").symlink_to("loader.1")
    write(tmp_path, "ostree-2.conf", 2, argument(0))
    write(tmp_path, "ostree-1.conf", 1, argument(1))
    return tmp_path


def argument(serial: int) -> str:
    return f"ostree=/ostree/boot.1/rhcos/{CSUM}/{serial}"


def write(top: Path, name: str, version: object, options: str) -> None:
    text = f"title RHCOS (ostree)\nversion {version}\noptions root=UUID=1 {options} rw\nlinux /vmlinuz\n"
    (top / "boot/loader/entries" / name).write_text(text)


def found(top: Path) -> list[tuple[int, str]]:
    return [(entry.number, entry.deployment) for entry in boot.entries(top / "boot", top / "sysroot")]


# -- entries ----------------------------------------------------------------------------------------------------------


def test_the_entry_with_the_highest_version_is_the_default(top: Path) -> None:
    assert found(top) == [(2, TARGET), (1, SOURCE)]
    entry = boot.entries(top / "boot", top / "sysroot")[0]
    assert (entry.osname, entry.options) == ("rhcos", f"root=UUID=1 {argument(0)} rw")


def test_the_version_counts_and_not_the_order_of_the_names(top: Path) -> None:
    write(top, "ostree-10-rhcos.conf", 10, argument(1))
    write(top, "ostree-9-rhcos.conf", 9, argument(0))
    assert [number for number, _name in found(top)] == [10, 9, 2, 1]


@pytest.mark.parametrize("name", ["ostree-3-rhcos.conf", "ostree-3-fedora-coreos.conf", "ostree-3.conf",
                                  "ostree-3+2.conf", "ostree-3-rhcos+3-1.conf"])  # fmt: skip
def test_all_forms_of_names_are_known(top: Path, name: str) -> None:
    write(top, name, 3, argument(1))
    assert found(top)[0] == (3, SOURCE)


@pytest.mark.parametrize("name", ["memtest.conf", "ostree.conf", "ostree-x.conf", "ostree-3.conf.bak",
                                  "3-ostree-3.conf",
                                  "ostree-3.conf~", ".ostree-3.conf"])  # fmt: skip
def test_other_entries_and_backups_are_left_out(top: Path, name: str) -> None:
    write(top, name, 9, argument(1))
    assert found(top) == [(2, TARGET), (1, SOURCE)]


@pytest.mark.parametrize("version", ["", "4.12.0", "two", "-1", "²", "0x10"])
def test_a_version_that_is_no_number_gives_way_to_the_number_in_the_name(top: Path, version: str) -> None:
    write(top, "ostree-7.conf", version, argument(1))
    assert found(top)[0] == (7, SOURCE)


TORN = {
    "empty": b"", "zeros": b"\0" * 500,
    "half a line": b"title RHCOS\nversion 3\noptio",
    "binary": bytes(range(128, 256)),
    "no options": b"version 3\n", "options without ostree": b"version 3\noptions root=UUID=1 rw\n",
    "an ostree argument that is none": b"version 3\noptions ostree=/ostree/boot.1/rhcos/short/0\n",
}  # fmt: skip


@pytest.mark.parametrize("case", TORN)
def test_a_torn_entry_is_left_out_and_does_not_hide_the_others(top: Path, case: str) -> None:
    (top / "boot/loader/entries/ostree-3.conf").write_bytes(TORN[case])
    assert found(top) == [(2, TARGET), (1, SOURCE)]


def test_an_entry_whose_link_leads_nowhere_is_told_without_a_deployment(top: Path) -> None:
    write(top, "ostree-3.conf", 3, argument(7))
    assert found(top)[0] == (3, "")


def test_a_link_in_a_circle_is_no_deployment(top: Path) -> None:
    link = top / f"sysroot/ostree/boot.1/rhcos/{CSUM}/7"
    link.symlink_to("7")
    write(top, "ostree-3.conf", 3, argument(7))
    assert found(top)[0] == (3, "")


def test_a_machine_without_entries_is_named(tmp_path: Path) -> None:
    with pytest.raises(Broken, match="cannot list the boot entries in .*/boot/loader/entries"):
        boot.entries(tmp_path / "boot", tmp_path)


def test_an_empty_boot_has_none(top: Path) -> None:
    for place in (top / "boot/loader/entries").iterdir():
        place.unlink()
    assert found(top) == []


# -- the command line -------------------------------------------------------------------------------------------------


def test_the_last_ostree_argument_counts() -> None:
    assert boot.ostree_argument(f"{argument(0)} quiet {argument(1)}") == argument(1)[len("ostree=") :]
    assert boot.ostree_argument("rw quiet myostree=/x") is None


def test_a_command_line_is_followed_to_its_deployment(top: Path) -> None:
    assert boot.deployment_of(f"rw {argument(1)}", top / "sysroot") == ("rhcos", SOURCE)


@pytest.mark.parametrize("options", ["", "rw quiet", "ostree=", "ostree=/ostree/boot.1/rhcos/0", "ostree=/etc/passwd",
                                     f"ostree=/ostree/boot.2/rhcos/{CSUM}/0", f"ostree=/ostree/boot.1/a/b/{CSUM}/0",
                                     f"{argument(0)}/../.."])  # fmt: skip
def test_a_machine_that_did_not_boot_a_deployment_is_told_so(top: Path, options: str) -> None:
    with pytest.raises(Broken, match="cannot tell which deployment is booted.*is this an ostree machine"):
        boot.deployment_of(options, top / "sysroot")


def test_a_boot_link_that_is_gone_is_named(top: Path) -> None:
    with pytest.raises(Broken, match=f"cannot follow the boot link .*{CSUM}/9: No such file"):
        boot.deployment_of(argument(9), top / "sysroot")


def test_a_boot_link_in_a_circle_is_named(top: Path) -> None:
    (top / f"sysroot/ostree/boot.1/rhcos/{CSUM}/7").symlink_to("7")
    with pytest.raises(Broken, match="cannot follow the boot link"):
        boot.deployment_of(argument(7), top / "sysroot")


def test_the_boot_id_and_the_command_line_have_no_line_end(tmp_path: Path) -> None:
    (tmp_path / "sys/kernel/random").mkdir(parents=True)
    (tmp_path / "sys/kernel/random/boot_id").write_text("abc\n")
    (tmp_path / "cmdline").write_bytes(b"rw quiet=\xff\n")
    assert boot.boot_id(tmp_path) == "abc"
    assert boot.command_line(tmp_path) == "rw quiet=\ufffd"


def test_a_proc_that_is_not_mounted_is_named(tmp_path: Path) -> None:
    with pytest.raises(Broken, match="cannot read .*boot_id"):
        boot.boot_id(tmp_path)


# -- the stamp of a failed finalization -------------------------------------------------------------------------------


def test_the_text_of_a_failed_finalization_is_kept_by_ostree(tmp_path: Path) -> None:
    assert boot.finalize_failure(tmp_path) == ""
    (tmp_path / "ostree").mkdir()
    (tmp_path / boot.FINALIZE_FAILURE).write_bytes(b"During /etc merge: \xff\n")
    assert boot.finalize_failure(tmp_path) == "During /etc merge: \ufffd"


def test_a_stamp_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / boot.FINALIZE_FAILURE).mkdir(parents=True)
    with pytest.raises(Broken, match="cannot read .*finalize-failure.stamp"):
        boot.finalize_failure(tmp_path)
