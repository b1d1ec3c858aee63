"""The images and packages that the suite uses: an OS, the next version of it, and small packages for it."""

from __future__ import annotations

from functools import lru_cache

from tests.stand.images import KERNEL, File, Image, layer_on, os_image
from tests.stand.packages import Package

_VERSION = "org.opencontainers.image.version"
_LISTS = "usr/share/stand/base-packages"
RT_KERNEL = "6.1.0-stand-rt"


@lru_cache(maxsize=1)
def base() -> Image:
    """Version 1: has the base packages ``kernel`` and ``tools``."""
    modules = f"/usr/lib/modules/{KERNEL}"
    return os_image(
        {
            "etc/version": File(b"1\n"),
            "usr/bin/tool": File(b"#!/bin/sh\n", 0o755),
            f"{_LISTS}/kernel.list": File(
                f"# version: 6.1.0\n# release: 9\n{modules}/vmlinuz\n{modules}/initramfs.img\n".encode()
            ),
            f"{_LISTS}/tools.list": File(b"# version: 2\n# provides: toolbox\n/usr/bin/tool\n"),
        },
        version="1",
    )


@lru_cache(maxsize=1)
def following() -> Image:
    """Version 2: another /etc/version and a program, in two layers."""
    first = layer_on(base(), {"etc/version": File(b"2\n")}, labels={_VERSION: "2"})
    return layer_on(first, {"usr/bin/new": File(b"#!/bin/sh\n", 0o755)})


def usbguard(version: str = "1.0") -> Package:
    """A package with a program, a file in /etc, and a requirement."""
    files = {
        "/usr/bin/usbguard": File(f"usbguard {version}\n".encode(), 0o755),
        "/etc/usbguard/rules.conf": File(b"allow\n", 0o600),
    }
    return Package("usbguard", version, files=files, requires=["libusb"], provides=["guard"])


LIBUSB = Package("libusb", files={"/usr/lib64/libusb.so": File(b"so\n")})
LONELY = Package("lonely", files={"/usr/bin/lonely": File(b"x\n")}, requires=["nowhere"])
CLASH = Package("clash", files={"/usr/bin/tool": File(b"other\n")})
KERNEL_RT = Package(
    "kernel-rt",
    files={f"/usr/lib/modules/{RT_KERNEL}/vmlinuz": File(b"rt kernel\n", 0o755)},
    provides=["kernel-variant"],
)
PACKAGES = (usbguard(), LIBUSB, LONELY, CLASH, KERNEL_RT)
TOOLS = Package("tools", "3", files={"/usr/bin/tool": File(b"newer\n", 0o755)})
