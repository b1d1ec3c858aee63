"""GLib, Gio and libostree through GObject introspection, with the version that the stand is written for."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import gi
from gi.repository import Gio, GLib

gi.require_version("OSTree", "1.0")
# Importing it by statement would have to stand above the line that says which version.
OSTree: Any = import_module("gi.repository.OSTree")

__all__ = ["GLib", "Gio", "OSTree"]
