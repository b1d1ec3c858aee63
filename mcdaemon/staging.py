"""Staging: from the first transaction to a deployment that is proved, with the node at work all the time."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence

from mcdaemon.context import Context
from mcdaemon.decide import Decision, Staged
from mcdaemon.errors import Broken, Held, Transient
from mcdaemon.host import authfile, packages
from mcdaemon.host.finished import LOCAL_TROUBLE, NOT_UNDERSTOOD
from mcdaemon.host.namespace import with_writable
from mcdaemon.image.reference import Transport
from mcdaemon.image.resolve import Source
from mcdaemon.inflight import InFlight, plan_of, update_of
from mcdaemon.observe import Facts
from mcdaemon.plan import Plan
from mcdaemon.update import downgrade, merge, ownsettings, payload, stage
from mcdaemon.update.journal import Update

log = logging.getLogger("mcdaemon")

_STAGED_ANEW = {"staged": "", "finalizing": "", "armed": ""}
"""What the journal says of an earlier staging, whose discarding was interrupted, does not hold for the next."""

_MOST_MISSES = 3
"""How often a staging that reports success may leave something else."""

MOST_TROUBLES = {LOCAL_TROUBLE: 10, NOT_UNDERSTOOD: 3}
"""How often staging may fail with an error of a code before it is the target's failure."""


class Staging:
    """The steps that stage the target and prove it."""

    def __init__(self, context: Context, update: InFlight) -> None:
        self._context = context
        self._update = update

    def stage_os(self, facts: Facts, _decision: Decision) -> None:
        """ONE transaction for image, packages and kernel, locked."""
        plan, update = plan_of(facts), self._update.begin(facts)
        self._clear_the_stage(facts)
        refspec = self._hold_image(facts, plan, update)
        update = self._update.note(attempt=update.attempt + 1, origin=refspec, **_STAGED_ANEW)
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
                passing = isinstance(error, Transient) and error.code not in MOST_TROUBLES
                if passing or not _is_local(refspec):
                    raise
                # Whatever is wrong with the local copy, it must not fail what would succeed without it.
                self._update.note(no_storage=True)
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
            self._update.note(held=True)  # there may be a hold from now on, whatever happens next
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

    def stage_kargs(self, facts: Facts, _decision: Decision) -> None:
        """Kernel arguments on top of what was staged; with an unchanged OS the marker alone makes a deployment."""
        plan, update = plan_of(facts), self._update.begin(facts)
        if facts.observation.staged is not Staged.OS_ONLY:
            self._clear_the_stage(facts)
        update = self._update.note(attempt=update.attempt + 1, **_STAGED_ANEW)
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
            plan_of(facts),
            update,
            context.machine.staged(),
            context.rpmostree.deployments(),
            context.machine.options_of(facts.booted),
        )
        if found in good:
            if update.misses:
                self._update.note(misses=0)
            return
        what = "nothing" if found is Staged.NONE else "something else"
        sentence = f"cannot stage {update.name}: rpm-ostree reports success, but staged {what}"
        if self._update.note(misses=update.misses + 1).misses >= _MOST_MISSES:
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

    def verify_staged(self, facts: Facts, _decision: Decision) -> None:
        """Prove what is staged and lay out the payload; say what the merge would lose. The node still works."""
        plan, update, staged = plan_of(facts), update_of(facts), facts.staged
        assert staged is not None and facts.desired is not None
        context = self._context
        # The payload takes the agent's own files along: a broken one would come back over its repair.
        ownsettings.require_before_reboot(context.root, context.settings.state_dir, update.name)
        self._require_not_older(plan, facts)
        versions = context.probe.versions(facts.booted)
        stage.verify(context.machine, staged, facts.deployments, versions.prunes_boot_early)
        target = context.machine.root_of(staged.name)
        load, entries = payload.build(
            update.id, facts.desired.config, facts.current, target, context.root, facts.outside
        )
        report = merge.predict(context.root, target, load, versions.skips_special_files)
        report.log(log)
        context.payloads.drop(update.id)
        context.payloads.save(load, entries)
        with_writable(context.machine.sysroot, lambda: merge.pre_place(report, target, load, context.payloads))
        # What was placed must not make the merge fail.
        merge.predict(context.root, target, load, versions.skips_special_files)
        release(context, update)
        self._update.note(staged=staged.name, committed="", proved="", stamp=context.machine.stamp())
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
            error = downgrade.refusal(update_of(facts).name, why)
            raise Broken(error.sentence, error.hint)
        if why:
            log.warning("the OS goes back: %s", why)


def release(context: Context, update: Update) -> None:
    """Let go of the local copy; only where a hold was taken: a node without podman has none and needs none."""
    if update.held:
        context.images.release(update.id)


def _is_local(origin: str) -> bool:
    return f"{Transport.STORAGE.value}:" in origin
