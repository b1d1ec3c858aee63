"""Two rendered configs captured from a real controller, where the machine has them; they are not in the repository."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from mcdaemon.desired.directory import DirectorySource
from mcdaemon.machineconfig.diff import diff
from mcdaemon.machineconfig.disruption import actions
from mcdaemon.machineconfig.model import KernelType, MachineConfig, Owner, parse
from mcdaemon.machineconfig.reconcile import Facts, reconcile
from mcdaemon.machineconfig.render import render

SHARED = Path(os.environ.get("MCDAEMON_SHARED", Path(__file__).parents[3] / "shared"))
CLUSTER = SHARED / "data" / "cluster"

pytestmark = pytest.mark.skipif(
    not CLUSTER.is_dir(), reason=f"no captured configs in {CLUSTER}; set MCDAEMON_SHARED to the folder that has them"
)


def raw(letter: str) -> Any:
    return json.loads((CLUSTER / f"rendered-worker-{letter}.json").read_text())


def config(letter: str) -> MachineConfig:
    return parse(raw(letter), f"rendered-worker-{letter}.json")


@pytest.mark.parametrize("letter", ["a", "b"])
def test_nothing_of_a_real_config_is_lost(letter: str) -> None:
    made, ignition = config(letter), raw(letter)["spec"]["config"]
    assert {entry.path for entry in made.files} == {entry["path"] for entry in ignition["storage"]["files"]}
    assert {entry.path: entry.mode for entry in made.files} == {
        entry["path"]: entry["mode"] for entry in ignition["storage"]["files"]
    }
    assert [entry.name for entry in made.units] == sorted(entry["name"] for entry in ignition["systemd"]["units"])
    assert sum(len(entry.dropins) for entry in made.units) == sum(
        len(entry.get("dropins") or []) for entry in ignition["systemd"]["units"]
    )
    assert made.kernel_arguments == ("systemd.unified_cgroup_hierarchy=1", 'cgroup_no_v1="all"')
    assert made.kernel_type is KernelType.DEFAULT and not made.fips and made.os_image and made.extensions_image
    assert made.users[0].ssh_keys and all(entry.user == Owner(0) for entry in made.files)


def test_the_encodings_of_a_real_config_are_decoded() -> None:
    made = config("a")
    assert made.file("/etc/kubernetes/kubelet.conf").content.startswith(b"apiVersion: kubelet.config.k8s.io")
    assert json.loads(made.file("/var/lib/kubelet/config.json").content)["auths"] is not None
    assert made.file("/usr/local/bin/configure-ovs.sh").content.startswith(b"#!/bin/bash\n")
    assert made.unit("kubelet.service").enabled is True
    assert [dropin.content is None for dropin in made.unit("rpm-ostreed.service").dropins] == [True]


def test_the_two_real_configs_differ_by_what_was_added() -> None:
    found = diff(config("a"), config("b"))
    assert found.files == found.added_files == {"/etc/peer/app.conf"}
    assert found.units == found.added_units == {"peer.service"}
    assert not found.users and not found.system
    assert [str(action) for action in actions(found, config("a"), config("b"))] == ["Reboot"]


def test_a_node_can_go_from_one_to_the_other_and_back() -> None:
    one, two = config("a"), config("b")
    for old, new in ((None, one), (one, two), (two, one)):
        reconcile(old, new, Facts(fips=False, architecture="x86_64"))
    assert not diff(one, parse(one.raw, "again")) and parse(one.raw, "again").identity == one.identity


def test_a_real_rendered_config_in_a_directory_is_taken_as_it_is(tmp_path: Path) -> None:
    shutil.copyfile(CLUSTER / "rendered-worker-a.json", tmp_path / "config.json")
    desired = DirectorySource(str(tmp_path)).read()
    assert desired is not None and desired.config == config("a")
    assert desired.release_image == desired.config.os_image and not desired.overridden_by


def test_a_config_laid_over_a_real_one_keeps_the_rest() -> None:
    mine = parse(
        {"metadata": {"name": "99-mine"}, "spec": {"osImageURL": "quay.io/mine:1", "kernelArguments": ["a b"]}}, "x"
    )
    found = render([mine, config("a")])
    assert (found.config.os_image, found.overridden_by) == ("quay.io/mine:1", "99-mine")
    assert found.release_image == config("a").os_image
    assert (found.config.files, found.config.units) == (config("a").files, config("a").units)
    assert found.config.kernel_arguments == (*config("a").kernel_arguments, "a", "b")
