"""The packages of a base image, from the small database that the stand's images carry.

``/usr/share/stand/base-packages/NAME.list`` holds one absolute path per line. Lines of the form ``# key: value`` may
say more: ``epoch``, ``version``, ``release``, ``arch``, ``provides`` (names, separated by blanks).
"""

from __future__ import annotations

import platform
from typing import Any

from tests.stand.introspection import Gio, GLib
from tests.stand.rpmostreed.rpm import Package

FOLDER = "usr/share/stand/base-packages"


def read(repo: Any, commit: str) -> dict[str, Package]:
    """The base packages of a commit by name; empty for an image without a database."""
    _, root, _ = repo.read_commit(commit, None)
    folder = root.resolve_relative_path(FOLDER)
    found = {}
    try:
        # The enumerator is lazy: what is wrong with the folder shows at the first child.
        children = list(folder.enumerate_children("standard::name", Gio.FileQueryInfoFlags.NOFOLLOW_SYMLINKS, None))
    except GLib.Error as error:
        if error.matches(Gio.io_error_quark(), Gio.IOErrorEnum.NOT_FOUND):
            return {}
        raise
    for child in children:
        name = child.get_name()
        if name.endswith(".list"):
            _, content, _ = folder.get_child(name).load_contents(None)
            found[name[: -len(".list")]] = parse(name[: -len(".list")], bytes(content).decode())
    return found


def parse(name: str, text: str) -> Package:
    """One package from its list."""
    facts = {"epoch": "0", "version": "1", "release": "1", "arch": platform.machine(), "provides": ""}
    files = []
    for line in text.splitlines():
        if line.startswith("#"):
            key, _, value = line[1:].partition(":")
            facts[key.strip()] = value.strip()
        elif line.strip():
            files.append(line.strip())
    return Package(
        name,
        int(facts["epoch"]),
        facts["version"],
        facts["release"],
        facts["arch"],
        (name, *facts["provides"].split()),
        (),
        tuple(files),
    )


def list_path(package: Package) -> str:
    """Where a base package's list is in the tree."""
    return f"{FOLDER}/{package.name}.list"
