"""Build mcdaemon.pyz: the agent and its pure-Python dependencies in one file that /usr/bin/python3 runs.

    build.py --wheels FOLDER --output FILE

FOLDER holds the wheels of requirements.txt (`make zipapp` fetches them); each is checked against its hash again. The
same inputs give the same bytes: entries are sorted, have one time stamp and one mode, and nothing is compiled. Byte
code would save 0.15 s of a start, but only on the one Python version that built it, and would triple the size.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

_HERE = Path(__file__).resolve().parent
_ROOT = _HERE.parent

# -I: no PYTHON* variable, user site or working directory decides what root imports. -B: no byte code into the image.
_SHEBANG = b"#!/usr/bin/python3 -IB\n"
_TIME = (1980, 1, 1, 0, 0, 0)
_MODE = 0o100644 << 16
_PIN = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)==\S+ --hash=sha256:(?P<sha256>[0-9a-f]{64})$")
_LICENCE = re.compile(r"(^|/)(LICEN[CS]E|COPYING|NOTICE|AUTHORS)[^/]*$", re.IGNORECASE)


def pins(requirements: Path) -> dict[str, str]:
    """Map the hash of each pinned wheel to its project. Exits with the line that is not a pin."""
    found: dict[str, str] = {}
    for number, line in enumerate(requirements.read_text("utf-8").splitlines(), 1):
        if not line or line.startswith("#"):
            continue
        pin = _PIN.match(line)
        if pin is None:
            sys.exit(f"cannot read {requirements}:{number}: expected NAME==VERSION --hash=sha256:HEX")
        found[pin["sha256"]] = pin["name"]
    return found


def chosen(wheels: Path, wanted: dict[str, str]) -> list[Path]:
    """The wheel of every pin, told by its bytes, not by its name. Exits naming the pins that have none."""
    by_hash = {hashlib.sha256(path.read_bytes()).hexdigest(): path for path in wheels.glob("*.whl")}
    missing = sorted(name for sha256, name in wanted.items() if sha256 not in by_hash)
    if missing:
        names = ", ".join(missing)
        sys.exit(f"cannot find the pinned wheels of {names} in {wheels} (remove it and run `make zipapp` again)")
    return [by_hash[sha256] for sha256 in wanted]


def carried(name: str) -> bool:
    """Whether the member `name` of a wheel goes into the archive: its Python sources and its licence."""
    if ".dist-info/" in name:
        return _LICENCE.search(name) is not None
    # `_yaml` only imports the compiled half of PyYAML under its old name.
    return name.endswith(".py") and not name.startswith("_yaml/")


def members(wheels: Path) -> Iterator[tuple[str, bytes]]:
    """Every entry of the archive, as (name, content)."""
    for path in chosen(wheels, pins(_HERE / "requirements.txt")):
        with zipfile.ZipFile(path) as wheel:
            yield from ((name, wheel.read(name)) for name in wheel.namelist() if carried(name))
    for path in (_ROOT / "mcdaemon").rglob("*.py"):
        yield str(path.relative_to(_ROOT)), path.read_bytes()
    for name in ("__main__.py", "certifi/__init__.py"):
        yield name, (_HERE / name).read_bytes()


def build(wheels: Path, output: Path) -> None:
    """Write the archive at `output`, replacing it only when it is complete."""
    output.parent.mkdir(parents=True, exist_ok=True)
    draft = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        with open(draft, "wb") as file:
            file.write(_SHEBANG)
            with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
                for name, content in sorted(members(wheels)):
                    entry = zipfile.ZipInfo(name, _TIME)
                    entry.external_attr = _MODE
                    entry.compress_type = zipfile.ZIP_DEFLATED
                    archive.writestr(entry, content)
        os.chmod(draft, 0o755)
        os.replace(draft, output)
    finally:
        draft.unlink(missing_ok=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Build mcdaemon.pyz.")
    parser.add_argument("--wheels", type=Path, required=True, help="the folder with the pinned wheels")
    parser.add_argument("--output", type=Path, required=True, help="the archive to write")
    arguments = parser.parse_args()
    build(arguments.wheels, arguments.output)
    print(f"{arguments.output}: {arguments.output.stat().st_size} bytes")


if __name__ == "__main__":
    main()
