"""Text files that decide what root does: who may have written them, and how large they may be.

Configs and settings end in programs, units and keys of root. A file that anybody else could have written is not read, a
FIFO or device is not waited for, and a file without end is not swallowed.
"""

from __future__ import annotations

import os
import stat

from mcdaemon.errors import Broken, from_os_error

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def read(path: str, most: int) -> str:
    """The text of a regular file of at most `most` bytes, which only root (or who runs this) could have written.

    A symbolic link is followed when the link itself is root's, too: git-sync and ConfigMap mounts are made of them.
    Raises FileNotFoundError when there is none (also for a dangling link), Broken for everything that is wrong with it.
    """
    try:
        require_trusted(path, os.lstat(path))
        with open(path, "rb", opener=_open_without_waiting) as stream:
            status = os.fstat(stream.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise Broken(f"cannot read {path}: it is not a regular file")
            require_trusted(path, status)
            content = stream.read(most + 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise from_os_error(error, "read", path) from error
    if len(content) > most:
        raise Broken(f"cannot read {path}: it is larger than {most} bytes")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise Broken(f"cannot read {path}: line {line}: it is not UTF-8 text") from error


def require_trusted(path: str, status: os.stat_result) -> None:
    """Raise Broken when the file, link or directory with this status belongs to others or can be written by them."""
    # Links have no permissions of their own: only the directory decides who can replace them.
    open_to_others = not stat.S_ISLNK(status.st_mode) and status.st_mode & _OTHERS_WRITE
    if status.st_uid not in (0, os.geteuid()) or open_to_others:
        raise Broken(
            f"cannot trust {path}: others than root can write it", f"chown -h root:root {path}; chmod go-w {path}"
        )


def _open_without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
