"""Whether an engine that has turns still moves any of them: progress from outside, not a ping."""

from __future__ import annotations

import asyncio
from typing import Final

from session_server.core.commands import EngineCommand, SubmitTurn
from session_server.core.events import (
    EngineEvent,
    PrefillProgressed,
    PromptScored,
    TokensProduced,
    TurnFailed,
    TurnFinished,
    TurnStarted,
)
from session_server.core.ids import TurnId

STALL_LIMIT_S: Final = 300.0
"""No forward takes so long."""


class Watchdog:
    """Sees what is sent to one engine and what it says.

    An engine that answers questions, runs its loop or keeps its socket open may still hang where
    it matters: what counts is that of the turns it has, some is told something.
    """

    def __init__(self) -> None:
        self._turns: set[TurnId] = set()
        self._has_moved = False

    def sent(self, command: EngineCommand) -> None:
        """The engine was sent this."""
        if isinstance(command, SubmitTurn):
            self._turns.add(command.turn_id)

    def heard(self, event: EngineEvent) -> None:
        """The engine said this."""
        match event:
            case TurnFinished(turn_id=turn_id) | TurnFailed(turn_id=turn_id):
                self._has_moved = True
                self._turns.discard(turn_id)
            case TurnStarted() | PrefillProgressed() | PromptScored() | TokensProduced():
                self._has_moved = True
            case _:
                pass

    async def stalled(self, limit_s: float) -> None:
        """Return once the engine has had turns and moved none of them for `limit_s`.

        Counted in ticks of the event loop: a server that was itself asleep, or whose clock jumps,
        does not blame its engine.
        """
        tick_s, silent_s = min(1.0, limit_s / 8), 0.0
        while silent_s < limit_s:
            self._has_moved = False
            await asyncio.sleep(tick_s)
            is_silent = bool(self._turns) and not self._has_moved
            silent_s = silent_s + tick_s if is_silent else 0.0
