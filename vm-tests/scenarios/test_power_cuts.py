"""The power is cut at points spread over a whole update, with a disk that loses what was not flushed.

Each of the two tests records an update of its own, checks the disk at all of its flushes without booting, and boots
half of VMLAB_CUTS disks (8; `make vm-soak N=…`), at flushes and with random losses (VMLAB_SEED). A disk's content after
QEMU was killed proves less: it has all that the guest had written, flushed or not.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from vmlab import powercuts
from vmlab.guest import FOLDER, Guest
from vmlab.osimage import next_image
from vmlab.powercuts import Recording

from scenarios.conftest import MakeNode, Push, Record
from tests.stand.configs import machine_config
from tests.stand.images import File
from tests.stand.incidents import WORKLOAD

LOSSES = 30
"""Random losses that are checked without booting."""

FSCK = 25
"""`ostree fsck` is run on each so many-th disk that is checked."""

_SHARES = 2
# None of these needs a reboot.
_OLD = {
    "/etc/nmstate/openshift/only-old.yaml": ("old\n", 0o600),
    "/etc/nmstate/openshift/both.yaml": ("old\n", 0o644),
    "/var/lib/kubelet/config.json": ("{}\n", 0o600),
}
_NEW = {
    "/etc/nmstate/openshift/both.yaml": ("new, and longer\n", 0o640),
    "/var/lib/kubelet/config.json": ('{"auths": {}}\n', 0o600),
    "/etc/only-new/deep/er": ("new\n", 0o644),
    "/etc/sysctl.d/90-vmlab.conf": ("vm.swappiness = 7\n", 0o644),
    "/usr/local/bin/workload.sh": ("#!/bin/sh\nexit 0\n", 0o755),
    "/usr/local/bin/only-new": ("#!/bin/sh\n" + "# long\n" * 3000, 0o755),
}


def _record(make_node: MakeNode, folder: Path, image: str) -> Recording:
    """From files of an old config to an OS (or the same), kernel arguments, other files and units."""
    node = make_node(folder / "writes.log")
    node.desire(machine_config("50-old", files=_OLD))
    node.until()
    new = machine_config("50-new", files=_NEW, units=[WORKLOAD], os_image=image, kernel_arguments=["vmlab.new=1"])
    return powercuts.record(node, new)


@pytest.mark.timeout(1500 + 450 * (powercuts.cuts() // _SHARES))
@pytest.mark.parametrize("share", range(_SHARES), ids=["another-os", "same-os"])
def test_wherever_the_power_is_cut_the_node_boots_the_old_or_the_new_and_gets_there(
    share: int,
    make_node: MakeNode,
    machines: list[Guest],
    push: Push,
    tmp_path: Path,
    record_property: Record,
) -> None:
    """P1, P4, P6: at each flush of the disk, and whatever a volatile write cache loses between two of them."""
    image = push(next_image("417.94.2", {"usr/share/hello": File(b"2" * 50_000)}), "os:v2") if share == 0 else ""
    seed = powercuts.seed()
    recording = _record(make_node, tmp_path, image)
    count = recording.check(LOSSES, seed, FSCK)
    record_property("numbers", f"update to {'another' if image else 'the same'} OS: {count}")
    kept = FOLDER / "failed" / f"power-cuts-{share}"
    shutil.rmtree(kept, ignore_errors=True)
    found = [str(state) for state in count.wrong] + recording.forgotten(count)
    if not found:
        many = powercuts.cuts() // _SHARES + (share < powercuts.cuts() % _SHARES)
        points = recording.points(many, seed)
        ended = list(powercuts.outcomes(recording, points, tmp_path / "cuts", machines.append, kept))
        replays = sum(outcome.replay for outcome in ended)
        boots = sum(outcome.boots for outcome in ended)
        record_property("numbers", f"{len(ended)} cut disks: {boots} boots, {replays} after a replay, seed {seed}")
        found = [str(outcome) for outcome in ended if outcome.problems]
    if found:
        found.append(f"check it again: {recording.keep(kept)}")
    recording.log.path.unlink()
    assert not found, f"seed {seed}, disks and logs: {kept}\n" + "\n".join(found)
