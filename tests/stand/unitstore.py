"""Where unit files are on the node: lookup, drop-ins, masks, and the links that enable, disable and mask units.

Follows systemd.unit(5) ("Unit File Load Path", "[Install]") and systemctl(1) for the states and the links. `root` is
"/" in a node; all paths in answers are paths below that root.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from tests.stand.unitfile import UnitFile, template_of

PERSISTENT = "/etc/systemd/system"
RUNTIME = "/run/systemd/system"
VENDOR = "/usr/lib/systemd/system"
# Units that a real image has from its ostree package; an image of the stand may bring its own.
BUILT_IN = "/run/stand/units"
SEARCH_PATH = (PERSISTENT, RUNTIME, VENDOR, BUILT_IN)
PRESETS = ("/etc/systemd/system-preset", "/run/systemd/system-preset", "/usr/lib/systemd/system-preset")


class LoadState(enum.Enum):
    """Unit property LoadState."""

    LOADED = "loaded"
    NOT_FOUND = "not-found"
    MASKED = "masked"
    BAD = "bad-setting"


@dataclass(frozen=True)
class Source:
    """The files that define a unit, with their modification times (ns) for NeedDaemonReload."""

    state: LoadState
    fragment: str = ""
    drop_ins: tuple[str, ...] = ()
    stamps: tuple[int, ...] = ()
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Change:
    """One change of a link, as Enable-, Disable- and MaskUnitFiles report it (kind "symlink" or "unlink")."""

    kind: str
    path: str
    target: str = ""


class UnitMasked(Exception):
    """The unit file is a link to /dev/null."""


@dataclass(frozen=True)
class UnitStore:
    """The unit files of a node."""

    root: Path = Path("/")
    search_path: Sequence[str] = field(default=SEARCH_PATH)

    def _at(self, path: str) -> Path:
        return self.root / path.lstrip("/")

    # -- loading ------------------------------------------------------------------------------------------------------

    def find(self, name: str) -> Source:
        """Locate the fragment and drop-ins of a unit, its aliases followed."""
        names = [name]
        for candidate in (name, template_of(name)):
            for folder in self.search_path if candidate else ():
                path = f"{folder}/{candidate}"
                if not os.path.lexists(self._at(path)):
                    continue
                if self._is_mask(path):
                    return Source(LoadState.MASKED, names=(name,))
                real = self._follow(path)
                if os.path.basename(real) not in (name, candidate):
                    names.insert(0, os.path.basename(real))
                return self._source(real, names)
        return Source(LoadState.NOT_FOUND, names=(name,))

    def _follow(self, path: str) -> str:
        """Follow links of unit files, below the root."""
        for _ in range(8):
            if not self._at(path).is_symlink():
                break
            path = os.path.normpath(os.path.join(os.path.dirname(path), os.readlink(self._at(path))))
        return path

    def _source(self, fragment: str, names: list[str]) -> Source:
        if not self._at(fragment).is_file():
            return Source(LoadState.NOT_FOUND, names=tuple(names))
        drop_ins = self._drop_ins(names)
        stamps = tuple(self._at(path).stat().st_mtime_ns for path in (fragment, *drop_ins))
        return Source(LoadState.LOADED, fragment, drop_ins, stamps, tuple(names))

    def _drop_ins(self, names: Sequence[str]) -> tuple[str, ...]:
        """Drop-ins sorted by file name; the directory that is searched first wins where names are equal."""
        found: dict[str, str] = {}
        kinds = {f"{name.rpartition('.')[2]}.d" for name in names}
        folders = [f"{name}.d" for name in names] + [f"{template_of(name)}.d" for name in names if template_of(name)]
        for folder in (*folders, *sorted(kinds)):
            for base in self.search_path:
                place = self._at(f"{base}/{folder}")
                for path in sorted(place.glob("*.conf")) if place.is_dir() else ():
                    found.setdefault(path.name, f"{base}/{folder}/{path.name}")
        kept = [path for _, path in sorted(found.items()) if not self._is_mask(path) and self._at(path).is_file()]
        return tuple(kept)

    def read(self, source: Source) -> UnitFile:
        """Parse the files of a unit that was found."""
        paths = [source.fragment, *source.drop_ins] if source.fragment else []
        return UnitFile.parse(self._at(path).read_text(errors="replace") for path in paths)

    def wanted_by(self, target: str) -> list[str]:
        """The units that stand in the .wants and .requires directories of a target, sorted by name."""
        found: set[str] = set()
        for base in self.search_path:
            for kind in ("wants", "requires"):
                folder = self._at(f"{base}/{target}.{kind}")
                found |= {path.name for path in folder.iterdir()} if folder.is_dir() else set()
        return sorted(found)

    def names(self) -> list[str]:
        """The names of all unit files."""
        found: set[str] = set()
        for base in self.search_path:
            if self._at(base).is_dir():
                found |= {path.name for path in self._at(base).iterdir() if not path.is_dir() or path.is_symlink()}
        return sorted(found)

    def bus_names(self) -> dict[str, str]:
        """The units of services that have a BusName=, by that name: what D-Bus service files say on a real node."""
        found = {}
        for name in self.names():
            source = self.find(name) if name.endswith(".service") else Source(LoadState.NOT_FOUND)
            bus_name = self.read(source).last("Service", "BusName") if source.state is LoadState.LOADED else ""
            if bus_name:
                found[bus_name] = name
        return found

    # -- state --------------------------------------------------------------------------------------------------------

    def state(self, name: str) -> str:
        """UnitFileState as `systemctl is-enabled` prints it. Raises FileNotFoundError."""
        for folder, text in ((PERSISTENT, "masked"), (RUNTIME, "masked-runtime")):
            if self._is_mask(f"{folder}/{name}"):
                return text
        source = self.find(name)
        if source.state is LoadState.NOT_FOUND:
            raise FileNotFoundError(f"no unit file {name}")
        if source.state is LoadState.MASKED:
            return "masked"
        if source.names[0] != name:
            return "alias"
        for folder, text in ((PERSISTENT, "enabled"), (RUNTIME, "enabled-runtime")):
            if self._links(folder, name):
                return text
        return self._state_without_links(name, source)

    def _state_without_links(self, name: str, source: Source) -> str:
        own = self._at(f"{PERSISTENT}/{name}")
        if own.is_symlink() and os.path.dirname(source.fragment) not in self.search_path:
            return "linked"
        unit = self.read(source)
        if any(unit.words("Install", key) for key in ("WantedBy", "RequiredBy", "Alias")):
            return "disabled"
        return "indirect" if unit.words("Install", "Also") else "static"

    def _is_mask(self, path: str) -> bool:
        place = self._at(path)
        if place.is_symlink():
            return os.readlink(place) == "/dev/null"
        return place.is_file() and place.stat().st_size == 0 and path.endswith(".service")

    def _links(self, folder: str, name: str) -> list[str]:
        """The links in `folder` that enable the unit: in .wants, .requires, and aliases."""
        base = self._at(folder)
        found = [
            f"{folder}/{path.relative_to(base)}"
            for pattern in ("*.wants", "*.requires")
            for path in base.glob(f"{pattern}/{name}")
        ]
        for path in base.iterdir() if base.is_dir() else ():
            if path.is_symlink() and path.name != name and os.path.basename(os.readlink(path)) == name:
                found.append(f"{folder}/{path.name}")
        return sorted(found)

    # -- changes ------------------------------------------------------------------------------------------------------

    def enable(self, name: str, runtime: bool = False, force: bool = False) -> tuple[bool, list[Change]]:
        """Make the links of [Install]; answers whether there is install information, and the changes.

        Raises FileNotFoundError, UnitMasked, and FileExistsError when a link has another target and `force` is off.
        """
        folder = RUNTIME if runtime else PERSISTENT
        changes: list[Change] = []
        if name.startswith("/"):
            fragment, name = name, os.path.basename(name)
            changes += self._link(f"{folder}/{name}", fragment, force)
        source = self.find(name)
        if source.state is LoadState.MASKED:
            raise UnitMasked(name)
        if source.state is LoadState.NOT_FOUND:
            raise FileNotFoundError(name)
        unit = self.read(source)
        carries = False
        for key, suffix in (("WantedBy", "wants"), ("RequiredBy", "requires")):
            for target in unit.words("Install", key):
                carries = True
                changes += self._link(f"{folder}/{target}.{suffix}/{name}", source.fragment, force)
        for alias in unit.words("Install", "Alias"):
            carries = True
            changes += self._link(f"{folder}/{alias}", source.fragment, force)
        for other in unit.words("Install", "Also"):
            if other != name:
                carries = self._enable_also(other, runtime, force, changes) or carries
        return carries, changes

    def _enable_also(self, name: str, runtime: bool, force: bool, changes: list[Change]) -> bool:
        try:
            carries, more = self.enable(name, runtime, force)
        except FileNotFoundError:
            return False
        changes += more
        return carries

    def _link(self, path: str, target: str, force: bool) -> list[Change]:
        place = self._at(path)
        if place.is_symlink() and os.readlink(place) == target:
            return []
        changes = []
        if os.path.lexists(place):
            if place.is_symlink() and self._follow(path) == self._follow(target):
                return []  # The same file over another spelling: systemd leaves it.
            if not force:
                raise FileExistsError(path)
            place.unlink()
            changes.append(Change("unlink", path))
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(target)
        return [*changes, Change("symlink", path, target)]

    def disable(self, name: str, runtime: bool = False) -> list[Change]:
        """Remove every link that enables the unit, and the directories that this empties."""
        folder = RUNTIME if runtime else PERSISTENT
        names = [name]
        source = self.find(name)
        if source.state is LoadState.LOADED:
            names += [also for also in self.read(source).words("Install", "Also") if also != name]
        changes = []
        for each in names:
            for path in self._links(folder, each):
                self._at(path).unlink()
                changes.append(Change("unlink", path))
                self._remove_if_empty(os.path.dirname(path), folder)
        return changes

    def _remove_if_empty(self, path: str, folder: str) -> None:
        place = self._at(path)
        if path != folder and not any(place.iterdir()):
            place.rmdir()

    def mask(self, name: str, runtime: bool = False, force: bool = False) -> list[Change]:
        """Link the unit's name to /dev/null. Raises FileExistsError when a unit file stands there."""
        return self._link(f"{RUNTIME if runtime else PERSISTENT}/{name}", "/dev/null", force)

    def unmask(self, name: str, runtime: bool = False) -> list[Change]:
        """Remove a mask, if there is one."""
        path = f"{RUNTIME if runtime else PERSISTENT}/{name}"
        place = self._at(path)
        if not (place.is_symlink() and os.readlink(place) == "/dev/null"):
            return []
        place.unlink()
        return [Change("unlink", path)]

    def preset(self, name: str, runtime: bool = False, force: bool = False) -> tuple[bool, list[Change]]:
        """Enable or disable as the first matching preset line says; without one, enable (systemd.preset(5))."""
        if self._preset_rule(name):
            return self.enable(name, runtime, force)
        return False, self.disable(name, runtime)

    def _preset_rule(self, name: str) -> bool:
        files: dict[str, Path] = {}
        for folder in PRESETS:
            for path in self._at(folder).glob("*.preset") if self._at(folder).is_dir() else ():
                files.setdefault(path.name, path)
        for _, path in sorted(files.items()):
            for line in path.read_text().splitlines():
                words = line.split()
                if len(words) >= 2 and words[0] in ("enable", "disable") and fnmatchcase(name, words[1]):
                    return words[0] == "enable"
        return True
