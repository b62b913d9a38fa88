"""Define what the native protocol sends: one frame type per journal entry, and the hello.

Frames with a `seq` come from the session's journal; a client that has seen `seq` n resumes with
`after=n`. A frame may stand for several adjacent deltas; it then carries the last one's `seq`.
Frames without a `seq` are for one connection only: a repeated turn is answered with its
`turn.created` or, once it has ended, with its last frame.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, Final, Literal, assert_never

import msgspec

from session_server.core.errors import WIRE_ERRORS
from session_server.core.events import TurnTimings
from session_server.core.session_events import (
    CancelReason,
    CloseReason,
    ConversationItem,
    ItemEdited,
    Outcome,
    SessionClosed,
    SessionDraining,
    SessionEntry,
    SessionForked,
    SessionOnlyEntry,
    SessionRewound,
    SessionState,
    SessionStateChanged,
    SessionUpdated,
    StateReason,
    TokenUsage,
    ToolCall,
    ToolCallDelta,
    TurnCancelled,
    TurnCompleted,
    TurnCreated,
    TurnDelta,
    TurnEnd,
    TurnFailedEntry,
    TurnProgress,
)
from session_server.protocol.errors import ErrorBody, sanitize, wait_of
from session_server.protocol.scores import EncodedScores, LogprobBody, logprob_bodies

MAX_COALESCED_CHARS: Final = 16_384
"""A coalesced delta stays smaller than this plus one delta."""

SCORE_CHARS: Final = 64
"""What a token's logprob, or that of an alternative, counts for in it: about what it takes."""


class ServerFrame(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", omit_defaults=True):
    """Root of the frames."""


class LimitsBody(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of this server, in bytes, tokens, turns and seconds."""

    max_message_bytes: int
    max_context: int
    max_queued_turns: int
    replay_bytes: int
    idle_ttl_s: float


class UsageBody(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Token counts of a turn. `cached_tokens` of `input_tokens` were not recomputed; a draft had
    computed `drafted_tokens` of those, absent if none."""

    input_tokens: int
    cached_tokens: int
    cache_write_tokens: int
    output_tokens: int
    total_tokens: int
    drafted_tokens: int = 0


class ItemBody(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The answer that stays in the session; `status` is `incomplete` after a cancel."""

    id: str
    role: Literal["assistant"]
    status: Literal["completed", "incomplete"]
    content: str
    token_ids: tuple[int, ...]
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    logprobs: tuple[LogprobBody, ...] | None = None
    prompt_logprobs: tuple[LogprobBody, ...] | None = None


class OpenedFrame(ServerFrame, frozen=True, kw_only=True, tag="session.opened"):
    """The first frame. `seq` is the journal position of this connection; later frames count up from
    it."""

    seq: int
    session_id: str
    epoch: str
    resumed: bool
    state: SessionState
    tokens: int
    model: str
    limits: LimitsBody
    heartbeat_s: float


class ResumeFailedFrame(ServerFrame, frozen=True, kw_only=True, tag="session.resume_failed"):
    """The missed frames cannot be replayed; a `session.snapshot` follows."""

    reason: Literal["offset_lost", "epoch_changed"]


class SnapshotTurn(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The running turn and its answer so far."""

    turn_id: str
    text: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


class SnapshotFrame(ServerFrame, frozen=True, kw_only=True, tag="session.snapshot"):
    """The state of the session at `seq`, in place of the frames before it."""

    seq: int
    state: SessionState
    tokens: int
    items: tuple[ConversationItem, ...]
    turn: SnapshotTurn | None
    queued: tuple[str, ...]


class CreatedFrame(ServerFrame, frozen=True, kw_only=True, tag="turn.created"):
    """The turn was accepted; `position` turns run before it."""

    seq: int | None = None
    turn_id: str
    position: int


class ProgressFrame(ServerFrame, frozen=True, kw_only=True, tag="turn.progress"):
    """Prefill: `processed` of `total` context tokens are computed, `cached` of them were before."""

    seq: int
    turn_id: str
    phase: Literal["prefill"]
    processed: int
    cached: int
    total: int


class DeltaFrame(ServerFrame, frozen=True, kw_only=True, tag="turn.delta"):
    """What `n` tokens add to the answer: text, thoughts, pieces of calls. The first piece of call
    number `index` has its `id` and `name`."""

    seq: int
    turn_id: str
    item_id: str
    text: str
    n: int
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    logprobs: tuple[LogprobBody, ...] | None = None


class CompletedFrame(ServerFrame, frozen=True, kw_only=True, tag="turn.completed"):
    """The turn completed; `matched` is the stop token or string that ended it."""

    seq: int | None = None
    turn_id: str
    finish_reason: Literal["stop", "length"]
    matched: int | str | None
    item: ItemBody
    usage: UsageBody
    timings: TurnTimings | None
    durable: bool | None = None
    """Whether the turn is on disk; left out by a server that keeps no session there."""


class CancelledFrame(ServerFrame, frozen=True, kw_only=True, tag="turn.cancelled"):
    """Canceled; without `kept_partial` the session is as it was before the turn."""

    seq: int | None = None
    turn_id: str
    reason: CancelReason
    kept_partial: bool
    item: ItemBody
    usage: UsageBody
    timings: TurnTimings | None
    durable: bool | None = None


class FailedFrame(ServerFrame, frozen=True, kw_only=True, tag="turn.failed"):
    """The turn failed; the session is as it was before the turn."""

    seq: int | None = None
    turn_id: str
    error: ErrorBody
    retryable: bool
    usage: UsageBody
    timings: TurnTimings | None
    durable: bool | None = None


class StateFrame(ServerFrame, frozen=True, kw_only=True, tag="session.state"):
    """The state of the session's KV changed."""

    seq: int
    state: Literal["resident", "cold"]
    reason: StateReason


class UpdatedFrame(ServerFrame, frozen=True, kw_only=True, tag="session.updated"):
    """The effective settings of the session."""

    seq: int
    ttl_s: float
    metadata: dict[str, str]
    pinned: bool


class RewoundFrame(ServerFrame, frozen=True, kw_only=True, tag="session.rewound"):
    """The conversation ends with item `to_item` now, or is empty. The history has `tokens`, of
    which `kept_tokens` have their KV."""

    seq: int
    to_item: str | None
    tokens: int
    kept_tokens: int


class ForkedFrame(ServerFrame, frozen=True, kw_only=True, tag="session.forked"):
    """Session `session_id` was opened with the first `tokens` of the history."""

    seq: int
    session_id: str
    tokens: int


class EditedFrame(ServerFrame, frozen=True, kw_only=True, tag="item.edited"):
    """The item has another content now, and those behind it are gone. The next turn computes it;
    before it the history has `tokens`, of which `kept_tokens` have their KV."""

    seq: int
    item_id: str
    tokens: int
    kept_tokens: int


class DrainingFrame(ServerFrame, frozen=True, kw_only=True, tag="session.draining"):
    """The server shuts down; running turns have `deadline_s` left."""

    seq: int
    deadline_s: float


class ClosedFrame(ServerFrame, frozen=True, kw_only=True, tag="session.closed"):
    """The last frame of a session."""

    seq: int
    reason: CloseReason


class ErrorFrame(ServerFrame, frozen=True, kw_only=True, tag="error"):
    """A message of the client was rejected; the connection stays open."""

    error: ErrorBody


class PongFrame(ServerFrame, frozen=True, kw_only=True, tag="pong"):
    """Answer to `ping`; `server_time` is the wall clock in seconds."""

    t: float | None
    server_time: float


class DraftedFrame(ServerFrame, frozen=True, kw_only=True, tag="turn.drafted"):
    """Answer to the newest `turn.draft`: `processed` of the `total` tokens of its context are
    computed, `kept` of which were before. Fewer than `total` where memory is short."""

    draft_id: str
    processed: int
    kept: int
    total: int


TurnFrame = (
    CreatedFrame | ProgressFrame | DeltaFrame | CompletedFrame | CancelledFrame | FailedFrame
)
JournalFrame = (
    TurnFrame
    | StateFrame
    | UpdatedFrame
    | RewoundFrame
    | ForkedFrame
    | EditedFrame
    | DrainingFrame
    | ClosedFrame
)
AnyServerFrame = (
    JournalFrame
    | OpenedFrame
    | ResumeFailedFrame
    | SnapshotFrame
    | DraftedFrame
    | ErrorFrame
    | PongFrame
)


def coalesce(
    entries: Iterable[tuple[int, SessionEntry]], *, max_chars: int = MAX_COALESCED_CHARS
) -> Iterator[tuple[int, SessionEntry]]:
    """Merge adjacent deltas of one turn, so that a slow reader catches up cheaply.

    A merged entry has the sequence number of its last part; nothing else is touched or reordered.
    """
    run: list[TurnDelta] = []
    run_seq = run_chars = 0
    for seq, entry in entries:
        delta = entry if isinstance(entry, TurnDelta) else None
        run_chars += _num_chars(run[-1]) if run else 0
        if run and not (
            delta is not None
            and (delta.turn_id, delta.item_id) == (run[0].turn_id, run[0].item_id)
            and run_chars < max_chars
        ):
            yield run_seq, _merged(run)
            run, run_chars = [], 0
        if delta is None:
            yield seq, entry
            continue
        run.append(delta)
        run_seq = seq
    if run:
        yield run_seq, _merged(run)


def frame_of(seq: int, entry: SessionEntry, *, scores: EncodedScores | None = None) -> JournalFrame:
    """Return the frame of one journal entry. `scores`: those of a turn's end, if already
    encoded."""
    match entry:
        case TurnCreated():
            return CreatedFrame(seq=seq, turn_id=entry.turn_id, position=entry.position)
        case TurnProgress():
            return ProgressFrame(
                seq=seq,
                turn_id=entry.turn_id,
                phase="prefill",
                processed=entry.processed,
                cached=entry.cached,
                total=entry.total,
            )
        case TurnDelta():
            return DeltaFrame(
                seq=seq,
                turn_id=entry.turn_id,
                item_id=entry.item_id,
                text=entry.text,
                n=len(entry.token_ids),
                reasoning=entry.reasoning,
                tool_calls=entry.tool_calls,
                logprobs=logprob_bodies(entry.logprobs),
            )
        case TurnCompleted() | TurnCancelled() | TurnFailedEntry():
            return end_frame(seq, entry, scores=scores)
        case _:
            return _session_frame(seq, entry)


def _session_frame(seq: int, entry: SessionOnlyEntry) -> JournalFrame:
    match entry:
        case SessionStateChanged():
            return StateFrame(seq=seq, state=entry.state, reason=entry.reason)
        case SessionUpdated():
            return UpdatedFrame(
                seq=seq, ttl_s=entry.ttl_s, metadata=entry.metadata, pinned=entry.pinned
            )
        case SessionRewound():
            return RewoundFrame(
                seq=seq,
                to_item=entry.to_item,
                tokens=entry.tokens,
                kept_tokens=entry.kept_tokens,
            )
        case SessionForked():
            return ForkedFrame(seq=seq, session_id=entry.session_id, tokens=entry.tokens)
        case ItemEdited():
            return EditedFrame(
                seq=seq,
                item_id=entry.item_id,
                tokens=entry.tokens,
                kept_tokens=entry.kept_tokens,
            )
        case SessionDraining():
            return DrainingFrame(seq=seq, deadline_s=entry.deadline_s)
        case SessionClosed():
            return ClosedFrame(seq=seq, reason=entry.reason)
        case _:
            assert_never(entry)


def usage_body(usage: TokenUsage) -> UsageBody:
    """Convert token counts to the body that every surface reports."""
    return msgspec.convert(usage, UsageBody, from_attributes=True)


def item_body(outcome: Outcome, *, complete: bool, scores: EncodedScores | None = None) -> ItemBody:
    """Convert the answer of a turn. `scores`: its logprobs if they are already encoded."""
    return ItemBody(
        id=outcome.item_id,
        role="assistant",
        status="completed" if complete else "incomplete",
        content=outcome.text,
        token_ids=outcome.token_ids,
        reasoning=outcome.reasoning,
        tool_calls=outcome.tool_calls,
        logprobs=scores.answer() if scores else logprob_bodies(outcome.logprobs),
        prompt_logprobs=scores.prompt() if scores else logprob_bodies(outcome.prompt_logprobs),
    )


def failure_body(entry: TurnFailedEntry) -> ErrorBody:
    """Return the error body of a failed turn."""
    kinds = {form.code: form.kind for form in WIRE_ERRORS.values()}
    return ErrorBody(
        type=kinds.get(entry.code, "server_error"),
        code=entry.code,
        message=sanitize(entry.message),
        param=None,
        turn_id=entry.turn_id,
        retry_after_s=wait_of(entry.code, entry.retry_after_s),
    )


def end_frame(seq: int | None, entry: TurnEnd, *, scores: EncodedScores | None = None) -> TurnFrame:
    """Return the last frame of a turn; `seq` None repeats it outside the journal's order."""
    outcome = entry.outcome
    shared: dict[str, Any] = {
        "seq": seq,
        "turn_id": entry.turn_id,
        "usage": usage_body(outcome.usage),
        "timings": outcome.timings,
        "durable": outcome.is_durable,
    }
    match entry:
        case TurnCompleted():
            item = item_body(outcome, complete=True, scores=scores)
            return CompletedFrame(
                finish_reason=entry.reason, matched=entry.matched, item=item, **shared
            )
        case TurnCancelled():
            item = item_body(outcome, complete=False, scores=scores)
            return CancelledFrame(
                reason=entry.reason, kept_partial=entry.kept_partial, item=item, **shared
            )
        case TurnFailedEntry():
            return FailedFrame(error=failure_body(entry), retryable=entry.retryable, **shared)
        case _:
            assert_never(entry)


def _num_chars(delta: TurnDelta) -> int:
    """Return about how many characters a delta takes in a frame."""
    num_chars = len(delta.text) + len(delta.reasoning)
    num_chars += sum(len(piece.arguments) for piece in delta.tool_calls)
    return num_chars + SCORE_CHARS * sum(1 + len(score.top) for score in delta.logprobs)


def _merged(run: list[TurnDelta]) -> TurnDelta:
    if len(run) == 1:
        return run[0]
    return TurnDelta(
        turn_id=run[0].turn_id,
        item_id=run[0].item_id,
        text="".join(delta.text for delta in run),
        token_ids=tuple(chain.from_iterable(delta.token_ids for delta in run)),
        logprobs=tuple(chain.from_iterable(delta.logprobs for delta in run)),
        reasoning="".join(delta.reasoning for delta in run),
        tool_calls=tuple(chain.from_iterable(delta.tool_calls for delta in run)),
    )
