"""Replace asyncio's `Event` and `Queue` with smaller ones, for those of every socket.

Each deque in asyncio's classes takes 760 bytes, and a `Queue` has four.
"""

from __future__ import annotations

import asyncio
from typing import Any


class Signal:
    """Signal an event to one waiter."""

    __slots__ = ("_is_set", "_waiter")

    def __init__(self) -> None:
        self._is_set = False
        self._waiter: asyncio.Future[None] | None = None

    def set(self) -> None:
        """Wake the waiter, now or when it starts to wait."""
        self._is_set = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def is_set(self) -> bool:
        """Return whether `wait` returns at once."""
        return self._is_set

    @property
    def is_awaited(self) -> bool:
        """Return whether the waiter waits, and nothing has woken it."""
        return self._waiter is not None and not self._is_set

    def clear(self) -> None:
        """Reset the signal."""
        self._is_set = False

    async def wait(self) -> None:
        """Return once the signal is set."""
        while not self._is_set:
            assert self._waiter is None, "a second waiter"
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None


class MessageQueue:
    """Queue messages for one reader, with the methods that uvicorn uses of `asyncio.Queue`."""

    __slots__ = ("_messages", "_signal")

    def __init__(self) -> None:
        self._messages: list[Any] = []
        self._signal = Signal()

    def put_nowait(self, message: Any) -> None:
        """Add a message."""
        self._messages.append(message)
        self._signal.set()

    def empty(self) -> bool:
        """Return whether there is no message."""
        return not self._messages

    def qsize(self) -> int:
        """Return the number of messages."""
        return len(self._messages)

    async def get(self) -> Any:
        """Remove and return the oldest message; wait for one if there is none."""
        while not self._messages:
            self._signal.clear()
            await self._signal.wait()
        return self._messages.pop(0)
