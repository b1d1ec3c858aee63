"""A node on a real Fedora CoreOS or RHCOS disk: `VM_IMAGE=…qcow2`. What a person does with it: vm-tests/README.md.

    image = from_environment()          # None: no such disk was given
    if image is not None:
        with CoreOs(image, folder, config=node_config(tree)) as node:
            node.boot()
            node.run(["rpm-ostree", "status"])

The given disk is never written: the node runs on an overlay of it. The firmware, the disk's own GRUB and its own
Ignition boot it; only the first boot sees an Ignition config. QEMU is started anew for every boot (a reset inside one
QEMU is slow under emulation), and ends with it.
"""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from vmlab import ignition, rootshell

VARIABLE = "VM_IMAGE"
HOST = "10.0.2.2"
"""The host's loopback as a guest sees it through QEMU's user network."""

FW_CFG = "opt/com.coreos/config"
SMALLEST = 1 << 30
"""Bytes; CoreOS disks have 10 GiB and more."""

_SHELL_SCRIPT = "/etc/vmlab/rootshell.sh"
_TOOL_TIMEOUT = 60.0
_PACKED = {".xz": "xz -d -k", ".gz": "gzip -d -k", ".zst": "zstd -d", ".zip": "unzip"}

SHELL_UNIT = f"""\
[Unit]
Description=A root shell for the test harness on the host
# Early and to the end: what goes wrong before or after the other units is what a test wants to look at.
DefaultDependencies=no
After=systemd-remount-fs.service
Conflicts=shutdown.target
Before=shutdown.target
StartLimitIntervalSec=0

[Service]
# In /etc, which a policy for confined programs lets nobody execute; so bash is what is started.
ExecStart=/usr/bin/bash {_SHELL_SCRIPT} {rootshell.PORT}
Environment=HOME=/root PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin
# Also when the port is not there yet, or when the host was not: reading then ends at once.
Restart=always
RestartSec=1s

[Install]
WantedBy=sysinit.target
"""
JOURNAL = "[Journal]\nStorage=persistent\nForwardToConsole=yes\nTTYPath=/dev/hvc0\nMaxLevelConsole=debug\n"
# Without a port: it then stands for all ports of that host (containers-registries.conf(5), prefix matching).
REGISTRIES = f'[[registry]]\nlocation = "{HOST}"\ninsecure = true\n'


class BadImage(Exception):
    """VM_IMAGE cannot be used; the text says why and what to do."""


@dataclass(frozen=True)
class DiskImage:
    """A disk that was given: `format` is qcow2 or raw, `size` the guest's bytes, `key` changes with the file."""

    path: Path
    format: str
    size: int
    key: str


def from_environment(environ: Mapping[str, str] = os.environ) -> Optional[DiskImage]:
    """The disk that VM_IMAGE names; None without the variable. Raises BadImage."""
    value = environ.get(VARIABLE, "").strip()
    return check(Path(value)) if value else None


def check(path: Path) -> DiskImage:
    """Look at a given disk without writing to it. Raises BadImage."""
    place = f"cannot use {VARIABLE}={path}"
    if not path.exists():
        raise BadImage(f"{place}: there is no such file")
    if not path.is_file():
        raise BadImage(f"{place}: it is no file")
    if not os.access(path, os.R_OK):
        raise BadImage(f"{place}: it cannot be read by this user")
    if path.suffix in _PACKED:
        raise BadImage(f"{place}: it is compressed; unpack it first: `{_PACKED[path.suffix]} {path}`")
    try:
        found: dict[str, Any] = json.loads(_tool(["qemu-img", "info", "--output=json", "--force-share", str(path)]))
    except ToolFailed as error:
        raise BadImage(f"{place}: {error}") from error
    kind, size = str(found.get("format")), int(found.get("virtual-size", 0))
    if kind not in ("qcow2", "raw"):
        raise BadImage(f"{place}: its format is {kind}; convert it: `qemu-img convert -O qcow2 {path} disk.qcow2`")
    if found.get("format-specific", {}).get("data", {}).get("corrupt"):
        raise BadImage(f"{place}: its qcow2 is marked corrupt; look with `qemu-img check {path}`, or fetch it again")
    if size < SMALLEST:
        raise BadImage(
            f"{place}: it has {size} bytes, which no CoreOS disk has; is it the `qemu` one (*-qemu.x86_64.qcow2)?"
        )
    if kind == "raw" and _boot_signature(path) != b"\x55\xaa":
        raise BadImage(f"{place}: it is neither a qcow2 nor a disk with a partition table")
    status = path.stat()
    text = f"{path.resolve()} {status.st_size} {status.st_mtime_ns}"
    return DiskImage(path.resolve(), kind, size, hashlib.sha256(text.encode()).hexdigest()[:16])


def overlay(image: DiskImage, path: Path) -> Path:
    """A new disk at `path` that begins as `image` and takes all writes."""
    _tool(["qemu-img", "create", "-q", "-f", "qcow2", "-F", image.format, "-b", str(image.path), str(path)])
    return path


def copy(disk: Path, to: Path, timeout: float) -> None:
    """Write a machine's disk as one file that needs no other. Raises ToolFailed."""
    _tool(["qemu-img", "convert", "-O", "qcow2", str(disk), str(to)], timeout)


def harness_config(keys: tuple[str, ...] = ()) -> ignition.Config:
    """What the harness needs in a guest: the root shell, the journal on hvc0, its registries, and nobody who updates.

    `keys`: ssh keys for the user core, for a person who wants to look around.
    """
    return ignition.Config(
        files=(
            ignition.File(_SHELL_SCRIPT, rootshell.SCRIPT.read_bytes()),
            ignition.File("/etc/systemd/journald.conf.d/90-vmlab.conf", JOURNAL.encode()),
            ignition.File("/etc/containers/registries.conf.d/90-vmlab.conf", REGISTRIES.encode()),
        ),
        units=(
            ignition.Unit("vmlab-shell.service", SHELL_UNIT, enabled=True),
            # systemd-getty-generator puts a login on every virtualizer console; the journal is there.
            ignition.Unit("serial-getty@hvc0.service", mask=True),
            # Fedora CoreOS updates itself: two agents on one node undo each other.
            ignition.Unit("zincati.service", mask=True),
        ),
        users=(ignition.User("core", keys),) if keys else (),
    )


def agent_config(project: Path, timeout: float = 600.0) -> ignition.Config:
    """mcdaemon as `make install DESTDIR=` lays it out, as a config."""
    with tempfile.TemporaryDirectory(prefix="vmlab-destdir-") as folder:
        tree = Path(folder) / "tree"
        tree.mkdir()
        _tool(["make", "--silent", "-C", str(project), "install", f"DESTDIR={tree}"], timeout)
        return ignition.from_tree(tree)


@contextmanager
def served(text: str) -> Iterator[str]:
    """What to give fw_cfg for the config `text`: itself, or a pointer to it while this context serves it by HTTP.

    Reading 1 MB through fw_cfg takes minutes (ignition.FW_CFG_LIMIT); the agent's archive alone has that.
    """
    if len(text) <= ignition.FW_CFG_LIMIT:
        yield text
        return
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _serving(text.encode()))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, name="ignition", daemon=True)
    thread.start()
    try:
        yield ignition.pointer(text, f"http://{HOST}:{server.server_port}/config.ign")
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


def _serving(content: bytes) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/config.ign" else 404)
            body = content if self.path == "/config.ign" else b""
            self.send_header("Content-Type", "application/vnd.coreos.ignition+json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Nothing: Ignition's own log says what it fetched."""

    return Handler


def ignition_arguments(config: Path) -> list[str]:
    """QEMU's arguments by which Ignition (platform `qemu`, x86_64 and aarch64) finds a config."""
    if "," in str(config):
        raise BadImage(f"cannot give {config} to QEMU: a comma in a path; use another folder")
    return ["-fw_cfg", f"name={FW_CFG},file={config}"]


class ToolFailed(Exception):
    """A program of the host failed or is missing; the text says which and why."""


def _tool(argv: list[str], timeout: float = _TOOL_TIMEOUT) -> str:
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL)
    except FileNotFoundError as error:
        raise ToolFailed(f"there is no {argv[0]}; `make vm-deps` installs it") from error
    except subprocess.TimeoutExpired as error:
        raise ToolFailed(f"`{' '.join(argv)}` did not end within {timeout:g} s") from error
    if done.returncode != 0:
        raise ToolFailed(f"`{' '.join(argv)}`: {' '.join(done.stderr.split())}")
    return done.stdout


def _boot_signature(path: Path) -> bytes:
    with path.open("rb") as disk:
        return disk.read(512)[510:]
