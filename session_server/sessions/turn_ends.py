"""Build the terminal journal entry of a turn from what the turn has produced."""

from __future__ import annotations

from typing import Final

from session_server.core.errors import WIRE_ERRORS
from session_server.core.events import TurnTimings
from session_server.core.session_events import (
    CancelReason,
    Message,
    Outcome,
    TokenUsage,
    TurnCancelled,
    TurnCompleted,
    TurnEnd,
    TurnFailedEntry,
)
from session_server.sessions.turn import SessionTurn

_RETRYABLE: Final = frozenset(wire.code for wire in WIRE_ERRORS.values() if wire.retryable)


def completed(
    turn: SessionTurn, *, is_stop: bool, matched: int | str | None, timings: TurnTimings | None
) -> TurnCompleted:
    """Return the end of a turn that stopped or reached its length."""
    outcome = _outcome(turn, kept=True, timings=timings)
    return TurnCompleted(turn.request.turn_id, "stop" if is_stop else "length", matched, outcome)


def cancelled(
    turn: SessionTurn, *, kept: bool, reason: CancelReason, timings: TurnTimings | None
) -> TurnCancelled:
    """Return the end of a canceled turn; `kept`: its input and partial answer stay."""
    outcome = _outcome(turn, kept=kept, timings=timings)
    return TurnCancelled(turn.request.turn_id, kept, reason, outcome)


def failed(turn: SessionTurn, *, code: str, message: str) -> TurnFailedEntry:
    """Return the end of a turn that failed."""
    outcome = _outcome(turn, kept=False, timings=None)
    return TurnFailedEntry(turn.request.turn_id, code, message, code in _RETRYABLE, outcome)


def is_kept(end: TurnEnd) -> bool:
    """Return whether the turn's input and answer become part of the history."""
    return isinstance(end, TurnCompleted) or (isinstance(end, TurnCancelled) and end.kept_partial)


def _outcome(turn: SessionTurn, *, kept: bool, timings: TurnTimings | None) -> Outcome:
    submitted = turn.submitted
    if submitted is None:
        return Outcome(turn.item_id, "", (), TokenUsage(), timings)
    answer = submitted.answer
    said = answer.message if kept else Message("assistant", "")
    num_outputs = len(answer.token_ids) if kept else 0
    return Outcome(
        item_id=turn.item_id,
        text=said.content,
        token_ids=tuple(answer.token_ids[:num_outputs]),
        usage=TokenUsage(
            submitted.prompt.context_len,
            submitted.cached_tokens,
            num_outputs,
            drafted_tokens=submitted.drafted_tokens,
            reasoning_tokens=answer.num_thought if kept else 0,
        ),
        timings=timings,
        logprobs=tuple(answer.logprobs[:num_outputs]),
        prompt_logprobs=tuple(submitted.prompt_logprobs),
        reasoning=said.reasoning,
        tool_calls=said.tool_calls,
    )
