"""`Patience`: who waits for the disk is told when it does not answer.

A disk that has much to write answers again and again, however long the last of it waits.
"""

from __future__ import annotations

import asyncio
from itertools import count
from typing import Final

from session_server.sessions.store.writer import Told, tell_each

DISK_WAIT_S: Final = 10.0
"""How long the disk may answer nothing, while somebody waits for it, before that counts as
failed."""

NO_ANSWER: Final = "the disk does not answer"


class Patience:
    """Know who waits for the disk. Call every method on the event loop's thread."""

    def __init__(self) -> None:
        self._waiting: dict[int, Told] = {}
        self._numbers = count()
        self._since_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def wait(self, loop: asyncio.AbstractEventLoop, told: Told) -> Told:
        """Return what takes the disk's answer. `told` gets it, or an error where there is none."""
        number = next(self._numbers)
        if not self._waiting:
            self._since_s = loop.time()
        self._waiting[number] = told
        if self._timer is None:
            self._timer = loop.call_later(DISK_WAIT_S, self._look, loop)

        def answered(error: Exception | None) -> None:
            self._since_s = loop.time()
            waiting = self._waiting.pop(number, None)
            if waiting is not None:
                waiting(error)

        return answered

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        left_s = self._since_s + DISK_WAIT_S - loop.time()
        if not self._waiting:
            return
        if left_s > 0:
            self._timer = loop.call_later(left_s, self._look, loop)
            return
        waiting, self._waiting = self._waiting, {}
        tell_each(waiting.values(), TimeoutError(NO_ANSWER))
