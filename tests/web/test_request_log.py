"""Every request has a name, and is counted by its route, whoever sends it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
from unittest.mock import patch

import pytest
from starlette.datastructures import Headers
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from session_server.core.errors import ServerBusy
from session_server.core.owner import ANONYMOUS
from session_server.sessions.manager import SessionManager
from session_server.web.keys import KeyRing
from session_server.web.request_log import MAX_TRACE_CHARS, origin_of
from tests.rig.scraped import samples_of
from tests.web.realtime_client import realtime
from tests.web.serving import Served, served, serving
from tests.web.test_responses_socket import lanes_of

KEYS = KeyRing.of("secret", "other")
HEAD = b"GET /v1/sessions HTTP/1.1\r\nhost: 127.0.0.1\r\n"


async def samples(this: Served, name: str, **headers: str) -> dict[tuple[str, ...], float]:
    """The samples of one metric as a scrape shows them, by the values of their labels."""
    scraped = (await this.http.get("/metrics", headers=headers)).text
    return {
        tuple(sample.labels.values()): sample.value
        for sample in samples_of(scraped, f"session_server_{name}")
    }


@served()
async def test_requests_are_counted_by_route_and_status(this: Served) -> None:
    session_id = await this.open()
    await this.http.get(f"/v1/sessions/{session_id}")
    await this.http.get("/v1/sessions/another")
    await this.http.get("/v1/whatever?secret=1")
    await this.http.delete("/health")
    counted = await samples(this, "http_requests_total")
    assert counted == {
        ("POST /v1/sessions", "201"): 1,
        ("GET /v1/sessions/{session_id}", "200"): 1,
        ("GET /v1/sessions/{session_id}", "404"): 1,
        ("other", "404"): 1,
        ("other", "405"): 1,
    }


@served()
async def test_refusals_are_counted_by_code_on_every_surface(this: Served) -> None:
    await this.http.get("/v1/sessions/another")
    await this.http.get("/nowhere")
    await this.http.post("/v1/sessions", content=b"{", headers={"content-type": "text/plain"})
    await this.http.get("/v1/sessions", params={"limit": "x"})
    await this.raw(HEAD + b"x: " + b"a" * 20_000 + b"\r\n\r\n")
    await this.raw(HEAD + b"host: twice\r\n\r\n")
    with pytest.raises(Exception, match="404"):
        async with this.bare_socket("another"):
            pass
    async with this.socket() as wire:
        await wire.send("turn.cancel", turn_id="nobody")
        await wire.until("error")
    counted = await samples(this, "refusals_total")
    assert counted == {
        ("session_not_found",): 2,
        ("not_found",): 1,
        ("unsupported_media_type",): 1,
        ("invalid_request",): 1,
        ("headers_too_large",): 1,
        ("bad_request",): 1,
        ("turn_not_found",): 1,
    }


@served(keys=KEYS)
async def test_a_socket_that_is_refused_counts_once_whoever_opens_it(this: Served) -> None:
    url = this.url.replace("http", "ws", 1)
    for path in ("/v1/sessions/new/ws", "/v1/realtime", "/v1/responses"):
        for origin in (None, this.url):
            offers = ("ticket.used",)
            with contextlib.suppress(InvalidStatus):
                async with connect(
                    url + path,
                    proxy=None,
                    origin=origin,  # type: ignore[arg-type]
                    subprotocols=offers,  # type: ignore[arg-type]
                ) as socket:
                    await socket.wait_closed()
    async with this.bare_socket() as wire:  # says nothing of a key
        await wire.send("ping")
        await wire.close_code()
    key = {"authorization": "Bearer secret"}
    assert await samples(this, "refusals_total", **key) == {("unauthorized",): 7}


@served()
async def test_a_frame_that_is_refused_counts_once_in_every_protocol(this: Served) -> None:
    async with this.socket() as wire:
        await wire.socket.send("{")
        await wire.send("turn.create", turn_id="t", input=7)
        await wire.send("turn.cancel", turn_id="nobody")
        for _ in range(3):
            await wire.until("error")
    assert await samples(this, "refusals_total") == {
        ("invalid_request",): 2,
        ("turn_not_found",): 1,
    }
    async with realtime(this.url) as talk:
        for kind in ("nonsense", "response.cancel"):
            await talk.send(kind)
            await talk.until("error")
        content = [{"type": "input_text", "text": "x"}]
        said = {"type": "message", "role": "user", "content": content}
        await talk.send("conversation.item.create", item=said)
        with patch.object(SessionManager, "submit", side_effect=ServerBusy("no room")):
            await talk.send("response.create")
            await talk.until("error")
    assert await samples(this, "refusals_total") == {
        ("invalid_request",): 4,
        ("turn_not_found",): 1,
        ("server_busy",): 1,
    }
    async with lanes_of(this) as lanes:
        for message in (
            {"type": "response.create", "model": "another"},
            {"type": "response.create", "background": True},
            {"type": "response.cancel"},
            {"type": "response.steer", "input": "x"},
        ):
            await lanes.socket.send(json.dumps(message))
            await lanes.socket.recv()
    assert await samples(this, "refusals_total") == {
        ("invalid_request",): 4,
        ("turn_not_found",): 1,
        ("server_busy",): 1,
        ("model_not_found",): 1,
        ("unsupported_operation",): 2,
        ("turn_not_active",): 1,
    }


@served()
async def test_a_realtime_session_that_expires_refuses_nothing(this: Served) -> None:
    async with realtime(this.url, "?session_id=ada") as talk:
        this.sessions.close(ANONYMOUS, "ada", reason="expired")
        told = await talk.until("error")
        assert told["error"]["code"] == "session_expired"
    assert await samples(this, "refusals_total") == {}


@served()
async def test_a_request_has_the_id_that_its_client_gives_it(this: Served) -> None:
    answer = await this.http.get("/health", headers={"x-request-id": "mine-1"})
    assert answer.headers["x-request-id"] == "mine-1"
    for odd in ("a b", "a" * 65, 'x"y', ""):
        answer = await this.http.get("/health", headers={"x-request-id": odd})
        assert re.fullmatch(r"req_[0-9a-f]{16}", answer.headers["x-request-id"])
    answer = await this.http.get("/nowhere", headers={"x-request-id": "a" * 64})
    assert answer.headers["x-request-id"] == "a" * 64


@served()
async def test_a_bug_of_ours_is_answered_with_the_id_of_its_request(this: Served) -> None:
    with patch.object(SessionManager, "list", side_effect=ValueError("canary")):
        answer = await this.http.get("/v1/sessions", headers={"x-request-id": "mine"})
    assert (answer.status_code, answer.headers["x-request-id"]) == (500, "mine")
    assert answer.json()["error"]["code"] == "internal_error"
    assert "canary" not in answer.text
    assert await samples(this, "http_requests_total") == {("GET /v1/sessions", "500"): 1}
    assert (await samples(this, "refusals_total")) == {("internal_error",): 1}


def test_a_line_names_route_code_and_request_and_no_path(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with serving(keys=KEYS) as this:
            await this.http.get("/v1/sessions/canary?key=canary", headers={"x-request-id": "r1"})
            await this.http.get("/v1/canary", headers={"x-request-id": "r2"})

    with caplog.at_level(logging.DEBUG, logger="session_server.web"):
        asyncio.run(run())
    lines = [line for line in caplog.messages if line.startswith("request ")]
    assert [re.sub(r"ms=[\d.]+", "ms=_", line) for line in lines] == [
        "request route=GET /v1/sessions/{session_id} status=401 code=unauthorized ms=_ request=r1",
        "request route=other status=404 code=not_found ms=_ request=r2",
    ]


@served()
async def test_readers_that_come_back_are_counted_by_what_they_find(this: Served) -> None:
    async with this.socket() as wire:
        session_id, epoch = wire.hello["session_id"], wire.hello["epoch"]
        await wire.turn("t1", input_ids=[7, 8])
        async with this.socket(session_id, f"?after=1&epoch={epoch}"):
            await wire.close_code()
    for query in (f"?after=99&epoch={epoch}", "?after=1&epoch=other"):
        async with this.socket(session_id, query):
            pass
    path = f"/v1/sessions/{session_id}/events"
    for after in (None, 1, 99):
        async with this.http.stream("GET", path, params={"after": after} if after else {}):
            pass
    for query in ("", "&last_event_id=event_1", "&last_event_id=event_99"):
        async with realtime(this.url, f"?session_id=ada{query}"):
            pass
    assert await samples(this, "resumes_total") == {
        ("resumed",): 3,
        ("offset_lost",): 3,
        ("epoch_changed",): 1,
    }
    assert (await samples(this, "socket_closes_total")).keys() == {("superseded",)}


@pytest.mark.parametrize("num_chars", [MAX_TRACE_CHARS + step for step in (-1, 0, 1)])
def test_a_trace_context_is_taken_up_to_its_bound(num_chars: int) -> None:
    headers = Headers({"traceparent": "x", "tracestate": "y" * num_chars})
    trace = origin_of(headers, now_s=0.0).trace
    assert trace is not None
    assert ("tracestate" in trace) == (num_chars <= MAX_TRACE_CHARS)
