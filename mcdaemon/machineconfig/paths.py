"""Which paths a config may manage on an ostree node, and which of them are the same place.

/usr belongs to the image and is read-only, /boot and /ostree belong to ostree, /run and /tmp are empty after a boot. A
file that is asked for there could be written and could never be validated after the reboot, so it is refused before.
"""

from __future__ import annotations

from typing import Optional

# Places that a deployment keeps: its own /etc, the shared /var, and the image's links into /var.
_KEPT = ("/etc", "/var", "/home", "/opt", "/srv", "/root", "/mnt", "/usr/local")
# How ostree images spell the same place; only to find out that one place is asked for twice. Where a path really leads
# is read from the root (host/root.py).
_ALIASES = (
    ("/usr/local", "/var/usrlocal"),
    ("/home", "/var/home"),
    ("/opt", "/var/opt"),
    ("/srv", "/var/srv"),
    ("/root", "/var/roothome"),
    ("/mnt", "/var/mnt"),
)
_EMPTY_AFTER_BOOT = "is empty after each boot"
_REFUSED = (
    ("/usr", "belongs to the OS image and is read-only", "use /etc or /usr/local"),
    ("/boot", "belongs to ostree and the boot loader", ""),
    ("/sysroot", "belongs to ostree", ""),
    ("/ostree", "belongs to ostree", ""),
    ("/run", _EMPTY_AFTER_BOOT, "use /etc/tmpfiles.d"),
    ("/var/run", _EMPTY_AFTER_BOOT, "use /etc/tmpfiles.d"),
    ("/var/lock", _EMPTY_AFTER_BOOT, "use /etc/tmpfiles.d"),
    ("/tmp", _EMPTY_AFTER_BOOT, "use /etc/tmpfiles.d"),
    ("/media", _EMPTY_AFTER_BOOT, "use /etc/tmpfiles.d"),
    ("/dev", "belongs to the kernel", "use /etc/udev/rules.d"),
    ("/proc", "belongs to the kernel", "use /etc/sysctl.d"),
    ("/sys", "belongs to the kernel", "use /etc/tmpfiles.d or /etc/udev/rules.d"),
    # What either daemon itself keeps about the config: a config that wrote these would lie about itself.
    ("/etc/yum.repos.d/mcdaemon-extensions.repo", "is written by mcdaemon while it stages packages", ""),
    ("/var/lib/mcdaemon", "is the state of mcdaemon itself", ""),
    ("/var/usrlocal/lib/mcdaemon", "is the program of mcdaemon itself", "install it with `make install`"),
    ("/var/usrlocal/bin/mcdaemon", "is the program of mcdaemon itself", "install it with `make install`"),
    ("/etc/machine-config-daemon/currentconfig", "is written by the daemon itself", ""),
    ("/etc/machine-config-daemon/currentimage", "is written by the daemon itself", ""),
    ("/etc/machine-config-daemon/orig", "is written by the daemon itself", ""),
    ("/etc/machine-config-daemon/noorig", "is written by the daemon itself", ""),
)
FORCE_FILE = "/run/machine-config-daemon-force"
_MAX_PATH = 4095
_MAX_NAME = 255


def below(path: str, place: str) -> bool:
    """Whether `path` is `place` or lies in it as a directory."""
    return path == place or path.startswith(place + "/")


def canonical(path: str) -> str:
    """One spelling for each place, by the links that every ostree image has."""
    for alias, real in _ALIASES:
        if below(path, alias):
            return real + path[len(alias) :]
    return path


def problem(path: str) -> Optional[tuple[str, str]]:
    """Why `path` cannot be managed and what to do about it, or None (FILE-03, FILE-04; mcd.md 4, rule 14)."""
    if not path.startswith("/"):
        return "the path has to be absolute", ""
    if any(part in ("", ".", "..") for part in path[1:].split("/")):
        return "the path has to be clean: no //, no . or .. part, no / at the end", ""
    if any(not char.isprintable() for char in path):
        return "the path holds a character that cannot be printed", ""
    if len(path.encode()) > _MAX_PATH or any(len(part.encode()) > _MAX_NAME for part in path.split("/")):
        return f"the path is longer than {_MAX_PATH} bytes, or a part of it than {_MAX_NAME}", ""
    if path == FORCE_FILE:
        return "the force file of the machine-config-daemon cannot be made by a config", ""
    return _misplaced(path)


def _misplaced(path: str) -> Optional[tuple[str, str]]:
    real = canonical(path)
    for place, reason, hint in _REFUSED:
        if below(real, place):
            return f"{place} {reason}", hint
    if path in _KEPT or real in ("/var/usrlocal", "/var/home", "/var/opt", "/var/srv", "/var/roothome", "/var/mnt"):
        return "this is a directory of the system", ""
    if not any(below(path, place) for place in _KEPT):
        return "an ostree node keeps files only in /etc, /var and the places that lead there", "use /etc or /var"
    return None
