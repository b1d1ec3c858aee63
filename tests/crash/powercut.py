"""A power cut that really loses what was not synced: a node on a disk of its own, copied at a call of its agent.

The agent runs traced (see `tracer`); at a stop nothing of it moves, and the disk's image is copied as it is. The node
goes on. Each copy is a disk after a power cut at that moment: another node boots from it, and is looked at when it
rests.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable

from mcdaemon.update import journal
from tests.crash import picture
from tests.crash.killing import Variant, to_rest
from tests.crash.scenarios import LIVE_FILES, NEW_FILES, OLD_FILES, UNITS, Ground, Scenario
from tests.crash.tracer import Action, Stop, trace
from tests.field.evidence import status
from tests.stand.configs import FileText
from tests.stand.disk import GIB, Disk
from tests.stand.machine import Down
from tests.stand.node import Node

SIZE = 4 * GIB
_ROUNDS = 12


class OnDisk(Node):
    """A node whose /sysroot is the file system in `image`, booted."""

    def __init__(self, image: Path, folder: Path) -> None:
        self.disk = Disk(image, folder / "sysroot")
        self.disk.mount()
        try:
            super().__init__(folder, "", own_disk=True)
        except BaseException:
            self.disk.unmount()
            raise

    def _install_os(self, image: str, kargs: object, transport: str) -> None:
        """It is on the disk."""
        self.machine.units.update(UNITS)

    def _install_agent(self, settings: str) -> None:
        """So is the agent."""

    def follow_reboot(self, timeout: float = 60.0) -> None:
        """As Node's; whoever goes down in an orderly way has unmounted its disks, and so has synced them."""
        how = self.machine.wait_down(timeout)
        if how is not Down.REBOOT:
            raise AssertionError(f"the node went down by {how.value} instead of a reboot")
        self.disk.sync()
        self.boots += self.machine.boot(timeout)

    def close(self) -> None:
        super().close()
        self.disk.unmount()

    def __enter__(self) -> OnDisk:
        return self

    def rests(self) -> bool:
        """Nothing is left to do; a reboot that was asked for is followed before."""
        if any(call["method"] in ("Reboot", "RebootWithFlags") for call in self.machine.calls()):
            self.follow_reboot()
            return False
        found = status(self)
        return found["step"] in ("rest", "reject") or (found["step"] == "hold" and found["state"] == "Degraded")


@dataclass
class Ready:
    """A scenario with its disk as an image, and what a node is at rest: on the old config, and on the new one.

    `returned`: on the old one again, after the new one was confirmed.
    """

    scenario: Scenario
    ground: Ground
    image: Path
    withdrawn: picture.Picture = field(default_factory=dict)
    target: picture.Picture = field(default_factory=dict)

    @functools.cached_property
    def returned(self) -> picture.Picture:
        with self.node(self.image.with_name(f"{self.image.stem}-returned")) as node:
            for config in (self.scenario.desired, self.scenario.instead):
                node.desire(first=config(self.ground))
                to_rest(node)
            return picture.picture(node)

    @contextlib.contextmanager
    def node(self, folder: Path) -> Iterator[OnDisk]:
        """A node from a copy of the image, up, where the run begins."""
        folder.mkdir()
        try:
            subprocess.run(["cp", "--sparse=auto", str(self.image), f"{folder}/disk.img"], check=True, timeout=60)
            with OnDisk(folder / "disk.img", folder) as node:
                self.scenario.more(self.ground, node)
                self.scenario.begin(self.ground, node)
                yield node
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def make_image(disk: Path) -> Path:
    """The disk of a scenario as an image, all of it synced."""
    image = disk.with_name(f"{disk.name}.img")
    mounted = disk.with_name(f"{disk.name}.mnt")
    with Disk(image, mounted, size=SIZE) as made:
        subprocess.run(["cp", "-a", f"{disk}/sysroot/.", str(mounted)], check=True, timeout=60)
        made.sync()
    mounted.rmdir()
    return image


@dataclass(frozen=True)
class Cut:
    """A disk as a power cut has left it, and the call before which that was."""

    image: Path
    stop: Stop
    number: int

    def __str__(self) -> str:
        return f"{self.number} ({self.stop.program}: {self.stop.call} {self.stop.path})"


@dataclass
class Run:
    """A run of the agent with the power cuts that were made on its way.

    `stops`: calls before which the disk was looked at; `disks`: how often it was another one than before.
    """

    scenario: str
    stops: int = 0
    disks: int = 0
    cuts: list[Cut] = field(default_factory=list)
    said: str = ""

    def share(self, index: int, count: int) -> Cut:
        """The cut in the middle of one of `count` equal parts of the way."""
        return self.cuts[(2 * index + 1) * len(self.cuts) // (2 * count)]


def run_with_cuts(ready: Ready, most: int) -> Run:
    """Let the agent go all the way, and keep each disk that a power cut at one of its calls would leave.

    When they are more than `most`, every other one goes, and only each second one is kept from there on, and so on.
    """
    run = Run(ready.scenario.name)
    folder = ready.image.with_name(f"cuts-{ready.scenario.name}")
    with ready.node(folder) as node:
        to_rest(node)
        ready.withdrawn = picture.picture(node)
        node.desire(first=ready.scenario.desired(ready.ground))
        node.disk.sync()
        last, stride = node.disk.writes(), 1

        def at_stop(stop: Stop) -> Action:
            nonlocal last, stride
            run.stops += 1
            now = node.disk.writes()
            if now is not None and now == last:
                return Action.GO
            run.disks += 1
            last = now
            if run.disks % stride == 0:
                target = ready.image.with_name(f"{folder.name}-{run.stops}.img")
                run.cuts.append(Cut(node.disk.snapshot(target), stop, run.stops))
                last = node.disk.writes()
            if len(run.cuts) > most:
                for cut in run.cuts[::2]:
                    cut.image.unlink()
                run.cuts, stride = run.cuts[1::2], 2 * stride
            return Action.GO

        for _round in range(_ROUNDS):
            run.said += _traced(node, at_stop)
            if node.rests():
                ready.target = picture.picture(node)
                return run
    raise AssertionError(f"no rest after {_ROUNDS} rounds:\n{run.said}")


def _traced(node: Node, at_stop: Callable[[Stop], Action]) -> str:
    """One run of the agent under the tracer; what it said."""
    argv, environment = node.machine.entering(["mcdaemon", "run", "--once"])
    reader, writer = os.pipe()
    said: list[bytes] = []
    with open(reader, "rb") as stream:
        collector = threading.Thread(target=lambda: said.append(stream.read()))
        collector.start()
        try:
            trace(argv, at_stop, environment, writer, writer, syncs=True)
        finally:
            os.close(writer)
            collector.join()
    return b"".join(said).decode(errors="replace")


# -- what a power cut has left ----------------------------------------------------------------------------------------


def torn(cut: Cut) -> list[str]:
    """What can be said of a cut without booting it: the file system is sound, the journal can be read, and each file of
    the configs is the old one, the new one, or not there."""
    disk = Disk(cut.image, cut.image.with_suffix(".mnt"))
    unsound = disk.check()
    try:
        with disk:
            found = list(_torn(disk.folder))
    finally:
        disk.folder.rmdir()
    return [f"{cut}: {problem}" for problem in [*found, *([unsound] if unsound else [])]]


def _torn(top: Path) -> Iterator[str]:
    (stateroot,) = (top / "ostree/deploy").iterdir()
    record = stateroot / "var/lib/mcdaemon/journal.json"
    try:
        journal.decode(record.read_bytes())
    except (OSError, ValueError) as error:
        yield f"the journal cannot be read: {error}"
    for path in sorted({*OLD_FILES, *NEW_FILES, *LIVE_FILES}):
        contents = {_content(files[path]) for files in (OLD_FILES, NEW_FILES, LIVE_FILES) if path in files}
        if path.startswith("/etc/"):
            places = list(stateroot.glob(f"deploy/*.*{path}"))
        else:
            places = [stateroot / "var" / path.replace("/usr/local/", "usrlocal/").replace("/var/", "")]
        for place in places:
            default = Path(str(place).replace("/etc/", "/usr/etc/", 1))
            if place.exists() and place.read_bytes() not in contents and not _same(place, default):
                yield f"{place.relative_to(stateroot)} is torn: {place.read_bytes()[:40]!r}"


def _same(one: Path, other: Path) -> bool:
    return other.exists() and one.read_bytes() == other.read_bytes()


def _content(text: FileText) -> bytes:
    return (text if isinstance(text, str) else text[0]).encode()


def problems_after(cut: Cut, ready: Ready, variant: Variant) -> list[str]:
    """Boot from what the power cut has left, go on until rest, and say what is not as it has to be. The cut stays."""
    folder = cut.image.with_suffix(f".{variant.value}")
    folder.mkdir()
    try:
        subprocess.run(["cp", "--sparse=auto", str(cut.image), f"{folder}/disk.img"], check=True, timeout=60)
        with OnDisk(folder / "disk.img", folder) as node:
            ready.scenario.begin(ready.ground, node)  # a service that it starts is started at each boot
            if variant is Variant.WITHDRAWN:
                node.desire(first=ready.scenario.instead(ready.ground))
            said = to_rest(node)
            found = list(_problems(node, ready, variant, said))
        unsound = node.disk.check()
        found += [unsound] if unsound else []
    except (AssertionError, RuntimeError, OSError) as error:
        found = [f"{type(error).__name__}: {error}"]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return [f"{cut}, {variant.value}: {problem}" for problem in found]


def _problems(node: OnDisk, ready: Ready, variant: Variant, said: str) -> Iterator[str]:
    wanted = ready.target
    if variant is Variant.WITHDRAWN:
        confirmed = any(line.startswith("confirm: ") for line in said.splitlines())
        wanted = ready.returned if confirmed else ready.withdrawn
    found = picture.picture(node)
    # Where a podman whose power was cut had put a layer; systemd-tmpfiles clears it.
    found = {place: what for place, what in found.items() if not place.startswith("/var/tmp/storage")}
    yield from picture.differences(found, wanted)
    state = node.machine.sysroot.stateroot / "var/lib/mcdaemon"
    yield from (f"the journal could not be used: {path.name}" for path in state.glob("*.alien-*"))
    early = node.machine.journal("mcdaemon-early.service")
    if "cannot" in early:
        yield f"the early unit: {early}"
    done = node.mcdaemon("validate", check=False)
    if done.returncode != 0:
        yield f"`mcdaemon validate` finds: {done.stdout}{done.stderr}"
