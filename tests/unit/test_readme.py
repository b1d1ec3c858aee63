"""The README says what is true: its commands, settings, steps and places exist."""

from __future__ import annotations

import argparse
import re
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

from mcdaemon import cli
from mcdaemon.decide import Step
from mcdaemon.settings import Settings

PROJECT = Path(__file__).resolve().parents[2]
README = (PROJECT / "README.md").read_text()


def rows(heading: str) -> list[list[str]]:
    """The cells of the table below a heading, without its head."""
    section = README.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def subcommands() -> set[str]:
    parser = cli.parser()
    action = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return set(action.choices)


def test_every_command_it_shows_is_one_and_every_command_is_shown() -> None:
    shown = set(re.findall(r"^    mcdaemon ([a-z]+)", README, re.MULTILINE))
    assert shown == subcommands() - {"early"}


def test_every_make_target_it_shows_is_one() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (PROJECT / "Makefile").read_text(), re.MULTILINE))
    shown = set(re.findall(r"(?:^    |`)make ([a-z-]+)", README, re.MULTILINE))
    assert shown and shown <= targets


@pytest.mark.parametrize("keys, default", [(row[0], row[1]) for row in rows("Settings")])
def test_the_settings_it_shows_have_these_defaults(keys: str, default: str) -> None:
    for number, key in enumerate(re.findall(r"`([a-z_.]+)`", keys)):
        found: Any = reduce(getattr, key.split("."), Settings())
        value = ", ".join(found) if isinstance(found, tuple) else found
        wanted = default.split(", ")[number] if "," in default else default
        shown = f"{value:g}" if isinstance(value, float) else str(value) if value else "none"
        assert shown == wanted.strip("`")


def test_the_order_of_an_update_names_every_step_that_has_an_effect() -> None:
    shown = {row[0] for row in rows("The order of an update")}
    assert shown == {step.value for step in Step} - {Step.REST.value, Step.REJECT.value}


def test_the_places_it_names_exist() -> None:
    named = re.findall(r"`((?:mcdaemon|tests|systemd)/[a-z_./]*)`", README)
    assert named
    assert [name for name in named if not (PROJECT / name).exists()] == []
