"""What differs between rpm-ostree's versions, as letters (rpm-ostree.md 6.3).

A: before 2024.6, ``lock-finalization`` is the flag file that libostree 2022.7 knows, and shows up on D-Bus.
B: since 2024.6, it is the key ``locked`` in the staged file only. libostree 2022.7 ignores that key: see ``lockkey``.
C: since 2025.10, a digest that is imported already is not opened again.
D: before 2023.2, the transaction socket is an abstract one with a random name.
E: since 2026.1, installing what a container image already has needs no ``allow-inactive``, and an empty package
   transaction passes with ``idempotent-layering``.
"""

from __future__ import annotations

from dataclasses import dataclass

LETTERS = "ABCDE"


@dataclass(frozen=True)
class Profile:
    """One version's behaviour. Build it with ``parse``."""

    lock_key: bool
    skip_known_digest: bool
    abstract_socket: bool
    skip_base_check: bool


def parse(letters: str) -> Profile:
    """A profile from its letters, e.g. ``AC``. Raises ValueError on an unknown letter and on A with B."""
    unknown = sorted(set(letters) - set(LETTERS))
    if unknown:
        raise ValueError(f"unknown profile letter {', '.join(unknown)} in {letters!r}: known are {LETTERS}")
    if "A" in letters and "B" in letters:
        raise ValueError(f"profile {letters!r} names both A and B")
    return Profile("B" in letters, "C" in letters, "D" in letters, "E" in letters)
