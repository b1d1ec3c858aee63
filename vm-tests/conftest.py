"""Shared by the harness's own tests and the scenarios: the numbers that tests state are shown at the end."""

from __future__ import annotations

from tests.conftest import pytest_terminal_summary

__all__ = ["pytest_terminal_summary"]
