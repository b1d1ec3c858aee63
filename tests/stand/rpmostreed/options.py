"""Reading a{sv} dictionaries as rpm-ostreed does: by key and exact type, everything else ignored (1.10)."""

from __future__ import annotations

from typing import Any, Optional

from tests.stand.introspection import GLib


class Options:
    """A view of an a{sv} variant. A key of the wrong type counts as absent, and so does an empty array."""

    def __init__(self, variant: Any) -> None:
        self._variant = variant

    @classmethod
    def of(cls, **values: Any) -> Options:
        """Options made in the daemon itself; underscores in names stand for dashes, None for absent."""
        given = {key.replace("_", "-"): value for key, value in values.items() if value is not None}
        return cls(GLib.Variant("a{sv}", given))

    def boolean(self, key: str, default: bool = False) -> bool:
        found = self._lookup(key, "b")
        return default if found is None else bool(found.get_boolean())

    def text(self, key: str) -> Optional[str]:
        found = self._lookup(key, "s")
        return None if found is None else str(found.get_string())

    def texts(self, key: str) -> tuple[str, ...]:
        found = self._lookup(key, "as")
        return () if found is None else tuple(found.unpack())

    def pair(self, key: str) -> Optional[tuple[str, str]]:
        found = self._lookup(key, "(ss)")
        if found is None:
            return None
        first, second = found.unpack()
        return first, second

    def handles(self, key: str) -> tuple[int, ...]:
        found = self._lookup(key, "ah")
        return () if found is None else tuple(found.unpack())

    def handle(self, key: str) -> Optional[int]:
        found = self._lookup(key, "h")
        return None if found is None else int(found.get_handle())

    def _lookup(self, key: str, kind: str) -> Any:
        return self._variant.lookup_value(key, GLib.VariantType(kind))


def variants(**values: tuple[str, object]) -> dict[str, Any]:
    """A dictionary for an a{sv}: ``name=(type, value)``, underscores in names standing for dashes."""
    return {key.replace("_", "-"): GLib.Variant(kind, value) for key, (kind, value) in values.items()}


def names(*groups: tuple[str, ...]) -> list[str]:
    """All names of several options, each once, in order."""
    return list(dict.fromkeys(name for group in groups for name in group))


def entries(dictionary: Any) -> dict[str, Any]:
    """The keys of an a{sv} variant with their values as variants."""
    children = (dictionary.get_child_value(index) for index in range(dictionary.n_children()))
    return {child.get_child_value(0).get_string(): child.get_child_value(1).get_variant() for child in children}
