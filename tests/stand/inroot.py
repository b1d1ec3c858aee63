"""Open files below a foreign root so that no link, absolute or with "..", leads out of it (openat2(2))."""

from __future__ import annotations

import ctypes
import errno
import os

_SYS_OPENAT2 = 437  # The same number on every architecture.
_RESOLVE_IN_ROOT = 0x10
_LIBC = ctypes.CDLL(None, use_errno=True)


class _OpenHow(ctypes.Structure):
    _fields_ = [("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64)]


# A rename or mount anywhere on the machine during a path with ".." makes the kernel give up: openat2(2), EAGAIN.
_ATTEMPTS = 1000


def open_in_root(root: int, path: str, flags: int, mode: int = 0) -> int:
    """Open `path` as a process would that has the directory `root` as "/". Raises OSError that names the path."""
    how = _OpenHow(flags | os.O_CLOEXEC, mode if flags & os.O_CREAT else 0, _RESOLVE_IN_ROOT)
    for _attempt in range(_ATTEMPTS):
        descriptor = int(_LIBC.syscall(_SYS_OPENAT2, root, path.encode(), ctypes.byref(how), ctypes.sizeof(how)))
        if descriptor >= 0 or ctypes.get_errno() != errno.EAGAIN:
            break
    if descriptor < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), path)
    return descriptor
