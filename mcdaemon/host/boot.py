"""What the machine booted and will boot: boot id, command line, boot loader entries, traces of failed finalizations."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from mcdaemon.errors import Broken, from_os_error

FINALIZE_FAILURE = "ostree/finalize-failure.stamp"
"""Below /boot; libostree leaves the text of a failed finalization there (rpm-ostree.md 5.2)."""

_ENTRY = re.compile(r"ostree-(?P<number>\d+)(?:-[^+]+)?(?:\+[\d-]+)?\.conf$")
_OSTREE = re.compile(r"/ostree/boot\.[01]/(?P<osname>[^/]+)/(?P<bootcsum>[0-9a-f]{64})/(?P<serial>\d+)$")


@dataclass(frozen=True)
class Entry:
    """A boot loader entry of an ostree deployment.

    :ivar number: the higher, the earlier it is tried; the highest is the default.
    :ivar options: the kernel command line as written.
    :ivar deployment: name (checksum.serial) of the deployment that it enters, "" when its link leads nowhere.
    """

    number: int
    options: str
    osname: str
    deployment: str


def _read(path: Path) -> str:
    try:
        # A torn entry (FAT, power cut) must not end the agent: what cannot be read is not what is looked for.
        return path.read_text(errors="replace")
    except OSError as error:
        raise from_os_error(error, "read", path) from error


def boot_id(proc: Path = Path("/proc")) -> str:
    """The kernel's random id of this boot."""
    return _read(proc / "sys/kernel/random/boot_id").strip()


def command_line(proc: Path = Path("/proc")) -> str:
    """The kernel arguments that this boot runs with."""
    return _read(proc / "cmdline").strip()


def ostree_argument(options: str) -> Optional[str]:
    """The value of `ostree=` on a command line; the last one counts, as it does for ostree-prepare-root."""
    found = [word[len("ostree=") :] for word in options.split() if word.startswith("ostree=")]
    return found[-1] if found else None


def deployment_of(options: str, sysroot: Path = Path("/sysroot")) -> tuple[str, str]:
    """(osname, deployment name) that a command line boots into. Raises Broken when it names none."""
    argument = ostree_argument(options)
    match = _OSTREE.match(argument or "")
    if not match:
        raise Broken(
            f"cannot tell which deployment is booted: the kernel command line has ostree={argument!r}",
            "is this an ostree machine?",
        )
    link = sysroot / (argument or "").lstrip("/")
    try:
        link.stat()  # pathlib raises something else for links in a circle
        return match["osname"], link.resolve().name
    except OSError as error:
        raise from_os_error(error, "follow the boot link", link) from error


def entries(boot: Path = Path("/boot"), sysroot: Path = Path("/sysroot")) -> tuple[Entry, ...]:
    """The ostree entries of the boot loader, the default first."""
    folder = boot / "loader/entries"
    try:
        names = sorted(path.name for path in folder.iterdir())
    except OSError as error:
        raise from_os_error(error, "list the boot entries in", folder) from error
    found = []
    for name in names:
        named = _ENTRY.match(name)
        if not named:
            continue
        pairs = (line.split(None, 1) for line in _read(folder / name).splitlines())
        fields = dict(pair for pair in pairs if len(pair) == 2)
        options = fields.get("options", "")
        match = _OSTREE.match(ostree_argument(options) or "")
        if not match:
            continue
        link = sysroot / (ostree_argument(options) or "").lstrip("/")
        target = link.resolve().name if link.exists() else ""
        # `version` is the order that libostree wrote, whatever the file's name looks like (rpm-ostree.md 5.6).
        version = fields.get("version", "").strip()
        number = int(version) if version.isascii() and version.isdigit() else int(named["number"])
        found.append(Entry(number, options, match["osname"], target))
    return tuple(sorted(found, key=lambda entry: -entry.number))


def finalize_failure(boot: Path = Path("/boot")) -> str:
    """The text that a failed finalization left behind, "" when there is none."""
    try:
        return (boot / FINALIZE_FAILURE).read_text(errors="replace").strip()
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise from_os_error(error, "read", boot / FINALIZE_FAILURE) from error
