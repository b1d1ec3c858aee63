"""MachineConfigs for the stand, as a person would write them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Optional, Union
from urllib.parse import quote

GENERATED_BY = "machineconfiguration.openshift.io/generated-by-controller-version"


@dataclass(frozen=True)
class Unit:
    """A systemd unit of a config."""

    name: str
    contents: Optional[str] = None
    enabled: Optional[bool] = None
    mask: Optional[bool] = None
    dropins: Mapping[str, str] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        found: dict[str, Any] = {"name": self.name}
        for key in ("contents", "enabled", "mask"):
            if getattr(self, key) is not None:
                found[key] = getattr(self, key)
        if self.dropins:
            found["dropins"] = [{"name": name, "contents": text} for name, text in self.dropins.items()]
        return found


FileText = Union[str, tuple[str, int]]


def machine_config(
    name: str,
    files: Optional[Mapping[str, FileText]] = None,
    units: Sequence[Unit] = (),
    os_image: str = "",
    kernel_arguments: Sequence[str] = (),
    extensions: Sequence[str] = (),
    extensions_image: str = "",
    ssh_keys: Sequence[str] = (),
    kernel_type: str = "",
    generated: bool = False,
) -> str:
    """The text of a MachineConfig file. `files`: path to text, or to (text, mode). `generated`: by the release."""
    ignition: dict[str, Any] = {"ignition": {"version": "3.4.0"}}
    if files:
        ignition["storage"] = {"files": [_file(path, text) for path, text in files.items()]}
    if units:
        ignition["systemd"] = {"units": [unit.document() for unit in units]}
    if ssh_keys:
        ignition["passwd"] = {"users": [{"name": "core", "sshAuthorizedKeys": list(ssh_keys)}]}
    spec: dict[str, Any] = {"config": ignition}
    for key, value in (
        ("osImageURL", os_image),
        ("kernelArguments", list(kernel_arguments)),
        ("extensions", list(extensions)),
        ("baseOSExtensionsContainerImage", extensions_image),
        ("kernelType", kernel_type),
    ):
        if value:
            spec[key] = value
    metadata: dict[str, Any] = {"name": name, "labels": {"machineconfiguration.openshift.io/role": "worker"}}
    if generated:
        metadata["annotations"] = {GENERATED_BY: "stand"}
    return json.dumps(
        {
            "apiVersion": "machineconfiguration.openshift.io/v1",
            "kind": "MachineConfig",
            "metadata": metadata,
            "spec": spec,
        },
        indent=1,
    )


def _file(path: str, text: FileText) -> dict[str, Any]:
    content, mode = text if isinstance(text, tuple) else (text, 0o644)
    return {"path": path, "mode": mode, "overwrite": True, "contents": {"source": "data:," + quote(content)}}
