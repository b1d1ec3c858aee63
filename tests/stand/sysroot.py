"""The node's disk as seen from outside: a scratch ostree sysroot, its boot entries and deployments.

Everything is done by the `ostree` program or read from the files that a boot loader reads. Times are in seconds.
"""

from __future__ import annotations

import array
import fcntl
import os
import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

OSTREE_TIMEOUT = 60.0
BRANCH = "stand/os"
KERNEL_ARGUMENTS = ("root=UUID=00000000-0000-4000-8000-000000000001", "rw")

# ioctl_iflags(2)
_FS_IOC_GETFLAGS, _FS_IOC_SETFLAGS, _FS_IMMUTABLE_FL = 0x80086601, 0x40086602, 0x10

# Lines of `ostree admin status` (src/ostree/ot-admin-builtin-status.c): "* rhcos 0123….0 (pending)".
_STATUS_LINE = re.compile(r"^([* ]) (\S+) ([0-9a-f]{64}\.\d+)((?: \([a-z ]+\))*)$")


class NoSuchDeployment(Exception):
    """The sysroot has no such boot entry or deployment."""


@dataclass(frozen=True)
class BootEntry:
    """A BLS entry; `options` is the kernel command line, `deployment` the name ("<checksum>.<serial>") it boots."""

    path: Path
    title: str
    version: int
    options: str
    deployment: str


@dataclass(frozen=True)
class Deployment:
    """A deployment as `ostree admin status` reports it; `name` is "<checksum>.<serial>"."""

    name: str
    osname: str
    booted: bool
    staged: bool
    pending: bool
    rollback: bool
    pinned: bool

    @property
    def checksum(self) -> str:
        """The ostree commit."""
        return self.name.partition(".")[0]


def admin_command(sysroot: Path, scratch: Path, *arguments: str) -> list[str]:
    """`ostree admin ...` where it cannot freeze the host's file system (see `init.mount_boot`), not even for the moment
    in which a node beside it remounts something (EBUSY). `scratch` is an empty directory on the same file system.

    The PID namespace takes the watchdog with it that libostree leaves behind.
    """
    for name in ("lower", "work"):
        (scratch / name).mkdir()
    layers = f"lowerdir={scratch}/lower,upperdir={sysroot}/boot,workdir={scratch}/work,volatile"
    script = 'mount -t overlay -o "$1" overlay "$2" 2>/dev/null || :; shift 2; exec ostree admin "$@"'
    return ["unshare", "--mount", "--pid", "--fork", "--propagation", "private", "--",
            "sh", "-c", script, "sh", layers, f"{sysroot}/boot", *arguments]  # fmt: skip


@dataclass(frozen=True)
class Sysroot:
    """A physical ostree sysroot at `path` with one stateroot `osname`."""

    path: Path
    osname: str

    @classmethod
    def create(cls, path: Path, osname: str) -> Sysroot:
        """Make the sysroot, or take the one that is there."""
        sysroot = cls(path, osname)
        if not (path / "ostree/repo/config").exists():
            path.mkdir(parents=True, exist_ok=True)
            _ostree("admin", "init-fs", "--modern", str(path))
            # As on CoreOS: nothing but the BLS entries is written. No fsync: most nodes meet no real power cut.
            for key, value in (("sysroot.bootloader", "none"), ("core.fsync", "false")):
                _ostree(f"--repo={path}/ostree/repo", "config", "set", key, value)
        if not sysroot.stateroot.exists():
            _ostree("admin", "os-init", f"--sysroot={path}", osname)
        return sysroot

    def sync_writes(self) -> None:
        """From now on ostree syncs what it writes, as it does by default."""
        _ostree(f"--repo={self.repo}", "config", "set", "core.fsync", "true")

    @property
    def repo(self) -> Path:
        """The repository."""
        return self.path / "ostree/repo"

    @property
    def stateroot(self) -> Path:
        """The directory of the stateroot, which has deploy/ and var/."""
        return self.path / "ostree/deploy" / self.osname

    def deployment_root(self, name: str) -> Path:
        """The directory of the deployment `name`; it need not exist."""
        return self.stateroot / "deploy" / name

    def commit_tree(self, tree: Path, version: str = "") -> str:
        """Commit a directory as it is (owners and modes too); returns the checksum."""
        metadata = [f"--add-metadata-string=version={version}"] if version else []
        return _ostree(f"--repo={self.repo}", "commit", f"--branch={BRANCH}", f"--tree=dir={tree}", *metadata).strip()

    def deploy(self, refspec: str, kargs: Sequence[str] = (), origin: Optional[str] = None) -> None:
        """Make a ref or commit the first boot entry; `kargs` are added to those of the previous first entry."""
        with tempfile.NamedTemporaryFile("w", suffix=".origin") as file:
            arguments = [f"--sysroot={self.path}", f"--os={self.osname}"]
            if not self.entries():
                kargs = (*KERNEL_ARGUMENTS, *kargs)
            if origin is not None:
                file.write(origin)
                file.flush()
                arguments.append(f"--origin-file={file.name}")
            self._admin("deploy", *arguments, *(f"--karg={karg}" for karg in kargs), refspec)

    def _admin(self, *arguments: str) -> None:
        with tempfile.TemporaryDirectory(dir=self.path.parent, prefix="boot-overlay-") as scratch:
            _run(*admin_command(self.path, Path(scratch), *arguments))

    def entries(self) -> list[BootEntry]:
        """The boot entries, in the order in which a boot loader offers them."""
        folder = self.path / "boot/loader/entries"
        entries = [self._read_entry(path) for path in folder.glob("*.conf")]
        return sorted(entries, key=lambda entry: entry.version, reverse=True)

    def default_entry(self) -> BootEntry:
        """The entry that boots. Raises NoSuchDeployment when nothing is installed."""
        entries = self.entries()
        if not entries:
            raise NoSuchDeployment(f"no boot entry in {self.path}/boot/loader/entries")
        return entries[0]

    def _read_entry(self, path: Path) -> BootEntry:
        fields = dict(line.split(" ", 1) for line in path.read_text().splitlines() if " " in line)
        options = fields["options"].strip()
        link = next(word[len("ostree=") :] for word in options.split() if word.startswith("ostree="))
        deployment = (self.path / link.lstrip("/")).resolve()
        return BootEntry(path, fields.get("title", ""), int(fields.get("version", "0")), options, deployment.name)

    def status(self) -> list[Deployment]:
        """The deployments as `ostree admin status` sees them from outside: none is booted, a staged one is unknown."""
        return self.parse_status(_ostree("admin", "status", f"--sysroot={self.path}"))

    @staticmethod
    def parse_status(text: str) -> list[Deployment]:
        """Read the output of `ostree admin status`."""
        deployments = []
        for line in text.splitlines():
            match = _STATUS_LINE.match(line)
            if match:
                star, osname, name, marks = match.groups()
                deployments.append(
                    Deployment(name, osname, booted=star == "*", staged="(staged)" in marks,
                               pending="(pending)" in marks, rollback="(rollback)" in marks, pinned=False)
                )  # fmt: skip
            elif line.strip() == "Pinned: yes" and deployments:
                deployments[-1] = Deployment(**{**vars(deployments[-1]), "pinned": True})
        return deployments

    def make_deletable(self) -> None:
        """Take the immutable flag off all deployment roots, so that the folder can be removed."""
        for root in (self.path / "ostree/deploy").glob("*/deploy/*.*"):
            if root.is_dir():
                _clear_immutable(root)


def _clear_immutable(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        flags = array.array("l", [0])
        fcntl.ioctl(descriptor, _FS_IOC_GETFLAGS, flags, True)
        if flags[0] & _FS_IMMUTABLE_FL:
            fcntl.ioctl(descriptor, _FS_IOC_SETFLAGS, array.array("l", [flags[0] & ~_FS_IMMUTABLE_FL]))
    except OSError:
        pass  # A file system without flags has no immutable ones.
    finally:
        os.close(descriptor)


def _ostree(*arguments: str) -> str:
    return _run("ostree", *arguments)


def _run(*argv: str) -> str:
    """Run a program of the host. Raises RuntimeError with what it said."""
    result = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=OSTREE_TIMEOUT)
    if result.returncode != 0:
        raise RuntimeError(f"{' '.join(argv)} failed: {result.stderr.strip()}")
    return result.stdout
