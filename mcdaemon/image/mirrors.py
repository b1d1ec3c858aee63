"""registries.conf: which places an image's name leads to, in order.

Follows containers/image's pkg/sysregistriesv2 (containers-registries.conf(5)): the longest matching prefix wins, its
mirrors come in order before its own location, and a name that nothing matches is its own location.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mcdaemon.errors import Broken, Irreconcilable, from_os_error
from mcdaemon.image.findings import printable
from mcdaemon.image.reference import Reference

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MAIN_FILE = "etc/containers/registries.conf"
DROP_INS = "etc/containers/registries.conf.d"

_PULL_FROM = ("all", "digest-only", "tag-only", "")


@dataclass(frozen=True)
class Mirror:
    location: str
    insecure: bool = False
    pull_from: str = ""


@dataclass(frozen=True)
class Registry:
    """One [[registry]] table."""

    prefix: str
    location: str
    insecure: bool = False
    blocked: bool = False
    by_digest_only: bool = False
    mirrors: tuple[Mirror, ...] = ()


@dataclass(frozen=True)
class Candidate:
    """A place to ask for an image: `reference` as it is called there."""

    reference: Reference
    is_mirror: bool = False
    insecure: bool = False
    blocked: bool = False


@dataclass(frozen=True)
class Registries:
    tables: tuple[Registry, ...] = ()

    @classmethod
    def load(cls, root: Path = Path("/")) -> Registries:
        """Read registries.conf and its drop-ins below `root`; none at all means no mirrors.

        Raises Broken that names the file: with such a file containers/image pulls nothing either.
        """
        folder = root / DROP_INS
        try:
            drop_ins = sorted(path for path in folder.iterdir() if path.suffix == ".conf")
        except FileNotFoundError:
            drop_ins = []
        except OSError as error:
            raise from_os_error(error, "read", folder) from error
        by_prefix: dict[str, Registry] = {}
        for path in [root / MAIN_FILE, *drop_ins]:
            # A later file replaces the whole table of a prefix (sysregistriesv2, updateWithConfigurationFrom).
            by_prefix.update({table.prefix: table for table in _read(path)})
        return cls(tuple(by_prefix.values()))

    def candidates(self, reference: Reference) -> tuple[Candidate, ...]:
        """Mirrors in order, then the registry itself. Raises Broken for a location that is no name of an image."""
        table = self._table(reference.repository)
        if table is None:
            return (Candidate(reference),)
        wanted = "digest-only" if reference.digest else "tag-only"
        found = []
        for mirror in table.mirrors:
            skipped = table.by_digest_only and not reference.digest
            if not skipped and mirror.pull_from in ("", "all", wanted):
                there = _rewritten(reference, table.prefix, mirror.location)
                found.append(Candidate(there, True, mirror.insecure, self._blocked(there)))
        there = _rewritten(reference, table.prefix, table.location) if table.location else reference
        return (*found, Candidate(there, False, table.insecure, self._blocked(there)))

    def _blocked(self, there: Reference) -> bool:
        """Blocking is looked up by the name really contacted: mirrors of a blocked registry are used (IMG-45,
        IMG-47).
        """
        table = self._table(there.repository)
        return table is not None and table.blocked

    def _table(self, repository: str) -> Registry | None:
        matching = [table for table in self.tables if _matches(repository, table.prefix)]
        return max(matching, key=lambda table: len(table.prefix), default=None)


def _matches(name: str, prefix: str) -> bool:
    if prefix.startswith("*."):
        tail = prefix[1:]
        index = name.find(tail)
        return index >= 0 and "/" not in name[:index] and _ends_part(name, index + len(tail))
    return name.startswith(prefix) and _ends_part(name, len(prefix))


def _ends_part(name: str, index: int) -> bool:
    return index == len(name) or name[index] in ":/@"


def _rewritten(reference: Reference, prefix: str, location: str) -> Reference:
    text = str(reference)
    start = text.find(prefix[1:]) + len(prefix[1:]) if prefix.startswith("*.") else len(prefix)
    try:
        return Reference.parse(location + text[start:])
    except Irreconcilable as error:
        sentence = f"cannot use the location {printable(location)} in registries.conf: {error.sentence}"
        raise Broken(sentence, "correct it; podman and rpm-ostree stumble over it too") from None


def _read(path: Path) -> list[Registry]:
    try:
        document = tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise from_os_error(error, "read", path) from error
    except ValueError as error:
        raise _broken(path, printable(str(error))) from None
    if "registries" in document:
        return _version_1(document["registries"], path)
    tables = document.get("registry", [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise _broken(path, '"registry" is not a list of tables')
    return [_registry(table, path) for table in tables]


def _registry(table: Mapping[str, object], path: Path) -> Registry:
    location, prefix = _text(table, "location", path), _text(table, "prefix", path)
    if not location and not prefix:
        raise _broken(path, "a [[registry]] has neither location nor prefix")
    if not location and not prefix.startswith("*."):
        location = prefix
    mirrors = table.get("mirror", [])
    if not isinstance(mirrors, list) or not all(isinstance(mirror, dict) for mirror in mirrors):
        raise _broken(path, '"mirror" is not a list of tables')
    made = Registry(
        prefix=prefix or location,
        location=location,
        insecure=_flag(table, "insecure", path),
        blocked=_flag(table, "blocked", path),
        by_digest_only=_flag(table, "mirror-by-digest-only", path),
        mirrors=tuple(_mirror(mirror, path) for mirror in mirrors),
    )
    if made.by_digest_only and any(mirror.pull_from for mirror in made.mirrors):
        raise _broken(path, f"{made.prefix} has both mirror-by-digest-only and pull-from-mirror")
    return made


def _mirror(table: Mapping[str, object], path: Path) -> Mirror:
    location, pull_from = _text(table, "location", path), _text(table, "pull-from-mirror", path)
    if not location:
        raise _broken(path, "a [[registry.mirror]] has no location")
    if pull_from not in _PULL_FROM:
        raise _broken(path, f"pull-from-mirror is {printable(pull_from)}, not one of all, digest-only, tag-only")
    return Mirror(location, _flag(table, "insecure", path), pull_from)


def _version_1(section: object, path: Path) -> list[Registry]:
    """The old format, which containers/image still reads: lists of insecure and of blocked registries."""
    if not isinstance(section, dict):
        raise _broken(path, '"registries" is not a table')
    found: dict[str, Registry] = {}
    for key in ("insecure", "block"):
        listed = section.get(key, {})
        names = listed.get("registries", []) if isinstance(listed, dict) else None
        if not isinstance(names, list):
            raise _broken(path, f"registries.{key} is not a list")
        for name in _strings(names, path):
            known = found.get(name, Registry(name, name))
            found[name] = replace(known, insecure=True) if key == "insecure" else replace(known, blocked=True)
    return list(found.values())


def _strings(values: Sequence[object], path: Path) -> list[str]:
    texts = [value.rstrip("/") for value in values if isinstance(value, str)]
    if len(texts) != len(values) or not all(texts):
        raise _broken(path, "a registry's name is not a string")
    return texts


def _text(table: Mapping[str, object], key: str, path: Path) -> str:
    value = table.get(key, "")
    if not isinstance(value, str):
        raise _broken(path, f"{key} is not a string")
    return value.rstrip("/")


def _flag(table: Mapping[str, object], key: str, path: Path) -> bool:
    value = table.get(key, False)
    if not isinstance(value, bool):
        raise _broken(path, f"{key} is not true or false")
    return value


def _broken(path: Path, why: str) -> Broken:
    return Broken(f"cannot read {path}: {why}", "see containers-registries.conf(5); podman and rpm-ostree read it too")
