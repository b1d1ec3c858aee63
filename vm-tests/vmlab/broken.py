"""mcdaemon with one thing broken on purpose: the suite has to notice (`make vm-test BROKEN=…`).

A suite that is green for a daemon without its early unit, or without a single fsync, proves nothing.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


class CannotBreak(Exception):
    """The source does not look as this module remembers it: what is to be broken has moved."""


@dataclass(frozen=True)
class Damage:
    """What is broken: texts of one source file that become others. `caught_by`: the scenario that has to fail."""

    caught_by: str
    source: str
    changes: tuple[tuple[str, str], ...]


DAMAGES: Mapping[str, Damage] = MappingProxyType(
    {
        "no-early-unit": Damage(
            "test_early_commit.py",
            "mcdaemon/agent.py",
            (("    outcome = early.run(", "    return Outcome(early.Early.NOTHING, '')\n    outcome = early.run("),),
        ),
        "drain-before-verify": Damage(
            "test_full_update.py",
            "mcdaemon/decide.py",
            (
                (
                    "if o.staged is Staged.READY and u.verified:",
                    "if o.staged is Staged.READY and (u.verified or not u.drained):",
                ),
                ("    if u.draining:\n", "    if u.draining and o.staged is not Staged.READY:\n"),
            ),
        ),
        "no-commit": Damage(
            "test_finalized_root.py",
            "mcdaemon/perform.py",
            (
                (
                    "        with_writable(context.machine.sysroot, "
                    "lambda: commit.apply(load, context.payloads, root))\n",
                    "",
                ),
            ),
        ),
        "no-fsync": Damage(
            "test_power_cuts.py",
            "mcdaemon/host/files.py",
            (
                (
                    "                    os.fchmod(descriptor, mode)\n                    os.fsync(descriptor)\n",
                    "                    os.fchmod(descriptor, mode)\n",
                ),
                (
                    "                os.rename(name, path.name, src_dir_fd=directory, dst_dir_fd=directory)\n"
                    "                os.fsync(directory)\n",
                    "                os.rename(name, path.name, src_dir_fd=directory, dst_dir_fd=directory)\n",
                ),
            ),
        ),
    }
)


def broken(archive: bytes, name: str) -> bytes:
    """The zipapp `archive` with that damage, without byte code for what was changed. Raises CannotBreak."""
    damage = DAMAGES[name]
    stale = damage.source + "c"
    packed = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archive)) as whole, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as made:
        for entry in whole.infolist():
            if entry.filename == stale:
                continue
            content = whole.read(entry)
            made.writestr(
                entry, _changed(content.decode(), damage).encode() if entry.filename == damage.source else content
            )
    return packed.getvalue()


def _changed(text: str, damage: Damage) -> str:
    for sound, spoilt in damage.changes:
        if text.count(sound) != 1:
            raise CannotBreak(f"cannot break {damage.source}: {sound.strip()!r} is there {text.count(sound)} times")
        text = text.replace(sound, spoilt)
    return text
