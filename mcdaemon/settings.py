"""The settings file, `/etc/mcdaemon/mcdaemon.yaml`: every key with its unit and its default.

A key that is not known or has the wrong type is refused with its full name and its line: a misspelt timeout that is
ignored is found out in the night in which it is needed. A missing file means the defaults.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

from mcdaemon import textfile
from mcdaemon.document import Document, Malformed, pointer, read_yaml
from mcdaemon.errors import Broken

PATH = "/etc/mcdaemon/mcdaemon.yaml"
_MAX_BYTES = 1024 * 1024
_MIB = 1024 * 1024
_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
_UNIT = re.compile(r"[A-Za-z0-9:_.\\@-]+\.[a-z]+")
_URL = re.compile(r"http://[^\s/@?#]+(/[^\s#]*)?")
_LISTEN = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]+):(?P<port>[0-9]{1,5})")


def _key(default: Any, kind: str, least: float = 0) -> Any:
    """A setting: its default, what it is in words (for errors), and the smallest value of a number."""
    return field(default=default, metadata={"kind": kind, "least": least})


def _group(kind: type) -> Any:
    return field(default_factory=kind)


@dataclass(frozen=True)
class Directory:
    """Where the `directory` source reads."""

    path: str = _key("/var/lib/mcdaemon/machineconfigs", "an absolute path")
    """The directory with MachineConfigs (*.yaml, *.yml, *.json)."""
    pool: str = _key("worker", "the name of a pool")
    """The pool that the node belongs to; decides which of the MachineConfigs count, by their role label."""


@dataclass(frozen=True)
class Source:
    """Where the desired config comes from."""

    kind: str = _key("directory", "directory")
    """`directory`: MachineConfig files on the node itself."""
    directory: Directory = _group(Directory)


@dataclass(frozen=True)
class Metrics:
    """Prometheus metrics over plain HTTP."""

    listen: str = _key("127.0.0.1:8797", "HOST:PORT, or empty text for none")
    """Address and port; the default is the machine-config-daemon's. Empty: no metrics are served."""

    @property
    def address(self) -> str:
        """The host part of `listen`, without brackets; "" when metrics are off."""
        return self.listen.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        """The port of `listen`; 0 lets the kernel choose, and is also the answer when metrics are off."""
        return int(self.listen.rpartition(":")[2] or 0)


@dataclass(frozen=True)
class Images:
    """Checks whether an image is complete and reachable."""

    timeout_seconds: float = _key(30.0, "a number of seconds", 0.1)
    """Seconds that one request to a registry may take."""
    parallel: int = _key(4, "a whole number of requests", 1)
    """How many requests to a registry run at the same time."""


@dataclass(frozen=True)
class Hold:
    """Waiting for something outside of the node (an image, space, a drain)."""

    retry_min_seconds: float = _key(15.0, "a number of seconds", 0.1)
    """Seconds before the first new attempt; doubles up to the maximum, with jitter."""
    retry_max_seconds: float = _key(600.0, "a number of seconds", 0.1)
    """Seconds between attempts at most."""
    degraded_after_seconds: float = _key(0.0, "a number of seconds, 0 for never")
    """Seconds after which a hold is reported as Degraded; 0: never, it only shows in the metrics."""


@dataclass(frozen=True)
class Drain:
    """Taking the workloads away before a reboot, by programs of the administrator. No shell is involved."""

    command: tuple[str, ...] = _key((), "a list of a program and its arguments")
    """Run before the reboot; exit status 0 means drained. Empty: nothing is drained."""
    undo: tuple[str, ...] = _key((), "a list of a program and its arguments")
    """Run when the node serves again, or the reboot is called off."""
    timeout_seconds: float = _key(3600.0, "a number of seconds", 1)
    """Seconds that either program may take; then it is stopped and tried again later."""


@dataclass(frozen=True)
class Reboot:
    """The reboot into a target."""

    command: tuple[str, ...] = _key((), "a list of a program and its arguments")
    """Run to reboot the node. Empty: logind is asked, which waits for inhibitors."""
    timeout_seconds: float = _key(900.0, "a number of seconds", 1)
    """Seconds until a reboot that was asked for and does not come is reported."""


@dataclass(frozen=True)
class Health:
    """What has to be well after a reboot before the target is kept; otherwise the node goes back."""

    units: tuple[str, ...] = _key((), "a list of unit names")
    """systemd units that have to be active, with their suffix (kubelet.service)."""
    timeout_seconds: float = _key(600.0, "a number of seconds", 1)
    """Seconds after the agent's first look in a boot until everything has to be well."""
    settle_seconds: float = _key(5.0, "a number of seconds")
    """Seconds for which everything has to stay well; 0: one good look is enough."""
    scripts_directories: tuple[str, ...] = _key(("/etc/mcdaemon/health.d",), "a list of absolute paths")
    """Directories in greenboot's layout: required.d, wanted.d, green.d, red.d; an absent one has no scripts."""
    script_timeout_seconds: float = _key(60.0, "a number of seconds", 1)
    """Seconds that one script may take."""
    kubelet_healthz: str = _key("", "an http:// URL, or empty text")
    """The kubelet's health endpoint, http://127.0.0.1:10248/healthz on OpenShift. Empty: not asked."""
    node_kubeconfig: str = _key("", "an absolute path, or empty text")
    """The kubelet's kubeconfig (/var/lib/kubelet/kubeconfig), for the node's Ready condition. Empty: not asked."""
    node_name: str = _key("", "the name of a node, or empty text")
    """The node's name; empty: the one in the kubeconfig's client certificate, or else the host's name."""
    unreachable_api: str = _key("roll-back", "roll-back or wait")
    """What an API server that cannot be reached until the deadline means."""


@dataclass(frozen=True)
class Os:
    """The operating system that a config may move the node to."""

    downgrade: str = _key("allow", "allow or refuse")
    """A target older than the booted OS, by version or else by the time it was made. `allow`: it is a warning, because
    going back to an older config is how a pool is taken back. `refuse`: the config is refused."""


@dataclass(frozen=True)
class Disruption:
    """What a change does to a running node."""

    policy_file: str = _key("", "an absolute path, or empty text for the built-in policy")
    """A YAML file with a nodeDisruptionPolicy (files, units, sshkey) that is laid over the built-in one."""


@dataclass(frozen=True)
class RpmOstree:
    """Patience with rpm-ostreed."""

    call_timeout_seconds: float = _key(300.0, "a number of seconds", 1)
    """Seconds that one D-Bus call may take. Transactions run beside it and take longer."""
    idle_timeout_seconds: float = _key(1800.0, "a number of seconds", 1)
    """Seconds without a sign of progress after which a transaction counts as hung and is cancelled."""


@dataclass(frozen=True)
class Limits:
    """How large things may be, in bytes."""

    max_file_bytes: int = _key(32 * _MIB, "a whole number of bytes", 1)
    """One managed file, decoded and decompressed."""
    max_total_bytes: int = _key(128 * _MIB, "a whole number of bytes", 1)
    """All managed files and units together."""
    max_source_bytes: int = _key(16 * _MIB, "a whole number of bytes", 1)
    """All MachineConfig files of the directory together, as they are on disk."""


@dataclass(frozen=True)
class Loop:
    """The round of observe, decide, perform."""

    interval_seconds: float = _key(60.0, "a number of seconds", 1)
    """Seconds between two rounds when nothing wakes the agent earlier."""


@dataclass(frozen=True)
class Settings:
    """All settings of the agent."""

    source: Source = _group(Source)
    state_dir: str = _key("/var/lib/mcdaemon", "an absolute path")
    """Journal, payloads and other state."""
    metrics: Metrics = _group(Metrics)
    images: Images = _group(Images)
    hold: Hold = _group(Hold)
    drain: Drain = _group(Drain)
    reboot: Reboot = _group(Reboot)
    health: Health = _group(Health)
    os: Os = _group(Os)
    disruption: Disruption = _group(Disruption)
    rpm_ostree: RpmOstree = _group(RpmOstree)
    limits: Limits = _group(Limits)
    loop: Loop = _group(Loop)

    @property
    def scripts(self) -> tuple[Path, ...]:
        """The directories of the health scripts."""
        return tuple(Path(folder) for folder in self.health.scripts_directories)


def load(path: str = PATH) -> Settings:
    """Read the settings file; the defaults when there is none at the default place.

    Raises Broken with file, line and key for everything that is wrong, and for a file that somebody other than root (or
    who runs this) could have written: it names programs that run as root.
    """
    try:
        text = textfile.read(path, _MAX_BYTES)
    except FileNotFoundError as error:
        if path != PATH or os.path.lexists(path):
            raise Broken(f"cannot read the settings {path}: no such file", "repair the link or the name") from error
        return Settings()
    return parse(text, path)


def parse(text: str, where: str) -> Settings:
    """Settings from YAML text; `where` names it in errors. Raises Broken."""
    try:
        documents = read_yaml(text)
    except Malformed as error:
        raise Broken(f"cannot use {where}: {error}") from error
    if len(documents) > 1:
        raise Broken(f"cannot use {where}: line {documents[1].line('')}: expected one document, found more")
    document = documents[0] if documents else Document({}, {})
    settings: Settings = _Reader(document, where).group(Settings, document.data, "", "")
    if settings.hold.retry_max_seconds < settings.hold.retry_min_seconds:
        raise Broken(f"cannot use {where}: hold.retry_max_seconds: less than hold.retry_min_seconds")
    return settings


class _Reader:
    """Turns the data of one document into settings, and knows where everything stands."""

    def __init__(self, document: Document, where: str) -> None:
        self._document = document
        self._where = where

    def group(self, kind: type, value: object, name: str, at: str) -> Any:
        if value is None:
            return kind()
        known = {entry.name: entry for entry in dataclasses.fields(kind)}
        if not isinstance(value, Mapping):
            raise self._wrong(at, name, f"a mapping with {', '.join(known)}", value)
        types = get_type_hints(kind)
        found: dict[str, Any] = {}
        for key, inner in value.items():
            below, full = pointer(at, key), f"{name}.{key}" if name else str(key)
            if key not in known:
                raise self._refusal(below, full, "unknown key", f"known here are {', '.join(known)}")
            if dataclasses.is_dataclass(types[key]):
                found[key] = self.group(types[key], inner, full, below)
            elif inner is not None:
                found[key] = self._value(known[key], types[key], inner, full, below)
        return kind(**found)

    def _value(self, entry: Any, kind: Any, value: object, name: str, at: str) -> object:
        expected, least = entry.metadata["kind"], entry.metadata["least"]
        if kind in (int, float):
            return self._number(kind, value, expected, least, name, at)
        if kind is str:
            if not isinstance(value, str) or not _text_fits(value, expected):
                raise self._wrong(at, name, expected, value)
            return value
        if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
            raise self._wrong(at, name, expected, value)
        for index, item in enumerate(value):
            if not _item_fits(item, index, expected):
                raise self._wrong(pointer(at, index), f"{name}[{index}]", _ITEM[expected], item)
        return tuple(value)

    def _number(self, kind: Any, value: object, expected: str, least: float, name: str, at: str) -> object:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise self._wrong(at, name, expected, value)
        if kind is int and not isinstance(value, int):
            raise self._wrong(at, name, expected, value)
        if value < least:
            raise self._wrong(at, name, f"{expected}, at least {least:g}", value)
        return kind(value)

    def _wrong(self, at: str, name: str, expected: str, value: object) -> Broken:
        shown = {True: "true", False: "false"}.get(value) if isinstance(value, bool) else None
        if shown is None:
            shown = f'"{value[:80]}"' if isinstance(value, str) else str(value)[:80]
        if isinstance(value, (list, dict)):
            shown = "a list" if isinstance(value, list) else "a mapping"
        return self._refusal(at, name, f"expected {expected}, found {shown}")

    def _refusal(self, at: str, name: str, problem: str, hint: str = "") -> Broken:
        line = self._document.line(at)
        place = f"{self._where}: line {line}" if line else self._where
        return Broken(f"cannot use {place}: {name + ': ' if name else ''}{problem}", hint)


_ITEM = {
    "a list of a program and its arguments": "the absolute path of a program",
    "a list of unit names": "the full name of a systemd unit",
    "a list of absolute paths": "an absolute path",
}


def _text_fits(text: str, expected: str) -> bool:
    if not text:
        return "empty text" in expected
    if "\0" in text:
        return False
    if expected.startswith("an absolute path"):
        return text.startswith("/") and ".." not in text.split("/")
    if expected.startswith("the name of a "):
        return bool(_NAME.fullmatch(text))
    if expected.startswith("an http:// URL"):
        return bool(_URL.fullmatch(text))
    if expected.startswith("HOST:PORT"):
        match = _LISTEN.fullmatch(text)
        return bool(match) and int(match.group("port")) <= 65535 if match else False
    return text in expected.split(" or ")


def _item_fits(item: str, index: int, expected: str) -> bool:
    if "\0" in item:
        return False
    if expected == "a list of unit names":
        return bool(_UNIT.fullmatch(item))
    if expected == "a list of absolute paths":
        return _text_fits(item, "an absolute path")
    # Only the program has to be absolute: what PATH is for a service is nothing to rely on.
    return index > 0 or item.startswith("/")
