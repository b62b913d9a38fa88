"""Let in what has arrived on many connections at once, some per iteration of the event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

MESSAGES_AT_ONCE: Final = 16
"""Messages let in per iteration of the event loop: taking a turn is about a millisecond of work."""


class Turnstile:
    """Let `MESSAGES_AT_ONCE` callers pass per iteration of the event loop, so that a thousand peers
    that speak in the same moment hold up nobody else for long. Those that have waited longest come
    first; who comes in the iteration that lets them in may pass them by that one iteration, which
    is how up to twice as many may pass in it.

    Those that do not pass at once wait as tasks of their own; nothing is done for them meanwhile.
    """

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._num_free = MESSAGES_AT_ONCE
        self._is_scheduled = False

    async def enter(self) -> None:
        """Return when it is the caller's turn."""
        if not self._is_scheduled:
            self._schedule()
        if self._num_free > 0:
            self._num_free -= 1
            return
        waiter = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        await waiter

    def _schedule(self) -> None:
        self._is_scheduled = True
        asyncio.get_running_loop().call_soon(self._run)

    def _run(self) -> None:
        """Begin an iteration: those that have waited come first."""
        self._is_scheduled = False
        self._num_free = MESSAGES_AT_ONCE
        while self._waiting and self._num_free > 0:
            waiter = self._waiting.popleft()
            if not waiter.done():  # its connection has ended
                self._num_free -= 1
                waiter.set_result(None)
        if self._num_free < MESSAGES_AT_ONCE:
            self._schedule()
