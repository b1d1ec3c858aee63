"""Bad input: one clear sentence that names the place, an exit status other than 0, and nothing on the node changes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.field.conftest import Copy
from tests.field.evidence import STATE, fingerprint, status, transactions
from tests.stand.configs import machine_config
from tests.stand.node import DESIRED, Node

pytestmark = pytest.mark.stand

OLD = machine_config("50-old", files={"/etc/app.conf": "old\n", "/etc/secret": ("hunter2\n", 0o600)})
CURRENT = "/etc/machine-config-daemon/currentconfig"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, disks: Any) -> Iterator[Node]:
    """One node for all: whatever the input, it has to be as it was afterwards."""
    with Copy(disks(OLD), tmp_path_factory.mktemp("bad") / "node", "") as node:
        yield node


@pytest.fixture
def node(shared: Node) -> Iterator[Node]:
    """A node that rests on OLD; every test proves that it still does."""
    shared.desire(first=OLD)
    before = fingerprint(shared)
    yield shared
    assert fingerprint(shared) == before and transactions(shared) == []


def refused(node: Node, *arguments: str) -> str:
    """What the agent says when it refuses: one sentence."""
    done = node.mcdaemon(*(arguments or ("run", "--once")), check=False)
    assert done.returncode not in (0, -9), done.stderr
    assert "Traceback" not in done.stderr and "hunter2" not in done.stderr + done.stdout
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert "cannot" in lines[0]
    return lines[0]


def variant(**spec: Any) -> str:
    """OLD with other members of its spec, or of the ignition config in it."""
    document = json.loads(OLD)
    for key, value in spec.items():
        place = document["spec"] if key in ("osImageURL", "kernelType") else document["spec"]["config"]
        place[key] = value
    return json.dumps(document, indent=1)


def bad_file(**changes: Any) -> str:
    document = json.loads(OLD)
    document["spec"]["config"]["storage"]["files"][0].update(changes)
    return json.dumps(document, indent=1)


CONTENTS = "/spec/config/storage/files/0/contents"
CASES: dict[str, tuple[str, str]] = {
    "a JSON error with its line": ('{\n"kind": "MachineConfig",\n oops\n}', "line 3"),
    "an empty file": ("", "line 1"),
    "another kind of object": ('{"apiVersion": "v1", "kind": "Secret"}', "v1 Secret"),
    "a field that is not honoured": (variant(storage={"disks": [{"device": "/dev/x"}]}), "/spec/config/storage/disks"),
    "a data URL that is cut": (bad_file(contents={"source": "data:;base64,AAA"}), CONTENTS),
    "a file to be fetched": (bad_file(contents={"source": "https://x.invalid/f"}), CONTENTS),
    "a wrong hash": (bad_file(contents={"source": "data:,x", "verification": {"hash": "sha512-00"}}),
                     CONTENTS),
    "a mode that is no number": (bad_file(mode="0644"), "/spec/config/storage/files/0/mode"),
    "a path that climbs": (bad_file(path="/etc/../etc/app.conf"), "/spec/config/storage/files/0/path"),
    "a kernel type that nobody knows": (variant(kernelType="fast"), "/spec/kernelType"),
    "an image that is no reference": (variant(osImageURL="http://Not A Reference"), "osImageURL"),
    "a unit without a suffix": (variant(systemd={"units": [{"name": "workload", "enabled": True}]}), "systemd/units/0"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_machineconfig_is_refused_for(node: Node, case: str) -> None:
    text, place = CASES[case]
    node.machine.write(f"{DESIRED}/first.json", text, 0o600)
    line = refused(node)
    assert place in line, line
    assert f"{DESIRED}/first.json" in line, line
    assert status(node)["state"] == "Unreconcilable"


def test_a_yaml_error_is_said_with_its_line(node: Node) -> None:
    node.machine.write(f"{DESIRED}/second.yaml", "apiVersion: machineconfiguration.openshift.io/v1\nkind: [\n", 0o600)
    line = refused(node)
    assert "second.yaml" in line and "line 3" in line or "line 2" in line, line


def test_two_configs_of_one_name_are_refused_with_both_places(node: Node) -> None:
    node.machine.write(f"{DESIRED}/second.json", OLD, 0o600)
    line = refused(node)
    assert "first.json" in line and "second.json" in line


def test_a_source_that_others_can_write_is_refused(node: Node) -> None:
    node.machine.run(["chmod", "0777", DESIRED])
    assert DESIRED in refused(node)
    node.machine.run(["chmod", "0755", DESIRED])


def test_a_managed_file_where_a_directory_must_be_is_refused_by_its_path(node: Node) -> None:
    """FILE-15."""
    node.desire(first=machine_config("50-bad", files={"/etc/a": "x", "/etc/a/b": "y"}))
    assert "/etc/a" in refused(node)


@pytest.mark.parametrize(
    ("text", "place"),
    [("hold: {retry_min_secs: 3}\n", "hold.retry_min_secs"), ("metrics:\n  listen: 17\n", "line 2"),
     ("health: {timeout_seconds: -1}\n", "health.timeout_seconds"), ("a: b: c\n", "line 1"),
     ("drain: {command: [test]}\n", "drain.command[0]")],
)  # fmt: skip
@pytest.mark.parametrize("command", [("run", "--once"), ("plan",)])
def test_settings_are_refused_with_key_or_line(node: Node, text: str, place: str, command: tuple[str, ...]) -> None:
    node.machine.write("/run/bad.yaml", text)
    line = refused(node, "--settings", "/run/bad.yaml", *command)
    assert place in line and "/run/bad.yaml" in line, line


def test_settings_that_others_can_write_are_refused(node: Node) -> None:
    node.machine.write("/run/open.yaml", "loop: {interval_seconds: 5}\n", 0o666)
    assert "/run/open.yaml" in refused(node, "--settings", "/run/open.yaml", "run", "--once")


def test_a_disruption_policy_is_refused_with_its_place(node: Node) -> None:
    node.machine.write("/run/policy.yaml", "files:\n- path: /etc/x\n  actions: [{type: Explode}]\n")
    node.machine.write("/run/s.yaml", "disruption: {policy_file: /run/policy.yaml}\n")
    line = refused(node, "--settings", "/run/s.yaml", "run", "--once")
    assert "/run/policy.yaml" in line and "files[0].actions[0].type" in line


@pytest.mark.parametrize("pullspec", ["Not A Reference", "host:port/x@sha256:12", "", "ostree-unverified-registry:x/y"])
def test_a_reference_is_refused_by_name(node: Node, pullspec: str) -> None:
    line = refused(node, "resolve", pullspec)
    assert not pullspec or pullspec[:20] in line


@pytest.mark.parametrize("content", ["{torn", '{"format": 9, "sha256": "", "journal": {}}', "\x00" * 9, ""])
def test_a_journal_that_is_torn_or_alien_is_kept_aside_and_reported(node: Node, content: str) -> None:
    before = node.machine.run(["find", STATE, "-name", "journal.json.alien-*"]).stdout.split()
    node.machine.write(f"{STATE}/journal.json", content, 0o600)
    done = node.mcdaemon("run", "--once", check=False)
    kept = set(node.machine.run(["find", STATE, "-name", "journal.json.alien-*"]).stdout.split()) - set(before)
    assert len(kept) == 1 and node.machine.read(kept.pop()) == content
    warning = status(node)["warnings"][0]
    assert f"cannot use the journal {STATE}/journal.json" in warning and "alien" in warning
    assert "cannot use the journal" in done.stderr, "the log has it too: status is gone after the next round"
    assert status(node)["state"] == "Done", "the config is read from the root, so the node is still known"


@pytest.mark.parametrize("content", ["{torn", "[]", '{"kind": "MachineConfig"}', "\xff\xfe"])
def test_a_torn_currentconfig_is_said_by_its_path(node: Node, content: str) -> None:
    """STATE-04."""
    good = node.machine.read_bytes(CURRENT)
    node.machine.write(CURRENT, content.encode("latin-1"), 0o600)
    try:
        for command in (("run", "--once"), ("validate",)):
            assert CURRENT in refused(node, *command)
    finally:
        node.machine.write(CURRENT, good, 0o600)


def test_counters_that_are_torn_are_worth_no_word(node: Node) -> None:
    node.machine.write(f"{STATE}/counters.json", "{", 0o600)
    assert node.mcdaemon("run", "--once").returncode == 0


def test_a_pull_secret_that_is_torn_stops_no_node_that_needs_no_image(node: Node) -> None:
    node.machine.write("/var/lib/kubelet/config.json", "{hunter2", 0o600)
    assert node.mcdaemon("run", "--once").returncode == 0
    node.machine.run(["rm", "/var/lib/kubelet/config.json"])


def test_wrong_usage_is_said_as_such(node: Node) -> None:
    assert node.mcdaemon("rnu", check=False).returncode == 2
    assert node.mcdaemon(check=False).returncode == 2


def test_an_ordinary_user_is_told_so(node: Node) -> None:
    nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    done = node.machine.run([*nobody, "mcdaemon", "run", "--once"], check=False)
    assert done.returncode == 1 and "run it as root" in done.stderr
