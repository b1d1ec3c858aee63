"""`make bench`: what the budgets of the design measure, beside a peer that does the same work in the same run.

These machines are shared and noisy: read the ratios, not the times. Nothing here fails because of a number.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from mcdaemon.host.files import Entry, put_all
from mcdaemon.host.root import Root
from mcdaemon.image.resolve import Resolver
from mcdaemon.image.storage import Storage
from mcdaemon.update.verify import Expected, validate
from tests.stand.configs import machine_config
from tests.stand.images import push
from tests.stand.incidents import FILES, Stage
from tests.stand.isolation import private
from tests.stand.node import Node, base_image
from tests.stand.registry import Registry

_ROUNDS = 5
_REST_SECONDS = 10.0
_AGENT_UP = 30.0


def _median(work: Callable[[], object]) -> float:
    times = []
    for _round in range(_ROUNDS):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def _report(what: str, ours: float, peer: str, theirs: float) -> None:
    print(f"{what:<46} {ours * 1000:8.1f} ms   {peer:<28} {theirs * 1000:8.1f} ms   ratio {ours / theirs:5.2f}")


def validation(folder: Path) -> None:
    """1,000 files of 4 KiB; the peer is coreutils' sha256sum, which compares content only."""
    root = Root(folder / "root", folder / "root/var")
    (folder / "root/var").mkdir(parents=True)
    entries = {f"/etc/bench/{n:04}": Entry.file(os.urandom(4096)) for n in range(1000)}
    put_all(root, entries)
    expected = {path: Expected(entry.node) for path, entry in entries.items()}
    sums = folder / "sums"
    sums.write_text("".join(f"{entry.node.sha256}  {folder}/root{path}\n" for path, entry in entries.items()))
    ours = _median(lambda: validate(root, expected))
    theirs = _median(lambda: subprocess.run(["sha256sum", "--check", "--quiet", str(sums)], check=True, timeout=60))
    _report("validate 1,000 files of 4 KiB", ours, "sha256sum --check", theirs)


def image_check(folder: Path, registry: Registry) -> None:
    """A cold and a warm check of an image in a registry; the peer asks for manifest and config only."""
    reference = f"{registry.host}/os@{push(base_image(), f'{registry.host}/os:bench')}"
    (folder / "etc/containers").mkdir(parents=True)
    (folder / "etc/containers/registries.conf").write_text('[[registry]]\nlocation = "127.0.0.1"\ninsecure = true\n')
    (folder / "etc/containers/policy.json").write_text('{"default": [{"type": "insecureAcceptAnything"}]}')
    storage = Storage(str(folder / "graph"), str(folder / "run"))

    def cold() -> None:
        found = Resolver(storage, folder).resolve(reference, without_storage=True)
        if not found.complete:
            raise found.held()

    kept = Resolver(storage, folder)
    skopeo = private(["skopeo", "inspect", "--tls-verify=false", f"docker://{reference}"])
    theirs = _median(lambda: subprocess.run(skopeo, check=True, capture_output=True, timeout=60))
    _report("check an image (manifest, config, every layer)", _median(cold), "skopeo inspect", theirs)
    kept.resolve(reference, without_storage=True)
    _report("the same again", _median(lambda: kept.resolve(reference, without_storage=True)), "skopeo inspect", theirs)


def at_rest(stage: Stage) -> None:
    """Memory and CPU of the daemon on a node at rest; the budget is 50 MiB, the machine-config-daemon's own is 74."""
    v1 = stage.push(base_image(), "os:v1")
    with stage.node(v1) as node:
        node.desire(first=machine_config("50-app", files=FILES, os_image=v1))
        node.update()
        agent = node.machine.start(["mcdaemon", "run"], stderr=subprocess.PIPE)
        assert agent.stderr is not None
        deadline = time.monotonic() + _AGENT_UP
        while "rest:" not in agent.stderr.readline():
            if time.monotonic() > deadline:
                raise RuntimeError("the agent does not come to rest")
        before = _ticks(node)
        time.sleep(_REST_SECONDS)  # this is what is measured
        used = (_ticks(node) - before) / os.sysconf("SC_CLK_TCK")
        memory = node.machine.run(["sh", "-c", f"grep VmRSS /proc/{_pid(node)}/status"]).stdout.split()[1]
        print(f"{'at rest: resident memory':<46} {int(memory) / 1024:8.1f} MiB  (budget 50)")
        print(f"{'at rest: CPU':<46} {used / _REST_SECONDS * 100:8.2f} %")
        node.machine.stop_process(agent, 15)


def _pid(node: Node) -> str:
    return node.machine.run(["pgrep", "-of", "mcdaemon.pyz run"]).stdout.strip()


def _ticks(node: Node) -> int:
    fields = node.machine.read(f"/proc/{_pid(node)}/stat").rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def main() -> int:
    folder = Path(tempfile.mkdtemp(prefix="mcdaemon-bench-", dir="/var/tmp"))
    try:
        (folder / "files").mkdir()
        validation(folder / "files")
        with Registry(folder / "registry") as registry:
            image_check(folder / "image", registry)
            at_rest(Stage(folder, registry))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
