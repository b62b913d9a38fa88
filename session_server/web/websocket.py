"""Serve `kvsession.v1` over a WebSocket: one reader task, one writer task, one session.

The reader turns frames into commands and never waits for a turn; the writer follows the session's
journal. A client that reads nothing for `send_timeout_s` is disconnected with 1013 and may resume;
its turn runs on. The newest connection to a session replaces the previous one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from functools import partial
from typing import Any, Final, assert_never

from starlette.websockets import WebSocket, WebSocketDisconnect

from session_server.core.errors import (
    InvalidRequest,
    ServerBusy,
    ServerDraining,
    SessionNotFound,
    SessionServerError,
    Unauthorized,
)
from session_server.core.session_events import TurnDelta, TurnEnd, TurnRequest
from session_server.metrics.prometheus import ReaderKind
from session_server.protocol.frames import ResumeFailedFrame
from session_server.protocol.messages import (
    MAX_SEQ,
    ItemEdit,
    SessionAuth,
    SessionClose,
    SessionCool,
    SessionFork,
    SessionRewind,
    SessionUpdate,
    SessionWarm,
    TurnCancel,
)
from session_server.protocol.scores import EncodedScores
from session_server.protocol.session_protocol import (
    SUBPROTOCOL,
    ClientRequest,
    CloseCode,
    SessionProtocol,
    StartDraft,
    StartTurn,
)
from session_server.sessions.journal import OffsetLost
from session_server.sessions.views import DraftView, OpenRequest, SessionView, TurnView
from session_server.web.keys import Credential
from session_server.web.readers import SessionReaders
from session_server.web.refusals import deny
from session_server.web.requests import (
    BEARER_PROTOCOL,
    Call,
    authenticator_of,
    make_call,
    services_of,
)
from session_server.web.slices import encode_scores
from session_server.web.slim_exit_stack import SlimExitStack
from session_server.web.socket_peer import SocketPeer
from session_server.web.sockets import Sockets
from session_server.web.turns import check_still_here
from session_server.web.views import hello_frame, snapshot_frame

MAX_SUBMISSIONS: Final = 8
"""Turns of one connection that are not accepted yet; no further frame is read."""

MAX_EPOCH_CHARS: Final = 64
NEW_SESSION: Final = "new"

_AT_ONCE: Final = (CloseCode.SUPERSEDED, CloseCode.UNAUTHORIZED)
"""Codes with which a socket closes though there is more to tell."""

_logger: Final = logging.getLogger("session_server.web")


async def session_endpoint(websocket: WebSocket) -> None:
    """Serve the route `/v1/sessions/{session_id}/ws`."""
    sockets = websocket.app.state.sockets
    assert isinstance(sockets, Sockets), "create_app set it"
    try:
        with sockets.admit(), SlimExitStack() as resources:
            await SessionSocket(websocket, sockets, resources).run()
    except ServerBusy as error:
        await deny(websocket, error)


class SessionSocket:
    """Serve one connection, from handshake to close."""

    def __init__(self, websocket: WebSocket, sockets: Sockets, resources: SlimExitStack) -> None:
        self._websocket = websocket
        self._sockets = sockets
        self._resources = resources
        self._services = services_of(websocket)
        self._peer = SocketPeer(websocket, subprotocol=SUBPROTOCOL, key_prefix=BEARER_PROTOCOL)
        self._position = 0
        self._submissions: dict[asyncio.Task[TurnView | None], None] = {}
        """Oldest first, which is the order in which they are canceled."""

    def end(self, code: CloseCode) -> None:
        """Close soon, after sending what is already queued."""
        self._peer.end(code)
        if code is CloseCode.SUPERSEDED:
            self._resources.close()

    async def run(self) -> None:
        """Serve the connection to its end."""
        try:
            authenticator = authenticator_of(self._websocket)
            needs_auth = not authenticator.is_open and not self._peer.offers_credential
            self._protocol = SessionProtocol(
                defaults=self._services.model.defaults,
                needs_auth=needs_auth,
                max_message_bytes=self._services.settings.max_message_bytes,
            )
            if needs_auth:
                with self._sockets.admit_unauthenticated():
                    await self._peer.accept()
                    credential = await self._first_message_credential()
            else:
                credential = self._peer.authenticate()
            call = make_call(self._websocket, credential, self._resources)
            view = await self._open(call)
        except SessionServerError as error:
            self._protocol.send_error(error)
            await self._peer.refuse(error, self._protocol, self._protocol.close_code)
            return
        except WebSocketDisconnect:
            return
        # Before anything is awaited: a session that nobody reads may leave the memory.
        with call.readers.reading(call.owner, view.session_id, is_bounded=False) as readers:
            await self._peer.accept()
            with (
                call.authenticator.track(call.credential, self),
                self._sockets.attach(call.owner, view.session_id, self),
            ):
                await self._serve(call, view, readers)

    async def _first_message_credential(self) -> Credential:
        """Return whose key a first message `session.auth` holds.

        Raises:
            Unauthorized: it did not come in time, was another message, or holds a wrong key.
        """
        try:
            async with asyncio.timeout(self._services.settings.auth_timeout_s):
                message = await self._websocket.receive()
        except TimeoutError:
            raise Unauthorized(
                "A valid API key is required: a header, a subprotocol or a session.auth message."
            ) from None
        if message["type"] == "websocket.disconnect":
            raise WebSocketDisconnect(message["code"])
        text = message.get("text")
        command = self._protocol.receive_frame(text or "", now_s=time.time())
        if not isinstance(command, SessionAuth):
            self._protocol.take_frame()
            raise Unauthorized("The first message must be session.auth.", param="type")
        credential = authenticator_of(self._websocket).authenticate(command.token)
        self._protocol.on_authenticated()
        return credential

    async def _open(self, call: Call) -> SessionView:
        """Return the session this connection is for; the id `new` opens one."""
        if call.sessions.is_draining:
            raise ServerDraining("The server is shutting down.")
        self._after, self._epoch = self._resume_point()
        session_id = str(self._websocket.path_params["session_id"])
        self._sockets.supersede(call.owner, session_id)
        call.connect(ReaderKind.WEBSOCKET)
        if session_id == NEW_SESSION:
            session_id = call.sessions.open(call.owner, OpenRequest(is_stored=True)).session_id
            await call.sessions.stored()
        else:
            await call.sessions.load(call.owner, session_id)
            call.sessions.edits.retention.attach(call.owner, session_id)
        view = call.sessions.get(call.owner, session_id)
        # The journal stays readable to its end even if the session closes now.
        self._journal = call.sessions.journal(call.owner, view.session_id)
        return view

    def _resume_point(self) -> tuple[int | None, str | None]:
        query = self._websocket.query_params
        after, epoch = query.get("after"), query.get("epoch")
        if after is not None and not (after.isascii() and after.isdigit() and len(after) <= 16):
            raise InvalidRequest("after is not a sequence number.", param="after")
        if epoch is not None and len(epoch) > MAX_EPOCH_CHARS:
            raise InvalidRequest("epoch is too long.", param="epoch")
        return (None if after is None else min(int(after), MAX_SEQ)), epoch

    async def _serve(self, call: Call, view: SessionView, readers: SessionReaders) -> None:
        session_id = view.session_id
        await self._queue_hello(call, view)
        self._peer.start()
        self._protocol.on_refusal = self._services.metrics.count_refusal
        self._journal.add_listener(self._on_entry)
        reader = asyncio.create_task(self._read(call, session_id, readers), name="read socket")
        code: CloseCode | None = CloseCode.INTERNAL
        try:
            code = await self._write(call, session_id, readers)
        except WebSocketDisconnect:
            code = None
        finally:
            self._journal.remove_listener(self._on_entry)
            tasks: list[asyncio.Task[Any]] = [reader, *self._submissions]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if code is not None:
                await self._peer.close(code)

    async def _queue_hello(self, call: Call, view: SessionView) -> None:
        """Queue the hello, and set the position that the client wants to resume from."""
        journal = self._journal
        wanted = self._after
        lost: ResumeFailedFrame | None = None
        if wanted is not None and self._epoch not in (None, journal.epoch):
            lost = ResumeFailedFrame(reason="epoch_changed")
        elif wanted is not None and not journal.first_seq - 1 <= wanted <= journal.last_seq:
            lost = ResumeFailedFrame(reason="offset_lost")
        is_resumed = wanted is not None and lost is None
        if wanted is not None:
            self._services.metrics.count_resume("resumed" if lost is None else lost.reason)
        self._position = wanted if wanted is not None and lost is None else journal.last_seq
        hello = hello_frame(view, self._services, seq=self._position, resumed=is_resumed)
        self._protocol.on_opened(hello)
        if lost is not None:
            await self._queue_snapshot(call, view.session_id, lost)

    async def _queue_snapshot(self, call: Call, session_id: str, lost: ResumeFailedFrame) -> None:
        try:
            settled = await call.sessions.settled_snapshot(call.owner, session_id)
            snapshot = await snapshot_frame(settled)
        except SessionNotFound:
            self._protocol.on_resume_failed(lost, None)
            self._position = self._journal.last_seq - 1  # only the end is left to send
            return
        self._protocol.on_resume_failed(lost, snapshot)
        self._position = snapshot.seq

    async def _read(self, call: Call, session_id: str, readers: SessionReaders) -> None:
        """Handle frames until the client disconnects, or one ends the connection."""
        try:
            while not self._peer.is_disconnected and self._protocol.close_code is None:
                text = await self._peer.receive(self._protocol)
                if text is not None:
                    command = self._protocol.receive_frame(text, now_s=time.time())
                    if command is not None:
                        await self._handle_command(command, call, session_id, readers)
                    self._peer.set_behind(self._protocol.outbox_bytes)
                self._peer.wake.set()
        except Exception:
            _logger.exception("reader failed session=%s", session_id)
            self.end(CloseCode.INTERNAL)
            raise

    async def _handle_command(
        self, command: ClientRequest, call: Call, session_id: str, readers: SessionReaders
    ) -> None:
        sessions, owner = call.sessions, call.owner
        turn_id: str | None = None
        try:
            match command:
                case StartTurn(request=request):
                    await self._start(request, call, session_id, readers)
                case StartDraft(request=draft):
                    turn_id = draft.turn_id if draft is not None else None
                    self._draft(draft, call, session_id)
                case TurnCancel(turn_id=turn_id, keep_partial=keep_partial):
                    sessions.cancel(owner, session_id, turn_id, keep_partial=keep_partial)
                case SessionUpdate(ttl_s=ttl_s, metadata=metadata, pinned=pinned):
                    if pinned is not None:
                        sessions.edits.retention.pin(owner, session_id, pinned=pinned)
                    sessions.update(owner, session_id, ttl_s=ttl_s, metadata=metadata)
                case SessionRewind(to_item=to_item):
                    sessions.edits.rewind(owner, session_id, to_item)
                case SessionFork(at_item=at_item, id=new_id):
                    await sessions.edits.fork_as(owner, session_id, new_id, at_item=at_item)
                case ItemEdit(item_id=item_id, content=content):
                    sessions.edits.edit_item(owner, session_id, item_id, content)
                case SessionCool():
                    sessions.edits.retention.cool(owner, session_id)
                case SessionWarm():
                    sessions.edits.retention.warm(owner, session_id)
                case SessionClose():
                    sessions.close(owner, session_id)
                case SessionAuth():
                    pass
                case _:
                    assert_never(command)
        except SessionServerError as error:
            self._protocol.send_error(error, turn_id=turn_id)

    def _draft(self, draft: TurnRequest | None, call: Call, session_id: str) -> None:
        drafts = call.sessions.drafts
        if draft is None:
            drafts.abandon(call.owner, session_id)
        else:
            answer = partial(self._on_drafted, draft.turn_id)
            drafts.submit(call.owner, session_id, draft, answer)

    def _on_drafted(self, draft_id: str, answer: DraftView | SessionServerError) -> None:
        """Tell the client, unless something has come in the draft's place."""
        if isinstance(answer, SessionServerError):
            self._protocol.send_error(answer, turn_id=draft_id)
        elif answer.total:
            self._protocol.send_drafted(
                draft_id, processed=answer.processed, kept=answer.kept, total=answer.total
            )
        self._peer.wake.set()

    async def _start(
        self, request: TurnRequest, call: Call, session_id: str, readers: SessionReaders
    ) -> None:
        """Submit a turn. One that is not accepted at once holds up no frame behind it."""
        seq_before = self._journal.last_seq
        work = self._submit(request, call, session_id, readers)
        submission = asyncio.create_task(work, name="submit turn")
        self._submissions[submission] = None
        submission.add_done_callback(self._submissions.pop)
        await asyncio.sleep(0)  # it is in its queue now, where a cancel finds it
        view = submission.result() if submission.done() else None
        if view is not None and view.created_seq <= seq_before:
            scores = await encode_scores(view.end)
            self._protocol.send_repeat(
                view.turn_id, position=view.position, end=view.end, scores=scores
            )
        while len(self._submissions) >= MAX_SUBMISSIONS:
            await asyncio.wait(self._submissions, return_when=asyncio.FIRST_COMPLETED)

    async def _submit(
        self, request: TurnRequest, call: Call, session_id: str, readers: SessionReaders
    ) -> TurnView | None:
        """Return the turn when it is accepted; None if it was refused."""
        view, is_bound = None, request.on_disconnect == "cancel"
        try:
            await check_still_here(call, session_id, self._journal)
            view = await call.sessions.submit(call.owner, session_id, request)
        except SessionServerError as error:
            self._protocol.send_error(error, turn_id=request.turn_id)
        except asyncio.CancelledError:
            # The connection ends before the turn is accepted; the turn goes on without it.
            if is_bound:
                readers.bind_turn(request.turn_id, keep_partial=True)
            raise
        except Exception:
            _logger.exception("a turn was not submitted session=%s", session_id)
            self.end(CloseCode.INTERNAL)
            raise
        if is_bound and view is not None and view.end is None:
            readers.bind_turn(view.turn_id, keep_partial=True)
        self._peer.wake.set()
        return view

    async def _write(
        self, call: Call, session_id: str, readers: SessionReaders
    ) -> CloseCode | None:
        """Send queued frames and the journal's entries. Return the close code; None if the peer
        left.
        """
        while True:
            self._peer.wake.clear()
            await self._queue_entries(call, session_id, readers)
            await self._peer.flush(self._protocol)
            if self._peer.is_disconnected:
                return None
            code = self._protocol.close_code or self._peer.end_code
            if code is None and self._journal.is_suspended:
                code = CloseCode.RESTART  # whoever connects again finds the session
            if self._position < self._journal.last_seq and code not in _AT_ONCE:
                continue
            if code is not None:
                return code
            if not await self._peer.wait():
                return CloseCode.IDLE

    def _on_entry(self) -> None:
        """Send a token at once if the peer has everything before it; else wake the writer."""
        if self._journal.is_suspended:
            self._peer.wake.set()
            return
        seq, entry = self._journal.last_seq, self._journal.newest.entry
        if isinstance(entry, TurnDelta) and seq == self._position + 1 and self._peer.is_at_rest:
            self._position = seq
            self._protocol.send_delta(seq, entry)
            self._peer.send_now(self._protocol)
        else:
            self._peer.wake.set()

    async def _queue_entries(self, call: Call, session_id: str, readers: SessionReaders) -> None:
        try:
            entries = self._journal.read(self._position)
        except OffsetLost:
            # The client fell behind the journal: tell it, instead of skipping entries silently.
            await self._queue_snapshot(call, session_id, ResumeFailedFrame(reason="offset_lost"))
            return
        if not entries:
            return
        self._position = entries[-1].seq
        encoded: dict[int, EncodedScores] = {}
        for item in entries:
            if isinstance(item.entry, TurnEnd):
                readers.unbind_turn(item.entry.turn_id)
                if scores := await encode_scores(item.entry):
                    encoded[item.seq] = scores
        self._protocol.send_entries(((item.seq, item.entry) for item in entries), scores=encoded)
