"""Performing: one idempotent step with effects. Its outcome is never trusted, the next observation is."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import secrets
import time
from collections.abc import Iterator
from typing import Any, Callable, Optional

from mcdaemon.context import Context
from mcdaemon.decide import Decision, Staged, Step
from mcdaemon.errors import Broken, Held, HoldReason, Transient
from mcdaemon.host import authfile, files, greenboot, packages, process
from mcdaemon.host.deployments import libostree_version
from mcdaemon.host.namespace import with_writable
from mcdaemon.image.reference import Transport
from mcdaemon.image.resolve import Source
from mcdaemon.machineconfig import kernelargs
from mcdaemon.observe import Facts
from mcdaemon.plan import Plan
from mcdaemon.update import commit, health, journal, live, lost, merge, payload, rollback, stage, verify
from mcdaemon.update.journal import Confirmed, FailedTarget, Journal, Update

log = logging.getLogger("mcdaemon")

TARGET_FAILED = "target-failed"
"""Code of the error that says: this target was written off."""


_MOST_MISSES = 3
"""How often a staging that reports success may leave something else."""


class Performer:
    """The effects of each step on one node."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._finalized_at = time.time()
        self._asked: Optional[float] = None
        self._misses = 0
        self._effects: dict[Step, Callable[[Facts, Decision], None]] = {
            Step.APPLY_LIVE: self._apply_live,
            Step.STAGE_OS: self._stage_os,
            Step.STAGE_KARGS: self._stage_kargs,
            Step.VERIFY_STAGED: self._verify_staged,
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
        """Remove what a crash left behind and no journal knows: payloads, undo records, holds, a package repository.

        Returns the sentence about a journal that could not be used: who loads it first is the only one who learns.
        """
        context = self._context
        record, alien = journal.load(context.journal)
        update = record.update
        if alien:
            _osname, booted = context.machine.booted()
            update = lost.stand_in(context.payloads, context.undo, context.root, booted, alien)
            self._store(dataclasses.replace(record, update=update))
        known = {update.id} if update is not None else set()
        for shelf in (context.payloads, context.undo):
            for identity in shelf.identities():
                if identity not in known:
                    shelf.drop(identity)
        files.remove_temporaries(context.root, (context.settings.state_dir,))
        for left in packages.leftovers(context.root):
            log.warning("removing %s, which an interrupted transaction left behind", left)
            packages.remove(context.root)
        try:
            for hold in context.images.release_unknown(known):
                log.warning("released the hold %s, which no update knows", hold)
        except Transient as error:
            # A node without podman has none; otherwise the next start looks again.
            log.info("%s", error)
        return alien

    def retry_if_asked(self) -> None:
        """Forget the failed target when `mcdaemon retry` asked for it: only the agent writes the journal.

        And what was confirmed, where an older deployment was booted since: that is what keeps the agent from acting.
        """
        if self._context.retry.exists():
            record = self._record()
            confirmed = record.confirmed
            if confirmed is not None and confirmed.deployment != self._context.machine.booted()[1]:
                confirmed = None
            self._store(dataclasses.replace(record, failed=None, confirmed=confirmed))
            self._context.retry.unlink()

    def perform(self, decision: Decision, facts: Facts) -> None:
        """Take the step. Raises Failure; a target that turns out to be impossible is written down first."""
        effect = self._effects.get(decision.step)
        if effect is None:
            return
        try:
            effect(facts, decision)
        except Broken as error:
            if decision.step not in _CAN_FAIL_THE_TARGET or self._record().update is None:
                raise
            # The target cannot be reached: `decide` drops it next, and remembers.
            self._note(failure=str(error))
            raise Broken(error.sentence, error.hint, TARGET_FAILED) from error

    # -- the journal ------------------------------------------------------------------------------------------------

    def _record(self) -> Journal:
        record, _alien = journal.load(self._context.journal)
        return record

    def _store(self, record: Journal) -> None:
        journal.store(self._context.journal, record)

    def _note(self, **changes: Any) -> Update:
        """Change the update in flight, on the disk."""
        record = self._record()
        assert record.update is not None
        update = dataclasses.replace(record.update, **changes)
        self._store(dataclasses.replace(record, update=update))
        return update

    def _begin(self, facts: Facts) -> Update:
        """The update in flight; a new one when there is none: from here on the node knows what it is about to do."""
        assert facts.desired is not None and facts.plan is not None
        if facts.update is not None:
            return facts.update
        config = facts.desired.config
        update = Update(
            id=secrets.token_hex(6),
            desired=config.identity,
            name=config.name,
            source=facts.booted,
            previous=facts.current.name if facts.current else "",
            live=not facts.plan.reboot,
        )
        if facts.resolution is not None and facts.plan.image:
            update = dataclasses.replace(
                update, digest=facts.resolution.digest, image_digest=facts.resolution.image_digest
            )
        record = self._record()
        self._store(dataclasses.replace(record, update=update))
        if record.failed is not None and update.digest and update.digest == record.failed.digest:
            log.warning("%s goes to %s, which has failed before, with %s", update.name, update.digest, record.failed)
        return update

    # -- staging ----------------------------------------------------------------------------------------------------

    def _stage_os(self, facts: Facts, _decision: Decision) -> None:
        """ONE transaction for image, packages and kernel, locked."""
        plan, update = _plan(facts), self._begin(facts)
        self._clear_the_stage(facts)
        refspec = self._hold_image(facts, plan, update)
        update = self._note(attempt=update.attempt + 1, staged="", origin=refspec)
        delta = plan.packages
        with self._repository(facts, plan, update):
            try:
                self._context.rpmostree.update(
                    refspec,
                    {
                        "install-packages": delta.install,
                        "uninstall-packages": delta.uninstall,
                        "override-remove-packages": delta.remove_base,
                        "override-reset-packages": delta.reset_base,
                    },
                    stage.title(update.id, update.attempt),
                )
            except (Held, Broken) as error:
                if not _is_local(refspec):
                    raise
                # Whatever is wrong with the local copy, it must not fail what would succeed without it.
                self._note(no_storage=True)
                raise Transient(error.sentence, "it is staged from the registry next") from error
        self._look_at_the_stage(facts, update, {Staged.READY, Staged.OS_ONLY})

    def _hold_image(self, facts: Facts, plan: Plan, update: Update) -> str:
        if not plan.image:
            return ""
        authfile.link(self._context.machine.top)
        chosen = facts.resolution.chosen if facts.resolution else None
        if chosen is not None and chosen.source is Source.STORAGE:
            self._note(held=True)  # there may be a hold from now on, whatever happens next
        return self._context.images.hold(plan.image, update.digest, update.id).origin()

    @contextlib.contextmanager
    def _repository(self, facts: Facts, plan: Plan, update: Update) -> Iterator[None]:
        booted = next((d for d in facts.deployments if d.booted), None)
        if not stage.needs_repository(plan, booted):
            yield
            return
        where = self._context.images.check(plan.extensions_image)
        local = where.chosen is not None and where.chosen.source is Source.STORAGE
        login = authfile.path(self._context.machine.top)
        with packages.repository(self._context.root, str(where.pinned), update.id, not local, login):
            yield

    def _stage_kargs(self, facts: Facts, _decision: Decision) -> None:
        """Kernel arguments on top of what was staged; with an unchanged OS the marker alone makes a deployment."""
        plan, update = _plan(facts), self._begin(facts)
        if facts.observation.staged is not Staged.OS_ONLY:
            self._clear_the_stage(facts)
        update = self._note(attempt=update.attempt + 1, staged="")
        existing = self._context.rpmostree.boot_options()
        line = stage.kernel_line(existing, plan, update.id)
        self._context.rpmostree.kernel_args(existing, line, stage.title(update.id, update.attempt))
        self._look_at_the_stage(facts, update, {Staged.READY})

    def _look_at_the_stage(self, facts: Facts, update: Update, good: set[Staged]) -> None:
        """Success is what the deployments say, not what `Finished` said (rpm-ostree.md 7.1, rows 14 and 48).

        Somebody else may have been faster, so it is tried again; but not for ever.
        """
        context = self._context
        found = stage.classify(
            _plan(facts),
            update,
            context.machine.staged(),
            context.rpmostree.deployments(),
            context.machine.options_of(facts.booted),
        )
        if found in good:
            self._misses = 0
            return
        self._misses += 1
        sentence = f"cannot stage {update.name}: rpm-ostree reports success, but staged something else"
        if self._misses >= _MOST_MISSES:
            raise Broken(sentence, "compare `rpm-ostree status --json` with the config; is another agent at work?")
        raise Transient(sentence)

    def _clear_the_stage(self, facts: Facts) -> None:
        """A staged deployment that is not exactly ours would be built upon (rpm-ostree.md 3.7): it goes first."""
        if facts.staged is not None or facts.pending:
            self._context.rpmostree.cleanup("pending-deploy")

    # -- proving ----------------------------------------------------------------------------------------------------

    def _verify_staged(self, facts: Facts, _decision: Decision) -> None:
        """Prove what is staged and lay out the payload; say what the merge would lose. The node still works."""
        plan, update, staged = _plan(facts), _update(facts), facts.staged
        assert staged is not None and facts.desired is not None
        context = self._context
        stage.verify(context.machine, staged)
        target = context.machine.root_of(staged.name)
        load, entries = payload.build(update.id, facts.desired.config, facts.current, target, context.root)
        report = merge.predict(context.root, target, load, libostree_version())
        report.log(log)
        context.payloads.drop(update.id)
        context.payloads.save(load, entries)
        with_writable(context.machine.sysroot, lambda: merge.pre_place(report, target, load, context.payloads))
        merge.predict(context.root, target, load, libostree_version())  # what was placed must not make the merge fail
        self._release(update)
        self._note(staged=staged.name, committed="", proved="")
        for note in payload.notes(facts.desired.config, target):
            log.info("%s", note)
        log.info(
            "%s: %d files and links are ready for the new root; image %s",
            update.name,
            len(load.entries),
            update.digest or ("unchanged" if not plan.image else "?"),
        )

    def _drain(self, facts: Facts, _decision: Decision) -> None:
        update = self._begin(facts)
        if not update.live:
            self._require_free_way()
        settings = self._context.settings.drain
        _run_hook(settings.command, settings.timeout_seconds, f"drain the node for {update.name}")
        self._note(drained=True)

    # -- the point of no return, and back ---------------------------------------------------------------------------

    def _require_free_way(self) -> None:
        """Raises Held while somebody holds a reboot up: the node is not taken out of service for that, and nothing is
        finalized, because from there to the reboot changes to /etc are lost."""
        if not self._context.settings.reboot.command:
            self._context.logind.require_free()

    def _finalize(self, facts: Facts, _decision: Decision) -> None:
        self._require_free_way()
        self._note(finalizing=facts.boot_id)
        self._finalized_at = time.time()
        self._context.machine.unlock()
        self._context.machine.finalize(self._context.systemd)

    def _commit_files(self, facts: Facts, _decision: Decision) -> None:
        update, context = _update(facts), self._context
        root, load = context.machine.root_of(facts.pending), self._payload(update)
        commit.remember(load, context.undo, root, root.shared)
        with_writable(context.machine.sysroot, lambda: commit.apply(load, context.payloads, root))
        self._note(committed=facts.pending)

    def _verify_root(self, facts: Facts, _decision: Decision) -> None:
        update, context = _update(facts), self._context
        root, load = context.machine.root_of(facts.pending), self._payload(update)
        report = verify.validate(root, load.expected())
        if report.mismatches:
            raise Broken(
                f"cannot reboot into {update.name}: the root that would boot is not what was asked for:\n"
                f"{report.text()}"
            )
        plan, options = facts.plan, kernelargs.split(context.machine.options_of(facts.pending))
        if plan is not None and not kernelargs.satisfied(options, plan.kargs_to, plan.kargs_from):
            raise Broken(f"cannot reboot into {update.name}: the boot entry has other kernel arguments than the config")
        self._note(proved=facts.pending)

    def _reboot(self, facts: Facts, _decision: Decision) -> None:
        """Arm the journal, then ask. Until the call has succeeded the update can still be dropped (P7).

        An armed journal without our asking is the work of an agent that died in between: ask, twice does no harm.
        """
        patience = self._context.settings.reboot.timeout_seconds
        if self._asked is not None and time.monotonic() - self._asked < patience:
            return
        if self._asked is not None:
            self._asked = None
            raise Transient(
                f"cannot reboot: it was asked for {patience:.0f} s ago and did not come",
                "see `systemctl list-jobs` and `systemd-inhibit --list`; it is asked for again",
            )
        late = merge.late_changes(self._context.root.path / "etc", self._finalized_at)
        if late:
            log.warning("changed after the merge, so not in the new root: %s", ", ".join(late))
        self._note(armed=facts.boot_id)
        try:
            self._ask_for_reboot()
        except (Held, Transient, Broken):
            self._note(armed="")
            raise
        self._asked = time.monotonic()

    def _ask_for_reboot(self) -> None:
        settings = self._context.settings.reboot
        if settings.command:
            _run_hook(settings.command, settings.timeout_seconds, "reboot", HoldReason.INHIBITED)
        else:
            self._context.logind.reboot()

    def _confirm(self, facts: Facts, decision: Decision) -> None:
        update = _update(facts)
        booted = next((d for d in facts.deployments if d.booted), None)
        self._back_to_work(update)
        # What the origin is pinned to, which for a multi-platform image is the index and not the platform's manifest.
        pinned = self._context.machine.origin_of(facts.booted).rpartition("@")[2]
        digest = pinned if pinned.startswith("sha256:") else booted.digest if booted else self._record().digest
        # The record first: without the payload that it names, a target looks broken. What a crash leaves is swept.
        record = dataclasses.replace(self._record(), update=None, digest=digest)
        if not decision.remember:
            confirmed = Confirmed(update.desired, update.name, facts.booted, int(time.time()))
            record = dataclasses.replace(record, failed=None, confirmed=confirmed)
        self._store(record)
        self._forget(update)
        if not update.live and not decision.remember:
            for said in health.told(self._context.runtime):
                log.warning("wanted, but not required: %s", said)
            self._run_scripts(greenboot.GREEN)

    def _roll_back(self, facts: Facts, decision: Decision) -> None:
        update, context = _update(facts), self._context
        if not update.rolled_back:
            changed = dataclasses.replace(update, rolled_back=True, failure=f"{update.name}: {decision.why}")
            failed = FailedTarget.of(update, decision.why)
            self._store(dataclasses.replace(self._record(), update=changed, failed=failed))
            self._run_scripts(greenboot.RED)
        rollback.to_source(context.machine, context.rpmostree, update.source)
        commit.take_back(update.id, context.undo, context.root)
        self._ask_for_reboot()

    def _discard(self, facts: Facts, decision: Decision) -> None:
        """Back to exactly the old config: what was staged or finalized goes, what was written comes back."""
        update, context = _update(facts), self._context
        if not update.live and (facts.staged is not None or facts.pending):
            context.rpmostree.cleanup("pending-deploy")
        if update.live:
            live.take_back(
                update.id, facts.current, context.policy, context.root, context.payloads, context.undo, context.systemd
            )
        else:
            commit.take_back(update.id, context.undo, context.root)
        self._back_to_work(update)
        record = self._record()
        failed = record.failed
        # What was taken back by the health gate is remembered since then, with its reason.
        if decision.remember and not (update.rolled_back and failed is not None and failed.desired == update.desired):
            failed = FailedTarget.of(update, decision.why)
        self._store(dataclasses.replace(record, update=None, failed=failed))
        self._forget(update)

    def _apply_live(self, facts: Facts, _decision: Decision) -> None:
        update = self._begin(facts)
        assert facts.desired is not None
        context = self._context
        live.apply(
            update.id,
            facts.desired.config,
            facts.current,
            _plan(facts),
            context.root,
            context.payloads,
            context.undo,
            context.systemd,
        )
        self._note(applied=True)

    def reboot_at_once(self) -> None:
        """For the early unit: nothing else runs yet, so nothing has to be asked."""
        process.run(["systemctl", "reboot", "--force"], "reboot", 60.0, Broken)

    # -- shared -----------------------------------------------------------------------------------------------------

    def _payload(self, update: Update) -> payload.Payload:
        load = self._context.payloads.load(update.id)
        if load is None:
            raise Broken(f"cannot go on with {update.name}: its payload {update.id} is gone")
        return load

    def _back_to_work(self, update: Update) -> None:
        if update.drained:
            settings = self._context.settings.drain
            _run_hook(settings.undo, settings.timeout_seconds, "take the node back to work")
            self._note(drained=False)

    def _run_scripts(self, kind: str) -> None:
        """What the administrator has for a verdict; whatever becomes of it, the node goes its way."""
        for said in self._context.scripts.verdict(kind):
            log.warning("%s", said)

    def _release(self, update: Update) -> None:
        """Only where a hold was taken: a node without podman has none and needs none."""
        if update.held:
            self._context.images.release(update.id)

    def _forget(self, update: Update) -> None:
        self._release(update)
        self._context.images.trust_storage()
        self._context.images.forget()
        self._context.payloads.drop(update.id)
        self._context.undo.drop(update.id)


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


def _plan(facts: Facts) -> Plan:
    assert facts.plan is not None, "a step that needs a plan was decided without one"
    return facts.plan


def _update(facts: Facts) -> Update:
    assert facts.update is not None, "a step of an update was decided without one"
    return facts.update


def _is_local(origin: str) -> bool:
    return f"{Transport.STORAGE.value}:" in origin


def _run_hook(argv: tuple[str, ...], timeout: float, doing: str, reason: HoldReason = HoldReason.DRAIN) -> None:
    """Run a program that the settings name; nothing to run is fine."""
    if argv:
        process.run(argv, doing, timeout, lambda sentence: Held(reason, sentence, "it is tried again"))
