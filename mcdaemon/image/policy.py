"""policy.json: whether containers/image would reject an image whatever is in it.

Only what needs no signature is decided here (containers-policy.json(5)): a scope whose requirements include `reject`.
Requirements that ask for signatures are left to the pull itself, which alone has the keys and the signatures. The
policy of the node is never changed.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from mcdaemon.errors import Broken, from_os_error
from mcdaemon.image.findings import printable
from mcdaemon.image.reference import Reference

FILE = "etc/containers/policy.json"
DOCKER = "docker"
STORAGE = "containers-storage"


class Requirement(enum.Enum):
    """The types that containers/image knows; any other makes it refuse the whole file (IMG-07)."""

    ACCEPT = "insecureAcceptAnything"
    REJECT = "reject"
    SIGNED_BY = "signedBy"
    SIGNED_BASE_LAYER = "signedBaseLayer"
    SIGSTORE_SIGNED = "sigstoreSigned"


@dataclass(frozen=True)
class Ruling:
    """`rule` names the scope that decided, for people. `signatures`: allowed only with signatures, checked by the
    pull.
    """

    rejected: bool
    signatures: bool
    rule: str


@dataclass(frozen=True)
class Policy:
    file: Path
    default: tuple[Requirement, ...]
    transports: Mapping[str, Mapping[str, tuple[Requirement, ...]]] = field(
        default_factory=lambda: MappingProxyType({})
    )

    @classmethod
    def load(cls, root: Path = Path("/")) -> Policy:
        """Raises Broken where the file is missing or not a policy: containers/image refuses every image then."""
        path = root / FILE
        try:
            document = json.loads(path.read_bytes())
        except OSError as error:
            raise from_os_error(error, "read", path) from error
        except (ValueError, RecursionError):
            raise _unreadable(path, "it is not JSON") from None
        if not isinstance(document, dict) or "default" not in document:
            raise _unreadable(path, "it has no default")
        transports = document.get("transports", {})
        if not isinstance(transports, dict) or not all(isinstance(scopes, dict) for scopes in transports.values()):
            raise _unreadable(path, "transports is not an object of objects")
        read = {
            transport: {scope: _requirements(value, f"{transport}, {scope}", path) for scope, value in scopes.items()}
            for transport, scopes in transports.items()
        }
        return cls(path, _requirements(document["default"], "default", path), read)

    def ruling(self, transport: str, scopes: Sequence[str]) -> Ruling:
        """The first of `scopes` (most specific first) that the policy has, then the transport's own, then the
        default.
        """
        known = self.transports.get(transport, {})
        for scope in (*scopes, ""):
            if scope in known:
                return self._ruling(known[scope], f'"{scope}" of transport {transport}' if scope else transport)
        return self._ruling(self.default, "the default")

    def _ruling(self, requirements: Sequence[Requirement], rule: str) -> Ruling:
        signatures = any(one not in (Requirement.ACCEPT, Requirement.REJECT) for one in requirements)
        return Ruling(Requirement.REJECT in requirements, signatures, f"{rule} in {self.file}")

    def has_scopes(self, transport: str) -> bool:
        """False where every image of the transport gets one ruling."""
        return any(self.transports.get(transport, {}))


def docker_scopes(reference: Reference) -> tuple[str, ...]:
    """The scopes of an image by its own name (never a mirror's), most specific first."""
    suffix = f"@{reference.digest}" if reference.digest else f":{reference.tag}"
    host = reference.host.partition(":")[0]
    labels = host.split(".")
    wildcards = ["*." + ".".join(labels[start:]) for start in range(1, len(labels))]
    return (reference.repository + suffix, *_parents(reference), *wildcards)


def storage_scopes(reference: Reference, driver: str, graph_root: str, run_root: str) -> tuple[str, ...]:
    """The scopes of an image in containers-storage; `graph_root` with its symbolic links resolved (IMG-04)."""
    identity = f"[{driver}@{graph_root}+{run_root}]{reference}"
    place = f"[{driver}@{graph_root}]"
    return (identity, f"{place}{reference}", *(place + one for one in _parents(reference)), place, f"[{graph_root}]")


def _parents(reference: Reference) -> list[str]:
    parts = reference.repository.split("/")
    return ["/".join(parts[:length]) for length in range(len(parts), 0, -1)]


def _requirements(value: object, where: str, path: Path) -> tuple[Requirement, ...]:
    if not isinstance(value, list) or not value:
        raise _unreadable(path, f"the requirements of {printable(where)} are not a list with at least one")
    return tuple(_requirement(one, where, path) for one in value)


def _requirement(value: object, where: str, path: Path) -> Requirement:
    kind = value.get("type") if isinstance(value, dict) else None
    for known in Requirement:
        if known.value == kind:
            return known
    raise _unreadable(path, f"{printable(where)} has a requirement of the unknown type {printable(str(kind))}")


def _unreadable(path: Path, why: str) -> Broken:
    return Broken(f"cannot read {path}: {why}", "see containers-policy.json(5); until then every image is rejected")
