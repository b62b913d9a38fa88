"""Readers come, go and stall: whose turns end with them, and what is left of them."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import Any

import pytest

from session_server.core.owner import ANONYMOUS
from session_server.core.session_events import Message, TurnCancelled, TurnEnd
from session_server.sessions import tokenizing
from session_server.sessions.prompt import Prompt, build_prompt
from session_server.sessions.views import OpenRequest
from session_server.text.rendering import Rendering
from session_server.web import http_guard, readers
from tests.web.serving import Served, served, turn
from tests.web.test_websocket import flood
from tests.web.wire_client import narrow_socket


@served()
async def test_a_bound_turn_ends_with_a_reader_that_goes_while_the_input_is_tokenized(
    this: Served,
) -> None:
    may_go_on = threading.Event()

    def end() -> TurnEnd | None:
        return this.sessions.turn(ANONYMOUS, session_id, "t").end

    def slow_build(*args: Any, **kwargs: Any) -> Rendering[Prompt]:
        may_go_on.wait(30)
        return build_prompt(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizing, "build_prompt", slow_build)
        async with this.socket() as wire:
            session_id = wire.hello["session_id"]
            fields = turn("word " * 1500, max_tokens=2000, on_disconnect="cancel")
            await wire.send("turn.create", turn_id="t", **fields)
            await this.until(lambda: this.sessions.get(ANONYMOUS, session_id).running_turn == "t")
            wire.socket.transport.abort()
        # Only a writer that has something to say notices; its reader still waits for the tokens.
        while this.sockets.num_attached:
            this.sessions.update(ANONYMOUS, session_id, metadata={"a": "b"})
            await asyncio.sleep(0.01)
        may_go_on.set()
    await this.until(lambda: end() is not None)
    assert isinstance(end(), TurnCancelled)


@served()
async def test_a_reader_of_events_keeps_a_bound_turn_alive_and_is_counted_by_its_kind(
    this: Served,
) -> None:
    session_id = await this.open()
    this.is_held = True
    async with this.http.stream("GET", f"/v1/sessions/{session_id}/events") as events:
        async with this.socket(session_id) as wire:
            await wire.send("turn.create", turn_id="t", **turn(on_disconnect="cancel"))
            await wire.until("turn.created")
        await this.until(lambda: not this.sockets.num_attached)
        scraped = this.services.metrics.exposition().decode()
        assert 'session_server_connections{kind="sse"} 1.0' in scraped
        assert 'session_server_connections{kind="websocket"} 0.0' in scraped
        assert session_id not in scraped
        this.is_held = False
        async for line in events.aiter_lines():
            if line in ("event: turn.completed", "event: turn.cancelled"):
                break
        assert line == "event: turn.completed"


@served(heartbeat_s=0.02)
async def test_a_silent_stream_goes_on_behind_its_heartbeats(this: Served) -> None:
    session_id, num_heartbeats = await this.open(), 0
    async with this.http.stream("GET", f"/v1/sessions/{session_id}/events") as events:
        async for line in events.aiter_lines():
            if line == ": ping":
                num_heartbeats += 1
                if num_heartbeats == 3:
                    this.sessions.close(ANONYMOUS, session_id)
            elif line.startswith("event:"):
                break
    assert line == "event: session.closed"
    assert num_heartbeats >= 3, "one more may be on its way"


@served(max_queued_turns=0)
async def test_readers_of_one_session_are_bounded_and_its_websocket_is_one_more(
    this: Served,
) -> None:
    """Each reader encodes every entry itself, while everybody else waits."""
    session_id, other = await this.open(), await this.open()
    path = f"/v1/sessions/{session_id}"
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(readers.MAX_SESSION_READERS):
            await stack.enter_async_context(this.http.stream("GET", f"{path}/events"))
        async with this.http.stream("GET", f"{path}/events") as last:
            assert last.status_code == 200, "one reader for the one turn that may run"
            for answer in (
                await this.http.get(f"{path}/events"),
                await this.http.post(f"{path}/turns", json=turn(turn_id="t")),
            ):
                assert (answer.status_code, answer.json()["error"]["code"]) == (503, "server_busy")
            assert (await this.http.get(f"{path}/turns/t")).status_code == 404
            answer = await this.http.post(f"/v1/sessions/{other}/turns", json=turn())
            assert answer.status_code == 200
            async with this.socket(session_id) as wire:
                assert (await wire.turn("t"))["type"] == "turn.completed"
        # The server notices a moment later that the client is gone.
        while (answer := await this.http.post(f"{path}/turns", json=turn())).status_code == 503:
            pass
        assert answer.status_code == 200


@pytest.mark.parametrize("path", ["events", "items"])
def test_a_stalled_http_reader_is_let_go_with_its_socket(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    monkeypatch.setattr(http_guard, "STALL_S", 0.2)

    @served()
    async def test(this: Served) -> None:
        begun = OpenRequest(messages=(Message("system", "x" * 900_000),))
        session_id = this.sessions.open(ANONYMOUS, begun).session_id
        await this.http.aclose()
        narrow = await narrow_socket(this.port)
        request = f"GET /v1/sessions/{session_id}/{path} HTTP/1.1\r\nHost: localhost\r\n\r\n"
        # Eight answers of 0.9 MB, or a stream of 16 MB: more than the kernel takes for the reader.
        num_requests = 8 if path == "items" else 1
        await asyncio.get_running_loop().sock_sendall(narrow, request.encode() * num_requests)
        if path == "events":
            await this.until(lambda: len(this.server.server_state.tasks) == 1)
            await flood(this, session_id)
        await this.until(lambda: not this.server.server_state.connections)
        await this.until(lambda: not this.server.server_state.tasks)
        narrow.close()

    test()
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []
