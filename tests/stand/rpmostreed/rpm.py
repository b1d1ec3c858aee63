"""RPM packages as far as layering needs them: what a file says about itself, versions, what a request means."""

from __future__ import annotations

import itertools
import platform
import re
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Optional

from tests.stand.rpmostreed.errors import OperationFailed

QUERY_TIMEOUT = 60
_FORMAT = (
    "%{NAME}\t%{EPOCHNUM}\t%{VERSION}\t%{RELEASE}\t%{ARCH}\t[%{PROVIDENAME} ]\t[%{REQUIRENAME} ]\t[%{FILENAMES} ]\n"
)
_SEGMENT = re.compile(r"\d+|[a-zA-Z]+|~|\^")
Nevra = tuple[str, str, int, str, str, str]


@dataclass(frozen=True)
class Package:
    """One package, from a file (``path``), from the pkgcache (``ref``) or of the base (neither)."""

    name: str
    epoch: int
    version: str
    release: str
    arch: str
    provides: tuple[str, ...] = ()
    requires: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    path: str = ""
    repository: str = ""

    @property
    def nevra(self) -> str:
        epoch = f"{self.epoch}:" if self.epoch else ""
        return f"{self.name}-{epoch}{self.version}-{self.release}.{self.arch}"

    @property
    def ref(self) -> str:
        """The pkgcache ref (rpmostree/pkg/NAME/EVR.ARCH, what is not alphanumeric escaped as _XX)."""
        epoch = f"{self.epoch}:" if self.epoch else ""
        return f"rpmostree/pkg/{_escape(self.name)}/{_escape(f'{epoch}{self.version}-{self.release}.{self.arch}')}"

    @property
    def fields(self) -> Nevra:
        """The (sstsss) of deployment dictionaries."""
        return self.nevra, self.name, self.epoch, self.version, self.release, self.arch

    def answers(self, request: str) -> bool:
        """Whether the package is meant by a name, a NEVRA in any of its usual lengths, a provide or a file."""
        version = f"{self.name}-{self.version}"
        release = f"{version}-{self.release}"
        names = (self.name, self.nevra, version, release, f"{self.name}.{self.arch}", f"{release}.{self.arch}")
        return request in names or request in self.provides or (request.startswith("/") and request in self.files)


def query(paths: Sequence[str], repository: str = "") -> list[Package]:
    """Reads RPM files. Raises OperationFailed with rpm's own words."""
    if not paths:
        return []
    done = subprocess.run(
        ["rpm", "-qp", "--nosignature", "--nodigest", "--qf", _FORMAT, *paths],
        capture_output=True,
        text=True,
        timeout=QUERY_TIMEOUT,
    )
    if done.returncode != 0:
        raise OperationFailed(f"Reading packages: {done.stderr.strip()}")
    machine = platform.machine()
    found = []
    for path, line in zip(paths, done.stdout.splitlines()):
        name, epoch, version, release, arch, provides, requires, files = line.split("\t")
        if arch in (machine, "noarch"):
            found.append(
                Package(
                    name,
                    int(epoch),
                    version,
                    release,
                    arch,
                    tuple(provides.split()),
                    tuple(one for one in requires.split() if not one.startswith("rpmlib(")),
                    tuple(files.split()),
                    path,
                    repository,
                )
            )
    return found


def best(packages: Iterable[Package], request: str) -> Optional[Package]:
    """The newest package that answers a request, one of that name preferred."""
    found = [package for package in packages if package.answers(request)]
    named = [package for package in found if package.name == request]
    newest: Optional[Package] = None
    for package in named or found:
        if newest is None or compare(package, newest) > 0:
            newest = package
    return newest


def compare(one: Package, other: Package) -> int:
    """Newer is greater than zero: epoch, version, release as rpm compares them."""
    if one.epoch != other.epoch:
        return 1 if one.epoch > other.epoch else -1
    return compare_versions(one.version, other.version) or compare_versions(one.release, other.release)


def compare_versions(one: str, other: str) -> int:
    """rpmvercmp: segments of digits or letters; ``~`` sorts before the end, ``^`` after it but before anything else."""
    for left, right in itertools.zip_longest(_SEGMENT.findall(one), _SEGMENT.findall(other)):
        if left == right:
            continue
        left_rank, right_rank = _rank(left), _rank(right)
        return 1 if left_rank > right_rank else -1
    return 0


def _rank(segment: Optional[str]) -> tuple[int, int, str]:
    if segment == "~":
        return (0, 0, "")
    if segment is None:
        return (1, 0, "")
    if segment == "^":
        return (2, 0, "")
    return (4, int(segment), "") if segment.isdigit() else (3, 0, segment)


def _escape(text: str) -> str:
    return "".join(
        char if char.isalnum() or char in ".-" else "__" if char == "_" else f"_{ord(char):02X}" for char in text
    )
