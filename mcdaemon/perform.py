"""Performing: one idempotent step with effects. Its outcome is never trusted, the next observation is."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Callable, NoReturn, Optional

from mcdaemon.context import Context
from mcdaemon.decide import Booted, Decision, Staged, Step
from mcdaemon.errors import Broken, Failure, Held, HoldReason, Transient
from mcdaemon.host import authfile, files, greenboot, otheragents, packages, process
from mcdaemon.host.finished import LOCAL_TROUBLE, NOT_UNDERSTOOD
from mcdaemon.host.namespace import with_writable
from mcdaemon.image.reference import Transport
from mcdaemon.image.resolve import Source
from mcdaemon.machineconfig import kernelargs
from mcdaemon.observe import Facts
from mcdaemon.plan import Plan
from mcdaemon.update import commit, downgrade, health, journal, live, lost, merge, payload, rollback, stage, verify
from mcdaemon.update.journal import Confirmed, FailedTarget, Journal, Update

log = logging.getLogger("mcdaemon")

TARGET_FAILED = "target-failed"
"""Code of the error that says: this target was written off."""


_STAGED_ANEW = {"staged": "", "finalizing": "", "armed": ""}
"""What the journal says of an earlier staging, whose discarding was interrupted, does not hold for the next."""

_MOST_MISSES = 3
"""How often a staging that reports success may leave something else."""

_MOST_FINALIZATIONS = 3
"""How often a target may fail to be finalized: each time costs a drain (TXN-31)."""

_MOST_TROUBLES = {LOCAL_TROUBLE: 10, NOT_UNDERSTOOD: 3}
"""How often staging may fail with an error of a code before it is the target's failure."""


class Performer:
    """The effects of each step on one node."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._asked: Optional[float] = None
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

        Returns the sentence about a journal that could not be used: who mends it is the only one who learns.
        """
        context, alien = self._context, self._mend()
        update = self._record().update
        known = {update.id} if update is not None else set()
        for shelf in (context.payloads, context.undo):
            for identity in shelf.identities():
                if identity not in known:
                    shelf.drop(identity)
        if update is not None and update.unfinalized:
            log.warning("ostree could not finalize %s at the last shutdown: %s", update.name, update.unfinalized)
            self._note(unfinalized="")
        files.remove_temporaries(context.root, (context.settings.state_dir, str(context.runtime)))
        if update is None:
            self._etc_before.unlink(missing_ok=True)
        for left in packages.leftovers(context.root):
            log.warning("removing %s, which an interrupted transaction left behind", left)
            packages.remove(context.root)
        try:
            for hold in context.images.release_unknown(known if update is not None and update.held else set()):
                log.warning("released the hold %s, which no update knows", hold)
        except Transient as error:
            # A node without podman has none; otherwise the next start looks again.
            log.info("%s", error)
        return alien

    def _mend(self) -> str:
        """Replace a journal that cannot be used by one whose update stands in for what was in flight, in one stroke.

        Returns the sentence about it, "" for one that is in order.
        """
        context = self._context
        _record, alien = journal.load(context.journal)
        if not alien:
            return ""
        told = f"{alien}; it is kept as {journal.keep_aside(context.journal)}"
        _osname, booted = context.machine.booted()
        self._store(Journal(update=lost.stand_in(context.payloads, context.undo, context.root, booted, told)))
        return told

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
        except Transient as error:
            if not self._too_often(decision, error):
                raise
            self._write_off(error)
        except Held as error:
            if error.reason is HoldReason.SPACE and decision.step in _OUT_OF_SERVICE:
                self._retreat(facts, decision, error)
            raise
        except Broken as error:
            if decision.step not in _CAN_FAIL_THE_TARGET or self._record().update is None:
                raise
            if decision.step in _ABOUT_A_DEPLOYMENT and self._moved(facts):
                raise Transient(f"somebody else's deployments took the place of ours: {error.sentence}") from error
            self._write_off(error)

    def _retreat(self, facts: Facts, decision: Decision, error: Held) -> None:
        """A node does not wait out of service for space: what is finalized goes, which also frees some, and the update
        begins again from where space is asked for before the drain (TXN-33). Where not even that can be written, the
        next rounds go on with it."""
        machine, update = self._context.machine, facts.update
        with contextlib.suppress(Failure):
            if update is not None and decision.step is Step.FINALIZE:
                self._back_to_work(update)  # first: nothing is written outside of the staged deployment yet
            now = dataclasses.replace(facts, staged=machine.staged(), pending=machine.pending())
            self._discard(now, Decision(Step.DISCARD, str(error)))

    def _write_off(self, error: Failure) -> NoReturn:
        """The target cannot be reached: `decide` drops it next, and remembers."""
        self._note(failure=str(error))
        raise Broken(error.sentence, error.hint, TARGET_FAILED) from error

    def _too_often(self, decision: Decision, error: Transient) -> bool:
        """Count a failure that may pass or may not: the registry's are waited for, these are not for ever."""
        most = _MOST_TROUBLES.get(error.code)
        update = self._record().update
        if most is None or update is None or decision.step not in _CAN_FAIL_THE_TARGET:
            return False
        return self._note(troubles=update.troubles + 1).troubles >= most

    def _moved(self, facts: Facts) -> bool:
        """Whether somebody else has staged or cleaned up since the observation: a race lost is not the target's."""
        staged = self._context.machine.staged()
        seen = facts.staged.name if facts.staged is not None else ""
        return (staged.name if staged is not None else "", self._context.machine.pending()) != (seen, facts.pending)

    # -- the journal ------------------------------------------------------------------------------------------------

    def _record(self) -> Journal:
        record, alien = journal.load(self._context.journal)
        if alien:
            raise Transient(alien, "the next round puts right what was in flight")
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
        update = self._note(attempt=update.attempt + 1, origin=refspec, **_STAGED_ANEW)
        delta = plan.packages
        packages = {
            "install-packages": delta.install,
            "uninstall-packages": delta.uninstall,
            "override-remove-packages": delta.remove_base,
            "override-reset-packages": delta.reset_base,
        }
        title = stage.title(update.id, update.attempt)
        with self._repository(facts, plan, update):
            try:
                if update.misses:
                    self._stage_step_by_step(refspec, packages, title)
                else:
                    self._context.rpmostree.update(refspec, packages, title)
            except (Held, Broken, Transient) as error:
                passing = isinstance(error, Transient) and error.code not in _MOST_TROUBLES
                if passing or not _is_local(refspec):
                    raise
                # Whatever is wrong with the local copy, it must not fail what would succeed without it.
                self._note(no_storage=True)
                raise Transient(error.sentence, "it is staged from the registry next") from error
        self._look_at_the_stage(facts, update, {Staged.READY, Staged.OS_ONLY})

    def _stage_step_by_step(self, refspec: str, packages: Mapping[str, Sequence[str]], title: str) -> None:
        """The same in other calls, after rpm-ostree has reported success and done nothing (TXN-26, TXN-27): the image
        by a rebase, then the packages on top of it. Those stay together: a kernel that is removed in a step of its own
        would leave a tree without one."""
        if refspec:
            self._context.rpmostree.rebase(refspec, title)
        if any(packages.values()):
            self._context.rpmostree.update("", packages, f"{title}:packages")

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
        update = self._note(attempt=update.attempt + 1, **_STAGED_ANEW)
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
            if update.misses:
                self._note(misses=0)
            return
        what = "nothing" if found is Staged.NONE else "something else"
        sentence = f"cannot stage {update.name}: rpm-ostree reports success, but staged {what}"
        if self._note(misses=update.misses + 1).misses >= _MOST_MISSES:
            known = "; this version of rpm-ostree is known for it" if facts.versions.has_false_no_ops else ""
            raise Broken(
                sentence, f"compare `rpm-ostree status --json` with the config; is another agent at work?{known}"
            )
        raise Transient(sentence, "it is tried again in smaller steps")

    def _clear_the_stage(self, facts: Facts) -> None:
        """A staged deployment that is not exactly ours would be built upon (rpm-ostree.md 3.7): it goes first."""
        if facts.staged is not None or facts.pending:
            name = facts.staged.name if facts.staged is not None else facts.pending
            log.warning("removing the deployment %s, which is not what this update needs; another client's?", name)
            self._context.rpmostree.cleanup("pending-deploy")

    # -- proving ----------------------------------------------------------------------------------------------------

    def _verify_staged(self, facts: Facts, _decision: Decision) -> None:
        """Prove what is staged and lay out the payload; say what the merge would lose. The node still works."""
        plan, update, staged = _plan(facts), _update(facts), facts.staged
        assert staged is not None and facts.desired is not None
        context = self._context
        self._require_not_older(plan, facts)
        versions = context.probe.versions(facts.booted)
        stage.verify(context.machine, staged, facts.deployments, versions.prunes_boot_early)
        target = context.machine.root_of(staged.name)
        load, entries = payload.build(update.id, facts.desired.config, facts.current, target, context.root)
        report = merge.predict(context.root, target, load, versions.skips_special_files)
        report.log(log)
        context.payloads.drop(update.id)
        context.payloads.save(load, entries)
        with_writable(context.machine.sysroot, lambda: merge.pre_place(report, target, load, context.payloads))
        # What was placed must not make the merge fail.
        merge.predict(context.root, target, load, versions.skips_special_files)
        self._release(update)
        self._note(staged=staged.name, committed="", proved="", stamp=context.machine.stamp())
        for note in payload.notes(facts.desired.config, target):
            log.info("%s", note)
        log.info(
            "%s: %d files and links are ready for the new root; image %s",
            update.name,
            len(load.entries),
            update.digest or ("unchanged" if not plan.image else "?"),
        )

    def _require_not_older(self, plan: Plan, facts: Facts) -> None:
        """The last word on the age of the target, from what is really staged. Raises Broken where the settings refuse
        an older one: then it did not say so before it was fetched."""
        staged = next((d for d in facts.deployments if d.staged), None)
        booted = next((d for d in facts.deployments if d.booted), None)
        if not plan.image or staged is None or booted is None:
            return
        target = downgrade.described(staged.version, staged.timestamp)
        why = downgrade.older(target, booted.version, booted.timestamp)
        if why and self._context.settings.os.downgrade == "refuse":
            error = downgrade.refusal(_update(facts).name, why)
            raise Broken(error.sentence, error.hint)
        if why:
            log.warning("the OS goes back: %s", why)

    def _drain(self, facts: Facts, _decision: Decision) -> None:
        update = self._begin(facts)
        if not update.live:
            self._require_free_way()
            otheragents.require_none(self._context.systemd, self._context.machine.top)
        settings = self._context.settings.drain
        self._note(draining=True)  # from here on workloads may be away, whatever becomes of the hook
        _run_hook(settings.command, settings.timeout_seconds, f"drain the node for {update.name}")
        self._note(drained=True)

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
        update, context = _update(facts), self._context
        staged = context.machine.staged()
        if staged is None or staged.name != update.staged:
            raise Transient("cannot finalize: what was verified is not what is staged any more", "another client's?")
        update = self._note(
            finalizing=facts.boot_id, finalizations=update.finalizations + 1, stamp=context.machine.stamp()
        )
        with contextlib.suppress(Failure):  # only for a sentence in the log
            files.write_atomic(self._etc_before, json.dumps(merge.snapshot(context.root.path / "etc")).encode())
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
        self._note(staged="")
        if update.finalizations >= _MOST_FINALIZATIONS:
            raise Broken(f"{error.sentence}; so it went {update.finalizations} times", error.hint) from error
        raise Transient(error.sentence, f"the node is back at work, it is tried again; {error.hint}") from error

    @property
    def _etc_before(self) -> Path:
        return self._context.runtime / "etc-at-merge.json"

    def _late_changes(self) -> tuple[str, ...]:
        """What was changed in the running /etc since the merge. Nothing is said where the record of it is gone."""
        try:
            before = json.loads(self._etc_before.read_bytes())
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
        update, context = _update(facts), self._context
        root, load = context.machine.root_of(facts.pending), self._payload(update)
        commit.remember(load, context.undo, root, root.shared)
        with_writable(context.machine.sysroot, lambda: commit.apply(load, context.payloads, root))
        self._note(committed=facts.pending)

    def _verify_root(self, facts: Facts, _decision: Decision) -> None:
        update, context = _update(facts), self._context
        root, load = context.machine.root_of(facts.pending), self._payload(update)
        report = verify.validate(root, load.expected(), load.passwords)
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
        late = self._late_changes()
        if late:
            log.warning("changed after the merge, so not in the new root: %s", ", ".join(late))
        self._note(armed=facts.boot_id)
        try:
            self._ask_for_reboot()
        except (Held, Transient, Broken):
            # The early unit's own asking stays: services of this boot have read files that it replaced since.
            self._note(armed=facts.boot_id if facts.observation.booted is Booted.TARGET else "")
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
        self._note(applied=True)  # what was validated is kept: workloads come now, and are not taken away again
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
        """The files outside /etc stay until the old deployment runs, where the early unit puts them back: whatever else
        may boot was made from this one, and carries the same config."""
        update, context = _update(facts), self._context
        if not update.rolled_back:
            changed = dataclasses.replace(update, rolled_back=True, failure=f"{update.name}: {decision.why}")
            failed = FailedTarget.of(update, decision.why)
            self._store(dataclasses.replace(self._record(), update=changed, failed=failed))
            self._run_scripts(greenboot.RED)
        rollback.to_source(context.machine, context.rpmostree, update.source)
        self._bar_the_stage()
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
            # What somebody else has made of the booted target carries its config, and the files fit that.
            if facts.current is None or facts.current.identity != update.desired:
                commit.take_back(update.id, context.undo, context.root)
            self._clear_lost_stage(facts, update)
        self._back_to_work(update)
        record = self._record()
        failed = record.failed
        # What was taken back by the health gate is remembered since then, with its reason.
        if decision.remember and not (update.rolled_back and failed is not None and failed.desired == update.desired):
            failed = FailedTarget.of(update, decision.why)
        self._store(dataclasses.replace(record, update=None, failed=failed))
        self._forget(update)

    def _clear_lost_stage(self, facts: Facts, update: Update) -> None:
        """What was staged is forgotten with the boot, but its directory stays on the disk, with what was put into its
        /etc, which can be secret. Nothing waits for that: rpm-ostree also removes it with its next deployment."""
        if update.attempt and facts.staged is None and not facts.pending:
            try:
                self._context.rpmostree.cleanup("base")
            except (Held, Transient, Broken) as error:
                log.info("%s", error)

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
        if update.draining or update.drained:
            settings = self._context.settings.drain
            self._note(draining=True, drained=False)  # before: who is back must never be taken for drained
            _run_hook(settings.undo, settings.timeout_seconds, "take the node back to work")
            self._note(draining=False)

    def _run_scripts(self, kind: str) -> None:
        """What the administrator has for a verdict; whatever becomes of it, the node goes its way."""
        for said in self._context.scripts.verdict(kind):
            log.warning("%s", said)

    def _release(self, update: Update) -> None:
        """Only where a hold was taken: a node without podman has none and needs none."""
        if update.held:
            self._context.images.release(update.id)

    def _forget(self, update: Update) -> None:
        """The secrets first: what cannot be released now, the next start releases."""
        self._context.payloads.drop(update.id)
        self._context.undo.drop(update.id)
        self._etc_before.unlink(missing_ok=True)
        self._context.images.trust_storage()
        self._context.images.forget()
        self._release(update)


_OUT_OF_SERVICE = frozenset({Step.FINALIZE, Step.COMMIT_FILES, Step.VERIFY_ROOT})
"""Steps of a drained node before its reboot was asked for."""

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
