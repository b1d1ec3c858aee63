"""The archive that runs in the machine is the one that is shipped, with byte code beside it."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

from vmlab import bytecode


def _archive(path: Path) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("__main__.py", "import part\n")
        archive.writestr("part.py", "raise SystemExit(__spec__.loader.get_filename('part') and 7)\n")
    return path


def test_the_sources_stay_and_each_has_its_byte_code(tmp_path: Path) -> None:
    archive = _archive(tmp_path / "agent.pyz")
    bytecode.add(archive)
    names = zipfile.ZipFile(archive).namelist()
    assert sorted(names) == ["__main__.py", "__main__.pyc", "part.py", "part.pyc"]


def test_it_runs_and_is_the_same_when_made_again(tmp_path: Path) -> None:
    one, other = _archive(tmp_path / "one.pyz"), _archive(tmp_path / "other.pyz")
    for archive in (one, other):
        bytecode.add(archive)
    assert one.read_bytes() == other.read_bytes()
    assert subprocess.run([sys.executable, "-I", str(one)], timeout=30, check=False).returncode == 7
