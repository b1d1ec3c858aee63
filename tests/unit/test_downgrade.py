"""Which OS is older: by version where both can be compared, else by age, else nobody says so."""

from __future__ import annotations

import pytest

from mcdaemon.image.description import Description, from_annotations, from_config
from mcdaemon.update.downgrade import described, incomparable, moment, numbers, older, refusal

RHCOS, FCOS, RHEL9 = "417.94.202410160352-0", "41.20250105.3.0", "9.6.20250523-0"

ORDER = [
    ("417.94.202410160352-0", "417.94.202411261619-0"),
    ("416.94.202505010000-0", "417.94.202410160352-0"),  # the release counts, and not the day of the build
    ("417.94.202410160352-0", "417.94.202410160352-1"),
    ("41.20250105.3.0", "41.20250105.3.1"),
    ("9.20250105.3.0", "41.20250105.3.0"),  # as numbers; as text it is the other way round
    ("41.20250105.2.0", "41.20250105.10.0"),
    ("9.6.20250523-0", "9.10.20250101-0"),
    ("417.94.9", "417.94.30"),
    ("417.94", "417.94.1"),
]


@pytest.mark.parametrize(("low", "high"), ORDER)
def test_versions_are_ordered_by_their_numbers(low: str, high: str) -> None:
    why = older(Description(low), high, 0)
    assert low in why and high in why
    assert older(Description(high), low, 0) == ""
    assert older(Description(low), low, 0) == "" and not incomparable(Description(low), high, 0)


UNKNOWN = ["", " ", "latest", "v1.2", "1.2.3~rc1", "1..2", "1.2.", ".1", "417.94.x", "٤١.1.2", "1.2+3"]


@pytest.mark.parametrize("version", UNKNOWN)
def test_a_version_of_an_unknown_form_is_neither_older_nor_newer(version: str) -> None:
    assert numbers(version) is None
    for new, old in ((version, RHCOS), (RHCOS, version), (version, version)):
        assert older(Description(new), old, 0) == "" and incomparable(Description(new), old, 0)


@pytest.mark.parametrize("new, old", [(RHEL9, RHCOS), (RHCOS, RHEL9), (FCOS, RHCOS), (RHEL9, FCOS), (FCOS, RHEL9)])
def test_numbers_of_different_schemes_are_not_compared(new: str, old: str) -> None:
    """RHCOS 9.6.… comes after 418.94.…: by the numbers alone an upgrade would be refused."""
    assert older(Description(new), old, 0) == "" and incomparable(Description(new), old, 0)


DAY = 86400.0
BOOTED = 1_730_000_000.0  # 2024-10-27T03:33:20Z


@pytest.mark.parametrize(("created", "is_older"), [
    ("2024-10-27T03:33:19Z", True), ("2024-10-27T03:33:20Z", False), ("2024-10-27T05:33:19+02:00", True),
    ("2024-10-26T23:33:21-04:00", False), ("2024-10-27T03:33:19.999999999Z", True), ("2025-01-01T00:00:00Z", False),
    ("yesterday", False), ("", False), ("2024-13-45T99:00:00Z", False), ("1730000000", False),
])  # fmt: skip
def test_without_versions_the_time_of_making_decides(created: str, is_older: bool) -> None:
    why = older(Description("", created), "", BOOTED)
    assert bool(why) is is_older
    assert not is_older or (created in why and "2024-10-27T03:33:20Z" in why)
    assert older(Description("", created), "", 0) == "", "the booted one's time is not known"


def test_a_version_wins_over_the_time() -> None:
    """The newer release may have been built first, and an old one again today."""
    assert older(Description("417.94.31", "2020-01-01T00:00:00Z"), "417.94.30", BOOTED) == ""
    assert "version" in older(Description("417.94.29", "2030-01-01T00:00:00Z"), "417.94.30", BOOTED)


def test_nothing_said_is_not_comparable_and_no_refusal() -> None:
    assert older(Description(), "", 0) == "" and incomparable(Description(), "", 0)
    assert not incomparable(Description("", "2024-10-27T03:33:20Z"), "", BOOTED)


def test_a_deployment_is_described_as_its_image_would_be() -> None:
    assert moment(described("1.2", BOOTED).created) == BOOTED
    assert described("1.2", 0) == Description("1.2")


def test_a_refusal_names_the_field_and_the_setting() -> None:
    error = refusal("50-old", "version 1 is older than the booted 2")
    assert error.field == "/spec/osImageURL" and "50-old" in str(error) and "os.downgrade" in str(error)


# -- what an image says of itself ------------------------------------------------------------------------------------

LABELS = b'{"created": "2024-01-01T00:00:00Z", "config": {"Labels": {"org.opencontainers.image.version": "417.94.1"}}}'


def test_labels_of_the_config_tell_version_and_age() -> None:
    assert from_config(LABELS) == Description("417.94.1", "2024-01-01T00:00:00Z")
    assert from_config(b'{"config": {"Labels": {"version": "9.6.1"}}}') == Description("9.6.1")


@pytest.mark.parametrize("body", [
    b"", b"\xff", b"[]", b"null", b"7", b"{}", b'{"config": null}', b'{"config": {"Labels": null}}',
    b'{"config": {"Labels": ["x"]}}', b'{"config": {"Labels": {"version": 7}}}', b"[" * 100_000, b'{"created": 7}',
])  # fmt: skip
def test_a_config_that_cannot_be_read_says_nothing(body: bytes) -> None:
    assert from_config(body) == Description()


@pytest.mark.parametrize("annotations", [None, [], "x", {"version": 7}, {"org.opencontainers.image.version": ""}])
def test_annotations_that_are_none_say_nothing(annotations: object) -> None:
    assert from_annotations(annotations) == Description()


def test_what_is_shown_to_people_is_bounded_and_printable() -> None:
    said = from_annotations({"org.opencontainers.image.version": "1.2\n\x1b[31m" + "9" * 1000}).version
    assert len(said) == 128 and said.isprintable()
