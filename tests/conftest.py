"""In what order files are run, and what is said at the end besides how many tests passed."""

from __future__ import annotations

import gc
import os
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from typing import Final

import psutil
import pytest

LONG_FILES: Final = (
    "tests/differential/test_echo_device.py",
    "tests/oracle/test_detours.py",
    "tests/sim/test_million.py",
    "tests/sim/test_tiers.py",
    "tests/cache/test_session_cache_machine.py",
    "tests/oracle/",
    "tests/wire/",
)
"""What takes a minute or more is begun first: left to itself, the scheduler begins with files of
many tests, and at the end one worker has a long file and the others nothing. It gives a worker a
class, or all functions of a file, at a time (`--dist loadscope`)."""


IN_MEMORY: Final = "/dev/shm"
ROOM_BYTES: Final = 8 << 30


# A background job of a shell ignores SIGINT, and the programs that tests interrupt inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _needs_no_disk() -> bool:
    """Whether there is a file system in memory with room for all that tests write."""
    try:
        found = os.statvfs(IN_MEMORY)
    except OSError:
        return False
    room = min(found.f_bavail * found.f_frsize, psutil.virtual_memory().available)
    return room >= ROOM_BYTES and not found.f_flag & os.ST_NOEXEC and os.access(IN_MEMORY, os.W_OK)


# Kernels in Triton run in its interpreter, which is asked for before anything imports it.
if os.environ.get("TEST_DEVICE", "cpu") == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

# Tests sync thousands of files that nobody reads behind them: a disk would take minutes for that.
# What a worker of xdist has is in the directory of the process that has begun it.
if "PYTEST_XDIST_WORKER" not in os.environ and _needs_no_disk():
    _files = tempfile.TemporaryDirectory(prefix="tests-", dir=IN_MEMORY, ignore_cleanup_errors=True)
    os.chmod(_files.name, 0o711)  # PostgreSQL is another user
    os.environ["TMPDIR"] = tempfile.tempdir = _files.name


# What a server keeps unless it is told otherwise is kept in nobody's home.
_state = tempfile.TemporaryDirectory(prefix="state-")
os.environ["XDG_STATE_HOME"] = _state.name


def pytest_collection_finish() -> None:
    """Have kernels interpreted faster, if some are."""
    if "triton.runtime.interpreter" in sys.modules:
        from tests.gpu import interpreted  # noqa: F401


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Look for no garbage in what is imported: there is none, and it takes a third of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first, in the order in which they are listed."""

    def place(item: pytest.Item) -> int:
        found = (i for i, name in enumerate(LONG_FILES) if item.nodeid.startswith(name))
        return next(found, len(LONG_FILES))

    items.sort(key=place)


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
