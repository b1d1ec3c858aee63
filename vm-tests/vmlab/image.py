"""Builds the machine's disk from Debian's packages, the stand and mcdaemon: `python -m vmlab.image`, `make vm-image`.

Three parts, each kept under the hash of what it was made from: the packages (rootfs), the OS image (os), the disk.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from vmlab import disk, osimage, store
from vmlab.programs import CannotBuild

ARCHIVE = store.PROJECT / "dist/mcdaemon.pyz"
_HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Built:
    """A disk to copy and boot. `oci`: the OCI layout of its OS, with `digest`; `commit`: what ostree made of that.

    The layers of the image are in the disk's repository already: only what comes on top of them is ever fetched.
    """

    disk: Path
    oci: Path
    digest: str
    commit: str
    key: str


def key() -> str:
    """The hash of all inputs of the disk. Raises CannotBuild when the zipapp is not there."""
    if not ARCHIVE.is_file():
        raise CannotBuild(f"cannot build a disk without {ARCHIVE}: run `make zipapp`")
    sources = [_HERE / "disk.py", _HERE / "bytecode.py"]
    project = [store.PROJECT / "systemd", store.PROJECT / "Makefile"]
    return store.key_of([osimage.key()], [ARCHIVE, *sources, *project])


def build() -> Built:
    """The disk for the sources as they are now; what is there is not built again. Raises CannotBuild."""
    found = key()
    folder = disk.build(ARCHIVE, found)
    parts = osimage.load(osimage.build())
    commit = (folder / "commit").read_text().strip()
    return Built(folder / "disk.raw", parts.layout, parts.digest, commit, found)


def build_anew(folder: Path) -> str:
    """Everything once more from nothing, below `folder`; returns the commit. Raises CannotBuild."""
    kept, store.FOLDER = store.FOLDER, folder
    try:
        return build().commit
    finally:
        store.FOLDER = kept


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="Build the disk of the virtual machines.")
    parser.add_argument("--check-reproducible", action="store_true", help="build all of it again, and compare")
    options = parser.parse_args()
    begun = time.monotonic()
    try:
        built = build()
        seconds = time.monotonic() - begun
        size = built.disk.stat().st_blocks * 512 / 1e6
        print(f"disk: {built.disk}\nkey: {built.key}\ncontent: {built.commit} (ostree commit)\nimage: {built.digest}")
        print(f"{size:.0f} MB on disk, built or found in {seconds:.1f} s")
        if options.check_reproducible:
            with tempfile.TemporaryDirectory(dir=store.FOLDER, prefix=".again-") as folder:
                again = build_anew(Path(folder))
            print(f"again: {again} ({'the same' if again == built.commit else 'another'})")
            return int(again != built.commit)
    except CannotBuild as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
