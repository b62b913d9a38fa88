"""Run work that concerns many sessions in slices, so that the event loop stays responsive."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
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

    def run(self, work: Iterator[Callable[[], None]]) -> None:
        """Run the first slice of work now, and the rest one slice per iteration of the event
        loop. Items are made when their slice runs."""
        num_run = 0
        try:
            for item in islice(work, SLICE):
                num_run += 1
                item()
        finally:
            # An item that raises must not keep the rest from running.
            if num_run:
                self.defer(partial(self.run, work))

    def defer(self, work: Callable[[], None]) -> None:
        """Append work for the next iteration of the event loop."""
        self._work.append(work)
        self._schedule()

    def finish(self) -> None:
        """Run all remaining work now."""
        while self._work:
            self._work.popleft()()

    def _do_slice(self) -> None:
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
