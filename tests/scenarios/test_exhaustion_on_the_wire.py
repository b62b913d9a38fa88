"""E, seen from outside: more than there is of anything, and an engine that is gone."""

from __future__ import annotations

import asyncio
import signal
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from msgspec import structs
from websockets.exceptions import ConnectionClosed

from session_server import serving, wiring
from session_server.config import HttpOptions, Settings
from session_server.core.commands import SubmitTurn
from session_server.core.engine_client import EventListener
from session_server.core.events import EngineReady
from session_server.core.session_events import TurnCancelled
from session_server.sessions.views import OpenRequest
from session_server.web import http_guard
from session_server.web import server as web_server
from tests.mutants.guards import (
    DEAD_ENGINE_IS_UP,
    DISCONNECT_STOPS_NOBODY,
    EXIT_STATUS_IS_ZERO,
    FRAMES_ARE_TRUSTED,
    HEADERS_WITHOUT_END,
    NOBODY_IS_LET_GO,
    OWNERS_OPEN_WITHOUT_END,
    SENDS_THE_WHOLE_HISTORY,
    VIOLATIONS_DO_NOT_SHOW,
)
from tests.scenarios.registry import scenario
from tests.scenarios.test_races_on_the_wire import OWNER, SOON_S, ended, posted
from tests.sessions.paper_engine import PaperEngine
from tests.sessions.test_session_engine import sample
from tests.web.serving import WORD, Served, Wire, served, turn
from tests.web.test_websocket import flood
from tests.web.wire_client import narrow_socket


async def answer_to(wire: Wire, frame: str) -> dict[str, Any]:
    """The error that a frame is answered with, on a connection that lives on."""
    try:
        await wire.socket.send(frame)
        error = await wire.until("error")
        await wire.send("ping", t=1)
        await wire.until("pong")
    except ConnectionClosed:
        pytest.fail("the connection did not survive")
    body: dict[str, Any] = error["error"]
    return body


@scenario("E1", NOBODY_IS_LET_GO)
@served(send_timeout_s=0.2)
async def test_e1_a_reader_that_stalls_is_let_go_and_its_session_stays(this: Served) -> None:
    session_id = await this.open()
    narrow = await narrow_socket(this.port)
    async with this.bare_socket(session_id, sock=narrow, max_queue=1) as wire:
        await this.until(lambda: this.sockets.num_attached == 1)
        await flood(this, session_id)
        async with asyncio.timeout(5.0):
            await this.until(lambda: this.sockets.num_attached == 0)
        wire.socket.transport.abort()
    async with this.socket(session_id) as wire:
        assert (await wire.turn("t1"))["type"] == "turn.completed"


@scenario("E2", DISCONNECT_STOPS_NOBODY)
@served()
async def test_e2_a_client_that_hangs_up_does_not_leave_its_turn_running(this: Served) -> None:
    session_id = await this.open()
    body = turn(input_ids=[7], turn_id="t", max_tokens=900)
    async with posted(this, f"/v1/sessions/{session_id}/turns", body):
        await this.until(lambda: this.sessions.get(OWNER, session_id).seq > 3)
        this.is_held = True
    async with asyncio.timeout(SOON_S):
        await this.until(lambda: this.sessions.get(OWNER, session_id).seq > 3)
    this.is_held = False
    end = await ended(this, session_id, "t")
    assert isinstance(end, TurnCancelled)
    assert len(end.outcome.token_ids) < 900


@scenario("E3", HEADERS_WITHOUT_END)
@served()
async def test_e3_a_head_of_many_headers_is_refused(this: Served) -> None:
    head = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    for num_more, status in (
        (http_guard.MAX_HEADERS - 2, b"200"),
        (http_guard.MAX_HEADERS - 1, b"431"),
    ):
        answer = await this.raw(head + b"X: a\r\n" * num_more + b"\r\n")
        assert answer.startswith(b"HTTP/1.1 " + status)


@scenario("E3", FRAMES_ARE_TRUSTED)
@served()
async def test_e3_absurd_frames_are_answered_and_the_connection_lives(this: Served) -> None:
    absurd = {
        "deep": '{"type":"turn.create","text":"a","x":' + "[" * 50_000 + "]" * 50_000 + "}",
        "open": "[" * 100_000,
        "many": '{"type":"turn.create","text":"a","sampling":{"max_tokens":1000000000}}',
        "huge": '{"type":"ack","seq":' + "9" * 4_000 + "}",
        "none": '{"type":"turn.create","text":"a","sampling":{"temperature":NaN}}',
        "half": '{"type":"turn.create","text":"\\ud800"}',
    }
    async with this.socket() as wire:
        for frame in absurd.values():
            assert (await answer_to(wire, frame))["code"] == "invalid_request"
        assert (await wire.turn("t", input_ids=[7]))["type"] == "turn.completed"


@scenario("E4", OWNERS_OPEN_WITHOUT_END)
@served()
async def test_e4_a_client_that_only_opens_is_refused(this: Served) -> None:
    for _ in range(1024):
        this.sessions.open(OWNER, OpenRequest())
    refused = await this.http.post("/v1/sessions", json={})
    assert refused.status_code == 429, refused.text
    assert refused.json()["error"]["code"] == "quota_exceeded"
    assert refused.headers["retry-after"]


@scenario("E5", SENDS_THE_WHOLE_HISTORY)
@served()
async def test_e5_a_long_conversation_costs_per_turn_what_a_short_one_does(this: Served) -> None:
    async with this.socket() as wire:
        total = 0
        for index in range(30):
            end = await wire.turn(f"t{index}", input_ids=[7, 8])
            assert end["usage"]["cached_tokens"] in (total, max(0, total - 1))
            total = end["usage"]["total_tokens"]
    sent = [len(c.tokens) for c in this.engine.seen if isinstance(c, SubmitTurn)]
    assert total == 30 * 6
    assert max(sent) <= 3


@scenario("E6", DEAD_ENGINE_IS_UP)
@served()
async def test_e6_without_an_engine_the_server_is_not_ready_and_nobody_waits(this: Served) -> None:
    this.is_held = True
    async with this.socket() as wire:
        await wire.send("turn.create", turn_id="t", **turn(input_ids=[7]))
        await wire.until("turn.created")
        assert (await this.http.get("/ready")).status_code == 200
        this.engine.die()
        failed = await wire.until("turn.failed")
        assert (failed["error"]["code"], failed["retryable"]) == ("engine_restarting", True)
        ready = await this.http.get("/ready")
        assert (ready.status_code, ready.json()["status"]) == (503, "engine_unavailable")
        await wire.send("turn.create", turn_id="u", **turn(input_ids=[7]))
        await wire.until("turn.created")
        this.engine.come_up()
        this.is_held = False
        assert (await wire.until("turn.completed"))["turn_id"] == "u"
        assert (await this.http.get("/ready")).status_code == 200


class GivenUp(PaperEngine):
    """An engine that comes up, and is given up while the server serves."""

    async def start(self, listener: EventListener) -> EngineReady:
        ready = await super().start(listener)
        self.failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(self.failed.set_result, "it dies at every start")
        return ready


@scenario("E7", EXIT_STATUS_IS_ZERO)
def test_e7_a_server_whose_engine_is_given_up_leaves_with_status_one() -> None:
    """In one process; `tests/wire/test_faults.py` kills the engine of a real server."""
    raised = list[int]()

    async def serve(*_: object, **__: object) -> None:
        while not raised:
            await asyncio.sleep(0)

    engine = GivenUp(vocab_size=1536, eos_ids=(4,), next_token=lambda _: WORD)
    signals = SimpleNamespace(raise_signal=raised.append, SIGTERM=signal.SIGTERM)
    with (
        patch.object(wiring, "make_engine", lambda _: engine),
        patch.object(web_server, "serve", serve),
        patch.object(serving, "signal", signals),
    ):
        settings = Settings(http=HttpOptions(port=0))
        status = asyncio.run(asyncio.wait_for(serving._serve(settings, wiring.Entrance()), SOON_S))
    assert raised == [signal.SIGTERM]
    assert status == 1


@scenario("E8", VIOLATIONS_DO_NOT_SHOW)
@served()
async def test_e8_a_violation_shows_in_the_health_and_the_server_serves_on(this: Served) -> None:
    assert (await this.http.get("/health")).status_code == 200
    this.engine.events.append(structs.replace(sample(), check_violations=1))
    await this.until(lambda: not this.engine.events)
    assert (await this.http.get("/health")).status_code == 503
    async with this.socket() as wire:
        assert (await wire.turn("t", input_ids=[7]))["type"] == "turn.completed"
