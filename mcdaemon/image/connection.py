"""HTTP to registries: trust, proxies, redirects, deadlines and bounds, and what went wrong in a Verdict's terms.

Nothing here retries; whoever asks decides by the verdict.
"""

from __future__ import annotations

import email.utils
import http.cookiejar
import ipaddress
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Callable, Optional, Union
from urllib.parse import urljoin, urlsplit

import requests
import requests.adapters
import requests.utils
import urllib3

from mcdaemon.image.findings import Unavailable, Verdict, printable

# Where distributions keep the CAs that their administrator trusts; certifi's are nobody's choice on a node.
_CA_BUNDLES = ("etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem", "etc/ssl/certs/ca-certificates.crt")
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_REDIRECT_LIMIT = 5
_CHUNK = 65536
_SMALL_CHUNK = 64
RETRY_AFTER_LIMIT = 3600.0


@dataclass(frozen=True)
class Limits:
    """Seconds to connect, between two pieces of an answer, and for a whole answer; requests in parallel."""

    connect: float = 10.0
    read: float = 20.0
    total: float = 60.0
    parallel: int = 6


DEFAULT_LIMITS = Limits()


@dataclass(frozen=True)
class Answer:
    """`redirected`: another host than the one asked gave it. `length` is Content-Length, or -1."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    url: str
    redirected: bool = False

    @property
    def length(self) -> int:
        text = self.headers.get("Content-Length", "")
        return int(text) if text.isdecimal() else -1

    @property
    def retry_after(self) -> Optional[float]:
        """Seconds, from either form of Retry-After, at most an hour; None where the server did not say."""
        text = self.headers.get("Retry-After", "").strip()
        if text.isdecimal():
            return min(float(text), RETRY_AFTER_LIMIT)
        try:
            when = email.utils.parsedate_to_datetime(text)
        except (TypeError, ValueError, IndexError):
            return None
        if when.tzinfo is None:
            when = when.replace(tzinfo=timezone.utc)
        wait = (when - datetime.now(timezone.utc)).total_seconds()
        return min(max(wait, 0.0), RETRY_AFTER_LIMIT)


def host_ca_bundle(root: Path = Path("/")) -> Optional[Path]:
    """The host's own CA bundle, or None."""
    return next((root / name for name in _CA_BUNDLES if (root / name).is_file()), None)


class Connections:
    """A pool of connections for the length of one resolution. Usable from several threads."""

    def __init__(
        self,
        ca_bundle: Optional[Path],
        limits: Limits = DEFAULT_LIMITS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ca_bundle = ca_bundle
        self._limits = limits
        self._clock = clock
        self._schemes: dict[str, str] = {}
        self._session = requests.Session()
        # Neither a ~/.netrc nor REQUESTS_CA_BUNDLE nor a cookie has a say: rpm-ostree's pull knows none of them.
        self._session.trust_env = False
        self._session.cookies.set_policy(http.cookiejar.DefaultCookiePolicy(allowed_domains=[]))
        adapter = requests.adapters.HTTPAdapter(pool_maxsize=limits.parallel, max_retries=0)
        self._session.mount("https://", adapter)
        self._session.mount("http://", adapter)

    def close(self) -> None:
        self._session.close()

    def ask(
        self, method: str, host: str, path: str, insecure: bool, headers: Mapping[str, str], size_limit: int
    ) -> Answer:
        """Ask a registry, by https; one that registries.conf calls insecure also unverified, then by plain http.

        Raises Unavailable.
        """
        if not insecure:
            return self.fetch(method, f"https://{host}{path}", False, headers, size_limit)
        scheme = self._schemes.get(host)
        if scheme is None:
            try:
                answer = self.fetch(method, f"https://{host}{path}", True, headers, size_limit)
                self._schemes[host] = "https"
                return answer
            except Unavailable as https_error:
                if https_error.verdict not in (Verdict.TLS, Verdict.UNREACHABLE):
                    raise
            scheme = "http"
        answer = self.fetch(method, f"{scheme}://{host}{path}", True, headers, size_limit)
        self._schemes[host] = scheme
        return answer

    def fetch(
        self,
        method: str,
        url: str,
        insecure: bool,
        headers: Mapping[str, str],
        size_limit: int,
        form: Optional[Mapping[str, str]] = None,
    ) -> Answer:
        """One request with its redirects. Authorization goes to no other host than the one that `url` names.

        Raises Unavailable: UNREACHABLE, TLS, or MALFORMED for an answer of more than `size_limit` bytes.
        """
        first, sent = urlsplit(url), dict(headers)
        deadline = self._clock() + self._limits.total
        for _ in range(_REDIRECT_LIMIT + 1):
            redirected = urlsplit(url)[:2] != first[:2]
            if redirected:
                sent.pop("Authorization", None)
            answer = self._once(method, url, insecure, sent, size_limit, deadline, form, redirected)
            location = answer.headers.get("Location", "")
            if answer.status not in _REDIRECTS or not location:
                return answer
            url, form = _target(url, location), None
        raise Unavailable(Verdict.MALFORMED, f"{first.netloc} redirects more than {_REDIRECT_LIMIT} times")

    def _once(
        self,
        method: str,
        url: str,
        insecure: bool,
        headers: Mapping[str, str],
        size_limit: int,
        deadline: float,
        form: Optional[Mapping[str, str]],
        redirected: bool,
    ) -> Answer:
        host = urlsplit(url).netloc.rpartition("@")[2]
        try:
            with self._session.request(
                method,
                url,
                headers={"Accept-Encoding": "identity", "User-Agent": "mcdaemon", **headers},
                data=form,
                timeout=(self._limits.connect, self._limits.read),
                allow_redirects=False,
                stream=True,
                verify=self._verify(url, insecure),
                proxies=_proxies(url),
            ) as response:
                body = self._read(response, host, size_limit, deadline)
                return Answer(response.status_code, response.headers, body, url, redirected)
        except requests.exceptions.SSLError as error:
            raise Unavailable(Verdict.TLS, f"{host}: {_cause(error)}") from error
        except ValueError as error:
            # InvalidURL and InvalidHeader are ValueErrors; requests also lets some of urllib's through, for a Location.
            raise Unavailable(Verdict.MALFORMED, f"{host}: {printable(str(error))}") from error
        except requests.exceptions.Timeout as error:
            raise Unavailable(Verdict.UNREACHABLE, f"{host} does not answer in time") from error
        except (requests.exceptions.RequestException, urllib3.exceptions.HTTPError, OSError) as error:
            raise Unavailable(Verdict.UNREACHABLE, f"{host}: {_cause(error)}") from error

    def _read(self, response: requests.Response, host: str, size_limit: int, deadline: float) -> bytes:
        parts, size = [], 0
        for part in _pieces(response):
            size += len(part)
            parts.append(part)
            if size > size_limit:
                raise Unavailable(Verdict.MALFORMED, f"{host} answers with more than {size_limit} bytes")
            if self._clock() > deadline:
                raise Unavailable(Verdict.UNREACHABLE, f"{host} does not finish its answer in {self._limits.total} s")
        promised = response.headers.get("Content-Length", "")
        # urllib3 before 2.0 takes a connection that broke for the end of the answer.
        if response.request.method != "HEAD" and promised.isdecimal() and int(promised) != size:
            raise Unavailable(Verdict.UNREACHABLE, f"{host} broke off after {size} of {promised} bytes")
        return b"".join(parts)

    def _verify(self, url: str, insecure: bool) -> Union[bool, str]:
        if insecure or url.startswith("http:"):
            urllib3.disable_warnings(urllib3.exceptions.InsecureRequestWarning)
            return False
        if self._ca_bundle is None:
            raise Unavailable(Verdict.TLS, "this host has no CA bundle (ca-certificates) to verify a registry with")
        return str(self._ca_bundle)


def _target(url: str, location: str) -> str:
    """Where a redirect leads. Raises Unavailable(MALFORMED)."""
    try:
        target = urljoin(url, location)
        if urlsplit(target).scheme in ("http", "https"):
            return target
    except ValueError:
        pass
    raise Unavailable(Verdict.MALFORMED, f"{urlsplit(url).netloc} redirects to {printable(location)}")


def _pieces(response: requests.Response) -> Iterator[bytes]:
    """The body as it arrives, so that the deadline is looked at even while a server drips."""
    read1 = getattr(response.raw, "read1", None)
    if read1 is None:
        # urllib3 before 2.3 reads until a piece is full.
        yield from response.iter_content(_SMALL_CHUNK)
        return
    while True:
        piece: bytes = read1(_CHUNK)
        if not piece:
            return
        yield piece


def _proxies(url: str) -> dict[str, str]:
    """The environment's proxy for a URL; never one for the loopback, as Go's own rule is."""
    host = urlsplit(url).hostname or ""
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = host == "localhost"
    return {} if loopback else requests.utils.get_environ_proxies(url, no_proxy=None)


def _cause(error: BaseException) -> str:
    """The operating system's own words below the layers of urllib3's and requests' (IMG-22: never hide the cause)."""
    seen: set[int] = set()
    queue: list[object] = [error]
    told = str(error)
    while queue:
        one = queue.pop(0)
        if not isinstance(one, BaseException) or id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, socket.gaierror):
            return f"its name cannot be looked up: {one.strerror}"
        if isinstance(one, OSError) and one.strerror and not isinstance(one, requests.RequestException):
            return printable(one.strerror)
        told = str(one) or told
        queue += [getattr(one, "reason", None), one.__cause__, one.__context__, *one.args]
    return printable(told)
