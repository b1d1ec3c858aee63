"""Fixtures of the field tests: one registry and its images for all of them, a node of its own for each."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import pytest

from tests.field.archive import compiled
from tests.field.evidence import ARCHIVE, OLD, settle
from tests.stand import images
from tests.stand.images import Image, extensions_image
from tests.stand.incidents import GATED, usbguard
from tests.stand.node import PROJECT, Node, base_image
from tests.stand.registry import Registry


class FieldNode(Node):
    """A node whose agent starts faster; see `archive`."""

    def _install_agent(self, settings: str) -> None:
        super()._install_agent(settings)
        built = PROJECT / "dist/mcdaemon.pyz"
        self.machine.write(ARCHIVE, compiled(built, built.stat().st_mtime_ns), 0o755)


class MakeNode(Protocol):
    """Boots a node; arguments as for `Node`, but with the base image and a gated drain as defaults."""

    def __call__(self, image: str = "", **options: Any) -> Node: ...


@pytest.fixture(scope="session")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    with Registry(tmp_path_factory.mktemp("registry")) as running:
        yield running


class Push(Protocol):
    """Pushes an image as "os:v2"; returns its reference by digest."""

    def __call__(self, image: Image, name: str) -> str: ...


@pytest.fixture(scope="session")
def push(registry: Registry) -> Push:
    def pushed(image: Image, name: str) -> str:
        digest = images.push(image, f"{registry.host}/{name}")
        return f"{registry.host}/{name.partition(':')[0]}@{digest}"

    return pushed


@pytest.fixture(scope="session")
def base(push: Push) -> str:
    """The OS that every node is installed with, by digest."""
    return push(base_image(), "os:v1")


@pytest.fixture(scope="session")
def extensions(push: Push, tmp_path_factory: pytest.TempPathFactory) -> str:
    """An extensions image with usbguard in it, by digest."""
    return push(extensions_image([usbguard(tmp_path_factory.mktemp("packages"))]), "extensions:v1")


@pytest.fixture
def make_node(tmp_path: Path, base: str) -> Iterator[MakeNode]:
    """Boot nodes; all are closed and their disks removed at the end, whatever happens."""
    nodes: list[Node] = []

    def make(image: str = "", **options: Any) -> Node:
        options.setdefault("settings", GATED)
        node = FieldNode(tmp_path / f"node-{len(nodes)}", image or base, **options)
        nodes.append(node)
        return node

    yield make
    for node in nodes:
        node.close()
        shutil.rmtree(node.machine.folder, ignore_errors=True)


@pytest.fixture
def node(make_node: MakeNode) -> Node:
    """A freshly installed node that no config was applied to yet; its drain is shut until the gate is opened."""
    return make_node()


class Aged(Protocol):
    """Boots a node that rests on a config since an earlier boot; `settings` as for `Node`."""

    def __call__(self, config: str, settings: str = GATED) -> Node: ...


class Copy(Node):
    """A node from a copy of another one's disk."""

    def __init__(self, disk: Path, folder: Path, settings: str) -> None:
        self._make_folder(folder)
        # One `cp` for all of it, so that files that are one in repository and deployments stay one.
        subprocess.run(["cp", "-a", str(disk / "sysroot"), str(folder)], check=True, timeout=60)
        super().__init__(folder, "", settings=settings)

    def _make_folder(self, folder: Path) -> None:
        folder.mkdir()

    def _install_os(self, image: str, kargs: Sequence[str], transport: str) -> None:
        """It is on the disk."""

    def _install_agent(self, settings: str) -> None:
        self.machine.write("/etc/mcdaemon/mcdaemon.yaml", settings)


@pytest.fixture(scope="session")
def disks(tmp_path_factory: pytest.TempPathFactory, base: str) -> Iterator[Callable[[str], Path]]:
    """The disk of a node that was brought to a config and switched off; made once for each config."""
    made: dict[str, Node] = {}

    def disk(config: str) -> Path:
        if config not in made:
            with contextlib.ExitStack() as stack:
                node = stack.enter_context(FieldNode(tmp_path_factory.mktemp("disk"), base, settings=GATED))
                settle(node, first=config)
                node.machine.power_cut()
                stack.pop_all()
            made[config] = node
        return made[config].machine.folder

    yield disk
    for node in made.values():
        node.close()


@pytest.fixture
def aged(tmp_path: Path, disks: Callable[[str], Path]) -> Iterator[Aged]:
    nodes: list[Node] = []

    def boot(config: str, settings: str = GATED) -> Node:
        node = Copy(disks(config), tmp_path / f"aged-{len(nodes)}", settings)
        nodes.append(node)
        return node

    yield boot
    for node in nodes:
        node.close()
        shutil.rmtree(node.machine.folder, ignore_errors=True)


@pytest.fixture
def old(aged: Aged) -> Node:
    """A node that rests on OLD."""
    return aged(OLD)
