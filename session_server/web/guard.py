"""What a request must be before any route sees it.

uvicorn's fast parser takes 10,000 headers, a header of a megabyte and HTTP/1.1 without a Host;
`GuardedHttp` bounds them at the parser. `RequestGuard` checks what is said: one Host, a name we
answer to (DNS rebinding), an Origin we trust (browsers send it always, WebSockets included), one
framing header (request smuggling), a body that is not too large.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import Any, Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from session_server.protocol.errors import ErrorResponse
from session_server.protocol.session_protocol import CloseCode
from session_server.web.refusals import HttpRefusal, JsonResponse
from session_server.web.services import WebSettings

MAX_HEADER_BYTES: Final = 16_384
MAX_HEADERS: Final = 100
MAX_URL_BYTES: Final = 8_192
HEADER_TIMEOUT_S: Final = 10.0
STALL_S: Final = 10.0
"""An HTTP peer that takes nothing of what it is owed for so long is cut, bytes and all."""

LINGER_S: Final = 5.0
"""A WebSocket whose peer reads nothing is cut this long after its handler has returned, or after a
ping has found no answer."""

_LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "::1"})
_HOST: Final = re.compile(r"^(?P<name>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]{1,253})(?::\d{1,5})?$")


class GuardedHttp(HttpToolsProtocol):
    """uvicorn's httptools protocol with bounds on the head of a request, in bytes and in time, and
    on the patience with a peer that does not read its answer.

    uvicorn closes such a connection in order, and a closing transport waits for its last byte to
    be taken: the socket would be the peer's for as long as it likes.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_bytes = 0
        self._head_count = 0
        self._unparsed_bytes = 0
        self._refusal: HttpRefusal | None = None
        self._head_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """The peer has a bounded time to send a first head."""
        super().connection_made(transport)
        # Whatever the kernel does not take at once counts as owed: `pause_writing` is told.
        transport.set_write_buffer_limits(high=0)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the timers with the connection."""
        self._head_done()
        self._nothing_owed()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """The peer owes it to us to take something soon."""
        super().pause_writing()
        self._expect_reading(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        """The peer has taken everything."""
        super().resume_writing()
        self._nothing_owed()

    def data_received(self, data: bytes) -> None:
        """Parse; a head that never ends is cut by the bytes seen so far."""
        if self._refusal is not None:
            return
        super().data_received(data)
        if self._head_timer is None or self._refusal is not None:
            return
        self._unparsed_bytes += len(data)
        if self._unparsed_bytes > MAX_HEADER_BYTES + MAX_URL_BYTES:
            self._refusal = HttpRefusal(431, "The request head is too large.")
            self.send_400_response("")

    def on_message_begin(self) -> None:
        """A new head begins."""
        super().on_message_begin()
        self._head_bytes = self._head_count = self._unparsed_bytes = 0
        self._expect_head()

    def on_url(self, url: bytes) -> None:
        """Bound the request target."""
        super().on_url(url)
        if len(self.url) > MAX_URL_BYTES:
            self._refuse(431, "The request target is too long.")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Bound the headers, in number and together."""
        super().on_header(name, value)
        self._head_bytes += len(name) + len(value) + 4
        self._head_count += 1
        if self._head_bytes > MAX_HEADER_BYTES or self._head_count > MAX_HEADERS:
            self._refuse(431, "The request headers are too large.")

    def on_headers_complete(self) -> None:
        """The head is here in time."""
        self._head_done()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer a head that cannot be parsed, or that we refused, and hang up."""
        refusal = self._refusal or HttpRefusal(400, "The request is not valid HTTP.")
        self._refusal = refusal
        self._head_done()
        body = JsonResponse(ErrorResponse(error=refusal.body)).body
        self.transport.write(
            b"HTTP/1.1 %d Refused\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
            b"connection: close\r\n\r\n" % (refusal.status, len(body)) + bytes(body)
        )
        self.transport.close()

    def _refuse(self, status: int, message: str) -> None:
        self._refusal = HttpRefusal(status, message)
        raise self._refusal

    def _expect_head(self) -> None:
        self._head_done()
        self._head_timer = self.loop.call_later(HEADER_TIMEOUT_S, self._head_late)

    def _head_done(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_late(self) -> None:
        self._refusal = HttpRefusal(408, "The request head did not arrive in time.")
        self.send_400_response("")

    def _expect_reading(self, owed_bytes: int) -> None:
        self._stall_timer = self.loop.call_later(STALL_S, self._check_reading, owed_bytes)

    def _nothing_owed(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def _check_reading(self, owed_bytes: int) -> None:
        still_owed = self.transport.get_write_buffer_size()
        if still_owed >= owed_bytes:
            self.transport.abort()
        else:
            self._expect_reading(still_owed)


class GuardedWebSocket(WebSocketsSansIOProtocol):
    """uvicorn's WebSocket protocol that does not wait for a peer that reads nothing."""

    async def send(self, message: Any) -> None:
        """Send to a peer that is still there; a handshake refused with a whole response is
        complete too.

        uvicorn thinks otherwise, and would log an error whenever a client asks for a session that
        is gone; it also goes on writing to a socket that has failed, until it is told.
        """
        if self.transport.is_closing():
            raise ClientDisconnected
        if message["type"] == "websocket.close":
            # Waiting for a peer that takes nothing would mean to go without a word: the code is
            # owed behind the rest, to one that wakes up before it is cut.
            self.writable.set()
        await super().send(message)
        if self.initial_response is not None and self.close_sent:
            self.handshake_complete = True

    def send_receive_event_to_app(self) -> None:
        """Hand a message on; one that is not UTF-8 closes with 1007.

        uvicorn does the same, and writes an error with a stack into the log: any client could.
        """
        if self.curr_msg_data_type == "text" and not self.close_sent:
            try:
                b"".join(self.frames).decode()
            except UnicodeDecodeError:
                self.frames = []
                self.conn.send_close(CloseCode.NOT_TEXT)
                self.handle_parser_exception()
                return
        super().send_receive_event_to_app()

    def keepalive_timeout(self) -> None:
        """The peer answers no ping: nothing it is still owed is waited for."""
        super().keepalive_timeout()
        self.loop.call_later(LINGER_S, self.transport.abort)

    def on_task_complete(self, task: asyncio.Task[None]) -> None:
        """The handler is done; what the peer has not taken soon is dropped."""
        super().on_task_complete(task)
        self.loop.call_later(LINGER_S, self.transport.abort)


class RequestGuard:
    """ASGI middleware; refuses what no route should see, and bounds bodies."""

    def __init__(self, app: ASGIApp, *, settings: WebSettings) -> None:
        self._app = app
        self._max_body_bytes = settings.max_message_bytes
        self._origins = frozenset(origin.rstrip("/").lower() for origin in settings.allowed_origins)
        # Bound to every interface, the names by which we are reached are not ours to know.
        is_local = settings.host in _LOOPBACK
        self._hosts = _LOOPBACK | {host.lower() for host in settings.hosts} if is_local else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check, then hand on."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        try:
            self._check(Headers(scope=scope))
        except HttpRefusal as refusal:
            response = JsonResponse(ErrorResponse(error=refusal.body), refusal.status)
            await response(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _check(self, headers: Headers) -> None:
        host = self._checked_host(headers.getlist("host"))
        self._check_origin(headers.getlist("origin"), host)
        lengths = headers.getlist("content-length")
        if len(lengths) > 1 or (lengths and headers.getlist("transfer-encoding")):
            raise HttpRefusal(400, "A request has one length: Content-Length or chunks.")
        if lengths and not re.fullmatch(r"[0-9]{1,18}", lengths[0]):
            raise HttpRefusal(400, "Content-Length is not a number.")
        if lengths and int(lengths[0]) > self._max_body_bytes:
            raise HttpRefusal(413, f"The body is larger than {self._max_body_bytes} bytes.")

    def _checked_host(self, hosts: Sequence[str]) -> str:
        match = _HOST.match(hosts[0]) if len(hosts) == 1 else None
        if match is None:
            raise HttpRefusal(400, "A request names exactly one host.")
        name = match["name"].strip("[]").lower()
        if self._hosts is not None and name not in self._hosts:
            raise HttpRefusal(421, "This server does not answer to that host name.")
        return hosts[0].lower()

    def _check_origin(self, origins: Sequence[str], host: str) -> None:
        if not origins:
            return  # not a browser
        origin = origins[0].rstrip("/").lower()
        parts = urlsplit(origin) if len(origins) == 1 and len(origin) <= 512 else None
        if parts is None or parts.scheme not in ("http", "https") or not parts.netloc:
            raise HttpRefusal(403, "This origin is not allowed.")
        is_same = parts.netloc == host
        if not (is_same or _is_loopback(parts.netloc) or origin in self._origins):
            raise HttpRefusal(403, "This origin is not allowed.")


def _is_loopback(netloc: str) -> bool:
    match = _HOST.match(netloc)
    return match is not None and match["name"].strip("[]") in _LOOPBACK
