"""Processes of servers and of their engines, seen from outside."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

import psutil

from session_server.local_server import LocalServer

ENGINE = "_engine"
"""What the command line of a real engine has in it."""

ECHO_ENGINE = "echo_child"
"""And that of an engine on the echo device."""


def engines_of(pid: int, program: str = ENGINE) -> list[int]:
    """Return the engine processes of a server, one that is still starting among them."""
    found = []
    for child in psutil.Process(pid).children():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            found += [child.pid] if any(program in word for word in child.cmdline()) else []
    return found


def engine_pid(server: LocalServer) -> int:
    """Return the process of the server's one engine."""
    (pid,) = engines_of(server.pid)
    return pid


def is_alive(pid: int) -> bool:
    """Return whether a process runs; one that nobody has reaped does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def assert_gone(pids: Sequence[int]) -> None:
    """Wait until the processes have ended."""
    deadline_s = time.monotonic() + 60
    while any(map(is_alive, pids)) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    assert not any(map(is_alive, pids))


def memory_mib(pid: int) -> float:
    """Return the resident memory of a process."""
    return round(psutil.Process(pid).memory_info().rss / 2**20, 1)
