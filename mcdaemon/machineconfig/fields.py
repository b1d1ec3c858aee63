"""A value of a config together with its place, so that every refusal names a JSON pointer into the document given.

Nothing in a config may be ignored in silence: what is neither honoured nor empty is refused here by name.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Optional, Union

from mcdaemon.document import MAX_DEPTH, MAX_VALUES, pointer
from mcdaemon.errors import Irreconcilable

_KINDS = {type(None): "null", bool: "true or false", int: "a number", float: "a number", str: "text", list: "a list"}


def shown(text: object) -> str:
    """A short, quoted, printable form of a name, for an error text. Never used for contents or secrets."""
    plain = str(text)
    return repr(plain if len(plain) <= 120 else plain[:117] + "...")


@dataclass(frozen=True)
class Field:
    """A value, its JSON pointer in the document, and the document's name (a file, or an object)."""

    value: object = field(repr=False)
    pointer: str
    where: str

    def refusal(self, problem: str, hint: str = "") -> Irreconcilable:
        """The error for this field: "cannot use <where>: <pointer>: <problem>"."""
        return Irreconcilable(f"cannot use {self.where}: {self.pointer or '/'}: {problem}", self.pointer, hint)

    def child(self, key: Union[str, int]) -> Field:
        """The member `key` of a mapping or list; its value is None where it is missing."""
        inner: object = None
        if isinstance(self.value, dict):
            inner = self.value.get(key)
        elif isinstance(self.value, list) and isinstance(key, int) and 0 <= key < len(self.value):
            inner = self.value[key]
        return Field(inner, pointer(self.pointer, key), self.where)

    def members(self) -> Mapping[str, object]:
        """The value as a mapping; null is an empty one. Raises Irreconcilable for anything else."""
        if self.value is None:
            return {}
        if not isinstance(self.value, dict):
            raise self._wrong("a mapping")
        return self.value

    def elements(self) -> list[Field]:
        """The elements of a list; null is an empty one. Raises Irreconcilable for anything else."""
        if self.value is None:
            return []
        if not isinstance(self.value, list):
            raise self._wrong("a list")
        return [Field(item, pointer(self.pointer, index), self.where) for index, item in enumerate(self.value)]

    def text(self) -> Optional[str]:
        """The value as text, None where it is null. Raises Irreconcilable for anything else."""
        if self.value is not None and not isinstance(self.value, str):
            raise self._wrong("text")
        return self.value

    def flag(self) -> Optional[bool]:
        """The value as true or false, None where it is null. Raises Irreconcilable for anything else."""
        if self.value is not None and not isinstance(self.value, bool):
            raise self._wrong("true or false")
        return self.value

    def number(self) -> Optional[int]:
        """The value as a whole number, None where it is null. Raises Irreconcilable for anything else."""
        if self.value is None:
            return None
        if isinstance(self.value, bool) or not isinstance(self.value, int):
            raise self._wrong("a whole number")
        return self.value

    def texts(self) -> list[str]:
        """The value as a list of texts. Raises Irreconcilable at the element that is not one."""
        found = []
        for element in self.elements():
            text = element.text()
            if text is None:
                raise element._wrong("text")
            found.append(text)
        return found

    def only(self, known: Collection[str], problem: str, hint: str = "") -> None:
        """Refuse the first member that is not among `known` and is not empty."""
        for key in self.members():
            if key not in known:
                self.child(key).nothing(problem, hint)

    def nothing(self, problem: str, hint: str = "") -> None:
        """Refuse the first value at or below this field that is not empty (null, "", empty list or mapping)."""
        if self.is_empty():
            return
        if isinstance(self.value, dict):
            for key in self.value:
                self.child(key).nothing(problem, hint)
        raise (self.child(0) if isinstance(self.value, list) else self).refusal(problem, hint)

    def is_empty(self) -> bool:
        """Whether there is nothing here: null, "", an empty list, or a mapping of such things.

        Go writes empty structs (`"security": {"tls": {}}`) that ask for nothing.
        """
        if isinstance(self.value, dict):
            return all(self.child(key).is_empty() for key in self.value)
        return self.value is None or self.value in ("", [])

    def _wrong(self, expected: str) -> Irreconcilable:
        # The value itself stays out of the text: it may be a secret in the wrong place.
        return self.refusal(f"expected {expected}, found {_KINDS.get(type(self.value), 'a mapping')}")


def require_plain(root: Field) -> None:
    """Refuse what JSON cannot hold or UTF-8 cannot write, and what is too deep or too large to look at.

    After this the document can be walked by recursion, written as canonical JSON, and stored.
    """
    count = 0
    stack: list[tuple[Field, int]] = [(root, 0)]
    while stack:
        here, depth = stack.pop()
        count += 1
        if depth > MAX_DEPTH or count > MAX_VALUES:
            raise here.refusal("the document is nested too deeply or has too many values")
        value = here.value
        if isinstance(value, str):
            _require_encodable(value, here)
        elif isinstance(value, float):
            if not math.isfinite(value):
                raise here.refusal("not a number that JSON can hold")
        elif isinstance(value, (dict, list)):
            stack.extend((inner, depth + 1) for inner in _inside(here))
        elif value is not None and not isinstance(value, (bool, int)):
            raise here.refusal(f"{type(value).__name__} is not a value that JSON can hold")


def _inside(here: Field) -> Iterator[Field]:
    if isinstance(here.value, dict):
        for key in here.value:
            if not isinstance(key, str):
                raise here.refusal("a key has to be text")
            _require_encodable(key, here)
            yield here.child(key)
    else:
        yield from here.elements()


def _require_encodable(text: str, here: Field) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise here.refusal("the text holds half of a surrogate pair, which cannot be written as UTF-8") from error
