"""Malformed JSON, bytes that are no text, frames that are none: answered, and nothing else."""

from __future__ import annotations

import itertools
import json
import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from session_server.core.owner import ANONYMOUS
from tests.faults.malformed import bodies, frames
from tests.faults.points import Points, injects
from tests.rig.moments import turn
from tests.rig.raw_peer import RawPeer, frames_in, raw_frame, request, text_frame, upgrade
from tests.rig.wired import Wired, wired

ROUTES = (
    ("POST", "/v1/sessions"),
    ("POST", "/v1/sessions/s/turns"),
    ("POST", "/v1/sessions/s/turns/t/cancel"),
    ("PATCH", "/v1/sessions/s"),
    ("POST", "/generate"),
    ("POST", "/open_session"),
    ("POST", "/close_session"),
    ("POST", "/abort_request"),
)
LOGGERS = ("session_server", "uvicorn.error", "asyncio")
LONG = turn("long", *range(9, 20), max_tokens=12)
HEAD = (
    b"POST /v1/sessions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n"
    b"Connection: close\r\n\r\n"
)
REFUSED = {400, 404, 409, 413, 415, 422}


@contextmanager
def nothing_logged() -> Iterator[None]:
    """No client can write an error into the log."""
    records: list[logging.LogRecord] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    handler, loggers = Collect(logging.ERROR), [logging.getLogger(name) for name in LOGGERS]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
    assert [record.getMessage() for record in records] == []


async def greeted(server: Wired) -> RawPeer:
    """A WebSocket to the session `s` that has heard the hello."""
    peer = await server.peer()
    await peer.send(upgrade("s"))
    assert await peer.read_until(b"session.opened")
    return peer


def answers_in(peer: RawPeer) -> list[dict[str, Any]]:
    """Frames received since the last call."""
    found = frames_in(b"\r\n\r\n" + peer.received)
    peer.received.clear()
    return found


@injects("malformed JSON, UTF-8", "messages of a WebSocket", points=600)
async def test_a_message_that_is_wrong_is_answered_and_the_connection_lives(
    points: Points,
) -> None:
    num_refused = 0
    with nothing_logged():
        async with wired() as server:
            server.open("s")
            peer = await greeted(server)
            await server.rounds()
            peer.received.clear()
            for body in bodies():
                try:
                    text = body.decode()
                except UnicodeDecodeError:
                    continue  # ends a connection: below
                await peer.send(raw_frame(text.replace("{", '{"type":"turn.create",', 1).encode()))
                assert await peer.read_until(b'"type"'), (body[:80], "no answer")
                await peer.send(text_frame({"type": "ping", "t": 7}))
                assert await peer.read_until(b'"pong"'), body[:80]
                answers = answers_in(peer)
                assert all(answer["type"] != "close" for answer in answers), body[:80]
                refusals = [answer["error"] for answer in answers if answer["type"] == "error"]
                assert all(refusal["code"] != "internal_error" for refusal in refusals)
                num_refused += bool(refusals)
                points.strike()
            peer.vanish(hard=False)
            server.sessions.close(ANONYMOUS, "s")
            await server.assert_empty()
    assert num_refused > 0.9 * points.num


@injects("malformed JSON, UTF-8", "bodies of plain HTTP, on every route that takes one", points=700)
async def test_a_body_that_is_wrong_is_a_refusal_and_nothing_more(points: Points) -> None:
    num_refused = 0
    with nothing_logged():
        async with wired() as server:
            server.open("s")
            peer = await server.peer()
            for body, (method, path) in zip(bodies(), itertools.cycle(ROUTES), strict=False):
                await peer.send(request(method, path, body))
                status, answer = await peer.response()
                if status >= 400:
                    assert status in REFUSED, (path, status, body[:80])
                    assert json.loads(answer)["error"]["code"] != "internal_error"
                    num_refused += 1
                points.strike()
            peer.vanish(hard=False)
            for view in (await server.sessions.list(ANONYMOUS)).sessions:
                server.sessions.close(ANONYMOUS, view.session_id)
            await server.assert_empty()
    assert num_refused > 0.8 * points.num


@injects("malformed JSON, UTF-8", "frames of a WebSocket that break framing or UTF-8", points=55)
async def test_a_frame_that_is_none_ends_the_connection_with_its_code_and_not_the_session(
    points: Points,
) -> None:
    with nothing_logged():
        async with wired() as server:
            for number, bad in enumerate(frames()):
                server.open("s")
                peer = await greeted(server)
                if number % 2:
                    await server.submit("s", LONG)  # the answer goes on being written meanwhile
                await peer.send(bad.payload)
                if bad.code is None:
                    await peer.send(text_frame({"type": "ping", "t": 7}))
                    assert await peer.read_until(b'"pong"'), bad.name
                else:
                    await peer.read_to(1 << 30)
                    close = frames_in(peer.received)[-1]
                    assert close == {"type": "close", "code": bad.code}, bad.name
                peer.vanish(hard=False)
                await server.assert_recovered("s", {"long": LONG})
                points.strike()


@injects("malformed JSON, UTF-8", "every byte of a request's head replaced, six ways", points=500)
async def test_a_head_with_a_wrong_byte_is_served_or_refused_and_never_an_error(
    points: Points,
) -> None:
    statuses: Counter[int] = Counter()
    with nothing_logged():
        async with wired() as server:
            for position, byte in itertools.product(range(len(HEAD)), b"\0\r\n :\xff"):
                peer = await server.peer()
                await peer.send(HEAD[:position] + bytes([byte]) + HEAD[position + 1 :] + b"{}")
                if await peer.read_until(b"\r\n\r\n", max_pauses=1):
                    statuses[int(bytes(peer.received[9:12]))] += 1
                peer.vanish(hard=True)
                points.strike()
            for view in (await server.sessions.list(ANONYMOUS)).sessions:
                server.sessions.close(ANONYMOUS, view.session_id)
            await server.assert_empty()
    # 505 refuses the version that a wrong byte has made of "1.1".
    assert max(statuses.keys() - {505}) < 500
    assert statuses[400] > 200
