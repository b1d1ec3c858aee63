"""The machine's disk: the OS image imported and deployed as an installer would, mcdaemon installed, one ext4 partition.

The OS's own libostree deploys it, because an older one on the host does not know all settings. No loop device is used:
mke2fs copies the files in.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

from vmlab import layout, namespace, osimage, store
from vmlab.namespace import bound
from vmlab.programs import CannotBuild, run
from vmlab.rootfs import ENVIRONMENT

STATEROOT = "rhcos"
REGISTRY = "10.0.2.2:5000"
SIZE = 3 << 30
PARTITION = 1 << 20
"""Where the only partition begins."""

# quiet and below: each line on the serial port costs milliseconds. Not for a real node: mitigations and lsm.
KERNEL_ARGUMENTS = (
    "root=/dev/vda1", "rw", "console=ttyS0", "quiet", "loglevel=3", "systemd.show_status=0", "mitigations=off",
    "nokaslr", "lsm=capability", "panic=-1", "oops=panic",
)  # fmt: skip
_SETTINGS = ("sysroot.bootloader=none", "sysroot.bootprefix=true", "sysroot.readonly=true")
# Boot loaders that read ext4 by themselves know no newer features.
_FEATURES = "^64bit,^metadata_csum"
_UUID = "7e6d0c1e-0000-4000-8000-766d6c616230"
_IMMUTABLE = 0x10
_TIMEOUT = 300.0


def reference(digest: str) -> str:
    """The origin of the first deployment: where this image would have come from."""
    return f"ostree-unverified-registry:{REGISTRY}/os@{digest}"


def build(archive: Path, key: str) -> Path:
    """The folder with disk.raw and `commit`, built if not there; `archive` is the zipapp. Raises CannotBuild."""
    system = osimage.build()

    def make(folder: Path) -> None:
        arguments = (str(system), str(archive), str(folder))
        namespace.call("build the disk", "vmlab.disk", *arguments, timeout=2 * _TIMEOUT)

    return store.part("disk", key, make)


# -- in the namespace --------------------------------------------------------------------------------------------------


def _make(system: osimage.Parts, archive: Path, folder: Path) -> None:
    with namespace.memory(folder / "work") as scratch:
        root, sysroot = scratch / "root", scratch / "sysroot"
        root.mkdir()
        sysroot.mkdir()
        _unpack(system, root)
        with layout.chrootable(root), bound(sysroot, root / "sysroot"):
            commit = _deploy(root, sysroot, system)
            deployment = sysroot / f"ostree/deploy/{STATEROOT}/deploy/{commit}.0"
            _install(root, deployment, sysroot / f"ostree/deploy/{STATEROOT}/var", archive)
        run("let the deployment be copied", ["chattr", "-i", str(deployment)], 30)
        _write(sysroot, folder / "disk.raw", f"/ostree/deploy/{STATEROOT}/deploy/{commit}.0")
        (folder / "commit").write_text(commit + "\n")


def _unpack(system: osimage.Parts, root: Path) -> None:
    layer = max((system.layout / "blobs/sha256").iterdir(), key=lambda path: path.stat().st_size)
    options = ["--extract", "--gzip", "--numeric-owner", "--same-owner", "--same-permissions"]
    run("unpack the OS image", ["tar", *options, f"--file={layer}", f"--directory={root}"], _TIMEOUT)


def _deploy(root: Path, sysroot: Path, system: osimage.Parts) -> str:
    """Import and deploy; returns the commit."""

    def ostree(*arguments: str) -> None:
        argv = ["chroot", str(root), "ostree", *arguments]
        run(f"deploy the OS (ostree {arguments[0]} {arguments[1]})", argv, _TIMEOUT, env=ENVIRONMENT)

    ostree("admin", "init-fs", "--modern", "/sysroot")
    ostree("admin", "stateroot-init", "--sysroot=/sysroot", STATEROOT)
    for setting in _SETTINGS:
        ostree("config", "set", "--repo=/sysroot/ostree/repo", *setting.split("="))
    target = reference(system.digest)
    importer = [sys.executable, "-m", "tests.stand.ostree_import", f"--repo={sysroot}/ostree/repo"]
    source = f"ostree-unverified-image:oci:{system.layout}:image"
    # The importer's skopeo looks into /var/lib and /run, where it must leave nothing.
    hide = 'mount -t tmpfs tmpfs /run && exec "$@"'
    argv = ["unshare", "--mount", "--", "sh", "-c", hide, "sh", *importer, f"--target={target}", source]
    commit = run("import the OS image", argv, _TIMEOUT, cwd=store.PROJECT).split()[-1]
    if not re.fullmatch("[0-9a-f]{64}", commit):
        raise CannotBuild(f"cannot import the OS image: {commit!r} is no commit")
    (root / "tmp/origin").write_text(f"[origin]\ncontainer-image-reference={target}\n")
    kargs = [f"--karg={argument}" for argument in KERNEL_ARGUMENTS]
    ostree(
        "admin", "deploy", "--sysroot=/sysroot", f"--os={STATEROOT}", "--origin-file=/tmp/origin", *kargs, commit
    )  # fmt: skip
    return commit


def _install(root: Path, deployment: Path, var: Path, archive: Path) -> None:
    """mcdaemon as README says, into the deployment's /etc and the stateroot's /var; with byte code for this Python."""
    (var / "usrlocal").mkdir(parents=True, exist_ok=True)
    with bound(var, deployment / "var"):
        install = ["make", "--silent", "install", f"DESTDIR={deployment}", f"ARCHIVE={archive}"]
        # `make` must not build the archive anew: it is an input of the disk's key.
        run("install mcdaemon", [*install, "--old-file", str(archive)], _TIMEOUT, cwd=store.PROJECT)
        installed = var / "usrlocal/lib/mcdaemon/mcdaemon.pyz"
        if not installed.is_file():
            raise CannotBuild("cannot install mcdaemon: `make install` left no usr/local/lib/mcdaemon/mcdaemon.pyz")
        shutil.copyfile(installed, root / "tmp/mcdaemon.pyz")
        shutil.copyfile(Path(__file__).with_name("bytecode.py"), root / "tmp/bytecode.py")
        python = ["chroot", str(root), "/usr/bin/python3", "-IB", "/tmp/bytecode.py", "/tmp/mcdaemon.pyz"]
        run("compile mcdaemon for the machine's Python", python, _TIMEOUT, env={**ENVIRONMENT, "PYTHONHASHSEED": "0"})
        shutil.copyfile(root / "tmp/mcdaemon.pyz", installed)


def _write(sysroot: Path, disk: Path, deployment: str) -> None:
    """One partition with everything in it."""
    disk.touch()
    os.truncate(disk, SIZE)
    table = f"label: dos\\nlabel-id: 0x766d6c61\\nstart={PARTITION // 512}, type=83, bootable\\n"
    partition = ["sh", "-c", f'printf "{table}" | sfdisk --quiet "$1"', "sh", str(disk)]
    run("make the partition table", partition, 60)
    make = ["mke2fs", "-q", "-F", "-t", "ext4", "-O", _FEATURES, "-U", _UUID, "-L", "root", "-d", str(sysroot)]
    extended = f"hash_seed={_UUID},offset={PARTITION}"
    size = f"{(SIZE - PARTITION) >> 10}k"
    run("make the file system", [*make, "-E", extended, str(disk), size], _TIMEOUT, env=ENVIRONMENT)
    _protect(f"{disk}?offset={PARTITION}", deployment)


def _protect(device: str, deployment: str) -> None:
    """As on a node, nobody can add to a deployment's top; mke2fs does not copy that flag."""
    stat = run("read the deployment's flags", ["debugfs", "-R", f"stat {deployment}", device], 60)
    found = re.search(r"Flags: (0x[0-9a-f]+)", stat)
    if found is None:
        raise CannotBuild(f"cannot make the disk: no deployment at {deployment}\n{stat}")
    wanted = hex(int(found.group(1), 16) | _IMMUTABLE)
    run("protect the deployment", ["debugfs", "-w", "-R", f"sif {deployment} flags {wanted}", device], 60)


if __name__ == "__main__":
    try:
        _make(osimage.load(Path(sys.argv[1])), Path(sys.argv[2]), Path(sys.argv[3]))
    except CannotBuild as error:
        sys.exit(str(error))
