"""All of a node at rest that an update may change, as lines that two nodes are compared by.

Normalised, because each way to the same config has its own: the marker with an update's id on the kernel line, serials
and checksums of deployments (a deployment is what its origin, its tree and its place say), versions of boot entries,
times, and the record of a target that failed before.
Left out: logs, counters, caches, the desired configs, the stand's own files in /run, the rollback deployment, which any
finalization drops, and podman's and skopeo's own: images in containers-storage, which are a cache that the kubelet
clears, directories of a killed podman's probes, and manifests that one has left in /var/tmp (systemd-tmpfiles clears
it; they leave some also when nobody kills them). Containers and unfinished layers do count.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.field.evidence import deployment_etc, status, tree
from tests.stand.node import Node

_MARKER = re.compile(r" mcdaemon\.update=\S+")
_BOOT_LINK = re.compile(r"ostree=\S+")
_LEFT_BY_PODMAN = re.compile(r"tmp/\d+")
_OUTSIDE = ("lib/containers/", "lib/rpm-ostree", "log", "cache", "lib/cni", "lib/mcdaemon/counters.json",
            "lib/mcdaemon/journal.json", "lib/mcdaemon/machineconfigs", "lib/mcdaemon/status.json")  # fmt: skip
# What the stand and the programs of the node have in /run at any time.
_RUN = re.compile(r"(stand|systemd|dbus|lock|containers|crun|libpod|rpm-ostree[^/]*|user|log|netns)(/|$)"
                  r"|mcdaemon/((lock|hook\.lock|settled|(status|health|versions)\.json)$)")  # fmt: skip


POLICY, LOADED = "/etc/containers/policy.json", "/run/loaded-policy"
"""A file of a config, and where crio.service of these nodes notes what it has read of it."""

Picture = dict[str, str]


def picture(node: Node) -> Picture:
    """What the node is, by place; two equal pictures are two equal nodes. The node must be up and at rest."""
    lines = dict(_lines(node))
    found = status(node)
    lines["status"] = f"{found['state']} {found['current']}"
    return lines


def differences(found: dict[str, str], wanted: dict[str, str]) -> list[str]:
    """One line for each place that is not as it should be."""
    return [
        f"{place}: is {found.get(place, 'not there')}, should be {wanted.get(place, 'not there')}"
        for place in sorted({*found, *wanted})
        if found.get(place) != wanted.get(place)
    ]


def _lines(node: Node) -> Iterator[tuple[str, str]]:
    machine = node.machine
    booted = machine.booted()
    for path, what in deployment_etc(node, booted.name).items():
        yield f"/etc/{path}", what
    var = machine.sysroot.stateroot / "var"
    for path, what in tree(var).items():
        if not path.startswith(_OUTSIDE) and not _LEFT_BY_PODMAN.fullmatch(path):
            yield f"/var/{path}", what
    yield from _deployments(node, booted.name)
    yield from _journal(var, booted.name)
    yield from _storage(var)
    yield from _repository(machine.sysroot.repo)
    if machine.exists(LOADED):
        yield "what crio has loaded", machine.read(LOADED)
    for place in ("/run", "/tmp", "/dev/shm"):
        listing = machine.run(["find", place, "-mindepth", "1", "-xdev", "-not", "-type", "s"], check=False).stdout
        for path in listing.splitlines():
            if place != "/run" or not _RUN.match(path[len("/run/") :]):
                yield path, "there"


def _deployments(node: Node, booted: str) -> Iterator[tuple[str, str]]:
    machine = node.machine
    entry = machine.default_entry()
    yield "boot entry", _BOOT_LINK.sub("ostree=X", _MARKER.sub("", entry.options))
    yield "boots", "the booted deployment" if entry.deployment == booted else "another one"
    found = [d for d in machine.deployments() if not d.rollback]
    yield "deployments", " ".join(f"booted={d.booted} staged={d.staged} pending={d.pending}" for d in found)
    root = machine.deployment_root(booted)
    yield "origin", root.with_name(root.name + ".origin").read_text()
    for path, what in _outline(root / "usr"):
        yield f"/usr/{path}", what
    folders = {path.name for path in root.parent.iterdir() if path.is_dir()}
    known = {d.name for d in machine.deployments()}
    yield "unknown deployment folders", " ".join(sorted(folders - known))
    yield "kernels", "as many as entries" if _kernels(machine.sysroot.path) else "more than entries"


def _outline(top: Path) -> Iterator[tuple[str, str]]:
    """Files of an image by size and mode: ostree has checked their content."""
    for path in sorted(top.rglob("*")):
        info = path.lstat()
        yield str(path.relative_to(top)), f"{info.st_mode:o} {0 if path.is_dir() else info.st_size}"


def _kernels(sysroot: Path) -> bool:
    entries = list((sysroot / "boot/loader/entries").glob("*.conf"))
    kernels = list((sysroot / "boot/ostree").iterdir())
    return len(kernels) <= len(entries)


def _journal(var: Path, booted: str) -> Iterator[tuple[str, str]]:
    """But for moments, and with the deployment that was confirmed by what it is now."""
    record: dict[str, Any] = json.loads((var / "lib/mcdaemon/journal.json").read_text())["journal"]
    del record["failed"]
    if record["confirmed"] is not None:
        del record["confirmed"]["at"]
        record["confirmed"]["deployment"] = "booted" if record["confirmed"]["deployment"] == booted else "not booted"
    yield "journal", json.dumps(record, sort_keys=True)


def _storage(var: Path) -> Iterator[tuple[str, str]]:
    """Containers by name; a layer that was begun and not finished says so itself."""

    store = var / "lib/containers/storage"

    def entries(kind: str) -> list[dict[str, Any]]:
        path = store / f"overlay-{kind}/{kind}.json"
        return json.loads(path.read_text() or "[]") if path.exists() else []

    yield "containers", " ".join(sorted(name for e in entries("containers") for name in e.get("names") or [e["id"]]))
    unfinished = [entry["id"] for entry in entries("layers") if "incomplete" in str(entry.get("flags"))]
    yield "unfinished layers", " ".join(unfinished)


def _repository(repo: Path) -> Iterator[tuple[str, str]]:
    left = [path.name for path in (repo / "tmp").iterdir() if path.name != "cache"]
    yield "repository's temporaries", " ".join(sorted(left))
