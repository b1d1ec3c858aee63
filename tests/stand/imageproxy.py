"""A client of ``skopeo experimental-image-proxy``, the program through which rpm-ostree reads container images.

The protocol is JSON over a SOCK_SEQPACKET socket; bulk data comes through pipes whose read ends are passed with the
replies (containers-image-proxy-rs is the client that rpm-ostree uses). Nothing is answered by this module itself:
an error always carries skopeo's own text.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import subprocess
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Optional

from tests.stand.isolation import private

_PACKET = 64 * 1024
_CHUNK = 256 * 1024
# One request may fetch a whole layer; what matters is that a dead registry ends in an error at some time.
REQUEST_TIMEOUT = 300.0


class ProxyError(Exception):
    """skopeo refused a request. ``method`` is the request's name, ``text`` what skopeo said."""

    def __init__(self, method: str, text: str) -> None:
        super().__init__(f"failed to invoke method {method}: {text}")
        self.method = method
        self.text = text


class ImageProxy:
    """One skopeo child. Use as a context manager; not for several threads at once, ``kill`` excepted."""

    def __init__(
        self, authfile: str = "", environment: Optional[dict[str, str]] = None, tls_verify: Optional[bool] = None
    ) -> None:
        """Without ``authfile`` registries are asked anonymously; ``tls_verify`` overrides registries.conf."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout(REQUEST_TIMEOUT)
        credentials = ["--authfile", authfile] if authfile else ["--no-creds"]
        if tls_verify is not None:
            credentials.append(f"--tls-verify={str(tls_verify).lower()}")
        self._socket = ours
        # The child must not outlive a daemon that is killed in the middle of a pull; rpm-ostree does it this way too.
        argv = ["setpriv", "--pdeathsig", "TERM", "skopeo", "experimental-image-proxy", "--sockfd", "0", *credentials]
        if not Path("/run/ostree-booted").exists():
            argv = private(argv)  # outside of a node its caches would be the host's
        self._child = subprocess.Popen(
            argv, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment
        )
        theirs.close()

    def __enter__(self) -> ImageProxy:
        try:
            self._request("Initialize")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def kill(self) -> None:
        """Ends the child at once (from any thread); a running request then fails."""
        self._child.kill()

    def close(self) -> None:
        """Closes the connection and waits for the child."""
        self._socket.close()
        try:
            self._child.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.communicate(timeout=10)

    def open_image(self, name: str) -> int:
        """The handle of the image ``name`` (``docker://…``, ``containers-storage:…``, ``oci:…``)."""
        value, _, _ = self._request("OpenImage", name)
        return int(str(value))

    def close_image(self, image: int) -> None:
        self._request("CloseImage", image)

    def manifest(self, image: int) -> tuple[str, bytes]:
        """The digest of the original manifest and the manifest for this platform, as OCI JSON."""
        value, pipe, pipe_id = self._request("GetManifest", image)
        return str(value), self._read_all(pipe, pipe_id)

    def config(self, image: int) -> bytes:
        """The image's full configuration as OCI JSON."""
        _, pipe, pipe_id = self._request("GetFullConfig", image)
        return self._read_all(pipe, pipe_id)

    def blob_size(self, image: int, digest: str) -> int:
        """The size that the source itself gives for a blob; needed where only a diff id is known."""
        value, pipe, pipe_id = self._request("GetBlob", image, digest, 0)
        os.close(pipe)
        with contextlib.suppress(ProxyError):  # it says that size 0 was wrong, or that nobody read
            self._request("FinishPipe", pipe_id)
        return int(str(value))

    def fetch(self, image: int, digest: str, size: int, target: IO[bytes]) -> None:
        """Copies a blob to ``target``. Raises ProxyError where skopeo finds it missing, short or corrupt."""
        _, pipe, pipe_id = self._request("GetBlob", image, digest, size)
        checksum = hashlib.sha256()
        for chunk in self._read(pipe, pipe_id):
            checksum.update(chunk)
            target.write(chunk)
        target.flush()

    def _read_all(self, pipe: int, pipe_id: int) -> bytes:
        return b"".join(self._read(pipe, pipe_id))

    def _read(self, pipe: int, pipe_id: int) -> Iterator[bytes]:
        # The proxy closes its end of the pipe in FinishPipe only, so that request has to run beside the reading.
        failure: list[Exception] = []
        finisher = threading.Thread(target=self._finish, args=(pipe_id, failure), daemon=True)
        finisher.start()
        try:
            with open(pipe, "rb", buffering=0) as stream:
                while True:
                    chunk = stream.read(_CHUNK)
                    if not chunk:
                        break
                    yield chunk
        finally:
            finisher.join(REQUEST_TIMEOUT)
        if failure:
            raise failure[0]

    def _finish(self, pipe_id: int, failure: list[Exception]) -> None:
        try:
            self._request("FinishPipe", pipe_id)
        except (ProxyError, OSError) as error:
            failure.append(error)

    def _request(self, method: str, *arguments: object) -> tuple[object, int, int]:
        """Sends one request. The reply's value, and the pipe with its id (-1, 0 without a pipe)."""
        try:
            self._socket.send(json.dumps({"method": method, "args": list(arguments)}).encode())
            data, descriptors, _, _ = socket.recv_fds(self._socket, _PACKET, 1)
        except OSError as error:
            raise ProxyError(method, f"skopeo proxy: {error}") from error
        if not data:
            raise ProxyError(method, f"skopeo proxy unexpectedly exited: {self._last_words()}")
        reply = json.loads(data)
        if not reply["success"]:
            for descriptor in descriptors:
                os.close(descriptor)
            raise ProxyError(method, str(reply["error"]))
        return reply["value"], _one(descriptors), int(reply.get("pipeid") or 0)

    def _last_words(self) -> str:
        try:
            _, stderr = self._child.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            return "still running"
        return bytes(stderr or b"").decode(errors="replace").strip() or f"exit status {self._child.returncode}"


def _one(descriptors: Sequence[int]) -> int:
    return descriptors[0] if descriptors else -1
