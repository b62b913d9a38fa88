"""Probe the engine with a turn of one token that is exempt from quotas."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final

from session_server.core.owner import Owner
from session_server.protocol.messages import MAX_PRIORITY

PROBER: Final = Owner("server:probe", max_priority=MAX_PRIORITY, is_exempt=True)
"""The owner of probes. Ids of keys' owners are digests or start with `name:`: no client is this."""


class SharedProbe:
    """Run one probe at a time, and give its result to every caller that waits meanwhile.

    Otherwise callers could run any number of turns outside all quotas.
    """

    def __init__(self) -> None:
        self._running: asyncio.Task[bool] | None = None

    async def run(self, probe: Callable[[], Coroutine[Any, Any, bool]]) -> bool:
        """Return the result of the probe that runs, or else of a new one."""
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(probe())
        return await asyncio.shield(self._running)
