"""End what runs when the server shuts down, within a deadline."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from session_server.core.session_events import SessionDraining
from session_server.sessions.engine_link import EngineLink
from session_server.sessions.registry import SessionRegistry
from session_server.sessions.session import Session
from session_server.sessions.turn_flow import TurnFlow

_CANCEL_GRACE_S: Final = 2.0
"""How long a drain waits for the engine to confirm the cancels it sent at its deadline."""

_DISK_GRACE_S: Final = 5.0
"""How long a drain waits for what it has written."""


@dataclass(slots=True)
class Drain:
    """Shut down the sessions of a manager. `became_idle` is set whenever one becomes idle; `close`
    ends one."""

    sessions: SessionRegistry
    flow: TurnFlow
    link: EngineLink
    close: Callable[[Session], None]
    is_on: bool = False
    became_idle: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, deadline_s: float) -> None:
        """End waiting turns, give running turns `deadline_s`, then close every session.

        Turns still running then are canceled and keep their output. A second call waits likewise.
        """
        if not self.is_on:
            self.is_on = True
            async for session in self.sessions.in_slices():
                session.journal.append(SessionDraining(deadline_s))
                if session.queue:
                    self.flow.cancel(session, *session.queue, keep_partial=True, reason="draining")
        await self._wait(deadline_s)
        async for session in self.sessions.in_slices():
            if session.live is not None:
                self.flow.cancel(session, session.live, keep_partial=True, reason="draining")
        await self._wait(_CANCEL_GRACE_S)
        if self.flow.counts.live:
            # The engine confirmed no cancel in time: end the turns without it.
            self.link.mark_gone()
            self.flow.on_engine_lost(will_restart=False)
            self.flow.backlog.finish()
        self.sessions.is_ending = True
        async for session in self.sessions.in_slices():
            self.close(session)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_DISK_GRACE_S):
                await self.flow.conclusion.logs.flush()

    async def _wait(self, deadline_s: float) -> None:
        """Wait until no turn is live, at most for `deadline_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline_s):
                while self.flow.counts.live:
                    self.became_idle.clear()
                    await self.became_idle.wait()
