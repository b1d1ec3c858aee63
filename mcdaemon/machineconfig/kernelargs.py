"""Kernel arguments: one tokenizer for configs, boot entries and the running command line, and the plan between them.

The managed arguments of a command line are those that the config names; all others (root=, ostree=, what the installer
or an administrator added) are left where they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Optional

_BLANKS = " \t\n\v\f\r"
# ostree finds its deployment by the first, and the second is the marker of an update (design, StageKargs).
_RESERVED = ("ostree", "mcdaemon.update")


@dataclass(frozen=True)
class KargsPlan:
    """What rpm-ostree is asked for in one call: arguments to delete where present, then arguments to append."""

    delete_if_present: tuple[str, ...] = ()
    append: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.delete_if_present or self.append)


def split(text: str) -> tuple[str, ...]:
    """Split at blanks outside of double quotes; the quotes stay, order and repeats are kept.

    As the kernel does (lib/cmdline.c:next_arg) and the MCD (update.go:splitKernelArguments). KARG-02, KARG-11: one
    entry may hold several arguments, and only one argument may be passed on per item.
    """
    found: list[str] = []
    current: list[str] = []
    quoted = False
    for char in text:
        if char in _BLANKS and not quoted:
            if current:
                found.append("".join(current))
                current = []
            continue
        if char == '"':
            quoted = not quoted
        current.append(char)
    if current:
        found.append("".join(current))
    return tuple(found)


def split_all(entries: Iterable[str]) -> tuple[str, ...]:
    """The arguments of all entries of a config's list, in order."""
    return tuple(token for entry in entries for token in split(entry))


def problem(entry: str) -> Optional[str]:
    """Why an entry of a config's list cannot be used, or None."""
    if entry.count('"') % 2:
        return "a double quote is not closed"
    for token in split(entry):
        if any(not char.isprintable() for char in token):
            return "a kernel argument holds a character that cannot be printed"
        key = token.partition("=")[0]
        if key in _RESERVED:
            return f"the kernel argument {key} cannot be managed by a config"
    return None


def managed(cmdline: Iterable[str], names: Iterable[str]) -> tuple[str, ...]:
    """The arguments of `cmdline` that occur in `names`, in the command line's order and multiplicity (H.2)."""
    wanted = frozenset(names)
    return tuple(token for token in cmdline if token in wanted)


def satisfied(cmdline: Iterable[str], wanted: Sequence[str], former: Iterable[str] = ()) -> bool:
    """Whether `cmdline` holds exactly `wanted`, in order and with repeats, and nothing more of `former` (KARG-13)."""
    return managed(cmdline, (*wanted, *former)) == tuple(wanted)


def plan(current_managed: Sequence[str], wanted: Sequence[str], existing_cmdline: Sequence[str]) -> KargsPlan:
    """How to get from `existing_cmdline` to one that holds exactly `wanted` of all managed arguments.

    `current_managed` are the arguments of the config that the deployment was made for. Everything managed is deleted
    and all of `wanted` is appended, which is the only way to get order and repeats right (KARG-03). Nothing is asked
    for when nothing would change (KARG-07), and what the installer already put there is not doubled (KARG-05). An
    argument that the config no longer wants is deleted as often as the config had it: what is there beyond that is
    somebody else's. The same three inputs give the same plan, so it is to be made against the booted deployment.
    """
    if satisfied(existing_cmdline, wanted, current_managed):
        return KargsPlan()
    delete: list[str] = []
    again = frozenset(wanted)
    left = Counter(current_managed)
    for token in existing_cmdline:
        if token in again:
            delete.append(token)
        elif left[token] > 0:
            left[token] -= 1
            delete.append(token)
    return KargsPlan(tuple(delete), tuple(wanted))


def expected(existing_cmdline: Sequence[str], change: KargsPlan) -> tuple[str, ...]:
    """The arguments after `change`, in order: what the staged deployment has to have."""
    left = Counter(change.delete_if_present)
    kept = []
    for token in existing_cmdline:
        if left[token] > 0:
            left[token] -= 1
        else:
            kept.append(token)
    return (*kept, *change.append)
