"""The smallest operating-system tree that ostree deploys and the stand boots, laid out as RHEL CoreOS is."""

from __future__ import annotations

from pathlib import Path

KERNEL = "6.1.0-stand"

DIRECTORIES = (
    "usr/bin", "usr/sbin", "usr/lib", "usr/lib64", "usr/share", "usr/lib/systemd/system",
    "usr/lib/systemd/system-preset",
    "usr/etc/containers/registries.conf.d", "usr/etc/systemd/system", "usr/etc/ssh",
    "dev", "proc", "sys", "run", "sysroot", "boot", "tmp", "var",
)  # fmt: skip

# What stands on top of an RHCOS deployment; usr/local and everything that people write to is in /var.
LINKS = {
    "bin": "usr/bin", "sbin": "usr/sbin", "lib": "usr/lib", "lib64": "usr/lib64", "ostree": "sysroot/ostree",
    "root": "var/roothome", "home": "var/home", "opt": "var/opt", "srv": "var/srv", "mnt": "var/mnt",
    "media": "run/media", "usr/local": "../var/usrlocal", "usr/etc/os-release": "../usr/lib/os-release",
}  # fmt: skip

FILES = {
    "usr/lib/os-release": 'NAME="Stand OS"\nID=rhcos\nID_LIKE="rhel fedora"\nVERSION_ID="9.4"\n'
    'PRETTY_NAME="Stand OS 9.4"\nOSTREE_VERSION="9.4"\n',
    "usr/etc/passwd": "root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534:nobody:/:/sbin/nologin\n"
    "core:x:1000:1000:CoreOS Admin:/var/home/core:/bin/bash\n",
    "usr/etc/group": "root:x:0:\nwheel:x:10:core\nnobody:x:65534:\ncore:x:1000:\n",
    "usr/etc/hosts": "127.0.0.1 localhost\n::1 localhost\n",
    "usr/etc/hostname": "stand\n",
    "usr/etc/machine-id": "5741d0000000400080000000000057a0\n",
    "usr/etc/containers/policy.json": '{"default": [{"type": "insecureAcceptAnything"}]}\n',
    "usr/etc/containers/registries.conf": 'unqualified-search-registries = ["registry.invalid"]\n',
    "usr/etc/containers/storage.conf": '[storage]\ndriver = "overlay"\nrunroot = "/run/containers/storage"\n'
    'graphroot = "/var/lib/containers/storage"\n',
    "usr/etc/containers/containers.conf": '[containers]\n[engine]\ncgroup_manager = "cgroupfs"\n'
    'events_logger = "file"\nruntime = "crun"\n[network]\n',
}
SHADOW = "root:*:19000:0:99999:7:::\ncore:*:19000:0:99999:7:::\n"


def minimal_tree(folder: Path, kernel: str = KERNEL) -> Path:
    """Write a bootable OS tree into `folder` (made when missing) and return it.

    The caller adds to it (files below usr/etc become the image's /etc) before `Machine.install_tree`.
    """
    for name in DIRECTORIES:
        (folder / name).mkdir(parents=True, exist_ok=True)
    for name, target in LINKS.items():
        if not (folder / name).is_symlink():
            (folder / name).symlink_to(target)
    for name, text in FILES.items():
        (folder / name).write_text(text)
    shadow = folder / "usr/etc/shadow"
    shadow.write_text(SHADOW)
    shadow.chmod(0o000)
    modules = folder / "usr/lib/modules" / kernel
    modules.mkdir(parents=True, exist_ok=True)
    (modules / "vmlinuz").write_text(f"kernel {kernel}\n")
    (modules / "initramfs.img").write_text(f"initramfs {kernel}\n")
    return folder
