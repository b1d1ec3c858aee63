"""rpm-ostree over D-Bus: the transactions of an update and the deployments they leave behind.

The rules of the reference (rpm-ostree.md 2 and 7.1) in code: the service is started and the client registered before
anything else; a transaction's socket is opened through Gio, which pydbus cannot; signals are subscribed to before
`Start`; the peer is closed after `Finished`; and whether something worked is read from the deployments afterwards.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Callable, Optional

from gi.repository import Gio, GLib

from mcdaemon.errors import Broken, Failure, Transient
from mcdaemon.host import bus as system_bus
from mcdaemon.host import process
from mcdaemon.host.bus import Bus, Systemd
from mcdaemon.host.finished import UNIT, verdict

NAME = "org.projectatomic.rpmostree1"
_SYSROOT = "org.projectatomic.rpmostree1.Sysroot"
_OS = "org.projectatomic.rpmostree1.OS"
_TRANSACTION = "org.projectatomic.rpmostree1.Transaction"
_SYSROOT_PATH = "/org/projectatomic/rpmostree1/Sysroot"

CLIENT_ID = "mcdaemon"
START_TIMEOUT = 300.0
"""Seconds for the service to start: its own TimeoutStartSec (rpm-ostree.md 7, row 7)."""
REGISTER_ATTEMPTS = 5
CANCEL_GRACE = 60.0
"""Seconds that a cancelled transaction gets to end (row 5); less where silence counts as a hang much sooner."""
HUNG = "hung"
"""Code of a transaction that neither worked nor could be cancelled."""


@dataclass(frozen=True)
class Deployment:
    """One deployment as rpm-ostree tells it.

    :ivar name: `<checksum>.<serial>`, the directory below ostree/deploy/<osname>/deploy.
    :ivar image: the origin's container reference, "" for an ostree ref.
    :ivar digest: digest of the base image's manifest; what the origin is pinned to (for several platforms that is the
        index) where rpm-ostree cannot tell, "" when nobody can (row 48).
    :ivar version: of the base, "" when it has none; `timestamp` is when it was made, in seconds since the epoch, or 0.
    :ivar requested: packages that the origin requests.
    :ivar removals: base packages that the origin removes.
    """

    name: str
    osname: str
    booted: bool
    staged: bool
    pinned: bool
    image: str
    digest: str
    version: str
    requested: tuple[str, ...]
    removals: tuple[str, ...]
    timestamp: int = 0

    @classmethod
    def from_dict(cls, entry: Mapping[str, Any]) -> Deployment:
        image = entry.get("container-image-reference", "")
        # Where rpm-ostree cannot read the image's metadata any more, the origin still says what was pulled.
        pinned = image.rpartition("@")[2] if "@sha256:" in image else ""
        return cls(
            name=f"{entry['checksum']}.{entry['serial']}",
            osname=entry["osname"],
            booted=entry["booted"],
            staged=entry["staged"],
            pinned=entry.get("pinned", False),
            image=image,
            digest=entry.get("container-image-reference-digest", "") or pinned,
            version=entry.get("base-version", "") or entry.get("version", ""),
            requested=tuple(entry.get("requested-packages", ())),
            removals=tuple(entry.get("requested-base-removals", ())),
            timestamp=int(entry.get("base-timestamp", 0) or entry.get("timestamp", 0)),
        )


@dataclass(frozen=True)
class Active:
    """A transaction that runs right now: its method, the bus name of its caller, its title and socket."""

    method: str
    sender: str
    title: str
    address: str


def _b(value: bool) -> GLib.Variant:
    return GLib.Variant("b", value)


class RpmOstree:
    """A client of rpm-ostreed. Not thread safe: one thread owns the bus, the context and the peer."""

    def __init__(
        self,
        bus: Bus,
        systemd: Systemd,
        call_timeout: float = 300.0,
        idle_timeout: float = 1800.0,
        report: Callable[[str], None] = lambda line: None,
    ) -> None:
        """`call_timeout`: seconds for a method; `idle_timeout`: seconds without any sign of life from a transaction."""
        self._bus = bus
        self._systemd = systemd
        self._call_timeout = call_timeout
        self._idle_timeout = idle_timeout
        self._report = report
        self._registered = ""

    # -- the service ------------------------------------------------------------------------------------------------

    def connect(self) -> None:
        """Start the service and register, so that it does not exit while idle. Idempotent.

        Activation by the bus gives up after 25 s, the unit's own limit is 5 min: the unit is started first (row 7).
        A service on its way out answers NoReply: ask again (rpm-ostree.md 1.8).
        """
        owner = self._owner()
        if owner and owner == self._registered:
            return
        if not owner:
            self._start_service()
        for attempt in range(1, REGISTER_ATTEMPTS + 1):
            try:
                self._sysroot("RegisterClient", {"id": GLib.Variant("s", CLIENT_ID)}, doing="register with rpm-ostreed")
                break
            except Transient:
                if attempt == REGISTER_ATTEMPTS:
                    raise
        self._registered = self._owner()

    def _start_service(self) -> None:
        """A unit that was started too often stays down until its failure is forgotten (row 60)."""
        result = self._systemd.run_job("Start", UNIT, START_TIMEOUT)
        if result != "done" and self._systemd.forget_start_limit(UNIT):
            result = self._systemd.run_job("Start", UNIT, START_TIMEOUT)
        if result != "done":
            raise Transient(f"cannot start {UNIT}: the job ended with {result!r}", f"see `journalctl -u {UNIT}`")

    def disconnect(self) -> None:
        """Let the service go idle: a registered client pins its memory for ever (rpm-ostree.md 1.8)."""
        if self._registered and self._owner() == self._registered:
            self._sysroot("UnregisterClient", {}, doing="unregister from rpm-ostreed")
        self._registered = ""

    def _owner(self) -> str:
        proxy = self._bus.proxy("org.freedesktop.DBus", "/org/freedesktop/DBus", "ask the bus")
        if not self._bus.call(proxy, "org.freedesktop.DBus", "NameHasOwner", NAME):
            return ""
        try:
            return str(self._bus.call(proxy, "org.freedesktop.DBus", "GetNameOwner", NAME))
        except Failure:  # it left between the two calls
            return ""

    def _sysroot(self, method: str, *arguments: Any, doing: str) -> Any:
        proxy = self._bus.proxy(NAME, _SYSROOT_PATH, doing)
        return self._bus.call(proxy, _SYSROOT, method, *arguments, timeout=self._call_timeout, doing=doing)

    def _os(self, doing: str) -> Any:
        """The proxy of the booted OS; its path is asked for, never built (rpm-ostree.md 1.1)."""
        sysroot = self._bus.proxy(NAME, _SYSROOT_PATH, doing)
        path = self._bus.get(sysroot, _SYSROOT, "Booted")
        if path == "/":
            raise Broken(f"cannot {doing}: this machine is not booted from an ostree deployment")
        return self._bus.proxy(NAME, path, doing)

    # -- facts ------------------------------------------------------------------------------------------------------

    def deployments(self) -> tuple[Deployment, ...]:
        """All deployments of the booted OS, in boot order, a staged one first. Read once per round (row 54)."""
        self.connect()
        self._sysroot("Reload", doing="reload the deployments")
        sysroot = self._bus.proxy(NAME, _SYSROOT_PATH, "read the deployments")
        found = [Deployment.from_dict(entry) for entry in self._bus.get(sysroot, _SYSROOT, "Deployments")]
        booted = next((d for d in found if d.booted), None)
        return tuple(d for d in found if booted is None or d.osname == booted.osname)

    def active(self) -> Optional[Active]:
        """The transaction that runs right now, ours or not."""
        self.connect()
        sysroot = self._bus.proxy(NAME, _SYSROOT_PATH, "look for a transaction")
        method, sender, _path = self._bus.get(sysroot, _SYSROOT, "ActiveTransaction")
        address = self._bus.get(sysroot, _SYSROOT, "ActiveTransactionPath")
        if not method or not address:
            return None
        return Active(method, sender, self._title(address), address)

    def boot_options(self) -> str:
        """Kernel arguments of the deployment that the next operation starts from (staged, pending or booted)."""
        self.connect()
        doing = "read the kernel arguments"
        config = self._bus.call(
            self._os(doing), _OS, "GetDeploymentBootConfig", "", True, timeout=self._call_timeout, doing=doing
        )
        return str(config.get("options", ""))

    # -- transactions -----------------------------------------------------------------------------------------------

    def update(self, refspec: str, packages: Mapping[str, Sequence[str]], title: str) -> None:
        """Stage image and packages in one transaction, locked. `refspec` "" leaves the base alone, and unread.

        `packages`: names by modifier (`install-packages`, `override-remove-packages`, ...; rpm-ostree.md 1.11).

        `no-pull-base` and a refspec exclude each other (rpm-ostree.md 1.11); `allow-inactive` and
        `idempotent-layering` because a package may be in the base already (rows 16 to 18).
        """
        modifiers: dict[str, GLib.Variant] = {}
        if refspec:
            modifiers["set-refspec"] = GLib.Variant("s", refspec)
        for modifier, names in packages.items():
            if names:
                modifiers[modifier] = GLib.Variant("as", list(names))
        options = {
            "lock-finalization": _b(True),
            "allow-inactive": _b(True),
            "idempotent-layering": _b(True),
            "initiating-command-line": GLib.Variant("s", title),
        }
        if not refspec:
            options["no-pull-base"] = _b(True)
        self._transact("UpdateDeployment", modifiers, options)

    def rebase(self, refspec: str, title: str) -> None:
        """Stage image and nothing else, locked: another method for what `update` does, whose packages stay as they are.

        rpm-ostree never skips a rebase as "no change" (rpm-ostree.md 1.11), and has not joined it to an `update` (2.3).
        """
        options = {"lock-finalization": _b(True), "initiating-command-line": GLib.Variant("s", title)}
        self._transact("Rebase", options, refspec, [])

    def kernel_args(self, existing: str, final: str, title: str) -> None:
        """Stage the kernel arguments `final`, locked; `existing` is what they were computed from.

        The whole line is sent: adding and deleting single arguments loses order and repeats (rpm-ostree.md 1.13).
        """
        options = {
            "lock-finalization": _b(True),
            "final-kernel-args": GLib.Variant("s", final),
            "initiating-command-line": GLib.Variant("s", title),
        }
        self._transact("KernelArgs", existing, [], [], [], options)

    def cleanup(self, *elements: str) -> None:
        """Drop deployments or caches: "pending-deploy", "rollback-deploy", "base", "repomd"."""
        self._transact("Cleanup", list(elements))

    def roll_back(self) -> None:
        """Make the previous deployment the default of the next boot."""
        self._transact("Rollback", {})

    def attach(self, active: Active) -> None:
        """Wait for a running transaction of ours to end."""
        self._follow(active.address, f"wait for {active.method}", joined=True)

    def _transact(self, method: str, *arguments: Any) -> None:
        """Run one transaction to its end. Raises Held when somebody else drives, Transient when its outcome is
        unknown (the daemon died), Broken with rpm-ostree's own text when it failed."""
        self.connect()
        doing = f"run rpm-ostree's {method}"
        try:
            address = self._bus.call(self._os(doing), _OS, method, *arguments, timeout=self._call_timeout, doing=doing)
        except Transient:
            # The transaction may have been created after we gave up, and would hold the lock for as long as our
            # name lives: let the name go (rpm-ostree.md 2.10).
            self._bus.close()
            self._registered = ""
            raise
        self._follow(address, doing, joined=False)

    def _follow(self, address: str, doing: str, joined: bool) -> None:
        try:
            outcome = _Peer(address, self._idle_timeout, self._report).run(doing, joined)
        except Transient as error:
            if error.code == HUNG:
                # It holds the sysroot's lock until its daemon ends (row 5); as MCO does, and only to our own.
                self._report(f"{error.sentence}: {UNIT} is restarted")
                self._registered = ""
                self._systemd.run_job("Restart", UNIT, START_TIMEOUT)
            raise
        if outcome is None:
            self._registered = ""
            raise Transient(
                f"cannot {doing}: rpm-ostreed went away before it was finished",
                f"see `journalctl -u {UNIT}`; what it left behind is looked at next",
            )
        success, text = outcome
        if not success and not joined:
            raise verdict(text, doing)

    def _title(self, address: str) -> str:
        try:
            peer = _connect(address)
        except GLib.Error:  # it ended meanwhile
            return ""
        try:
            reply = peer.call_sync(
                None,
                "/",
                "org.freedesktop.DBus.Properties",
                "Get",
                GLib.Variant("(ss)", (_TRANSACTION, "Title")),
                GLib.VariantType("(v)"),
                Gio.DBusCallFlags.NONE,
                int(system_bus.CALL_TIMEOUT * 1000),
                None,
            )
            return str(reply.unpack()[0] or "")
        except GLib.Error:
            return ""
        finally:
            if not peer.is_closed():
                peer.close_sync(None)


def _connect(address: str) -> Any:
    """A connection to a transaction's private socket (no message bus, hence not pydbus)."""
    return Gio.DBusConnection.new_for_address_sync(address, Gio.DBusConnectionFlags.AUTHENTICATION_CLIENT, None, None)


class _Peer:
    """One visit to a transaction's socket: Start, progress, Finished, close."""

    def __init__(self, address: str, idle_timeout: float, report: Callable[[str], None]) -> None:
        self._address = address
        self._idle_timeout = idle_timeout
        self._report = report
        self._outcome: Optional[tuple[bool, str]] = None
        self._closed = False
        self._cancelled: Optional[float] = None
        self._last_sign = time.monotonic()

    def run(self, doing: str, joined: bool) -> Optional[tuple[bool, str]]:
        """The transaction's (success, text), or None when it ended without a word."""
        context = GLib.MainContext.new()
        context.push_thread_default()
        try:
            try:
                peer = _connect(self._address)
            except GLib.Error:
                return None
            try:
                self._watch(peer)
                if not self._start(peer) and not joined:
                    self._report("rpm-ostree joined this request to a transaction that was there already")
                self._wait(context, doing, peer)
            finally:
                if not peer.is_closed():
                    peer.close_sync(None)
            return self._outcome
        finally:
            context.pop_thread_default()

    def _watch(self, peer: Any) -> None:
        # Messages of a peer have no sender: it must be None, or nothing arrives (rpm-ostree.md 2.13).
        peer.signal_subscribe(None, _TRANSACTION, None, "/", None, Gio.DBusSignalFlags.NONE, self._signal)
        peer.connect("closed", self._on_closed)

    def _on_closed(self, _peer: Any, _vanished: bool, _error: Any) -> None:
        self._closed = True

    def _signal(self, _con: Any, _sender: Any, _path: str, _interface: str, signal: str, parameters: Any) -> None:
        self._last_sign = time.monotonic()
        values = parameters.unpack()
        if signal == "Finished":
            self._outcome = (bool(values[0]), str(values[1]))
        elif signal in ("Message", "TaskBegin"):
            self._report(str(values[0]))

    def _start(self, peer: Any) -> bool:
        try:
            reply = peer.call_sync(
                None,
                "/",
                _TRANSACTION,
                "Start",
                None,
                GLib.VariantType("(b)"),
                Gio.DBusCallFlags.NONE,
                int(system_bus.CALL_TIMEOUT * 1000),
                None,
            )
        except GLib.Error:
            self._closed = True
            return False
        return bool(reply.unpack()[0])

    def _cancel(self, peer: Any) -> None:
        self._cancelled = time.monotonic()
        self._report(f"no sign of life for {self._idle_timeout:.0f} s: the transaction is cancelled")
        with contextlib.suppress(GLib.Error):
            peer.call_sync(
                None,
                "/",
                _TRANSACTION,
                "Cancel",
                None,
                None,
                Gio.DBusCallFlags.NONE,
                int(system_bus.CALL_TIMEOUT * 1000),
                None,
            )

    def _wait(self, context: Any, doing: str, peer: Any) -> None:
        """Iterate until Finished or the end of the connection. A silent transaction is cancelled once; whether that
        helped, and what it left, the deployments say (2.8: Cancel is asynchronous, and may be ignored)."""
        tick = GLib.timeout_source_new(int(process.BEAT * 1000))  # wakes the wait, so that silence can be measured
        tick.set_callback(lambda *_: process.alive())
        tick.attach(context)
        try:
            while self._outcome is None:
                if self._closed and not context.pending():
                    return
                context.iteration(True)
                process.check_end(doing, "the transaction goes on by itself and is found again")
                silence = time.monotonic() - self._last_sign
                if silence > self._idle_timeout and self._cancelled is None:
                    self._cancel(peer)
                grace = min(CANCEL_GRACE, 5 * self._idle_timeout)
                if self._cancelled is not None and time.monotonic() - self._cancelled > grace:
                    raise Transient(
                        f"cannot {doing}: no sign of life for {self._idle_timeout:.0f} s, and it cannot be cancelled",
                        f"see `journalctl -u {UNIT}`",
                        HUNG,
                    )
        finally:
            tick.destroy()
