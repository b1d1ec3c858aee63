"""The record of the update in flight: what was intended, tied to the deployment it was true of.

One file, replaced as a whole (temporary, fsync, rename, fsync of the directory), with a checksum over its content, so
that a torn or alien file is recognised. Such a file is kept aside and reported; it is never guessed at.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import stat
import time
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from mcdaemon.decide import Progress
from mcdaemon.errors import Broken, Failure, from_os_error
from mcdaemon.host import files

_FORMAT = 1
# A journal is a few hundred bytes; more than this is not ours.
_MAX_BYTES = 1 << 20


@dataclass(frozen=True)
class Update:
    """The update in flight.

    :ivar id: random, new for each update; part of the payload's path, of holds and of the kernel argument marker.
    :ivar desired: identity of the target config; `name` is for people.
    :ivar source: name of the deployment (checksum.serial) that was booted when the update began: the way back.
    :ivar digest: digest that the target's pullspec was settled to, "" when the base does not change; `image_digest` is
        the manifest for this platform below it (the same, but for an index); `origin` is what it is staged from.
    :ivar held: there may be a hold on the local copy; `no_storage`: staging from the local copy has failed, it does not
        count any more.
    :ivar attempt: number of stagings so far; part of every transaction's title, which makes each unique.
    :ivar draining: workloads may be away, from before the drain begins until they were let back; `drained`: they are.
    :ivar misses: how often in a row rpm-ostree reported success and had not staged what was asked for.
    :ivar staged: the staged deployment that was verified; `committed`/`proved`: the pending one that this was done to.
    :ivar armed: boot id in which the reboot was asked for, "" before.
    :ivar finalizing: boot id in which finalization was asked for, "" before; `finalizations`: how often it was.
    :ivar stamp: the trace of a failed finalization that was there before, "" for none: it is not ours.
    :ivar unfinalized: what libostree said when a shutdown could not finalize it; the early unit finds it.
    :ivar troubles: how often staging has failed for a reason that is not known to be the target's.
    :ivar repairs: how often the early unit had to complete the target's files.
    """

    id: str
    desired: str
    name: str
    source: str
    previous: str = ""
    live: bool = False
    digest: str = ""
    image_digest: str = ""
    origin: str = ""
    held: bool = False
    no_storage: bool = False
    attempt: int = 0
    misses: int = 0
    staged: str = ""
    draining: bool = False
    drained: bool = False
    finalizing: str = ""
    finalizations: int = 0
    stamp: str = ""
    unfinalized: str = ""
    troubles: int = 0
    committed: str = ""
    proved: str = ""
    applied: bool = False
    armed: str = ""
    repairs: int = 0
    rolled_back: bool = False
    failure: str = ""

    def progress(self, boot_id: str, staged: str, pending: str) -> Progress:
        """What of this record holds for the deployments that exist now."""
        return Progress(
            desired=self.desired,
            live=self.live,
            verified=bool(staged) and self.staged == staged,
            draining=self.draining or self.drained,
            drained=self.drained,
            committed=bool(pending) and self.committed == pending,
            proved=bool(pending) and self.proved == pending,
            applied=self.applied,
            rebooting=self.armed == boot_id,
            came_back=self._came_back(boot_id, pending),
            rolled_back=self.rolled_back,
            failure=self.failure,
        )

    def _came_back(self, boot_id: str, pending: str) -> bool:
        """Seen from the old root: this boot should have entered the target. The reboot was asked for, or what is the
        default was passed over, by a person in front of the boot menu or by a boot loader that counts its attempts; or
        it was left after it had been validated.
        """
        passed_over = bool(pending) and pending == self.staged and self.finalizing not in ("", boot_id)
        return self.armed not in ("", boot_id) or passed_over or self.applied


@dataclass(frozen=True)
class FailedTarget:
    """A target that was taken back; it is not tried again until another config is desired or `retry` is called.

    :ivar desired: identity of the config; `name` is for people.
    :ivar digest: of the OS image that it came with, "" when that did not change: a tag may name another one meanwhile.
    :ivar at: when it was given up, seconds since the epoch; 0 where an older agent did not say.
    """

    desired: str
    digest: str
    reason: str
    name: str = ""
    at: int = 0

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}" if self.name else self.reason

    @classmethod
    def of(cls, update: Update, reason: str) -> FailedTarget:
        """`update` is given up now."""
        return cls(update.desired, update.digest, reason, update.name, int(time.time()))


@dataclass(frozen=True)
class Confirmed:
    """What the last update that was kept has put in place.

    :ivar desired: identity of the config; `name` is for people. `deployment`: what was booted then.
        `desired` is "" once `retry` was asked for on an older deployment.
    :ivar at: when it was confirmed, seconds since the epoch.
    :ivar shared: the paths of its files outside /etc, which older deployments share; separated by NUL.
    """

    desired: str
    name: str
    deployment: str
    at: int = 0
    shared: str = ""

    def outside(self, booted: str) -> tuple[str, ...]:
        """Paths that hold files of this config though `booted`, an older deployment, may know nothing of them."""
        return tuple(self.shared.split("\0")) if self.shared and booted != self.deployment else ()


@dataclass(frozen=True)
class Journal:
    """All that the daemon remembers between two rounds.

    :ivar digest: digest of the image that the last confirmed update put in place ("" before the first one).
    """

    update: Optional[Update] = None
    failed: Optional[FailedTarget] = None
    digest: str = ""
    confirmed: Optional[Confirmed] = None


def _build(kind: type, data: Any, where: str) -> Any:
    """A flat dataclass from JSON; unknown, missing and wrongly typed members make the file alien."""
    if not isinstance(data, dict):
        raise ValueError(f"{where}: expected an object")
    hints = typing.get_type_hints(kind)
    for key, value in data.items():
        if key not in hints:
            raise ValueError(f"{where}/{key}: not a member of this format")
        if not isinstance(value, hints[key]) or (hints[key] is int and isinstance(value, bool)):
            raise ValueError(f"{where}/{key}: expected {hints[key].__name__}")
    try:
        return kind(**data)
    except TypeError as error:
        raise ValueError(f"{where}: {error}") from error


def decode(content: bytes) -> Journal:
    """The journal in `content`. Raises ValueError naming the place when it is torn or alien."""
    try:
        outer = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(outer, dict) or set(outer) != {"format", "sha256", "journal"}:
        raise ValueError("not a journal of mcdaemon")
    if outer["format"] != _FORMAT:
        raise ValueError(f"/format: {outer['format']!r} is not known to this version")
    inner = outer["journal"]
    if hashlib.sha256(_canonical(inner)).hexdigest() != outer["sha256"]:
        raise ValueError("/sha256: the content was changed or torn")
    required = {"update", "failed", "digest"}
    if not isinstance(inner, dict) or set(inner) - {"confirmed"} != required or type(inner["digest"]) is not str:
        raise ValueError("/journal: expected update, failed, digest and confirmed")
    confirmed = inner.get("confirmed")  # a journal from before there was one is ours, too
    return Journal(
        update=None if inner["update"] is None else _build(Update, inner["update"], "/journal/update"),
        failed=None if inner["failed"] is None else _build(FailedTarget, inner["failed"], "/journal/failed"),
        digest=inner["digest"],
        confirmed=None if confirmed is None else _build(Confirmed, confirmed, "/journal/confirmed"),
    )


def encode(journal: Journal) -> bytes:
    inner = dataclasses.asdict(journal)
    outer = {"format": _FORMAT, "sha256": hashlib.sha256(_canonical(inner)).hexdigest(), "journal": inner}
    return json.dumps(outer, indent=1, sort_keys=True).encode() + b"\n"


def _canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def store(path: Path, journal: Journal) -> None:
    """Replace the journal at `path`; on return it survives a power cut. Raises what `host.files` raises."""
    files.write_atomic(path, encode(journal))


def load(path: Path) -> tuple[Journal, str]:
    """The journal at `path` and, when it is not ours or torn, the sentence about that; it stays where it is."""
    try:
        content = _read(path)
    except FileNotFoundError:
        return Journal(), ""
    except OSError as error:
        raise from_os_error(error, "read the journal", path) from error
    try:
        if content is None:
            raise ValueError("it is not a regular file")
        if len(content) > _MAX_BYTES:
            raise ValueError(f"larger than {_MAX_BYTES} bytes")
        return decode(content), ""
    except ValueError as error:
        return Journal(), f"cannot use the journal {path}: {error}"


def out_of_service(path: Path) -> bool:
    """Whether workloads may be away from the node. A journal that cannot be read says nothing; others report it."""
    try:
        update = load(path)[0].update
    except Failure:
        return False
    return update is not None and (update.draining or update.drained)


def keep_aside(path: Path) -> Path:
    """Keep a journal that cannot be used for people to look at, and return where. It also stays in its place until
    another one is stored: without any, what was in flight would be swept as something that nobody knows."""
    aside = _aside(path)
    if not os.path.lexists(aside):
        files.keep_aside(path, aside)
    return aside


def _read(path: Path) -> Optional[bytes]:
    """At most one byte more than a journal can have; None where something else than a file stands."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return None
        with os.fdopen(descriptor, "rb", closefd=False) as stream:
            return stream.read(_MAX_BYTES + 1)
    finally:
        os.close(descriptor)


def _aside(path: Path) -> Path:
    """A name that is free, or was given to this very file by somebody who did not get further."""
    for number in range(1, 1000):
        aside = path.with_name(f"{path.name}.alien-{number}")
        if not os.path.lexists(aside) or os.path.samestat(os.lstat(aside), os.lstat(path)):
            return aside
    raise Broken(
        f"cannot keep the journal {path} aside: too many of them are kept already",
        f"look at {path}.alien-* and remove them",
    )
