"""Pre-flight: is there room for what an update is about to bring, asked before the first byte of it is fetched.

What is needed, by file system; two places on the same one are added up:

- /ostree: the layers that are not imported yet, 2.5 times their compressed size, and what libostree keeps free, 3 % if
  not configured otherwise (rpm-ostree.md 5.9); an allowance for layered packages; the new deployment itself;
- /boot: kernel and initramfs. How large the new ones are nobody knows before the fetch: they are taken to be those of
  the booted deployment and a bit more. Once staged, they are measured (`kernel_need`). An image that is imported
  already costs no fetch, so nothing is guessed: it may well be the rollback deployment's, with its kernel in place;
- /var/tmp, for a local copy: containers/image unpacks one layer at a time there before it hands it over (IMG-43);
- containers-storage, for an extensions image that has to be pulled.

The agent never removes a deployment to make room: the rollback deployment is the only way back from an update that
turns out bad a day later (TXN-03, TXN-50). The sentence names the command, a human decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from mcdaemon.errors import Held, HoldReason
from mcdaemon.host import space
from mcdaemon.host.deployments import Machine, StagedDeployment
from mcdaemon.host.rpmostree import Deployment
from mcdaemon.host.space import Room
from mcdaemon.image.findings import Blob, Source
from mcdaemon.image.resolve import Resolution

MIB = 1 << 20

UNPACKED = 2.5
"""Bytes that a compressed byte of a layer becomes in the repository, with what is needed meanwhile (5.9)."""

DEPLOYMENT = 64 * MIB
"""Bytes for a new deployment besides its content: directories, the merged /etc, the payload."""

PACKAGES = 256 * MIB
"""Bytes allowed for layered packages: RPMs, their unpacked content and rpm's own database. An allowance, because only
rpm-ostree itself knows what it is going to install; what exceeds it ends in rpm-ostree's own refusal, held as well."""

KERNEL_MARGIN = 2 * MIB
"""Bytes on /boot besides the kernel: boot entries, directories, metadata of the file system (TXN-46)."""

KERNEL_GROWTH = 1.125
"""How much larger than the booted one the next kernel is taken to be."""

_BYTES_PER_INODE = 16 << 10
"""mke2fs's default: a file system with fewer inodes than that runs out of them first (TXN-33)."""

_INODES = 4096
"""Inodes for the directories of a deployment; its files are links into the repository."""

_GRAPH_ROOT = "var/lib/containers"
_SPACE_HINT = "free space there, for example with `podman image prune`; it is looked at again"
_BOOT_HINT = (
    "`rpm-ostree cleanup -r` removes the rollback deployment and its kernel, which mcdaemon never does by itself; "
    "it is looked at again"
)


@dataclass(frozen=True)
class Need:
    """Something that takes room: `place` is where, `where` how people call that, `what` is for the sentence."""

    place: Path
    where: str
    what: str
    bytes: int
    inodes: int = 0
    hint: str = _SPACE_HINT


def size(count: int) -> str:
    """Bytes for people, rounded up: what is needed must not look smaller than it is."""
    if count >= 10 << 30:
        return f"{-(-count // (1 << 30))} GiB"
    return f"{-(-count // MIB)} MiB"


def require(needs: Iterable[Need], doing: str) -> None:
    """Raises Held with needed and free bytes (TXN-39) for the first file system that is too small for its needs."""
    shared: dict[int, tuple[Room, list[Need]]] = {}
    for need in needs:
        room = space.look(need.place)
        shared.setdefault(room.device, (room, []))[1].append(need)
    for room, group in shared.values():
        _require(room, group, doing)


def _require(room: Room, group: Sequence[Need], doing: str) -> None:
    wanted, inodes = sum(need.bytes for need in group), sum(need.inodes for need in group)
    where = " and ".join(dict.fromkeys(need.where for need in group))
    if wanted > room.bytes:
        parts = ", ".join(f"{need.what} ({size(need.bytes)})" for need in group if need.bytes)
        sentence = f"{size(wanted)} are needed on {where}: {parts}; {room.bytes // MIB} MiB are free"
    elif room.inodes is not None and inodes > room.inodes:
        sentence = f"{inodes} inodes are needed on {where}; {room.inodes} are free"
    else:
        return
    # The largest need is the one to do something about.
    hint = max(group, key=lambda need: need.bytes).hint
    raise Held(HoldReason.SPACE, f"cannot {doing}: {sentence}", hint)


# -- before the fetch -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """What an update brings, as far as it is known before anything of it is fetched.

    :ivar image: where the OS image is, None when the base stays; `extensions` is the same of the extensions image,
        None when no packages are read.
    :ivar packages: the new tree has layered packages.
    """

    image: Optional[Resolution] = None
    extensions: Optional[Resolution] = None
    packages: bool = False


def needs(machine: Machine, target: Target) -> list[Need]:
    """All that `target` needs besides a kernel on /boot."""
    repo = machine.sysroot / "ostree/repo"
    found = [Need(repo, "/sysroot", "the new deployment", DEPLOYMENT, _INODES)]
    missing = to_fetch(machine, target.image)
    if missing:
        whole = unpacked(missing)
        what = f"{len(missing)} of {_layers(target.image)} layers of the image, unpacked"
        found.append(Need(repo, "/sysroot", what, whole, whole // _BYTES_PER_INODE))
        found += _temporary(machine, target.image, missing)
    if target.packages:
        found.append(Need(repo, "/sysroot", "layered packages", PACKAGES, PACKAGES // _BYTES_PER_INODE))
    if missing or target.packages:
        kept = space.kept_free(repo, space.look(repo).total)
        found.append(Need(repo, "/sysroot", "what libostree keeps free", kept))
    if target.extensions is not None and target.extensions.contents is not None and not _local(target.extensions):
        whole = unpacked(target.extensions.contents.layers)
        found.append(Need(machine.top / _GRAPH_ROOT, f"/{_GRAPH_ROOT}", "the extensions image, unpacked", whole))
    return found


def unpacked(layers: Iterable[Blob]) -> int:
    """Bytes that these layers are allowed to become."""
    return sum(int(blob.size * UNPACKED) if blob.compressed else blob.size for blob in layers)


def estimated_kernel(machine: Machine, booted: str) -> Need:
    """/boot's part before the fetch: the booted kernel, a bit larger. `booted`: name of the deployment."""
    files = space.kernel_files(machine.root_of(booted).path)
    block = space.look(machine.boot).block
    whole = int(space.rounded(files.values(), block) * KERNEL_GROWTH) + KERNEL_MARGIN
    return Need(machine.boot, "/boot", "a kernel like the booted one", whole, 16, _BOOT_HINT)


def to_fetch(machine: Machine, image: Optional[Resolution]) -> tuple[Blob, ...]:
    """The layers of an image that are not in the repository yet; none when there is no image."""
    if image is None or image.contents is None:
        return ()
    layers = {blob.digest: blob for blob in image.contents.layers}
    gone = space.not_imported(machine.sysroot / "ostree/repo", layers)
    return tuple(blob for digest, blob in layers.items() if digest in gone)


def _layers(image: Optional[Resolution]) -> int:
    return len({blob.digest for blob in image.contents.layers}) if image and image.contents else 0


def _local(image: Optional[Resolution]) -> bool:
    return image is not None and image.chosen is not None and image.chosen.source is Source.STORAGE


def _temporary(machine: Machine, image: Optional[Resolution], missing: Sequence[Blob]) -> list[Need]:
    if not _local(image):
        return []
    largest = max(unpacked([blob]) for blob in missing)
    return [Need(machine.top / "var/tmp", "/var/tmp", "the largest layer, unpacked", largest)]


# -- once it is staged ------------------------------------------------------------------------------------------------


def kernel_need(machine: Machine, staged: StagedDeployment) -> Optional[Need]:
    """/boot's part of what is staged, exactly: the files that finalization has to copy there, in whole blocks.

    A file that is there already is not copied again; libostree makes each one whole or not at all.
    """
    there = machine.boot / "ostree" / f"{staged.osname}-{staged.bootcsum}"
    files = space.kernel_files(machine.root_of(staged.name).path)
    absent = [count for name, count in files.items() if not (there / name).exists()]
    if not absent:
        return None
    whole = space.rounded(absent, space.look(machine.boot).block) + KERNEL_MARGIN
    return Need(machine.boot, "/boot", "the kernel", whole, len(absent) + 16, _BOOT_HINT)


def less_what_is_dropped(need: Need, machine: Machine, deployments: Sequence[Deployment], prunes_early: bool) -> Need:
    """`need` on /boot, less the kernels that finalization itself removes before it copies, where libostree does that.

    It drops what is neither booted nor pinned, the old rollback deployment above all (rpm-ostree.md 5.2 step 7, 5.6);
    without `prunes_early` only after the copy, too late.
    """
    booted = next((d for d in deployments if d.booted), None)
    if not prunes_early or booted is None:
        return need
    keep = [d.name for d in deployments if d.booted or d.pinned]
    dropped = space.prunable_kernels(machine.boot, machine.sysroot, booted.osname, keep)
    return Need(need.place, need.where, need.what, max(0, need.bytes - dropped), need.inodes, need.hint)
