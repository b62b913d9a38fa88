"""Carry out how this server has decided that a turn ends, whatever the engine still reports."""

from __future__ import annotations

from typing import assert_never

from session_server.core.commands import CancelTurn, StopTurn
from session_server.core.events import TurnTimings
from session_server.core.session_events import TurnEnd
from session_server.sessions.bugs import BUG_CODE, BUG_MESSAGE
from session_server.sessions.turn import (
    BugFound,
    CancelAccepted,
    SessionTurn,
    StopFound,
    SubmittedTurn,
    TurnPhase,
    Verdict,
)
from session_server.sessions.turn_ends import cancelled, completed, failed


def submitted_of(turn: SessionTurn) -> SubmittedTurn:
    """Return the state of a turn that was sent to the engine."""
    assert turn.submitted is not None, "the turn was never sent"
    return turn.submitted


def decide(turn: SessionTurn, verdict: Verdict) -> CancelTurn | StopTurn:
    """Decide how a turn ends that the engine runs; return the command that makes the engine end
    it."""
    submitted = submitted_of(turn)
    submitted.verdict, turn.phase = verdict, TurnPhase.ENDING
    num_outputs = len(submitted.answer.token_ids)
    match verdict:
        case StopFound():
            return StopTurn(turn_id=turn.engine_id, num_outputs=num_outputs)
        case CancelAccepted(keep_partial=True):
            return CancelTurn(turn_id=turn.engine_id, num_outputs=num_outputs)
        case CancelAccepted() | BugFound():
            return CancelTurn(turn_id=turn.engine_id, num_outputs=None)
        case _:
            assert_never(verdict)


def end_by(turn: SessionTurn, verdict: Verdict, timings: TurnTimings | None) -> TurnEnd:
    """Return the end of a turn that was decided so."""
    match verdict:
        case StopFound(stop=stop):
            return completed(turn, is_stop=True, matched=stop, timings=timings)
        case CancelAccepted(keep_partial=keep, reason=reason):
            return cancelled(turn, kept=keep, reason=reason, timings=timings)
        case BugFound():
            return failed(turn, code=BUG_CODE, message=BUG_MESSAGE)
        case _:
            assert_never(verdict)
