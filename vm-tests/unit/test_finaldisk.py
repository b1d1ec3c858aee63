"""A node that went through a power cut is held against one that did not, by their disks."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from unit.nodetree import OSNAME, NodeTree, up_to
from unit.smalldisk import make_disk
from vmlab import finaldisk
from vmlab.prefixes import PrefixError

from tests.crash.offline import NEW, OLD, UPDATE


@pytest.fixture(scope="module")
def arrived(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeTree]:
    """A node that was confirmed, and then ran for a while."""
    folder = tmp_path_factory.mktemp("arrived")
    yield up_to(folder / "node", "confirm")
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def reference(arrived: NodeTree, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_disk(tmp_path_factory.mktemp("reference") / "disk.img", arrived.sysroot).path


def differences(reference: Path, tree: NodeTree) -> list[str]:
    return finaldisk.compare(reference, make_disk(tree.top / "disk.img", tree.sysroot).path)


def test_the_same_end_is_the_same(reference: Path, arrived: NodeTree, tmp_path: Path) -> None:
    assert differences(reference, arrived.copy(tmp_path / "node")) == []


def test_what_a_node_writes_by_itself_makes_no_difference(reference: Path, arrived: NodeTree, tmp_path: Path) -> None:
    tree = arrived.copy(tmp_path / "node")
    var = tree.state.parents[1]
    (var / "log/journal").mkdir(parents=True)
    (var / "log/journal/system.journal").write_text("of another boot")
    (tree.state / "counters.json").write_text("{}")
    (tree.deployment(NEW) / "etc/.pwd.lock").touch()
    assert differences(reference, tree) == []


def _file_of_the_old_config(tree: NodeTree) -> None:
    (tree.deployment(NEW) / "etc/only-old").write_text("only old\n")


def _other_content(tree: NodeTree) -> None:
    (tree.deployment(NEW) / "etc/app.conf").write_text("old content\n")


def _other_mode(tree: NodeTree) -> None:
    (tree.deployment(NEW) / "etc/app.conf").chmod(0o644)


def _other_owner(tree: NodeTree) -> None:
    os.chown(tree.deployment(NEW) / "etc/app.conf", 1000, 1000)


def _shared_file_gone(tree: NodeTree) -> None:
    (tree.state.parents[1] / "usrlocal/bin/tool").unlink()


def _old_one_boots(tree: NodeTree) -> None:
    tree.new_default(OLD, NEW)


def _one_entry_only(tree: NodeTree) -> None:
    tree.new_default(NEW)


def _other_arguments(tree: NodeTree) -> None:
    path = tree.sysroot / "boot/loader/entries/ostree-1.conf"
    path.write_text(path.read_text().replace("quiet", "loud"))


def _half_a_deployment(tree: NodeTree) -> None:
    (tree.deployment("f" * 64 + ".0") / "usr").mkdir(parents=True)


def _kernel_of_nobody(tree: NodeTree) -> None:
    (tree.sysroot / f"boot/ostree/{OSNAME}-{'f' * 64}").mkdir()


def _payload(tree: NodeTree) -> None:
    (tree.state / "payload" / UPDATE).mkdir(parents=True)


def _temporary(tree: NodeTree) -> None:
    (tree.deployment(NEW) / "etc/.mcdaemon-x").touch()


def _in_flight(tree: NodeTree) -> None:
    tree.say(proved=NEW)


def _torn_journal(tree: NodeTree) -> None:
    (tree.state / "journal.json").write_text("{")


def _never_confirmed(tree: NodeTree) -> None:
    tree.rest()


def _damaged_repository(tree: NodeTree) -> None:
    (tree.sysroot / "ostree/repo/config").unlink()


DIFFERENCES = {
    "a file of the old config": (_file_of_the_old_config, "/etc/only-old: -rw-r--r-- 0:0 .*, not there"),
    "content": (_other_content, "/etc/app.conf: -rw------- 0:0 .*, not -rw------- 0:0 "),
    "mode": (_other_mode, "/etc/app.conf: -rw-r--r-- 0:0 .*, not -rw------- 0:0 "),
    "owner": (_other_owner, "/etc/app.conf: -rw------- 1000:1000 .*, not -rw------- 0:0 "),
    "a shared file": (_shared_file_gone, "/var/usrlocal/bin/tool: missing, not -rwxr-x--- "),
    "the old one boots": (_old_one_boots, f"what boots was not confirmed, but .*{NEW}"),
    "a boot entry less": (_one_entry_only, "1 boot entries, not 2"),
    "kernel arguments": (_other_arguments, r"kernel arguments: \['loud'\], not \['quiet'\]"),
    "half a deployment": (_half_a_deployment, "f{64}.0 is left, and no entry boots it"),
    "a kernel": (_kernel_of_nobody, f"/boot/ostree/{OSNAME}-f+ is left"),
    "a payload": (_payload, f"payload/{UPDATE} of mcdaemon is left"),
    "a temporary file": (_temporary, "/etc/.mcdaemon-x: .*, not there"),
    "an update in flight": (_in_flight, "an update is in flight: "),
    "a torn journal": (_torn_journal, "cannot use the journal"),
    "no confirmation": (_never_confirmed, "what boots was not confirmed, but None"),
    "a damaged repository": (_damaged_repository, "ostree fsck: error: "),
}


@pytest.mark.parametrize(("damage", "sentence"), DIFFERENCES.values(), ids=DIFFERENCES)
def test_another_end_is_told(
    reference: Path, arrived: NodeTree, tmp_path: Path, damage: Callable[[NodeTree], None], sentence: str
) -> None:
    tree = arrived.copy(tmp_path / "node")
    damage(tree)
    found = differences(reference, tree)
    assert any(re.match(sentence, line) for line in found), found


def test_a_disk_that_cannot_be_read_is_said(reference: Path, tmp_path: Path) -> None:
    (tmp_path / "disk.img").write_bytes(bytes(4096))
    with pytest.raises(PrefixError, match="cannot compare .*/disk.img: .*has no partition table"):
        finaldisk.compare(reference, tmp_path / "disk.img")


def test_the_disks_stay_as_they_are(reference: Path, arrived: NodeTree, tmp_path: Path) -> None:
    before = reference.read_bytes()
    finaldisk.compare(reference, reference)
    assert reference.read_bytes() == before
