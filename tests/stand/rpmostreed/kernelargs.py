"""Patching a kernel command line as libostree does (OS:ostree-kernel-args.c), with its error texts.

Written out because OSTree.KernelArgs of libostree 2022.7 cannot be used through introspection."""

from __future__ import annotations

from typing import Optional

from tests.stand.rpmostreed.errors import OperationFailed


class KernelArguments:
    """An ordered list of ``key`` and ``key=value`` arguments. Its methods raise OperationFailed."""

    def __init__(self, text: str) -> None:
        self.items: list[str] = text.split()

    def append(self, argument: str) -> None:
        self.items.append(argument)

    def delete(self, argument: str) -> None:
        """Deletes ``key=value``, or by bare key where that has a single value."""
        key, value = _split(argument)
        matching = self._of(key)
        if value is None and len(matching) > 1 and argument not in matching:
            raise OperationFailed(f"Multiple values for key '{key}' found")
        if value is None and argument not in matching:
            self.items.remove(matching[0])
        elif argument in matching:
            self.items.remove(argument)
        else:
            raise OperationFailed(f"No karg '{key}={value}' found")

    def replace(self, argument: str) -> None:
        """``KEY=NEW`` where KEY has a single value, or ``KEY=OLD=NEW``."""
        key, value = _split(argument)
        matching = self._of(key)
        old, separator, new = (value or "").partition("=")
        if separator:
            if f"{key}={old}" not in matching:
                raise OperationFailed(f"No karg '{key}={old}' found")
            self._put(f"{key}={old}", f"{key}={new}")
            return
        if len(matching) > 1:
            raise OperationFailed(f"Multiple values for key '{key}' found")
        self._put(matching[0], argument)

    def _of(self, key: str) -> list[str]:
        matching = [item for item in self.items if _split(item)[0] == key]
        if not matching:
            raise OperationFailed(f"No key '{key}' found")
        return matching

    def _put(self, old: str, new: str) -> None:
        self.items[self.items.index(old)] = new


def _split(argument: str) -> tuple[str, Optional[str]]:
    key, separator, value = argument.partition("=")
    return key, value if separator else None
