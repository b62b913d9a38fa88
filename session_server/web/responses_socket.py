"""Serve the WebSocket mode of OpenAI's Responses: `GET /v1/responses`, upgraded.

The reader makes a task of every response that is asked for. Those of one lane wait for each other,
and all but a few wait for a place; each follows the journal of its turn. What is not stored is
known to its connection alone, and the end of the connection cancels what runs on it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import replace
from itertools import chain
from typing import Final, assert_never

from starlette.websockets import WebSocket, WebSocketDisconnect

from session_server.core.errors import (
    QuotaExceeded,
    ServerBusy,
    ServerDraining,
    SessionServerError,
    TurnNotActive,
)
from session_server.metrics.prometheus import ReaderKind
from session_server.protocol.response_body import ResponseBody
from session_server.protocol.response_events import ResponseEvent
from session_server.protocol.responses_socket import (
    RefusedRequest,
    ResponseCancel,
    ResponseCreate,
    ResponsesProtocol,
)
from session_server.protocol.session_protocol import CloseCode
from session_server.sessions.response_turns import ResponseTurns
from session_server.sessions.responses import StoredResponse
from session_server.web.refusals import HttpRefusal, deny
from session_server.web.requests import BEARER_PROTOCOL, Call, make_call, services_of
from session_server.web.response_run import ResponseRun, parse, start_response
from session_server.web.slim_exit_stack import SlimExitStack
from session_server.web.socket_peer import SocketPeer
from session_server.web.sockets import Sockets

MAX_IN_FLIGHT: Final = 16
"""Responses that run at once on one connection; further ones wait."""

MAX_WAITING: Final = 64
"""Responses that wait on one connection, for their lane or for a place."""

SUBPROTOCOL: Final = "responses"

_logger: Final = logging.getLogger("session_server.web")


async def responses_endpoint(websocket: WebSocket) -> None:
    """Serve the route."""
    sockets, turns = websocket.app.state.sockets, websocket.app.state.responses
    assert isinstance(sockets, Sockets), "create_app set it"
    assert isinstance(turns, ResponseTurns), "create_app set it"
    if not services_of(websocket).settings.responses_ws:
        text = "This server has no WebSocket mode: use POST /v1/responses."
        await deny(websocket, HttpRefusal(426, text))
        return
    try:
        with sockets.admit():
            await ResponsesSocket(websocket, sockets, turns).run()
    except ServerBusy as error:
        await deny(websocket, error)


class ResponsesSocket:
    """Serve one connection, from handshake to close."""

    def __init__(self, websocket: WebSocket, sockets: Sockets, turns: ResponseTurns) -> None:
        self._websocket = websocket
        self._sockets = sockets
        self._turns = turns
        self._settings = services_of(websocket).settings
        self._peer = SocketPeer(websocket, subprotocol=SUBPROTOCOL, key_prefix=BEARER_PROTOCOL)
        self._protocol = ResponsesProtocol(max_message_bytes=self._settings.max_message_bytes)
        self._places = asyncio.Semaphore(MAX_IN_FLIGHT)
        self._lanes: dict[str | None, asyncio.Lock] = {}
        self._latest: dict[str | None, tuple[StoredResponse, ...]] = {}
        """Of each lane the newest response; before one that was canceled, also the one before."""

        self._runs: dict[str | None, ResponseRun | str] = {}
        """Of each lane the response that runs, or the id of one whose turn is not accepted yet."""

        self._tasks: dict[asyncio.Task[None], None] = {}
        self._room = asyncio.Event()

    def end(self, code: CloseCode) -> None:
        """Close soon, after sending what is already queued."""
        self._peer.end(code)

    async def run(self) -> None:
        """Serve the connection to its end."""
        with SlimExitStack() as resources:
            try:
                call = make_call(self._websocket, self._peer.authenticate(), resources)
                if call.sessions.is_draining:
                    raise ServerDraining("The server is shutting down.")
                call.connect(ReaderKind.WEBSOCKET)
            except SessionServerError as error:
                self._protocol.send_error(error)
                await self._peer.refuse(error, self._protocol)
                return
            await self._peer.accept()
            with call.authenticator.track(call.credential, self), self._sockets.join(self):
                await self._serve(call)

    async def _serve(self, call: Call) -> None:
        self._peer.start()
        self._protocol.on_refusal = call.services.metrics.count_refusal
        reader = asyncio.create_task(self._read(call), name="read socket")
        code: CloseCode | None = CloseCode.INTERNAL
        try:
            code = await self._write()
        except WebSocketDisconnect:
            code = None
        finally:
            tasks = [reader, *self._tasks]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._drop(*chain.from_iterable(self._latest.values()))
            if code is not None:
                await self._peer.close(code)

    async def _write(self) -> CloseCode | None:
        """Send what is queued. Return the close code; None if the peer left."""
        while True:
            self._peer.wake.clear()
            await self._peer.flush(self._protocol)
            self._room.set()
            if self._peer.is_disconnected:
                return None
            if self._protocol.outbox_bytes and not self._peer.is_dismissed:
                continue
            if self._peer.end_code is not None:
                return self._peer.end_code
            if not await self._peer.wait():
                return CloseCode.IDLE

    async def _read(self, call: Call) -> None:
        """Handle frames until the client disconnects, or one ends the connection."""
        try:
            while not self._peer.is_disconnected and self._peer.end_code is None:
                text = await self._peer.receive(self._protocol)
                if text is not None:
                    self._handle(call, text)
                    self._peer.set_behind(self._protocol.outbox_bytes)
                self._peer.wake.set()
        except Exception:
            _logger.exception("reader of responses failed")
            self.end(CloseCode.INTERNAL)
            raise

    def _handle(self, call: Call, text: str) -> None:
        message = self._protocol.receive_frame(text)
        match message:
            case None:
                pass
            case RefusedRequest():
                self._evict(message.stream_id, message.previous_response_id)
            case ResponseCancel():
                self._cancel(call, message)
            case ResponseCreate():
                if len(self._tasks) - len(self._runs) >= MAX_WAITING:
                    text = f"{MAX_WAITING} responses wait on this connection, as many as may."
                    self._fail(call, message, QuotaExceeded(text))
                    return
                task = asyncio.create_task(self._respond(call, message, len(text)), name="respond")
                self._tasks[task] = None
                task.add_done_callback(self._tasks.pop)
            case _:
                assert_never(message)

    def _cancel(self, call: Call, message: ResponseCancel) -> None:
        """Cancel a response that runs in a lane, or is about to; it ends with its events."""
        run = self._runs.get(message.stream_id)
        if message.response_id is not None:
            runs = (each for each in self._runs.values() if isinstance(each, ResponseRun))
            by_id = {each.stored.response_id: each for each in runs}
            run = by_id.get(message.response_id)
        if isinstance(run, ResponseRun):
            run.cancel(keep_partial=True)
            return
        try:
            if run is None:
                raise TurnNotActive(
                    "No such response runs on this connection.", param="response_id"
                )
            stored = self._turns.store.find(call.owner, run, scope=self)
            call.sessions.cancel(call.owner, stored.made_in, run)
        except SessionServerError as error:
            self._protocol.send_error(error, stream_id=message.stream_id)

    async def _respond(self, call: Call, message: ResponseCreate, num_chars: int) -> None:
        """Make one response when its lane is free and there is a place."""
        name: str | None = message.stream_id
        held = call.sessions.edits.parts.quotas.turn_bytes.held
        lane = self._lanes.setdefault(name, asyncio.Lock())
        try:
            async with contextlib.AsyncExitStack() as scope:
                with held(call.owner, num_chars):
                    await scope.enter_async_context(lane)
                    await scope.enter_async_context(self._places)
                await self._run(call, message, name)
        except SessionServerError as error:
            self._fail(call, message, error)
        except Exception:
            _logger.exception("a response failed")
            self.end(CloseCode.INTERNAL)
            raise
        self._peer.wake.set()

    async def _run(self, call: Call, message: ResponseCreate, name: str | None) -> None:
        asked = await parse(self._turns, call, message, scope=self)
        self._runs[name] = asked.response_id
        try:
            with SlimExitStack() as resources:
                lane = replace(call, resources=resources)
                run = await start_response(lane, self._turns, asked, scope=self, stream_id=name)
                self._runs[name] = run
                await self._tell(run, message, name)
        finally:
            del self._runs[name]

    async def _tell(self, run: ResponseRun, message: ResponseCreate, name: str | None) -> None:
        """Send the events of a response, and keep what the next one of its lane goes on from."""
        is_canceled = has_failed = is_said = False
        try:
            with run.call.resources:
                async for event in run.read():
                    if event is not None:
                        if isinstance(event.response, ResponseBody):
                            is_canceled = event.response.status == "cancelled"
                            has_failed = event.response.status == "failed"
                        await self._emit(event)
            is_said = run.stored.content.state == "said"
        finally:
            if not is_said:
                self._drop(run.stored)
        if is_said:
            before = self._latest.get(name, ())
            # A client may take back what it has canceled, and go on from the one before.
            kept = before[:1] if is_canceled else ()
            self._latest[name] = (*kept, run.stored)
            self._drop(*before[len(kept) :])
        elif has_failed:
            self._evict(name, message.previous_response_id)

    async def _emit(self, event: ResponseEvent) -> None:
        """Queue an event, and wait while too much is queued."""
        self._protocol.send_event(event)
        self._peer.wake.set()
        while self._protocol.is_full:
            self._room.clear()
            await self._room.wait()

    def _fail(self, call: Call, message: ResponseCreate, error: SessionServerError) -> None:
        self._protocol.send_error(error, stream_id=message.stream_id)
        self._evict(message.stream_id, message.previous_response_id)

    def _evict(self, name: str | None, previous: str | None) -> None:
        """Forget what a failed response of a lane went on from, if it was the lane's own."""
        latest = self._latest.get(name, ())
        self._drop(*(each for each in latest if each.response_id == previous))
        self._latest[name] = tuple(each for each in latest if each.response_id != previous)

    def _drop(self, *responses: StoredResponse) -> None:
        """Forget responses that only this connection knows."""
        for response in responses:
            if response.scope is self:
                self._turns.forget(response)
