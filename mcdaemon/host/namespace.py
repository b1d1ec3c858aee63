"""Writing below /sysroot, which every ostree machine mounts read-only.

The work is done by a child in a mount namespace of its own, where /sysroot is remounted writable. The agent itself
stays in the host's namespace: podman counts mounts in /run/containers, which CRI-O shares, and such a count is true in
one namespace only.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import time
from pathlib import Path
from typing import Callable, NoReturn, Optional

from mcdaemon.errors import Broken, Failure, Held, HoldReason, Irreconcilable, Transient, from_os_error
from mcdaemon.host import process

TIMEOUT = 600.0
"""Seconds for the whole work: a config of some hundred files, synced to a slow disk."""

_CLONE_NEWNS = 0x00020000
_MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = 32, 4096, 16384, 1 << 18


def with_writable(sysroot: Path, work: Callable[[], None]) -> None:
    """Run `work` where `sysroot` can be written. Raises what `work` raises, and Transient when it does not end or is
    killed, which says nothing about the work."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _be_the_child(sysroot, work, writer)
    os.close(writer)
    try:
        answer = _read_all(reader, child, sysroot)
    finally:
        os.close(reader)
        _pid, status = os.waitpid(child, 0)
    if answer:
        raise _decode(answer)
    if os.WIFSIGNALED(status):
        raise Transient(
            f"cannot write below {sysroot}: the process that does it was killed by signal {os.WTERMSIG(status)}",
            "was memory short? see the kernel log",
        )
    if status != 0:
        raise Broken(f"cannot write below {sysroot}: the process that does it ended with wait status {status}")


def _be_the_child(sysroot: Path, work: Callable[[], None], writer: int) -> None:
    """Never returns: a child that left this module, by whatever error, would be a second agent."""
    with contextlib.ExitStack() as last:
        last.push(lambda _kind, error, _trace: _leave(sysroot, error, writer))
        _make_writable(sysroot)
        work()


def _leave(sysroot: Path, error: Optional[BaseException], writer: int) -> NoReturn:
    """Exit status 0, or an error written to the pipe."""
    try:
        if error is None:
            os._exit(0)
        os.write(writer, _encode(_as_failure(sysroot, error)))
    finally:
        os._exit(1)


def _as_failure(sysroot: Path, error: BaseException) -> Failure:
    if isinstance(error, Failure):
        return error
    if isinstance(error, OSError):
        return from_os_error(error, "write below", sysroot)
    # Where it happened and what it is, but not its text, which may hold content of a managed file.
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    place = f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}" if trace else "an unknown place"
    return Broken(f"cannot write below {sysroot}: {type(error).__name__} at {place}", "this is a mistake in mcdaemon")


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


def _read_all(reader: int, child: int, sysroot: Path) -> bytes:
    """What the child says until it ends. A child that does not end is killed: its temporaries are swept later."""
    parts: list[bytes] = []
    deadline = time.monotonic() + TIMEOUT
    while True:
        ready, _, _ = select.select([reader], [], [], max(0.0, min(process.BEAT, deadline - time.monotonic())))
        if not ready:
            process.alive()
            if time.monotonic() < deadline:
                continue
            os.kill(child, signal.SIGKILL)
            raise Transient(f"cannot write below {sysroot}: it took longer than {TIMEOUT:.0f} s")
        part = os.read(reader, 65536)
        if not part:
            return b"".join(parts)
        parts.append(part)


def _encode(error: Failure) -> bytes:
    more: dict[str, object] = {}
    if isinstance(error, (Held, Transient)):
        more["retry_after"] = error.retry_after
    if isinstance(error, Held):
        more["reason"] = error.reason.value
    if isinstance(error, Irreconcilable):
        more["field"] = error.field
    return json.dumps([type(error).__name__, error.sentence, error.hint, error.code, more]).encode()


def _decode(answer: bytes) -> Failure:
    kind, sentence, hint, code, more = json.loads(answer)
    if kind == "Held":
        return Held(HoldReason(more["reason"]), sentence, hint, more["retry_after"])
    if kind == "Transient":
        return Transient(sentence, hint, code, more["retry_after"])
    if kind == "Irreconcilable":
        return Irreconcilable(sentence, more["field"], hint)
    return Broken(sentence, hint, code)
