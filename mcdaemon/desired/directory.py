"""MachineConfig files in a directory of the node, rendered with the cluster's rules.

Files are written by people and by programs (git-sync, Ansible, a ConfigMap mount) that do not write them all at once,
so what is read counts only when nothing changed meanwhile.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from typing import Optional

from mcdaemon import textfile
from mcdaemon.desired import Desired
from mcdaemon.document import Document, Malformed, read_json, read_yaml
from mcdaemon.errors import Broken, Irreconcilable, Transient, from_os_error
from mcdaemon.machineconfig.model import API_VERSION, KIND, Limits, MachineConfig, parse
from mcdaemon.machineconfig.render import render

__all__ = ["Desired", "DirectorySource", "Token"]

_SUFFIXES = (".yaml", ".yml", ".json")
_ATTEMPTS = 3
_RETRY_SECONDS = 2.0

Token = tuple[tuple[str, int, int, int, int], ...]
"""(name, inode, size, mtime, ctime in ns) of the directory and each file in it: differs when something was changed."""


@dataclass(frozen=True)
class _Found:
    config: MachineConfig
    path: str


class DirectorySource:
    """The `directory` source: `path` of the directory, `pool` of the node, size limits in bytes.

    Files are those that end in .yaml, .yml or .json; hidden ones are left out. Each holds one or more MachineConfigs
    and nothing else.
    """

    def __init__(
        self, path: str, pool: str = "worker", limits: Optional[Limits] = None, max_source_bytes: int = 16 * 1024 * 1024
    ) -> None:
        self.path = str(path)
        self.pool = pool
        self._limits = limits or Limits()
        self._max_source_bytes = max_source_bytes
        self._last: Optional[tuple[Token, Optional[Desired]]] = None

    def token(self) -> Token:
        """What the directory looks like from outside, without reading a file; () when there is none.

        Two equal tokens mean that there is nothing new to read. Raises Irreconcilable when it cannot be looked at.
        """
        try:
            with os.scandir(self.path) as entries:
                names = sorted(entry.name for entry in entries if _counts(entry.name))
            return tuple(_look(os.path.join(self.path, name), name) for name in [".", *names])
        except FileNotFoundError:
            return ()
        except NotADirectoryError as error:
            raise Irreconcilable(f"cannot read {self.path}: it is not a directory") from error
        except OSError as error:
            raise Irreconcilable(str(from_os_error(error, "read", self.path))) from error

    def read(self) -> Optional[Desired]:
        """The desired config; None when the directory is absent or holds no MachineConfig: nothing is asked for.

        Raises Irreconcilable with file, line and JSON pointer for what cannot be used, Transient when the files do not
        come to rest. An unchanged directory is not read again.
        """
        for _attempt in range(_ATTEMPTS):
            before = self.token()
            if self._last is not None and self._last[0] == before:
                return self._last[1]
            try:
                desired = self._render(before)
            except FileNotFoundError as error:
                if self.token() == before:
                    raise Irreconcilable(f"cannot read {error.filename}: the link leads nowhere") from error
                continue
            except Irreconcilable:
                if self.token() != before:
                    continue
                raise
            if self.token() == before:
                self._last = (before, desired)
                return desired
        raise Transient(
            f"cannot read {self.path}: the files change while they are read", "", "", retry_after=_RETRY_SECONDS
        )

    def _render(self, token: Token) -> Optional[Desired]:
        names = [entry[0] for entry in token[1:]]
        if not names:
            return None
        self._require_trusted_directory()
        found: list[_Found] = []
        room = self._max_source_bytes
        for name in names:
            path = os.path.join(self.path, name)
            text = self._text(path, room)
            room -= len(text)
            found.extend(_Found(self._config(document, path), path) for document in _documents(text, path))
        if not found:
            return None
        _refuse_doubles(found)
        rendered = render([entry.config for entry in found], self.pool, self._limits)
        return Desired(rendered.config, rendered.release_image, rendered.overridden_by, self.path)

    def _require_trusted_directory(self) -> None:
        try:
            textfile.require_trusted(self.path, os.stat(self.path))
        except Broken as error:
            raise Irreconcilable(error.sentence, hint=error.hint) from error

    def _text(self, path: str, room: int) -> str:
        try:
            return textfile.read(path, room)
        except Broken as error:
            # What is wrong with a desired config is never wrong with the node: it goes on serving.
            raise Irreconcilable(error.sentence, hint=error.hint) from error

    def _config(self, document: Document, path: str) -> MachineConfig:
        _require_kind(document, path)
        try:
            return parse(document.data, path, self._limits)
        except Irreconcilable as error:
            line = document.line(error.field)
            sentence = error.sentence.replace(path, f"{path}: line {line}", 1) if line else error.sentence
            raise Irreconcilable(sentence, error.field, error.hint) from error


def _counts(name: str) -> bool:
    return name == "." or (name.endswith(_SUFFIXES) and not name.startswith("."))


def _look(path: str, name: str) -> tuple[str, int, int, int, int]:
    # Links are followed: a ConfigMap mount swaps a link in the middle of the path, and only the target changes.
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return name, 0, 0, 0, 0
    size = 0 if stat.S_ISDIR(status.st_mode) else status.st_size
    return name, status.st_ino, size, status.st_mtime_ns, status.st_ctime_ns


def _documents(text: str, path: str) -> list[Document]:
    try:
        documents = [read_json(text)] if path.endswith(".json") else read_yaml(text)
    except Malformed as error:
        raise Irreconcilable(f"cannot read {path}: {error}") from error
    if not documents:
        raise Irreconcilable(f"cannot use {path}: it is empty", hint="remove it, or write a MachineConfig")
    return documents


def _require_kind(document: Document, path: str) -> None:
    """Objects in a file say what they are; anything but a MachineConfig has been put here by mistake."""
    data = document.data
    kind = data.get("kind") if isinstance(data, dict) else None
    version = data.get("apiVersion") if isinstance(data, dict) else None
    line = document.line("/kind")
    place = f"{path}: line {line}" if line else path
    if kind != KIND or version != API_VERSION:
        found = f"{version} {kind}" if isinstance(kind, str) and isinstance(version, str) else "something else"
        raise Irreconcilable(
            f"cannot use {place}: expected a {API_VERSION} {KIND}, found {found[:120]!r}", "/kind", "move it elsewhere"
        )


def _refuse_doubles(found: list[_Found]) -> None:
    seen: dict[str, str] = {}
    for entry in found:
        if entry.config.name in seen:
            raise Irreconcilable(
                f"cannot use {entry.path}: the name {entry.config.name} is taken by {seen[entry.config.name]}",
                "/metadata/name",
            )
        seen[entry.config.name] = entry.path
