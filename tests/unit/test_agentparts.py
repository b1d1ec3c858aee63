"""A config cannot change the agent that applies it."""

from __future__ import annotations

from typing import Any

import pytest

from mcdaemon.errors import Irreconcilable
from mcdaemon.machineconfig.reconcile import Facts, reconcile
from tests.unit.configs import config, file

SYSTEM = "/etc/systemd/system"
EARLY = "mcdaemon-early.service"


@pytest.mark.parametrize("name", ["mcdaemon.service", EARLY])
@pytest.mark.parametrize(
    "unit",
    [{"contents": "[Service]\n"}, {"enabled": False}, {"mask": True},
     {"dropins": [{"name": "10.conf", "contents": "[Service]\n"}]}, {"dropins": [{"name": "10.conf"}]}],
)  # fmt: skip
def test_a_unit_of_the_agent_cannot_be_changed(name: str, unit: dict[str, Any]) -> None:
    with pytest.raises(Irreconcilable, match=f"{name} belongs to the agent") as caught:
        reconcile(None, config("new", units=[{"name": "z.service"}, {"name": name, **unit}]), Facts())
    assert caught.value.field == "/spec/config/systemd/units/1"


@pytest.mark.parametrize(
    "path",
    [
        f"{SYSTEM}/mcdaemon.service",
        f"{SYSTEM}/{EARLY}",
        f"{SYSTEM}/mcdaemon.service.d/10.conf",
        f"{SYSTEM}/mcdaemon-.service.d/10.conf",
        f"{SYSTEM}.control/{EARLY}.d/10.conf",
        f"{SYSTEM}/multi-user.target.wants/mcdaemon.service",
        f"{SYSTEM}/sysinit.target.requires/{EARLY}",
        f"{SYSTEM}/mcdaemon.service.wants/x.service",
        "/usr/local/lib/systemd/system/mcdaemon.service.d/10.conf",
        "/var/usrlocal/lib/systemd/system/mcdaemon.service",
        "/etc/tmpfiles.d/mcdaemon.conf",
        "/etc/systemd/system-preset/50-mcdaemon.preset",
    ],
)
def test_a_file_of_the_agent_cannot_be_managed(path: str) -> None:
    with pytest.raises(Irreconcilable, match="belongs to the agent") as caught:
        reconcile(None, config("new", files=[file("/var/z"), file(path)]), Facts())
    assert caught.value.field == "/spec/config/storage/files/1"


@pytest.mark.parametrize("argument", ["systemd.mask=mcdaemon.service", f'quiet systemd.mask="{EARLY}"'])
def test_the_kernel_cannot_be_told_to_mask_the_agent(argument: str) -> None:
    with pytest.raises(Irreconcilable, match="belongs to the agent") as caught:
        reconcile(None, config("new", kernelArguments=["nosmt", argument]), Facts())
    assert caught.value.field == "/spec/kernelArguments/1"


def test_what_only_looks_like_the_agent_is_free() -> None:
    units = [
        {"name": "mcdaemon.service", "enabled": True},
        {"name": "mcdaemon-exporter.service", "contents": "[Service]\n", "enabled": False},
        {"name": "app.service", "dropins": [{"name": "10.conf", "contents": "[Unit]\nAfter=mcdaemon.service\n"}]},
    ]
    paths = [
        f"{SYSTEM}/mcdaemon.target",
        f"{SYSTEM}/app.service.d/mcdaemon.conf",
        "/etc/tmpfiles.d/mcdaemon-app.conf",
        "/etc/mcdaemon/health.d/required.d/x",
    ]
    files = [file(path) for path in paths]
    reconcile(None, config("new", units=units, files=files, kernelArguments=["systemd.mask=app.service"]), Facts())
