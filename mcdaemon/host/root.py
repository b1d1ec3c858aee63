"""A tree that boots or will boot, and how a path of it is found without being led astray.

The same code has to work on "/", on a pending deployment and on the directory of a test. A deployment has no /var of
its own: all deployments of a stateroot share one (rpm-ostree reference 5.8), and /home, /root, /usr/local and others
are links into it. So a path is walked component by component from the root's own top, by directory descriptors, and

- a component that is a link is followed only if it belongs to root and only root can write to every directory on
  the way to it: anything else could have been placed by a user who wants root to write somewhere else;
- a link never leads out of the root: an absolute target begins at the root's own top, and /var is `Root.var`.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import os
import posixpath
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Callable, Optional

from mcdaemon.errors import Broken, from_os_error

# The kernel's own limit, path_resolution(7).
_MOST_LINKS = 40

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC

# Where links are the layout of the image itself (/home, /root, /opt, /usr/local): nothing manages these links, so
# also as the last component of a path they mean the directory behind them.
LAYOUT = ("/", "/usr")


@dataclass(frozen=True)
class Place:
    """An open directory of a root, and a name in it. The descriptor belongs to whoever opened the place.

    `directory` is the canonical path of the directory, without links.
    """

    fd: int
    directory: str
    name: str

    @property
    def path(self) -> str:
        """The canonical path of the name itself."""
        return posixpath.join(self.directory, self.name)


# Makes the directory that a place names; called for each parent that is missing.
MakeDirectory = Callable[[Place], None]


@dataclass(frozen=True)
class Root:
    """A tree that boots or will boot. `path` is where its "/" is on the running system, `var` is where its /var is."""

    path: Path
    var: Path

    @classmethod
    def host(cls) -> Root:
        """The running system."""
        return cls(Path("/"), Path("/var"))

    @classmethod
    def of_deployment(cls, sysroot: Path, osname: str, name: str) -> Root:
        """The deployment `name` ("<checksum>.<serial>") of the stateroot `osname`; its /var is the stateroot's."""
        stateroot = sysroot / "ostree" / "deploy" / osname
        return cls(stateroot / "deploy" / name, stateroot / "var")

    def canonical(self, path: str) -> str:
        """The path of this root without the root's own links: /usr/local/x is /var/usrlocal/x, /root is /var/roothome.

        The last component is not followed, unless it belongs to the image's layout. Links that a user could have placed
        are never followed; what does not exist yet is taken as written. Raises Broken for a path that is not absolute.
        """
        with _Walk(self, path) as walk:
            walk.run()
            return walk.canonical()

    def locate(self, path: str) -> Path:
        """Where a path of this root is on the running system. Raises Broken for a path that is not absolute."""
        canonical = self.canonical(path)
        if canonical == "/var" or canonical.startswith("/var/"):
            return self.var / canonical[len("/var/") :]
        return self.path / canonical[1:]

    def shared(self, path: str) -> bool:
        """True where all deployments share the path: it is in /var. Raises Broken for a path that is not absolute."""
        canonical = self.canonical(path)
        return canonical == "/var" or canonical.startswith("/var/")


@contextlib.contextmanager
def open_parent(
    root: Root, path: str, make: Optional[MakeDirectory] = None, strict: bool = False
) -> Iterator[Optional[Place]]:
    """Open the directory that holds `path`. None where there is no such directory and nobody is to `make` it.

    Raises Broken where a link on the way is not root's own, for a path that is not absolute, and where a parent is no
    directory and one is to be made (or with `strict`); what OSErrors mean says errors.from_os_error.
    """
    with _Walk(root, path) as walk:
        try:
            obstacle = walk.run(make)
        except OSError as error:
            raise from_os_error(error, "reach", path) from error
        if obstacle is None:
            yield walk.place()
        elif obstacle is _Obstacle.MISSING or (obstacle is _Obstacle.NO_DIRECTORY and make is None and not strict):
            yield None
        else:
            sentence = f"cannot reach {path}: {walk.next_path()} {obstacle.value}"
            raise Broken(sentence, "remove or rename what stands there", obstacle.name.lower().replace("_", "-"))


def split(path: str) -> list[str]:
    """The components of an absolute path, without empty ones and dots.

    Raises Broken for a path that is relative, climbs with "..", or holds a NUL (field case FILE-04).
    """
    if not path.startswith("/"):
        raise Broken(f"cannot use the path {path!r}: it is not absolute", "paths in a config begin with /")
    parts = _components(path)
    if ".." in parts or "\0" in path:
        raise Broken(f"cannot use the path {path!r}: it is not canonical", 'write it without ".." and NUL')
    return parts


def only_root_writes(status: os.stat_result) -> bool:
    """True for a directory whose entries nobody but root can change.

    A directory that its group can write counts as open even for group root: a POSIX ACL for a user shows up in these
    bits.
    """
    return status.st_uid == 0 and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


class _Obstacle(enum.Enum):
    MISSING = "does not exist"
    NO_DIRECTORY = "is not a directory"
    FOREIGN_LINK = "is a link that a user could have placed"
    LOOP = "leads through too many links"


class _Walk:
    """From the top of a root to the directory that holds a path: what is open, and what is still to go."""

    def __init__(self, root: Root, path: str) -> None:
        self._root = root
        self._path = path
        self._pending = list(reversed(split(path)))
        self._names: list[str] = []
        self._fds: list[int] = []
        self._links = 0

    def __enter__(self) -> _Walk:
        try:
            self._fds.append(os.open(self._root.path, _DIRECTORY))
        except OSError as error:
            raise from_os_error(error, "open the root", self._root.path) from error
        return self

    def __exit__(
        self,
        kind: Optional[type[BaseException]],
        error: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        while self._fds:
            os.close(self._fds.pop())

    def run(self, make: Optional[MakeDirectory] = None) -> Optional[_Obstacle]:
        """Walk until only the last name is pending; what stands in the way is left pending."""
        while len(self._pending) > 1 or self._pending[:1] == [".."] or self._at_layout_link():
            obstacle = self._step(make)
            if obstacle is not None:
                return obstacle
        return None

    def place(self) -> Place:
        if not self._pending:
            raise Broken(f"cannot manage {self._path}: it is the top of the root")
        if not self._names and self._pending == ["var"]:
            # /var is not where the root's own tree has its (empty) directory; it stands where the stateroot has it.
            self._fds.append(os.open(self._root.var.parent, _DIRECTORY))
            return Place(self._fds[-1], "/", self._root.var.name)
        return Place(self._fds[-1], self._directory(), self._pending[0])

    def canonical(self) -> str:
        return posixpath.normpath("/" + "/".join([*self._names, *reversed(self._pending)]))

    def next_path(self) -> str:
        return posixpath.join(self._directory(), self._pending[-1])

    def _directory(self) -> str:
        return "/" + "/".join(self._names)

    def _at_layout_link(self) -> bool:
        if len(self._pending) != 1 or self._directory() not in LAYOUT or self._pending == ["var"]:
            return False
        try:
            status = os.stat(self._pending[0], dir_fd=self._fds[-1], follow_symlinks=False)
        except OSError:
            return False
        return stat.S_ISLNK(status.st_mode) and self._is_roots_own(status)

    def _step(self, make: Optional[MakeDirectory]) -> Optional[_Obstacle]:
        name = self._pending[-1]
        if name == "..":
            self._pending.pop()
            if self._names:
                self._names.pop()
                os.close(self._fds.pop())
            return None
        try:
            fd = self._open(name)
        except FileNotFoundError:
            if make is None:
                return _Obstacle.MISSING
            make(Place(self._fds[-1], self._directory(), name))
            fd = self._open(name)
        except OSError as error:
            # O_NOFOLLOW with O_DIRECTORY says ENOTDIR for a link, ELOOP on some file systems.
            if error.errno not in (errno.ENOTDIR, errno.ELOOP):
                raise
            return self._follow(name)
        self._pending.pop()
        self._names.append(name)
        self._fds.append(fd)
        return None

    def _open(self, name: str) -> int:
        if not self._names and name == "var":
            return os.open(self._root.var, _DIRECTORY)
        return os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=self._fds[-1])

    def _follow(self, name: str) -> Optional[_Obstacle]:
        status = os.stat(name, dir_fd=self._fds[-1], follow_symlinks=False)
        if not stat.S_ISLNK(status.st_mode):
            return _Obstacle.NO_DIRECTORY
        if not self._is_roots_own(status):
            return _Obstacle.FOREIGN_LINK
        self._links += 1
        if self._links > _MOST_LINKS:
            return _Obstacle.LOOP
        target = os.readlink(name, dir_fd=self._fds[-1])
        self._pending.pop()
        self._pending.extend(reversed(_components(target)))
        if target.startswith("/"):
            while self._names:
                self._names.pop()
                os.close(self._fds.pop())
        return None

    def _is_roots_own(self, link: os.stat_result) -> bool:
        # All directories on the way, not only the last: a user who can write further up could have moved a directory of
        # root's, with its links, to this place.
        return link.st_uid == 0 and all(only_root_writes(os.fstat(fd)) for fd in self._fds)


def _components(path: str) -> list[str]:
    return [part for part in path.split("/") if part not in ("", ".")]
