"""Makes of an unpacked Debian what CoreOS is: the tree of an ostree deployment, with the stand's rpm-ostreed in it.

Trimmed for emulation, where each started program costs a second; what an update meets is left as Debian has it: PID 1,
journal, bus, logind, tmpfiles, sysctl, and all units of ostree.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.stand import rpmostreed
from vmlab import namespace
from vmlab.programs import CannotBuild, run
from vmlab.rootfs import ENVIRONMENT
from vmlab.store import PROJECT

OVERLAY = PROJECT / "vm-tests/overlay"
STAND = "usr/lib/stand"
STAND_SOURCES = ("tests/__init__.py", "tests/stand")

_TOP_LINKS = {
    "home": "var/home",
    "root": "var/roothome",
    "opt": "var/opt",
    "srv": "var/srv",
    "mnt": "var/mnt",
    "media": "run/media",
    "ostree": "sysroot/ostree",
    "usr/local": "../var/usrlocal",
}
_EMPTY = ("boot", "dev", "proc", "run", "sys", "sysroot", "tmp", "var")
_MODULES = ("virtio_blk", "virtio_net", "failover", "net_failover", "overlay")

# Debian's own lines for what is a link on CoreOS, caches that are rebuilt, backups that hold the time of the build.
_GONE = (
    "kernel", "usr/lib/tmpfiles.d/home.conf", "usr/lib/tmpfiles.d/provision.conf", "usr/lib/tmpfiles.d/debian.conf",
    "usr/lib/udev/rules.d/60-qemu-guest-agent.rules", "usr/include", "usr/games", "usr/src", "etc/resolv.conf",
    "etc/.pwd.lock", "etc/passwd-", "etc/group-", "etc/shadow-", "etc/gshadow-", "etc/subuid-", "etc/subgid-",
)  # fmt: skip
_MASKED = (
    # Devices: devtmpfs makes the few that there are.
    "systemd-udevd.service", "systemd-udev-trigger.service", "systemd-udev-settle.service",
    "systemd-udevd-control.socket", "systemd-udevd-kernel.socket", "systemd-udevd-varlink.socket",
    "systemd-udev-load-credentials.service", "systemd-hwdb-update.service", "kmod-static-nodes.service",
    "modprobe@.service", "systemd-modules-load.service",
    # Nobody sits in front of it.
    "getty.target", "getty@.service", "serial-getty@.service", "console-getty.service",
    "systemd-ask-password-console.path", "systemd-ask-password-wall.path", "systemd-firstboot.service",
    # File systems that nobody looks into.
    "proc-sys-fs-binfmt_misc.automount", "systemd-binfmt.service", "sys-kernel-debug.mount",
    "sys-kernel-tracing.mount", "sys-kernel-config.mount", "sys-fs-fuse-connections.mount", "dev-hugepages.mount",
    "dev-mqueue.mount",
    # Caches, which are made in the image, and seeds.
    "ldconfig.service", "systemd-journal-catalog-update.service", "systemd-update-done.service",
    "systemd-random-seed.service", "systemd-pstore.service",
    # Of other hardware.
    "systemd-tpm2-setup.service", "systemd-tpm2-setup-early.service", "systemd-pcrphase.service",
    "systemd-hibernate-clear.service", "systemd-hostnamed.socket", "systemd-creds.socket", "systemd-sysext.socket",
    "systemd-initctl.socket", "systemd-networkd.service", "systemd-timesyncd.service",
    # Jobs of packages; a node's own would come by a MachineConfig.
    "apt-daily.timer", "apt-daily-upgrade.timer", "dpkg-db-backup.timer", "fstrim.timer", "e2scrub_all.timer",
    "e2scrub_reap.service", "podman.socket", "podman.service", "podman-auto-update.timer", "podman-restart.service",
    "podman-clean-transient.service", "qemu-guest-agent.service", "netavark-dhcp-proxy.socket",
)  # fmt: skip
_GENERATORS = ("ostree-system-generator", "systemd-fstab-generator", "systemd-run-generator")
_SLOW = 300.0


def release(version: str) -> bytes:
    """The os-release of this OS."""
    text = f'NAME="Stand CoreOS"\nID="rhcos"\nVERSION="{version}"\nPRETTY_NAME="Stand CoreOS {version}"\n'
    return text.encode()


def arrange(root: Path, version: str) -> str:
    """Turn the unpacked packages at `root` into the OS, except for its initramfs; returns the kernel's version.

    /etc stays where it is, as in a container image. Raises CannotBuild.
    """
    kernel = _kernel(root)
    _links(root)
    _trim(root)
    shutil.copytree(OVERLAY, root, symlinks=True, dirs_exist_ok=True)
    _identity(root, version)
    _stand(root)
    _byte_code(root)
    return kernel


@contextmanager
def chrootable(root: Path) -> Iterator[None]:
    """Devices and processes for programs that run in `root`."""
    with namespace.bound(Path("/dev"), root / "dev"), namespace.bound(Path("/proc"), root / "proc"):
        yield


def _kernel(root: Path) -> str:
    unpacked = [path for path in (root / "kernel").glob("**/lib/modules/*") if path.is_dir()]
    if len(unpacked) != 1:
        raise CannotBuild(f"cannot find the kernel: {len(unpacked)} versions in {root}/kernel")
    source, version = unpacked[0], unpacked[0].name
    target = root / "usr/lib/modules" / version
    target.mkdir(parents=True)
    shutil.copyfile(root / f"kernel/boot/vmlinuz-{version}", target / "vmlinuz")
    for path in sorted(source.glob("modules.builtin*")) + [source / "modules.order"]:
        shutil.copyfile(path, target / path.name)
    for name in _MODULES:
        (module,) = source.rglob(f"{name}.ko*")
        place = target / module.relative_to(source)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(module, place)
    run("index the kernel's modules", ["chroot", str(root), "depmod", version], 60)
    return version


def _links(root: Path) -> None:
    for path in (*_EMPTY, *_TOP_LINKS):
        place = root / path
        if place.is_symlink():
            place.unlink()
        elif place.exists():
            shutil.rmtree(place)
    for path in _EMPTY:
        (root / path).mkdir()
    (root / "tmp").chmod(0o1777)
    for path, target in _TOP_LINKS.items():
        (root / path).symlink_to(target)


def _trim(root: Path) -> None:
    for path in _GONE:
        place = root / path
        if place.is_dir() and not place.is_symlink():
            shutil.rmtree(place)
        else:
            place.unlink(missing_ok=True)
    units = root / "usr/lib/systemd/system"
    for name in _MASKED:
        (units / name).unlink(missing_ok=True)
        (units / name).symlink_to("/dev/null")
        for wanted in root.glob(f"*/systemd/system/*.wants/{name}"):
            wanted.unlink()
    for generator in (root / "usr/lib/systemd/system-generators").iterdir():
        if generator.name not in _GENERATORS:
            generator.unlink()
    (units / "default.target").unlink(missing_ok=True)
    (units / "default.target").symlink_to("multi-user.target")


def _identity(root: Path, version: str) -> None:
    (root / "usr/lib/os-release").write_bytes(release(version))
    (root / "etc/os-release").unlink(missing_ok=True)
    (root / "etc/os-release").symlink_to("../usr/lib/os-release")
    # Each machine makes an id of its own at its first boot.
    (root / "etc/machine-id").write_bytes(b"")
    (root / "etc/fstab").write_bytes(b"")
    # useradd would write the day of the build into shadow.
    for name, line in {
        "passwd": "core:x:1000:1000:CoreOS Admin:/var/home/core:/bin/bash",
        "group": "core:x:1000:",
        "shadow": "core:*:19000:0:99999:7:::",
        "gshadow": "core:!::",
    }.items():
        with open(root / "etc" / name, "a") as file:
            file.write(line + "\n")


def _stand(root: Path) -> None:
    for source in STAND_SOURCES:
        target = root / STAND / source
        target.parent.mkdir(parents=True, exist_ok=True)
        if (PROJECT / source).is_dir():
            shutil.copytree(PROJECT / source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copyfile(PROJECT / source, target)
    (root / "usr/lib/systemd/system/rpm-ostreed.service").write_text(rpmostreed.unit_text("/" + STAND))
    program = root / "usr/bin/rpm-ostree"
    # All that the agent asks the program for; everything else goes over D-Bus.
    program.write_text(
        '#!/bin/sh\n[ "$*" = --version ] || exit 64\n'
        f"printf \"rpm-ostree:\\n Version: '{rpmostreed.program_version()}'\\n Git: none\\n"
        ' Features:\\n  - container\\n"\n'
    )
    program.chmod(0o755)


def _byte_code(root: Path) -> None:
    """ostree sets all times to 0, so byte code that is checked against the source's time is never used."""
    for cache in list(root.glob("usr/**/__pycache__")):
        shutil.rmtree(cache)
    folders = sorted(f"/{path.relative_to(root)}" for path in (root / "usr/lib").glob("python3*"))
    compiler = ["python3", "-m", "compileall", "-qq", "-f", "-j1", "--invalidation-mode=unchecked-hash"]
    # Some files of the standard library's own tests do not compile, on purpose: the exit status says nothing.
    script = '"$@" || :'
    with chrootable(root):
        run(
            "compile the Python modules of the OS",
            ["chroot", str(root), "sh", "-c", script, "sh", *compiler, *folders, f"/{STAND}"],
            _SLOW,
            env={**ENVIRONMENT, "PYTHONHASHSEED": "0"},
        )
