"""Serve OpenAI's Realtime in text modality over a WebSocket: one conversation, one session.

A session opened here ends with its connection, unless the client has said that it comes back: then
it lives on as sessions do, with its responses, and a later connection is told what it has missed.
Responses that do not go on in the conversation run in sessions of one turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, assert_never
from weakref import WeakKeyDictionary

from starlette.websockets import WebSocket, WebSocketDisconnect

from session_server.core.errors import (
    ServerBusy,
    ServerDraining,
    SessionNotFound,
    SessionServerError,
    UnsupportedOperation,
)
from session_server.core.session_events import ChatInput, SessionClosed, TurnRequest
from session_server.metrics.prometheus import ReaderKind
from session_server.protocol.realtime import (
    CONVERSATION_PREFIX,
    REALTIME,
    RealtimeModel,
    RealtimeNames,
    RealtimeProtocol,
)
from session_server.protocol.realtime_frames import RateName, RealtimeRateLimit
from session_server.protocol.realtime_outbox import RealtimeOutbox, RealtimeQueue
from session_server.protocol.realtime_responses import (
    CancelResponse,
    DraftNextInput,
    StartResponse,
)
from session_server.protocol.session_protocol import CloseCode
from session_server.sessions.journal import Journal, OffsetLost
from session_server.sessions.usage import rate_uses
from session_server.sessions.views import DraftView, OpenRequest, SessionView
from session_server.web.refusals import deny
from session_server.web.requests import Call, make_call, services_of
from session_server.web.slices import run_in_slices
from session_server.web.slim_exit_stack import SlimExitStack
from session_server.web.socket_peer import SocketPeer
from session_server.web.sockets import Sockets
from session_server.web.turns import check_still_here

KEY_PROTOCOL: Final = "openai-insecure-api-key."

_logger: Final = logging.getLogger("session_server.web")


@dataclass(slots=True)
class Aside:
    """Hold what is read of a session of one response."""

    session_id: str
    journal: Journal
    position: int = 0


@dataclass(frozen=True, slots=True)
class HeldBefore:
    """Remember that a session's history, as of entry `seq`, holds the first `num` messages of a
    conversation."""

    version: int
    tools: tuple[str, ...]
    seq: int
    num: int


@dataclass(slots=True, eq=False)
class RealtimeRun:
    """Hold what stays of a conversation between two connections. `position`: in the journal of its
    session; `asides`: by response."""

    protocol: RealtimeProtocol
    position: int
    held: HeldBefore | None = None
    peer: SocketPeer | None = None
    asides: dict[str, Aside] = field(default_factory=dict)
    submissions: set[asyncio.Task[None]] = field(default_factory=set)

    def notify(self) -> None:
        """Wake the connection, if there is one."""
        if self.peer is not None:
            self.peer.wake.set()


RealtimeRuns = WeakKeyDictionary[Journal, RealtimeRun]
"""The conversations of open sessions, by their journals."""


async def realtime_endpoint(websocket: WebSocket) -> None:
    """Serve the route `/v1/realtime`."""
    sockets = websocket.app.state.sockets
    assert isinstance(sockets, Sockets), "create_app set it"
    try:
        with sockets.admit(), SlimExitStack() as resources:
            await RealtimeSocket(websocket, sockets, resources).run()
    except ServerBusy as error:
        await deny(websocket, error)


class RealtimeSocket:
    """Serve one connection, from handshake to close."""

    def __init__(self, websocket: WebSocket, sockets: Sockets, resources: SlimExitStack) -> None:
        self._websocket = websocket
        self._sockets = sockets
        self._resources = resources
        self._services = services_of(websocket)
        self._peer = SocketPeer(websocket, subprotocol=REALTIME, key_prefix=KEY_PROTOCOL)
        self._queue = RealtimeQueue()

    def end(self, code: CloseCode) -> None:
        """Close soon, after sending what is already queued."""
        self._peer.end(code)
        if code is CloseCode.SUPERSEDED:
            self._resources.close()

    async def run(self) -> None:
        """Serve the connection to its end."""
        with SlimExitStack() as reading:
            await self._run_reading(reading)

    async def _run_reading(self, reading: SlimExitStack) -> None:
        """Serve the connection; `reading` holds its place among those that read its session."""
        try:
            self._call = make_call(self._websocket, self._peer.authenticate(), self._resources)
            view = await self._open(reading)
        except SessionServerError as error:
            outbox = RealtimeOutbox()
            told = outbox.attach()
            outbox.tell(error, None)
            await self._peer.refuse(error, told)
            return
        self._session_id = view.session_id
        try:
            await self._peer.accept()
            owner, session_id = self._call.owner, view.session_id
            tracked = self._call.authenticator.track(self._call.credential, self)
            with tracked, self._sockets.attach(owner, session_id, self):
                await self._serve()
        finally:
            self._leave()

    # -- the session

    async def _open(self, reading: SlimExitStack) -> SessionView:
        """Return the session of this connection: a new one, or that which the client names."""
        query, sessions, owner = self._websocket.query_params, self._call.sessions, self._call.owner
        if sessions.is_draining:
            raise ServerDraining("The server is shutting down.")
        self._services.check_model(query.get("model"))
        if query.get("call_id"):
            raise UnsupportedOperation("There are no calls here.", param="call_id")
        name, self._last_event_id = query.get("session_id"), query.get("last_event_id")
        if (conversation_id := query.get("conversation_id")) is not None:
            if not conversation_id.startswith(CONVERSATION_PREFIX):
                raise SessionNotFound("There is no such conversation.", param="conversation_id")
            name = conversation_id.removeprefix(CONVERSATION_PREFIX)
        if name is not None:
            await sessions.load(owner, name)
            if conversation_id is not None:
                sessions.get(owner, name)  # it must be open
            self._sockets.supersede(owner, name)
        self._call.connect(ReaderKind.WEBSOCKET)
        view = sessions.open(owner, OpenRequest()) if name is None else self._named(name)
        self._journal = sessions.journal(owner, view.session_id)
        # Before anything is awaited: a session that nobody reads may leave the memory.
        reader = self._call.readers.reading(owner, view.session_id, is_bounded=False)
        reading.enter_context(reader)
        self._run = await self._run_of(view)
        if query.get("x_events") == "1":
            self._run.protocol.outbox.has_extensions = True
        if name is not None:
            self._run.protocol.is_resumable = True
        return view

    def _named(self, name: str) -> SessionView:
        """Return the session of this id, which opens unless it should be there already."""
        try:
            self._call.sessions.edits.retention.attach(self._call.owner, name)
            return self._call.sessions.get(self._call.owner, name)
        except SessionNotFound:
            if self._last_event_id is not None:
                raise
        return self._call.sessions.open(self._call.owner, OpenRequest(session_id=name))

    async def _run_of(self, view: SessionView) -> RealtimeRun:
        """Return what an earlier connection has left, or what was said in the session before."""
        runs: RealtimeRuns = self._websocket.app.state.realtime
        run = runs.get(self._journal)
        if run is None:
            call, card = self._call, self._services.model
            protocol = RealtimeProtocol(
                RealtimeNames(view.session_id),
                model=RealtimeModel(card.name, card.defaults, takes_tools=card.takes_tools),
                max_message_bytes=self._services.settings.max_message_bytes,
                check_room=partial(call.sessions.edits.parts.quotas.check_growth, call.owner),
                read_rates=partial(_rates_of, call),
            )
            protocol.outbox.on_refusal = self._services.metrics.count_refusal
            snapshot = call.sessions.snapshot(call.owner, view.session_id)
            if self._websocket.app.state.sglang.is_branching(self._journal):
                raise UnsupportedOperation("This session branches: it is no conversation.")
            await run_in_slices(protocol.adopt(snapshot.items))
            run = runs.get(self._journal)
            if run is None:  # nobody else has been faster
                run = runs[self._journal] = RealtimeRun(protocol, snapshot.session.seq)
                self._journal.add_listener(run.notify)
        return run

    def _leave(self) -> None:
        """Close the session unless the client may come back."""
        run = self._run
        if run.peer is self._peer:
            run.peer = None
            run.protocol.outbox.detach()
        if self._is_superseded:
            return
        self._end_asides()
        if not run.protocol.is_resumable:
            self._close(self._session_id)

    def _end_asides(self) -> None:
        """End the responses that run beside the conversation, for a connection that is gone."""
        self._run.protocol.responses.forget_asides()
        while self._run.asides:
            _, aside = self._run.asides.popitem()
            self._close(aside.session_id)

    def _close(self, session_id: str) -> None:
        with contextlib.suppress(SessionNotFound):
            self._call.sessions.close(self._call.owner, session_id)

    # -- the connection

    async def _serve(self) -> None:
        run = self._run
        self._peer.start()
        self._end_asides()  # those of the connection whose place this one takes
        while self._queue_entries():  # what has happened since the last connection
            await asyncio.sleep(0)
            if self._is_cut:
                await self._peer.close(self._peer.end_code or CloseCode.SUPERSEDED)
                return
        self._queue, run.peer = run.protocol.outbox.attach(), self._peer
        reader: asyncio.Task[None] | None = None
        code: CloseCode | None = CloseCode.INTERNAL
        if self._last_event_id is not None:
            is_known = run.protocol.outbox.mark_of(self._last_event_id).number >= 0
            self._services.metrics.count_resume("resumed" if is_known else "offset_lost")
        try:
            for _ in run.protocol.greet(self._last_event_id):
                await self._peer.flush(self._queue)
                if self._is_cut:
                    break
            reader = asyncio.create_task(self._read(), name="read socket")
            code = await self._write()
        except WebSocketDisconnect:
            code = None
        finally:
            if reader is not None:
                reader.cancel()
                await asyncio.gather(reader, return_exceptions=True)
            if code is not None:
                await self._peer.close(code)

    @property
    def _is_superseded(self) -> bool:
        return self._peer.end_code is CloseCode.SUPERSEDED

    @property
    def _is_cut(self) -> bool:
        return self._is_superseded or self._peer.is_dismissed

    async def _read(self) -> None:
        """Handle events until the client disconnects, or the connection ends."""
        try:
            while not self._peer.is_disconnected and self._peer.end_code is None:
                text = await self._peer.receive(self._queue)
                if text is not None and not self._is_cut:
                    self._run.protocol.receive_frame(text)
                    await self._run_commands()
                    self._peer.set_behind(self._queue.outbox_bytes)
                self._peer.wake.set()
        except Exception:
            _logger.exception("reader failed session=%s", self._session_id)
            self.end(CloseCode.INTERNAL)
            raise

    async def _write(self) -> CloseCode | None:
        """Send what there is to tell. Return the close code; None if the peer left."""
        while True:
            self._peer.wake.clear()
            has_more = not self._is_cut and self._queue_entries()
            if not self._is_cut:
                await self._run_commands()
            await self._peer.flush(self._queue)
            if self._peer.is_disconnected:
                return None
            code = self._run.protocol.close_code or self._peer.end_code
            if code is None and self._journal.is_suspended:
                code = CloseCode.RESTART
            if has_more and not self._is_cut:
                continue
            if code is not None:
                return code
            if not await self._peer.wait():
                return CloseCode.IDLE

    def _queue_entries(self) -> bool:
        """Tell what the journals have; return whether there may be more."""
        run, has_more = self._run, False
        for response_id, aside in list(run.asides.items()):
            try:
                entries = aside.journal.read(aside.position)
            except OffsetLost:
                aside.position = aside.journal.last_seq
                self._catch_up(response_id, aside.session_id)
                entries = ()
            aside.position += len(entries)
            run.protocol.add_entries((item.seq, item.entry) for item in entries)
            has_more |= bool(entries)
            if not run.protocol.responses.is_open(response_id):
                del run.asides[response_id]
        try:
            entries = self._journal.read(run.position)
        except OffsetLost:
            run.position = self._journal.last_seq - self._journal.is_closed  # its end is to be told
            if (active_id := run.protocol.responses.active_id) and active_id not in run.asides:
                self._catch_up(active_id, self._session_id)
            return True
        run.position += len(entries)
        run.protocol.add_entries((item.seq, item.entry) for item in entries)
        if entries and isinstance(entries[-1].entry, SessionClosed):
            run.protocol.on_closed(entries[-1].entry)
        return has_more or bool(entries)

    def _catch_up(self, response_id: str, session_id: str) -> None:
        """Tell how a response stands, in place of entries that are lost."""
        call, responses = self._call, self._run.protocol.responses
        try:
            view = call.sessions.turn(call.owner, session_id, response_id)
            responses.catch_up(response_id, view.text, view.end)
        except SessionServerError as error:
            responses.on_lost(response_id, error)

    def _recount(self) -> None:
        """Count what the conversation holds as bytes of its session, if that is here."""
        with contextlib.suppress(SessionServerError):
            self._call.sessions.set_attached_bytes(
                self._call.owner, self._session_id, self._run.protocol.num_bytes
            )

    # -- what is asked for

    async def _run_commands(self) -> None:
        while (command := self._run.protocol.take_command()) is not None:
            match command:
                case StartResponse():
                    submission = asyncio.create_task(self._submit(command), name="submit response")
                    self._run.submissions.add(submission)
                    submission.add_done_callback(self._run.submissions.discard)
                    await asyncio.sleep(0)  # it is in its queue now, where a cancel finds it
                case CancelResponse(response_id=response_id):
                    self._cancel(response_id)
                case DraftNextInput():
                    self._draft(command)
                case _:
                    assert_never(command)
        self._recount()

    async def _submit(self, start: StartResponse) -> None:
        """Run a response. One that waits for a long input to be tokenized holds up nothing."""
        call, run, session_id = self._call, self._run, self._session_id
        try:
            if start.is_alone:
                session_id = self._open_aside(start.response_id)
            else:
                await check_still_here(call, session_id, self._journal)
            await call.sessions.submit(call.owner, session_id, start.request)
        except SessionServerError as error:
            run.protocol.responses.on_refused(start.response_id, error)
            if run.asides.pop(start.response_id, None) is not None:
                self._close(session_id)
            run.notify()

    def _open_aside(self, response_id: str) -> str:
        """Open the session of one response."""
        call = self._call
        view = call.sessions.open(call.owner, OpenRequest(single_turn=True))
        journal = call.sessions.journal(call.owner, view.session_id)
        self._run.asides[response_id] = Aside(view.session_id, journal)
        journal.add_listener(self._run.notify)
        return view.session_id

    def _cancel(self, response_id: str) -> None:
        """Cancel a response. One that has ended meanwhile is told as it is."""
        aside = self._run.asides.get(response_id)
        session_id = self._session_id if aside is None else aside.session_id
        with contextlib.suppress(SessionServerError):
            self._call.sessions.cancel(self._call.owner, session_id, response_id)

    def _draft(self, draft: DraftNextInput) -> None:
        """Compute ahead what the user is about to say, or drop what was computed."""
        drafts, owner = self._call.sessions.drafts, self._call.owner
        try:
            if draft.request is None:
                drafts.abandon(owner, self._session_id)
            else:
                answer = partial(_tell_drafted, self._run, draft.event_id)
                request = self._shortened(draft.request, draft.version)
                drafts.submit(owner, self._session_id, request, answer)
        except SessionServerError as error:
            self._run.protocol.outbox.refuse(error, draft.event_id)

    def _shortened(self, request: TurnRequest, version: int) -> TurnRequest:
        """Leave out what the session's history holds, so that no key costs a look at all of it."""
        chat, held, seq = request.input, self._run.held, self._journal.last_seq
        assert isinstance(chat, ChatInput), "a draft is a whole conversation"
        if held is None or (held.version, held.tools, held.seq) != (version, chat.tools, seq):
            drafts, owner = self._call.sessions.drafts, self._call.owner
            num = drafts.num_held(owner, self._session_id, chat)
            self._run.held = held = HeldBefore(version, chat.tools, seq, num)
        if not held.num:
            return request
        return replace(request, input=ChatInput(chat.messages[held.num :], tools=chat.tools))


def _rates_of(call: Call) -> tuple[RealtimeRateLimit, ...]:
    """Return what is left of the rates of a tenant: of tokens the count with fewest left."""
    edits = call.sessions.edits
    uses = rate_uses(edits.parts.quotas, call.owner, now_s=edits.clock())
    named: dict[RateName, tuple[str, ...]] = {
        "requests": ("turns_per_min",),
        "tokens": ("input_tokens_per_min", "output_tokens_per_min"),
    }
    rates = []
    for name, quotas in named.items():
        limited = [
            (max(0, use.limit - use.held), use.limit, use.refilled_in_s or 0.0)
            for use in map(uses.__getitem__, quotas)
            if use.limit is not None
        ]
        if limited:
            left, limit, reset_s = min(limited)
            rates.append(
                RealtimeRateLimit(
                    name=name, limit=limit, remaining=left, reset_seconds=round(reset_s, 3)
                )
            )
    return tuple(rates)


def _tell_drafted(
    run: RealtimeRun, event_id: str | None, answer: DraftView | SessionServerError
) -> None:
    if isinstance(answer, SessionServerError):
        run.protocol.outbox.refuse(answer, event_id)
    else:
        run.protocol.on_drafted(processed=answer.processed, kept=answer.kept, total=answer.total)
    run.notify()
