"""The weakest file system that keeps the rules of fsync(2): what a power cut may leave after some operations.

- Content, mode and owner of a file are on the disk once the file was fsynced. Before that the power cut leaves what was
  there at the last fsync, or any later state of mode and owner, and as content the old one, a later one, nothing, half
  of it, or zeros in its length (delayed allocation).
- A change in a directory (create, mkdir, link, rename, unlink) is on the disk once that directory was fsynced. Before
  that each of them, independently of the others, may be there or not. A rename is atomic: the old name or the new one.
- Everything on a file system is on the disk once it was synced with syncfs(2) or sync(2).

No file system in use is as weak in all of this (ext4 and XFS keep the order of directory changes, an fsync brings
earlier ones along); what survives here survives on each of them. A symbolic link is complete where its name is there:
there is no way to fsync one, and none is needed.
"""

from __future__ import annotations

import copy
import itertools
import math
import os
import random
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Optional

from tests.crash.recording import Call, Operation


@dataclass(frozen=True)
class Leaf:
    """What is at a path: `kind` is "file", "link" or "directory"; of a link `data` is the target."""

    kind: str
    data: bytes = b""
    mode: int = 0
    uid: int = 0
    gid: int = 0


Tree = Mapping[str, Leaf]
"""By path relative to the disk's top; parents come before what is in them."""


@dataclass(eq=False)
class _Inode:
    """`versions`: the state on the disk, and all later ones; `durable` and `changes`: the same of a folder's names."""

    device: int
    versions: list[Leaf]
    durable: dict[str, _Inode] = field(default_factory=dict)
    changes: list[_Change] = field(default_factory=list)
    current: dict[str, _Inode] = field(default_factory=dict)

    @property
    def now(self) -> Leaf:
        return self.versions[-1]

    def change(self, **values: object) -> None:
        self.versions.append(replace(self.now, **values))  # type: ignore[arg-type]  # names are those of Leaf

    def alter(self, change: _Change) -> None:
        self.changes.append(change)
        change.apply(self.current)

    def sync(self) -> None:
        self.versions = [self.now]
        self.durable, self.changes = dict(self.current), []


@dataclass(frozen=True, eq=False)
class _Change:
    """`name` becomes `inode` (None: it goes); of a rename `source` is the name that goes."""

    name: str
    inode: Optional[_Inode]
    gone: Optional[_Inode] = None
    source: str = ""

    def apply(self, names: dict[str, _Inode]) -> None:
        if self.source and names.get(self.source) is self.inode:
            del names[self.source]
        if self.inode is not None:
            names[self.name] = self.inode
        elif names.get(self.name) is self.gone:
            names.pop(self.name, None)


@dataclass(frozen=True, eq=False)
class _Choice:
    """Something that a power cut decides: `options` from the one that is on the disk to the one that was last seen."""

    inode: _Inode
    what: str
    options: Sequence[object]


class LossyDisk:
    """The tree below `top` as it is now, all of it on the disk; then what operations make of it.

    `devices`: folders below `top` that are file systems of their own.
    """

    def __init__(self, top: Path, devices: Sequence[str] = ()) -> None:
        self._top = os.fspath(top)
        self._devices = {folder: number for number, folder in enumerate(devices, 1)}
        self._root = self._load(self._top)

    @classmethod
    def of(cls, other: LossyDisk) -> LossyDisk:
        """An independent copy."""
        return copy.deepcopy(other)

    # -- what happens ---------------------------------------------------------------------------------------------

    def apply(self, operation: Operation) -> None:
        """Let an operation happen, as processes see it."""
        call = operation.call
        if call is Call.MARK:
            return
        if call is Call.SYNC:
            self._sync(None)
        elif call in (Call.FSYNC, Call.SYNCFS):
            inode = self._find(operation.path)
            if call is Call.FSYNC:
                inode.sync()
            else:
                self._sync(inode.device)
        elif call in (Call.WRITE, Call.TRUNCATE, Call.CHMOD, Call.CHOWN):
            self._alter_file(operation)
        else:
            self._alter_names(operation)

    def _alter_file(self, operation: Operation) -> None:
        inode = self._find(operation.path)
        now = inode.now
        if operation.call is Call.WRITE:
            data = now.data.ljust(operation.offset, b"\0")
            end = operation.offset + len(operation.data)
            inode.change(data=data[: operation.offset] + operation.data + data[end:])
        elif operation.call is Call.TRUNCATE:
            inode.change(data=now.data[: operation.offset].ljust(operation.offset, b"\0"))
        elif operation.call is Call.CHMOD:
            inode.change(mode=operation.mode)
        else:
            uid, gid = (now.uid, now.gid) if operation.uid < 0 else (operation.uid, operation.gid)
            # chown(2) takes setuid and setgid away.
            mode = now.mode if now.kind != "file" else now.mode & 0o1777
            inode.change(uid=uid, gid=gid, mode=mode)

    def _alter_names(self, operation: Operation) -> None:
        call, (folder, name) = operation.call, os.path.split(operation.path)
        parent = self._find(folder)
        if call is Call.RENAME:
            old_folder, old_name = os.path.split(operation.other)
            if old_folder != folder:
                raise ValueError(f"a rename from one directory to another: {operation}")
            parent.alter(_Change(name, parent.current[old_name], source=old_name))
        elif call is Call.LINK:
            parent.alter(_Change(name, self._find(operation.other)))
        elif call is Call.UNLINK:
            parent.alter(_Change(name, None, gone=parent.current[name]))
        elif call is Call.CREATE:
            if name not in parent.current:
                parent.alter(_Change(name, _Inode(parent.device, [Leaf("file", mode=operation.mode & ~0o022)])))
        elif call is Call.MKDIR:
            parent.alter(_Change(name, _Inode(parent.device, [Leaf("directory", mode=operation.mode & ~0o022)])))
        else:
            leaf = Leaf("link", operation.other.encode(), 0o777)
            parent.alter(_Change(name, _Inode(parent.device, [leaf])))

    def read(self, path: str) -> Optional[bytes]:
        """The content of a file as processes see it now; None where there is none."""
        try:
            return self._find(path).now.data
        except KeyError:
            return None

    # -- what a power cut leaves ----------------------------------------------------------------------------------

    def states(self, most: int, chance: random.Random) -> Iterator[Tree]:
        """What a power cut may leave now: all of it where that is at most `most`; else with nothing of what was not
        synced, with all of it, with all but one, with one alone, and by `chance`."""
        choices = self._choices()
        sizes = [len(choice.options) for choice in choices]
        if math.prod(sizes) <= most:
            picks: Iterator[Sequence[int]] = itertools.product(*map(range, sizes))
        else:
            picks = itertools.islice(_some(sizes, chance), most)
        seen = set()
        for pick in picks:
            tree = self._tree(choices, pick)
            key = frozenset(tree.items())
            if key not in seen:
                seen.add(key)
                yield tree

    def settled(self) -> Tree:
        """What is there when everything gets to the disk."""
        choices = self._choices()
        return self._tree(choices, [len(choice.options) - 1 for choice in choices])

    def _choices(self) -> list[_Choice]:
        found = []
        for inode in self._inodes():
            found += [_Choice(inode, "name", (None, change)) for change in inode.changes]
            rights = list(dict.fromkeys((v.mode, v.uid, v.gid) for v in inode.versions))
            contents = _contents([version.data for version in inode.versions])
            found += [_Choice(inode, "rights", rights)] if len(rights) > 1 else []
            found += [_Choice(inode, "content", contents)] if len(contents) > 1 else []
        return found

    def _tree(self, choices: Sequence[_Choice], pick: Sequence[int]) -> Tree:
        chosen: dict[tuple[int, str], list[object]] = {}
        for choice, index in zip(choices, pick):
            chosen.setdefault((id(choice.inode), choice.what), []).append(choice.options[index])
        tree: dict[str, Leaf] = {}
        waiting = [("", self._root)]
        while waiting:
            path, inode = waiting.pop()
            leaf = inode.versions[0]
            for content in chosen.get((id(inode), "content"), []):
                assert isinstance(content, bytes)
                leaf = replace(leaf, data=content)
            for rights in chosen.get((id(inode), "rights"), []):
                assert isinstance(rights, tuple)
                leaf = replace(leaf, mode=rights[0], uid=rights[1], gid=rights[2])
            tree[path] = leaf
            names = dict(inode.durable)
            for change in chosen.get((id(inode), "name"), []):
                if isinstance(change, _Change):
                    change.apply(names)
            waiting += [(f"{path}/{name}".lstrip("/"), names[name]) for name in sorted(names, reverse=True)]
        return tree

    # -- inodes ---------------------------------------------------------------------------------------------------

    def _inodes(self) -> list[_Inode]:
        """All that a power cut could leave a name of."""
        found: dict[int, _Inode] = {}
        waiting = [self._root]
        while waiting:
            inode = waiting.pop()
            if id(inode) not in found:
                found[id(inode)] = inode
                changed = [change.inode for change in inode.changes if change.inode is not None]
                waiting += [*inode.durable.values(), *changed]
        return list(found.values())

    def _sync(self, device: Optional[int]) -> None:
        for inode in self._inodes():
            if device is None or inode.device == device:
                inode.sync()

    def _find(self, path: str) -> _Inode:
        inode = self._root
        for name in path[len(self._top) :].split("/"):
            if name:
                inode = inode.current[name]
        return inode

    def _load(self, path: str, device: int = 0) -> _Inode:
        device = self._devices.get(path, device)
        info = os.lstat(path)
        rights = stat.S_IMODE(info.st_mode), info.st_uid, info.st_gid
        if stat.S_ISLNK(info.st_mode):
            return _Inode(device, [Leaf("link", os.readlink(path).encode(), *rights)])
        if not stat.S_ISDIR(info.st_mode):
            return _Inode(device, [Leaf("file", Path(path).read_bytes(), *rights)])
        names = {name: self._load(f"{path}/{name}", device) for name in sorted(os.listdir(path))}
        return _Inode(device, [Leaf("directory", b"", *rights)], durable=names, current=dict(names))


def _contents(versions: Sequence[bytes]) -> list[bytes]:
    """What a file may hold that was not synced since the first of these: the first, a later one, or none of them."""
    last = versions[-1]
    if set(versions) == {last}:
        return [last]
    found = dict.fromkeys([*versions[:-1], b"", last[: len(last) // 2], bytes(len(last))])
    return [content for content in found if content != last] + [last]


def _some(sizes: Sequence[int], chance: random.Random) -> Iterator[Sequence[int]]:
    least, greatest = [0] * len(sizes), [size - 1 for size in sizes]
    yield least
    yield greatest
    single = [
        [*base[:index], option, *base[index + 1 :]]
        for index, size in enumerate(sizes)
        for option in range(size)
        for base in (greatest, least)
        if base[index] != option
    ]
    chance.shuffle(single)
    for pick in single:
        yield pick
        yield [chance.randrange(size) for size in sizes]
    while True:
        yield [chance.randrange(size) for size in sizes]


def materialise(tree: Tree, place: Path) -> None:
    """Make an empty or missing folder `place` that tree."""
    for path, leaf in tree.items():
        where = place / path
        if leaf.kind == "link":
            where.symlink_to(os.fsdecode(leaf.data))
        elif leaf.kind == "directory":
            where.mkdir(exist_ok=True)
        else:
            where.write_bytes(leaf.data)
        os.chown(where, leaf.uid, leaf.gid, follow_symlinks=False)
        if leaf.kind != "link":
            where.chmod(leaf.mode)
