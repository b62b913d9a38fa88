"""The transport of prompts by HTTP: news come as lines, and whatever is not news is no answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import httpx
import pytest

from session_server.sessions.roles import transport as transport_module
from session_server.sessions.roles.messages import (
    News,
    PrefillRefused,
    PrefillWorking,
    PrefillWritten,
    line_of,
)
from session_server.sessions.roles.transport import MAX_LINE_BYTES, HttpTransport, Unreachable

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
DONE = PrefillWritten(32, ((b"name", 4096),))
HEAD = b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n"


async def news_from(answer: Answer, *, leaves_after: int | None = None) -> list[News]:
    """Ask a server that answers in this way."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"POST /v1/internal/prefill HTTP/1.1\r\n")
        assert await reader.readexactly(6) == b"sealed"
        try:
            await answer(reader, writer)
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
    transport, found = HttpTransport(), list[News]()
    try:
        async with transport.ask(url, b"sealed") as told:
            async for news in told:
                found.append(news)
                if len(found) == leaves_after:
                    break
    finally:
        await transport.close()
        server.close()
    return found


def saying(*pieces: bytes) -> Answer:
    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.01)

    return answer


def test_news_come_as_lines_however_they_are_cut() -> None:
    lines = line_of(PrefillWorking(16)) + line_of(DONE)
    for place in range(0, len(lines), 7):
        answer = saying(HEAD, lines[:place], lines[place:])
        assert asyncio.run(news_from(answer)) == [PrefillWorking(16), DONE]


def test_an_answer_of_another_status_is_a_refusal() -> None:
    answer = saying(b"HTTP/1.1 503 Busy\r\ncontent-length: 2\r\n\r\nno")
    assert asyncio.run(news_from(answer)) == [PrefillRefused("failed", "HTTP 503")]


@pytest.mark.parametrize("said", [b"<html>\n", b'{"type":"other"}\n', b"\xff\n"], ids=repr)
def test_what_is_no_news_is_no_answer(said: bytes) -> None:
    with pytest.raises(Unreachable, match="no news of ours"):
        asyncio.run(news_from(saying(HEAD, said)))


@pytest.mark.parametrize("amount", ["-1", str(1 << 64), "9" * 4000], ids=["-1", "65 bits", "9s"])
@pytest.mark.parametrize(
    "told",
    [
        '{"type":"written","num_tokens":%s,"files":[]}',
        '{"type":"written","num_tokens":32,"files":[["eA==",%s]]}',
        '{"type":"working","computed":%s}',
    ],
)
def test_an_amount_that_nobody_can_have_is_no_answer(told: str, amount: str) -> None:
    with pytest.raises(Unreachable, match="no news of ours"):
        asyncio.run(news_from(saying(HEAD, (told % amount).encode() + b"\n")))


@pytest.mark.parametrize("port", ["99999", "-1"])
def test_an_address_that_is_none_is_told(port: str) -> None:
    async def ask() -> None:
        async with HttpTransport().ask(f"http://127.0.0.1:{port}", b"sealed") as told:
            async for _ in told:
                pass

    with pytest.raises(Unreachable):
        asyncio.run(ask())


def test_a_long_line_in_small_pieces_takes_no_time() -> None:
    """Each piece is joined to the others once: a thousand times as many bytes take seconds."""
    length, num_pieces = MAX_LINE_BYTES - 20_000, 10_000
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n%x\r\n" % length
    answer = saying(head + b"x" * length + b"\r\n" + b"1\r\nx\r\n" * num_pieces)
    begun_s = time.process_time()
    with pytest.raises(Unreachable):
        asyncio.run(news_from(answer))
    assert time.process_time() - begun_s < 3.0


def test_a_line_without_an_end_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport_module, "MAX_LINE_BYTES", 100)
    with pytest.raises(Unreachable, match="without an end"):
        asyncio.run(news_from(saying(HEAD, b"x" * 200)))


def test_nobody_there_and_a_connection_that_breaks_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def ask_nobody() -> None:
        async with HttpTransport().ask("http://127.0.0.1:1", b"sealed") as told:
            async for _ in told:
                pass

    with pytest.raises(Unreachable, match="ConnectError"):
        asyncio.run(ask_nobody())
    with pytest.raises(Unreachable):
        asyncio.run(news_from(saying(b"HTTP/1.1 200 OK\r\ncontent-length: 500\r\n\r\nx")))


def test_silence_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport_module, "SILENT_S", 0.05)

    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + line_of(PrefillWorking(1)))
        await reader.read()  # until the other one leaves

    with pytest.raises(Unreachable, match="ReadTimeout"):
        asyncio.run(news_from(say_nothing))


def test_to_leave_closes_the_connection() -> None:
    has_left = list[bytes]()

    async def go_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + line_of(PrefillWorking(1)))
        has_left.append(await reader.read())

    async def ask() -> None:
        assert await news_from(go_on, leaves_after=1) == [PrefillWorking(1)]
        await asyncio.sleep(0.05)

    asyncio.run(ask())
    assert has_left == [b""]


def test_only_the_client_of_http_is_used() -> None:
    """No proxy of the environment sees prompts."""
    assert isinstance(HttpTransport()._client, httpx.AsyncClient)
    assert HttpTransport()._client.trust_env is False
