"""Read one turn, or a whole session, over plain HTTP."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Self

from starlette.types import Receive

from session_server.core.errors import (
    SessionClosing,
    SessionMoved,
    SessionNotFound,
    SessionServerError,
    TurnNotFound,
)
from session_server.core.session_events import (
    SessionEntry,
    TurnEnd,
    TurnRequest,
)
from session_server.protocol.errors import error_body
from session_server.protocol.frames import (
    ErrorFrame,
    ResumeFailedFrame,
    coalesce,
    frame_of,
)
from session_server.sessions.journal import Journal, OffsetLost
from session_server.sessions.turn import TurnHooks
from session_server.sessions.views import TurnView
from session_server.web.event_stream import (
    HEARTBEAT,
    Merge,
    event_chunk,
    read_batches,
    until_disconnect,
)
from session_server.web.requests import Call
from session_server.web.slices import encode_scores
from session_server.web.slim_exit_stack import SlimExitStack
from session_server.web.views import snapshot_frame

OnEntry = Callable[[SessionEntry], Awaitable[object]]


class TurnReader:
    """Read one turn: `follow` it once it is submitted, then iterate or wait, once.

    It is a reader of the session from the beginning, and until it or the call's place is closed.
    `keep_partial` None lets the turn run on when the last reader of the session disconnects.
    Otherwise the turn is canceled then, and keeps its partial answer or not. `is_bounded`: as in
    `Readers.reading`. Raises ServerBusy: too many read the session.
    """

    def __init__(
        self,
        call: Call,
        session_id: str,
        *,
        keep_partial: bool | None,
        merge: Merge = coalesce,
        is_bounded: bool = True,
    ) -> None:
        self._call = call
        self.view: TurnView
        self._keep_partial = keep_partial
        self._merge = merge
        self.has_gap = False
        """Whether entries were lost: the reader fell behind the journal."""

        self.has_ended = False
        """Whether the turn's end was read."""

        self._scope = call.resources.enter_context(SlimExitStack())
        reading = call.readers.reading(call.owner, session_id, is_bounded=is_bounded)
        self._session_readers = self._scope.enter_context(reading)

    def follow(self, view: TurnView) -> Self:
        """Read this turn."""
        self.view = view
        if view.end is None:
            self.bind(view.turn_id)
        return self

    def bind(self, turn_id: str) -> None:
        """Let a turn end with its readers, unless it was asked to run on."""
        if self._keep_partial is not None:
            self._session_readers.bind_turn(turn_id, keep_partial=self._keep_partial)

    def close(self) -> None:
        """Stop to count as a reader."""
        self._scope.close()

    async def end(self, receive: Receive, *, on_entry: OnEntry | None = None) -> TurnEnd:
        """Wait for the end of the turn. `on_entry` gets the turn's entries before it.

        Raises:
            HttpRefusal: the client disconnected before.
            And what `entries` raises.
        """
        return await until_disconnect(self.wait(on_entry=on_entry), receive)

    async def wait(self, *, on_entry: OnEntry | None = None) -> TurnEnd:
        """Wait for the end of the turn. Raises what `entries` raises."""
        async for item in self.entries():
            if item is not None and isinstance(item[1], TurnEnd):
                return item[1]
            if item is not None and on_entry is not None:
                await on_entry(item[1])
        raise AssertionError("entries come up to the turn's end")

    async def entries(self) -> AsyncGenerator[tuple[int, SessionEntry] | None, None]:
        """Yield the turn's entries up to its end; None after each silent heartbeat interval.

        A reader that falls behind the journal goes on at its newest entry: it may miss
        deltas but not the end, which holds the whole text.

        Raises:
            SessionClosing, SessionMoved: the end was among the lost entries, and the session is
                gone, or goes on in another replica.
            TurnNotFound: so it was, and what the turn said was replaced since.
        """
        journal, position = self.view.journal, self.view.created_seq - 1
        turn_id = self.view.turn_id
        heartbeat_s = self._call.services.settings.heartbeat_s
        while True:
            try:
                batches = read_batches(
                    journal, position, heartbeat_s=heartbeat_s, merge=self._merge
                )
                async for batch in batches:
                    if not batch:
                        yield None
                    for seq, entry in batch:
                        if not belongs_to(entry, turn_id):
                            continue
                        if isinstance(entry, TurnEnd):
                            self._note_end()
                            yield seq, entry
                            return
                        yield seq, entry
                if journal.is_suspended:
                    raise SessionMoved("The session has moved: send the turn again.")
                raise SessionClosing("The session closed before the turn's end was read.")
            except OffsetLost as lost:
                self.has_gap = True
                position = lost.last_seq
                end = self._current_end()
                if end is not None:
                    self._note_end()
                    yield position, end
                    return

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the turn as server-sent events; the last one is its end or an `error`."""
        try:
            async for item in self.entries():
                if self.has_ended:
                    self._call.resources.close()  # the client may send its next turn now
                yield HEARTBEAT if item is None else await _event(*item)
        except (SessionClosing, SessionMoved, TurnNotFound) as error:
            body = error_body(error, turn_id=self.view.turn_id)
            yield event_chunk(ErrorFrame(error=body), seq=None)

    def _note_end(self) -> None:
        self.has_ended = True
        self._session_readers.unbind_turn(self.view.turn_id)

    def _current_end(self) -> TurnEnd | None:
        """Return the turn's end if it has ended. Raises TurnNotFound if what it said is gone."""
        call, found = self._call, self.view
        if found.end is None:
            try:
                found = call.sessions.turn(call.owner, found.session_id, found.turn_id)
            except SessionServerError:
                return None  # its session is not here any more
        if found.is_answer_lost:
            raise TurnNotFound("The turn has ended, and what it said was replaced since.")
        return found.end


async def submitted(
    call: Call,
    request: TurnRequest,
    session_id: str,
    *,
    on_end: Callable[[TurnEnd], None] | None = None,
) -> TurnView:
    """Submit a turn that nobody else knows; it is canceled with its caller. Raises what
    `SessionManager.submit` raises."""
    sessions, owner = call.sessions, call.owner
    try:
        return await sessions.submit(owner, session_id, request, hooks=TurnHooks(on_end))
    except asyncio.CancelledError:
        with contextlib.suppress(SessionServerError):
            turn_id = request.turn_id
            sessions.cancel(owner, session_id, turn_id, keep_partial=False, reason="disconnected")
        raise


async def check_still_here(call: Call, session_id: str, journal: Journal) -> None:
    """Raise SessionMoved if a session has left since somebody began to read this journal of it: it
    may be back, and whoever submits a turn then reads nothing of it. Between this and a submission
    nothing may be awaited. Raises what `SessionManager.load` raises."""
    await call.sessions.load(call.owner, session_id)
    if journal.is_suspended:
        raise SessionMoved("The session has moved: connect again.")


async def session_events(call: Call, session_id: str, *, after: int) -> AsyncGenerator[bytes, None]:
    """Yield a whole session as server-sent events; a snapshot replaces lost ones."""
    position = after
    heartbeat_s = call.services.settings.heartbeat_s
    journal = call.sessions.journal(call.owner, session_id)
    while True:
        try:
            async for batch in read_batches(journal, position, heartbeat_s=heartbeat_s):
                if not batch:
                    yield HEARTBEAT
                for seq, entry in batch:
                    position = seq
                    yield await _event(seq, entry)
            return
        except OffsetLost as lost:
            call.services.metrics.count_resume("offset_lost")
            yield event_chunk(ResumeFailedFrame(reason="offset_lost"), seq=None)
            try:
                settled = await call.sessions.settled_snapshot(call.owner, session_id)
                snapshot = await snapshot_frame(settled)
            except SessionNotFound:
                position = lost.last_seq - 1  # only the end is left to send
                continue
            yield event_chunk(snapshot, seq=snapshot.seq)
            position = snapshot.seq


async def _event(seq: int, entry: SessionEntry) -> bytes:
    return event_chunk(frame_of(seq, entry, scores=await encode_scores(entry)), seq=seq)


def belongs_to(entry: SessionEntry, turn_id: str) -> bool:
    """Return whether an entry is about this turn."""
    return getattr(entry, "turn_id", None) == turn_id
