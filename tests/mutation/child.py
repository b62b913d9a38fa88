"""A pytest plugin of the processes that run tests on a mutant; the harness loads it with `-p`.

It runs files in the order of the command line, reports seconds per file and the failed tests, and
bounds memory. The process is killed when the harness ends.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
from collections import defaultdict
from pathlib import Path
from typing import Final

import pytest

REPORT: Final = "MUTATION_REPORT"
"""The environment variable that names the file to report to."""

_MAX_ADDRESS_SPACE: Final = 16 << 30
_PR_SET_PDEATHSIG: Final = 1

_seconds: dict[str, float] = defaultdict(float)
_failed: list[str] = []


def pytest_configure() -> None:
    """Bound what a wild mutant can take."""
    # The hard limit stays: code that looks at it takes the path that it takes without a harness.
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_ADDRESS_SPACE, hard))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Undo the order of `tests/conftest.py`, which begins with long files."""
    place = {name.split("::")[0]: number for number, name in enumerate(config.args)}
    items.sort(key=lambda item: place[item.nodeid.split("::")[0]])


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add up durations of set-up, call and teardown."""
    _seconds[report.nodeid.split("::")[0]] += report.duration
    if report.failed:
        _failed.append(report.nodeid)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Count a file that cannot be imported as failed."""
    if report.failed:
        _failed.append(report.nodeid)


def pytest_sessionfinish() -> None:
    """Write the report."""
    Path(os.environ[REPORT]).write_text(json.dumps({"seconds": _seconds, "failed": _failed}))
