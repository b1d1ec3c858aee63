"""One hook at a time: a drain that outlived its agent must not end after the undo that is to follow it.

The program inherits the lock, so that it is held for as long as the program lives, whatever became of the agent.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from mcdaemon.errors import Held, HoldReason

log = logging.getLogger("mcdaemon")


@contextlib.contextmanager
def taken(lock: Path, doing: str) -> Iterator[Sequence[int]]:
    """Descriptors that the program has to inherit. Raises Held while an earlier one lives.

    Where no lock can be made (a full /run), nothing is kept off: a node has to come back to work all the same.
    """
    try:
        lock.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        log.warning("cannot lock %s: %s", lock, error.strerror)
        yield ()
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise Held(
                HoldReason.DRAIN,
                f"cannot {doing}: an earlier program of drain.command, drain.undo or reboot.command still runs"
                f"{_holder(descriptor)}",
                "its end is waited for; its agent was killed",
            ) from error
        try:
            yield (descriptor,)
        finally:
            # For all who inherited it: a daemon that the program left behind keeps nobody off.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)


def _holder(descriptor: int) -> str:
    """ " as process N": the oldest one that has the lock open, "" when it has ended meanwhile."""
    held = os.fstat(descriptor)
    for pid in sorted(int(name) for name in os.listdir("/proc") if name.isdigit()):
        with contextlib.suppress(OSError):
            if pid != os.getpid() and any(os.path.samestat(held, other) for other in open_in(pid)):
                return f" as process {pid}"
    return ""


def open_in(pid: int) -> list[os.stat_result]:
    """The files that a process has open. Raises OSError: it is gone, or somebody else's."""
    found = []
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.append(os.stat(f"/proc/{pid}/fd/{name}"))
    return found
