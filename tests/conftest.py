"""What a test run says at its end, besides how many tests passed."""

from __future__ import annotations

from collections import Counter

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Add up what tests recorded as "simulated", those of other processes included."""
    totals: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport) and report.when == "call":
                for name, counts in report.user_properties:
                    if name == "simulated" and isinstance(counts, dict):
                        totals.update(counts)
    if totals:
        said = ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in totals.items())
        terminalreporter.write_line(f"simulated: {said}")
