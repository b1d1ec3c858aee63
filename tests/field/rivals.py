"""Other hands on a node, for the tests of races: clients of rpm-ostree, unlocked locks, odd finalizers, a witness.

The agent's drains and the ways back to work are written down over reboots, so that a test can tell how often the node
was out of service.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

from tests.field.evidence import GATE
from tests.stand.configs import FileText, Unit, machine_config
from tests.stand.machine import Down
from tests.stand.node import SETTINGS, SOURCE, Node

LOCK = "/run/ostree/staged-deployment-locked"
STAMP = "/boot/ostree/finalize-failure.stamp"
FINALIZER = "ostree-finalize-staged.service"

DRAINS = "/var/lib/drains"
COUNTED = SETTINGS.replace("max_seconds: 5", "max_seconds: 1.1") + (
    f"drain: {{command: [/bin/sh, -c, 'test -e {GATE} && printf d >>{DRAINS}'], "
    f"undo: [/bin/sh, -c, 'printf u >>{DRAINS}']}}\n"
)
"""Settings with the drain gate; every drain and every way back to work is one letter in a file."""


def rival(node: Node, *deed: str) -> subprocess.CompletedProcess[str]:
    """Let another client do something (see `tests.stand.rival`), which has to succeed."""
    return node.machine.run(["/usr/bin/python3", "-m", "tests.stand.rival", *deed], env={"PYTHONPATH": SOURCE})


def drains(node: Node, path: str = DRAINS) -> str:
    """`d` for each drain and `u` for each way back to work since the last `forget_drains`, in order."""
    return node.machine.read(path) if node.machine.exists(path) else ""


def forget_drains(node: Node) -> None:
    node.machine.run(["rm", "-f", DRAINS])


def unlock(node: Node) -> None:
    """What `ostree admin lock-finalization --unlock` does on a host of profile A."""
    node.machine.run(["rm", "-f", LOCK])


def orderly_reboot(node: Node) -> int:
    """Somebody else reboots the node; returns how many boots came of it."""
    node.machine.ask_reboot()
    how = node.machine.wait_down()
    assert how is Down.REBOOT
    return node.machine.boot()


def finalizer(node: Node, script: str) -> None:
    """Let stopping the finalizing unit run `script` instead, until the next boot. $0 is of no meaning."""
    drop_in = "[Service]\nExecStop=\nExecStop=/bin/sh /run/stand/finalizer.sh\n"
    node.machine.write("/run/stand/finalizer.sh", script)
    node.machine.write(f"/run/systemd/system/{FINALIZER}.d/90-test.conf", drop_in)
    node.machine.run(["systemctl", "daemon-reload"])


FAILS = "mkdir -p /etc/odd && mkfifo /etc/odd/pipe; ostree admin finalize-staged; s=$?; rm -r /etc/odd; exit $s\n"
"""A FIFO that is there only while ostree merges: libostree 2022.7 fails on it, for real (TXN-34, TXN-45)."""


def fails_times(count: int) -> str:
    """The finalizer fails so often, then works."""
    return (
        "echo x >>/run/stand/finalizations\n"
        f"if test $(wc -l </run/stand/finalizations) -gt {count}; then exec ostree admin finalize-staged; fi\n" + FAILS
    )


# -- a witness: what the workloads of a node saw, boot by boot --

_SEEN = "/var/lib/seen"
_LOOK = (
    "[Unit]\nDescription=witness\n[Service]\nType=oneshot\n"
    "ExecStart=/bin/sh -c 'echo $(cat /etc/app.conf) $(cat /usr/local/bin/tool) "
    f"$(grep -o nosmt /proc/cmdline || echo smt) >>{_SEEN}'\n"
    "[Install]\nWantedBy=multi-user.target\n"
)
WITNESS = Unit("witness.service", _LOOK, True)
OLD_SIGHT, NEW_SIGHT = "old old smt", "new new nosmt"


def _watched(word: str, more: Sequence[str], kernel_arguments: Sequence[str] = ()) -> str:
    files: dict[str, FileText] = {"/etc/app.conf": f"{word}\n", "/usr/local/bin/tool": (f"{word}\n", 0o755)}
    files |= dict.fromkeys(more, "new\n")
    return machine_config(f"50-{word}", files=files, units=[WITNESS], kernel_arguments=kernel_arguments)


WATCHED_OLD = _watched("old", ())
WATCHED_NEW = _watched("new", ("/etc/only-new", "/usr/local/bin/only-new"), kernel_arguments=["nosmt"])


def sights(node: Node) -> list[str]:
    """What the witness saw: one line per boot."""
    return node.machine.read(_SEEN).splitlines() if node.machine.exists(_SEEN) else []


def forget_sights(node: Node) -> None:
    node.machine.run(["rm", "-f", _SEEN])


def wait_until(node: Node, condition: str, seconds: int = 20) -> None:
    """Wait in the node until a shell condition holds."""
    tries = seconds * 10
    node.machine.run(
        ["sh", "-c", f"i=0; until {condition}; do i=$((i+1)); test $i -lt {tries} || exit 1; sleep 0.1; done"],
        timeout=seconds + 10,
    )
