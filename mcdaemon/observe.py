"""Observing: every fact that a decision rests on, read afresh. Nothing here changes the node."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Optional

from mcdaemon.context import Context
from mcdaemon.decide import Booted, Health, Observation, Progress, Staged
from mcdaemon.desired.directory import Desired
from mcdaemon.errors import Broken, Failure, Held, Irreconcilable, Transient
from mcdaemon.host import boot, files, otheragents, users
from mcdaemon.host.deployments import StagedDeployment
from mcdaemon.host.rpmostree import Deployment
from mcdaemon.host.versions import Versions
from mcdaemon.image.description import Description
from mcdaemon.image.reference import Reference
from mcdaemon.image.resolve import Resolution
from mcdaemon.machineconfig import kernelargs, model, reconcile
from mcdaemon.machineconfig.model import MachineConfig
from mcdaemon.plan import Plan, make, same_base
from mcdaemon.update import downgrade, health, journal, ownsettings, payload, preflight, stage, verify
from mcdaemon.update.journal import Confirmed, Journal, Update
from mcdaemon.update.payload import CURRENT_CONFIG, wanted
from mcdaemon.update.verify import Expected

FIPS = "proc/sys/crypto/fips_enabled"


@dataclass(frozen=True)
class Facts:
    """What one round found out; `observation` is the part that decides.

    :ivar current: the config that the booted root carries; of a live change in flight, the one it carried before.
    :ivar source: where desired configs are read.
    :ivar notes: what of the current config cannot be done on this root (a unit to enable that does not exist).
    :ivar remarks: what people should know about the plan, and about the node's company.
    :ivar versions: of the host's programs.
    :ivar alien: the sentence about a journal that could not be used, "" when there was none.
    :ivar resolution: where the target image is, None when it is not needed or not found.
    """

    desired: Optional[Desired]
    current: Optional[MachineConfig]
    journal: Journal
    booted: str
    boot_id: str
    observation: Observation
    source: str
    plan: Optional[Plan] = None
    deployments: tuple[Deployment, ...] = ()
    staged: Optional[StagedDeployment] = None
    pending: str = ""
    resolution: Optional[Resolution] = None
    held: Optional[Failure] = None
    alien: str = ""
    notes: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    versions: Versions = Versions()

    @property
    def outside(self) -> tuple[str, ...]:
        """Paths outside /etc that are of a newer config than the booted one, because an older deployment is booted."""
        confirmed = self.journal.confirmed
        return confirmed.outside(self.booted) if confirmed is not None else ()

    @property
    def update(self) -> Optional[Update]:
        return self.journal.update


class Observer:
    """Reads the facts of one node. `hold` is why the last step could not be taken, until it is due again."""

    def __init__(self, context: Context, look_only: bool = False) -> None:
        """`look_only`: do not even wait for a transaction of ours that runs."""
        self._context = context
        self._look_only = look_only
        self.alien = ""

    def observe(self, hold: Optional[Failure] = None) -> Facts:
        """All facts of this moment. Raises Failure when the node itself cannot be read (D-Bus away, disk broken)."""
        context = self._context
        record, alien = journal.load(context.journal)
        if alien and not self._look_only:
            raise Transient(alien, "the next round puts right what was in flight")
        self.alien = alien or self.alien
        update = record.update
        desired, refusal = self._desired(update)
        current = self._current(update)
        _osname, booted = context.machine.booted()
        identity = boot.boot_id(context.machine.top / "proc")
        wish = desired.config.identity if desired else None
        if refusal:
            # A live change must not stay half done while somebody repairs the file; a staged one can wait.
            wish = update.desired if update and not update.live else "unreadable"
        observation = Observation(wish, current.identity if current else None)
        facts = Facts(
            desired, current, record, booted, identity, observation, context.source.path, alien=self.alien, held=hold
        )
        facts = dataclasses.replace(facts, versions=context.probe.versions(booted))
        if update is None and current is not None and wish in (None, current.identity):
            return self._resting(facts, current)
        stood_back = self._stood_back(facts)
        if stood_back:  # nothing is going to be done, so no image is asked for
            found = drift(self._context, current) if current is not None else ()
            return _with(dataclasses.replace(facts, notes=found), stood_back=stood_back)
        if refusal and update is None:
            return _with(facts, refusal=refusal)
        return self._moving(facts, refusal) if update or desired else facts

    def carried(self) -> Optional[MachineConfig]:
        """The config that the running root carries, None before the first."""
        return self._current(None)

    def _desired(self, update: Optional[Update]) -> tuple[Optional[Desired], str]:
        try:
            return self._context.source.read(), ""
        except Irreconcilable as error:
            return None, str(error)

    def _current(self, update: Optional[Update]) -> Optional[MachineConfig]:
        """The config that the booted root says it carries."""
        if update is not None and update.live:
            before = payload.carried(update.id, self._context.undo)
            if before is not None or self._context.undo.load(update.id) is not None:
                return before
        content = files.read_file(self._context.root, CURRENT_CONFIG)
        if not content:
            return None
        try:
            return model.parse(json.loads(content), CURRENT_CONFIG)
        except (ValueError, Irreconcilable) as error:
            raise Broken(
                f"cannot tell which config this root carries: {CURRENT_CONFIG}: {error}",
                "put the file back; without it the desired config is applied anew, and what only the old one had stays",
            ) from error

    def _resting(self, facts: Facts, current: MachineConfig) -> Facts:
        others: tuple[otheragents.OtherAgent, ...] = ()
        with contextlib.suppress(Failure):  # a node at rest needs nobody, and no bus either
            others = otheragents.scheduled(self._context.systemd, self._context.machine.top)
        facts = dataclasses.replace(
            facts,
            notes=(*payload.notes(current, self._context.root), *health.told(self._context.runtime)),
            remarks=tuple(
                f"no update can be made while {agent.name} is at work; {agent.how_to_end}" for agent in others
            ),
        )
        found = [*drift(self._context, current), *self._other_image(facts)]
        if found and facts.journal.confirmed is not None and self._left(facts):
            found.insert(0, _told_apart(current, facts.journal.confirmed))
        return _with(facts, drift="; ".join(found))

    def _other_image(self, facts: Facts) -> list[str]:
        """Somebody else has rebased the node since the last update; told by the origin, as far as that has a digest."""
        origin = self._context.machine.origin_of(facts.booted)
        _name, _at, digest = origin.rpartition("@")
        if not facts.journal.digest or not digest.startswith("sha256:") or digest == facts.journal.digest:
            return []
        return [f"the OS image is {origin}, and not the one of the last update, {facts.journal.digest}"]

    def _stood_back(self, facts: Facts) -> str:
        """Somebody chose to boot an older deployment after the desired config was confirmed: that is their decision.

        Only while the confirmed one could still be booted: on a node that was installed anew it cannot.
        """
        confirmed = facts.journal.confirmed
        if facts.update is not None or confirmed is None or confirmed.desired != facts.observation.desired:
            return ""
        if not self._left(facts):
            return ""
        carried = facts.current.name if facts.current else "no config"
        return (
            f"an older deployment is booted, {facts.booted} with {carried}; "
            f"{confirmed.name} was confirmed on {confirmed.deployment}, which is still there. It is left so until that "
            "one is booted, another config is desired, or `mcdaemon retry`"
        )

    def _left(self, facts: Facts) -> bool:
        """Whether the deployment that was confirmed last can be booted, and another one is."""
        confirmed, machine = facts.journal.confirmed, self._context.machine
        if confirmed is None or facts.booted == confirmed.deployment:
            return False
        return any(entry.deployment == confirmed.deployment for entry in boot.entries(machine.boot, machine.sysroot))

    def _moving(self, facts: Facts, refusal: str) -> Facts:
        """The facts of an update that is due or in flight. `refusal`: why the desired config cannot be read now."""
        context, update = self._context, facts.update
        active = context.rpmostree.active()
        if active is not None and active.title.startswith("mcdaemon:") and not self._look_only:
            # Ours, from before a restart of the agent: it may be about to finish what we want (rpm-ostree.md 2.9).
            context.rpmostree.attach(active)
        deployments = context.rpmostree.deployments()
        staged, pending = context.machine.staged(), context.machine.pending()
        facts = dataclasses.replace(facts, deployments=deployments, staged=staged, pending=pending)
        if update is not None and not update.live and facts.booted == update.staged:
            return self._arrived(facts, update)
        if update is not None and not update.live and facts.booted != update.source:
            facts = _with(facts, booted=Booted.OTHER)
        if facts.desired is None:
            return self._in_flight(_with(facts, hold=refusal), None)
        try:
            self._check_reconcilable(facts)
        except Irreconcilable as error:
            return self._in_flight(_with(facts, refusal=str(error), hold=str(error)), None)
        plan, facts = self._plan(facts)
        return self._in_flight(facts, plan)

    def _check_reconcilable(self, facts: Facts) -> None:
        assert facts.desired is not None
        config = facts.desired.config
        for pullspec, field in (
            (config.os_image, "/spec/osImageURL"),
            (config.extensions_image, "/spec/baseOSExtensionsContainerImage"),
        ):
            if pullspec:
                _check_reference(config.name, pullspec, field)
        reconcile.reconcile(facts.current, config, reconcile.Facts(fips=self._fips()))
        ownsettings.check(config, self._context.settings, self._context.root)

    def _fips(self) -> Optional[bool]:
        try:
            return (self._context.machine.top / FIPS).read_text().strip() == "1"
        except FileNotFoundError:
            return None

    def _plan(self, facts: Facts) -> tuple[Plan, Facts]:
        """The plan, and what stands in its way right now; an image that turns out to be the booted one is no change."""
        assert facts.desired is not None
        booted = next((d for d in facts.deployments if d.booted), None)
        plan = make(
            facts.current,
            facts.desired.config,
            booted.requested if booted else (),
            booted.removals if booted else (),
            self._context.policy,
        )
        update = facts.update
        if update is not None and update.desired != facts.desired.config.identity:
            return plan, facts
        if facts.held is not None:
            facts = _with(facts, hold=str(facts.held))
        if update is not None and not update.digest:
            plan = self._same_base(plan, facts)  # settled when it began: the base does not change
        if booted is not None and plan.image and Reference.parse(plan.image).digest == (booted.digest or "unknown"):
            plan = self._same_base(plan, facts)  # another name for what is booted; nobody has to be asked
        there = (facts.pending, facts.staged.name if facts.staged is not None else "")
        if update is not None and update.staged and update.staged in there:
            # Staged and verified: no image is read any more, and nothing is staged.
            return plan, self._look_at_age(plan, facts, _description(facts.deployments))
        if facts.held is None:
            facts = self._alone(plan, facts)
            if facts.observation.hold:
                return plan, facts
        return self._images(plan, facts, booted)

    def _alone(self, plan: Plan, facts: Facts) -> Facts:
        """A wait while somebody else drives this node. What is drained already is not stopped by it: the shortest way
        back to service is the reboot, and what the other one stages meanwhile is recognised as not ours."""
        try:
            otheragents.require_none(self._context.systemd, self._context.machine.top, live=not plan.reboot)
        except Held as error:
            return dataclasses.replace(_with(facts, hold=str(error)), held=error)
        return facts

    def _images(self, plan: Plan, facts: Facts, booted: Optional[Deployment]) -> tuple[Plan, Facts]:
        """Where the images are that the plan reads; a wait when one is complete nowhere."""
        update = facts.update
        if (update is not None and update.no_storage) or not facts.versions.local_copies:
            self._context.images.distrust_storage()
        try:
            if plan.image:
                resolution = self._context.images.check(plan.image, update.digest if update else "")
                facts = dataclasses.replace(facts, resolution=resolution)
                known = (resolution.image_digest, resolution.digest)
                if update is None and booted is not None and booted.digest in known:
                    plan = self._same_base(plan, facts)  # another name for what is booted
            extensions = None
            if stage.needs_repository(plan, booted):
                extensions = self._context.images.check(plan.extensions_image)
            contents = facts.resolution.contents if facts.resolution else None
            if contents is not None:
                facts = self._look_at_age(plan, facts, contents.description)
            self._require_room(plan, facts, extensions)
        except (Held, Transient) as error:
            facts = dataclasses.replace(_with(facts, hold=str(error)), held=error)
        return plan, facts

    def _look_at_age(self, plan: Plan, facts: Facts, target: Description) -> Facts:
        """A target that is older than what is booted: a remark, or a refusal, as the settings say."""
        booted = next((d for d in facts.deployments if d.booted), None)
        if not plan.image or booted is None:
            return facts
        why = downgrade.older(target, booted.version, booted.timestamp)
        refuses = self._context.settings.os.downgrade == "refuse"
        if why and refuses:
            assert facts.desired is not None
            error = downgrade.refusal(facts.desired.config.name, why)
            return _with(facts, refusal=str(error), hold=str(error))
        if why:
            return dataclasses.replace(facts, remarks=(*facts.remarks, f"the OS goes back: {why}"))
        if refuses and downgrade.incomparable(target, booted.version, booted.timestamp):
            note = "whether the target is older than the booted OS cannot be told: they have no version in common"
            return dataclasses.replace(facts, remarks=(*facts.remarks, note))
        return facts

    def _require_room(self, plan: Plan, facts: Facts, extensions: Optional[Resolution]) -> None:
        """Raises Held while the disks are too small for what is about to come. What is staged already is measured
        when it is verified, and not estimated any more."""
        if not plan.reboot or (facts.staged is not None and facts.update is not None and facts.update.attempt):
            return
        machine, booted = self._context.machine, next((d for d in facts.deployments if d.booted), None)
        packages = plan.os_changes and bool(plan.packages.install or (booted is not None and booted.requested))
        target = preflight.Target(facts.resolution if plan.image else None, extensions, packages)
        needs = preflight.needs(machine, target)
        if plan.packages.remove_base or plan.packages.reset_base or preflight.to_fetch(machine, target.image):
            need = preflight.estimated_kernel(machine, facts.booted)
            early = facts.versions.prunes_boot_early
            needs.append(preflight.less_what_is_dropped(need, machine, facts.deployments, early))
        assert facts.desired is not None
        preflight.require(needs, f"stage {facts.desired.config.name}")

    def _same_base(self, plan: Plan, facts: Facts) -> Plan:
        assert facts.desired is not None
        return same_base(plan, facts.current, facts.desired.config, self._context.policy)

    def _in_flight(self, facts: Facts, plan: Optional[Plan]) -> Facts:
        update = facts.update
        state = Staged.NONE if facts.staged is None else Staged.OTHER
        if update is not None and plan is not None:
            state = stage.classify(
                plan, update, facts.staged, facts.deployments, self._context.machine.options_of(facts.booted)
            )
        failed = facts.journal.failed
        wish = facts.observation.desired
        return _with(
            dataclasses.replace(facts, plan=plan),
            update=self._progress(facts),
            staged=state,
            pending=bool(facts.pending) and update is not None and facts.pending == update.staged,
            reboot=plan.reboot if plan else True,
            drain=plan.drain if plan else True,
            os_changes=plan.os_changes if plan else False,
            failed_before=failed.reason if failed is not None and failed.desired == wish else "",
        )

    def _arrived(self, facts: Facts, update: Update) -> Facts:
        """Booted into the target: is it what was asked for, and healthy?"""
        verdict, trouble = self._health(update)
        progress = self._progress(facts)
        if progress is not None and trouble:
            progress = dataclasses.replace(progress, failure=progress.failure or trouble)
        known = boot.entries(self._context.machine.boot, self._context.machine.sysroot)
        stranded = all(entry.deployment != update.source for entry in known)
        return _with(facts, booted=Booted.TARGET, health=verdict, update=progress, stranded=stranded)

    def _health(self, update: Update) -> tuple[Health, str]:
        if self._look_only:
            return Health.PENDING, "`mcdaemon status` says what it waits for"
        context = self._context
        try:
            load = context.payloads.load(update.id)
        except Broken as error:
            return Health.BAD, str(error)
        if load is None:
            return Health.BAD, f"the payload {update.id} is gone, so the target cannot be validated"
        expected, checks, settings = load.expected(agents=False), context.checks(), context.settings.health

        def look() -> health.Look:
            trouble = self._differs(expected)
            return health.Look(trouble) if trouble else checks.look()

        gate = health.Gate(
            context.runtime / health.RECORD, settings.timeout_seconds, settings.settle_seconds if checks.exist else 0.0
        )
        return gate.verdict(update.id, look)

    def _differs(self, expected: Mapping[str, Expected]) -> str:
        """What of the booted root is not what its payload says, "" for nothing."""
        report = verify.validate(self._context.root, expected)
        if not report.ok:
            return report.text()
        config = self.carried()
        running = kernelargs.split(boot.command_line(self._context.machine.top / "proc"))
        if config is None or not kernelargs.satisfied(running, config.kernel_arguments):
            return "the running kernel arguments are not those of the config"
        return ""

    def _progress(self, facts: Facts) -> Optional[Progress]:
        if facts.update is None:
            return None
        return facts.update.progress(facts.boot_id, facts.staged.name if facts.staged else "", facts.pending)


def _description(deployments: tuple[Deployment, ...]) -> Description:
    """What is staged, as its image would be described."""
    staged = next((d for d in deployments if d.staged), None)
    return downgrade.described(staged.version, staged.timestamp) if staged else Description()


def _check_reference(name: str, pullspec: str, field: str) -> None:
    try:
        Reference.parse(pullspec)
    except Irreconcilable as error:
        raise Irreconcilable(f"cannot go to {name}: {field}: {error.sentence}", field, error.hint) from error


def drift(context: Context, config: MachineConfig) -> tuple[str, ...]:
    """What of the booted root is not what `config` says: one line each."""
    expected = {path: Expected(entry.node) for path, entry in wanted(config, context.root, context.root).items()}
    found = [str(mismatch) for mismatch in verify.validate(context.root, expected).mismatches]
    for user in config.users:
        if user.password_hash and not users.has_password_hash(context.root, user.name, user.password_hash):
            found.append(f"/etc/shadow: the password of {user.name} is not the one of the config")
    running = kernelargs.split(boot.command_line(context.machine.top / "proc"))
    if not kernelargs.satisfied(running, config.kernel_arguments):
        found.append("kernel arguments: the running ones are not those of the config")
    return tuple(found)


def _told_apart(current: MachineConfig, confirmed: Confirmed) -> str:
    """Why what is outside /etc is not what the booted root's config says, though nobody has changed it by hand."""
    return (
        f"the older deployment of {current.name} is booted, and the files outside /etc are still those of "
        f"{confirmed.name}, which was confirmed on {confirmed.deployment}; boot that one, from where {current.name} is "
        "applied as a whole if it is desired, or desire another config"
    )


def _with(facts: Facts, **changes: Any) -> Facts:
    return dataclasses.replace(facts, observation=dataclasses.replace(facts.observation, **changes))
