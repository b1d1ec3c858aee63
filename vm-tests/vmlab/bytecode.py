"""Adds byte code to a zipapp; run by the machine's own Python, as `bytecode.py ARCHIVE`.

The one that is shipped holds sources only: compiling them takes half a minute at each start under emulation.
"""

from __future__ import annotations

import compileall
import py_compile
import sys
import tempfile
import zipfile
from pathlib import Path

_TIME = (2024, 1, 1, 0, 0, 0)


def add(archive: Path, shown_as: str = "/usr/local/lib/mcdaemon/mcdaemon.pyz") -> None:
    """Put a .pyc beside each .py of `archive`; tracebacks name the files below `shown_as`."""
    with tempfile.TemporaryDirectory(prefix="bytecode-") as folder:
        with zipfile.ZipFile(archive) as source:
            source.extractall(folder)
        compileall.compile_dir(
            folder, quiet=2, legacy=True, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
            stripdir=folder, prependdir=shown_as,
        )  # fmt: skip
        with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as target:
            for path in sorted(Path(folder).rglob("*")):
                if path.is_file():
                    entry = zipfile.ZipInfo(str(path.relative_to(folder)), _TIME)
                    entry.compress_type = zipfile.ZIP_DEFLATED
                    target.writestr(entry, path.read_bytes())


if __name__ == "__main__":
    add(Path(sys.argv[1]))
