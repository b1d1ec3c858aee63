"""`make zipapp` and `make install` on a directory that stands for a node; the units before systemd's own judge."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Optional

import pytest
import yaml

from mcdaemon import settings

ROOT = Path(__file__).resolve().parents[2]
SYSTEM = "etc/systemd/system"
ARCHIVE = "usr/local/lib/mcdaemon/mcdaemon.pyz"
ENABLED = {
    f"{SYSTEM}/multi-user.target.wants/mcdaemon.service": "/etc/systemd/system/mcdaemon.service",
    f"{SYSTEM}/sysinit.target.wants/mcdaemon-early.service": "/etc/systemd/system/mcdaemon-early.service",
}
INSTALLED = {
    ARCHIVE: 0o755,
    "usr/local/bin/mcdaemon": 0o755,
    f"{SYSTEM}/mcdaemon.service": 0o644,
    f"{SYSTEM}/mcdaemon-early.service": 0o644,
    "etc/systemd/system-preset/50-mcdaemon.preset": 0o644,
    "etc/tmpfiles.d/mcdaemon.conf": 0o644,
    "etc/mcdaemon/mcdaemon.yaml": 0o644,
}
# What the archive carries for the agent; gi comes from the host.
LIBRARIES = "certifi,charset_normalizer,idna,prometheus_client,requests,tenacity,tomli,urllib3,yaml"
IMPORT_ALL = """
import importlib, sys, unittest.mock, zipfile
archive, names = sys.argv[1], sys.argv[2].split(",")
sys.path.insert(0, archive)
# Only /usr/bin/python3 has PyGObject; for the others it is enough that the modules load.
sys.modules.update({name: unittest.mock.MagicMock() for name in ("gi", "gi.repository", "pydbus")})
for name in zipfile.ZipFile(archive).namelist():
    if name.startswith("mcdaemon/"):
        names.append(name[:-3].replace("/", ".").replace(".__init__", ""))
for name in names:
    module = importlib.import_module(name)
    assert module.__file__.startswith(archive + "/"), (name, module.__file__)
print(sys.modules["certifi"].where())
"""
ONESHOT = "[Service]\nType=oneshot\nRemainAfterExit=yes\nExecStart=/usr/bin/true\n"


def run(command: Sequence[str], environment: Optional[dict[str, str]] = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=55, stdin=subprocess.DEVNULL
    )


def make(*arguments: str) -> str:
    assert sys.prefix != sys.base_prefix, "run the tests with `make test`: its venv holds the wheels"
    # A make that runs the tests hands its own flags down; the tree's own archive and venv are not to be touched.
    environment = {name: v for name, v in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    done = run(["make", "--no-print-directory", f"VENV={sys.prefix}", *arguments], environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    make("zipapp", f"DIST={folder}")
    return folder


@pytest.fixture(scope="module")
def tree(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tree")
    make("install", f"DIST={dist}", f"DESTDIR={folder}")
    return folder


def listing(tree: Path) -> set[str]:
    return {str(path.relative_to(tree)) for path in tree.rglob("*") if path.is_symlink() or path.is_file()}


# -- the archive


def test_the_archive_is_the_same_bytes_every_time(dist: Path, tmp_path: Path) -> None:
    make("zipapp", f"DIST={tmp_path}")
    first, second = ((folder / "mcdaemon.pyz").read_bytes() for folder in (dist, tmp_path))
    assert hashlib.sha256(first).digest() == hashlib.sha256(second).digest()


def test_the_archive_is_pure_python_and_carries_the_licences(dist: Path) -> None:
    names = zipfile.ZipFile(dist / "mcdaemon.pyz").namelist()
    others = [name for name in names if not name.endswith(".py")]
    assert all(".dist-info/" in name for name in others)
    projects = {name.split("-")[0] for name in others}
    assert projects >= {"charset_normalizer", "idna", "prometheus_client", "pyyaml", "requests", "tenacity", "urllib3"}
    assert not [name for name in names if name.startswith(("tests/", "gi/"))]


def test_the_archive_is_small_enough_for_a_machineconfig(dist: Path) -> None:
    # As a base64 data URL it must stay below the 1.5 MiB that etcd takes for one object.
    assert (dist / "mcdaemon.pyz").stat().st_size * 4 / 3 < 1024 * 1024


def interpreters() -> list[str]:
    found = ["/usr/bin/python3"]
    for minor in range(9, 15):
        pyenv = sorted(Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/python3"))
        system = shutil.which(f"python3.{minor}", path="/usr/bin:/usr/local/bin")
        found += [str(path) for path in pyenv[-1:]] or ([system] if system else [])
    return found


@pytest.mark.parametrize("interpreter", interpreters())
def test_every_interpreter_here_imports_all_modules_from_the_archive_and_writes_nothing(
    interpreter: str, dist: Path, tmp_path: Path
) -> None:
    archive = str(dist / "mcdaemon.pyz")
    # -S: what the interpreter's own site-packages load at its start must not stand in for what the archive lacks.
    done = run([interpreter, "-ISB", "-W", "error", "-c", IMPORT_ALL, archive, LIBRARIES], {"TMPDIR": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(("/etc/pki/", "/etc/ssl/")), "the authorities are not the host's"
    assert not list(tmp_path.iterdir())


def test_the_archive_runs_as_a_program_whatever_its_environment_says(dist: Path, tmp_path: Path) -> None:
    (tmp_path / "requests.py").write_text("raise SystemExit('a file of the caller was imported')")
    done = run([str(dist / "mcdaemon.pyz"), "--version"], {"PYTHONPATH": str(tmp_path), "HOME": str(tmp_path)})
    assert (done.returncode, done.stdout.split(" ")[0]) == (0, "mcdaemon"), done.stderr


def test_pydbus_in_the_archive_works_with_the_distributions_gi_and_without_setuptools(dist: Path) -> None:
    # EL9 hosts need not have setuptools; some old packages ask it for their own version at import.
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); sys.modules['pkg_resources'] = sys.modules['setuptools'] = None\n"
        "import pydbus; print(pydbus.__file__)"
    )
    archive = str(dist / "mcdaemon.pyz")
    done = run(["/usr/bin/python3", "-IB", "-c", program, archive])
    assert done.stdout.startswith(archive), done.stderr


def test_an_interpreter_that_is_too_old_is_refused_in_words() -> None:
    # The first file that runs is read by the old interpreter too, so it has to compile there before it can refuse.
    source = (ROOT / ".zipapp/__main__.py").read_text()
    program = f"import sys; sys.hexversion = 0x030608f0; exec(compile({source!r}, '__main__.py', 'exec'))"
    for interpreter in ["/usr/bin/python3", *map(str, Path.home().glob(".pyenv/versions/3.6.*/bin/python3"))]:
        done = run([interpreter, "-IB", "-c", program])
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith("cannot run on this Python: mcdaemon needs 3.9 or newer"), done.stderr


def test_a_wheel_that_was_tampered_with_is_not_carried(tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    shutil.copytree(Path(sys.prefix) / "wheels", wheels)
    victim = next(wheels.glob("requests-*.whl"))
    victim.write_bytes(victim.read_bytes() + b"\0")
    output = tmp_path / "mcdaemon.pyz"
    done = run([sys.executable, str(ROOT / ".zipapp/build.py"), "--wheels", str(wheels), "--output", str(output)])
    assert done.returncode == 1
    assert done.stderr.startswith("cannot find the pinned wheels of requests in ")
    assert not output.exists()


def test_what_the_archive_carries_is_what_the_tests_run_with() -> None:
    def versions(path: Path) -> dict[str, str]:
        return dict(re.findall(r"^([A-Za-z][\w.-]*)==(\S+)", path.read_text(), re.MULTILINE))

    carried, tested = versions(ROOT / ".zipapp/requirements.txt"), versions(ROOT / "tests/requirements.txt")
    del carried["pydbus"]  # comes with PyGObject from Debian for the tests
    assert carried.items() <= tested.items()


# -- the installed tree


def test_install_puts_down_exactly_what_it_should_with_the_modes(tree: Path) -> None:
    assert listing(tree) == {*INSTALLED, *ENABLED}
    assert {name: (tree / name).stat().st_mode & 0o7777 for name in INSTALLED} == INSTALLED


def test_the_enablement_links_are_the_ones_that_systemctl_would_make(tree: Path, tmp_path: Path) -> None:
    for unit in ("mcdaemon.service", "mcdaemon-early.service"):
        (tmp_path / SYSTEM).mkdir(parents=True, exist_ok=True)
        shutil.copy(tree / SYSTEM / unit, tmp_path / SYSTEM / unit)
        done = run(["systemctl", f"--root={tmp_path}", "enable", unit])
        assert done.returncode == 0, done.stderr
    made = {name: os.readlink(tmp_path / name) for name in listing(tmp_path) if (tmp_path / name).is_symlink()}
    assert made == ENABLED
    assert {name: os.readlink(tree / name) for name in ENABLED} == ENABLED


def test_the_preset_enables_both_units(tree: Path) -> None:
    for unit in ("mcdaemon.service", "mcdaemon-early.service"):
        assert f"enable {unit}\n" in (tree / "etc/systemd/system-preset/50-mcdaemon.preset").read_text()


@pytest.mark.parametrize("target", ["../var/usrlocal", "/var/usrlocal"])
def test_on_an_ostree_tree_the_agent_lands_in_the_shared_var(target: str, dist: Path, tmp_path: Path) -> None:
    (tmp_path / "usr").mkdir()
    (tmp_path / "usr/local").symlink_to(target)
    make("install", f"DIST={dist}", f"DESTDIR={tmp_path}")
    assert os.readlink(tmp_path / "usr/local") == target
    assert (tmp_path / "var/usrlocal/lib/mcdaemon/mcdaemon.pyz").is_file()
    assert (tmp_path / "var/usrlocal/bin/mcdaemon").is_file()
    make("uninstall", f"DESTDIR={tmp_path}")
    assert listing(tmp_path) == {"usr/local"}


def test_settings_that_are_there_survive_an_install_and_changed_ones_an_uninstall(dist: Path, tmp_path: Path) -> None:
    own = tmp_path / "etc/mcdaemon/mcdaemon.yaml"
    own.parent.mkdir(parents=True)
    own.write_text("state_dir: /var/lib/mcdaemon\n")
    make("install", f"DIST={dist}", f"DESTDIR={tmp_path}")
    make("uninstall", f"DESTDIR={tmp_path}")
    assert listing(tmp_path) == {"etc/mcdaemon/mcdaemon.yaml"}
    assert own.read_text() == "state_dir: /var/lib/mcdaemon\n"


def test_installing_twice_is_the_same_as_once(dist: Path, tmp_path: Path) -> None:
    for _ in range(2):
        make("install", f"DIST={dist}", f"DESTDIR={tmp_path}")
    assert listing(tmp_path) == {*INSTALLED, *ENABLED}


def test_the_settings_that_are_installed_change_nothing(tree: Path) -> None:
    assert settings.parse((tree / "etc/mcdaemon/mcdaemon.yaml").read_text(), "mcdaemon.yaml") == settings.Settings()


def test_the_settings_that_are_installed_show_every_key_with_its_default(tree: Path) -> None:
    # A commented key is `#key:`, with its indentation after the sign; what follows "# " is prose.
    text = (tree / "etc/mcdaemon/mcdaemon.yaml").read_text()
    shown = "\n".join(line[1:] for line in text.splitlines() if re.match(r"#(  )*[a-z]", line))
    assert settings.parse(shown, "mcdaemon.yaml") == settings.Settings()
    assert keys(yaml.safe_load(shown)) == keys(dataclasses.asdict(settings.Settings()))


def keys(value: object, name: str = "") -> set[str]:
    if not isinstance(value, dict):
        return {name}
    return {key for inner in value for key in keys(value[inner], f"{name}.{inner}")}


def test_the_tmpfiles_make_the_agents_places_private(tree: Path, tmp_path: Path) -> None:
    done = run(["systemd-tmpfiles", "--create", f"--root={tmp_path}", str(tree / "etc/tmpfiles.d/mcdaemon.conf")])
    assert done.returncode == 0, done.stderr
    private = ("var/lib/mcdaemon", "var/lib/mcdaemon/payload", "var/lib/mcdaemon/machineconfigs")
    assert {name: (tmp_path / name).stat().st_mode & 0o777 for name in private} == dict.fromkeys(private, 0o700)
    assert (tmp_path / "run/mcdaemon").is_dir()


# -- the units


def verify(units: Path, *names: str) -> str:
    """What systemd-analyze has to say about `names`, with `units` before the host's own."""
    environment = {"PATH": "/usr/bin:/bin", "SYSTEMD_UNIT_PATH": f"{units}:"}
    done = run(["systemd-analyze", "verify", "--man=no", *names], environment)
    return done.stderr + (f"exit status {done.returncode}" if done.returncode else "")


def test_systemd_has_nothing_to_say_against_the_units(tree: Path) -> None:
    assert verify(tree / SYSTEM, "mcdaemon.service", "mcdaemon-early.service") == ""


def test_a_unit_that_is_wrong_would_be_noticed(tree: Path, tmp_path: Path) -> None:
    shutil.copytree(tree / SYSTEM, tmp_path, dirs_exist_ok=True, symlinks=True)
    unit = tmp_path / "mcdaemon.service"
    unit.write_text(unit.read_text().replace("WatchdogSec=5min", "WatchdogSec=often"))
    assert "Failed to parse sec value, ignoring: often" in verify(tmp_path, "mcdaemon.service")


# The units of a node that the agent orders itself against, with the ordering that they have there (rpm-ostree.md 5.2,
# mcd.md appendix F); Debian has none of them.
NODE_UNITS = {
    "ostree-remount.service": "DefaultDependencies=no\nConditionKernelCommandLine=ostree\n"
    "After=-.mount var.mount systemd-remount-fs.service\nBefore=local-fs.target umount.target\n",
    "ostree-finalize-staged.service": "DefaultDependencies=no\nRequiresMountsFor=/sysroot /boot /etc\n"
    "After=local-fs.target systemd-journal-flush.service\nBefore=basic.target final.target\nConflicts=final.target\n",
    "rpm-ostreed.service": "RequiresMountsFor=/boot\n",
    "NetworkManager.service": "Wants=network.target\nAfter=network-pre.target dbus.service\nBefore=network.target\n",
    "kubelet-dependencies.target": "Before=crio.service kubelet.service\n",
    "crio.service": "Requires=kubelet-dependencies.target\nAfter=network-online.target kubelet-dependencies.target\n",
    "kubelet.service": "Requires=crio.service kubelet-dependencies.target\n"
    "After=crio.service kubelet-dependencies.target ostree-finalize-staged.service\n",
}


def node(tree: Path, units: Path) -> None:
    shutil.copytree(tree / SYSTEM, units, dirs_exist_ok=True, symlinks=True)
    wants = units / "multi-user.target.wants"
    for name, section in NODE_UNITS.items():
        body = f"[Unit]\n{section}{'' if name.endswith('.target') else ONESHOT}"
        (units / name).write_text(body)
        (wants / name).symlink_to(units / name)
    # A link into /etc of this machine would be a dangling one.
    for name, unit in ENABLED.items():
        link = units / Path(name).relative_to(SYSTEM)
        link.unlink()
        link.symlink_to(units / Path(unit).name)


def test_a_whole_boot_with_the_units_has_no_ordering_cycle(tree: Path, tmp_path: Path) -> None:
    node(tree, tmp_path)
    said = verify(tmp_path, "multi-user.target", "mcdaemon-early.service")
    assert "cycle" not in said
    assert "mcdaemon" not in said


def test_a_cycle_would_be_noticed(tree: Path, tmp_path: Path) -> None:
    node(tree, tmp_path)
    unit = tmp_path / "mcdaemon-early.service"
    unit.write_text(unit.read_text().replace("After=local-fs.target", "After=basic.target local-fs.target"))
    assert "cycle" in verify(tmp_path, "multi-user.target", "mcdaemon-early.service")
