"""The parts of a machine that need no guest: its command line, the probe, the numbers, a listing."""

from __future__ import annotations

import json
import os
import subprocess
from multiprocessing import get_context
from pathlib import Path

import pytest
from vmlab import kvm, tally
from vmlab.guestprocess import LISTING, parse_listing
from vmlab.qemu import Drive, Start


def test_a_machine_has_one_cpu_and_ends_at_a_reset() -> None:
    argv = Start(Drive(Path("/d")), Path("/k"), Path("/i"), "root=/dev/vda1 rw").argv(3, 4, 5, 6)
    assert argv[argv.index("-smp") + 1] == "1"
    assert "-no-reboot" in argv
    assert argv[argv.index("-append") + 1] == "root=/dev/vda1 rw"
    assert "virtio-blk-pci,drive=disk,write-cache=on" in argv


def test_a_logged_disk_has_the_same_device_and_an_odd_name_is_no_option() -> None:
    plain, logged = Drive(Path("/a,b")).options(), Drive(Path("/a,b"), Path("/log")).options()
    assert plain[-1] == logged[-1]
    assert any("filename=/a,,b," in word for word in logged)
    assert any(word.startswith("driver=blklogwrites,node-name=disk") for word in logged)


def test_the_probe_tells_a_guest_that_runs_from_one_that_does_not() -> None:
    assert kvm.runs_a_guest("tcg", timeout=30)
    assert not kvm.runs_a_guest("no-such-accelerator", timeout=30)


def test_a_guest_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvm, "_PROGRAM", bytes([0xF4, 0xEB, 0xFD]))
    assert not kvm.runs_a_guest("tcg", timeout=1)


def test_the_answer_is_kept_for_this_boot_of_the_host_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def works(accel: str) -> bool:
        asked.append(accel)
        return True

    monkeypatch.setattr(kvm, "runs_a_guest", works)
    monkeypatch.setattr(os, "access", lambda path, mode: True)
    assert [kvm.accelerator(tmp_path), kvm.accelerator(tmp_path)] == [kvm.KVM] * 2
    (tmp_path / "accelerator.json").write_text(json.dumps({"boot": "before", "accelerator": kvm.TCG}))
    assert kvm.accelerator(tmp_path) == kvm.KVM
    (tmp_path / "accelerator.json").write_text('{"boot": ')
    assert kvm.accelerator(tmp_path) == kvm.KVM
    assert len(asked) == 3


def _count_many(file: Path) -> None:
    for _ in range(200):
        tally.count(file, tally.BOOTS, 0.5)


def test_what_workers_count_at_once_adds_up(tmp_path: Path) -> None:
    file = tmp_path / "cache/counts.jsonl"
    workers = [get_context("fork").Process(target=_count_many, args=(file,)) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(30)
    with file.open("a") as stream:
        stream.write('{"what": "bo')
    assert tally.totals(file) == {"boots": (600, 300.0)}
    assert tally.totals(tmp_path / "nothing") == {}


def test_a_listing_sees_types_modes_links_and_contents_with_any_name(tmp_path: Path) -> None:
    (tmp_path / "a b\nc").write_text("x")
    (tmp_path / "a b\nc").chmod(0o4750)
    (tmp_path / "link").symlink_to("a b\nc")
    os.mkfifo(tmp_path / "pipe", 0o600)
    os.mkdir(os.fsencode(tmp_path) + b"/\xff", 0o700)
    done = subprocess.run(["sh", "-c", LISTING, "sh", str(tmp_path)], capture_output=True, check=True, timeout=60)
    found = parse_listing(done.stdout)
    owner = f"{os.getuid()}:{os.getgid()}"
    digest = "2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881"
    listed = {path[len(str(tmp_path)) :]: one for path, one in found.items()}
    assert {path: (one.kind, one.mode, one.owner, one.content) for path, one in listed.items() if path} == {
        "/a b\nc": ("f", "4750", owner, digest),
        "/link": ("l", "777", owner, "a b\nc"),
        "/pipe": ("p", "600", owner, ""),
        "/\udcff": ("d", "700", owner, ""),
    }


def test_a_listing_of_nothing_is_empty(tmp_path: Path) -> None:
    done = subprocess.run(
        ["sh", "-c", LISTING, "sh", str(tmp_path / "no")], capture_output=True, check=False, timeout=60
    )
    assert parse_listing(done.stdout) == {}
