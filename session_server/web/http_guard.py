"""Bound everything that a peer can make uvicorn's HTTP protocol keep or wait for.

Requests are parsed in small pieces. Bytes behind a complete request are held back, unparsed, until
its answer is sent, so a connection keeps only a few requests in memory however many its peer sends
ahead. Heads, bodies and reading peers have deadlines, and the bytes of an unfinished request count
in the connection table.

uvicorn's fast parser alone accepts 10,000 headers, a header of a megabyte, HTTP/1.1 without a Host,
and endless chunk extensions.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import httptools
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from session_server.core.errors import ServerBusy
from session_server.web.connection_table import ConnectionTable
from session_server.web.refusals import HttpRefusal, refusal_bytes, refusal_code
from session_server.web.request_guard import DRAIN
from session_server.web.services import AppServices
from session_server.web.tls_records import UNDECRYPTED
from session_server.web.unread_output import UnreadOutput

MAX_HEADER_BYTES: Final = 16_384
MAX_HEADERS: Final = 100
MAX_URL_BYTES: Final = 8_192
MAX_FRAMING_PER_BODY_BYTE: Final = 16
"""Chunks of one byte need five bytes of framing; chunk extensions are not needed."""

PARSE_BYTES: Final = 4_096
"""Bytes given to the parser at a time."""

LEAST_PARSE_BYTES: Final = 64
"""The same, behind bytes that held many parts."""

MANY_PARTS: Final = 4
"""Parts of a body, or frames, in so many bytes; behind as many others are served."""

QUEUED_REQUEST_BYTES: Final = 4_096
"""Bytes that a parsed request counts while it waits for an earlier answer."""

HEADER_TIMEOUT_S: Final = 10.0
STALL_S: Final = 10.0
"""Seconds until a peer that reads nothing of its answer is aborted."""

REFUSAL_LINGER_S: Final = 2.0
"""Seconds a refused peer may go on sending: closing earlier could destroy the answer (RST)."""

_HTTP_VERSIONS: Final = ("1.0", "1.1")


class GuardedConfig(uvicorn.Config):
    """Configure uvicorn with protocols that bound what a peer makes the server keep."""

    def __init__(
        self, app: FastAPI, *, services: AppServices, table: ConnectionTable, **options: Any
    ) -> None:
        super().__init__(app, **options)
        self.web_settings = services.settings
        self.metrics = services.metrics
        self.connection_table = table


def guarded(config: uvicorn.Config) -> GuardedConfig:
    """Return the configuration that a guard was created with."""
    assert isinstance(config, GuardedConfig), "guards run under a GuardedConfig"
    return config


class Guard(asyncio.Protocol):
    """Name the peer, watch what it does not read, hold one deadline, and choose how much is parsed
    at a time, for either protocol."""

    client: tuple[str, int] | None
    transport: asyncio.Transport
    _unread: UnreadOutput
    _deadline: asyncio.TimerHandle | None = None
    _most_parse_bytes: ClassVar[int]
    _parse_bytes: int

    @property
    def address(self) -> str:
        """Return the peer's address, without its port."""
        return self.client[0] if self.client else ""

    def pause_writing(self) -> None:
        """Count and time what the peer has not read."""
        super().pause_writing()
        self._unread.begin()

    def resume_writing(self) -> None:
        """Stop counting: the peer has read everything."""
        super().resume_writing()
        self._unread.end()

    def _pace(self, num_parts: int) -> None:
        """Choose how many bytes are parsed next, behind some that held so many parts: as many of
        the smallest parts would take milliseconds, and those of many peers seconds."""
        least, more = LEAST_PARSE_BYTES, 2 * self._parse_bytes
        self._parse_bytes = least if num_parts >= MANY_PARTS else min(more, self._most_parse_bytes)

    def _num_undecrypted(self) -> int:
        """Return the bytes that the transport cannot pass on yet; a socket's passes on all."""
        return int(self.transport.get_extra_info(UNDECRYPTED, 0))

    def _stop_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class RequestPhase(enum.Enum):
    """Name how much of the newest request has arrived."""

    HEAD = "head"
    BODY = "body"
    COMPLETE = "complete"


@dataclass(slots=True)
class RequestSize:
    """Count the newest request. `num_bytes` counts whole pieces, `head_bytes` headers only."""

    num_bytes: int = 0
    head_bytes: int = 0
    num_headers: int = 0
    num_parts: int = 0
    body_bytes: int = 0


class GatedFlow(FlowControl):
    """Control flow like uvicorn, and keep reading paused while bytes wait to be parsed."""

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__(transport)
        self._is_held = False

    def hold(self, *, is_held: bool) -> None:
        """Pause reading, or let uvicorn decide again."""
        if is_held:
            self._is_held = True
            self.pause_reading()
        elif self._is_held:
            self._is_held = False
            self.resume_reading()

    def resume_reading(self) -> None:
        """Resume unless bytes wait to be parsed."""
        if not self._is_held:
            super().resume_reading()


class GuardedHttp(Guard, HttpToolsProtocol):
    """Serve one HTTP connection within bounds.

    A closing transport waits until its peer has read the last byte. A peer that stops reading would
    hold the socket forever, so such connections are aborted instead.
    """

    flow: GatedFlow
    _most_parse_bytes = _parse_bytes = PARSE_BYTES

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = guarded(self.config)
        self._settings = config.web_settings
        self._table = config.connection_table
        self._count_refusal = config.metrics.count_refusal
        self._phase = RequestPhase.HEAD
        self._size = RequestSize()
        self._held_back = b""
        self._num_unanswered = 0
        self._awaited_phase: RequestPhase | None = None
        self._refusal: Exception | None = None
        self._is_admitted = True
        self._is_over = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count the connection, and bound the time until its first request head."""
        super().connection_made(transport)
        self.flow = GatedFlow(transport)
        self._unread = UnreadOutput(
            self, transport, table=self._table, stall_s=STALL_S, on_stall=transport.abort
        )
        self._is_admitted = self._table.add(self)
        self._update()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection and its timers."""
        self._stop_reading()
        self._table.remove(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse the bytes that may be parsed now, and hold back the rest."""
        if self._is_over:
            return
        self._unset_keepalive_if_required()
        if self._num_unanswered == 0 and self._phase is RequestPhase.COMPLETE:
            self._phase, self._size = RequestPhase.HEAD, RequestSize()
        self._held_back += data
        self._parse()
        self._update()

    def evict(self) -> None:
        """Close at once, with a 503 if the peer is in the middle of a request."""
        is_mid_request = self._size.num_bytes > 0 and self._phase is not RequestPhase.COMPLETE
        is_mid_request = is_mid_request and not self._is_early
        has_unsent_answer = self._is_over or self.transport.get_write_buffer_size() > 0
        if is_mid_request and self._is_refusable() and not has_unsent_answer:
            self._write_refusal(ServerBusy("Too many unfinished requests are open."))
            self._stop_reading()
            self.transport.close()
        else:
            self._stop_reading()
            self.transport.abort()

    def shutdown(self) -> None:
        """Close after answering the running request, or at once if it has not fully arrived."""
        if self._is_over or self._awaited_phase is RequestPhase.BODY:
            self.transport.abort()
        else:
            super().shutdown()

    # -- what the parser calls

    def on_message_begin(self) -> None:
        """Start a request."""
        self._unset_keepalive_if_required()  # set by the answer before, if this one was held back
        super().on_message_begin()
        self.scope["state"][DRAIN] = self.flow.drain
        self._phase, self._size = RequestPhase.HEAD, RequestSize()

    def on_url(self, url: bytes) -> None:
        """Limit the length of the request target."""
        super().on_url(url)
        if len(self.url) > MAX_URL_BYTES:
            self._refuse(431, "The request target is too long.")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Limit headers and trailers, in number and in total size.

        What comes behind a body is dropped (RFC 9110, section 6.5.1): a proxy that checked the head
        has not seen it, and uvicorn would append it to the head.
        """
        if self._phase is RequestPhase.HEAD:
            super().on_header(name, value)
        self._size.head_bytes += len(name) + len(value) + 4
        self._size.num_headers += 1
        if self._size.head_bytes > MAX_HEADER_BYTES or self._size.num_headers > MAX_HEADERS:
            self._refuse(431, "The request headers are too large.")

    def on_headers_complete(self) -> None:
        """Check the head, and start the request unless it is an upgrade."""
        self._check_head()
        is_upgrade = self.parser.should_upgrade() and self._should_upgrade()
        if is_upgrade:
            self._check_upgrade()
        self._phase = RequestPhase.BODY
        super().on_headers_complete()
        if not is_upgrade:
            self._num_unanswered += 1
            if self.parser.should_upgrade():
                # The upgrade is not supported, and the parser reads nothing behind its request.
                self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        """Limit the size of the body."""
        self._size.num_parts += 1
        self._size.body_bytes += len(body)
        if self._size.body_bytes > self._settings.max_message_bytes:
            most = self._settings.max_message_bytes
            self._refuse(413, f"The body is larger than {most} bytes.")
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Record that the request has arrived."""
        if self._is_early and not self.transport.is_closing():
            self._unset_keepalive_if_required()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )
        self._phase = RequestPhase.COMPLETE
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Parse what was held back: the rest of the answered request, which is dropped as it comes,
        or the next one."""
        self._num_unanswered -= 1
        if self._is_early and self.expect_100_continue and not self.transport.is_closing():
            self._linger()  # the peer may send the body or not: nobody knows what comes next
        super().on_response_complete()
        if self._is_over:
            self._unset_keepalive_if_required()
        elif not self.transport.is_closing():
            self._parse()
            self._update()

    @property
    def _is_early(self) -> bool:
        """Return whether the newest request was answered and has not arrived."""
        return self._num_unanswered == 0 and self._phase is RequestPhase.BODY

    def handle_websocket_upgrade(self) -> None:
        """Hand the connection over to the WebSocket protocol."""
        self._stop_reading()
        self._table.remove(self)
        super().handle_websocket_upgrade()

    # -- parsing

    def _parse(self) -> None:
        """Parse what may be parsed, up to a piece that holds many parts of a body: the rest comes
        next, and others are served in between."""
        held_back, start, num_parts = self._held_back, 0, 0
        while start < len(held_back) and self._is_parsing() and num_parts < MANY_PARTS:
            piece, before = held_back[start : start + self._parse_bytes], self._size.num_parts
            start += len(piece)
            self._parse_piece(piece)
            num_parts = self._size.num_parts - before
            self._pace(num_parts)
        self._held_back = b"" if self._is_over else held_back[start:]
        if self._held_back and self._is_parsing():
            self.loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        if not self._is_over:
            self._parse()
            self._update()

    def _is_parsing(self) -> bool:
        """Return whether the next bytes belong to a request that may be parsed now."""
        if self._is_over or self._refusal is not None:
            return False
        is_reading_body = self._num_unanswered == 1 and self._phase is RequestPhase.BODY
        return self._num_unanswered == 0 or is_reading_body

    def _parse_piece(self, piece: bytes) -> None:
        try:
            self.parser.feed_data(piece)
            self._size.num_bytes += len(piece)
            self._check_size()
        except httptools.HttpParserUpgrade:
            if self._should_upgrade():
                self.handle_websocket_upgrade()
        except (httptools.HttpParserError, HttpRefusal):
            self._refusal = self._refusal or HttpRefusal(400, "The request is not valid HTTP.")

    def _check_size(self) -> None:
        """Refuse endless heads and chunk framing, for which the parser calls nothing."""
        # The first piece may begin with the end of the previous request.
        size, head_bytes = self._size, MAX_HEADER_BYTES + MAX_URL_BYTES + PARSE_BYTES
        if self._phase is RequestPhase.HEAD and size.num_bytes > head_bytes:
            self._refuse(431, "The request head is too large.")
        if self._phase is RequestPhase.BODY:
            framing_bytes = size.num_bytes - size.body_bytes - head_bytes
            if framing_bytes > MAX_FRAMING_PER_BODY_BYTE * max(1, size.body_bytes):
                self._refuse(400, "The chunk extensions of the body are too large.")

    def _check_head(self) -> None:
        if not self._is_admitted:
            self._refusal = ServerBusy("The maximum number of connections is open.")
            raise self._refusal
        version = self.parser.get_http_version()
        if version not in _HTTP_VERSIONS:
            self._refuse(505, "This server speaks HTTP/1.1.")
        if not self.url.startswith(b"/"):
            target = httptools.parse_url(self.url)
            host = (target.host or b"").lower()
            host = b"[%s]" % host if b":" in host else host  # the parser drops the brackets
            port = b":%d" % target.port if target.port else b""
            named = [value.lower() for name, value in self.headers if name == b"host"]
            if named != [host + port]:
                self._refuse(400, "The request target names another host.")

    def _check_upgrade(self) -> None:
        # uvicorn hands the head over as HTTP/1.1, whatever it was. A body is refused by websockets.
        if self.parser.get_http_version() != "1.1":
            self._refuse(400, "A WebSocket handshake requires HTTP/1.1.")
        if self._num_unanswered:
            self._refuse(400, "A WebSocket handshake cannot follow an unanswered request.")

    # -- deadlines and answers

    def _update(self) -> None:
        """Update the connection table, the flow and the deadline with what is awaited now."""
        if self._refusal is not None and self._is_refusable():
            self._refuse_and_linger(self._refusal)
        if self._is_over:
            return
        self.flow.hold(is_held=bool(self._held_back))
        self._set_deadline(self._phase_to_await())
        num_waiting = len(self._held_back) + self._num_undecrypted()
        num_bytes = num_waiting + QUEUED_REQUEST_BYTES * max(0, self._num_unanswered - 1)
        if self._phase is not RequestPhase.COMPLETE and not self._is_early:
            num_bytes += self._size.num_bytes
        if self._num_unanswered == 0 or self._awaited_phase is not None or num_waiting:
            self._table.await_input(self, num_bytes=num_bytes)
        else:
            self._table.mark_served(self)

    def _phase_to_await(self) -> RequestPhase | None:
        """Return the phase whose end is awaited; None while the peer awaits an answer."""
        match self._phase:
            case RequestPhase.HEAD:
                return self._phase if self._num_unanswered == 0 else None
            case RequestPhase.BODY:
                return self._phase if self._num_unanswered <= 1 else None
            case RequestPhase.COMPLETE:
                return None

    def _set_deadline(self, phase: RequestPhase | None) -> None:
        """Start the deadline of an awaited phase; one that is running goes on."""
        if phase is self._awaited_phase:
            return
        self._stop_deadline()
        self._awaited_phase = phase
        if phase is not None:
            is_head = phase is RequestPhase.HEAD
            delay_s = HEADER_TIMEOUT_S if is_head else self._settings.message_timeout_s
            self._deadline = self.loop.call_later(delay_s, self._answer_timeout, phase)

    def _answer_timeout(self, phase: RequestPhase) -> None:
        self._refuse_and_linger(
            HttpRefusal(408, f"The {phase.value} of the request did not arrive in time.")
        )

    def _is_refusable(self) -> bool:
        """Return whether the peer's next expected answer is the one to the newest request."""
        is_newest = self._num_unanswered == 1 and self._phase is RequestPhase.BODY
        return self._num_unanswered == 0 or is_newest

    def _refuse(self, status: int, message: str) -> None:
        """Stop parsing. The refusal is sent once older requests are answered."""
        self._refusal = HttpRefusal(status, message)
        raise self._refusal

    def _refuse_and_linger(self, refusal: Exception) -> None:
        """Answer the newest request with a refusal, unless it is answered, and close."""
        if self._num_unanswered and self.cycle.response_started:
            self._stop_reading()
            self.transport.abort()
            return
        if not self._is_early:
            self._write_refusal(refusal)
        self._linger()

    def _write_refusal(self, refusal: Exception) -> None:
        if self._num_unanswered:
            # The route reads nothing more of its request, and its answer is dropped.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self._count_refusal(refusal_code(refusal))
        self.transport.write(refusal_bytes(refusal))

    def _linger(self) -> None:
        """Send EOF, and let the peer stop sending before the socket is closed."""
        self._stop_reading()
        self._table.mark_served(self)
        self._table.await_input(self, num_bytes=0)
        with contextlib.suppress(OSError):  # the peer may have gone
            self.transport.write_eof()
        self.flow.hold(is_held=False)
        self.flow.resume_reading()
        self._deadline = self.loop.call_later(REFUSAL_LINGER_S, self.transport.abort)

    def _stop_reading(self) -> None:
        """Read nothing more, and stop every timer."""
        self._is_over = True
        self._held_back = b""
        self._stop_deadline()
        self._unread.end()
        self._unset_keepalive_if_required()
