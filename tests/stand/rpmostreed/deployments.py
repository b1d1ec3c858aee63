"""The dictionaries that describe deployments on D-Bus (rpm-ostree.md section 3)."""

from __future__ import annotations

import json
from typing import Any, Optional

from tests.stand import ostree_refs
from tests.stand.introspection import GLib, OSTree
from tests.stand.rpmostreed import lockkey
from tests.stand.rpmostreed.options import entries, variants
from tests.stand.rpmostreed.origin import Origin
from tests.stand.rpmostreed.sysroot import Sysroot, identity
from tests.stand.rpmostreed.transaction import journal

Dictionary = dict[str, Any]
# Filtered out of commit metadata on D-Bus, because they are large.
_FILTERED = frozenset(
    "rpmostree." + name
    for name in (
        "rpmdb.pkglist",
        "advisories",
        "packages",
        "modules",
        "spec",
        "removed-base-packages",
        "replaced-base-packages",
        "replaced-base-remote-packages",
    )
)
_UNLOCKED = {
    OSTree.DeploymentUnlockedState.NONE: "none",
    OSTree.DeploymentUnlockedState.DEVELOPMENT: "development",
    OSTree.DeploymentUnlockedState.HOTFIX: "hotfix",
}


def describe_all(sysroot: Sysroot) -> list[Dictionary]:
    """Every deployment, in boot order with the staged one first."""
    return [describe(sysroot, deployment) for deployment in sysroot.deployments]


def describe_os(sysroot: Sysroot, osname: str) -> Dictionary:
    """The properties of a stateroot's object (1.3)."""
    booted = sysroot.booted
    mine = booted if booted is not None and booted.get_osname() == osname else None
    described = {
        "BootedDeployment": mine,
        "DefaultDeployment": sysroot.pending(osname) or mine,
        "RollbackDeployment": sysroot.rollback(osname),
    }
    values = {key: GLib.Variant("a{sv}", describe(sysroot, item)) for key, item in described.items()}
    return {
        **values,
        "CachedUpdate": GLib.Variant("a{sv}", {}),
        "Name": GLib.Variant("s", osname),
        "HasCachedUpdateRpmDiff": GLib.Variant("b", False),
    }


def describe(sysroot: Sysroot, deployment: Optional[Any]) -> Dictionary:
    """One deployment; an empty dictionary for none. Keys and their conditions: 3.2."""
    if deployment is None:
        return {}
    commit = deployment.get_csum()
    found = variants(
        id=("s", identity(deployment)),
        osname=("s", deployment.get_osname()),
        checksum=("s", commit),
        serial=("i", deployment.get_deployserial()),
        booted=("b", sysroot.is_booted(deployment)),
        staged=("b", deployment.is_staged()),
        pinned=("b", deployment.is_pinned()),
        unlocked=("s", _UNLOCKED.get(deployment.get_unlocked(), "transient")),
    )
    found.update(_commit_details(sysroot, commit, ""))
    if deployment.is_staged() and lockkey.LEGACY_FILE.exists():
        found["finalization-locked"] = GLib.Variant("b", True)
    found.update(_layers(sysroot, commit))
    found.update(_origin(sysroot.origin(deployment)))
    found.update(_image(sysroot, sysroot.origin(deployment), commit))
    return found


def _commit_details(sysroot: Sysroot, commit: str, prefix: str) -> Dictionary:
    found = {f"{prefix}timestamp": GLib.Variant("t", sysroot.timestamp(commit))}
    version = sysroot.metadata(commit).lookup_value("version", GLib.VariantType("s"))
    if version is not None and version.get_string():
        found[f"{prefix}version"] = version
    return found


def _layers(sysroot: Sysroot, commit: str) -> Dictionary:
    base = sysroot.base(commit)
    metadata = sysroot.metadata(commit)
    found = {"base-commit-meta": _filter(sysroot.metadata(base))}
    packages = metadata.lookup_value("rpmostree.packages", GLib.VariantType("as")) or GLib.Variant("as", [])
    removed = metadata.lookup_value("rpmostree.removed-base-packages", GLib.VariantType("av")) or GLib.Variant("av", [])
    found.update(
        {
            "packages": packages,
            "base-removals": removed,
            "base-local-replacements": GLib.Variant("a(vv)", []),
            "base-remote-replacements": GLib.Variant("a{sv}", {}),
        }
    )
    if base != commit:
        found["base-checksum"] = GLib.Variant("s", base)
        found.update(_commit_details(sysroot, base, "base-"))
        found["layered-commit-meta"] = _filter(metadata)
    return found


def _filter(metadata: Any) -> Any:
    kept = {key: value for key, value in entries(metadata).items() if key not in _FILTERED}
    return GLib.Variant("a{sv}", kept)


def _origin(origin: Origin) -> Dictionary:
    found = variants(
        requested_packages=("as", origin.packages),
        requested_local_packages=("as", origin.local_nevras),
        requested_local_fileoverride_packages=("as", []),
        requested_base_removals=("as", origin.removed),
        requested_base_local_replacements=("as", []),
        regenerate_initramfs=("b", origin.regenerate_initramfs),
    )
    if origin.image:
        found["container-image-reference"] = GLib.Variant("s", origin.image)
    else:
        found["origin"] = GLib.Variant("s", origin.refspec)
    if origin.custom_url:
        found["custom-origin"] = GLib.Variant("(ss)", (origin.custom_url, origin.custom_description))
    if origin.regenerate_initramfs or origin.initramfs_args or origin.initramfs_etc:
        found["initramfs-args"] = GLib.Variant("as", origin.initramfs_args)
        found["initramfs-etc"] = GLib.Variant("as", origin.initramfs_etc)
    if origin.cliwrap:
        found["cliwrap"] = GLib.Variant("b", True)
    return found


def _image(sysroot: Sysroot, origin: Origin, commit: str) -> Dictionary:
    if not origin.image:
        return {}
    metadata = sysroot.metadata(sysroot.base(commit)).unpack()
    layers = json.loads(metadata.get("ostree.manifest", "{}")).get("layers", [])
    if not layers or not sysroot.resolve(ostree_refs.blob_ref(layers[0]["digest"])):
        journal(f"failed to query container image base metadata: Missing base image ref for {origin.image}")
        return {}
    return {"container-image-reference-digest": GLib.Variant("s", metadata["ostree.manifest-digest"])}
