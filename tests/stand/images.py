"""OCI images for the stand, built from dicts in pure Python: OS images, delta layers on them, extensions images.

Everything is deterministic: the same input gives the same digest on every machine of one architecture. An OS image is
laid out as bootc's are: files of /etc stand at etc/ in the layer (the importer moves them to /usr/etc), the kernel at
usr/lib/modules/<version>/, and the labels say that it boots. skopeo moves images to registries and storages.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import platform
import stat
import subprocess
import tarfile
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Optional, Union

from tests.stand.isolation import private

SKOPEO_TIMEOUT = 60.0
KERNEL = "6.1.0-stand"
EXTENSIONS_FOLDER = "usr/share/rpm-ostree/extensions"
_CREATED = "2024-01-01T00:00:00Z"
_MTIME = 1704067200
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64", "ppc64le": "ppc64le", "s390x": "s390x", "riscv64": "riscv64"}
ARCHITECTURE = _MACHINES.get(platform.machine(), platform.machine())

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
INDEX = "application/vnd.oci.image.index.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"


@dataclass(frozen=True)
class File:
    content: bytes = b""
    mode: int = 0o644
    uid: int = 0
    gid: int = 0


@dataclass(frozen=True)
class Link:
    target: str
    uid: int = 0
    gid: int = 0


@dataclass(frozen=True)
class Directory:
    mode: int = 0o755
    uid: int = 0
    gid: int = 0


Entry = Union[File, Link, Directory]
Tree = Mapping[str, Entry]


@dataclass(frozen=True)
class Layer:
    blob: bytes = field(repr=False)
    digest: str
    diff_id: str

    def descriptor(self) -> dict[str, object]:
        return {"mediaType": LAYER, "digest": self.digest, "size": len(self.blob)}


@dataclass(frozen=True)
class Image:
    """Layers with a config; `tree` is what they amount to, so that a layer on top knows its parents' modes."""

    layers: tuple[Layer, ...]
    labels: Mapping[str, str]
    tree: Tree = field(repr=False)
    architecture: str = ARCHITECTURE
    command: tuple[str, ...] = ()
    volumes: tuple[str, ...] = ()

    @property
    def config(self) -> bytes:
        inner: dict[str, object] = {"Labels": dict(self.labels)}
        if self.command:
            inner["Cmd"] = list(self.command)
        if self.volumes:
            inner["Volumes"] = {path: {} for path in self.volumes}
        return _json(
            {
                "created": _CREATED,
                "architecture": self.architecture,
                "os": "linux",
                "config": inner,
                "rootfs": {"type": "layers", "diff_ids": [layer.diff_id for layer in self.layers]},
                "history": [{"created": _CREATED, "created_by": "tests.stand.images"} for _ in self.layers],
            }
        )

    @property
    def manifest(self) -> bytes:
        config = self.config
        return _json(
            {
                "schemaVersion": 2,
                "mediaType": MANIFEST,
                "config": {"mediaType": CONFIG, "digest": sha256(config), "size": len(config)},
                "layers": [layer.descriptor() for layer in self.layers],
            }
        )

    @property
    def digest(self) -> str:
        """The manifest's digest: what `@sha256:...` pins."""
        return sha256(self.manifest)

    @property
    def config_digest(self) -> str:
        return sha256(self.config)

    def blobs(self) -> dict[str, bytes]:
        """Config and layers by digest."""
        found = {layer.digest: layer.blob for layer in self.layers}
        found[self.config_digest] = self.config
        return found

    def descriptor(self) -> dict[str, object]:
        """What an index says of this image."""
        return {
            "mediaType": MANIFEST,
            "digest": self.digest,
            "size": len(self.manifest),
            "platform": {"architecture": self.architecture, "os": "linux"},
        }

    def write_layout(self, folder: Path, name: str = "image") -> str:
        """Write as an OCI layout; returns what skopeo calls it ("oci:FOLDER:NAME")."""
        _write_layout(folder, self.blobs(), self.manifest, MANIFEST, name)
        return f"oci:{folder}:{name}"


@dataclass(frozen=True)
class Index:
    """A multi-platform image. `extra` are descriptors that are no image for a machine (attestations)."""

    images: tuple[Image, ...]
    extra: tuple[Mapping[str, object], ...] = ()

    @property
    def manifest(self) -> bytes:
        children = [image.descriptor() for image in self.images] + [dict(one) for one in self.extra]
        return _json({"schemaVersion": 2, "mediaType": INDEX, "manifests": children})

    @property
    def digest(self) -> str:
        return sha256(self.manifest)

    def write_layout(self, folder: Path, name: str = "image") -> str:
        blobs: dict[str, bytes] = {}
        for image in self.images:
            blobs.update(image.blobs())
            blobs[image.digest] = image.manifest
        _write_layout(folder, blobs, self.manifest, INDEX, name)
        return f"oci:{folder}:{name}"


def os_image(
    changes: Optional[Tree] = None,
    *,
    version: str = "417.94.202401010000-0",
    without: Iterable[str] = (),
    labels: Optional[Mapping[str, str]] = None,
    architecture: str = ARCHITECTURE,
) -> Image:
    """A small OS that libostree deploys: `bootable_tree` with `changes` on it and `without` taken out."""
    tree = dict(bootable_tree(version))
    for path in without:
        tree.pop(_clean(path), None)
    tree.update({_clean(path): entry for path, entry in (changes or {}).items()})
    named = {
        "containers.bootc": "1",
        "ostree.bootable": "true",
        "org.opencontainers.image.version": version,
        **(labels or {}),
    }
    return image_of(tree, labels=named, architecture=architecture)


def image_of(
    tree: Tree,
    labels: Optional[Mapping[str, str]] = None,
    architecture: str = ARCHITECTURE,
    command: Sequence[str] = (),
) -> Image:
    """Any image of one layer."""
    whole = _with_parents({_clean(path): entry for path, entry in tree.items()}, {})
    return Image((_layer(whole, ()),), MappingProxyType(dict(labels or {})), whole, architecture, tuple(command))


def layer_on(
    image: Image,
    changes: Tree,
    whiteouts: Iterable[str] = (),
    labels: Optional[Mapping[str, str]] = None,
) -> Image:
    """`image` with one more layer: `changes` added or replaced, `whiteouts` (files or whole folders) taken away."""
    gone = tuple(sorted(_clean(path) for path in whiteouts))
    below = {
        path: entry
        for path, entry in image.tree.items()
        if not any(path == one or path.startswith(one + "/") for one in gone)
    }
    added = _with_parents({_clean(path): entry for path, entry in changes.items()}, below)
    layer = _layer(added, gone)
    merged = {**image.labels, **(labels or {})}
    return replace(image, layers=(*image.layers, layer), labels=MappingProxyType(merged), tree={**below, **added})


def extensions_image(packages: Iterable[Path], labels: Optional[Mapping[str, str]] = None) -> Image:
    """An extensions image: the RPM files at /usr/share/rpm-ostree/extensions, as in the release's own."""
    tree: dict[str, Entry] = {EXTENSIONS_FOLDER: Directory()}
    for package in packages:
        tree[f"{EXTENSIONS_FOLDER}/{package.name}"] = File(package.read_bytes())
    return image_of(tree, labels=labels)


def bootable_tree(version: str = "417.94.202401010000-0") -> dict[str, Entry]:
    """What RHCOS has at its top, a kernel that is none, and the /etc that ostree, podman and skopeo want to read."""
    tree: dict[str, Entry] = {path: Link(target) for path, target in _TOP_LINKS.items()}
    tree.update({path: Directory() for path in _EMPTY})
    tree["tmp"] = Directory(0o1777)
    tree[f"usr/lib/modules/{KERNEL}/vmlinuz"] = File(b"stand kernel " + version.encode(), 0o755)
    tree[f"usr/lib/modules/{KERNEL}/initramfs.img"] = File(b"stand initramfs " + version.encode(), 0o600)
    release = f'NAME="Stand CoreOS"\nID="rhcos"\nVERSION="{version}"\nPRETTY_NAME="Stand CoreOS {version}"\n'
    tree["usr/lib/os-release"] = File(release.encode())
    tree["etc/os-release"] = Link("../usr/lib/os-release")
    for path, (text, mode) in _ETC.items():
        tree[f"etc/{path}"] = File(text.encode(), mode)
    return tree


def tree_from_directory(folder: Path) -> dict[str, Entry]:
    """Read a directory tree; owners become root, times are dropped."""
    tree: dict[str, Entry] = {}
    for path in sorted(folder.rglob("*")):
        info = path.lstat()
        mode = stat.S_IMODE(info.st_mode)
        name = str(path.relative_to(folder))
        if stat.S_ISLNK(info.st_mode):
            tree[name] = Link(os.readlink(path))
        elif stat.S_ISDIR(info.st_mode):
            tree[name] = Directory(mode)
        elif stat.S_ISREG(info.st_mode):
            tree[name] = File(path.read_bytes(), mode)
    return tree


def push(image: Union[Image, Index], name: str, credentials: str = "", tls_verify: bool = False) -> str:
    """Copy to a registry ("127.0.0.1:PORT/repo:tag") with skopeo; returns the manifest digest there.

    `credentials` is "user:password". Raises subprocess.CalledProcessError with skopeo's own words in stderr.
    """
    options = [f"--dest-tls-verify={'true' if tls_verify else 'false'}"]
    if credentials:
        options.append(f"--dest-creds={credentials}")
    _copy(image, f"docker://{name}", options)
    return image.digest


def store(image: Union[Image, Index], name: str, root: Path, runroot: Path, driver: str = "overlay") -> str:
    """Copy into a containers-storage as `name` with skopeo; returns the manifest digest."""
    _copy(image, f"containers-storage:[{driver}@{root}+{runroot}]{name}", [])
    return image.digest


def sha256(content: bytes) -> str:
    return "sha256:" + hashlib.sha256(content).hexdigest()


def _copy(image: Union[Image, Index], destination: str, options: Sequence[str]) -> None:
    with tempfile.TemporaryDirectory(prefix="stand-image-") as scratch:
        source = image.write_layout(Path(scratch))
        which = ["--all"] if isinstance(image, Index) and destination.startswith("docker://") else []
        argv = ["skopeo", "--insecure-policy", "copy", "--quiet", "--preserve-digests", *which, *options]
        subprocess.run(
            private([*argv, source, destination]),
            check=True,
            timeout=SKOPEO_TIMEOUT,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
        )


def _layer(tree: Tree, whiteouts: Iterable[str]) -> Layer:
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path in whiteouts:
            folder, _, name = path.rpartition("/")
            archive.addfile(_header(f"{folder}/.wh.{name}" if folder else f".wh.{name}", File(mode=0)))
        for path in sorted(tree):
            entry = tree[path]
            content = io.BytesIO(entry.content) if isinstance(entry, File) else None
            archive.addfile(_header(path, entry), content)
    blob = gzip.compress(plain.getvalue(), mtime=0)
    return Layer(blob, sha256(blob), sha256(plain.getvalue()))


def _header(path: str, entry: Entry) -> tarfile.TarInfo:
    header = tarfile.TarInfo(path)
    header.mtime = _MTIME
    header.uid, header.gid = entry.uid, entry.gid
    if isinstance(entry, File):
        header.mode, header.size = entry.mode, len(entry.content)
    elif isinstance(entry, Link):
        header.type, header.linkname, header.mode = tarfile.SYMTYPE, entry.target, 0o777
    else:
        header.type, header.mode = tarfile.DIRTYPE, entry.mode
    return header


def _with_parents(tree: Tree, below: Tree) -> dict[str, Entry]:
    """`tree` with every parent directory named, as it is `below` or 0755 root."""
    whole: dict[str, Entry] = {}
    for path, entry in tree.items():
        parts = path.split("/")
        for depth in range(1, len(parts)):
            parent = "/".join(parts[:depth])
            known = tree.get(parent) or below.get(parent) or Directory()
            if not isinstance(known, Directory):
                raise ValueError(f"cannot put {path} in an image: {parent} is no directory there")
            whole[parent] = known
        whole[path] = entry
    return whole


def _clean(path: str) -> str:
    clean = path.strip("/")
    if not clean or any(part in ("", ".", "..") for part in clean.split("/")):
        raise ValueError(f"cannot put {path!r} in an image: not a plain path")
    return clean


def _write_layout(folder: Path, blobs: Mapping[str, bytes], manifest: bytes, media_type: str, name: str) -> None:
    store_folder = folder / "blobs" / "sha256"
    store_folder.mkdir(parents=True, exist_ok=True)
    for digest, blob in {**blobs, sha256(manifest): manifest}.items():
        (store_folder / digest.partition(":")[2]).write_bytes(blob)
    (folder / "oci-layout").write_text('{"imageLayoutVersion":"1.0.0"}')
    entry = {
        "mediaType": media_type,
        "digest": sha256(manifest),
        "size": len(manifest),
        "annotations": {"org.opencontainers.image.ref.name": name},
    }
    (folder / "index.json").write_bytes(_json({"schemaVersion": 2, "manifests": [entry]}))


def _json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


_TOP_LINKS = {
    "bin": "usr/bin",
    "sbin": "usr/sbin",
    "lib": "usr/lib",
    "lib64": "usr/lib64",
    "home": "var/home",
    "root": "var/roothome",
    "opt": "var/opt",
    "srv": "var/srv",
    "mnt": "var/mnt",
    "media": "run/media",
    "ostree": "sysroot/ostree",
    "usr/local": "../var/usrlocal",
}
_EMPTY = ("boot", "dev", "proc", "run", "sys", "sysroot", "var", "usr/bin", "usr/sbin", "usr/lib64", "usr/share")

# "location 127.0.0.1" without a port matches every port there, so that the image does not depend on the registry's.
_REGISTRIES = """\
unqualified-search-registries = []

[[registry]]
location = "127.0.0.1"
insecure = true
"""
# The stand has no systemd: podman must not ask it for cgroups or a journal.
_CONTAINERS = """\
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
"""
_STORAGE = """\
[storage]
driver = "overlay"
graphroot = "/var/lib/containers/storage"
runroot = "/run/containers/storage"
"""
_ETC: dict[str, tuple[str, int]] = {
    "passwd": ("root:x:0:0:root:/root:/bin/bash\ncore:x:1000:1000:CoreOS Admin:/var/home/core:/bin/bash\n", 0o644),
    "group": ("root:x:0:\nwheel:x:10:core\nsystemd-journal:x:190:core\ncore:x:1000:\n", 0o644),
    "shadow": ("root:*:19000:0:99999:7:::\ncore:*:19000:0:99999:7:::\n", 0o000),
    "containers/policy.json": ('{"default":[{"type":"insecureAcceptAnything"}]}\n', 0o644),
    "containers/registries.conf": (_REGISTRIES, 0o644),
    "containers/storage.conf": (_STORAGE, 0o644),
    "containers/containers.conf": (_CONTAINERS, 0o644),
}
