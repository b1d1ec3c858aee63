"""A node's machine: switched on, booted by a boot loader, talked to, rebooted, and cut off from its power.

What `tests.stand.machine.Machine` is for the stand, with a real kernel, a real systemd and a real disk. Times are in
seconds; time limits are at least five times what a quiet machine needs under TCG.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Optional, Protocol, Union

from tests.stand.machine import BOOTS_IN_A_ROW, CommandFailed, Down, MachineError
from tests.stand.sysroot import BootEntry, Deployment, NoSuchDeployment, Sysroot
from vmlab import bootloader, tally
from vmlab.bootloader import BlsEntry, DiskFiles
from vmlab.guestagent import CHUNK, AgentError, AgentGone
from vmlab.guestprocess import LISTING, Found, GuestProcess, parse_listing
from vmlab.kvm import QEMU, accelerator
from vmlab.qemu import Drive, Ending, Qemu, Start

FOLDER = Path(__file__).resolve().parents[2] / "dist/vm"
BOOT = 300.0
"""Seconds for a boot or a shutdown: ten times what each takes on a quiet machine."""

STALLED = 90.0
"""Seconds after which a boot that has logged nothing is looked at: systemd's first line comes after five to twenty."""

_IDLE_FOR = 5.0

# Part of a snapshot's key: raise it when the machine's devices change.
_MACHINE = "1"
_KEPT = "/var/tmp/vmlab"
_TALLY = "counts.jsonl"
# For each entry: its path, its ostree= link, the link's target, its text.
_ENTRIES = r"""
for f in /boot/loader/entries/*.conf; do
    o=$(sed -n 's/^options.* ostree=\([^ ]*\).*/\1/p' "$f")
    printf '%s\0%s\0%s\0%s\0' "$f" "$o" "$(readlink "$o")" "$(cat "$f")"
done
"""
_DOWN = {Ending.REBOOT: Down.REBOOT, Ending.POWEROFF: Down.POWEROFF}


class Image(Protocol):
    """What `vmlab.image.build` gives, as far as it matters here."""

    @property
    def disk(self) -> Path: ...

    @property
    def key(self) -> str: ...


class Guest:
    """One machine; `folder` keeps its disk and its logs (run-1, run-2, … one per boot).

    `cache` keeps kernels and snapshots and may be shared by workers. `write_log`: the next boots note all writes and
    flushes of the disk there (QEMU's blklogwrites), to be applied to a copy of `began_with`. `extra` is added to QEMU's
    options.

    What a power cut loses: QEMU is killed, so all that the guest keeps in memory, its page cache too, is gone. What the
    guest's kernel has written to the disk stays, flushed or not, because the host's page cache survives. The loss of
    a disk's own write cache is tried with the log of writes (`write_log`) instead.
    """

    def __init__(self, folder: Path, disk: Path, cache: Path = FOLDER, extra: Sequence[str] = ()) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.disk = disk
        self.cache = cache
        self.extra = tuple(extra)
        self.boots: list[str] = []
        self.write_log: Optional[Path] = None
        self.began_with = disk
        self.last_ending: Optional[Ending] = None
        self._qemu: Optional[Qemu] = None
        self._start: Start
        self._runs = 0
        self._kept = 0

    @classmethod
    def cold(cls, image: Path, folder: Path, cache: Path = FOLDER) -> Guest:
        """A machine that is off, with a sparse copy of the disk `image`."""
        folder.mkdir(parents=True, exist_ok=True)
        disk = folder / "disk.raw"
        copy_sparse(image, disk)
        guest = cls(folder, disk, cache)
        guest.began_with = image
        return guest

    @classmethod
    def at_rest(
        cls,
        built: Image,
        folder: Path,
        cache: Path = FOLDER,
        name: str = "",
        prepare: Optional[Callable[[Guest], None]] = None,
        write_log: Optional[Path] = None,
        begin: Optional[Callable[[Path], Guest]] = None,
    ) -> Guest:
        """A machine that is up: restored from the snapshot of one that was booted once, its clock set.

        `prepare` is done once, before the snapshot, and `name` is its name and version in the snapshot's key. `begin`
        makes the machine for it, up, in this folder; else it is booted from the image.
        """
        snapshot = _snapshot(built, cache, name, prepare, begin)
        guest = cls.cold(snapshot / "disk.raw", folder, cache)
        guest.write_log = write_log
        guest.restore(snapshot)
        return guest

    # -- the disk -----------------------------------------------------------------------------------------------------

    def entries(self) -> list[BootEntry]:
        """What the boot loader offers, the default first; of a running machine what it has in /boot/loader now."""
        if not self.up:
            return list(bootloader.entries(DiskFiles.open(self.disk)))
        words = self.run(["sh", "-c", _ENTRIES]).stdout.split("\0")
        links = dict(zip(words[1::4], words[2::4]))
        texts = zip(words[0::4], words[3::4])
        found = [bootloader.parse_entry(name, text, lambda link: os.path.basename(links[link])) for name, text in texts]
        return list(bootloader.in_order([entry for entry in found if entry is not None]))

    def default_entry(self) -> BootEntry:
        """The entry that a boot loader takes now. Raises NoSuchDeployment."""
        found = self.entries()
        if not found:
            raise NoSuchDeployment(f"no boot entry on {self.disk}")
        return found[0]

    def replay_journal(self) -> None:
        """Replay the file system's journal of a machine that is off, which a boot loader does not do; it is counted."""
        self._must_be_down()
        DiskFiles.open(self.disk).replay_journal()
        self._count(tally.REPLAYS)

    def disk_files(self) -> DiskFiles:
        """The files of a machine that is off."""
        self._must_be_down()
        return DiskFiles.open(self.disk)

    # -- up and down --------------------------------------------------------------------------------------------------

    @property
    def up(self) -> bool:
        """True from a boot's begin until it is known that the machine is down."""
        return self._qemu is not None

    @property
    def qemu(self) -> Qemu:
        """The running machine. Raises MachineError when it is off."""
        if self._qemu is None:
            raise MachineError("the machine is off")
        return self._qemu

    @property
    def boot_id(self) -> str:
        """The id of the last boot that came up."""
        if not self.boots:
            raise MachineError("the machine has never been booted")
        return self.boots[-1]

    def boot(self, timeout: float = BOOT, follow: bool = True, entry: Optional[BootEntry] = None) -> int:
        """Boot (the default entry, or `entry`) and wait until systemd has started everything.

        A reboot before that (mcdaemon-early's) is followed into the default entry, `follow` permitting: the answer is
        how many boots it took. Raises MachineError.
        """
        for count in range(1, BOOTS_IN_A_ROW + 1):
            self.start_boot(entry)
            how = self.wait_up(timeout)
            if how is None:
                return count
            if how is not Down.REBOOT or not follow:
                raise MachineError(f"the machine went down while it booted: {how.value}{self._last_words()}")
            entry = None
        raise MachineError(f"the machine rebooted {BOOTS_IN_A_ROW} times in a row while it booted{self._last_words()}")

    def start_boot(self, entry: Optional[BootEntry] = None) -> None:
        """Switch on and return at once; `wait_up` tells how the boot ends."""
        self._must_be_down()
        disk = DiskFiles.open(self.disk)
        chosen = entry if isinstance(entry, BlsEntry) else bootloader.default_entry(disk)
        if entry is not None and chosen is not entry:
            chosen = next(one for one in bootloader.entries(disk) if one.deployment == entry.deployment)
        boot = bootloader.load(disk, chosen, self.cache / "kernels")
        start = Start(Drive(self.disk, self.write_log), boot.kernel, boot.initrd, boot.options,
                      accelerator(self.cache), extra=self.extra)  # fmt: skip
        self._count(tally.BOOTS)
        self._start = start
        self._qemu = Qemu(start, self._next_folder())

    def _begin_again_if_stalled(self) -> None:
        """Seen once in some hundred boots: QEMU 7.2 without KVM loses the end of the kernel's first read, and
        waits for ever, idle. Nothing of the disk was changed then, so the same boot is begun again, and counted."""
        qemu = self.qemu
        with qemu.changed:
            if qemu.changed.wait_for(lambda: qemu.journal.lines or not qemu.qmp.open, STALLED):
                return
        before = qemu.cpu_seconds()
        with qemu.changed:
            if qemu.changed.wait_for(lambda: qemu.journal.lines or not qemu.qmp.open, _IDLE_FOR):
                return
        if qemu.cpu_seconds() - before < _IDLE_FOR / 20:
            qemu.kill()
            self._count(tally.STALLS)
            self._qemu = Qemu(self._start, self._next_folder())

    def wait_up(self, timeout: float = BOOT) -> Optional[Down]:
        """Wait until the boot is complete; the answer is None, or how the machine went down instead."""
        self._begin_again_if_stalled()
        deadline = time.monotonic() + timeout
        qemu = self.qemu
        with qemu.changed:
            qemu.changed.wait_for(lambda: qemu.agent.port_open or not qemu.qmp.open, timeout)
        if qemu.agent.port_open:
            script = "systemctl is-system-running --wait >/dev/null; cat /proc/sys/kernel/random/boot_id"
            left = max(1.0, deadline - time.monotonic())
            try:
                done = self.run(["sh", "-c", script], timeout=left, check=False)
            except CommandFailed as error:
                raise MachineError(f"the boot does not end: {error}{qemu.tails()}") from None
            if done.returncode == 0 and done.stdout.strip():
                self.boots.append(done.stdout.strip())
                return None
        elif qemu.qmp.open:
            raise MachineError(f"no guest agent within {timeout:g} s of the boot{qemu.tails()}")
        return self.wait_down(max(60.0, deadline - time.monotonic()))

    def wait_down(self, timeout: float = BOOT) -> Down:
        """Wait until the machine is down by itself and say how; `last_ending` tells a panic from a lost QEMU."""
        self.last_ending = ending = self.qemu.wait_end(timeout)
        self._qemu = None
        if ending is Ending.PANIC:
            self._count(tally.PANICS)
        return _DOWN.get(ending, Down.CRASH)

    def wait_for(self, pattern: Union[str, re.Pattern[str]], timeout: float = BOOT, since: int = 0) -> str:
        """Wait for a line of this boot's journal; `since` is a place from `mark`."""
        return self.qemu.wait_line(pattern, timeout, since)

    def hear(self, pattern: str, timeout: float = BOOT, since: int = 0) -> Optional[tuple[int, str]]:
        """Wait for a line of this boot's journal: the place after it and itself; None when the machine went down first.

        Raises MachineError after `timeout` seconds.
        """
        qemu = self.qemu
        try:
            return qemu.journal.hear(pattern, timeout, since)
        except TimeoutError as error:
            raise MachineError(f"{error}{qemu.tails()}") from None

    def mark(self) -> int:
        """The place after what this boot's journal said so far."""
        return self.qemu.journal.mark()

    def ask_reboot(self) -> None:
        """Ask logind for an orderly reboot and return at once."""
        self._ask_logind("Reboot")

    def reboot(self, timeout: float = BOOT) -> None:
        """An orderly reboot, and the boot after it."""
        self.ask_reboot()
        how = self.wait_down(timeout)
        if how is not Down.REBOOT:
            raise MachineError(f"the machine should have rebooted, but went down by {how.value}{self._last_words()}")
        self.boot(timeout)

    def power_off(self, timeout: float = BOOT) -> None:
        """An orderly power off."""
        self._ask_logind("PowerOff")
        how = self.wait_down(timeout)
        if how is not Down.POWEROFF:
            raise MachineError(f"the machine should be off, but went down by {how.value}{self._last_words()}")

    def power_cut(self) -> None:
        """Kill QEMU in whatever it does; what is lost is said above."""
        self.qemu.kill()
        self.last_ending = Ending.KILLED
        self._qemu = None
        self._count(tally.POWER_CUTS)

    def close(self) -> None:
        """Switch off; the folder stays."""
        if self._qemu is not None:
            self._qemu.kill()
            self._qemu = None

    def __enter__(self) -> Guest:
        return self

    def __exit__(self, kind: Optional[type[BaseException]], error: Optional[BaseException],
                 trace: Optional[TracebackType]) -> None:  # fmt: skip
        self.close()

    # -- snapshots ----------------------------------------------------------------------------------------------------

    def snapshot(self, folder: Path) -> None:
        """Keep RAM and disk of the running machine in `folder`; it runs on."""
        folder.mkdir(parents=True, exist_ok=True)
        self.qemu.stop()
        self.qemu.save(folder / "ram")
        copy_sparse(self.disk, folder / "disk.raw")
        (folder / "state.json").write_text(json.dumps({"boot_id": self.boot_id}))
        self.qemu.cont()

    def restore(self, folder: Path) -> None:
        """Go on from the RAM in `folder`; the disk must be (a copy of) the one beside it. The clock is set to now."""
        self._must_be_down()
        start = Start(Drive(self.disk, self.write_log), accel=accelerator(self.cache), restore=folder / "ram",
                      extra=self.extra)  # fmt: skip
        begin = time.monotonic()
        self._qemu = Qemu(start, self._next_folder())
        self._qemu.wait_agent(60)
        self.boots.append(json.loads((folder / "state.json").read_text())["boot_id"])
        self.run(["date", "--set", f"@{time.time():.3f}"])
        self._count(tally.RESTORES, time.monotonic() - begin)

    # -- commands -----------------------------------------------------------------------------------------------------

    def run(
        self,
        argv: Sequence[str],
        timeout: float = 120.0,
        check: bool = True,
        env: Optional[Mapping[str, str]] = None,
        input: Optional[str] = None,
        cwd: str = "/",
        keep: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in the guest as root. Raises CommandFailed when it fails (`check`) or exceeds `timeout`.

        On a timeout the command and its children are killed. When the guest goes down before it has ended, the status
        is -9, and what it printed is lost unless it was to `keep` it: then it goes to the disk, from which it is
        fetched once the machine is down.
        """
        stdin = input.encode() if input is not None else None
        process = self.start(argv, env, cwd, stdin, keep)
        if not keep:
            return process.finish(timeout, check)
        process.finish(timeout, check=False)
        if process.gone:
            self._fetch_kept(process, timeout)
        if check and process.returncode != 0:
            raise CommandFailed(process.result(), f"command failed with status {process.returncode}")
        return process.result()

    def start(self, argv: Sequence[str], env: Optional[Mapping[str, str]] = None, cwd: str = "/",
              stdin: Optional[bytes] = None, keep: bool = False) -> GuestProcess:  # fmt: skip
        """Start a command in the guest and return a handle: poll, wait, send_signal, finish."""
        self._kept += keep
        place = f"{_KEPT}/{self._runs}-{self._kept}" if keep else ""
        try:
            return GuestProcess(self.qemu, argv, env, cwd, stdin, place)
        except AgentGone as error:
            raise MachineError(f"cannot run {list(argv)!r}: {error}{self.qemu.tails()}") from None

    # -- files --------------------------------------------------------------------------------------------------------

    def read(self, path: str) -> str:
        """The text of a file of the guest."""
        return self.read_bytes(path).decode()

    def read_bytes(self, path: str) -> bytes:
        """The content of a file of the guest. Raises FileNotFoundError, MachineError."""
        with self._agent_errors(f"cannot read {path}"):
            return self.qemu.agent.read_file(path)

    def write(self, path: str, text: Union[str, bytes], mode: int = 0o644) -> None:
        """Write a file in the guest as an administrator would with an editor: in place, parents are made."""
        content = text.encode() if isinstance(text, str) else text
        script = 'mkdir -p "${1%/*}/" && { [ -z "$3" ] && cat >"$1" || cat "$3" >"$1"; } && chmod "$2" "$1"'
        large = ""
        if len(content) > CHUNK:
            large = "/run/vmlab-transfer"
            with self._agent_errors(f"cannot write {path}"):
                self.qemu.agent.write_file(large, content)
        process = self.start(["sh", "-c", script, "sh", path, f"{mode:o}", large], stdin=b"" if large else content)
        process.finish(120, check=True)

    def copy_in(self, source: Path, target: str) -> None:
        """Put the content of a host's directory into a directory of the guest."""
        with tempfile.TemporaryFile() as archive:
            subprocess.run(["tar", "--create", "--owner=0", "--group=0", "-C", str(source), "."], stdout=archive,
                           check=True, timeout=120)  # fmt: skip
            archive.seek(0)
            with self._agent_errors(f"cannot copy to {target}"):
                self.qemu.agent.write_file("/run/vmlab-transfer", archive.read())
        script = 'mkdir -p "$1" && tar --extract -C "$1" -f /run/vmlab-transfer; r=$?; rm /run/vmlab-transfer; exit $r'
        self.run(["sh", "-c", script, "sh", target])

    def exists(self, path: str) -> bool:
        """True when the path, its last link not followed, exists in the guest."""
        return self.run(["sh", "-c", '[ -e "$1" ] || [ -L "$1" ]', "sh", path], check=False).returncode == 0

    def lstat(self, path: str) -> os.stat_result:
        """lstat(2) in the guest. Raises FileNotFoundError."""
        done = self.run(["stat", "-c", "%f %i %h %u %g %s %X %Y %Z", path], check=False)
        if done.returncode != 0:
            raise FileNotFoundError(path)
        mode, *numbers = done.stdout.split()
        inode, links, *rest = (int(number) for number in numbers)
        return os.stat_result((int(mode, 16), inode, 0, links, *rest))

    def readlink(self, path: str) -> str:
        """The target of a symbolic link in the guest."""
        return self.run(["readlink", "-n", path]).stdout

    def listing(self, *paths: str, without: Sequence[str] = ()) -> dict[str, Found]:
        """Everything at and below `paths`: type, mode, owner, content's hash or link's target; `without` prefixes."""
        process = self.start(["sh", "-c", LISTING, "sh", *paths])
        process.finish(300, check=False)
        found = parse_listing(process.out)
        return {path: one for path, one in found.items() if not any(path.startswith(prefix) for prefix in without)}

    # -- ostree and logs ----------------------------------------------------------------------------------------------

    def deployments(self) -> list[Deployment]:
        """What `ostree admin status` says in the guest, in its order."""
        return Sysroot.parse_status(self.run(["ostree", "admin", "status"]).stdout)

    def booted(self) -> Deployment:
        """The deployment that the guest runs. Raises NoSuchDeployment."""
        for deployment in self.deployments():
            if deployment.booted:
                return deployment
        raise NoSuchDeployment("no deployment is booted")

    def deployment_root(self, name: str, osname: str = "rhcos") -> str:
        """The guest's path of the deployment `name` ("<checksum>.<serial>"); on the downed disk it is the same."""
        return f"/ostree/deploy/{osname}/deploy/{name}"

    def journal(self, unit: str = "") -> str:
        """What was logged in this boot, by the unit or by all."""
        return self.run(["journalctl", "-b", "--no-pager", "-o", "cat", *(["-u", unit] if unit else [])]).stdout

    def collect(self, folder: Path) -> None:
        """Copy the logs of all runs, and what a machine that is still up says of itself, into `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        for run in sorted(self.folder.glob("run-*")):
            shutil.copytree(run, folder / run.name, dirs_exist_ok=True)
        if self._qemu is None or not self._qemu.running:
            return
        for name, argv in (("journal", ["journalctl", "-b", "--no-pager", "-o", "short-monotonic"]),
                           ("status", ["mcdaemon", "status"]), ("ostree", ["ostree", "admin", "status"]),
                           ("failed-units", ["systemctl", "--failed", "--no-pager"])):  # fmt: skip
            try:
                done = self.run(argv, check=False)
                (folder / name).write_text(done.stdout + done.stderr)
            except MachineError as error:
                (folder / name).write_text(str(error))
                return  # It does not answer; nothing else would.

    # -- inside -------------------------------------------------------------------------------------------------------

    def _ask_logind(self, method: str) -> None:
        self.run(["busctl", "--timeout=60", "call", "org.freedesktop.login1", "/org/freedesktop/login1",
                  "org.freedesktop.login1.Manager", method, "b", "false"])  # fmt: skip

    def _fetch_kept(self, process: GuestProcess, timeout: float) -> None:
        """What a command printed before the guest went down with it; nothing after a power cut or reset."""
        self.qemu.wait_end(max(timeout, BOOT))  # `wait_down` finds it ended and tells how.
        disk = DiskFiles.open(self.disk)
        stateroots = [f"/ostree/deploy/{name}{process.keep}" for name in disk.names("/ostree/deploy")]
        for end in ("out", "err"):
            for place in stateroots:
                if disk.kind(f"{place}.{end}") == "regular":
                    setattr(process, end, disk.read(f"{place}.{end}"))

    def _next_folder(self) -> Path:
        self._runs += 1
        return self.folder / f"run-{self._runs}"

    def _must_be_down(self) -> None:
        if self._qemu is not None:
            raise MachineError("the machine is up; reboot() or power_cut() it first")

    def _last_words(self) -> str:
        """The logs' place, for an error after the machine has ended, and the end of its console."""
        folder = self.folder / f"run-{self._runs}"
        texts = [(name, (folder / name).read_text(errors="replace")[-2000:]) for name in ("serial.log", "journal.log")]
        return f"\nlogs: {folder}" + "".join(f"\n--- {name} ---\n{text}" for name, text in texts)

    @contextmanager
    def _agent_errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except AgentError as error:
            raise MachineError(f"{what}: {error}{self.qemu.tails()}") from None

    def _count(self, what: str, seconds: float = 0.0) -> None:
        tally.count(self.cache / _TALLY, what, seconds)


def counts(cache: Path = FOLDER) -> dict[str, int]:
    """How many boots, power cuts, panics, journal replays and restores there were since the file was removed."""
    return {what: number for what, (number, _) in tally.totals(cache / _TALLY).items()}


def copy_sparse(source: Path, target: Path) -> None:
    """Copy a disk without writing its holes."""
    subprocess.run(["cp", "--sparse=always", "--reflink=auto", str(source), str(target)], check=True, timeout=300)


def _snapshot(built: Image, cache: Path, name: str, prepare: Optional[Callable[[Guest], None]],
              begin: Optional[Callable[[Path], Guest]]) -> Path:  # fmt: skip
    """The folder of a snapshot, made under a lock when it is not there."""
    version = subprocess.run([QEMU, "--version"], capture_output=True, text=True, check=True, timeout=60).stdout
    parts = [built.key, version, accelerator(cache), name, _MACHINE]
    folder = cache / "rest" / hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            fresh = Path(f"{folder}.new")
            shutil.rmtree(fresh, ignore_errors=True)
            machine = fresh / "machine"
            with begin(machine) if begin is not None else Guest.cold(built.disk, machine, cache) as guest:
                if not guest.up:
                    guest.boot()
                if prepare is not None:
                    prepare(guest)
                guest.run(["sync"])
                guest.snapshot(fresh)
            shutil.rmtree(fresh / "machine")
            os.replace(fresh, folder)
    return folder
