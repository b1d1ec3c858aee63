"""Several MachineConfigs made one, by the rules of the cluster's render controller.

pkg/controller/common/helpers.go:MergeMachineConfigs and Ignition's config/merge; mcd.md 2.1.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Optional

from mcdaemon.errors import Irreconcilable
from mcdaemon.machineconfig.model import API_VERSION, KIND, KernelType, Limits, MachineConfig, canonical_json, parse

GENERATED_BY = "machineconfiguration.openshift.io/generated-by-controller-version"
ROLE = "machineconfiguration.openshift.io/role"
# Pools whose selector names no other role; a custom pool takes the worker's configs, too.
_OWN_ROLE_ONLY = frozenset({"master", "arbiter", "worker"})
_DEFAULT_LIMITS = Limits()
_Json = dict[str, Any]


@dataclass(frozen=True)
class Rendered:
    """The config of a pool. `release_image` is the OS image of the release ("" where no config names one);
    `overridden_by` names the config whose osImageURL stands in its place, "" where none does (incident 3)."""

    config: MachineConfig
    release_image: str = ""
    overridden_by: str = ""


def render(configs: Sequence[MachineConfig], pool: str = "worker", limits: Limits = _DEFAULT_LIMITS) -> Rendered:
    """Merge the configs that belong to `pool`; the order of `configs` does not matter.

    A single one is taken as it is. Raises Irreconcilable when there is none, when two have the same name, when two are
    rendered already, or when the merged config is not valid.
    """
    chosen = _ordered([config for config in configs if _belongs(config, pool)], pool)
    _refuse_doubles(chosen, pool)
    release = _last(chosen, lambda config: config.os_image if _generated(config) else "")
    override = _last(chosen, lambda config: "" if _generated(config) else config.os_image)
    release_image = release.os_image if release else ""
    overridden = override is not None and bool(release_image) and override.os_image != release_image
    config = chosen[0] if len(chosen) == 1 else _merged(chosen, pool, limits)
    return Rendered(config, release_image, override.name if override and overridden else "")


def _belongs(config: MachineConfig, pool: str) -> bool:
    """By the role label, as a pool's selector does. A config without one was put there for this node."""
    role = config.labels.get(ROLE, "")
    return role in ("", pool) or (role == "worker" and pool not in _OWN_ROLE_ONLY)


def _generated(config: MachineConfig) -> bool:
    return bool(config.annotations.get(GENERATED_BY))


def _is_rendered(config: MachineConfig) -> bool:
    owners = (config.raw.get("metadata") or {}).get("ownerReferences") or []
    return any(isinstance(owner, dict) and owner.get("kind") == "MachineConfigPool" for owner in owners)


def _ordered(configs: Sequence[MachineConfig], pool: str) -> list[MachineConfig]:
    """Base first, then by name: a config that the cluster rendered, the worker's for a custom pool, the pool's own."""

    def rank(config: MachineConfig) -> tuple[int, str]:
        if _is_rendered(config):
            return 0, config.name
        return (1 if pool not in _OWN_ROLE_ONLY and config.labels.get(ROLE) == "worker" else 2), config.name

    return sorted(configs, key=rank)


def _refuse_doubles(chosen: Sequence[MachineConfig], pool: str) -> None:
    if not chosen:
        raise Irreconcilable(
            f"cannot render a config for the pool {pool}: none of the MachineConfigs belongs to it",
            f"/metadata/labels/{ROLE.replace('/', '~1')}",
            f"label them with {ROLE}: {pool}, or set the pool in the settings",
        )
    names = [config.name for config in chosen]
    for name in names:
        if names.count(name) > 1:
            raise Irreconcilable(
                f"cannot render a config for the pool {pool}: two MachineConfigs have the name {name}", "/metadata/name"
            )
    rendered = [config.name for config in chosen if _is_rendered(config)]
    if len(rendered) > 1:
        raise Irreconcilable(
            f"cannot render a config for the pool {pool}: {' and '.join(rendered)} are rendered configs already",
            "/metadata/ownerReferences",
            "keep one of them",
        )


def _last(configs: Sequence[MachineConfig], value: Callable[[MachineConfig], str]) -> Optional[MachineConfig]:
    """The last config for which `value` is not empty."""
    return next((config for config in reversed(configs) if value(config)), None)


def _merged(chosen: Sequence[MachineConfig], pool: str, limits: Limits) -> MachineConfig:
    specs: list[_Json] = [dict(config.raw.get("spec") or {}) for config in chosen]
    ignition: _Json = {}
    for spec in specs:
        ignition = _merge_ignition(ignition, spec.get("config") or {})
    kernel = _last(chosen, lambda config: "" if config.kernel_type is KernelType.DEFAULT else config.kernel_type.value)
    spec = {
        "config": ignition,
        "kernelArguments": [entry for spec in specs for entry in spec.get("kernelArguments") or []],
        "extensions": [entry for spec in specs for entry in spec.get("extensions") or []],
        "fips": any(config.fips for config in chosen),
        "kernelType": (kernel.kernel_type if kernel else KernelType.DEFAULT).value,
        "osImageURL": _image(chosen, lambda config: config.os_image),
        "baseOSExtensionsContainerImage": _image(chosen, lambda config: config.extensions_image),
    }
    name = f"rendered-{pool}-{hashlib.sha256(canonical_json(spec)).hexdigest()[:32]}"
    document = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": name}, "spec": spec}
    sources = ", ".join(config.name for config in chosen)
    return parse(document, f"the config of the pool {pool} (rendered from {sources})", limits)


def _image(chosen: Sequence[MachineConfig], value: Callable[[MachineConfig], str]) -> str:
    """The last image of a config that no controller generated, else the last of one that it did."""
    override = _last(chosen, lambda config: "" if _generated(config) else value(config))
    winner = override or _last(chosen, value)
    return value(winner) if winner else ""


def _merge_ignition(parent: _Json, child: _Json) -> _Json:
    """Ignition's merge of what is honoured; everything else was refused before."""
    versions = [version for version in (_version(parent), _version(child)) if version]
    if not versions:
        return {}

    def lists(section: str, key: str) -> tuple[list[_Json], list[_Json]]:
        return ((parent.get(section) or {}).get(key) or [], (child.get(section) or {}).get(key) or [])

    files = _merge_lists(*lists("storage", "files"), "path", _file)
    return {
        "ignition": {"version": max(versions, key=lambda version: [int(part) for part in version.split(".")])},
        # Said for every file, as the controller does: Ignition on a new node would refuse to replace a file otherwise.
        "storage": {
            "files": [file if file.get("overwrite") is not None else {**file, "overwrite": True} for file in files]
        },
        "systemd": {"units": _merge_lists(*lists("systemd", "units"), "name", _unit)},
        "passwd": {"users": _merge_lists(*lists("passwd", "users"), "name", _user)},
    }


def _version(config: _Json) -> str:
    return (config.get("ignition") or {}).get("version") or ""


def _merge_lists(
    parent: Sequence[_Json], child: Sequence[_Json], key: str, merge: Callable[[_Json, _Json], _Json]
) -> list[_Json]:
    """Entries with the same key merged in the parent's place, the child's others behind them."""
    later = {entry[key]: entry for entry in child}
    merged = [merge(entry, later.pop(entry[key])) if entry[key] in later else entry for entry in parent]
    return merged + list(later.values())


def _plain(parent: _Json, child: _Json) -> _Json:
    return {**parent, **{key: value for key, value in child.items() if value is not None}}


def _file(parent: _Json, child: _Json) -> _Json:
    """A later file replaces an earlier one; what it leaves unsaid (mode, owner) is the earlier one's.

    Contents are replaced as a whole: encoding and hash of the one say nothing about the bytes of the other, which is
    why the controller clears the compression before it merges.
    """
    merged = _plain(parent, child)
    for owner in ("user", "group"):
        if parent.get(owner) and child.get(owner):
            merged[owner] = _plain(parent[owner], child[owner])
    if (child.get("contents") or {}).get("source") is None and parent.get("contents"):
        merged["contents"] = parent["contents"]
    return merged


def _unit(parent: _Json, child: _Json) -> _Json:
    merged = _plain(parent, child)
    if parent.get("dropins") and child.get("dropins"):
        merged["dropins"] = _merge_lists(parent["dropins"], child["dropins"], "name", _plain)
    return merged


def _user(parent: _Json, child: _Json) -> _Json:
    merged = _plain(parent, child)
    keys = [*(parent.get("sshAuthorizedKeys") or []), *(child.get("sshAuthorizedKeys") or [])]
    if keys:
        merged["sshAuthorizedKeys"] = list(dict.fromkeys(keys))
    return merged
