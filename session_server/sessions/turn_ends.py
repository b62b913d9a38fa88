"""Build the terminal journal entry of a turn from what the turn has produced."""

from __future__ import annotations

from typing import Final

from msgspec import structs

from session_server.core.errors import (
    WIRE_ERRORS,
    QuotaExceeded,
    SessionMoved,
    SessionServerError,
    wire_error,
)
from session_server.core.events import TurnTimings
from session_server.core.session_events import (
    CancelReason,
    ChatInput,
    Message,
    Outcome,
    TokenUsage,
    TurnCancelled,
    TurnCompleted,
    TurnEnd,
    TurnFailedEntry,
)
from session_server.core.turn_report import TurnReport
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


def failed(
    turn: SessionTurn, *, code: str, message: str, retry_after_s: float | None = None
) -> TurnFailedEntry:
    """Return the end of a turn that failed."""
    outcome = _outcome(turn, kept=False, timings=None)
    retryable = code in _RETRYABLE
    return TurnFailedEntry(turn.request.turn_id, code, message, retryable, outcome, retry_after_s)


def refused(turn: SessionTurn, error: SessionServerError) -> TurnFailedEntry:
    """Return the end of a turn that waited, and could not run when its time came."""
    wait_s = error.retry_after_s if isinstance(error, QuotaExceeded) else None
    code = wire_error(error).code
    return failed(turn, code=code, message=error.message, retry_after_s=wait_s)


def turn_moved() -> SessionMoved:
    """Return what a turn fails with whose session another replica holds by now."""
    return SessionMoved("the session goes on in another replica: send the turn again")


def report_of(session_id: str, turn: SessionTurn, end: TurnEnd, *, ended_s: float) -> TurnReport:
    """Return what operators are told of a turn that has ended."""
    course, sampling = turn.course, turn.request.sampling
    return TurnReport(
        session_id=session_id,
        turn_id=end.turn_id,
        status=end.status,
        reason=end.code if isinstance(end, TurnFailedEntry) else end.reason,
        is_chat=isinstance(turn.request.input, ChatInput),
        max_tokens=sampling.max_tokens,
        usage=end.outcome.usage,
        num_retractions=course.num_retractions,
        timings=end.outcome.timings,
        origin=course.origin,
        received_s=course.received_s,
        asked_s=course.asked_s,
        checked_s=course.checked_s,
        begun_s=course.begun_s,
        sent_s=course.sent_s,
        first_token_s=course.first_token_s,
        ended_s=ended_s,
    )


def with_durability(end: TurnEnd, *, is_durable: bool) -> TurnEnd:
    """Return an end that says whether it is on disk."""
    return structs.replace(end, outcome=structs.replace(end.outcome, is_durable=is_durable))


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
