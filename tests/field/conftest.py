"""Fixtures of the field tests: one registry and its images for all of them, a node of its own for each."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

from tests.stand import images
from tests.stand.images import Image, extensions_image
from tests.stand.incidents import GATED, usbguard
from tests.stand.node import Node, base_image
from tests.stand.registry import Registry


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
        node = Node(tmp_path / f"node-{len(nodes)}", image or base, **options)
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
