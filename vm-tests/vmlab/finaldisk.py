"""Whether a node whose power was cut has come to where it would have come without that. Both are switched off.

    python -m vmlab.finaldisk reference.img disk.img

prints what differs, a line each. All of /etc of the booted deployment, /var, the kernel arguments, the OS, the boot
entries, and what ostree keeps are compared; what a node writes by itself at each boot is left out (`_OWN`). Besides,
ostree fsck and e2fsck must find nothing, mcdaemon must not have an update in flight, and nothing half made may be left.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from mcdaemon.errors import Failure
from mcdaemon.update import journal
from vmlab import blocklog, diskstate, prefixes
from vmlab.bootloader import DiskError, DiskFiles
from vmlab.diskstate import STATE, BootEntry, Story
from vmlab.prefixes import PrefixError

_TIMEOUT = 300.0
_MOST = 20
# Paths that begin like this are written by the node itself at any boot, or say when something was.
_OWN = re.compile(
    r"/etc/(\.updated|ld\.so\.cache|adjtime|\.pwd\.lock)$"
    r"|/var/(log|tmp|cache|spool|\.updated|lib/(systemd|containers|dbus|private|vmlab/service))(/|$)"
    r"|/var/lib/mcdaemon/(journal|counters)\.json$"
)
# Words of a command line that name this very deployment.
_OF_ITS_OWN = re.compile(r"(ostree|mcdaemon\.\w+)=\S+")


def compare(reference: Path, disk: Path) -> list[str]:
    """What keeps a disk from being as good as the other one. Neither is changed. Raises PrefixError."""
    argv = prefixes.apart([sys.executable, "-m", "vmlab.finaldisk", str(reference), str(disk)])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=_TIMEOUT, env=environment,
                              stdin=subprocess.DEVNULL)  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise PrefixError(f"cannot compare {disk}: not done after {_TIMEOUT:.0f} s") from error
    if done.returncode != 0:
        raise PrefixError(f"cannot compare {disk}: {done.stderr.strip()}")
    return done.stdout.splitlines()


def main(reference: str, disk: str) -> int:
    """The program; in a mount namespace of its own."""
    folder = prefixes.scratch(Path(disk))
    try:
        copies = [blocklog.copy(Path(source), folder / name)
                  for source, name in ((reference, "reference.img"), (disk, "disk.img"))]  # fmt: skip
        first, second = map(DiskFiles.open, copies)
        with prefixes.mounted(first, folder / "reference"), prefixes.mounted(second, folder / "disk"):
            found = list(_differences(folder / "reference", folder / "disk"))
            found += prefixes.ostree_fsck(folder / "disk")
        found += prefixes.unsound(second)
    except (PrefixError, DiskError, ValueError, Failure) as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for difference in found[:_MOST]:
        print(difference)
    return 0


def _differences(reference: Path, disk: Path) -> Iterator[str]:
    story = Story.of(reference, disk)
    theirs, ours = diskstate.boot_entries(reference), diskstate.boot_entries(disk)
    yield from diskstate.boot_troubles(disk, ours, story)
    if len(ours) != len(theirs):
        yield f"{len(ours)} boot entries, not {len(theirs)}"
    if not ours:
        return
    if _arguments(ours[0]) != _arguments(theirs[0]):
        yield f"kernel arguments: {_arguments(ours[0])}, not {_arguments(theirs[0])}"
    if story.usr[ours[0].deployment] != story.usr[theirs[0].deployment]:
        yield f"the OS of {ours[0].deployment} is not the one of {theirs[0].deployment}"
    yield from _left_over(disk, story.osname, ours)
    yield from _journal(disk, story.osname, ours[0])
    yield from _trees(_files(reference, story.osname, theirs[0]), _files(disk, story.osname, ours[0]))


def _arguments(entry: BootEntry) -> list[str]:
    return [word for word in entry.options.split() if not _OF_ITS_OWN.fullmatch(word)]


def _left_over(disk: Path, osname: str, entries: list[BootEntry]) -> Iterator[str]:
    known = {entry.deployment for entry in entries}
    yield from (f"{name} is left, and no entry boots it" for name in diskstate.deployments(disk, osname)
                if name not in known)  # fmt: skip
    kernels = {Path(entry.linux).parent.name for entry in entries}
    found = {path.name for path in (disk / "boot/ostree").iterdir() if path.is_dir()}
    yield from (f"/boot/ostree/{name} is left" for name in sorted(found - kernels))
    state = disk / "ostree/deploy" / osname / "var" / STATE
    for shelf in ("payload", "undo"):
        names = [path.name for path in (state / shelf).iterdir()] if (state / shelf).is_dir() else []
        yield from (f"{shelf}/{name} of mcdaemon is left" for name in names)


def _journal(disk: Path, osname: str, entry: BootEntry) -> Iterator[str]:
    record, alien = journal.load(disk / "ostree/deploy" / osname / "var" / STATE / "journal.json")
    if alien:
        yield alien
    elif record.update is not None:
        yield f"an update is in flight: {record.update.name}"
    elif record.failed is not None:
        yield f"a target has failed: {record.failed}"
    elif record.confirmed is None or record.confirmed.deployment != entry.deployment:
        yield f"what boots was not confirmed, but {record.confirmed}"


def _trees(reference: Mapping[str, str], found: Mapping[str, str]) -> Iterator[str]:
    for path in sorted({*reference, *found}):
        if reference.get(path) != found.get(path):
            yield f"{path}: {found.get(path, 'missing')}, not {reference.get(path, 'there')}"


def _files(top: Path, osname: str, entry: BootEntry) -> dict[str, str]:
    """One line for each path of /etc and /var of what boots."""
    places = {
        "/etc": diskstate.deployment_folder(top, osname, entry.deployment) / "etc",
        "/var": top / "ostree/deploy" / osname / "var",
    }
    found = {}
    for name, place in places.items():
        for at, folders, files in os.walk(place):
            for path in (Path(at, one) for one in [*folders, *files]):
                known = f"{name}/{path.relative_to(place)}"
                if not _OWN.match(known):
                    found[known] = _described(path)
    return found


def _described(path: Path) -> str:
    info = path.lstat()
    rights = f"{stat.filemode(info.st_mode)} {info.st_uid}:{info.st_gid}"
    if stat.S_ISLNK(info.st_mode):
        return f"{rights} -> {os.readlink(path)}"
    if stat.S_ISREG(info.st_mode):
        return f"{rights} {hashlib.sha256(path.read_bytes()).hexdigest()[:16]}"
    return rights


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
