"""The part of Ignition (spec 3.0 to 3.5) that a node can be brought to again and again.

Honoured: files, systemd units, and the ssh keys and password hash of the user `core`, as by the MCD (mcd.md 2.3).
Everything else describes a first boot (disks, links, users, sources on the network). A config that has any of it is
refused by the JSON pointer of the first such value; it is never applied in part.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Optional

from mcdaemon.machineconfig import dataurl, paths
from mcdaemon.machineconfig.fields import Field, shown
from mcdaemon.machineconfig.specs import ROOT, DropIn, FileSpec, Limits, Owner, UnitSpec, UserSpec

USER = "core"
_VERSION = re.compile(r"(0|[1-9][0-9]*)\.(0|[1-9][0-9]*)\.(0|[1-9][0-9]*)(-[0-9A-Za-z.-]+)?")
_OLDEST, _NEWEST = (3, 0), (3, 5)
_UNIT_NAME = re.compile(
    r"[A-Za-z0-9:_.\\@-]+\.(service|socket|device|mount|automount|swap|target|path|timer|snapshot|slice|scope)"
)
_DROPIN_NAME = re.compile(r"[^/\x00-\x20\x7f]+\.conf")
_OWNER_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\$?")
_MAX_NAME = 255
_MAX_ID = 2**32 - 2
# The crypt(5) forms that a shadow file of a supported release can hold, and the two for "no password".
_PASSWORD_HASH = re.compile(r"[!*]|\$[A-Za-z0-9]+\$[./A-Za-z0-9$,=+_-]+")
# FILE-19: special bits are refused up front, as by the MCD. 644 written in decimal is the usual way to get some.
_MODE_HINT = "at most 0777; JSON has no octal numbers: 420 is 0644"
_NOT_HONOURED = "this part of Ignition cannot be applied to a node that is already installed"
_FIRST_BOOT = "it is done by Ignition at the first boot only; remove it from the config"
# Says of `core` what is so on every CoreOS anyway.
_USER_DEFAULTS = {"shouldExist": True, "system": False, "noCreateHome": False, "noUserGroup": False, "noLogInit": False}


@dataclass(frozen=True)
class Ignition:
    """What an Ignition config wants: files sorted by path, units sorted by name, users."""

    files: tuple[FileSpec, ...] = ()
    units: tuple[UnitSpec, ...] = ()
    users: tuple[UserSpec, ...] = ()


def parse(config: Field, limits: Limits) -> Ignition:
    """Read the Ignition config at `config`; an absent or empty one wants nothing.

    Raises Irreconcilable with the pointer of the first thing that is wrong, or not honoured.
    """
    config.members()
    if config.is_empty():
        return Ignition()
    config.only(("ignition", "storage", "systemd", "passwd"), _NOT_HONOURED, _FIRST_BOOT)
    _version(config.child("ignition"))
    storage, systemd, passwd = config.child("storage"), config.child("systemd"), config.child("passwd")
    storage.only(("files",), _NOT_HONOURED, _FIRST_BOOT)
    systemd.only(("units",), _NOT_HONOURED)
    passwd.only(("users",), _NOT_HONOURED, _FIRST_BOOT)
    file_fields = storage.child("files").elements()
    unit_fields = systemd.child("units").elements()
    files = [_file(field, limits) for field in file_fields]
    units = [_unit(field) for field in unit_fields]
    users = [_user(field) for field in passwd.child("users").elements()]
    if len(users) > 1:
        raise passwd.child("users").child(1).refusal(f"the user {USER} is given twice")
    _refuse_conflicts(list(zip(file_fields, files)), list(zip(unit_fields, units)))
    _refuse_too_much(config, files, units, limits)
    return Ignition(
        tuple(sorted(files, key=lambda file: file.path)),
        tuple(sorted(units, key=lambda unit: unit.name)),
        tuple(users),
    )


def _version(ignition: Field) -> None:
    ignition.members()
    field = ignition.child("version")
    text = field.text()
    match = _VERSION.fullmatch(text or "")
    if not match:
        raise field.refusal("the Ignition version is missing or not a version", "supported are 3.0.0 to 3.5.0")
    number = (int(match.group(1)), int(match.group(2)))
    if match.group(4) or not _OLDEST <= number <= _NEWEST:
        kind = "experimental" if match.group(4) else ("newer" if number > _NEWEST else "older")
        raise field.refusal(
            f"Ignition {shown(text)} is {kind} and cannot be read faithfully", "supported are 3.0.0 to 3.5.0"
        )
    ignition.only(("version",), _NOT_HONOURED, _FIRST_BOOT)


def _file(field: Field, limits: Limits) -> FileSpec:
    path_field = field.child("path")
    path = path_field.text()
    if not path:
        raise path_field.refusal("a file needs a path")
    trouble = paths.problem(path)
    if trouble:
        raise path_field.refusal(f"cannot manage {shown(path)}: {trouble[0]}", trouble[1])
    field.child("append").nothing("append is not supported", "give the whole file, or use a drop-in directory")
    field.only(("path", "mode", "user", "group", "contents", "overwrite", "append"), "unknown part of a file")
    # Whether an existing file may be replaced is a question of the first boot. A managed file is always replaced, as by
    # the MCD (mcd.md 2.3): configs in the field carry both values, with the same meaning.
    field.child("overwrite").flag()
    return FileSpec(
        path,
        _contents(field.child("contents"), limits),
        _mode(field.child("mode")),
        _owner(field.child("user")),
        _owner(field.child("group")),
    )


def _mode(field: Field) -> int:
    mode = field.number()
    if mode is None:
        return 0o644
    if 0o777 < mode <= 0o7777:
        raise field.refusal(f"mode {mode:#o} has setuid, setgid or sticky bits, which are not supported", _MODE_HINT)
    if not 0 <= mode <= 0o777:
        raise field.refusal(f"{mode} is not a file mode", _MODE_HINT)
    return mode


def _owner(field: Field) -> Owner:
    field.only(("id", "name"), "unknown part of an owner")
    number, name = field.child("id").number(), field.child("name").text()
    if number is not None:
        if not 0 <= number <= _MAX_ID:
            raise field.child("id").refusal(f"{number} is not a user or group id")
        # The id wins over the name (file_writers.go:getFileOwnership).
        return Owner(number)
    if not name or name == "root":
        return ROOT
    if not _OWNER_NAME.fullmatch(name) or len(name) > _MAX_NAME:
        raise field.child("name").refusal(f"{shown(name)} is not a user or group name")
    return Owner(None, name)


def _contents(field: Field, limits: Limits) -> bytes:
    field.child("httpHeaders").nothing("contents from the network are not supported")
    field.only(("source", "compression", "verification", "httpHeaders"), "unknown part of contents")
    source_field, compression_field = field.child("source"), field.child("compression")
    source, compression = source_field.text(), compression_field.text()
    if compression not in (None, "", "gzip"):
        raise compression_field.refusal(f"unsupported compression {shown(compression)}", "supported is gzip")
    try:
        content = dataurl.decode(source, limits.file_bytes) if source else b""
        if compression:
            content = dataurl.gunzip(content, limits.file_bytes)
    except dataurl.Undecodable as error:
        raise source_field.refusal(f"cannot decode the contents: {error}") from error
    verification = field.child("verification")
    verification.only(("hash",), "unknown part of a verification")
    wanted = verification.child("hash").text()
    if wanted:
        try:
            dataurl.check_hash(wanted, content)
        except dataurl.Undecodable as error:
            raise verification.child("hash").refusal(f"cannot verify the contents: {error}") from error
    return content


def _unit(field: Field) -> UnitSpec:
    name_field = field.child("name")
    name = name_field.text() or ""
    if not _valid_unit_name(name):
        raise name_field.refusal(f"{shown(name)} is not the name of a systemd unit")
    field.only(("name", "contents", "enabled", "mask", "dropins"), "unknown part of a unit")
    dropins: dict[str, DropIn] = {}
    for dropin_field in field.child("dropins").elements():
        dropin = _dropin(dropin_field)
        if dropin.name in dropins:
            raise dropin_field.child("name").refusal(f"the drop-in {shown(dropin.name)} is given twice")
        dropins[dropin.name] = dropin
    enabled, mask = field.child("enabled").flag(), field.child("mask").flag() or False
    if mask and enabled:
        raise field.child("enabled").refusal(f"{shown(name)} cannot be enabled and masked at the same time")
    return UnitSpec(
        name, _unit_text(field.child("contents")), enabled, mask, tuple(dropins[key] for key in sorted(dropins))
    )


def _valid_unit_name(name: str) -> bool:
    stem = name.rpartition(".")[0]
    return bool(_UNIT_NAME.fullmatch(name)) and len(name) <= _MAX_NAME and not stem.startswith(("@", "."))


def _dropin(field: Field) -> DropIn:
    name_field = field.child("name")
    name = name_field.text() or ""
    if not _DROPIN_NAME.fullmatch(name) or len(name.encode()) > _MAX_NAME or name.startswith("."):
        raise name_field.refusal(f"{shown(name)} is not the name of a drop-in", "it has to end in .conf")
    field.only(("name", "contents"), "unknown part of a drop-in")
    return DropIn(name, _unit_text(field.child("contents")))


def _unit_text(field: Field) -> Optional[bytes]:
    text = field.text()
    # Empty contents are no contents, for units and drop-ins alike (UNIT-07; file_writers.go:writeUnit).
    if not text:
        return None
    if "\0" in text:
        raise field.refusal("the contents hold a NUL character")
    return text.encode("utf-8")


def _user(field: Field) -> UserSpec:
    name_field = field.child("name")
    name = name_field.text() or ""
    if name != USER:
        raise name_field.refusal(f"only the user {USER} can be managed, not {shown(name)}", _FIRST_BOOT)
    for key, default in _USER_DEFAULTS.items():
        if field.child(key).value not in (None, default):
            raise field.child(key).refusal(_NOT_HONOURED, "only sshAuthorizedKeys and passwordHash can be changed")
    known = ("name", "sshAuthorizedKeys", "passwordHash", *_USER_DEFAULTS)
    field.only(known, _NOT_HONOURED, "only sshAuthorizedKeys and passwordHash can be changed")
    keys = dict.fromkeys(_ssh_key(key) for key in field.child("sshAuthorizedKeys").elements())
    return UserSpec(name, tuple(keys), _password_hash(field.child("passwordHash")))


def _ssh_key(field: Field) -> str:
    text = field.text() or ""
    key = text.strip()
    if not key:
        raise field.refusal("an ssh key is empty")
    if any(not char.isprintable() for char in key):
        raise field.refusal("an ssh key has to be one line of printable text", "give each key an entry of its own")
    return key


def _password_hash(field: Field) -> Optional[str]:
    text = field.text()
    if text is None:
        return None
    if not text:
        # An empty field in /etc/shadow lets everyone in (mcd.md 3.11).
        raise field.refusal("an empty password hash would let anyone log in", "leave it out for no password")
    if not _PASSWORD_HASH.fullmatch(text):
        raise field.refusal("not a password hash in crypt(5) form", "make one with: mkpasswd --method=yescrypt")
    return text


def _refuse_conflicts(files: list[tuple[Field, FileSpec]], units: list[tuple[Field, UnitSpec]]) -> None:
    """Refuse two things that want the same place, and a file where another needs a directory.

    Ignition refuses both at install time (duplicate keys, "path conflicts with systemd unit or dropin"); FILE-03,
    FILE-13 and FILE-15 say what happens otherwise.
    """
    taken: dict[str, Field] = {}
    wanted: list[tuple[str, Field]] = [(paths.canonical(spec.path), field.child("path")) for field, spec in files]
    for field, unit in units:
        wanted.append((unit.path, field.child("name")))
        for dropin in field.child("dropins").elements():
            name = dropin.child("name")
            wanted.append((f"{unit.path}.d/{name.text()}", name))
    for path, place in wanted:
        if path in taken:
            raise place.refusal(f"{shown(path)} is asked for twice, first at {taken[path].pointer}")
        taken[path] = place
    for path, place in wanted:
        parent = path.rpartition("/")[0]
        while parent:
            if parent in taken:
                raise place.refusal(f"{shown(path)} needs a directory where {taken[parent].pointer} wants a file")
            parent = parent.rpartition("/")[0]


def _refuse_too_much(config: Field, files: list[FileSpec], units: list[UnitSpec], limits: Limits) -> None:
    total = sum(len(file.content) for file in files)
    total += sum(len(unit.content or b"") + sum(len(d.content or b"") for d in unit.dropins) for unit in units)
    if total > limits.total_bytes:
        raise config.refusal(f"all files and units together have {total} bytes, more than {limits.total_bytes}")
