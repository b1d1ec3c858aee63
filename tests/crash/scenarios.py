"""The seven ways through an update in which the agent is killed at every effect.

A scenario has a disk (a node that was switched off), a `begin` that brings a node from that disk to where the killing
starts, and two configs: the one that is desired, and the one that is desired instead once the first was withdrawn.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable, Optional

from tests.crash.picture import LOADED, POLICY, Picture, picture
from tests.field.archive import compiled
from tests.field.evidence import ARCHIVE, rests_on, stop_after
from tests.stand import images
from tests.stand.configs import FileText, Unit, machine_config
from tests.stand.images import File, Image, extensions_image, layer_on
from tests.stand.incidents import usbguard
from tests.stand.node import PROJECT, Node, base_image, next_image
from tests.stand.registry import Registry

SETTINGS = """\
hold: {retry_min_seconds: 1, retry_max_seconds: 2}
health: {timeout_seconds: 1, settle_seconds: 0, units: [app.service]}
drain: {command: [/usr/bin/touch, /run/drained], undo: [/usr/bin/rm, -f, /run/drained]}
"""
"""A node that stays drained keeps /run/drained, and is found by it."""

_CRIO = f"""\
[Service]
Type=simple
ExecStartPre=/bin/cp {POLICY} {LOADED}
ExecStart=/bin/sleep 100000
ExecReload=/bin/cp {POLICY} {LOADED}
"""
UNITS = {"crio.service": _CRIO}
"""A service that a policy change reloads; what it has loaded last is looked at in the end."""


@dataclass
class Ground:
    """Where the nodes of a session live: a folder, a registry, images."""

    folder: Path
    registry: Registry
    _pushed: dict[str, str] = field(default_factory=dict)

    def push(self, name: str, image: Callable[[], Image]) -> str:
        """Push once; the reference by digest."""
        if name not in self._pushed:
            digest = images.push(image(), f"{self.registry.host}/{name}")
            self._pushed[name] = f"{self.registry.host}/{name.partition(':')[0]}@{digest}"
        return self._pushed[name]

    def base(self) -> str:
        return self.push("os:v1", base_image)

    def next(self) -> str:
        return self.push("os:v2", lambda: next_image("417.94.2", {"usr/share/stand/two": File(b"2" * 50_000)}))

    def extensions(self) -> str:
        return self.push("extensions:v1", lambda: extensions_image([usbguard(self.folder / "rpm")]))


class Fresh(Node):
    """A node that is installed, with the agent's byte code in its archive (`field.archive`)."""

    def _install_os(self, image: str, kargs: Sequence[str], transport: str) -> None:
        self.machine.units.update(UNITS)
        super()._install_os(image, kargs, transport)

    def _install_agent(self, settings: str) -> None:
        super()._install_agent(settings)
        built = PROJECT / "dist/mcdaemon.pyz"
        self.machine.write(ARCHIVE, compiled(built, built.stat().st_mtime_ns), 0o755)


class Resumed(Node):
    """A node from a copy of a disk; with `boot` as first one, which the early unit may be killed in."""

    def __init__(self, disk: Path, folder: Path, units: Optional[Mapping[str, str]] = None) -> None:
        folder.mkdir(parents=True)
        subprocess.run(["cp", "-a", str(disk / "sysroot"), str(folder)], check=True, timeout=60)
        self._more = {**UNITS, **(units or {})}
        super().__init__(folder, "")

    def _install_os(self, image: str, kargs: Sequence[str], transport: str) -> None:
        """It is on the disk."""
        self.machine.units.update(self._more)

    def _install_agent(self, settings: str) -> None:
        """So is the agent."""

    def discard(self) -> None:
        self.close()
        shutil.rmtree(self.machine.folder, ignore_errors=True)


@dataclass(frozen=True)
class Scenario:
    """One way through an update. `first` and `second` are configs: desired in the beginning, and after a withdrawal.

    `install`: the image of the first installation; `rests`: the config that the disk was brought to; `more`: what else
    is on the disk; `begin`: steps before the killing starts. `early`: the early unit is killed, not the agent.
    """

    name: str
    install: Callable[[Ground], str]
    rests: Callable[[Ground], str]
    desired: Callable[[Ground], str]
    more: Callable[[Ground, Node], None] = lambda ground, node: None
    begin: Callable[[Ground, Node], None] = lambda ground, node: None
    withdrawn: Optional[Callable[[Ground], str]] = None
    early: bool = False

    def instead(self, ground: Ground) -> str:
        """What is desired when the target was withdrawn."""
        return (self.withdrawn or self.rests)(ground)

    def make_disk(self, ground: Ground) -> tuple[Path, Picture]:
        """A node that rests on the old config, switched off; its folder, and what it was at rest."""
        folder = ground.folder / f"disk-{self.name}"
        with Fresh(folder, self.install(ground), settings=SETTINGS) as node:
            config = self.rests(ground)
            node.desire(first=config)
            node.update()
            rests_on(node, "50-old")
            # Every real node has it; the package repository of an extensions image is put there.
            node.machine.run(["mkdir", "-p", "/etc/yum.repos.d"])
            at_rest = picture(node)
            self.more(ground, node)
            node.machine.power_cut()
        return folder, at_rest


# -- configs ----------------------------------------------------------------------------------------------------------


def _unit(text: str, command: str = "/bin/true") -> Unit:
    return Unit(
        "app.service",
        f"[Unit]\nDescription={text}\n[Service]\nType=oneshot\nRemainAfterExit=yes\nExecStart={command}\n"
        "[Install]\nWantedBy=multi-user.target\n",
        True,
        dropins={"10-limits.conf": f"[Service]\nLimitNOFILE={1024 if text == 'old' else 2048}\n"},
    )


OLD_FILES: dict[str, FileText] = {
    "/etc/app.conf": "old\n",
    "/etc/app/secret": ("old\n", 0o600),
    "/etc/app/gone.conf": "gone\n",
    "/usr/local/bin/tool": ("old\n", 0o755),
    "/usr/local/bin/gone": ("gone\n", 0o755),
    POLICY: '{"default": [{"type": "insecureAcceptAnything"}]}\n',
}
NEW_FILES: dict[str, FileText] = {
    "/etc/app.conf": ("new\n", 0o640),
    "/etc/app/secret": ("new\n", 0o600),
    "/etc/app/deeper/only-new": "new\n",
    "/usr/local/bin/tool": ("new\n", 0o700),
    "/usr/local/bin/only-new": ("new\n", 0o755),
    "/usr/local/share/app/deeper/only-new": "new\n",
    POLICY: '{"default": [{"type": "insecureAcceptAnything"}]}\n',
}
LIVE_FILES: dict[str, FileText] = {
    **OLD_FILES,
    POLICY: ('{"default": [{"type": "insecureAcceptAnything"}], "transports": {}}\n', 0o640),
    "/etc/containers/registries.d/new.yaml": "docker: {}\n",
    "/var/lib/kubelet/config.json": ('{"auths": {}}\n', 0o600),
}


def old(ground: Ground) -> str:
    return machine_config(
        "50-old", files=OLD_FILES, units=[_unit("old")], os_image=ground.base(), kernel_arguments=["old=1"],
        extensions_image=ground.extensions(),
    )  # fmt: skip


def files_only(ground: Ground) -> str:
    return machine_config(
        "50-new", files=NEW_FILES, units=[_unit("new")], os_image=ground.base(), kernel_arguments=["old=1"],
        extensions_image=ground.extensions(),
    )  # fmt: skip


def everything(ground: Ground) -> str:
    return machine_config(
        "50-new", files=NEW_FILES, units=[_unit("new")], os_image=ground.next(), kernel_arguments=["new=1", "more"],
        extensions=["usbguard"], extensions_image=ground.extensions(),
    )  # fmt: skip


def live(ground: Ground) -> str:
    return machine_config(
        "50-new", files=LIVE_FILES, units=[_unit("old")], os_image=ground.base(), kernel_arguments=["old=1"],
        extensions_image=ground.extensions(), ssh_keys=["ssh-ed25519 AAAA one@stand"],
    )  # fmt: skip


def unhealthy(ground: Ground) -> str:
    return machine_config(
        "50-new", files=NEW_FILES, units=[_unit("new", "/bin/false")], os_image=ground.base(),
        kernel_arguments=["old=1"], extensions_image=ground.extensions(),
    )  # fmt: skip


def _layered(ground: Ground) -> str:
    """The plain image, and what the old config writes into /etc, in a layer."""

    def image() -> Image:
        layer: dict[str, images.Entry] = {}
        for path, text in OLD_FILES.items():
            if path.startswith("/etc/"):
                content, mode = text if isinstance(text, tuple) else (text, 0o644)
                layer[path.lstrip("/")] = File(content.encode(), mode)
        unit = _unit("old")
        layer["etc/systemd/system/app.service"] = File((unit.contents or "").encode())
        layer["etc/systemd/system/app.service.d/10-limits.conf"] = File(unit.dropins["10-limits.conf"].encode())
        return layer_on(base_image(), layer, labels={"org.opencontainers.image.version": "417.94.1-layered"})

    return ground.push("os:layered", image)


def _on(image: Callable[[Ground], str], name: str) -> Callable[[Ground], str]:
    def config(ground: Ground) -> str:
        return machine_config(
            name, files=OLD_FILES, units=[_unit("old")], os_image=image(ground), kernel_arguments=["old=1"]
        )

    return config


# -- the scenarios ----------------------------------------------------------------------------------------------------


def _pull_target(ground: Ground, node: Node) -> None:
    node.machine.run(["podman", "pull", "--quiet", ground.next()])


def _start_crio(ground: Ground, node: Node) -> None:
    node.machine.run(["systemctl", "start", "crio.service"])


def _committed(ground: Ground, node: Node) -> None:
    """The target is finalized, committed and proved; then its config is withdrawn."""
    node.desire(first=files_only(ground))
    stop_after(node, "verify-root")


def _finalized(ground: Ground, node: Node) -> None:
    """Finalized by ostree, not committed; then the power goes."""
    node.desire(first=files_only(ground))
    stop_after(node, "finalize")


SCENARIOS: Sequence[Scenario] = (
    Scenario("live", Ground.base, old, live, begin=_start_crio),
    Scenario("staged", Ground.base, old, everything, more=_pull_target),
    Scenario("files", Ground.base, old, files_only),
    Scenario("early", Ground.base, old, files_only, more=_finalized, early=True),
    Scenario("rollback", Ground.base, old, unhealthy),
    Scenario("discard", Ground.base, old, old, begin=_committed, withdrawn=files_only),
    Scenario("wayback", _layered, _on(_layered, "50-old"), _on(Ground.base, "50-new")),
)


def scenario(name: str) -> Scenario:
    return next(found for found in SCENARIOS if found.name == name)
