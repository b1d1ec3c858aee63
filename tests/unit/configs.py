"""Short ways to write MachineConfigs in tests."""

from __future__ import annotations

import base64
from typing import Any, Optional
from urllib.parse import quote_from_bytes

from mcdaemon.machineconfig.model import API_VERSION, KIND, MachineConfig, parse

Json = dict[str, Any]


def percent(content: bytes) -> str:
    return "data:," + quote_from_bytes(content, safe="")


def base64_url(content: bytes) -> str:
    return "data:text/plain;charset=utf-8;base64," + base64.b64encode(content).decode()


def file(path: str, content: bytes = b"x", **more: Any) -> Json:
    return {"path": path, "contents": {"source": percent(content)}, **more}


def document(
    name: str = "99-test",
    files: Optional[list[Any]] = None,
    units: Optional[list[Any]] = None,
    users: Optional[list[Any]] = None,
    labels: Optional[Json] = None,
    annotations: Optional[Json] = None,
    **spec: Any,
) -> Json:
    ignition: Json = {"ignition": {"version": "3.4.0"}}
    if files is not None:
        ignition["storage"] = {"files": files}
    if units is not None:
        ignition["systemd"] = {"units": units}
    if users is not None:
        ignition["passwd"] = {"users": users}
    metadata: Json = {"name": name}
    if labels is not None:
        metadata["labels"] = labels
    if annotations is not None:
        metadata["annotations"] = annotations
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": {"config": ignition, **spec}}


def config(name: str = "99-test", **parts: Any) -> MachineConfig:
    return parse(document(name, **parts), f"{name}.yaml")


def core(*keys: str, **more: Any) -> Json:
    return {"name": "core", "sshAuthorizedKeys": list(keys), **more}
