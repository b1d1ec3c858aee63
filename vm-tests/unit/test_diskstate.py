"""What a disk has to be at each moment of an update is told from what it must not be."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from unit.nodetree import OSNAME, STEPS, NodeTree, up_to
from vmlab import diskstate
from vmlab.diskstate import Boots, Look, Story

from tests.crash.offline import NEW, OLD, UPDATE


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    """The physical root before the update, and after all of it."""
    folder = tmp_path_factory.mktemp("ends")
    yield up_to(folder / "before", "rest").sysroot, up_to(folder / "after", "confirm").sysroot
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def proved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeTree]:
    """Right before the reboot."""
    folder = tmp_path_factory.mktemp("proved")
    yield up_to(folder / "node", "prove")
    shutil.rmtree(folder)


@pytest.fixture
def story(ends: tuple[Path, Path]) -> Story:
    return Story.of(*ends)


def look(tree: NodeTree, story: Story) -> Look:
    return diskstate.look(tree.sysroot, story)


def test_each_moment_of_an_update_is_as_it_has_to_be(tmp_path: Path, story: Story) -> None:
    tree, seen = NodeTree(tmp_path / "node"), {}
    for step in STEPS:
        getattr(tree, step)()
        found = look(tree, story)
        assert found.troubles == (), step
        seen[step] = (found.progress, found.boots)
    assert {step: progress for step, (progress, _boots) in seen.items()} == STEPS
    assert [boots for _progress, boots in seen.values()] == [Boots.OLD] * 2 + [Boots.NEW] * 4


def test_an_earlier_update_that_was_confirmed_is_not_this_one(tmp_path: Path, ends: tuple[Path, Path]) -> None:
    tree = up_to(tmp_path / "node", "confirm")
    later = Story.of(tree.sysroot, ends[1])
    assert look(tree, later).progress == "no update"


def test_the_story_knows_what_was_there_before(story: Story) -> None:
    assert (story.osname, story.source, story.old) == (OSNAME, OLD, frozenset({OLD}))
    assert set(story.usr) == {OLD, NEW}


def test_a_disk_that_boots_nothing_is_no_beginning(tmp_path: Path, ends: tuple[Path, Path]) -> None:
    (tmp_path / "ostree/deploy/os/deploy").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"cannot tell what .* boots: stateroots \['os'\], boot entries \[\]"):
        Story.of(tmp_path, ends[1])


def _no_entries(tree: NodeTree) -> None:
    shutil.rmtree(tree.sysroot / "boot/loader/entries")


def _torn_kernel(tree: NodeTree) -> None:
    tree.kernel(NEW).write_bytes(b"new ker")


def _kernel_gone(tree: NodeTree) -> None:
    tree.kernel(OLD).unlink()


def _link_to_nowhere(tree: NodeTree) -> None:
    shutil.rmtree(tree.deployment(NEW))


def _half_a_checkout(tree: NodeTree) -> None:
    (tree.deployment(NEW) / "usr/lib/modules/vmlinuz").unlink()


def _no_etc(tree: NodeTree) -> None:
    shutil.rmtree(tree.deployment(OLD) / "etc")


def _no_origin(tree: NodeTree) -> None:
    tree.deployment(NEW).with_name(f"{NEW}.origin").unlink()


BOOT_DAMAGES = {
    "no entries": (_no_entries, "there is no boot entry"),
    "torn kernel": (_torn_kernel, r"ostree-1\.conf: kernel and initramfs are not those of its bootcsum"),
    "kernel of the other entry": (_kernel_gone, r"ostree-2\.conf: cannot read .*vmlinuz'"),
    "deployment gone": (_link_to_nowhere, r"ostree-1\.conf: /ostree/boot\.0/.*/0 leads nowhere"),
    "file of the OS gone": (_half_a_checkout, rf"usr of {re.escape(NEW)} is not what it is in the end"),
    "no etc": (_no_etc, rf"{re.escape(OLD)} has no etc/passwd"),
    "no origin": (_no_origin, rf"{re.escape(NEW)} has no origin"),
}


@pytest.mark.parametrize(("damage", "sentence"), BOOT_DAMAGES.values(), ids=BOOT_DAMAGES)
def test_what_cannot_boot_is_found(
    tmp_path: Path, proved: NodeTree, story: Story, damage: Callable[[NodeTree], None], sentence: str
) -> None:
    tree = proved.copy(tmp_path / "node")
    assert look(tree, story).troubles == ()
    damage(tree)
    _found(look(tree, story), sentence)


def _found(look: Look, sentence: str) -> None:
    assert any(re.search(sentence, trouble) for trouble in look.troubles), look.troubles


def _torn_journal(tree: NodeTree) -> None:
    journal = tree.state / "journal.json"
    journal.write_bytes(journal.read_bytes()[:-30])


def _no_journal(tree: NodeTree) -> None:
    (tree.state / "journal.json").unlink()


def _no_list(tree: NodeTree) -> None:
    (tree.state / "payload" / UPDATE / "payload.json").unlink()


def _torn_list(tree: NodeTree) -> None:
    path = tree.state / "payload" / UPDATE / "payload.json"
    path.write_bytes(path.read_bytes()[:-1])


def _no_content(tree: NodeTree) -> None:
    next((tree.state / "payload" / UPDATE / "content").iterdir()).unlink()


def _empty_content(tree: NodeTree) -> None:
    next(path for path in (tree.state / "payload" / UPDATE / "content").iterdir()).write_bytes(b"")


def _empty_undo(tree: NodeTree) -> None:
    next(path for path in (tree.state / "undo" / UPDATE / "content").iterdir()).write_bytes(b"")


def _file_not_there(tree: NodeTree) -> None:
    (tree.deployment(NEW) / "etc/app.conf").write_text("old content\n")


def _shared_file_not_there(tree: NodeTree) -> None:
    (tree.state.parents[1] / "usrlocal/bin/tool").unlink()


def _old_etc_written(tree: NodeTree) -> None:
    (tree.deployment(OLD) / "etc/app.conf").write_text("new content, which is longer\n")


def _wrong_deployment(tree: NodeTree) -> None:
    tree.say(committed="", proved="", staged="f" * 64 + ".0", finalizing="")
    (tree.deployment(NEW) / "etc/app.conf").unlink()


LIES = {
    "torn journal": (_torn_journal, "cannot use the journal"),
    "journal lost": (_no_journal, "the new deployment boots that was never confirmed"),
    "verified without a payload": (_no_list, "the journal says verified, and there is no payload"),
    "torn list": (_torn_list, "the payload is torn: cannot use the payload"),
    "content gone": (_no_content, "half of the payload is there: .*cannot"),
    "content empty": (_empty_content, "half of the payload is there: .*not what its name says"),
    "undo content empty": (_empty_undo, "half of the undo is there: .*not what its name says"),
    "committed, but not there": (_file_not_there, r"the journal says committed, but /etc/app\.conf: content"),
    "committed, but not what is shared": (
        _shared_file_not_there,
        "the journal says committed, but /usr/local/bin/tool",
    ),
    "the old root was written to": (_old_etc_written, rf"/etc/app\.conf of the old deployment {re.escape(OLD)} was"),
    "nobody would complete it": (_wrong_deployment, "boots without its files, and the early unit does nothing"),
}


@pytest.mark.parametrize(("damage", "sentence"), LIES.values(), ids=LIES)
def test_a_journal_that_lies_is_found(
    tmp_path: Path, proved: NodeTree, story: Story, damage: Callable[[NodeTree], None], sentence: str
) -> None:
    tree = proved.copy(tmp_path / "node")
    assert look(tree, story).troubles == ()
    damage(tree)
    _found(look(tree, story), sentence)


def test_files_that_the_old_deployment_shares_need_somebody_who_puts_them_back(tmp_path: Path, story: Story) -> None:
    """The old deployment is chosen at the boot menu, or by a boot loader that counts."""
    tree = up_to(tmp_path / "node", "commit")
    tree.new_default(OLD, NEW)
    assert look(tree, story).troubles == ()
    shutil.rmtree(tree.state / "undo")
    _found(look(tree, story), "files that the old deployment shares are new, and there is no undo record")
    tree.say(finalizing="", staged="")
    _found(look(tree, story), "files that the old deployment shares are new, and the early unit does nothing")


def test_without_an_update_in_flight_nobody_repairs_anything(tmp_path: Path, proved: NodeTree, story: Story) -> None:
    tree = proved.copy(tmp_path / "node")
    assert look(tree, story).troubles == ()
    tree.confirm()
    (tree.deployment(NEW) / "etc/app.conf").unlink()
    _found(look(tree, story), r"the new deployment boots without its files: /etc/app\.conf: missing")
    tree.new_default(OLD, NEW)
    _found(look(tree, story), "no update is in flight, the old deployment boots, and files that it shares are new")


def test_an_update_whose_files_are_not_written_yet_is_the_early_units(tmp_path: Path, story: Story) -> None:
    tree = up_to(tmp_path / "node", "finalize")
    found = look(tree, story)
    assert (found.boots, found.progress, found.troubles) == (Boots.NEW, "finalizing", ())


def test_a_deployment_that_the_end_does_not_know_is_compared_with_the_beginning(
    tmp_path: Path, proved: NodeTree, ends: tuple[Path, Path]
) -> None:
    after = tmp_path / "after"
    shutil.copytree(ends[1], after, symlinks=True)
    shutil.rmtree(after / f"ostree/deploy/{OSNAME}/deploy/{OLD}")
    assert look(proved, Story.of(ends[0], after)).troubles == ()


def test_a_confirmed_config_is_only_believed_when_its_payload_was_seen_before(tmp_path: Path, story: Story) -> None:
    tree = up_to(tmp_path / "node", "confirm")
    _found(look(tree, story), "its payload was never seen")
