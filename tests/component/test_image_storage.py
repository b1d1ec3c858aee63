"""What is complete in a real containers-storage, and what a hold is worth against podman."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from mcdaemon.errors import Transient
from mcdaemon.image.findings import Contents, Unavailable, Verdict
from mcdaemon.image.reference import Reference
from mcdaemon.image.storage import Storage
from tests.stand import images
from tests.stand.isolation import private
from tests.stand.registry import Registry
from tests.stand.storage import ContainersStorage

IMAGE = images.layer_on(images.layer_on(images.os_image(), {"etc/x": images.File(b"x")}), {"etc/y": images.File(b"y")})
TAGGED = Reference.parse("127.0.0.1:5000/team/os:1")
PINNED = TAGGED.pinned(IMAGE.digest)
SIZE = len(IMAGE.config) + sum(len(layer.blob) for layer in IMAGE.layers)


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Iterator[ContainersStorage]:
    with ContainersStorage() as made:
        monkeypatch.setenv("PATH", f"{made.programs}:{os.environ['PATH']}")
        yield made


@pytest.fixture
def stocked(node: ContainersStorage) -> ContainersStorage:
    node.add(IMAGE, str(TAGGED))
    return node


def storage(node: ContainersStorage) -> Storage:
    return Storage(str(node.root), str(node.runroot))


def whole(found: Contents) -> tuple[str, str, int]:
    return found.digest, found.image_digest, found.size


def refusal(node: ContainersStorage, reference: Reference = PINNED) -> Unavailable:
    with pytest.raises(Unavailable) as caught:
        storage(node).check(reference)
    return caught.value


def skopeo_copies(node: ContainersStorage) -> bool:
    """The oracle: would containers/image read it?"""
    source, target = f"{node.skopeo_prefix}{PINNED}", f"dir:{node.folder}/copy"
    argv = private(["skopeo", "--insecure-policy", "copy", "--quiet", source, target])
    return subprocess.run(argv, capture_output=True, timeout=30).returncode == 0


def test_a_stored_image_is_complete(stocked: ContainersStorage) -> None:
    assert whole(storage(stocked).check(PINNED)) == (IMAGE.digest, IMAGE.digest, SIZE)
    assert storage(stocked).digest(TAGGED) == IMAGE.digest
    assert skopeo_copies(stocked)


def test_a_stored_image_tells_its_version_and_layers(node: ContainersStorage) -> None:
    image = images.os_image(version="417.94.7")
    node.add(image, str(TAGGED))
    found = storage(node).check(TAGGED.pinned(image.digest), describe=True)
    assert found.description.version == "417.94.7"
    assert [layer.digest for layer in found.layers] == [layer.digest for layer in image.layers]
    assert storage(node).check(TAGGED.pinned(image.digest)).description.version == ""


def test_an_image_that_was_removed_is_absent(stocked: ContainersStorage) -> None:
    stocked.podman("rmi", str(TAGGED))
    assert refusal(stocked).verdict is Verdict.ABSENT


def test_an_empty_storage_has_nothing(node: ContainersStorage) -> None:
    assert refusal(node).verdict is Verdict.ABSENT


def test_the_same_digest_under_another_name_is_absent_as_it_is_for_rpm_ostree(stocked: ContainersStorage) -> None:
    assert refusal(stocked, Reference.parse(f"quay.io/other/os@{IMAGE.digest}")).verdict is Verdict.ABSENT


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_layer_that_is_gone_makes_the_copy_incomplete(stocked: ContainersStorage, number: int) -> None:
    shutil.rmtree(stocked.layer_folder(IMAGE, number))
    error = refusal(stocked)
    assert error.verdict is Verdict.INCOMPLETE
    assert stocked.layer_folder(IMAGE, number).name in error.reason
    assert not skopeo_copies(stocked)


def test_a_layer_without_its_content_directory_makes_the_copy_incomplete(stocked: ContainersStorage) -> None:
    shutil.rmtree(stocked.layer_folder(IMAGE, 1) / "diff")
    assert refusal(stocked).verdict is Verdict.INCOMPLETE
    assert not skopeo_copies(stocked)


def test_a_layer_that_cannot_be_put_together_again_makes_the_copy_incomplete(stocked: ContainersStorage) -> None:
    layer = stocked.layer_folder(IMAGE, 0).name
    (stocked.root / "overlay-layers" / f"{layer}.tar-split.gz").unlink()
    assert refusal(stocked).verdict is Verdict.INCOMPLETE
    assert not skopeo_copies(stocked)


def test_img_39_a_manifest_emptied_by_a_power_cut_is_no_copy(stocked: ContainersStorage) -> None:
    kept = stocked.root / "overlay-images" / IMAGE.config_digest.partition(":")[2]
    emptied = [path for path in kept.iterdir() if path.read_bytes() == IMAGE.manifest]
    assert emptied
    for path in emptied:
        path.write_bytes(b"")
    assert refusal(stocked).verdict is Verdict.MALFORMED


def test_img_39_a_list_of_lower_layers_emptied_by_a_power_cut_is_no_copy(stocked: ContainersStorage) -> None:
    (stocked.layer_folder(IMAGE, 2) / "lower").write_bytes(b"")
    assert refusal(stocked).verdict is Verdict.INCOMPLETE


def test_a_config_that_is_gone_makes_the_copy_incomplete(stocked: ContainersStorage) -> None:
    kept = stocked.root / "overlay-images" / IMAGE.config_digest.partition(":")[2]
    for path in kept.iterdir():
        if IMAGE.config in path.read_bytes():
            path.unlink()
    assert refusal(stocked).verdict is Verdict.INCOMPLETE
    assert not skopeo_copies(stocked)


def test_an_image_pulled_by_an_indexs_digest_is_complete_by_it(node: ContainersStorage, tmp_path: Path) -> None:
    index = images.Index((images.os_image(architecture="s390x"), IMAGE))
    with Registry(tmp_path / "registry") as registry:
        images.push(index, f"{registry.host}/team/os:multi")
        pinned = Reference.parse(f"{registry.host}/team/os@{index.digest}")
        node.podman("pull", "--tls-verify=false", "--quiet", str(pinned))
    assert whole(storage(node).check(pinned)) == (index.digest, IMAGE.digest, SIZE)
    assert storage(node).check(pinned.pinned(IMAGE.digest)).digest == IMAGE.digest


class TestHolds:
    def test_a_held_image_survives_removal_and_pruning(self, stocked: ContainersStorage) -> None:
        held = storage(stocked)
        held.hold(TAGGED, IMAGE.digest, "u1")
        assert stocked.podman("rmi", str(TAGGED), check=False).returncode != 0
        stocked.podman("image", "prune", "--all", "--force")
        assert held.check(PINNED).size == SIZE
        assert skopeo_copies(stocked)
        held.release("u1")
        stocked.podman("image", "prune", "--all", "--force")
        assert refusal(stocked).verdict is Verdict.ABSENT

    def test_holding_twice_is_holding_once(self, stocked: ContainersStorage) -> None:
        held = storage(stocked)
        assert held.hold(TAGGED, IMAGE.digest, "u1") == held.hold(TAGGED, IMAGE.digest, "u1")
        (only,) = held.holds()
        assert (only.update, only.digest) == ("u1", IMAGE.digest)
        assert held.is_held(IMAGE.digest, "u1")
        assert not held.is_held(IMAGE.digest, "u2")

    def test_a_hold_lost_to_container_prune_is_seen(self, stocked: ContainersStorage) -> None:
        held = storage(stocked)
        held.hold(TAGGED, IMAGE.digest, "u1")
        stocked.podman("container", "prune", "--force")
        assert not held.is_held(IMAGE.digest, "u1")
        held.release("u1")

    def test_img_24_holds_that_a_crash_left_are_released_and_others_containers_are_not(
        self, stocked: ContainersStorage
    ) -> None:
        held = storage(stocked)
        for update in ("u1", "u2", "u3"):
            held.hold(TAGGED, IMAGE.digest, update)
        stocked.podman("create", "--name=not-ours", "--network=none", str(TAGGED), "/bin/true")
        gone = held.release_unknown({"u2"})
        assert sorted(hold.update for hold in gone) == ["u1", "u3"]
        assert [hold.update for hold in held.holds()] == ["u2"]
        assert stocked.podman("container", "exists", "not-ours", check=False).returncode == 0

    def test_a_hold_that_a_killed_podman_has_made_half_way_is_released_or_made_again(
        self, stocked: ContainersStorage
    ) -> None:
        """Killed between the storage's record and podman's own: the image could not be removed any more."""
        held = storage(stocked)
        for again in (True, False):
            held.hold(TAGGED, IMAGE.digest, "u1")
            (stocked.root / "libpod/bolt_state.db").unlink()
            assert [hold.update for hold in held.holds()] == ["u1"]
            assert not held.is_held(IMAGE.digest, "u1")
            if again:
                held.hold(TAGGED, IMAGE.digest, "u1")
                assert held.is_held(IMAGE.digest, "u1")
                held.release("u1")
        assert [hold.update for hold in held.release_unknown({"u2"})] == ["u1"]
        assert held.holds() == ()
        stocked.podman("rmi", str(TAGGED))

    def test_a_container_that_an_extensions_image_was_read_through_goes_at_the_next_start(
        self, stocked: ContainersStorage
    ) -> None:
        stocked.podman("create", "--name=mcdaemon-extensions-u1", "--network=none", str(TAGGED), "/none")
        assert storage(stocked).release_unknown({"u1"}) == ()
        assert stocked.podman("container", "exists", "mcdaemon-extensions-u1", check=False).returncode == 1

    def test_releasing_what_nobody_holds_is_fine(self, node: ContainersStorage) -> None:
        storage(node).release("never")
        assert storage(node).holds() == ()

    def test_an_image_that_is_gone_cannot_be_held(self, node: ContainersStorage) -> None:
        with pytest.raises(Transient, match=f"^cannot hold {PINNED} in containers-storage: "):
            storage(node).hold(TAGGED, IMAGE.digest, "u1")

    def test_an_image_with_a_volume_leaves_none(self, node: ContainersStorage) -> None:
        image = replace(IMAGE, volumes=("/data",))
        node.add(image, str(TAGGED))
        storage(node).hold(TAGGED, image.digest, "update: with/odd characters")
        assert storage(node).holds()[0].update == "update: with/odd characters"
        assert node.podman("volume", "ls", "--quiet").stdout == ""


class TestPrograms:
    """Field case IMG-54: a local check that fails is no verdict on the image."""

    def shim(self, folder: Path, monkeypatch: pytest.MonkeyPatch, **scripts: str) -> None:
        folder.mkdir()
        for name, script in scripts.items():
            (folder / name).write_text(f"#!/bin/sh\n{script}\n")
            (folder / name).chmod(stat.S_IRWXU)
        monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin" if scripts else str(folder))

    def test_a_missing_skopeo_is_named(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.shim(tmp_path / "bin", monkeypatch)
        with pytest.raises(Unavailable, match="skopeo is not installed") as caught:
            Storage("/nowhere", "/nowhere").check(PINNED)
        assert caught.value.verdict is Verdict.UNREACHABLE
        with pytest.raises(Transient, match="cannot list the held images: podman is not installed"):
            Storage("/nowhere", "/nowhere").holds()

    def test_a_program_that_hangs_is_given_up(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.shim(tmp_path / "bin", monkeypatch, skopeo="exec sleep 30")
        with pytest.raises(Unavailable, match="skopeo does not finish in"):
            Storage("/nowhere", "/nowhere", timeout=0.3).check(PINNED)

    @pytest.mark.parametrize(
        "output", ["echo '[{]'", "echo null", "echo '[]'", "echo '{}'", "echo '[1]'", "echo '[{}]'", "exit 125"]
    )
    def test_a_podman_that_prints_nonsense_makes_no_complete_copy(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str
    ) -> None:
        (tmp_path / "manifest").write_bytes(IMAGE.manifest)
        skopeo = f"echo 'level=warning msg=\"noise\"' >&2; cat {tmp_path}/manifest"
        self.shim(tmp_path / "bin", monkeypatch, skopeo=skopeo, podman=output)
        with pytest.raises(Unavailable):
            Storage("/nowhere", "/nowhere").check(PINNED)

    def test_the_last_fatal_words_of_a_program_are_told(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "said").write_text('level=warning msg="careful"\nlevel=fatal msg="disk \\"on\\" fire"\n')
        self.shim(tmp_path / "bin", monkeypatch, skopeo=f"cat {tmp_path}/said >&2; exit 1")
        with pytest.raises(Unavailable, match='disk "on" fire') as caught:
            Storage("/nowhere", "/nowhere").check(PINNED)
        assert caught.value.verdict is Verdict.INCOMPLETE
