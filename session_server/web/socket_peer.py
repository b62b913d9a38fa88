"""Talk to the peer of one WebSocket, whatever protocol it speaks: handshake, frames, end.

The peer's next message is not read while too much waits for it, nor let in before those that came
earlier on other connections, and nothing is written behind what it has not read. `wake` tells the
writer that there is something to do.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from typing import Final, Protocol

from starlette.websockets import WebSocket, WebSocketDisconnect
from uvicorn.protocols.utils import ClientDisconnected

from session_server.core.errors import (
    ServerBusy,
    ServerDraining,
    SessionNotFound,
    SessionServerError,
    Unauthorized,
    wire_error,
)
from session_server.core.origin import ORIGIN
from session_server.protocol.frame_queue import FrameQueue
from session_server.protocol.session_protocol import CloseCode
from session_server.web.keys import Credential
from session_server.web.refusals import deny
from session_server.web.requests import TICKET_PROTOCOL, authenticator_of, header_key, services_of
from session_server.web.signal import Signal
from session_server.web.websocket_guard import CONNECTION

WRITE_BYTES: Final = 1 << 16
"""Bytes of frames that one write has. All that a step adds for a socket goes out together."""

_logger: Final = logging.getLogger("session_server.web")


class PeerConnection(Protocol):
    """Name what a handler asks of the connection itself: a `GuardedWebSocket`, or a relayed one."""

    writable: Signal

    def set_behind(self, num_bytes: int) -> None:
        """Count the frames that wait behind what the peer has not read."""

    @property
    def is_drained(self) -> bool:
        """Return whether `drain` returns at once."""

    async def drain(self) -> None:
        """Wait until more may be written."""

    def send_texts(self, texts: Sequence[bytes]) -> None:
        """Send text messages. Call `drain` before. Raises ClientDisconnected."""


class SocketPeer:
    """Hold the state of one connection that all protocols share.

    `subprotocol` is the one that is echoed, never one that holds a ticket, or a key, which follows
    `key_prefix`.
    """

    def __init__(self, websocket: WebSocket, *, subprotocol: str, key_prefix: str) -> None:
        self._websocket = websocket
        self._subprotocol = subprotocol
        self._key_prefix = key_prefix
        self._connection: PeerConnection = websocket.scope["state"][CONNECTION]
        self._services = services_of(websocket)
        self._origin = ORIGIN.get()
        self._has_room = Signal()
        self._last_traffic_s = 0.0
        self.wake = Signal()
        self.end_code: CloseCode | None = None
        self.is_accepted = False
        self.is_disconnected = False

    def end(self, code: CloseCode) -> None:
        """Close soon, after sending what is already queued."""
        if self.end_code is None:
            self.end_code = code
        if self.is_dismissed:
            self._connection.writable.set()  # `flush` does not wait for a peer that reads nothing
        self.wake.set()

    @property
    def is_dismissed(self) -> bool:
        """Return whether the key was taken back: nothing more is said or heard."""
        return self.end_code is CloseCode.UNAUTHORIZED

    @property
    def offers_credential(self) -> bool:
        """Return whether the handshake holds a key or a ticket."""
        key, ticket = self._offered_key(), self._offered(TICKET_PROTOCOL)
        return key is not None or ticket is not None

    def authenticate(self) -> Credential:
        """Return who connects: by the Authorization header, else a ticket or a key among the
        subprotocols. Raises Unauthorized."""
        authenticator, ticket = authenticator_of(self._websocket), self._offered(TICKET_PROTOCOL)
        if ticket is not None and header_key(self._websocket) is None:
            return authenticator.redeem(ticket)
        return authenticator.authenticate(self._offered_key())

    def _offered_key(self) -> str | None:
        return header_key(self._websocket) or self._offered(self._key_prefix)

    def _offered(self, prefix: str) -> str | None:
        """Return what follows the prefix in the first subprotocol that has it."""
        offers: list[str] = self._websocket.scope["subprotocols"]
        return next((each.removeprefix(prefix) for each in offers if each.startswith(prefix)), None)

    async def accept(self) -> None:
        """Accept the connection unless that was done."""
        if self.is_accepted:
            return
        offered = self._websocket.scope["subprotocols"]
        await self._websocket.accept(self._subprotocol if self._subprotocol in offered else None)
        self.is_accepted = True

    async def refuse(
        self, error: SessionServerError, told: FrameQueue, code: CloseCode | None = None
    ) -> None:
        """Refuse with HTTP if the client can see that, and count it. Scripts in browsers see close
        codes only: theirs is accepted, sent what is `told`, and closed; `code`: unless it follows
        from `error`.
        """
        if not self.is_accepted and "origin" not in self._websocket.headers:
            await deny(self._websocket, error)
            return
        self._services.metrics.count_refusal(wire_error(error).code)
        await self.accept()
        with contextlib.suppress(WebSocketDisconnect):
            await self.flush(told)
            await self.close(code or _close_code_of(error))

    def start(self) -> None:
        """Begin to measure how long there is no traffic."""
        self._last_traffic_s = asyncio.get_running_loop().time()
        self._websocket.scope["headers"].clear()  # 1 kB that is not needed again

    async def receive(self, waiting: FrameQueue) -> str | None:
        """Return the next text message; None if the peer has left, or must leave."""
        # A message may be answered with megabytes: read no other until the peer took them.
        while waiting.is_full:
            self._has_room.clear()
            await self._has_room.wait()
        message = await self._websocket.receive()
        self._last_traffic_s = asyncio.get_running_loop().time()
        if message["type"] == "websocket.disconnect":
            self.is_disconnected = True
        elif self.is_dismissed:
            pass
        elif message.get("text") is None:
            self.end(CloseCode.UNSUPPORTED_DATA)
        else:
            if self._origin is not None:
                self._origin.received_s = self._services.now_s()
            text: str = message["text"]
            await self._services.turnstile.enter()
            return None if self.is_dismissed else text
        return None

    def set_behind(self, num_bytes: int) -> None:
        """Count the frames that wait behind what the peer has not read."""
        self._connection.set_behind(num_bytes)

    async def flush(self, waiting: FrameQueue) -> None:
        """Send every frame that waits. Raises WebSocketDisconnect."""
        # What has ended by now is in those frames.
        ended = () if self._origin is None else self._origin.take_undelivered()
        while not self.is_dismissed and (num_bytes := waiting.outbox_bytes):
            self._connection.set_behind(num_bytes)
            await self._connection.drain()
            if self.is_dismissed:
                return
            try:
                self._connection.send_texts(waiting.take_frames(WRITE_BYTES))
            except ClientDisconnected:
                raise WebSocketDisconnect(1006) from None
            self._has_room.set()
        for delivered in ended:
            delivered(self._services.now_s())

    @property
    def is_at_rest(self) -> bool:
        """Return whether the writer waits for something to do, and the peer has read all that was
        sent: a frame may be sent with `send_now`."""
        is_ending = self.end_code is not None or self.is_disconnected
        return self.wake.is_awaited and not is_ending and self._connection.is_drained

    def send_now(self, waiting: FrameQueue) -> None:
        """Send frames without a change of tasks, which would take as long again."""
        self._last_traffic_s = asyncio.get_running_loop().time()
        try:
            self._connection.send_texts(waiting.take_frames(WRITE_BYTES))
        except ClientDisconnected:
            self.is_disconnected = True
        if self.is_disconnected or waiting.outbox_bytes:
            self.wake.set()

    async def wait(self) -> bool:
        """Wait until there is something to do; return False if there was no traffic for too
        long."""
        if self.wake.is_set():
            return True
        idle_s, loop = self._services.settings.idle_s, asyncio.get_running_loop()
        timer = loop.call_later(idle_s, self.wake.set)
        try:
            await self.wake.wait()
        finally:
            timer.cancel()
        now_s = loop.time()
        return now_s < timer.when() or now_s - self._last_traffic_s < idle_s

    async def close(self, code: CloseCode) -> None:
        """Close the connection."""
        self._services.metrics.connection_ended(code.name.lower())
        if self._origin is not None:
            _logger.debug("socket closed code=%d request=%s", code, self._origin.request_id)
        # A stalled peer may still read the code; if it does not, GuardedWebSocket aborts.
        with contextlib.suppress(WebSocketDisconnect, TimeoutError, RuntimeError):
            async with asyncio.timeout(1.0):
                await self._websocket.close(int(code), code.name.lower())


def _close_code_of(error: SessionServerError) -> CloseCode:
    """Return the code with which a connection ends that is refused for this."""
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
