"""`make demo`: a node taken from one MachineConfig to the next, and through the four incidents, on real components.

Everything happens in one folder below /var/tmp and in processes and mount namespaces of its own; both are gone at the
end, also when it is interrupted. Exit status 0 when all went as told.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from typing import NoReturn

from tests.stand.configs import machine_config
from tests.stand.images import File, extensions_image
from tests.stand.incidents import FILES, STORIES, WORKLOAD, Outcome, Stage, transactions, usbguard
from tests.stand.machine import MachineError
from tests.stand.node import SETTINGS, base_image, next_image
from tests.stand.registry import Registry

_DRAIN = SETTINGS + "drain: {command: [/usr/bin/touch, /run/drained], undo: [/usr/bin/touch, /run/undrained]}\n"


_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Narrator:
    """Says what happens, with the seconds since the start."""

    def __init__(self) -> None:
        self._start = time.monotonic()

    def __call__(self, text: str) -> None:
        print(f"[{time.monotonic() - self._start:5.1f}] {text}", flush=True)

    def chapter(self, text: str) -> None:
        print(f"\n== {text} ==", flush=True)


def one_config_to_the_next(stage: Stage) -> None:
    """A whole update: image, kernel arguments, package, files and units, one reboot."""
    v1 = stage.push(base_image(), "os:v1")
    v2 = stage.push(next_image("417.94.2", {"usr/share/hello": File(b"2")}), "os:v2")
    extensions = stage.push(extensions_image([usbguard(stage.folder)]), "extensions:v2")
    with stage.node(v1, settings=_DRAIN) as node:
        stage.say(f"a node is up on {v1}")
        node.desire(worker=machine_config("50-worker", files=FILES, os_image=v1))
        _tell(stage, node.update())
        stage.say("now another config is desired: `mcdaemon plan` says")
        config = machine_config(
            "50-worker",
            files={**FILES, "/etc/app/app.conf": ("level = debug\n", 0o640)},
            units=[WORKLOAD],
            os_image=v2,
            kernel_arguments=["hugepagesz=2M hugepages=64"],
            extensions=["usbguard"],
            extensions_image=extensions,
        )
        node.desire(worker=config)
        _tell(stage, node.mcdaemon("plan").stdout)
        boots, before = node.boots, transactions(node)
        said = node.update()
        _tell(stage, said)
        stage.check(node.boots == boots + 1, "one reboot")
        stage.check(transactions(node) - before == 2, "two rpm-ostree transactions: the tree, and the kernel arguments")
        stage.check("hugepages=64" in node.machine.read("/proc/cmdline"), "the kernel arguments are in force")
        stage.check(node.machine.run(["usbguard"]).stdout.strip() == "usbguard", "the package is there")
        stage.check("417.94.2" in node.machine.read("/etc/os-release"), "the new OS runs")
        stage.check(node.machine.exists("/run/undrained"), "the node is back at work")
        _tell(stage, node.mcdaemon("status").stdout)


def _tell(stage: Stage, text: str) -> None:
    for line in text.splitlines():
        stage.say(f"    | {line[:180]}")


def table(outcomes: list[Outcome]) -> str:
    """The four incidents, before and after, in columns that fit a terminal."""
    widths = (28, 42, 42)
    rule = "+".join("-" * (width + 2) for width in widths)
    rows = [("incident", "before", "after")] + [(o.incident, o.before, o.after) for o in outcomes]
    lines = [rule]
    for row in rows:
        cells = [textwrap.wrap(text, width) or [""] for text, width in zip(row, widths)]
        for number in range(max(map(len, cells))):
            parts = [cell[number] if number < len(cell) else "" for cell in cells]
            lines.append("|".join(f" {part:<{width}} " for part, width in zip(parts, widths)))
        lines.append(rule)
    return "\n".join(lines)


def _interrupted(number: int, _frame: object) -> NoReturn:
    raise KeyboardInterrupt(signal.Signals(number).name)


def main() -> int:
    if os.geteuid() != 0:
        print("cannot run the demo as an ordinary user: it boots a node in namespaces; run it as root", file=sys.stderr)
        return 1
    for number in _SIGNALS:
        signal.signal(number, _interrupted)
    say = Narrator()
    folder = Path(tempfile.mkdtemp(prefix="mcdaemon-demo-", dir="/var/tmp"))
    tempfile.tempdir = str(folder)  # for everything that the stand keeps for a moment
    try:
        return _play(say, folder)
    except KeyboardInterrupt:
        print("\ninterrupted; everything that was started is stopped", file=sys.stderr)
        return 130
    except (AssertionError, MachineError, subprocess.SubprocessError, RuntimeError, OSError) as error:
        print(f"\nThe demo failed: {error}", file=sys.stderr)
        return 1
    finally:
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)  # cleaning up takes a second; it is not interrupted again
        shutil.rmtree(folder, ignore_errors=True)
        if folder.exists():
            print(f"cannot remove all of {folder}: see `lsattr -R {folder}`", file=sys.stderr)


def _play(say: Narrator, folder: Path) -> int:
    print(
        f"The stand: libostree, skopeo, podman, docker-registry, dbus-daemon are real; PID 1 and rpm-ostreed are\n"
        f"stand-ins over them (tests/stand). Everything is in {folder} and goes away with this program."
    )
    outcomes = []
    with Registry(folder / "registry") as registry:
        stage = Stage(folder, registry, say)
        say.chapter("From one MachineConfig to the next")
        one_config_to_the_next(stage)
        for number, (title, story) in enumerate(STORIES, 1):
            say.chapter(f"Incident {number}: {title}")
            outcomes.append(story(stage))
    print(f"\n{table(outcomes)}\n\nAll four incidents simply work.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
