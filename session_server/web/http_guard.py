"""uvicorn's HTTP protocol with bounds on the head of a request and on waiting for a slow reader.

uvicorn's fast parser takes 10,000 headers, a header of a megabyte and HTTP/1.1 without a Host.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from session_server.protocol.errors import ErrorResponse
from session_server.web.refusals import HttpRefusal, JsonResponse

MAX_HEADER_BYTES: Final = 16_384
MAX_HEADERS: Final = 100
MAX_URL_BYTES: Final = 8_192
HEADER_TIMEOUT_S: Final = 10.0
STALL_S: Final = 10.0
"""An HTTP peer that takes nothing of what it is owed for so long is cut, bytes and all."""


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
