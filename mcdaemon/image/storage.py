"""The node's containers-storage: is an image in it complete, and holding it against garbage collection.

skopeo and podman are asked, because rpm-ostree's pull goes through the same library. But both call an image good
whose layer is gone (seen with skopeo 1.9 and podman 4.3: only the copy fails, "creating file-getter: readlink
.../diff: no such file or directory"), so the layer directories that podman names are looked at too, and with each the
tar-split file without which the layer cannot be put together again byte by byte.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from mcdaemon.errors import Transient
from mcdaemon.image import programs
from mcdaemon.image.description import Description, from_config
from mcdaemon.image.findings import Contents, Unavailable, Verdict
from mcdaemon.image.manifest import Manifest, parse, this_architecture
from mcdaemon.image.reference import Reference

LABEL = "mcdaemon.hold"
DIGEST_LABEL = "mcdaemon.digest"
_NAME_PREFIX = "mcdaemon-hold-"
# See host/packages.py, which may not be imported here.
_OTHER_PREFIX = "mcdaemon-extensions-"
# The container is never started; an image without a command needs one all the same.
_COMMAND = "/mcdaemon-hold"
_ABSENT = re.compile(r"does not resolve to an image ID|image not known|identifier is not an image")


@dataclass(frozen=True)
class Hold:
    """A stopped container of ours that keeps an image from being removed. `container` is its ID."""

    container: str
    update: str
    digest: str


@dataclass(frozen=True)
class Place:
    """Where a storage is, as podman says; `graph_root` with symbolic links resolved."""

    driver: str
    graph_root: str
    run_root: str


class Storage:
    """One containers-storage: the node's own, or with `root` and `runroot` another one. `timeout` in seconds, for each
    call of a program."""

    def __init__(self, root: str = "", runroot: str = "", timeout: float = 60.0, architecture: str = "") -> None:
        self._timeout = timeout
        self._architecture = architecture or this_architecture()
        self._podman = ["podman"]
        self._prefix = "containers-storage:"
        if root:
            self._podman += ["--root", root, "--runroot", runroot, "--storage-driver", "overlay"]
            self._prefix += f"[overlay@{root}+{runroot}]"

    def digest(self, reference: Reference) -> str:
        """The digest of the image that has exactly this name here. Raises Unavailable."""
        return self._manifest(reference, "").digest

    def check(self, reference: Reference, describe: bool = False) -> Contents:
        """Make sure that the image is here by this name and digest, whole. Raises Unavailable: ABSENT, INCOMPLETE,
        MALFORMED, or UNREACHABLE where skopeo or podman cannot be asked. `describe`: the version is wanted too.
        """
        top = image = self._manifest(reference, reference.digest)
        named = reference
        if top.is_index:
            child = top.child_for(self._architecture).digest
            try:
                named = reference.pinned(child)
                image = self._manifest(named, child)
            except Unavailable as error:
                if error.verdict is not Verdict.ABSENT:
                    raise
                raise Unavailable(Verdict.INCOMPLETE, "only the index is here, not its image") from error
        self._check_layers(reference, len(image.layers))
        description = image.description
        if describe and not description.version:
            description = self._config(named)
        return Contents(top.digest, image.digest, image.size, image.layers, description)

    def _config(self, reference: Reference) -> Description:
        """A config that skopeo does not print says nothing; the image is no worse for it."""
        done = programs.run(["skopeo", "inspect", "--config", "--raw", f"{self._prefix}{reference}"], self._timeout)
        return from_config(done.stdout) if done.returncode == 0 else Description()

    def place(self) -> Place:
        """Raises Unavailable."""
        done = programs.run([*self._podman, "info", "--format", "json"], self._timeout)
        try:
            store = json.loads(done.stdout)["store"]
            driver, graph, run = store["graphDriverName"], store["graphRoot"], store["runRoot"]
        except (ValueError, LookupError, TypeError):
            raise Unavailable(Verdict.UNREACHABLE, f"podman info fails: {programs.complaint(done)}") from None
        return Place(str(driver), os.path.realpath(str(graph)), str(run))

    def hold(self, reference: Reference, digest: str, update: str) -> Hold:
        """Hold an image for an update; calling it again returns the hold that is there.

        Raises Transient where that is not possible; the image may be gone then, so resolve again.
        """
        for known in self.holds():
            if (known.update, known.digest) == (update, digest):
                return known
        argv = [*self._podman, "create", "--pull=never", "--network=none", "--log-driver=none"]
        # A VOLUME in the image must not leave a volume on the node.
        argv += ["--image-volume=ignore", f"--label={LABEL}={update}", f"--label={DIGEST_LABEL}={digest}"]
        argv += [f"--name={_container_name(update, digest)}", "--replace", str(reference.pinned(digest)), _COMMAND]
        done = self._run(argv, f"hold {reference.pinned(digest)}")
        if done.returncode != 0:
            sentence = f"cannot hold {reference.pinned(digest)} in containers-storage: {programs.complaint(done)}"
            raise Transient(sentence, "the image is looked for again")
        lines = done.stdout.decode("utf-8", "replace").split()
        return Hold(lines[-1] if lines else "", update, digest)

    def holds(self) -> tuple[Hold, ...]:
        """Every hold of mcdaemon in this storage. Raises Transient.

        One that a killed podman has made half-way holds its image as well, for ever, but podman knows it by its name
        only, and lists it among those of other programs ("external"). Its `digest` is "": it is to be made again.
        """
        return tuple(self._holds(self._containers()))

    @staticmethod
    def _holds(containers: Collection[Mapping[str, object]]) -> list[Hold]:
        found = []
        for container in containers:
            labels = container.get("Labels")
            if isinstance(labels, Mapping) and LABEL in labels:
                digest = str(labels.get(DIGEST_LABEL, ""))
                found.append(Hold(str(container.get("Id", "")), str(labels.get(LABEL, "")), digest))
            elif _name(container).startswith(_NAME_PREFIX):
                update = _name(container)[len(_NAME_PREFIX) :].rpartition("-")[0]
                found.append(Hold(str(container.get("Id", "")), update, ""))
        return found

    def _containers(self) -> list[dict[str, object]]:
        argv = [*self._podman, "ps", "--all", "--external", "--format=json"]
        try:
            return programs.listed(self._run(argv, "list the held images"), "podman ps")
        except Unavailable as error:
            raise Transient(f"cannot list the held images: {error.reason}") from error

    def is_held(self, digest: str, update: str) -> bool:
        """False once somebody has removed the hold (`podman container prune`): resolve again then. Raises Transient."""
        return any((hold.update, hold.digest) == (update, digest) for hold in self.holds())

    def release(self, update: str) -> None:
        """Drop the holds of an update; none is fine. Raises Transient."""
        self._remove([hold for hold in self.holds() if hold.update == update])

    def release_unknown(self, known: Collection[str]) -> tuple[Hold, ...]:
        """Drop and return the holds of all updates but the `known` ones: what a crash left (IMG-24), and containers
        that an extensions image was read through: nobody reads one when the agent starts. Raises Transient.
        """
        containers = self._containers()
        strangers = tuple(hold for hold in self._holds(containers) if hold.update not in known)
        readers = [container for container in containers if _name(container).startswith(_OTHER_PREFIX)]
        self._remove([*strangers, *(Hold(str(reader.get("Id", "")), "", "") for reader in readers)])
        return strangers

    def _remove(self, holds: Collection[Hold]) -> None:
        if not holds:
            return
        argv = [*self._podman, "rm", "--force", "--ignore", *(hold.container for hold in holds)]
        done = self._run(argv, "release held images")
        if done.returncode != 0:
            raise Transient(f"cannot release held images: {programs.complaint(done)}")

    def _run(self, argv: list[str], doing: str) -> programs.Done:
        try:
            return programs.run(argv, self._timeout)
        except Unavailable as error:
            raise Transient(f"cannot {doing}: {error.reason}") from error

    def _manifest(self, reference: Reference, wanted: str) -> Manifest:
        """The manifest as rpm-ostree would find it: same name of the repository, same digest."""
        done = programs.run(["skopeo", "inspect", "--raw", f"{self._prefix}{reference}"], self._timeout)
        if done.returncode != 0:
            raise self._failure(done)
        return parse(done.stdout, wanted)

    def _check_layers(self, reference: Reference, expected: int) -> None:
        done = programs.run([*self._podman, "image", "inspect", str(reference)], self._timeout)
        if done.returncode != 0:
            raise self._failure(done)
        images = programs.listed(done, "podman image inspect")
        folders = _layer_folders(images[0]) if images else None
        if folders is None:
            raise Unavailable(Verdict.UNREACHABLE, "podman does not say where the layers are (is the driver overlay?)")
        if len(folders) != expected:
            raise Unavailable(Verdict.INCOMPLETE, f"{len(folders)} of its {expected} layers are here")
        for folder in folders:
            _check_layer(folder)

    def _failure(self, done: programs.Done) -> Unavailable:
        said = programs.complaint(done)
        if _ABSENT.search(done.stderr.decode("utf-8", "replace")):
            return Unavailable(Verdict.ABSENT, "no image of this name and digest")
        return Unavailable(Verdict.INCOMPLETE, said)


def _layer_folders(image: Mapping[str, object]) -> Optional[list[Path]]:
    """The directories of an image's layers, from the top down; None where podman names none."""
    driver = image.get("GraphDriver")
    data = driver.get("Data") if isinstance(driver, Mapping) else None
    upper = data.get("UpperDir") if isinstance(data, Mapping) else None
    if not isinstance(data, Mapping) or not isinstance(upper, str):
        return None
    lower = str(data.get("LowerDir") or "")
    return [Path(upper), *(Path(one) for one in lower.split(":") if one)]


def _check_layer(folder: Path) -> None:
    """`folder` is GRAPHROOT/overlay/LAYER/diff; the additional stores have the same shape."""
    layer, driver = folder.parent, folder.parent.parent
    recipe = driver.parent / f"{driver.name}-layers" / f"{layer.name}.tar-split.gz"
    for path, there in ((folder, folder.is_dir()), (recipe, recipe.is_file())):
        if not there:
            raise Unavailable(Verdict.INCOMPLETE, f"{path} is gone")


def _name(container: Mapping[str, object]) -> str:
    names = container.get("Names")
    return str(names[0]) if isinstance(names, list) and names else ""


def _container_name(update: str, digest: str) -> str:
    """Unique for an update and a digest, of the characters that podman allows."""
    short = digest.partition(":")[2][:12]
    return f"{_NAME_PREFIX}{re.sub(r'[^a-zA-Z0-9_.-]', '-', update)}-{short}"
