"""A command that runs in a node, started from outside through nsenter."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

KILL_TIMEOUT = 2.0


class NodeProcess(subprocess.Popen[str]):
    """Popen of nsenter, which waits outside for the command inside; it must lead a session of its own.

    Signals go to the command and its process group, never to nsenter: an nsenter that dies first leaves the command to
    the host's init, and a node cannot end before that has reaped it. nsenter ends with the command, with its status.
    """

    def send_signal(self, sig: int) -> None:
        """Signal the command and the children that did not leave its group."""
        if self.poll() is not None:
            return
        members = _group(self.pid)
        _send(members or {self.pid}, sig)
        # A process may have forked between the look and the signal; a killed one does so no more.
        while sig == signal.SIGKILL and members:
            members = _group(self.pid) - members
            _send(members, sig)

    def kill_and_collect(self) -> tuple[str, str]:
        """Kill it; the answer is what it has printed to stdout and stderr."""
        self.kill()
        try:
            return self.communicate(timeout=KILL_TIMEOUT)
        except subprocess.TimeoutExpired as error:
            # Something that left the group still holds the pipes; it lives until the node goes down.
            parts = [part.decode(errors="replace") if part else "" for part in (error.stdout, error.stderr)]
            return parts[0], parts[1]


def _send(pids: set[int], sig: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, sig)
        except ProcessLookupError:
            pass  # It has ended meanwhile.


def _group(leader: int) -> set[int]:
    """All but the leader of a process group, and the leader's own children (proc(5), stat fields 4 and 5)."""
    found = set()
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == leader:
            continue
        try:
            fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # It ended meanwhile.
        if fields[0] != "Z" and leader in (int(fields[1]), int(fields[2])):
            found.add(int(name))
    return found
