"""The four incidents that mcdaemon exists for, each with its *before* and its *after*, on real parts.

The before is produced by the naive order of calls (`naive`): its errors come from skopeo and the registry, its lost
files from ostree's own merge. The demo tells these stories, the tests under tests/field assert them.
"""

from __future__ import annotations

import json
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.stand import images, rpmostreed
from tests.stand.configs import Unit, machine_config
from tests.stand.faultproxy import FaultProxy
from tests.stand.images import Directory, File, Image, Link, extensions_image, layer_on, push
from tests.stand.node import SETTINGS, SOURCE, Node, base_image, next_image
from tests.stand.packages import Package, build
from tests.stand.registry import Registry

UNIT_TEXT = """\
[Unit]
Description=A workload of the node

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/usr/local/bin/workload.sh

[Install]
WantedBy=multi-user.target
"""
FILES: dict[str, tuple[str, int]] = {
    "/etc/kubernetes/ca.crt": ("-----BEGIN CERTIFICATE-----\nnot a real one\n-----END CERTIFICATE-----\n", 0o600),
    "/etc/app/app.conf": ("level = info\n", 0o644),
    "/usr/local/bin/workload.sh": ("#!/bin/sh\nexec true\n", 0o755),
}
WORKLOAD = Unit("workload.service", UNIT_TEXT, True, dropins={"10-limits.conf": "[Service]\nLimitNOFILE=4096\n"})
# The drain of these nodes is open or shut by a file, so that a story can stop there and look.
GATED = SETTINGS + "drain: {command: [/usr/bin/test, -e, /run/may-drain], undo: [/usr/bin/touch, /run/undrained]}\n"


@dataclass(frozen=True)
class Outcome:
    """One line of the table at the end of the demo."""

    incident: str
    before: str
    after: str


@dataclass
class Stage:
    """Where a story plays: a folder, a registry, and somebody who listens."""

    folder: Path
    registry: Registry
    say: Callable[[str], None] = print
    _nodes: int = field(default=0)

    def push(self, image: Image, name: str) -> str:
        """Push as `name` ("os:v2"); returns the reference by digest."""
        digest = push(image, f"{self.registry.host}/{name}")
        return f"{self.registry.host}/{name.partition(':')[0]}@{digest}"

    @contextmanager
    def node(
        self,
        image: str,
        settings: str = SETTINGS,
        transport: str = "registry",
        profile: str = rpmostreed.DEFAULT_PROFILE,
    ) -> Iterator[Node]:
        self._nodes += 1
        folder = self.folder / f"node-{self._nodes}"
        node = Node(folder, image, settings=settings, transport=transport, profile=profile)
        try:
            yield node
        finally:
            node.close()
            shutil.rmtree(folder, ignore_errors=True)

    def check(self, true: object, what: str) -> None:
        """Say what was proved. Raises AssertionError when it was not."""
        if not true:
            raise AssertionError(what)
        self.say(f"    ok  {what}")


def naive(node: Node, modifiers: dict[str, object], options: dict[str, object]) -> tuple[bool, str]:
    """(success, rpm-ostree's own words) of one naive transaction."""
    done = node.machine.run(
        ["/usr/bin/python3", "-m", "tests.stand.naive", json.dumps(modifiers), json.dumps(options)],
        env={"PYTHONPATH": SOURCE},
        check=False,
    )
    return done.returncode == 0, (done.stderr.strip() or done.stdout.strip())


def usbguard(folder: Path) -> Path:
    """A small real RPM with the name of a package that an extension brings."""
    content = File(b"#!/bin/sh\necho usbguard\n", 0o755)
    return build(Package("usbguard", files={"/usr/bin/usbguard": content}), folder / "rpms")


def transactions(node: Node) -> int:
    """How many transactions rpm-ostree has begun since the node was made, from its log."""
    return node.machine.journal("rpm-ostreed.service").count("Initiated txn")


# rpm-ostree before v2025.10: every pull opens the base's source, also for a digest that is imported already.
_OPENS = "A"


# -- 1 --------------------------------------------------------------------------------------------------------------


def local_image_gone(stage: Stage) -> Outcome:
    """The booted origin is containers-storage, the image was collected, an extension is added."""
    v1 = stage.push(base_image(), "os:v1")
    ext = stage.push(extensions_image([usbguard(stage.folder)]), "extensions:v1")
    config = machine_config(
        "50-usbguard", files=FILES, units=[WORKLOAD], os_image=v1, extensions=["usbguard"], extensions_image=ext
    )
    stage.say("  before: rpm-ostree is asked for the package the way `rpm-ostree update --install` does")
    with stage.node(v1, transport="containers-storage", profile=_OPENS) as node:
        _repository_by_hand(node, stage)
        success, text = naive(node, {"install-packages": ["usbguard"]}, {})
        stage.say(f"    {text.splitlines()[-1][:300]}")
        stage.check(
            not success and "does not resolve to an image ID" in text,
            "the node is degraded by an image that it does not need: skopeo's own words",
        )
        before = "package install fails: " + _tail(text)

    stage.say("  after: mcdaemon adds the extension; nobody has to have the base image")
    with stage.node(v1, transport="containers-storage", profile=_OPENS) as node:
        node.desire(first=machine_config("50-usbguard", files=FILES, units=[WORKLOAD], os_image=v1))
        node.update()
        stage.registry.delete("os", v1.partition("@")[2])
        stage.registry.forget_requests()
        node.desire(first=config)
        node.update()
        stage.check("usbguard" in node.machine.run(["usbguard"]).stdout, "the extension's program runs")
        asked = [r for r in stage.registry.requests() if "/os/" in r.path]
        stage.check(not asked, "the base image was looked for nowhere: no request to the registry")
        stage.check(node.status()["state"] == "Done", "the node is Done, was never degraded")
        stage.check(node.machine.run(["mcdaemon", "validate"]).returncode == 0, "every file of the config is in place")
    _registry_down(stage, v1, ext, config)
    _image_change(stage)
    return Outcome(
        "1 local image collected, then an extension is added",
        before,
        "extension added, base never read, registry up or down; with an image change the registry's name",
    )


def _repository_by_hand(node: Node, stage: Stage) -> None:
    rpm = usbguard(stage.folder)
    node.machine.write(f"/var/rpms/{rpm.name}", rpm.read_bytes())
    node.machine.write("/etc/yum.repos.d/hand.repo", "[hand]\nname=hand\nbaseurl=file:///var/rpms/\nenabled=1\n")


def _registry_down(stage: Stage, v1: str, ext: str, config: str) -> None:
    stage.push(base_image(), "os:v1")
    with stage.node(v1, transport="containers-storage", profile=_OPENS) as node:
        node.machine.run(["podman", "pull", "--quiet", ext])
        stage.registry.stop()
        try:
            node.desire(first=config)
            node.update()
            stage.check(
                "usbguard" in node.machine.run(["usbguard"]).stdout,
                "the same with the registry down, the extensions image being in containers-storage",
            )
        finally:
            stage.registry.start()


def _image_change(stage: Stage) -> None:
    """From an origin that is gone to another image: the registry's name; nobody has it: hold."""
    v1, v2 = stage.push(base_image(), "os:v1"), stage.push(next_image("417.94.2"), "os:v2")
    digest = v2.partition("@")[2]
    stage.registry.delete("os", digest)
    with stage.node(v1, settings=GATED, transport="containers-storage", profile=_OPENS) as node:
        node.machine.write("/run/may-drain", "")
        node.desire(first=machine_config("50-v2", files=FILES, os_image=v2))
        said = node.once(expect=3)
        stage.check(
            "cannot find" in said and node.status()["state"] == "Working",
            "an image that nobody has: held, not degraded",
        )
        stage.check(not node.machine.exists("/etc/app/app.conf"), "nothing was written while it was held")
        stage.push(next_image("417.94.2"), "os:v2")
        node.update()
        stage.check(
            "417.94.2" in node.machine.read("/etc/os-release"), "it is pushed again: the node goes on by itself"
        )
        origin = _origin(node)
        stage.check("containers-storage" not in origin, f"the new origin is the registry's: {origin}")


def _origin(node: Node) -> str:
    root = node.machine.deployment_root(node.machine.booted().name)
    text = root.with_name(root.name + ".origin").read_text()
    return next(line.partition("=")[2] for line in text.splitlines() if line.startswith("container-image-reference"))


# -- 2 --------------------------------------------------------------------------------------------------------------


def target_deleted(stage: Stage) -> Outcome:
    """The target image is deleted from the registry: before staging, while layers are fetched, after staging."""
    v1 = stage.push(base_image(), "os:v1")
    v3 = stage.push(next_image("417.94.3", {"usr/share/stand/three": File(b"3" * 200_000)}), "os:v3")
    stage.say("  before: the image is deleted, and rpm-ostree is asked to rebase")
    with stage.node(v1) as node:
        stage.registry.delete("os", v3.partition("@")[2])
        success, text = naive(node, {"set-refspec": f"ostree-unverified-registry:{v3}"}, {})
        stage.say(f"    {text.splitlines()[-1][:300]}")
        stage.check(
            not success and "manifest unknown" in text, "the roll-out fails on a healthy node: the registry's own words"
        )
        before = "update fails after drain: " + _tail(text)
    _deleted_before_staging(stage, v1, v3)
    _deleted_while_fetching(stage, v1)
    _deleted_after_staging(stage, v1, back=False)
    _deleted_after_staging(stage, v1, back=True)
    return Outcome(
        "2 target image deleted in mid roll-out",
        before,
        "before and while fetching: held, nothing drained or changed; after staging: completes or is dropped",
    )


def _deleted_before_staging(stage: Stage, v1: str, v3: str) -> None:
    stage.say("  after (a): deleted before staging")
    old = machine_config("50-app", files=FILES, os_image=v1)
    with stage.node(v1, settings=GATED) as node:
        node.machine.write("/run/may-drain", "")
        node.desire(first=old)
        node.update()
        node.machine.run(["rm", "-f", "/run/undrained"])
        changed = {**FILES, "/etc/app/app.conf": ("level = debug\n", 0o644)}
        node.desire(first=machine_config("50-app", files=changed, os_image=v3))
        node.once(expect=3)
        status = node.status()
        stage.check(status["step"] == "hold" and status["state"] == "Working", f"held: {status['why'][:120]}")
        _untouched(stage, node)
        node.desire(first=old)
        node.once()
        stage.check(node.status()["state"] == "Done", "the desired config goes back: at rest, no reboot")


def _deleted_while_fetching(stage: Stage, v1: str) -> None:
    stage.say("  after (b): deleted while its layers are fetched")
    first = next_image("417.94.4", {"usr/share/stand/four": File(bytes(range(256)) * 2000)})
    image = layer_on(first, {"usr/share/stand/more": File(b"4" * 1000)})
    with FaultProxy(stage.registry.host) as proxy:
        digest = push(image, f"{stage.registry.host}/os:v4")
        slow, next_one = (layer.digest for layer in image.layers[-2:])
        gate = proxy.stall(f"GET /v2/os/blobs/{slow}")
        old = machine_config("50-app", files=FILES, os_image=v1)
        with stage.node(v1, settings=GATED) as node:
            node.machine.write("/run/may-drain", "")
            node.desire(first=old)
            node.update()
            node.machine.run(["rm", "-f", "/run/undrained"])
            node.desire(first=machine_config("50-app", files=FILES, os_image=f"{proxy.host}/os@{digest}"))
            run = node.machine.start(["mcdaemon", "run", "--once"])
            stage.check(gate.reached.wait(60), "rpm-ostree is in the middle of a layer")
            stage.registry.delete("os", digest)
            stage.registry.delete_blob("os", next_one)
            gate.release()
            status = run.wait(120)
            stage.check(status == 3, "the transaction failed, the update is held")
            _untouched(stage, node)
            node.desire(first=old)
            node.once()
            stage.check(node.status()["state"] == "Done", "the desired config goes back: dropped, at rest, no reboot")


def _deleted_after_staging(stage: Stage, v1: str, back: bool) -> None:
    version = "417.94.6" if back else "417.94.5"
    stage.say("  after (c): deleted after staging; desired " + ("goes back" if back else "stays"))
    target = stage.push(next_image(version), "os:v5")
    old = machine_config("50-app", files=FILES, os_image=v1)
    with stage.node(v1, settings=GATED) as node:
        node.machine.write("/run/may-drain", "")
        node.desire(first=old)
        node.update()
        node.machine.run(["rm", "-f", "/run/may-drain", "/run/undrained"])
        node.desire(first=machine_config("50-app", files=FILES, os_image=target))
        node.once(expect=3)
        stage.check(any(d.staged for d in node.machine.deployments()), "staged and verified, waiting for the drain")
        stage.registry.delete("os", target.partition("@")[2])
        if back:
            node.desire(first=old)
            boots = node.boots
            node.update()
            stage.check(
                node.boots == boots and not any(d.staged for d in node.machine.deployments()),
                "dropped: no reboot, nothing staged",
            )
        else:
            node.machine.write("/run/may-drain", "")
            node.update()
            stage.check(version in node.machine.read("/etc/os-release"), "completes although the image is gone")
        stage.check(node.status()["state"] == "Done", "at rest")


def _untouched(stage: Stage, node: Node) -> None:
    stage.check(node.machine.read("/etc/app/app.conf") == "level = info\n", "no file was changed")
    stage.check(not node.machine.exists("/run/undrained"), "the node was not drained")
    stage.check(not any(d.staged for d in node.machine.deployments()), "nothing is staged")


# -- 3 --------------------------------------------------------------------------------------------------------------


def custom_image(stage: Stage) -> Outcome:
    """A custom osImageURL by tag; then the release's image and other files change, and the tag moves meanwhile."""
    v1, v7 = stage.push(base_image(), "os:v1"), stage.push(next_image("417.94.7"), "os:v7")
    custom = next_image("417.94.1-custom", {"usr/share/stand/custom": File(b"one")})
    pinned = stage.push(custom, "custom:mine").partition("@")[2]
    tag = f"{stage.registry.host}/custom:mine"
    override = machine_config("99-custom-os", os_image=tag)
    before = _upgrade_over_custom(stage, v1, v7, tag)
    with stage.node(v1) as node:
        release = machine_config("00-worker", files=FILES, os_image=v1, generated=True)
        node.desire(release=release, override=override)
        node.update()
        stage.check(node.machine.exists("/usr/share/stand/custom"), "the custom image is booted")

        stage.say("  after: the release goes on, the tag moves")
        moved = stage.push(next_image("417.94.1-custom2", {"usr/share/stand/custom": File(b"two")}), "custom:mine")
        changed = {**FILES, "/etc/app/app.conf": ("level = debug\n", 0o644)}
        node.desire(release=machine_config("00-worker", files=changed, os_image=v7, generated=True), override=override)
        stage.registry.forget_requests()
        node.update()
        status = node.status()
        stage.check(
            status["state"] == "Done" and node.machine.read("/etc/app/app.conf") == "level = debug\n",
            "the upgrade finished",
        )
        stage.check(node.machine.read("/usr/share/stand/custom") == "one", "the custom image was kept")
        stage.check(
            status["digest"] == pinned and moved.partition("@")[2] != pinned,
            f"pinned to {pinned[:19]}, although the tag has moved",
        )
        stage.check(
            not [r for r in stage.registry.requests() if "/custom/" in r.path], "the tag was not looked at again"
        )
        stage.check(
            status["overridden_by"] == "99-custom-os" and status["release_image"] == v7,
            "status says who overrides the OS, and which release image is hidden",
        )
        node.once()
        stage.check(node.status()["step"] == "rest", "and nothing more happens")
    return Outcome(
        "3 a custom osImageURL outlives an upgrade",
        before,
        "upgrade finished, custom image kept, digest pinned, override shown",
    )


def _upgrade_over_custom(stage: Stage, v1: str, v7: str, tag: str) -> str:
    """What the upgrade does to a custom image when somebody just rebases to the release's: what is lost, in `cat`'s
    own words."""
    stage.say("  before: the custom image is booted, then rpm-ostree rebases to the release's next image")
    with stage.node(v1) as node:
        for reference in (tag, v7):
            success, text = naive(node, {"set-refspec": f"ostree-unverified-registry:{reference}"}, {})
            if not success:
                raise AssertionError(text)
            node.machine.reboot()
        done = node.machine.run(["cat", "/usr/share/stand/custom"], check=False)
        stage.say(f"    {done.stderr.strip()}")
        stage.check(done.returncode != 0, "the upgrade has taken the custom image away, and nobody was told")
        return f"the upgrade replaces the custom image: {done.stderr.strip()}"


# -- 4 --------------------------------------------------------------------------------------------------------------


def way_back(stage: Stage) -> Outcome:
    """A layered image with the config baked in, then back to the plain image, which knows nothing of mcdaemon."""
    v1 = stage.push(base_image(), "os:v1")
    config = machine_config("50-app", files=FILES, units=[WORKLOAD], os_image=v1)
    baked = _bake(stage, v1, config)
    layered = stage.push(baked, "os:layered")
    stage.say("  before: files are in /etc, rpm-ostree rebases to the plain image, the node reboots")
    with stage.node(v1) as node:
        _into_layered(stage, node, layered)
        success, text = naive(node, {"set-refspec": f"ostree-unverified-registry:{v1}"}, {})
        stage.check(success, "rpm-ostree stages the plain image")
        node.machine.reboot()
        lost = [path for path in _ETC_PATHS if not node.machine.exists(path)]
        stage.check(
            "/etc/kubernetes/ca.crt" in lost and "/etc/systemd/system/workload.service" in lost,
            f"ostree's merge has dropped {len(lost)} paths: {' '.join(lost)}",
        )
        before = f"the node boots without {len(lost)} of its files, units and links"

    stage.say("  after: mcdaemon takes the same way")
    with stage.node(v1) as node:
        _into_layered(stage, node, layered)
        boots = node.boots
        node.desire(first=config)
        said = node.update()
        stage.check(node.boots == boots + 1, "ONE reboot")
        dropped = [line for line in said.splitlines() if "would have been dropped" in line]
        stage.check(
            any("/etc/kubernetes/ca.crt" in line for line in dropped),
            f"before the drain it said which {len(dropped)} paths the merge would have dropped",
        )
        stage.check(
            said.index("would have been dropped") < said.index("drain:") < said.index("verify-root:"),
            "the report came before the drain, the real root was validated before the reboot",
        )
        _all_there(stage, node)
        stage.check("417.94.1" in node.machine.read("/etc/os-release"), "the plain image is booted")
        stage.check(node.mcdaemon("validate").returncode == 0, "validate finds nothing wrong")
    return Outcome(
        "4 the way back from a layered image", before, "ONE reboot, every file, unit and link there, the agent included"
    )


_LINK = "/etc/systemd/system/multi-user.target.wants/workload.service"
_ETC_PATHS = (
    "/etc/kubernetes/ca.crt",
    "/etc/app/app.conf",
    "/etc/systemd/system/workload.service",
    "/etc/systemd/system/workload.service.d/10-limits.conf",
    _LINK,
    "/etc/systemd/system/mcdaemon.service",
    "/etc/systemd/system/mcdaemon-early.service",
    "/etc/systemd/system/multi-user.target.wants/mcdaemon.service",
)


def _bake(stage: Stage, v1: str, config: str) -> Image:
    """The plain image with a layer that holds, byte for byte, what the config and the agent put into /etc."""
    with stage.node(v1) as node:
        node.desire(first=config)
        node.update()
        layer: dict[str, images.Entry] = {}
        listing = node.machine.run(
            [
                "find",
                "/etc/kubernetes",
                "/etc/app",
                "/etc/systemd/system",
                "/etc/mcdaemon",
                "/etc/tmpfiles.d",
                "/etc/systemd/system-preset",
            ]
        ).stdout
        for path in listing.split():
            layer[path.lstrip("/")] = _as_image_entry(node, path)
    return layer_on(base_image(), layer, labels={"org.opencontainers.image.version": "417.94.1-layered"})


def _as_image_entry(node: Node, path: str) -> images.Entry:
    info = node.machine.lstat(path)
    if stat.S_ISLNK(info.st_mode):
        return Link(node.machine.readlink(path))
    if stat.S_ISDIR(info.st_mode):
        return Directory(stat.S_IMODE(info.st_mode))
    return File(node.machine.read_bytes(path), stat.S_IMODE(info.st_mode), info.st_uid, info.st_gid)


def _into_layered(stage: Stage, node: Node, layered: str) -> None:
    node.desire(first=machine_config("50-app", files=FILES, units=[WORKLOAD], os_image=layered))
    node.update()
    stage.check(layered in _origin(node), "the node runs the layered image")


def _all_there(stage: Stage, node: Node) -> None:
    for path, (text, mode) in FILES.items():
        info = node.machine.lstat(path)
        if (node.machine.read(path), stat.S_IMODE(info.st_mode), info.st_uid) != (text, mode, 0):
            raise AssertionError(f"{path} is not what the config says")
    stage.check(
        all(node.machine.exists(path) for path in _ETC_PATHS),
        "every file, unit, drop-in and enablement link is there with mode and owner, the agent's own too",
    )
    stage.check(node.machine.readlink(_LINK) == "/etc/systemd/system/workload.service", "the workload is enabled")


def _tail(text: str) -> str:
    last = text.strip().splitlines()[-1]
    return last if len(last) < 110 else "…" + last[-108:]


STORIES: tuple[tuple[str, Callable[[Stage], Outcome]], ...] = (
    ("The local image is gone", local_image_gone),
    ("The target image is deleted in mid roll-out", target_deleted),
    ("A custom osImageURL outlives an upgrade of the release", custom_image),
    ("The way back from a layered image", way_back),
)
