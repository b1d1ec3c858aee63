"""Imports a container image into an ostree repository, as ostree-ext does it for rpm-ostree.

Every layer becomes a commit under ``ostree/container/blob/``, the whole image a merge commit under
``ostree/container/image/``; a layer whose ref exists is not fetched again. The image is read by skopeo's
``experimental-image-proxy``, the very program that rpm-ostree uses, so that its errors are the real ones.

What it leaves out: SELinux labels, xattrs, the packing of ostree content in layers (every image is taken for a plain
OCI image whose first layer is the base), and incremental memory use for huge images.

Run as a program: ``python3 -m tests.stand.ostree_import --repo=/ostree/repo ostree-unverified-registry:HOST/NAME``.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Optional

from tests.stand import ostree_images, ostree_refs, ostree_tree
from tests.stand.imageproxy import ImageProxy, ProxyError
from tests.stand.introspection import Gio, GLib, OSTree
from tests.stand.ostree_images import Imported
from tests.stand.ostree_refs import ImageReference, Verification

IMPORTER_VERSION = "0.15.3"
COMMIT_TIMEOUT = 300
AUTH_FILES = ("run/ostree/auth.json", "etc/ostree/auth.json", "usr/lib/ostree/auth.json")
POLICY_FILE = "etc/containers/policy.json"
_GO_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_ETC_FILTER = r"^(\./)?etc(/.*)?$,usr/etc\2"


class ImportFailed(Exception):
    """The image was not imported; the text is the chain of contexts that rpm-ostree would report."""


@dataclass(frozen=True)
class Watcher:
    """Who looks on: ``message`` and ``task``/``done`` are for people; ``step`` is called with the names of steps
    (``after-manifest``, ``before-layer-N``, ``after-layer-N``) and may raise or wait; ``started`` gets the skopeo
    client so that somebody else can kill it."""

    message: Callable[[str], None] = lambda text: None
    task: Callable[[str], None] = lambda text: None
    done: Callable[[], None] = lambda: None
    step: Callable[[str], None] = lambda name: None
    started: Callable[[ImageProxy], None] = lambda proxy: None


@dataclass(frozen=True)
class _Layer:
    """A layer of the manifest, with the diff id by which containers-storage knows it."""

    digest: str
    diff_id: str
    size: int


@dataclass
class Importer:
    """Imports one image. ``skip_known_digest`` is rpm-ostree >= v2025.10: a reference by digest that was imported
    under the same name is not opened again (rpm-ostree.md 4.3, step 4). ``target`` is the name to keep it under where
    that is not the source's, as an installer does (ostree-ext's ``set_target``). ``tls_verify`` overrides
    what registries.conf says."""

    repo: Any
    reference: ImageReference
    skip_known_digest: bool = True
    watcher: Watcher = field(default_factory=Watcher)
    root: Path = Path("/")
    target: Optional[ImageReference] = None
    tls_verify: Optional[bool] = None

    @property
    def kept_as(self) -> ImageReference:
        """The reference under which the image is looked up and kept."""
        return self.target or self.reference

    def run(self) -> Imported:
        """Imports the image, or finds it present. Raises ImportFailed."""
        self.watcher.message(f"Pulling manifest: {self.reference.text}")
        self._check_verification()
        previous = ostree_images.find_image(self.repo, self.kept_as)
        if self.skip_known_digest and previous and previous.manifest_digest == self.kept_as.digest:
            return previous
        try:
            with self._proxy() as proxy:
                self.watcher.started(proxy)
                return self._import(proxy, previous)
        except ProxyError as error:  # outside of any request with a context of its own
            raise ImportFailed(f"Creating importer: {error}") from error

    def _proxy(self) -> ImageProxy:
        environment = dict(os.environ)
        if self.reference.transport != "containers-storage:":
            for name in ("HOME", "XDG_DATA_DIR", "USER"):
                environment.pop(name, None)
        authfile = next((str(self.root / name) for name in AUTH_FILES if (self.root / name).exists()), "")
        return ImageProxy(authfile, environment, self.tls_verify)

    def _check_verification(self) -> None:
        if self.reference.verification is Verification.REMOTE:
            raise ImportFailed(
                "Preparing import: Fetching manifest: Cannot currently verify layered containers via ostree remote"
            )
        if self.reference.verification is Verification.SIGNED and _policy_is_insecure(self.root / POLICY_FILE):
            raise ImportFailed(
                "Preparing import: Fetching manifest: containers-policy.json specifies a default of "
                "`insecureAcceptAnything`; refusing usage"
            )

    def _import(self, proxy: ImageProxy, previous: Optional[Imported]) -> Imported:
        image = self._open(proxy)
        with _context("Preparing import: Fetching manifest"):
            digest, manifest_bytes = proxy.manifest(image)
        manifest = json.loads(manifest_bytes)
        self.watcher.step("after-manifest")
        if previous and (
            previous.manifest_digest == digest
            or ostree_images.config_digest(self.repo, previous.commit) == manifest["config"]["digest"]
        ):
            return previous
        with _context("Preparing import: Fetching manifest"):
            config_bytes = proxy.config(image)
        config = json.loads(config_bytes)
        _check_image(config)
        if previous:
            self._cache_pending(previous.commit, digest, manifest_bytes, config_bytes)
        layers = _layers(manifest, config)
        self._announce(digest, layers)
        commits = self._fetch_layers(proxy, image, layers)
        with _context("Importing"):
            proxy.close_image(image)
        commit = self._merge(commits, digest, manifest_bytes, config_bytes, config)
        ostree_images.prune_layers(self.repo)
        return Imported(commit, commits[0], digest, False)

    def _open(self, proxy: ImageProxy) -> int:
        # The wrapping differs by release, see rpm-ostree.md 4.6; the text in it is skopeo's.
        try:
            return proxy.open_image(self.reference.source)
        except ProxyError as error:
            if self.skip_known_digest:
                raise ImportFailed(f"Preparing import: Fetching manifest: {error}") from error
            raise ImportFailed(f"Creating importer: failed to invoke method OpenImage: {error}") from error

    def _cache_pending(self, commit: str, digest: str, manifest: bytes, config: bytes) -> None:
        _, metadata = self.repo.read_commit_detached_metadata(commit, None)
        cached = GLib.VariantDict.new(metadata)
        for key, value in (("manifest-digest", digest), ("manifest", manifest.decode()), ("config", config.decode())):
            cached.insert_value(f"ostree-ext.cached.{key}", GLib.Variant("s", value))
        self.repo.write_commit_detached_metadata(commit, cached.end(), None)

    def _announce(self, digest: str, layers: list[_Layer]) -> None:
        self.watcher.message(f"Importing: {self.reference.text} (digest: {digest})")
        for kind, part in (("ostree chunk layers", layers[:1]), ("custom layers", layers[1:])):
            missing = [
                layer for layer in part if not ostree_images.resolve(self.repo, ostree_refs.blob_ref(layer.digest))
            ]
            if len(missing) < len(part):
                self.watcher.message(f"{kind} already present: {len(part) - len(missing)}")
            if missing:
                size = GLib.format_size(sum(layer.size for layer in missing))
                self.watcher.message(f"{kind} needed: {len(missing)} ({size})")

    def _fetch_layers(self, proxy: ImageProxy, image: int, layers: list[_Layer]) -> list[str]:
        commits = []
        missing = [
            layer.digest for layer in layers if not ostree_images.resolve(self.repo, ostree_refs.blob_ref(layer.digest))
        ]
        for layer in layers:
            commit = ostree_images.resolve(self.repo, ostree_refs.blob_ref(layer.digest))
            if not commit:
                number = missing.index(layer.digest) + 1
                self.watcher.step(f"before-layer-{number}")
                kind = "ostree chunk" if layer is layers[0] else "layer"
                self.watcher.task(
                    f"[{number}/{len(missing)}] Fetching {kind} {layer.digest[:19]} ({GLib.format_size(layer.size)})"
                )
                with _context(f"Importing: Parsing layer blob {layer.digest}"):
                    commit = self._fetch_layer(proxy, image, layer)
                self.watcher.done()
                self.watcher.step(f"after-layer-{number}")
            commits.append(commit)
        return commits

    def _fetch_layer(self, proxy: ImageProxy, image: int, layer: _Layer) -> str:
        digest, size = layer.digest, layer.size
        if self.reference.transport == "containers-storage:":
            # The storage keeps layers uncompressed and finds them by diff id only; the manifest's sizes are those
            # of the compressed blobs (rpm-ostree.md 4.7). skopeo 1.9 has no GetLayerInfo, but names the size.
            digest, size = layer.diff_id, proxy.blob_size(image, layer.diff_id)
        with tempfile.NamedTemporaryFile(dir=f"{_location(self.repo)}/tmp", prefix="layer-") as archive:
            proxy.fetch(image, digest, size, archive)
            return _commit_archive(self.repo, archive.name, layer.digest)

    def _merge(self, commits: list[str], digest: str, manifest: bytes, config: bytes, parsed: dict[str, Any]) -> str:
        repo = self.repo
        repo.prepare_transaction(None)
        try:
            tree = ostree_tree.mutable_tree(repo, commits[0])
            ostree_tree.strip_whiteouts(repo, tree)
            for commit in commits[1:]:
                ostree_tree.apply_layer(repo, tree, commit)
            _, root = repo.write_mtree(tree, None)
            metadata = _metadata(digest, manifest, config, parsed)
            _, merged = repo.write_commit_with_time(
                commits[0], None, None, metadata, root, _timestamp(manifest, parsed), None
            )
            repo.transaction_set_ref(None, self.kept_as.ref, merged)
            repo.commit_transaction(None)
        except BaseException:
            repo.abort_transaction(None)
            raise
        return str(merged)


@contextlib.contextmanager
def _context(text: str) -> Iterator[None]:
    try:
        yield
    except (ProxyError, subprocess.CalledProcessError) as error:
        detail = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else str(error)
        raise ImportFailed(f"{text}: {detail}") from error


def _location(repo: Any) -> str:
    # The repository of a sysroot calls itself /proc/self/fd/N, which means nothing to a child.
    return os.readlink(f"/proc/self/fd/{repo.get_dfd()}")


def _commit_archive(repo: Any, archive: str, digest: str) -> str:
    """Commits a layer archive (any compression that libarchive knows). The stand needs no fsync."""
    done = subprocess.run(
        [
            "ostree",
            "commit",
            f"--repo={_location(repo)}",
            f"--branch={ostree_refs.blob_ref(digest)}",
            f"--tree=tar={archive}",
            "--tar-autocreate-parents",
            f"--tar-pathname-filter={_ETC_FILTER}",
            "--fsync=false",
            "--timestamp=@0",
        ],
        check=True,
        timeout=COMMIT_TIMEOUT,
        capture_output=True,
        text=True,
    )
    return done.stdout.strip()


def _check_image(config: dict[str, Any]) -> None:
    labels = (config.get("config") or {}).get("Labels") or {}
    if "ostree.bootable" not in labels and "containers.bootc" not in labels:
        raise ImportFailed("Preparing import: Target image does not have ostree.bootable label")
    expected = _GO_ARCHITECTURES.get(platform.machine(), platform.machine())
    if config.get("architecture", "") != expected:
        raise ImportFailed(
            f"Preparing import: Image has architecture {config.get('architecture', '')}; expected {expected}"
        )


def _layers(manifest: dict[str, Any], config: dict[str, Any]) -> list[_Layer]:
    diff_ids = config["rootfs"]["diff_ids"]
    if not manifest["layers"]:
        raise ImportFailed("Preparing import: No layers found")
    if len(diff_ids) != len(manifest["layers"]):
        raise ImportFailed(
            f"Preparing import: Image has {len(manifest['layers'])} layers; its config names {len(diff_ids)}"
        )
    return [_Layer(layer["digest"], diff_id, layer["size"]) for layer, diff_id in zip(manifest["layers"], diff_ids)]


def _metadata(digest: str, manifest: bytes, config: bytes, parsed: dict[str, Any]) -> Any:
    labels = (parsed.get("config") or {}).get("Labels") or {}
    values = {
        "ostree.manifest-digest": digest,
        "ostree.manifest": manifest.decode(),
        "ostree.container.image-config": config.decode(),
        "ostree.importer.version": IMPORTER_VERSION,
    }
    version = labels.get("org.opencontainers.image.version") or labels.get("version")
    if version:
        values["version"] = version
    return GLib.Variant("a{sv}", {key: GLib.Variant("s", value) for key, value in sorted(values.items())})


def _timestamp(manifest: bytes, config: dict[str, Any]) -> int:
    annotations = json.loads(manifest).get("annotations") or {}
    created = annotations.get("org.opencontainers.image.created") or config.get("created") or ""
    parsed = GLib.DateTime.new_from_iso8601(created, GLib.TimeZone.new_utc()) if created else None
    return int(parsed.to_unix()) if parsed else int(datetime.datetime(2024, 1, 1).timestamp())


def _policy_is_insecure(path: Path) -> bool:
    try:
        policy = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ImportFailed(f"Preparing import: Fetching manifest: reading {path}: {error}") from error
    return bool(policy.get("default") == [{"type": "insecureAcceptAnything"}])


def main(arguments: Optional[list[str]] = None) -> int:
    """The command line: imports one image and prints its merge commit."""
    parser = argparse.ArgumentParser(description="Import a container image into an ostree repository.")
    parser.add_argument("--repo", required=True, help="path of the repository")
    parser.add_argument("--reopen", action="store_true", help="open the source even for a digest that is present")
    parser.add_argument("--target", default="", help="reference to keep it under, where that is another")
    parser.add_argument("reference", help="ostree image reference, e.g. ostree-unverified-registry:HOST/NAME@sha256:…")
    options = parser.parse_args(arguments)
    repo = OSTree.Repo.new(Gio.File.new_for_path(options.repo))
    repo.open(None)
    watcher = Watcher(message=lambda text: print(text, file=sys.stderr))
    try:
        target = ostree_refs.parse(options.target) if options.target else None
        importer = Importer(repo, ostree_refs.parse(options.reference), not options.reopen, watcher, target=target)
        print(importer.run().commit)
    except (ImportFailed, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
