"""The images of an update: looked for rarely, held while needed, in a real registry and a real containers-storage."""

from __future__ import annotations

import os
import shutil
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest

from mcdaemon.errors import Failure, Held, HoldReason, Irreconcilable
from mcdaemon.image.connection import Limits
from mcdaemon.image.resolve import Resolver, Source
from mcdaemon.image.storage import Storage
from mcdaemon.retry import Backoff
from mcdaemon.update.images import Images
from tests.stand import images as built
from tests.stand.registry import Registry
from tests.stand.storage import ContainersStorage

IMAGE = built.layer_on(built.os_image(), {"etc/x": built.File(b"x")})
OTHER = built.layer_on(built.os_image(), {"etc/x": built.File(b"other")})
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: containers-storage")


class Node:
    """What an update's images are looked for with, and a clock that only moves when told."""

    def __init__(self, root: Path, storage: ContainersStorage, registry: Registry) -> None:
        self.storage = storage
        self.registry = registry
        self.now = 1000.0
        (root / "etc/containers").mkdir(parents=True)
        (root / "etc/containers/policy.json").write_text('{"default": [{"type": "insecureAcceptAnything"}]}')
        (root / "etc/containers/registries.conf").write_text('[[registry]]\nlocation = "127.0.0.1"\ninsecure = true\n')
        self.holds = Storage(str(storage.root), str(storage.runroot))
        resolver = Resolver(self.holds, root, Limits(connect=2.0, read=2.0, total=4.0), clock=lambda: self.now)
        self.images = Images(resolver, self.holds, Backoff(10.0, 100.0), clock=lambda: self.now)
        self.name = f"{registry.host}/os"
        self.pinned = f"{self.name}@{IMAGE.digest}"

    def push(self) -> None:
        built.push(IMAGE, f"{self.name}:1")
        self.registry.forget_requests()

    def pull(self) -> None:
        self.storage.add(IMAGE, f"{self.name}:1")

    def held(self) -> list[tuple[str, str]]:
        return [(hold.update, hold.digest) for hold in self.holds.holds()]

    def failure(self, pullspec: str = "", digest: str = "") -> Held:
        with pytest.raises(Held) as caught:
            self.images.check(pullspec or self.pinned, digest)
        return caught.value


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    with ContainersStorage() as storage, Registry(tmp_path / "registry") as registry:
        monkeypatch.setenv("PATH", f"{storage.programs}:{os.environ['PATH']}")
        yield Node(tmp_path / "root", storage, registry)


# -- looking ----------------------------------------------------------------------------------------------------------


def test_an_image_that_was_found_is_not_asked_for_again(node: Node) -> None:
    node.push()
    first = node.images.check(node.pinned)
    asked = len(node.registry.requests())
    assert first.complete and asked
    for _ in range(5):
        assert node.images.check(node.pinned) is first
    assert len(node.registry.requests()) == asked
    node.images.forget()
    node.images.check(node.pinned)
    assert len(node.registry.requests()) > asked


def test_an_image_that_is_missing_is_looked_for_when_it_is_due_and_not_before(node: Node) -> None:
    error = node.failure()
    asked = len(node.registry.requests())
    assert error.reason is HoldReason.IMAGE and asked
    due = node.images.next_look()
    assert due is not None and 1010.0 <= due <= 1020.1
    for _ in range(20):
        assert str(node.failure()) == str(error)
    assert len(node.registry.requests()) == asked
    node.push()
    asked = 0
    node.failure()
    assert len(node.registry.requests()) == asked
    node.now = due
    assert node.images.check(node.pinned).complete
    assert node.images.next_look() is None


def test_a_node_that_waits_for_hours_does_not_grow(node: Node) -> None:
    """The same error is raised every round; its traceback holds the frames of each."""
    node.failure()
    depths = {len(traceback.extract_tb(node.failure().__traceback__)) for _ in range(50)}
    assert len(depths) == 1


def test_waits_grow_until_the_image_is_found_and_begin_anew_after_that(node: Node) -> None:
    last = 0.0
    for _ in range(6):
        node.failure()
        due = node.images.next_look()
        assert due is not None
        last, node.now = due - node.now, due
    assert last > 10.0
    node.push()
    node.images.check(node.pinned)
    node.registry.delete("os", IMAGE.digest)
    node.images.forget()
    node.failure()
    due = node.images.next_look()
    assert due is not None and due - node.now <= 20.1


def test_incident_2_an_image_that_nobody_wants_any_more_wakes_nobody(node: Node) -> None:
    """The desired config went back: a look that is overdue for ever would be a loop without a pause."""
    node.failure()
    due = node.images.next_look()
    assert due is not None
    node.now = due + 1
    assert node.images.next_look() is None


def test_a_timer_that_is_a_moment_early_finds_the_image_due(node: Node) -> None:
    node.failure()
    due = node.images.next_look()
    assert due is not None
    node.push()
    node.now = due - 0.01
    assert node.images.check(node.pinned).complete


def test_the_answer_for_one_digest_is_none_for_another(node: Node) -> None:
    node.push()
    tag = f"{node.name}:1"
    assert node.images.check(tag, IMAGE.digest).complete
    assert node.failure(tag, OTHER.digest).reason is HoldReason.IMAGE
    assert node.images.check(tag, IMAGE.digest).complete


def test_a_reference_that_is_none_is_refused_and_not_waited_for(node: Node) -> None:
    with pytest.raises(Irreconcilable):
        node.images.check("not a reference")
    assert node.images.next_look() is None


# -- holding ----------------------------------------------------------------------------------------------------------


def test_a_local_image_is_held_against_garbage_collection(node: Node) -> None:
    node.pull()
    found = node.images.hold(node.pinned, "", "u1")
    assert found.chosen is not None and found.chosen.source is Source.STORAGE
    assert node.held() == [("u1", IMAGE.digest)]
    node.storage.podman("image", "prune", "--all", "--force")
    node.images.forget()
    assert node.images.check(node.pinned).complete
    node.images.release("u1")
    assert node.held() == []
    node.storage.podman("image", "prune", "--all", "--force")
    node.images.forget()
    node.failure()


def test_holding_again_after_a_crash_makes_no_second_hold(node: Node) -> None:
    node.pull()
    for _ in range(2):
        node.images.hold(node.pinned, "", "u1")
    assert node.held() == [("u1", IMAGE.digest)]


def test_an_image_of_the_registry_needs_no_hold(node: Node) -> None:
    node.push()
    found = node.images.hold(node.pinned, "", "u1")
    assert found.chosen is not None and found.chosen.source is Source.REGISTRY
    assert node.held() == []


def test_incident_1_a_local_image_that_went_away_since_the_check_is_taken_from_the_registry(node: Node) -> None:
    node.push()
    node.pull()
    assert "containers-storage" in node.images.check(node.pinned).origin()
    node.storage.podman("rmi", "--all", "--force")
    assert "registry" in node.images.hold(node.pinned, "", "u1").origin()


def test_a_local_image_that_went_away_since_the_check_and_is_nowhere_else_is_waited_for(node: Node) -> None:
    node.pull()
    node.images.check(node.pinned)
    node.storage.podman("rmi", "--all", "--force")
    with pytest.raises(Held) as caught:
        node.images.hold(node.pinned, "", "u1")
    assert caught.value.reason is HoldReason.IMAGE and node.held() == []


def broken_create(node: Node) -> None:
    """A podman that can do everything but hold."""
    wrapper = node.storage.programs / "podman"
    real = node.storage.programs / "podman.real"
    shutil.move(wrapper, real)
    wrapper.write_text(f'#!/bin/sh\ncase "$*" in *" create "*) echo no room >&2; exit 125;; esac\nexec {real} "$@"\n')
    wrapper.chmod(0o755)


def test_a_local_image_that_cannot_be_held_is_taken_from_the_registry(node: Node) -> None:
    """Unheld, garbage collection could win while it is staged."""
    node.push()
    node.pull()
    broken_create(node)
    found = node.images.hold(node.pinned, "", "u1")
    assert found.chosen is not None and found.chosen.source is Source.REGISTRY


def test_a_local_image_that_cannot_be_held_and_is_nowhere_else_is_waited_for(node: Node) -> None:
    node.pull()
    broken_create(node)
    with pytest.raises(Failure):
        node.images.hold(node.pinned, "", "u1")


def test_after_staging_from_a_local_copy_failed_it_does_not_count_until_the_next_update(node: Node) -> None:
    node.push()
    node.pull()
    node.images.distrust_storage()
    node.images.forget()
    assert "registry" in node.images.check(node.pinned).origin()
    node.images.trust_storage()
    node.images.forget()
    assert "containers-storage" in node.images.check(node.pinned).origin()


def test_holds_that_no_journal_knows_are_released_and_others_stay(node: Node) -> None:
    """IMG-24."""
    node.pull()
    for update in ("u1", "u2"):
        node.images.hold(node.pinned, "", update)
    assert len(node.images.release_unknown({"u2"})) == 1
    assert node.held() == [("u2", IMAGE.digest)]
    assert node.images.release_unknown({"u2"}) == ()
    node.images.release("u1")
    assert node.held() == [("u2", IMAGE.digest)]
