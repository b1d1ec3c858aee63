"""Faults that a test switches on, read afresh for every method call that makes a transaction.

The file ``/run/stand/rpmostreed-faults.json`` (or, for a daemon started by hand, the variable
``RPMOSTREED_STAND_FAULTS``) holds one JSON object:

``methods``            list of D-Bus methods that the rest is for; absent: all
``once``               true: the file is removed as soon as a fault strikes
``crash``              step at which the process ends without a word (``os._exit``)
``hold``               {"at": step, "fifo": path}: the daemon opens the FIFO for reading and waits until its writer
                       closes it; so opening it for writing tells a test that the step is reached. Can be cancelled
``delay``              {"at": step, "seconds": n}: waits n seconds. Can be cancelled
``fail``               {"at": step, "text": text}: ``Finished(false, text)``
``hang``               step at which the transaction stops for good; cannot be cancelled
``busy``               true: somebody else holds /ostree/lock while the transaction is made
``force_close_seconds``  how long peers may stay connected after Finished, in place of 30
``reboot_initiated``   true: as after a reboot that the daemon asked for
``no_op``              true: a deploy request, or KernelArgs, ends at once, with success and "No upgrade available."
                       (v2026.1, row 14)
``ignore_resets``      true: override-reset-packages does nothing, without a word (v2026.1, TXN-27)

Steps, in their order: ``before-reply`` (the transaction is not made yet), ``before-start`` (somebody has connected to
it); only a crash can strike at these two. Then ``after-start``, ``after-manifest``, ``before-layer-N``,
``after-layer-N`` (N counts the layers that are fetched, from 1), ``after-pull``, ``before-stage``,
``after-stage-before-finished``. ``after-start`` and ``after-stage-before-finished`` (as the last step) are reached by
every transaction.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import select
import struct
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from tests.stand.rpmostreed import FAULTS_FILE, FAULTS_VARIABLE
from tests.stand.rpmostreed.errors import FAILED, Cancelled, MethodError, OperationFailed

LOCK_FILE = "/ostree/lock"
FORCE_CLOSE_SECONDS = 30
_EARLY = frozenset({"before-reply", "before-start"})
_STEP = re.compile(
    r"after-start|after-manifest|(before|after)-layer-\d+|after-pull|before-stage"
    r"|after-stage-before-finished"
)
_KEYS = {
    "methods": list,
    "once": bool,
    "crash": str,
    "hold": dict,
    "delay": dict,
    "fail": dict,
    "hang": str,
    "busy": bool,
    "reboot_initiated": bool,
    "no_op": bool,
    "ignore_resets": bool,
    "force_close_seconds": int,
}


@dataclass(frozen=True)
class Faults:
    """The faults for one transaction."""

    settings: dict[str, Any]
    file: Optional[Path] = None

    def flag(self, name: str) -> bool:
        """Whether the fault of this name, one that is true or false, is asked for."""
        if not self.settings.get(name):
            return False
        self._strike(name)
        return True

    @property
    def force_close_seconds(self) -> int:
        return int(self.settings.get("force_close_seconds", FORCE_CLOSE_SECONDS))

    def reach_early(self, step: str) -> None:
        """Called when ``step``, before any work, is reached. May end the process."""
        if self.settings.get("crash") == step:
            self._strike(f"crash at {step}")
            os._exit(70)

    def reach(self, step: str, cancellable: Any) -> None:
        """Called when ``step`` is reached. May not return, raise OperationFailed, or end the process."""
        if self.settings.get("crash") == step:
            self._strike(f"crash at {step}")
            os._exit(70)
        if self.settings.get("hang") == step:
            self._strike(f"hang at {step}")
            threading.Event().wait()
        for name in ("hold", "delay"):
            fault = self.settings.get(name)
            if fault and fault["at"] == step:
                self._strike(f"{name} at {step}")
                _wait(fault, cancellable)
        failure = self.settings.get("fail")
        if failure and failure["at"] == step:
            self._strike(f"fail at {step}")
            raise OperationFailed(failure["text"])

    def _strike(self, what: str) -> None:
        print(f"fault: {what}", file=sys.stderr, flush=True)
        if self.settings.get("once") and self.file:
            self.file.unlink(missing_ok=True)


def read(method: str) -> Faults:
    """The faults for a call of ``method``. Raises MethodError where the file is not understood, so that a typing error
    in a test is not taken for a fault that did nothing."""
    file = Path(FAULTS_FILE)
    try:
        text = file.read_text()
    except FileNotFoundError:
        text = os.environ.get(FAULTS_VARIABLE, "{}")
    try:
        settings = json.loads(text)
        _check(settings)
    except (ValueError, KeyError, TypeError) as error:
        raise MethodError(FAILED, f"stand: cannot read faults in {file}: {error!r}") from error
    if method not in settings.get("methods", [method]):
        return Faults({})
    return Faults(settings, file)


def _check(settings: Any) -> None:
    if not isinstance(settings, dict):
        raise ValueError("not an object")
    for key, value in settings.items():
        if not isinstance(value, _KEYS[key]):
            raise ValueError(f"{key} is not a {_KEYS[key].__name__}")
    steps = [settings[key] for key in ("crash", "hang") if key in settings and settings[key] not in _EARLY]
    steps += [settings[key]["at"] for key in ("hold", "delay", "fail") if key in settings]
    for step in steps:
        if not _STEP.fullmatch(step):
            raise ValueError(f"unknown step {step!r}")


def _wait(fault: dict[str, Any], cancellable: Any) -> None:
    watched = []
    fifo = os.open(fault["fifo"], os.O_RDONLY | os.O_NONBLOCK) if "fifo" in fault else -1
    if fifo >= 0:
        watched.append(fifo)
    cancel = cancellable.get_fd()
    try:
        ready, _, _ = select.select([*watched, cancel], [], [], fault.get("seconds"))
        while fifo in ready and os.read(fifo, 1):  # what is written does not matter, the end does
            ready, _, _ = select.select([*watched, cancel], [], [])
    finally:
        cancellable.release_fd()
        if fifo >= 0:
            os.close(fifo)
    if cancellable.is_cancelled():
        raise Cancelled


@contextlib.contextmanager
def foreign_lock(wanted: bool, path: str = LOCK_FILE) -> Iterator[None]:
    """Holds the sysroot lock as another process would: an open-file-description lock on the whole file (2.9)."""
    if not wanted:
        yield
        return
    with open(path, "a") as file:
        take_lock(file.fileno())
        yield


def take_lock(descriptor: int) -> None:
    """Takes libostree's lock on an open lock file. Raises BlockingIOError where it is held.

    struct flock: l_type, l_whence, l_start, l_len, l_pid. Closing the descriptor releases it."""
    whole_file = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    fcntl.fcntl(descriptor, _F_OFD_SETLK, whole_file)


_F_OFD_SETLK = 37
