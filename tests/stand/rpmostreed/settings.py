"""/etc/rpm-ostreed.conf, as far as it matters here (rpm-ostree.md 1.8)."""

from __future__ import annotations

import configparser
from dataclasses import dataclass
from pathlib import Path

from tests.stand.rpmostreed.errors import OperationFailed
from tests.stand.rpmostreed.transaction import journal

FILE = Path("/etc/rpm-ostreed.conf")
POLICIES = ("none", "check", "stage", "apply")


@dataclass(frozen=True)
class Settings:
    """``policy`` for automatic updates, ``idle_exit`` in seconds (0: never), and whether layering is forbidden."""

    policy: str = "none"
    idle_exit: int = 60
    lock_layering: bool = False


def read(path: Path = FILE) -> Settings:
    """The daemon's settings; a missing file is only worth a line. Raises OperationFailed."""
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read_string(path.read_text())
        if not parser.has_section("Daemon"):
            return Settings()
        section = parser["Daemon"]
        found = Settings(
            section.get("AutomaticUpdatePolicy", "none"),
            section.getint("IdleExitTimeout", 60),
            section.getboolean("LockLayering", False),
        )
    except FileNotFoundError:
        journal(f"Failed to load {path}: No such file or directory")
        return Settings()
    except (configparser.Error, ValueError) as error:
        raise OperationFailed(f"Failed to load {path}: {error}") from error
    if found.policy not in POLICIES:
        raise OperationFailed(f"Invalid value for AutomaticUpdatePolicy: '{found.policy}'")
    return found
