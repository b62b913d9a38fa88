"""Define what is measured: a system that holds conversations, and what a turn's client saw."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

from session_server.local_server import LocalServer


class PeerFailed(Exception):
    """Report that a system could not be started or gave a wrong answer; the message says how."""


class TurnTrace(NamedTuple):
    """Say when a turn was sent, and when which number of its tokens arrived (seconds)."""

    begun_s: float
    arrivals: tuple[tuple[float, int], ...]

    @property
    def num_tokens(self) -> int:
        """Return the tokens of the answer."""
        return sum(count for _, count in self.arrivals)

    @property
    def first_s(self) -> float:
        """Return when the first token arrived."""
        return self.arrivals[0][0]

    @property
    def last_s(self) -> float:
        """Return when the last token arrived."""
        return self.arrivals[-1][0]


class PeerConversation(Protocol):
    """Hold one conversation whose history its system keeps."""

    async def prefill(self, token_ids: Sequence[int]) -> None:
        """Add tokens to the history without an answer."""

    async def turn(self, token_ids: Sequence[int], num_output: int) -> TurnTrace:
        """Add new tokens and generate exactly `num_output` greedily, whatever the end tokens."""

    async def close(self) -> None:
        """Give the history up."""


class System(AbstractContextManager["System"], Protocol):
    """Run one server process. `name` is the row of the tables that its figures are in."""

    @property
    def name(self) -> str:
        """Return what it is and how it is set."""

    @property
    def pid(self) -> int:
        """Return the process id of the server, whose children belong to it."""

    async def open(self, slot: int) -> PeerConversation:
        """Open a conversation; `slot`: 0 up to the number of conversations held at once."""


class ServedSystem:
    """Run a `System` that is a server reached by a URL."""

    def __init__(self, name: str, server: LocalServer) -> None:
        self.name = name
        self._server = server

    def __enter__(self) -> Self:
        self._server.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._server.stop()

    @property
    def pid(self) -> int:
        """Return the process id of the server."""
        return self._server.pid

    @property
    def url(self) -> str:
        """Return where it listens."""
        return self._server.url


class ServerSize(NamedTuple):
    """Say what a server must hold: conversations at once, tokens of each, and its CPU threads."""

    num_sessions: int
    context_len: int
    num_threads: int


def pause(pid: int) -> None:
    """Stop a process and its children, so that it takes no time from others."""
    for each in _family(pid):
        os.kill(each, signal.SIGSTOP)


def resume(pid: int) -> None:
    """Let a paused process and its children run again."""
    for each in reversed(_family(pid)):
        os.kill(each, signal.SIGCONT)


def _family(pid: int) -> list[int]:
    """Return a process and all that descend from it; where there is no /proc, only itself."""
    family = [pid]
    for each in family:
        for children in Path(f"/proc/{each}/task").glob("*/children"):
            family += map(int, children.read_text().split())
    return family
