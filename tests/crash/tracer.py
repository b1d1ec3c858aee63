"""Stops a program and all that it starts before each system call that changes something, and kills there on demand.

    python -m tests.crash.tracer [--kill-at N] [--report FILE] -- program argument…

A seccomp filter lets every other call run at full speed; ptrace(2) hands over the rest. A stop is counted when the call
would change something that outlives the process: see `_Judge`. All counted calls of the tree pass through one thread,
so that nothing traced changes anything while the tree stands at a stop. The kill comes before the call is made: a kill
before call N is a kill after call N-1.

strace does not do: it counts for each thread, and its injected signal ends one process only.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import enum
import os
import re
import signal
import struct
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable, Optional

from tests.stand.inroot import open_in_root

KILLED = 86
"""Exit status of this program when it has killed the tree."""
NOT_PERMITTED = 87
"""Exit status of this program when ptrace or seccomp is not permitted here."""


class NotPermitted(Exception):
    """ptrace or seccomp is not permitted: nothing can be proved here, which is a failure and no reason to skip."""


class Action(enum.Enum):
    """What becomes of the tree that stands at a stop."""

    GO = "go"
    KILL = "kill"


@dataclass(frozen=True)
class Stop:
    """A process that is about to make a call. `number` counts from 1 over the whole tree; `path` is the node's."""

    number: int
    pid: int
    program: str
    call: str
    path: str

    def line(self) -> str:
        return f"{self.number}\t{self.program}\t{self.call}\t{self.path}"


@dataclass
class Traced:
    """How it ended: exit status of the first process (negative: a signal), and the stop at which all were killed."""

    status: int = 0
    stops: list[Stop] = field(default_factory=list)
    killed: Optional[Stop] = None


AtStop = Callable[[Stop], Action]

# -- the calls --------------------------------------------------------------------------------------------------------


class _Kind(enum.Enum):
    """Which argument says what is changed."""

    OPEN = "open"  # with flags that create or truncate
    PATH = "path"
    FILE = "file"  # a descriptor
    SEND = "send"  # to a bus, or a write
    CONNECT = "connect"  # counts never; says where a socket leads
    SYNC = "sync"
    KILL = "kill"
    PLAIN = "plain"


@dataclass(frozen=True)
class _Call:
    """One system call: its numbers, and where its directory and path or its descriptor are among the arguments."""

    name: str
    x86: int
    arm: int
    kind: _Kind
    path: int = 0
    at: int = -1


def _table() -> tuple[_Call, ...]:
    k = _Kind
    rows = [
        ("open", 2, -1, k.OPEN, 0), ("creat", 85, -1, k.OPEN, 0), ("openat", 257, 56, k.OPEN, 1, 0),
        ("openat2", 437, 437, k.OPEN, 1, 0),
        ("write", 1, 64, k.SEND), ("pwrite64", 18, 68, k.FILE), ("writev", 20, 66, k.SEND),
        ("pwritev", 296, 70, k.FILE), ("pwritev2", 328, 287, k.FILE),
        ("rename", 82, -1, k.PATH, 1), ("renameat", 264, 38, k.PATH, 3, 2), ("renameat2", 316, 276, k.PATH, 3, 2),
        ("link", 86, -1, k.PATH, 1), ("linkat", 265, 37, k.PATH, 3, 2),
        ("unlink", 87, -1, k.PATH, 0), ("unlinkat", 263, 35, k.PATH, 1, 0),
        ("mkdir", 83, -1, k.PATH, 0), ("mkdirat", 258, 34, k.PATH, 1, 0), ("rmdir", 84, -1, k.PATH, 0),
        ("symlink", 88, -1, k.PATH, 1), ("symlinkat", 266, 36, k.PATH, 2, 1),
        ("chmod", 90, -1, k.PATH, 0), ("fchmod", 91, 52, k.FILE), ("fchmodat", 268, 53, k.PATH, 1, 0),
        ("fchmodat2", 452, 452, k.PATH, 1, 0),
        ("chown", 92, -1, k.PATH, 0), ("fchown", 93, 55, k.FILE), ("lchown", 94, -1, k.PATH, 0),
        ("fchownat", 260, 54, k.PATH, 1, 0),
        ("setxattr", 188, 5, k.PATH, 0), ("lsetxattr", 189, 6, k.PATH, 0), ("fsetxattr", 190, 7, k.FILE),
        ("removexattr", 197, 14, k.PATH, 0), ("lremovexattr", 198, 15, k.PATH, 0), ("fremovexattr", 199, 16, k.FILE),
        ("truncate", 76, 45, k.PATH, 0), ("ftruncate", 77, 46, k.FILE), ("fallocate", 285, 47, k.FILE),
        ("fsync", 74, 82, k.SYNC), ("fdatasync", 75, 83, k.SYNC), ("sync", 162, 81, k.SYNC),
        ("syncfs", 306, 267, k.SYNC),
        ("utime", 132, -1, k.PATH, 0), ("utimes", 235, -1, k.PATH, 0), ("futimesat", 261, -1, k.PATH, 1, 0),
        ("utimensat", 280, 88, k.PATH, 1, 0),
        ("mknod", 133, -1, k.PATH, 0), ("mknodat", 259, 33, k.PATH, 1, 0),
        ("mount", 165, 40, k.PATH, 1), ("umount2", 166, 39, k.PATH, 0), ("move_mount", 429, 429, k.PATH, 3, 2),
        ("mount_setattr", 442, 442, k.PATH, 1, 0), ("pivot_root", 155, 41, k.PATH, 0),
        ("ioctl", 16, 29, k.FILE), ("copy_file_range", 326, 285, k.FILE, 2), ("sendfile", 40, 71, k.FILE, 0),
        ("splice", 275, 76, k.FILE, 2),
        ("sendto", 44, 206, k.SEND), ("sendmsg", 46, 211, k.SEND), ("sendmmsg", 307, 269, k.SEND),
        ("connect", 42, 203, k.CONNECT), ("kill", 62, 129, k.KILL), ("pidfd_send_signal", 424, 424, k.KILL),
    ]  # fmt: skip
    return tuple(_Call(*row) for row in rows)  # type: ignore[arg-type]  # rows of different lengths


_X86 = os.uname().machine == "x86_64"
_ARCHITECTURE = 0xC000003E if _X86 else 0xC00000B7
_CALLS = {(call.x86 if _X86 else call.arm): call for call in _table() if (call.x86 if _X86 else call.arm) >= 0}
_CREATES = os.O_CREAT | os.O_TRUNC | 0o20000000  # the last is O_TMPFILE without O_DIRECTORY
_SETFLAGS, _FICLONE = 0x40086602, 0x40049409
# Which argument holds flags of interest, for calls that are traced only with these.
_WITH_FLAGS = {"open": (1, _CREATES), "openat": (2, _CREATES)}


def _filter() -> bytes:
    """The seccomp program: TRACE for the calls of the table, ALLOW for all others (seccomp(2), struct sock_filter)."""
    load, equal, any_bit, answer = 0x20, 0x15, 0x45, 0x06
    allow, trace = 0x7FFF0000, 0x7FF00000
    code = [(load, 0, 0, 4), (equal, 1, 0, _ARCHITECTURE), (answer, 0, 0, allow), (load, 0, 0, 0)]
    for number, call in _CALLS.items():
        if call.name in _WITH_FLAGS:
            argument, mask = _WITH_FLAGS[call.name]
            code += [(equal, 0, 4, number), (load, 0, 0, 16 + 8 * argument), (any_bit, 0, 1, mask)]
            code += [(answer, 0, 0, trace), (answer, 0, 0, allow)]
        elif call.name == "ioctl":
            code += [(equal, 0, 5, number), (load, 0, 0, 24), (equal, 1, 0, _SETFLAGS), (equal, 0, 1, _FICLONE)]
            code += [(answer, 0, 0, trace), (answer, 0, 0, allow)]
        else:
            code += [(equal, 0, 1, number), (answer, 0, 0, trace)]
    code.append((answer, 0, 0, allow))
    return b"".join(struct.pack("=HBBI", *line) for line in code)


# -- what a stopped process is about to do ----------------------------------------------------------------------------

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_LIBC.ptrace.restype = ctypes.c_long
_NOT_FILES = ("/proc/", "/sys/", "/dev/", "/memfd:")
_PAGE = 4096
# Calls over the bus that only ask; every other one counts.
_ASKING = frozenset(
    b"Hello AddMatch RemoveMatch GetNameOwner NameHasOwner ListNames GetConnectionUnixProcessID Get GetAll Introspect "
    b"Ping GetManagedObjects GetUnit GetUnitFileState ListUnits ListUnitsByNames ListUnitsByPatterns ListInhibitors "
    b"ListJobs GetDeploymentBootConfig GetId Subscribe".split()
)
# The system bus, and a transaction's own socket, which has a path or an abstract name.
_BUS = re.compile(r"bus|rpm-ostree")
_MEMBER = re.compile(rb"\x03\x01s\x00(....)", re.DOTALL)


class _Vector(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


def _memory(pid: int, address: int, size: int) -> bytes:
    """Up to `size` bytes of another process; what lies behind an unmapped page is missing."""
    parts = b""
    while size > 0 and address:
        step = min(size, _PAGE - address % _PAGE)
        buffer = ctypes.create_string_buffer(step)
        here, there = _Vector(ctypes.addressof(buffer), step), _Vector(address, step)
        got = _LIBC.process_vm_readv(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        if got <= 0:
            break
        parts += buffer.raw[:got]
        address, size = address + step, size - step
    return parts


def _text(pid: int, address: int) -> str:
    """The string at an address of another process, as far as a path can be long."""
    found = b""
    while address and len(found) < 2 * _PAGE:
        part = _memory(pid, address, _PAGE - address % _PAGE)
        found += part
        if not part or b"\0" in part:
            break
        address += len(part)
    return found.partition(b"\0")[0].decode(errors="replace")


class _Judge:
    """Says what a call would change, or None when that is nothing which a later process can see.

    Not counted, because a kill before such a call and one before the next call that counts leave the same:
    fsync and its kin (unless `syncs`); an open that creates nothing new and truncates nothing; a directory that is
    there already; the removal of what is not there; calls on files without a name, devices, /proc and /sys; calls over
    the bus that only ask; messages to anybody else than a bus.
    """

    def __init__(self, syncs: bool) -> None:
        self._syncs = syncs
        self._sockets: dict[str, str] = {}
        self._programs: dict[int, str] = {}

    def program(self, pid: int) -> str:
        if pid not in self._programs:
            try:
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            except OSError:
                return "?"
            names = [os.path.basename(word.decode(errors="replace")) for word in words if word[:1] not in (b"-", b"")]
            self._programs[pid] = " ".join(names[:3])[:60]
        return self._programs[pid]

    def forget(self, pid: int) -> None:
        self._programs.pop(pid, None)

    def __call__(self, pid: int, call: _Call, args: Sequence[int]) -> Optional[str]:
        """The path or message that the call is about."""
        if call.kind is _Kind.CONNECT:
            self._connect(pid, args)
            return None
        if call.kind is _Kind.SEND:
            return self._send(pid, call, args)
        if call.kind is _Kind.FILE:
            return self._file(pid, args[call.path])
        if call.kind is _Kind.SYNC:
            return (self._file(pid, args[0]) if call.name != "sync" else "") if self._syncs else None
        if call.kind is _Kind.KILL:
            return f"process {args[0]}" if args[1] else None
        path = self._path(pid, call, args)
        if path.startswith(_NOT_FILES) and not path.startswith("/dev/shm/"):
            return None
        if call.kind is _Kind.OPEN:
            return path if self._opens_anew(pid, call, args, path) else None
        if call.name.startswith("mkdir"):
            return None if _kind_of(pid, path) else path
        if call.name.startswith(("unlink", "rmdir", "rename")):
            return path if call.name.startswith("rename") or _kind_of(pid, path) is not False else None
        return path

    def _opens_anew(self, pid: int, call: _Call, args: Sequence[int], path: str) -> bool:
        if call.name == "creat":
            flags = os.O_CREAT | os.O_TRUNC
        elif call.name == "openat2":
            flags = int.from_bytes(_memory(pid, args[2], 8), "little")
        else:
            flags = args[_WITH_FLAGS[call.name][0]]
        if not flags & _CREATES:
            return False
        if flags & 0o20000000:  # a file without a name
            return False
        exists = _kind_of(pid, path)
        return bool(flags & os.O_TRUNC) if exists else True

    def _path(self, pid: int, call: _Call, args: Sequence[int]) -> str:
        path = _text(pid, args[call.path])
        if path.startswith("/"):
            return path
        descriptor = ctypes.c_int(args[call.at]).value if call.at >= 0 else -100
        base = _link(f"/proc/{pid}/cwd" if descriptor == -100 else f"/proc/{pid}/fd/{descriptor}")
        return f"{base}/{path}" if path else base

    def _file(self, pid: int, descriptor: int) -> Optional[str]:
        path = _link(f"/proc/{pid}/fd/{ctypes.c_int(descriptor).value}")
        if not path.startswith("/") or path.endswith(" (deleted)"):
            return None
        return None if path.startswith(_NOT_FILES) and not path.startswith("/dev/shm/") else path

    def _connect(self, pid: int, args: Sequence[int]) -> None:
        address = _memory(pid, args[1], min(args[2] & 0xFF, 110))
        where = address[2:].strip(b"\0").decode(errors="replace") if address[:2] == b"\1\0" else ""
        self._sockets[_link(f"/proc/{pid}/fd/{args[0]}")] = where

    def _send(self, pid: int, call: _Call, args: Sequence[int]) -> Optional[str]:
        where = _link(f"/proc/{pid}/fd/{args[0]}")
        if not where.startswith("socket:"):
            return self._file(pid, args[0]) if call.name in ("write", "writev") else None
        if not _BUS.search(self._sockets.get(where, "")):
            return None
        return _method(self._message(pid, call, args))

    def _message(self, pid: int, call: _Call, args: Sequence[int]) -> bytes:
        if call.name in ("write", "sendto"):
            return _memory(pid, args[1], min(args[2], 1 << 16))
        address, count = args[1], args[2]
        if call.name != "writev":  # struct msghdr: name, its length, vector, its length
            header = _memory(pid, address, 32)
            address, count = struct.unpack("=QQ", header[16:32]) if len(header) == 32 else (0, 0)
        vector = _memory(pid, address, 16 * min(count, 64))
        pairs = struct.iter_unpack("=QQ", vector[: len(vector) // 16 * 16])
        return b"".join(_memory(pid, base, min(length, 1 << 16)) for base, length in pairs)


def _method(message: bytes) -> Optional[str]:
    """The first method that does more than ask, in messages to a bus (D-Bus Specification, "Message Protocol")."""
    if message[:2] != b"l\1":
        return None  # the handshake, or an answer
    for found in _MEMBER.finditer(message):
        length = int.from_bytes(found.group(1), "little")
        member = message[found.end() : found.end() + length]
        if length < 256 and member not in _ASKING:
            return f"bus: {member.decode(errors='replace')}"
    return None


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _kind_of(pid: int, path: str) -> Optional[bool]:
    """True: it is there; False: it is not; None: it cannot be told."""
    try:
        root = os.open(f"/proc/{pid}/root", os.O_PATH | os.O_DIRECTORY)
    except OSError:
        return None
    try:
        os.close(open_in_root(root, path, os.O_PATH | os.O_NOFOLLOW))
        return True
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return None
    finally:
        os.close(root)


# -- the tree ---------------------------------------------------------------------------------------------------------

_SEIZE, _CONT, _LISTEN, _EVENT_MESSAGE, _SYSCALL_INFO = 0x4206, 7, 0x4208, 0x4201, 0x420E
_OPTIONS = 0x2 | 0x4 | 0x8 | 0x10 | 0x80 | 0x100000  # fork, vfork, clone, exec, seccomp, exitkill
_EVENT_EXEC, _EVENT_SECCOMP, _EVENT_STOP = 4, 7, 128
_WALL, _WNOTHREAD = 0x40000000, 0x20000000
_STOPPING = (signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU)


def _ptrace(request: int, pid: int, address: int = 0, data: int = 0) -> int:
    """Raises ProcessLookupError when the process has been killed meanwhile."""
    answer = int(_LIBC.ptrace(request, pid, address, data))
    if answer < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return answer


class _Tree:
    """All processes from one, as this thread traces them: ptrace belongs to a thread, and so do its waits."""

    def __init__(self, at_stop: AtStop, syncs: bool) -> None:
        self._at_stop = at_stop
        self._judge = _Judge(syncs)
        self._info = ctypes.create_string_buffer(128)
        self.alive: set[int] = set()
        self.first = 0
        self.traced = Traced()
        self._killing = False

    def start(self, argv: Sequence[str], env: Mapping[str, str], stdout: int, stderr: int) -> None:
        reader, writer = os.pipe()
        program = _filter()
        child = os.fork()
        if child == 0:
            os.close(writer)
            _become(argv, env, stdout, stderr, reader, program)
        os.close(reader)
        try:
            _ptrace(_SEIZE, child, 0, _OPTIONS)
        except OSError as error:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise NotPermitted(f"cannot trace: ptrace is not permitted here: {error.strerror}") from error
        else:
            os.write(writer, b"x")  # only now may it go on
        finally:
            os.close(writer)
        self.first = child
        self.alive.add(child)

    def follow(self) -> None:
        """Until the last of them has ended."""
        while True:
            try:
                pid, status = os.waitpid(-1, _WALL | _WNOTHREAD)
            except ChildProcessError:
                return
            if os.WIFSTOPPED(status):
                self.alive.add(pid)
                try:
                    self._stopped(pid, status >> 8)
                except ProcessLookupError:
                    pass  # It was killed while it stood.
            else:
                self.alive.discard(pid)
                self._judge.forget(pid)
                if pid == self.first:
                    self.traced.status = os.waitstatus_to_exitcode(status)

    def _stopped(self, pid: int, how: int) -> None:
        number, event = how & 0xFF, how >> 8
        if self._killing and not self._waits_outside(pid):
            os.kill(pid, signal.SIGKILL)
            return
        if event == _EVENT_SECCOMP:
            if self._may_go_on(pid):
                _ptrace(_CONT, pid)
        elif event == _EVENT_STOP and number in _STOPPING:
            _ptrace(_LISTEN, pid)
        elif event == _EVENT_EXEC:
            former = ctypes.c_ulong(0)
            _ptrace(_EVENT_MESSAGE, pid, 0, ctypes.addressof(former))
            if former.value != pid:
                self.alive.discard(former.value)
            self._judge.forget(pid)
            _ptrace(_CONT, pid)
        else:
            _ptrace(_CONT, pid, 0, 0 if event else number)

    def _may_go_on(self, pid: int) -> bool:
        _ptrace(_SYSCALL_INFO, pid, len(self._info), ctypes.addressof(self._info))
        number, *args = struct.unpack_from("=7Q", self._info, 24)
        call = _CALLS[number]
        path = self._judge(pid, call, args)
        if path is None:
            return True
        stop = Stop(len(self.traced.stops) + 1, pid, self._judge.program(pid), call.name, path)
        self.traced.stops.append(stop)
        if self._at_stop(stop) is Action.GO:
            return True
        self.traced.killed = stop
        self.kill()
        return False

    def kill(self) -> None:
        """SIGKILL for all of them; `follow` sees them end. Who just waits outside of the node's namespace ends with
        the one that it waits for: if it went first, that one would be left to somebody else."""
        self._killing = True
        for pid in list(self.alive):
            if not self._waits_outside(pid):
                _kill(pid)

    def _waits_outside(self, pid: int) -> bool:
        own = _link(f"/proc/{pid}/ns/pid")
        return own != "" and _link(f"/proc/{pid}/ns/pid_for_children") not in (own, "") and len(self.alive) > 1


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # It has ended meanwhile.


def _become(argv: Sequence[str], env: Mapping[str, str], stdout: int, stderr: int, reader: int, program: bytes) -> None:
    """In the child: wait until it is traced, take the filter, and exec."""
    try:
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for source, target in ((null, 0), (stdout if stdout >= 0 else null, 1), (stderr if stderr >= 0 else null, 2)):
            os.dup2(source, target)
        if os.read(reader, 1) != b"x":
            os._exit(127)
        code = ctypes.create_string_buffer(program, len(program))
        header = struct.pack("=HxxxxxxQ", len(program) // 8, ctypes.addressof(code))
        if _LIBC.prctl(22, 2, ctypes.c_char_p(header), 0, 0) != 0:  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER
            os._exit(NOT_PERMITTED)
        os.execvpe(argv[0], list(argv), dict(env))
    finally:
        os._exit(127)


def trace(
    argv: Sequence[str],
    at_stop: AtStop,
    env: Optional[Mapping[str, str]] = None,
    stdout: int = -1,
    stderr: int = -1,
    syncs: bool = False,
) -> Traced:
    """Run `argv` and call `at_stop` before each call that changes something; the answer says how it ended.

    `stdout` and `stderr` are descriptors, -1 is /dev/null. With `syncs` the calls of fsync's kin are stops as well.
    Raises NotPermitted, and what `at_stop` raises; nothing of the tree is left then.
    """
    tree = _Tree(at_stop, syncs)
    errors: list[BaseException] = []

    def work() -> None:
        try:
            tree.start(argv, os.environ if env is None else env, stdout, stderr)
            tree.follow()
        except BaseException as error:  # noqa: BLE001 - handed over to the caller's thread
            errors.append(error)
            tree.kill()
            tree.follow()

    thread = threading.Thread(target=work, name="tracer")
    thread.start()
    try:
        thread.join()
    except BaseException:
        tree.kill()
        thread.join()
        raise
    if errors:
        raise errors[0]
    if tree.traced.status == NOT_PERMITTED:
        raise NotPermitted("cannot trace: a seccomp filter is not permitted here")
    return tree.traced


def require_permission() -> None:
    """Raises NotPermitted, with a sentence, where this process may not trace. A suite fails then; it does not skip."""
    seen = trace(["/usr/bin/python3", "-IBc", "import os; os.kill(os.getpid(), 18)"], lambda _stop: Action.GO)
    if seen.status != 0 or [stop.call for stop in seen.stops] != ["kill"]:
        raise NotPermitted(f"cannot trace: the calls of a program are not seen here (status {seen.status})")


def main(arguments: Sequence[str]) -> int:
    """The program; see the top of this file."""
    parser = argparse.ArgumentParser(prog="tracer", description="Kill a program at a call that changes something.")
    parser.add_argument("--kill-at", type=int, default=0, metavar="N")
    parser.add_argument("--report", type=Path, metavar="FILE", help="one line for each counted call")
    parser.add_argument("--syncs", action="store_true", help="count fsync and its kin as well")
    parser.add_argument("argv", nargs="+")
    options = parser.parse_args(arguments)

    with contextlib.ExitStack() as last:
        report = last.enter_context(options.report.open("w")) if options.report else None

        def at_stop(stop: Stop) -> Action:
            if report is not None:  # at once: who reboots the machine ends this program as well
                print(stop.line(), file=report, flush=True)
            return Action.KILL if stop.number == options.kill_at else Action.GO

        try:
            done = trace(options.argv, at_stop, stdout=1, stderr=2, syncs=options.syncs)
        except NotPermitted as error:
            print(error, file=sys.stderr)
            return NOT_PERMITTED
    if done.killed is not None:
        return KILLED
    return done.status if done.status >= 0 else 128 - done.status


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
