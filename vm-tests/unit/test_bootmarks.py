"""What consoles of CoreOS machines look like, whole and in pieces."""

from __future__ import annotations

import pytest
from vmlab.bootmarks import HOPELESS, LONGEST_LINE, BootMarks, Mark

GRUB = (
    "\x1b[0m\x1b[30m\x1b[40m\x1b[2J\x1b[01;01H\x1b[0m\x1b[37m\x1b[40m\x1b[02;30HGNU GRUB  version 2.12\x1b[04;02H"
    "+----------------------------------------------------------------------------+\x1b[05;02H|\x1b[05;79H|"
    "\x1b[0m\x1b[30m\x1b[47m\x1b[05;03H*Fedora CoreOS 42.20250803.3.0 (ostree:0)                                  "
    "\x1b[0m\x1b[37m\x1b[40m\x1b[05;78H\x1b[23;01H   The highlighted entry will be executed automatically in 1s.   "
    "\x1b[05;78H\x1b[23;01H   The highlighted entry will be executed automatically in 0s.   "
)
KERNEL = (
    "[    0.000000] Linux version 6.15.8-200.fc42.x86_64 (mockbuild@example) (gcc (GCC) 15.1.1) #1 SMP\r\n"
    "[    0.000000] Command line: BOOT_IMAGE=(hd0,gpt3)/boot/ostree/fedora-coreos-x/vmlinuz console=ttyS0,115200n8\r\n"
)
INITRD = (
    "[\x1b[0;32m  OK  \x1b[0m] Reached target \x1b[0;1;39mignition-complete.target\x1b[0m - Ignition Complete.\r\n"
    "         Starting \x1b[0;1;39minitrd-switch-root.service\x1b[0m - Switch Root...\r\n"
)
LOGIN = (
    "Fedora CoreOS 42.20250803.3.0\r\nKernel 6.15.8-200.fc42.x86_64 on x86_64 (ttyS0)\r\n\r\n"
    "SSH host key: SHA256:0000000000000000000000000000000000000000000 (ED25519)\r\n"
    "Ignition: ran on 2026/12/01 02:00:00 UTC (this boot)\r\nIgnition: user-provided config was applied\r\n"
    "\x1b[0;33mNo SSH authorized keys provided by Ignition or Afterburn\x1b[0m\r\nlocalhost login: "
)
DOWN = (
    "[\x1b[0;32m  OK  \x1b[0m] Reached target \x1b[0;1;39mreboot.target\x1b[0m - System Reboot.\r\n"
    "[  101.000001] systemd-shutdown[1]: Syncing filesystems and block devices.\r\n"
    "[  101.200001] systemd-shutdown[1]: Sending SIGTERM to remaining processes...\r\n"
    "[  101.500001] reboot: Restarting system\r\n"
)
WHOLE_BOOT = [Mark.GRUB_MENU, Mark.KERNEL, Mark.LOGIN]
IGNITION_FAILED = (
    "[\x1b[0;1;31mFAILED\x1b[0m] Failed to start \x1b[0;1;39mignition-files.service\x1b[0m - Ignition (files).\r\n"
    "See 'systemctl status ignition-files.service' for details.\r\n"
    "------\r\nIgnition has failed. Please ensure your config is valid. Note that only\r\n"
    "Ignition spec v3.0.0+ configs are accepted.\r\n\r\n"
    "Press Enter for emergency shell or wait 5 minutes for reboot.                 \r"
    "Press Enter for emergency shell or wait 4 minutes 45 seconds for reboot.      \r"
)


def marks(text: str, size: int = 0) -> list[Mark]:
    reader, data = BootMarks(), text.encode()
    size = size or len(data)
    return [seen.mark for at in range(0, len(data), size) for seen in reader.feed(data[at : at + size])]


def test_a_boot_from_the_menu_to_the_prompt_shows_its_marks_in_order() -> None:
    assert marks(GRUB + KERNEL + INITRD + LOGIN) == WHOLE_BOOT


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 1000])
def test_pieces_that_end_within_lines_characters_and_escapes_change_nothing(size: int) -> None:
    whole = GRUB + "│ ▲ ▼ │\r\n" + KERNEL + INITRD + LOGIN + "\r\n" + DOWN + IGNITION_FAILED
    assert marks(whole, size) == marks(whole)


def test_a_prompt_counts_although_its_line_has_no_end() -> None:
    reader = BootMarks()
    assert [seen.line for seen in reader.feed(b"\r\nnode-1.example.org login: ")] == ["node-1.example.org login:"]
    assert reader.feed(b"\x1b[6n") == [], "the same prompt is not told twice"


def test_what_only_looks_like_a_prompt_is_none() -> None:
    assert marks("systemd[1]: Started getty@tty1.service, login: is next\r\nLast login: Tue Dec  1\r\n") == []


def test_a_failed_ignition_is_seen_at_its_unit_and_at_its_explanation_and_ends_in_the_emergency_prompt() -> None:
    found = marks(IGNITION_FAILED)
    assert found == [Mark.IGNITION_FAILED, Mark.IGNITION_FAILED, Mark.EMERGENCY, Mark.EMERGENCY]
    assert set(found) <= HOPELESS


def test_ignition_that_logs_its_failure_is_seen_in_the_journal_lines() -> None:
    line = "[   11.1] ignition[781]: Ignition failed: failed to create users/groups: exit status 9\r\n"
    assert marks(line) == [Mark.IGNITION_FAILED]


@pytest.mark.parametrize(
    "line",
    [
        'You are in emergency mode. After logging in, type "journalctl -xb" to view\r\n',
        "\r\nEntering emergency mode. Exit the shell to continue.\r\n",
        "[\x1b[0;32m  OK  \x1b[0m] Reached target \x1b[0;1;39memergency.target\x1b[0m - Emergency Mode.\r\n",
        "[  OK  ] Reached target Emergency Mode.\r\n",
        "Cannot open access to console, the root account is locked.\r\n",
    ],
)
def test_emergency_mode_of_initrd_and_system_is_seen(line: str) -> None:
    assert marks(line) == [Mark.EMERGENCY]


def test_a_unit_that_mentions_emergency_is_no_emergency() -> None:
    assert marks("[  OK  ] Started emergency-timeout.service - Watch for emergency mode.\r\n") == []


def test_a_panic_is_seen_with_its_reason() -> None:
    (seen,) = BootMarks().feed(
        b"[    3.1] Kernel panic - not syncing: VFS: Unable to mount root fs on unknown-block\r\n"
    )
    assert seen.mark is Mark.PANIC and seen.line.endswith("unknown-block")


def test_a_reboot_and_a_power_off_are_told_apart() -> None:
    assert marks(DOWN) == [Mark.STOPPING, Mark.STOPPING, Mark.STOPPING, Mark.REBOOT]
    assert marks("[   50.0] reboot: Power down\r\n") == [Mark.POWER_OFF]


def test_a_boot_loader_without_its_config_is_hopeless() -> None:
    text = "error: no such device: 1c0ffee0.\r\nerror: unknown filesystem.\r\nEntering rescue mode...\r\ngrub rescue> "
    assert marks(text) == [Mark.GRUB_ERROR, Mark.GRUB_ERROR, Mark.GRUB_RESCUE]
    assert Mark.GRUB_RESCUE in HOPELESS and Mark.GRUB_ERROR not in HOPELESS, "many boot in spite of an error"


@pytest.mark.parametrize("move", ["\x1b[23;01H", "\x1b[2J", "\x1b[5;1f", "\x1bc"])
def test_what_the_cursor_is_moved_for_begins_a_line(move: str) -> None:
    assert marks(f"| a menu |{move}grub rescue> ") == [Mark.GRUB_RESCUE]


def test_an_error_of_a_program_is_none_of_the_boot_loader() -> None:
    assert marks("[   10.2] podman[99]: error: no such image\r\n") == []


def test_the_marks_of_a_second_boot_on_the_same_console_are_told_again() -> None:
    assert marks(KERNEL + LOGIN + "\r\n" + DOWN + GRUB + KERNEL + LOGIN).count(Mark.KERNEL) == 2


def test_bytes_that_are_no_text_and_lines_without_end_neither_raise_nor_pile_up() -> None:
    reader = BootMarks()
    for _round in range(50):
        reader.feed(b"\xff\xfe\x00\x1b" + b"x" * 1000)
    assert len(reader._line) <= LONGEST_LINE and len(reader._unfinished) <= 300
    assert [seen.mark for seen in reader.feed(b"\r\nlocalhost login: ")] == [Mark.LOGIN]


def test_a_string_escape_that_never_ends_hides_nothing_for_long() -> None:
    reader = BootMarks()
    reader.feed(b"\x1b]0;" + b"t" * 1000)
    assert [seen.mark for seen in reader.feed(b"\r\nlocalhost login: ")] == [Mark.LOGIN]
