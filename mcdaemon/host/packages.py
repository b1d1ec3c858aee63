"""The package repository of an extensions image, laid out for one rpm-ostree transaction and taken away after it.

The image holds RPMs below usr/share/rpm-ostree/extensions (mcd.md 5.2). It is unpacked by podman into a private
directory below /run, which a reboot clears by itself; the repository file in /etc is an observed fact that is removed
at start when a crash left it behind (field case EXT-13's kind).
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Optional

from mcdaemon.errors import Held, HoldReason, from_os_error
from mcdaemon.host import files, process
from mcdaemon.host.root import Root

REPOSITORY = "/etc/yum.repos.d/mcdaemon-extensions.repo"
"""Ours alone, so that removing one that a crash left cannot hit somebody else's (the MCD's is coreos-extensions)."""

CONTAINER_PREFIX = "mcdaemon-extensions-"
"""A container that the image is read through has this and the update's id as its name; `image.storage` sweeps them."""

CONTENT = "usr/share/rpm-ostree/extensions"
_FOLDER = "run/mcdaemon/extensions"
# Layers are as large as the packages of a whole release: podman puts them below /var/tmp while it pulls, under names
# of its own, and a killed one leaves them there.
_LAYERS = "var/tmp/mcdaemon-extensions"
_PULL_TIMEOUT = 1800.0
_TIMEOUT = 300.0


def leftovers(root: Root) -> tuple[str, ...]:
    """What a crash left of an earlier transaction: the repository file, the unpacked image."""
    beside = root.locate(REPOSITORY).parent.glob(".mcdaemon-*")
    found = [REPOSITORY] if root.locate(REPOSITORY).exists() or any(beside) else []
    return tuple(found + [f"/{folder}" for folder in (_FOLDER, _LAYERS) if (root.path / folder).exists()])


def remove(root: Root) -> None:
    """Take the repository away again. Idempotent."""
    files.remove(root, REPOSITORY)
    files.remove_temporaries(root, (os.path.dirname(REPOSITORY),))
    for folder in (_FOLDER, _LAYERS):
        shutil.rmtree(root.path / folder, ignore_errors=True)


@contextlib.contextmanager
def repository(root: Root, image: str, update: str, pull: bool, authfile: str = "") -> Iterator[None]:
    """Make the packages of the extensions image available to rpm-ostree.

    `pull`: the image is not in containers-storage and comes from the registry. Raises Held when podman cannot get it.
    """
    folder = root.path / _FOLDER
    try:
        if pull:
            _pull(image, root.path / _LAYERS, authfile)
        _unpack(image, folder, f"{CONTAINER_PREFIX}{update}")
        content = (
            "[coreos-extensions]\nname=coreos-extensions\nenabled=1\nmetadata_expire=1m\n"
            f"baseurl={(folder / CONTENT).as_uri()}/\ngpgcheck=0\nskip_if_unavailable=False\n"
        )
        files.write_file(root, REPOSITORY, content.encode(), 0o644, 0, 0)
        yield
    finally:
        remove(root)


def _empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.mkdir(parents=True, mode=0o700)
    except OSError as error:
        raise from_os_error(error, "make the directory", folder) from error


def _pull(image: str, layers: Path, authfile: str) -> None:
    _empty(layers)
    auth = ["--authfile", authfile] if authfile else []
    argv = ["pull", "--quiet", *auth, image]
    _podman(argv, f"pull the extensions image {image}", _PULL_TIMEOUT, {**os.environ, "TMPDIR": os.fspath(layers)})


def _unpack(image: str, folder: Path, container: str) -> None:
    _empty(folder)
    _podman(["rm", "--force", "--ignore", container], "remove a container left behind")
    _podman(["create", "--name", container, "--net=none", "--pull=never", image, "/none"], f"open {image}")
    try:
        # The RPMs alone: the rest of the image is of no use and may be large.
        target = folder / CONTENT
        target.mkdir(parents=True)
        _podman(["cp", f"{container}:/{CONTENT}/.", os.fspath(target)], f"unpack {image}", _PULL_TIMEOUT)
    finally:
        _podman(["rm", "--force", "--ignore", container], "remove the container of the extensions image")


def _podman(
    arguments: list[str], doing: str, timeout: float = _TIMEOUT, env: Optional[Mapping[str, str]] = None
) -> None:
    def failed(sentence: str) -> Held:
        return Held(HoldReason.IMAGE, sentence, "is the image still there?")

    process.run(["podman", *arguments], doing, timeout, failed, env)
