"""The four incidents that mcdaemon exists for, as `tests.stand.incidents` tells them, with real reboots.

What happens without mcdaemon was proved there; here is how each ends with it. All images come from a registry on the
host. Those that are deleted have repositories of their own: the registry is the session's.
"""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Mapping
from pathlib import Path

from vmlab import image, osimage, store
from vmlab.guestprocess import Found
from vmlab.node import SETTINGS, VmNode
from vmlab.osimage import next_image

from scenarios.conftest import Push, Record, seen
from tests.stand import ostree_refs
from tests.stand.configs import machine_config
from tests.stand.images import Directory, Entry, File, Link, layer_on, tree_from_directory
from tests.stand.incidents import FILES, WORKLOAD
from tests.stand.registry import Registry

# rpm-ostree before v2025.10, which opens the origin's image in every pull, also by a digest that is imported already.
OPENS_THE_ORIGIN = """\
[Service]
ExecStart=
ExecStart=/usr/bin/python3 -m tests.stand.rpmostreed --profile=A
"""
_UNITS = "etc/systemd/system"
_REWRITE_ORIGIN = r"""
mount -o remount,rw /sysroot
printf '[origin]\ncontainer-image-reference=%s\n' "$1" >"$2"
ostree refs --repo=/sysroot/ostree/repo --create="$3" "$4"
"""


def test_an_extension_is_added_although_the_local_image_is_gone_everywhere(
    node_at_rest: VmNode, extensions: str, push: Push, registry: Registry, record_property: Record
) -> None:
    """P1, incident 1: the booted origin is containers-storage, and neither that nor the registry has the image."""
    node, machine = node_at_rest, node_at_rest.machine
    gone = push(osimage.base(), "gone:v1")
    origin = _came_from_containers_storage(node, gone)
    registry.delete("gone", gone.partition("@")[2])
    assert node.mcdaemon("resolve", gone, check=False).returncode != 0, "nobody has it"
    asked, boots = len(registry.requests()), node.boots
    node.desire(
        machine_config(
            "50-usbguard",
            files=FILES,
            units=[WORKLOAD],
            os_image=gone,
            extensions=["usbguard"],
            extensions_image=extensions,
        )
    )
    node.until()
    assert node.boots == boots + 1, "one reboot"
    assert machine.run(["usbguard"]).stdout.strip() == "usbguard", "the extension's program runs"
    requests = registry.requests()[asked:]
    assert [one for one in requests if "/extensions/" in one.path], "the requests are seen"
    assert not [one for one in requests if "/gone/" in one.path], "nobody looked for the base image"
    assert origin in _origin(node), "it was not re-pointed either: that would have been a pull"
    _at_rest_with(node, _config_paths())
    record_property("numbers", "incident 1: extension added, 1 reboot, 0 requests for the base image")


def _came_from_containers_storage(node: VmNode, reference: str) -> str:
    """Make that the booted deployment's origin, as after `podman pull` and a rebase to it; returns the origin."""
    machine = node.machine
    booted = machine.booted().name
    origin = f"ostree-unverified-image:containers-storage:{reference}"
    file, ref = f"{machine.deployment_root(booted)}.origin", ostree_refs.parse(origin).ref
    machine.write("/run/systemd/system/rpm-ostreed.service.d/50-opens.conf", OPENS_THE_ORIGIN)
    commit = booted.partition(".")[0]
    machine.run(["unshare", "--mount", "sh", "-euc", _REWRITE_ORIGIN, "sh", origin, file, ref, commit])
    machine.run(["sh", "-ec", "systemctl daemon-reload; systemctl restart rpm-ostreed.service"])
    assert origin in _origin(node)
    return origin


def _origin(node: VmNode) -> str:
    machine = node.machine
    return machine.read(f"{machine.deployment_root(machine.booted().name)}.origin")


def test_a_target_that_is_deleted_is_held_before_staging_and_completes_after_it(
    node_at_rest: VmNode, push: Push, registry: Registry
) -> None:
    """P1, P2, incident 2: deleted before staging, nothing changes and nobody is drained; deleted afterwards, the
    update does not need it any more."""
    node, machine = node_at_rest, node_at_rest.machine
    doomed = push(next_image("417.94.3"), "doomed:v3")
    registry.delete("doomed", doomed.partition("@")[2])
    etc, deployments, boots = machine.listing("/etc"), machine.deployments(), node.boots
    node.desire(machine_config("50-app", files=FILES, os_image=doomed))
    node.until("hold: cannot find")
    status = node.status()
    assert (status["step"], status["state"]) == ("hold", "Working"), status["why"]
    assert machine.listing("/etc") == etc and machine.deployments() == deployments, "nothing was changed or staged"
    assert node.turns() == [] and node.boots == boots, "nobody was drained"

    target = push(next_image("417.94.5"), "doomed:v5")
    node.shut_gate()
    node.desire(machine_config("50-app", files=FILES, os_image=target))
    node.until("drain: ")
    registry.delete("doomed", target.partition("@")[2])
    assert any(one.staged for one in machine.deployments()), "staged and verified, waiting for the drain"
    assert not machine.exists("/etc/app/app.conf"), "and the running root is as it was"
    node.open_gate()
    node.until()
    assert node.boots == boots + 1, "one reboot"
    assert "417.94.5" in machine.read("/etc/os-release"), "into the image that is gone"
    assert [turn.what for turn in node.turns()] == ["drained", "back"]
    assert node.status()["digest"] == target.partition("@")[2]
    _at_rest_with(node, _config_paths())


def test_a_custom_image_by_tag_outlives_an_upgrade_of_the_release(
    node_at_rest: VmNode, base: str, push: Push, registry: Registry
) -> None:
    """Incident 3: the release's image and files change and the tag moves; the custom image is kept by its digest."""
    node, machine = node_at_rest, node_at_rest.machine
    custom = push(next_image("417.94.1-custom", {"usr/share/custom": File(b"one")}), "custom:mine")
    override = machine_config("99-custom-os", os_image=f"{seen(registry)}/custom:mine")
    node.desire(machine_config("00-worker", files=FILES, os_image=base, generated=True), override)
    node.until()
    assert machine.read("/usr/share/custom") == "one", "the custom image is booted"

    moved = push(next_image("417.94.1-custom2", {"usr/share/custom": File(b"two")}), "custom:mine")
    release = push(next_image("417.94.7"), "os:v7")
    changed = {**FILES, "/etc/app/app.conf": ("level = debug\n", 0o640)}
    asked, boots = len(registry.requests()), node.boots
    node.desire(machine_config("00-worker", files=changed, os_image=release, generated=True), override)
    node.until()
    assert node.boots == boots + 1, "one reboot"
    _at_rest_with(node, _config_paths(changed))
    assert machine.read("/usr/share/custom") == "one", "the custom image was kept"
    assert "417.94.1-custom" in machine.read("/etc/os-release")
    status = node.status()
    pinned = custom.partition("@")[2]
    assert status["digest"] == pinned != moved.partition("@")[2], "pinned, although the tag has moved"
    assert not [one for one in registry.requests()[asked:] if "/custom/" in one.path], "the tag was not looked at"
    assert (status["overridden_by"], status["release_image"]) == ("99-custom-os", release), "and everybody is told"


def test_the_way_back_from_a_layered_image_is_one_reboot_and_nothing_is_lost(
    node_at_rest: VmNode, base: str, push: Push, tmp_path: Path, record_property: Record
) -> None:
    """P5, incident 4: what is baked into the image's /etc equals what is in /etc, and ostree's merge would drop it."""
    node, machine = node_at_rest, node_at_rest.machine
    baked = _baked(tmp_path / "installed")
    paths = {f"/{path}": _found(entry) for path, entry in baked.items()}
    versioned = {"org.opencontainers.image.version": "417.94.1-layered"}
    layered = push(layer_on(osimage.base(), baked, labels=versioned), "os:layered")
    node.desire(machine_config("50-app", files=FILES, units=[WORKLOAD], os_image=layered))
    node.until()
    assert layered in _origin(node), "the node runs the layered image"
    defaults = machine.listing(*(f"/usr{path}" for path in paths))
    assert defaults == {f"/usr{path}": one for path, one in paths.items()}, "whose own files are the config's"
    assert machine.listing(*paths) == paths

    mark, boots = machine.mark(), node.boots
    node.desire(machine_config("50-app", files=FILES, units=[WORKLOAD], os_image=base))
    drain = node.until("drain: ")
    said = machine.qemu.journal.lines[mark:]
    told = [line for line in said[: said.index(drain)] if "would have been dropped by ostree's /etc merge" in line]
    untold = [path for path in paths if not any(f": {path} would have been dropped" in line for line in told)]
    assert not untold, "each was told before the drain"
    node.until()
    assert node.boots == boots + 1, "ONE reboot"
    assert base in _origin(node), "the node runs the plain image"
    assert machine.listing(*(f"/usr{path}" for path in paths)) == {}, "which has none of them"
    _at_rest_with(node, {**paths, **_config_paths()})
    assert machine.run(["systemctl", "is-active", "workload.service", "mcdaemon.service"]).returncode == 0
    assert "LimitNOFILE=4096" in machine.run(["systemctl", "show", "-p", "LimitNOFILE", "workload.service"]).stdout
    record_property("numbers", f"incident 4: {len(paths)} paths that the merge would have dropped, 1 reboot, 0 lost")


def _baked(folder: Path) -> dict[str, Entry]:
    """What the config and the agent have in /etc, byte for byte, as a layer; the settings are those of these nodes."""
    install = ["make", "--silent", "install", f"DESTDIR={folder}", f"ARCHIVE={image.ARCHIVE}"]
    # Not built anew: it has to be what the disk was made with.
    subprocess.run([*install, "--old-file", str(image.ARCHIVE)], cwd=store.PROJECT, check=True, timeout=300)
    tree: dict[str, Entry] = {
        f"etc/{path}": entry
        for path, entry in tree_from_directory(folder / "etc").items()
        if not isinstance(entry, Directory)
    }
    assert f"{_UNITS}/sysinit.target.wants/mcdaemon-early.service" in tree
    tree["etc/mcdaemon/mcdaemon.yaml"] = File(SETTINGS.encode())
    for path, (text, mode) in FILES.items():
        if path.startswith("/etc/"):
            tree[path.lstrip("/")] = File(text.encode(), mode)
    unit = f"{_UNITS}/{WORKLOAD.name}"
    tree[unit] = File((WORKLOAD.contents or "").encode())
    tree.update({f"{unit}.d/{name}": File(text.encode()) for name, text in WORKLOAD.dropins.items()})
    tree[f"{_UNITS}/multi-user.target.wants/{WORKLOAD.name}"] = Link(f"/{unit}")
    return tree


def _config_paths(files: Mapping[str, tuple[str, int]] = FILES) -> dict[str, Found]:
    return {path: _found(File(text.encode(), mode)) for path, (text, mode) in files.items()}


def _found(entry: Entry) -> Found:
    """What a listing says of it."""
    if isinstance(entry, Link):
        return Found("l", "777", "0:0", entry.target)
    assert isinstance(entry, File)
    return Found("f", f"{entry.mode:o}", "0:0", hashlib.sha256(entry.content).hexdigest())


def _at_rest_with(node: VmNode, expected: Mapping[str, Found]) -> None:
    """Every path with its bytes, mode and owner, no unit failed, and the agent has nothing to say against it."""
    assert node.machine.listing(*expected) == expected
    assert node.mcdaemon("validate").returncode == 0
    assert node.machine.run(["systemctl", "--failed", "--no-legend"]).stdout == ""
    assert node.status()["state"] == "Done"
