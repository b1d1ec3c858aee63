"""Another update agent lives on the node: it is named, nothing is staged beside it, and what is drained is finished."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest

from tests.field.conftest import Push
from tests.field.evidence import (
    NEW,
    fingerprint,
    is_new,
    is_old,
    journal,
    no_leftovers,
    open_gate,
    rests_on,
    status,
    stop_after,
    through_gate,
    transactions,
)
from tests.stand.configs import machine_config
from tests.stand.node import SOURCE, Node, next_image
from tests.stand.registry import Registry

pytestmark = pytest.mark.stand

_SERVICE = "[Service]\nType=oneshot\nRemainAfterExit=yes\nExecStart=/bin/true\n"
_DRIVER = f"""\
[Service]
Environment=PYTHONPATH={SOURCE}
Type=oneshot
RemainAfterExit=yes
ExecStart=/usr/bin/python3 -m tests.stand.naive \
'{json.dumps({"set-revision": ""})}' '{json.dumps({"register-driver": "Fleet"})}'
"""


def start(node: Node, unit: str, text: str = _SERVICE) -> None:
    node.machine.write(f"/run/systemd/system/{unit}", text)
    node.machine.run(["systemctl", "daemon-reload"])
    node.machine.run(["systemctl", "start", unit])


def stop(node: Node, unit: str) -> None:
    node.machine.run(["systemctl", "stop", unit])


@contextmanager
def zincati(node: Node) -> Iterator[str]:
    start(node, "zincati.service")
    yield "zincati.service"
    stop(node, "zincati.service")


@contextmanager
def automatic(node: Node, policy: str = "stage") -> Iterator[str]:
    """The timer of the real package is a timer; that it is active is all that counts."""
    node.machine.write("/etc/rpm-ostreed.conf", f"[Daemon]\nAutomaticUpdatePolicy={policy}\n")
    start(node, "rpm-ostreed-automatic.timer", "[Timer]\nOnBootSec=1h\n")
    yield "rpm-ostreed-automatic.timer with AutomaticUpdatePolicy=stage"
    stop(node, "rpm-ostreed-automatic.timer")
    node.machine.run(["rm", "/etc/rpm-ostreed.conf"])


@contextmanager
def bootc(node: Node) -> Iterator[str]:
    start(node, "bootc-fetch-apply-updates.timer", "[Timer]\nOnBootSec=1h\n")
    yield "bootc-fetch-apply-updates.timer"
    stop(node, "bootc-fetch-apply-updates.timer")


@contextmanager
def driver(node: Node) -> Iterator[str]:
    """Registered with rpm-ostree as Zincati does at its start (rpm-ostree.md 1.9)."""
    start(node, "fleet.service", _DRIVER)
    yield "Fleet (fleet.service)"
    stop(node, "fleet.service")


@contextmanager
def machine_config_daemon(node: Node) -> Iterator[str]:
    node.machine.run(["cp", "/usr/bin/sleep", "/var/tmp/machine-config-daemon"])
    process = node.machine.start(["/var/tmp/machine-config-daemon", "600"], stdout=subprocess.DEVNULL)
    node.machine.run(["sh", "-c", "until pgrep -x machine-config- >/dev/null; do :; done"], timeout=20)
    try:
        yield "machine-config-daemon (process "
    finally:
        node.machine.stop_process(process)


AGENTS: dict[str, Callable[[Node], AbstractContextManager[str]]] = {
    "zincati": zincati, "automatic": automatic, "bootc": bootc, "driver": driver, "mcd": machine_config_daemon,
}  # fmt: skip


@pytest.mark.parametrize("kind", AGENTS)
def test_beside_another_agent_nothing_is_asked_for_or_staged_until_it_is_gone(
    old: Node, push: Push, registry: Registry, kind: str
) -> None:
    """rpm-ostree.md 7 row 59: one driver for one node."""
    target = push(next_image("417.94.30"), "os:v30")
    open_gate(old)
    with AGENTS[kind](old) as name:
        before, done = fingerprint(old), transactions(old)
        registry.forget_requests()
        old.desire(first=json.dumps({**json.loads(NEW), "spec": {**json.loads(NEW)["spec"], "osImageURL": target}}))
        said = old.once(expect=3)
        assert name in said and "cannot update this node while another agent drives it" in said
        assert (fingerprint(old), transactions(old)) == (before, done) and registry.requests() == ()
        assert status(old)["state"] == "Working" and name in status(old)["hold"]
        is_old(old)
    through_gate(old)
    is_new(old)
    rests_on(old, "50-new")


def test_a_check_for_updates_that_stages_nothing_is_harmless(old: Node) -> None:
    with automatic(old, "check"):
        old.desire(first=NEW)
        said = old.once(expect=3)  # waits for its drain
    assert "stage-kargs:" in said and "another agent" not in said


def test_one_that_comes_while_the_node_waits_for_its_drain_stops_the_drain(old: Node) -> None:
    old.desire(first=NEW)
    old.once(expect=3)
    done = transactions(old)
    open_gate(old)
    with zincati(old):
        said = old.once(expect=3)
        assert "another agent drives it: zincati.service" in said and not journal(old)["update"]["drained"]
        assert old.boots == 0
        is_old(old)
    assert transactions(old) == done, "what was staged and verified is still there, and locked"
    through_gate(old)
    assert old.boots == 1
    is_new(old)
    rests_on(old, "50-new")


@pytest.mark.parametrize("step", ["drain", "finalize", "commit-files", "verify-root"])
def test_one_that_comes_after_the_drain_does_not_tear_the_update_apart(old: Node, step: str) -> None:
    """The shortest way back to service is the reboot; half an update would help nobody."""
    old.desire(first=NEW)
    open_gate(old)
    stop_after(old, step)
    start(old, "zincati.service")
    through_gate(old)
    assert old.boots == 1
    is_new(old)
    rests_on(old, "50-new")


def test_what_another_one_stages_after_the_drain_is_not_rebooted_into(old: Node) -> None:
    """TXN-36: ours is replaced; the node goes back to work, and waits."""
    old.desire(first=NEW)
    open_gate(old)
    stop_after(old, "drain")
    with zincati(old):
        old.machine.run(
            ["ostree", "admin", "deploy", "--stage", "--karg-append=foreign", old.machine.booted().checksum]
        )
        said = old.once(expect=3)
        assert "discard:" in said and "another agent drives it" in said and old.boots == 0
        assert old.machine.exists("/run/undrained")
        is_old(old)
        no_leftovers(old)
    through_gate(old)
    assert "foreign" not in old.machine.read("/proc/cmdline")
    rests_on(old, "50-new")


def test_at_rest_it_is_a_warning(old: Node) -> None:
    with zincati(old):
        old.once()
        found = status(old)
        assert found["state"] == "Done" and found["step"] == "rest"
        assert "zincati.service" in old.mcdaemon("status").stdout
        assert any("`systemctl disable --now zincati.service`" in text for text in found["warnings"])
    old.once()
    assert status(old)["warnings"] == []


LIVE = machine_config("50-live", files={"/etc/app.conf": "old\n", "/usr/local/bin/tool": ("old\n", 0o755)},
                      ssh_keys=["ssh-ed25519 AAAA core"])  # fmt: skip


@pytest.mark.parametrize(("other", "waits"), [("zincati", False), ("mcd", True)])
def test_a_live_change_waits_only_for_one_that_writes_files_too(old: Node, other: str, waits: bool) -> None:
    with AGENTS[other](old):
        old.desire(first=LIVE)
        said = old.once(expect=3 if waits else 0)
        assert ("apply-live:" in said) is not waits
    old.once()
    rests_on(old, "50-live")
