"""Which digest an image reference means, who holds it completely, and what to stage it from.

The order is containers-storage, the mirrors of registries.conf, the registry itself; looking stops at the first source
that is complete. Any local failure leads to the next source (IMG-01, IMG-02, IMG-54).

A tag is decided by the registry (through its mirrors), not by containers-storage: a local tag is whatever somebody
pulled once, it would differ from node to node of a pool (IMG-55), and rpm-ostree's pull would not have looked at it.
Only when no registry gives an answer is the image of exactly that name in containers-storage taken, and the finding
says so.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Callable, Optional

from mcdaemon.errors import Held, HoldReason, Irreconcilable
from mcdaemon.image.connection import DEFAULT_LIMITS, Limits, host_ca_bundle
from mcdaemon.image.findings import Contents, Finding, Source, Verdict
from mcdaemon.image.reference import OstreeReference, Reference, Transport, is_digest
from mcdaemon.image.registry import RegistryClient
from mcdaemon.image.search import Memory, NodeRules, Search
from mcdaemon.image.storage import Storage

__all__ = ["Finding", "Resolution", "Resolver", "Source", "Verdict", "hold_reason"]

_REASONS = {
    Verdict.UNAUTHORIZED: HoldReason.CREDENTIALS,
    Verdict.RATE_LIMITED: HoldReason.REGISTRY,
    Verdict.TLS: HoldReason.REGISTRY,
    Verdict.UNREACHABLE: HoldReason.REGISTRY,
    Verdict.POLICY: HoldReason.POLICY,
    Verdict.INCOMPLETE: HoldReason.IMAGE,
    Verdict.MALFORMED: HoldReason.IMAGE,
    Verdict.ABSENT: HoldReason.IMAGE,
}
_HINTS = {
    HoldReason.CREDENTIALS: "put a login for the registry where rpm-ostree looks: /run/ostree/auth.json or /etc/ostree",
    HoldReason.REGISTRY: "it is tried again; see that the registry can be reached and is trusted",
    HoldReason.POLICY: "allow the image in /etc/containers/policy.json and registries.conf, or desire another one",
    HoldReason.IMAGE: "push the image again, or desire another one",
}


@dataclass(frozen=True)
class Resolution:
    """What is known of one reference. `digest` is "" where nobody knows the tag; `size` in bytes is that of config and
    layers; `findings` are in the order in which the sources were asked."""

    reference: Reference
    digest: str
    findings: tuple[Finding, ...]
    size: int = 0

    @property
    def complete(self) -> bool:
        return self.chosen is not None

    @property
    def chosen(self) -> Optional[Finding]:
        """The first source that holds the image completely."""
        return next((finding for finding in self.findings if finding.complete), None)

    @property
    def pinned(self) -> Reference:
        """The reference by digest; as it was written where the digest is not known."""
        return self.reference.pinned(self.digest) if self.digest else self.reference

    @property
    def image_digest(self) -> str:
        """The manifest for this platform: what ostree records of the image. The same as `digest` but for an index."""
        return self.chosen.image_digest if self.chosen else ""

    @property
    def contents(self) -> Optional[Contents]:
        """Layers and description of the image, None where it is complete nowhere."""
        return self.chosen.contents if self.chosen else None

    def origin(self) -> str:
        """The ostree image reference to stage from. Always the registry's name, for mirrors too: they are the
        business of registries.conf. Raises Held where no source is complete.
        """
        if self.chosen is None:
            raise self.held()
        transport = Transport.STORAGE if self.chosen.source is Source.STORAGE else Transport.REGISTRY
        return str(OstreeReference.unverified(transport, self.pinned))

    def held(self) -> Held:
        """Why the update has to wait, for the caller to raise and for people to read."""
        reason = hold_reason(self.findings)
        places = "; ".join(str(finding) for finding in self.findings) or "no source is left to ask"
        waits = [finding.retry_after for finding in self.findings if finding.retry_after is not None]
        sentence = f"cannot find {self.pinned} complete anywhere: {places}"
        return Held(reason, sentence, _HINTS[reason], min(waits, default=None))


def hold_reason(findings: Collection[Finding]) -> HoldReason:
    """The one reason to publish for all that was found: what somebody can set right first, then what may pass by
    itself.

    A containers-storage without the image is no reason: nobody expects it there.
    """
    verdicts = {finding.verdict for finding in findings if finding.source is not Source.STORAGE}
    verdicts = verdicts or {finding.verdict for finding in findings}
    return next((reason for verdict, reason in _REASONS.items() if verdict in verdicts), HoldReason.IMAGE)


class Resolver:
    """Resolves references for one update. What was found complete is not asked for again until `forget`; a host that
    asked for patience (Retry-After) is left alone for so long.

    `root` is where registries.conf, policy.json, auth.json and the CA bundle are read, afresh at every `resolve`.
    `describe`: the version of each image is wanted too.
    """

    def __init__(
        self,
        storage: Optional[Storage] = None,
        root: Path = Path("/"),
        limits: Limits = DEFAULT_LIMITS,
        architecture: str = "",
        ca_bundle: Optional[Path] = None,
        clock: Callable[[], float] = time.monotonic,
        describe: bool = False,
    ) -> None:
        self._describe = describe
        self._storage = storage or Storage(architecture=architecture)
        self._root = root
        self._limits = limits
        self._architecture = architecture
        self._ca_bundle = ca_bundle
        self._memory = Memory(clock)

    def resolve(self, pullspec: str, digest: str = "", without_storage: bool = False) -> Resolution:
        """Look for `pullspec`, pinned to `digest` if that was decided before; `without_storage` after staging from
        there has failed. Raises Irreconcilable for a reference that is none. Everything else is a finding.
        """
        reference = Reference.parse(pullspec)
        if digest and not is_digest(digest):
            raise Irreconcilable(f"cannot look for {reference} by {digest!r}: that is no digest")
        rules = NodeRules.load(self._root)
        bundle = self._ca_bundle or host_ca_bundle(self._root)
        with RegistryClient(rules.credentials, bundle, self._limits, self._architecture) as client:
            storage = None if without_storage else self._storage
            search = Search(reference, rules, storage, client, self._memory, self._describe)
            found, findings = search.run(digest or reference.digest)
        resolution = Resolution(reference, found, findings)
        return replace(resolution, size=resolution.chosen.size) if resolution.chosen else resolution

    def forget(self) -> None:
        """Ask everybody again at the next `resolve`, but for those who asked for patience."""
        self._memory.forget()
