"""An API server that knows one node: TLS with a CA of its own, client certificates and tokens, and faults."""

from __future__ import annotations

import base64
import json
import ssl
import subprocess
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Optional

NODE = "worker-0"
TOKEN = "stand-token"
_KEY = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]


def node_object(boot_id: str, ready: str = "True", message: str = "kubelet is posting ready status") -> dict[str, Any]:
    """A Node (v1) as far as anybody reads it."""
    return {
        "apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE},
        "status": {
            "conditions": [
                {"type": "MemoryPressure", "status": "False", "message": "ok"},
                {"type": "Ready", "status": ready, "reason": "Kubelet", "message": message},
            ],
            "nodeInfo": {"bootID": boot_id},
        },
    }  # fmt: skip


@dataclass
class Authority:
    """A CA in a folder, and certificates of it."""

    folder: Path

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._openssl("req", "-x509", *_KEY, "-subj", "/CN=stand-ca", "-addext", "keyUsage=critical,keyCertSign",
                      "-keyout", "ca.key", "-out", "ca.crt")  # fmt: skip

    @property
    def certificate(self) -> Path:
        return self.folder / "ca.crt"

    def issue(self, name: str, subject: str) -> tuple[Path, Path]:
        """(certificate, key) for a subject such as "/CN=x"; good for 127.0.0.1 as a server."""
        self._openssl("req", "-new", *_KEY, "-subj", subject, "-addext", "subjectAltName=IP:127.0.0.1",
                      "-keyout", f"{name}.key", "-out", f"{name}.csr")  # fmt: skip
        self._openssl("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial",
                      "-copy_extensions", "copy", "-days", "2", "-out", f"{name}.crt")  # fmt: skip
        return self.folder / f"{name}.crt", self.folder / f"{name}.key"

    def _openssl(self, *arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=self.folder, check=True, capture_output=True, timeout=30,
                       stdin=subprocess.DEVNULL)  # fmt: skip


@dataclass
class ApiServer:
    """`node`: what is answered; `status`: with which status. `asked`: (user, path) of each request.

    `slow`: the body comes byte by byte, for ever. It ends with the `with` block, or with `close`.
    """

    folder: Path
    node: dict[str, Any] = field(default_factory=dict)
    status: int = 200
    slow: bool = False
    asked: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.authority = Authority(self.folder)
        self._client = self.authority.issue("client", f"/O=system:nodes/CN=system:node:{NODE}")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*self.authority.issue("server", "/CN=127.0.0.1"))
        context.load_verify_locations(self.authority.certificate)
        context.verify_mode = ssl.CERT_OPTIONAL
        self._stop = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self._server.server_address[1]}"

    def kubeconfig(self, user: Optional[dict[str, str]] = None, cluster: Optional[dict[str, Any]] = None) -> str:
        """A kubeconfig as the kubelet's, everything in it; `user` and `cluster` in place of what they name."""
        certificate, key = (base64.b64encode(path.read_bytes()).decode() for path in self._client)
        ca = base64.b64encode(self.authority.certificate.read_bytes()).decode()
        whole = {"certificate-authority-data": ca, "server": self.url, **(cluster or {})}
        named = {"client-certificate-data": certificate, "client-key-data": key} if user is None else user
        return json.dumps({
            "apiVersion": "v1", "kind": "Config", "current-context": "system:node@stand",
            "clusters": [{"name": "stand", "cluster": whole}],
            "contexts": [{"name": "system:node@stand", "context": {"cluster": "stand", "user": "kubelet"}}],
            "users": [{"name": "other", "user": {}}, {"name": "kubelet", "user": named}],
        })  # fmt: skip

    def client(self) -> tuple[Path, Path]:
        """(certificate, key) of the kubelet, as files."""
        return self._client

    def close(self) -> None:
        self._stop.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> ApiServer:
        return self

    def __exit__(
        self, kind: Optional[type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        self.close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                user = server._user(self)
                server.asked.append((user, self.path))
                status, body = server._answer(user, self.path)
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.end_headers()
                while server.slow and not server._stop.wait(0.05):
                    self.wfile.write(b" ")
                    self.wfile.flush()
                self.wfile.write(body)

            def log_message(self, format: str, *arguments: object) -> None:
                """Nobody reads it."""

        return Handler

    def _user(self, handler: BaseHTTPRequestHandler) -> str:
        if handler.headers.get("Authorization") == f"Bearer {TOKEN}":
            return f"system:node:{NODE}"
        connection = handler.connection
        assert isinstance(connection, ssl.SSLSocket)
        subject: Any = (connection.getpeercert() or {}).get("subject", ())
        return next((value for part in subject for name, value in part if name == "commonName"), "system:anonymous")

    def _answer(self, user: str, path: str) -> tuple[int, bytes]:
        if user != f"system:node:{NODE}" or path != f"/api/v1/nodes/{NODE}":
            return 403, b'{"kind": "Status", "code": 403}'
        return self.status, json.dumps(self.node).encode()
