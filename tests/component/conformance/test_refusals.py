"""Requests that rpm-ostreed refuses, with its texts; nothing on the node changes (rpm-ostree.md 1.11, 4.1)."""

from __future__ import annotations

import pytest

from tests.component.conformance.conftest import Node
from tests.stand.introspection import GLib

pytestmark = pytest.mark.stand

NO_PULL = {"no-pull-base": True}


@pytest.mark.parametrize(
    ("modifiers", "options", "text"),
    [
        ({"override-remove-packages": ["nothing"]}, NO_PULL, 'Package "nothing" not found'),
        ({"override-reset-packages": ["kernel"]}, NO_PULL, "No overrides for package 'kernel'"),
        ({"override-replace-packages": ["kernel"]}, NO_PULL, "Non-local replacement overrides not implemented yet"),
        ({"override-reset-packages": ["kernel"]}, {**NO_PULL, "no-overrides": True},
         "Can't specify no-overrides if setting override modifiers"),
        ({"set-refspec": "x"}, NO_PULL, "Can't specify no-pull-base if setting a new refspec or revision"),
        ({}, {"skip-purge": True}, "Can't specify skip-purge if not setting a new refspec"),
        ({}, {"cache-only": True, "download-only": True}, "Can't specify cache-only and download-only"),
        ({}, {"dry-run": True, "download-only": True}, "Can't specify dry-run and download-only"),
        ({}, {"apply-live": True, "reboot": True}, "Cannot specify `apply-live` and `reboot`"),
        ({"install-fileoverride-packages": ["x"]}, {}, "Non-local fileoverrides not implemented"),
        ({"install-local-packages": GLib.Variant("ah", [0])}, {}, "Expected 1 fds but received 0"),
    ],
)  # fmt: skip
def test_impossible_requests_fail_in_finished(
    resting_node: Node, modifiers: dict[str, object], options: dict[str, object], text: str
) -> None:
    client = resting_node.client
    assert client.update(modifiers, options).finished == [(False, text)]
    assert len(client.get("Deployments")) == 1


@pytest.mark.parametrize(
    ("reference", "text"),
    [
        ("ostree-image-signed:docker://quay.io/x/y", "insecureAcceptAnything"),
        ("ostree-remote-registry:fedora:quay.io/x/y", "Cannot currently verify layered containers via ostree remote"),
        ("quay.io/x/y:latest", 'Remote "quay.io/x/y" not found'),
        ("no/such/branch", "Refspec 'no/such/branch' not found"),
    ],
)
def test_a_reference_that_cannot_be_used_is_refused(resting_node: Node, reference: str, text: str) -> None:
    refused = resting_node.client.update({"set-refspec": reference}).finished[0]
    assert refused[0] is False
    assert text in refused[1]
