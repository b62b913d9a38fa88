"""Convert the session manager's views to wire bodies."""

from __future__ import annotations

from session_server.core.session_events import (
    TurnCancelled,
    TurnCompleted,
    TurnEnd,
    TurnFailedEntry,
)
from session_server.protocol.frames import (
    LimitsBody,
    OpenedFrame,
    SnapshotFrame,
    SnapshotTurn,
    failure_body,
    item_body,
    usage_body,
)
from session_server.protocol.resources import SessionBody, TurnResultBody
from session_server.sessions.views import (
    SessionSnapshot,
    SessionView,
    TurnView,
)
from session_server.web.services import AppServices, ModelCard
from session_server.web.slices import encode_list, encode_scores


def session_body(view: SessionView, model: ModelCard) -> SessionBody:
    """Return the REST body of a session."""
    return SessionBody(
        id=view.session_id,
        object="session",
        model=model.name,
        state=view.state,
        epoch=view.epoch,
        seq=view.seq,
        tokens=view.num_tokens,
        turns=view.num_turns,
        running_turn=view.running_turn,
        queued_turns=view.queued_turns,
        ttl_s=view.ttl_s,
        metadata=dict(view.metadata),
        pinned=view.is_pinned,
        history=view.history,
        created=view.created_s,
        durable=view.is_durable,
    )


async def turn_body(view: TurnView) -> TurnResultBody:
    """Return the REST body of a turn, ended or not."""
    if view.end is not None:
        return await turn_result(view.session_id, view.end)
    return TurnResultBody(
        id=view.turn_id,
        object="turn",
        session_id=view.session_id,
        status=view.status,
        text=view.text,
    )


async def turn_result(session_id: str, end: TurnEnd) -> TurnResultBody:
    """Return the REST body of a turn that has ended."""
    scores = await encode_scores(end)
    completed = end if isinstance(end, TurnCompleted) else None
    return TurnResultBody(
        id=end.turn_id,
        object="turn",
        session_id=session_id,
        status=end.status,
        text=end.outcome.text,
        finish_reason=completed.reason if completed is not None else None,
        matched=completed.matched if completed is not None else None,
        kept_partial=end.kept_partial if isinstance(end, TurnCancelled) else None,
        item=item_body(end.outcome, complete=completed is not None, scores=scores),
        usage=usage_body(end.outcome.usage),
        timings=end.outcome.timings,
        error=failure_body(end) if isinstance(end, TurnFailedEntry) else None,
        durable=end.outcome.is_durable,
    )


def hello_frame(
    view: SessionView, services: AppServices, *, seq: int, resumed: bool
) -> OpenedFrame:
    """Return the first frame of a socket that reads on from `seq`."""
    settings = services.settings
    return OpenedFrame(
        seq=seq,
        session_id=view.session_id,
        epoch=view.epoch,
        resumed=resumed,
        state=view.state,
        tokens=view.num_tokens,
        model=services.model.name,
        limits=LimitsBody(
            max_message_bytes=settings.max_message_bytes,
            max_context=services.max_context,
            max_queued_turns=settings.max_queued_turns,
            replay_bytes=settings.replay_bytes,
            idle_ttl_s=view.ttl_s,
        ),
        heartbeat_s=settings.heartbeat_s,
    )


async def snapshot_frame(snapshot: SessionSnapshot) -> SnapshotFrame:
    """Return the state of a session, for a reader that lost its position."""
    running = snapshot.running
    turn = None
    if running is not None:
        said = running.said
        turn = SnapshotTurn(
            turn_id=running.turn_id,
            text=said.content,
            reasoning=said.reasoning,
            tool_calls=said.tool_calls,
        )
    return SnapshotFrame(
        seq=snapshot.session.seq,
        state=snapshot.session.state,
        tokens=snapshot.session.num_tokens,
        items=await encode_list(snapshot.items),
        turn=turn,
        queued=tuple(view.turn_id for view in snapshot.queued),
    )
