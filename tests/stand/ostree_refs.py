"""Container image references as ostree writes them, and the names of the refs under which images are kept.

Rules: ostree-ext ``container/mod.rs`` (grammar), ``refescape.rs`` (escaping), ``container/store.rs`` (ref names).
"""

from __future__ import annotations

import string
from dataclasses import dataclass, replace
from enum import Enum

IMAGE_PREFIX = "ostree/container/image/"
BLOB_PREFIX = "ostree/container/blob/"
_ALNUM = frozenset(string.ascii_letters + string.digits)
_TRANSPORTS = (
    "docker://",
    "registry:",
    "oci:",
    "oci-archive:",
    "docker-archive:",
    "containers-storage:",
    "dir:",
    "docker-daemon:",
)


class Verification(Enum):
    """What an ostree image reference asks to be verified."""

    SIGNED = "ostree-image-signed"
    UNVERIFIED = "ostree-unverified-image"
    REMOTE = "ostree-remote-image"


@dataclass(frozen=True)
class ImageReference:
    """An ostree image reference: verification, transport (as skopeo spells it) and name; ``text`` is the original."""

    text: str
    verification: Verification
    transport: str
    name: str

    @property
    def source(self) -> str:
        """What skopeo is asked to open."""
        return self.transport + self.name

    @property
    def ref(self) -> str:
        """The ref of the merge commit."""
        return IMAGE_PREFIX + escape(self.source)

    @property
    def digest(self) -> str:
        """The digest in the name, or ``""``."""
        _, at, digest = self.name.partition("@")
        return digest if at else ""

    def with_digest(self, digest: str) -> ImageReference:
        """The same repository, by digest (rpm-ostree's ``clone_with_digest``). ValueError where it has no tags."""
        if self.transport not in ("docker://", "containers-storage:"):
            raise ValueError(f"invalid reference format: {self.name}")
        base = self.name.partition("@")[0]
        head, colon, tail = base.rpartition(":")
        if colon and "/" not in tail:
            base = head
        return replace(self, name=f"{base}@{digest}")


def parse(text: str) -> ImageReference:
    """Reads an ostree image reference. Raises ValueError with ostree-ext's own texts."""
    scheme, colon, rest = text.partition(":")
    if not colon:
        raise ValueError(f"Missing ':' in {text}")
    if scheme == "ostree-unverified-registry":
        return ImageReference(text, Verification.UNVERIFIED, "docker://", rest)
    if scheme == "ostree-remote-registry":
        return ImageReference(text, Verification.REMOTE, "docker://", rest.partition(":")[2])
    if scheme == "ostree-remote-image":
        rest = rest.partition(":")[2]
    if scheme not in [kind.value for kind in Verification]:
        raise ValueError(f"Invalid ostree image reference scheme: {scheme}")
    transport, name = _transport(rest)
    return ImageReference(text, Verification(scheme), transport, name)


def _transport(text: str) -> tuple[str, str]:
    for transport in _TRANSPORTS:
        if text.startswith(transport):
            name = text[len(transport) :]
            if not name:
                raise ValueError(f"Invalid empty name in {text}")
            return ("docker://" if transport == "registry:" else transport), name
    if text.startswith("docker:"):
        raise ValueError(f"Missing // in docker:// in {text}")
    raise ValueError(f"Unknown transport '{text.partition(':')[0]}'")


def is_image(text: str) -> bool:
    """Whether rpm-ostree takes a refspec for a container reference: by parsing alone."""
    try:
        parse(text)
    except ValueError:
        return False
    return True


def blob_ref(digest: str) -> str:
    """The ref of an imported layer."""
    return BLOB_PREFIX + escape(digest)


def escape(name: str) -> str:
    """ostree-ext's escaping of arbitrary text to a valid ref name."""
    out = []
    for index, char in enumerate(name):
        after_alnum = index > 0 and name[index - 1] in _ALNUM
        if char in _ALNUM or char == "-" or (char == "/" and after_alnum and index + 1 < len(name)):
            out.append(char)
        elif char == "_":
            out.append("__")
        else:
            out.append(f"_{ord(char):02X}_")
    return "".join(out)


def unescape(ref: str) -> str:
    """The inverse of ``escape``. Raises ValueError on text that ``escape`` cannot have made."""
    out = []
    rest = ref
    while rest:
        char, rest = rest[0], rest[1:]
        if char != "_":
            out.append(char)
            continue
        code, under, rest = rest.partition("_")
        if not under:
            raise ValueError(f"invalid escape in {ref}")
        out.append(chr(int(code, 16)) if code else "_")
    return "".join(out)
