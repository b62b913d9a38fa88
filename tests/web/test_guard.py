"""What a request must be before any route sees it: the table of FAULTS, over raw sockets."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Final
from unittest import mock

import pytest
from websockets.frames import Close

from session_server.web import http_guard, websocket_guard
from session_server.web.websocket import SessionSocket
from session_server.web.websocket_guard import GuardedWebSocket
from tests.web.serving import Served, served

OK = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
POST = b"POST /v1/sessions HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = POST + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
HANDSHAKE = (
    b"Host: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n"
)
SOCKET = b"GET /v1/sessions/new/ws HTTP/1.1\r\n" + HANDSHAKE
NUM_FREE = http_guard.MAX_HEADERS - 2

RAW = [
    ("plain", OK + b"\r\n", 200),
    ("http/1.0 with a host", b"GET /health HTTP/1.0\r\nHost: localhost\r\n\r\n", 200),
    ("no host", b"GET /health HTTP/1.1\r\nConnection: close\r\n\r\n", 400),
    ("two hosts", OK + b"Host: localhost\r\n\r\n", 400),
    ("a host that is none", OK.replace(b"localhost", b"a/b?c") + b"\r\n", 400),
    ("a foreign host", OK.replace(b"localhost", b"evil.example") + b"\r\n", 421),
    ("a foreign origin", OK + b"Origin: https://evil.example\r\n\r\n", 403),
    ("an opaque origin", OK + b"Origin: null\r\n\r\n", 403),
    ("two origins", OK + b"Origin: http://localhost\r\nOrigin: http://localhost\r\n\r\n", 403),
    ("our own origin", OK + b"Origin: http://localhost\r\n\r\n", 200),
    (
        "two framings, a smuggled request",
        b"POST /v1/sessions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 6\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /metrics HTTP/1.1\r\nHost: a\r\n\r\n",
        400,
    ),
    ("two lengths", OK + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n", 400),
    ("a length that is none", OK + b"Content-Length: -1\r\n\r\n", 400),
    ("a body announced too large", OK + b"Content-Length: 99999999999\r\n\r\n", 413),
    ("a header of a megabyte", OK + b"X: " + b"a" * (1 << 20) + b"\r\n\r\n", 431),
    ("a header without end", OK + b"X: " + b"a" * 60_000, 431),
    ("ten thousand headers", OK + b"X: a\r\n" * 10_000 + b"\r\n", 431),
    ("headers one too many", OK + b"X: a\r\n" * (NUM_FREE + 1) + b"\r\n", 431),
    ("as many headers as allowed", OK + b"X: a\r\n" * NUM_FREE + b"\r\n", 200),
    ("a target too long", b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", 431),
    ("a later version", b"GET /health HTTP/2.0\r\nHost: localhost\r\n\r\n", 505),
    ("an absolute target", OK.replace(b"/health", b"http://localhost/health") + b"\r\n", 200),
    (
        "an absolute target of an IPv6 address",
        b"GET http://[::1]:9/health HTTP/1.1\r\nHost: [::1]:9\r\nConnection: close\r\n\r\n",
        200,
    ),
    (
        "an absolute target of another IPv6 address",
        b"GET http://[::2]:9/health HTTP/1.1\r\nHost: [::1]:9\r\nConnection: close\r\n\r\n",
        400,
    ),
    ("an absolute target elsewhere", OK.replace(b"/health", b"http://a/health") + b"\r\n", 400),
    (
        "an absolute target on another port",
        OK.replace(b"/h", b"http://localhost:9/h") + b"\r\n",
        400,
    ),
    (
        "a chunk extension of a megabyte",
        CHUNKED + b"2;" + b"a" * (1 << 20) + b"\r\n{}\r\n0\r\n\r\n",
        400,
    ),
    ("a chunk extension without end", CHUNKED + b"2;" + b"a" * 60_000, 400),
    (
        "trailers of a megabyte",
        CHUNKED + b"2\r\n{}\r\n0\r\n" + (b"X: " + b"a" * 999 + b"\r\n") * 1000,
        431,
    ),
    (
        "a host that comes behind the body",
        CHUNKED.replace(b"Host: localhost\r\n", b"") + b"2\r\n{}\r\n0\r\nHost: localhost\r\n\r\n",
        400,
    ),
    ("chunks that are none", CHUNKED + b"no\r\n", 400),
    ("chunks of a byte each", CHUNKED + b"1\r\n \r\n" * 9999 + b"2\r\n{}\r\n0\r\n\r\n", 201),
    (
        "sixteen bytes of framing for each of the body",
        CHUNKED + b"1;xxxxxxxxxx\r\n \r\n" * 30_000 + b"2\r\n{}\r\n0\r\n\r\n",
        201,
    ),
    (
        "seventeen bytes of framing for each of the body",
        CHUNKED + b"1;xxxxxxxxxxx\r\n \r\n" * 30_000 + b"2\r\n{}\r\n0\r\n\r\n",
        400,
    ),
    ("a body too large in chunks", CHUNKED + (b"ffff\r\n" + b" " * 0xFFFF + b"\r\n") * 17, 413),
    ("a handshake with a body", SOCKET + b"Content-Length: 5\r\n\r\n", 400),
    ("a handshake with its body", SOCKET + b"Content-Length: 5\r\n\r\nhello", 400),
    ("a handshake with chunks", SOCKET + b"Transfer-Encoding: chunked\r\n\r\n", 400),
    ("a handshake of another method", SOCKET.replace(b"GET", b"POST") + b"\r\n", 405),
    ("a handshake in HTTP/1.0", SOCKET.replace(b"1.1", b"1.0") + b"\r\n", 400),
    ("a handshake without a key", SOCKET.replace(b"Key", b"Kay") + b"\r\n", 400),
    ("a handshake with a bad header", SOCKET + b"X: \x01\r\n\r\n", 400),
    ("a handshake whose line is too long", SOCKET.replace(b"new", b"a" * 8170) + b"\r\n", 400),
    ("another upgrade", OK.replace(b"close", b"Upgrade") + b"Upgrade: h2c\r\n\r\n", 200),
    ("no http", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 hello\r\n\r\n", 400),
]


@served()
async def test_a_request_is_what_it_must_be_or_is_refused(this: Served) -> None:
    for name, payload, status in RAW:
        async with asyncio.timeout(10):
            answer = await this.until_closed(payload)
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 %d" % status), (name, answer[:200])
        if status not in (200, 201, 400, 405) or b"application/json" in head:
            assert body.startswith((b'{"error":{"type":', b'{"status":', b'{"id":')), name
        assert answer.count(b"HTTP/1.1 ") == 1, f"{name}: a second request was served"


def test_a_head_that_does_not_come_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_guard, "HEADER_TIMEOUT_S", 0.1)

    @served()
    async def test(this: Served) -> None:
        assert b" 408 " in await this.until_closed(b"GET /health HTTP/1.1\r\nHost: loc")
        assert b" 408 " in await this.until_closed(b"")

    test()


@served(message_timeout_s=0.1)
async def test_a_body_that_does_not_come_is_not_waited_for(this: Served) -> None:
    head = b"POST /v1/sessions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{"
    assert b" 408 " in await this.until_closed(head)


CLOSE_FRAME: Final = b"\x88\x82" + bytes(4) + b"\x03\xe8"
"""A masked close frame with code 1000."""


@served()
async def test_a_shutdown_adds_nothing_to_a_socket_that_its_peer_has_closed(this: Served) -> None:
    async with this.socket():
        (socket,) = websockets_of(this)
        socket.data_received(CLOSE_FRAME)
        socket.shutdown()
        assert socket.conn.close_sent == Close(1000, "")
        assert socket.transport.is_closing()


def test_a_shutdown_does_not_answer_a_failed_handshake_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def wait(_: SessionSocket) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(SessionSocket, "run", wait)

    @served()
    async def test(this: Served) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", this.port)
        writer.write(SOCKET + b"\r\n")
        await this.until(lambda: bool(websockets_of(this)))
        (socket,) = websockets_of(this)
        socket.send_500_response()
        socket.shutdown()
        assert (await reader.read()).count(b"HTTP/1.1 ") == 1
        writer.close()

    test()


@served()
async def test_a_ping_behind_a_long_frame_is_waited_for_while_the_peer_reads(this: Served) -> None:
    async with this.socket():
        (connection,) = websockets_of(this)
        wire = connection.transport
        sizes = iter((900, 800, 700, 700))
        transport = mock.Mock(wraps=wire, get_write_buffer_size=lambda: next(sizes))
        with mock.patch.object(connection, "transport", transport):
            connection.send_keepalive_ping()
            for _ in range(2):
                connection.keepalive_timeout()
                assert not connection.close_sent
                assert connection.pong_timer is not None
            connection.keepalive_timeout()
            assert connection.close_sent, "it has read nothing more"


class Turns:
    """Count what happens in one turn of the event loop, at most, and the turns in which it does."""

    def __init__(self) -> None:
        self.most = self.num = self.num_now = self.num_turns = 0

    def count(self) -> None:
        if self.num_now == 0:
            self.num_turns += 1
            asyncio.get_running_loop().call_soon(self.reset)
        self.num, self.num_now = self.num + 1, self.num_now + 1
        self.most = max(self.most, self.num_now)

    def reset(self) -> None:
        self.num_now = 0

    def counting(self, monkeypatch: pytest.MonkeyPatch, guard: type, *names: str) -> None:
        """Count the calls of these methods."""
        for name in names:
            monkeypatch.setattr(guard, name, self._counted(getattr(guard, name)))

    def _counted(self, handle: Callable[..., None]) -> Callable[..., None]:
        def counted(*args: object) -> None:
            self.count()
            handle(*args)

        return counted


PARTS = 20_000
AT_ONCE = 2 * http_guard.LEAST_PARSE_BYTES // 6
"""The smallest parts that are parsed in a turn of the loop, behind the first."""


@pytest.mark.parametrize("opcode", [b"\x89", b"\x8a"])
def test_a_flood_of_frames_that_say_nothing_ends_its_socket(
    opcode: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pings and pongs need no key, and none of them waits for an application."""
    turns = Turns()
    turns.counting(monkeypatch, GuardedWebSocket, "handle_ping", "handle_pong")
    frame, most = opcode + b"\x80" + bytes(4), websocket_guard.MAX_CONTROL_FRAMES

    @served()
    async def test(this: Served) -> None:
        for num_frames in (most - 1, most, PARTS):
            reader, writer = await asyncio.open_connection("127.0.0.1", this.port)
            writer.write(SOCKET + b"\r\n")
            assert (await reader.readuntil(b"\r\n\r\n")).split()[1] == b"101"
            writer.write(frame * num_frames)
            if num_frames <= most:
                writer.write(masked(b"\x81", b'{"type":"ping","t":7}'))
                await reader.readuntil(b'"pong"')
            else:
                with contextlib.suppress(ConnectionResetError):  # it was still sending
                    await reader.read()
            writer.close()

    test()
    assert turns.most <= websocket_guard.PARSE_BYTES // 6 + 1
    assert turns.num < 3 * most + websocket_guard.PARSE_BYTES // 6


@served()
async def test_one_who_pings_as_often_as_allowed_is_not_closed(this: Served) -> None:
    async with this.socket():
        await this.until(lambda: len(websockets_of(this)) == 1)
        (connection,) = websockets_of(this)
        now_s = connection.loop.time()
        with mock.patch.object(connection.loop, "time") as time:
            for number in range(1000):
                time.return_value = now_s + number / websocket_guard.CONTROL_FRAMES_PER_S
                assert connection._may_send_control()


def test_a_message_of_small_fragments_is_parsed_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    turns, num_fragments = Turns(), websocket_guard.MAX_FRAGMENTS - 2
    turns.counting(monkeypatch, GuardedWebSocket, "handle_cont")

    @served()
    async def test(this: Served) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", this.port)
        begin, end = masked(b"\x01", b'{"type":"ping"'), masked(b"\x80", b',"t":7}')
        writer.write(SOCKET + b"\r\n")
        await reader.readuntil(b"\r\n\r\n")
        writer.write(begin + masked(b"\x00", b"") * num_fragments + end)
        await reader.readuntil(b'"pong"')
        writer.close()

    test()
    assert turns.num == num_fragments + 1
    assert turns.most <= websocket_guard.PARSE_BYTES // 6 + 1
    assert turns.num_turns >= num_fragments / AT_ONCE / 2


def test_a_body_of_small_chunks_is_parsed_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = Turns()
    turns.counting(monkeypatch, http_guard.GuardedHttp, "on_body")

    @served()
    async def test(this: Served) -> None:
        body = b"1\r\n{\r\n" + b"1\r\n \r\n" * PARTS + b"1\r\n}\r\n0\r\n\r\n"
        answer = await this.until_closed(CHUNKED + body)
        assert answer.startswith(b"HTTP/1.1 201")

    test()
    assert turns.num == PARTS + 2
    assert turns.most <= http_guard.PARSE_BYTES // 6 + 1
    assert turns.num_turns >= PARTS / AT_ONCE


def masked(first: bytes, payload: bytes) -> bytes:
    """A frame of a client whose mask is zero."""
    return first + bytes([0x80 | len(payload)]) + bytes(4) + payload


def websockets_of(this: Served) -> list[GuardedWebSocket]:
    """Return the WebSocket connections of the server."""
    connections = this.server.server_state.connections
    return [it for it in connections if isinstance(it, GuardedWebSocket)]
