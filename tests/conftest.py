"""The numbers that tests have to state (`record_property("numbers", …)`) are shown at the end of a run."""

from __future__ import annotations

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = (report for found in terminalreporter.stats.values() for report in found)
    properties = (pair for report in reports for pair in getattr(report, "user_properties", ()))
    numbers = dict.fromkeys(str(value) for name, value in properties if name == "numbers")
    if numbers:
        terminalreporter.section("numbers")
        for line in numbers:
            terminalreporter.write_line(line)
