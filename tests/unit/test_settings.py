"""The settings file: every key optional, everything wrong refused with file, line and key."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mcdaemon.settings as settings_module
from mcdaemon.errors import Broken
from mcdaemon.settings import Settings, load, parse

SHIPPED = Path(__file__).parents[2] / "systemd" / "mcdaemon.yaml"


def refusal(text: str) -> Broken:
    with pytest.raises(Broken) as caught:
        parse(text, "/etc/mcdaemon/mcdaemon.yaml")
    assert str(caught.value).startswith("cannot use /etc/mcdaemon/mcdaemon.yaml: ")
    return caught.value


def keys(value: Any, prefix: str = "") -> list[str]:
    """All full names of settings."""
    found = []
    for entry in dataclasses.fields(value):
        inner = getattr(value, entry.name)
        name = prefix + entry.name
        found += keys(inner, name + ".") if dataclasses.is_dataclass(inner) else [name]
    return found


def written(name: str, value: str) -> str:
    """YAML that sets the setting with this full name."""
    *groups, last = name.split(".")
    lines = [f"{'  ' * depth}{group}:" for depth, group in enumerate(groups)]
    return "\n".join([*lines, f"{'  ' * len(groups)}{last}: {value}"]) + "\n"


@pytest.mark.parametrize("text", ["", "{}", "# nothing\n", "---\n", "source:\n", "source: {}\nmetrics: ~\n"])
def test_what_is_not_said_is_the_default(text: str) -> None:
    assert parse(text, "x") == Settings()


def test_the_defaults_are_those_of_the_documentation() -> None:
    made = Settings()
    assert (made.source.kind, made.source.directory.path, made.source.directory.pool) == (
        "directory", "/var/lib/mcdaemon/machineconfigs", "worker")  # fmt: skip
    assert (made.state_dir, made.metrics.listen) == ("/var/lib/mcdaemon", "127.0.0.1:8797")
    assert (made.hold.retry_min_seconds, made.hold.retry_max_seconds, made.hold.degraded_after_seconds) == (15, 600, 0)
    assert (made.drain.command, made.drain.undo, made.drain.timeout_seconds) == ((), (), 3600)
    assert (made.health.units, made.health.timeout_seconds) == ((), 600)
    assert made.scripts == (Path("/etc/mcdaemon/health.d"),)
    assert (made.health.settle_seconds, made.health.script_timeout_seconds) == (5, 60)
    assert (made.health.kubelet_healthz, made.health.node_kubeconfig, made.health.node_name) == ("", "", "")
    assert made.health.unreachable_api == "roll-back"
    assert (made.rpm_ostree.call_timeout_seconds, made.rpm_ostree.idle_timeout_seconds) == (300, 1800)
    assert (made.loop.interval_seconds, made.limits.max_file_bytes) == (60, 32 * 1024 * 1024)


def test_the_shipped_file_asks_for_nothing_and_shows_every_key_with_its_default() -> None:
    text = SHIPPED.read_text()
    assert parse(text, str(SHIPPED)) == Settings()
    shown = re.sub(r"^#( *)([a-z#])", r"\1\2", text, flags=re.MULTILINE)
    lines = [line for line in shown.splitlines() if re.fullmatch(r" *[a-z_]+:.*", line)]
    assert parse("\n".join(lines), "shown") == Settings()
    assert {name.rpartition(".")[2] for name in keys(Settings())} <= {line.split(":")[0].strip() for line in lines}


def test_every_key_can_be_set() -> None:
    made = parse(
        """
source: {kind: directory, directory: {path: /srv/configs, pool: infra}}
state_dir: /var/lib/other
metrics: {listen: ""}
images: {timeout_seconds: 2.5, parallel: 1}
hold: {retry_min_seconds: 1, retry_max_seconds: 1, degraded_after_seconds: 3600}
drain:
  command: [/usr/bin/drain, --node, "a b"]
  undo: [/usr/bin/undrain]
  timeout_seconds: 10
reboot: {command: [/usr/bin/reboot], timeout_seconds: 5}
health:
  units: [kubelet.service, crio.service]
  timeout_seconds: 1
  settle_seconds: 0
  scripts_directories: [/etc/greenboot/check, /usr/lib/greenboot/check]
  script_timeout_seconds: 5
  kubelet_healthz: http://127.0.0.1:10248/healthz
  node_kubeconfig: /var/lib/kubelet/kubeconfig
  node_name: worker-0
  unreachable_api: wait
os: {downgrade: refuse}
disruption: {policy_file: /etc/mcdaemon/policy.yaml}
rpm_ostree: {call_timeout_seconds: 1, idle_timeout_seconds: 2}
limits: {max_file_bytes: 1, max_total_bytes: 2, max_source_bytes: 3}
loop: {interval_seconds: 1}
""",
        "x",
    )
    assert made.drain.command == ("/usr/bin/drain", "--node", "a b") and made.health.units[1] == "crio.service"
    assert (made.images.timeout_seconds, made.limits.max_source_bytes, made.metrics.listen) == (2.5, 3, "")
    assert made.scripts[1] == Path("/usr/lib/greenboot/check") and made.health.unreachable_api == "wait"
    assert (made.health.node_kubeconfig, made.health.node_name) == ("/var/lib/kubelet/kubeconfig", "worker-0")
    assert made.os.downgrade == "refuse"
    assert made.source.directory.pool == "infra" and made.disruption.policy_file == "/etc/mcdaemon/policy.yaml"


def test_a_wrong_value_is_named_with_file_line_and_key() -> None:
    error = refusal("drain:\n  command: []\n  timeout_seconds: soon\n")
    assert error.sentence == (
        "cannot use /etc/mcdaemon/mcdaemon.yaml: line 3: drain.timeout_seconds: "
        'expected a number of seconds, found "soon"'
    )


@pytest.mark.parametrize("name", keys(Settings()))
def test_every_key_refuses_another_type_with_its_full_name(name: str) -> None:
    for value in ("{a: b}", "true", "[{}]", "[1]"):
        error = refusal(written(name, value))
        assert f"line {name.count('.') + 1}: {name}" in error.sentence


@pytest.mark.parametrize("name", [name for name in keys(Settings()) if name.endswith(("seconds", "bytes", "parallel"))])
@pytest.mark.parametrize("value", ["-1", "soon", ".inf", "1e999", '"5"', "true", "[]", "1s"])
def test_a_number_is_a_number_and_not_negative(name: str, value: str) -> None:
    assert name in refusal(written(name, value)).sentence


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("images.parallel", "1.5"),
        ("images.parallel", "0"),
        ("limits.max_file_bytes", "0"),
        ("loop.interval_seconds", "0"),
        ("source.kind", "cluster"),
        ("source.kind", '""'),
        ("os.downgrade", "deny"),
        ("os.downgrade", '""'),
        ("os.downgrade", "allow or refuse"),
        ("source.directory.path", "configs"),
        ("source.directory.path", "/a/../b"),
        ("source.directory.path", '""'),
        ("source.directory.pool", "a b"),
        ("state_dir", "relative"),
        ("state_dir", '"/a\\0b"'),
        ("metrics.listen", "8797"),
        ("metrics.listen", "localhost"),
        ("metrics.listen", "localhost:99999"),
        ("metrics.listen", "a b:80"),
        ("disruption.policy_file", "policy.yaml"),
    ],
)
def test_a_value_that_makes_no_sense_is_refused(name: str, value: str) -> None:
    error = refusal(written(name, value))
    assert f"{name}: expected " in error.sentence


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("drain: {command: [drain]}", "drain.command[0]"),
        ("drain: {command: /usr/bin/drain}", "drain.command"),
        ('drain: {command: [""]}', "drain.command"),
        ("drain: {command: [/usr/bin/drain, 5]}", "drain.command"),
        ("health: {units: [kubelet]}", "health.units[0]"),
        ("health:\n  units:\n    - a.service\n    - b c.service\n", "line 4: health.units[1]"),
    ],
)
def test_a_list_is_refused_at_the_entry_that_is_wrong(text: str, name: str) -> None:
    assert name in refusal(text).sentence


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("drian: {}", "line 1: drian: unknown key"),
        ("drain:\n  timeout: 5\n", "line 2: drain.timeout: unknown key"),
        ("source:\n  directory:\n    paths: x\n", "line 3: source.directory.paths: unknown key"),
        ("hold: 5", "line 1: hold: expected a mapping"),
        ("- a", "line 1: expected a mapping"),
        ("just text", "expected a mapping"),
        ("a: [", "line "),
        ("loop: {}\nloop: {}\n", "line 2: "),
        ("{}\n---\n{a: b}\n", "expected one document"),
        ("hold: {retry_min_seconds: 20, retry_max_seconds: 10}", "hold.retry_max_seconds"),
        ("5: x", "5: unknown key"),
    ],
)
def test_what_is_not_known_or_not_yaml_is_refused_with_its_place(text: str, place: str) -> None:
    assert place in refusal(text).sentence


def test_an_unknown_key_is_answered_with_those_that_are_known() -> None:
    assert "timeout_seconds" in refusal("drain: {timeout: 5}").hint


@pytest.mark.parametrize(
    ("listen", "address", "port"),
    [("127.0.0.1:8797", "127.0.0.1", 8797), ("[::1]:0", "::1", 0), ("localhost:80", "localhost", 80), ("", "", 0)],
)
def test_address_and_port_of_the_metrics(listen: str, address: str, port: int) -> None:
    metrics = parse(f'metrics: {{listen: "{listen}"}}', "x").metrics
    assert (metrics.address, metrics.port) == (address, port)


def test_a_missing_file_means_the_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings_module, "PATH", str(tmp_path / "mcdaemon.yaml"))
    assert load(settings_module.PATH) == Settings()


def test_a_file_that_was_named_has_to_be_there(tmp_path: Path) -> None:
    with pytest.raises(Broken, match="no such file"):
        load(str(tmp_path / "other.yaml"))


def test_a_link_that_leads_nowhere_is_not_taken_for_the_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node would be rebooted without its drain."""
    monkeypatch.setattr(settings_module, "PATH", str(tmp_path / "mcdaemon.yaml"))
    (tmp_path / "mcdaemon.yaml").symlink_to("/nowhere")
    with pytest.raises(Broken, match="no such file"):
        load(settings_module.PATH)


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "mcdaemon.yaml"
    path.write_text("loop: {interval_seconds: 7}\n")
    assert load(str(path)).loop.interval_seconds == 7


def test_a_file_that_others_can_write_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "mcdaemon.yaml"
    path.write_text("{}")
    path.chmod(0o666)
    with pytest.raises(Broken, match="others than root can write it") as caught:
        load(str(path))
    assert str(path) in caught.value.hint


@pytest.mark.parametrize("content", [b"a: \xff\xfe", b"# ok\n\xc3\x28: 1\n", b"a: 1\0"])
def test_a_file_that_is_no_text_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "mcdaemon.yaml"
    path.write_bytes(content)
    with pytest.raises(Broken, match="^cannot (read|use) "):
        load(str(path))


def test_a_file_that_is_too_large_a_directory_or_a_fifo_is_refused_at_once(tmp_path: Path) -> None:
    large, directory, fifo = tmp_path / "large", tmp_path / "directory", tmp_path / "fifo"
    large.write_bytes(b"#" * (1024 * 1024 + 1))
    directory.mkdir()
    os.mkfifo(fifo)
    for path in (large, directory, fifo):
        with pytest.raises(Broken, match="^cannot read "):
            load(str(path))


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(keys(Settings())), st.text(alphabet="ab01-:/.[]{}'\"\n ,&*", max_size=12))
def test_any_value_is_taken_or_refused(name: str, value: str) -> None:
    try:
        parse(written(name, value), "x")
    except Broken as error:
        assert str(error).startswith("cannot use x")
