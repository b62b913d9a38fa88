"""Serve `kvsession.v1` over a WebSocket: one reader task, one writer task, one session.

The reader turns frames into commands and never waits for a turn; the writer follows the session's
journal. A client that reads nothing for `send_timeout_s` is disconnected with 1013 and may resume;
its turn runs on. The newest connection to a session replaces the previous one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import Final, assert_never

from starlette.websockets import WebSocket, WebSocketDisconnect

from session_server.core.errors import (
    InvalidRequest,
    ServerBusy,
    ServerDraining,
    SessionNotFound,
    SessionServerError,
    Unauthorized,
    wire_error,
)
from session_server.core.owner import Owner
from session_server.core.session_events import TurnEnd, TurnRequest
from session_server.metrics.prometheus import ReaderKind
from session_server.protocol.frames import ResumeFailedFrame
from session_server.protocol.messages import (
    MAX_SEQ,
    ItemEdit,
    SessionAuth,
    SessionClose,
    SessionFork,
    SessionRewind,
    SessionUpdate,
    TurnCancel,
)
from session_server.protocol.scores import EncodedScores
from session_server.protocol.session_protocol import (
    SUBPROTOCOL,
    ClientRequest,
    CloseCode,
    SessionProtocol,
    StartTurn,
)
from session_server.sessions.journal import OffsetLost
from session_server.sessions.views import OpenRequest, SessionView
from session_server.web.readers import SessionReaders
from session_server.web.refusals import error_response
from session_server.web.requests import BEARER_PROTOCOL, Call, header_key, make_call, services_of
from session_server.web.signal import Signal
from session_server.web.slices import encode_scores
from session_server.web.sockets import Sockets
from session_server.web.views import hello_frame, snapshot_frame
from session_server.web.websocket_guard import CONNECTION, GuardedWebSocket

MAX_EPOCH_CHARS: Final = 64
NEW_SESSION: Final = "new"

_logger: Final = logging.getLogger("session_server.web")


async def session_endpoint(websocket: WebSocket) -> None:
    """Serve the route `/v1/sessions/{session_id}/ws`."""
    sockets = websocket.app.state.sockets
    assert isinstance(sockets, Sockets), "create_app set it"
    try:
        with sockets.admit():
            await SessionSocket(websocket, sockets).run()
    except ServerBusy as error:
        await websocket.send_denial_response(error_response(error))


class SessionSocket:
    """Serve one connection, from handshake to close."""

    def __init__(self, websocket: WebSocket, sockets: Sockets) -> None:
        self._websocket = websocket
        self._sockets = sockets
        self._services = services_of(websocket)
        self._connection: GuardedWebSocket = websocket.scope["state"][CONNECTION]
        self._wake = Signal()
        self._has_room = Signal()
        self._end_code: CloseCode | None = None
        self._is_disconnected = False
        self._last_received_s = 0.0
        self._is_accepted = False
        self._position = 0

    def end(self, code: CloseCode) -> None:
        """Close soon, after sending what is already queued."""
        if self._end_code is None:
            self._end_code = code
        self._wake.set()

    async def run(self) -> None:
        """Serve the connection to its end."""
        try:
            key = self._offered_key()
            keys = self._services.settings.keys
            needs_auth = not keys.is_open and key is None
            self._protocol = SessionProtocol(
                defaults=self._services.model.defaults,
                needs_auth=needs_auth,
                max_message_bytes=self._services.settings.max_message_bytes,
            )
            owner = None if needs_auth else keys.owner_of(key)
            if owner is None:
                with self._sockets.admit_unauthenticated():
                    await self._accept()
                    owner = await self._first_message_owner()
            call = make_call(self._websocket, owner)
            view = self._open(call)
        except SessionServerError as error:
            await self._refuse(error)
            return
        except WebSocketDisconnect:
            return
        await self._accept()
        with (
            call.readers.register(
                owner=owner, session_id=view.session_id, kind=ReaderKind.WEBSOCKET
            ) as readers,
            self._sockets.attach(owner, view.session_id, self),
        ):
            await self._serve(call, view, readers)

    def _offered_key(self) -> str | None:
        """Return the key of the Authorization header, else of a `bearer.<key>` subprotocol."""
        for offered in self._websocket.scope["subprotocols"]:
            if offered.startswith(BEARER_PROTOCOL):
                return header_key(self._websocket) or offered.removeprefix(BEARER_PROTOCOL)
        return header_key(self._websocket)

    async def _accept(self) -> None:
        if self._is_accepted:
            return
        # Never echo a subprotocol that holds a key.
        offered = self._websocket.scope["subprotocols"]
        await self._websocket.accept(SUBPROTOCOL if SUBPROTOCOL in offered else None)
        self._is_accepted = True

    async def _first_message_owner(self) -> Owner:
        """Return the owner whose key a first message `session.auth` holds.

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
        owner = self._services.settings.keys.owner_of(command.token)
        self._protocol.on_authenticated()
        return owner

    def _open(self, call: Call) -> SessionView:
        """Return the session this connection is for; the id `new` opens one."""
        if call.sessions.is_draining:
            raise ServerDraining("The server is shutting down.")
        self._after, self._epoch = self._resume_point()
        session_id = str(self._websocket.path_params["session_id"])
        if session_id == NEW_SESSION:
            view = call.sessions.open(call.owner, OpenRequest())
        else:
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

    async def _refuse(self, error: SessionServerError) -> None:
        """Refuse with HTTP if the client can see it; scripts in browsers only see close codes."""
        is_browser = "origin" in self._websocket.headers
        if not self._is_accepted and not is_browser:
            await self._websocket.send_denial_response(error_response(error))
            return
        await self._accept()
        self._protocol.send_error(error)
        with contextlib.suppress(WebSocketDisconnect):
            await self._flush()
            await self._close(self._protocol.close_code or _close_code(error))

    async def _serve(self, call: Call, view: SessionView, readers: SessionReaders) -> None:
        session_id = view.session_id
        await self._queue_hello(call, view)
        self._last_received_s = asyncio.get_running_loop().time()
        self._websocket.scope["headers"].clear()  # 1 kB that is not needed again
        self._journal.add_listener(self._wake.set)
        reader = asyncio.create_task(self._read(call, session_id, readers), name="read socket")
        code: CloseCode | None = CloseCode.INTERNAL
        try:
            code = await self._write(call, session_id, readers)
        except WebSocketDisconnect:
            code = None
        finally:
            self._journal.remove_listener(self._wake.set)
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
            if code is not None:
                await self._close(code)

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
        self._position = wanted if wanted is not None and lost is None else journal.last_seq
        hello = hello_frame(view, self._services, seq=self._position, resumed=is_resumed)
        self._protocol.on_opened(hello)
        if lost is not None:
            await self._queue_snapshot(call, view.session_id, lost)

    async def _queue_snapshot(self, call: Call, session_id: str, lost: ResumeFailedFrame) -> None:
        try:
            snapshot = await snapshot_frame(call.sessions.snapshot(call.owner, session_id))
        except SessionNotFound:
            self._protocol.on_resume_failed(lost, None)
            self._position = self._journal.last_seq - 1  # only the end is left to send
            return
        self._protocol.on_resume_failed(lost, snapshot)
        self._position = snapshot.seq

    async def _read(self, call: Call, session_id: str, readers: SessionReaders) -> None:
        """Handle frames until the client disconnects, or one ends the connection."""
        try:
            while not self._is_disconnected and self._protocol.close_code is None:
                # A message may be answered with megabytes: read no other until the peer took them.
                while self._protocol.is_full:
                    self._has_room.clear()
                    await self._has_room.wait()
                message = await self._websocket.receive()
                self._last_received_s = asyncio.get_running_loop().time()
                if message["type"] == "websocket.disconnect":
                    self._is_disconnected = True
                elif message.get("text") is None:
                    self.end(CloseCode.UNSUPPORTED_DATA)
                else:
                    command = self._protocol.receive_frame(message["text"], now_s=time.time())
                    if command is not None:
                        await self._handle_command(command, call, session_id, readers)
                    self._connection.set_behind(self._protocol.outbox_bytes)
                self._wake.set()
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
                    turn_id = request.turn_id
                    await self._start(request, call, session_id, readers)
                case TurnCancel(turn_id=turn_id, keep_partial=keep_partial):
                    sessions.cancel(owner, session_id, turn_id, keep_partial=keep_partial)
                case SessionUpdate(ttl_s=ttl_s, metadata=metadata):
                    sessions.update(owner, session_id, ttl_s=ttl_s, metadata=metadata)
                case SessionRewind(to_item=to_item):
                    sessions.edits.rewind(owner, session_id, to_item)
                case SessionFork(at_item=at_item, id=new_id):
                    sessions.edits.fork(owner, session_id, at_item=at_item, new_id=new_id)
                case ItemEdit(item_id=item_id, content=content):
                    sessions.edits.edit_item(owner, session_id, item_id, content)
                case SessionClose():
                    sessions.close(owner, session_id)
                case SessionAuth():
                    pass
                case _:
                    assert_never(command)
        except SessionServerError as error:
            self._services.metrics.count_refusal(wire_error(error).code)
            self._protocol.send_error(error, turn_id=turn_id)

    async def _start(
        self, request: TurnRequest, call: Call, session_id: str, readers: SessionReaders
    ) -> None:
        seq_before = self._journal.last_seq
        is_bound = request.on_disconnect == "cancel"
        try:
            view = await call.sessions.submit(call.owner, session_id, request)
        except asyncio.CancelledError:
            # The connection ends while the input is tokenized; the turn goes on without it.
            if is_bound:
                readers.bind_turn(request.turn_id, keep_partial=True)
            raise
        if view.created_seq <= seq_before:
            scores = await encode_scores(view.end)
            self._protocol.send_repeat(
                view.turn_id, position=view.position, end=view.end, scores=scores
            )
        if is_bound and view.end is None:
            readers.bind_turn(view.turn_id, keep_partial=True)

    async def _write(
        self, call: Call, session_id: str, readers: SessionReaders
    ) -> CloseCode | None:
        """Send queued frames and the journal's entries. Return the close code; None if the peer
        left.
        """
        idle_s = self._services.settings.idle_s
        while True:
            self._wake.clear()
            await self._queue_entries(call, session_id, readers)
            await self._flush()
            if self._is_disconnected:
                return None
            code = self._protocol.close_code or self._end_code
            if self._position < self._journal.last_seq and code is not CloseCode.SUPERSEDED:
                continue
            if code is not None:
                return code
            try:
                async with asyncio.timeout(idle_s):
                    await self._wake.wait()
            except TimeoutError:
                if asyncio.get_running_loop().time() - self._last_received_s >= idle_s:
                    return CloseCode.IDLE

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

    async def _flush(self) -> None:
        while num_bytes := self._protocol.outbox_bytes:
            self._connection.set_behind(num_bytes)
            await self._connection.drain()
            await self._websocket.send_text(self._protocol.take_frame() or "")
            self._has_room.set()

    async def _close(self, code: CloseCode) -> None:
        # A stalled peer may still read the code; if it does not, GuardedWebSocket aborts.
        with contextlib.suppress(WebSocketDisconnect, TimeoutError, RuntimeError):
            async with asyncio.timeout(1.0):
                await self._websocket.close(int(code), code.name.lower())


def _close_code(error: SessionServerError) -> CloseCode:
    match error:
        case Unauthorized():
            return CloseCode.UNAUTHORIZED
        case SessionNotFound():
            return CloseCode.NO_SUCH_SESSION
        case ServerDraining():
            return CloseCode.RESTART
        case ServerBusy():
            return CloseCode.OVERLOADED
        case _:
            return CloseCode.LIMITS if wire_error(error).status == 429 else CloseCode.POLICY
