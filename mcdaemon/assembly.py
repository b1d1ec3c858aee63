"""Putting a node's agent together from its settings."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Optional

from mcdaemon.context import RUNTIME, Context
from mcdaemon.desired.directory import DirectorySource
from mcdaemon.desired.policy import load_policy
from mcdaemon.host.bus import Bus, Logind, Systemd
from mcdaemon.host.deployments import Machine
from mcdaemon.host.root import Root
from mcdaemon.host.rpmostree import RpmOstree
from mcdaemon.host.versions import Probe
from mcdaemon.image.connection import Limits
from mcdaemon.image.resolve import Resolver
from mcdaemon.image.storage import Storage
from mcdaemon.machineconfig import model
from mcdaemon.retry import Backoff
from mcdaemon.settings import Settings
from mcdaemon.update.images import Images
from mcdaemon.update.payload import Shelf

log = logging.getLogger("mcdaemon")


def assemble(settings: Settings, runtime: Path = RUNTIME) -> Context:
    """Everything that the agent needs; nothing is connected or read yet but the disruption policy."""
    bus = Bus()
    systemd = Systemd(bus)
    state = Path(settings.state_dir)
    storage = Storage()
    return Context(
        settings=settings,
        machine=Machine(),
        root=Root.host(),
        bus=bus,
        systemd=systemd,
        logind=Logind(bus),
        rpmostree=RpmOstree(
            bus,
            systemd,
            settings.rpm_ostree.call_timeout_seconds,
            settings.rpm_ostree.idle_timeout_seconds,
            lambda line: log.info("rpm-ostree: %s", line),
        ),
        source=DirectorySource(
            settings.source.directory.path,
            settings.source.directory.pool,
            model.Limits(settings.limits.max_file_bytes, settings.limits.max_total_bytes),
            settings.limits.max_source_bytes,
        ),
        images=Images(
            resolver(settings, storage),
            storage,
            Backoff(settings.hold.retry_min_seconds, settings.hold.retry_max_seconds),
        ),
        payloads=Shelf(state / "payload"),
        undo=Shelf(state / "undo"),
        policy=load_policy(settings.disruption.policy_file),
        probe=Probe(runtime),
        runtime=runtime,
    )


def resolver(settings: Settings, storage: Optional[Storage] = None) -> Resolver:
    """The resolver of this node's registries and containers-storage."""
    limits = Limits(read=settings.images.timeout_seconds, parallel=settings.images.parallel)
    # Only who refuses by version has to know it before anything is fetched.
    return Resolver(storage, limits=limits, describe=settings.os.downgrade == "refuse")
