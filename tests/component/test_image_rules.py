"""The node's files about images: registries.conf, auth.json and policy.json, read as containers/image reads them."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from mcdaemon.errors import Broken
from mcdaemon.image.authorization import parse_challenges
from mcdaemon.image.credentials import Credentials, Login
from mcdaemon.image.mirrors import Registries
from mcdaemon.image.policy import DOCKER, STORAGE, Policy, docker_scopes, storage_scopes
from mcdaemon.image.reference import Reference

D = "sha256:" + "a1" * 32
TAGGED = Reference.parse("quay.io/acme/os:1")
PINNED = Reference.parse(f"quay.io/acme/os@{D}")


def put(root: Path, name: str, text: str) -> Path:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def registries(root: Path, text: str, **drop_ins: str) -> Registries:
    put(root, "etc/containers/registries.conf", text)
    for name, content in drop_ins.items():
        put(root, f"etc/containers/registries.conf.d/{name}.conf", content)
    return Registries.load(root)


def places(read: Registries, reference: Reference) -> list[str]:
    return [str(candidate.reference) for candidate in read.candidates(reference)]


class TestRegistriesConf:
    def test_without_a_file_an_image_is_where_its_name_says(self, tmp_path: Path) -> None:
        assert places(Registries.load(tmp_path), TAGGED) == ["quay.io/acme/os:1"]

    def test_mirrors_come_in_order_before_the_registry(self, tmp_path: Path) -> None:
        read = registries(
            tmp_path,
            """
            [[registry]]
            location = "quay.io/acme"
            [[registry.mirror]]
            location = "m1.example/x"
            insecure = true
            [[registry.mirror]]
            location = "m2.example:5000"
            """,
        )
        assert places(read, PINNED) == [f"m1.example/x/os@{D}", f"m2.example:5000/os@{D}", f"quay.io/acme/os@{D}"]
        assert [c.insecure for c in read.candidates(PINNED)] == [True, False, False]
        assert [c.is_mirror for c in read.candidates(PINNED)] == [True, True, False]

    def test_the_longest_prefix_wins_and_ends_at_a_part_of_the_name(self, tmp_path: Path) -> None:
        read = registries(
            tmp_path,
            """
            [[registry]]
            prefix = "quay.io/ac"
            location = "wrong.example"
            [[registry]]
            prefix = "quay.io"
            location = "short.example"
            [[registry]]
            prefix = "quay.io/acme"
            location = "long.example/y"
            """,
        )
        assert places(read, TAGGED) == ["long.example/y/os:1"]
        assert places(read, Reference.parse("quay.io/other/os:1")) == ["short.example/other/os:1"]

    def test_mirrors_for_digests_are_not_asked_for_tags(self, tmp_path: Path) -> None:
        read = registries(
            tmp_path,
            """
            [[registry]]
            location = "quay.io"
            mirror-by-digest-only = true
            [[registry.mirror]]
            location = "m.example"
            """,
        )
        assert places(read, TAGGED) == ["quay.io/acme/os:1"]
        assert places(read, PINNED) == [f"m.example/acme/os@{D}", f"quay.io/acme/os@{D}"]

    def test_each_mirror_may_be_for_tags_or_for_digests(self, tmp_path: Path) -> None:
        read = registries(
            tmp_path,
            """
            [[registry]]
            location = "quay.io"
            [[registry.mirror]]
            location = "d.example"
            pull-from-mirror = "digest-only"
            [[registry.mirror]]
            location = "t.example"
            pull-from-mirror = "tag-only"
            """,
        )
        assert places(read, TAGGED) == ["t.example/acme/os:1", "quay.io/acme/os:1"]
        assert places(read, PINNED) == [f"d.example/acme/os@{D}", f"quay.io/acme/os@{D}"]

    def test_a_wildcard_matches_subdomains_and_rewrites_only_with_a_location(self, tmp_path: Path) -> None:
        read = registries(
            tmp_path,
            """
            [[registry]]
            prefix = "*.example.com"
            insecure = true
            [[registry]]
            prefix = "*.mirror.test"
            location = "one.test"
            """,
        )
        candidate = read.candidates(Reference.parse("a.b.example.com:5000/os:1"))[0]
        assert (str(candidate.reference), candidate.insecure) == ("a.b.example.com:5000/os:1", True)
        assert not read.candidates(Reference.parse("example.com/os:1"))[0].insecure
        assert places(read, Reference.parse("x.mirror.test/a/os:1")) == ["one.test/a/os:1"]

    def test_a_host_without_a_port_matches_every_port(self, tmp_path: Path) -> None:
        read = registries(tmp_path, '[[registry]]\nlocation = "127.0.0.1"\ninsecure = true\n')
        candidate = read.candidates(Reference.parse("127.0.0.1:41234/os:1"))[0]
        assert (str(candidate.reference), candidate.insecure) == ("127.0.0.1:41234/os:1", True)

    def test_img_47_a_blocked_registry_is_blocked_and_its_mirrors_are_not(self, tmp_path: Path) -> None:
        read = registries(
            tmp_path,
            """
            [[registry]]
            location = "quay.io"
            blocked = true
            [[registry.mirror]]
            location = "m.example"
            """,
        )
        assert [c.blocked for c in read.candidates(PINNED)] == [False, True]

    def test_a_later_drop_in_replaces_a_table_and_other_files_are_not_read(self, tmp_path: Path) -> None:
        put(tmp_path, "etc/containers/registries.conf.d/90.conf.rpmsave", "broken [")
        read = registries(
            tmp_path,
            '[[registry]]\nlocation = "quay.io"\nblocked = true\n',
            a='[[registry]]\nlocation = "quay.io"\ninsecure = true\n',
            b='unqualified-search-registries = ["quay.io"]\n',
        )
        candidate = read.candidates(PINNED)[0]
        assert (candidate.blocked, candidate.insecure) == (False, True)

    def test_the_old_format_still_blocks(self, tmp_path: Path) -> None:
        text = '[registries.block]\nregistries = ["quay.io"]\n[registries.insecure]\nregistries = ["127.0.0.1"]\n'
        read = registries(tmp_path, text)
        assert read.candidates(PINNED)[0].blocked
        assert read.candidates(Reference.parse("127.0.0.1:5000/os"))[0].insecure

    @pytest.mark.parametrize(
        ("text", "says"),
        [
            ("[[registry]\n", "line 1"),
            ("registry = 1\n", "not a list of tables"),
            ("[[registry]]\ninsecure = true\n", "neither location nor prefix"),
            ('[[registry]]\nlocation = "quay.io"\ninsecure = "yes"\n', "insecure is not true or false"),
            ("[[registry]]\nlocation = 5\n", "location is not a string"),
            ('[[registry]]\nlocation = "q"\n[[registry.mirror]]\ninsecure = true\n', "mirror\\]\\] has no location"),
            (
                '[[registry]]\nlocation = "q"\n[[registry.mirror]]\nlocation = "m"\npull-from-mirror = "never"\n',
                "pull-from-mirror is never",
            ),
            (
                '[[registry]]\nlocation = "q"\nmirror-by-digest-only = true\n'
                '[[registry.mirror]]\nlocation = "m"\npull-from-mirror = "all"\n',
                "both mirror-by-digest-only",
            ),
        ],
    )
    def test_a_wrong_file_is_named_with_what_is_wrong(self, tmp_path: Path, text: str, says: str) -> None:
        with pytest.raises(Broken, match=rf"^cannot read {tmp_path}/etc/containers/registries.conf: .*{says}"):
            registries(tmp_path, text)

    def test_a_location_that_is_no_name_is_refused_when_it_is_needed(self, tmp_path: Path) -> None:
        read = registries(tmp_path, '[[registry]]\nprefix = "quay.io"\nlocation = "https://quay.io"\n')
        with pytest.raises(Broken, match="cannot use the location https://quay.io"):
            read.candidates(PINNED)
        assert places(read, Reference.parse("other.io/os:1")) == ["other.io/os:1"]


def auths(**entries: str) -> str:
    encoded = {key: {"auth": base64.b64encode(value.encode()).decode()} for key, value in entries.items()}
    return json.dumps({"auths": encoded})


class TestCredentials:
    def test_the_first_file_that_exists_is_taken_alone(self, tmp_path: Path) -> None:
        put(tmp_path, "var/lib/kubelet/config.json", auths(**{"quay.io": "kubelet:pw"}))
        assert Credentials.load(tmp_path).login("quay.io", "os") == Login("kubelet", "pw")
        assert not Credentials.load(tmp_path).seen_by_rpm_ostree
        put(tmp_path, "etc/ostree/auth.json", auths(**{"other.io": "etc:pw"}))
        read = Credentials.load(tmp_path)
        assert read.login("quay.io", "os") is None
        assert read.login("other.io", "os") == Login("etc", "pw")
        assert read.seen_by_rpm_ostree
        put(tmp_path, "run/ostree/auth.json", auths(**{"quay.io": "run:pw:with:colons"}))
        assert Credentials.load(tmp_path).login("quay.io", "os") == Login("run", "pw:with:colons")

    def test_without_any_file_everything_is_anonymous(self, tmp_path: Path) -> None:
        read = Credentials.load(tmp_path)
        assert read.login("quay.io", "os") is None
        assert read.explain("quay.io", "os") == "there is no auth.json, so it was asked anonymously"

    def test_img_17_a_dangling_link_counts_as_missing(self, tmp_path: Path) -> None:
        (tmp_path / "run/ostree").mkdir(parents=True)
        (tmp_path / "run/ostree/auth.json").symlink_to("/nowhere/config.json")
        put(tmp_path, "etc/ostree/auth.json", auths(**{"quay.io": "etc:pw"}))
        assert Credentials.load(tmp_path).login("quay.io", "os") == Login("etc", "pw")

    def test_the_longest_namespace_wins(self, tmp_path: Path) -> None:
        text = auths(**{"quay.io": "h:1", "quay.io/acme": "n:2", "quay.io/acme/os": "r:3", "quay.io/acme/o": "x:4"})
        put(tmp_path, "etc/ostree/auth.json", text)
        read = Credentials.load(tmp_path)
        assert [read.login("quay.io", path) for path in ("acme/os", "acme/other", "os")] == [
            Login("r", "3"),
            Login("n", "2"),
            Login("h", "1"),
        ]
        assert read.login("quay.io:443", "acme/os") is None

    def test_docker_hubs_old_keys_are_understood(self, tmp_path: Path) -> None:
        put(tmp_path, "etc/ostree/auth.json", auths(**{"https://index.docker.io/v1/": "hub:pw"}))
        assert Credentials.load(tmp_path).login("docker.io", "library/os") == Login("hub", "pw")

    def test_an_entry_that_cannot_be_decoded_matters_only_to_its_own_registry(self, tmp_path: Path) -> None:
        text = '{"auths": {"bad.io": {"auth": "not-a-secret!"}, "good.io": {"auth": "dTpw"}}}'
        put(tmp_path, "etc/ostree/auth.json", text)
        read = Credentials.load(tmp_path)
        assert read.login("good.io", "os") == Login("u", "p")
        assert read.login("bad.io", "os") is None
        assert "the entry for bad.io" in read.explain("bad.io", "os")
        assert "not-a-secret" not in read.explain("bad.io", "os") + repr(read)

    @pytest.mark.parametrize("text", ["", "{", "[]", '{"auths": []}', '{"auths": {"q": 5}}'])
    def test_a_malformed_file_is_named_and_not_quoted(self, tmp_path: Path, text: str) -> None:
        put(tmp_path, "etc/ostree/auth.json", text)
        if text == '{"auths": []}':
            assert not Credentials.load(tmp_path).logins
            return
        with pytest.raises(Broken, match=r"^cannot read .*etc/ostree/auth.json: it is not an auth.json") as caught:
            Credentials.load(tmp_path)
        assert "not-a-secret" not in str(caught.value)
        assert caught.value.__cause__ is None

    def test_a_directory_in_its_place_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "run/ostree/auth.json").mkdir(parents=True)
        with pytest.raises(Broken, match="cannot read .*run/ostree/auth.json"):
            Credentials.load(tmp_path)

    def test_no_repr_shows_a_secret(self, tmp_path: Path) -> None:
        put(tmp_path, "etc/ostree/auth.json", auths(**{"quay.io": "somebody:hunter2"}))
        read = Credentials.load(tmp_path)
        shown = repr(read) + repr(read.login("quay.io", "os")) + str(read)
        assert "hunter2" not in shown
        assert "somebody" not in shown
        assert read.explain("quay.io", "os") == f"it refused the credentials in {tmp_path}/etc/ostree/auth.json"


ACCEPT = [{"type": "insecureAcceptAnything"}]
REJECT = [{"type": "reject"}]
SIGNED = [{"type": "signedBy", "keyType": "GPGKeys", "keyPath": "/k"}]


def rules(root: Path, document: object) -> Policy:
    put(root, "etc/containers/policy.json", json.dumps(document))
    return Policy.load(root)


class TestPolicy:
    def test_the_most_specific_scope_decides(self, tmp_path: Path) -> None:
        docker = {"quay.io": REJECT, "quay.io/acme": ACCEPT, "quay.io/acme/os:1": SIGNED, "": REJECT}
        read = rules(tmp_path, {"default": ACCEPT, "transports": {"docker": docker}})
        ruling = read.ruling(DOCKER, docker_scopes(TAGGED))
        assert (ruling.rejected, ruling.signatures) == (False, True)
        assert not read.ruling(DOCKER, docker_scopes(PINNED)).rejected
        other = read.ruling(DOCKER, docker_scopes(Reference.parse("quay.io/other/os")))
        assert other.rejected
        assert other.rule == f'"quay.io" of transport docker in {tmp_path}/etc/containers/policy.json'
        assert read.ruling(DOCKER, docker_scopes(Reference.parse("x.io/os"))).rejected
        assert not read.ruling(STORAGE, ()).rejected

    def test_a_wildcard_scope_matches_subdomains(self, tmp_path: Path) -> None:
        read = rules(tmp_path, {"default": REJECT, "transports": {"docker": {"*.example.com": ACCEPT}}})
        assert not read.ruling(DOCKER, docker_scopes(Reference.parse("a.b.example.com/os"))).rejected
        assert read.ruling(DOCKER, docker_scopes(Reference.parse("example.com/os"))).rejected

    def test_one_reject_among_requirements_rejects(self, tmp_path: Path) -> None:
        assert rules(tmp_path, {"default": [*ACCEPT, *REJECT]}).ruling(DOCKER, ()).rejected

    @pytest.mark.parametrize(
        "scope", ["[overlay@/g]quay.io/acme/os:1", "[overlay@/g]quay.io/acme", "[overlay@/g]", "[/g]", ""]
    )
    def test_scopes_of_a_storage_are_matched(self, tmp_path: Path, scope: str) -> None:
        read = rules(tmp_path, {"default": REJECT, "transports": {"containers-storage": {scope: ACCEPT}}})
        assert not read.ruling(STORAGE, storage_scopes(TAGGED, "overlay", "/g", "/r")).rejected
        assert read.has_scopes(STORAGE) is bool(scope)

    @pytest.mark.parametrize(
        ("document", "says"),
        [
            ([], "no default"),
            ({}, "no default"),
            ({"default": []}, "requirements of default"),
            ({"default": [{"type": "wishful"}]}, "unknown type wishful"),
            ({"default": ACCEPT, "transports": {"docker": {"q.io": [{}]}}}, "docker, q.io has a requirement"),
            ({"default": ACCEPT, "transports": {"docker": []}}, "not an object of objects"),
        ],
    )
    def test_img_07_a_policy_that_cannot_be_read_is_said_to_be_so(
        self, tmp_path: Path, document: object, says: str
    ) -> None:
        with pytest.raises(Broken, match=f"^cannot read .*policy.json: .*{says}"):
            rules(tmp_path, document)

    def test_a_missing_policy_is_an_error_as_it_is_for_containers_image(self, tmp_path: Path) -> None:
        with pytest.raises(Broken, match="cannot read .*policy.json: No such file"):
            Policy.load(tmp_path)


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (
            'Bearer realm="https://auth.example/token?x=1,2",service="r",scope="repository:a/b:pull"',
            [
                (
                    "bearer",
                    {"realm": "https://auth.example/token?x=1,2", "service": "r", "scope": "repository:a/b:pull"},
                )
            ],
        ),
        ('Basic realm="a \\"b\\""', [("basic", {"realm": 'a "b"'})]),
        ("Negotiate, Basic realm=x", [("negotiate", {}), ("basic", {"realm": "x"})]),
        ('Basic realm="x", Bearer realm="y"', [("basic", {"realm": "x"}), ("bearer", {"realm": "y"})]),
        ("", []),
        ('="broken', []),
    ],
)
def test_challenges_are_parsed(header: str, expected: list[tuple[str, dict[str, str]]]) -> None:
    assert [(one.scheme, dict(one.parameters)) for one in parse_challenges(header)] == expected
