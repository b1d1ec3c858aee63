"""Credentials for registries, from the auth.json file that rpm-ostree would take.

ostree-ext opens the first of three files that exists and sends nothing where there is none (rpm-ostree.md 4.9); MCD
links the first of them to the kubelet's. So the kubelet's file comes last here: it is what that link will lead to.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Optional

from mcdaemon.errors import Broken, from_os_error

RPM_OSTREE_FILES = ("run/ostree/auth.json", "etc/ostree/auth.json", "usr/lib/ostree/auth.json")
KUBELET_FILE = "var/lib/kubelet/config.json"

_DOCKER_HUB = frozenset({"docker.io", "index.docker.io", "registry-1.docker.io"})


@dataclass(frozen=True)
class Login:
    """One account. Nothing of it shows in a repr, so that no log can have it."""

    user: str = field(default="", repr=False)
    password: str = field(default="", repr=False)
    identity_token: str = field(default="", repr=False)

    @property
    def basic(self) -> str:
        """The value of an Authorization header."""
        return "Basic " + base64.b64encode(f"{self.user}:{self.password}".encode()).decode()


@dataclass(frozen=True)
class Credentials:
    """The logins of one file; `file` is None where there is none (everything is then asked anonymously).

    `unreadable` are the keys of entries that cannot be decoded. As for containers/image, they matter only to whoever
    needs just these: one bad entry must not cut the node off from every other registry.
    """

    file: Optional[Path] = None
    logins: Mapping[str, Login] = field(default_factory=lambda: MappingProxyType({}), repr=False)
    seen_by_rpm_ostree: bool = True
    unreadable: frozenset[str] = frozenset()

    @classmethod
    def load(cls, root: Path = Path("/")) -> Credentials:
        """Read the first file that exists. A dangling link counts as missing, as for ostree-ext (IMG-17).

        Raises Broken that names the file and never what is in it.
        """
        for name in (*RPM_OSTREE_FILES, KUBELET_FILE):
            path = root / name
            try:
                text = path.read_bytes()
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as error:
                raise from_os_error(error, "read", path) from error
            logins, unreadable = _parse(text, path)
            return cls(path, MappingProxyType(logins), name != KUBELET_FILE, unreadable)
        return cls()

    def login(self, host: str, path: str) -> Optional[Login]:
        """The login for a repository: the longest key that is HOST/PATH or a parent of it, then HOST."""
        return next((self.logins[key] for key in _keys(host, path) if key in self.logins), None)

    def explain(self, host: str, path: str) -> str:
        """Where the credentials for a repository came from, for an error text (IMG-30)."""
        if self.file is None:
            return "there is no auth.json, so it was asked anonymously"
        unreadable = next((key for key in _keys(host, path) if key in self.unreadable), "")
        if unreadable:
            return f"the entry for {unreadable} in {self.file} cannot be decoded"
        if self.login(host, path) is None:
            return f"{self.file} has no credentials for it"
        return f"it refused the credentials in {self.file}"


def _keys(host: str, path: str) -> list[str]:
    """The keys that can name a repository, the closest first."""
    parts = [_normal(host), *path.split("/")]
    return ["/".join(parts[:length]) for length in range(len(parts), 0, -1)]


def _parse(text: bytes, path: Path) -> tuple[dict[str, Login], frozenset[str]]:
    logins: dict[str, Login] = {}
    unreadable = set()
    try:
        document = json.loads(text)
        auths = document.get("auths") or {}
        for key, entry in auths.items():
            try:
                login = _login(entry)
            except _UndecodableError:
                unreadable.add(_key(str(key)))
                continue
            if login is not None:
                logins[_key(str(key))] = login
    except (ValueError, AttributeError, TypeError, RecursionError):
        # The cause's text may hold a piece of the file: it is cut off here.
        raise Broken(
            f"cannot read {path}: it is not an auth.json", "see containers-auth.json(5); write it anew"
        ) from None
    return logins, frozenset(unreadable)


class _UndecodableError(Exception):
    """An entry is not base64 of user:password; its text is in no message."""


def _login(entry: Mapping[str, object]) -> Optional[Login]:
    token = str(entry.get("identitytoken") or "")
    encoded = str(entry.get("auth") or "")
    if not encoded:
        user, password = str(entry.get("username") or ""), str(entry.get("password") or "")
        return Login(user, password, token) if user or token else None
    try:
        user, colon, password = base64.b64decode(encoded, validate=True).decode("utf-8").partition(":")
    except (binascii.Error, UnicodeDecodeError):
        raise _UndecodableError from None
    return Login(user, password.rstrip("\0"), token) if colon else None


def _key(key: str) -> str:
    """Old Docker files have keys like https://index.docker.io/v1/: only the host counts there."""
    bare = key
    for scheme in ("https://", "http://"):
        if key.startswith(scheme):
            bare = key[len(scheme) :].partition("/")[0]
    host, slash, rest = bare.rstrip("/").partition("/")
    return _normal(host) + slash + rest


def _normal(host: str) -> str:
    return "docker.io" if host in _DOCKER_HUB else host
