"""Names of images: the grammar of distribution/reference, and ostree's "scheme:transport:name" around it.

Source: github.com/distribution/reference (grammar, normalisation), ostree-ext's container module (rpm-ostree.md 4.1).
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from typing import NoReturn, Optional

from mcdaemon.errors import Irreconcilable

DEFAULT_HOST = "docker.io"
DEFAULT_TAG = "latest"
NAME_LIMIT = 255

_LABEL = r"[a-zA-Z0-9](?:[a-zA-Z0-9-]*[a-zA-Z0-9])?"
_HOST = re.compile(rf"(?:{_LABEL}(?:\.{_LABEL})*|\[[0-9a-fA-F:]+\])(?::[0-9]+)?")
_COMPONENT = re.compile(r"[a-z0-9]+(?:(?:__|[._]|-+)[a-z0-9]+)*")
_TAG = re.compile(r"[a-zA-Z0-9_][a-zA-Z0-9_.-]{0,127}")
_ALGORITHM = re.compile(r"sha(?:256|384|512):")
_HEX = re.compile(r"[0-9a-f]+")
_HEX_LENGTHS = {"sha256:": 64, "sha384:": 96, "sha512:": 128}
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}|sha384:[0-9a-f]{96}|sha512:[0-9a-f]{128}")
_FOREIGN_PREFIX = re.compile(r"[a-z][a-z-]*:(?://)?(?=.*[:/])")


def is_digest(text: str) -> bool:
    """True for "sha256:" with 64 hex digits (and sha384, sha512 likewise)."""
    return _DIGEST.fullmatch(text) is not None


@dataclass(frozen=True)
class Reference:
    """An image in a repository: by tag, by digest, or (as written) by both. Always normalised: it has a host and a
    tag or a digest, as containers/image would fill them in.
    """

    host: str
    path: str
    tag: str = ""
    digest: str = ""

    @classmethod
    def parse(cls, text: str, field: str = "") -> Reference:
        """Read "[HOST[:PORT]/]PATH[:TAG][@DIGEST]". Raises Irreconcilable that points at the character; `field` is the
        JSON pointer of where the text stood."""
        scanner = _Scanner(text, field)
        if not text:
            scanner.refuse(0, "it is empty")
        name, at, digest = text.partition("@")
        if at:
            scanner.check_digest(digest, len(name) + 1)
        colon = name.find(":", name.rfind("/") + 1)
        name, tag = (name[:colon], name[colon + 1 :]) if colon >= 0 else (name, "")
        if colon >= 0:
            scanner.check(_TAG, tag, colon + 1, "in a tag")
        host, path, start = _split_host(name)
        if start:
            scanner.check(_HOST, host, 0, "in a host name")
        scanner.check_path(path[len("library/") :] if not start and "/" not in name else path, start)
        if len(host) + 1 + len(path) > NAME_LIMIT:
            scanner.refuse(min(NAME_LIMIT, len(text) - 1), f"the name is longer than {NAME_LIMIT} characters")
        return cls(host, path, tag if tag or digest else DEFAULT_TAG, digest)

    @property
    def repository(self) -> str:
        """HOST/PATH without tag and digest."""
        return f"{self.host}/{self.path}"

    def pinned(self, digest: str) -> Reference:
        """The same repository by `digest`. The tag goes: containers/image takes no name with both (rpm-ostree.md
        4.2).
        """
        return Reference(self.host, self.path, "", digest)

    def same_image(self, other: Reference) -> bool:
        """True where both name one image: the same repository, and the same digest or, where neither has one, tag.

        Field case IMG-55: host names differ in case, ":443" is what https means anyway, and a digest beats a tag.
        """
        mine = (_plain_host(self.host), self.path, self.digest or self.tag)
        return mine == (_plain_host(other.host), other.path, other.digest or other.tag)

    def __str__(self) -> str:
        return self.repository + (f":{self.tag}" if self.tag else "") + (f"@{self.digest}" if self.digest else "")


class Scheme(enum.Enum):
    """How ostree verifies what it pulls."""

    SIGNED = "ostree-image-signed"
    UNVERIFIED = "ostree-unverified-image"
    REMOTE = "ostree-remote-image"


class Transport(enum.Enum):
    """Where containers/image reads from; the values are ostree's words for them."""

    REGISTRY = "registry"
    STORAGE = "containers-storage"
    OCI = "oci"
    OCI_ARCHIVE = "oci-archive"
    DOCKER_ARCHIVE = "docker-archive"
    DIR = "dir"
    DOCKER_DAEMON = "docker-daemon"


_SHORTHANDS = {"ostree-unverified-registry": Scheme.UNVERIFIED, "ostree-remote-registry": Scheme.REMOTE}
_NAMED = frozenset({Transport.REGISTRY, Transport.STORAGE})


@dataclass(frozen=True)
class OstreeReference:
    """What an origin says. Equal objects are spellings of one thing ("registry:" is "docker://"); rpm-ostree compares
    the strings, so keep the string too where it is compared by rpm-ostree.
    """

    scheme: Scheme
    transport: Transport
    name: str
    remote: str = ""

    @classmethod
    def parse(cls, text: str, field: str = "") -> OstreeReference:
        """Read the forms of rpm-ostree.md 4.1. Raises Irreconcilable."""
        word, _, rest = text.partition(":")
        scheme = _SHORTHANDS.get(word) or next((one for one in Scheme if one.value == word), None)
        if scheme is None:
            _refuse(text, field, f'"{word}" is no scheme; one is {", ".join(one.value for one in Scheme)}')
        remote = ""
        if scheme is Scheme.REMOTE:
            remote, _, rest = rest.partition(":")
            if not remote:
                _refuse(text, field, "it names no ostree remote")
        if word in _SHORTHANDS:
            transport, name = Transport.REGISTRY, rest
        else:
            transport, name = _split_transport(rest, text, field)
        if not name:
            _refuse(text, field, "it names no image")
        return cls(scheme, transport, name, remote)

    @classmethod
    def unverified(cls, transport: Transport, reference: Reference) -> OstreeReference:
        """What mcdaemon stages from: policy.json as it is, no more and no less, decides about signatures."""
        return cls(Scheme.UNVERIFIED, transport, str(reference))

    @property
    def reference(self) -> Optional[Reference]:
        """The image's name, where the transport has such names (a registry, containers-storage) and it is one: images
        in containers-storage may also be named by ID.
        """
        if self.transport not in _NAMED:
            return None
        try:
            return Reference.parse(self.name.rpartition("]")[2] if self.name.startswith("[overlay@") else self.name)
        except Irreconcilable:
            return None

    def same_image(self, other: OstreeReference) -> bool:
        """True where both lead to the same content: the same name by digest through any transport, or, by tag, through
        the same transport (a tag in containers-storage may be an old one)."""
        mine, theirs = self.reference, other.reference
        if mine is None or theirs is None:
            return (self.transport, self.name) == (other.transport, other.name)
        if not mine.same_image(theirs):
            return False
        return bool(mine.digest) or self.transport is other.transport

    def __str__(self) -> str:
        if self.transport is Transport.REGISTRY and self.scheme is Scheme.UNVERIFIED:
            return f"ostree-unverified-registry:{self.name}"
        if self.transport is Transport.REGISTRY and self.scheme is Scheme.REMOTE:
            return f"ostree-remote-registry:{self.remote}:{self.name}"
        remote = f"{self.remote}:" if self.scheme is Scheme.REMOTE else ""
        return f"{self.scheme.value}:{remote}{self.transport.value}:{self.name}"


@dataclass(frozen=True)
class _Scanner:
    """Checks the parts of one text and refuses it with the place of the first wrong character."""

    text: str
    field: str

    def check(self, pattern: re.Pattern[str], part: str, start: int, where: str) -> None:
        found = pattern.match(part)
        end = found.end() if found else 0
        if not part or end < len(part):
            self.refuse(start + end, f"{_character(self.text, start + end)} cannot stand there {where}")

    def check_path(self, path: str, start: int) -> None:
        for component in path.split("/"):
            self.check(_COMPONENT, component, start, "in a repository name")
            start += len(component) + 1

    def check_digest(self, digest: str, start: int) -> None:
        algorithm = _ALGORITHM.match(digest)
        if algorithm is None:
            self.refuse(start, "a digest begins with sha256:, sha384: or sha512:")
        digits = digest[algorithm.end() :]
        start += algorithm.end()
        self.check(_HEX, digits, start, "in a digest (lower-case hex)")
        wanted = _HEX_LENGTHS[algorithm.group()]
        if len(digits) != wanted:
            self.refuse(start + min(len(digits), wanted), f"the digest has {len(digits)} hex digits, not {wanted}")

    def refuse(self, index: int, why: str) -> NoReturn:
        hint = ""
        prefix = _FOREIGN_PREFIX.match(self.text)
        if prefix and "//" in self.text:
            hint = f"leave {prefix.group()} out: only a registry's name is expected"
        raise Irreconcilable(
            f'cannot read the image reference "{_shown(self.text)}" at character {index + 1}: {why}', self.field, hint
        )


def _split_host(name: str) -> tuple[str, str, int]:
    """(host, path, where the path starts in the text): the first component is a host if it looks like one."""
    first, slash, rest = name.partition("/")
    if slash and (any(c in first for c in ".:[") or first == "localhost" or first != first.lower()):
        return (DEFAULT_HOST if first == "index.docker.io" else first), rest, len(first) + 1
    return DEFAULT_HOST, name if slash else f"library/{name}", 0


def _split_transport(rest: str, text: str, field: str) -> tuple[Transport, str]:
    word, _, name = rest.partition(":")
    if word == "docker":
        if not name.startswith("//"):
            _refuse(text, field, "docker: needs two slashes, docker://")
        return Transport.REGISTRY, name[2:]
    transport = next((one for one in Transport if one.value == word), None)
    if transport is None:
        _refuse(text, field, f'"{_shown(word)}" is no transport')
    return transport, name


def _refuse(text: str, field: str, why: str) -> NoReturn:
    raise Irreconcilable(f'cannot read the ostree image reference "{_shown(text)}": {why}', field)


def _character(text: str, index: int) -> str:
    return "the end" if index >= len(text) else ascii(text[index])


def _shown(text: str) -> str:
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text[: NAME_LIMIT + 100])


def _plain_host(host: str) -> str:
    lower = host.lower()
    return lower[: -len(":443")] if lower.endswith(":443") else lower
