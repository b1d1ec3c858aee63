"""The way onto a node that the README shows, on a node that has nothing of mcdaemon yet."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.stand.machine import Machine, minimal_tree
from tests.stand.node import PROJECT

pytestmark = pytest.mark.stand


def test_the_agent_is_copied_onto_a_node_as_the_readme_says(tmp_path: Path) -> None:
    readme = (PROJECT / "README.md").read_text()
    line = re.search(r"^    \(cd tree && (.*)\) \| ssh core@node sudo (.*)$", readme, re.MULTILINE)
    assert line is not None
    pack, unpack = line.groups()
    tree = tmp_path / "tree"
    subprocess.run(["make", "--silent", "install", f"DESTDIR={tree}"], cwd=PROJECT, check=True, timeout=300)
    packed = subprocess.run(["sh", "-c", pack], cwd=tree, check=True, capture_output=True, timeout=60).stdout
    with Machine(tmp_path / "node") as node:
        node.install_tree(minimal_tree(tmp_path / "os"))
        node.boot()
        node.write("/var/agent.tar", packed)
        node.run([*unpack.split(), "-f", "/var/agent.tar"])
        assert node.run(["mcdaemon", "--version"]).stdout.startswith("mcdaemon ")
        assert node.readlink("/usr/local") == "../var/usrlocal"
        assert node.run(["systemctl", "is-enabled", "mcdaemon.service"]).stdout.strip() == "enabled"
        assert "no config is desired" in node.run(["mcdaemon", "run", "--once"]).stderr
        assert node.run(["stat", "-c", "%U %a", "/etc"]).stdout.strip() == "root 755"
