"""The package repository of an extensions image, laid out for one rpm-ostree transaction and taken away after it.

The image holds RPMs below usr/share/rpm-ostree/extensions (mcd.md 5.2). It is unpacked by podman into a private
directory below /run, which a reboot clears by itself; the repository file in /etc is an observed fact that is removed
at start when a crash left it behind (field case EXT-13's kind).
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from mcdaemon.errors import Held, HoldReason, from_os_error
from mcdaemon.host import files, process
from mcdaemon.host.root import Root

REPOSITORY = "/etc/yum.repos.d/mcdaemon-extensions.repo"
"""Ours alone, so that removing one that a crash left cannot hit somebody else's (the MCD's is coreos-extensions)."""

CONTENT = "usr/share/rpm-ostree/extensions"
_FOLDER = "run/mcdaemon/extensions"
_PULL_TIMEOUT = 1800.0
_TIMEOUT = 300.0


def leftovers(root: Root) -> tuple[str, ...]:
    """What a crash left of an earlier transaction: the repository file, the unpacked image."""
    found = [REPOSITORY] if root.locate(REPOSITORY).exists() else []
    folder = root.path / _FOLDER
    return tuple(found + ([f"/{_FOLDER}"] if folder.exists() else []))


def remove(root: Root) -> None:
    """Take the repository away again. Idempotent."""
    files.remove(root, REPOSITORY)
    shutil.rmtree(root.path / _FOLDER, ignore_errors=True)


@contextlib.contextmanager
def repository(root: Root, image: str, update: str, pull: bool, authfile: str = "") -> Iterator[None]:
    """Make the packages of the extensions image available to rpm-ostree.

    `pull`: the image is not in containers-storage and comes from the registry. Raises Held when podman cannot get it.
    """
    folder = root.path / _FOLDER
    try:
        _unpack(image, folder, f"mcdaemon-extensions-{update}", pull, authfile)
        content = (
            "[coreos-extensions]\nname=coreos-extensions\nenabled=1\nmetadata_expire=1m\n"
            f"baseurl={(folder / CONTENT).as_uri()}/\ngpgcheck=0\nskip_if_unavailable=False\n"
        )
        files.write_file(root, REPOSITORY, content.encode(), 0o644, 0, 0)
        yield
    finally:
        remove(root)


def _unpack(image: str, folder: Path, container: str, pull: bool, authfile: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.mkdir(parents=True, mode=0o700)
    except OSError as error:
        raise from_os_error(error, "make the directory", folder) from error
    if pull:
        auth = ["--authfile", authfile] if authfile else []
        _podman(["pull", "--quiet", *auth, image], f"pull the extensions image {image}", _PULL_TIMEOUT)
    _podman(["rm", "--force", "--ignore", container], "remove a container left behind")
    _podman(["create", "--name", container, "--net=none", "--pull=never", image, "/none"], f"open {image}")
    try:
        # The RPMs alone: the rest of the image is of no use and may be large.
        target = folder / CONTENT
        target.mkdir(parents=True)
        _podman(["cp", f"{container}:/{CONTENT}/.", os.fspath(target)], f"unpack {image}", _PULL_TIMEOUT)
    finally:
        _podman(["rm", "--force", "--ignore", container], "remove the container of the extensions image")


def _podman(arguments: list[str], doing: str, timeout: float = _TIMEOUT) -> None:
    def failed(sentence: str) -> Held:
        return Held(HoldReason.IMAGE, sentence, "is the image still there?")

    process.run(["podman", *arguments], doing, timeout, failed)
