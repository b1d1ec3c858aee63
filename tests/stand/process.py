"""Processes of the node's PID 1: started, awaited, found by invocation, killed; orphans are reaped.

There are no control groups in a stand node. What belongs to a unit is found by the INVOCATION_ID in the environment
that each process inherits, or by the session that its main process leads.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Optional


class Processes:
    """All direct children of PID 1 that have somebody who waits for them; every other zombie is reaped."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._known: set[int] = set()
        loop.add_signal_handler(signal.SIGCHLD, self._reap_orphans)

    def adopt(self, process: subprocess.Popen[bytes]) -> None:
        """Take a child that was started elsewhere."""
        self._known.add(process.pid)

    def spawn(self, argv: Sequence[str], environment: Mapping[str, str], output: int, cwd: str = "/", user: str = "",
              umask: int = 0o022) -> subprocess.Popen[bytes]:  # fmt: skip
        """Start a program in a session of its own with its output to a descriptor. Raises OSError, KeyError (user)."""
        process = subprocess.Popen(
            argv, env=dict(environment), cwd=cwd, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            start_new_session=True, user=user or None, extra_groups=[] if user else None, umask=umask,
        )  # fmt: skip
        self._known.add(process.pid)
        return process

    async def exited(self, process: subprocess.Popen[bytes]) -> int:
        """Wait for a child's end; the answer is its status, -N for signal N."""
        if process.returncode is None:
            await self._gone(process.pid)
        status = process.wait()
        self._known.discard(process.pid)
        return status

    async def all_gone(self, pids: Iterable[int]) -> None:
        """Wait until none of the processes lives; children of ours count as gone when they are zombies."""
        await asyncio.gather(*(self._gone(pid) for pid in pids))

    async def _gone(self, pid: int) -> None:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            return
        gone = asyncio.Event()
        self._loop.add_reader(descriptor, gone.set)
        try:
            await gone.wait()
        finally:
            self._loop.remove_reader(descriptor)
            os.close(descriptor)

    def _reap_orphans(self) -> None:
        for pid, (state, parent, _) in _all_processes().items():
            if state == "Z" and parent == 1 and pid not in self._known:
                try:
                    os.waitpid(pid, os.WNOHANG)
                except ChildProcessError:
                    pass  # Somebody who waited for it was faster.


def members(invocation: str, leader: Optional[int]) -> set[int]:
    """The living processes of a unit's invocation; `leader` is the main process, whose session counts too."""
    marker = f"INVOCATION_ID={invocation}".encode()
    found = set()
    for pid, (state, _, session) in _all_processes().items():
        if pid == 1 or state == "Z":
            continue
        if (leader is not None and session == leader) or marker in _environment(pid):
            found.add(pid)
    return found


def kill(pids: Iterable[int], number: int) -> None:
    """Send a signal to each of the processes that still lives."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass  # It ended between the look and the signal.


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []  # It ended meanwhile.


def _all_processes() -> dict[int, tuple[str, int, int]]:
    """State, parent and session by process id (proc(5), /proc/pid/stat fields 3, 4 and 6)."""
    found = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # It ended meanwhile.
        found[int(name)] = (fields[0], int(fields[1]), int(fields[3]))
    return found
