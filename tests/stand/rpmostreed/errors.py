"""How failures reach a client: as a method's D-Bus error, or as the text of ``Finished(false, text)``."""

from __future__ import annotations

_UNMAPPED = "org.gtk.GDBus.UnmappedGError.Quark._g_2dio_2derror_2dquark.Code"
FAILED = _UNMAPPED + "0"
NOT_FOUND = _UNMAPPED + "1"
BUSY = _UNMAPPED + "26"
DAEMON_FAILED = "org.projectatomic.rpmostreed.Error.Failed"
ACCESS_DENIED = "org.freedesktop.DBus.Error.AccessDenied"
UNKNOWN_METHOD = "org.freedesktop.DBus.Error.UnknownMethod"
CANCELLED_TEXT = "Operation was cancelled"


class MethodError(Exception):
    """A method call is answered by the D-Bus error ``name`` with ``text`` (rpm-ostree.md 2.7)."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(text)
        self.name = name
        self.text = text


class OperationFailed(Exception):
    """A transaction ends with ``Finished(false, str(self))``."""


class Cancelled(OperationFailed):
    """A transaction was cancelled at a place where that is possible."""

    def __init__(self) -> None:
        super().__init__(CANCELLED_TEXT)
