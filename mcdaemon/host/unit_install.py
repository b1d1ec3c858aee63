"""The names of systemd units and their [Install] sections: which links enable a unit. Pure.

`systemctl enable` cannot be used: it works on the running system, file by file and not crash-safe (field case
UNIT-02), and the links have to be known before they are made, to be committed and validated in a root that does not
run yet (UNIT-15, UNIT-16). So the section is interpreted here, as systemd's src/shared/install.c does: WantedBy=,
RequiredBy=, UpheldBy= (systemd 254; an older one does not look at these links), Alias=, Also=, DefaultInstance=,
drop-ins, instances of templates, and the specifiers %i %j %n %N %p %%. Specifiers that depend on the machine are not
resolved: such a word is left out with a note.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Optional

DIRECTORY = "/etc/systemd/system"

_TYPES = "service|socket|target|device|mount|automount|swap|timer|path|slice|scope"
_NAME = re.compile(rf"[A-Za-z0-9:_.\\-]+(@[A-Za-z0-9:_.\\@-]*)?\.({_TYPES})")
_LONGEST_NAME = 255
# unit_type_may_alias() in systemd's src/basic/unit-file.c.
_ALIASED_TYPES = frozenset({"service", "socket", "target", "device", "timer", "path"})
_SUFFIXES = {"WantedBy": "wants", "RequiredBy": "requires", "UpheldBy": "upholds"}


class Form(enum.Enum):
    """The three forms of a unit name: a.service, a@.service, a@b.service."""

    PLAIN = "plain"
    TEMPLATE = "template"
    INSTANCE = "instance"


@dataclass(frozen=True)
class Install:
    """An [Install] section. The words still have their specifiers, but for `default_instance`.

    `dependencies` are pairs of a unit and "wants", "requires" or "upholds".
    """

    aliases: tuple[str, ...] = ()
    dependencies: tuple[tuple[str, str], ...] = ()
    also: tuple[str, ...] = ()
    default_instance: str = ""


@dataclass(frozen=True)
class Links:
    """The enablement links (path, target) of one unit, the units that go with it, and what systemd would refuse."""

    links: tuple[tuple[str, str], ...] = ()
    also: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def form_of(name: str) -> Optional[Form]:
    """The form of a unit name; None where systemd would not take it as one (characters, length, suffix)."""
    if len(name) > _LONGEST_NAME or not _NAME.fullmatch(name):
        return None
    if "@" not in name:
        return Form.PLAIN
    return Form.INSTANCE if instance_of(name) else Form.TEMPLATE


def type_of(name: str) -> str:
    """The suffix of a unit name, without the dot."""
    return name.rpartition(".")[2]


def instance_of(name: str) -> str:
    """What stands between the @ and the suffix of a unit name."""
    return name.partition("@")[2][: -len(type_of(name)) - 1]


def template_of(name: str) -> str:
    """The template of an instance; any other name is its own."""
    prefix, at, _ = name.partition("@")
    return f"{prefix}@.{type_of(name)}" if at else name


def with_instance(template: str, instance: str) -> str:
    """The name of an instance of a template."""
    return f"{template.partition('@')[0]}@{instance}.{type_of(template)}"


def install_links(name: str, text: str, path: str = "") -> tuple[tuple[str, str], ...]:
    """The links (path, target) that `systemctl enable` makes for one unit file, without those of units in its Also=.

    `path` is where the file is; without it, it is the file of that name in /etc/systemd/system.
    """
    return links_of(name, path or f"{DIRECTORY}/{name}", (text,)).links


def links_of(name: str, path: str, texts: Iterable[str]) -> Links:
    """The links of a unit whose file is at `path`, under its own name or that of an instance: install_info_apply().

    `texts` are the unit file and its drop-ins, in the order in which they apply.
    """
    install = parse_install(name, texts)
    notes: list[str] = []
    links: dict[str, str] = {}
    for word in install.aliases:
        alias = _alias(word, name, install.default_instance)
        if alias is None:
            notes.append(f"{name} cannot have the alias {word!r}")
        elif f"{DIRECTORY}/{alias}" != path and alias != name:
            links[f"{DIRECTORY}/{alias}"] = path
    enabled = _enabled_name(name, install.default_instance)
    for word, suffix in install.dependencies:
        other = _expand(word, name, install.default_instance)
        if other is None or not _may_depend(other, enabled):
            notes.append(f"{name} cannot be enabled for {word!r}")
        else:
            links[f"{DIRECTORY}/{other}.{suffix}/{enabled}"] = path
    also = [_expand(word, name, install.default_instance) for word in install.also]
    if not links and not also:
        notes.append(f"{name} cannot be enabled: its [Install] section asks for nothing that can be done")
    return Links(tuple(links.items()), tuple(word for word in also if word and form_of(word)), tuple(notes))


def parse_install(name: str, texts: Iterable[str]) -> Install:
    """The [Install] section of a unit file and its drop-ins. Never fails: systemd ignores what it does not know."""
    aliases: list[str] = []
    dependencies: list[tuple[str, str]] = []
    also: list[str] = []
    default = ""
    for text in texts:
        for key, value in _assignments(text):
            if key == "Alias" and type_of(name) in _ALIASED_TYPES:
                aliases = [*aliases, *_words(value)] if value else []
            elif key in _SUFFIXES:
                suffix = _SUFFIXES[key]
                # An empty assignment resets the list of its key.
                dependencies = [pair for pair in dependencies if value or pair[1] != suffix]
                dependencies += [(word, suffix) for word in _words(value)]
            elif key == "Also":
                also += value.split()
            elif key == "DefaultInstance" and form_of(name) is Form.TEMPLATE:
                default = _expand(value, name, "") or ""
    return Install(tuple(aliases), tuple(dependencies), tuple(also), default)


def _enabled_name(name: str, default: str) -> str:
    if form_of(name) is Form.TEMPLATE and default:
        return with_instance(name, default)
    return name


def _may_depend(other: str, enabled: str) -> bool:
    # A template without an instance can be wanted only by what passes an instance on.
    if form_of(enabled) is Form.TEMPLATE:
        return form_of(other) in (Form.TEMPLATE, Form.INSTANCE)
    return form_of(other) is not None


def _alias(word: str, name: str, default: str) -> Optional[str]:
    """An Alias= word resolved, or None where systemd refuses it: unit_file_verify_alias()."""
    alias = _expand(word, name, default)
    if alias is None:
        return None
    if "/" in alias:
        return alias if _is_dependency_alias(alias, name) else None
    if form_of(alias) is Form.TEMPLATE and form_of(name) is Form.INSTANCE:
        alias = with_instance(alias, instance_of(name))
    form, own = form_of(alias), form_of(name)
    if form is None or type_of(alias) != type_of(name):
        return None
    if form is Form.INSTANCE and own is Form.INSTANCE and instance_of(alias) != instance_of(name):
        return None
    return alias if form is own or (form is Form.INSTANCE and own is Form.TEMPLATE) else None


def _is_dependency_alias(alias: str, name: str) -> bool:
    """The old spelling of WantedBy=: Alias=other.target.wants/name."""
    directory, _, link = alias.rpartition("/")
    other, _, suffix = directory.rpartition(".")
    if suffix not in ("wants", "requires") or form_of(other) is None:
        return False
    if link == name:
        return form_of(link) is not Form.TEMPLATE or form_of(other) is Form.TEMPLATE
    return form_of(link) is Form.INSTANCE and template_of(link) == name


def _expand(word: str, name: str, default: str) -> Optional[str]:
    """Resolve the specifiers of a word, as install_name_printf(); None for one that depends on the machine."""
    stem = name[: -len(type_of(name)) - 1]
    prefix, at, instance = stem.partition("@")
    instance = instance or (default if at else "")
    values = {
        "i": instance,
        "j": prefix.rpartition("-")[2],
        "n": f"{prefix}{at}{instance}.{type_of(name)}",
        "N": f"{prefix}{at}{instance}",
        "p": prefix,
        "%": "%",
    }
    parts = re.split(r"%(.)", word)
    if any(specifier not in values for specifier in parts[1::2]):
        return None
    return "".join(values[part] if index % 2 else part for index, part in enumerate(parts))


def _assignments(text: str) -> Iterator[tuple[str, str]]:
    """The assignments in the [Install] sections of a unit file, systemd.syntax(7)."""
    section = ""
    for line in _logical_lines(text):
        if line.startswith("["):
            section = line[1:-1] if line.endswith("]") else ""
            continue
        key, separator, value = line.partition("=")
        if separator and section == "Install":
            yield key.rstrip(), value.strip()


def _logical_lines(text: str) -> Iterator[str]:
    held = ""
    for line in re.split(r"\r\n|\n|\r", text.lstrip("\ufeff")):
        if line.lstrip().startswith(("#", ";")):
            # Also in the middle of a continued line.
            continue
        if (len(line) - len(line.rstrip("\\"))) % 2:
            held += line[:-1] + " "
            continue
        whole, held = (held + line).strip(), ""
        if whole:
            yield whole
    if held.strip():
        yield held.strip()


def _words(value: str) -> tuple[str, ...]:
    """Split at blanks outside quotes. The backslash stays: unit names use it. Nothing where quotes do not close."""
    words: list[str] = []
    word: Optional[str] = None
    quote = ""
    for character in value:
        if quote:
            quote = "" if character == quote else quote
            word = (word or "") + (character if quote else "")
        elif character in "\"'":
            quote, word = character, word or ""
        elif not character.isspace():
            word = (word or "") + character
        elif word is not None:
            words.append(word)
            word = None
    if quote:
        return ()
    return tuple(words if word is None else [*words, word])
