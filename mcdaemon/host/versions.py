"""The versions of the programs of the host that an update goes through, and what each version can do.

What a version does differently and can be seen is looked at and not concluded from a number: both places where a lock
can be (rpm-ostree.md 3.3, profiles A and B), who is asked for an image (profile C), the address of a transaction as it
is given (2.2, profile D), digests instead of messages (7, row 14). So a distribution's own patches deceive nobody. A
number decides only where there is nothing to look at before it is too late. A version that nobody tells takes the
careful path: it can do nothing.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from mcdaemon.errors import Broken, Failure
from mcdaemon.host import files, process

Version = tuple[int, ...]
"""Numbers, the most significant first; () where the program is not there or does not tell."""

_TIMEOUT = 30.0
_PROGRAMS = {"rpm_ostree": "rpm-ostree", "ostree": "ostree", "podman": "podman", "skopeo": "skopeo"}
_NUMBERS = re.compile(r"(?:Version: *'?|version +)(\d+(?:\.\d+)+)", re.IGNORECASE)


@dataclass(frozen=True)
class Versions:
    """Versions of one booted deployment."""

    rpm_ostree: Version = ()
    ostree: Version = ()
    podman: Version = ()
    skopeo: Version = ()

    @property
    def prunes_boot_early(self) -> bool:
        """libostree drops what it is going to drop before it copies the new kernel, when /boot is short of space.

        Default since pull request ostreedev/ostree#3012; rpm-ostree.md 5.6.
        """
        return self.ostree >= (2023, 8)

    @property
    def skips_special_files(self) -> bool:
        """The /etc merge leaves FIFOs and sockets out, instead of failing (ostree pull request 3143; TXN-45)."""
        return self.ostree >= (2024, 2)

    @property
    def has_false_no_ops(self) -> bool:
        """Known to report success and to stage nothing in some requests with packages (row 14, TXN-26, TXN-27)."""
        return (2025, 12) <= self.rpm_ostree[:2] < (2026, 2)

    @property
    def local_copies(self) -> bool:
        """Images of containers-storage can be used: skopeo reads them, podman holds them. Without: the registry."""
        return bool(self.podman and self.skopeo)

    def texts(self) -> dict[str, str]:
        """For people, by the name of the program; "" where it is not known."""
        return {_PROGRAMS[key]: ".".join(map(str, value)) for key, value in dataclasses.asdict(self).items()}


def parse(said: str) -> Version:
    """The version in what a program prints for `--version`, () when there is none."""
    found = _NUMBERS.search(said)
    return tuple(int(number) for number in found[1].split(".")) if found else ()


class Probe:
    """Asks each program once in a boot, and again when another file stands in its place (`rpm-ostree apply-live`)."""

    def __init__(self, runtime: Path) -> None:
        """`runtime`: a directory below /run, where the answers are kept for the next process."""
        self._path = runtime / "versions.json"
        self._known: Optional[tuple[dict[str, str], Versions]] = None

    def versions(self, booted: str) -> Versions:
        """The versions on this node; `booted` is the deployment that they belong to."""
        key = {"booted": booted, **{name: _identity(program) for name, program in _PROGRAMS.items()}}
        if self._known is not None and self._known[0] == key:
            return self._known[1]
        found = self._kept(key)
        if found is None:
            found = Versions(**{name: _ask(program) for name, program in _PROGRAMS.items()})
            document = {"key": key, "versions": dataclasses.asdict(found)}
            if self._path.parent.is_dir():
                files.write_atomic(self._path, json.dumps(document).encode())
        self._known = (key, found)
        return found

    def _kept(self, key: dict[str, str]) -> Optional[Versions]:
        try:
            document = json.loads(self._path.read_bytes())
            if document["key"] != key:
                return None
            return Versions(**{name: tuple(map(int, value)) for name, value in document["versions"].items()})
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None  # it is asked for again


def _identity(program: str) -> str:
    path = shutil.which(program)
    if path is None:
        return ""
    try:
        found = os.stat(path)
    except OSError:
        return path
    return f"{path}:{found.st_dev}:{found.st_ino}:{found.st_size}:{found.st_mtime_ns}"


def _ask(program: str) -> Version:
    """A program that is not there, hangs or fails has no version; an update may well do without it."""
    if shutil.which(program) is None:
        return ()
    try:
        return parse(process.run([program, "--version"], f"ask for the version of {program}", _TIMEOUT, Broken))
    except Failure as error:
        if error.code == process.STOPPED:
            raise
        return ()
