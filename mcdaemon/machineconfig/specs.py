"""What a config wants of single things: files, units and their drop-ins, users.

Contents and password hashes are secrets until proven otherwise and never appear in a `repr`.
"""

from __future__ import annotations

import enum
import hashlib
from dataclasses import dataclass, field
from typing import Optional

UNIT_DIRECTORY = "/etc/systemd/system"


class KernelType(enum.Enum):
    """Which kernel the node boots. Values are the MachineConfig API's."""

    DEFAULT = "default"
    REALTIME = "realtime"
    PAGES_64K = "64k-pages"


@dataclass(frozen=True)
class Limits:
    """How large a config may be once decoded, in bytes: one file, and all files and units together.

    Gzip can blow one kilobyte up to a megabyte, so the bound holds while decompressing, not afterwards.
    """

    file_bytes: int = 32 * 1024 * 1024
    total_bytes: int = 128 * 1024 * 1024


@dataclass(frozen=True)
class Owner:
    """A user or group: by id where `id` is set, else by `name`, to be looked up in the root that the file is for."""

    id: Optional[int] = 0
    name: str = ""

    def __str__(self) -> str:
        return self.name if self.id is None else str(self.id)


ROOT = Owner(0)


@dataclass(frozen=True)
class FileSpec:
    """A regular file: absolute clean path, decoded content, permission bits (0 to 0o777), owners."""

    path: str
    content: bytes = field(repr=False)
    mode: int = 0o644
    user: Owner = ROOT
    group: Owner = ROOT

    @property
    def sha256(self) -> str:
        """Hex digest of the content."""
        return hashlib.sha256(self.content).hexdigest()


@dataclass(frozen=True)
class DropIn:
    """A drop-in of a unit. Without content it has to be absent (UNIT-07, MCD file_writers.go)."""

    name: str
    content: Optional[bytes] = field(default=None, repr=False)


@dataclass(frozen=True)
class UnitSpec:
    """A systemd unit. `content` None: the unit file is not managed. `enabled` None: the presets decide.

    A masked unit is a link to /dev/null whatever its content says (UNIT-05). Drop-ins are sorted by name.
    """

    name: str
    content: Optional[bytes] = field(default=None, repr=False)
    enabled: Optional[bool] = None
    mask: bool = False
    dropins: tuple[DropIn, ...] = ()

    @property
    def path(self) -> str:
        """Where the unit file (or the mask link) is."""
        return f"{UNIT_DIRECTORY}/{self.name}"

    def dropin_path(self, dropin: DropIn) -> str:
        """Where `dropin` is."""
        return f"{UNIT_DIRECTORY}/{self.name}.d/{dropin.name}"


@dataclass(frozen=True)
class UserSpec:
    """A user's ssh keys (public, one line each) and crypt(5) hash; hash None: no password login."""

    name: str
    ssh_keys: tuple[str, ...] = ()
    password_hash: Optional[str] = field(default=None, repr=False)
