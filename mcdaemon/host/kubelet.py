"""What the kubelet and the API server say about this node: the kubelet's own health endpoint, and the Ready condition.

The API server is asked with the kubelet's credentials, as the machine-config-daemon's node writer does (mcd.md 1.6):
the Node authorizer lets them read this node and nothing else is needed. Neither proxies of the environment nor other
CAs than the one of the kubeconfig have a say, and no key or token gets into an error.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import json
import os
import re
import socket
import ssl
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Optional
from urllib.parse import quote, urlsplit

import requests
import urllib3

from mcdaemon import textfile
from mcdaemon.document import Malformed, read_yaml
from mcdaemon.errors import Broken, Failure

CONNECT_TIMEOUT, READ_TIMEOUT, TOTAL_TIMEOUT = 5.0, 5.0, 15.0
"""Seconds to connect, between two pieces of an answer, and for all of it."""

_MOST_BYTES = 4 << 20
_CERTIFICATE = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_COMMON_NAME = b"\x06\x03\x55\x04\x03"  # OID 2.5.4.3 in DER
_USER = "system:node:"


class Unreachable(Failure):
    """Nobody answered, or not as an API server that works: this node's network, or the server, is out of order."""

    code = "unreachable"


@dataclass(frozen=True)
class Access:
    """The way to an API server as a kubeconfig's current context has it. Contents are PEM; secrets are not shown.

    :ivar proxy: URL of the proxy that the kubeconfig names, "" for none.
    """

    server: str
    authority: bytes
    certificate: bytes = b""
    key: bytes = field(default=b"", repr=False)
    token: str = field(default="", repr=False)
    proxy: str = ""

    @property
    def node(self) -> str:
        """The node that the client certificate is made out to, "" when it does not say."""
        found = _CERTIFICATE.search(self.certificate.decode("ascii", "replace"))
        if not found:
            return ""
        try:
            names = _common_names(ssl.PEM_cert_to_DER_cert(found[0]))
        except (ValueError, binascii.Error):
            return ""
        return next((name[len(_USER) :] for name in names if name.startswith(_USER)), "")


def _common_names(der: bytes) -> list[str]:
    """All common names in a certificate, the issuer's and the subject's, without parsing the rest."""
    found = []
    for piece in der.split(_COMMON_NAME)[1:]:
        length, start = (piece[2], 3) if piece[1:2] == b"\x81" else (piece[1] if len(piece) > 1 else 0, 2)
        found.append(piece[start : start + length].decode("utf-8", "replace"))
    return found


def read_access(path: str) -> Access:
    """What the kubeconfig at `path` says. Raises Broken naming the place for all that is missing or not supported."""
    try:
        documents = read_yaml(textfile.read(path, _MOST_BYTES))
    except FileNotFoundError as error:
        raise Broken(
            f"cannot read the kubeconfig {path}: no such file", "has the kubelet joined the cluster?"
        ) from error
    except Malformed as error:
        raise Broken(f"cannot use the kubeconfig {path}: {error}") from error
    return _Kubeconfig(path, documents[0].data if documents else None).access()


class _Kubeconfig:
    def __init__(self, path: str, data: object) -> None:
        self._path = path
        self._data: Mapping[str, Any] = data if isinstance(data, Mapping) else {}

    def access(self) -> Access:
        context = self._named("contexts", "context", str(self._data.get("current-context") or ""))
        cluster = self._named("clusters", "cluster", str(context.get("cluster") or ""))
        user = self._named("users", "user", str(context.get("user") or ""))
        server = str(cluster.get("server") or "")
        if urlsplit(server).scheme != "https":
            raise self._refusal(f"the server {server!r} is not an https:// URL")
        for name, place in (("exec", user), ("auth-provider", user), ("tls-server-name", cluster)):
            if place.get(name):
                raise self._refusal(f"{name} is not supported")
        authority = self._content(cluster, "certificate-authority")
        if not authority or cluster.get("insecure-skip-tls-verify"):
            raise self._refusal("it names no certificate authority, and an unverified server is not asked")
        token = str(user.get("token") or "")
        if not token and user.get("tokenFile"):
            token = self._file(str(user["tokenFile"])).decode("utf-8", "replace").strip()
        return Access(
            server.rstrip("/"),
            authority,
            self._content(user, "client-certificate"),
            self._content(user, "client-key"),
            token,
            str(cluster.get("proxy-url") or ""),
        )

    def _named(self, plural: str, singular: str, name: str) -> Mapping[str, Any]:
        entries = self._data.get(plural)
        for entry in entries if isinstance(entries, list) else []:
            if isinstance(entry, Mapping) and entry.get("name") == name and isinstance(entry.get(singular), Mapping):
                found: Mapping[str, Any] = entry[singular]
                return found
        raise self._refusal(f"/{plural} has no {name!r}")

    def _content(self, where: Mapping[str, Any], name: str) -> bytes:
        if where.get(f"{name}-data"):
            try:
                return base64.b64decode(str(where[f"{name}-data"]), validate=True)
            except binascii.Error as error:
                raise self._refusal(f"{name}-data is not base64") from error
        return self._file(str(where[name])) if where.get(name) else b""

    def _file(self, name: str) -> bytes:
        path = os.path.join(os.path.dirname(self._path), name)
        try:
            return textfile.read(path, _MOST_BYTES).encode()
        except FileNotFoundError as error:
            raise self._refusal(f"{path} is not there") from error

    def _refusal(self, problem: str) -> Broken:
        return Broken(f"cannot use the kubeconfig {self._path}: {problem}")


@dataclass(frozen=True)
class Kubelet:
    """Whom to ask. `healthz`: URL of the health endpoint, "" for not at all; `kubeconfig`: path, "" for not at all.

    `node`: the node's name, "" for the one in the client certificate, or else the host's name as the kubelet takes it.
    `boot_id`: of this boot; what the API server still knows from before the reboot does not count.
    """

    healthz: str
    kubeconfig: str
    node: str
    boot_id: str

    def trouble(self) -> str:
        """What is not well, "" when all is. Raises Unreachable when the API server cannot be asked."""
        try:
            return (self.healthz and self._endpoint()) or (self.kubeconfig and self._ready())
        except Broken as error:
            return str(error)

    def _endpoint(self) -> str:
        """Unlike the machine-config-daemon, an answer that says "not ok" counts (mcd.md, defect 49)."""
        try:
            status, body = _get(self.healthz)
        except Unreachable as error:
            return f"the kubelet's health endpoint: {error}"
        text = body.decode("utf-8", "replace").strip()
        return "" if status == 200 and text == "ok" else f"{self.healthz} answers {status}: {_first_line(text)}"

    def _ready(self) -> str:
        access = read_access(self.kubeconfig)
        node = self.node or access.node or socket.gethostname().lower()
        headers = {"Authorization": f"Bearer {access.token}"} if access.token else {}
        url = f"{access.server}/api/v1/nodes/{quote(node, safe='')}"
        status, body = _get(url, headers, access)
        if status == 429 or status >= 500:
            raise Unreachable(f"{access.server} answers {status} when asked for the node {node}")
        if status != 200:
            return f"{access.server} answers {status} when asked for the node {node}"
        try:
            return not_ready(json.loads(body), self.boot_id)
        except (ValueError, RecursionError):
            raise Unreachable(f"{access.server} answers with something else than a node") from None


def not_ready(found: object, boot_id: str) -> str:
    """Why a Node object (v1) does not say that the node is ready in this boot, "" when it does.

    The API server keeps the Ready condition of before the reboot until the kubelet posts again, and it posts its boot
    id with it: without that comparison a node that has no network any more would look ready for most of a minute.
    """
    node: Any = found if isinstance(found, Mapping) else {}
    try:
        name, status = node["metadata"]["name"], node["status"]
        ready = next((each for each in status.get("conditions", ()) if each["type"] == "Ready"), None)
        seen = status["nodeInfo"]["bootID"]
    except (KeyError, TypeError, AttributeError):
        return "the API server's answer is not a node that a kubelet has registered"
    if seen != boot_id:
        return f"the node {name} has not reported itself to the API server since this boot"
    if ready is None or ready.get("status") != "True":
        why = _first_line(str(ready.get("message") or ready.get("reason") or "")) if ready else "no such condition"
        return f"the node {name} is not Ready: {why}"
    return ""


def _get(url: str, headers: Optional[Mapping[str, str]] = None, access: Optional[Access] = None) -> tuple[int, bytes]:
    """(status, body) of one request. Raises Unreachable, also for an answer that is too slow or too large."""
    host = urlsplit(url).netloc.rpartition("@")[2]
    deadline = time.monotonic() + TOTAL_TIMEOUT
    try:
        with contextlib.ExitStack() as stack:
            session = stack.enter_context(requests.Session())
            session.trust_env = False
            if access is not None:
                session.verify = stack.enter_context(_as_file(access.authority))
                session.proxies = {"https": access.proxy} if access.proxy else {}
                if access.certificate:
                    pair = (access.certificate, access.key or access.certificate)
                    session.cert = tuple(stack.enter_context(_as_file(each)) for each in pair)
            session.headers.update({"Accept-Encoding": "identity", "User-Agent": "mcdaemon", **(headers or {})})
            limits = (CONNECT_TIMEOUT, READ_TIMEOUT)
            answer = stack.enter_context(session.get(url, timeout=limits, allow_redirects=False, stream=True))
            body = b""
            for piece in _pieces(answer):
                body += piece
                if len(body) > _MOST_BYTES or time.monotonic() > deadline:
                    raise Unreachable(f"{host} does not come to an end with its answer")
            return answer.status_code, body
    except requests.exceptions.Timeout as error:
        raise Unreachable(f"{host} does not answer in time") from error
    except (requests.exceptions.RequestException, urllib3.exceptions.HTTPError, ValueError, OSError) as error:
        raise Unreachable(f"cannot reach {host}: {_cause(error)}") from error


def _pieces(answer: requests.Response) -> Iterator[bytes]:
    """The body as it arrives, so that the deadline is looked at even while a server drips."""
    read1 = getattr(answer.raw, "read1", None)
    if read1 is None:  # urllib3 before 2.3 waits until a piece is full
        return iter(answer.iter_content(16))
    return iter(lambda: bytes(read1(65536)), b"")


@contextlib.contextmanager
def _as_file(content: bytes) -> Iterator[str]:
    """A path for what wants one; in memory, so that a key is on no disk, also not after a crash."""
    descriptor = os.memfd_create("mcdaemon", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, content)
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def _cause(error: BaseException) -> str:
    """The innermost reason in words; the outer ones repeat it with addresses of objects."""
    reason = getattr(error.args[0] if error.args else error, "reason", None)
    return _first_line(str(getattr(reason, "strerror", None) or reason or error))


def _first_line(text: str) -> str:
    return "".join(char for char in (text.splitlines() or [""])[0][:200] if char.isprintable())
