"""Names of images are read as containers/image reads them, and a wrong one is pointed at."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcdaemon.errors import Irreconcilable
from mcdaemon.image.reference import OstreeReference, Reference, Scheme, Transport

D = "sha256:" + "a1" * 32
E = "sha256:" + "b2" * 32


@pytest.mark.parametrize(
    ("text", "host", "path", "tag", "digest"),
    [
        ("quay.io/acme/os:1", "quay.io", "acme/os", "1", ""),
        (f"quay.io/acme/os@{D}", "quay.io", "acme/os", "", D),
        (f"quay.io/acme/os:4.17@{D}", "quay.io", "acme/os", "4.17", D),
        ("127.0.0.1:5000/os", "127.0.0.1:5000", "os", "latest", ""),
        ("localhost/os:dev", "localhost", "os", "dev", ""),
        ("localhost:5000/a/b/c", "localhost:5000", "a/b/c", "latest", ""),
        ("[2001:db8::1]:5000/os:1", "[2001:db8::1]:5000", "os", "1", ""),
        ("[::1]/os", "[::1]", "os", "latest", ""),
        ("Registry/os:1", "Registry", "os", "1", ""),
        ("ubi9", "docker.io", "library/ubi9", "latest", ""),
        ("acme/os:1", "docker.io", "acme/os", "1", ""),
        ("index.docker.io/acme/os:1", "docker.io", "acme/os", "1", ""),
        ("quay.io/a__b/c-d.e--f:X_.-", "quay.io", "a__b/c-d.e--f", "X_.-", ""),
        ("quay.io/os@sha512:" + "0f" * 64, "quay.io", "os", "", "sha512:" + "0f" * 64),
    ],
)
def test_a_reference_is_split_and_normalised(text: str, host: str, path: str, tag: str, digest: str) -> None:
    assert Reference.parse(text) == Reference(host, path, tag, digest)


@pytest.mark.parametrize(
    ("text", "position"),
    [
        ("", 1),
        ("quay.io/Acme/os:1", 9),
        ("quay.io/acme/Os:1", 14),
        ("quay.io/acme//os", 14),
        ("quay.io/acme/os/", 17),
        ("quay.io/acme/-os", 14),
        ("quay.io/acme/os-", 16),
        ("quay.io/a...b/os", 10),
        ("quay.io/acme/os:", 17),
        ("quay.io/acme/os:.1", 17),
        ("quay.io/acme/os:a b", 18),
        ("quay.io/acme/os:" + "x" * 129, 17 + 128),
        ("quay.io/acme/os:1\n", 18),
        (" quay.io/acme/os:1", 1),
        ("quay..io/acme/os", 5),
        ("-quay.io/acme/os", 1),
        ("quay.io:port/os", 8),
        ("[::1/os", 1),
        ("quay.io/acme/os@", 17),
        ("quay.io/acme/os@md5:00", 17),
        ("quay.io/acme/os@sha256:", 24),
        ("quay.io/acme/os@sha256:12", 26),
        ("quay.io/acme/os@sha256:" + "A" * 64, 24),
        (f"quay.io/acme/os@{D}0", 24 + 64),
        (f"quay.io/acme/os@{D}@{D}", 24 + 64),
        ("https://quay.io/acme/os", 6),
        ("docker://quay.io/acme/os:1", 7),
        ("quay.io/ünïcode:1", 9),
        ("quay.io/" + "a" * 260, 256),
    ],
)
def test_a_wrong_reference_is_pointed_at(text: str, position: int) -> None:
    with pytest.raises(
        Irreconcilable, match=rf"^cannot read the image reference .* at character {position}:"
    ) as caught:
        Reference.parse(text, "/spec/osImageURL")
    assert caught.value.field == "/spec/osImageURL"


def test_a_url_is_refused_with_what_to_leave_out() -> None:
    with pytest.raises(Irreconcilable, match=re.escape("leave docker:// out")):
        Reference.parse("docker://quay.io/acme/os:1")


def test_a_newline_is_shown_and_not_printed() -> None:
    with pytest.raises(Irreconcilable) as caught:
        Reference.parse("quay.io/os:1\nINFO all is well")
    assert "\n" not in str(caught.value)


@given(st.text(max_size=80))
def test_any_text_is_a_reference_or_refused_in_one_line(text: str) -> None:
    try:
        reference = Reference.parse(text)
    except Irreconcilable as error:
        assert str(error).startswith("cannot read the image reference")
        assert str(error).isprintable()
        return
    assert Reference.parse(str(reference)) == reference


def test_pinning_drops_the_tag() -> None:
    assert str(Reference.parse(f"quay.io/os:4.17@{E}").pinned(D)) == f"quay.io/os@{D}"


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("quay.io/os:1", "quay.io/os:1", True),
        ("QUAY.io/os:1", "quay.io/os:1", True),
        ("quay.io:443/os:1", "quay.io/os:1", True),
        (f"quay.io/os:1@{D}", f"quay.io/os@{D}", True),
        (f"quay.io/os:1@{D}", f"quay.io/os:2@{D}", True),
        ("os", "docker.io/library/os:latest", True),
        ("quay.io/os:1", "quay.io/os:2", False),
        (f"quay.io/os@{D}", f"quay.io/os@{E}", False),
        (f"quay.io/os@{D}", f"quay.io/other@{D}", False),
        (f"quay.io/os:1@{D}", "quay.io/os:1", False),
        ("quay.io:5000/os:1", "quay.io/os:1", False),
    ],
)
def test_references_are_compared_by_what_they_name(one: str, other: str, same: bool) -> None:
    assert Reference.parse(one).same_image(Reference.parse(other)) is same


@pytest.mark.parametrize(
    ("text", "scheme", "transport", "name", "written"),
    [
        ("ostree-unverified-registry:quay.io/os:1", Scheme.UNVERIFIED, Transport.REGISTRY, "quay.io/os:1", ""),
        (
            "ostree-unverified-image:registry:quay.io/os:1",
            Scheme.UNVERIFIED,
            Transport.REGISTRY,
            "quay.io/os:1",
            "ostree-unverified-registry:quay.io/os:1",
        ),
        (
            "ostree-unverified-image:docker://quay.io/os:1",
            Scheme.UNVERIFIED,
            Transport.REGISTRY,
            "quay.io/os:1",
            "ostree-unverified-registry:quay.io/os:1",
        ),
        (
            "ostree-image-signed:docker://quay.io/os:1",
            Scheme.SIGNED,
            Transport.REGISTRY,
            "quay.io/os:1",
            "ostree-image-signed:registry:quay.io/os:1",
        ),
        (
            f"ostree-unverified-image:containers-storage:quay.io/os@{D}",
            Scheme.UNVERIFIED,
            Transport.STORAGE,
            f"quay.io/os@{D}",
            "",
        ),
        ("ostree-unverified-image:oci:/run/os", Scheme.UNVERIFIED, Transport.OCI, "/run/os", ""),
        ("ostree-remote-registry:fedora:quay.io/os:1", Scheme.REMOTE, Transport.REGISTRY, "quay.io/os:1", ""),
        ("ostree-remote-image:fedora:oci-archive:/x.tar", Scheme.REMOTE, Transport.OCI_ARCHIVE, "/x.tar", ""),
    ],
)
def test_an_origin_is_read_and_written(
    text: str, scheme: Scheme, transport: Transport, name: str, written: str
) -> None:
    read = OstreeReference.parse(text)
    assert (read.scheme, read.transport, read.name) == (scheme, transport, name)
    assert str(read) == (written or text)
    assert OstreeReference.parse(str(read)) == read


@pytest.mark.parametrize(
    "text",
    [
        "",
        "quay.io/os:1",
        "docker://quay.io/os:1",
        "ostree-unverified-image:quay.io/os:1",
        "ostree-unverified-image:docker:quay.io/os:1",
        "ostree-unverified-image:registry:",
        "ostree-unverified-registry:",
        "ostree-remote-registry::quay.io/os",
        "ostree-signed-image:registry:quay.io/os",
        "fedora:fedora/x86_64/coreos/stable",
    ],
)
def test_what_is_no_container_origin_is_refused(text: str) -> None:
    with pytest.raises(Irreconcilable, match="^cannot read the ostree image reference"):
        OstreeReference.parse(text)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("ostree-unverified-registry:q.io/os:1", "ostree-unverified-image:docker://q.io/os:1", True),
        (f"ostree-unverified-registry:q.io/os@{D}", f"ostree-unverified-image:containers-storage:q.io/os@{D}", True),
        (f"ostree-unverified-registry:q.io/os@{D}", f"ostree-image-signed:registry:q.io/os:7@{D}", True),
        ("ostree-unverified-registry:q.io/os:1", "ostree-unverified-image:containers-storage:q.io/os:1", False),
        (f"ostree-unverified-registry:q.io/os@{D}", f"ostree-unverified-registry:q.io/os@{E}", False),
        ("ostree-unverified-image:oci:/a", "ostree-unverified-image:oci:/a", True),
        ("ostree-unverified-image:oci:/a", "ostree-unverified-image:dir:/a", False),
        (
            f"ostree-unverified-image:containers-storage:[overlay@/g+/r]q.io/os@{D}",
            f"ostree-unverified-registry:q.io/os@{D}",
            True,
        ),
    ],
)
def test_origins_are_compared_by_the_content_they_lead_to(one: str, other: str, same: bool) -> None:
    assert OstreeReference.parse(one).same_image(OstreeReference.parse(other)) is same


def test_the_origins_that_are_staged_from() -> None:
    pinned = Reference.parse(f"quay.io/os@{D}")
    assert str(OstreeReference.unverified(Transport.REGISTRY, pinned)) == f"ostree-unverified-registry:quay.io/os@{D}"
    local = str(OstreeReference.unverified(Transport.STORAGE, pinned))
    assert local == f"ostree-unverified-image:containers-storage:quay.io/os@{D}"
