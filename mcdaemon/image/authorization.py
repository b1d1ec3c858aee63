"""How a registry wants to be asked: the WWW-Authenticate challenge, basic logins and bearer tokens.

Source: distribution's token specification (docs/spec/auth/token.md, oauth.md), as containers/image implements it.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Optional
from urllib.parse import urlencode, urlsplit

from mcdaemon.image.connection import Answer, Connections
from mcdaemon.image.credentials import Credentials, Login
from mcdaemon.image.findings import Unavailable, Verdict

_TOKEN_LIMIT = 1024 * 1024
_SCHEME = re.compile(r"\s*,?\s*([A-Za-z][A-Za-z0-9-]*)(?:\s+|$|(?=,))(?!=)")
_PARAMETER = re.compile(r'\s*,?\s*([A-Za-z_-]+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^\s,"]+))')


@dataclass(frozen=True)
class Endpoint:
    """A repository at a registry, by the name really contacted."""

    host: str
    path: str
    insecure: bool = False

    def __str__(self) -> str:
        return f"{self.host}/{self.path}"


@dataclass(frozen=True)
class Challenge:
    """`scheme` in lower case, `parameters` by lower-case name."""

    scheme: str
    parameters: Mapping[str, str]


def parse_challenges(header: str) -> tuple[Challenge, ...]:
    """All challenges of a WWW-Authenticate header; what cannot be read is left out."""
    found: list[Challenge] = []
    position = 0
    while position < len(header):
        scheme = _SCHEME.match(header, position)
        if scheme is None:
            break
        position = scheme.end()
        parameters: dict[str, str] = {}
        while True:
            parameter = _PARAMETER.match(header, position)
            if parameter is None:
                break
            quoted, bare = parameter.group(2), parameter.group(3)
            parameters[parameter.group(1).lower()] = re.sub(r"\\(.)", r"\1", quoted) if bare is None else bare
            position = parameter.end()
        found.append(Challenge(scheme.group(1).lower(), parameters))
    return tuple(found)


class Authorizer:
    """Gets and keeps, for the length of one resolution, what an Authorization header must say. Thread-safe."""

    def __init__(self, connections: Connections, credentials: Credentials) -> None:
        self._connections = connections
        self._credentials = credentials
        self._headers: dict[Endpoint, str] = {}
        self._lock = threading.Lock()

    def header(self, endpoint: Endpoint) -> str:
        """What worked before, or "" to ask without."""
        return self._headers.get(endpoint, "")

    def renew(self, endpoint: Endpoint, answer: Answer, refused: str) -> str:
        """What to say after a 401 `answer` to the header `refused`: a login, or a new token (the old one may have
        expired in the middle, IMG-49). Raises Unavailable(UNAUTHORIZED), or what asking for a token ran into.
        """
        with self._lock:
            known = self._headers.get(endpoint, "")
            if known != refused:
                return known
            header = self._answer(endpoint, answer)
            if header == refused:
                raise self.unauthorized(endpoint, answer.status)
            self._headers[endpoint] = header
            return header

    def unauthorized(self, endpoint: Endpoint, status: int) -> Unavailable:
        why = self._credentials.explain(endpoint.host, endpoint.path)
        return Unavailable(Verdict.UNAUTHORIZED, f"{endpoint.host} answers {status} for {endpoint.path}: {why}")

    def _answer(self, endpoint: Endpoint, answer: Answer) -> str:
        login = self._credentials.login(endpoint.host, endpoint.path)
        for challenge in parse_challenges(answer.headers.get("WWW-Authenticate", "")):
            if challenge.scheme == "bearer":
                return "Bearer " + self._token(endpoint, challenge, login)
            if challenge.scheme == "basic" and login is not None:
                return login.basic
        raise self.unauthorized(endpoint, answer.status)

    def _token(self, endpoint: Endpoint, challenge: Challenge, login: Optional[Login]) -> str:
        realm = challenge.parameters.get("realm", "")
        if urlsplit(realm).scheme not in ("http", "https"):
            raise Unavailable(Verdict.MALFORMED, f"{endpoint.host} names no token server that can be asked")
        scope = f"repository:{endpoint.path}:pull"
        service = challenge.parameters.get("service", "")
        query = {"scope": scope, **({"service": service} if service else {})}
        headers: dict[str, str] = {"Accept": "application/json"}
        if login is not None and login.identity_token:
            form = {"grant_type": "refresh_token", "refresh_token": login.identity_token, "client_id": "mcdaemon"}
            answer = self._connections.fetch(
                "POST", realm, endpoint.insecure, headers, _TOKEN_LIMIT, form={**form, **query}
            )
        else:
            if login is not None:
                headers["Authorization"] = login.basic
                query["account"] = login.user
            url = realm + ("&" if urlsplit(realm).query else "?") + urlencode(query)
            answer = self._connections.fetch("GET", url, endpoint.insecure, headers, _TOKEN_LIMIT)
        return self._read_token(endpoint, answer)

    def _read_token(self, endpoint: Endpoint, answer: Answer) -> str:
        place = urlsplit(answer.url).netloc
        if answer.status in (400, 401, 403):
            raise self.unauthorized(endpoint, answer.status)
        if answer.status == 429:
            reason = f"the token server {place} asks for patience"
            raise Unavailable(Verdict.RATE_LIMITED, reason, answer.retry_after)
        if answer.status != 200:
            reason = f"the token server {place} answers {answer.status}"
            raise Unavailable(Verdict.UNREACHABLE, reason, answer.retry_after)
        try:
            document = json.loads(answer.body)
            token = document.get("token") or document.get("access_token")
        except (ValueError, AttributeError, RecursionError):
            token = None
        if not isinstance(token, str) or not token.isprintable():
            raise Unavailable(Verdict.MALFORMED, f"the token server {place} gives no token")
        return token
