"""Run work that concerns many sessions in slices, so that the event loop stays responsive."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

SLICE: Final = 64
"""Work items per iteration of the event loop: a few milliseconds."""


class Backlog:
    """Run work items in order: the first slice at once, one more per event loop iteration."""

    def __init__(self) -> None:
        self._work: deque[Callable[[], None]] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_scheduled = False

    def __len__(self) -> int:
        return len(self._work)

    def bind(self, loop: asyncio.AbstractEventLoop) -> None:
        """Use this event loop. Call it before any work is added."""
        self._loop = loop

    def extend(self, work: Iterable[Callable[[], None]]) -> None:
        """Append work, and run the first slice unless a slice is already scheduled."""
        self._work.extend(work)
        if not self._is_scheduled:
            self._do_slice()

    def defer(self, work: Callable[[], None]) -> None:
        """Append work for the next iteration of the event loop."""
        self._work.append(work)
        self._schedule()

    def finish(self) -> None:
        """Run all remaining work now."""
        while self._work:
            self._work.popleft()()

    def _do_slice(self) -> None:
        self._is_scheduled = True  # running work may append more
        try:
            for _ in range(min(SLICE, len(self._work))):
                self._work.popleft()()
        finally:
            # An item that raises must not keep the rest from running.
            self._is_scheduled = False
            if self._work:
                self._schedule()

    def _schedule(self) -> None:
        if not self._is_scheduled:
            assert self._loop is not None, "work before the manager was started"
            self._is_scheduled = True
            self._loop.call_soon(self._do_slice)
