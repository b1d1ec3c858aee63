"""Starts the stand-in: ``python3 -m tests.stand.rpmostreed [--profile AC]``."""

from __future__ import annotations

import argparse
import signal
import sys
from typing import Optional

from tests.stand.introspection import Gio, GLib
from tests.stand.rpmostreed import DEFAULT_PROFILE, interface, profiles
from tests.stand.rpmostreed.daemon import Daemon
from tests.stand.rpmostreed.errors import OperationFailed
from tests.stand.rpmostreed.sysroot import enter_mount_namespace
from tests.stand.rpmostreed.transaction import journal


def main(arguments: Optional[list[str]] = None) -> int:
    """Runs the daemon until it is idle for long enough or told to stop. Its exit status."""
    parser = argparse.ArgumentParser(description="Stand-in for rpm-ostreed on the system bus.")
    parser.add_argument(
        "--profile",
        default=DEFAULT_PROFILE,
        type=profiles.parse,
        help=f"letters of {profiles.LETTERS}, see profiles.py (default {DEFAULT_PROFILE})",
    )
    options = parser.parse_args(arguments)
    loop = GLib.MainLoop()
    try:
        enter_mount_namespace()
        bus = Gio.bus_get_sync(Gio.BusType.SYSTEM, None)
        daemon = Daemon(bus, options.profile, loop.quit)
        daemon.start()
    except (OSError, OperationFailed) as error:
        return _refuse(str(error))
    except GLib.Error as error:
        return _refuse(f"Error setting up sysroot: {error.message}")
    lost: list[str] = []

    def on_lost(_bus: object, name: str) -> None:
        lost.append(name)
        loop.quit()

    Gio.bus_own_name_on_connection(bus, interface.BUS_NAME, Gio.BusNameOwnerFlags.NONE, None, on_lost)
    for number in (signal.SIGTERM, signal.SIGINT):
        GLib.unix_signal_add(GLib.PRIORITY_DEFAULT, number, loop.quit)
    loop.run()
    return _refuse(f"cannot own {lost[0]}") if lost else 0


def _refuse(text: str) -> int:
    journal(f"error: Couldn't start daemon: {text}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
