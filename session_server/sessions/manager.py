"""Manage every session of the server: its turns in order and its token history."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from session_server.core.commands import MAX_REPORTED_SESSIONS
from session_server.core.engine_client import EngineClient, EventListener
from session_server.core.errors import (
    EngineUnavailable,
    InvalidRequest,
    ServerDraining,
    SessionBusy,
    SessionExists,
)
from session_server.core.events import (
    EngineDied,
    EngineEvent,
    EngineReady,
    InputDrafted,
    KVForgotten,
    MemoryReported,
    SessionCooled,
    SessionRefused,
    SessionWritten,
    TurnEvent,
)
from session_server.core.origin import ORIGIN
from session_server.core.owner import Owner
from session_server.core.session_events import (
    CancelReason,
    CloseReason,
    RawInput,
    StateReason,
    TurnRequest,
)
from session_server.core.turn_report import TurnListener
from session_server.sessions.answer_grammar import held_request
from session_server.sessions.drafts import SessionDrafts
from session_server.sessions.edits import HistoryEdits
from session_server.sessions.engine_link import EngineLink
from session_server.sessions.exits import SessionExits
from session_server.sessions.footprint import input_bytes, message_bytes, metadata_bytes
from session_server.sessions.journal import Journal
from session_server.sessions.keeping import keep_sessions
from session_server.sessions.opening import SessionMaker, check_repeated
from session_server.sessions.parts import NOT_ENDED, SessionParts
from session_server.sessions.prompt import check_num_ids
from session_server.sessions.quotas import QuotaLimits, Quotas, SessionLimits
from session_server.sessions.registry import SessionRegistry
from session_server.sessions.replay import Replay
from session_server.sessions.salts import TenantSalts
from session_server.sessions.session import Session
from session_server.sessions.stats import manager_stats
from session_server.sessions.store.session_store import SessionStore
from session_server.sessions.transcript import Transcript
from session_server.sessions.turn import (
    SessionTurn,
    TurnCourse,
    TurnHooks,
    check_same_request,
    fingerprint,
    with_allowed_priority,
)
from session_server.sessions.turn_flow import TurnFlow
from session_server.sessions.validation import (
    check_metadata,
    check_open,
    check_ttl,
    check_turn,
)
from session_server.sessions.views import (
    ManagerStats,
    OpenRequest,
    SessionPage,
    SessionSnapshot,
    SessionView,
    TurnView,
)
from session_server.text.model_text import ModelText

MAX_LIST: Final = 1000


class SessionManager:
    """Open, run, cancel and close sessions and turns for their owners.

    Call every method on the event loop's thread. Methods that reject a request raise errors of
    `core.errors`. `owner` is the authenticated caller: sessions of one owner do not exist for
    another. `salts` gives sessions their cache namespaces. `clock` returns monotonic seconds.
    """

    def __init__(
        self,
        engine: EngineClient,
        text: ModelText,
        *,
        salts: TenantSalts,
        limits: SessionLimits | None = None,
        quotas: QuotaLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.text = text
        self._salts = salts
        self._clock = clock
        self._limits = limits or SessionLimits()
        quotas = quotas or QuotaLimits()
        self._quotas = Quotas(quotas)
        replay = Replay(max_bytes=quotas.replay_bytes, max_age_s=self._limits.journal.max_age_s)
        self._maker = SessionMaker(text, self._limits, replay, clock)
        self._sessions = SessionRegistry()
        self._link = EngineLink(engine, clock=clock)
        self._flow = TurnFlow(
            self._link, text, limits=self._limits, quotas=self._quotas, clock=clock, salts=salts
        )
        self._flow.on_idle = self._on_idle
        prompts = self._flow.prompt_builder
        mark_cold = self._flow.residents.mark_cold
        logs, backlog = self._flow.conclusion.logs, self._flow.backlog
        parts = SessionParts(
            self._sessions, self._link, self._quotas, prompts, mark_cold, logs, backlog
        )
        self.drafts = SessionDrafts(parts, self._flow.copies, text, self._limits, clock)
        self.edits = HistoryEdits(parts, text, self._limits, clock, self._open_with, self.drafts)
        self.exits = SessionExits(parts, self._flow, self.drafts)

    @property
    def engine_ready(self) -> EngineReady | None:
        """Return what the engine reported when it last came up; None while there is no engine."""
        return self._link.ready if self._link.is_up else None

    @property
    def engine_stalled_s(self) -> float | None:
        """Return the seconds since the last step of an engine that stalls; None for any other."""
        return self._link.stalled_s

    @property
    def is_draining(self) -> bool:
        """Return whether the server shuts down and accepts no new work."""
        return self.exits.drain.is_on

    def on_turn_ended(self, listener: TurnListener) -> None:
        """Have a listener told of every accepted turn that ends, in place of the one before."""
        self._flow.counts.on_ended = listener

    def store_in(self, store: SessionStore) -> None:
        """Keep sessions in a store that the caller opens, starts and closes."""
        keep_sessions(store, exits=self.exits, maker=self._maker, clock=self._clock)

    async def start(self, observers: Sequence[EventListener] = ()) -> EngineReady:
        """Start the engine; `observers` get each of its events before the sessions do. Raises
        EngineUnavailable if it did not come up."""
        self._flow.backlog.bind(asyncio.get_running_loop())
        return await self._link.start((*observers, self.on_event))

    async def stop(self) -> None:
        """Stop the engine; call it after `drain`."""
        await self._link.stop()

    async def stored(self) -> None:
        """Wait until what has changed so far is on disk, or cannot be."""
        await self._flow.conclusion.logs.flush()

    async def create(self, owner: Owner, request: OpenRequest) -> SessionView:
        """Open a session as a client requested it, after measuring its first messages.

        A key of an open session gives that session again, if the request is the same.

        Raises:
            SessionExists, SessionClosing: the key is another request's, or its session closes.
            ContextTooLong: no turn behind the messages could ever fit the context.
            TokenizeFailed: the tokenizer refused them. And whatever `open` raises.
        """
        if request.idempotency_key is None:
            if request.session_id is not None:
                await self._sessions.look_up(owner, request.session_id)
            return await self._create(owner, request)
        session_id = self._salts.id_for_key(owner, request.idempotency_key)
        await self._sessions.look_up(owner, session_id)
        try:
            return await self._create(owner, replace(request, session_id=session_id))
        except SessionExists:
            await self.load(owner, session_id)
            session = self._sessions.get(owner, session_id)
            check_repeated(session, request)
            await self.stored()
            return session.view()

    async def _create(self, owner: Owner, request: OpenRequest) -> SessionView:
        session = self._make_session(owner, request)
        if request.messages and self._link.ready is not None:
            state, max_len = session.transcript.state(), self._link.ready.max_turn_len
            with self._quotas.opening(session):
                await self._flow.prompt_builder.check_opening(owner, state, max_len=max_len)
            # Another request may have taken the id, the place or the room during the await.
            self._check_open(owner, request)
        self._add(session, is_stored=request.is_stored)
        log = session.life.log
        await self.stored()
        session.check_not_lost(log)
        return session.view()

    def open(self, owner: Owner, request: OpenRequest) -> SessionView:
        """Open a session whose first messages, if any, need not be measured.

        Nothing is computed before its first turn.

        Raises:
            InvalidRequest: a bound is exceeded, or the session id is malformed.
            UnsupportedOperation: messages without a chat template, or `history` "append" with a
                template that rewrites its history.
            SessionExists: the owner has a session of this id.
            QuotaExceeded, ServerBusy: too many sessions.
            ServerDraining: the server shuts down.
        """
        return self._add(self._make_session(owner, request), is_stored=request.is_stored)

    async def load(self, owner: Owner, session_id: str) -> None:
        """Bring a long session that is on disk into memory, others being served in between: methods
        that are not async refuse it before. Raises what they raise, but SessionNotFound."""
        await self._sessions.load(owner, session_id)

    def get(self, owner: Owner, session_id: str) -> SessionView:
        """Return one session. Raises SessionNotFound."""
        return self._sessions.get(owner, session_id).view()

    async def list(
        self, owner: Owner, *, limit: int = 100, after: str | None = None
    ) -> SessionPage:
        """Return the owner's sessions, oldest first, after a cursor or an open session.

        Raises:
            InvalidRequest: `limit` is outside [1, MAX_LIST], or `after` is neither.
        """
        if not 1 <= limit <= MAX_LIST:
            raise InvalidRequest(f"limit must lie in [1, {MAX_LIST}]", param="limit")
        return await self._sessions.page(owner, limit=limit, after=after)

    def update(
        self,
        owner: Owner,
        session_id: str,
        *,
        ttl_s: float | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> SessionView:
        """Change settings (None keeps the present value) and journal the effective ones. Raises
        SessionNotFound, SessionClosing, InvalidRequest."""
        session = self._sessions.use(owner, session_id)
        session.check_not_closing()
        if ttl_s is not None:
            check_ttl(ttl_s, self._limits)
        if metadata is not None:
            check_metadata(metadata, self._limits)
            self._quotas.check_growth(owner, metadata_bytes(metadata))
        settings = session.settings
        settings.ttl_s = settings.ttl_s if ttl_s is None else ttl_s
        settings.metadata = settings.metadata if metadata is None else dict(metadata)
        session.life.last_active_s = self._clock()
        self._sessions.deadlines.watch(session)
        self._quotas.recount(session)
        session.journal.append(settings.updated())
        self._flow.conclusion.logs.touch(session)
        return session.view()

    def close(
        self, owner: Owner, session_id: str, *, reason: CloseReason = "client"
    ) -> SessionView:
        """Start closing a session: reject new turns, end waiting ones, cancel a running one.

        `SessionClosed` ends the journal, at once when no turn runs; then the id is free. Closing
        twice is closing once. Raises SessionNotFound.
        """
        return self.exits.close_named(owner, session_id, reason)

    async def encode(self, owner: Owner, raw: RawInput, *, add_bos: bool) -> tuple[int, ...]:
        """Return the token ids of raw input; encode a long text off the event loop. Raises
        EngineUnavailable, ContextTooLong, TokenizeFailed, QuotaExceeded, ServerBusy."""
        if self._link.ready is None:
            raise EngineUnavailable("there is no engine")
        encode, max_len = self._flow.prompt_builder.encode, self._link.ready.max_turn_len
        with self._quotas.turn_bytes.held(owner, input_bytes(raw)):
            return await encode(owner, raw, add_bos=add_bos, max_len=max_len)

    def set_attached_bytes(self, owner: Owner, session_id: str, num_bytes: int) -> None:
        """Set the bytes that another surface keeps with a session. Raises SessionNotFound."""
        session = self._sessions.get(owner, session_id)
        session.transcript.attached_bytes = num_bytes
        self._quotas.recount(session)

    async def submit(
        self,
        owner: Owner,
        session_id: str,
        request: TurnRequest,
        *,
        hooks: TurnHooks | None = None,
    ) -> TurnView:
        """Accept a turn, or reject it by raising with nothing changed.

        Returns as soon as the turn waits in the queue or was sent to the engine. Turns run in the
        order of these calls. A turn id seen before in this session returns the same turn, or runs
        again (`EndedTurn.may_run_again`). Canceling the caller does not cancel it. `hooks` are
        those of a new turn.

        Raises:
            SessionNotFound, SessionClosing: no session to run it in.
            SessionBusy: a turn runs, and `request.queue` is False or the queue is full.
            TurnConflict: the turn id was used with another request.
            InvalidRequest, UnsupportedOperation, TokenizeFailed: the input or grammar is at fault.
            ContextTooLong: it cannot fit; a turn that must wait first fails later instead.
            QuotaExceeded, ServerBusy, ServerDraining, EngineUnavailable
        """
        await self.load(owner, session_id)
        session = self._sessions.use(owner, session_id)
        if self._link.ready is not None:
            check_num_ids(request.input, self._link.ready.max_turn_len)
        digest = fingerprint(request)
        turn = session.find(request.turn_id)
        if turn is None:
            ended = session.ended.find(request.turn_id)
            if ended is not None:
                check_same_request(ended.fingerprint, digest)
                if not ended.may_run_again:
                    return session.ended_view(request.turn_id, ended)
            held = held_request(self.text, request, session.transcript.tools_of(request.input))
            turn = self._new_turn(session, with_allowed_priority(held, owner), digest)
            turn.course.hooks = hooks or turn.course.hooks
            self.drafts.stop(session)
            self._flow.enqueue(session, turn)
        else:
            check_same_request(turn.fingerprint, digest)
        error = await turn.refusal()
        if error is not None:
            raise error
        return session.view_of(request.turn_id)

    def cancel(
        self,
        owner: Owner,
        session_id: str,
        turn_id: str | None = None,
        *,
        keep_partial: bool = True,
        reason: CancelReason = "client_cancelled",
    ) -> TurnView:
        """End a turn early (None: the running one, else the first in the queue).

        This call decides whether the output processed so far stays (`keep_partial`) or is dropped;
        a turn not yet sent to the engine leaves nothing. The terminal entry follows when the engine
        has released the turn. Canceling twice has the effect of canceling once.

        Raises:
            SessionNotFound, TurnNotFound
            TurnNotActive: it has ended, or its last token has already arrived.
        """
        session = self._sessions.get(owner, session_id)
        turn = session.turn_to_cancel(turn_id)
        self._flow.cancel(session, turn, keep_partial=keep_partial, reason=reason)
        return session.view_of(turn.request.turn_id)

    def turn(self, owner: Owner, session_id: str, turn_id: str) -> TurnView:
        """Return a turn, ended or not. Raises SessionNotFound, TurnNotFound."""
        return self._sessions.get(owner, session_id).view_of(turn_id)

    def journal(self, owner: Owner, session_id: str) -> Journal:
        """Return the session's journal. Its holder can read it to its end, even after the session
        is gone. Raises SessionNotFound."""
        return self._sessions.get(owner, session_id).journal

    def snapshot(self, owner: Owner, session_id: str) -> SessionSnapshot:
        """Return the state from which a reader that lost the journal continues. Raises
        SessionNotFound."""
        session = self._sessions.get(owner, session_id)
        live = session.live
        return SessionSnapshot(
            session=session.view(),
            items=session.transcript.items,
            running=session.turn_view(live) if live is not None and live.is_accepted else None,
            queued=tuple(session.turn_view(turn) for turn in session.queue if turn.is_accepted),
        )

    async def settled_snapshot(self, owner: Owner, session_id: str) -> SessionSnapshot:
        """Return a snapshot once no end is on its way to disk. Raises SessionNotFound."""
        await self.load(owner, session_id)
        while self._sessions.get(owner, session_id).is_concluding:
            await self.stored()
        return self.snapshot(owner, session_id)

    def history(self, owner: Owner, session_id: str) -> tuple[int, ...]:
        """Return the token ids of the session as of its last ended turn. Raises SessionNotFound."""
        return self._sessions.get(owner, session_id).transcript.tokens()

    async def memory(
        self, *, full: bool = False, trace: bool = False, max_sessions: int = MAX_REPORTED_SESSIONS
    ) -> MemoryReported:
        """Return the engine's memory accounts; see `ReportMemory`. Raises EngineUnavailable."""
        return await self._link.memory(full=full, trace=trace, max_sessions=max_sessions)

    async def flush(self) -> bool:
        """Cool all sessions, empty the radix tree; False if turns run. Raises EngineUnavailable."""
        return await self._link.flush()

    def stats(self) -> ManagerStats:
        """Return what the manager holds now."""
        return manager_stats(
            self._sessions, self._flow, self._link, quotas=self._quotas, replay=self._maker.replay
        )

    def on_event(self, event: EngineEvent) -> None:
        """Process one engine event; called on the event loop's thread, in order."""
        if isinstance(event, TurnEvent):
            self._flow.on_turn_event(event)
            return
        match event:
            case InputDrafted():
                self.drafts.on_drafted(event)
            case SessionCooled(session_id=session_id):
                session = self._sessions.find_by_engine_id(session_id)
                if session is not None:
                    is_flush = self._link.is_flushing
                    reason: StateReason = "flush" if is_flush else "pressure"
                    self._flow.residents.mark_cold(session, reason)
            case SessionRefused(session_id=session_id, code=code, message=message):
                session = self._sessions.find_by_engine_id(session_id)
                if session is not None:
                    self._flow.on_refused(session, code, message)
            case SessionWritten(session_id=session_id):
                self._flow.copies.on_written(session_id)
            case KVForgotten():
                self._flow.copies.on_forgotten(event)
            case EngineDied(will_restart=will_restart):
                self._link.on_event(event)
                self._flow.on_engine_lost(will_restart=will_restart)
                self.drafts.on_engine_lost(self._flow.backlog)
            case EngineReady():
                self._link.on_event(event)
                self._flow.retry()
            case _:
                self._link.on_event(event)

    def tick(self, now_s: float | None = None) -> None:
        """Close expired sessions, drop old journal entries, retry what the engine did not take.

        Call it about once a second. Its cost grows with what is due, not with open sessions.
        """
        now_s = self._clock() if now_s is None else now_s
        with contextlib.suppress(EngineUnavailable):
            self._link.resend()
        self._flow.retry()
        self.exits.expire(now_s)
        self._drop_old(now_s)
        self._flow.conclusion.logs.retry()

    def _drop_old(self, now_s: float) -> None:
        """Drop slices of old journal entries, of rates that are paid and of sessions on disk that
        have expired, until there are none."""
        slices = (
            self._maker.replay.drop_old(now_s),
            self._quotas.drop_paid(now_s),
            self._sessions.expire_on_disk(now_s),
        )
        if any(slices):
            self._flow.backlog.defer(partial(self._drop_old, now_s))

    async def drain(self, deadline_s: float) -> None:
        """Reject new work, and end what there is; see `Drain.run`."""
        await self.exits.drain.run(deadline_s)

    # -- sessions

    def _check_open(self, owner: Owner, request: OpenRequest) -> None:
        """Reject what can be rejected without tokenizing the messages."""
        if self.exits.drain.is_on:
            raise ServerDraining("the server is shutting down")
        check_open(request, self._limits)
        self._sessions.by_use.in_hand = None
        if request.session_id is not None:
            self._sessions.check_free(owner, request.session_id)
        self._quotas.check_session(owner, sum(map(message_bytes, request.messages)))

    def _make_session(self, owner: Owner, request: OpenRequest) -> Session:
        self._check_open(owner, request)
        return self._maker.new(owner, request)

    def _open_with(self, owner: Owner, request: OpenRequest, said: Transcript) -> SessionView:
        session = self._make_session(owner, request)
        session.transcript = said
        return self._add(session, is_stored=request.is_stored)

    def _add(self, session: Session, *, is_stored: bool) -> SessionView:
        if is_stored and self._sessions.on_disk is not None:
            self._sessions.on_disk.check()
            self._quotas.stored_bytes.check(session.owner, session.num_bytes)
        self._quotas.take_session(session)
        self._sessions.add(session)
        self._sessions.deadlines.watch(session)
        if is_stored:
            self._flow.conclusion.logs.open(session)
        self._sessions.by_use.use(session)
        return session.view()

    def _on_idle(self, session: Session) -> None:
        """Finish a close that waited for the last turn to end. Does nothing for a session that is
        closed already: whoever is told of a turn's end may close its session."""
        self.exits.drain.became_idle.set()
        if self._sessions.find(session.owner, session.session_id) is not session:
            return
        if session.settings.is_single_turn and session.closing is None:
            session.closing = "client"
        if session.closing is not None and session.is_idle:
            self.exits.finish(session)
            return
        self._sessions.by_use.postpone(session)
        self.drafts.start(session)

    # -- turns

    def _new_turn(self, session: Session, request: TurnRequest, digest: bytes) -> SessionTurn:
        """Check, count and return a turn that is new to its session."""
        if self.exits.drain.is_on:
            raise ServerDraining("the server is shutting down")
        session.check_not_closing()
        if self._link.is_gone or self._link.ready is None:
            raise EngineUnavailable("there is no engine")
        # A turn that may wait is kept for the next engine.
        if not self._link.is_up and not request.queue:
            raise EngineUnavailable("the engine restarts")
        check_turn(request, self._limits, self._link.ready.vocab_size)
        if not session.is_idle:
            if not request.queue:
                raise SessionBusy(NOT_ENDED)
            if len(session.queue) >= self._limits.max_queued_turns:
                waiting = f"{len(session.queue)} wait behind it, the most there may be"
                raise SessionBusy(f"{NOT_ENDED}: {waiting}")
        self._quotas.check_turn(session.owner, request)
        if session.life.log is not None:
            self._quotas.stored_bytes.check(session.owner, input_bytes(request.input))
        self._quotas.start_turn(session.owner, now_s=self._clock())
        turn = SessionTurn(
            request=request,
            fingerprint=digest,
            item_id=session.transcript.new_item_id(),
            accepted=asyncio.get_running_loop().create_future(),
            course=TurnCourse(self._clock(), ORIGIN.get()),
        )
        self._quotas.take_turn(session.owner, turn)
        return turn
