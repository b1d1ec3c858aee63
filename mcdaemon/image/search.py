"""One search for one image through its sources, under the node's rules, with what earlier searches learned."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Optional, TypeVar, Union

from mcdaemon.errors import Failure
from mcdaemon.image import policy
from mcdaemon.image.authorization import Endpoint
from mcdaemon.image.credentials import Credentials
from mcdaemon.image.findings import Contents, Finding, Source, Unavailable, Verdict
from mcdaemon.image.mirrors import Candidate, Registries
from mcdaemon.image.policy import Policy
from mcdaemon.image.reference import Reference
from mcdaemon.image.registry import RegistryClient
from mcdaemon.image.storage import Storage

_LOCAL_TAG = "no registry answers for the tag, so it is the one of containers-storage"
_STAYS = "rpm-ostree's pull would stay with this mirror, because it answers for the manifest"
_SIGNED = "signatures are checked by rpm-ostree's own pull"


_T = TypeVar("_T")


class Memory:
    """What searches of one update share: who is complete, and who wants to be left alone until when."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._complete: dict[tuple[Endpoint, str], Contents] = {}
        self._until: dict[str, float] = {}

    def contents(self, endpoint: Endpoint, digest: str) -> Optional[Contents]:
        return self._complete.get((endpoint, digest))

    def remember(self, endpoint: Endpoint, contents: Contents) -> None:
        self._complete[endpoint, contents.digest] = contents

    def forget(self) -> None:
        self._complete.clear()

    def leave_alone(self, host: str, seconds: float) -> None:
        self._until[host] = self._clock() + seconds

    def check_patience(self, host: str) -> None:
        """Raises Unavailable(RATE_LIMITED) while `host` wants to be left alone."""
        left = self._until.get(host, 0.0) - self._clock()
        if left > 0:
            reason = f"{host} asked to be left alone for another {left:.0f} s"
            raise Unavailable(Verdict.RATE_LIMITED, reason, left)


@dataclass(frozen=True)
class NodeRules:
    """The node's files about images. One that cannot be read stands for its failure: it stops the sources it governs,
    as it would stop containers/image, and no others.
    """

    registries: Union[Registries, Failure]
    policy: Union[Policy, Failure]
    credentials: Credentials
    credentials_failure: Optional[Failure] = None

    @classmethod
    def load(cls, root: Path) -> NodeRules:
        registries = _loaded(lambda: Registries.load(root))
        rules = _loaded(lambda: Policy.load(root))
        credentials = _loaded(lambda: Credentials.load(root))
        if isinstance(credentials, Failure):
            return cls(registries, rules, Credentials(), credentials)
        return cls(registries, rules, credentials)


def _loaded(load: Callable[[], _T]) -> Union[_T, Failure]:
    try:
        return load()
    except Failure as error:
        return error


class Search:
    """Goes through the sources of `reference` once. `storage` is None where containers-storage is left out; `describe`:
    the image's version is wanted too."""

    def __init__(
        self,
        reference: Reference,
        rules: NodeRules,
        storage: Optional[Storage],
        client: RegistryClient,
        memory: Memory,
        describe: bool = False,
    ) -> None:
        self._describe = describe
        self._reference = reference
        self._rules = rules
        self._storage = storage
        self._client = client
        self._memory = memory
        self._note = ""

    def run(self, digest: str) -> tuple[str, tuple[Finding, ...]]:
        """The digest ("" where nobody knows the tag) and what was found, up to the first complete source."""
        failed: list[Finding] = []
        if not digest:
            digest, failed = self._digest_of_tag()
        if not digest:
            return "", tuple(failed)
        pinned = self._reference.pinned(digest)
        findings = self._search(pinned)
        places = {finding.place for finding in findings}
        return digest, tuple([one for one in failed if one.place not in places] + findings)

    def _search(self, pinned: Reference) -> list[Finding]:
        findings: list[Finding] = []
        if self._storage is not None:
            findings.append(self._try_storage(self._storage, pinned))
            if findings[-1].complete:
                return findings
        candidates, refusal = self._candidates(pinned)
        if refusal is not None:
            return [*findings, refusal]
        for candidate in candidates:
            finding, opened = self._try_registry(candidate, pinned)
            findings.append(finding)
            if finding.complete or opened:
                break
        return findings

    def _digest_of_tag(self) -> tuple[str, list[Finding]]:
        """The registry's answer, through its mirrors; else that of containers-storage (see resolve.py)."""
        candidates, refusal = self._candidates(self._reference)
        failed = [refusal] if refusal else []
        for candidate in candidates:
            endpoint = _endpoint(candidate)
            try:
                self._check_rules(candidate)
                return self._client.digest(endpoint, candidate.reference.tag), failed
            except Unavailable as error:
                failed.append(self._failure(candidate, error))
                if error.opened:
                    return "", failed
        if self._storage is not None:
            try:
                digest = self._storage.digest(self._reference)
                self._note = _LOCAL_TAG
                return digest, failed
            except Unavailable as error:
                failed.insert(0, Finding(Source.STORAGE, Source.STORAGE.value, error.verdict, error.reason))
        return "", failed

    def _try_storage(self, storage: Storage, pinned: Reference) -> Finding:
        place = Source.STORAGE.value
        try:
            note = self._storage_ruling(storage, pinned)
            contents = storage.check(pinned, self._describe)
        except Unavailable as error:
            return Finding(Source.STORAGE, place, error.verdict, error.reason, pinned.digest)
        return _complete(Source.STORAGE, place, contents, _joined(self._note, note))

    def _storage_ruling(self, storage: Storage, pinned: Reference) -> str:
        rules = self._rules.policy
        if isinstance(rules, Failure):
            raise Unavailable(Verdict.POLICY, rules.sentence)
        scopes: tuple[str, ...] = ()
        if rules.has_scopes(policy.STORAGE):
            place = storage.place()
            scopes = policy.storage_scopes(pinned, place.driver, place.graph_root, place.run_root)
        return _obeyed(rules, policy.STORAGE, scopes)

    def _candidates(self, reference: Reference) -> tuple[tuple[Candidate, ...], Optional[Finding]]:
        """Where to ask, or why nobody may be asked."""
        registries, rules = self._rules.registries, self._rules.policy
        place = self._reference.repository
        try:
            if isinstance(rules, Failure):
                raise Unavailable(Verdict.POLICY, rules.sentence)
            # Signatures are bound to the image's own name, whichever mirror it comes from.
            _obeyed(rules, policy.DOCKER, policy.docker_scopes(reference))
            if isinstance(registries, Failure):
                raise Unavailable(Verdict.MALFORMED, registries.sentence)
            if self._rules.credentials_failure is not None:
                raise Unavailable(Verdict.UNAUTHORIZED, self._rules.credentials_failure.sentence)
            return registries.candidates(reference), None
        except Unavailable as error:
            return (), Finding(Source.REGISTRY, place, error.verdict, error.reason, reference.digest)
        except Failure as error:
            return (), Finding(Source.REGISTRY, place, Verdict.MALFORMED, error.sentence, reference.digest)

    def _try_registry(self, candidate: Candidate, pinned: Reference) -> tuple[Finding, bool]:
        """What a registry has of the image, and whether rpm-ostree's pull would go no further than here."""
        endpoint = _endpoint(candidate)
        try:
            contents = self._memory.contents(endpoint, pinned.digest)
            if contents is None:
                self._check_rules(candidate)
                contents = self._client.check(endpoint, pinned.digest, self._describe)
                self._memory.remember(endpoint, contents)
        except Unavailable as error:
            return self._failure(candidate, error), error.opened
        source = Source.MIRROR if candidate.is_mirror else Source.REGISTRY
        return _complete(source, str(endpoint), contents, self._remarks(endpoint, pinned)), False

    def _check_rules(self, candidate: Candidate) -> None:
        if candidate.blocked:
            raise Unavailable(Verdict.POLICY, "registries.conf blocks it")
        self._memory.check_patience(candidate.reference.host)

    def _failure(self, candidate: Candidate, error: Unavailable) -> Finding:
        if error.retry_after is not None:
            self._memory.leave_alone(candidate.reference.host, error.retry_after)
        source = Source.MIRROR if candidate.is_mirror else Source.REGISTRY
        reason = _joined(error.reason, _STAYS if error.opened and candidate.is_mirror else "")
        place = candidate.reference
        return Finding(source, place.repository, error.verdict, reason, place.digest, error.retry_after)

    def _remarks(self, endpoint: Endpoint, pinned: Reference) -> str:
        rules, credentials = self._rules.policy, self._rules.credentials
        note = _obeyed(rules, policy.DOCKER, policy.docker_scopes(pinned)) if isinstance(rules, Policy) else ""
        borrowed = ""
        if not credentials.seen_by_rpm_ostree and credentials.login(endpoint.host, endpoint.path):
            borrowed = f"with the login of {credentials.file}, which rpm-ostree needs linked to /run/ostree/auth.json"
        return _joined(note, borrowed)


def _obeyed(rules: Policy, transport: str, scopes: tuple[str, ...]) -> str:
    """A remark on a source that policy allows. Raises Unavailable(POLICY) for one that it rejects."""
    ruling = rules.ruling(transport, scopes)
    if ruling.rejected:
        raise Unavailable(Verdict.POLICY, f"{ruling.rule} rejects it")
    return _SIGNED if ruling.signatures else ""


def _complete(source: Source, place: str, contents: Contents, reason: str) -> Finding:
    digest, image_digest, size = contents.digest, contents.image_digest, contents.size
    return Finding(
        source, place, Verdict.COMPLETE, reason, digest, image_digest=image_digest, size=size, contents=contents
    )


def _endpoint(candidate: Candidate) -> Endpoint:
    return Endpoint(candidate.reference.host, candidate.reference.path, candidate.insecure)


def _joined(*remarks: str) -> str:
    return "; ".join(remark for remark in remarks if remark)
