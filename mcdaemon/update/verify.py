"""Is a root what it should be? Asked of a pending deployment before the reboot, of "/" after it, and of drift.

Everything of a node is compared: type, content by hash, mode with setuid, setgid and sticky, owner, link target,
absence (field cases FILE-19, FILE-20, UNIT-15; the MCD compares content and mode of files only). Nothing is changed.
A report names paths, hashes and numbers, never content: files can be secret (FILE-25).
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Union

from mcdaemon.errors import Failure
from mcdaemon.host.files import Kind, Node, read_nodes
from mcdaemon.host.root import Root
from mcdaemon.host.users import has_password_hash

_SHORT = 12
_SHADOW = "/etc/shadow"


class Aspect(enum.Enum):
    """What of a path is not as expected."""

    CONTENT = "content"
    MODE = "mode"
    OWNER = "owner"
    TYPE = "type"
    TARGET = "target"
    MISSING = "missing"
    UNEXPECTED = "unexpected"


@dataclass(frozen=True)
class Expected:
    """What a path should be, and why ("file of the config", "enablement of kubelet.service"), for the report."""

    node: Node
    reason: str = ""


@dataclass(frozen=True)
class Mismatch:
    """One aspect of one path. `expected` and `found` are for people: hashes are shortened, content is never in them."""

    path: str
    aspect: Aspect
    expected: str
    found: str
    reason: str = ""

    def __str__(self) -> str:
        why = f" [{self.reason}]" if self.reason else ""
        if self.aspect is Aspect.MISSING:
            return _printable(f"{self.path}: missing, expected {self.expected}{why}")
        return _printable(f"{self.path}: {self.aspect.value}: expected {self.expected}, found {self.found}{why}")


@dataclass(frozen=True)
class Report:
    """The outcome of a validation. Mismatches are in the order of paths."""

    checked: int
    mismatches: tuple[Mismatch, ...] = ()

    @property
    def ok(self) -> bool:
        """True where everything is as expected."""
        return not self.mismatches

    def text(self, most: int = 20) -> str:
        """The report for people, one line per mismatch; of more than `most` it says how many are left out."""
        if self.ok:
            return f"all {self.checked} paths are as expected"
        paths = len({mismatch.path for mismatch in self.mismatches})
        lines = [f"{paths} of {self.checked} paths are not as expected:"]
        lines += [f"  {mismatch}" for mismatch in self.mismatches[:most]]
        if len(self.mismatches) > most:
            lines.append(f"  and {len(self.mismatches) - most} more")
        return "\n".join(lines)


def validate(root: Root, expected: Mapping[str, Expected], passwords: Iterable[tuple[str, str]] = ()) -> Report:
    """Compare paths of a root with what they should be, and users' password hashes in its /etc/shadow.

    Memory does not grow with the size of files. Never raises for a path that cannot be read: that is a mismatch, with
    the reason as what was found.
    """
    mismatches: list[Mismatch] = []
    for path, found in read_nodes(root, expected):
        mismatches += _compare(path, expected[path], found)
    for user, secret in passwords:
        mismatches += _compare_password(root, user, secret)
    return Report(len(expected), tuple(sorted(mismatches, key=lambda mismatch: mismatch.path)))


def _compare(path: str, expected: Expected, found: Union[Node, Failure]) -> Iterator[Mismatch]:
    want, reason = expected.node, expected.reason
    if isinstance(found, Failure):
        yield Mismatch(path, Aspect.TYPE, want.kind.value, str(found), reason)
    elif want.kind is Kind.ABSENT:
        if found.kind is not Kind.ABSENT:
            yield Mismatch(path, Aspect.UNEXPECTED, "nothing", _describe(found), reason)
    elif found.kind is Kind.ABSENT:
        yield Mismatch(path, Aspect.MISSING, _describe(want), "nothing", reason)
    elif want.kind is not found.kind:
        yield Mismatch(path, Aspect.TYPE, _describe(want), _describe(found), reason)
    else:
        yield from _compare_attributes(path, want, found, reason)


def _compare_password(root: Root, user: str, secret: str) -> Iterator[Mismatch]:
    wanted = f"the password of {user} that the config has"
    try:
        if not has_password_hash(root, user, secret):
            yield Mismatch(_SHADOW, Aspect.CONTENT, wanted, "another one, or none")
    except Failure as failure:
        yield Mismatch(_SHADOW, Aspect.CONTENT, wanted, str(failure))


def _compare_attributes(path: str, want: Node, found: Node, reason: str) -> Iterator[Mismatch]:
    if want.sha256 != found.sha256:
        yield Mismatch(path, Aspect.CONTENT, _hash(want), _hash(found), reason)
    if want.target != found.target:
        yield Mismatch(path, Aspect.TARGET, want.target, found.target, reason)
    if want.mode != found.mode:
        yield Mismatch(path, Aspect.MODE, f"{want.mode:04o}", f"{found.mode:04o}", reason)
    if (want.uid, want.gid) != (found.uid, found.gid):
        yield Mismatch(path, Aspect.OWNER, f"{want.uid}:{want.gid}", f"{found.uid}:{found.gid}", reason)


def _describe(node: Node) -> str:
    if node.kind is Kind.LINK:
        return f"link to {node.target}"
    if node.kind is Kind.FILE:
        return f"file {node.mode:04o} with {_hash(node)}"
    return str(node.kind.value)


def _hash(node: Node) -> str:
    return f"sha256 {node.sha256[:_SHORT]}"


def _printable(text: str) -> str:
    # A link target on disk can hold anything; it must not forge a line of the log or break the terminal.
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)
