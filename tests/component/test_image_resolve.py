"""Resolution through all sources: real registries with real gaps, a real containers-storage, real node files."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from mcdaemon.errors import Held, HoldReason, Irreconcilable
from mcdaemon.image.connection import Limits
from mcdaemon.image.resolve import Finding, Resolution, Resolver, Source, Verdict, hold_reason
from mcdaemon.image.storage import Storage
from tests.stand import images
from tests.stand.faultproxy import FaultProxy
from tests.stand.isolation import private
from tests.stand.registry import PASSWORD, USER, Registry
from tests.stand.storage import ContainersStorage

IMAGE = images.layer_on(images.os_image(), {"etc/x": images.File(b"x")})
OTHER = images.layer_on(images.os_image(), {"etc/x": images.File(b"other")})
SIZE = len(IMAGE.config) + sum(len(layer.blob) for layer in IMAGE.layers)
ACCEPT = [{"type": "insecureAcceptAnything"}]
REJECT = [{"type": "reject"}]


class Node:
    """A node's files below a directory, its storage, and the resolver of one update."""

    def __init__(self, root: Path, storage: ContainersStorage) -> None:
        self.root = root
        self.storage = storage
        self.now = 0.0
        (root / "etc/containers").mkdir(parents=True)
        self.registries_conf("")
        self.policy({"default": ACCEPT})
        limits = Limits(connect=2.0, read=2.0, total=4.0)
        local = Storage(str(storage.root), str(storage.runroot))
        self.resolver = Resolver(local, root, limits, clock=lambda: self.now)

    def registries_conf(self, text: str) -> None:
        insecure = '[[registry]]\nlocation = "127.0.0.1"\ninsecure = true\n'
        (self.root / "etc/containers/registries.conf").write_text(insecure + text)

    def mirrored(self, origin: str, *mirrors: str, more: str = "") -> None:
        tables = [f'[[registry.mirror]]\nlocation = "{mirror}"\ninsecure = true\n' for mirror in mirrors]
        self.registries_conf(f'[[registry]]\nlocation = "{origin}"\ninsecure = true\n{more}\n{"".join(tables)}')

    def policy(self, document: object) -> None:
        (self.root / "etc/containers/policy.json").write_text(json.dumps(document))

    def resolve(self, pullspec: str, digest: str = "", without_storage: bool = False) -> Resolution:
        return self.resolver.resolve(pullspec, digest, without_storage)

    def skopeo_copies(self, name: str) -> bool:
        """The oracle: would containers/image pull it, with this node's registries.conf?"""
        conf = self.root / "etc/containers/registries.conf"
        argv = ["skopeo", "--insecure-policy", f"--registries-conf={conf}", "copy"]
        target = self.root / "copied"
        done = subprocess.run(private([*argv, f"docker://{name}", f"dir:{target}"]), capture_output=True, timeout=30)
        shutil.rmtree(target, ignore_errors=True)
        return done.returncode == 0


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    with ContainersStorage() as storage:
        monkeypatch.setenv("PATH", f"{storage.programs}:{os.environ['PATH']}")
        yield Node(tmp_path / "root", storage)


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    with Registry(tmp_path / "registry") as running:
        images.push(IMAGE, f"{running.host}/os:1")
        running.forget_requests()
        yield running


@pytest.fixture
def mirror(tmp_path: Path) -> Iterator[Registry]:
    with Registry(tmp_path / "mirror") as running:
        images.push(IMAGE, f"{running.host}/copy/os:1")
        running.forget_requests()
        yield running


def verdicts(resolution: Resolution) -> list[tuple[Source, Verdict]]:
    return [(finding.source, finding.verdict) for finding in resolution.findings]


LOCAL, MIRROR, REMOTE = Source.STORAGE, Source.MIRROR, Source.REGISTRY
COMPLETE, ABSENT, INCOMPLETE = Verdict.COMPLETE, Verdict.ABSENT, Verdict.INCOMPLETE


class TestOrder:
    def test_a_complete_local_copy_is_taken_and_nobody_else_is_asked(self, node: Node, registry: Registry) -> None:
        node.storage.add(IMAGE, f"{registry.host}/os:1")
        found = node.resolve(f"{registry.host}/os@{IMAGE.digest}")
        assert verdicts(found) == [(LOCAL, COMPLETE)]
        name = f"{registry.host}/os@{IMAGE.digest}"
        assert found.origin() == f"ostree-unverified-image:containers-storage:{name}"
        assert (found.digest, found.image_digest, found.size) == (IMAGE.digest, IMAGE.digest, SIZE)
        assert registry.requests() == ()

    def test_without_a_local_copy_the_registry_is_taken(self, node: Node, registry: Registry) -> None:
        found = node.resolve(f"{registry.host}/os@{IMAGE.digest}")
        assert verdicts(found) == [(LOCAL, ABSENT), (REMOTE, COMPLETE)]
        assert found.origin() == f"ostree-unverified-registry:{registry.host}/os@{IMAGE.digest}"
        assert found.size == SIZE

    def test_img_01_a_local_copy_with_a_lost_layer_leads_on_to_the_registry(
        self, node: Node, registry: Registry
    ) -> None:
        node.storage.add(IMAGE, f"{registry.host}/os:1")
        shutil.rmtree(node.storage.layer_folder(IMAGE, 0))
        found = node.resolve(f"{registry.host}/os@{IMAGE.digest}")
        assert verdicts(found) == [(LOCAL, INCOMPLETE), (REMOTE, COMPLETE)]
        assert found.origin().startswith("ostree-unverified-registry:")

    def test_img_01_after_staging_from_the_local_copy_failed_it_is_left_out(
        self, node: Node, registry: Registry
    ) -> None:
        node.storage.add(IMAGE, f"{registry.host}/os:1")
        found = node.resolve(f"{registry.host}/os@{IMAGE.digest}", without_storage=True)
        assert verdicts(found) == [(REMOTE, COMPLETE)]

    def test_img_54_without_podman_and_skopeo_the_registry_is_taken(
        self, node: Node, registry: Registry, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PATH", "/nowhere")
        found = node.resolve(f"{registry.host}/os@{IMAGE.digest}")
        assert verdicts(found) == [(LOCAL, Verdict.UNREACHABLE), (REMOTE, COMPLETE)]
        assert "skopeo is not installed" in found.findings[0].reason

    def test_img_11_a_local_copy_serves_while_the_registry_is_down(self, node: Node, registry: Registry) -> None:
        node.storage.add(IMAGE, f"{registry.host}/os:1")
        registry.stop()
        assert node.resolve(f"{registry.host}/os@{IMAGE.digest}").complete

    def test_a_registry_that_is_down_holds_until_it_is_up(self, node: Node, registry: Registry) -> None:
        registry.stop()
        found = node.resolve(f"{registry.host}/os@{IMAGE.digest}")
        assert verdicts(found) == [(LOCAL, ABSENT), (REMOTE, Verdict.UNREACHABLE)]
        with pytest.raises(Held) as caught:
            found.origin()
        assert caught.value.reason is HoldReason.REGISTRY
        registry.start()
        assert node.resolve(f"{registry.host}/os@{IMAGE.digest}").complete

    def test_incident_2_a_deleted_target_is_held_with_a_sentence_that_says_it_all(
        self, node: Node, registry: Registry
    ) -> None:
        registry.delete("os", IMAGE.digest)
        held = node.resolve(f"{registry.host}/os:1@{IMAGE.digest}").held()
        assert held.reason is HoldReason.IMAGE
        assert held.sentence == (
            f"cannot find {registry.host}/os@{IMAGE.digest} complete anywhere: "
            "containers-storage: absent (no image of this name and digest); "
            f"registry {registry.host}/os: absent (manifest unknown)"
        )
        assert "push the image again" in held.hint

    def test_a_layer_deleted_at_the_registry_holds_and_nothing_was_fetched(
        self, node: Node, registry: Registry
    ) -> None:
        registry.delete_blob("os", IMAGE.layers[1].digest)
        registry.forget_requests()
        found = node.resolve(f"{registry.host}/os@{IMAGE.digest}")
        assert verdicts(found) == [(LOCAL, ABSENT), (REMOTE, INCOMPLETE)]
        assert registry.blob_fetches() == ()
        assert not node.skopeo_copies(f"{registry.host}/os@{IMAGE.digest}")

    def test_what_is_no_reference_is_refused(self, node: Node) -> None:
        with pytest.raises(Irreconcilable, match="character 11"):
            node.resolve("quay.io/a/B:1")
        with pytest.raises(Irreconcilable, match="that is no digest"):
            node.resolve("quay.io/a/b:1", digest="sha256:1")


class TestTags:
    def test_a_tag_is_pinned_to_what_the_registry_says(self, node: Node, registry: Registry) -> None:
        found = node.resolve(f"{registry.host}/os:1")
        assert found.digest == IMAGE.digest
        assert found.origin() == f"ostree-unverified-registry:{registry.host}/os@{IMAGE.digest}"
        manifests = [request for request in registry.requests() if "/manifests/" in request.path]
        assert [request.path for request in manifests] == ["/v2/os/manifests/1"]

    def test_incident_3_a_tag_that_moved_is_not_followed_once_the_digest_is_decided(
        self, node: Node, registry: Registry
    ) -> None:
        decided = node.resolve(f"{registry.host}/os:1").digest
        images.push(OTHER, f"{registry.host}/os:1")
        node.resolver.forget()
        found = node.resolve(f"{registry.host}/os:1", digest=decided)
        assert found.complete
        assert found.origin().endswith(IMAGE.digest)
        assert node.resolve(f"{registry.host}/os:1").digest == OTHER.digest

    def test_img_55_an_old_tag_in_local_storage_does_not_beat_the_registry(
        self, node: Node, registry: Registry
    ) -> None:
        node.storage.add(OTHER, f"{registry.host}/os:1")
        found = node.resolve(f"{registry.host}/os:1")
        assert found.digest == IMAGE.digest
        assert verdicts(found) == [(LOCAL, ABSENT), (REMOTE, COMPLETE)]

    def test_a_tag_of_the_registry_is_staged_from_local_storage_if_the_digest_is_there(
        self, node: Node, registry: Registry
    ) -> None:
        node.storage.add(IMAGE, f"{registry.host}/os:1")
        found = node.resolve(f"{registry.host}/os:1")
        assert verdicts(found) == [(LOCAL, COMPLETE)]
        assert "HEAD" not in {request.method for request in registry.requests()}

    @pytest.mark.parametrize("fault", ["down", "deleted", "in trouble"])
    def test_the_local_tag_is_taken_when_no_registry_answers_and_that_is_said(
        self, node: Node, registry: Registry, fault: str
    ) -> None:
        with FaultProxy(registry.host) as proxy:
            node.storage.add(OTHER, f"{proxy.host}/os:1")
            if fault == "down":
                registry.stop()
            elif fault == "deleted":
                registry.delete("os", IMAGE.digest)
            else:
                proxy.answer("manifests", 503)
            found = node.resolve(f"{proxy.host}/os:1")
            assert found.digest == OTHER.digest
            assert found.chosen is not None
            assert found.chosen.source is LOCAL
            assert "no registry answers for the tag" in found.chosen.reason

    def test_a_tag_that_nobody_knows_has_no_digest_and_holds(self, node: Node, registry: Registry) -> None:
        found = node.resolve(f"{registry.host}/os:none")
        assert found.digest == ""
        assert verdicts(found) == [(LOCAL, ABSENT), (REMOTE, ABSENT)]
        assert found.held().reason is HoldReason.IMAGE
        assert f"cannot find {registry.host}/os:none complete anywhere" in str(found.held())


class TestMirrors:
    def test_a_mirror_is_asked_first_and_the_origin_keeps_the_registrys_name(
        self, node: Node, registry: Registry, mirror: Registry
    ) -> None:
        node.mirrored(registry.host, f"{mirror.host}/copy")
        found = node.resolve(f"{registry.host}/os@{IMAGE.digest}")
        assert verdicts(found) == [(LOCAL, ABSENT), (MIRROR, COMPLETE)]
        assert found.origin() == f"ostree-unverified-registry:{registry.host}/os@{IMAGE.digest}"
        assert registry.requests() == ()

    def test_img_12_a_mirror_serves_a_registry_that_cannot_be_reached(
        self, node: Node, registry: Registry, mirror: Registry
    ) -> None:
        node.mirrored(registry.host, f"{mirror.host}/copy")
        registry.stop()
        assert node.resolve(f"{registry.host}/os@{IMAGE.digest}").complete
        assert node.skopeo_copies(f"{registry.host}/os@{IMAGE.digest}")

    @pytest.mark.parametrize(
        ("status", "verdict"),
        [
            (401, Verdict.UNAUTHORIZED),
            (403, Verdict.UNAUTHORIZED),
            (404, ABSENT),
            (429, Verdict.RATE_LIMITED),
            (500, Verdict.UNREACHABLE),
            (503, Verdict.UNREACHABLE),
        ],
    )
    def test_img_46_a_mirror_that_refuses_leads_on_to_the_registry(
        self, node: Node, registry: Registry, mirror: Registry, status: int, verdict: Verdict
    ) -> None:
        with FaultProxy(mirror.host) as front:
            front.answer("manifests", status)
            node.mirrored(registry.host, f"{front.host}/copy")
            found = node.resolve(f"{registry.host}/os@{IMAGE.digest}")
            assert verdicts(found) == [(LOCAL, ABSENT), (MIRROR, verdict), (REMOTE, COMPLETE)]

    def test_a_mirror_that_is_down_leads_on_to_the_registry(
        self, node: Node, registry: Registry, mirror: Registry
    ) -> None:
        node.mirrored(registry.host, f"{mirror.host}/copy")
        mirror.stop()
        found = node.resolve(f"{registry.host}/os@{IMAGE.digest}")
        assert verdicts(found) == [(LOCAL, ABSENT), (MIRROR, Verdict.UNREACHABLE), (REMOTE, COMPLETE)]
        assert node.skopeo_copies(f"{registry.host}/os@{IMAGE.digest}")

    @pytest.mark.parametrize("fault", ["layer gone", "other body"])
    def test_a_mirror_with_a_gap_ends_the_search_as_it_ends_containers_images_pull(
        self, node: Node, registry: Registry, mirror: Registry, fault: str
    ) -> None:
        with FaultProxy(mirror.host) as front:
            if fault == "layer gone":
                mirror.delete_blob("copy/os", IMAGE.layers[0].digest)
            else:
                front.replace_body("manifests", OTHER.manifest)
            node.mirrored(registry.host, f"{front.host}/copy")
            found = node.resolve(f"{registry.host}/os@{IMAGE.digest}")
            assert not found.complete
            assert found.findings[-1].source is MIRROR
            assert "would stay with this mirror" in found.findings[-1].reason
            assert not node.skopeo_copies(f"{registry.host}/os@{IMAGE.digest}")

    def test_img_45_img_47_a_blocked_registry_is_never_asked_and_the_mirrors_reason_is_told(
        self, node: Node, registry: Registry, mirror: Registry
    ) -> None:
        mirror.delete("copy/os", IMAGE.digest)
        node.mirrored(registry.host, f"{mirror.host}/copy", more="blocked = true")
        found = node.resolve(f"{registry.host}/os@{IMAGE.digest}")
        assert verdicts(found) == [(LOCAL, ABSENT), (MIRROR, ABSENT), (REMOTE, Verdict.POLICY)]
        assert "manifest unknown" in str(found.held())
        assert registry.requests() == ()

    def test_a_mirror_for_digests_only_is_not_asked_for_a_tag_but_for_its_digest(
        self, node: Node, registry: Registry, mirror: Registry
    ) -> None:
        node.mirrored(registry.host, f"{mirror.host}/copy", more="mirror-by-digest-only = true")
        found = node.resolve(f"{registry.host}/os:1")
        assert verdicts(found) == [(LOCAL, ABSENT), (MIRROR, COMPLETE)]
        assert [request.path for request in registry.requests()] == ["/v2/os/manifests/1"]

    def test_a_broken_registries_conf_stops_registries_and_not_a_local_copy(
        self, node: Node, registry: Registry
    ) -> None:
        node.registries_conf("[[registry]\n")
        found = node.resolve(f"{registry.host}/os@{IMAGE.digest}")
        assert verdicts(found) == [(LOCAL, ABSENT), (REMOTE, Verdict.MALFORMED)]
        assert "registries.conf" in found.findings[1].reason
        node.storage.add(IMAGE, f"{registry.host}/os:1")
        assert node.resolve(f"{registry.host}/os@{IMAGE.digest}").complete


class TestPolicy:
    def test_img_02_a_policy_against_local_copies_leads_on_to_the_registry(
        self, node: Node, registry: Registry
    ) -> None:
        node.storage.add(IMAGE, f"{registry.host}/os:1")
        node.policy({"default": REJECT, "transports": {"docker": {registry.host: ACCEPT}}})
        found = node.resolve(f"{registry.host}/os@{IMAGE.digest}")
        assert verdicts(found) == [(LOCAL, Verdict.POLICY), (REMOTE, COMPLETE)]

    def test_img_03_a_policy_for_one_storage_allows_its_copies(self, node: Node, registry: Registry) -> None:
        node.storage.add(IMAGE, f"{registry.host}/os:1")
        scope = f"[overlay@{node.storage.root}]{registry.host}/os"
        node.policy({"default": REJECT, "transports": {"containers-storage": {scope: ACCEPT}}})
        assert verdicts(node.resolve(f"{registry.host}/os@{IMAGE.digest}")) == [(LOCAL, COMPLETE)]

    def test_a_rejected_registry_is_not_asked(self, node: Node, registry: Registry) -> None:
        node.policy({"default": ACCEPT, "transports": {"docker": {registry.host: REJECT}}})
        for pullspec in (f"{registry.host}/os@{IMAGE.digest}", f"{registry.host}/os:1"):
            found = node.resolve(pullspec)
            assert verdicts(found) == [(LOCAL, ABSENT), (REMOTE, Verdict.POLICY)]
            assert found.held().reason is HoldReason.POLICY
            assert registry.host in found.findings[1].reason
        assert registry.requests() == ()

    def test_wanted_signatures_are_left_to_the_pull_and_noted(self, node: Node, registry: Registry) -> None:
        node.policy({"default": [{"type": "signedBy", "keyType": "GPGKeys", "keyPath": "/k"}]})
        found = node.resolve(f"{registry.host}/os@{IMAGE.digest}")
        assert found.chosen is not None
        assert found.chosen.reason == "signatures are checked by rpm-ostree's own pull"

    def test_img_07_an_unreadable_policy_is_the_reason_and_not_the_image(self, node: Node, registry: Registry) -> None:
        node.policy({"default": [{"type": "fromTheFuture"}]})
        found = node.resolve(f"{registry.host}/os@{IMAGE.digest}")
        assert found.held().reason is HoldReason.POLICY
        assert "unknown type fromTheFuture" in str(found.held())
        assert registry.requests() == ()


class TestCredentials:
    @pytest.fixture
    def closed(self, tmp_path: Path) -> Iterator[Registry]:
        with Registry(tmp_path / "closed", password_needed=True) as running:
            images.push(IMAGE, f"{running.host}/os:1", credentials=f"{USER}:{PASSWORD}")
            yield running

    def auth(self, node: Node, name: str, host: str, password: str) -> None:
        path = node.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"auths": {host: {"username": USER, "password": password}}}))

    def test_credentials_that_come_later_end_the_hold(self, node: Node, closed: Registry) -> None:
        found = node.resolve(f"{closed.host}/os:1")
        assert found.held().reason is HoldReason.CREDENTIALS
        assert "there is no auth.json" in str(found.held())
        self.auth(node, "etc/ostree/auth.json", closed.host, PASSWORD)
        assert node.resolve(f"{closed.host}/os:1").complete

    def test_the_kubelets_credentials_are_used_with_a_word_about_rpm_ostree(self, node: Node, closed: Registry) -> None:
        self.auth(node, "var/lib/kubelet/config.json", closed.host, PASSWORD)
        found = node.resolve(f"{closed.host}/os:1")
        assert found.chosen is not None
        assert "rpm-ostree needs linked to /run/ostree/auth.json" in found.chosen.reason

    def test_a_malformed_auth_file_is_the_reason(self, node: Node, closed: Registry) -> None:
        self.auth(node, "run/ostree/auth.json", closed.host, PASSWORD)
        (node.root / "run/ostree/auth.json").write_text("{torn")
        found = node.resolve(f"{closed.host}/os:1")
        assert found.held().reason is HoldReason.CREDENTIALS
        assert "run/ostree/auth.json: it is not an auth.json" in str(found.held())

    def test_no_finding_shows_a_password(self, node: Node, closed: Registry) -> None:
        self.auth(node, "run/ostree/auth.json", closed.host, "hunter2")
        found = node.resolve(f"{closed.host}/os:1")
        assert not found.complete
        assert "hunter2" not in repr(found) + str(found.held()) + repr(node.resolver)


class TestLoad:
    def test_what_was_found_complete_is_not_asked_for_again(self, node: Node, registry: Registry) -> None:
        node.resolve(f"{registry.host}/os@{IMAGE.digest}")
        before = registry.requests()
        assert node.resolve(f"{registry.host}/os@{IMAGE.digest}").complete
        assert registry.requests() == before
        node.resolver.forget()
        node.resolve(f"{registry.host}/os@{IMAGE.digest}")
        assert len(registry.requests()) == 2 * len(before)

    def test_what_was_not_complete_is_asked_for_again(self, node: Node, registry: Registry) -> None:
        registry.delete("os", IMAGE.digest)
        assert not node.resolve(f"{registry.host}/os@{IMAGE.digest}").complete
        images.push(IMAGE, f"{registry.host}/os:1")
        assert node.resolve(f"{registry.host}/os@{IMAGE.digest}").complete

    def test_a_host_that_asks_for_patience_is_left_alone_for_so_long(self, node: Node, registry: Registry) -> None:
        with FaultProxy(registry.host) as proxy:
            proxy.answer("manifests", 429, headers={"Retry-After": "60"}, times=1)
            pullspec = f"{proxy.host}/os@{IMAGE.digest}"
            held = node.resolve(pullspec).held()
            assert (held.reason, held.retry_after) == (HoldReason.REGISTRY, 60.0)
            asked = len(proxy.requests())
            node.now = 59.0
            held = node.resolve(pullspec).held()
            assert (held.reason, held.retry_after) == (HoldReason.REGISTRY, 1.0)
            assert len(proxy.requests()) == asked
            node.now = 60.5
            assert node.resolve(pullspec).complete


def finding(source: Source, verdict: Verdict) -> Finding:
    return Finding(source, "there", verdict)


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        ([], HoldReason.IMAGE),
        ([(LOCAL, ABSENT)], HoldReason.IMAGE),
        ([(LOCAL, Verdict.UNREACHABLE), (REMOTE, ABSENT)], HoldReason.IMAGE),
        ([(LOCAL, Verdict.POLICY), (REMOTE, Verdict.UNREACHABLE)], HoldReason.REGISTRY),
        ([(MIRROR, Verdict.UNAUTHORIZED), (REMOTE, Verdict.UNREACHABLE)], HoldReason.CREDENTIALS),
        ([(MIRROR, ABSENT), (REMOTE, Verdict.TLS)], HoldReason.REGISTRY),
        ([(MIRROR, ABSENT), (REMOTE, Verdict.POLICY)], HoldReason.POLICY),
        ([(REMOTE, INCOMPLETE)], HoldReason.IMAGE),
        ([(REMOTE, Verdict.MALFORMED)], HoldReason.IMAGE),
        ([(REMOTE, Verdict.RATE_LIMITED)], HoldReason.REGISTRY),
    ],
)
def test_one_reason_is_published_for_all_findings(found: list[tuple[Source, Verdict]], reason: HoldReason) -> None:
    assert hold_reason([finding(source, verdict) for source, verdict in found]) is reason
