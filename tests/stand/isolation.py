"""Runs skopeo and podman so that they leave nothing on the host: no caches, no state, no mounts.

As root both keep things at fixed places, whatever --root says: /var/lib/containers/cache, /run/libpod, /run/crun,
/etc/cni/net.d/cni.lock, and a bind mount on GRAPHROOT/overlay. In a mount namespace of its own with a fresh /var/lib
and /run all of that is gone when the program ends.
"""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path

# `podman info` asks rpm for versions, which makes a database in the home directory.
_ENTER = 'mount -t tmpfs tmpfs /var/lib && mount -t tmpfs tmpfs /run && HOME=/run exec "$@"'
_PROGRAMS = ("podman", "skopeo")


def private(argv: Sequence[str]) -> list[str]:
    """`argv`, to be run in such a namespace. Needs root."""
    return ["unshare", "--mount", "--propagation", "private", "sh", "-c", _ENTER, "sh", *argv]


def private_programs(folder: Path, podman_options: Sequence[str] = ()) -> Path:
    """A folder to put first in PATH: its podman and skopeo are the host's, run by `private`."""
    folder.mkdir(parents=True, exist_ok=True)
    for program in _PROGRAMS:
        real = shutil.which(program)
        if real is None:
            raise RuntimeError(f"cannot find {program} in PATH: install it")
        options = podman_options if program == "podman" else ()
        wrapper = folder / program
        wrapper.write_text(f'#!/bin/sh\nexec {shlex.join(private([real, *options]))} "$@"\n')
        wrapper.chmod(0o755)
    return folder
