"""A booted node with the stand-in rpm-ostreed, made from container images in a registry."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path

from tests.component.conformance.client import RpmOstree
from tests.stand import ostree_import, ostree_refs, rpmostreed
from tests.stand.images import Image
from tests.stand.introspection import Gio, OSTree
from tests.stand.machine import NODE_LIBRARY, Machine

UNIT = "rpm-ostreed.service"
BUS_ADDRESS = "unix:path=/run/dbus/system_bus_socket"


def install(machine: Machine, image: Image, reference: str, scratch: Path) -> str:
    """Deploys ``image`` as first boot entry, as an installer that got it from ``reference``. The commit."""
    repo = OSTree.Repo.new(Gio.File.new_for_path(str(machine.sysroot.repo)))
    repo.open(None)
    source = ostree_refs.parse("ostree-unverified-image:" + image.write_layout(scratch / "installer"))
    commit = ostree_import.Importer(repo, source, target=ostree_refs.parse(reference)).run().commit
    machine.deploy_commit(commit, origin_text=f"[origin]\ncontainer-image-reference={reference}\n")
    return commit


def make(folder: Path, profile: str = rpmostreed.DEFAULT_PROFILE) -> Machine:
    """A machine that has the stand-in's units."""
    return Machine(folder, units=rpmostreed.units(NODE_LIBRARY, profile))


def client(machine: Machine) -> RpmOstree:
    """A client on the node's bus from outside of the node; starts the daemon."""
    machine.run(["systemctl", "start", UNIT])
    return RpmOstree(BUS_ADDRESS, lambda address: _open(machine, address))


def _open(machine: Machine, address: str) -> int:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with ours, theirs:
        ours.settimeout(20)
        process = machine.start(
            ["/usr/bin/python3", "-m", "tests.component.conformance.peer", address],
            env={"PYTHONPATH": NODE_LIBRARY},
            stdin=theirs.fileno(),
            stderr=subprocess.PIPE,
        )
        theirs.close()
        _, descriptors, _, _ = socket.recv_fds(ours, 1, 1)
        _, errors = process.communicate(timeout=20)
    if not descriptors:
        raise ConnectionError(errors)
    return descriptors[0]
