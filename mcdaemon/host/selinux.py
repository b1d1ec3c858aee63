"""SELinux labels of a root, from that root's own policy.

A file that is renamed into its place keeps the label that it was made with, so it must carry the right one before the
rename (field case FILE-05). For a deployment that is to boot, right means: by its own policy, not by the running one.

Where a root has no policy, or its config switches SELinux off, nothing is labelled; `policy_of(root).off` says why.
libselinux is on every system that has a policy; it is loaded only then.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from mcdaemon.errors import Broken
from mcdaemon.host.root import Root

ATTRIBUTE = "security.selinux"

# From selinux/label.h.
_BACKEND_FILE = 0
_OPTION_PATH = 3


@dataclass(frozen=True)
class Policy:
    """The file contexts of a root. `off` is empty, or the reason why nothing is labelled there."""

    contexts: Path
    off: str = ""


def policy_of(root: Root) -> Policy:
    """Which policy labels the files of a root, by its own /etc/selinux/config (selinux_config(5)).

    Raises Broken where the config cannot be read.
    """
    config = root.locate("/etc/selinux/config")
    try:
        text = config.read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        return Policy(Path(), "the root has no /etc/selinux/config")
    except OSError as error:
        raise Broken(f"cannot read {config}: {error.strerror}") from error
    values = _assignments(text)
    if values.get("SELINUX", "").lower() == "disabled":
        return Policy(Path(), "SELINUX=disabled in the root's /etc/selinux/config")
    kind = values.get("SELINUXTYPE", "targeted")
    contexts = root.locate(f"/etc/selinux/{kind}/contexts/files/file_contexts")
    if not contexts.exists():
        return Policy(contexts, f"the root has no file contexts for its policy {kind!r}")
    return Policy(contexts)


def label_of(root: Root, path: str, mode: int) -> Optional[bytes]:
    """The label that the root's policy gives a canonical path of it, with the NUL that the attribute ends in.

    `mode` is a whole st_mode: contexts can depend on the type of a file. None where SELinux is off or where the policy
    leaves the path alone. Raises Broken where the policy cannot be read.
    """
    policy = policy_of(root)
    if policy.off:
        return None
    status = policy.contexts.stat()
    # The identity is part of the key, because a deployment's policy is replaced by its merge.
    table = _table(str(policy.contexts), status.st_ino, status.st_mtime_ns, status.st_size)
    return table.lookup(path, mode)


def forget_policies() -> None:
    """Give the memory of the policies back (several MiB each); the next label reads its policy again."""
    _table.cache_clear()


@functools.lru_cache(maxsize=2)
def _table(contexts: str, inode: int, changed: int, size: int) -> _Table:
    return _Table(contexts)


class _Option(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("value", ctypes.c_char_p))


class _Table:
    """An open selabel(5) handle."""

    def __init__(self, contexts: str) -> None:
        self._library = _library()
        options = (_Option * 1)(_Option(_OPTION_PATH, os.fsencode(contexts)))
        self._handle = self._library.selabel_open(_BACKEND_FILE, options, 1)
        if not self._handle:
            reason = os.strerror(ctypes.get_errno())
            raise Broken(f"cannot read the SELinux file contexts {contexts}: {reason}")
        weakref.finalize(self, self._library.selabel_close, self._handle)

    def lookup(self, path: str, mode: int) -> Optional[bytes]:
        label = ctypes.c_char_p()
        ctypes.set_errno(0)
        if self._library.selabel_lookup_raw(self._handle, ctypes.byref(label), os.fsencode(path), mode) == 0:
            value = label.value or b""
            self._library.freecon(label)
            return value + b"\0"
        if ctypes.get_errno() in (0, errno.ENOENT):
            return None
        raise Broken(f"cannot tell the SELinux label of {path}: {os.strerror(ctypes.get_errno())}")


@functools.lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL("libselinux.so.1", use_errno=True)
    except OSError as error:
        raise Broken(f"cannot label files: {error}", "a root with an SELinux policy needs libselinux") from error
    library.selabel_open.restype = ctypes.c_void_p
    library.selabel_open.argtypes = (ctypes.c_uint, ctypes.POINTER(_Option), ctypes.c_uint)
    library.selabel_lookup_raw.argtypes = (
        ctypes.c_void_p,
        ctypes.POINTER(ctypes.c_char_p),
        ctypes.c_char_p,
        ctypes.c_int,
    )
    library.selabel_close.argtypes = (ctypes.c_void_p,)
    library.freecon.argtypes = (ctypes.c_char_p,)
    return library


def _assignments(text: str) -> dict[str, str]:
    values = {}
    for line in text.splitlines():
        key, separator, value = line.strip().partition("=")
        if separator and not key.startswith("#"):
            values[key.strip()] = value.strip().strip('"')
    return values
