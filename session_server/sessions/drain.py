"""Hold what a shutdown waits for."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field

from session_server.sessions.turn import TurnCounts


@dataclass(slots=True)
class Drain:
    """Say whether the server shuts down. `became_idle` is set whenever a session becomes idle."""

    is_on: bool = False
    became_idle: asyncio.Event = field(default_factory=asyncio.Event)

    async def wait(self, counts: TurnCounts, deadline_s: float) -> None:
        """Wait until no turn is live, at most for `deadline_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline_s):
                while counts.live:
                    self.became_idle.clear()
                    await self.became_idle.wait()
