"""The parts that make up one node's agent, put together once: what it talks to and where it keeps things."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mcdaemon.desired.directory import DirectorySource
from mcdaemon.host import boot
from mcdaemon.host.bus import Bus, Logind, Systemd
from mcdaemon.host.deployments import Machine
from mcdaemon.host.greenboot import Scripts
from mcdaemon.host.kubelet import Kubelet
from mcdaemon.host.root import Root
from mcdaemon.host.rpmostree import RpmOstree
from mcdaemon.host.versions import Probe
from mcdaemon.machineconfig.disruption import Policy
from mcdaemon.settings import Settings
from mcdaemon.update.health import Checks
from mcdaemon.update.images import Images
from mcdaemon.update.payload import Shelf

RUNTIME = Path("/run/mcdaemon")
"""What must not outlive a boot: the lock, the last status, the moment this boot was first seen."""


@dataclass
class Context:
    """Mechanisms and places; no state of an update lives here."""

    settings: Settings
    machine: Machine
    root: Root
    bus: Bus
    systemd: Systemd
    logind: Logind
    rpmostree: RpmOstree
    source: DirectorySource
    images: Images
    payloads: Shelf
    undo: Shelf
    policy: Policy
    probe: Probe
    runtime: Path

    @property
    def journal(self) -> Path:
        return Path(self.settings.state_dir) / "journal.json"

    def checks(self) -> Checks:
        """What has to be well after a reboot, as the settings say."""
        gate, kubelet = self.settings.health, None
        if gate.kubelet_healthz or gate.node_kubeconfig:
            boot_id = boot.boot_id(self.machine.top / "proc")
            kubelet = Kubelet(gate.kubelet_healthz, gate.node_kubeconfig, gate.node_name, boot_id)
        return Checks(self.systemd, gate.units, self.scripts, kubelet, gate.unreachable_api == "wait")

    @property
    def scripts(self) -> Scripts:
        """The health scripts."""
        return Scripts(self.settings.scripts, self.settings.health.script_timeout_seconds)

    @property
    def settled(self) -> Path:
        """Its existence says that the early unit came to its end in this boot."""
        return self.runtime / "settled"

    @property
    def etc_at_merge(self) -> Path:
        """What /etc was when ostree merged it: for a sentence about what was changed after that."""
        return self.runtime / "etc-at-merge.json"

    @property
    def retry(self) -> Path:
        """Its existence asks the agent to try a failed target again."""
        return Path(self.settings.state_dir) / "retry"
