"""Another client of rpm-ostree at work on a node, as a person at its shell is: unlocked, and asking nobody.

    python3 -m tests.stand.rival kargs by-hand | cleanup | rollback | install NAME | rebase REFERENCE | orphan FIFO

`orphan` makes a transaction and never starts it, until the FIFO's writer closes it (TXN-21). Exit status 1 when
rpm-ostree refuses, with its words.
"""

from __future__ import annotations

import sys
from typing import Any

from gi.repository import Gio, GLib

from tests.stand import naive

NO_OPTIONS: dict[str, Any] = {}


def kargs(argument: str) -> tuple[bool, str]:
    """`rpm-ostree kargs --append=ARGUMENT`."""
    bus, booted = naive.connect()
    return naive.call(bus, booted, "KernelArgs", _kargs(bus, booted, argument))


def _kargs(bus: Any, booted: str, argument: str) -> Any:
    asked = GLib.Variant("(sb)", ("", True))
    interface = f"{naive.NAME}.OS"
    reply = bus.call_sync(
        naive.NAME, booted, interface, "GetDeploymentBootConfig", asked, None, 0, naive.TIMEOUT, None
    )
    existing = reply.unpack()[0]["options"]
    return GLib.Variant("(sasasasa{sv})", (existing, [argument], [], [], NO_OPTIONS))


def cleanup() -> tuple[bool, str]:
    """`rpm-ostree cleanup -p`."""
    return naive.call(*naive.connect(), "Cleanup", GLib.Variant("(as)", (["pending-deploy"],)))


def rollback() -> tuple[bool, str]:
    """`rpm-ostree rollback`."""
    return naive.call(*naive.connect(), "Rollback", GLib.Variant("(a{sv})", (NO_OPTIONS,)))


def install(name: str) -> tuple[bool, str]:
    """`rpm-ostree install NAME`."""
    return naive.transact({"install-packages": [name]}, {"no-pull-base": True})


def rebase(reference: str) -> tuple[bool, str]:
    """`rpm-ostree rebase ostree-unverified-registry:REFERENCE`."""
    return naive.transact({"set-refspec": f"ostree-unverified-registry:{reference}"}, {})


def orphan(fifo: str) -> tuple[bool, str]:
    """A client that hangs between the reply and `Start`."""
    bus, booted = naive.connect()
    arguments = _kargs(bus, booted, "orphaned")
    interface = f"{naive.NAME}.OS"
    bus.call_sync(naive.NAME, booted, interface, "KernelArgs", arguments, None, 0, naive.TIMEOUT, None)
    print("made", flush=True)
    with open(fifo, "rb") as stream:
        stream.read()
    return True, ""


DEEDS = {"kargs": kargs, "cleanup": cleanup, "rollback": rollback, "install": install, "rebase": rebase,
         "orphan": orphan}  # fmt: skip


def main() -> int:
    try:
        success, text = DEEDS[sys.argv[1]](*sys.argv[2:])  # type: ignore[operator]  # the deeds differ in their arguments
    except GLib.Error as error:
        success, text = False, Gio.DBusError.get_remote_error(error) or error.message
    if not success:
        print(f"error: {text}", file=sys.stderr)
    return 0 if success else 1


if __name__ == "__main__":
    sys.exit(main())
