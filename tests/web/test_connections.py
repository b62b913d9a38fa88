"""A connection is what a client has opened: it counts once, before anything runs in it.

Every surface is tried where a tenant may have one connection, so that each one too many shows.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import pytest
from websockets.exceptions import InvalidStatus

from session_server.core.owner import ANONYMOUS
from session_server.web.readers import MAX_SESSION_READERS
from tests.web.realtime_client import realtime
from tests.web.serving import DEADLINE_S, Served, served, serving, turn
from tests.web.test_chat_completions import HELLO, ask, client_of, stream
from tests.web.test_quotas import ring
from tests.web.test_responses_socket import Lanes, lanes_of


def with_one_connection(test: Callable[[Served], Awaitable[None]]) -> Callable[[], None]:
    """Run a test over a server where a tenant may have one connection; it has none afterwards."""

    async def scenario() -> None:
        async with serving(keys=ring(max_connections=1)) as this:
            await test(this)
            await this.until(lambda: this.app.state.readers.num_connections == 0)
            assert this.app.state.readers._by_session == {}

    def run() -> None:
        asyncio.run(asyncio.wait_for(scenario(), DEADLINE_S))

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


def exposition(this: Served) -> str:
    return this.services.metrics.exposition().decode()


def held(this: Served) -> int:
    """The connections that the tenant is told to have."""
    num: int = this.app.state.readers.num_of(ANONYMOUS)
    return num


@contextlib.asynccontextmanager
async def data_of(this: Served, path: str, body: Any) -> AsyncIterator[AsyncIterator[str]]:
    """The `data` of the events that answer a request, as they come."""
    headers = {"accept": "text/event-stream"}
    async with this.http.stream("POST", path, json=body, headers=headers) as answer:
        assert answer.status_code == 200, await answer.aread()

        async def lines() -> AsyncIterator[str]:
            async for line in answer.aiter_lines():
                if line.startswith("data: "):
                    yield line.removeprefix("data: ")

        yield lines()


@with_one_connection
async def test_a_session_socket_runs_turns(this: Served) -> None:
    async with this.socket() as wire:
        assert (await wire.turn("t1"))["type"] == "turn.completed"
        assert held(this) == 1


@with_one_connection
async def test_a_realtime_socket_runs_responses_beside_its_conversation(this: Served) -> None:
    async with realtime(this.url) as wire:
        await wire.say("Hello")
        this.is_held = True
        for beside in ({}, {"conversation": "none"}):
            await wire.send("response.create", response={"max_output_tokens": 4, **beside})
        await this.until(lambda: this.sessions.stats().live_turns == 2)
        assert held(this) == 1
        this.is_held = False
        for _ in range(2):
            done = await wire.until("response.done", "error")
            assert done["response"]["status"] == "incomplete"


@with_one_connection
async def test_a_socket_of_responses_runs_several_side_by_side(this: Served) -> None:
    async with lanes_of(this) as lanes:
        this.is_held = True
        for name in ("a", "b"):
            await lanes.create(stream_id=name)
        await this.until(lambda: this.sessions.stats().live_turns == 2)
        assert held(this) == 1
        this.is_held = False
        ends = [await either(lanes) for _ in range(2)]
        assert [end["type"] for end in ends] == ["response.incomplete"] * 2
        assert {end["stream_id"] for end in ends} == {"a", "b"}


async def either(lanes: Lanes) -> dict[str, Any]:
    """The next end of a response, of whichever lane."""
    while (frame := await lanes.receive())["type"] not in ("response.incomplete", "error"):
        pass
    return frame


@with_one_connection
async def test_choices_of_one_call_are_one_connection(this: Served) -> None:
    async with client_of(this) as client:
        for name in (None, "mine"):
            options: Any = {} if name is None else {"extra_body": {"session_id": name}}
            for _ in range(2):
                completion = await ask(client, HELLO, n=3, **options)
                assert [choice.index for choice in completion.choices] == [0, 1, 2]
            indices = {each.choices[0].index for each in await stream(client, HELLO, n=3)}
            assert indices == {0, 1, 2}


@with_one_connection
async def test_prompts_of_one_call_are_one_connection(this: Served) -> None:
    async with client_of(this, is_strict=False) as client:
        asked: Any = {"model": "paper", "prompt": ["One", "Two"], "n": 2, "max_tokens": 4}
        assert len((await client.completions.create(**asked)).choices) == 4
        chunks = [chunk async for chunk in await client.completions.create(stream=True, **asked)]
        assert {chunk.choices[0].index for chunk in chunks} == {0, 1, 2, 3}


async def _native(this: Served) -> tuple[str, Any, Callable[[Any], bool]]:
    path = f"/v1/sessions/{await this.open()}/turns"
    return path, turn(), lambda event: event["type"] == "turn.completed"


async def _sglang(this: Served) -> tuple[str, Any, Callable[[Any], bool]]:
    body = {"text": "Hello", "stream": True, "sampling_params": {"max_new_tokens": 4}}
    return "/generate", body, lambda event: bool(event["meta_info"]["finish_reason"])


async def _responses(this: Served) -> tuple[str, Any, Callable[[Any], bool]]:
    body = {"model": "paper", "input": "Hello", "stream": True, "max_output_tokens": 4}
    return "/v1/responses", body, lambda event: event["type"] == "response.incomplete"


async def _chat(this: Served) -> tuple[str, Any, Callable[[Any], bool]]:
    body = {"model": "paper", "messages": HELLO, "stream": True, "max_tokens": 4, "n": 2}
    num_ended = 0

    def is_last(event: Any) -> bool:
        nonlocal num_ended
        num_ended += event["choices"][0]["finish_reason"] is not None
        return num_ended % 2 == 0 and event["choices"][0]["finish_reason"] is not None

    return "/v1/chat/completions", body, is_last


@pytest.mark.parametrize("surface", [_native, _sglang, _responses, _chat])
def test_the_next_request_may_follow_the_last_event_of_a_stream(surface: Any) -> None:
    """The stream of the first is not over when the second comes."""

    @with_one_connection
    async def test(this: Served) -> None:
        path, body, is_last = await surface(this)
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(3):
                this.is_held = True
                events = await stack.enter_async_context(data_of(this, path, body))
                assert held(this) == 1
                this.is_held = False
                async for data in events:
                    if is_last(json.loads(data)):
                        break
                else:
                    raise AssertionError("the stream has no last event")

    test()


@with_one_connection
async def test_a_response_that_is_read_can_be_canceled(this: Served) -> None:
    this.is_held = True
    body = {"model": "paper", "input": "Hello", "background": True, "stream": True}
    async with data_of(this, "/v1/responses", body) as events:
        response_id = json.loads(await anext(events))["response"]["id"]
        canceling = asyncio.create_task(this.http.post(f"/v1/responses/{response_id}/cancel"))
        await this.until(lambda: this.sessions.stats().live_turns == 1)
        this.is_held = False
        answer = await canceling
        assert (answer.status_code, answer.json()["status"]) == (200, "cancelled")


@with_one_connection
async def test_a_stream_of_events_and_a_turn_are_two_connections(this: Served) -> None:
    session_id = await this.open()
    path = f"/v1/sessions/{session_id}"
    async with this.http.stream("GET", f"{path}/events") as events:
        assert events.status_code == 200
        assert 'session_server_connections{kind="sse"} 1.0' in exposition(this)
        for refused in (
            await this.http.post(f"{path}/turns", json=turn()),
            await this.http.get(f"{path}/events"),
        ):
            assert refused.status_code == 429
        for connecting in (this.bare_socket(session_id), realtime(this.url), lanes_of(this)):
            with pytest.raises(InvalidStatus) as refusal:
                async with connecting:
                    pass
            assert refusal.value.response.status_code == 429
    assert len((await this.http.get("/v1/sessions")).json()["data"]) == 1
    assert this.sessions.get(ANONYMOUS, session_id).num_turns == 0


@with_one_connection
async def test_sockets_that_come_at_once_are_no_more_connections_than_may_be(
    this: Served,
) -> None:
    async def connect(how: Callable[[], Any]) -> int:
        try:
            await stack.enter_async_context(how())
        except InvalidStatus as refusal:
            return refusal.response.status_code
        return 101

    for how in (this.bare_socket, lambda: realtime(this.url), lambda: lanes_of(this)):
        async with contextlib.AsyncExitStack() as stack:
            statuses = await asyncio.gather(*(connect(how) for _ in range(6)))
            assert sorted(statuses) == [101] + [429] * 5
        await this.until(lambda: held(this) == 0)


@with_one_connection
async def test_whoever_comes_back_to_a_session_takes_the_place_of_the_connection_before(
    this: Served,
) -> None:
    """The server does not know yet that the connection before has lost its peer."""
    async with this.socket() as before:
        session_id = before.hello["session_id"]
        async with this.socket(session_id) as wire:
            assert held(this) == 1
            assert (await wire.turn("t"))["type"] == "turn.completed"
            assert await before.close_code() == 4409
            assert held(this) == 1
    await this.until(lambda: held(this) == 0)
    for query in ("?session_id=ada", "?conversation_id=conv_ada"):
        async with realtime(this.url, "?session_id=ada") as first, realtime(this.url, query):
            assert held(this) == 1
            assert await first.close_code() == 4409
            assert held(this) == 1
        await this.until(lambda: held(this) == 0)


@served(max_queued_turns=0)
async def test_a_turn_has_its_reader_before_others_can_take_the_place(this: Served) -> None:
    """It is not refused for its readers once it was submitted."""
    session_id = await this.open()
    path = f"/v1/sessions/{session_id}"
    this.is_held = True
    async with contextlib.AsyncExitStack() as stack:

        async def follow() -> httpx.Response:
            return await stack.enter_async_context(this.http.stream("GET", f"{path}/events"))

        body = {"model": "paper", "messages": HELLO, "max_tokens": 4, "session_id": session_id}
        asking = asyncio.create_task(this.http.post("/v1/chat/completions", json=body))
        readers = this.app.state.readers
        await this.until(lambda: readers.num_readers(ANONYMOUS, session_id) == 1)
        followed = [await follow() for _ in range(MAX_SESSION_READERS + 1)]
        assert [each.status_code for each in followed] == [200] * MAX_SESSION_READERS + [503]
        this.is_held = False
        assert (await asking).status_code == 200


@served(max_queued_turns=0)
async def test_a_response_without_room_for_its_reader_leaves_its_session_as_it_was(
    this: Served,
) -> None:
    body = {"model": "paper", "input": "Hello", "max_output_tokens": 4}
    first = (await this.http.post("/v1/responses", json=body)).json()
    path, session_id = f"/v1/sessions/{first['session_id']}/events", first["session_id"]
    following = body | {"previous_response_id": first["id"]}
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(MAX_SESSION_READERS + 1):
            await stack.enter_async_context(this.http.stream("GET", path))
        refused = await this.http.post("/v1/responses", json=following)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "server_busy")
        assert this.sessions.get(ANONYMOUS, session_id).num_turns == 1
    readers = this.app.state.readers
    await this.until(lambda: not readers.num_readers(ANONYMOUS, session_id))
    assert session_id in this.app.state.responses._resting.of(ANONYMOUS)
    second = (await this.http.post("/v1/responses", json=following)).json()
    assert (second["status"], second["session_id"]) == ("incomplete", session_id)
