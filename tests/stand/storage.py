"""A containers-storage of a test's own, with podman and skopeo pointed at it."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Optional, Union

from tests.stand import images
from tests.stand.isolation import private, private_programs

PODMAN_TIMEOUT = 60.0


class ContainersStorage:
    """A graph root and a run root in a folder below /tmp (podman refuses a run root of more than 50 characters).

    `programs` is a folder to put first in PATH: podman and skopeo there leave nothing on the host.
    """

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="stand-cs-", dir="/tmp"))
        self.root = self.folder / "root"
        self.runroot = self.folder / "run"
        self.programs = private_programs(self.folder / "bin", self._state_options())

    def __enter__(self) -> ContainersStorage:
        return self

    def __exit__(
        self, kind: Optional[type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        self.close()

    @property
    def skopeo_prefix(self) -> str:
        """What skopeo calls this storage; an image's name follows."""
        return f"containers-storage:[overlay@{self.root}+{self.runroot}]"

    def add(self, image: Union[images.Image, images.Index], name: str) -> str:
        return images.store(image, name, self.root, self.runroot)

    def podman(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        argv = ["podman", *self._state_options(), "--root", str(self.root), "--runroot", str(self.runroot)]
        return subprocess.run(
            private([*argv, "--storage-driver", "overlay", *arguments]),
            check=check,
            timeout=PODMAN_TIMEOUT,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
        )

    def layer_folder(self, image: images.Image, number: int) -> Path:
        """Where layer `number` (from 0, the base) of a stored image has its directory."""
        return self.root / "overlay" / _chain_id(image, number)

    def close(self) -> None:
        shutil.rmtree(self.folder)

    def _state_options(self) -> tuple[str, ...]:
        """No systemd here to ask for cgroups or a journal; the rest keeps podman's state in this folder."""
        return (
            f"--tmpdir={self.folder / 'state'}",
            f"--network-config-dir={self.folder / 'networks'}",
            "--cgroup-manager=cgroupfs",
            "--events-backend=file",
        )


def _chain_id(image: images.Image, number: int) -> str:
    """The layer's name: the base's diff id, then sha256(ID below + "+" + diff id), as containers/image makes it."""
    chain = image.layers[0].diff_id.partition(":")[2]
    for layer in image.layers[1 : number + 1]:
        chain = images.sha256(f"{chain}+{layer.diff_id.partition(':')[2]}".encode()).partition(":")[2]
    return chain
