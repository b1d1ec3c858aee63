"""dist/vm: what is built, each part in a folder that is named by the hash of all that it was made from.

A part is written under another name and renamed when it is whole, so an interrupted build leaves nothing half made.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Callable

PROJECT = Path(__file__).resolve().parents[2]
FOLDER = PROJECT / "dist/vm"
_KEPT = 2


def key_of(texts: Iterable[str], paths: Iterable[Path]) -> str:
    """The hash of these texts and of the files and folders at `paths`: names, modes, links and contents."""
    total = hashlib.sha256()
    for text in texts:
        total.update(f"{len(text)}:{text}".encode())
    for path in paths:
        found = [path, *sorted(path.rglob("*"))] if path.is_dir() and not path.is_symlink() else [path]
        for one in found:
            if "__pycache__" in one.parts:
                continue
            content = os.readlink(one).encode() if one.is_symlink() else one.read_bytes() if one.is_file() else b""
            name = one.relative_to(PROJECT) if one.is_relative_to(PROJECT) else one
            total.update(f"{name}:{one.lstat().st_mode:o}:{len(content)}:".encode() + content)
    return total.hexdigest()


def part(name: str, key: str, make: Callable[[Path], None]) -> Path:
    """The folder of the part `name` with this key; where it is not there, `make` fills an empty one that becomes it."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    folder = FOLDER / f"{name}-{key[:20]}"
    if not folder.is_dir():
        with _lock(name), tempfile.TemporaryDirectory(dir=FOLDER, prefix=f".{name}-") as scratch:
            if not folder.is_dir():
                made = Path(scratch) / "made"
                made.mkdir()
                make(made)
                made.rename(folder)
                _forget(name, folder)
    return folder


@contextmanager
def _lock(name: str) -> Iterator[None]:
    with open(FOLDER / f".{name}.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _forget(name: str, newest: Path) -> None:
    """Only the latest are kept; whoever goes back to another branch and forth again finds both."""
    others = [path for path in FOLDER.glob(f"{name}-*") if path != newest]
    for path in sorted(others, key=lambda path: path.stat().st_mtime, reverse=True)[_KEPT - 1 :]:
        shutil.rmtree(path)
