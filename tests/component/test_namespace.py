"""Writing below a read-only /sysroot from a child in a real mount namespace: only its errors reach the parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mcdaemon.errors import Broken, Failure, Held, HoldReason, Irreconcilable, Transient
from mcdaemon.host import namespace, process
from mcdaemon.host.namespace import with_writable
from tests.component.leftovers import children

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: mounts")


def mount(*arguments: object) -> None:
    subprocess.run(["mount", *map(str, arguments)], check=True, timeout=10)


@pytest.fixture
def sysroot(tmp_path: Path) -> Iterator[Path]:
    """A read-only bind mount, as ostree makes it."""
    place = tmp_path / "sysroot"
    place.mkdir()
    (place / "old").write_text("old")
    mount("--bind", place, place)
    try:
        mount("--make-private", place)
        mount("-o", "remount,bind,ro", place)
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True, timeout=10)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """No child and no descriptor survives, and no second agent goes on in this process's name."""
    pid, descriptors, before = os.getpid(), os.listdir("/proc/self/fd"), children()
    yield
    assert os.getpid() == pid
    assert os.listdir("/proc/self/fd") == descriptors
    assert children() <= before


def raising(error: BaseException) -> Callable[[], None]:
    def work() -> None:
        raise error

    return work


def failure_of(sysroot: Path, work: Callable[[], Any]) -> Failure:
    with pytest.raises(Failure) as caught:
        with_writable(sysroot, work)
    return caught.value


# -- the namespace ----------------------------------------------------------------------------------------------------


def test_what_is_read_only_here_is_written_there(sysroot: Path) -> None:
    with pytest.raises(OSError, match="Read-only"):
        (sysroot / "new").write_text("x")
    with_writable(sysroot, lambda: os.mkdir(sysroot / "new"))
    assert (sysroot / "new").is_dir()


def test_the_agents_own_namespace_stays_as_it_was(sysroot: Path) -> None:
    before = Path("/proc/self/mountinfo").read_text(), os.readlink("/proc/self/ns/mnt")
    with_writable(sysroot, lambda: None)
    assert (Path("/proc/self/mountinfo").read_text(), os.readlink("/proc/self/ns/mnt")) == before
    with pytest.raises(OSError, match="Read-only"):
        (sysroot / "old").write_text("x")


def test_a_mount_made_by_the_work_is_seen_by_nobody_else(sysroot: Path, tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    with_writable(sysroot, lambda: mount("-t", "tmpfs", "tmpfs", tmp_path / "m"))
    assert str(tmp_path / "m") not in Path("/proc/self/mountinfo").read_text()


def test_what_the_work_changes_in_memory_stays_in_the_child(sysroot: Path) -> None:
    seen: list[int] = []
    with_writable(sysroot, lambda: seen.append(1))
    assert seen == []


def test_a_sysroot_that_is_no_mount_is_named(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    error = failure_of(tmp_path / "plain", lambda: None)
    assert isinstance(error, Broken) and f"cannot write below {tmp_path}/plain: Invalid argument" in str(error)


def test_a_sysroot_that_is_gone_is_named(tmp_path: Path) -> None:
    assert "cannot write below" in str(failure_of(tmp_path / "gone", lambda: None))


# -- errors -----------------------------------------------------------------------------------------------------------

ERRORS = {
    "broken": Broken("cannot a", "hint é", "some-code"),
    "broken without a code": Broken("cannot a\nsecond line"),
    "transient": Transient("cannot b", "hint", "code", retry_after=3.5),
    "transient without patience": Transient("cannot b"),
    "held": Held(HoldReason.SPACE, "cannot c", "free space", retry_after=60.0),
    "held for another reason": Held(HoldReason.OTHER_CLIENT, "cannot c"),
    "irreconcilable": Irreconcilable("cannot d", "/spec/x", "hint"),
    "long": Broken("cannot " + "x" * 500_000),
}


@pytest.mark.parametrize("case", ERRORS)
def test_a_failure_arrives_as_it_was_raised(sysroot: Path, case: str) -> None:
    wanted = ERRORS[case]
    error = failure_of(sysroot, raising(wanted))
    assert type(error) is type(wanted)
    assert {**vars(error), "code": error.code} == {**vars(wanted), "code": wanted.code}


@pytest.mark.parametrize(("number", "kind"), [(28, Held), (11, Transient), (16, Transient), (30, Broken), (5, Broken)])
def test_an_error_of_the_kernel_is_mapped_as_everywhere(sysroot: Path, number: int, kind: type) -> None:
    error = failure_of(sysroot, raising(OSError(number, os.strerror(number))))
    assert type(error) is kind and f"cannot write below {sysroot}: {os.strerror(number)}" in str(error)


UNFORESEEN = [KeyError("canary"), AssertionError("canary"), ValueError("canary"), RuntimeError("canary"),
              UnicodeDecodeError("utf-8", b"canary", 0, 1, "x"), SystemExit(0), SystemExit("canary"),
              KeyboardInterrupt(), GeneratorExit(), MemoryError()]  # fmt: skip


@pytest.mark.parametrize("error", UNFORESEEN, ids=[f"{type(e).__name__}-{n}" for n, e in enumerate(UNFORESEEN)])
def test_an_error_that_nobody_foresaw_ends_the_child_and_is_named_without_its_text(
    sysroot: Path, error: BaseException
) -> None:
    """Its text may be content of a managed file. The child must not run on as a second agent."""
    found = failure_of(sysroot, raising(error))
    assert isinstance(found, Broken)
    assert type(error).__name__ in str(found) and "test_namespace.py:" in str(found)
    assert "canary" not in str(found)


def test_an_error_while_another_one_is_handled_does_not_confuse_the_two(sysroot: Path) -> None:
    try:
        raise ValueError("outer")
    except ValueError:
        with_writable(sysroot, lambda: None)
        assert failure_of(sysroot, raising(Broken("cannot inner"))).sentence == "cannot inner"


def test_what_was_written_before_an_error_stays(sysroot: Path) -> None:
    def work() -> None:
        (sysroot / "new").write_text("x")
        raise Broken("cannot go on")

    failure_of(sysroot, work)
    assert (sysroot / "new").exists()


@pytest.mark.parametrize("status", [0, 1, 7])
def test_a_child_that_leaves_without_a_word_did_its_work_or_not(sysroot: Path, status: int) -> None:
    if status == 0:
        with_writable(sysroot, lambda: os._exit(0))
    else:
        assert "wait status" in str(failure_of(sysroot, lambda: os._exit(status)))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_a_child_that_is_killed_says_nothing_about_the_target(sysroot: Path, number: signal.Signals) -> None:
    """The OOM killer's choice must not write a config off."""

    def work() -> None:
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    error = failure_of(sysroot, work)
    assert isinstance(error, Transient) and f"killed by signal {int(number)}" in str(error)


# -- time -------------------------------------------------------------------------------------------------------------


def test_a_child_that_hangs_is_killed_in_time(sysroot: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespace, "TIMEOUT", 0.3)
    begin = time.monotonic()
    error = failure_of(sysroot, lambda: time.sleep(60))
    assert isinstance(error, Transient) and f"cannot write below {sysroot}: it took longer" in str(error)
    assert time.monotonic() - begin < 5


def test_a_child_that_ignores_signals_is_killed_all_the_same(sysroot: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespace, "TIMEOUT", 0.3)

    def work() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        while True:
            time.sleep(1)

    assert isinstance(failure_of(sysroot, work), Transient)


def test_the_watchdog_hears_of_long_work(sysroot: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit for the work is longer than the watchdog's."""
    beats: list[float] = []
    monkeypatch.setattr(process, "BEAT", 0.05)
    process.on_wait(lambda: beats.append(time.monotonic()))
    try:
        with_writable(sysroot, lambda: time.sleep(0.6))
    finally:
        process.on_wait(lambda: None)
    assert len(beats) >= 5


def test_the_child_does_not_run_what_the_parent_has_to_do_at_its_end(tmp_path: Path) -> None:
    """In a process of its own: finally blocks, exit handlers and buffered output of the parent."""
    program = f"""
import atexit, sys
from pathlib import Path
from mcdaemon.host.namespace import with_writable
atexit.register(lambda: print("exit handler"))
sys.stdout.write("buffered ")
def work():
    raise LookupError("x")
try:
    with_writable(Path({str(tmp_path)!r}), work)
except Exception as error:
    print(type(error).__name__)
finally:
    print("finally")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=20)
    assert done.stdout == "buffered Broken\nfinally\nexit handler\n", done
    assert done.stderr == ""
