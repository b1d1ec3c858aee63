"""Pulling images: when the source is read, what is fetched, and whose words an error has (rpm-ostree.md section 4)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Optional

import pytest

from tests.component.conformance import samples
from tests.component.conformance.conftest import Node
from tests.stand import images
from tests.stand.images import File, layer_on, os_image
from tests.stand.introspection import GLib
from tests.stand.registry import Registry

pytestmark = pytest.mark.stand

GONE = r"failed to invoke method OpenImage: reference \"\[overlay@.*does not resolve to an image ID"


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    """A registry of the test's own, because these tests take it down."""
    with Registry(tmp_path / "registry") as running:
        yield running


def fetched(node: Node) -> list[str]:
    """The layers that went over the wire since ``forget_requests``."""
    layers = {layer.digest for image in (samples.base(), samples.following()) for layer in image.layers}
    return [digest for one in node.registry.blob_fetches() for digest in layers if digest in one.path]


def image_refs(node: Node) -> set[str]:
    listed = node.machine.run(["ostree", "refs", "--repo=/ostree/repo", "--list", "ostree/container/image"])
    return set(listed.stdout.split())


def store(node: Node, image: images.Image) -> str:
    """Copies the image from the registry into the node's containers-storage; its name by digest there."""
    name = node.name(image)
    node.machine.run(["skopeo", "copy", "--preserve-digests", f"docker://{name}", f"containers-storage:{name}"])
    return name


def test_only_missing_layers_are_fetched(node: Node) -> None:
    reference = node.reference(samples.following())
    node.registry.forget_requests()
    node.client.update({"set-refspec": reference})
    assert sorted(fetched(node)) == sorted(layer.digest for layer in samples.following().layers[1:])


def test_the_merged_tree_is_what_the_layers_amount_to(node: Node) -> None:
    changes = {"etc/added": File(b"a", 0o600, 7, 8), "usr/share/stand/base-packages": images.File(b"now a file")}
    top = layer_on(layer_on(samples.base(), changes), {"usr/bin/new": File(b"n")}, ["usr/bin/tool", "etc/containers"])
    node.client.update({"set-refspec": node.reference(top)})
    root = node.staged_root()
    assert node.machine.read(f"{root}/usr/share/stand/base-packages") == "now a file"
    assert node.machine.read(f"{root}/usr/bin/new") == "n"
    assert not node.machine.exists(f"{root}/usr/bin/tool")
    assert not node.machine.exists(f"{root}/usr/etc/containers")
    assert not node.machine.exists(f"{root}/usr/bin/.wh.tool")
    added = node.machine.lstat(f"{root}/usr/etc/added")
    assert (added.st_mode & 0o777, added.st_uid, added.st_gid) == (0o600, 7, 8)


def test_the_same_reference_twice_is_refused(node: Node) -> None:
    reference = node.reference(samples.following())
    node.client.update({"set-refspec": reference})
    again = node.client.update({"set-refspec": reference}, {"initiating-command-line": "2"})
    assert again.finished == [(False, f"Old and new refs are equal: {reference}")]
    other_spelling = reference.replace("ostree-unverified-registry:", "ostree-unverified-image:docker://")
    assert node.client.update({"set-refspec": other_spelling}).finished == [(True, "")]


@pytest.mark.parametrize("profile", ["A", "AC"])
def test_a_digest_that_is_imported_is_opened_again_before_2025_10_only(node: Node, profile: str) -> None:
    node.registry.stop()
    upgrade = node.client.run("Upgrade", "(a{sv})", {}).finished[0]
    if profile == "AC":
        assert upgrade == (True, "")
    else:
        assert upgrade[0] is False
        assert upgrade[1].startswith("Creating importer: failed to invoke method OpenImage: failed to invoke method ")
        assert "connection refused" in upgrade[1]


@pytest.mark.parametrize("options", [{}, {"cache-only": True}, {"dry-run": True}])
@pytest.mark.parametrize("profile", ["A"])
def test_the_source_is_read_unless_no_pull_base_is_given(node: Node, options: dict[str, bool]) -> None:
    node.offer(*samples.PACKAGES)
    node.registry.stop()
    refused = node.client.update({"install-packages": ["usbguard"]}, options).finished[0]
    assert refused[0] is False
    assert "OpenImage" in refused[1]
    accepted = node.client.update({"install-packages": ["usbguard"]}, {"no-pull-base": True})
    assert accepted.finished == [(True, "")]
    assert node.client.kargs({"append-if-missing": ["x=1"]}).finished == [(True, "")]


def test_a_manifest_that_is_deleted_is_the_registrys_own_error(node: Node) -> None:
    reference = node.reference(samples.following())
    node.registry.delete("os", samples.following().digest)
    refused = node.client.update({"set-refspec": reference}).finished[0]
    assert refused[0] is False
    assert refused[1].startswith("Preparing import: Fetching manifest: failed to invoke method OpenImage: ")
    assert "manifest unknown" in refused[1]


def test_a_layer_that_is_deleted_is_named_in_the_error(node: Node) -> None:
    reference = node.reference(samples.following())
    digest = samples.following().layers[2].digest
    node.registry.delete_blob("os", digest)
    refused = node.client.update({"set-refspec": reference}).finished[0]
    assert refused[0] is False
    assert refused[1].startswith(f"Importing: Parsing layer blob {digest}: failed to invoke method GetBlob: ")
    assert "404" in refused[1] or "blob unknown" in refused[1]
    assert len(node.client.get("Deployments")) == 1


@pytest.mark.parametrize("profile", ["A", "AC"])
def test_an_image_gone_from_containers_storage_is_reported_in_skopeos_words(node: Node) -> None:
    name = store(node, samples.following())
    reference = f"ostree-unverified-image:containers-storage:{name}"
    assert node.client.update({"set-refspec": reference}).finished == [(True, "")]
    node.reboot()
    assert node.client.os_get("BootedDeployment")["container-image-reference-digest"] == samples.following().digest
    node.machine.run(["podman", "rmi", "--force", name])
    tag = name.partition("@")[0] + ":gone"
    refused = node.client.update({"set-refspec": f"ostree-unverified-image:containers-storage:{tag}"})
    assert refused.finished[0][0] is False
    assert re.search(GONE, refused.finished[0][1]), refused.finished[0][1]
    assert node.client.kargs({"append-if-missing": ["x=1"]}).finished == [(True, "")], "reads no base"


def test_a_stored_image_moves_to_the_registrys_name_without_a_download(node: Node) -> None:
    name = store(node, samples.following())
    node.registry.forget_requests()
    node.client.update({"set-refspec": f"ostree-unverified-image:containers-storage:{name}"})
    assert fetched(node) == []
    staged = node.client.os_get("DefaultDeployment")
    node.client.update({"set-refspec": f"ostree-unverified-registry:{name}"})
    assert fetched(node) == []
    moved = node.client.os_get("DefaultDeployment")
    assert moved["container-image-reference"] == f"ostree-unverified-registry:{name}"
    assert moved["checksum"] == staged["checksum"]
    assert moved["id"] != staged["id"]


def test_an_upgrade_follows_a_tag_and_shows_the_digest(node: Node) -> None:
    tag = f"{node.registry.host}/tagged:stable"
    images.push(samples.base(), tag)
    node.client.update({"set-refspec": f"ostree-unverified-registry:{tag}"})
    assert node.client.run("Upgrade", "(a{sv})", {}).messages[-1] == "No upgrade available."
    images.push(samples.following(), tag)
    assert node.client.run("Upgrade", "(a{sv})", {}).finished == [(True, "")]
    staged = node.client.os_get("DefaultDeployment")
    assert staged["container-image-reference"] == f"ostree-unverified-registry:{tag}"
    assert staged["container-image-reference-digest"] == samples.following().digest
    assert staged["version"] == "2"


def test_a_revision_is_a_digest_for_one_operation_only(node: Node) -> None:
    tag = f"{node.registry.host}/tagged:stable"
    images.push(samples.base(), tag)
    images.push(samples.following(), f"{node.registry.host}/tagged:other")
    node.client.update({"set-refspec": f"ostree-unverified-registry:{tag}"})
    assert node.client.run("Deploy", "(sa{sv})", samples.following().digest, {}).finished == [(True, "")]
    staged = node.client.os_get("DefaultDeployment")
    assert staged["container-image-reference"] == f"ostree-unverified-registry:{tag}"
    assert staged["container-image-reference-digest"] == samples.following().digest
    node.client.run("Upgrade", "(a{sv})", {})
    assert node.client.os_get("DefaultDeployment")["container-image-reference-digest"] == samples.base().digest


@pytest.mark.parametrize(
    ("labels", "architecture", "text"),
    [
        (None, "s390x", "Preparing import: Image has architecture s390x; expected "),
        ({}, images.ARCHITECTURE, "Preparing import: Target image does not have ostree.bootable label"),
    ],
)
def test_an_image_that_cannot_boot_here_is_refused(
    node: Node, labels: Optional[dict[str, str]], architecture: str, text: str
) -> None:
    image = os_image(architecture=architecture)
    if labels is not None:
        image = replace(image, labels=labels)
    refused = node.client.update({"set-refspec": node.reference(image)}).finished[0]
    assert refused[0] is False
    assert refused[1].startswith(text), refused[1]


def test_images_and_layers_of_no_deployment_are_pruned(node: Node) -> None:
    node.client.update({"set-refspec": node.reference(samples.following())})
    assert len(image_refs(node)) == 2
    node.client.run("Cleanup", "(as)", ["pending-deploy"])
    assert len(image_refs(node)) == 1
    blobs = node.machine.run(["ostree", "refs", "--repo=/ostree/repo", "--list", "ostree/container/blob"])
    assert len(blobs.stdout.split()) == 1
    assert len(node.client.get("Deployments")) == 1


def test_a_custom_origin_is_kept_for_a_digest(node: Node) -> None:
    custom = GLib.Variant("(ss)", ("pivot://x", "Managed by a test"))
    node.client.update({"set-refspec": node.reference(samples.following())}, {"custom-origin": custom})
    assert node.client.os_get("DefaultDeployment")["custom-origin"] == ("pivot://x", "Managed by a test")
    empty = {"custom-origin": GLib.Variant("(ss)", ("pivot://x", "")), "initiating-command-line": "2"}
    refused = node.client.update({"set-refspec": node.reference(samples.base())}, empty)
    assert refused.finished == [(False, "Invalid custom-origin")]
