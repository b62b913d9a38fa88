"""Let callers share a call that is costly and has the same result for all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class SharedTask(Generic[T]):
    """Run one call at a time; those who come while it runs get its result."""

    def __init__(self) -> None:
        self._task: asyncio.Task[T] | None = None

    async def run(self, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return the result of the call that runs, or else of a new one."""
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(call())
        # Whoever leaves must not end the call for the others.
        return await asyncio.shield(self._task)
