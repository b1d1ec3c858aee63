"""What the field tests look at on a node, and how they stop the agent in the middle of a step."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Optional
from unittest import mock

from tests.stand.configs import machine_config
from tests.stand.incidents import GATED
from tests.stand.node import Node, ends_in_reboot
from tests.stand.rpmostreed import FAULTS_FILE

GATE = "/run/may-drain"
"""With the settings `GATED` a drain succeeds once this file exists; /run is gone after a reboot."""

STATE = "/var/lib/mcdaemon"
ARCHIVE = "/usr/local/lib/mcdaemon/mcdaemon.pyz"
_LINE_TIMEOUT = 60.0


# -- the node ---------------------------------------------------------------------------------------------------------


def settle(node: Node, **configs: str) -> str:
    """Bring the node to these configs, drain gate open; the gate is shut again after it."""
    open_gate(node)
    node.desire(**configs)
    said = node.update()
    assert status(node)["state"] == "Done", status(node)
    shut_gate(node)
    return said


def open_gate(node: Node) -> None:
    node.machine.write(GATE, "")


def shut_gate(node: Node) -> None:
    node.machine.run(["rm", "-f", GATE, "/run/undrained"])


def through_gate(node: Node) -> str:
    """Open the gate in each boot until the node rests."""
    said = ""
    for _round in range(8):
        open_gate(node)
        boots = node.boots
        said += node.once()
        if node.boots == boots:
            return said
    raise AssertionError(f"no rest after eight rounds:\n{said}")


def gated(**more: str) -> str:
    """Settings with the drain gate, and further lines of YAML by their first key."""
    return GATED + "".join(f"{key}: {value}\n" for key, value in more.items())


def deployment_etc(node: Node, name: str) -> dict[str, str]:
    """Type, mode, owner and content of everything in a deployment's /etc, by path: two of them are compared."""
    found = tree(node.machine.deployment_root(name) / "etc")
    # Debian's podman makes its lock for networks in /etc whatever it is asked for.
    return {path: what for path, what in found.items() if path.split("/")[0] != "cni"}


def tree(top: Path) -> dict[str, str]:
    """One line for every path below `top`, which is looked at from outside of the node."""
    found: dict[str, str] = {}
    for folder, folders, names in os.walk(top):
        for name in [*folders, *names]:
            path = Path(folder, name)
            info = path.lstat()
            if path.is_symlink():
                what = f"-> {os.readlink(path)}"
            else:
                what = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "directory"
            found[str(path.relative_to(top))] = f"{info.st_mode:o} {info.st_uid}:{info.st_gid} {what}"
    return found


@dataclass(frozen=True)
class Fingerprint:
    """All that an agent must not touch when it refuses: /etc, shared places, deployments, boot entries.

    A finalization drops the rollback deployment, whatever becomes of what it finalized: `rollback` is apart.
    """

    etc: dict[str, str]
    shared: dict[str, str]
    default: tuple[str, str]
    deployments: list[tuple[str, bool, bool, bool]]
    rollback: list[str] = field(default_factory=list)

    def but_for_rollback(self) -> Fingerprint:
        return replace(self, rollback=[])


def fingerprint(node: Node) -> Fingerprint:
    machine = node.machine
    found, entry = machine.deployments(), machine.default_entry()
    booted = next(deployment.name for deployment in found if deployment.booted)
    others = [deployment for deployment in found if not deployment.rollback]
    return Fingerprint(
        deployment_etc(node, booted),
        tree(machine.sysroot.stateroot / "var/usrlocal"),
        (entry.options, entry.deployment),
        [(d.name, d.booted, d.staged, d.pending) for d in others],
        [deployment.name for deployment in found if deployment.rollback],
    )


def status(node: Node) -> dict[str, Any]:
    """What `mcdaemon status --json` shows, without the start of a process."""
    found: dict[str, Any] = json.loads(node.machine.read("/run/mcdaemon/status.json"))
    return found


def transactions(node: Node, boot_id: str = "") -> list[str]:
    """Titles of rpm-ostree's transactions in a boot (default: this one), in order, from its log."""
    lines = node.machine.journal("rpm-ostreed.service", boot_id or node.machine.boot_id).splitlines()
    return [line.partition("Initiated txn ")[2].split()[0] for line in lines if "Initiated txn" in line]


def faults(node: Node, **settings: Any) -> None:
    """Switch faults of the stand-in rpm-ostreed on; none: off."""
    if settings:
        node.machine.write(FAULTS_FILE, json.dumps(settings))
    else:
        node.machine.run(["rm", "-f", FAULTS_FILE])


def journal(node: Node) -> dict[str, Any]:
    """The agent's own record, as it is on the disk."""
    found: dict[str, Any] = json.loads(node.machine.read(f"{STATE}/journal.json"))["journal"]
    return found


def validated(node: Node) -> str:
    """`mcdaemon validate`, which has to be clean; returns what it said."""
    done = node.mcdaemon("validate", check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def no_leftovers(node: Node) -> None:
    """A node at rest keeps nothing of an update: no payload with its secrets, no undo, hold, staged or pending one."""
    machine = node.machine
    for folder in ("payload", "undo"):
        listing = machine.run(["find", f"{STATE}/{folder}", "-mindepth", "1"], check=False).stdout
        assert listing == "", f"left in {folder}: {listing}"
    assert journal(node)["update"] is None
    assert [d.name for d in machine.deployments() if d.staged or d.pending] == []
    assert machine.default_entry().deployment == machine.booted().name
    repositories = machine.run(["find", "/etc/yum.repos.d", "-name", "*mcdaemon*"], check=False).stdout
    assert repositories == ""
    temporary = machine.run(["find", "/etc", "/var/usrlocal", STATE, "-name", ".mcdaemon-*"], check=False).stdout
    assert temporary == "", f"temporary files are left: {temporary}"


def rests_on(node: Node, name: str) -> None:
    """The node carries exactly this config, says so, and nothing is left of the way to it."""
    found = status(node)
    assert (found["state"], found["step"], found["current"]) == ("Done", "rest", name), found
    validated(node)
    no_leftovers(node)


# -- the agent in the middle of a step -------------------------------------------------------------------------------


@dataclass
class Agent:
    """`mcdaemon run --once` in the background, whose sentences are waited for."""

    node: Node
    process: subprocess.Popen[str]
    said: list[str]
    _new: threading.Condition
    _ended: bool = False

    @classmethod
    def start(cls, node: Node, *arguments: str, env: Optional[Mapping[str, str]] = None) -> Agent:
        argv = ["mcdaemon", *(arguments or ("run", "--once"))]
        process = node.machine.start(argv, env=env, stderr=subprocess.PIPE)
        agent = cls(node, process, [], threading.Condition())
        threading.Thread(target=agent._read, daemon=True).start()
        return agent

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._new:
                self.said.append(line.rstrip("\n"))
                self._new.notify_all()
        with self._new:
            self._ended = True
            self._new.notify_all()

    def wait_for(self, start: str, timeout: float = _LINE_TIMEOUT) -> str:
        """The first line that begins with `start`."""

        def found() -> Optional[str]:
            return next((line for line in self.said if line.startswith(start)), None)

        with self._new:
            if not self._new.wait_for(lambda: found() is not None or self._ended, timeout) or found() is None:
                raise AssertionError(f"the agent never said {start!r}:\n" + "\n".join(self.said))
            return str(found())

    def kill(self) -> None:
        """SIGKILL, children included, as the kernel's OOM killer or a crash would end it."""
        self.node.machine.stop_process(self.process)

    def wait(self, timeout: float = _LINE_TIMEOUT) -> int:
        status = self.process.wait(timeout)
        with self._new:
            self._new.wait_for(lambda: self._ended, 10)
        return status

    def text(self) -> str:
        return "\n".join(self.said)


STEPS: Sequence[str] = ("stage-kargs", "verify-staged", "drain", "finalize", "commit-files", "verify-root", "reboot")
"""The steps of a files-only update, in their order."""


# The loop as `mcdaemon run --once` turns it, ended without a word after the first step of a kind.
_STOP_AFTER = """
import os, sys
from pathlib import Path
from mcdaemon import assembly, cli, settings
from mcdaemon.agent import Agent, make_places
from mcdaemon.context import RUNTIME
from mcdaemon.perform import Performer
from mcdaemon.report.notify import Notifier
from mcdaemon.reporter import Reporter
cli._log_to_stderr(False)
context = assembly.assemble(settings.load())
make_places(context)
Performer(context).sweep()
agent = Agent(context, Reporter(Path(context.settings.state_dir), RUNTIME), Notifier())
for _round in range(20):
    decision = agent.round()
    if decision is None or decision.step.value == sys.argv[1]:
        os._exit(decision is None)
os._exit(1)
"""


def stop_after(node: Node, step: str) -> str:
    """Let the agent take its steps up to and including `step`, then end it at once; returns what it said."""
    done = node.machine.run(["/usr/bin/python3", "-c", _STOP_AFTER, step], check=False, env={"PYTHONPATH": ARCHIVE})
    assert done.returncode == 0, done.stderr
    return done.stderr


def tick(node: Node) -> int:
    """`mcdaemon run --once` and the reboot that it asks for, whatever its exit status, which is the answer."""
    done = node.mcdaemon("run", "--once", check=False)
    if ends_in_reboot(done):
        node.follow_reboot()
    return done.returncode


def boot_by_hand(node: Node, deployment: str) -> int:
    """Boot another entry than the default, as a person in front of the boot menu does; returns the boots it took."""
    entry = next(entry for entry in node.machine.sysroot.entries() if entry.deployment == deployment)
    with mock.patch.object(node.machine, "default_entry", return_value=entry):
        return node.machine.boot()


def fifo(node: Node, path: str = "/run/stand/fifo") -> str:
    node.machine.run(["mkfifo", path])
    return path


# -- one config and the next --

OLD = machine_config("50-old", files={"/etc/app.conf": "old\n", "/usr/local/bin/tool": ("old\n", 0o755)})
NEW = machine_config("50-new", files={"/etc/app.conf": "new\n", "/usr/local/bin/tool": ("new\n", 0o755),
                                      "/etc/only-new": "new\n", "/usr/local/bin/only-new": "new\n"})  # fmt: skip
NEWEST = machine_config("50-newest", files={"/etc/app.conf": "newest\n", "/usr/local/bin/tool": ("newest\n", 0o755)})


def is_old(node: Node) -> None:
    assert node.machine.read("/etc/app.conf") == "old\n" and node.machine.read("/usr/local/bin/tool") == "old\n"
    assert not node.machine.exists("/etc/only-new") and not node.machine.exists("/usr/local/bin/only-new")


def is_new(node: Node) -> None:
    assert node.machine.read("/etc/app.conf") == "new\n" and node.machine.read("/usr/local/bin/tool") == "new\n"
    assert node.machine.exists("/etc/only-new") and node.machine.exists("/usr/local/bin/only-new")
