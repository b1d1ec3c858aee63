"""Ignition configs, spec 3.2: what is put onto a CoreOS disk at its first boot. Pure but for `from_tree`.

The rules of `problems` are those of Ignition's own validation, as far as the configs made here can break them: the
document's types (configuration-v3_2.md), config/v3_*/types (paths, modes, URLs, units, duplicates). 3.2.0 is the lowest
version that has all that is used; every Ignition from 2.7.0 on takes it (ignition docs/specs.md).
"""

from __future__ import annotations

import base64
import binascii
import gzip
import hashlib
import json
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Optional

VERSION = "3.2.0"
UNIT_FOLDER = "/etc/systemd/system"
FW_CFG_LIMIT = 64 * 1024
"""Bytes that may go through fw_cfg: Ignition reads it in quadratic time (coreos/ignition issue 1259)."""

_VERSIONS = {"3.0.0", "3.1.0", "3.2.0", "3.3.0", "3.4.0"}
_UNIT_TYPES = ("service", "socket", "device", "mount", "automount", "swap", "target", "path", "timer", "slice", "scope")
_UNIT_NAME = re.compile(r"[A-Za-z0-9:_.\\@-]+\.(" + "|".join(_UNIT_TYPES) + r")")
_DROPIN_NAME = re.compile(r"[^/]+\.conf")
_KEY_TYPES = ("ssh-rsa", "ssh-ed25519", "ecdsa-sha2-nistp", "sk-ssh-ed25519@openssh.com", "sk-ecdsa-sha2-nistp256@")
_USER_NAME = re.compile(r"[a-z_][a-z0-9_-]{0,31}\$?")
_DATA = re.compile(r"data:([a-z]+/[a-z0-9.+-]+)?(;charset=[A-Za-z0-9-]+)?(;base64)?,(.*)", re.DOTALL)
_HASH = re.compile(r"sha512-[0-9a-f]{128}|sha256-[0-9a-f]{64}")
_PERMISSIONS = 0o777


class BadConfig(ValueError):
    """Ignition would refuse this config; the text names each place as a JSON pointer."""


@dataclass(frozen=True)
class File:
    path: str
    content: bytes
    mode: int = 0o644
    overwrite: bool = False


@dataclass(frozen=True)
class Directory:
    path: str
    mode: int = 0o755


@dataclass(frozen=True)
class Link:
    path: str
    target: str
    overwrite: bool = False


@dataclass(frozen=True)
class Unit:
    """`text` None: an image's own unit. `enabled` None: neither; True needs an [Install] section."""

    name: str
    text: Optional[str] = None
    enabled: Optional[bool] = None
    mask: bool = False
    dropins: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class User:
    name: str
    keys: tuple[str, ...]


@dataclass(frozen=True)
class Config:
    """What the first boot puts onto the disk. Configs add up; a path or unit in both makes `text` raise."""

    files: tuple[File, ...] = ()
    directories: tuple[Directory, ...] = ()
    links: tuple[Link, ...] = ()
    units: tuple[Unit, ...] = ()
    users: tuple[User, ...] = ()

    def __add__(self, other: Config) -> Config:
        return Config(
            self.files + other.files,
            self.directories + other.directories,
            self.links + other.links,
            self.units + other.units,
            self.users + other.users,
        )

    def document(self) -> dict[str, Any]:
        """The config as Ignition's JSON document; sections that hold nothing are left out."""
        sections: dict[str, Any] = {
            "passwd": {"users": [{"name": user.name, "sshAuthorizedKeys": list(user.keys)} for user in self.users]},
            "storage": {
                "directories": [{"path": item.path, "mode": item.mode} for item in self.directories],
                "files": [_file(item) for item in self.files],
                "links": [_link(item) for item in self.links],
            },
            "systemd": {"units": [_unit(item) for item in self.units]},
        }
        for name, section in sections.items():
            sections[name] = {key: value for key, value in section.items() if value}
        return {"ignition": {"version": VERSION}, **{name: section for name, section in sections.items() if section}}

    def text(self) -> str:
        """The document as text. Raises BadConfig when Ignition would refuse it."""
        document = self.document()
        found = problems(document)
        if found:
            raise BadConfig("cannot make an Ignition config: " + "; ".join(found))
        return json.dumps(document, indent=1) + "\n"


def pointer(text: str, url: str) -> str:
    """A small config that is replaced by `text`, served at `url`: for those that fw_cfg is too slow for."""
    digest = hashlib.sha512(text.encode()).hexdigest()
    source = {"source": url, "verification": {"hash": f"sha512-{digest}"}}
    return json.dumps({"ignition": {"version": VERSION, "config": {"replace": source}}}) + "\n"


def from_tree(root: Path) -> Config:
    """What is in `root` (a DESTDIR of `make install`) as a config: units become units, links links, the rest files.

    Directories are named only when they are empty or have another mode than 0755, which is how Ignition makes parents.
    Raises BadConfig for what Ignition cannot make (devices, sockets, FIFOs).
    """
    files: list[File] = []
    directories: list[Directory] = []
    links: list[Link] = []
    units: dict[str, str] = {}
    dropins: dict[str, list[tuple[str, str]]] = {}
    for path in sorted(root.rglob("*")):
        place = "/" + path.relative_to(root).as_posix()
        status = path.lstat()
        mode = stat.S_IMODE(status.st_mode)
        folder, _, name = place.rpartition("/")
        if stat.S_ISLNK(status.st_mode):
            links.append(Link(place, str(path.readlink())))
        elif stat.S_ISDIR(status.st_mode):
            if mode != 0o755 or not any(path.iterdir()):
                directories.append(Directory(place, mode))
        elif not stat.S_ISREG(status.st_mode):
            raise BadConfig(f"cannot put {place} into an Ignition config: it is no file, directory or link")
        elif folder == UNIT_FOLDER and _UNIT_NAME.fullmatch(name) and mode == 0o644:
            units[name] = path.read_text()
        elif folder.startswith(f"{UNIT_FOLDER}/") and folder.endswith(".d") and mode == 0o644:
            dropins.setdefault(folder[len(UNIT_FOLDER) + 1 : -2], []).append((name, path.read_text()))
        else:
            files.append(File(place, path.read_bytes(), mode))
    names = sorted({*units, *dropins})
    made = tuple(Unit(name, units.get(name), dropins=tuple(dropins.get(name, ()))) for name in names)
    return Config(tuple(files), tuple(directories), tuple(links), made)


def content_of(source: str, compression: str = "") -> bytes:
    """What a data URL holds. Raises BadConfig."""
    parts = _DATA.fullmatch(source)
    if parts is None or not parts[3]:
        raise BadConfig("is no data URL in base64")
    try:
        data = base64.b64decode(parts[4], validate=True)
        return gzip.decompress(data) if compression == "gzip" else data
    except (binascii.Error, OSError, EOFError) as error:
        raise BadConfig(f"cannot be decoded: {error}") from error


# -- the checks -------------------------------------------------------------------------------------------------------


def problems(document: Mapping[str, Any]) -> list[str]:
    """What Ignition would refuse in `document`: sentences that begin with a JSON pointer; [] when nothing."""
    found = list(_shape("", document, _TOP))
    if found:
        return found
    version = document["ignition"].get("version")
    if version not in _VERSIONS:
        found.append(f"/ignition/version: {version!r} is none of {', '.join(sorted(_VERSIONS))}")
    storage = document.get("storage", {})
    units = document.get("systemd", {}).get("units", [])
    found += [*_nodes(storage), *_contents(storage), *_units(units), *_clashes(storage, units)]
    return found + list(_users(document.get("passwd", {}).get("users", [])))


_NODE = {"path": str, "overwrite": bool, "user": dict, "group": dict}
_RESOURCE = {"source": str, "compression": str, "verification": {"hash": str}}
_TOP: dict[str, Any] = {
    "ignition": {"version": str, "config": {"replace": _RESOURCE, "merge": [_RESOURCE]}},
    "passwd": {"users": [{"name": str, "sshAuthorizedKeys": [str], "groups": [str], "passwordHash": str}]},
    "storage": {
        "directories": [{**_NODE, "mode": int}],
        "files": [{**_NODE, "mode": int, "contents": _RESOURCE}],
        "links": [{**_NODE, "target": str, "hard": bool}],
    },
    "systemd": {
        "units": [
            {"name": str, "contents": str, "enabled": bool, "mask": bool, "dropins": [{"name": str, "contents": str}]}
        ]
    },
}
_REQUIRED = {"/ignition", "/ignition/version"}


def _shape(place: str, value: Any, wanted: Any) -> Iterator[str]:
    """Unknown keys and wrong types: Ignition warns of the first and refuses the second; here both are mistakes."""
    if isinstance(wanted, dict):
        if not isinstance(value, Mapping):
            yield f"{place or '/'}: is no object"
            return
        for key in value:
            if key not in wanted:
                yield f"{place}/{key}: is unknown"
            else:
                yield from _shape(f"{place}/{key}", value[key], wanted[key])
        for key in wanted:
            if f"{place}/{key}" in _REQUIRED and key not in value:
                yield f"{place}/{key}: is missing"
    elif isinstance(wanted, list):
        if not isinstance(value, list):
            yield f"{place}: is no list"
            return
        for number, item in enumerate(value):
            yield from _shape(f"{place}/{number}", item, wanted[0])
    elif not isinstance(value, wanted) or (wanted is int and isinstance(value, bool)):
        yield f"{place}: is no {wanted.__name__}"


def _each(storage: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for kind in ("directories", "files", "links"):
        for number, node in enumerate(storage.get(kind, [])):
            yield f"/storage/{kind}/{number}", node


def _nodes(storage: Mapping[str, Any]) -> Iterator[str]:
    seen: dict[str, str] = {}
    links = {node.get("path", "") for node in storage.get("links", [])}
    for place, node in _each(storage):
        path = node.get("path", "")
        if not path.startswith("/") or path == "/" or str(PurePosixPath(path)) != path or ".." in path.split("/"):
            yield f"{place}/path: {path!r} is no plain absolute path"
        if path in seen:
            yield f"{place}/path: {path} is at {seen[path]} already"
        seen[path] = place
        for parent in PurePosixPath(path).parents:
            if str(parent) in links:
                yield f"{place}/path: {path} goes through the link {parent} of the same config"
        mode = node.get("mode")
        if mode is not None and not 0 <= mode <= _PERMISSIONS:
            yield f"{place}/mode: {mode} is no permission mode (0644 is the decimal 420; special bits need spec 3.4)"
        if "/links/" in place and not node.get("target"):
            yield f"{place}/target: is missing"


def _contents(storage: Mapping[str, Any]) -> Iterator[str]:
    for number, node in enumerate(storage.get("files", [])):
        place, resource = f"/storage/files/{number}/contents", node.get("contents", {})
        source, compression = resource.get("source", ""), resource.get("compression", "")
        if compression not in ("", "gzip"):
            yield f"{place}/compression: {compression!r} is neither gzip nor nothing"
        if node.get("overwrite") and "source" not in resource:
            yield f"{place}/source: is needed with overwrite"
        if source.startswith("data:"):
            try:
                content = content_of(source, compression)
            except BadConfig as error:
                yield f"{place}/source: {error}"
                continue
            digest = resource.get("verification", {}).get("hash")
            if digest is not None and digest != f"sha512-{hashlib.sha512(content).hexdigest()}":
                yield f"{place}/verification/hash: does not fit the content"
        elif source and not source.startswith(("http://", "https://")):
            yield f"{place}/source: {source.partition(':')[0]!r} is no scheme that can be used here"
        if not _HASH.fullmatch(resource.get("verification", {}).get("hash", "sha256-" + "0" * 64)):
            yield f"{place}/verification/hash: is neither sha512-… nor sha256-…"


def _units(units: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    seen: set[str] = set()
    for number, unit in enumerate(units):
        place, name = f"/systemd/units/{number}", unit.get("name", "")
        if not _UNIT_NAME.fullmatch(name):
            yield f"{place}/name: {name!r} is no name of a unit"
        if name in seen:
            yield f"{place}/name: {name} is there twice"
        seen.add(name)
        text = unit.get("contents", "")
        if text and not re.match(r"\s*([#;].*\n\s*)*\[[A-Za-z]", text):
            yield f"{place}/contents: does not begin with a section"
        if unit.get("enabled") and text and "\n[Install]\n" not in f"\n{text}\n":
            yield f"{place}/enabled: has no effect, the unit has no [Install] section"
        if unit.get("mask") and text:
            yield f"{place}/mask: a masked unit cannot have contents"
        names = [dropin.get("name", "") for dropin in unit.get("dropins", [])]
        for index, dropin in enumerate(names):
            if not _DROPIN_NAME.fullmatch(dropin):
                yield f"{place}/dropins/{index}/name: {dropin!r} does not end with .conf"
            if names.index(dropin) != index:
                yield f"{place}/dropins/{index}/name: {dropin} is there twice"


def _clashes(storage: Mapping[str, Any], units: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Paths that the units' own files take (config/v3_4/types/config.go)."""
    taken = {f"{UNIT_FOLDER}/{unit.get('name')}" for unit in units if unit.get("contents") or unit.get("mask")}
    for unit in units:
        taken |= {f"{UNIT_FOLDER}/{unit.get('name')}.d/{item.get('name')}" for item in unit.get("dropins", [])}
    for place, node in _each(storage):
        if node.get("path") in taken:
            yield f"{place}/path: {node.get('path')} is a unit's own file"


def _users(users: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    seen: set[str] = set()
    for number, user in enumerate(users):
        place, name = f"/passwd/users/{number}", user.get("name", "")
        if not _USER_NAME.fullmatch(name):
            yield f"{place}/name: {name!r} is no user's name"
        if name in seen:
            yield f"{place}/name: {name} is there twice"
        seen.add(name)
        for index, key in enumerate(user.get("sshAuthorizedKeys", [])):
            words = key.split()
            if len(words) < 2 or not words[0].startswith(_KEY_TYPES) or "\n" in key or not _is_key(words[0], words[1]):
                yield f"{place}/sshAuthorizedKeys/{index}: is no public ssh key in one line"


def _is_key(kind: str, blob: str) -> bool:
    try:
        data = base64.b64decode(blob, validate=True)
    except binascii.Error:
        return False
    size = int.from_bytes(data[:4], "big")
    return data[4 : 4 + size] == kind.encode()


# -- the document -----------------------------------------------------------------------------------------------------


def _file(item: File) -> dict[str, Any]:
    packed = gzip.compress(item.content, mtime=0)
    small = len(packed) < len(item.content)
    source = "data:;base64," + base64.b64encode(packed if small else item.content).decode()
    digest = hashlib.sha512(item.content).hexdigest()
    contents = {"source": source, "verification": {"hash": f"sha512-{digest}"}}
    node = {"path": item.path, "mode": item.mode, "contents": contents}
    if small:
        contents["compression"] = "gzip"
    return {**node, "overwrite": True} if item.overwrite else node


def _link(item: Link) -> dict[str, Any]:
    node = {"path": item.path, "target": item.target, "hard": False}
    return {**node, "overwrite": True} if item.overwrite else node


def _unit(item: Unit) -> dict[str, Any]:
    made: dict[str, Any] = {"name": item.name}
    if item.text is not None:
        made["contents"] = item.text
    if item.enabled is not None:
        made["enabled"] = item.enabled
    if item.mask:
        made["mask"] = True
    if item.dropins:
        made["dropins"] = [{"name": name, "contents": text} for name, text in item.dropins]
    return made
