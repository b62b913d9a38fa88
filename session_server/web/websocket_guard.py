"""Bound everything that a peer can make uvicorn's WebSocket protocol keep or wait for.

Frames are parsed in small pieces, and nothing is parsed while a message waits to be handled, so a
connection keeps few messages in memory however many its peer sends. An unfinished message has a
deadline and a maximum number of fragments. Its bytes count in the connection table, and so do those
of messages and of frames that wait. The server does not wait for a peer that reads nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final

from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame
from websockets.protocol import State

from session_server.protocol.session_protocol import CloseCode
from session_server.web.http_guard import MANY_PARTS, Guard, guarded
from session_server.web.refusals import HttpRefusal, refusal_bytes
from session_server.web.signal import MessageQueue, Signal
from session_server.web.unread_output import UnreadOutput

CONNECTION: Final = "session_server.connection"
MAX_FRAGMENTS: Final = 1_024
"""Maximum fragments of one message."""

PARSE_BYTES: Final = 1_024
"""Bytes given to the parser at a time."""

MAX_CONTROL_FRAMES: Final = 64
"""Pings and pongs that a peer may send at once; later as many as `CONTROL_FRAMES_PER_S` allows."""

CONTROL_FRAMES_PER_S: Final = 4

LINGER_S: Final = 5.0
"""Seconds until a WebSocket whose peer reads nothing is aborted, after its handler has returned or
a ping has timed out."""

FRAGMENT_BYTES: Final = 64
"""Bytes that a fragment counts in addition to its content."""


class GuardedWebSocket(Guard, WebSocketsSansIOProtocol):
    """Serve one WebSocket connection within bounds, from its handshake on."""

    _most_parse_bytes = _parse_bytes = PARSE_BYTES

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.queue = MessageQueue()  # type: ignore[assignment]
        self.writable = Signal()  # type: ignore[assignment]
        self.writable.set()
        config = guarded(self.config)
        self._table = config.connection_table
        self._settings = config.web_settings
        self._held_back = b""
        self._num_fragments = 0
        self._control_s = 0.0
        self._queued_bytes = 0
        self._unread_at_ping = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Count the connection."""
        super().connection_made(transport)
        self._unread = UnreadOutput(
            self,
            self.transport,
            table=self._table,
            stall_s=self._settings.send_timeout_s,
            on_stall=self._fail_stalled,
        )
        self._table.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection and its deadline."""
        self._stop_deadline()
        self._unread.end()
        self._held_back = b""
        self._table.remove(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse the bytes that may be parsed now, and hold back the rest.

        The first call brings the whole head of the handshake.
        """
        self._held_back += data
        self._parse()
        if not self.handshake_initiated:
            self._refuse_handshake()

    async def receive(self) -> Any:
        """Return the next message; parse held-back bytes before reading more."""
        if self._held_back:
            # Yield to other connections: this peer has sent ahead.
            await asyncio.sleep(0)
        message = await self.queue.get()
        if self.read_paused and self.queue.empty():
            self.read_paused = False
            self._queued_bytes = 0
            self._parse()
        return message

    def evict(self) -> None:
        """Close at once, to make room: the peer is in the middle of a message."""
        self._fail(CloseCode.OVERLOADED, "too many unfinished messages")
        if self.transport.get_write_buffer_size():
            self.transport.abort()

    def shutdown(self) -> None:
        """Close with 1012, or without a frame where the parser has sent its last byte.

        uvicorn would raise there: after a close frame of the peer, or a handshake that has failed.
        """
        if self.conn.eof_sent:
            self.stop_keepalive()
            self.transport.close()
        else:
            super().shutdown()

    # -- what the parser calls

    def handle_cont(self, event: Frame) -> None:
        """Limit the number of fragments of a message."""
        self._num_fragments += 1
        if self._num_fragments >= MAX_FRAGMENTS:
            self._fail(CloseCode.TOO_BIG, "too many fragments")
        else:
            super().handle_cont(event)

    def handle_ping(self) -> None:
        """Answer a ping unless the peer does not read the answers."""
        if not self._may_send_control():
            return
        if self.writable.is_set():
            super().handle_ping()
        else:
            self.conn.data_to_send()

    def handle_pong(self, event: Frame) -> None:
        """Take a pong as uvicorn does."""
        if self._may_send_control():
            super().handle_pong(event)

    def _may_send_control(self) -> bool:
        """Count a frame that says nothing, whoever sends it; close with 1008 at too many of them.

        They need no key, and nothing waits for them. The bound is a generic cell rate algorithm
        (ITU-T I.371): `_control_s` is when all that came would have been allowed one by one.
        """
        now_s = self.loop.time()
        self._control_s = max(self._control_s, now_s) + 1 / CONTROL_FRAMES_PER_S
        if self._control_s <= now_s + MAX_CONTROL_FRAMES / CONTROL_FRAMES_PER_S:
            return True
        if not self.close_sent:
            self._fail(CloseCode.POLICY, "too many pings or pongs")
        return False

    def send_receive_event_to_app(self) -> None:
        """Pass a message on to the application; one that is not UTF-8 closes with 1007.

        uvicorn does the same, but logs an error with a stack, which any client could trigger.
        """
        self._num_fragments = 0
        self._queued_bytes += sum(map(len, self.frames))
        self._stop_deadline()
        if self.curr_msg_data_type == "text" and not self.close_sent:
            try:
                b"".join(self.frames).decode()
            except UnicodeDecodeError:
                self.frames = []
                self._fail(CloseCode.NOT_TEXT, "")
                return
        super().send_receive_event_to_app()

    def _parse(self) -> None:
        """Parse up to a message, or to a piece that holds many frames: the rest comes next, and
        others are served in between."""
        held_back, start, num_frames = self._held_back, 0, 0
        while start < len(held_back) and not self.read_paused and num_frames < MANY_PARTS:
            piece = held_back[start : start + self._parse_bytes]
            start += len(piece)
            num_frames = self._parse_piece(piece)
            self._pace(num_frames)
        self._held_back = held_back[start:]
        if self._held_back and not self.read_paused:
            self.transport.pause_reading()
            self.loop.call_soon(self._go_on)
        elif not self.read_paused:
            self.transport.resume_reading()
        self._update()

    def _parse_piece(self, piece: bytes) -> int:
        """Do what uvicorn does with what it receives; return how many frames there were."""
        self.conn.receive_data(piece)
        num_frames = len(self.conn.events)
        if self.conn.parser_exc is None:
            self.handle_events()
        else:
            self.handle_parser_exception()
        return num_frames

    def _go_on(self) -> None:
        if self._held_back and not self.read_paused:
            self._parse()

    def _update(self) -> None:
        """Update the connection table and the deadline: is the peer in the middle of a message, or
        does one wait?"""
        has_begun = self.conn.current_size is not None
        num_bytes = len(self._held_back) + len(self.conn.reader.buffer) + self._queued_bytes
        num_bytes += self._num_undecrypted()
        if self.close_sent or not (has_begun or num_bytes):
            self._stop_deadline()
            self._table.mark_served(self)
            return
        if self.read_paused:
            self._stop_deadline()  # the peer waits for the server
        elif self._deadline is None:
            self._deadline = self.loop.call_later(
                self._settings.message_timeout_s, self._fail_timeout
            )
        num_bytes += (self.conn.current_size or 0) + FRAGMENT_BYTES * self._num_fragments
        self._table.await_input(self, num_bytes=num_bytes)

    def _fail_timeout(self) -> None:
        self._deadline = None
        self._fail(CloseCode.IDLE, "the message did not arrive in time")

    def _fail_stalled(self) -> None:
        self._fail(CloseCode.OVERLOADED, "nothing was read for too long")
        self.writable.set()  # `send` raises

    def _fail(self, code: CloseCode, reason: str) -> None:
        """Close with this code, and read nothing more."""
        self._held_back = b""
        self._stop_deadline()
        if self.conn.state is State.OPEN:
            self.frames = []
            self.conn.fail(code, reason)
            self.handle_parser_exception()
        else:
            self.transport.close()

    def _refuse_handshake(self) -> None:
        """Answer a head that is not a handshake; uvicorn would not answer it."""
        self.handshake_initiated = self.handshake_complete = self.close_sent = True
        refusal = HttpRefusal(400, "The request is not a valid WebSocket handshake.")
        self.transport.write(refusal_bytes(refusal))
        self.transport.close()

    # -- what the application calls

    async def run_asgi(self) -> None:
        """Run the application, which finds this connection in the state of its scope."""
        self.scope["state"][CONNECTION] = self
        await super().run_asgi()

    def set_behind(self, num_bytes: int) -> None:
        """Count the frames that wait behind what the peer has not read, if there is anything."""
        self._unread.set_behind(num_bytes)

    @property
    def is_drained(self) -> bool:
        """Return whether `drain` returns at once."""
        return self.writable.is_set()

    async def drain(self) -> None:
        """Wait until the peer has read what was written."""
        await self.writable.wait()

    async def send(self, message: Any) -> None:
        """Send if the peer is still connected, and mark a handshake refused by a response complete.

        uvicorn does not, and would log an error whenever a client asks for a session that is gone.
        It also goes on writing to a closing transport.

        Raises:
            ClientDisconnected: the peer is gone, or has read nothing for `send_timeout_s`.
        """
        if message["type"] == "websocket.close":
            # A peer that does not read would block `send` here. Queue the close frame behind the
            # rest, for a peer that reads again before the connection is aborted.
            self.writable.set()
        await self.writable.wait()
        if self.transport.is_closing():
            raise ClientDisconnected
        await super().send(message)
        if self.initial_response is not None and self.close_sent:
            self.handshake_complete = True
        if message["type"] == "websocket.accept":
            # The handshake takes 4 kB and is not needed again. The parser keeps the request.
            self.request.headers.clear()
            del self.request, self.response

    def send_texts(self, texts: Sequence[bytes]) -> None:
        """Send text messages, UTF-8, in one write. Call `drain` before.

        `send` takes one, and three times as long as this on its way through ASGI.

        Raises:
            ClientDisconnected: the peer is gone, or has read nothing for `send_timeout_s`.
        """
        if self.close_sent or self.conn.state is not State.OPEN or self.transport.is_closing():
            raise ClientDisconnected
        if not self.conn.extensions:
            self.transport.write(b"".join([part for text in texts for part in (_head(text), text)]))
            return
        for text in texts:
            self.conn.send_text(text)
        self.transport.write(b"".join(self.conn.data_to_send()))

    def send_keepalive_ping(self) -> None:
        """Send a ping, and record how much the peer has to read before it and the ping itself."""
        super().send_keepalive_ping()
        self._unread_at_ping = self.transport.get_write_buffer_size()

    def keepalive_timeout(self) -> None:
        """Abort soon after a ping timed out, whatever the peer has not read. A peer that still
        reads what was sent before the ping has more time."""
        unread = self.transport.get_write_buffer_size()
        if 0 < unread < self._unread_at_ping:
            self._unread_at_ping = unread
            timeout_s = self._settings.ping_timeout_s
            self.pong_timer = self.loop.call_later(timeout_s, self.keepalive_timeout)
            return
        super().keepalive_timeout()
        self.loop.call_later(LINGER_S, self.transport.abort)

    def on_task_complete(self, task: asyncio.Task[None]) -> None:
        """Abort soon after the handler is done, whatever the peer has not read."""
        super().on_task_complete(task)
        self.loop.call_later(LINGER_S, self.transport.abort)


def _head(text: bytes) -> bytes:
    """Return the head of a frame that is one whole text message of a server (RFC 6455, 5.2)."""
    size = len(text)
    if size < 126:
        return bytes((0x81, size))
    return b"\x81\x7e" + size.to_bytes(2) if size < 1 << 16 else b"\x81\x7f" + size.to_bytes(8)
