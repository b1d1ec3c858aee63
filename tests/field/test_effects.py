"""Every effect of the model beside the real one: the same things change on a node, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.field.conftest import Aged, MakeNode, Push
from tests.field.effects import BOUNDARY, OUT, SETTINGS, Walk, desiring_new, early_by_hand, walking
from tests.field.evidence import NEW, OLD, settle
from tests.field.rivals import fails_times, finalizer, rival
from tests.model import steps, world
from tests.model.effects import Effect, finalize
from tests.model.node import DOWN, FOREIGN, KINDS, MIXED, STRANGER, UP, Deployment, Undo, with_root
from tests.model.node import Node as Abstract
from tests.stand.configs import machine_config
from tests.stand.node import Node, next_image

pytestmark = pytest.mark.stand

E = Effect
CHECK = "/etc/mcdaemon/health.d/10-check.sh"
OS = next(kind for kind in KINDS if kind.name == "OS")
FILES = next(kind for kind in KINDS if kind.name.startswith("files"))


def rebooted(walk: Walk) -> Abstract:
    """After the agent has asked: the node comes up again, and so does the abstract one, before its early unit."""
    walk.go_on()
    walk.node.follow_reboot()
    return world.boot(finalize(walk.kind, walk.abstract))


def up(abstract: Abstract, **changes: Any) -> Abstract:
    return abstract._replace(agent=UP, task=None, **changes)


@pytest.fixture
def node(aged: Aged) -> Node:
    """Rests on the old config; the new one is desired."""
    made = aged(OLD, settings=SETTINGS)
    made.desire(first=NEW)
    return made


@pytest.mark.slow
def test_an_update_of_files_has_the_effects_of_the_model(node: Node) -> None:
    with walking(node, FILES, desiring_new(FILES)) as walk:
        walk.until("reboot")
        seen, abstract = walk.seen, rebooted(walk)
    with walking(node, FILES, up(abstract, health="good")) as walk:
        walk.until("confirm")
    assert seen + walk.seen == [
        E.BEGIN, E.NOTE_STAGING, E.STAGE_LINE, E.DROP_PAYLOAD, E.LAY_OUT, E.NOTE_VERIFIED, E.NOTE_DRAINING, E.DRAIN,
        E.NOTE_DRAINED, E.NOTE_FINALIZING, E.UNLOCK, E.FINALIZE, E.KEEP_SHARED, E.WRITE_SOME, E.WRITE_REST, E.SYNC,
        E.NOTE_COMMITTED, E.NOTE_PROVED, E.ARM, E.ASK, E.NOTE_APPLIED, E.NOTE_RETURNING, E.UNDRAIN, E.NOTE_BACK,
        E.NOTE_CONFIRMED, E.DROP_PAYLOAD, E.DROP_UNDO,
    ]  # fmt: skip


def test_dropping_a_committed_update_has_the_effects_of_the_model(node: Node) -> None:
    with walking(node, FILES, desiring_new(FILES)) as walk:
        walk.until("verify-root")
        node.desire(first=OLD)
        walk.abstract = walk.abstract._replace(desired="old")
        before = len(walk.seen)
        assert walk.step() == "discard"
    assert walk.seen[before:] == [
        E.CLEAR_STAGE, E.PUT_SOME_BACK, E.PUT_REST_BACK, E.SYNC, E.NOTE_RETURNING, E.UNDRAIN, E.NOTE_BACK,
        E.NOTE_DISCARDED, E.DROP_PAYLOAD, E.DROP_UNDO,
    ]  # fmt: skip


@pytest.mark.slow
def test_the_way_back_has_the_effects_of_the_model(node: Node) -> None:
    node.machine.write(CHECK, '#!/bin/sh\ntest "$(cat /etc/app.conf)" = old\n', 0o755)
    with walking(node, FILES, desiring_new(FILES)) as walk:
        walk.until("reboot")
        abstract = rebooted(walk)
    early_by_hand(node)
    with walking(node, FILES, up(abstract, health="bad")) as walk:
        walk.patient = True
        assert walk.step() == "roll-back"
        seen, abstract = walk.seen, rebooted(walk)
    with walking(node, FILES, abstract, "early") as walk:
        walk.effects()
        seen += walk.seen
    with walking(node, FILES, up(walk.abstract)) as walk:
        assert walk.step() == "discard"
        node.mcdaemon("retry")
        walk.stopped_at("round")
        walk.go_on()
        walk.told(E.FORGET_FAILED)
    assert seen + walk.seen == [
        E.NOTE_ROLLED_BACK, E.DEFAULT_BACK, E.ASK, E.VOID_PROOF, E.PUT_SOME_BACK, E.PUT_REST_BACK, E.SYNC,
        E.PUT_REST_BACK, E.SYNC, E.CLEAR_LOST, E.NOTE_RETURNING, E.UNDRAIN, E.NOTE_BACK,
        E.NOTE_DISCARDED, E.DROP_PAYLOAD, E.DROP_UNDO, E.FORGET_FAILED,
    ]  # fmt: skip


def test_the_early_unit_has_the_effects_of_the_model(node: Node) -> None:
    with walking(node, FILES, desiring_new(FILES)) as walk:
        walk.until("finalize")
    node.machine.power_cut()
    early_by_hand(node)
    node.machine.boot()
    with walking(node, FILES, next(world.power_cut(walk.abstract))[1], "early") as walk:
        walk.effects()
        assert walk.seen == [E.NOTE_REPAIR, E.KEEP_SHARED, E.WRITE_SOME, E.WRITE_REST, E.SYNC, E.REBOOT_AT_ONCE]
    node.machine.run(["sh", "-c", "rm -r /var/lib/mcdaemon/payload/*"])
    node.machine.power_cut()
    node.machine.boot()
    with walking(node, FILES, world.boot(walk.abstract._replace(payload=None)), "early") as walk:
        walk.effects()
        assert walk.seen == [E.NOTE_GIVEN_UP]


def test_a_reboot_that_is_not_to_be_had_has_the_effects_of_the_model(node: Node) -> None:
    with walking(node, FILES, desiring_new(FILES)) as walk:
        walk.until("verify-root")
        hold = ["systemd-inhibit", "--what=shutdown", "--mode=block", "--who=backup", "--why=runs", "sleep", "600"]
        holder = node.machine.start(hold)
        node.machine.run(["sh", "-c", "until systemd-inhibit --list | grep -q backup; do :; done"])
        walk.begin()
        assert walk.effect() is E.ARM
        walk.abstract = next(steps.faults(FILES, walk.abstract))[1]
        assert walk.effect() is E.DISARM
        node.machine.stop_process(holder)


def test_a_root_that_is_not_what_was_asked_for_is_written_down_as_in_the_model(node: Node) -> None:
    with walking(node, FILES, desiring_new(FILES)) as walk:
        walk.until("commit-files")
        pending = node.machine.default_entry().deployment
        (node.machine.deployment_root(pending) / "etc/app.conf").write_text("damaged\n")
        walk.abstract = with_root(walk.abstract, "t", "new", MIXED)
        walk.begin()
        walk.abstract = steps.advance(FILES, walk.abstract)[1]
        assert walk.effect() is E.NOTE_FAILURE


def test_what_somebody_else_stages_on_top_is_locked_as_in_the_model(node: Node) -> None:
    with walking(node, FILES, desiring_new(FILES)) as walk:
        walk.until("finalize")
        rival(node, "kargs", "by-hand")
        theirs = Deployment(STRANGER, FOREIGN, "", "", "")
        walk.abstract = walk.abstract._replace(staged=theirs, locked=False)
        assert walk.begin() == "commit-files"
        assert walk.effect() is E.LOCK


def test_a_finalization_that_fails_has_the_effects_of_the_model(node: Node) -> None:
    with walking(node, FILES, desiring_new(FILES)) as walk:
        walk.until("drain")
        finalizer(node, fails_times(1))
        walk.begin()
        assert (walk.effect(), walk.effect()) == (E.NOTE_FINALIZING, E.UNLOCK)
        before = len(walk.seen)
        walk.abstract = dict(steps.faults(FILES, walk.abstract))["finalize: it fails"]
        walk.effects()
        assert walk.seen[before:] == [E.NOTE_RETURNING, E.UNDRAIN, E.NOTE_BACK, E.NOTE_UNVERIFIED]


def test_a_live_change_has_the_effects_of_the_model(aged: Aged) -> None:
    live = next(kind for kind in KINDS if kind.name == "live with drain")
    node = aged(OLD, settings=SETTINGS + "disruption: {policy_file: /etc/mcdaemon/policy.yaml}\n")
    drained = [{"type": "Drain"}, {"type": "DaemonReload"}]
    files = ("/etc/app.conf", "/etc/only-new", "/usr/local/bin/tool", "/usr/local/bin/only-new")
    policy = {"files": [{"path": path, "actions": drained} for path in files]}
    node.machine.write("/etc/mcdaemon/policy.yaml", json.dumps(policy))
    node.desire(first=NEW)
    with walking(node, live, desiring_new(live)) as walk:
        walk.until("confirm")
    assert walk.seen == [
        E.BEGIN, E.NOTE_DRAINING, E.DRAIN, E.NOTE_DRAINED, E.LAY_OUT, E.KEEP_ALL, E.WRITE_SOME, E.WRITE_REST, E.SYNC,
        E.RESTART, E.NOTE_APPLIED, E.NOTE_APPLIED, E.NOTE_RETURNING, E.UNDRAIN, E.NOTE_BACK, E.NOTE_CONFIRMED,
        E.DROP_PAYLOAD, E.DROP_UNDO,
    ]  # fmt: skip


def local_image(make_node: MakeNode, push: Push) -> Node:
    """A node that rests on the old config, desires the new one with another OS, and has its image."""
    node = make_node(settings=SETTINGS)
    settle(node, first=OLD)
    image = push(next_image("417.94.2"), "os:v2")
    node.machine.run(["podman", "pull", "--quiet", "--tls-verify=false", image], timeout=120)
    files: Any = {"/etc/app.conf": "new\n", "/etc/only-new": "new\n", "/usr/local/bin/tool": ("new\n", 0o755),
                  "/usr/local/bin/only-new": "new\n"}  # fmt: skip
    node.desire(first=machine_config("50-new", files=files, os_image=image))
    return node


@pytest.mark.slow
def test_another_os_that_lies_on_the_node_has_the_effects_of_the_model(make_node: MakeNode, push: Push) -> None:
    node = local_image(make_node, push)
    with walking(node, OS, desiring_new(OS)) as walk:
        walk.until("verify-staged")
    assert walk.seen == [
        E.BEGIN, E.NOTE_HOLD, E.HOLD_IMAGE, E.NOTE_STAGING, E.STAGE_TREE, E.DROP_PAYLOAD, E.LAY_OUT, E.RELEASE_IMAGE,
        E.NOTE_VERIFIED,
    ]  # fmt: skip


@pytest.mark.slow
def test_a_hold_that_no_record_knows_goes_at_the_start(make_node: MakeNode, push: Push) -> None:
    node = local_image(make_node, push)
    with walking(node, OS, desiring_new(OS)) as walk:
        walk.begin()
        while walk.effect() is not E.HOLD_IMAGE:
            pass
    node.machine.run(["rm", "/var/lib/mcdaemon/journal.json"])
    with walking(node, OS, steps.start(walk.abstract._replace(agent=DOWN, update=None, task=None))) as walk:
        walk.effects()
        assert walk.seen == [E.SWEEP_HOLD]


def test_a_start_after_a_crash_has_the_effects_of_the_model(node: Node) -> None:
    with walking(node, FILES, desiring_new(FILES)) as walk:
        walk.until("drain")
    node.machine.write("/var/lib/mcdaemon/journal.json", "torn")
    with walking(node, FILES, steps.start(walk.abstract._replace(agent=DOWN, torn=True))) as walk:
        walk.effects()
        assert walk.seen == [E.STAND_IN]
    left = walk.abstract._replace(agent=DOWN, update=None, out=False, undo=Undo("u", "", "", "old"))
    node.machine.run(["sh", "-c", f"cd /var/lib/mcdaemon; rm -f journal.json {OUT}; cp -a payload/* undo/"])
    with walking(node, FILES, steps.start(left)) as walk:
        walk.effects()
        assert walk.seen == [E.SWEEP_PAYLOAD, E.SWEEP_UNDO]


TESTS: dict[Callable[..., None], tuple[Effect, ...]] = {
    test_an_update_of_files_has_the_effects_of_the_model: (
        E.BEGIN, E.NOTE_STAGING, E.STAGE_LINE, E.DROP_PAYLOAD, E.LAY_OUT, E.NOTE_VERIFIED, E.NOTE_DRAINING, E.DRAIN,
        E.NOTE_DRAINED, E.NOTE_FINALIZING, E.UNLOCK, E.FINALIZE, E.KEEP_SHARED, E.WRITE_SOME, E.WRITE_REST, E.SYNC,
        E.NOTE_COMMITTED, E.NOTE_PROVED, E.ARM, E.ASK, E.NOTE_APPLIED, E.NOTE_RETURNING, E.UNDRAIN, E.NOTE_BACK,
        E.NOTE_CONFIRMED, E.DROP_UNDO,
    ),
    test_dropping_a_committed_update_has_the_effects_of_the_model: (
        E.CLEAR_STAGE, E.PUT_SOME_BACK, E.PUT_REST_BACK, E.NOTE_DISCARDED,
    ),
    test_the_way_back_has_the_effects_of_the_model: (
        E.NOTE_ROLLED_BACK, E.DEFAULT_BACK, E.VOID_PROOF, E.CLEAR_LOST, E.FORGET_FAILED,
    ),
    test_what_somebody_else_stages_on_top_is_locked_as_in_the_model: (E.LOCK,),
    test_a_finalization_that_fails_has_the_effects_of_the_model: (E.NOTE_UNVERIFIED,),
    test_the_early_unit_has_the_effects_of_the_model: (E.NOTE_REPAIR, E.REBOOT_AT_ONCE, E.NOTE_GIVEN_UP),
    test_a_reboot_that_is_not_to_be_had_has_the_effects_of_the_model: (E.DISARM,),
    test_a_root_that_is_not_what_was_asked_for_is_written_down_as_in_the_model: (E.NOTE_FAILURE,),
    test_a_live_change_has_the_effects_of_the_model: (E.KEEP_ALL, E.RESTART),
    test_another_os_that_lies_on_the_node_has_the_effects_of_the_model: (
        E.NOTE_HOLD, E.HOLD_IMAGE, E.STAGE_TREE, E.RELEASE_IMAGE,
    ),
    test_a_hold_that_no_record_knows_goes_at_the_start: (E.SWEEP_HOLD,),
    test_a_start_after_a_crash_has_the_effects_of_the_model: (E.STAND_IN, E.SWEEP_PAYLOAD, E.SWEEP_UNDO),
}  # fmt: skip
"""The test that shows each effect on the stand, and fails when the real one changes more or less."""


def test_every_effect_of_the_model_is_shown_once_on_the_stand() -> None:
    assert sorted(effect.name for shown in TESTS.values() for effect in shown) == sorted(effect.name for effect in E)
    assert set(BOUNDARY) == set(E)
