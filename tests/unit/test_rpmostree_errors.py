"""What an error of rpm-ostree or of the bus means for an update: wait, try again, or write the target off.

Texts are those of the reference (rpm-ostree.md 2.7 and 7), of containers/image and of libcurl.
"""

from __future__ import annotations

from typing import Any, Optional

import pytest
from gi.repository import Gio, GLib

from mcdaemon.errors import Broken, Failure, Held, HoldReason, Transient
from mcdaemon.host.bus import error_name, error_text, failure
from mcdaemon.host.finished import LOCAL_TROUBLE, NOT_UNDERSTOOD, verdict
from mcdaemon.host.rpmostree import Deployment

# Digits that look like every HTTP status there is: about one digest in ten has some of them.
DIGEST = "sha256:404401403429502503504" + "5" * 45


def meaning(error: Failure) -> tuple[type, Optional[HoldReason]]:
    return type(error), error.reason if isinstance(error, Held) else None


FINISHED: dict[str, tuple[type, Optional[HoldReason]]] = {
    "error: Pulling image: Creating importer: reading manifest sha256:1 in quay.io/x: manifest unknown": (
        Held, HoldReason.IMAGE),
    "remote error: Error initializing source docker://quay.io/x: invalid status code from registry 404 (Not Found)": (
        Held, HoldReason.IMAGE),
    'remote error: reference "[overlay@/var/lib/containers/storage]x" does not resolve to an image ID': (
        Held, HoldReason.IMAGE),
    "name unknown: repository name not known to registry": (Held, HoldReason.IMAGE),
    "fetching blob: blob unknown to registry": (Held, HoldReason.IMAGE),
    "Status code: 404 for http://mirror/repodata/repomd.xml": (Held, HoldReason.IMAGE),
    "unauthorized: access to the requested resource is not authorized": (Held, HoldReason.CREDENTIALS),
    "received unexpected HTTP status: 403 Forbidden": (Held, HoldReason.CREDENTIALS),
    "unable to retrieve auth token: invalid username/password: unauthorized: authentication required": (
        Held, HoldReason.CREDENTIALS),
    "denied: requested access to the resource is denied": (Held, HoldReason.CREDENTIALS),
    "toomanyrequests: You have reached your pull rate limit": (Held, HoldReason.REGISTRY),
    "received unexpected HTTP status: 429 Too Many Requests": (Held, HoldReason.REGISTRY),
    "Installing kernel: regfile copy: No space left on device": (Held, HoldReason.SPACE),
    "min-free-space-percent '3%' would be exceeded, at least 1.2 GB requested": (Held, HoldReason.SPACE),
    "dial tcp: lookup quay.io on 10.0.0.1:53: no such host": (Transient, None),
    "Get https://quay.io/v2/: net/http: TLS handshake timeout": (Transient, None),
    "read tcp 10.0.0.2:4: i/o timeout": (Transient, None),
    "Get https://quay.io/v2/: context deadline exceeded": (Transient, None),
    "read: connection reset by peer": (Transient, None),
    "dial tcp 127.0.0.1:5000: connect: connection refused": (Transient, None),
    "dial tcp 10.0.0.1:443: connect: no route to host": (Transient, None),
    "dial tcp [fd00::1]:443: connect: network is unreachable": (Transient, None),
    "Curl error (28): Timeout was reached for http://mirror/x [Operation timed out]": (Transient, None),
    "Curl error (6): Couldn't resolve host name for http://m/x [Could not resolve host: mirror]": (Transient, None),
    "FinishPipe: unexpected EOF": (Transient, None),
    "FinishPipe: writing: broken pipe": (Transient, None),
    "received unexpected HTTP status: 503 Service Unavailable": (Transient, None),
    "HTTP/1.1 502 Bad Gateway": (Transient, None),
    "Bus owner changed, aborting.": (Transient, None),
    "Operation was cancelled": (Transient, None),
    "Packages not found: no-such-package": (Broken, None),
    "Could not depsolve transaction; 1 problem detected": (Broken, None),
    "No packages in transaction": (Broken, None),
    "Multiple subdirectories found in: usr/lib/modules": (Broken, None),
    "Sanity-checking final rootfs: no kernel": (Broken, None),
    "Expected staged base checksum abc, but found def": (Transient, None),
    "No pending staged deployment found": (Transient, None),
    "": (Transient, None),
}  # fmt: skip


@pytest.mark.parametrize("text", FINISHED)
def test_the_text_of_a_failed_transaction_decides_what_it_means(text: str) -> None:
    error = verdict(text, "stage the target")
    assert meaning(error) == FINISHED[text]
    assert error.sentence == f"cannot stage the target: {text}"


@pytest.mark.parametrize("text", [
    f"Importing layer {DIGEST}: corrupted tar stream",
    f"Writing object {'404' * 21}4.file: Invalid argument",
    "Base packages would be removed: kernel-core-5.14.0-403.el9.x86_64",
    "Package foo-429.0-1.x86_64 conflicts with rhcos-404.92.2023",
    "cannot stat inode 503: Input/output error",
])  # fmt: skip
def test_a_number_that_is_no_status_is_not_taken_for_one(text: str) -> None:
    """Otherwise a node would wait for ever for an image that is there."""
    error = verdict(text, "stage")
    assert isinstance(error, Broken) or error.code in (NOT_UNDERSTOOD, LOCAL_TROUBLE), "not for ever"


@pytest.mark.parametrize("text", [
    "opening file: Too many open files",
    "fork: Cannot allocate memory",
    "Child process killed by signal 9",
    "Failed to invoke skopeo proxy method OpenImage: remote closed",
    "fsync: Input/output error",
    "mkdir /ostree/repo/tmp: Read-only file system",
    "Failed to start ostree-finalize-staged.service",
])  # fmt: skip
def test_trouble_of_the_node_itself_is_not_the_targets_fault(text: str) -> None:
    error = verdict(text, "stage")
    assert isinstance(error, Transient) and error.code == LOCAL_TROUBLE


@pytest.mark.parametrize("text", ["", "something nobody has seen", "Importing layer: corrupted tar stream"])
def test_a_text_that_is_not_known_is_not_yet_the_targets_fault(text: str) -> None:
    error = verdict(text, "stage")
    assert isinstance(error, Transient) and error.code == NOT_UNDERSTOOD


def test_a_full_disk_is_told_from_an_image_that_is_gone_when_both_are_named() -> None:
    text = f"reading manifest {DIGEST}: No space left on device"
    assert meaning(verdict(text, "stage")) == (Held, HoldReason.SPACE)


# -- method errors ----------------------------------------------------------------------------------------------------

BUSY = "org.gtk.GDBus.UnmappedGError.Quark._g_2dio_2derror_2dquark.Code26"
REMOTE: dict[tuple[str, str], tuple[type, Optional[HoldReason]]] = {
    (BUSY, "Transaction in progress: install foo"): (Held, HoldReason.OTHER_CLIENT),
    (BUSY, "System transaction in progress"): (Held, HoldReason.OTHER_CLIENT),
    ("org.projectatomic.rpmostreed.Error.Failed", "Reboot initiated"): (Held, HoldReason.OTHER_CLIENT),
    ("org.freedesktop.DBus.Error.NoReply", "Message recipient disconnected"): (Transient, None),
    ("org.freedesktop.DBus.Error.TimedOut", "x"): (Transient, None),
    ("org.freedesktop.DBus.Error.Timeout", "x"): (Transient, None),
    ("org.freedesktop.DBus.Error.ServiceUnknown", "The name is not activatable"): (Transient, None),
    ("org.freedesktop.DBus.Error.NameHasNoOwner", "x"): (Transient, None),
    ("org.freedesktop.DBus.Error.Disconnected", "x"): (Transient, None),
    ("org.freedesktop.DBus.Error.AccessDenied", "x"): (Broken, None),
    ("org.freedesktop.DBus.Error.InvalidArgs", "x"): (Broken, None),
    ("org.freedesktop.DBus.Error.UnknownMethod", "x"): (Broken, None),
    ("org.projectatomic.rpmostreed.Error.NotAuthorized", "x"): (Broken, None),
    ("org.projectatomic.rpmostreed.Error.Failed", "No deployments found for os rhcos"): (Broken, None),
    ("org.gtk.GDBus.UnmappedGError.Quark._g_2dio_2derror_2dquark.Code1", 'OS name "x" not found'): (Broken, None),
}  # fmt: skip


@pytest.mark.parametrize("name", REMOTE)
def test_the_name_of_a_remote_error_decides_what_it_means(name: tuple[str, str]) -> None:
    error = Gio.DBusError.new_for_dbus_error(*name)
    found = failure(error, "stage the target")
    assert meaning(found) == REMOTE[name]
    assert found.sentence == f"cannot stage the target: {name[1]}"
    assert "GDBus.Error" not in str(found)


@pytest.mark.parametrize(("code", "kind"), [
    (Gio.IOErrorEnum.TIMED_OUT, Transient), (Gio.IOErrorEnum.CLOSED, Transient), (Gio.IOErrorEnum.BUSY, Held),
    (Gio.IOErrorEnum.FAILED, Broken), (Gio.IOErrorEnum.PERMISSION_DENIED, Broken),
])  # fmt: skip
def test_an_error_of_this_side_of_the_bus_is_understood_too(code: Any, kind: type) -> None:
    error = GLib.Error.new_literal(Gio.io_error_quark(), "Timeout was reached", int(code))
    assert error_name(error) == ""
    assert error_text(error) == "Timeout was reached"
    assert type(failure(error, "ask")) is kind


# -- deployments ------------------------------------------------------------------------------------------------------

LEAST = {"checksum": "c" * 64, "serial": 1, "osname": "rhcos", "booted": True, "staged": False}


def test_a_deployment_of_an_old_version_has_defaults_for_what_it_does_not_tell() -> None:
    """Row 48: an origin that is an ostree ref has no image and no digest."""
    deployment = Deployment.from_dict(LEAST)
    assert deployment.name == f"{'c' * 64}.1"
    assert (deployment.image, deployment.digest, deployment.requested, deployment.removals) == ("", "", (), ())
    assert not deployment.pinned


def test_members_that_nobody_knows_are_no_trouble() -> None:
    assert Deployment.from_dict({**LEAST, "soft-reboot-target": True, "live-inprogress": ""}).booted


PINNED = "ostree-unverified-registry:quay.io/org/os@sha256:" + "1" * 64


@pytest.mark.parametrize(("image", "told", "digest"), [
    (PINNED, "", "sha256:" + "1" * 64), (PINNED, "sha256:" + "2" * 64, "sha256:" + "2" * 64),
    ("ostree-unverified-registry:quay.io/org/os:1", "", ""), ("", "", ""),
])  # fmt: skip
def test_a_digest_that_rpm_ostree_cannot_tell_is_the_one_of_the_origin(image: str, told: str, digest: str) -> None:
    """Row 48: unknown is not different."""
    entry = {**LEAST, "container-image-reference": image, "container-image-reference-digest": told}
    assert Deployment.from_dict(entry).digest == digest


def test_version_and_age_are_those_of_the_base_below_layered_packages() -> None:
    """rpm-ostree.md 3.2."""
    layered = {**LEAST, "version": "2", "timestamp": 20, "base-version": "1", "base-timestamp": 10}
    found = Deployment.from_dict(layered)
    assert (found.version, found.timestamp) == ("1", 10)
    found = Deployment.from_dict({**LEAST, "version": "2", "timestamp": 20})
    assert (found.version, found.timestamp) == ("2", 20)
