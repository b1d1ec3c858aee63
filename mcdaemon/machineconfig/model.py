"""The MachineConfig as mcdaemon understands it: everything decoded, checked and comparable.

Formats of OpenShift 4.12 to 4.22 (api/machineconfiguration/v1/types.go). What is not honoured is refused by name.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mcdaemon.machineconfig import extensions as extension_table
from mcdaemon.machineconfig import ignition, kernelargs
from mcdaemon.machineconfig.fields import Field, require_plain, shown
from mcdaemon.machineconfig.specs import (
    ROOT,
    UNIT_DIRECTORY,
    DropIn,
    FileSpec,
    KernelType,
    Limits,
    Owner,
    UnitSpec,
    UserSpec,
)

__all__ = [
    "API_VERSION",
    "KIND",
    "ROOT",
    "UNIT_DIRECTORY",
    "DropIn",
    "FileSpec",
    "KernelType",
    "Limits",
    "MachineConfig",
    "Owner",
    "UnitSpec",
    "UserSpec",
    "parse",
]

KIND = "MachineConfig"
API_VERSION = "machineconfiguration.openshift.io/v1"
_SPEC = (
    "baseOSExtensionsContainerImage",
    "config",
    "extensions",
    "fips",
    "kernelArguments",
    "kernelType",
    "osImageURL",
)
_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
_DEFAULT_LIMITS = Limits()


@dataclass(frozen=True)
class MachineConfig:
    """One MachineConfig. `kernel_arguments` are single arguments, already split; `extensions` are sorted and unique.

    `raw` is the document itself (JSON data, to be written as `currentconfig`, where the MCD reads it too). It holds
    secrets and is no part of comparisons.
    """

    name: str
    files: tuple[FileSpec, ...] = ()
    units: tuple[UnitSpec, ...] = ()
    users: tuple[UserSpec, ...] = ()
    kernel_arguments: tuple[str, ...] = ()
    extensions: tuple[str, ...] = ()
    os_image: str = ""
    extensions_image: str = ""
    kernel_type: KernelType = KernelType.DEFAULT
    fips: bool = False
    annotations: Mapping[str, str] = field(default_factory=dict, compare=False)
    labels: Mapping[str, str] = field(default_factory=dict, compare=False)
    raw: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def identity(self) -> str:
        """What the config says, whatever it is called: hex SHA-256 over the canonical JSON of its spec."""
        return hashlib.sha256(canonical_json(self.raw.get("spec") or {})).hexdigest()

    def pointer(self, section: str, key: str, value: str) -> str:
        """The JSON pointer of the thing in `section` ("storage/files") whose `key` is `value`, as the document has it:
        `files` and `units` are sorted."""
        found: Any = (self.raw.get("spec") or {}).get("config") or {}
        for part in section.split("/"):
            found = found.get(part) or {}
        index = next((index for index, entry in enumerate(found) if entry.get(key) == value), 0)
        return f"/spec/config/{section}/{index}"

    def file(self, path: str) -> FileSpec:
        """The file at `path`; raises KeyError when the config does not have it."""
        for candidate in self.files:
            if candidate.path == path:
                return candidate
        raise KeyError(path)

    def unit(self, name: str) -> UnitSpec:
        """The unit called `name`; raises KeyError when the config does not have it."""
        for candidate in self.units:
            if candidate.name == name:
                return candidate
        raise KeyError(name)


def canonical_json(value: object) -> bytes:
    """JSON with sorted keys, without blanks, in ASCII: the same bytes for the same value on every Python."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def parse(document: object, where: str, limits: Limits = _DEFAULT_LIMITS) -> MachineConfig:
    """Read a MachineConfig from plain data (as read from JSON or YAML); `where` names it in errors.

    apiVersion and kind may be missing: objects that the MCD wrote to `currentconfig` have none (mcd.md, appendix D).
    Raises Irreconcilable with the JSON pointer of the first thing that is wrong or not honoured.
    """
    root = Field(document, "", where)
    require_plain(root)
    if not isinstance(document, dict):
        raise root.refusal("expected a MachineConfig, which is a mapping")
    _require_kind(root)
    root.only(("apiVersion", "kind", "metadata", "spec"), "unknown part of a MachineConfig")
    metadata, spec = root.child("metadata"), root.child("spec")
    name = metadata.child("name").text() if metadata.members() else None
    if not name or not _NAME.fullmatch(name) or len(name) > 253:
        raise metadata.child("name").refusal("a MachineConfig needs a name of lower case letters, digits, - and .")
    spec.only(_SPEC, "unknown part of a MachineConfig's spec, which cannot be honoured")
    wanted = ignition.parse(spec.child("config"), limits)
    kernel_type = _kernel_type(spec.child("kernelType"))
    return MachineConfig(
        name=name,
        files=wanted.files,
        units=wanted.units,
        users=wanted.users,
        kernel_arguments=_kernel_arguments(spec.child("kernelArguments")),
        extensions=_extensions(spec.child("extensions"), kernel_type),
        os_image=_pullspec(spec.child("osImageURL")),
        extensions_image=_pullspec(spec.child("baseOSExtensionsContainerImage")),
        kernel_type=kernel_type,
        fips=spec.child("fips").flag() or False,
        annotations=_strings(metadata.child("annotations")),
        labels=_strings(metadata.child("labels")),
        raw=json.loads(canonical_json(document)),
    )


def _require_kind(root: Field) -> None:
    kind = root.child("kind").text()
    if kind and kind != KIND:
        raise root.child("kind").refusal(f"expected a {KIND}, found a {shown(kind)}")
    version = root.child("apiVersion").text()
    if version and version != API_VERSION:
        raise root.child("apiVersion").refusal(f"expected {API_VERSION}, found {shown(version)}")


def _kernel_arguments(field: Field) -> tuple[str, ...]:
    entries = field.texts()
    for index, entry in enumerate(entries):
        trouble = kernelargs.problem(entry)
        if trouble:
            raise field.child(index).refusal(trouble)
    return kernelargs.split_all(entries)


def _extensions(field: Field, kernel_type: KernelType) -> tuple[str, ...]:
    for element in field.elements():
        name = element.text()
        if name not in extension_table.PACKAGES:
            known = ", ".join(sorted(extension_table.PACKAGES))
            raise element.refusal(f"{shown(name)} is not an extension", f"known are {known}")
        if name == extension_table.KERNEL_DEVEL and kernel_type is not KernelType.DEFAULT:
            # Its packages belong to the default kernel (common/helpers.go:MergeMachineConfigs).
            raise element.refusal(f"{name} cannot be installed beside the {kernel_type.value} kernel")
    return tuple(sorted(set(field.texts())))


def _pullspec(field: Field) -> str:
    text = field.text() or ""
    if any(char.isspace() or not char.isprintable() for char in text):
        raise field.refusal("an image reference cannot hold blanks or control characters")
    return text


def _kernel_type(field: Field) -> KernelType:
    text = field.text()
    try:
        return KernelType(text) if text else KernelType.DEFAULT
    except ValueError as error:
        # The MCD takes an unknown type for the default one (CanonicalizeKernelType), which hides a spelling mistake.
        known = ", ".join(kind.value for kind in KernelType)
        raise field.refusal(f"{shown(text)} is not a kernel type", f"known are {known}") from error


def _strings(field: Field) -> Mapping[str, str]:
    return {key: field.child(key).text() or "" for key in field.members()}
