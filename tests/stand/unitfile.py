"""Reading of systemd unit files (systemd.syntax(7), systemd.service(5)), without any effect on the node.

Only what services of the stand need: sections, drop-ins, list settings that an empty value resets, quoting,
specifiers, environment variables, time spans, command prefixes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Optional

# Settings of which the last value counts are read with `last`; all others are lists.
_ESCAPES = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v", "\\": "\\", '"': '"',
            "'": "'", "s": " "}  # fmt: skip
_SPAN = re.compile(r"(\d+(?:\.\d+)?)\s*([a-zµ]*)")
_SPAN_UNITS = {
    **dict.fromkeys(("usec", "us", "µs"), 1e-6), **dict.fromkeys(("msec", "ms"), 1e-3),
    **dict.fromkeys(("seconds", "second", "sec", "s", ""), 1.0),
    **dict.fromkeys(("minutes", "minute", "min", "m"), 60.0), **dict.fromkeys(("hours", "hour", "hr", "h"), 3600.0),
    **dict.fromkeys(("days", "day", "d"), 86400.0),
}  # fmt: skip
_NAME = re.compile(r"^[A-Za-z0-9:_.\\-]+(@[A-Za-z0-9:_.\\@-]*)?\.(service|socket|target|path|timer|mount|automount|"
                   r"slice|scope|device|swap)$")  # fmt: skip


class BadSetting(Exception):
    """A unit file that cannot be used; the text names the setting."""


@dataclass
class UnitFile:
    """The settings of a unit: its fragment and then its drop-ins, in the order in which they apply."""

    values: dict[tuple[str, str], list[str]] = field(default_factory=dict)

    @classmethod
    def parse(cls, texts: Iterable[str]) -> UnitFile:
        """Read the fragment's text and the drop-ins' texts; an empty value drops what was set before."""
        unit = cls()
        for text in texts:
            section = ""
            for line in _logical_lines(text):
                if line.startswith("[") and line.endswith("]"):
                    section = line[1:-1]
                elif "=" in line:
                    key, value = (part.strip() for part in line.split("=", 1))
                    unit._assign((section, key), value)
        return unit

    def _assign(self, key: tuple[str, str], value: str) -> None:
        if value:
            self.values.setdefault(key, []).append(value)
        else:
            self.values[key] = []

    def all(self, section: str, key: str) -> list[str]:
        """All values of a list setting."""
        return list(self.values.get((section, key), []))

    def last(self, section: str, key: str, default: str = "") -> str:
        """The value of a setting that has one value."""
        values = self.values.get((section, key))
        return values[-1] if values else default

    def words(self, section: str, key: str) -> list[str]:
        """All words of all values."""
        return [word for value in self.all(section, key) for word in split_words(value)]

    def flag(self, section: str, key: str, default: bool = False) -> bool:
        """A boolean setting. Raises BadSetting."""
        text = self.last(section, key)
        if not text:
            return default
        if text.lower() in ("1", "yes", "y", "true", "t", "on"):
            return True
        if text.lower() in ("0", "no", "n", "false", "f", "off"):
            return False
        raise BadSetting(f"{key}={text} is not a boolean")

    def seconds(self, section: str, key: str, default: float) -> float:
        """A time span in seconds, infinity where the unit says so. Raises BadSetting."""
        text = self.last(section, key)
        return parse_span(text) if text else default


def _logical_lines(text: str) -> list[str]:
    """Lines without comments, a backslash at the end joined with the next line (comments between are skipped)."""
    lines: list[str] = []
    pending = ""
    for raw in text.splitlines():
        line = raw.strip()
        if line.startswith(("#", ";")) or (not line and not pending):
            continue
        if line.endswith("\\"):
            pending += line[:-1] + " "
        else:
            lines.append(pending + line)
            pending = ""
    return [*lines, pending.strip()] if pending.strip() else lines


def parse_span(text: str) -> float:
    """A systemd.time(7) span in seconds. Raises BadSetting."""
    if text == "infinity":
        return float("inf")
    parts = _SPAN.findall(text)
    if not parts or _SPAN.sub("", text).strip() or any(unit not in _SPAN_UNITS for _, unit in parts):
        raise BadSetting(f"{text!r} is not a time span")
    return sum(float(number) * _SPAN_UNITS[unit] for number, unit in parts)


def split_words(text: str) -> list[str]:
    """Split as systemd splits command lines: quotes at the begin of a word, C escapes. Raises BadSetting."""
    words: list[str] = []
    word: Optional[str] = None
    quote = ""
    position = 0
    while position < len(text):
        char = text[position]
        if char == "\\" and position + 1 < len(text):
            following = text[position + 1]
            word = (word or "") + _ESCAPES.get(following, "\\" + following)
            position += 1
        elif quote:
            if char == quote:
                quote = ""
            else:
                word = (word or "") + char
        elif char in "\"'":
            quote, word = char, word or ""
        elif char.isspace():
            if word is not None:
                words.append(word)
            word = None
        else:
            word = (word or "") + char
        position += 1
    if quote:
        raise BadSetting(f"unbalanced quotes in {text!r}")
    return words if word is None else [*words, word]


def valid_name(name: str) -> bool:
    """True for a full unit name ("a.service", "a@b.service")."""
    return bool(_NAME.match(name)) and len(name) < 256


def template_of(name: str) -> str:
    """ "a@.service" for "a@b.service", "" for a unit that is no instance."""
    prefix, at, rest = name.partition("@")
    return f"{prefix}@.{rest.rpartition('.')[2]}" if at and not rest.startswith(".") else ""


def specifiers(name: str, boot_id: str, hostname: str) -> dict[str, str]:
    """The values of the specifiers that services use (systemd.unit(5), "Specifiers")."""
    stem, _, _ = name.rpartition(".")
    prefix, _, instance = stem.partition("@")
    return {"n": name, "N": stem, "p": prefix, "i": instance, "I": instance, "t": "/run", "S": "/var/lib",
            "C": "/var/cache", "L": "/var/log", "E": "/etc", "T": "/tmp", "V": "/var/tmp", "%": "%",
            "b": boot_id.replace("-", ""), "H": hostname, "u": "root", "U": "0", "h": "/root"}  # fmt: skip


def expand_specifiers(text: str, table: Mapping[str, str]) -> str:
    """Replace %n and the like; unknown ones stay."""
    return re.sub(r"%(.)", lambda match: table.get(match.group(1), match.group(0)), text)


def expand_variables(words: Iterable[str], environment: Mapping[str, str]) -> list[str]:
    """Replace ${X} inside of words and words that are $X, the latter split at spaces (systemd.service(5))."""
    expanded: list[str] = []
    for word in words:
        whole = re.fullmatch(r"\$([A-Za-z_][A-Za-z0-9_]*)", word)
        if whole:
            expanded += environment.get(whole.group(1), "").split()
        else:
            text = re.sub(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}", lambda match: environment.get(match.group(1), ""), word)
            expanded.append(text.replace("$$", "$"))
    return expanded


@dataclass(frozen=True)
class Command:
    """One ExecStart= or similar line; `ignore_failure` is the "-" prefix, `literal` the ":" one (no variables)."""

    words: tuple[str, ...]
    ignore_failure: bool
    literal: bool

    @classmethod
    def parse(cls, line: str, table: Mapping[str, str]) -> Command:
        """Read a command line; "+", "!" and "!!" mean nothing here, all runs as root. Raises BadSetting."""
        prefix = re.match(r"^[-@:+!]*", line)
        marks = prefix.group(0) if prefix else ""
        words = [expand_specifiers(word, table) for word in split_words(line[len(marks) :])]
        if "@" in marks and len(words) > 1:
            del words[1]  # argv[0] differs from the program's path: of no interest here.
        if not words:
            raise BadSetting(f"no command in {line!r}")
        return cls(tuple(words), "-" in marks, ":" in marks)

    def argv(self, environment: Mapping[str, str]) -> list[str]:
        """The arguments with variables replaced; the program's own path is never replaced."""
        if self.literal:
            return list(self.words)
        return [self.words[0], *expand_variables(self.words[1:], environment)]
