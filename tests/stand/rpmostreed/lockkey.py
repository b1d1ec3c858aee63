"""The finalization lock of both kinds, and a program that honours the newer one on libostree 2022.7.

Since 2024.6 rpm-ostree locks a staged deployment by the key ``locked`` in /run/ostree/staged-deployment, which needs a
libostree that knows it. The one of this machine does not: it would finalize. So with profile B the node's
``ostree-finalize-staged.service`` runs ``lockkey finalize-staged``, which says what a newer libostree says and does
nothing while the key is there. ``lockkey unlock`` is ``ostree admin lock-finalization --unlock``, which 2022.7 lacks.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any, Optional

from tests.stand.introspection import GLib
from tests.stand.rpmostreed.options import entries

STAGED_FILE = Path("/run/ostree/staged-deployment")
LEGACY_FILE = Path("/run/ostree/staged-deployment-locked")


def locked(staged: Path = STAGED_FILE, legacy: Path = LEGACY_FILE) -> bool:
    """Whether a deployment is staged and locked in either way."""
    return staged.exists() and (legacy.exists() or _key(staged))


def lock(by_key: bool) -> None:
    """Locks what is staged: by the key, or by the flag file."""
    if by_key:
        _write_key(True)
    else:
        LEGACY_FILE.parent.mkdir(parents=True, exist_ok=True)
        LEGACY_FILE.touch(mode=0o640)


def unlock() -> None:
    """Removes both kinds of lock."""
    LEGACY_FILE.unlink(missing_ok=True)
    if STAGED_FILE.exists() and _key(STAGED_FILE):
        _write_key(False)


def _key(staged: Path) -> bool:
    return bool(_read(staged).unpack().get("locked", False))


def _read(staged: Path) -> Any:
    return GLib.Variant.new_from_bytes(GLib.VariantType("a{sv}"), GLib.Bytes.new(staged.read_bytes()), False)


def _write_key(value: bool) -> None:
    values = entries(_read(STAGED_FILE))
    values["locked"] = GLib.Variant("b", value)
    temporary = STAGED_FILE.with_name(STAGED_FILE.name + ".new")
    temporary.write_bytes(GLib.Variant("a{sv}", values).get_data_as_bytes().get_data())
    temporary.replace(STAGED_FILE)


def main(arguments: Optional[list[str]] = None) -> int:
    """The command line, see the module's text."""
    parser = argparse.ArgumentParser(description="The finalization lock of a staged deployment.")
    parser.add_argument("command", choices=["status", "lock", "unlock", "finalize-staged"])
    command = parser.parse_args(arguments).command
    if command == "status":
        print("locked" if locked() else "unlocked")
    elif command == "finalize-staged":
        if locked():
            print("Not finalizing; deployment is locked for finalization", file=sys.stderr)
            return 0
        os.execvp("ostree", ["ostree", "admin", "finalize-staged"])
    elif not STAGED_FILE.exists():
        print("error: No staged deployment", file=sys.stderr)
        return 1
    elif command == "lock":
        lock(by_key=True)
        lock(by_key=False)
    else:
        unlock()
    return 0


if __name__ == "__main__":
    sys.exit(main())
