"""The directory source: what is read, what is refused with which place, and what counts as nothing new."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from mcdaemon.desired import Desired
from mcdaemon.desired.directory import DirectorySource
from mcdaemon.desired.policy import load_policy
from mcdaemon.errors import Broken, Irreconcilable, Transient
from mcdaemon.machineconfig import disruption
from mcdaemon.machineconfig.model import Limits
from mcdaemon.machineconfig.render import GENERATED_BY, ROLE
from tests.unit.configs import document, file


def put(folder: Path, name: str, *documents: Any) -> Path:
    path = folder / name
    text = json.dumps(documents[0]) if name.endswith(".json") else yaml.safe_dump_all(documents)
    path.write_text(text)
    return path


def read(folder: Path, pool: str = "worker") -> Desired:
    desired = DirectorySource(str(folder), pool).read()
    assert desired is not None
    return desired


def refusal(folder: Path) -> Irreconcilable:
    with pytest.raises(Irreconcilable) as caught:
        DirectorySource(str(folder)).read()
    assert caught.value.sentence.startswith("cannot ")
    return caught.value


def test_files_of_all_three_kinds_are_rendered_into_one_config(tmp_path: Path) -> None:
    put(tmp_path, "b.yaml", document("00-a", files=[file("/etc/a")]), document("01-b", files=[file("/etc/b")]))
    put(tmp_path, "a.json", document("02-c", files=[file("/etc/c")]))
    put(tmp_path, "c.yml", document("03-d", files=[file("/etc/d")]))
    desired = read(tmp_path)
    assert [made.path for made in desired.config.files] == ["/etc/a", "/etc/b", "/etc/c", "/etc/d"]
    assert desired.config.name.startswith("rendered-worker-") and desired.place == str(tmp_path)


def test_a_single_config_is_taken_as_it_is(tmp_path: Path) -> None:
    put(tmp_path, "a.yaml", document("my-node"))
    assert read(tmp_path).config.name == "my-node"


def test_modes_and_times_are_what_people_write_in_yaml(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("""
apiVersion: machineconfiguration.openshift.io/v1
kind: MachineConfig
metadata:
  name: 99-x
  creationTimestamp: 2026-11-30T16:48:13Z
spec:
  config:
    ignition: {version: 3.2.0}
    storage:
      files:
        - {path: /etc/a, mode: 0600}
        - {path: /etc/b, mode: 0o640}
        - {path: /etc/c, mode: 420}
    systemd:
      units:
        - name: a.service
          enabled: yes
          contents: |
            [Unit]
            Description=x
""")
    made = read(tmp_path).config
    assert [entry.mode for entry in made.files] == [0o600, 0o640, 0o644]
    assert made.units[0].enabled is True and made.units[0].content == b"[Unit]\nDescription=x\n"


def test_incident_3_the_release_image_is_kept_beside_the_override(tmp_path: Path) -> None:
    put(tmp_path, "a.yaml", document("00-worker", annotations={GENERATED_BY: "x"}, osImageURL="release:1"))
    put(tmp_path, "b.yaml", document("99-custom", osImageURL="custom:tag"))
    desired = read(tmp_path)
    assert desired.config.os_image == "custom:tag"
    assert (desired.release_image, desired.overridden_by) == ("release:1", "99-custom")


def test_only_the_configs_of_the_pool_count(tmp_path: Path) -> None:
    put(tmp_path, "a.yaml", document("a", labels={ROLE: "master"}), document("b", labels={ROLE: "worker"}))
    assert (read(tmp_path).config.name, read(tmp_path, "master").config.name) == ("b", "a")


@pytest.mark.parametrize("names", [[], ["README.md", ".hidden.yaml", "x.yaml~", "x.yaml.swp", ".git"]])
def test_a_directory_without_machineconfig_files_asks_for_nothing(tmp_path: Path, names: list[str]) -> None:
    for name in names:
        (tmp_path / name).write_text("not: [read")
    assert DirectorySource(str(tmp_path)).read() is None
    assert DirectorySource(str(tmp_path / "absent")).read() is None
    assert DirectorySource(str(tmp_path / "absent")).token() == ()


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("a.yaml", "a: 1\nb: [\n", "line 3"),
        ("a.yaml", "a:\n\tb: 1\n", "line 2"),
        ("a.yml", "a: &x [*x]\n", "line 1"),
        ("a.json", '{\n "a": 1,\n}', "line 3"),
        ("a.json", "a: 1\n", "line 1"),
        ("a.yaml", "\x00", ""),
    ],
)
def test_malformed_text_is_refused_with_file_and_line(tmp_path: Path, name: str, text: str, line: str) -> None:
    (tmp_path / name).write_text(text)
    error = refusal(tmp_path)
    assert str(tmp_path / name) in error.sentence and line in error.sentence


def test_text_that_is_not_utf8_is_refused_with_file_and_line(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_bytes(b"# one\n# \xff\n")
    assert f"{tmp_path / 'a.yaml'}: line 2" in refusal(tmp_path).sentence


@pytest.mark.parametrize("text", ["", "# a comment\n", "---\n---\n"])
def test_an_empty_file_is_refused_since_it_may_be_half_written(tmp_path: Path, text: str) -> None:
    put(tmp_path, "a.yaml", document("a"))
    (tmp_path / "b.yaml").write_text(text)
    assert str(tmp_path / "b.yaml") in refusal(tmp_path).sentence


def test_a_refused_field_is_named_with_file_line_and_pointer(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("""apiVersion: machineconfiguration.openshift.io/v1
kind: MachineConfig
metadata: {name: 99-x}
spec:
  config:
    ignition: {version: 3.2.0}
    storage:
      links:
        - {path: /etc/a, target: /b}
""")
    error = refusal(tmp_path)
    assert error.field == "/spec/config/storage/links/0"
    assert f"{tmp_path / 'a.yaml'}: line 9: /spec/config/storage/links/0: " in error.sentence


def test_the_second_document_of_a_file_has_its_own_lines(tmp_path: Path) -> None:
    path = put(tmp_path, "a.yaml", document("a"), document("b", kernelType="fast"))
    wanted = [number for number, line in enumerate(path.read_text().splitlines(), 1) if "kernelType" in line]
    assert f"line {wanted[0]}: /spec/kernelType" in refusal(tmp_path).sentence


@pytest.mark.parametrize(
    "data",
    [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "x"}},
        {"apiVersion": "machineconfiguration.openshift.io/v1", "kind": "MachineConfigPool", "metadata": {"name": "x"}},
        {"kind": "MachineConfig", "metadata": {"name": "x"}},
        {"apiVersion": "v1", "kind": "List", "items": []},
        ["MachineConfig"],
        "MachineConfig",
        5,
        {"kind": ["x"], "apiVersion": {}},
    ],
)
@pytest.mark.parametrize("name", ["b.yaml", "b.json"])
def test_anything_but_a_machineconfig_is_refused_with_the_name_of_its_file(
    tmp_path: Path, name: str, data: Any
) -> None:
    put(tmp_path, "a.yaml", document("a"))
    put(tmp_path, name, data)
    assert str(tmp_path / name) in refusal(tmp_path).sentence


def test_one_name_in_two_files_is_refused_with_both_files(tmp_path: Path) -> None:
    put(tmp_path, "a.yaml", document("same"))
    put(tmp_path, "b.yaml", document("same"))
    assert "a.yaml" in refusal(tmp_path).sentence and "b.yaml" in refusal(tmp_path).sentence


def test_files_that_contradict_each_other_are_refused_with_their_names(tmp_path: Path) -> None:
    put(tmp_path, "a.yaml", document("one", files=[file("/etc/x")]))
    put(tmp_path, "b.yaml", document("two", files=[file("/etc/x/y")]))
    assert "rendered from one, two" in refusal(tmp_path).sentence


def test_sizes_are_bounded(tmp_path: Path) -> None:
    put(tmp_path, "a.yaml", document("a", files=[file("/etc/x", b"a" * 500)]))
    with pytest.raises(Irreconcilable, match="larger than 100 bytes"):
        DirectorySource(str(tmp_path), max_source_bytes=100).read()
    with pytest.raises(Irreconcilable, match="larger than 400 bytes"):
        DirectorySource(str(tmp_path), limits=Limits(400, 400)).read()
    size = (tmp_path / "a.yaml").stat().st_size
    put(tmp_path, "b.yaml", document("b"))
    with pytest.raises(Irreconcilable, match="b.yaml"):
        DirectorySource(str(tmp_path), max_source_bytes=size + 10).read()


@pytest.mark.parametrize("mode", [0o664, 0o646, 0o666])
def test_a_file_that_others_can_write_is_refused(tmp_path: Path, mode: int) -> None:
    put(tmp_path, "a.yaml", document("a")).chmod(mode)
    assert "others than root can write it" in refusal(tmp_path).sentence


def test_a_directory_that_others_can_write_is_refused(tmp_path: Path) -> None:
    put(tmp_path, "a.yaml", document("a"))
    tmp_path.chmod(0o777)
    assert str(tmp_path) in refusal(tmp_path).sentence


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
@pytest.mark.parametrize("link", [True, False])
def test_a_file_or_link_of_somebody_else_is_refused(tmp_path: Path, link: bool) -> None:
    real = tmp_path / "real"
    real.mkdir()
    target = put(real, "a.yaml", document("a"))
    folder = tmp_path / "configs"
    folder.mkdir()
    (folder / "a.yaml").symlink_to(target)
    os.chown(folder / "a.yaml" if link else target, 1000, 1000, follow_symlinks=False)
    assert "others than root can write it" in refusal(folder).sentence


def test_a_link_of_root_is_followed_as_configmap_mounts_have_them(tmp_path: Path) -> None:
    first, second, folder = tmp_path / "1", tmp_path / "2", tmp_path / "configs"
    for place in (first, second, folder):
        place.mkdir()
    put(first, "a.yaml", document("one"))
    put(second, "a.yaml", document("two"))
    (folder / "..data").symlink_to(first)
    (folder / "a.yaml").symlink_to("..data/a.yaml")
    source = DirectorySource(str(folder))
    before, token = source.read(), source.token()
    (folder / "..next").symlink_to(second)
    os.replace(folder / "..next", folder / "..data")
    after = source.read()
    assert before is not None and after is not None and (before.config.name, after.config.name) == ("one", "two")
    assert token != source.token()


def test_a_link_that_leads_nowhere_is_refused_and_not_taken_for_an_empty_directory(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").symlink_to("gone.yaml")
    assert "leads nowhere" in refusal(tmp_path).sentence and "a.yaml" in refusal(tmp_path).sentence


def test_a_fifo_a_directory_and_a_file_in_the_wrong_place_are_refused_at_once(tmp_path: Path) -> None:
    for number, make in enumerate((os.mkfifo, os.mkdir)):
        folder = tmp_path / str(number)
        folder.mkdir()
        make(folder / "a.yaml")
        assert str(folder / "a.yaml") in refusal(folder).sentence
    plain = put(tmp_path, "b.yaml", document("a"))
    assert "not a directory" in refusal(plain).sentence


def test_an_unchanged_directory_is_not_read_again(tmp_path: Path) -> None:
    path = put(tmp_path, "a.yaml", document("a"))
    source = DirectorySource(str(tmp_path))
    first, token = source.read(), source.token()
    assert source.read() is first and source.token() == token
    os.utime(path, ns=(1, 1))
    second = source.read()
    assert source.token() != token and second is not first and second == first


def test_a_change_a_new_file_and_a_removed_one_are_seen(tmp_path: Path) -> None:
    path = put(tmp_path, "a.yaml", document("a", fips=False))
    source = DirectorySource(str(tmp_path))
    first = source.read()
    assert first is not None
    identities = {first.config.identity}
    put(tmp_path, "a.yaml", document("a", kernelArguments=["x"]))
    put(tmp_path, "b.yaml", document("b", kernelArguments=["y"]))
    for _change in range(2):
        desired = source.read()
        assert desired is not None
        identities.add(desired.config.identity)
        (tmp_path / "b.yaml").unlink(missing_ok=True)
    assert len(identities) == 3
    path.unlink()
    assert source.read() is None


def test_a_refused_config_is_read_again_once_it_is_corrected(tmp_path: Path) -> None:
    source = DirectorySource(str(tmp_path))
    (tmp_path / "a.yaml").write_text("a: [")
    with pytest.raises(Irreconcilable):
        source.read()
    put(tmp_path, "a.yaml", document("a"))
    assert source.read() is not None


class _Restless(DirectorySource):
    """A source whose directory is changed by somebody else `times` times while it is read."""

    def __init__(self, folder: Path, times: int, text: str) -> None:
        super().__init__(str(folder))
        self._folder, self._times, self._text_then = folder, times, text

    def _render(self, token: Any) -> Any:
        desired = super()._render(token)
        if self._times:
            self._times -= 1
            (self._folder / "a.yaml").write_text(self._text_then + f"# {self._times}\n")
        return desired


def test_a_file_that_changes_while_it_is_read_is_read_again(tmp_path: Path) -> None:
    put(tmp_path, "a.yaml", document("before"))
    desired = _Restless(tmp_path, 1, yaml.safe_dump(document("after"))).read()
    assert desired is not None and desired.config.name == "after"


def test_a_directory_that_does_not_come_to_rest_is_tried_again_later(tmp_path: Path) -> None:
    put(tmp_path, "a.yaml", document("before"))
    with pytest.raises(Transient, match="change while they are read") as caught:
        _Restless(tmp_path, 100, yaml.safe_dump(document("after"))).read()
    assert caught.value.retry_after


def test_a_policy_file_is_laid_over_the_built_in_policy(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text("files: [{path: /etc/app, actions: [{type: None}]}]\n")
    policy = load_policy(str(path))
    assert policy.for_path("/etc/app/x") == (disruption.NONE,)
    assert policy.for_path("/etc/containers/policy.json") == disruption.DEFAULT.for_path("/etc/containers/policy.json")
    assert load_policy("") is disruption.DEFAULT


@pytest.mark.parametrize("text", ["", "a: [", "files: 5", "{}\n---\n{}\n", "files: [{path: x}]"])
def test_a_wrong_policy_file_is_refused_with_its_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(text)
    with pytest.raises(Broken, match=f"^cannot use {path}"):
        load_policy(str(path))


def test_a_policy_file_that_is_named_and_missing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(Broken, match="no such file"):
        load_policy(str(tmp_path / "policy.yaml"))
