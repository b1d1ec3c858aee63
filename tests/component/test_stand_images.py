"""The stand's images, registry, packages and fault proxy do what the tests that stand on them believe."""

from __future__ import annotations

import io
import json
import subprocess
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

from tests.stand import images, packages
from tests.stand.faultproxy import FaultProxy
from tests.stand.isolation import private
from tests.stand.registry import PASSWORD, USER, Certificate, Registry, make_certificate
from tests.stand.storage import ContainersStorage


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    with Registry(tmp_path / "registry") as running:
        yield running


def inspect(name: str, *options: str) -> dict[str, object]:
    argv = ["skopeo", "inspect", "--no-tags", "--tls-verify=false", *options, name]
    done = subprocess.run(private(argv), check=True, capture_output=True, text=True, timeout=30)
    found: dict[str, object] = json.loads(done.stdout)
    return found


def manifest_status(host: str, repository: str, reference: str) -> int:
    url = f"http://{host}/v2/{repository}/manifests/{reference}"
    return requests.get(url, headers={"Accept": images.MANIFEST}, timeout=10).status_code


def members(layer: images.Layer) -> dict[str, tarfile.TarInfo]:
    with tarfile.open(fileobj=io.BytesIO(layer.blob)) as archive:
        return {member.name: member for member in archive}


def test_the_same_input_gives_the_same_digest_and_the_registry_keeps_it(registry: Registry) -> None:
    first, second = images.os_image(), images.os_image()
    assert first.digest == second.digest
    assert images.push(first, f"{registry.host}/os:1") == first.digest
    found = inspect(f"docker://{registry.host}/os:1")
    assert found["Digest"] == first.digest
    assert found["Architecture"] == images.ARCHITECTURE
    labels = found["Labels"]
    assert isinstance(labels, dict)
    assert labels["ostree.bootable"] == "true"
    assert labels["containers.bootc"] == "1"


def test_an_os_image_has_the_links_and_modes_of_a_coreos_tree() -> None:
    inside = members(images.os_image().layers[0])
    assert inside["root"].linkname == "var/roothome"
    assert inside["usr/local"].linkname == "../var/usrlocal"
    assert inside["tmp"].mode == 0o1777
    assert inside["etc/shadow"].mode == 0
    assert inside[f"usr/lib/modules/{images.KERNEL}/vmlinuz"].size > 0


def test_a_delta_layer_has_its_whiteouts_and_keeps_its_parents_modes() -> None:
    base = images.os_image({"/etc/private": images.Directory(0o700), "/etc/private/a": images.File(b"a")})
    top = images.layer_on(base, {"/etc/private/b": images.File(b"b", 0o600, 7, 8)}, whiteouts=["/etc/group"])
    inside = members(top.layers[1])
    assert set(inside) == {"etc", "etc/private", "etc/private/b", "etc/.wh.group"}
    assert inside["etc/private"].mode == 0o700
    assert (inside["etc/private/b"].mode, inside["etc/private/b"].uid, inside["etc/private/b"].gid) == (0o600, 7, 8)
    assert "etc/group" not in top.tree
    assert top.layers[0] == base.layers[0]


def test_a_file_below_a_link_is_refused() -> None:
    with pytest.raises(ValueError, match="usr/local is no directory"):
        images.os_image({"/usr/local/bin/tool": images.File(b"")})


def test_a_layer_that_the_registry_has_is_not_uploaded_again(registry: Registry) -> None:
    base = images.os_image()
    images.push(base, f"{registry.host}/os:1")
    registry.forget_requests()
    images.push(images.layer_on(base, {"/etc/motd": images.File(b"hi")}), f"{registry.host}/os:2")
    uploads = [request for request in registry.requests() if request.method == "POST"]
    assert len(uploads) == 2  # the new layer and the config


def test_a_deleted_manifest_is_unknown_and_its_tag_is_gone(registry: Registry) -> None:
    image = images.os_image()
    images.push(image, f"{registry.host}/team/os:1")
    assert registry.tags("team/os") == ("1",)
    registry.delete("team/os", image.digest)
    assert manifest_status(registry.host, "team/os", image.digest) == 404
    assert registry.tags("team/os") == ()


def test_a_deleted_layer_leaves_a_manifest_that_cannot_be_pulled(registry: Registry, tmp_path: Path) -> None:
    image = images.os_image()
    images.push(image, f"{registry.host}/os:1")
    registry.delete_blob("os", image.layers[0].digest)
    assert manifest_status(registry.host, "os", image.digest) == 200
    with pytest.raises(subprocess.CalledProcessError):
        argv = ["skopeo", "--insecure-policy", "copy", "--src-tls-verify=false"]
        source = f"docker://{registry.host}/os:1"
        subprocess.run(private([*argv, source, f"dir:{tmp_path / 'd'}"]), check=True, capture_output=True, timeout=30)


def test_a_registry_that_is_stopped_refuses_and_one_that_is_started_again_has_everything(registry: Registry) -> None:
    image = images.os_image()
    images.push(image, f"{registry.host}/os:1")
    host = registry.host
    registry.stop()
    with pytest.raises(requests.ConnectionError):
        manifest_status(host, "os", image.digest)
    registry.start()
    assert registry.host == host
    assert manifest_status(host, "os", image.digest) == 200


def test_the_access_log_proves_what_was_fetched(registry: Registry, tmp_path: Path) -> None:
    image = images.os_image()
    images.push(image, f"{registry.host}/os:1")
    registry.forget_requests()
    assert manifest_status(registry.host, "os", "1") == 200
    assert [(r.method, r.path, r.status, r.size) for r in registry.requests()] == [
        ("GET", "/v2/os/manifests/1", 200, len(image.manifest))
    ]
    assert registry.blob_fetches() == ()
    layer = image.layers[0]
    requests.get(f"http://{registry.host}/v2/os/blobs/{layer.digest}", timeout=10)
    assert [fetch.size for fetch in registry.blob_fetches()] == [len(layer.blob)]


def test_a_registry_with_a_password_turns_strangers_away(tmp_path: Path) -> None:
    with Registry(tmp_path / "r", password_needed=True) as registry:
        with pytest.raises(subprocess.CalledProcessError):
            images.push(images.os_image(), f"{registry.host}/os:1")
        images.push(images.os_image(), f"{registry.host}/os:1", credentials=f"{USER}:{PASSWORD}")
        assert manifest_status(registry.host, "os", "1") == 401
        assert registry.tags("os") == ("1",)


def test_a_registry_with_tls_is_trusted_by_its_certificate_only(tmp_path: Path) -> None:
    made = make_certificate(tmp_path / "tls")
    with Registry(tmp_path / "r", certificate=made) as registry:
        images.push(images.os_image(), f"{registry.host}/os:1")
        with pytest.raises(requests.exceptions.SSLError):
            requests.get(f"{registry.url}/v2/", timeout=10)
        assert requests.get(f"{registry.url}/v2/", timeout=10, verify=str(made.certificate)).status_code == 200


def test_an_index_is_pushed_with_its_children(registry: Registry) -> None:
    here, other = images.os_image(), images.os_image(architecture="s390x")
    index = images.Index((other, here))
    assert images.push(index, f"{registry.host}/os:multi") == index.digest
    assert manifest_status(registry.host, "os", here.digest) == 200
    assert manifest_status(registry.host, "os", other.digest) == 200


def test_a_registry_that_cannot_start_says_why(tmp_path: Path) -> None:
    (tmp_path / "registry.key").write_text("no key")
    (tmp_path / "registry.crt").write_text("no certificate")
    broken = Certificate(tmp_path / "registry.crt", tmp_path / "registry.key")
    with pytest.raises(RuntimeError, match="(?s)cannot start docker-registry: exit status 1: .*PEM"):
        Registry(tmp_path / "r", certificate=broken).start()


def test_a_port_that_somebody_else_has_is_not_taken_for_ours(registry: Registry, tmp_path: Path) -> None:
    second = Registry(tmp_path / "second", port=int(registry.host.rpartition(":")[2]))
    with pytest.raises(RuntimeError, match=f"somebody else listens on {registry.host}"):
        second.start()


def test_a_package_is_a_real_rpm_and_is_built_once(tmp_path: Path) -> None:
    wanted = packages.Package(
        "usbguard",
        "1.2",
        files={"/usr/bin/usbguard": images.File(b"#!/bin/sh\n", 0o755), "/etc/usbguard.conf": images.File(b"x", 0o600)},
        requires=["libqb"],
    )
    built = packages.build(wanted, tmp_path / "cache")
    argv = [
        "rpm",
        f"--dbpath={tmp_path}",
        "-qp",
        "--queryformat",
        "%{NEVRA}\n[%{FILENAMES} %{FILEMODES:perms}\n]",
        str(built),
    ]
    said = subprocess.run(argv, check=True, capture_output=True, text=True, timeout=30).stdout.splitlines()
    assert said == ["usbguard-1.2-1.noarch", "/etc/usbguard.conf -rw-------", "/usr/bin/usbguard -rwxr-xr-x"]
    before = built.stat().st_mtime_ns
    assert packages.build(wanted, tmp_path / "cache") == built
    assert built.stat().st_mtime_ns == before


def test_an_extensions_image_holds_the_packages(tmp_path: Path) -> None:
    built = packages.build(packages.Package("kernel-devel"), tmp_path)
    inside = members(images.extensions_image([built]).layers[0])
    assert inside["usr/share/rpm-ostree/extensions/kernel-devel-1.0-1.noarch.rpm"].size == built.stat().st_size


def test_a_storage_takes_an_image_and_leaves_no_mount() -> None:
    image = images.os_image()
    with ContainersStorage() as storage:
        storage.add(image, "127.0.0.1:5000/os:1")
        said = storage.podman("image", "inspect", "127.0.0.1:5000/os:1", "--format", "{{.Digest}}").stdout.strip()
        assert said == image.digest
        assert (storage.layer_folder(image, 0) / "diff/etc/passwd").exists()
        assert str(storage.folder) not in Path("/proc/self/mounts").read_text()
    assert not storage.folder.exists()


def test_the_proxy_hands_on_what_no_fault_touches(registry: Registry) -> None:
    with FaultProxy(registry.host) as proxy:
        image = images.os_image()
        assert images.push(image, f"{proxy.host}/os:1") == image.digest
        assert inspect(f"docker://{proxy.host}/os:1")["Digest"] == image.digest


def test_the_proxy_answers_stalls_and_cuts(registry: Registry) -> None:
    image = images.os_image()
    images.push(image, f"{registry.host}/os:1")
    with FaultProxy(registry.host) as proxy:
        blob = f"http://{proxy.host}/v2/os/blobs/{image.layers[0].digest}"
        proxy.answer("manifests", 429, headers={"Retry-After": "7"}, times=1)
        assert manifest_status(proxy.host, "os", "1") == 429
        assert manifest_status(proxy.host, "os", "1") == 200
        cut = proxy.cut("GET .*/blobs/", after=10)
        with pytest.raises((requests.ConnectionError, requests.exceptions.ChunkedEncodingError)):
            requests.get(blob, timeout=10)
        assert cut.met == 1
        proxy.clear()
        gate = proxy.stall("GET .*/blobs/", after=10)
        got: list[bytes] = []
        thread = threading.Thread(target=lambda: got.append(requests.get(blob, timeout=10).content))
        thread.start()
        assert gate.reached.wait(5)
        assert got == []
        gate.release()
        thread.join(5)
        assert got == [image.layers[0].blob]
