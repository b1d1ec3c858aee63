"""A deployment's origin file (rpm-ostree.md 3.5)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Optional

from tests.stand.introspection import GLib
from tests.stand.rpmostreed.errors import OperationFailed


@dataclass(frozen=True)
class Origin:
    """What a deployment was made from. Exactly one of ``image`` and ``refspec`` is set."""

    image: str = ""
    refspec: str = ""
    override_commit: str = ""
    custom_url: str = ""
    custom_description: str = ""
    unconfigured_state: str = ""
    packages: tuple[str, ...] = ()
    local_packages: tuple[str, ...] = ()  # items "sha256:nevra"
    removed: tuple[str, ...] = ()
    regenerate_initramfs: bool = False
    initramfs_args: tuple[str, ...] = ()
    initramfs_etc: tuple[str, ...] = ()
    cliwrap: bool = False

    @property
    def layers(self) -> bool:
        """Whether a tree made from this origin may differ from its base."""
        return bool(self.packages or self.local_packages or self.removed or self.regenerate_initramfs)

    @property
    def local_nevras(self) -> tuple[str, ...]:
        return tuple(item.rpartition(":")[2] for item in self.local_packages)


_STRINGS = (
    ("origin", "container-image-reference", "image"),
    ("origin", "refspec", "refspec"),
    ("origin", "override-commit", "override_commit"),
    ("origin", "custom-url", "custom_url"),
    ("origin", "custom-description", "custom_description"),
    ("origin", "unconfigured-state", "unconfigured_state"),
)
_LISTS = (
    ("packages", "requested", "packages"),
    ("packages", "requested-local", "local_packages"),
    ("overrides", "remove", "removed"),
    ("rpmostree", "initramfs-args", "initramfs_args"),
    ("rpmostree", "initramfs-etc", "initramfs_etc"),
)
_FLAGS = (("rpmostree", "regenerate-initramfs", "regenerate_initramfs"), ("rpmostree", "ex-cliwrap", "cliwrap"))


def read(keyfile: Optional[Any]) -> Origin:
    """The origin in a GLib.KeyFile as libostree gives it. Keys that rpm-ostree does not know are not kept.

    Raises OperationFailed with rpm-ostree's texts where it names no or two sources."""
    if keyfile is None:
        raise OperationFailed("Failed to find refspec/baserefspec/container-image-reference in origin")
    values: dict[str, Any] = {}
    for group, key, name in _STRINGS:
        values[name] = _text(keyfile, group, key)
    values["refspec"] = values["refspec"] or _text(keyfile, "origin", "baserefspec")
    if values["refspec"] and values["image"]:
        raise OperationFailed("Found both refspec/baserefspec and container-image-reference")
    if not values["refspec"] and not values["image"]:
        raise OperationFailed("Failed to find refspec/baserefspec/container-image-reference in origin")
    for group, key, name in _LISTS:
        values[name] = tuple(item for item in _text(keyfile, group, key).split(";") if item)
    for group, key, name in _FLAGS:
        values[name] = _text(keyfile, group, key) == "true"
    return Origin(**values)


def write(origin: Origin) -> Any:
    """The GLib.KeyFile of an origin. ostree origins with layers use ``baserefspec``, as rpm-ostree writes them."""
    keyfile = GLib.KeyFile()
    for group, key, name in _STRINGS:
        value = getattr(origin, name)
        if name == "refspec" and origin.layers:
            key = "baserefspec"
        if value:
            keyfile.set_string(group, key, value)
    for group, key, name in _LISTS:
        value = getattr(origin, name)
        if value:
            keyfile.set_value(group, key, "".join(item + ";" for item in value))
    for group, key, name in _FLAGS:
        if getattr(origin, name):
            keyfile.set_boolean(group, key, True)
    return keyfile


def _text(keyfile: Any, group: str, key: str) -> str:
    try:
        return str(keyfile.get_value(group, key))
    except GLib.Error:
        return ""
