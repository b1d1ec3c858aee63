"""Room: what is needed, what is free, and the sentence with both numbers."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Optional

import pytest

from mcdaemon.errors import Held, HoldReason
from mcdaemon.host import space
from mcdaemon.host.deployments import Machine, StagedDeployment
from mcdaemon.host.root import Root
from mcdaemon.host.rpmostree import Deployment
from mcdaemon.host.space import Room
from mcdaemon.image.findings import Blob, Contents, Finding, Source, Verdict
from mcdaemon.image.manifest import parse
from mcdaemon.image.reference import Reference
from mcdaemon.image.resolve import Resolution
from mcdaemon.update import preflight
from mcdaemon.update.preflight import MIB, Need, Target

GIB = 1 << 30
BOOTED, STAGED, ROLLBACK = (letter * 64 + ".0" for letter in "bcd")
DIGEST = "sha256:" + "1" * 64


def digest(number: int) -> str:
    return f"sha256:{number:064x}"


def image(*layers: Blob, source: Source = Source.REGISTRY) -> Resolution:
    contents = Contents(DIGEST, DIGEST, 0, layers)
    finding = Finding(source, "here", Verdict.COMPLETE, "", DIGEST, image_digest=DIGEST, contents=contents)
    return Resolution(Reference.parse("127.0.0.1:5000/os:1"), DIGEST, (finding,))


class Disks(Machine):
    """A machine in a directory, whose deployments are where they are and whose osname is known."""

    def root_of(self, name: str) -> Root:
        return Root.of_deployment(self.sysroot, "rhcos", name)


@pytest.fixture
def machine(tmp_path: Path) -> Disks:
    for folder in ("sysroot/ostree/repo/refs/heads/ostree/container/blob", "boot/ostree", "boot/loader/entries",
                   "var/tmp", "var/lib/containers"):  # fmt: skip
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "sysroot/ostree/repo/config").write_text("[core]\nmode=bare\n")
    return Disks(tmp_path)


Free = Callable[..., None]


@pytest.fixture
def free(machine: Disks, monkeypatch: pytest.MonkeyPatch) -> Free:
    """Gives each file system its free bytes; by default all places are on one."""

    def give(root: int, boot: Optional[int] = None, inodes: Optional[int] = 1 << 20, total: int = 100 * GIB) -> None:
        def look(place: Path) -> Room:
            if boot is not None and place == machine.boot:
                return Room(2, boot, inodes, GIB, 4096)
            return Room(1, root, inodes, total, 4096)

        monkeypatch.setattr(space, "look", look)

    return give


def held(machine: Disks, target: Target, *more: Need) -> Held:
    with pytest.raises(Held) as caught:
        preflight.require([*preflight.needs(machine, target), *more], "stage 50-new")
    assert caught.value.reason is HoldReason.SPACE
    return caught.value


def passes(machine: Disks, target: Target, *more: Need) -> None:
    preflight.require([*preflight.needs(machine, target), *more], "stage 50-new")


# -- layers -----------------------------------------------------------------------------------------------------------

LAYERS = (Blob(digest(1), 400 * MIB), Blob(digest(2), 100 * MIB))
NEEDED = 500 * MIB * 5 // 2 + 3 * GIB + preflight.DEPLOYMENT


def test_missing_layers_need_two_and_a_half_times_their_size_and_three_percent_stay_free(
    machine: Disks, free: Free
) -> None:
    free(NEEDED)
    passes(machine, Target(image(*LAYERS)))
    free(NEEDED - 1)
    error = held(machine, Target(image(*LAYERS)))
    assert str(error).startswith(
        "cannot stage 50-new: 4386 MiB are needed on /sysroot: the new deployment (64 MiB), 2 of 2 layers of the "
        "image, unpacked (1250 MiB), what libostree keeps free (3072 MiB); 4385 MiB are free"
    )


def imported(machine: Disks, *layers: Blob) -> None:
    for layer in layers:
        name = layer.digest.replace(":", "_3A_")
        (machine.sysroot / f"ostree/repo/refs/heads/ostree/container/blob/{name}").write_text("commit")


def test_layers_that_are_there_need_nothing(machine: Disks, free: Free) -> None:
    imported(machine, LAYERS[0])
    free(100 * MIB * 5 // 2 + 3 * GIB + preflight.DEPLOYMENT)
    passes(machine, Target(image(*LAYERS)))
    imported(machine, LAYERS[1])
    free(preflight.DEPLOYMENT)
    passes(machine, Target(image(*LAYERS)))
    free(preflight.DEPLOYMENT - 1)
    assert "the new deployment" in str(held(machine, Target(image(*LAYERS))))


def test_a_layer_that_occurs_twice_is_fetched_once(machine: Disks, free: Free) -> None:
    free(NEEDED)
    passes(machine, Target(image(*LAYERS, *LAYERS)))


def test_a_layer_that_is_not_compressed_does_not_grow(machine: Disks, free: Free) -> None:
    free(500 * MIB + 3 * GIB + preflight.DEPLOYMENT)
    passes(machine, Target(image(Blob(digest(1), 500 * MIB, compressed=False))))


@pytest.mark.parametrize(("media_type", "compressed"), [
    ("application/vnd.oci.image.layer.v1.tar+gzip", True), ("application/vnd.oci.image.layer.v1.tar+zstd", True),
    ("application/vnd.docker.image.rootfs.diff.tar.gzip", True), ("application/vnd.oci.image.layer.v1.tar", False),
    ("application/vnd.docker.image.rootfs.diff.tar", False), (None, True), (7, True),
])  # fmt: skip
def test_whether_a_layer_grows_is_in_its_type_and_an_unknown_one_does(media_type: object, compressed: bool) -> None:
    layer = {"digest": digest(1), "size": 5, "mediaType": media_type}
    document = {"config": {"digest": digest(2), "size": 1}, "layers": [layer], "annotations": {"version": "1.2"}}
    found = parse(json.dumps(document).encode())
    assert found.layers == (Blob(digest(1), 5, compressed=compressed),) and found.description.version == "1.2"


def test_a_base_that_stays_needs_only_a_deployment(machine: Disks, free: Free) -> None:
    free(preflight.DEPLOYMENT)
    passes(machine, Target())


def test_packages_get_an_allowance_and_leave_what_is_kept_free(machine: Disks, free: Free) -> None:
    free(preflight.DEPLOYMENT + preflight.PACKAGES + 3 * GIB)
    passes(machine, Target(packages=True))
    free(preflight.DEPLOYMENT + preflight.PACKAGES + 3 * GIB - 1)
    assert "layered packages (256 MiB)" in str(held(machine, Target(packages=True)))


def test_an_extensions_image_counts_where_podman_unpacks_it_and_only_when_it_is_pulled(
    machine: Disks, free: Free
) -> None:
    there = preflight.DEPLOYMENT + preflight.PACKAGES + 3 * GIB
    free(there)
    passes(machine, Target(None, image(*LAYERS, source=Source.STORAGE), True))
    assert "the extensions image, unpacked (1250 MiB)" in str(held(machine, Target(None, image(*LAYERS), True)))


def test_a_local_copy_needs_room_for_one_unpacked_layer_in_var_tmp(machine: Disks, free: Free) -> None:
    """IMG-43: the file systems that are really used."""
    free(NEEDED + 1000 * MIB)
    passes(machine, Target(image(*LAYERS, source=Source.STORAGE)))
    free(NEEDED + 1000 * MIB - 1)
    error = held(machine, Target(image(*LAYERS, source=Source.STORAGE)))
    assert "/sysroot and /var/tmp" in str(error) and "the largest layer, unpacked (1000 MiB)" in str(error)


@pytest.mark.parametrize(("inodes", "fits"), [(None, True), (4096 + 80_000, True), (4096 + 79_999, False), (0, False)])
def test_inodes_may_run_out_before_the_bytes_do(machine: Disks, free: Free, inodes: Optional[int], fits: bool) -> None:
    """TXN-33; a file system without a fixed number of them (btrfs) says none."""
    free(100 * GIB, inodes=inodes)
    if fits:
        passes(machine, Target(image(*LAYERS)))
    else:
        assert f"84096 inodes are needed on /sysroot; {inodes} are free" in str(held(machine, Target(image(*LAYERS))))


def test_nobody_removes_a_deployment_by_itself_the_sentence_names_the_command(machine: Disks, free: Free) -> None:
    """TXN-50."""
    free(0)
    assert "podman image prune" in str(held(machine, Target()))
    free(GIB, boot=0)
    need = Need(machine.boot, "/boot", "the kernel", 10 * MIB, hint=preflight._BOOT_HINT)
    assert "`rpm-ostree cleanup -r`" in str(held(machine, Target(), need))


KEPT = [
    ("", 3 * GIB), ("[core]\n", 3 * GIB), ("[core]\nmin-free-space-percent=5\n", 5 * GIB),
    ("[core]\nmin-free-space-percent=0\n", 0), ("[core]\nmin-free-space-size=500MB\n", 500 * MIB),
    ("[core]\nmin-free-space-size = 2GB\nmin-free-space-percent=50\n", 2 * GIB),
    ("[core]\nmin-free-space-size=0MB\nmin-free-space-percent=1\n", GIB),
    ("[core]\nmin-free-space-size=1TB\n", 1 << 40),
    ("[other]\nmin-free-space-percent=50\n", 3 * GIB), ("[core]\n#min-free-space-percent=50\n", 3 * GIB),
    ("[core]\nmin-free-space-percent=150\n", 3 * GIB), ("[core]\nmin-free-space-percent=many\n", 3 * GIB),
    ("[core]\nmin-free-space-size=many\n", 3 * GIB), ("\0\xff[core\n=", 3 * GIB),
    ("[core]\nmin-free-space-percent=5\n[core2]\nmin-free-space-percent=9\n", 5 * GIB),
]  # fmt: skip


@pytest.mark.parametrize(("config", "kept"), KEPT)
def test_what_libostree_keeps_free_is_read_as_it_reads_it(config: str, kept: int) -> None:
    assert space.parse_kept_free(config, 100 * GIB) == kept


def test_a_repository_without_a_config_keeps_the_default(tmp_path: Path) -> None:
    assert space.kept_free(tmp_path, 1000) == 30


@pytest.mark.parametrize(("count", "text"), [
    (0, "0 MiB"), (1, "1 MiB"), (MIB, "1 MiB"), (MIB + 1, "2 MiB"), (9 * GIB, "9216 MiB"), (10 * GIB + 1, "11 GiB"),
])  # fmt: skip
def test_what_is_needed_is_rounded_up(count: int, text: str) -> None:
    assert preflight.size(count) == text


# -- kernels ----------------------------------------------------------------------------------------------------------


def kernel(machine: Disks, name: str, *sizes: int, version: str = "5.14") -> None:
    folder = machine.root_of(name).path / f"usr/lib/modules/{version}"
    folder.mkdir(parents=True, exist_ok=True)
    for file, count in zip(("vmlinuz", "initramfs.img"), sizes):
        with open(folder / file, "wb") as stream:
            stream.truncate(count)


def staged(bootcsum: str = "k" * 64) -> StagedDeployment:
    return StagedDeployment(STAGED, "rhcos", bootcsum, (), True)


def test_before_the_fetch_the_next_kernel_is_taken_to_be_an_eighth_larger_than_the_booted_one(machine: Disks) -> None:
    kernel(machine, BOOTED, 16 * MIB, 80 * MIB)
    need = preflight.estimated_kernel(machine, BOOTED)
    assert need.bytes == 108 * MIB + preflight.KERNEL_MARGIN and need.where == "/boot"


@pytest.mark.parametrize(("sizes", "blocks"), [((1, 1), 2), ((4096, 4096), 2), ((4097, 1), 3), ((0, 4096), 1)])
def test_once_staged_every_file_counts_in_whole_blocks(
    machine: Disks, free: Free, sizes: Sequence[int], blocks: int
) -> None:
    """TXN-46: the estimate was wrong by the rounding."""
    free(GIB)
    kernel(machine, STAGED, *sizes)
    need = preflight.kernel_need(machine, staged())
    assert need is not None and need.bytes == blocks * 4096 + preflight.KERNEL_MARGIN


def test_device_trees_count(machine: Disks, free: Free) -> None:
    free(GIB)
    kernel(machine, STAGED, 4096, 4096)
    folder = machine.root_of(STAGED).path / "usr/lib/modules/5.14/dtb/vendor"
    folder.mkdir(parents=True)
    for number in range(10):
        (folder / f"{number}.dtb").write_bytes(b"x")
    need = preflight.kernel_need(machine, staged())
    assert need is not None and need.bytes == 12 * 4096 + preflight.KERNEL_MARGIN


def in_boot(machine: Disks, bootcsum: str, *files: tuple[str, int]) -> None:
    folder = machine.boot / f"ostree/rhcos-{bootcsum}"
    folder.mkdir()
    for name, count in files:
        (folder / name).write_bytes(b"x" * count)


def test_a_kernel_that_is_in_boot_needs_nothing_and_half_of_one_needs_the_other_half(
    machine: Disks, free: Free
) -> None:
    free(GIB)
    kernel(machine, STAGED, 4096, 8192)
    in_boot(machine, "k" * 64, ("vmlinuz-5.14", 4096))
    need = preflight.kernel_need(machine, staged())
    assert need is not None and need.bytes == 8192 + preflight.KERNEL_MARGIN
    (machine.boot / f"ostree/rhcos-{'k' * 64}/initramfs-5.14.img").write_bytes(b"x")
    assert preflight.kernel_need(machine, staged()) is None


def deployment(name: str, booted: bool = False, pinned: bool = False) -> Deployment:
    return Deployment(name, "rhcos", booted, False, pinned, "", "", "", (), ())


def entry(machine: Disks, number: int, name: str, bootcsum: str, osname: str = "rhcos") -> None:
    link = machine.sysroot / f"ostree/boot.1/{osname}/{bootcsum}/0"
    link.parent.mkdir(parents=True, exist_ok=True)
    target = machine.sysroot / f"ostree/deploy/{osname}/deploy/{name}"
    target.mkdir(parents=True, exist_ok=True)
    link.symlink_to(target)
    (machine.boot / f"loader/entries/ostree-{number}.conf").write_text(
        f"title x\nversion {number}\noptions rw ostree=/ostree/boot.1/{osname}/{bootcsum}/0\n"
    )


@pytest.fixture
def two_kernels(machine: Disks) -> Disks:
    """Booted with one kernel of 8 KiB, the rollback deployment with another one of 4 KiB."""
    one, other = "1" * 64, "2" * 64
    entry(machine, 2, BOOTED, one)
    entry(machine, 1, ROLLBACK, other)
    in_boot(machine, one, ("vmlinuz-5.14", 8192))
    in_boot(machine, other, ("vmlinuz-5.13", 4096))
    return machine


def left(machine: Disks, deployments: Sequence[Deployment], prunes_early: bool = True) -> int:
    need = Need(machine.boot, "/boot", "the kernel", 100_000)
    return preflight.less_what_is_dropped(need, machine, deployments, prunes_early).bytes


def test_the_rollbacks_kernel_makes_room_where_libostree_drops_it_first(two_kernels: Disks) -> None:
    """rpm-ostree.md 5.6."""
    known = (deployment(BOOTED, booted=True), deployment(ROLLBACK))
    assert left(two_kernels, known) == 100_000 - 4096
    assert left(two_kernels, known, prunes_early=False) == 100_000, "an old libostree copies first"


def test_the_kernel_of_a_pinned_deployment_stays(two_kernels: Disks) -> None:
    assert left(two_kernels, (deployment(BOOTED, booted=True), deployment(ROLLBACK, pinned=True))) == 100_000


def test_the_kernel_of_another_os_stays(machine: Disks) -> None:
    """Also of one whose name begins as ours does."""
    entry(machine, 3, BOOTED, "1" * 64)
    entry(machine, 1, "e" * 64 + ".0", "3" * 64, osname="rhcos-other")
    in_boot(machine, "1" * 64, ("vmlinuz-5.14", 8192))
    in_boot(machine, "other-" + "3" * 64, ("vmlinuz-5.14", 4096))
    assert left(machine, (deployment(BOOTED, booted=True), deployment(ROLLBACK))) == 100_000


def test_what_nobody_boots_any_more_makes_room(two_kernels: Disks) -> None:
    in_boot(two_kernels, "9" * 64, ("vmlinuz-5.12", 1000))
    known = (deployment(BOOTED, booted=True), deployment(ROLLBACK))
    assert left(two_kernels, known) == 100_000 - 4096 - 1000


def test_nothing_is_dropped_when_nobody_knows_what_is_booted(two_kernels: Disks) -> None:
    assert left(two_kernels, ()) == 100_000


# -- the real file system ---------------------------------------------------------------------------------------------


def test_a_place_that_is_not_there_yet_is_looked_for_above(tmp_path: Path) -> None:
    assert space.look(tmp_path / "not/there/yet").device == tmp_path.stat().st_dev
    assert space.look(tmp_path).bytes > 0
