"""What the systemd units of a config mean on disk: unit files, drop-ins, masks and enablement links.

All of it is in /etc/systemd/system. Which links enable a unit says unit_install.py; here is which units there are,
which file each of them has, and who wins where two claim a path. `expected_nodes` is pure; `vendor_units` and
`enablement_links` read a root.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Callable, Optional

from mcdaemon.errors import Irreconcilable
from mcdaemon.host.files import Entry, Kind, list_directory, read_file, read_node
from mcdaemon.host.root import Root
from mcdaemon.host.unit_install import (
    DIRECTORY,
    Form,
    Links,
    form_of,
    instance_of,
    links_of,
    template_of,
    with_instance,
)

MASKED = "/dev/null"

# The part of systemd's search path that is on disk, systemd.unit(5).
SEARCH_PATH = (DIRECTORY, "/usr/local/lib/systemd/system", "/usr/lib/systemd/system")

_MOST_LINKS = 8


@dataclass(frozen=True)
class Unit:
    """A unit of a config. `dropins` are pairs of file name and content; no content (or an empty one) means: no file.

    `enabled` None leaves the enablement alone.
    """

    name: str
    content: Optional[bytes] = field(default=None, repr=False)
    enabled: Optional[bool] = None
    mask: bool = False
    dropins: tuple[tuple[str, Optional[bytes]], ...] = field(default=(), repr=False)


@dataclass(frozen=True)
class UnitFile:
    """A unit file as systemd finds it. `name` differs from the name asked for, and `texts` is empty, for an alias.

    `texts` are the file and its drop-ins, in the order in which they apply.
    """

    name: str
    path: str
    texts: tuple[str, ...] = field(default=(), repr=False)
    masked: bool = False


@dataclass(frozen=True)
class Expectation:
    """What the units of a config make of paths, and in `notes` what could not be done and why, for the log."""

    entries: Mapping[str, Entry]
    notes: tuple[str, ...]


# Finds a unit file by its exact name.
Lookup = Callable[[str], Optional[UnitFile]]

# Finds the links that enable a unit now.
Found = Callable[[str], Iterable[str]]


def expected_nodes(units: Iterable[Unit], vendor: Lookup, found: Found = lambda name: ()) -> Expectation:
    """What all paths of a config's units should be.

    `vendor` finds unit files that the config does not carry (see vendor_units), `found` the enablement links that a
    root has of a unit that is to be disabled (see enablement_links): it can have been enabled by another [Install]
    section.

    - content: the file, 0644. An empty content counts as none, as in the MCD: an empty unit file would mask the unit.
    - mask: a link to /dev/null; content and enablement then do not matter (UNIT-05).
    - enabled True or False: the links are there or absent, also those of units in Also=. A unit that says so itself
    wins
      over an Also= of another. A unit without a file is left out with a note, as the MCD does. None: links are left
      alone.
    - drop-ins: a file, or absent without content (UNIT-07).

    Raises Irreconcilable for a name that systemd or the file system would not take.
    """
    known = {unit.name: unit for unit in units}
    for unit in known.values():
        _check_names(unit)
    plan = _Plan(_Finder(known, vendor), found)
    for unit in known.values():
        plan.enablement(unit)
        plan.own_files(unit)
    return Expectation(plan.entries(), tuple(plan.notes))


def vendor_units(root: Root, managed: Iterable[str] = ()) -> Lookup:
    """A lookup of the unit files that a root has, in /etc, /usr/local/lib and /usr/lib, in systemd's order.

    Paths in `managed` are passed over: what a config manages is in the config, or is about to go. The lookup raises
    Broken where a unit file cannot be read.
    """
    passed_over = frozenset(managed)

    def lookup(name: str) -> Optional[UnitFile]:
        for directory in SEARCH_PATH:
            path = f"{directory}/{name}"
            unit = None if path in passed_over else _read_unit(root, path, _MOST_LINKS)
            if unit is not None:
                return unit
        return None

    return lookup


def enablement_links(root: Root, name: str) -> tuple[str, ...]:
    """The links in a root's /etc/systemd/system that `systemctl disable` removes for a unit: of its name, or to it.

    Raises Broken where the directory cannot be read.
    """
    places = [DIRECTORY]
    for entry in list_directory(root, DIRECTORY):
        if entry.endswith((".wants", ".requires", ".upholds")):
            places.append(f"{DIRECTORY}/{entry}")
    links = []
    for place in places:
        for entry in list_directory(root, place):
            path = f"{place}/{entry}"
            if form_of(entry) is None or path == f"{DIRECTORY}/{name}":
                continue
            node = read_node(root, path)
            if node.kind is Kind.LINK and name in (entry, posixpath.basename(node.target)):
                links.append(path)
    return tuple(links)


class _Finder:
    """Finds unit files in the config first, then in the root, with the config's drop-ins on top."""

    def __init__(self, known: Mapping[str, Unit], vendor: Lookup) -> None:
        self._known = known
        self._vendor = vendor

    def find(self, name: str) -> Optional[UnitFile]:
        exact = self._exact(name)
        if exact is not None or form_of(name) is not Form.INSTANCE:
            return exact
        return self._exact(template_of(name))

    def _exact(self, name: str) -> Optional[UnitFile]:
        unit = self._known.get(name)
        if unit is not None and unit.mask:
            return UnitFile(name, f"{DIRECTORY}/{name}", masked=True)
        if unit is not None and unit.content:
            return UnitFile(name, f"{DIRECTORY}/{name}", (_text(unit.content), *_dropin_texts(unit)))
        file = self._vendor(name)
        if unit is None or file is None or not file.texts:
            return file
        return UnitFile(file.name, file.path, (*file.texts, *_dropin_texts(unit)))


class _Plan:
    """Collects entries by how strong a claim they have on their path."""

    def __init__(self, finder: _Finder, found: Found) -> None:
        self._finder = finder
        self._found = found
        self._absent: dict[bool, dict[str, Entry]] = {True: {}, False: {}}
        self._links: dict[bool, dict[str, Entry]] = {True: {}, False: {}}
        self._files: dict[str, Entry] = {}
        self.notes: list[str] = []

    def entries(self) -> dict[str, Entry]:
        # Weakest first: what an Also= asks for, then what the units ask for themselves.
        merged = {**self._absent[False], **self._links[False], **self._absent[True], **self._links[True]}
        for path in sorted(merged.keys() & self._files.keys()):
            if merged[path].node.kind is Kind.LINK:
                self.notes.append(f"{path} is a file of the config, so no link is made there")
        return {**merged, **self._files}

    def own_files(self, unit: Unit) -> None:
        path = f"{DIRECTORY}/{unit.name}"
        if unit.mask:
            self._files[path] = Entry.link(MASKED)
        elif unit.content:
            self._files[path] = Entry.file(unit.content)
        for name, content in unit.dropins:
            self._files[f"{path}.d/{name}"] = Entry.file(content) if content else Entry.absent()

    def enablement(self, unit: Unit) -> None:
        if unit.mask and unit.enabled:
            self.notes.append(f"{unit.name} is masked, so it is not enabled")
        if unit.mask or unit.enabled is None:
            return
        queue, done = [(unit.name, True)], set()
        while queue:
            name, own = queue.pop(0)
            if name in done:
                continue
            done.add(name)
            real, links = self._resolve(name)
            if real != name:
                # systemd enables what stands behind an alias; the unit was asked for all the same.
                queue.append((real, own))
            queue += [(other, False) for other in links.also]
            if unit.enabled:
                self._enable(links, own)
            else:
                self._disable(name, links, own)

    def _resolve(self, name: str) -> tuple[str, Links]:
        """The name behind an alias, or the links of the unit."""
        file = self._finder.find(name)
        if file is None:
            return name, Links(notes=(f"{name} has no unit file, so its enablement is skipped",))
        if file.masked:
            return name, Links(notes=(f"{name} is masked, so its enablement is skipped",))
        if file.texts:
            return name, links_of(name, file.path, file.texts)
        if form_of(file.name) is Form.TEMPLATE and form_of(name) is Form.INSTANCE:
            return with_instance(file.name, instance_of(name)), Links()
        return file.name, Links()

    def _enable(self, links: Links, own: bool) -> None:
        self.notes += links.notes
        for path, target in links.links:
            entry = self._links[own].setdefault(path, Entry.link(target))
            if entry.node.target != target:
                self.notes.append(f"{path} is claimed by two units; it leads to {entry.node.target}")

    def _disable(self, name: str, links: Links, own: bool) -> None:
        for path in (*(path for path, _ in links.links), *self._found(name)):
            self._absent[own][path] = Entry.absent()


def _check_names(unit: Unit) -> None:
    if form_of(unit.name) is None:
        sentence = f"cannot manage the unit {unit.name!r}: systemd does not take this name"
        raise Irreconcilable(sentence, hint="a unit is named like a.service; see systemd-escape for other characters")
    for name, _ in unit.dropins:
        if not re.fullmatch(r"[^./\0][^/\0]*\.conf", name):
            sentence = f"cannot manage the drop-in {name!r} of {unit.name}: systemd does not read this name"
            raise Irreconcilable(sentence, hint="drop-ins are files named *.conf")


def _read_unit(root: Root, path: str, links_left: int) -> Optional[UnitFile]:
    node = read_node(root, path)
    name = posixpath.basename(path)
    if node.kind is Kind.LINK:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), node.target))
        if target == MASKED:
            return UnitFile(name, path, masked=True)
        if posixpath.basename(target) != name:
            return UnitFile(posixpath.basename(target), target)
        return _read_unit(root, target, links_left - 1) if links_left else None
    if node.kind is not Kind.FILE:
        return None
    content = read_file(root, path)
    return UnitFile(name, path, (_text(content),)) if content else UnitFile(name, path, masked=True)


def _dropin_texts(unit: Unit) -> tuple[str, ...]:
    return tuple(_text(content) for _, content in sorted(unit.dropins, key=lambda dropin: dropin[0]) if content)


def _text(content: bytes) -> str:
    return content.decode("utf-8", "replace")
