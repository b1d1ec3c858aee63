"""A node's physical root without a node: deployments, boot entries, and mcdaemon's state at the moments of an update.

What mcdaemon writes is written by its own code, as in tests/crash/offline.py; OS and kernel are a few bytes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from mcdaemon.update import commit, journal, payload
from mcdaemon.update.journal import Confirmed, Journal, Update
from mcdaemon.update.payload import Payload
from tests.crash import offline
from tests.crash.offline import BOOT_ID, NEW, NEW_CONFIG, OLD, OLD_CONFIG, UPDATE, Offline

_KERNELS = {OLD: b"old kernel", NEW: b"new kernel"}
OSNAME = "os"


class NodeTree:
    """`sysroot` is what is on the disk's partition. Each method is one step of an update that takes the whole way."""

    def __init__(self, top: Path) -> None:
        """The tree that is in `top`, or the first one, at rest."""
        fresh = not top.exists()
        if fresh:
            top.mkdir(parents=True)
            offline.lay_out(top)
        self.top = top
        self.sysroot = top / "sysroot"
        self._node = Offline(top, OLD)
        self._new = self._node.machine.root_of(NEW)
        begun = Update(UPDATE, NEW_CONFIG.identity, NEW_CONFIG.name, OLD, OLD_CONFIG.name, attempt=1)
        self._update = self._node.record().update or begun
        if fresh:
            self._make_bootable()

    def _make_bootable(self) -> None:
        repo = str(self.sysroot / "ostree/repo")
        subprocess.run(["ostree", "init", f"--repo={repo}", "--mode=bare"], check=True, timeout=60)
        for name, kernel in _KERNELS.items():
            (self.deployment(name) / "usr/lib/modules").mkdir(parents=True, exist_ok=True)
            (self.deployment(name) / "usr/lib/modules/vmlinuz").write_bytes(kernel)
            self.deployment(name).with_name(f"{name}.origin").write_text("[origin]\n")
            place = self.kernel(name).parent
            place.mkdir(parents=True, exist_ok=True)
            self.kernel(name).write_bytes(kernel)
            (place / "initramfs").write_bytes(b"initramfs")
        self.new_default(OLD)

    def copy(self, top: Path) -> NodeTree:
        """Another one in `top`, as far as this one."""
        # With owners.
        subprocess.run(["cp", "--archive", str(self.top), str(top)], check=True, timeout=60)
        return NodeTree(top)

    def deployment(self, name: str) -> Path:
        return self.sysroot / "ostree/deploy" / OSNAME / "deploy" / name

    @property
    def state(self) -> Path:
        return self._node.journal.parent

    def kernel(self, name: str) -> Path:
        return self.sysroot / f"boot/ostree/os-{_bootcsum(name)}/vmlinuz"

    def new_default(self, *names: str) -> None:
        """Entries for these, the first is the default; the links that they name are made anew."""
        entries = self.sysroot / "boot/loader/entries"
        for folder in (entries, self.sysroot / "ostree/boot.0"):
            shutil.rmtree(folder, ignore_errors=True)
        entries.mkdir(parents=True)
        for number, name in enumerate(names):
            link = self.sysroot / f"ostree/boot.0/{OSNAME}/{_bootcsum(name)}/0"
            link.parent.mkdir(parents=True)
            link.symlink_to(f"../../../deploy/{OSNAME}/deploy/{name}")
            place = f"/boot/ostree/os-{_bootcsum(name)}"
            (entries / f"ostree-{number + 1}.conf").write_text(
                f"title Stand ({number})\nversion {len(names) - number}\n"
                f"options quiet ostree=/{link.relative_to(self.sysroot)}\n"
                f"linux {place}/vmlinuz\ninitrd {place}/initramfs\n"
            )

    def say(self, **changes: object) -> None:
        """The journal after these changes of the update."""
        self._update = dataclasses.replace(self._update, **changes)  # type: ignore[arg-type]  # names are Update's
        journal.store(self._node.journal, Journal(self._update))

    # -- the steps ----------------------------------------------------------------------------------------------------

    def rest(self) -> None:
        journal.store(self._node.journal, Journal())

    def verify(self) -> Payload:
        load, items = payload.build(UPDATE, NEW_CONFIG, OLD_CONFIG, self._node.root, self._new)
        self._node.payloads.save(load, items)
        self.say(staged=NEW)
        return load

    def finalize(self) -> None:
        self.say(drained=True, finalizing=BOOT_ID)
        self.new_default(NEW, OLD)

    def commit(self) -> None:
        load = self._node.payloads.load(UPDATE)
        assert load is not None
        commit.remember(load, self._node.undo, self._new, self._new.shared)
        commit.apply(load, self._node.payloads, self._new)
        self.say(committed=NEW)

    def prove(self) -> None:
        self.say(proved=NEW, armed=BOOT_ID)

    def confirm(self) -> None:
        confirmed = Confirmed(NEW_CONFIG.identity, NEW_CONFIG.name, NEW, 1)
        journal.store(self._node.journal, Journal(confirmed=confirmed))
        self._node.undo.drop(UPDATE)
        self._node.payloads.drop(UPDATE)


STEPS: Mapping[str, str] = {
    "rest": "no update",
    "verify": "verified",
    "finalize": "finalizing",
    "commit": "committed",
    "prove": "reboot asked for",
    "confirm": "confirmed",
}
"""The steps in their order, and what `diskstate` calls the progress after each."""


def up_to(top: Path, last: str) -> NodeTree:
    """The tree after the steps up to `last`."""
    tree = NodeTree(top)
    for step in STEPS:
        getattr(tree, step)()
        if step == last:
            return tree
    raise LookupError(last)


def _bootcsum(name: str) -> str:
    return hashlib.sha256(_KERNELS[name] + b"initramfs").hexdigest()
