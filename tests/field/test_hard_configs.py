"""What a newcomer tried on the first day: configs and nodes that look harmless and are not."""

from __future__ import annotations

import json

import pytest

from tests.field.conftest import MakeNode, Push
from tests.field.evidence import open_gate, settle, shut_gate, through_gate, transactions, validated
from tests.stand.configs import Unit, machine_config
from tests.stand.incidents import FILES, naive
from tests.stand.node import Node, next_image

pytestmark = pytest.mark.stand


def config(base: str, **more: object) -> str:
    return machine_config("50-app", files=FILES, os_image=base, **more)  # type: ignore[arg-type]  # passed on


def with_users(base: str, users: list[dict[str, object]]) -> str:
    document = json.loads(config(base))
    document["spec"]["config"]["passwd"] = {"users": users}
    return json.dumps(document)


def shadow(node: Node) -> str:
    lines = node.machine.read("/etc/shadow").splitlines()
    return next(line.split(":")[1] for line in lines if line.startswith("core:"))


@pytest.mark.parametrize("argument", ['d="a b"', 'dyndbg="file x +p" q'])
def test_a_kernel_argument_with_a_quoted_blank_is_staged_once(node: Node, base: str, argument: str) -> None:
    """libostree splits a staged command line at every blank; compared word by word it would never be the wanted one."""
    boot_id = node.machine.boot_id
    settle(node, first=config(base, kernel_arguments=[argument]))
    assert transactions(node, boot_id) == ["KernelArgs"]
    assert argument in node.machine.read("/proc/cmdline")
    assert validated(node)


@pytest.mark.parametrize(
    "prepare, path",
    [
        ("true", "/etc/passwd/y"),
        ("mkdir -p /etc/adm && touch /etc/adm/x", "/etc/adm"),
        ("mkdir -p /var/adm/d && touch /var/adm/d/x", "/var/adm/d"),
        ("touch /var/usrlocal/f", "/usr/local/f/x"),
        ("ln -s /nowhere /etc/dang", "/etc/dang/x"),
    ],
)
def test_a_place_that_cannot_be_written_is_found_out_before_the_drain(
    node: Node, base: str, prepare: str, path: str
) -> None:
    settle(node, first=config(base))
    node.machine.run(["sh", "-c", prepare])
    open_gate(node)
    node.desire(first=machine_config("50-app", files={**FILES, path: ("x\n", 0o644)}, os_image=base))
    said = node.once(expect=3)
    assert "drain:" not in said
    assert not node.machine.exists("/run/undrained")
    assert path in node.status()["failed"] or path.rpartition("/")[0] in node.status()["failed"]
    assert not any(deployment.staged or deployment.pending for deployment in node.machine.deployments())


def test_a_directory_of_managed_files_that_became_a_link_does_not_break_the_merge(node: Node, base: str) -> None:
    files = {**FILES, "/etc/d/b": ("one\n", 0o644)}
    settle(node, first=machine_config("50-app", files=files, os_image=base))
    node.machine.run(["sh", "-c", "mv /etc/d /etc/d2 && ln -s /etc/d2 /etc/d"])
    settle(
        node,
        first=machine_config("50-app", files={**files, "/etc/app/app.conf": ("level = debug\n", 0o644)}, os_image=base),
    )
    assert node.machine.read("/etc/d/b") == "one\n"
    assert validated(node)


def test_a_password_that_the_config_drops_is_locked(node: Node, base: str) -> None:
    hashed = "$6$salt$" + "x" * 86
    key = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIKey core"
    settle(node, first=with_users(base, [{"name": "core", "sshAuthorizedKeys": [key], "passwordHash": hashed}]))
    assert shadow(node) == hashed
    settle(node, first=with_users(base, [{"name": "core", "sshAuthorizedKeys": [key]}]))
    assert shadow(node) == "*"
    settle(node, first=with_users(base, [{"name": "core", "sshAuthorizedKeys": [key], "passwordHash": hashed}]))
    settle(node, first=config(base))
    assert shadow(node) == "*"


@pytest.mark.parametrize(
    "more",
    [
        {"units": [Unit("mcdaemon.service", mask=True)]},
        {"units": [Unit("mcdaemon-early.service", enabled=False)]},
        {"files": {"/etc/mcdaemon/mcdaemon.yaml": "hold: {retry_min: 3}\n"}},
        {"files": {"/etc/mcdaemon/mcdaemon.yaml": "state_dir: /var/lib/other\n"}},
        {"units": [Unit("mcdaemon.service", dropins={"10.conf": "[Service]\nExecStart=\nExecStart=/bin/false\n"})]},
        {"files": {"/usr/local/lib/mcdaemon/mcdaemon.pyz": "no program\n"}},
        {"os_image": "::"},
        {"extensions_image": "quay.io/x@sha256:abc"},
    ],
)
def test_a_config_that_would_switch_the_agent_off_or_names_no_image_is_refused(
    node: Node, base: str, more: dict[str, object]
) -> None:
    settle(node, first=config(base))
    node.desire(first=machine_config("60-bad", **{"files": FILES, "os_image": base, **more}))  # type: ignore[arg-type]
    said = node.once(expect=4)
    assert "/spec/" in said
    assert node.status()["state"] == "Unreconcilable"
    settle(node, first=config(base))


def test_a_stray_file_in_the_place_of_the_health_scripts_is_a_sentence(node: Node, base: str) -> None:
    node.machine.write("/etc/mcdaemon/health.d", "not a directory\n")
    open_gate(node)
    node.desire(first=config(base))
    node.once()
    assert "cannot list the health scripts" in node.once(expect=3)
    node.machine.run(["rm", "/etc/mcdaemon/health.d"])
    through_gate(node)
    assert node.status()["state"] == "Done"


def test_a_lost_journal_does_not_leave_the_node_drained_or_about_to_boot_the_unknown(
    make_node: MakeNode, base: str
) -> None:
    settings = (
        "hold: {retry_min_seconds: 1, retry_max_seconds: 5}\n"
        "drain: {command: [/usr/bin/touch, /run/drained], undo: [/usr/bin/touch, /run/undrained]}\n"
        "reboot: {command: [/bin/false]}\n"
    )
    node = make_node(settings=settings)
    node.desire(first=config(base))
    node.once(expect=3)
    assert node.machine.exists("/run/drained") and any(d.pending for d in node.machine.deployments())
    changed = node.machine.read("/usr/local/bin/workload.sh")
    node.machine.run(["truncate", "-s", "30", "/var/lib/mcdaemon/journal.json"])
    node.mcdaemon("plan", check=False)
    assert not node.machine.run(["sh", "-c", "ls /var/lib/mcdaemon/*.alien-* 2>/dev/null || true"]).stdout
    node.machine.run(["rm", "/var/lib/mcdaemon/machineconfigs/first.json"])
    said = node.once()
    assert "cannot use the journal" in said
    assert node.machine.exists("/run/undrained")
    assert not any(d.pending or d.staged for d in node.machine.deployments())
    assert changed and not node.machine.exists("/usr/local/bin/workload.sh")
    assert "cannot use the journal" in json.dumps(node.status())


def test_another_spelling_of_the_booted_image_is_no_reason_to_reboot(node: Node, base: str) -> None:
    settle(node, first=config(base))
    boots = node.boots
    tagged = base.partition("@")[0] + ":v1"
    settle(node, first=config(tagged))
    settle(node, first=config(base))
    assert node.boots == boots


def test_what_cannot_be_enabled_and_a_missing_source_are_said_in_the_status(node: Node, base: str) -> None:
    settle(node, first=config(base, units=[Unit("nowhere.service", enabled=True)]))
    assert any("nowhere.service" in text for text in node.status()["warnings"])
    node.machine.run(["rm", "-r", "/var/lib/mcdaemon/machineconfigs"])
    node.once()
    assert any("machineconfigs is not there" in text for text in node.status()["warnings"])


def test_drift_at_rest_is_an_exit_status(node: Node, base: str) -> None:
    settle(node, first=config(base))
    node.machine.write("/etc/app/app.conf", "by hand\n")
    assert "/etc/app/app.conf" in node.once(expect=1)
    assert node.status()["state"] == "Degraded"


def test_nothing_is_finalized_while_somebody_holds_the_reboot_up(node: Node, base: str) -> None:
    """From finalization to the reboot, changes to /etc are lost: the window must not last for hours."""
    holder = node.machine.start(["systemd-inhibit", "--what=shutdown", "--mode=block", "--who=backup", "--why=runs",
                                 "sleep", "600"])  # fmt: skip
    node.machine.run(["sh", "-c", "until systemd-inhibit --list | grep -q backup; do :; done"])
    open_gate(node)
    node.desire(first=config(base))
    assert "backup" in node.once(expect=3)
    assert not any(deployment.pending for deployment in node.machine.deployments())
    node.machine.write("/etc/late.conf", "late\n")
    node.machine.stop_process(holder)
    through_gate(node)
    assert node.machine.read("/etc/late.conf") == "late\n"
    shut_gate(node)


def test_an_image_that_somebody_rebases_to_by_hand_is_said(node: Node, base: str, push: Push) -> None:
    settle(node, first=config(base))
    other = push(next_image("417.94.77"), "os:v77")
    success, text = naive(node, {"set-refspec": f"ostree-unverified-registry:{other}"}, {})
    assert success, text
    node.machine.reboot()
    assert other in node.once(expect=1)
    assert node.status()["state"] == "Degraded"


def test_one_bad_entry_in_the_pull_secret_does_not_cut_the_node_off(node: Node, base: str, push: Push) -> None:
    """Captured configs have a placeholder there; containers/image decodes only the entry that it needs."""
    node.machine.write("/var/lib/kubelet/config.json", '{"auths": {"example.com": {"auth": "NOT-BASE64"}}}', 0o600)
    target = push(next_image("417.94.78"), "os:v78")
    settle(node, first=config(target))
    assert "417.94.78" in node.machine.read("/etc/os-release")
