"""Building in a mount namespace: no mount of a build is ever seen outside, nor left behind, however it ends.

Root is needed for owners and mounts; who is not root gets a user namespace with subordinate ids in which he is.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vmlab.programs import run
from vmlab.store import PROJECT

_SIZE = "3g"


def call(what: str, module: str, *arguments: str, timeout: float) -> str:
    """Run `python -m MODULE ARGUMENTS` in there; returns what it printed. Raises CannotBuild."""
    become_root = [] if os.geteuid() == 0 else ["--map-auto", "--map-root-user"]
    path = os.pathsep.join((str(PROJECT / "vm-tests"), str(PROJECT)))
    argv = ["unshare", *become_root, "--mount", "--propagation", "private", "--", sys.executable, "-m", module]
    return run(what, [*argv, *arguments], timeout, cwd=PROJECT, env={"PYTHONPATH": path})


@contextmanager
def memory(folder: Path) -> Iterator[Path]:
    """A file system in memory at `folder`: fast, and deploying on it cannot freeze the host's. Raises CannotBuild.

    Its content goes by unmounting and is never removed file by file: devices of the host are mounted below it.
    """
    folder.mkdir()
    argv = ["mount", "-t", "tmpfs", "-o", f"size={_SIZE},mode=0755", "tmpfs", str(folder)]
    run("get a file system in memory", argv, 30)
    try:
        yield folder
    finally:
        run("let go of the memory", ["umount", "--recursive", "--lazy", str(folder)], 30)
        folder.rmdir()


@contextmanager
def bound(source: Path, target: Path) -> Iterator[None]:
    """`source`, with what is mounted below it, is also seen at `target`. Raises CannotBuild."""
    target.mkdir(exist_ok=True)
    run(f"show {source} at {target}", ["mount", "--rbind", str(source), str(target)], 30)
    try:
        yield
    finally:
        run(f"take {source} from {target}", ["umount", "--recursive", "--lazy", str(target)], 30)
