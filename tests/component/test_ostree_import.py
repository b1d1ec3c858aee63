"""The importer of the stand: real skopeo, a real registry, a real ostree repository."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.stand import images, ostree_images, ostree_refs, ostree_tree
from tests.stand import registry as registries
from tests.stand.imageproxy import ImageProxy, ProxyError
from tests.stand.images import Directory, File, Link, layer_on
from tests.stand.introspection import Gio, OSTree
from tests.stand.ostree_import import Importer, ImportFailed, Watcher
from tests.stand.registry import Registry

pytestmark = pytest.mark.stand

DIGEST = "sha256:" + "ab" * 32


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    with Registry(tmp_path / "registry") as running:
        yield running


@pytest.fixture
def repo(tmp_path: Path) -> Any:
    """An empty repository as a sysroot has it."""
    made = OSTree.Repo.new(Gio.File.new_for_path(str(tmp_path / "repo")))
    made.create(OSTree.RepoMode.BARE, None)
    return made


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """An empty root without pull secrets and with a policy that wants nothing."""
    policy = tmp_path / "root/etc/containers/policy.json"
    policy.parent.mkdir(parents=True)
    policy.write_text('{"default": [{"type": "insecureAcceptAnything"}]}')
    return tmp_path / "root"


def pushed(registry: Registry, image: images.Image) -> str:
    """Pushes an image; its ostree reference by digest."""
    images.push(image, f"{registry.host}/os:latest")
    return f"ostree-unverified-registry:{registry.host}/os@{image.digest}"


def importer(repo: Any, reference: str, root: Path, **more: Any) -> Importer:
    return Importer(repo, ostree_refs.parse(reference), root=root, tls_verify=False, **more)


def listing(repo: Any, commit: str) -> dict[str, str]:
    """Path to mode, owner and size of everything in a commit, as ``ostree ls`` prints it."""
    done = subprocess.run(["ostree", "ls", f"--repo={repo.get_path().get_path()}", "-R", commit], check=True,
                          capture_output=True, text=True, timeout=20)  # fmt: skip
    rows = (line.split(None, 4) for line in done.stdout.splitlines())
    return {row[4].strip(): " ".join(row[:3]) for row in rows}


def refs(repo: Any) -> list[str]:
    return ostree_images.list_refs(repo, "ostree/container/")


# -- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "escaped"),
    [
        ("docker://quay.io/acme/os@sha256:abc", "docker_3A__2F__2F_quay_2E_io/acme/os_40_sha256_3A_abc"),
        ("containers-storage:quay.io/acme/os", "containers-storage_3A_quay_2E_io/acme/os"),
        ("sha256:00ff", "sha256_3A_00ff"),
        ("a_b-c/", "a__b-c_2F_"),
        ("a//b", "a/_2F_b"),
        ("ü", "_FC_"),
    ],
)
def test_names_are_escaped_as_ostree_ext_does_and_back(name: str, escaped: str) -> None:
    assert ostree_refs.escape(name) == escaped
    assert ostree_refs.unescape(escaped) == name


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("ostree-unverified-registry:quay.io/x/y:tag", "docker://quay.io/x/y:tag"),
        ("ostree-unverified-image:registry:quay.io/x/y", "docker://quay.io/x/y"),
        ("ostree-unverified-image:docker://quay.io/x/y", "docker://quay.io/x/y"),
        ("ostree-image-signed:containers-storage:localhost/x", "containers-storage:localhost/x"),
        ("ostree-remote-image:fedora:oci:/path:tag", "oci:/path:tag"),
        ("ostree-remote-registry:fedora:quay.io/x", "docker://quay.io/x"),
    ],
)
def test_a_reference_names_what_skopeo_opens(text: str, source: str) -> None:
    assert ostree_refs.parse(text).source == source


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("quay.io/x/y", "Missing ':'"),
        ("quay.io/x/y:tag", "Invalid ostree image reference scheme: quay.io/x/y"),
        ("docker://quay.io/x/y", "Invalid ostree image reference scheme: docker"),
        ("ostree-unverified-image:docker:quay.io/x", "Missing // in docker://"),
        ("ostree-unverified-image:ftp:quay.io/x", "Unknown transport 'ftp'"),
    ],
)
def test_what_is_no_image_reference_is_said_in_ostree_exts_words(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        ostree_refs.parse(text)
    assert not ostree_refs.is_image(text)


@pytest.mark.parametrize("name", ["h:5000/x/y:tag", "h:5000/x/y", f"h:5000/x/y@{DIGEST}"])
def test_a_digest_takes_the_place_of_a_tag_but_not_of_a_port(name: str) -> None:
    reference = ostree_refs.parse(f"ostree-unverified-registry:{name}").with_digest(DIGEST)
    assert reference.source == f"docker://h:5000/x/y@{DIGEST}"
    assert reference.digest == DIGEST


# -- trees ------------------------------------------------------------------------------------------------------------


def test_etc_of_an_image_is_usr_etc_of_the_commit(repo: Any, registry: Registry, root: Path) -> None:
    image = images.os_image({"etc/deep/file": File(b"x", 0o640, 3, 4), "etc/link": Link("deep/file")})
    found = listing(repo, importer(repo, pushed(registry, image), root).run().commit)
    assert found["/usr/etc/deep/file"] == "-00640 3 4"
    assert "/usr/etc/link -> deep/file" in found
    assert not [path for path in found if path.startswith("/etc")]
    assert found["/tmp"] == "d01777 0 0"


def test_layers_are_merged_with_whiteouts_and_changes_of_type(repo: Any, registry: Registry, root: Path) -> None:
    base = images.os_image({
        "etc/gone": File(b"1"), "usr/share/dir/a": File(b"a"), "usr/share/dir/b": File(b"b"),
        "usr/share/file": File(b"f"), "usr/share/link": Link("file"), "usr/share/whole/x": File(b"x"),
    })  # fmt: skip
    middle = layer_on(base, {"usr/share/link/inside": File(b"i"), "usr/share/back": File(b"1")},
                      ["etc/gone", "usr/share/dir/a", "usr/share/whole", "usr/share/link"])  # fmt: skip
    top = layer_on(middle, {"usr/share/dir": File(b"now a file"), "etc/gone": File(b"again", 0o600),
                            "usr/share/file": Directory(0o700)}, ["usr/share/back"])  # fmt: skip
    found = listing(repo, importer(repo, pushed(registry, top), root).run().commit)
    assert {path for path in found if path.startswith("/usr/share/")} == {
        "/usr/share/dir", "/usr/share/file", "/usr/share/link", "/usr/share/link/inside"}  # fmt: skip
    assert found["/usr/share/dir"][0] == "-"
    assert found["/usr/share/file"] == "d00700 0 0"
    assert found["/usr/etc/gone"] == "-00600 0 0"
    assert not [path for path in found if ".wh." in path]


def test_an_opaque_directory_hides_what_is_below(repo: Any, registry: Registry, root: Path) -> None:
    base = images.os_image({"usr/share/dir/old": File(b"1"), "usr/share/dir/sub/old": File(b"2")})
    top = layer_on(base, {"usr/share/dir/new": File(b"3"), f"usr/share/dir/{ostree_tree.OPAQUE}": File(b"")})
    found = listing(repo, importer(repo, pushed(registry, top), root).run().commit)
    assert [path for path in found if path.startswith("/usr/share/dir/")] == ["/usr/share/dir/new"]


def test_the_commit_knows_manifest_config_version_and_base(repo: Any, registry: Registry, root: Path) -> None:
    image = layer_on(images.os_image(version="7.1"), {"etc/x": File(b"x")})
    done = importer(repo, pushed(registry, image), root).run()
    metadata = ostree_images.commit_metadata(repo, done.commit)
    assert metadata["ostree.manifest-digest"] == image.digest == done.manifest_digest
    assert json.loads(metadata["ostree.manifest"])["layers"][1]["digest"] == image.layers[1].digest
    assert json.loads(metadata["ostree.container.image-config"])["rootfs"]["diff_ids"][0] == image.layers[0].diff_id
    assert metadata["version"] == "7.1"
    _, base = repo.resolve_rev(ostree_refs.blob_ref(image.layers[0].digest), False)
    assert done.base == base
    _, commit, _ = repo.load_commit(done.commit)
    assert OSTree.commit_get_parent(commit) == base
    assert OSTree.commit_get_timestamp(commit) == 1704067200


def test_the_same_image_by_another_way_is_the_same_commit(repo: Any, registry: Registry, root: Path,
                                                          tmp_path: Path) -> None:  # fmt: skip
    image = layer_on(images.os_image(), {"etc/x": File(b"x")})
    by_registry = importer(repo, pushed(registry, image), root).run()
    by_layout = importer(repo, f"ostree-unverified-image:{image.write_layout(tmp_path / 'layout')}", root).run()
    assert by_layout.commit == by_registry.commit
    assert len(ostree_images.list_refs(repo, ostree_refs.IMAGE_PREFIX)) == 2


# -- what is fetched --------------------------------------------------------------------------------------------------


def test_layers_that_are_there_are_not_fetched(repo: Any, registry: Registry, root: Path) -> None:
    base = images.os_image()
    importer(repo, pushed(registry, base), root).run()
    top = layer_on(base, {"etc/x": File(b"x")})
    reference = pushed(registry, top)
    registry.forget_requests()
    said: list[str] = []
    importer(repo, reference, root, watcher=Watcher(message=said.append)).run()
    fetched = [one.path for one in registry.blob_fetches()]
    assert not [path for path in fetched if base.layers[0].digest in path]
    assert [path for path in fetched if top.layers[1].digest in path]
    assert said[2] == "ostree chunk layers already present: 1"
    assert said[3].startswith("custom layers needed: 1 (")


def test_a_known_digest_is_not_opened_again_since_2025_10(repo: Any, registry: Registry, root: Path) -> None:
    reference = pushed(registry, images.os_image())
    first = importer(repo, reference, root).run()
    registry.stop()
    again = importer(repo, reference, root).run()
    assert (again.commit, again.already_present) == (first.commit, True)
    with pytest.raises(ImportFailed, match="^Creating importer: failed to invoke method OpenImage: failed to invoke "):
        importer(repo, reference, root, skip_known_digest=False).run()


def test_a_known_digest_is_opened_again_when_its_base_layer_is_gone(repo: Any, registry: Registry, root: Path) -> None:
    image = images.os_image()
    reference = pushed(registry, image)
    first = importer(repo, reference, root).run()
    repo.set_ref_immediate(None, ostree_refs.blob_ref(image.layers[0].digest), None, None)
    again = importer(repo, reference, root).run()
    assert (again.commit, again.already_present) == (first.commit, False)


def test_a_tag_that_did_not_move_is_present(repo: Any, registry: Registry, root: Path) -> None:
    pushed(registry, images.os_image())
    tag = f"ostree-unverified-registry:{registry.host}/os:latest"
    assert not importer(repo, tag, root).run().already_present
    assert importer(repo, tag, root).run().already_present
    moved = layer_on(images.os_image(), {"etc/x": File(b"x")})
    pushed(registry, moved)
    assert importer(repo, tag, root).run().manifest_digest == moved.digest


def test_an_installer_keeps_an_image_under_another_name(repo: Any, root: Path, tmp_path: Path) -> None:
    image = images.os_image()
    layout = f"ostree-unverified-image:{image.write_layout(tmp_path / 'layout')}"
    target = ostree_refs.parse(f"ostree-unverified-registry:quay.io/x/y@{image.digest}")
    done = importer(repo, layout, root, target=target).run()
    assert ostree_images.list_refs(repo, ostree_refs.IMAGE_PREFIX) == [target.ref]
    assert importer(repo, target.text, root).run() == ostree_images.Imported(
        done.commit, done.base, image.digest, True)  # fmt: skip


# -- failures ---------------------------------------------------------------------------------------------------------


def test_an_interrupted_import_keeps_what_it_has(repo: Any, registry: Registry, root: Path) -> None:
    image = layer_on(layer_on(images.os_image(), {"etc/1": File(b"1")}), {"etc/2": File(b"2")})
    reference = pushed(registry, image)

    def stop(step: str) -> None:
        if step == "before-layer-3":
            registry.delete_blob("os", image.layers[2].digest)

    with pytest.raises(ImportFailed, match=f"^Importing: Parsing layer blob {image.layers[2].digest}: "):
        importer(repo, reference, root, watcher=Watcher(step=stop)).run()
    assert len(refs(repo)) == 2
    pushed(registry, image)
    registry.forget_requests()
    importer(repo, reference, root).run()
    assert not [one for one in registry.blob_fetches() if image.layers[0].digest in one.path]


def test_a_layer_that_is_cut_off_is_not_kept(repo: Any, registry: Registry, root: Path) -> None:
    image = layer_on(images.os_image(), {"usr/bin/big": File(os.urandom(300_000))})
    reference = pushed(registry, image)
    blob = next((registry.log.parent).rglob(f"{image.layers[1].digest[7:]}/data"))
    blob.write_bytes(blob.read_bytes()[:1000])
    with pytest.raises(ImportFailed, match="Parsing layer blob"):
        importer(repo, reference, root).run()
    assert ostree_refs.blob_ref(image.layers[1].digest) not in refs(repo)


def test_a_layer_that_is_no_archive_is_named(repo: Any, registry: Registry, root: Path, tmp_path: Path) -> None:
    image = images.os_image()
    junk = images.Layer(b"junk" * 100, images.sha256(b"junk" * 100), images.sha256(b"junk" * 100))
    broken = images.Image((*image.layers, junk), image.labels, image.tree, image.architecture, image.command)
    layout = broken.write_layout(tmp_path / "layout")
    with pytest.raises(ImportFailed, match=f"Parsing layer blob {junk.digest}: error: .*archive"):
        importer(repo, f"ostree-unverified-image:{layout}", root).run()


def test_a_manifest_that_is_gone_is_the_registrys_word(repo: Any, registry: Registry, root: Path) -> None:
    image = images.os_image()
    reference = pushed(registry, image)
    registry.delete("os", image.digest)
    with pytest.raises(ImportFailed, match="failed to invoke method OpenImage: .*manifest unknown"):
        importer(repo, reference, root).run()
    assert refs(repo) == []


@pytest.mark.parametrize("scheme", ["ostree-image-signed:docker://", "ostree-remote-registry:fedora:"])
def test_signatures_are_refused_where_they_cannot_be_checked(repo: Any, root: Path, scheme: str) -> None:
    with pytest.raises(ImportFailed, match="refusing usage|Cannot currently verify"):
        importer(repo, f"{scheme}quay.io/x/y", root).run()


def test_the_pull_secret_of_ostree_is_used_and_no_other(repo: Any, tmp_path: Path, root: Path,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    with Registry(tmp_path / "private", password_needed=True) as private:
        credentials = f"{registries.USER}:{registries.PASSWORD}"
        image = images.os_image()
        images.push(image, f"{private.host}/os:latest", credentials)
        secret = {"auths": {private.host: {"auth": base64.b64encode(credentials.encode()).decode()}}}
        home = tmp_path / "home/.docker/config.json"
        home.parent.mkdir(parents=True)
        home.write_text(json.dumps(secret))
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        reference = f"ostree-unverified-registry:{private.host}/os@{image.digest}"
        with pytest.raises(ImportFailed, match="unauthorized|authentication required"):
            importer(repo, reference, root).run()
        (root / "etc/ostree").mkdir()
        (root / "etc/ostree/auth.json").write_text(json.dumps(secret))
        assert importer(repo, reference, root).run().manifest_digest == image.digest


# -- the proxy --------------------------------------------------------------------------------------------------------


def test_a_killed_proxy_fails_the_request_that_waits(registry: Registry) -> None:
    pushed(registry, images.os_image())
    with ImageProxy(tls_verify=False) as proxy:
        image = proxy.open_image(f"docker://{registry.host}/os:latest")
        proxy.manifest(image)
        killer = threading.Timer(0.05, proxy.kill)
        killer.start()
        killer.join()
        with pytest.raises(ProxyError, match="skopeo proxy"):
            proxy.config(image)


def test_the_proxy_says_so_when_it_cannot_even_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = tmp_path / "skopeo"
    fake.write_text("#!/bin/sh\necho no luck >&2\nexit 3\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(ProxyError, match="no luck|Broken pipe|reset"), ImageProxy():
        pass


# -- pruning and the program ------------------------------------------------------------------------------------------


def test_pruning_keeps_what_origins_name_and_what_is_deployed(repo: Any, registry: Registry, root: Path) -> None:
    base = images.os_image()
    kept = layer_on(base, {"etc/kept": File(b"k")})
    deployed = layer_on(base, {"etc/deployed": File(b"d")})
    dropped = layer_on(base, {"etc/dropped": File(b"x")})
    references = {name: pushed(registry, image) for name, image in
                  (("kept", kept), ("deployed", deployed), ("dropped", dropped))}  # fmt: skip
    commits = {name: importer(repo, reference, root).run().commit for name, reference in references.items()}
    repo.set_ref_immediate(None, "ostree/0/1/0", commits["deployed"], None)
    assert ostree_images.prune_images(repo, [references["kept"], "not an image"]) == (2, 1)
    layers = {ostree_refs.blob_ref(image.layers[1].digest) for image in (kept, deployed)}
    assert set(ostree_images.list_refs(repo, ostree_refs.BLOB_PREFIX)) == {
        ostree_refs.blob_ref(base.layers[0].digest), *layers}  # fmt: skip


def test_the_program_prints_the_commit_or_one_line_of_error(repo: Any, tmp_path: Path) -> None:
    layout = images.os_image().write_layout(tmp_path / "layout")
    argv = [sys.executable, "-m", "tests.stand.ostree_import", f"--repo={tmp_path / 'repo'}"]
    done = subprocess.run([*argv, f"ostree-unverified-image:{layout}"], capture_output=True, text=True, timeout=30,
                          check=True)  # fmt: skip
    assert len(done.stdout.strip()) == 64
    failed = subprocess.run([*argv, "quay.io/x"], capture_output=True, text=True, timeout=30, check=False)
    assert (failed.returncode, failed.stdout, failed.stderr) == (1, "", "error: Missing ':' in quay.io/x\n")
