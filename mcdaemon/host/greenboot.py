"""Health scripts in greenboot's layout.

    <folder>/required.d   all of them have to pass
    <folder>/wanted.d     a failure is only told
    <folder>/green.d      run once after a good verdict, <folder>/red.d after a bad one

Executables that lie in the folder itself count as required. Of greenboot's own folders, /etc/greenboot/check and
/usr/lib/greenboot/check, green.d and red.d are beside `check` (greenboot 0.15, usr/libexec/greenboot/greenboot).
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mcdaemon.errors import Broken, Failure
from mcdaemon.host import process
from mcdaemon.textfile import require_trusted

REQUIRED, WANTED, GREEN, RED = "required.d", "wanted.d", "green.d", "red.d"

_ENVIRONMENT = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8", "HOME": "/"}
"""Nothing of the agent's own: a script sees the same on every start."""


@dataclass(frozen=True)
class Scripts:
    """The scripts of some folders. `limit`: seconds that one script may take.

    All methods raise Transient with the code `process.STOPPED` when the agent has to end in the middle.
    """

    folders: Sequence[Path]
    limit: float

    def required(self) -> str:
        """Run the required ones by name, folder by folder; what the first failing one says, "" when all pass."""
        for folder in self.folders:
            for found in (folder, folder / REQUIRED):
                trouble = next(self._failures(found), "")
                if trouble:
                    return trouble
        return ""

    def wanted(self) -> tuple[str, ...]:
        """Run the wanted ones; what each failing one says."""
        return tuple(said for folder in self.folders for said in self._failures(folder / WANTED))

    def verdict(self, kind: str) -> tuple[str, ...]:
        """Run what waits for the verdict (GREEN or RED); what each failing one says."""
        return tuple(
            said
            for folder in self.folders
            for said in self._failures((folder.parent if folder.name == "check" else folder) / kind)
        )

    def present(self) -> bool:
        """Whether there is anything to run before the verdict."""
        kinds = (folder / kind for folder in self.folders for kind in ("", REQUIRED, WANTED))
        try:
            return any(_scripts(folder) for folder in kinds)
        except Failure:
            return True

    def _failures(self, folder: Path) -> Iterator[str]:
        try:
            found = _scripts(folder)
        except Failure as error:
            yield str(error)
            return
        for script in found:
            try:
                _require_trusted(script)
                process.run(
                    _command(script), f"pass the health script {script}", self.limit, Broken, _ENVIRONMENT, merged=True
                )
            except Failure as error:
                if error.code == process.STOPPED:
                    raise  # no verdict: it was not the script that failed
                yield str(error)


def _scripts(folder: Path) -> list[Path]:
    """What is to be run in a folder, by name: executables, and *.sh in any mode, because greenboot runs those too."""
    try:
        names = sorted(path for path in folder.iterdir() if not path.name.startswith(".") and path.is_file())
        return [path for path in names if _executable(path) or path.suffix == ".sh"]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise Broken(f"cannot list the health scripts in {folder}: {error.strerror}") from error


def _executable(path: Path) -> bool:
    return bool(path.stat().st_mode & (stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH))


def _command(script: Path) -> list[str]:
    return [os.fspath(script)] if _executable(script) else ["bash", os.fspath(script)]


def _require_trusted(script: Path) -> None:
    """Raise Broken when others than root could have written the script, what it links to, or the folders of both."""
    target = script.resolve()
    for path in dict.fromkeys((script.parent, script, target.parent, target)):
        require_trusted(os.fspath(path), path.lstat())
