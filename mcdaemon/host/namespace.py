"""Writing below /sysroot, which every ostree machine mounts read-only.

The work is done by a child in a mount namespace of its own, where /sysroot is remounted writable. The agent itself
stays in the host's namespace: podman counts mounts in /run/containers, which CRI-O shares, and such a count is true in
one namespace only.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import time
from pathlib import Path
from typing import Callable

from mcdaemon.errors import Broken, Failure, Held, HoldReason, Transient, from_os_error

TIMEOUT = 600.0
"""Seconds for the whole work: a config of some hundred files, synced to a slow disk."""

_CLONE_NEWNS = 0x00020000
_MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = 32, 4096, 16384, 1 << 18


def with_writable(sysroot: Path, work: Callable[[], None]) -> None:
    """Run `work` where `sysroot` can be written. Raises what `work` raises, and Transient when it does not end."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        os._exit(_in_child(sysroot, work, writer))
    os.close(writer)
    try:
        answer = _read_all(reader, child)
    finally:
        os.close(reader)
        _pid, status = os.waitpid(child, 0)
    if answer:
        raise _decode(answer)
    if status != 0:
        raise Broken(f"cannot write below {sysroot}: the process that does it ended with wait status {status}")


def _in_child(sysroot: Path, work: Callable[[], None], writer: int) -> int:
    """Exit status 0, or an error written to the pipe. Nothing of the parent's state is touched."""
    try:
        _make_writable(sysroot)
        work()
        return 0
    except Failure as error:
        os.write(writer, _encode(error))
        return 1
    except OSError as error:
        os.write(writer, _encode(from_os_error(error, "write below", sysroot)))
        return 1


def _make_writable(sysroot: Path) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    steps = [
        (libc.unshare, (_CLONE_NEWNS,)),
        (libc.mount, (None, b"/", None, _MS_REC | _MS_PRIVATE, None)),
        (libc.mount, (None, os.fsencode(sysroot), None, _MS_REMOUNT | _MS_BIND, None)),
    ]
    for call, arguments in steps:
        if call(*arguments) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))


def _read_all(reader: int, child: int) -> bytes:
    """What the child says until it ends. A child that does not end is killed: its temporaries are swept later."""
    parts: list[bytes] = []
    deadline = time.monotonic() + TIMEOUT
    while True:
        ready, _, _ = select.select([reader], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            os.kill(child, signal.SIGKILL)
            raise Transient(f"cannot write below /sysroot: it took longer than {TIMEOUT:.0f} s")
        part = os.read(reader, 65536)
        if not part:
            return b"".join(parts)
        parts.append(part)


def _encode(error: Failure) -> bytes:
    reason = error.reason.value if isinstance(error, Held) else ""
    return json.dumps([type(error).__name__, error.sentence, error.hint, error.code, reason]).encode()


def _decode(answer: bytes) -> Failure:
    kind, sentence, hint, code, reason = json.loads(answer)
    if kind == "Held":
        return Held(HoldReason(reason), sentence, hint)
    if kind == "Transient":
        return Transient(sentence, hint, code)
    return Broken(sentence, hint, code)
