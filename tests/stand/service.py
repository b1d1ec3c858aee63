"""One service: what systemd.service(5) says about its life, as far as the stand's services need it.

Types simple, exec, oneshot, notify and dbus; ExecStartPre/Start/StartPost/Reload/Stop/StopPost; Restart with a start
limit; watchdog; RemainAfterExit. Not here: forking and idle, sockets, control groups, sandboxing (PrivateMounts is).
Times are in seconds.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import time
import uuid
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable, Optional

from tests.stand.notifysocket import NotifySocket
from tests.stand.process import Processes, kill, members
from tests.stand.servicesettings import Settings, conditions_hold
from tests.stand.unitfile import Command, expand_specifiers, split_words

CLEAN_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGPIPE)
EXIT_EXEC, EXIT_USER = 203, 217  # systemd.exec(5), "Process Exit Codes"


class ServiceFailed(Exception):
    """A start that did not succeed; `result` is the value of the Result property."""

    def __init__(self, result: str) -> None:
        super().__init__(result)
        self.result = result


@dataclass
class Surroundings:
    """What a service needs from PID 1."""

    processes: Processes
    environment: Mapping[str, str]
    output: Callable[[str], int]
    changed: Callable[[str], None]
    restart: Callable[[str], None]
    wait_owner: Callable[[str], Awaitable[None]]


@dataclass
class Status:
    """The facts behind the D-Bus properties of a service."""

    active: str = "inactive"
    sub: str = "dead"
    result: str = "success"
    main_pid: int = 0
    exec_pid: int = 0
    exec_code: int = 0
    exec_status: int = 0
    restarts: int = 0
    text: str = ""
    watchdog_pings: int = 0
    condition: bool = True
    invocation: str = ""
    entered: dict[str, float] = field(default_factory=dict)


class Service:
    """The life of one service. `start`, `stop` and `reload` are called one at a time, as jobs."""

    def __init__(self, name: str, settings: Settings, surroundings: Surroundings) -> None:
        self.name = name
        self.settings = settings
        self.status = Status()
        self._around = surroundings
        self._main: Optional[subprocess.Popen[bytes]] = None
        self._monitor: Optional[asyncio.Task[None]] = None
        self._later: Optional[asyncio.TimerHandle] = None
        self._watchdog: Optional[asyncio.TimerHandle] = None
        self._notify: Optional[NotifySocket] = None
        self._ready = asyncio.Event()
        self._starts: list[float] = []
        self._verdict = ""
        self._forget_restarts = False

    # -- jobs ---------------------------------------------------------------------------------------------------------

    async def start(self) -> bool:
        """Start it and wait until it counts as started; False when it failed, with `status.result` saying how."""
        if self.status.active in ("active", "reloading"):
            return True
        self._cancel_restart()
        await self._end_monitor()
        self.status.condition = conditions_hold(self.settings.unit, self.settings.specifiers)
        if not self.status.condition:
            self.log(f"{self.name} was skipped because of an unmet condition check.")
            self._enter("inactive", "dead")
            return True
        try:
            self._count_start()
            await asyncio.wait_for(self._start(), _timeout(self.settings.timeout_start))
        except asyncio.TimeoutError:
            self.log("start operation timed out. Terminating.")
            await self._give_up("timeout")
            return False
        except ServiceFailed as failure:
            await self._give_up(failure.result)
            return False
        self.log(f"Started {self.name}.")
        return True

    async def stop(self) -> None:
        """Stop it: ExecStop, SIGTERM, SIGKILL, ExecStopPost. The state afterwards is inactive or failed."""
        waiting = self.status.sub == "auto-restart"
        self._cancel_restart()
        if waiting:
            self._enter("inactive", "dead")
        if self.status.active in ("inactive", "failed"):
            return
        self._enter("deactivating", "stop")
        await self._end_monitor()
        result = await self._run_all("ExecStop")
        main_result = await self._terminate()
        await self._finish(result or main_result or "success", restart=False)

    async def reload(self) -> bool:
        """Run ExecReload."""
        self._enter("reloading", "reload")
        result = await self._run_all("ExecReload")
        self._enter("active", "running" if self._main else "exited")
        return not result

    def become_active(self) -> None:
        """Enter "active" without running anything: what the start of a oneshot without ExecStart= comes to."""
        self.status = Status(invocation=uuid.uuid4().hex, entered=self.status.entered)
        self._enter("active", "exited")

    def reset_failed(self) -> None:
        """Forget a failure and the count of starts."""
        self._starts.clear()
        if self.status.active == "failed":
            self.status.result = "success"
            self._enter("inactive", "dead")

    def can_reload(self) -> bool:
        """True when there is an ExecReload."""
        return bool(self.settings.commands["ExecReload"])

    # -- starting -----------------------------------------------------------------------------------------------------

    def _count_start(self) -> None:
        burst, interval = self.settings.limit
        now = time.monotonic()
        self._starts = [moment for moment in self._starts if now - moment < interval]
        if len(self._starts) >= burst > 0:
            self.log("Start request repeated too quickly.")
            raise ServiceFailed("start-limit-hit")
        self._starts.append(now)

    async def _start(self) -> None:
        restarts = 0 if self._forget_restarts else self.status.restarts
        self._forget_restarts = False
        self.status = Status(restarts=restarts, invocation=uuid.uuid4().hex, entered=self.status.entered)
        self._ready, self._verdict = asyncio.Event(), ""
        self._enter("activating", "start-pre")
        self._make_directories()
        self._raise_bad(await self._run_all("ExecStartPre"))
        self._enter("activating", "start")
        if self.settings.type == "oneshot":
            await self._run_oneshot()
        else:
            await self._start_main()
        self._raise_bad(await self._run_all("ExecStartPost"))
        if self._main is not None:
            self._enter("active", "running")
            self._arm_watchdog()
            self._monitor = asyncio.get_running_loop().create_task(self._watch_main(self._main))
        elif self.settings.remain:
            self._enter("active", "exited")
        else:
            await self._finish("success", restart=True)

    def _raise_bad(self, result: str) -> None:
        if result:
            raise ServiceFailed(result)

    async def _run_oneshot(self) -> None:
        for command in self.settings.commands["ExecStart"]:
            process = self._main = self._spawn(command, self._environment())
            self._note_main(process)
            result = self._note_exit(await self._around.processes.exited(process))
            self._main = None
            if result and not command.ignore_failure:
                raise ServiceFailed(result)

    async def _start_main(self) -> None:
        command = self.settings.commands["ExecStart"][0]
        if self.settings.type == "notify" or self.settings.unit.last("Service", "NotifyAccess", "none") != "none":
            self._notify = NotifySocket(self.name, self._on_notify)
        self._main = process = self._spawn(command, self._environment())
        self._note_main(process)
        if self.settings.type == "notify":
            await self._await_first(process, self._ready.wait())
        elif self.settings.type == "dbus":
            await self._await_first(process, self._around.wait_owner(self.settings.bus_name))

    async def _await_first(self, process: subprocess.Popen[bytes], event: Awaitable[object]) -> None:
        """Wait for a service to be up; it fails when its main process ends before."""
        end = asyncio.ensure_future(self._around.processes.exited(process))
        up = asyncio.ensure_future(event)
        try:
            await asyncio.wait({end, up}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (end, up):
                task.cancel()
        if end.done() and not end.cancelled() and not up.done():
            self._main = None
            raise ServiceFailed(self._note_exit(end.result()) or "protocol")

    # -- running ------------------------------------------------------------------------------------------------------

    async def _watch_main(self, process: subprocess.Popen[bytes]) -> None:
        """Wait for the main process's end and do what follows; ends early when a stop job takes over."""
        result = self._note_exit(await self._around.processes.exited(process))
        self._main = None
        self._disarm_watchdog()
        result = self._verdict or result
        if not result and self.settings.remain:
            self._enter("active", "exited")
            return
        self._enter("deactivating", "stop")
        stop_result = await self._run_all("ExecStop")
        await self._terminate()
        await self._finish(result or stop_result or "success", restart=True)

    async def _end_monitor(self) -> None:
        task, self._monitor = self._monitor, None
        if task is not None and not task.done():
            task.cancel()
            await asyncio.wait({task})

    async def _give_up(self, result: str) -> None:
        """What follows a start that failed."""
        if self.status.active not in ("inactive", "failed"):
            self._enter("deactivating", "stop-sigterm")
            await self._terminate()
        await self._finish(result, restart=result != "start-limit-hit")

    async def _terminate(self) -> str:
        """End all processes of the service; the answer is what the main process's end means, "" for a clean one."""
        main, self._main = self._main, None
        self._disarm_watchdog()
        alive = members(self.status.invocation, main.pid if main else None) if self.status.invocation else set()
        mode = self.settings.unit.last("Service", "KillMode", "control-group")
        if mode in ("process", "mixed", "none"):
            alive &= {main.pid} if main and mode != "none" else set()
        number = _signal_number(self.settings.unit.last("Service", "KillSignal", "SIGTERM"))
        kill(alive, number)
        try:
            await asyncio.wait_for(self._around.processes.all_gone(alive), _timeout(self.settings.timeout_stop))
        except asyncio.TimeoutError:
            self.log("State 'stop-sigterm' timed out. Killing.")
            self._verdict = self._verdict or "timeout"
        if mode not in ("process", "none"):
            rest = members(self.status.invocation, main.pid if main else None) if self.status.invocation else set()
            kill(rest, signal.SIGKILL)
            await self._around.processes.all_gone(rest)
        result = self._note_exit(await self._around.processes.exited(main)) if main else ""
        return self._verdict or result

    async def _finish(self, result: str, restart: bool) -> None:
        await self._run_all("ExecStopPost")
        self._close_notify()
        self._remove_runtime_directories()
        self.status.result = result
        if result != "success":
            self.log(f"Failed with result '{result}'.")
        if restart and self._restarts(result):
            self.status.restarts += 1
            self._enter("activating", "auto-restart")
            loop = asyncio.get_running_loop()
            self._later = loop.call_later(self.settings.restart_delay, self._around.restart, self.name)
        else:
            self._forget_restarts = True  # They stay visible until the next start.
            self._enter("failed" if result != "success" else "inactive", "failed" if result != "success" else "dead")

    def _restarts(self, result: str) -> bool:
        """The table of Restart= in systemd.service(5)."""
        policy = self.settings.restart
        return {
            "always": True, "on-success": result == "success", "on-failure": result != "success",
            "on-abnormal": result in ("signal", "core-dump", "timeout", "watchdog"),
            "on-abort": result in ("signal", "core-dump"), "on-watchdog": result == "watchdog",
        }.get(policy, False)  # fmt: skip

    def _cancel_restart(self) -> None:
        if self._later is not None:
            self._later.cancel()
            self._later = None

    # -- processes ----------------------------------------------------------------------------------------------------

    async def _run_all(self, key: str) -> str:
        """Run the commands of a setting one after the other; the answer is "" or the result of the one that failed."""
        for command in self.settings.commands[key]:
            timeout = self.settings.timeout_start if key.startswith("ExecStart") else self.settings.timeout_stop
            try:
                process = self._spawn(command, self._environment())
                status = await asyncio.wait_for(self._around.processes.exited(process), _timeout(timeout))
                result = self._exit_result(status)
            except asyncio.TimeoutError:
                kill([process.pid], signal.SIGKILL)
                await self._around.processes.exited(process)
                result = "timeout"
            except ServiceFailed as failure:
                result = failure.result
            if result and not command.ignore_failure:
                self.log(f"Control process {command.words[0]} of {key} failed: {result}.")
                return result
        return ""

    def _spawn(self, command: Command, environment: dict[str, str]) -> subprocess.Popen[bytes]:
        unit = self.settings.unit
        argv = command.argv(environment)
        if unit.flag("Service", "PrivateMounts"):
            argv = ["unshare", "--mount", "--propagation", "slave", "--", *argv]
        cwd = expand_specifiers(unit.last("Service", "WorkingDirectory", "/"), self.settings.specifiers)
        output = self._around.output(self.name)
        try:
            return self._around.processes.spawn(
                argv, environment, output, "/root" if cwd == "~" else cwd.lstrip("-"),
                unit.last("Service", "User"), int(unit.last("Service", "UMask", "0022"), 8),
            )  # fmt: skip
        except (OSError, KeyError) as error:
            self.log(f"Failed to execute {argv[0]}: {error}")
            self.status.exec_code, self.status.exec_status = 1, EXIT_EXEC if isinstance(error, OSError) else EXIT_USER
            raise ServiceFailed("exit-code") from error
        finally:
            os.close(output)

    def _environment(self) -> dict[str, str]:
        """The environment of a command. Raises ServiceFailed when a mandatory EnvironmentFile= is missing."""
        unit, table = self.settings.unit, self.settings.specifiers
        environment = {**self._around.environment, "INVOCATION_ID": self.status.invocation}
        for word in unit.words("Service", "Environment"):
            name, _, value = expand_specifiers(word, table).partition("=")
            environment[name] = value
        for value in unit.all("Service", "EnvironmentFile"):
            environment.update(self._environment_file(expand_specifiers(value, table)))
        if self._main is not None:
            environment["MAINPID"] = str(self._main.pid)
        if self._notify is not None:
            environment["NOTIFY_SOCKET"] = self._notify.path
        if self.settings.watchdog:
            environment["WATCHDOG_USEC"] = str(int(self.settings.watchdog * 1e6))
        for key, base in (("RuntimeDirectory", "/run"), ("StateDirectory", "/var/lib")):
            names = [expand_specifiers(word, table) for word in unit.words("Service", key)]
            if names:
                environment[{"RuntimeDirectory": "RUNTIME_DIRECTORY"}.get(key, "STATE_DIRECTORY")] = ":".join(
                    f"{base}/{name}" for name in names
                )
        return environment

    def _environment_file(self, value: str) -> dict[str, str]:
        path = Path(value.lstrip("-"))
        try:
            lines = path.read_text().splitlines()
        except OSError as error:
            if value.startswith("-"):
                return {}
            self.log(f"Failed to load environment file {path}: {error.strerror}")
            raise ServiceFailed("resources") from error
        pairs = [line.partition("=") for line in lines if "=" in line and not line.lstrip().startswith(("#", ";"))]
        return {name.strip(): " ".join(split_words(text)) for name, _, text in pairs}

    def _make_directories(self) -> None:
        unit = self.settings.unit
        for key, base in (("RuntimeDirectory", "/run"), ("StateDirectory", "/var/lib")):
            for word in unit.words("Service", key):
                place = Path(base, expand_specifiers(word, self.settings.specifiers))
                place.mkdir(parents=True, exist_ok=True)
                place.chmod(int(unit.last("Service", f"{key}Mode", "0755"), 8))

    def _remove_runtime_directories(self) -> None:
        unit = self.settings.unit
        if unit.last("Service", "RuntimeDirectoryPreserve", "no") == "no":
            for word in unit.words("Service", "RuntimeDirectory"):
                shutil.rmtree(Path("/run", expand_specifiers(word, self.settings.specifiers)), ignore_errors=True)

    def _note_main(self, process: subprocess.Popen[bytes]) -> None:
        self.status.main_pid = self.status.exec_pid = process.pid
        self._around.changed(self.name)

    def _note_exit(self, status: int) -> str:
        self.status.main_pid = 0
        # CLD_EXITED and CLD_KILLED of waitid(2), as ExecMainCode has them.
        self.status.exec_code, self.status.exec_status = (1, status) if status >= 0 else (2, -status)
        result = self._exit_result(status)
        if result:
            how = f"code=exited, status={status}" if status >= 0 else f"code=killed, status={-status}"
            self.log(f"Main process exited, {how}")
        return result

    def _exit_result(self, status: int) -> str:
        """ "" for an exit that counts as clean (systemd.service(5), SuccessExitStatus=)."""
        extra = self.settings.unit.words("Service", "SuccessExitStatus")
        if status == 0 or str(status) in extra:
            return ""
        if status > 0:
            return "exit-code"
        if self.settings.type != "oneshot" and -status in CLEAN_SIGNALS:
            return ""
        return "" if signal.Signals(-status).name in extra else "signal"

    # -- notifications ------------------------------------------------------------------------------------------------

    def _on_notify(self, fields: Mapping[str, str]) -> None:
        if "STATUS" in fields:
            self.status.text = fields["STATUS"]
        if fields.get("MAINPID", "").isdigit():
            self.status.main_pid = int(fields["MAINPID"])
        if fields.get("READY") == "1":
            self._ready.set()
        if fields.get("WATCHDOG") == "1":
            self.status.watchdog_pings += 1
            if self._watchdog is not None:
                self._arm_watchdog()
        self._around.changed(self.name)

    def _arm_watchdog(self) -> None:
        self._disarm_watchdog()
        if self.settings.watchdog:
            loop = asyncio.get_running_loop()
            self._watchdog = loop.call_later(self.settings.watchdog, self._watchdog_missed)

    def _disarm_watchdog(self) -> None:
        if self._watchdog is not None:
            self._watchdog.cancel()
            self._watchdog = None

    def _watchdog_missed(self) -> None:
        self.log(f"Watchdog timeout (limit {self.settings.watchdog:g}s)!")
        self._verdict = "watchdog"
        if self._main is not None:
            kill([self._main.pid], signal.SIGABRT)

    def _close_notify(self) -> None:
        if self._notify is not None:
            self._notify.close()
            self._notify = None

    # -- state --------------------------------------------------------------------------------------------------------

    def _enter(self, active: str, sub: str) -> None:
        self.status.active, self.status.sub = active, sub
        self.status.entered[active] = time.time()
        self._around.changed(self.name)

    def log(self, text: str) -> None:
        """Add a line of PID 1's to the unit's log."""
        output = self._around.output(self.name)
        os.write(output, f"systemd[1]: {text}\n".encode())
        os.close(output)


def _timeout(seconds: float) -> Optional[float]:
    return None if seconds == float("inf") else seconds


def _signal_number(text: str) -> int:
    return int(text) if text.isdigit() else int(signal.Signals["SIG" + text.replace("SIG", "", 1)])
