"""A node of the stand with mcdaemon on it: what the scenarios, the demo and the tests of the agent are written with."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Optional

from tests.stand import rpmostreed
from tests.stand.images import File, Image, Link, layer_on, os_image
from tests.stand.isolation import private
from tests.stand.machine import Down, Machine

PROJECT = Path(__file__).resolve().parents[2]
SOURCE = "/run/stand/lib"
DESIRED = "/var/lib/mcdaemon/machineconfigs"
INSTALL_TIMEOUT = 600.0

SETTINGS = """\
hold: {retry_min_seconds: 1, retry_max_seconds: 5}
health: {timeout_seconds: 20, settle_seconds: 0}
"""

# The agent's unit does nothing by itself: a test takes each round with `mcdaemon run --once`.
_BY_HAND = "[Service]\nType=oneshot\nRemainAfterExit=yes\nExecStart=\nExecStart=/bin/true\n"

# Profile B keeps the lock as a key that this libostree does not know; the program that goes with it can unlock it.
_UNLOCKING_OSTREE = f"""\
#!/bin/sh
[ "$*" = "admin lock-finalization --unlock" ] || exec /usr/bin/ostree "$@"
PYTHONPATH={SOURCE} exec /usr/bin/python3 -m tests.stand.rpmostreed.lockkey unlock
"""


# All that the agent asks the program for; everything else goes over D-Bus.
_RPM_OSTREE = """\
#!/bin/sh
[ "$*" = --version ] || exit 64
printf "rpm-ostree:\\n Version: '{version}'\\n Git: none\\n Features:\\n  - container\\n"
"""


def agent_runtime() -> dict[str, Any]:
    """What the agent needs of an OS image: an interpreter and gi; the host's own, so that they also run."""
    interpreter = Path("/usr/bin/python3").resolve()
    bindings = Path("/usr/lib/python3/dist-packages/gi/__init__.py")
    return {
        "usr/bin/python3": Link(interpreter.name),
        f"usr/bin/{interpreter.name}": File(interpreter.read_bytes(), 0o755),
        "usr/lib/python3/dist-packages/gi/__init__.py": File(bindings.read_bytes()),
    }


_DECISION = re.compile(r"(?!rpm-ostree: )[a-z]+(-[a-z]+)*: ")

_base: Optional[Image] = None


def base_image() -> Image:
    """The OS of the first installation; every other image of the stand is a layer on it."""
    global _base  # built once: it compresses an interpreter
    if _base is None:
        _base = os_image(agent_runtime(), version="417.94.1")
    return _base


def next_image(version: str, changes: Optional[Mapping[str, Any]] = None, without: Sequence[str] = ()) -> Image:
    """Another OS: a layer on the base with its own version and kernel."""
    release = f'NAME="Stand CoreOS"\nID="rhcos"\nVERSION="{version}"\nPRETTY_NAME="Stand CoreOS {version}"\n'
    layer = {"usr/lib/os-release": File(release.encode()), **(changes or {})}
    return layer_on(base_image(), layer, without, {"org.opencontainers.image.version": version})


class Node:
    """A booted machine with mcdaemon installed as `make install` does.

    `image` is a reference ("127.0.0.1:PORT/os@sha256:...") from which the first deployment is made, with it as origin.
    `daemon`: mcdaemon.service runs by itself; otherwise each round is taken by hand. `own_disk`: as for `Machine`.
    """

    def __init__(
        self,
        folder: Path,
        image: str,
        daemon: bool = False,
        profile: str = rpmostreed.DEFAULT_PROFILE,
        kargs: Sequence[str] = (),
        settings: str = SETTINGS,
        transport: str = "registry",
        own_disk: bool = False,
    ) -> None:
        units = dict(rpmostreed.units(SOURCE, profile))
        if not daemon:
            units["mcdaemon.service.d/50-by-hand.conf"] = _BY_HAND
        self.profile = profile
        self.machine = Machine(folder, units=units, own_disk=own_disk)
        self.boots = 0
        try:
            self._install_os(image, kargs, transport)
            self.machine.boot()
            self._install_agent(settings)
        except BaseException:
            # Also when interrupted: a half-made node would leave a folder that cannot be removed.
            self.machine.close()
            raise

    def _install_os(self, image: str, kargs: Sequence[str], transport: str) -> None:
        prefix = "ostree-unverified-registry:" if transport == "registry" else f"ostree-unverified-image:{transport}:"
        commit = _import(self.machine.sysroot.repo, image, prefix + image)
        self.machine.deploy_commit(commit, kargs, f"[origin]\ncontainer-image-reference={prefix}{image}\n")

    def _install_agent(self, settings: str) -> None:
        root = self.machine.root
        self.machine.write("/etc/mcdaemon/mcdaemon.yaml", settings)
        subprocess.run(
            ["make", "--silent", "install", f"DESTDIR={root}"],
            cwd=PROJECT,
            check=True,
            capture_output=True,
            text=True,
            timeout=INSTALL_TIMEOUT,
            stdin=subprocess.DEVNULL,
        )
        self.machine.run(["mkdir", "-p", DESIRED])
        version = rpmostreed.program_version(self.profile)
        self.machine.write("/usr/local/bin/rpm-ostree", _RPM_OSTREE.format(version=version), 0o755)
        if "B" in self.profile:
            self.machine.write("/usr/local/bin/ostree", _UNLOCKING_OSTREE, 0o755)

    # -- what a person does -----------------------------------------------------------------------------------------

    def desire(self, **configs: str) -> None:
        """Make these MachineConfigs (name to text) the desired ones, and no others."""
        self.machine.run(["find", DESIRED, "-type", "f", "-delete"])
        for name, text in configs.items():
            self.machine.write(f"{DESIRED}/{name}.json", text, 0o600)

    def mcdaemon(self, *arguments: str, check: bool = True, timeout: float = 120.0) -> subprocess.CompletedProcess[str]:
        return self.machine.run(["mcdaemon", *arguments], timeout=timeout, check=check)

    def once(self, expect: int = 0) -> str:
        """`mcdaemon run --once`; follows the reboot that it asks for, and the early unit's. Returns what it said."""
        done = self.mcdaemon("run", "--once", check=False)
        said = done.stderr
        if ends_in_reboot(done):
            self.follow_reboot()
        elif done.returncode != expect:
            raise AssertionError(f"mcdaemon ended with {done.returncode}, not {expect}:\n{said}{done.stdout}")
        return said

    def update(self) -> str:
        """Rounds until the node is at rest again, through any reboot."""
        said = ""
        for _round in range(6):
            boots = self.boots
            said += self.once()
            if self.boots == boots:
                return said
        raise AssertionError(f"no rest after six rounds:\n{said}")

    def follow_reboot(self, timeout: float = 60.0) -> None:
        how = self.machine.wait_down(timeout)
        if how is not Down.REBOOT:
            raise AssertionError(f"the node went down by {how.value} instead of a reboot")
        self.boots += self.machine.boot(timeout)

    # -- what a person sees -----------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.mcdaemon("status", "--json").stdout)
        return found

    def mode(self, path: str) -> int:
        return int(self.machine.run(["stat", "-c", "%a", path]).stdout, 8)

    def close(self) -> None:
        self.machine.close()

    def __enter__(self) -> Node:
        return self

    def __exit__(
        self, kind: Optional[type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        self.close()


def ends_in_reboot(done: subprocess.CompletedProcess[str]) -> bool:
    """Whether the agent decided for a reboot last; it may have been killed by it before it could end."""
    # What rpm-ostree says meanwhile is no decision, and a reason may have several lines.
    decisions = [line for line in done.stderr.splitlines() if _DECISION.match(line)]
    asked = bool(decisions) and decisions[-1].startswith(("reboot: ", "roll-back: "))
    return asked and done.returncode in (0, -9, 137)


def _import(repo: Path, image: str, origin: str) -> str:
    """Import an image into the node's repository from outside, as an installer does; returns the commit."""
    with tempfile.TemporaryDirectory(prefix="stand-install-") as scratch:
        layout = f"oci:{scratch}:image"
        copy = [
            "skopeo",
            "--insecure-policy",
            "copy",
            "--quiet",
            "--preserve-digests",
            "--src-tls-verify=false",
            f"docker://{image}",
            layout,
        ]
        _run(private(copy))
        return _run(
            [
                sys.executable,
                "-m",
                "tests.stand.ostree_import",
                f"--repo={repo}",
                f"--target={origin}",
                f"ostree-unverified-image:{layout}",
            ]
        ).strip()


def _run(argv: Sequence[str]) -> str:
    done = subprocess.run(argv, cwd=PROJECT, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        raise RuntimeError(f"cannot install the node's OS: `{' '.join(argv)}`: {done.stderr}")
    return done.stdout
