"""A client of the registry protocol that checks whether a repository holds an image completely, and fetches nothing.

One GET for each level of the manifest, one HEAD for each blob. Source: OCI distribution specification.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from types import TracebackType
from typing import Optional

from mcdaemon.image.authorization import Authorizer, Endpoint
from mcdaemon.image.connection import DEFAULT_LIMITS, Answer, Connections, Limits
from mcdaemon.image.credentials import Credentials
from mcdaemon.image.description import Description, from_config
from mcdaemon.image.findings import Blob, Contents, Unavailable, Verdict, printable
from mcdaemon.image.manifest import ACCEPT, BYTES_LIMIT, Manifest, digest_of, parse, this_architecture
from mcdaemon.image.reference import DEFAULT_HOST, is_digest

# Docker Hub's registry does not live at the host that its images are named after.
_DOCKER_HUB = "registry-1.docker.io"
# A blob store behind a redirect signs its URLs for GET: these say no more than that it will not answer a HEAD.
_HEAD_NOT_ANSWERED = frozenset({400, 403, 405, 501})


class RegistryClient:
    """Asks registries for the length of one resolution, with one set of credentials."""

    def __init__(
        self,
        credentials: Credentials,
        ca_bundle: Optional[Path],
        limits: Limits = DEFAULT_LIMITS,
        architecture: str = "",
    ) -> None:
        self._limits = limits
        self._architecture = architecture or this_architecture()
        self._connections = Connections(ca_bundle, limits)
        self._authorizer = Authorizer(self._connections, credentials)
        self._manifests: dict[tuple[Endpoint, str], Manifest] = {}

    def __enter__(self) -> RegistryClient:
        return self

    def __exit__(
        self, kind: Optional[type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        self._connections.close()

    def digest(self, endpoint: Endpoint, tag: str) -> str:
        """What a tag stands for now. Raises Unavailable."""
        return self._manifest(endpoint, tag).digest

    def check(self, endpoint: Endpoint, digest: str, describe: bool = False) -> Contents:
        """Make sure that manifest, the child for this platform, config and every layer are there. Raises
        Unavailable.

        `describe`: the version is wanted too. Where the manifest does not tell it, the config is read in place of the
        HEAD that it is asked for otherwise: a few KiB, and no request more.
        """
        top = self._manifest(endpoint, digest)
        image = top
        if top.is_index:
            child = top.child_for(self._architecture).digest
            try:
                image = self._manifest(endpoint, child)
            except Unavailable as error:
                if error.verdict is not Verdict.ABSENT:
                    raise
                reason = f"the image for linux/{self._architecture} of the index is gone: {error.reason}"
                raise Unavailable(Verdict.INCOMPLETE, reason, opened=True) from error
            if image.is_index:
                raise Unavailable(Verdict.MALFORMED, "its manifest is an index of indexes", opened=True)
        description, blobs = image.description, image.blobs
        if describe and not description.version and image.config.size <= BYTES_LIMIT:
            description, blobs = self._config(endpoint, image.config), image.layers
        self._check_blobs(endpoint, blobs)
        return Contents(digest, image.digest, image.size, image.layers, description)

    def _config(self, endpoint: Endpoint, blob: Blob) -> Description:
        answer = self._ask("GET", endpoint, f"blobs/{blob.digest}", BYTES_LIMIT)
        if answer.status == 404:
            raise Unavailable(Verdict.INCOMPLETE, f"its config cannot be had: {blob.digest} is missing", opened=True)
        if answer.status != 200:
            raise self._refusal(endpoint, answer, f"blob {blob.digest}", opened=True)
        if digest_of(answer.body, blob.digest) != blob.digest:
            raise Unavailable(
                Verdict.MALFORMED, f"its config is not the one with the digest {blob.digest}", opened=True
            )
        return from_config(answer.body)

    def _manifest(self, endpoint: Endpoint, reference: str) -> Manifest:
        known = self._manifests.get((endpoint, reference))
        if known is not None:
            return known
        answer = self._ask("GET", endpoint, f"manifests/{reference}", BYTES_LIMIT)
        if answer.status != 200:
            raise self._refusal(endpoint, answer, f"manifest {reference}")
        manifest = parse(answer.body, reference if is_digest(reference) else "")
        self._manifests[endpoint, manifest.digest] = manifest
        return manifest

    def _check_blobs(self, endpoint: Endpoint, blobs: Sequence[Blob]) -> None:
        """Ask for every blob once, a few at a time; the first failure that is not a gap ends it."""
        asked = tuple({blob.digest: blob for blob in blobs if not blob.elsewhere}.values())
        pool = ThreadPoolExecutor(max(1, min(self._limits.parallel, len(asked))), "mcdaemon-head")
        try:
            futures = [pool.submit(self._gap, endpoint, blob) for blob in asked]
            # Each request has its own deadline; this one is for the sum of them.
            done, late = wait(futures, self._limits.total * max(1, len(asked)), FIRST_EXCEPTION)
            gaps = [gap for gap in (future.result() for future in done) if gap]
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
        if gaps:
            reason = f"{len(gaps)} of its {len(asked)} blobs cannot be had: {min(gaps)}"
            raise Unavailable(Verdict.INCOMPLETE, reason, opened=True)
        if late:
            raise Unavailable(Verdict.UNREACHABLE, f"{endpoint.host} does not answer in time", opened=True)

    def _gap(self, endpoint: Endpoint, blob: Blob) -> str:
        """What is wrong with one blob, or "". Raises Unavailable where the registry cannot be asked."""
        answer = self._ask("HEAD", endpoint, f"blobs/{blob.digest}", 0)
        if answer.status == 404:
            return f"{blob.digest} is missing"
        if answer.redirected and answer.status in _HEAD_NOT_ANSWERED:
            return ""
        if answer.status != 200:
            raise self._refusal(endpoint, answer, f"blob {blob.digest}", opened=True)
        if answer.length not in (-1, blob.size):
            return f"{blob.digest} has {answer.length} bytes instead of {blob.size}"
        return ""

    def _ask(self, method: str, endpoint: Endpoint, what: str, size_limit: int) -> Answer:
        header = self._authorizer.header(endpoint)
        answer = self._send(method, endpoint, what, size_limit, header)
        if answer.status == 401 and not answer.redirected:
            header = self._authorizer.renew(endpoint, answer, header)
            answer = self._send(method, endpoint, what, size_limit, header)
        return answer

    def _send(self, method: str, endpoint: Endpoint, what: str, size_limit: int, header: str) -> Answer:
        headers = {"Accept": ACCEPT} if method == "GET" else {}
        if header:
            headers["Authorization"] = header
        host = _DOCKER_HUB if endpoint.host == DEFAULT_HOST else endpoint.host
        return self._connections.ask(
            method, host, f"/v2/{endpoint.path}/{what}", endpoint.insecure, headers, size_limit
        )

    def _refusal(self, endpoint: Endpoint, answer: Answer, what: str, opened: bool = False) -> Unavailable:
        status = answer.status
        said = f"{endpoint.host} answers {status} for {what}"
        words = _registry_words(answer.body)
        said += f": {words}" if words else ""
        if status in (401, 403):
            refusal = self._authorizer.unauthorized(endpoint, status)
            refusal.opened = opened
            return refusal
        if status == 404:
            return Unavailable(Verdict.ABSENT, words or f"{what} is not there", opened=opened)
        if status == 429:
            return Unavailable(Verdict.RATE_LIMITED, said, answer.retry_after, opened)
        if status == 408 or status >= 500:
            return Unavailable(Verdict.UNREACHABLE, said, answer.retry_after, opened)
        return Unavailable(Verdict.MALFORMED, said, opened=opened)


def _registry_words(body: bytes) -> str:
    """The first error of the protocol's error document ("manifest unknown"), or ""."""
    try:
        first = json.loads(body)["errors"][0]
        return printable(str(first.get("message") or first.get("code") or ""))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return ""
