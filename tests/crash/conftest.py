"""The nodes of the crash tests are those of the field tests."""

from __future__ import annotations

from tests.field.conftest import aged, base, disks, make_node, node, old, push, registry

__all__ = ["aged", "base", "disks", "make_node", "node", "old", "push", "registry"]
