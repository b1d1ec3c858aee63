"""Manifests: OCI and Docker schema 2, images and indexes, read with bounds and never trusted before their digest."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass

from mcdaemon.image.description import Description, from_annotations
from mcdaemon.image.findings import Blob, Unavailable, Verdict, printable
from mcdaemon.image.reference import is_digest

# containers/image reads no manifest beyond this (internal/iolimits).
BYTES_LIMIT = 4 * 1024 * 1024
# More layers than any overlay mounts; bounds the requests that one manifest can cause.
BLOBS_LIMIT = 1000

IMAGE_TYPES = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
INDEX_TYPES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
ACCEPT = ", ".join(IMAGE_TYPES + INDEX_TYPES)

# What GOARCH calls the machines that RHCOS and FCOS run on.
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64", "ppc64le": "ppc64le", "s390x": "s390x", "riscv64": "riscv64"}


def this_architecture() -> str:
    """This machine, as images name it ("amd64")."""
    return _ARCHITECTURES.get(platform.machine(), platform.machine())


@dataclass(frozen=True)
class Child:
    digest: str
    architecture: str
    system: str


@dataclass(frozen=True)
class Manifest:
    """An image (`blobs`: config first, then the layers from the base up) or an index (`children`).

    `description`: what the annotations say of the image; most images say it in their config only.
    """

    digest: str
    blobs: tuple[Blob, ...] = ()
    children: tuple[Child, ...] = ()
    description: Description = Description()

    @property
    def is_index(self) -> bool:
        return not self.blobs

    @property
    def config(self) -> Blob:
        return self.blobs[0]

    @property
    def layers(self) -> tuple[Blob, ...]:
        return self.blobs[1:]

    @property
    def size(self) -> int:
        """Bytes of config and layers; a layer that occurs twice moves once."""
        return sum({blob.digest: blob.size for blob in self.blobs}.values())

    def child_for(self, architecture: str) -> Child:
        """The first child for linux on `architecture`, as containers/image takes it; attestations are for no machine.

        Raises Unavailable(ABSENT).
        """
        for child in self.children:
            if (child.architecture, child.system) == (architecture, "linux"):
                return child
        there = ", ".join(sorted({f"{one.system}/{one.architecture}" for one in self.children})) or "nothing"
        reason = f"the index has no image for linux/{architecture}, only for {printable(there)}"
        raise Unavailable(Verdict.ABSENT, reason, opened=True)


def digest_of(body: bytes, like: str = "sha256:") -> str:
    """The digest of `body`, by the algorithm of the digest `like`."""
    algorithm = like.partition(":")[0]
    return f"{algorithm}:{hashlib.new(algorithm, body).hexdigest()}"


def parse(body: bytes, wanted: str = "") -> Manifest:
    """Read a manifest; with `wanted`, only if it has that digest (field case IMG-23: a registry that rewrites it).

    Raises Unavailable(MALFORMED).
    """
    digest = digest_of(body, wanted or "sha256:")
    if wanted and digest != wanted:
        raise _malformed(f"its manifest has the digest {digest} instead of {wanted}")
    if len(body) > BYTES_LIMIT:
        raise _malformed(f"its manifest is larger than {BYTES_LIMIT} bytes")
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        raise _malformed("its manifest is not JSON") from None
    if not isinstance(document, dict):
        raise _malformed("its manifest is not a JSON object")
    media_type = document.get("mediaType")
    # A document that can be read as both means different things to different readers (CVE-2021-41190).
    is_index = "manifests" in document
    if is_index == ("layers" in document and "config" in document):
        kind = printable(str(media_type or f"schemaVersion {document.get('schemaVersion')}"))
        raise _malformed(f"its manifest is neither an image nor an index of images ({kind})")
    if media_type is not None and media_type not in (INDEX_TYPES if is_index else IMAGE_TYPES):
        raise _malformed(f"its manifest says that it is {printable(str(media_type))}, which cannot be used")
    if is_index:
        return Manifest(digest, children=tuple(_child(one) for one in _list(document, "manifests")))
    blobs = (_blob(document["config"]), *(_blob(one) for one in _list(document, "layers")))
    return Manifest(digest, blobs=blobs, description=from_annotations(document.get("annotations")))


def _list(document: Mapping[str, object], key: str) -> list[object]:
    value = document[key]
    if not isinstance(value, list) or len(value) > BLOBS_LIMIT:
        raise _malformed(f"{key} in its manifest is not a list of at most {BLOBS_LIMIT}")
    return value


def _blob(descriptor: object) -> Blob:
    digest, size, whole = _descriptor(descriptor)
    # Of a layer without compression the type ends in "tar"; the config is counted as it is anyway.
    compressed = not str(whole.get("mediaType", "")).endswith("tar")
    return Blob(digest, size, bool(whole.get("urls")), compressed)


def _child(descriptor: object) -> Child:
    digest, _, whole = _descriptor(descriptor)
    machine = whole.get("platform")
    if not isinstance(machine, dict):
        return Child(digest, "unknown", "unknown")
    return Child(digest, str(machine.get("architecture", "unknown")), str(machine.get("os", "unknown")))


def _descriptor(value: object) -> tuple[str, int, Mapping[str, object]]:
    if not isinstance(value, dict):
        raise _malformed("a descriptor in its manifest is not a JSON object")
    digest, size = value.get("digest"), value.get("size")
    if not isinstance(digest, str) or not is_digest(digest):
        raise _malformed("a descriptor in its manifest has no proper digest")
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        raise _malformed(f"the size of {digest} in its manifest is not a number")
    return digest, size, value


def _malformed(reason: str) -> Unavailable:
    return Unavailable(Verdict.MALFORMED, reason, opened=True)
