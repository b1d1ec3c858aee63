"""A stand-in for rpm-ostreed: its D-Bus surface over a real, booted libostree (rpm-ostree.md sections 1 to 4).

What is real: the bus name, signatures, transaction socket and locks; container images read by skopeo; staging, boot
entries, /etc and kernel arguments by libostree. What is not: packages. ``layering`` unpacks small RPM files over the
base and keeps lists; it is not dnf and not librepo, runs no scriptlets and keeps no rpmdb. There is no dracut, no
SELinux labelling and no polkit (root may do everything, others may read).

It lives under tests/ only, imports nothing of mcdaemon, and needs the standard library, GObject introspection and
the programs ostree, skopeo, rpm, rpm2cpio and cpio.
"""

from __future__ import annotations

FAULTS_FILE = "/run/stand/rpmostreed-faults.json"
FAULTS_VARIABLE = "RPMOSTREED_STAND_FAULTS"
DEFAULT_PROFILE = "AC"

_UNIT = """\
[Unit]
Description=stand-in for rpm-ostreed
ConditionPathExists=/ostree
RequiresMountsFor=/boot

[Service]
Type=dbus
BusName=org.projectatomic.rpmostree1
Environment=PYTHONPATH={source} PYTHONDONTWRITEBYTECODE=1
ExecStart=/usr/bin/python3 -m tests.stand.rpmostreed --profile={profile}
MountFlags=slave
TimeoutStartSec=5m
"""


def program_version(profile: str = DEFAULT_PROFILE) -> str:
    """A version of rpm-ostree that behaves like this profile: of the newest of its letters."""
    known = {"D": "2022.19", "A": "2024.5", "B": "2024.8", "C": "2025.10", "E": "2026.1"}
    return max((known[letter] for letter in profile), default="2024.5")


def unit_text(source: str, profile: str = DEFAULT_PROFILE) -> str:
    """The text of ``rpm-ostreed.service``; ``source`` is the directory in the node that holds ``tests/``.

    ``profile`` is a set of letters, see ``profiles``."""
    return _UNIT.format(source=source, profile=profile)


def units(source: str, profile: str = DEFAULT_PROFILE) -> dict[str, str]:
    """Unit files by name for a node with this profile: the daemon's, and what the profile changes elsewhere."""
    found = {"rpm-ostreed.service": unit_text(source, profile)}
    if "B" in profile:
        found["ostree-finalize-staged.service.d/50-lock-key.conf"] = (
            f"[Service]\nEnvironment=PYTHONPATH={source}\nExecStop=\nExecStop={finalize_command(profile)}\n"
        )
    return found


def finalize_command(profile: str = DEFAULT_PROFILE) -> str:
    """The ExecStop of ``ostree-finalize-staged.service``.

    With profile B the lock is a key in the staged file that libostree 2022.7 does not know, so ``lockkey`` looks at it
    before the real ``ostree admin finalize-staged`` runs."""
    if "B" in profile:
        return "/usr/bin/python3 -m tests.stand.rpmostreed.lockkey finalize-staged"
    return "/usr/bin/ostree admin finalize-staged"
