"""How much is done between two turns of the event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator


class Slices:
    """Count what happens between two turns of the event loop."""

    def __init__(self) -> None:
        self.num_now, self.most, self.total = 0, 0, 0

    def count(self, num: int = 1) -> None:
        self.num_now, self.total = self.num_now + num, self.total + num
        self.most = max(self.most, self.num_now)

    @contextlib.asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        watching = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            watching.cancel()

    async def _watch(self) -> None:
        while True:
            self.num_now = 0
            await asyncio.sleep(0)
