"""The packages of the machine's OS, unpacked by mmdebstrap into one archive: Debian trixie, whatever Debian runs here.

The kernel's package is only unpacked, into /kernel: installed, it would make an initramfs that nobody boots.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from vmlab.programs import run

SUITE = "trixie"
MIRROR = os.environ.get("VM_MIRROR", "http://deb.debian.org/debian")
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
KERNEL = "linux-image-cloud-amd64"
PACKAGES = (
    "systemd", "systemd-sysv", "dbus", "kmod", "e2fsprogs", "procps", "libnss-systemd",
    "ostree", "ostree-boot", "gir1.2-ostree-1.0",
    "python3", "python3-gi", "python3-pydbus", "python3-yaml", "python3-requests",
    "skopeo", "podman", "crun", "conmon", "ca-certificates",
    "rpm", "rpm2cpio", "cpio",
    "qemu-guest-agent", "busybox-static",
)  # fmt: skip
# Nobody reads them in there, and every byte is imported, checked out and copied many times. The plugins of cni are
# 50 MB for container networks, which these machines do not have.
LEFT_OUT = ("/usr/share/man/*", "/usr/share/doc/*", "/usr/share/info/*", "/usr/share/locale/*", "/usr/share/i18n/*",
            "/usr/lib/cni/*", "/usr/lib/udev/hwdb.d/*", "/usr/lib/file/*", "/usr/share/bash-completion/*")  # fmt: skip

TIME = 1704067200
"""2024-01-01: the time of everything that is built, so that the same inputs give the same bytes."""

ENVIRONMENT: Mapping[str, str] = {"SOURCE_DATE_EPOCH": str(TIME), "LC_ALL": "C.UTF-8", "TZ": "UTC"}
_TIMEOUT = 1800.0

# The hook's own apt-get finds the lists in the new root, and needs no permission to become another user.
_KERNEL_HOOK = """\
set -eu; export APT_CONFIG="$MMDEBSTRAP_APT_CONFIG"; mkdir "$1/kernel"; cd "$1/kernel"
package=$(apt-cache depends {kernel} | sed -n 's/^ *Depends: \\(linux-image-[^ ]*\\)$/\\1/p' | head -n 1)
apt-get -o APT::Sandbox::User=root download "$package"; dpkg-deb --extract ./*.deb .; rm ./*.deb"""


def command(archive: Path) -> list[str]:
    """How mmdebstrap makes the archive; only root can do without a user namespace."""
    return [
        "mmdebstrap",
        f"--mode={'root' if os.geteuid() == 0 else 'unshare'}",
        "--variant=apt",
        "--format=tar",
        f"--keyring={KEYRING}",
        "--aptopt=Apt::Install-Recommends false",
        # The clock of a machine that builds may be ahead of what a mirror promises.
        "--aptopt=Acquire::Check-Valid-Until false",
        "--dpkgopt=force-unsafe-io",
        *(f"--dpkgopt=path-exclude={pattern}" for pattern in LEFT_OUT),
        f"--include={','.join(PACKAGES)}",
        f"--customize-hook={_KERNEL_HOOK.format(kernel=KERNEL)}",
        SUITE,
        str(archive),
        f"deb {MIRROR} {SUITE} main",
    ]


def make(folder: Path) -> None:
    """Fetch and unpack the packages into FOLDER/rootfs.tar. Raises CannotBuild."""
    run(f"unpack Debian {SUITE} from {MIRROR}", command(folder / "rootfs.tar"), _TIMEOUT, env=ENVIRONMENT)
