"""The agent's archive with byte code in it, for tests that start the agent many times.

The one that is shipped holds sources only, which cost half of each start; what runs is the same.
"""

from __future__ import annotations

import compileall
import functools
import io
import py_compile
import tempfile
import zipfile
from pathlib import Path


@functools.lru_cache(maxsize=2)
def compiled(archive: Path, _changed: int) -> bytes:
    """`archive` with a .pyc beside each .py. Another Python than this one ignores them. `_changed`: its mtime in ns."""
    packed = io.BytesIO()
    with tempfile.TemporaryDirectory(prefix="field-archive-") as folder:
        with zipfile.ZipFile(archive) as source:
            source.extractall(folder)
        compileall.compile_dir(
            folder, quiet=2, legacy=True, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH
        )
        with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as target:
            for path in sorted(Path(folder).rglob("*")):
                if path.is_file():
                    target.write(path, path.relative_to(folder))
    return packed.getvalue()
