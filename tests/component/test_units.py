"""The enablement of units on disk, compared with what the real systemctl does to the same root."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Optional

import pytest

from mcdaemon.host.files import Entry, Kind, put_all, read_node
from mcdaemon.host.root import Root
from mcdaemon.host.unit_install import DIRECTORY
from mcdaemon.host.units import Unit, enablement_links, expected_nodes, vendor_units
from mcdaemon.update.verify import Expected, validate

pytestmark = pytest.mark.skipif(shutil.which("systemctl") is None, reason="needs systemctl")

SERVICE = "[Service]\nExecStart=/bin/true\n"
WANTED = SERVICE + "[Install]\nWantedBy=multi-user.target\n"

# name: unit files in /etc/systemd/system (or below, with "usr/"), what to enable.
TABLE: dict[str, tuple[dict[str, str], list[str]]] = {
    "plain": ({"a.service": WANTED}, ["a.service"]),
    "three kinds of keys": (
        {
            "a.service": SERVICE
            + "[Install]\nWantedBy=multi-user.target b.target\nRequiredBy=c.service\nAlias=d.service\n",
            "b.target": "[Unit]\n",
        },
        ["a.service"],
    ),
    "repeated keys": (
        {"a.service": SERVICE + "[Install]\nWantedBy=a.target\nRequiredBy=r.target\nWantedBy=b.target\n"},
        ["a.service"],
    ),
    "reset by an empty key": (
        {"a.service": SERVICE + "[Install]\nWantedBy=a.target\nRequiredBy=r.target\nWantedBy=\nWantedBy=b.target\n"},
        ["a.service"],
    ),
    "continued line with a comment in it": (
        {
            "a.service": SERVICE
            + "[Install]\nWantedBy=a.target \\\n# not this\n  b.target \\\n  c.target\nAlias=x.service\n"
        },
        ["a.service"],
    ),
    "line continued into nothing": (
        {"a.service": SERVICE + "[Install]\nWantedBy=a.target \\\n\nAlias=x.service"},
        ["a.service"],
    ),
    "blanks around keys and comments": (
        {"a.service": SERVICE + "\n ; no\n# [Install]\n[Install]  \n  WantedBy  =   a.target   b.target  \n"},
        ["a.service"],
    ),
    "section twice with another between": (
        {
            "a.service": "[Install]\nWantedBy=a.target\n[Service]\nExecStart=/bin/true\nWantedBy=no.target\n"
            "[Install]\nWantedBy=b.target\n"
        },
        ["a.service"],
    ),
    "windows line ends": ({"a.service": WANTED.replace("\n", "\r\n")}, ["a.service"]),
    "byte order mark": ({"a.service": "\ufeff[Install]\nWantedBy=a.target\n" + SERVICE}, ["a.service"]),
    "quoted words": ({"a.service": SERVICE + "[Install]\nWantedBy=\"a.target\" 'b.target'\n"}, ["a.service"]),
    "quotes that do not close": (
        {"a.service": SERVICE + '[Install]\nWantedBy="a.target b.target\nAlias=x.service\n'},
        ["a.service"],
    ),
    "also": (
        {
            "a.service": WANTED + "Also=a.socket b.service\n",
            "a.socket": "[Socket]\nListenStream=1\n[Install]\nWantedBy=sockets.target\n",
            "b.service": WANTED + "Also=a.service\n",
        },
        ["a.service"],
    ),
    "also missing": ({"a.service": WANTED + "Also=missing.socket\n"}, ["a.service"]),
    "also with nothing of its own": (
        {"a.service": SERVICE + "[Install]\nAlso=b.service\n", "b.service": WANTED},
        ["a.service"],
    ),
    "template with a default instance": (
        {"t@.service": SERVICE + "[Install]\nWantedBy=multi-user.target %i.target\nDefaultInstance=tty1\n"},
        ["t@.service"],
    ),
    "instance of a template": ({"t@.service": WANTED + "DefaultInstance=tty1\n"}, ["t@foo.service"]),
    "two instances": ({"t@.service": WANTED}, ["t@a.service", "t@b-c.service"]),
    "template without an instance, wanted by a template": (
        {"t@.service": SERVICE + "[Install]\nWantedBy=u@.target v@x.target\n"},
        ["t@.service"],
    ),
    "template without an instance": ({"t@.service": WANTED}, ["t@.service"]),
    "instance with a file of its own": (
        {"t@.service": WANTED, "t@foo.service": SERVICE + "[Install]\nWantedBy=own.target\n"},
        ["t@foo.service"],
    ),
    "instance with an escaped path": (
        {"t@.service": SERVICE + "[Install]\nWantedBy=%i.mount\n"},
        ["t@var-lib\\x2dx.service"],
    ),
    "specifiers": (
        {"pre-fix-last.service": SERVICE + "[Install]\nWantedBy=%N-1.target %p-2.target %j-3.target %n.target\n"},
        ["pre-fix-last.service"],
    ),
    "specifiers of an instance": (
        {
            "a-b@.service": SERVICE
            + "[Install]\nWantedBy=%N.target %p.target %j.target x-%i.target\nAlias=%p-y@%i.service\n"
        },
        ["a-b@q.service"],
    ),
    "specifiers of a default instance": (
        {"a-b@.service": SERVICE + "[Install]\nWantedBy=%N.target %i.target\nDefaultInstance=%p1\n"},
        ["a-b@.service"],
    ),
    "percent": ({"a.service": SERVICE + "[Install]\nWantedBy=a%%b.target ok.target\n"}, ["a.service"]),
    "alias of another type": ({"a.service": SERVICE + "[Install]\nAlias=a.socket b.service\n"}, ["a.service"]),
    "alias of a type that has none": (
        {"a.mount": "[Mount]\nWhat=x\nWhere=/a\n[Install]\nAlias=b.mount\nWantedBy=x.target\n"},
        ["a.mount"],
    ),
    "alias in the old spelling of wants": (
        {
            "a.service": SERVICE
            + "[Install]\nAlias=x.target.wants/a.service x.target.wants/b.service x.wrong/a.service\n"
        },
        ["a.service"],
    ),
    "alias of a template": ({"t@.service": SERVICE + "[Install]\nAlias=u@.service\n"}, ["t@.service"]),
    "alias of an instance": ({"t@.service": SERVICE + "[Install]\nAlias=u@.service plain.service\n"}, ["t@x.service"]),
    "wanted by what is no unit": ({"a.service": SERVICE + "[Install]\nWantedBy=nothing a.target\n"}, ["a.service"]),
    "no install section": ({"a.service": SERVICE}, ["a.service"]),
    "unit of the image": ({"usr/a.service": WANTED}, ["a.service"]),
    "template of the image": ({"usr/t@.service": WANTED}, ["t@x.service"]),
    "unit of the image, covered in etc": (
        {"usr/a.service": WANTED, "a.service": WANTED + "Alias=own.service\n"},
        ["a.service"],
    ),
    "install section in a drop-in": (
        {
            "a.service": SERVICE,
            "a.service.d/20.conf": "[Install]\nWantedBy=b.target\n",
            "a.service.d/10.conf": "[Install]\nWantedBy=a.target\n",
        },
        ["a.service"],
    ),
    "characters of unit names": ({"a:b_c.d\\x2de-f.service": WANTED}, ["a:b_c.d\\x2de-f.service"]),
}


def unit_path(root: Path, name: str) -> Path:
    if name.startswith("usr/"):
        return root / "usr/lib/systemd/system" / name[4:]
    return root / "etc/systemd/system" / name


@pytest.fixture
def root(tmp_path: Path) -> Root:
    (tmp_path / "etc/systemd/system").mkdir(parents=True)
    (tmp_path / "usr/lib/systemd/system").mkdir(parents=True)
    (tmp_path / "var").mkdir()
    return Root(tmp_path, tmp_path / "var")


def lay_down(root: Root, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = unit_path(root.path, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())


def systemctl(root: Root, *arguments: str) -> str:
    command = ["systemctl", f"--root={root.path}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    return done.stdout.strip()


def links(root: Root) -> dict[str, str]:
    top = root.path / "etc/systemd/system"
    return {f"/{path.relative_to(root.path)}": str(os.readlink(path)) for path in top.rglob("*") if path.is_symlink()}


def units_of(files: dict[str, str], names: list[str], enabled: Optional[bool]) -> list[Unit]:
    dropins: dict[str, list[tuple[str, Optional[bytes]]]] = {}
    for name, text in files.items():
        if "/" in name and not name.startswith("usr/"):
            unit, _, dropin = name.partition(".d/")
            dropins.setdefault(unit, []).append((dropin, text.encode()))
    contents = {name: text.encode() for name, text in files.items() if "/" not in name}
    return [
        Unit(name, contents.get(name), enabled if name in names else None, dropins=tuple(dropins.get(name, ())))
        for name in dict.fromkeys([*contents, *names])
    ]


def link_entries(entries: Mapping[str, Entry]) -> dict[str, str]:
    return {path: entry.node.target for path, entry in entries.items() if entry.node.kind is Kind.LINK}


@pytest.mark.parametrize("case", TABLE)
def test_the_links_are_those_of_systemctl_enable(root: Root, case: str) -> None:
    files, names = TABLE[case]
    lay_down(root, files)
    for name in names:
        systemctl(root, "enable", name)

    expectation = expected_nodes(units_of(files, names, True), vendor_units(root, [DIRECTORY + "/" + n for n in files]))

    assert link_entries(expectation.entries) == links(root)


@pytest.mark.parametrize("case", TABLE)
def test_disabling_leaves_none_of_the_links_that_systemctl_made(root: Root, case: str) -> None:
    files, names = TABLE[case]
    lay_down(root, files)
    systemctl(root, "enable", *names)

    disable(root, units_of(files, names, False))

    # systemctl disable itself would leave aliases of instances.
    assert links(root) == {}


def test_what_is_enabled_here_is_enabled_for_systemctl(root: Root) -> None:
    unit = Unit("a.service", WANTED.encode(), True)
    put_all(root, expected_nodes([unit], vendor_units(root)).entries)
    assert systemctl(root, "is-enabled", "a.service") == "enabled"
    systemctl(root, "disable", "a.service")
    assert links(root) == {}


def test_links_of_an_older_install_section_go_when_a_unit_is_disabled(root: Root) -> None:
    lay_down(root, {"a.service": SERVICE + "[Install]\nWantedBy=old.target\nAlias=old.service\n"})
    systemctl(root, "enable", "a.service")
    disable(root, [Unit("a.service", WANTED.encode(), False)])
    assert links(root) == {}


def test_a_dangling_link_of_the_same_name_is_in_nobodys_way(root: Root) -> None:
    lay_down(root, {"a.service": WANTED})
    wants = root.path / "etc/systemd/system/multi-user.target.wants"
    wants.mkdir()
    (wants / "a.service").symlink_to("/usr/lib/systemd/system/gone.service")
    put_all(root, expected_nodes([Unit("a.service", WANTED.encode(), True)], vendor_units(root)).entries)
    assert links(root) == {f"{DIRECTORY}/multi-user.target.wants/a.service": f"{DIRECTORY}/a.service"}


def test_a_mask_is_that_of_systemctl_mask(root: Root) -> None:
    systemctl(root, "mask", "a.service")
    made = links(root)
    unit = Unit("a.service", WANTED.encode(), True, mask=True, dropins=(("x.conf", b"[Unit]\n"),))
    expectation = expected_nodes([unit], vendor_units(root))
    assert link_entries(expectation.entries) == made == {f"{DIRECTORY}/a.service": "/dev/null"}
    put_all(root, expectation.entries)
    assert systemctl(root, "is-enabled", "a.service") == "masked"
    assert expectation.notes == ("a.service is masked, so it is not enabled",)


def test_a_mask_replaces_the_unit_file_and_goes_again(root: Root) -> None:
    lay_down(root, {"a.service": WANTED})
    put_all(root, expected_nodes([Unit("a.service", mask=True)], vendor_units(root)).entries)
    assert read_node(root, f"{DIRECTORY}/a.service").target == "/dev/null"
    put_all(root, expected_nodes([Unit("a.service", WANTED.encode())], vendor_units(root)).entries)
    assert (root.path / "etc/systemd/system/a.service").read_text() == WANTED


def test_an_alias_of_the_image_enables_what_stands_behind_it(root: Root) -> None:
    """TXN-13: unit files are looked at, not what systemd has loaded."""
    lay_down(root, {"usr/broker.service": WANTED + "Alias=bus.service\n"})
    (root.path / "usr/lib/systemd/system/bus.service").symlink_to("broker.service")
    systemctl(root, "enable", "bus.service")
    expectation = expected_nodes([Unit("bus.service", enabled=True)], vendor_units(root))
    assert link_entries(expectation.entries) == links(root)
    assert f"{DIRECTORY}/multi-user.target.wants/broker.service" in links(root)


def test_an_instance_of_a_template_alias_keeps_its_instance(root: Root) -> None:
    lay_down(root, {"usr/real@.service": WANTED})
    (root.path / "usr/lib/systemd/system/alias@.service").symlink_to("real@.service")
    systemctl(root, "enable", "alias@x.service")
    expectation = expected_nodes([Unit("alias@x.service", enabled=True)], vendor_units(root))
    assert link_entries(expectation.entries) == links(root)


@pytest.mark.parametrize("how", ["link", "empty file"])
def test_a_unit_that_the_root_masks_is_not_enabled(root: Root, how: str) -> None:
    lay_down(root, {"usr/a.service": WANTED})
    path = root.path / "etc/systemd/system/a.service"
    if how == "link":
        path.symlink_to("/dev/null")
    else:
        path.write_bytes(b"")
    expectation = expected_nodes([Unit("a.service", enabled=True)], vendor_units(root))
    assert dict(expectation.entries) == {}
    assert expectation.notes == ("a.service is masked, so its enablement is skipped",)


def test_a_unit_that_nobody_has_is_skipped_with_a_note(root: Root) -> None:
    expectation = expected_nodes([Unit("gone.service", enabled=True)], vendor_units(root))
    assert dict(expectation.entries) == {}
    assert expectation.notes == ("gone.service has no unit file, so its enablement is skipped",)


def test_a_unit_file_that_is_about_to_go_is_not_found(root: Root) -> None:
    lay_down(root, {"a.service": WANTED})
    lookup = vendor_units(root, managed=[f"{DIRECTORY}/a.service"])
    assert lookup("a.service") is None


def test_links_that_lead_in_a_circle_are_no_unit(root: Root) -> None:
    (root.path / "etc/systemd/system/a.service").symlink_to("/usr/lib/systemd/system/a.service")
    (root.path / "usr/lib/systemd/system/a.service").symlink_to("/etc/systemd/system/a.service")
    assert vendor_units(root)("a.service") is None


def test_a_disabled_unit_by_hand_is_seen_by_the_validation(root: Root) -> None:
    units = [Unit("a.service", WANTED.encode(), True)]
    entries = expected_nodes(units, vendor_units(root)).entries
    put_all(root, entries)
    expected = {path: Expected(entry.node, "a unit") for path, entry in entries.items()}
    assert validate(root, expected).ok
    systemctl(root, "disable", "a.service")
    assert [mismatch.path for mismatch in validate(root, expected).mismatches] == [
        f"{DIRECTORY}/multi-user.target.wants/a.service"
    ]


def disable(root: Root, units: list[Unit]) -> None:
    expectation = expected_nodes(units, vendor_units(root), found=lambda name: enablement_links(root, name))
    put_all(root, {path: entry for path, entry in expectation.entries.items() if entry.node.kind is Kind.ABSENT})
