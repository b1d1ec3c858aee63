"""Performing: one idempotent step with effects. Its outcome is never trusted, the next observation is."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import time
from pathlib import Path
from typing import Callable, NoReturn, Optional

from mcdaemon.context import Context
from mcdaemon.decide import Booted, Decision, Step
from mcdaemon.errors import Broken, Failure, Held, HoldReason, Transient
from mcdaemon.host import files, greenboot, otheragents, process, turns
from mcdaemon.host.namespace import with_writable
from mcdaemon.inflight import InFlight, plan_of, update_of
from mcdaemon.machineconfig import kernelargs
from mcdaemon.observe import Facts
from mcdaemon.staging import MOST_TROUBLES, Staging, release
from mcdaemon.sweeping import retry_if_asked, sweep
from mcdaemon.update import commit, health, live, merge, ownsettings, payload, rollback, verify
from mcdaemon.update.journal import Confirmed, FailedTarget, Update

log = logging.getLogger("mcdaemon")

TARGET_FAILED = "target-failed"
"""Code of the error that says: this target was written off."""


_MOST_FINALIZATIONS = 3
"""How often a target may fail to be finalized: each time costs a drain (TXN-31)."""


class Performer:
    """The effects of each step on one node."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._update = InFlight(context.journal)
        staging = Staging(context, self._update)
        self._asked: Optional[float] = None
        self._effects: dict[Step, Callable[[Facts, Decision], None]] = {
            Step.APPLY_LIVE: self._apply_live,
            Step.STAGE_OS: staging.stage_os,
            Step.STAGE_KARGS: staging.stage_kargs,
            Step.VERIFY_STAGED: staging.verify_staged,
            Step.DRAIN: self._drain,
            Step.FINALIZE: self._finalize,
            Step.COMMIT_FILES: self._commit_files,
            Step.VERIFY_ROOT: self._verify_root,
            Step.REBOOT: self._reboot,
            Step.CONFIRM: self._confirm,
            Step.ROLL_BACK: self._roll_back,
            Step.DISCARD: self._discard,
        }

    @property
    def leaving(self) -> bool:
        """Whether a reboot was asked for, by this process."""
        return self._asked is not None

    def sweep(self) -> str:
        """What a start has to do before anything else; see `sweeping`."""
        return sweep(self._context, self._update)

    def retry_if_asked(self) -> None:
        """Forget the failed target when `mcdaemon retry` asked for it."""
        retry_if_asked(self._context, self._update)

    def perform(self, decision: Decision, facts: Facts) -> None:
        """Take the step. Raises Failure; a target that turns out to be impossible is written down first."""
        effect = self._effects.get(decision.step)
        if effect is None:
            return
        try:
            effect(facts, decision)
        except Transient as error:
            if not self._too_often(decision, error):
                raise
            self._write_off(error)
        except Held as error:
            if error.reason in _NOT_WAITED_FOR and decision.step in _OUT_OF_SERVICE:
                self._retreat(facts, decision, error)
            raise
        except Broken as error:
            if decision.step not in _CAN_FAIL_THE_TARGET or self._update.record().update is None:
                raise
            if decision.step in _ABOUT_A_DEPLOYMENT and self._moved(facts):
                raise Transient(f"somebody else's deployments took the place of ours: {error.sentence}") from error
            self._write_off(error)

    def _retreat(self, facts: Facts, decision: Decision, error: Held) -> None:
        """A node does not wait out of service for space or a repair: what is finalized goes, which also frees some, and
        the update begins again from where that is asked for before the drain (TXN-33). Where not even that can be
        written, the next rounds go on with it."""
        machine, update = self._context.machine, facts.update
        if update is not None and decision.step is Step.FINALIZE:
            with contextlib.suppress(Failure):
                self._back_to_work(update)  # first: nothing is written outside of the staged deployment yet
        with contextlib.suppress(Failure):
            now = dataclasses.replace(facts, staged=machine.staged(), pending=machine.pending())
            self._discard(now, Decision(Step.DISCARD, str(error)))

    def _write_off(self, error: Failure) -> NoReturn:
        """The target cannot be reached: `decide` drops it next, and remembers."""
        self._update.note(failure=str(error))
        raise Broken(error.sentence, error.hint, TARGET_FAILED) from error

    def _too_often(self, decision: Decision, error: Transient) -> bool:
        """Count a failure that may pass or may not: the registry's are waited for, these are not for ever."""
        most = MOST_TROUBLES.get(error.code)
        update = self._update.record().update
        if most is None or update is None or decision.step not in _CAN_FAIL_THE_TARGET:
            return False
        return self._update.note(troubles=update.troubles + 1).troubles >= most

    def _moved(self, facts: Facts) -> bool:
        """Whether somebody else has staged or cleaned up since the observation: a race lost is not the target's."""
        staged = self._context.machine.staged()
        seen = facts.staged.name if facts.staged is not None else ""
        return (staged.name if staged is not None else "", self._context.machine.pending()) != (seen, facts.pending)

    def _drain(self, facts: Facts, _decision: Decision) -> None:
        update = self._update.begin(facts)
        if not update.live:
            self._require_free_way()
            otheragents.require_none(self._context.systemd, self._context.machine.top)
            ownsettings.require_before_reboot(self._context.root, self._context.settings.state_dir, update.name)
        settings = self._context.settings.drain
        self._update.note(draining=True)  # from here on workloads may be away, whatever becomes of the hook
        _run_hook(
            settings.command, settings.timeout_seconds, f"drain the node for {update.name}", self._context.runtime
        )
        self._update.note(drained=True)

    # -- the point of no return, and back ---------------------------------------------------------------------------

    def _require_free_way(self) -> None:
        """Raises Held while somebody holds a reboot up, or works on deployments: the node is not taken out of service
        for that, and nothing is finalized, because from there to the reboot changes to /etc are lost."""
        context = self._context
        if not context.settings.reboot.command:
            context.logind.require_free()
        active = context.rpmostree.active()
        if active is not None and active.title.startswith("mcdaemon:"):
            active = None  # our own, over and about to close
        if active is not None or context.machine.busy():
            doing = f"rpm-ostree's {active.method} ({active.title})" if active else "a program with the lock of ostree"
            raise Held(HoldReason.OTHER_CLIENT, f"cannot go on: {doing} is at work", "the update waits for its end")

    def _finalize(self, facts: Facts, _decision: Decision) -> None:
        self._require_free_way()
        update, context = update_of(facts), self._context
        ownsettings.require_before_reboot(context.root, context.settings.state_dir, update.name)
        staged = context.machine.staged()
        if staged is None or staged.name != update.staged:
            raise Transient("cannot finalize: what was verified is not what is staged any more", "another client's?")
        update = self._update.note(
            finalizing=facts.boot_id, finalizations=update.finalizations + 1, stamp=context.machine.stamp()
        )
        with contextlib.suppress(Failure):  # only for a sentence in the log
            files.write_atomic(
                self._context.etc_at_merge, json.dumps(merge.snapshot(context.root.path / "etc")).encode()
            )
        context.machine.unlock()
        try:
            context.machine.finalize(context.systemd, staged.name)
        except (Broken, Transient) as error:
            if error.code == process.STOPPED:
                raise
            self._finalization_failed(update, error)

    def _finalization_failed(self, update: Update, error: Failure) -> NoReturn:
        """The node goes back to work at once; what passes (a file that came and went, TXN-34) gets another try, what
        stays is told by the next verification, or ends here (TXN-31). No reboot comes of it: what may be left staged is
        locked again, for it is not known as verified any more, and nobody would complete it."""
        if self._context.machine.staged() is not None:
            self._context.machine.lock()
        self._back_to_work(update)
        self._update.note(staged="")
        if update.finalizations >= _MOST_FINALIZATIONS:
            raise Broken(f"{error.sentence}; so it went {update.finalizations} times", error.hint) from error
        raise Transient(error.sentence, f"the node is back at work, it is tried again; {error.hint}") from error

    def _late_changes(self) -> tuple[str, ...]:
        """What was changed in the running /etc since the merge. Nothing is said where the record of it is gone."""
        try:
            before = json.loads(self._context.etc_at_merge.read_bytes())
        except (OSError, ValueError):
            return ()
        return merge.late_changes(before, merge.snapshot(self._context.root.path / "etc"))

    def _bar_the_stage(self) -> None:
        """What another client staged on top of ours would be finalized by the shutdown, and boot in its place, without
        our files (TXN-36, TXN-43). Locked, it goes with the reboot."""
        staged = self._context.machine.staged()
        if staged is not None and not staged.locked:
            log.warning("another client has staged %s on top of this update; it is locked", staged.name)
            self._context.machine.lock()

    def _commit_files(self, facts: Facts, _decision: Decision) -> None:
        self._bar_the_stage()
        update, context = update_of(facts), self._context
        root, load = context.machine.root_of(facts.pending), self._payload(update)
        commit.remember(load, context.undo, root, root.shared)
        with_writable(context.machine.sysroot, lambda: commit.apply(load, context.payloads, root))
        self._update.note(committed=facts.pending)

    def _verify_root(self, facts: Facts, _decision: Decision) -> None:
        update, context = update_of(facts), self._context
        root, load = context.machine.root_of(facts.pending), self._payload(update)
        report = verify.validate(root, load.expected(), load.passwords)
        if report.mismatches:
            raise Broken(
                f"cannot reboot into {update.name}: the root that would boot is not what was asked for:\n"
                f"{report.text()}"
            )
        ownsettings.require_usable(root, context.settings.state_dir)
        plan, options = facts.plan, kernelargs.split(context.machine.options_of(facts.pending))
        if plan is not None and not kernelargs.satisfied(options, plan.kargs_to, plan.kargs_from):
            raise Broken(f"cannot reboot into {update.name}: the boot entry has other kernel arguments than the config")
        self._update.note(proved=facts.pending)

    def _reboot(self, facts: Facts, decision: Decision) -> None:
        """Arm the journal, then ask. Until the call has succeeded the update can still be dropped (P7).

        An armed journal without our asking is the work of an agent that died in between: ask, twice does no harm.
        """
        self._bar_the_stage()
        patience = self._context.settings.reboot.timeout_seconds
        if self._asked is not None and time.monotonic() - self._asked < patience:
            return
        if self._asked is not None:
            self._asked = None
            raise Transient(
                f"cannot reboot: it was asked for {patience:.0f} s ago and did not come",
                "see `systemctl list-jobs` and `systemd-inhibit --list`; it is asked for again",
            )
        update = facts.update
        if update is not None and not update.drained and facts.pending and facts.plan is not None:
            self._drain(facts, decision)  # back at work since a discard that could not be completed
        late = self._late_changes()
        if late:
            log.warning("changed after the merge, so not in the new root: %s", ", ".join(late))
        self._update.note(armed=facts.boot_id)
        try:
            self._ask_for_reboot()
        except (Held, Transient, Broken):
            # The early unit's own asking stays: services of this boot have read files that it replaced since.
            self._update.note(armed=facts.boot_id if facts.observation.booted is Booted.TARGET else "")
            raise
        self._asked = time.monotonic()

    def _ask_for_reboot(self) -> None:
        settings = self._context.settings.reboot
        if settings.command:
            runtime = self._context.runtime
            _run_hook(settings.command, settings.timeout_seconds, "reboot", runtime, HoldReason.INHIBITED)
        else:
            self._context.logind.reboot()

    def _confirm(self, facts: Facts, decision: Decision) -> None:
        update = update_of(facts)
        booted = next((d for d in facts.deployments if d.booted), None)
        self._update.note(applied=True)  # what was validated is kept: workloads come now, and are not taken away again
        self._back_to_work(update)
        # What the origin is pinned to, which for a multi-platform image is the index and not the platform's manifest.
        pinned = self._context.machine.origin_of(facts.booted).rpartition("@")[2]
        digest = pinned if pinned.startswith("sha256:") else booted.digest if booted else self._update.record().digest
        # The record first: without the payload that it names, a target looks broken. What a crash leaves is swept.
        record = dataclasses.replace(self._update.record(), update=None, digest=digest)
        if not decision.remember:
            shared = "\0".join(self._shared(update))
            confirmed = Confirmed(update.desired, update.name, facts.booted, int(time.time()), shared)
            record = dataclasses.replace(record, failed=None, confirmed=confirmed)
        self._update.store(record)
        self._forget(update)
        if not update.live and not decision.remember:
            for said in health.told(self._context.runtime):
                log.warning("wanted, but not required: %s", said)
            self._run_scripts(greenboot.GREEN)

    def _roll_back(self, facts: Facts, decision: Decision) -> None:
        """The files outside /etc stay until the old deployment runs, where the early unit puts them back: whatever else
        may boot was made from this one, and carries the same config."""
        update, context = update_of(facts), self._context
        if not update.rolled_back:
            changed = dataclasses.replace(update, rolled_back=True, failure=f"{update.name}: {decision.why}")
            failed = FailedTarget.of(update, decision.why)
            self._update.store(dataclasses.replace(self._update.record(), update=changed, failed=failed))
            self._run_scripts(greenboot.RED)
        rollback.to_source(context.machine, context.rpmostree, update.source)
        self._bar_the_stage()
        self._ask_for_reboot()

    def _discard(self, facts: Facts, decision: Decision) -> None:
        """Back to exactly the old config: what was staged or finalized goes, what was written comes back."""
        update, context = update_of(facts), self._context
        if not update.live and (facts.staged is not None or facts.pending):
            context.rpmostree.cleanup("pending-deploy")
            self._require_gone(update)
        if update.live:
            live.take_back(
                update.id, facts.current, context.policy, context.root, context.payloads, context.undo, context.systemd
            )
        else:
            carries = facts.current is not None and facts.current.identity == update.desired
            if carries and context.undo.load(update.id) is not None:
                self._complete(update)
            else:
                commit.take_back(update.id, context.undo, context.root, drop=False)
            self._clear_lost_stage(facts, update)
        self._back_to_work(update)
        record = self._update.record()
        failed = record.failed
        # What was taken back by the health gate is remembered since then, with its reason.
        if decision.remember and not (update.rolled_back and failed is not None and failed.desired == update.desired):
            failed = FailedTarget.of(update, decision.why)
        self._update.store(dataclasses.replace(record, update=None, failed=failed))
        self._forget(update)

    def _require_gone(self, update: Update) -> None:
        """Raises Held while the target is the default boot entry in spite of the cleanup, which keeps what is pinned
        and reports success: its files stay whole then, and so does the journal, for the next boot may enter it. It need
        not wait out of service."""
        machine = self._context.machine
        left = machine.pending()
        if not left or left != update.staged:
            return
        self._back_to_work(update)
        index = 0 if machine.staged() is None else 1
        raise Held(
            HoldReason.OTHER_CLIENT,
            f"cannot drop {update.name}: its deployment {left} is the default boot entry, also after a cleanup",
            f"if it is pinned: `ostree admin pin --unpin {index}`; it goes on by itself then, and a reboot until then "
            "boots it complete",
        )

    def _complete(self, update: Update) -> None:
        """What somebody else has made of the booted target carries its config: the files outside /etc have to fit that.
        The early unit sees to it first; here it is made sure of. What cannot be done is drift."""
        try:
            load = self._context.payloads.load(update.id)
            if load is not None:
                commit.apply(load, self._context.payloads, self._context.root)
        except Broken as error:
            log.warning("%s", error)

    def _clear_lost_stage(self, facts: Facts, update: Update) -> None:
        """What was staged is forgotten with the boot, but its directory stays on the disk, with what was put into its
        /etc, which can be secret. Nothing waits for that: rpm-ostree also removes it with its next deployment."""
        if update.attempt and facts.staged is None and not facts.pending:
            try:
                self._context.rpmostree.cleanup("base")
            except (Held, Transient, Broken) as error:
                log.info("%s", error)

    def _apply_live(self, facts: Facts, _decision: Decision) -> None:
        update = self._update.begin(facts)
        assert facts.desired is not None
        context = self._context
        live.apply(
            update.id,
            facts.desired.config,
            facts.current,
            plan_of(facts),
            context.root,
            context.payloads,
            context.undo,
            context.systemd,
            facts.outside,
        )
        self._update.note(applied=True)

    def reboot_at_once(self) -> None:
        """For the early unit: nothing else runs yet, so nothing has to be asked."""
        process.run(["systemctl", "reboot", "--force"], "reboot", 60.0, Broken)

    # -- shared -----------------------------------------------------------------------------------------------------

    def _payload(self, update: Update) -> payload.Payload:
        load = self._context.payloads.load(update.id)
        if load is None:
            raise Broken(f"cannot go on with {update.name}: its payload {update.id} is gone")
        return load

    def _shared(self, update: Update) -> tuple[str, ...]:
        """The files of the update that all deployments share. A payload that is torn by now keeps no update from its
        end."""
        with contextlib.suppress(Broken):
            load, root = self._context.payloads.load(update.id), self._context.root
            entries = load.entries if load is not None else ()
            return tuple(path for path, node in entries if node.kind is files.Kind.FILE and root.shared(path))
        return ()

    def _back_to_work(self, update: Update) -> None:
        if update.draining or update.drained:
            settings = self._context.settings.drain
            self._update.note(draining=True, drained=False)  # before: who is back must never be taken for drained
            _run_hook(settings.undo, settings.timeout_seconds, "take the node back to work", self._context.runtime)
            self._update.note(draining=False)

    def _run_scripts(self, kind: str) -> None:
        """What the administrator has for a verdict; whatever becomes of it, the node goes its way."""
        for said in self._context.scripts.verdict(kind):
            log.warning("%s", said)

    def _forget(self, update: Update) -> None:
        """The secrets first: what cannot be released now, the next start releases."""
        self._context.payloads.drop(update.id)
        self._context.undo.drop(update.id)
        self._context.etc_at_merge.unlink(missing_ok=True)
        self._context.images.trust_storage()
        self._context.images.forget()
        release(self._context, update)


_OUT_OF_SERVICE = frozenset({Step.FINALIZE, Step.COMMIT_FILES, Step.VERIFY_ROOT})
"""Steps of a drained node before its reboot was asked for."""

_NOT_WAITED_FOR = frozenset({HoldReason.SPACE, HoldReason.SETTINGS})
"""Holds that a node does not sit out while it is out of service."""

_CAN_FAIL_THE_TARGET = frozenset(
    {
        Step.APPLY_LIVE,
        Step.STAGE_OS,
        Step.STAGE_KARGS,
        Step.VERIFY_STAGED,
        Step.FINALIZE,
        Step.COMMIT_FILES,
        Step.VERIFY_ROOT,
    }
)

_ABOUT_A_DEPLOYMENT = frozenset({Step.VERIFY_STAGED, Step.COMMIT_FILES, Step.VERIFY_ROOT})
"""... because of a deployment that somebody else can take away meanwhile."""


def _run_hook(
    argv: tuple[str, ...], timeout: float, doing: str, runtime: Path, reason: HoldReason = HoldReason.DRAIN
) -> None:
    """Run a program that the settings name, one at a time; nothing to run is fine."""
    if argv:
        with turns.taken(runtime / "hook.lock", doing) as passed:
            process.run(
                argv, doing, timeout, lambda sentence: Held(reason, sentence, "it is tried again"), passed=passed
            )
