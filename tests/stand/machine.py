"""A node without a VM: a deployment of a scratch ostree sysroot, booted in namespaces of its own.

    node = Machine(tmp_path / "node")
    node.install_tree(minimal_tree(tmp_path / "tree"))
    node.boot()
    node.run(["ostree", "admin", "status"])
    node.reboot()
    node.close()

libostree, its deployments, boot entries and /etc merges are the real ones; PID 1 is a stand-in (`systemd1`). What
`power_cut` loses is every process, /run, /tmp and what PID 1 would have done at shutdown; it does not lose writes that
were not synced, because the host's page cache survives. A node on a `disk.Disk` can lose those, too: boot another
Machine from a snapshot of it. Times are in seconds everywhere.
"""

from __future__ import annotations

import enum
import json
import os
import select
import shutil
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Optional, Union

from tests.stand.init import BootPlan, shell_environment
from tests.stand.inroot import open_in_root
from tests.stand.nodeprocess import NodeProcess
from tests.stand.sysroot import BRANCH, BootEntry, Deployment, NoSuchDeployment, Sysroot
from tests.stand.tree import minimal_tree

__all__ = ["BootEntry", "CommandFailed", "Deployment", "Down", "Machine", "MachineError", "NoSuchDeployment",
           "minimal_tree"]  # fmt: skip

LIBRARY = Path(__file__).resolve().parents[1]
# The network is the host's: registries listen on its loopback.
NAMESPACES = ("--mount", "--pid", "--uts", "--ipc")
NODE_LIBRARY = "/run/stand/lib"
PROGRAMS = ("/usr/bin/python3", "ostree", "unshare", "nsenter", "dbus-daemon", "busctl")
BOOTS_IN_A_ROW = 5
_LOG_TAIL = 4000


class Down(enum.Enum):
    """How a node went down."""

    REBOOT = "reboot"
    POWEROFF = "poweroff"
    CRASH = "crash"


class MachineError(Exception):
    """The node cannot do what was asked; the text says what hung or failed and ends with the tail of its log."""


class CommandFailed(MachineError):
    """A command in the node ended with another status than 0, or did not end in time (`result.returncode` is -9)."""

    def __init__(self, result: subprocess.CompletedProcess[str], why: str) -> None:
        text = f"{why}: {result.args!r}\nstdout: {result.stdout or ''}\nstderr: {result.stderr or ''}"
        super().__init__(text)
        self.result = result


class Machine:
    """One node; `folder` keeps its disk (sysroot/) and its logs (logs/) and may be booted by one Machine at a time.

    `binds` maps host paths to node paths (read-only; as value also `(node path, "rw")`). `units` are unit files that
    appear in /run/systemd/system at each boot (name or `name.d/drop-in.conf` -> text). `environment` is given to every
    service and command. `logind` is the systemd version whose inhibitor rules hold (see `login1`). `own_disk`: sysroot/
    is on a file system that nobody else uses (`disk.Disk`), so the node may sync and freeze it as a real one does.
    """

    def __init__(
        self,
        folder: Path,
        binds: Optional[Mapping[Union[str, Path], Union[str, tuple[str, str]]]] = None,
        units: Optional[Mapping[str, str]] = None,
        environment: Optional[Mapping[str, str]] = None,
        osname: str = "rhcos",
        logind: int = 252,
        own_disk: bool = False,
    ) -> None:
        self.folder = folder.resolve()
        self.binds = dict(binds or {})
        self.units = dict(units or {})
        self.environment = dict(environment or {})
        self.logind = logind
        self.own_disk = own_disk
        self.boots: list[str] = []
        self.logs = self.folder / "logs"
        self.logs.mkdir(parents=True, exist_ok=True)
        self.sysroot = Sysroot.create(self.folder / "sysroot", osname)
        if own_disk:
            self.sysroot.sync_writes()
        self._plan: Optional[BootPlan] = None
        self._process: Optional[subprocess.Popen[bytes]] = None
        self._reports: Optional[_Reports] = None
        self._init = 0

    # -- the disk -----------------------------------------------------------------------------------------------------

    def install_tree(
        self, tree: Path, kargs: Sequence[str] = (), origin: Optional[str] = None, version: str = ""
    ) -> str:
        """Commit the directory `tree` and deploy it as first boot entry, as an installer would; returns the commit.

        The node must be down. `origin` is the text of an origin file; without it the origin is the branch
        `sysroot.BRANCH`. `kargs` are added to those of the first boot entry that is there.
        """
        self._must_be_down()
        commit = self.sysroot.commit_tree(tree, version)
        self.sysroot.deploy(BRANCH, kargs, origin)
        return commit

    def deploy_commit(self, commit: str, kargs: Sequence[str] = (), origin_text: Optional[str] = None) -> None:
        """Deploy a commit that is in the repository already as first boot entry; the node must be down."""
        self._must_be_down()
        self.sysroot.deploy(commit, kargs, origin_text)

    def default_entry(self) -> BootEntry:
        """The boot entry that a boot loader takes now: the highest version among the BLS entries."""
        return self.sysroot.default_entry()

    def deployments(self) -> list[Deployment]:
        """What `ostree admin status` says, in its order; a staged one is only known while the node is up."""
        if self.up:
            return self.sysroot.parse_status(self.run(["ostree", "admin", "status"]).stdout)
        return self.sysroot.status()

    def booted(self) -> Deployment:
        """The deployment that the node runs. Raises NoSuchDeployment when it is down."""
        for deployment in self.deployments():
            if deployment.booted:
                return deployment
        raise NoSuchDeployment("no deployment is booted")

    def deployment_root(self, name: str) -> Path:
        """The host's path of the deployment `name` ("<checksum>.<serial>")."""
        return self.sysroot.deployment_root(name)

    # -- up and down --------------------------------------------------------------------------------------------------

    @property
    def up(self) -> bool:
        """True from a boot's begin until the node is down."""
        return self._process is not None

    @property
    def root(self) -> Path:
        """The node's "/" as the host sees it; do not follow links from here (`read` and `write` are safe)."""
        self._booted_plan()
        return Path(f"/proc/{self._init}/root")

    @property
    def boot_id(self) -> str:
        """The id of this boot, as /proc/sys/kernel/random/boot_id has it in the node."""
        if not self.boots:
            raise MachineError("the node has never been booted")
        return self.boots[-1]

    def boot(self, timeout: float = 30.0, follow: bool = True) -> int:
        """Boot the default entry and wait until the bus, systemd and all enabled units are up.

        A unit that asks for a reboot before that (mcdaemon-early does) is followed, `follow` permitting: the answer is
        how many boots it took. Raises MachineError with what hung and the log's tail.
        """
        for count in range(1, BOOTS_IN_A_ROW + 1):
            self.start_boot()
            how = self.wait_up(timeout)
            if how is None:
                return count
            if how is not Down.REBOOT or not follow:
                raise MachineError(f"the node went down while it booted: {how.value}{self._log_tail()}")
        raise MachineError(f"the node rebooted {BOOTS_IN_A_ROW} times in a row while it booted{self._log_tail()}")

    def start_boot(self) -> None:
        """Begin to boot the default entry and return at once; `wait_up` tells how it ends."""
        self._must_be_down()
        entry = self.default_entry()
        self._plan = plan = self._make_plan(entry)
        self.boots.append(plan.boot_id)
        plan_path = self.folder / "boot.json"
        plan.write(plan_path)
        reader, writer = os.pipe()
        argv = ["unshare", *NAMESPACES, "--fork", "--kill-child=KILL", "--propagation", "private", "--",
                "/usr/bin/python3", "-m", "tests.stand.init", str(plan_path), str(writer)]  # fmt: skip
        self._reports = _Reports(reader)
        with open(self.logs / "init.log", "ab") as log:
            log.write(f"-- boot {plan.boot_id} of {entry.deployment} --\n".encode())
            log.flush()
            try:
                self._process = subprocess.Popen(
                    argv, cwd=LIBRARY.parent, env={"PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1"},
                    stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=(writer,), start_new_session=True,
                )  # fmt: skip
            finally:
                os.close(writer)

    def wait_up(self, timeout: float = 30.0) -> Optional[Down]:
        """Wait until the boot is complete; the answer is None, or how the node went down instead."""
        deadline = time.monotonic() + timeout
        stage = "its first process"
        while True:
            report = self._next_report(deadline, f"the boot hangs at {stage}")
            event = report.get("event")
            if event == "init":
                self._init, stage = int(str(report["pid"])), "its mounts"
            elif event == "mounted":
                stage = "the system bus"
            elif event == "waiting":
                stage = str(report["text"])
            elif event == "ready":
                return None
            elif event == "error":
                text = str(report["text"])
                self._reap()
                raise MachineError(f"the node does not boot: {text}{self._log_tail()}")
            else:
                return self._went_down(report)

    def wait_down(self, timeout: float = 60.0) -> Down:
        """Wait until the node has gone down by itself and say how. Raises MachineError after `timeout`."""
        deadline = time.monotonic() + timeout
        stage = "somebody to ask for it"
        while True:
            report = self._next_report(deadline, f"the node does not go down: it waits for {stage}")
            if report.get("event") in ("down", "eof"):
                return self._went_down(report)
            stage = str(report.get("text", stage))

    def ask_reboot(self) -> None:
        """Ask logind for an orderly reboot and return at once."""
        self.run(["busctl", "--timeout=20", "call", "org.freedesktop.login1", "/org/freedesktop/login1",
                  "org.freedesktop.login1.Manager", "Reboot", "b", "false"])  # fmt: skip

    def reboot(self, timeout: float = 60.0) -> None:
        """An orderly reboot through logind, and the boot after it."""
        self.ask_reboot()
        how = self.wait_down(timeout)
        if how is not Down.REBOOT:
            raise MachineError(f"the node should have rebooted, but it went down by {how.value}{self._log_tail()}")
        self.boot(timeout)

    def power_cut(self) -> None:
        """Kill every process of the node at once: nothing is stopped or finalized, /run and /tmp are lost."""
        if self._process is None:
            raise MachineError("the node is down already")
        self._kill()

    def close(self) -> None:
        """Kill the node if it is up and make its folder deletable (ostree marks deployments as immutable)."""
        if self._process is not None:
            self._kill()
        self.sysroot.make_deletable()

    def __enter__(self) -> Machine:
        return self

    def __exit__(self, kind: Optional[type[BaseException]], error: Optional[BaseException],
                 trace: Optional[TracebackType]) -> None:  # fmt: skip
        self.close()

    # -- commands -----------------------------------------------------------------------------------------------------

    def run(
        self,
        argv: Sequence[str],
        timeout: float = 60.0,
        check: bool = True,
        env: Optional[Mapping[str, str]] = None,
        input: Optional[str] = None,
        cwd: str = "/",
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in the node as root. Raises CommandFailed when it fails (`check`) or exceeds `timeout`.

        stdout and stderr are captured as text. On a timeout the command and its children are killed.
        """
        stdin = subprocess.PIPE if input is not None else subprocess.DEVNULL
        process = self.start(argv, env=env, cwd=cwd, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        try:
            out, err = process.communicate(input, timeout)
        except subprocess.TimeoutExpired:
            out, err = process.kill_and_collect()
            result = subprocess.CompletedProcess(list(argv), -signal.SIGKILL, out, err)
            raise CommandFailed(result, f"command did not end within {timeout:g} s") from None
        except BaseException:
            process.kill_and_collect()
            raise
        result = subprocess.CompletedProcess(list(argv), process.returncode, out, err)
        if check and process.returncode != 0:
            raise CommandFailed(result, f"command failed with status {process.returncode}")
        return result

    def start(
        self,
        argv: Sequence[str],
        env: Optional[Mapping[str, str]] = None,
        cwd: str = "/",
        stdin: Union[int, IO[str]] = subprocess.DEVNULL,
        stdout: Union[int, IO[str], None] = subprocess.DEVNULL,
        stderr: Union[int, IO[str], None] = subprocess.DEVNULL,
    ) -> NodeProcess:
        """Start a command in the node and return its Popen; `kill()` and `terminate()` reach it and its children.

        Its `pid` is that of nsenter, which waits outside for the command: never signal that number directly.
        """
        argv, environment = self.entering(argv, env, cwd)
        return NodeProcess(argv, env=environment, stdin=stdin, stdout=stdout, stderr=stderr, text=True,
                           errors="replace", start_new_session=True)  # fmt: skip

    def entering(
        self, argv: Sequence[str], env: Optional[Mapping[str, str]] = None, cwd: str = "/"
    ) -> tuple[list[str], dict[str, str]]:
        """The command of the host that runs `argv` in the node, and its environment: for who starts it otherwise."""
        plan = self._booted_plan()
        place = f"/proc/{self._init}/root{cwd}"
        command = ["nsenter", f"--target={self._init}", *NAMESPACES, "--root", f"--wd={place}", "--", *argv]
        return command, {**shell_environment(plan), **(env or {})}

    def stop_process(self, process: subprocess.Popen[str], number: int = signal.SIGKILL, timeout: float = 10.0) -> int:
        """Signal a command from `start` together with its children and wait for its end."""
        if process.poll() is None:
            process.send_signal(number)
        return process.wait(timeout)

    # -- files --------------------------------------------------------------------------------------------------------

    def read(self, path: str) -> str:
        """The text of a file of the node."""
        return self.read_bytes(path).decode()

    def read_bytes(self, path: str) -> bytes:
        """The content of a file of the node."""
        with self._open(path, os.O_RDONLY) as descriptor, open(descriptor, "rb", closefd=False) as stream:
            return stream.read()

    def write(self, path: str, text: Union[str, bytes], mode: int = 0o644) -> None:
        """Write a file in the node as an administrator would with an editor: in place, parents are made."""
        parent = os.path.dirname(path)
        if not self.exists(parent):
            self.run(["mkdir", "-p", parent])
        with self._open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode) as descriptor:
            os.fchmod(descriptor, mode)
            with open(descriptor, "wb", closefd=False) as stream:
                stream.write(text.encode() if isinstance(text, str) else text)

    def exists(self, path: str) -> bool:
        """True when the path, its last link not followed, exists in the node."""
        try:
            self.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def lstat(self, path: str) -> os.stat_result:
        """lstat(2) in the node."""
        with self._open(path, os.O_PATH | os.O_NOFOLLOW) as descriptor:
            return os.fstat(descriptor)

    def readlink(self, path: str) -> str:
        """The target of a symbolic link in the node."""
        with self._open(path, os.O_PATH | os.O_NOFOLLOW) as descriptor:
            return os.readlink("", dir_fd=descriptor)

    # -- logs ---------------------------------------------------------------------------------------------------------

    def journal(self, unit: str = "", boot_id: str = "") -> str:
        """All that `unit` printed, over all boots or in the one with `boot_id`; PID 1's lines are "systemd[1]: …".

        Without a unit: all units, each line with the unit's name in front.
        """
        lines = []
        for folder in sorted(self.logs.glob(f"boot-*-{boot_id or '*'}")):
            for path in sorted((folder / "units").glob(f"{unit or '*'}.log")):
                prefix = "" if unit else f"{path.stem}: "
                lines += [prefix + line for line in path.read_text(errors="replace").splitlines()]
        return "\n".join(lines)

    def calls(self, boot_id: str = "") -> list[dict[str, Any]]:
        """The calls to systemd and logind that the stand-in recorded in this boot (or in the one with `boot_id`).

        Each has `time` (seconds since the epoch), `sender`, `interface`, `path`, `method`, `args`.
        """
        (folder,) = self.logs.glob(f"boot-*-{boot_id or self.boot_id}")
        path = folder / "calls.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    # -- inside -------------------------------------------------------------------------------------------------------

    def _make_plan(self, entry: BootEntry) -> BootPlan:
        binds = []
        for source, target in self.binds.items():
            node_path, access = (target, "ro") if isinstance(target, str) else target
            binds.append([str(Path(source).resolve()), node_path, access])
        boot_id = str(uuid.uuid4())
        log = self.logs / f"boot-{len(list(self.logs.glob('boot-*'))):03}-{boot_id}"
        log.mkdir()
        scratch = self.folder / "scratch" / boot_id
        shutil.rmtree(scratch.parent, ignore_errors=True)
        scratch.mkdir(parents=True)
        return BootPlan(
            sysroot=str(self.sysroot.path), deployment=str(self.sysroot.deployment_root(entry.deployment)),
            stateroot_var=str(self.sysroot.stateroot / "var"), kernel_arguments=entry.options,
            boot_id=boot_id, library=str(LIBRARY), log=str(log), scratch=str(scratch), binds=binds,
            units=self.units, environment=self.environment,
            options={"logind": str(self.logind), "own_disk": "yes" if self.own_disk else ""},
        )  # fmt: skip

    def _booted_plan(self) -> BootPlan:
        if self._process is None or self._plan is None or not self._init:
            raise MachineError("the node is down")
        return self._plan

    def _must_be_down(self) -> None:
        if self._process is not None:
            raise MachineError("the node is up; reboot() or power_cut() it first")

    @contextmanager
    def _open(self, path: str, flags: int, mode: int = 0o600) -> Iterator[int]:
        """Open a path of the node without ever leaving its root, whatever its links say."""
        self._booted_plan()
        root = os.open(f"/proc/{self._init}/root", os.O_PATH | os.O_DIRECTORY)
        try:
            descriptor = open_in_root(root, path, flags, mode)
        finally:
            os.close(root)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def _next_report(self, deadline: float, what: str) -> dict[str, object]:
        if self._reports is None:
            raise MachineError("the node is down")
        report = self._reports.next(deadline)
        if report is None:
            raise MachineError(f"{what}{self._log_tail()}")
        return report

    def _went_down(self, report: Mapping[str, object]) -> Down:
        self._reap()
        return Down(str(report["how"])) if report.get("event") == "down" else Down.CRASH

    def _kill(self) -> None:
        if self._init:
            try:
                os.kill(self._init, signal.SIGKILL)
            except ProcessLookupError:
                pass  # It ended by itself meanwhile.
        elif self._process is not None:
            self._process.kill()
        self._reap()

    def _reap(self) -> None:
        """Wait until the kernel has ended every process of the node's PID namespace (unshare ends after the first)."""
        process, reports = self._process, self._reports
        self._process, self._reports, self._init = None, None, 0
        if reports is not None:
            reports.close()
        if process is not None:
            process.wait(20)

    def _log_tail(self) -> str:
        text = (self.logs / "init.log").read_text(errors="replace") if (self.logs / "init.log").exists() else ""
        text += self.journal()
        return f"\n--- log ---\n{text[-_LOG_TAIL:]}"


class _Reports:
    """The JSON lines that the node's first process sends while it boots and goes down."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._buffer = b""

    def next(self, deadline: float) -> Optional[dict[str, object]]:
        """The next report, `{"event": "eof"}` when the node is dead, None at the deadline (monotonic seconds)."""
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self._descriptor], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                return None
            data = os.read(self._descriptor, 65536)
            if not data:
                return {"event": "eof"}
            self._buffer += data
        line, self._buffer = self._buffer.split(b"\n", 1)
        report = json.loads(line)
        return report if isinstance(report, dict) else {"event": "eof"}

    def close(self) -> None:
        """Close the pipe; the node's first process notices and ends."""
        os.close(self._descriptor)
