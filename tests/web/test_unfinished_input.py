"""Peers that begin and do not finish, send too much at once, or go on when they were answered."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest

from session_server.web import http_guard, websocket_guard
from session_server.web.connection_table import ConnectionLimits
from session_server.web.http_guard import GuardedHttp
from session_server.web.websocket_guard import GuardedWebSocket
from tests.rig.raw_peer import frames_in, raw_frame, text_frame, upgrade
from tests.web.serving import Served, served

GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
BODY = (
    b"POST /v1/sessions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Content-Length: 1000000\r\n\r\n"
)


@dataclass
class Peer:
    """A connection that says what it is told to."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, payload: bytes) -> None:
        self.writer.write(payload)
        await self.writer.drain()

    async def read_until(self, mark: bytes) -> bytes:
        received = b""
        while mark not in received:
            chunk = await self.reader.read(65536)
            assert chunk, received
            received += chunk
        return received

    async def rest(self) -> bytes:
        """What comes until the server closes."""
        with contextlib.suppress(ConnectionResetError):
            return await self.reader.read()
        return b""

    async def upgrade(self, session_id: str = "new") -> None:
        await self.send(upgrade(session_id))
        await self.read_until(b"session.opened")

    async def close_code(self) -> int:
        frames = frames_in(b"\r\n\r\n" + await self.rest())
        assert frames[-1]["type"] == "close", frames
        return int(frames[-1]["code"])


@contextlib.asynccontextmanager
async def peers_of(this: Served, number: int = 1) -> AsyncIterator[list[Peer]]:
    peers = [Peer(*await asyncio.open_connection("127.0.0.1", this.port)) for _ in range(number)]
    try:
        yield peers
    finally:
        for peer in peers:
            peer.writer.close()


def connections(this: Served) -> list[Any]:
    return list(this.server.server_state.connections)


@served()
async def test_an_answer_to_a_request_that_asks_whether_to_send_its_body_ends_the_connection(
    this: Served,
) -> None:
    """It may come or not: nobody can say whether the next bytes are it or another request."""
    asks = b"\r\nContent-Length: 100\r\nExpect: 100-continue\r\n\r\n"
    async with peers_of(this) as (peer,):
        await peer.send(GET.replace(b"\r\n\r\n", asks))
        answer = await peer.rest()
    assert answer.startswith(b"HTTP/1.1 200")
    assert answer.endswith(b'{"status":"ok"}')


def test_a_refused_peer_that_goes_on_sending_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_guard, "REFUSAL_LINGER_S", 0.05)

    @served(message_timeout_s=0.05)
    async def test(this: Served) -> None:
        async with peers_of(this) as (peer,):
            await peer.send(BODY)
            assert (await peer.rest()).startswith(b"HTTP/1.1 408")
            peer.writer.write(b" ")
        await this.until(lambda: not connections(this))

    test()


@served()
async def test_a_body_in_time_is_served_however_it_comes(this: Served) -> None:
    body = b'{"id":"slow"}'
    async with peers_of(this) as (peer,):
        await peer.send(BODY.replace(b"1000000", b"%d" % len(body)))
        for byte in body:
            await peer.send(bytes([byte]))
            await asyncio.sleep(0)
        assert b" 201 " in await peer.read_until(b"slow")
        (connection,) = connections(this)
        assert isinstance(connection, GuardedHttp)
        assert connection._deadline is None, "a body that is here is not waited for"
        await peer.send(GET)
        assert b" 200 " in await peer.read_until(b"ok")


@served()
async def test_many_requests_sent_at_once_are_all_answered_and_few_are_in_memory(
    this: Served,
) -> None:
    async with peers_of(this) as (peer,):
        peer.writer.write(GET * 800)
        most, answers = 0, b""
        while answers.count(b"HTTP/1.1 200 OK") < 800:
            answers += await peer.reader.read(65536)
            (connection,) = connections(this)
            assert isinstance(connection, GuardedHttp)
            most = max(most, len(connection.pipeline))
        assert answers.endswith(b'{"status":"ok"}')
        assert 0 < most <= http_guard.PARSE_BYTES // len(GET)


@served()
async def test_a_refusal_waits_for_the_answers_before_it(this: Served) -> None:
    async with peers_of(this) as (peer,):
        await peer.send(GET + GET.replace(b"1.1", b"2.0") + GET)
        answer = await peer.rest()
    assert [head[:3] for head in answer.split(b"HTTP/1.1 ")[1:]] == [b"200", b"505"]


@served()
async def test_a_handshake_behind_an_unanswered_request_is_refused(this: Served) -> None:
    async with peers_of(this) as (peer,):
        await peer.send(GET + upgrade("new"))
        answer = await peer.rest()
    assert [head[:3] for head in answer.split(b"HTTP/1.1 ")[1:]] == [b"200", b"400"]


def test_line_ends_between_requests_do_not_keep_a_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_guard, "HEADER_TIMEOUT_S", 0.1)

    @served()
    async def test(this: Served) -> None:
        async with peers_of(this) as (peer,):
            await peer.send(GET)
            await peer.read_until(b"ok")
            await peer.send(b"\r\n")
            assert (await peer.rest()).startswith(b"HTTP/1.1 408")

    test()


@served(connections=ConnectionLimits(input_bytes=100_000, input_bytes_per_address=80_000))
async def test_unfinished_bodies_are_bounded_together_and_the_first_gives_way(
    this: Served,
) -> None:
    table = this.app.state.connections
    async with peers_of(this, 4) as peers:
        for peer in peers[:2]:
            await peer.send(BODY + b" " * 35_000)
        await this.until(lambda: table.num_input_bytes >= 70_000)
        await peers[2].send(BODY + b" " * 35_000)
        refused = await peers[0].rest()
        assert refused.startswith(b"HTTP/1.1 503")
        assert b"server_busy" in refused
        assert b"retry-after" in refused
        assert table.num_input_bytes <= 80_000
        await peers[3].send(BODY.replace(b"1000000", b"2") + b"{}")
        assert b" 201 " in await peers[3].read_until(b"created")
    await this.until(lambda: table.num_connections == 0)
    assert table.num_input_bytes == 0


@served(connections=ConnectionLimits(input_bytes=100_000))
async def test_unfinished_frames_are_bounded_together_and_the_first_gives_way(
    this: Served,
) -> None:
    frame = raw_frame(b" " * 50_000)
    async with peers_of(this, 3) as peers:
        for peer in peers:
            await peer.upgrade()
            await peer.send(frame[:40_000])
        assert await peers[0].close_code() == 1013
        assert this.app.state.connections.num_input_bytes <= 100_000
        await peers[2].send(frame[40_000:])
        assert b"not valid JSON" in await peers[2].read_until(b'"error"')


@served(message_timeout_s=0.1)
async def test_a_message_that_does_not_come_is_not_waited_for(this: Served) -> None:
    ping = text_frame({"type": "ping", "t": 1})
    starts = (raw_frame(b" " * 100)[:50], raw_frame(b"", final=False), ping + ping[:9])
    for start in starts:
        async with peers_of(this) as (peer,):
            await peer.upgrade()
            await peer.send(ping)
            await asyncio.sleep(0.15)  # silence between messages has no such deadline
            await peer.send(start)
            assert await peer.close_code() == 4408


def test_a_message_has_as_many_fragments_as_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(websocket_guard, "MAX_FRAGMENTS", 8)

    @served()
    async def test(this: Served) -> None:
        empty = raw_frame(b"", opcode=0, final=False)
        for number, answer in ((7, b"pong"), (8, b"pong"), (9, b"too many fragments")):
            async with peers_of(this) as (peer,):
                await peer.upgrade()
                last = raw_frame(b"}", opcode=0)
                first = raw_frame(b'{"type":"ping","t":1', final=False)
                await peer.send(first + empty * (number - 2) + last)
                await peer.read_until(answer)

    test()


@served()
async def test_few_of_many_small_frames_are_in_memory(this: Served) -> None:
    async with peers_of(this) as (peer,):
        await peer.upgrade()
        (connection,) = (c for c in connections(this) if isinstance(c, GuardedWebSocket))
        peer.writer.write(text_frame({"type": "ping", "t": 1}) * 3000)
        most, answers = 0, b""
        while answers.count(b"pong") < 3000:
            answers += await peer.reader.read(65536)
            most = max(most, connection.queue.qsize())
        assert most <= websocket_guard.PARSE_BYTES // 20


@served()
async def test_pings_of_a_peer_that_does_not_read_are_not_answered_into_memory(
    this: Served,
) -> None:
    async with peers_of(this) as (peer,):
        await peer.upgrade()
        (connection,) = (c for c in connections(this) if isinstance(c, GuardedWebSocket))
        peer.reader._transport.pause_reading()  # type: ignore[attr-defined]
        ping = raw_frame(b" " * 125, opcode=9)
        with mock.patch.object(websocket_guard, "MAX_CONTROL_FRAMES", 1_000_000):
            for _ in range(200):
                await peer.send(ping * 500)  # 13 MB, of which the kernel takes a few
                await asyncio.sleep(0)
        assert connection.transport.get_write_buffer_size() < 200_000


@served(connections=ConnectionLimits(connections=3))
async def test_silent_connections_keep_nobody_out(this: Served) -> None:
    async with peers_of(this, 6) as peers:
        for peer in peers[:-3]:
            assert await peer.rest() == b""
        await peers[-1].send(GET)
        assert b" 200 " in await peers[-1].read_until(b"ok")


def test_connections_that_are_being_closed_keep_nobody_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    @served(connections=ConnectionLimits(connections=3))
    async def test(this: Served) -> None:
        waits = b"\r\nContent-Length: 9\r\nExpect: 100-continue\r\n\r\n"
        async with peers_of(this, 3) as answered:
            for peer in answered:
                await peer.send(GET.replace(b"\r\n\r\n", waits))
                assert (await peer.rest()).startswith(b"HTTP/1.1 200")
            async with peers_of(this, 3) as late:
                for peer in late:
                    await peer.send(GET)
                    assert b" 200 " in await peer.read_until(b"ok")
            await this.until(lambda: len(connections(this)) <= 3)

    test()
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []


@served()
async def test_a_connection_goes_on_behind_a_request_that_is_answered_before_it_arrives(
    this: Served,
) -> None:
    """As clients send them: the head, then the body, which the route does not read."""
    async with peers_of(this) as (peer,):
        for pause in (True, False) * 3:
            await peer.send(GET.replace(b"\r\n\r\n", b"\r\nContent-Length: 9\r\n\r\n"))
            if pause:
                assert b" 200 " in await peer.read_until(b"ok")
            await peer.send(b"123456789")
            if not pause:
                assert b" 200 " in await peer.read_until(b"ok")
        (connection,) = connections(this)
        await this.until(lambda: connection.timeout_keep_alive_task is not None)


def test_an_answered_request_that_never_arrives_is_not_waited_for() -> None:
    @served(message_timeout_s=0.1)
    async def test(this: Served) -> None:
        for rest in (b"", b"1234", b"\r\n\r\n"):
            async with peers_of(this) as (peer,):
                await peer.send(GET.replace(b"\r\n\r\n", b"\r\nContent-Length: 9\r\n\r\n"))
                answer = await peer.read_until(b"ok")
                await peer.send(rest)
                answer += await peer.rest()
            assert answer.count(b"HTTP/1.1 ") == 1, "nothing is said behind the answer"

    test()


def test_a_request_that_was_held_back_is_not_cut_by_the_time_between_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @served()
    async def test(this: Served) -> None:
        this.is_held = True
        turn = b'{"input_ids":[300],"sampling":{"max_tokens":1}}'
        head = b"POST /v1/sessions/%s/turns HTTP/1.1\r\nHost: localhost\r\n"
        head += b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        session_id = await this.open()
        async with peers_of(this) as (peer,):
            first = GET[:-2] + b"X: %s\r\n\r\n"
            first %= b"x" * (http_guard.PARSE_BYTES - len(first) + 2)  # the next is another piece
            await peer.send(first + head % (session_id.encode(), len(turn)) + turn)
            await peer.read_until(b"ok")
            (connection,) = (
                c for c in connections(this) if c.client == peer.writer.get_extra_info("sockname")
            )
            await this.until(lambda: connection.cycle.scope["method"] == "POST")
            assert connection.timeout_keep_alive_task is None
            this.is_held = False
            assert b" 200 " in await peer.read_until(b"output")

    test()


@served(connections=ConnectionLimits(connections=3))
async def test_where_all_are_served_a_newcomer_is_told_so(this: Served) -> None:
    async with peers_of(this, 3) as sockets:
        for peer in sockets:
            await peer.upgrade()
        async with peers_of(this) as (late,):
            await late.send(GET)
            refused = await late.rest()
        assert refused.startswith(b"HTTP/1.1 503")
        assert b"server_busy" in refused
        await sockets[0].send(text_frame({"type": "ping", "t": 1}))
        await sockets[0].read_until(b"pong")


def test_a_server_with_unfinished_peers_ends_in_order(caplog: pytest.LogCaptureFixture) -> None:
    @served()
    async def test(this: Served) -> None:
        beginnings = (
            b"",
            GET[:9],
            GET,
            BODY,
            BODY + b"abc",
            BODY.replace(b"Content-Length: 1000000", b"Transfer-Encoding: chunked") + b"5\r\nab",
            upgrade("new"),
            upgrade("a" * 8170),
            upgrade("new").replace(b"\r\n\r\n", b"\r\nContent-Length: 5\r\n\r\n"),
            upgrade("new").replace(b"\r\n\r\n", b"\r\nX: \x01\r\n\r\n"),
        )
        async with peers_of(this, len(beginnings) + 1) as (half_frame, *peers):
            for peer, beginning in zip(peers, beginnings, strict=True):
                await peer.send(beginning)
            await half_frame.upgrade()
            await half_frame.send(raw_frame(b" " * 100)[:50])
            this.server.should_exit = True
            await this.until(lambda: not connections(this))

    test()
    assert [record.message for record in caplog.records if record.levelname != "INFO"] == []
