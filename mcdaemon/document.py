"""YAML and JSON text as plain data, with the line of every value.

Configs and settings are written by people, so an error has to name a line. The data that comes out is what JSON can
hold: text, whole and decimal numbers, booleans, null, lists, and mappings with text keys. The reader builds it from
parser events with a stack of its own, so neither depth nor aliases of the input decide how much it costs.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import NoReturn, Optional, Union

import yaml

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

MAX_DEPTH = 64
MAX_VALUES = 1_000_000

_NULL = frozenset({"", "~", "null", "Null", "NULL"})
_TRUE = frozenset({"true", "True", "TRUE", "yes", "Yes", "YES", "on", "On", "ON"})
_FALSE = frozenset({"false", "False", "FALSE", "no", "No", "NO", "off", "Off", "OFF"})
# Octal in both spellings: `mode: 0644` and `mode: 0o644` are both common in MachineConfigs, and the cluster takes both.
_INTEGER = re.compile(r"[-+]?(?:0[oO]?[0-7]+|0[xX][0-9a-fA-F]+|0[bB][01]+|0|[1-9][0-9]*)")
_FLOAT = re.compile(r"[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?")
_STR_TAGS = frozenset({"!", "tag:yaml.org,2002:str"})


class Malformed(ValueError):
    """The text is not the YAML or JSON that was expected; `line` counts from 1, 0 where it is not known."""

    def __init__(self, problem: str, line: int = 0) -> None:
        super().__init__(f"line {line}: {problem}" if line else problem)
        self.problem = problem
        self.line = line


@dataclass(frozen=True)
class Document:
    """One document of a text: its data, and the line (from 1) of each value by JSON pointer, where it is known."""

    data: object
    lines: dict[str, int] = field(default_factory=dict)

    def line(self, pointer: str) -> int:
        """The line of the value at `pointer`, or of the nearest value around it; 0 where nothing is known."""
        while pointer and pointer not in self.lines:
            pointer = pointer.rpartition("/")[0]
        return self.lines.get(pointer, 0)


def pointer(parent: str, key: Union[str, int]) -> str:
    """The JSON pointer (RFC 6901) of the member `key` of the value at `parent`."""
    return f"{parent}/" + str(key).replace("~", "~0").replace("/", "~1")


def read_json(text: str) -> Document:
    """Read one JSON document; raises Malformed, also for a key given twice (which of the two was meant?)."""
    try:
        return Document(json.loads(text, object_pairs_hook=_unique_pairs, parse_constant=_no_constant))
    except Malformed:
        raise
    except json.JSONDecodeError as error:
        raise Malformed(error.msg, error.lineno) from error
    except RecursionError as error:
        raise Malformed("the values are nested too deeply") from error
    except ValueError as error:
        # Python's own bound on the digits of a number, which keeps a short text from costing minutes.
        raise Malformed("a number is too long") from error


def read_yaml(text: str) -> list[Document]:
    """Read all documents of a YAML text (empty ones left out); raises Malformed."""
    documents = []
    builder: Optional[_Builder] = None
    try:
        for event in yaml.parse(text, Loader=_LOADER):
            if isinstance(event, yaml.DocumentStartEvent):
                builder = _Builder()
            elif isinstance(event, yaml.DocumentEndEvent):
                assert builder is not None
                if builder.root is not None:
                    documents.append(Document(builder.root, builder.lines))
            elif builder is not None:
                builder.take(event)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise Malformed(error.problem or error.context or "not YAML", mark.line + 1 if mark else 0) from error
    except yaml.YAMLError as error:
        raise Malformed(f"not YAML: {str(error).splitlines()[0]}") from error
    return documents


def _unique_pairs(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result: dict[str, object] = {}
    for key, value in pairs:
        if key in result:
            raise Malformed(f'the key "{key[:80]}" is given twice')
        result[key] = value
    return result


def _no_constant(text: str) -> NoReturn:
    raise Malformed(f"{text} is not a JSON value")


@dataclass
class _Open:
    """A list or mapping that the parser is inside of."""

    value: Union[list[object], dict[str, object]]
    pointer: str
    line: int
    anchor: Optional[str]
    started_at: int
    key: Optional[str] = None


class _Builder:
    """Builds the data of one document from the parser's events."""

    def __init__(self) -> None:
        self.root: object = None
        self.lines: dict[str, int] = {}
        self._open: list[_Open] = []
        self._anchors: dict[str, tuple[object, int]] = {}
        self._count = 0

    def take(self, event: yaml.Event) -> None:
        line = event.start_mark.line + 1 if event.start_mark else 0
        if isinstance(event, yaml.ScalarEvent):
            self._scalar(event, line)
        elif isinstance(event, (yaml.SequenceStartEvent, yaml.MappingStartEvent)):
            self._start([] if isinstance(event, yaml.SequenceStartEvent) else {}, event, line)
        elif isinstance(event, (yaml.SequenceEndEvent, yaml.MappingEndEvent)):
            self._end()
        elif isinstance(event, yaml.AliasEvent):
            self._alias(event, line)

    def _scalar(self, event: yaml.ScalarEvent, line: int) -> None:
        parent = self._open[-1] if self._open else None
        if parent is not None and isinstance(parent.value, dict) and parent.key is None:
            self._key(parent, str(event.value), line)
            return
        value = _value(event, line)
        if event.anchor:
            self._anchors[event.anchor] = (value, 1)
        self._place(value, line, 1)

    def _key(self, parent: _Open, key: str, line: int) -> None:
        if key == "<<":
            raise Malformed("merge keys (<<) are not supported; write the values out", line)
        if key in parent.value:
            raise Malformed(f'the key "{key[:80]}" is given twice', line)
        parent.key = key

    def _start(
        self, value: Union[list[object], dict[str, object]], event: yaml.CollectionStartEvent, line: int
    ) -> None:
        if len(self._open) >= MAX_DEPTH:
            raise Malformed(f"the values are nested more than {MAX_DEPTH} deep", line)
        if event.tag not in (None, "!", "tag:yaml.org,2002:seq", "tag:yaml.org,2002:map"):
            raise Malformed(f"the tag {event.tag} is not supported", line)
        if self._open and isinstance(self._open[-1].value, dict) and self._open[-1].key is None:
            raise Malformed("a key has to be text", line)
        at = self._place(value, line, 1)
        self._open.append(_Open(value, at, line, event.anchor, self._count))

    def _end(self) -> None:
        done = self._open.pop()
        if done.anchor:
            # Known only from here on, so that a value can not contain itself.
            self._anchors[done.anchor] = (done.value, self._count - done.started_at + 1)

    def _alias(self, event: yaml.AliasEvent, line: int) -> None:
        if event.anchor not in self._anchors:
            raise Malformed(f"the alias *{event.anchor} stands before its anchor is complete", line)
        if self._open and isinstance(self._open[-1].value, dict) and self._open[-1].key is None:
            raise Malformed("a key has to be text", line)
        value, size = self._anchors[event.anchor]
        self._place(value, line, size)

    def _place(self, value: object, line: int, size: int) -> str:
        self._count += size
        if self._count > MAX_VALUES:
            raise Malformed(f"more than {MAX_VALUES} values (aliases counted each time)", line)
        if not self._open:
            self.root = value
            self.lines[""] = line
            return ""
        parent = self._open[-1]
        if isinstance(parent.value, list):
            at = pointer(parent.pointer, len(parent.value))
            parent.value.append(value)
        else:
            assert parent.key is not None
            at = pointer(parent.pointer, parent.key)
            parent.value[parent.key] = value
            parent.key = None
        self.lines[at] = line
        return at


def _value(event: yaml.ScalarEvent, line: int) -> object:
    """The value of a scalar: plain ones by their looks, all others text."""
    text = str(event.value)
    if event.tag is not None and event.tag not in _STR_TAGS:
        raise Malformed(f"the tag {event.tag} is not supported", line)
    if event.style or event.tag in _STR_TAGS:  # plain is None in pure Python and empty in libyaml
        return text
    if text in _NULL:
        return None
    if text in _TRUE or text in _FALSE:
        return text in _TRUE
    if _INTEGER.fullmatch(text):
        return _integer(text, line)
    if _FLOAT.fullmatch(text):
        return float(text)
    return text


def _integer(text: str, line: int) -> int:
    # Python refuses to convert very long numbers, and nothing that is configured here is longer than 64 bits.
    if len(text) > 70:
        raise Malformed("the number is too long", line)
    sign = -1 if text.startswith("-") else 1
    digits = text.lstrip("+-").lower()
    if digits[:2] in ("0x", "0b", "0o"):
        return sign * int(digits, 0)
    if digits.startswith("0") and digits != "0":
        return sign * int(digits, 8)
    return sign * int(digits)
