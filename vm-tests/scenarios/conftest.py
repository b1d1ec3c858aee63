"""What every scenario starts with: a registry on the host, a node at rest, and a folder for what a failure leaves."""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Optional, Protocol

import pytest
from vmlab import image, node, osimage, tally
from vmlab.broken import DAMAGES
from vmlab.guest import FOLDER, Guest
from vmlab.image import Built
from vmlab.node import VmNode

from tests.stand import images
from tests.stand.images import Image, extensions_image
from tests.stand.incidents import usbguard
from tests.stand.registry import Registry

TIME_LIMIT = 1500
"""Seconds for one scenario, on a machine that is several times slower than a quiet one."""

HOST = "10.0.2.2"
"""The host as a machine sees it."""

_FAILED = FOLDER / "failed"
_COUNTS = FOLDER / "counts.jsonl"
_GUESTS: pytest.StashKey[list[Guest]] = pytest.StashKey()
_BEGIN: pytest.StashKey[float] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--broken", default="", choices=["", *sorted(DAMAGES)], help="a daemon that must be found broken")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_BEGIN] = time.monotonic()
    if not hasattr(config, "workerinput"):
        _COUNTS.unlink(missing_ok=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(pytest.mark.vm)
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TIME_LIMIT))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failure names the folder with what its machines have left."""
    report = yield
    guests = item.stash.get(_GUESTS, [])
    if report.failed and guests:
        folder = _FAILED / item.name.replace("/", "_")
        shutil.rmtree(folder, ignore_errors=True)
        for number, guest in enumerate(guests):
            guest.collect(folder / f"machine-{number}")
        report.sections.append(("virtual machine", f"serial logs, journals and states: {folder}"))
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    totals = tally.totals(_COUNTS)
    scenarios = sum(len(terminalreporter.getreports(how)) for how in ("passed", "failed"))
    told = ", ".join(f"{number} {what}" for what, (number, _seconds) in sorted(totals.items()))
    terminalreporter.section("virtual machines")
    terminalreporter.write_line(f"{scenarios} scenarios, {told}, {time.monotonic() - config.stash[_BEGIN]:.0f} s")


@pytest.fixture(scope="session")
def built() -> Built:
    """The disk that `make vm-image` has built."""
    return image.build()


@pytest.fixture(scope="session")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    with Registry(tmp_path_factory.mktemp("registry")) as running:
        yield running


class Record(Protocol):
    """pytest's `record_property`; what has the name "numbers" is shown at the end."""

    def __call__(self, name: str, value: object) -> None: ...


class Push(Protocol):
    """Pushes an image as "os:v2"; returns its reference by digest, as a machine names it."""

    def __call__(self, image: Image, name: str) -> str: ...


@pytest.fixture(scope="session")
def push(registry: Registry) -> Push:
    def pushed(image: Image, name: str) -> str:
        digest = images.push(image, f"{registry.host}/{name}")
        return f"{seen(registry)}/{name.partition(':')[0]}@{digest}"

    return pushed


def seen(registry: Registry) -> str:
    """The registry's host and port as a machine sees it."""
    return f"{HOST}:{registry.host.rpartition(':')[2]}"


@pytest.fixture(scope="session")
def base(push: Push) -> str:
    """The OS that every machine is installed with, by digest."""
    return push(osimage.base(), "os:v1")


@pytest.fixture(scope="session")
def extensions(push: Push, tmp_path_factory: pytest.TempPathFactory) -> str:
    """An extensions image with usbguard in it, by digest."""
    return push(extensions_image([usbguard(tmp_path_factory.mktemp("packages"))]), "extensions:v1")


class MakeNode(Protocol):
    """A node at rest on `config`, or without any; `write_log`: a file for the writes of its disk. The machine that went
    through the update to `config` is kept: that is done once for all scenarios."""

    def __call__(self, write_log: Optional[Path] = None, config: str = "") -> VmNode: ...


@pytest.fixture
def machines(request: pytest.FixtureRequest) -> Iterator[list[Guest]]:
    """The machines of this scenario: switched off at its end, and looked at when it failed."""
    guests: list[Guest] = []
    request.node.stash[_GUESTS] = guests
    yield guests
    for guest in guests:
        guest.close()
        shutil.rmtree(guest.folder, ignore_errors=True)


@pytest.fixture
def make_node(request: pytest.FixtureRequest, tmp_path: Path, built: Built, machines: list[Guest]) -> MakeNode:
    broken = str(request.config.getoption("--broken"))

    def prepare(guest: Guest) -> None:
        if broken:
            node.break_agent(guest, broken)
        node.prepare(guest)

    def plain(folder: Path, write_log: Optional[Path] = None) -> Guest:
        return Guest.at_rest(built, folder, FOLDER, f"node {node.VERSION} {broken}", prepare, write_log)

    def aged(folder: Path, config: str, write_log: Optional[Path]) -> Guest:
        def age(guest: Guest) -> None:
            young = VmNode(guest)
            young.desire(config)
            young.until()

        name = f"node {node.VERSION} {broken} {hashlib.sha256(config.encode()).hexdigest()}"
        return Guest.at_rest(built, folder, FOLDER, name, age, write_log, plain)

    def make(write_log: Optional[Path] = None, config: str = "") -> VmNode:
        folder = tmp_path / f"machine-{len(machines)}"
        guest = aged(folder, config, write_log) if config else plain(folder, write_log)
        machines.append(guest)
        return VmNode(guest)

    return make


@pytest.fixture
def node_at_rest(make_node: MakeNode) -> VmNode:
    """A node that is up, with the agent at rest and no config desired."""
    return make_node()
