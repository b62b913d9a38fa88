"""`Watchdog`: whether an engine makes progress, as seen from outside."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from session_server.core.commands import EngineCommand, SubmitTurn
from session_server.core.engine_client import EventListener
from session_server.core.events import (
    EngineEvent,
    EnginePulse,
    EngineResumed,
    EngineStalled,
    PrefillProgressed,
    PromptLogprobsComputed,
    TokensProduced,
    TurnFailed,
    TurnFinished,
    TurnStarted,
)
from session_server.core.ids import TurnId

PULSE_INTERVAL_S: Final = 0.25
"""Seconds between two pulses of an engine, and between two ticks of its watchdog."""

SILENCE_LIMIT_S: Final = 1.5
"""Seconds of silence after which an engine counts as stalled: its process was stopped, or something
holds its interpreter."""

HANG_LIMIT_S: Final = 300.0
"""Seconds after which an engine is ended if it has turns and none of them progresses."""


class Watchdog:
    """Watch one engine by the commands sent to it and the events it sends.

    An engine that completes no step is stalled: `listener` is called with `EngineStalled`, and with
    `EngineResumed` at the next step. An engine that has turns, none of which progresses for
    minutes, hangs, whatever else it still answers. `no_progress_s`: seconds for which no turn has
    progressed.
    """

    def __init__(self, listener: EventListener) -> None:
        self._listener = listener
        self._turns: set[TurnId] = set()
        self._is_heard = False
        self._has_progressed = False
        self._quiet_s = 0.0
        self.no_progress_s = 0.0
        self._is_stalled = False
        self.has_finished_turn = False

    def note_command(self, command: EngineCommand) -> None:
        """Note a command that was sent to the engine."""
        if isinstance(command, SubmitTurn):
            self._turns.add(command.turn_id)

    def note_event(self, event: EngineEvent) -> None:
        """Note an event that came from the engine."""
        self._is_heard = True
        match event:
            case TokensProduced():
                self._note_progress()
            case EnginePulse(stalled_s=stalled_s):
                self._report_stall(stalled_s)
            case TurnFinished(turn_id=turn_id) | TurnFailed(turn_id=turn_id):
                self._turns.discard(turn_id)
                self.has_finished_turn |= isinstance(event, TurnFinished)
                self._note_progress()
            case TurnStarted() | PrefillProgressed() | PromptLogprobsComputed():
                self._note_progress()
            case _:
                pass

    def tick(self, elapsed_s: float) -> None:
        """Count time in which the engine was silent.

        Time is counted in ticks of the event loop, so that a server that was itself suspended does
        not report its engine.
        """
        self._quiet_s = 0.0 if self._is_heard else self._quiet_s + elapsed_s
        is_unmoved = bool(self._turns) and not self._has_progressed
        self.no_progress_s = self.no_progress_s + elapsed_s if is_unmoved else 0.0
        self._is_heard = self._has_progressed = False
        if self._quiet_s >= SILENCE_LIMIT_S:
            self._report_stall(self._quiet_s)

    async def wait_until_hung(
        self, limit_s: float, *, pulse: Callable[[], EnginePulse] | None = None
    ) -> None:
        """Return once the engine has had turns, and none has progressed, for `limit_s` seconds.

        `pulse`: returns a pulse at each tick, for an engine that sends none.
        """
        tick_s = min(PULSE_INTERVAL_S, limit_s / 8)
        while self.no_progress_s < limit_s:
            await asyncio.sleep(tick_s)
            if pulse is not None:
                self.note_event(pulse())
            self.tick(tick_s)

    def _note_progress(self) -> None:
        self._has_progressed = True
        self._report_stall(0.0)

    def _report_stall(self, stalled_s: float) -> None:
        """Report to the listener when the engine stalls, and when it resumes."""
        if stalled_s and not self._is_stalled:
            self._listener(EngineStalled(stalled_s=stalled_s))
        elif self._is_stalled and not stalled_s:
            self._listener(EngineResumed())
        self._is_stalled = bool(stalled_s)
