"""First process of a stand node: makes the node's mounts, enters its root and becomes the systemd stand-in.

It is started by `machine.Machine` as the first process of a new mount and PID namespace. Every mount is made here, in
that private namespace, so nothing of it is ever seen by the host and all of it is gone when the node's processes are.

What a real node has and this one has too: the deployment is "/", `/usr` is read-only, `/sysroot` is mounted
read-only (writers take a private mount namespace, as libostree does), `/var` is the stateroot's, `/run` and `/tmp` are
fresh at every boot, `/proc/cmdline` is what the boot entry says, the boot id is new.

What is different: the host's `/usr` shows through where the image has nothing, so that python3, gi, ostree, skopeo and
podman need not be in every test image. Directories in which a file's mere presence means something (units, presets,
kernels) are the image's own.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import socket
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.stand.bus import ADDRESS

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
MNT_DETACH = 2

# Directories below /usr that must not show the host's files.
IMAGE_ONLY = ("lib/modules", "lib/systemd/system", "lib/systemd/system-preset", "lib/sysctl.d", "lib/tmpfiles.d")

# What systemd-tmpfiles makes on a RHEL CoreOS node at boot (path below /var, mode).
VAR_DIRECTORIES = (
    ("usrlocal", 0o755), ("usrlocal/bin", 0o755), ("usrlocal/sbin", 0o755), ("usrlocal/lib", 0o755),
    ("usrlocal/etc", 0o755), ("usrlocal/share", 0o755), ("roothome", 0o700), ("home", 0o755), ("opt", 0o755),
    ("srv", 0o755), ("mnt", 0o755), ("lib", 0o755), ("lib/containers", 0o755), ("log", 0o755), ("cache", 0o755),
    ("spool", 0o755), ("tmp", 0o1777),
)  # fmt: skip


@dataclass(frozen=True)
class BootPlan:
    """Everything that the in-node processes have to know about this boot; travels as JSON through a file.

    `deployment` and `stateroot_var` are host paths. `binds` are (host path, node path, "ro" or "rw"). `log` is the
    host directory that becomes /run/stand/log (unit logs, call log), `library` the `tests` directory, `scratch` a
    directory for this boot alone on the file system of the sysroot.
    """

    sysroot: str
    deployment: str
    stateroot_var: str
    kernel_arguments: str
    boot_id: str
    library: str
    log: str
    scratch: str
    binds: list[list[str]]
    units: dict[str, str]
    environment: dict[str, str]
    options: dict[str, str]

    def write(self, path: Path) -> None:
        """Store the plan as JSON at `path`."""
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> BootPlan:
        """Read the plan that `write` stored."""
        return cls(**json.loads(path.read_text()))


_LIBC = ctypes.CDLL(None, use_errno=True)


def mount(source: str, target: str, kind: str = "", flags: int = 0, data: str = "") -> None:
    """mount(2). Raises OSError that names the target."""
    result = _LIBC.mount(source.encode(), target.encode(), kind.encode() or None, ctypes.c_ulong(flags), data.encode())
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"cannot mount {source} on {target}: {os.strerror(code)}")


def bind(source: str, target: str, readonly: bool = False) -> None:
    """Bind `source` on `target`; the read-only flag needs a second call (mount(2), "Creating a bind mount")."""
    mount(source, target, flags=MS_BIND)
    if readonly:
        mount("", target, flags=MS_BIND | MS_REMOUNT | MS_RDONLY)


def mount_root(plan: BootPlan) -> None:
    """Mount the deployment as the node's root with everything below it, still at its place in the sysroot."""
    root = plan.deployment
    mount("", "/", flags=MS_REC | MS_PRIVATE)
    bind(root, root)
    mount("overlay", f"{root}/usr", "overlay", MS_RDONLY, f"lowerdir={root}/usr:/usr")
    bind(plan.sysroot, f"{root}/sysroot")
    mount_boot(plan)
    bind(plan.stateroot_var, f"{root}/var")
    mount("tmpfs", f"{root}/run", "tmpfs", MS_NOSUID | MS_NODEV, "mode=755")
    mount("tmpfs", f"{root}/tmp", "tmpfs", MS_NOSUID | MS_NODEV, "mode=1777")
    mount("proc", f"{root}/proc", "proc")
    mount("/dev", f"{root}/dev", flags=MS_BIND | MS_REC)
    mount("/sys", f"{root}/sys", flags=MS_BIND | MS_REC)
    # The kernel is the host's: a node that applies sysctl files must not reach it. cgroups below /sys stay writable.
    mount("", f"{root}/sys", flags=MS_BIND | MS_REMOUNT | MS_RDONLY)
    bind(f"{root}/proc/sys", f"{root}/proc/sys", readonly=True)
    # podman keeps its lock table in /dev/shm under a fixed name: nodes must not share it.
    mount("tmpfs", f"{root}/dev/shm", "tmpfs", MS_NOSUID | MS_NODEV, "mode=1777")
    own = f"{root}/sysroot/{os.path.relpath(root, plan.sysroot)}/usr"
    for name in IMAGE_ONLY:
        if os.path.isdir(f"{root}/usr/{name}"):
            hide_host_directory(f"{own}/{name}", f"{root}/usr/{name}", f"{root}/run/stand/empty")
    mount("", f"{root}/sysroot", flags=MS_BIND | MS_REMOUNT | MS_RDONLY)


def mount_boot(plan: BootPlan) -> None:
    """Mount the sysroot's boot directory as an overlay that has nothing below it.

    "volatile" spares the overlay's sync of the whole host at unmount.
    libostree freezes the file system of /boot while it swaps the boot entries (FIFREEZE). On a plain bind mount that
    is the host's, which would stay frozen for ever if a power cut came right then. An overlay cannot be frozen. A host
    whose own file system is an overlay cannot have this one (EINVAL), and does not need it.
    A node on a `Disk` has the plain mount: "volatile" would swallow the syncs that a power cut is about.
    """
    source, target = f"{plan.sysroot}/boot", f"{plan.deployment}/boot"
    if plan.options.get("own_disk"):
        bind(source, target)
        return
    for name in ("lower", "work"):
        os.makedirs(f"{plan.scratch}/{name}", exist_ok=True)
    layers = f"lowerdir={plan.scratch}/lower,upperdir={source},workdir={plan.scratch}/work,volatile"
    try:
        mount("overlay", target, "overlay", 0, layers)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        bind(source, target)


def hide_host_directory(own: str, target: str, empty: str) -> None:
    """Put the image's own directory, or an empty one, over the merged view at `target`."""
    if not os.path.isdir(own):
        os.makedirs(empty, exist_ok=True)
        own = empty
    bind(own, target, readonly=True)


def populate_run(plan: BootPlan) -> None:
    """Fill /run as the initramfs, systemd-tmpfiles and the caller of the Machine would."""
    run = Path(plan.deployment, "run")
    for name in ("systemd/system", "systemd/notify", "dbus", "lock", "ostree", "stand/log", "stand/lib/tests"):
        (run / name).mkdir(parents=True, exist_ok=True)
    (run / "ostree-booted").touch()
    (run / "stand/cmdline").write_text(plan.kernel_arguments + "\n")
    (run / "stand/boot_id").write_text(plan.boot_id + "\n")
    for name, text in plan.units.items():
        place = run / "systemd/system" / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    bind(plan.library, f"{run}/stand/lib/tests", readonly=True)
    bind(plan.log, f"{run}/stand/log")
    bind(f"{run}/stand/cmdline", f"{plan.deployment}/proc/cmdline", readonly=True)
    bind(f"{run}/stand/boot_id", f"{plan.deployment}/proc/sys/kernel/random/boot_id", readonly=True)


def populate_var(plan: BootPlan) -> None:
    """Make the directories of /var that every node has; a new stateroot's /var is empty."""
    for name, mode in VAR_DIRECTORIES:
        place = Path(plan.deployment, "var", name)
        if not place.is_dir():
            place.mkdir()
            place.chmod(mode)
    for name, target in (("run", "../run"), ("lock", "../run/lock")):
        link = Path(plan.deployment, "var", name)
        if not link.is_symlink():
            link.symlink_to(target)


def bind_extra(plan: BootPlan) -> None:
    """The caller's own bind mounts; missing mount points are made, which works in /run, /var, /etc and /tmp."""
    for source, target, access in plan.binds:
        place = Path(plan.deployment + target)
        place.parent.mkdir(parents=True, exist_ok=True)
        if os.path.isdir(source):
            place.mkdir(exist_ok=True)
        elif not place.exists():
            place.touch()
        bind(source, str(place), readonly=access == "ro")


def enter_root(root: str) -> None:
    """Make `root` the root of this mount namespace and drop the host's tree from it.

    The call with two dots is described in pivot_root(2), "Notes".
    """
    os.chdir(root)
    pivot_root = {"x86_64": 155, "aarch64": 41}[os.uname().machine]
    if _LIBC.syscall(pivot_root, b".", b".") != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"cannot make {root} the root of the node: {os.strerror(code)}")
    if _LIBC.umount2(b".", MNT_DETACH) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"cannot leave the host's root: {os.strerror(code)}")
    os.chdir("/")


def report(descriptor: int, **facts: object) -> None:
    """Send one fact about the node's progress to the Machine (JSON lines over a pipe)."""
    os.write(descriptor, (json.dumps(facts) + "\n").encode())


def service_environment(plan: BootPlan) -> dict[str, str]:
    """What PID 1 gives to every service: systemd's default, and what the caller of the Machine adds."""
    return {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin", "LANG": "C.UTF-8", **plan.environment}


def shell_environment(plan: BootPlan) -> dict[str, str]:
    """What a root shell on the node has; nothing of the host's leaks in."""
    return {"HOME": "/root", "USER": "root", "DBUS_SYSTEM_BUS_ADDRESS": ADDRESS, **service_environment(plan)}


def stand_environment(plan: BootPlan) -> dict[str, str]:
    """The environment of PID 1; only it and units that ask for it see the stand's own code."""
    return {**shell_environment(plan), "PYTHONPATH": "/run/stand/lib", "PYTHONDONTWRITEBYTECODE": "1"}


def main(plan_path: str, descriptor: int) -> None:
    """Boot the node that the plan describes; never returns."""
    plan = BootPlan.read(Path(plan_path))
    # /proc is still the host's here, so this is the process id that the host knows.
    report(descriptor, event="init", pid=int(os.readlink("/proc/self")))
    try:
        mount_root(plan)
        populate_run(plan)
        populate_var(plan)
        bind_extra(plan)
        plan.write(Path(plan.deployment, "run/stand/plan.json"))
        enter_root(plan.deployment)
    except OSError as error:
        report(descriptor, event="error", text=str(error))
        raise SystemExit(1) from error
    os.umask(0o022)
    hostname = Path("/etc/hostname")
    socket.sethostname(hostname.read_text().strip() if hostname.is_file() else "localhost")
    report(descriptor, event="mounted")
    argv = ["/usr/bin/python3", "-m", "tests.stand.systemd1", str(descriptor)]
    os.execve(argv[0], argv, stand_environment(plan))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
