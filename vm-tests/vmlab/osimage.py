"""The machine's OS as a container image, and other versions of it: layers on it, so only those are ever fetched."""

from __future__ import annotations

import functools
import gzip
import hashlib
import io
import json
import os
import stat
import sys
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Optional

from tests.stand.images import Directory, Entry, File, Image, Layer, layer_on, sha256
from vmlab import layout, namespace, rootfs, store
from vmlab.initramfs import INIT, cpio, initramfs
from vmlab.programs import CannotBuild, run
from vmlab.rootfs import TIME

VERSION = "417.94.1"
_VERSION_LABEL = "org.opencontainers.image.version"
_LABELS = {"containers.bootc": "1", "ostree.bootable": "true", _VERSION_LABEL: VERSION}
_HERE = Path(__file__).resolve().parent
_TIMEOUT = 900.0


@dataclass(frozen=True)
class Parts:
    """What is kept of the OS besides its layer: the kernel's version and the modes of all directories."""

    folder: Path
    digest: str
    kernel: str
    directories: Mapping[str, Sequence[int]]

    @property
    def layout(self) -> Path:
        """The OCI layout; skopeo calls its image "oci:LAYOUT:image"."""
        return self.folder / "oci"

    @property
    def initramfs(self) -> str:
        """The initramfs in the OS; the kernel is `vmlinuz` beside it."""
        return f"usr/lib/modules/{self.kernel}/initramfs.img"


def key() -> str:
    """The hash of all that the OS image is made from."""
    sources = [_HERE / f"{name}.py" for name in ("osimage", "layout", "initramfs", "rootfs", "namespace")]
    stand = [store.PROJECT / source for source in layout.STAND_SOURCES]
    return store.key_of([_rootfs_key()], [*sources, layout.OVERLAY, INIT, *stand])


def build() -> Path:
    """The folder of the OS image, built if it is not there. Raises CannotBuild."""

    def make(folder: Path) -> None:
        archive = store.part("rootfs", _rootfs_key(), rootfs.make) / "rootfs.tar"
        namespace.call("build the OS image", "vmlab.osimage", str(archive), str(folder), timeout=_TIMEOUT)

    return store.part("os", key(), make)


def load(folder: Path) -> Parts:
    """Read what `build` left in its folder."""
    facts: dict[str, Any] = json.loads((folder / "os.json").read_text())
    return Parts(folder, facts["digest"], facts["kernel"], facts["directories"])


@functools.lru_cache(maxsize=1)
def base() -> Image:
    """The OS that the disk has. `tree` holds its directories, kernel, initramfs and os-release, no other files."""
    parts = load(build())
    tree: dict[str, Entry] = {path: Directory(*three) for path, three in parts.directories.items()}
    modules = Path(parts.initramfs).parent
    tree[parts.initramfs] = File((parts.folder / "initramfs.img").read_bytes(), 0o600)
    tree[f"{modules}/vmlinuz"] = File((parts.folder / "vmlinuz").read_bytes())
    tree["usr/lib/os-release"] = File(layout.release(VERSION))
    return Image((_stored_layer(parts),), MappingProxyType(dict(_LABELS)), tree)


def next_image(version: str, changes: Optional[Mapping[str, Entry]] = None, without: Sequence[str] = ()) -> Image:
    """Another OS: a layer on the base with its own version and an initramfs that differs, and boots as well."""
    parts = load(build())
    mark = cpio({"etc/vmlab-version": File(version.encode())})
    current = base().tree[parts.initramfs]
    if not isinstance(current, File):
        raise CannotBuild(f"cannot make {version}: {parts.initramfs} is no file")
    layer: dict[str, Entry] = {
        "usr/lib/os-release": File(layout.release(version)),
        parts.initramfs: File(current.content + mark, 0o600),
        **(changes or {}),
    }
    return layer_on(base(), layer, without, {_VERSION_LABEL: version})


def _rootfs_key() -> str:
    return store.key_of([rootfs.SUITE], [_HERE / "rootfs.py"])


def _stored_layer(parts: Parts) -> Layer:
    blobs = parts.layout / "blobs/sha256"
    manifest = json.loads((blobs / parts.digest.partition(":")[2]).read_bytes())
    config = json.loads((blobs / manifest["config"]["digest"].partition(":")[2]).read_bytes())
    digest = manifest["layers"][0]["digest"]
    return Layer((blobs / digest.partition(":")[2]).read_bytes(), digest, config["rootfs"]["diff_ids"][0])


# -- in the namespace --------------------------------------------------------------------------------------------------


def _make(archive: Path, folder: Path) -> None:
    with namespace.memory(folder / "work") as scratch:
        root = scratch / "root"
        root.mkdir()
        unpack = ["tar", "--extract", "--numeric-owner", "--exclude=./dev/*", f"--directory={root}"]
        run("unpack the packages", [*unpack, f"--file={archive}"], _TIMEOUT)
        kernel = layout.arrange(root, VERSION)
        modules = root / "usr/lib/modules" / kernel
        early = initramfs(root, kernel)
        (modules / "initramfs.img").write_bytes(early)
        (modules / "initramfs.img").chmod(0o600)
        (folder / "initramfs.img").write_bytes(early)
        (folder / "vmlinuz").write_bytes((modules / "vmlinuz").read_bytes())
        directories: dict[str, Sequence[int]] = {}
        layer = _layer_of(root, directories)
        image = Image((layer,), _LABELS, {})
        (folder / "oci").mkdir()
        image.write_layout(folder / "oci")
        facts = {"digest": image.digest, "kernel": kernel, "directories": directories}
        (folder / "os.json").write_text(json.dumps(facts, sort_keys=True))


def _layer_of(root: Path, directories: dict[str, Sequence[int]]) -> Layer:
    """The whole tree as one layer: sorted, with fixed times; notes the directories' modes and owners."""
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path in sorted(root.rglob("*")):
            info = path.lstat()
            header = tarfile.TarInfo(str(path.relative_to(root)))
            header.mtime, header.uid, header.gid = TIME, info.st_uid, info.st_gid
            header.mode = stat.S_IMODE(info.st_mode)
            if stat.S_ISLNK(info.st_mode):
                header.type, header.linkname = tarfile.SYMTYPE, os.readlink(path)
                archive.addfile(header)
            elif stat.S_ISDIR(info.st_mode):
                header.type = tarfile.DIRTYPE
                directories[header.name] = (header.mode, header.uid, header.gid)
                archive.addfile(header)
            elif stat.S_ISREG(info.st_mode):
                header.size = info.st_size
                with open(path, "rb") as content:
                    archive.addfile(header, content)
    # Level 1: the best one takes ten times as long, and nobody fetches this layer over a network.
    blob = gzip.compress(plain.getbuffer(), 1, mtime=0)
    return Layer(blob, sha256(blob), "sha256:" + hashlib.sha256(plain.getbuffer()).hexdigest())


if __name__ == "__main__":
    try:
        _make(Path(sys.argv[1]), Path(sys.argv[2]))
    except CannotBuild as error:
        sys.exit(str(error))
