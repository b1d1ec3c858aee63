"""Fixtures of the conformance suite.

With MCDAEMON_REAL_RPMOSTREED=1 the suite talks to the host's own rpm-ostreed over the system bus; tests that need a
node of the stand, because they change deployments, are then skipped with a reason.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.component.conformance import node as nodes
from tests.component.conformance import samples
from tests.component.conformance.client import RpmOstree
from tests.stand import images, packages
from tests.stand.introspection import Gio
from tests.stand.machine import Machine
from tests.stand.registry import Registry
from tests.stand.rpmostreed import FAULTS_FILE

REAL = os.environ.get("MCDAEMON_REAL_RPMOSTREED") == "1"
REPOSITORY = "/var/lib/repo"
REPO_FILE = f"[extensions]\nname=Extensions\nbaseurl=file://{REPOSITORY}\nenabled=1\n"


@dataclass
class Node:
    """A node of the stand, booted from ``samples.base()`` by digest out of a registry."""

    machine: Machine
    registry: Registry
    folder: Path
    client: RpmOstree = field(init=False)

    def __post_init__(self) -> None:
        self.client = self.connect()

    def connect(self) -> RpmOstree:
        """Another client with its own bus connection."""
        client = nodes.client(self.machine)
        client.register()
        return client

    def name(self, image: images.Image) -> str:
        """The image's name by digest in the registry; pushes it."""
        images.push(image, f"{self.registry.host}/os:latest")
        return f"{self.registry.host}/os@{image.digest}"

    def reference(self, image: images.Image) -> str:
        return f"ostree-unverified-registry:{self.name(image)}"

    def faults(self, **settings: Any) -> None:
        """Switches faults on for the transactions to come, or off."""
        self.machine.write(FAULTS_FILE, json.dumps(settings))

    def offer(self, *offered: packages.Package) -> None:
        """A package repository with these packages, enabled in the booted /etc."""
        made = packages.repository(offered, self.folder / "repository", self.folder.parent / "rpms")
        self.machine.run(["mkdir", "-p", REPOSITORY])
        for rpm in made.iterdir():
            self.machine.write(f"{REPOSITORY}/{rpm.name}", rpm.read_bytes())
        self.machine.write("/etc/yum.repos.d/extensions.repo", REPO_FILE)

    def withdraw(self) -> None:
        """Takes the package repository away."""
        self.machine.run(["rm", "-rf", REPOSITORY, "/etc/yum.repos.d"])

    def reboot(self) -> None:
        """Reboots and connects again."""
        self.client.vanish()
        self.machine.reboot()
        self.client = self.connect()

    def staged_root(self) -> str:
        """The staged deployment's directory."""
        staged = self.client.os_get("DefaultDeployment")
        assert staged["staged"], staged
        return f"/ostree/deploy/{staged['osname']}/deploy/{staged['checksum']}.{staged['serial']}"


@pytest.fixture(scope="session")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    with Registry(tmp_path_factory.mktemp("registry")) as running:
        yield running


@pytest.fixture(scope="session")
def package_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("packages")


@pytest.fixture
def profile() -> str:
    """The version profile; a test overrides it by parametrizing ``profile``."""
    return "AC"


@contextmanager
def _booted(folder: Path, registry: Registry, packages_folder: Path, profile: str) -> Iterator[Node]:
    if REAL:
        pytest.skip("MCDAEMON_REAL_RPMOSTREED=1: this test needs a node of the stand")
    images.push(samples.base(), f"{registry.host}/os:latest")
    with nodes.make(folder / "node", profile) as machine:
        reference = f"ostree-unverified-registry:{registry.host}/os@{samples.base().digest}"
        nodes.install(machine, samples.base(), reference, folder)
        machine.boot()
        made = Node(machine, registry, packages_folder)
        yield made
        made.client.vanish()


@pytest.fixture
def node(tmp_path: Path, registry: Registry, package_cache: Path, profile: str) -> Iterator[Node]:
    """A booted node of the stand with a registered client."""
    with _booted(tmp_path, registry, package_cache / tmp_path.name, profile) as made:
        yield made


@pytest.fixture(scope="session")
def resting_node(tmp_path_factory: pytest.TempPathFactory, registry: Registry, package_cache: Path) -> Iterator[Node]:
    """A node that all tests share which change nothing on it: who only look, and who are refused."""
    with _booted(tmp_path_factory.mktemp("resting"), registry, package_cache / "resting", "AC") as made:
        yield made


@pytest.fixture
def rpmostreed(request: pytest.FixtureRequest) -> Iterator[RpmOstree]:
    """A registered client of a daemon whose deployments are not to be changed: the stand's, or the host's own."""
    if not REAL:
        made: Node = request.getfixturevalue("resting_node")
        yield made.client
        return
    address = Gio.dbus_address_get_for_bus_sync(Gio.BusType.SYSTEM, None)
    client = RpmOstree(address)
    client.register()
    yield client
    client.vanish()
