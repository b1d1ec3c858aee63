"""What a console says about a boot: marks found in a stream of bytes. Pure.

    reader = BootMarks()
    for seen in reader.feed(data):
        ...

A console is no list of lines: firmware and GRUB move the cursor about, prompts have no line's end, countdowns are
written over with a carriage return, and a chunk may end within a character or an escape sequence. So a mark is reported
as soon as its line shows it, once per line. The texts are those of GRUB 2, Linux, systemd 252 to 258, dracut and
CoreOS' own 99emergency-timeout (coreos/ignition-dracut pull requests 85 and 181).
"""

from __future__ import annotations

import codecs
import enum
import re
from dataclasses import dataclass

LONGEST_LINE = 4096
"""Characters of a line that are looked at; a guest that prints without end must not fill the memory."""


class Mark(enum.Enum):
    """What a line of the console tells."""

    GRUB_MENU = "the boot loader shows its menu"
    GRUB_ERROR = "the boot loader misses something"
    GRUB_RESCUE = "the boot loader cannot go on"
    KERNEL = "a kernel starts"
    IGNITION_FAILED = "Ignition has failed"
    EMERGENCY = "emergency mode"
    PANIC = "kernel panic"
    LOGIN = "a login prompt"
    STOPPING = "systemd stops the machine"
    REBOOT = "the kernel restarts the machine"
    POWER_OFF = "the kernel powers the machine off"


HOPELESS = frozenset({Mark.GRUB_RESCUE, Mark.IGNITION_FAILED, Mark.EMERGENCY, Mark.PANIC})
"""After these nobody needs to wait for the boot any longer."""


@dataclass(frozen=True)
class Seen:
    """A mark and the line that showed it, as a person saw it."""

    mark: Mark
    line: str


_PATTERNS: tuple[tuple[Mark, re.Pattern[str]], ...] = tuple(
    (mark, re.compile(pattern))
    for mark, pattern in (
        (Mark.GRUB_MENU, r"GNU GRUB  version [\d.~]+"),
        (Mark.GRUB_ERROR, r"^error: "),
        (Mark.GRUB_RESCUE, r"^(grub rescue>|Minimal BASH-like line editing is supported)"),
        (Mark.KERNEL, r"(?:^|\] )Linux version \d+\.\d+"),
        (Mark.IGNITION_FAILED, r"^Ignition has failed\.|\bignition\[\d+\]: (CRITICAL : )?Ignition failed: "),
        (Mark.IGNITION_FAILED, r"Failed to start .*ignition-\w[\w-]*\.service|Failed to start Ignition \("),
        (Mark.EMERGENCY, r"^(You are in|Entering) emergency mode\b|^Press Enter for emergency shell or wait "),
        (Mark.EMERGENCY, r"Reached target (emergency\.target|Emergency Mode)|^Cannot open access to console, the root"),
        (Mark.PANIC, r"(?:^|\] )Kernel panic - not syncing: "),
        (Mark.LOGIN, r"^[A-Za-z0-9][A-Za-z0-9.-]* login: *$"),
        (Mark.STOPPING, r"systemd-shutdown\[1\]: |Reached target (reboot|poweroff|halt|kexec)\.target"),
        (Mark.STOPPING, r"Reached target System (Reboot|Power Off|Halt)\b"),
        (Mark.REBOOT, r"(?:^|\] )reboot: (Restarting system|machine restart)"),
        (Mark.POWER_OFF, r"(?:^|\] )reboot: (Power down|System halted)"),
    )
)

# ECMA-48: control sequences, strings (OSC and others), and the two-character escapes.
_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)|[ -/]*[0-Z\\^-~])")
# A cursor that goes elsewhere begins another line for us: GRUB and firmware never send a line's end.
_MOVES = re.compile(r"\x1b\[[0-?]*[ABEFHJdf]|\x1b[cDEM]")
_UNFINISHED = re.compile(r"\x1b(?:\[[0-?]*[ -/]*|[\]PX^_][^\x07\x1b]{0,256}\x1b?|[ -/]*)$")
_ENDS = re.compile(r"[\r\n]+")
_INVISIBLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")


class BootMarks:
    """Reads a console as it comes."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._unfinished = ""
        self._line = ""
        self._told: set[Mark] = set()

    def feed(self, data: bytes) -> list[Seen]:
        """The marks that show with these bytes, in their order."""
        text = self._unfinished + self._decoder.decode(data)
        cut = _UNFINISHED.search(text)
        text, self._unfinished = (text[: cut.start()], text[cut.start() :]) if cut else (text, "")
        text = _ESCAPE.sub("", _MOVES.sub("\n", text))
        seen: list[Seen] = []
        *ended, rest = _ENDS.split(text)
        for part in ended:
            self._more(part, seen)
            self._line, self._told = "", set()
        self._more(rest, seen)
        return seen

    def _more(self, text: str, seen: list[Seen]) -> None:
        self._line = (self._line + _INVISIBLE.sub("", text))[:LONGEST_LINE]
        for mark, pattern in _PATTERNS:
            if mark not in self._told and pattern.search(self._line):
                self._told.add(mark)
                seen.append(Seen(mark, self._line.strip()))
