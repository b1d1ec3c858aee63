"""All reading and writing of managed places. Nothing else in mcdaemon renames, unlinks or writes a managed file.

A write makes a temporary file in the same directory, gives it content, owner, mode and label, syncs it, and renames
it over the name: whoever looks sees the old file or the new one, and a failed write leaves the old one and nothing
else. Directories are opened one by one and never through a link that a user could have placed (see root.py). The
temporary's name begins with a dot, so that programs which read a directory of manifests or drop-ins do not pick it up
(field case FILE-12).

Errors are mapped by errors.from_os_error and name the path: Held where space is short, Transient where the kernel says
"later", Broken for everything else. No error carries content.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import errno
import hashlib
import os
import re
import secrets
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Optional, Union

from mcdaemon.errors import Broken, Failure, from_os_error
from mcdaemon.host import selinux
from mcdaemon.host.root import LAYOUT, Place, Root, open_parent

# Larger than any file a MachineConfig can carry (the object is limited to about 1 MiB by etcd), small enough for
# memory.
MOST_BYTES = 64 * 1024 * 1024

_CHUNK = 1024 * 1024
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_TEMPORARY = re.compile(r"\.mcdaemon-[0-9a-f]{16}")
_PARENT_MODE = 0o755


class Kind(enum.Enum):
    """What stands at a path. OTHER is a FIFO, socket or device: never wanted, but it can be met."""

    FILE = "file"
    LINK = "link"
    DIRECTORY = "directory"
    ABSENT = "absent"
    OTHER = "special file"


@dataclass(frozen=True)
class Node:
    """What a path is, or should be.

    `mode` is S_IMODE, with setuid, setgid and sticky (field case FILE-19); of links it says nothing and keeps its
    default. `sha256` is the content of a FILE in hex, `target` the text of a LINK.
    """

    kind: Kind
    mode: int = 0o644
    uid: int = 0
    gid: int = 0
    sha256: str = ""
    target: str = ""


@dataclass(frozen=True)
class Entry:
    """A node together with the bytes that make it. The bytes may be secret: they are in no repr."""

    node: Node
    content: bytes = field(default=b"", repr=False)

    @classmethod
    def file(cls, content: bytes, mode: int = 0o644, uid: int = 0, gid: int = 0) -> Entry:
        """A regular file."""
        return cls(Node(Kind.FILE, mode, uid, gid, sha256=hashlib.sha256(content).hexdigest()), content)

    @classmethod
    def link(cls, target: str) -> Entry:
        """A symbolic link of root."""
        return cls(Node(Kind.LINK, target=target))

    @classmethod
    def directory(cls, mode: int = 0o755, uid: int = 0, gid: int = 0) -> Entry:
        """A directory; what is in it is another matter."""
        return cls(Node(Kind.DIRECTORY, mode, uid, gid))

    @classmethod
    def absent(cls) -> Entry:
        """Nothing."""
        return cls(Node(Kind.ABSENT))


def read_node(root: Root, path: str) -> Node:
    """What stands at a path; nothing is followed but root's own links on the way.

    ABSENT also where a parent is missing. Raises Broken where a link on the way could have been placed by a user, or
    where a file cannot be read.
    """
    with open_parent(root, path) as place:
        if place is None:
            return Node(Kind.ABSENT)
        with _naming("read", path):
            return node_at(place.fd, place.name)


def read_nodes(root: Root, paths: Iterable[str]) -> Iterator[tuple[str, Union[Node, Failure]]]:
    """Read many paths, each parent opened once; in order of parents. A path that cannot be read yields its failure."""
    by_parent: dict[str, list[str]] = {}
    for path in paths:
        by_parent.setdefault(os.path.dirname(path), []).append(path)
    for parent in sorted(by_parent):
        yield from _read_siblings(root, sorted(by_parent[parent]))


def read_file(root: Root, path: str, most: int = MOST_BYTES) -> Optional[bytes]:
    """The content of a regular file of at most `most` bytes; None where nothing is there.

    Raises Broken where something else than a regular file stands there (a link is not followed), or a larger one.
    """
    with open_parent(root, path) as place:
        if place is None:
            return None
        with _naming("read", path):
            try:
                descriptor = _open_file(place.fd, place.name)
            except FileNotFoundError:
                return None
            with os.fdopen(descriptor, "rb") as stream:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    raise Broken(f"cannot read {path}: it is not a regular file")
                content = stream.read(most + 1)
    if len(content) > most:
        raise Broken(f"cannot read {path}: it is larger than {most} bytes")
    return content


def list_directory(root: Root, path: str) -> tuple[str, ...]:
    """The names in a directory, sorted; none where there is no directory (field case FILE-24).

    A link in the place of the directory counts as none, unless it is one of root's own on the way.
    """
    with open_parent(root, path + "/.mcdaemon-") as place:
        if place is None:
            return ()
        with _naming("list", path):
            return tuple(sorted(os.listdir(place.fd)))


def write_file(root: Root, path: str, content: bytes, mode: int, uid: int, gid: int, sync: bool = True) -> None:
    """Replace whatever stands at a path by a file. Parents that are missing are made, 0755 and root's.

    A FIFO, device, socket or link is replaced, not followed; an empty directory gives way; any other directory is
    Broken. With `sync` the file is on the disk on return; without, only after sync_tree.
    """
    with _writable(root, path, "write", sync) as place, _temporary(place) as name:
        _fill_file(root, place, name, Entry.file(content, mode, uid, gid), sync)
        _rename(place, name, path, sync)


def write_link(root: Root, path: str, target: str, sync: bool = True) -> None:
    """Replace whatever stands at a path by a symbolic link of root's. As write_file otherwise."""
    with _writable(root, path, "link", sync) as place, _temporary(place) as name:
        _fill_link(root, place, name, target)
        _rename(place, name, path, sync)


def make_directory(root: Root, path: str, mode: int, uid: int, gid: int, sync: bool = True) -> None:
    """Make a directory, or give an existing one this mode and owner.

    Raises Broken where something else stands there.
    """
    with _writable(root, path, "make the directory", sync) as place:
        made = False
        with contextlib.suppress(FileExistsError):
            os.mkdir(place.name, 0o700, dir_fd=place.fd)
            made = True
        if _kind(place) is not Kind.DIRECTORY:
            raise Broken(f"cannot make the directory {path}: something else stands there", "remove it")
        with _opened_directory(place) as descriptor:
            os.fchown(descriptor, uid, gid)
            os.fchmod(descriptor, mode)
            if made:
                _label(root, place, descriptor, stat.S_IFDIR)
            if sync:
                os.fsync(descriptor)
                os.fsync(place.fd)


def remove(root: Root, path: str, sync: bool = True) -> None:
    """Remove what stands at a path, if anything does; parents stay. Raises Broken for a directory that is not empty."""
    with open_parent(root, path) as place:
        if place is None:
            return
        with _naming("remove", path):
            try:
                _unlink(place)
            except FileNotFoundError:
                return
            if sync:
                os.fsync(place.fd)


def put(root: Root, path: str, entry: Entry, sync: bool = True) -> None:
    """Make a path what an entry says. Raises as the four functions above; Broken for an entry of Kind.OTHER."""
    node = entry.node
    if node.kind is Kind.FILE:
        write_file(root, path, entry.content, node.mode, node.uid, node.gid, sync)
    elif node.kind is Kind.LINK:
        write_link(root, path, node.target, sync)
    elif node.kind is Kind.DIRECTORY:
        make_directory(root, path, node.mode, node.uid, node.gid, sync)
    elif node.kind is Kind.ABSENT:
        remove(root, path, sync)
    else:
        raise Broken(f"cannot make {path}: a {node.kind.value} is never made")


def put_all(root: Root, entries: Mapping[str, Entry], also: Iterable[str] = ()) -> None:
    """Make many paths what their entries say, and sync twice. Stops at the first failure; what was made stays.

    What goes, goes first and from the bottom up, so that a path can be a file in one config and a directory of files in
    the other (field cases FILE-13, FILE-15). Then all files are written under temporary names and synced before the
    first is renamed: a new name that reaches the disk before its content would be an empty file after a power cut.
    `also`: paths that have been right before, perhaps since a moment ago: their file systems are synced, too.
    """

    def order(path: str) -> tuple[int, int, str]:
        kind, depth = entries[path].node.kind, path.count("/")
        if kind is Kind.ABSENT:
            return 0, -depth, path
        return (1 if kind is Kind.DIRECTORY else 2), depth, path

    waiting: dict[str, str] = {}
    try:
        for path in sorted(entries, key=order):
            if entries[path].node.kind in (Kind.FILE, Kind.LINK):
                _prepare(root, path, entries[path], waiting)
            else:
                put(root, path, entries[path], sync=False)
        if any(entries[path].node.kind is Kind.FILE for path in waiting):
            sync_tree(root, waiting)
        for path in list(waiting):
            with _writable(root, path, "write", sync=False) as place:
                _rename(place, waiting[path], path, sync=False)
            del waiting[path]
    finally:
        for path, name in waiting.items():
            # What cannot be removed now is, before the next try (remove_temporaries).
            with contextlib.suppress(OSError, Failure), open_parent(root, path) as left:
                if left is not None:
                    os.unlink(name, dir_fd=left.fd)
    sync_tree(root, {*entries, *also})


def check_place(root: Root, path: str) -> None:
    """Find out, without a change, whether a file could be put at a path (field case FILE-15).

    Raises Broken where a parent is a file or a user's link, or where a directory with something in it stands there.
    """
    with open_parent(root, path, strict=True) as place:
        if place is None or _kind(place) is not Kind.DIRECTORY:
            return
        with _naming("write", path), _opened_directory(place) as descriptor:
            names = os.listdir(descriptor)
    if names:
        raise _directory_in_place(path)


def sync_tree(root: Root, paths: Iterable[str] = ()) -> None:
    """Bring everything written below a root, its /var and the parents of `paths` to the disk.

    syncfs(2), not sync(2): it waits for the root's file systems only, not for every container's or a hanging NFS; and
    it reports write-back errors (Linux 5.8), which sync(2) never does. Raises as the module says.
    """
    synced: set[int] = set()
    # On a composefs root "/" itself is read-only and /etc is another mount.
    for top in (root.path, root.path / "etc", root.var):
        with _naming("sync", top):
            try:
                descriptor = os.open(top, _DIRECTORY)
            except FileNotFoundError:
                continue
            _sync_once(descriptor, synced)
    for parent in sorted({os.path.dirname(path) for path in paths}):
        with open_parent(root, parent + "/.mcdaemon-") as place:
            if place is not None:
                with _naming("sync", parent):
                    _sync_once(os.dup(place.fd), synced)


def remove_temporaries(root: Root, directories: Iterable[str]) -> tuple[str, ...]:
    """Remove what interrupted writes left in these directories; returns the paths removed.

    Raises as the module says.
    """
    removed = []
    for directory in sorted(set(directories)):
        with open_parent(root, directory + "/.mcdaemon-") as place:
            if place is None:
                continue
            with _naming("clean", directory):
                for name in sorted(filter(_TEMPORARY.fullmatch, os.listdir(place.fd))):
                    os.unlink(name, dir_fd=place.fd)
                    removed.append(os.path.join(directory, name))
    return tuple(removed)


def write_atomic(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Replace one of the daemon's own state files, on the disk on return. The directory must exist.

    Raises as the module says.
    """
    with _naming("write", path):
        directory = os.open(path.parent, _DIRECTORY)
        try:
            place = Place(directory, str(path.parent), path.name)
            with _temporary(place) as name:
                with _created(place, name) as descriptor:
                    _write_all(descriptor, content)
                    os.fchmod(descriptor, mode)
                    os.fsync(descriptor)
                os.rename(name, path.name, src_dir_fd=directory, dst_dir_fd=directory)
                os.fsync(directory)
        finally:
            os.close(directory)


def keep_aside(path: Path, aside: Path) -> None:
    """Give one of the daemon's own state files a second name in the same directory, for when the first is written anew.
    A directory, which can have only one and cannot be written over, is moved. Raises as the module says."""
    with _naming("keep aside", path):
        if path.is_dir() and not path.is_symlink():
            os.rename(path, aside)
        else:
            os.link(path, aside, follow_symlinks=False)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Bring the names in one of the daemon's own directories to the disk. Raises as the module says."""
    with _naming("sync", path):
        directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def node_at(directory: int, name: str) -> Node:
    """What the name in an open directory is. Raises OSError."""
    try:
        status = os.stat(name, dir_fd=directory, follow_symlinks=False)
        mode, uid, gid = stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid
        if stat.S_ISREG(status.st_mode):
            return Node(Kind.FILE, mode, uid, gid, sha256=_hash(directory, name))
        if stat.S_ISLNK(status.st_mode):
            return Node(Kind.LINK, uid=uid, gid=gid, target=os.readlink(name, dir_fd=directory))
    except FileNotFoundError:
        return Node(Kind.ABSENT)
    return Node(Kind.DIRECTORY if stat.S_ISDIR(status.st_mode) else Kind.OTHER, mode, uid, gid)


def _read_siblings(root: Root, paths: list[str]) -> Iterator[tuple[str, Union[Node, Failure]]]:
    found: list[tuple[str, Union[Node, Failure]]] = []
    try:
        with open_parent(root, paths[0]) as place:
            if place is not None and place.directory in LAYOUT:
                # The last component can be a link of the layout (/root), which stands for what is behind it.
                found = [(path, _read_or_failure(root, path)) for path in paths]
            else:
                found = [(path, _sibling(place, path)) for path in paths]
    except Failure as failure:
        found = [(path, failure) for path in paths]
    yield from found


def _sibling(place: Optional[Place], path: str) -> Union[Node, Failure]:
    if place is None:
        return Node(Kind.ABSENT)
    try:
        return node_at(place.fd, os.path.basename(path))
    except OSError as error:
        return from_os_error(error, "read", path)


def _read_or_failure(root: Root, path: str) -> Union[Node, Failure]:
    try:
        return read_node(root, path)
    except Failure as failure:
        return failure


def _open_file(directory: int, name: str) -> int:
    # O_NONBLOCK: a FIFO that was put there since the last look must not hang the agent.
    return os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)


def _hash(directory: int, name: str) -> str:
    digest = hashlib.sha256()
    descriptor = _open_file(directory, name)
    try:
        while True:
            chunk = os.read(descriptor, _CHUNK)
            if not chunk:
                return digest.hexdigest()
            digest.update(chunk)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _writable(root: Root, path: str, doing: str, sync: bool) -> Iterator[Place]:
    def make(place: Place) -> None:
        _make_parent(root, place, sync)

    with open_parent(root, path, make) as place:
        if place is None:
            raise Broken(f"cannot {doing} {path}: its directory is missing")
        with _naming(doing, path):
            yield place


def _make_parent(root: Root, place: Place, sync: bool) -> None:
    with contextlib.suppress(FileExistsError):
        os.mkdir(place.name, _PARENT_MODE, dir_fd=place.fd)
    with _opened_directory(place) as descriptor:
        # Neither the umask nor a setgid parent decides.
        os.fchown(descriptor, 0, 0)
        os.fchmod(descriptor, _PARENT_MODE)
        _label(root, place, descriptor, stat.S_IFDIR)
    if sync:
        os.fsync(place.fd)


@contextlib.contextmanager
def _opened_directory(place: Place) -> Iterator[int]:
    descriptor = os.open(place.name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=place.fd)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _created(place: Place, name: str) -> Iterator[int]:
    descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=place.fd)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _prepare(root: Root, path: str, entry: Entry, waiting: dict[str, str]) -> None:
    """Make a file or link beside its path, to be renamed later; its name goes into `waiting`."""
    with _writable(root, path, "write", sync=False) as place:
        waiting[path] = name = _temporary_name()
        if entry.node.kind is Kind.LINK:
            _fill_link(root, place, name, entry.node.target)
        else:
            _fill_file(root, place, name, entry, sync=False)


def _fill_file(root: Root, place: Place, name: str, entry: Entry, sync: bool) -> None:
    with _created(place, name) as descriptor:
        _write_all(descriptor, entry.content)
        # Owner first: chown takes setuid and setgid away.
        os.fchown(descriptor, entry.node.uid, entry.node.gid)
        os.fchmod(descriptor, entry.node.mode)
        _label(root, place, descriptor, stat.S_IFREG)
        if sync:
            os.fsync(descriptor)


def _fill_link(root: Root, place: Place, name: str, target: str) -> None:
    os.symlink(target, name, dir_fd=place.fd)
    os.chown(name, 0, 0, dir_fd=place.fd, follow_symlinks=False)
    # There is no lsetxattr relative to a descriptor.
    _label(root, place, f"/proc/self/fd/{place.fd}/{name}", stat.S_IFLNK)


def _temporary_name() -> str:
    return f".mcdaemon-{secrets.token_hex(8)}"


@contextlib.contextmanager
def _temporary(place: Place) -> Iterator[str]:
    name = _temporary_name()
    try:
        yield name
    finally:
        # After the rename the name is free; after anything else the temporary goes.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=place.fd)


def _write_all(descriptor: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]


def _label(root: Root, place: Place, made: Union[int, str], kind: int) -> None:
    """Give what was `made` (a descriptor or a path) the label of the place that it is made for."""
    label = selinux.label_of(root, place.path, kind)
    if label is None:
        return
    try:
        os.setxattr(made, selinux.ATTRIBUTE, label, follow_symlinks=isinstance(made, int))
    except OSError as error:
        if error.errno == errno.ENOTSUP:
            # A file system without labels, such as an EFI partition.
            return
        text = label.rstrip(b"\0").decode("ascii", "replace")
        hint = "a label that the running policy does not know needs CAP_MAC_ADMIN"
        raise Broken(f"cannot label {place.path} {text}: {error.strerror}", hint) from error


def _rename(place: Place, temporary: str, path: str, sync: bool) -> None:
    try:
        os.rename(temporary, place.name, src_dir_fd=place.fd, dst_dir_fd=place.fd)
    except IsADirectoryError as error:
        try:
            os.rmdir(place.name, dir_fd=place.fd)
        except OSError:
            raise _directory_in_place(path) from error
        os.rename(temporary, place.name, src_dir_fd=place.fd, dst_dir_fd=place.fd)
    if sync:
        os.fsync(place.fd)


def _directory_in_place(path: str) -> Broken:
    return Broken(
        f"cannot write {path}: a directory with something in it stands there",
        "move the directory away, or choose another path in the config",
        "directory-in-place",
    )


def _kind(place: Place) -> Kind:
    try:
        mode = os.stat(place.name, dir_fd=place.fd, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return Kind.ABSENT
    kinds = {stat.S_IFREG: Kind.FILE, stat.S_IFLNK: Kind.LINK, stat.S_IFDIR: Kind.DIRECTORY}
    return kinds.get(stat.S_IFMT(mode), Kind.OTHER)


def _unlink(place: Place) -> None:
    try:
        os.unlink(place.name, dir_fd=place.fd)
    except IsADirectoryError:
        os.rmdir(place.name, dir_fd=place.fd)


def _sync_once(descriptor: int, synced: set[int]) -> None:
    try:
        device = os.fstat(descriptor).st_dev
        if device not in synced and ctypes.CDLL(None, use_errno=True).syncfs(descriptor) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        synced.add(device)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _naming(doing: str, place: object) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        failure = from_os_error(error, doing, place)
        if error.errno == errno.EPERM and isinstance(failure, Broken) and not failure.hint:
            # Root meets EPERM where chattr +i or +a was used (field case FILE-20).
            failure = Broken(failure.sentence, "it or its directory may be immutable; see lsattr", failure.code)
        raise failure from error
