"""Paths of a root: its own links are followed, and nobody else's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mcdaemon.errors import Broken
from mcdaemon.host.root import Root, open_parent

USER = 1234


@pytest.fixture
def root(tmp_path: Path) -> Root:
    """A deployment's tree with the links of an RHCOS image, and its stateroot's /var beside it."""
    deployment = tmp_path / "sysroot/ostree/deploy/rhcos/deploy/abc.0"
    var = tmp_path / "sysroot/ostree/deploy/rhcos/var"
    for name in ("usr/bin", "etc/systemd/system", "var", "sysroot"):
        (deployment / name).mkdir(parents=True)
    for name in ("home/core", "roothome", "usrlocal/bin", "opt", "srv", "mnt"):
        (var / name).mkdir(parents=True)
    for link, target in (
        ("home", "var/home"),
        ("root", "var/roothome"),
        ("opt", "/var/opt"),
        ("srv", "./var//srv"),
        ("mnt", "var/mnt"),
        ("bin", "usr/bin"),
        ("usr/local", "../var/usrlocal"),
    ):
        (deployment / link).symlink_to(target)
    return Root.of_deployment(tmp_path / "sysroot", "rhcos", "abc.0")


@pytest.mark.parametrize(
    ("path", "canonical"),
    [
        ("/usr/local/bin/x", "/var/usrlocal/bin/x"),
        ("/usr/local", "/var/usrlocal"),
        ("/root/.bashrc", "/var/roothome/.bashrc"),
        ("/root", "/var/roothome"),
        ("/home/core/.ssh", "/var/home/core/.ssh"),
        ("/opt/a/b/c", "/var/opt/a/b/c"),
        ("/srv/x", "/var/srv/x"),
        ("/bin/sh", "/usr/bin/sh"),
        ("/etc/foo", "/etc/foo"),
        ("//etc//./foo/", "/etc/foo"),
        ("/var/lib/x", "/var/lib/x"),
        ("/not/there/yet", "/not/there/yet"),
        ("/var", "/var"),
        ("/", "/"),
    ],
)
def test_the_links_of_the_image_are_resolved(root: Root, path: str, canonical: str) -> None:
    assert root.canonical(path) == canonical
    assert root.shared(path) == canonical.startswith("/var")


def test_var_is_where_the_stateroot_has_it(root: Root) -> None:
    assert root.locate("/usr/local/bin/x") == root.var / "usrlocal/bin/x"
    assert root.locate("/var") == root.var
    assert root.locate("/etc/foo") == root.path / "etc/foo"
    assert root.locate("/") == root.path


def test_a_link_as_the_last_component_is_not_followed_outside_of_the_layout(root: Root) -> None:
    (root.path / "etc/resolv.conf").symlink_to("/run/resolv.conf")
    assert root.canonical("/etc/resolv.conf") == "/etc/resolv.conf"


def test_an_absolute_link_stays_inside_the_root(root: Root, tmp_path: Path) -> None:
    (root.path / "etc/out").symlink_to(str(tmp_path))
    assert root.canonical("/etc/out/x") == f"{tmp_path}/x"
    assert root.locate("/etc/out/x") == root.path / str(tmp_path)[1:] / "x"


def test_dots_do_not_climb_out_of_the_root(root: Root) -> None:
    (root.path / "etc/up").symlink_to("../../../../../../../../../../etc/systemd")
    (root.var / "up").symlink_to("../../../etc")
    assert root.canonical("/etc/up/x") == "/etc/systemd/x"
    assert root.canonical("/var/up/x") == "/etc/x"


def test_a_link_of_a_user_is_not_followed(root: Root) -> None:
    os.symlink("/etc", root.var / "home/core/link")
    os.lchown(root.var / "home/core/link", USER, USER)
    assert root.canonical("/home/core/link/x") == "/var/home/core/link/x"
    refused = "cannot reach /home/core/link/x: /var/home/core/link is a link that a user could have placed"
    with pytest.raises(Broken, match=refused), open_parent(root, "/home/core/link/x"):
        pass


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o775])
def test_a_link_of_root_in_a_directory_that_others_can_write_is_not_followed(root: Root, mode: int) -> None:
    (root.var / "home/core/link").symlink_to("/etc")
    (root.var / "home/core").chmod(mode)
    assert root.canonical("/home/core/link/x") == "/var/home/core/link/x"


def test_a_link_of_root_in_a_directory_of_root_that_a_user_moved_there_is_not_followed(root: Root) -> None:
    """Everything on the way counts: below a user's directory there is no trust."""
    os.chown(root.var / "home/core", USER, USER)
    (root.var / "home/core/roots").mkdir(mode=0o755)
    (root.var / "home/core/roots/link").symlink_to("/etc")
    assert root.canonical("/home/core/roots/link/x") == "/var/home/core/roots/link/x"


def test_links_that_lead_in_a_circle_are_refused(root: Root) -> None:
    (root.path / "etc/a").symlink_to("b")
    (root.path / "etc/b").symlink_to("a")
    refused = "cannot reach /etc/a/x: /etc/[ab] leads through too many links"
    with pytest.raises(Broken, match=refused), open_parent(root, "/etc/a/x"):
        pass


def test_a_link_to_the_top_itself_has_no_place(root: Root) -> None:
    (root.path / "all").symlink_to("/")
    with pytest.raises(Broken, match="cannot manage /all: it is the top of the root"), open_parent(root, "/all"):
        pass


@pytest.mark.parametrize("path", ["", "etc/x", "./x", "../x", "/etc/../x", "/..", "/etc/x\0y"])
def test_a_path_that_is_not_absolute_and_canonical_is_refused(root: Root, path: str) -> None:
    """Field case FILE-04."""
    for use in (root.canonical, root.locate, root.shared):
        with pytest.raises(Broken, match="cannot use the path"):
            use(path)


def test_a_root_that_is_not_there_is_named(tmp_path: Path) -> None:
    root = Root(tmp_path / "gone", tmp_path / "var")
    with pytest.raises(Broken, match="cannot open the root .*/gone: No such file"):
        root.canonical("/etc/x")


def test_a_parent_that_is_missing_or_a_file_holds_nothing(root: Root) -> None:
    (root.path / "etc/file").write_text("x")
    for path in ("/etc/missing/x", "/etc/file/x", "/etc/file/y/x"):
        with open_parent(root, path) as place:
            assert place is None
    refused = "cannot reach /etc/file/y/x: /etc/file is not a directory"
    with pytest.raises(Broken, match=refused) as caught, open_parent(root, "/etc/file/y/x", strict=True):
        pass
    assert caught.value.code == "no-directory"


def test_no_descriptor_is_left_open(root: Root) -> None:
    before = os.listdir("/proc/self/fd")
    for path in ("/usr/local/bin/x", "/etc/missing/x", "/", "/var", "/home/core/x"):
        root.canonical(path)
    with pytest.raises(Broken), open_parent(root, "/"):
        pass
    assert os.listdir("/proc/self/fd") == before


def test_the_host_is_a_root_like_any_other() -> None:
    root = Root.host()
    assert root.locate("/etc/passwd") == Path("/etc/passwd")
    assert root.locate("/var/tmp") == Path("/var/tmp")
