"""A real dbus-daemon of a test's own, and on it a small systemd and logind in a process that can be killed.

What they answer is read from a file at every call, what they were asked is written to another: so a test can change
the node's mind between two calls, and nothing of the service runs in the process under test.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Optional

from tests.stand.busobject import BusError, BusObject, Call, Connection, Variant

SYSTEMD, MANAGER = "org.freedesktop.systemd1", "org.freedesktop.systemd1.Manager"
LOGIND = "org.freedesktop.login1"
ROOT = Path(__file__).resolve().parents[2]
_TIMEOUT = 10.0

CONFIGURATION = """<!DOCTYPE busconfig PUBLIC "-//freedesktop//DTD D-Bus Bus Configuration 1.0//EN"
 "http://www.freedesktop.org/standards/dbus/1.0/busconfig.dtd">
<busconfig><listen>unix:path={socket}</listen><auth>EXTERNAL</auth>
  <policy context="default"><allow user="*"/><allow own="*"/><allow send_destination="*"/><allow receive_sender="*"/>
  </policy></busconfig>"""

_JOB = """<method name="{verb}Unit"><arg name="name" type="s" direction="in"/><arg name="mode" type="s" direction="in"/>
  <arg name="job" type="o" direction="out"/></method>"""
MANAGER_XML = f"""<node><interface name="{MANAGER}"><method name="Subscribe"/><method name="Reload"/>
  {"".join(_JOB.format(verb=verb) for verb in ("Start", "Stop", "Restart", "Reload"))}
  <method name="LoadUnit"><arg name="name" type="s" direction="in"/><arg name="unit" type="o" direction="out"/></method>
  <signal name="JobRemoved"><arg name="id" type="u"/><arg name="job" type="o"/><arg name="unit" type="s"/>
    <arg name="result" type="s"/></signal></interface></node>"""
UNIT_XML = f"""<node><interface name="{SYSTEMD}.Unit">
  <property name="ActiveState" type="s" access="read"/></interface></node>"""
LOGIND_XML = f"""<node><interface name="{LOGIND}.Manager">
  <method name="Reboot"><arg name="interactive" type="b" direction="in"/></method>
  <method name="ListInhibitors"><arg name="inhibitors" type="a(ssssuu)" direction="out"/></method></interface></node>"""


class PrivateBus:
    """The bus and, from `serve` on, the services. `address` is what DBUS_SYSTEM_BUS_ADDRESS has to be."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.address = f"unix:path={folder / 'bus'}"
        configuration = folder / "bus.conf"
        configuration.write_text(CONFIGURATION.format(socket=folder / "bus"))
        self._daemon = _started(["dbus-daemon", f"--config-file={configuration}", "--nofork", "--nopidfile",
                                 "--print-address=1"])  # fmt: skip
        self._service: Optional[subprocess.Popen[bytes]] = None
        self.behave()

    def __enter__(self) -> PrivateBus:
        return self

    def __exit__(
        self, kind: Optional[type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        self.kill_service()
        self.kill_bus()

    def behave(
        self,
        units: Optional[Mapping[str, Mapping[str, Any]]] = None,
        inhibitors: Optional[list[tuple[str, str, str, str]]] = None,
        errors: Optional[Mapping[str, tuple[str, str]]] = None,
        hang: tuple[str, ...] = (),
        die: tuple[str, ...] = (),
    ) -> None:
        """What is answered from now on.

        A unit: `result` of its jobs, `state` after them, `when` the end is told ("before" the answer, "after",
        "never"). `errors` by method (name, text); a method that hangs, or in which the service dies.
        """
        text = json.dumps({"units": units or {}, "inhibitors": inhibitors or [], "errors": errors or {}, "hang": hang,
                           "die": die})  # fmt: skip
        (self.folder / "behaviour.new").write_text(text)
        os.rename(self.folder / "behaviour.new", self.folder / "behaviour")

    def serve(self) -> None:
        """Start the services; they can be called on return."""
        self._service = _started([sys.executable, "-m", "tests.component.privatebus", self.address, str(self.folder)])

    def calls(self) -> list[str]:
        """What the services were asked, one "Method argument" each."""
        path = self.folder / "calls"
        return path.read_text().splitlines() if path.exists() else []

    def forget_calls(self) -> None:
        (self.folder / "calls").unlink(missing_ok=True)

    def kill_service(self) -> None:
        _end(self._service)
        self._service = None

    def kill_bus(self) -> None:
        _end(self._daemon)


def _started(argv: list[str]) -> subprocess.Popen[bytes]:
    """A process that has said its first line."""
    process = subprocess.Popen(argv, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], _TIMEOUT)
    if not ready or not process.stdout.readline():
        process.kill()
        process.wait()
        raise RuntimeError(f"{argv[0]} did not start")
    return process


def _end(process: Optional[subprocess.Popen[bytes]]) -> None:
    if process is None:
        return
    if process.poll() is None:
        process.send_signal(signal.SIGKILL)
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


# -- the process of the services --------------------------------------------------------------------------------------


class _Services:
    def __init__(self, address: str, folder: Path) -> None:
        self._folder = folder
        self._jobs = 0
        self._exported: dict[str, str] = {}
        self._after: dict[str, str] = {}
        self._connection = Connection(address, asyncio.get_running_loop())
        self._connection.export("/org/freedesktop/systemd1", BusObject(MANAGER_XML, self._manager, lambda _name: {}))
        self._connection.export("/org/freedesktop/login1", BusObject(LOGIND_XML, self._login, lambda _name: {}))
        self._connection.own(SYSTEMD)
        self._connection.own(LOGIND)

    @property
    def _behaviour(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self._folder / "behaviour").read_text())
        return found

    async def _begin(self, call: Call) -> dict[str, Any]:
        behaviour = self._behaviour
        with open(self._folder / "calls", "a") as stream:
            stream.write(" ".join([call.method, *map(str, call.arguments[:1])]) + "\n")
        if call.method in behaviour["die"]:
            os.kill(os.getpid(), signal.SIGKILL)
        if call.method in behaviour["hang"]:
            await asyncio.sleep(3600)
        if call.method in behaviour["errors"]:
            raise BusError(*behaviour["errors"][call.method])
        return behaviour

    async def _login(self, call: Call) -> object:
        behaviour = await self._begin(call)
        if call.method == "ListInhibitors":
            return [(*inhibitor, 0, 1) for inhibitor in behaviour["inhibitors"]]
        return None

    async def _manager(self, call: Call) -> object:
        behaviour = await self._begin(call)
        if call.method in ("Subscribe", "Reload"):
            return None
        name = call.arguments[0]
        unit = behaviour["units"].get(name)
        if call.method == "LoadUnit":
            return self._unit_path(name)
        if unit is None:
            raise BusError("org.freedesktop.systemd1.NoSuchUnit", f"Unit {name} not found.")
        self._after[name] = unit.get("state", "active")
        self._jobs += 1
        job = f"/org/freedesktop/systemd1/job/{self._jobs}"
        ended = ("/org/freedesktop/systemd1", MANAGER, "JobRemoved", "(uoss)", self._jobs, job, name,
                 unit.get("result", "done"))  # fmt: skip
        # Somebody else's job ends, too.
        other = (*ended[:4], 9999, "/org/freedesktop/systemd1/job/9999", name, "failed")
        self._connection.emit(*other)
        when = unit.get("when", "after")
        if when == "before":
            self._connection.emit(*ended)
        elif when == "after":
            asyncio.get_running_loop().call_later(0.05, self._connection.emit, *ended)
        return job

    def _unit_path(self, name: str) -> str:
        path = self._exported.get(name)
        if path is None:
            path = f"/org/freedesktop/systemd1/unit/u{len(self._exported)}"
            self._exported[name] = path

            def properties(_interface: str) -> Mapping[str, Any]:
                state = self._after.get(name) or self._behaviour["units"].get(name, {}).get("state", "inactive")
                return {"ActiveState": Variant("s", state)}

            self._connection.export(path, BusObject(UNIT_XML, self._manager, properties))
        return path


async def _serve(address: str, folder: Path) -> None:
    _services = _Services(address, folder)
    print("ready", flush=True)
    await asyncio.sleep(3600)


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1], Path(sys.argv[2])))
