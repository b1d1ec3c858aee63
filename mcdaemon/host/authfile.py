"""The login that image pulls use.

rpm-ostree reads /run/ostree/auth.json, /etc/ostree/auth.json or /usr/lib/ostree/auth.json, and nothing else; the node's
pull secret is the kubelet's file. The MCD links the one to the other (image_manager_helper.go:linkAuthFile).
"""

from __future__ import annotations

import os
from pathlib import Path

from mcdaemon.errors import from_os_error

OSTREE = ("run/ostree/auth.json", "etc/ostree/auth.json", "usr/lib/ostree/auth.json")
MERGED = "etc/mco/internal-registry-pull-secret.json"
"""Kubelet's secret and the internal registry's, merged; written by the cluster's certificate writer."""
KUBELET = "var/lib/kubelet/config.json"


def path(top: Path = Path("/")) -> str:
    """The file with the node's logins, as podman takes it; "" when there is none."""
    return next((os.fspath(top / name) for name in (*OSTREE, MERGED, KUBELET) if (top / name).is_file()), "")


def link(top: Path = Path("/")) -> None:
    """Let rpm-ostree find the node's pull secret, unless it has a login of its own. Gone with the next boot."""
    secret = next((name for name in (MERGED, KUBELET) if (top / name).is_file()), "")
    if not secret or any((top / name).exists() for name in OSTREE):
        return
    place = top / OSTREE[0]
    try:
        place.parent.mkdir(exist_ok=True)
        if place.is_symlink():  # dangling, or `exists` had seen it
            place.unlink()
        place.symlink_to("/" + secret)
    except OSError as error:
        raise from_os_error(error, "link the pull secret to", place) from error
