"""What an image says of itself: its version and when it was made, from the manifest's annotations or the config."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

VERSION_LABELS = ("org.opencontainers.image.version", "version")
"""In the order in which rpm-ostree looks for the `version` of a deployment (rpm-ostree.md 3.2)."""

_CREATED = "org.opencontainers.image.created"
_LIMIT = 128


@dataclass(frozen=True)
class Description:
    """`version` as labelled, `created` in RFC 3339; "" where the image does not say."""

    version: str = ""
    created: str = ""


def from_annotations(annotations: object) -> Description:
    """From a manifest's `annotations`; whatever else stands there says nothing."""
    return Description(_first(annotations, VERSION_LABELS), _first(annotations, (_CREATED,)))


def from_config(body: bytes) -> Description:
    """From an image's config; one that cannot be read says nothing."""
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return Description()
    if not isinstance(document, dict):
        return Description()
    config = document.get("config")
    labels = config.get("Labels") if isinstance(config, dict) else None
    return Description(_first(labels, VERSION_LABELS), _first(labels, (_CREATED,)) or _first(document, ("created",)))


def _first(values: object, keys: tuple[str, ...]) -> str:
    """The first of the keys that has a text; bounded, because it is shown to people."""
    if not isinstance(values, Mapping):
        return ""
    found = (values.get(key) for key in keys)
    text = next((value for value in found if isinstance(value, str) and value), "")
    return "".join(c for c in text if c.isprintable())[:_LIMIT]
