"""What a program does to a folder, as a list of operations: recorded from outside with strace, call by call.

The program can leave marks in its recording with `mark`; all else it knows nothing about. A call that changes something
and is not understood here ends the recording with an error: nothing is left out silently.
"""

from __future__ import annotations

import contextlib
import enum
import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_MARKS = "/@mark/"
_TIMEOUT = 120.0


class Call(enum.Enum):
    """The kinds of operations."""

    CREATE = "create"
    TRUNCATE = "truncate"
    WRITE = "write"
    RENAME = "rename"
    LINK = "link"
    UNLINK = "unlink"
    MKDIR = "mkdir"
    SYMLINK = "symlink"
    CHMOD = "chmod"
    CHOWN = "chown"
    FSYNC = "fsync"
    SYNCFS = "syncfs"
    SYNC = "sync"
    MARK = "mark"


@dataclass(frozen=True)
class Operation:
    """One operation that succeeded. Paths are absolute.

    `other`: the old name of a RENAME or LINK, the target of a SYMLINK. `data` at `offset` for a WRITE, `offset` is the
    new length for TRUNCATE. `mode` for CREATE, MKDIR and CHMOD; `uid` and `gid` (-1: as it is) for CHOWN.
    """

    call: Call
    path: str
    other: str = ""
    data: bytes = b""
    offset: int = 0
    mode: int = 0
    uid: int = -1
    gid: int = -1

    def __str__(self) -> str:
        more = f" from {self.other}" if self.other else f" {len(self.data)} bytes" if self.call is Call.WRITE else ""
        return f"{self.call.value} {self.path}{more}"


class NotUnderstood(Exception):
    """The program made a call that the recording has no operation for."""


def mark(name: str) -> None:
    """Leave a mark in the recording of this program."""
    with contextlib.suppress(FileNotFoundError):
        os.readlink(_MARKS + name)


_SUPPORTED = (
    "open,openat,creat,write,pwrite64,truncate,ftruncate,rename,renameat,renameat2,link,linkat,unlink,unlinkat,rmdir,"
    "mkdir,mkdirat,symlink,symlinkat,chmod,fchmod,fchmodat,chown,fchown,lchown,fchownat,fsync,fdatasync,syncfs,sync,"
    "readlink"
)
_UNSUPPORTED = (
    "openat2,writev,pwritev,pwritev2,setxattr,lsetxattr,fsetxattr,fallocate,copy_file_range,sendfile,splice,mknod,"
    "mknodat,sync_file_range,removexattr,lremovexattr,fremovexattr"
)


def record(argv: Sequence[str], top: Path, log: Path) -> list[Operation]:
    """Run a program to its end and return what it, and what it started, did below `top` and where it left marks.

    Raises subprocess.CalledProcessError when it fails, NotUnderstood as above.
    """
    trace = f"trace={_SUPPORTED},{_UNSUPPORTED}"
    strace = ["strace", "-f", "-y", "-xx", "-s", "99999999", "-e", "signal=none", "-e", trace, "-o", str(log), "--"]
    subprocess.run([*strace, *argv], check=True, timeout=_TIMEOUT, stdin=subprocess.DEVNULL)
    return list(_Reader(str(top)).read(log.read_text()))


_LINE = re.compile(r"(?P<pid>\d+) +(?P<call>\w+)\((?P<args>.*)\) += (?P<result>-?\d+|\?)")
_RESUMED = re.compile(r"(?P<pid>\d+) +<\.\.\. \w+ resumed>(?P<rest>.*)")
_ARGUMENT = re.compile(r'(?:(?P<fd>-?\d+|AT_FDCWD)<(?P<place>[^>]*)>)|"(?P<text>[^"]*)"|(?P<plain>[^,\s][^,]*)')


class _Reader:
    """Turns strace's lines into operations; keeps the position of each descriptor that was written to."""

    def __init__(self, top: str) -> None:
        self._top = top
        self._positions: dict[tuple[str, str], int] = {}

    def read(self, text: str) -> Iterator[Operation]:
        begun: dict[str, str] = {}
        for line in text.splitlines():
            resumed = _RESUMED.match(line)
            if line.endswith("<unfinished ...>"):
                begun[line.split(None, 1)[0]] = line[: -len("<unfinished ...>")]
                continue
            if resumed:
                line = begun.pop(resumed["pid"]) + resumed["rest"]
            found = _LINE.match(line)
            if found and (found["result"] != "-1" or found["call"] == "readlink"):
                yield from self._operations(found["pid"], found["call"], found["args"], found["result"])

    def _operations(self, pid: str, call: str, text: str, result: str) -> Iterator[Operation]:
        args = [_Argument.of(match) for match in _ARGUMENT.finditer(text)]
        if call == "readlink":
            if args[0].text.startswith(_MARKS):
                yield Operation(Call.MARK, args[0].text[len(_MARKS) :])
            return
        if call == "sync":
            yield Operation(Call.SYNC, self._top)
            return
        for operation in _understood(call, args):
            if f"{operation.path}/".startswith(f"{self._top}/"):
                yield self._placed(operation, pid, result if operation.call is Call.CREATE else args[0].fd)

    def _placed(self, operation: Operation, pid: str, fd: str) -> Operation:
        if operation.call is Call.CREATE:
            self._positions[pid, fd] = 0
        if operation.call is not Call.WRITE or operation.offset >= 0:
            return operation
        at = self._positions.get((pid, fd), 0)
        self._positions[pid, fd] = at + len(operation.data)
        return Operation(Call.WRITE, operation.path, data=operation.data, offset=at)


@dataclass(frozen=True)
class _Argument:
    fd: str = ""
    place: str = ""
    raw: bytes = b""
    plain: str = ""

    @classmethod
    def of(cls, match: re.Match[str]) -> _Argument:
        return cls(
            match["fd"] or "", _bytes(match["place"] or "").decode(), _bytes(match["text"] or ""), match["plain"] or ""
        )

    @property
    def text(self) -> str:
        return self.raw.decode(errors="surrogateescape")

    @property
    def number(self) -> int:
        return int(self.plain, 8 if self.plain.startswith("0") else 10)


def _bytes(text: str) -> bytes:
    """What strace wrote with -xx, each byte as \\xNN."""
    return bytes.fromhex(text.replace("\\x", ""))


def _understood(call: str, args: list[_Argument]) -> Iterator[Operation]:
    """The operations of a call that succeeded."""
    if call in _UNSUPPORTED.split(","):
        raise NotUnderstood(f"{call}: {args}")
    at = call.endswith(("at", "at2"))
    place = _joined(args[0], args[1]) if at and call != "symlinkat" else args[0].place or _absolute(args[0].text)
    rest = args[2:] if at else args[1:]
    if call in ("open", "openat", "creat"):
        yield from _opened(call, place, rest)
    elif call in ("write", "pwrite64"):
        yield Operation(Call.WRITE, place, data=args[1].raw, offset=args[3].number if call == "pwrite64" else -1)
    elif call in ("truncate", "ftruncate"):
        yield Operation(Call.TRUNCATE, place, offset=args[1].number)
    elif call.startswith(("rename", "link")):
        kind = Call.RENAME if call.startswith("rename") else Call.LINK
        target = _joined(args[2], args[3]) if at else _absolute(args[1].text)
        if call == "renameat2" and args[4].plain not in ("0", "RENAME_NOREPLACE"):
            raise NotUnderstood(f"{call}: {args}")
        yield Operation(kind, target, other=place)
    elif call in ("unlink", "unlinkat", "rmdir"):
        yield Operation(Call.UNLINK, place)
    elif call.startswith("mkdir"):
        yield Operation(Call.MKDIR, place, mode=rest[0].number)
    elif call.startswith("symlink"):
        where = _joined(args[1], args[2]) if at else _absolute(args[1].text)
        yield Operation(Call.SYMLINK, where, other=args[0].text)
    elif "chmod" in call:
        yield Operation(Call.CHMOD, place, mode=rest[0].number)
    elif "chown" in call:
        yield Operation(Call.CHOWN, place, uid=rest[0].number, gid=rest[1].number)
    elif call in ("fsync", "fdatasync"):
        yield Operation(Call.FSYNC, place)
    elif call == "syncfs":
        yield Operation(Call.SYNCFS, place)
    else:
        raise NotUnderstood(f"{call}: {args}")


def _opened(call: str, place: str, rest: list[_Argument]) -> Iterator[Operation]:
    flags = "O_CREAT|O_TRUNC" if call == "creat" else rest[0].plain
    if "O_TMPFILE" in flags or "O_APPEND" in flags:
        raise NotUnderstood(f"{call} {place} {flags}")
    if "O_CREAT" in flags:
        yield Operation(Call.CREATE, place, mode=rest[-1].number)
    if "O_TRUNC" in flags:
        yield Operation(Call.TRUNCATE, place)


def _joined(base: _Argument, name: _Argument) -> str:
    return os.path.normpath(os.path.join(base.place, name.text))


def _absolute(path: str) -> str:
    if path and not path.startswith("/"):
        raise NotUnderstood(f"a path that is not absolute: {path}")
    return path
