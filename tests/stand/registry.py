"""A real registry (Debian's docker-registry) on loopback, whose images tests push, delete and count requests of."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Optional

import requests as http

from tests.stand import images

START_TIMEOUT = 15.0
STOP_TIMEOUT = 10.0
REQUEST_TIMEOUT = 10.0
_PORT_TRIES = 5

# One account for every registry that asks for one. The registry wants bcrypt, which Python's library lost in 3.13.
USER, PASSWORD = "node", "not-a-secret"
_HTPASSWD = "$2b$04$mcdaemonstandregistryuOJ.X6kRkGv9R.ZAJhyoqQlvMaZEqjpS"

_ACCESS = re.compile(r'^\S+ - \S* ?\[[^\]]*\] "(?P<method>[A-Z]+) (?P<path>\S+) [^"]*" (?P<status>\d+) (?P<bytes>\d+)')


@dataclass(frozen=True)
class Request:
    """One line of the access log; `size` is the bytes of the answer's body."""

    method: str
    path: str
    status: int
    size: int

    @property
    def is_blob_fetch(self) -> bool:
        return self.method == "GET" and "/blobs/sha256:" in self.path and self.status < 300


@dataclass(frozen=True)
class Certificate:
    certificate: Path
    key: Path


class _PortTaken(Exception):
    """The port was free a moment ago."""


def make_certificate(folder: Path, address: str = "127.0.0.1") -> Certificate:
    """A self-signed certificate for an IP address, made by openssl."""
    folder.mkdir(parents=True, exist_ok=True)
    made = Certificate(folder / "registry.crt", folder / "registry.key")
    argv = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    argv += ["-days", "2", "-subj", "/CN=stand", "-addext", f"subjectAltName=IP:{address}"]
    argv += ["-keyout", str(made.key), "-out", str(made.certificate)]
    subprocess.run(argv, check=True, capture_output=True, timeout=30, stdin=subprocess.DEVNULL)
    return made


class Registry:
    """`docker-registry serve` on 127.0.0.1 with deletion on; `folder` keeps its data, config and log.

    `password_needed` makes it ask for USER and PASSWORD; `certificate` makes it speak TLS.
    """

    def __init__(
        self,
        folder: Path,
        *,
        password_needed: bool = False,
        certificate: Optional[Certificate] = None,
        port: int = 0,
    ) -> None:
        self._folder = folder
        self._password_needed = password_needed
        self._certificate = certificate
        self._port = port or _free_port()
        self._port_is_promised = bool(port)
        self._process: Optional[subprocess.Popen[bytes]] = None

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self._port}"

    @property
    def url(self) -> str:
        return f"{'https' if self._certificate else 'http'}://{self.host}"

    @property
    def log(self) -> Path:
        return self._folder / "access.log"

    def __enter__(self) -> Registry:
        self.start()
        return self

    def __exit__(
        self, kind: Optional[type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Serve (again), on the same port, and return when it listens. Raises RuntimeError with its own words."""
        if self._process is not None:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        for _ in range(_PORT_TRIES):
            try:
                self._start_once()
                return
            except _PortTaken:
                if self._port_is_promised:
                    break
                self._port = _free_port()
        raise RuntimeError(f"cannot start docker-registry: somebody else listens on {self.host}")

    def _start_once(self) -> None:
        config = self._folder / "config.yml"
        config.write_text(self._config())
        errors = self._folder / "registry.log"
        seen = errors.stat().st_size if errors.exists() else 0
        with self.log.open("ab") as access, errors.open("ab") as log:
            # It must not outlive tests that are killed. Start it from a thread that lasts: the signal follows that.
            argv = ["setpriv", "--pdeathsig", "TERM", "docker-registry", "serve", str(config)]
            self._process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=access, stderr=log)
        try:
            self._wait_until_it_listens(errors, seen)
            self._port_is_promised = True
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Go down, data kept: whoever connects now is refused."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(STOP_TIMEOUT)

    def delete(self, repository: str, digest: str) -> None:
        """Delete a manifest; every tag on it goes too. The next one who asks hears "manifest unknown"."""
        self._call("DELETE", f"/v2/{repository}/manifests/{digest}").raise_for_status()

    def delete_blob(self, repository: str, digest: str) -> None:
        """Delete a config or layer, which leaves an image that looks complete until somebody reads that blob."""
        self._call("DELETE", f"/v2/{repository}/blobs/{digest}").raise_for_status()

    def tags(self, repository: str) -> tuple[str, ...]:
        answer = self._call("GET", f"/v2/{repository}/tags/list")
        if answer.status_code == 404:
            return ()
        answer.raise_for_status()
        return tuple(sorted(json.loads(answer.text).get("tags") or ()))

    def requests(self) -> tuple[Request, ...]:
        """All requests since the folder was new, oldest first (those of this object's own methods included)."""
        if not self.log.exists():
            return ()
        found = (_ACCESS.match(line) for line in self.log.read_text(errors="replace").splitlines())
        return tuple(Request(m["method"], m["path"], int(m["status"]), int(m["bytes"])) for m in found if m)

    def blob_fetches(self) -> tuple[Request, ...]:
        """The requests that moved a config or a layer."""
        return tuple(request for request in self.requests() if request.is_blob_fetch)

    def forget_requests(self) -> None:
        """Start counting afresh; the server appends, so truncating is safe."""
        if self.log.exists():
            with self.log.open("r+b") as log:
                log.truncate(0)

    def _call(self, method: str, path: str) -> http.Response:
        return http.request(
            method,
            self.url + path,
            timeout=REQUEST_TIMEOUT,
            headers={"Accept": f"{images.MANIFEST}, {images.INDEX}"},
            auth=(USER, PASSWORD) if self._password_needed else None,
            verify=str(self._certificate.certificate) if self._certificate else True,
        )

    def _wait_until_it_listens(self, log: Path, seen: int) -> None:
        """Its own word for it: a connection may be accepted by somebody else who has the port."""
        assert self._process is not None
        deadline = time.monotonic() + START_TIMEOUT
        while True:
            # Doubles as the pause between two looks, and ends at once when the server dies.
            try:
                status: Optional[int] = self._process.wait(0.02)
            except subprocess.TimeoutExpired:
                status = None
            with log.open("rb") as stream:
                stream.seek(seen)
                said = stream.read().decode("utf-8", "replace")
            if status is not None:
                if "address already in use" in said:
                    raise _PortTaken
                raise RuntimeError(f"cannot start docker-registry: exit status {status}: {said[-800:]}")
            if "listening on" in said:
                return
            if time.monotonic() > deadline:
                raise RuntimeError(f"cannot start docker-registry on {self.host} in {START_TIMEOUT} s")

    def _config(self) -> str:
        lines: Sequence[str] = [
            "version: 0.1",
            "log: {level: info, accesslog: {disabled: false}}",
            "storage:",
            f"  filesystem: {{rootdirectory: {json.dumps(str(self._folder / 'data'))}}}",
            "  delete: {enabled: true}",
            "http:",
            f"  addr: {self.host}",
            "  secret: stand",
            *self._tls_lines(),
            *self._auth_lines(),
        ]
        return "\n".join(lines) + "\n"

    def _tls_lines(self) -> Sequence[str]:
        if self._certificate is None:
            return ()
        return (
            "  tls:",
            f"    certificate: {json.dumps(str(self._certificate.certificate))}",
            f"    key: {json.dumps(str(self._certificate.key))}",
        )

    def _auth_lines(self) -> Sequence[str]:
        if not self._password_needed:
            return ()
        accounts = self._folder / "htpasswd"
        accounts.write_text(f"{USER}:{_HTPASSWD}\n")
        return ("auth:", f"  htpasswd: {{realm: stand, path: {json.dumps(str(accounts))}}}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
