"""The disk of a node without the node: the real steps and the real recovery on plain directories.

`Offline` is the node at one moment: which deployment runs, and everything of the agent that only needs files. What
ostree, rpm-ostree, systemd and podman do is left out or done by three lines; the tests on the stand have them.

    python -m tests.crash.offline STORY FOLDER [FAULT]

takes the steps of a story in a folder that `lay_out` has made; it leaves a mark where a power cut begins to mean
something else. A fault takes a sync away, for the proof that its absence is found.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Optional, cast
from unittest import mock

from mcdaemon import perform
from mcdaemon.context import Context
from mcdaemon.decide import Decision, Observation, Step
from mcdaemon.desired import Desired
from mcdaemon.errors import Broken
from mcdaemon.host import files
from mcdaemon.host.bus import Systemd
from mcdaemon.host.deployments import Machine, StagedDeployment
from mcdaemon.host.files import Node
from mcdaemon.host.root import Root
from mcdaemon.host.versions import Versions
from mcdaemon.machineconfig import disruption
from mcdaemon.machineconfig.diff import diff
from mcdaemon.machineconfig.extensions import PackageDelta
from mcdaemon.machineconfig.model import MachineConfig
from mcdaemon.observe import Facts
from mcdaemon.plan import Plan
from mcdaemon.settings import Settings
from mcdaemon.update import commit, early, journal, payload, rollback, stage
from mcdaemon.update.journal import Journal, Update
from mcdaemon.update.payload import Shelf
from tests.crash.recording import mark
from tests.unit.configs import config, core, file

OLD, NEW = "0" * 63 + "1.0", "0" * 63 + "2.0"
UPDATE = "u1"
BOOT_ID = "11111111-2222-4333-8444-555555555555"
_OSNAME = "os"
_STATE = "/var/lib/mcdaemon"
_PASSWD = "root:x:0:0:root:/root:/bin/sh\ncore:x:1000:1000:core:/home/core:/bin/sh\n"
_UNIT = "[Service]\nExecStart=/bin/true\n[Install]\nWantedBy=multi-user.target\n"

OLD_CONFIG = config(
    "50-old",
    files=[
        file("/etc/app.conf", b"old content\n"),
        file("/etc/only-old", b"only old\n"),
        file("/etc/turn", b"a file in the old config\n"),
        file("/usr/local/bin/tool", b"#!/bin/sh\nold\n", mode=0o755),
    ],
    units=[{"name": "work.service", "contents": _UNIT, "enabled": True}],
    users=[core("ssh-ed25519 OLD", passwordHash="$6$old")],
)
NEW_CONFIG = config(
    "50-new",
    files=[
        file("/etc/app.conf", b"new content, which is longer\n", mode=0o600),
        file("/etc/turn/inside", b"a directory in the new config\n"),
        file("/usr/local/bin/tool", b"#!/bin/sh\nnew\n", mode=0o750),
        file("/usr/local/share/deep/only-new", b"only new\n"),
    ],
    units=[{"name": "work.service", "contents": _UNIT + "# new\n", "enabled": True}],
    users=[core("ssh-ed25519 NEW", passwordHash="$6$new")],
)


def var(top: Path) -> Path:
    """Where the /var of all deployments is."""
    return top / "sysroot/ostree/deploy" / _OSNAME / "var"


def lay_out(top: Path) -> None:
    """A node that rests on the old config; the new deployment is as ostree's merge leaves it, without the new files."""
    (top / "run").mkdir()
    (top / "proc/sys/kernel/random").mkdir(parents=True)
    (top / "proc/sys/kernel/random/boot_id").write_text(BOOT_ID)
    stateroot = var(top).parent
    old = stateroot / "deploy" / OLD
    for name in ("usrlocal/bin", "usrlocal/share", "home/core", "roothome", "lib/mcdaemon"):
        (var(top) / name).mkdir(parents=True, exist_ok=True)
    (var(top) / "lib/mcdaemon").chmod(0o700)
    os.chown(var(top) / "home/core", 1000, 1000)
    for name in ("etc/systemd/system", "usr/etc", "usr/lib/systemd/system", "usr/bin", "var"):
        (old / name).mkdir(parents=True)
    for link, target in (("home", "var/home"), ("root", "var/roothome"), ("usr/local", "../var/usrlocal")):
        (old / link).symlink_to(target)
    (old / "etc/passwd").write_text(_PASSWD)
    (old / "etc/group").write_text("root:x:0:\ncore:x:1000:\n")
    (old / "etc/shadow").write_text("root:*:1::::::\ncore:*:1::::::\n")
    node = Offline(top, OLD)
    shelf = Shelf(top / "shelf")
    load, items = payload.build("first", OLD_CONFIG, None, node.root, node.root)
    shelf.save(load, items)
    commit.apply(load, shelf, node.root)
    shutil.rmtree(shelf.folder)
    shutil.copytree(old, stateroot / "deploy" / NEW, symlinks=True)


class _OfflineMachine(Machine):
    """Deployments by name; what is booted and pending is said, not found."""

    running = OLD
    waiting = ""

    def booted(self) -> tuple[str, str]:
        return _OSNAME, self.running

    def pending(self) -> str:
        return self.waiting

    def options_of(self, name: str) -> str:
        return ""

    def origin_of(self, name: str) -> str:
        return ""

    def staged(self) -> Optional[StagedDeployment]:
        return None if self.waiting else StagedDeployment(NEW, _OSNAME, "", (), locked=True)

    def unlock(self) -> None:
        pass

    def finalize(self, systemd: Systemd, name: str) -> None:
        object.__setattr__(self, "waiting", NEW)
        mark("pending")


class _Others:
    """Everybody else: systemd, logind, rpm-ostree, podman. They do nothing, and that well."""

    def __init__(self, cleanup: Callable[[], None]) -> None:
        self.failures = 0
        self._cleanup = cleanup

    def __getattr__(self, name: str) -> Callable[..., object]:
        return lambda *_arguments: None

    def release_unknown(self, _known: set[str]) -> list[str]:
        return []

    def verdict(self, _kind: str) -> list[str]:
        return []

    def active_states(self, units: Sequence[str]) -> dict[str, str]:
        return dict.fromkeys(units, "inactive")

    def cleanup(self, _what: str) -> None:
        self._cleanup()

    def reload(self) -> None:
        if self.failures:
            self.failures -= 1
            raise Broken("cannot reload")


class Offline:
    """The node in `top` with the deployment `booted` running."""

    def __init__(self, top: Path, booted: str) -> None:
        self.machine = _OfflineMachine(top)
        object.__setattr__(self.machine, "running", booted)
        self.root = self.machine.root_of(booted)
        state = self.root.locate(_STATE)
        self.payloads, self.undo = Shelf(state / "payload"), Shelf(state / "undo")
        self.journal = state / "journal.json"
        self._others = nobody = _Others(self._cleanup)
        self._context = cast(
            Context,
            SimpleNamespace(
                settings=Settings(state_dir=_STATE), machine=self.machine, root=self.root, bus=nobody,
                systemd=nobody, logind=nobody, rpmostree=nobody, source=nobody, images=nobody, payloads=self.payloads,
                undo=self.undo, policy=disruption.DEFAULT, runtime=top / "run", journal=self.journal,
                retry=state / "retry", scripts=nobody, etc_at_merge=top / "run/etc-at-merge.json",
                probe=SimpleNamespace(versions=lambda _booted: Versions(ostree=(2025, 1))),
            ),
        )  # fmt: skip
        self.performer = perform.Performer(self._context)

    def record(self) -> Journal:
        """The journal. Raises AssertionError when it cannot be used."""
        record, alien = journal.load(self.journal)
        assert not alien, alien
        return record

    def begin(self, live: bool) -> None:
        """Write down the update, as the step that stages does."""
        update = Update(UPDATE, NEW_CONFIG.identity, NEW_CONFIG.name, OLD, OLD_CONFIG.name, live=live, attempt=1)
        journal.store(self.journal, Journal(update))

    def take(self, step: Step, why: str = "", remember: bool = False) -> None:
        """One step, as the loop takes it."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.object(stage, "verify"))
            stack.enter_context(mock.patch.object(rollback, "to_source", lambda *_: mark("source")))
            self.performer.perform(Decision(step, why or step.value, remember=remember), self._facts())

    def services_fail(self) -> None:
        """The next change is one that systemd does not take."""
        self._others.failures = 1

    def early(self) -> early.Outcome:
        """What the early unit does in this boot."""
        return early.run(self.machine, self.root, self.journal, self.payloads, self.undo)

    def _facts(self) -> Facts:
        record, _alien = journal.load(self.journal)
        difference = diff(OLD_CONFIG, NEW_CONFIG)
        return Facts(
            Desired(NEW_CONFIG), OLD_CONFIG, record, self.machine.running, BOOT_ID, Observation("new", "old"), "",
            plan=Plan("", "", PackageDelta(), (), (), (disruption.NONE,), difference),
            staged=StagedDeployment(NEW, _OSNAME, "", (), True) if not self.machine.waiting else None,
            pending=self.machine.waiting,
        )  # fmt: skip

    def _cleanup(self) -> None:
        object.__setattr__(self.machine, "waiting", "")
        mark("source")


# -- what a root has to be --------------------------------------------------------------------------------------------


@functools.cache
def nodes(load: MachineConfig) -> Mapping[str, Node]:
    """Every path that either config manages, as `load` wants it, shadow aside."""
    with tempfile.TemporaryDirectory() as scratch:
        lay_out(Path(scratch))
        root = Offline(Path(scratch), OLD).root
        return _nodes(load, root)


def _nodes(load: MachineConfig, root: Root) -> Mapping[str, Node]:
    other = NEW_CONFIG if load is OLD_CONFIG else OLD_CONFIG
    built, _items = payload.build("x", load, other, root, root)
    return {path: expected.node for path, expected in built.expected().items()}


# -- the stories ------------------------------------------------------------------------------------------------------


def _arrive(top: Path) -> Offline:
    """Up to the reboot, and the first look of the early unit at the target."""
    node = _committed(top)
    for step in (Step.VERIFY_ROOT, Step.REBOOT):
        node.take(step)
    mark("target")
    node = Offline(top, NEW)
    node.early()
    node.performer.sweep()
    return node


def _committed(top: Path) -> Offline:
    node = Offline(top, OLD)
    node.begin(live=False)
    for step in (Step.VERIFY_STAGED, Step.DRAIN, Step.FINALIZE, Step.COMMIT_FILES):
        node.take(step)
    return node


def _update(top: Path) -> None:
    _arrive(top).take(Step.CONFIRM)


def _withdrawn(top: Path) -> None:
    node = _committed(top)
    node.take(Step.DISCARD, "another config is desired now")


def _rolled_back(top: Path) -> None:
    _arrive(top).take(Step.ROLL_BACK, "not healthy", remember=True)
    node = Offline(top, OLD)
    node.early()
    node.performer.sweep()
    node.take(Step.DISCARD, "back on the previous deployment", remember=True)


def _completed_early(top: Path) -> None:
    """The power was cut right after the finalization."""
    node = Offline(top, OLD)
    node.begin(live=False)
    for step in (Step.VERIFY_STAGED, Step.DRAIN, Step.FINALIZE):
        node.take(step)
    mark("target")
    for _boot in range(2):
        node = Offline(top, NEW)
        node.early()
    node.performer.sweep()
    node.take(Step.CONFIRM)


def _live(top: Path) -> None:
    node = Offline(top, OLD)
    node.begin(live=True)
    node.take(Step.APPLY_LIVE)
    node.take(Step.CONFIRM)


def _live_taken_back(top: Path) -> None:
    node = Offline(top, OLD)
    node.begin(live=True)
    node.services_fail()
    with contextlib.suppress(Broken):
        node.take(Step.APPLY_LIVE)
    node.take(Step.DISCARD, "a service did not take it", remember=True)


STORIES: Mapping[str, Callable[[Path], None]] = {
    "update": _update,
    "withdrawn": _withdrawn,
    "rolled-back": _rolled_back,
    "completed-early": _completed_early,
    "live": _live,
    "live-taken-back": _live_taken_back,
}

# -- faults -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _without_sync_of(wanted: Callable[[int], bool]) -> Iterator[None]:
    real = os.fsync

    def fsync(descriptor: int) -> None:
        if not wanted(os.fstat(descriptor).st_mode):
            real(descriptor)

    with mock.patch.object(os, "fsync", fsync):
        yield


def _rename_in_place(source: str, target: str, src_dir_fd: int, dst_dir_fd: int) -> None:
    """What a program does that writes a file without a temporary: the last content is right, the way to it is not."""
    old = Path(os.readlink(f"/proc/self/fd/{src_dir_fd}"), source)
    new = Path(os.readlink(f"/proc/self/fd/{dst_dir_fd}"), target)
    if old.is_symlink():
        new.symlink_to(os.readlink(old))
    else:
        new.write_bytes(old.read_bytes())
        os.chown(new, old.stat().st_uid, old.stat().st_gid)
        new.chmod(stat.S_IMODE(old.stat().st_mode))
    old.unlink()


FAULTS: Mapping[str, Callable[[], Any]] = {
    "no-file-sync": lambda: _without_sync_of(stat.S_ISREG),
    "no-directory-sync": lambda: _without_sync_of(stat.S_ISDIR),
    "no-tree-sync": lambda: mock.patch.object(files, "_sync_once", lambda descriptor, _synced: os.close(descriptor)),
    "in-place": lambda: mock.patch.object(os, "rename", _rename_in_place),
}


def main(story: str, top: str, fault: str = "") -> None:
    """The program; see the top of this file."""
    logging.disable()
    os.umask(0o022)
    real = journal.store

    def store(path: Path, record: Journal) -> None:
        real(path, record)
        mark("stored")

    with FAULTS[fault]() if fault else contextlib.nullcontext(), mock.patch.object(journal, "store", store):
        STORIES[story](Path(top))


if __name__ == "__main__":
    main(*sys.argv[1:])
