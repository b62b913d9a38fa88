"""Probe the engine with a turn of one token that no quota refuses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final

from session_server.core.owner import Owner
from session_server.protocol.messages import MAX_PRIORITY

PROBER: Final = Owner("server:probe", max_priority=MAX_PRIORITY, is_exempt=True)
"""The owner of probes. Keys are digests or named otherwise, so no client is this owner."""


class SharedProbe:
    """Run one probe at a time. Callers that come meanwhile wait for the same result, so that
    probes outside all quotas are no way around them."""

    def __init__(self) -> None:
        self._running: asyncio.Task[bool] | None = None

    async def run(self, probe: Callable[[], Coroutine[Any, Any, bool]]) -> bool:
        """Return the result of the probe that runs, or else of a new one."""
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(probe())
        return await asyncio.shield(self._running)
