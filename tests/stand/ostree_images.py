"""The images that an ostree repository holds: finding, listing and pruning them (rpm-ostree.md 4.3, 4.8)."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Optional

from tests.stand import ostree_refs
from tests.stand.ostree_refs import ImageReference


@dataclass(frozen=True)
class Imported:
    """An imported image: its merge commit, the commit of its base layer, and the manifest's digest."""

    commit: str
    base: str
    manifest_digest: str
    already_present: bool


def find_image(repo: Any, reference: ImageReference) -> Optional[Imported]:
    """The image imported under exactly this transport and name, if its base layer is still there (4.3 step 3)."""
    commit = resolve(repo, reference.ref)
    if not commit:
        return None
    metadata = commit_metadata(repo, commit)
    layers = json.loads(metadata.get("ostree.manifest", '{"layers": []}'))["layers"]
    base = resolve(repo, ostree_refs.blob_ref(layers[0]["digest"])) if layers else ""
    return Imported(commit, base, metadata.get("ostree.manifest-digest", ""), True) if base else None


def commit_metadata(repo: Any, commit: str) -> dict[str, Any]:
    """A commit's metadata, unpacked."""
    _, variant, _ = repo.load_commit(commit)
    unpacked: dict[str, Any] = variant.get_child_value(0).unpack()
    return unpacked


def prune_images(repo: Any, keep: Iterable[str]) -> tuple[int, int]:
    """Drops images that no origin in ``keep`` (ostree image references) names, then unreferenced layers.

    The numbers of images and layers dropped (rpm-ostree.md 4.8)."""
    wanted = {ostree_refs.parse(text).ref for text in keep if ostree_refs.is_image(text)}
    dropped = 0
    for ref in list_refs(repo, ostree_refs.IMAGE_PREFIX):
        if ref not in wanted:
            repo.set_ref_immediate(None, ref, None, None)
            dropped += 1
    return dropped, prune_layers(repo)


def prune_layers(repo: Any) -> int:
    """Drops layer refs that no image and no deployed or base commit uses. Their number."""
    roots = [
        ref
        for prefix in (ostree_refs.IMAGE_PREFIX, "ostree/0/", "ostree/1/", "rpmostree/base/")
        for ref in list_refs(repo, prefix)
    ]
    used: set[str] = set()
    for ref in roots:
        manifest = commit_metadata(repo, resolve(repo, ref)).get("ostree.manifest", '{"layers": []}')
        used.update(ostree_refs.blob_ref(layer["digest"]) for layer in json.loads(manifest)["layers"])
    unused = [ref for ref in list_refs(repo, ostree_refs.BLOB_PREFIX) if ref not in used]
    for ref in unused:
        repo.set_ref_immediate(None, ref, None, None)
    return len(unused)


def list_refs(repo: Any, prefix: str) -> list[str]:
    """All refs below ``prefix``, sorted."""
    _, refs = repo.list_refs(None, None)
    return sorted(ref for ref in refs if ref.startswith(prefix))


def resolve(repo: Any, ref: str) -> str:
    """The commit of a ref, or ``""``."""
    _, commit = repo.resolve_rev(ref, True)
    return str(commit or "")


def config_digest(repo: Any, commit: str) -> str:
    """The digest of an imported image's config, its "image id"; ``""`` for another commit."""
    manifest = commit_metadata(repo, commit).get("ostree.manifest", "{}")
    return str(json.loads(manifest).get("config", {}).get("digest", ""))
