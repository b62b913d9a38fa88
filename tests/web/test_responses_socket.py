"""The WebSocket mode of OpenAI's Responses, as the `openai` package speaks it and otherwise."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import openai
import pytest
from openai.types.responses import ResponsesServerEvent
from pydantic import TypeAdapter
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from session_server.core.owner import ANONYMOUS
from session_server.protocol.responses_socket import MAX_STREAMS
from session_server.protocol.session_protocol import CloseCode
from session_server.web.keys import KeyRing
from session_server.web.responses_socket import MAX_IN_FLIGHT, MAX_WAITING
from tests.web.published_frames import PublishedFrames
from tests.web.serving import Served, served
from tests.web.test_responses import (
    JSON_OBJECT,
    client_of,
    held_checks,
    num_sessions,
    turns_of,
)

EVENT: TypeAdapter[Any] = TypeAdapter(ResponsesServerEvent)
PUBLISHED = PublishedFrames("responses")
ENDS = {"response.completed", "response.incomplete", "response.failed", "error"}


@dataclass
class Lanes:
    """The client's end of a connection; every frame is exactly what the SDK's types say."""

    socket: ClientConnection

    async def create(self, said: Any = "Hello", **fields: Any) -> None:
        fields = {"model": "paper", "max_output_tokens": 4, "store": False} | fields
        await self.send("response.create", input=said, **fields)

    async def send(self, kind: str, **fields: Any) -> None:
        await self.socket.send(json.dumps({"type": kind, **fields}))

    async def receive(self) -> dict[str, Any]:
        frame: dict[str, Any] = json.loads(await self.socket.recv())
        EVENT.validate_python(frame, strict=True)
        PUBLISHED.check(frame)
        return frame

    async def until(self, *kinds: str, stream_id: str | None = None) -> dict[str, Any]:
        while True:
            frame = await self.receive()
            if frame["type"] in kinds and frame.get("stream_id") == stream_id:
                return frame

    async def ask(self, said: Any = "Hello", **fields: Any) -> dict[str, Any]:
        """The response, or the error."""
        await self.create(said, **fields)
        end = await self.until(*ENDS, stream_id=fields.get("stream_id"))
        result: dict[str, Any] = end if end["type"] == "error" else end["response"]
        return result


@contextlib.asynccontextmanager
async def lanes_of(this: Served, **options: Any) -> AsyncIterator[Lanes]:
    url = this.url.replace("http", "ws", 1) + "/v1/responses"
    options = {"compression": None, "proxy": None, "close_timeout": 0.2} | options
    async with connect(url, **options) as socket:
        yield Lanes(socket)


def code_of(error: dict[str, Any]) -> str:
    code: str = error["error"]["code"]
    return code


def cached(response: dict[str, Any]) -> int:
    count: int = response["usage"]["input_tokens_details"]["cached_tokens"]
    return count


def total(response: dict[str, Any]) -> int:
    count: int = response["usage"]["total_tokens"]
    return count


@pytest.mark.filterwarnings("ignore:connect.. must be used")  # by the SDK
@served()
async def test_the_sdk_holds_a_conversation_over_its_socket(this: Served) -> None:
    def talk() -> list[list[Any]]:
        http = openai.DefaultHttpxClient(trust_env=False)
        talked = []
        with (
            openai.OpenAI(base_url=f"{this.url}/v1", api_key="none", http_client=http) as client,
            client.responses.connect() as connection,
        ):
            previous = None
            for said in ("Hello", "And?", "And then?"):
                connection.response.create(
                    model="paper",
                    input=said,
                    store=False,
                    max_output_tokens=4,
                    previous_response_id=previous,
                )
                events = []
                for event in connection:
                    events.append(event)
                    if event.type in ENDS:
                        break
                previous = events[-1].response.id
                talked.append(events)
        return talked

    talked = await asyncio.to_thread(talk)
    before = None
    for events in talked:
        assert [event.sequence_number for event in events] == list(range(len(events)))
        usage = events[-1].response.usage
        if before is not None:
            assert usage.input_tokens_details.cached_tokens in (before, before - 1)
        before = usage.total_tokens
    await this.until(lambda: num_sessions(this) == 0)
    assert len(turns_of(this).store.records) == 0


@served()
async def test_the_asynchronous_sdk_reads_what_others_have_stored(this: Served) -> None:
    async with client_of(this) as client, client.responses.connect() as connection:
        await connection.response.create(model="paper", input="Hello", max_output_tokens=4)
        events = []
        async for event in connection:
            events.append(event)
            if event.type in ENDS:
                break
        stored = await client.responses.retrieve(events[-1].response.id)
        assert stored.to_dict() == events[-1].response.to_dict()
        after = await client.responses.create(
            model="paper", input="Go on", max_output_tokens=4, previous_response_id=stored.id
        )
        assert after.usage is not None
        assert after.usage.input_tokens_details.cached_tokens > 0


@served()
async def test_lanes_run_side_by_side_and_each_in_its_order(this: Served) -> None:
    async with lanes_of(this) as lanes:
        this.is_held = True
        for said in ("one", "two"):
            for name in ("a", "b", None):
                await lanes.create(said, **({} if name is None else {"stream_id": name}))
        await this.until(lambda: this.sessions.stats().live_turns == 3)
        this.is_held = False
        ends: dict[str | None, list[int]] = {}
        opened: dict[str | None, int] = {}
        while sum(map(len, ends.values())) < 6:
            frame = await lanes.receive()
            name = frame.get("stream_id")
            if frame["type"] == "response.created":
                opened[name] = opened.get(name, 0) + 1
                assert opened[name] == len(ends.get(name, [])) + 1, "one after the other"
            if frame["type"] in ENDS:
                ends.setdefault(name, []).append(frame["sequence_number"])
        assert {name: len(each) for name, each in ends.items()} == {"a": 2, "b": 2, None: 2}


@served()
async def test_more_than_may_run_wait_and_more_than_may_wait_are_refused(this: Served) -> None:
    async with lanes_of(this) as lanes:
        this.is_held = True
        for number in range(MAX_IN_FLIGHT + 2):
            await lanes.create(stream_id=f"lane{number}")
        await this.until(lambda: this.sessions.stats().live_turns == MAX_IN_FLIGHT)
        for _ in range(MAX_WAITING - 1):
            await lanes.create(stream_id="lane0")
        refused = await lanes.until("error", stream_id="lane0")
        assert (refused["status"], code_of(refused)) == (429, "quota_exceeded")
        this.is_held = False
        ended = 0
        while ended < MAX_IN_FLIGHT + 2 + MAX_WAITING - 2:
            ended += (await lanes.receive())["type"] in ENDS
        assert this.sessions.edits.parts.quotas.turn_bytes.total == 0


@served()
async def test_what_waits_for_a_lane_or_a_place_is_counted(this: Served) -> None:
    this.is_held = True
    quotas, said = this.sessions._quotas, "word " * 20_000
    async with lanes_of(this) as lanes:
        for lane in range(MAX_IN_FLIGHT):
            await lanes.create(stream_id=f"lane{lane}")
        await this.until(lambda: this.sessions.stats().live_turns == MAX_IN_FLIGHT)
        before = quotas.turn_bytes.total
        for number, lane in enumerate(("other", "another", "lane0"), 1):
            await lanes.create(said, stream_id=lane)
            least = before + number * len(said)
            await this.until(lambda least=least: quotas.turn_bytes.total >= least)  # type: ignore[misc]
    this.is_held = False
    await this.until(lambda: quotas.turn_bytes.total == 0)


@served()
async def test_names_of_lanes_are_checked_and_counted(this: Served) -> None:
    async with lanes_of(this) as lanes:
        for wrong in ("", "a b", "x" * 257, 7, "é", "a\n"):
            await lanes.create(stream_id=wrong)
            error = await lanes.until("error")
            assert (error["status"], code_of(error)) == (400, "invalid_stream_id")
        for number in range(MAX_STREAMS):
            end = await lanes.ask(stream_id=f"lane.{number}", generate=False)
            assert end["status"] == "completed"
        error = await lanes.ask(stream_id="one_more")
        assert code_of(error) == "websocket_stream_limit_reached"
        assert error["stream_id"] == "one_more"
        assert (await lanes.ask())["status"] == "incomplete"
        assert (await lanes.ask(stream_id="lane.0"))["status"] == "incomplete"


@served()
async def test_another_lane_forks_and_both_go_on(this: Served) -> None:
    async with lanes_of(this) as lanes:
        first = await lanes.ask(stream_id="main")
        fork = await lanes.ask("Or?", stream_id="other", previous_response_id=first["id"])
        # Another lane has no part in the newest of this one: it goes on where it was.
        main = await lanes.ask("And?", stream_id="main", previous_response_id=first["id"])
        assert main["session_id"] != fork["session_id"]
        ended = {}
        for name, before in (("main", main), ("other", fork)):
            ended[name] = await lanes.ask(
                "Go on", stream_id=name, previous_response_id=before["id"]
            )
            assert ended[name]["session_id"] == before["session_id"]
            assert cached(ended[name]) in (total(before), total(before) - 1)
        # Each lane has its latest alone.
        error = await lanes.ask("Again", previous_response_id=first["id"])
        assert code_of(error) == "previous_response_not_found"
    await this.until(lambda: num_sessions(this) == 0)


@served()
async def test_a_failed_continuation_forgets_in_its_own_lane_alone(this: Served) -> None:
    unknown = [{"type": "function_call_output", "call_id": "call_x", "output": "1"}]
    wrongs: list[dict[str, Any]] = [{"said": unknown}, {"truncation": "auto"}, {"temperature": -1}]
    async with lanes_of(this) as lanes:
        for wrong in wrongs:
            first = await lanes.ask(stream_id="main")
            previous = first["id"]
            error = await lanes.ask(**wrong, stream_id="other", previous_response_id=previous)
            assert error["status"] == 400
            kept = await lanes.ask("Go on", stream_id="main", previous_response_id=previous)
            assert kept["status"] == "incomplete"
            error = await lanes.ask(**wrong, stream_id="main", previous_response_id=kept["id"])
            assert error["status"] == 400
            assert error["stream_id"] == "main"
            gone = await lanes.ask("Go on", stream_id="main", previous_response_id=kept["id"])
            assert code_of(gone) == "previous_response_not_found"
            assert gone["error"]["param"] == "previous_response_id"


@served()
async def test_what_is_not_stored_is_unknown_to_other_connections(this: Served) -> None:
    async with lanes_of(this) as lanes, lanes_of(this) as others, client_of(this) as client:
        hidden, stored = await lanes.ask(), await lanes.ask(store=True, stream_id="s")
        error = await others.ask("Go on", previous_response_id=hidden["id"])
        assert code_of(error) == "previous_response_not_found"
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(hidden["id"])
        assert (await others.ask("Go on", previous_response_id=stored["id"])).get("usage")
        assert (await lanes.ask("Go on", previous_response_id=hidden["id"])).get("usage")


@served()
async def test_input_is_computed_ahead_and_gone_on_from(this: Served) -> None:
    async with lanes_of(this, additional_headers={"OpenAI-Beta": "responses_websockets"}) as lanes:
        options = {"client_metadata": {"a": "b"}, "stream": True, "instructions": "Be brief."}
        await lanes.create("Hello " * 20, generate=False, **options)
        kinds = [(await lanes.receive())["type"] for _ in range(3)]
        assert kinds == ["response.created", "response.in_progress", "response.completed"]
        warm = await lanes.ask("Hello " * 20, generate=False, **options)
        asked = await lanes.ask("And?", previous_response_id=warm["id"], **options)
        assert asked["session_id"] == warm["session_id"]
        assert cached(asked) > 20


@served()
async def test_a_response_is_canceled_and_keeps_what_it_said(this: Served) -> None:
    async with lanes_of(this) as lanes:
        for by_id in (True, False):
            await lanes.create(max_output_tokens=1500, stream_id="main")
            await lanes.until("response.output_text.delta", stream_id="main")
            (run,) = (task for task in asyncio.all_tasks() if task.get_name() == "respond")
            assert not run.done()
            by_owner = turns_of(this).store.records._by_owner[ANONYMOUS]
            response_id = next(reversed(by_owner))
            fields = {"response_id": response_id} if by_id else {"stream_id": "main"}
            await lanes.send("response.cancel", **fields)
            end = await lanes.until("response.incomplete", stream_id="main")
            assert end["response"]["status"] == "cancelled"
            assert end["response"]["incomplete_details"] is None
            assert end["response"]["output"][0]["status"] == "incomplete"
            after = await lanes.ask("Go on", stream_id="main", previous_response_id=response_id)
            assert after["session_id"] == end["response"]["session_id"]
        await lanes.send("response.cancel", response_id=response_id)
        assert code_of(await lanes.until("error")) == "turn_not_active"


@served()
async def test_what_was_before_a_canceled_response_can_be_gone_on_from(this: Served) -> None:
    async with lanes_of(this) as lanes:
        first = await lanes.ask()
        this.is_held = True
        await lanes.create("Go on", previous_response_id=first["id"], max_output_tokens=100)
        await lanes.until("response.in_progress")
        await lanes.send("response.cancel")
        this.is_held = False
        end = await lanes.until("response.incomplete")
        assert end["response"]["status"] == "cancelled"
        canceled = end["response"]["id"]
        again = await lanes.ask("Again", previous_response_id=first["id"])
        assert again["status"] == "incomplete"
        for gone in (first["id"], canceled):
            error = await lanes.ask("Again", previous_response_id=gone)
            assert code_of(error) == "previous_response_not_found"


@served()
async def test_a_response_that_fails_takes_what_it_went_on_from(this: Served) -> None:
    async with lanes_of(this) as lanes:
        first = await lanes.ask()
        await lanes.create("Go on", previous_response_id=first["id"], max_output_tokens=1500)
        await lanes.until("response.output_text.delta")
        this.engine.die(will_restart=True)
        end = await lanes.until("response.failed")
        assert end["response"]["error"]["code"] == "server_error"
        gone = await lanes.ask("Again", previous_response_id=first["id"])
        assert code_of(gone) == "previous_response_not_found"


@served()
async def test_what_a_socket_does_not_take_is_refused_and_it_stays_open(this: Served) -> None:
    async with lanes_of(this) as lanes:
        steered = {"input": "Stop", "previous_response_id": "resp_x", "stream_id": "main"}
        await lanes.send("response.steer", **steered)
        failed = await lanes.until("response.steer.failed", stream_id="main")
        assert failed["error"]["code"] == "steering_not_supported"
        assert code_of(await lanes.ask(background=True)) == "unsupported_operation"
        assert code_of(await lanes.ask(model="other")) == "model_not_found"
        for text in ("", "{", "[]", '{"type":"response.unknown"}', '{"type":7}', "\ud7ff"):
            await lanes.socket.send(text)
            assert code_of(await lanes.until("error")) == "invalid_request"
        assert (await lanes.ask())["status"] == "incomplete"
        await lanes.socket.send(b"bytes")
        with pytest.raises(ConnectionClosed):
            await lanes.receive()
        assert lanes.socket.close_code == CloseCode.UNSUPPORTED_DATA


@served()
async def test_a_socket_that_closes_cancels_what_runs_and_what_waits(this: Served) -> None:
    async with lanes_of(this) as lanes:
        stored = await lanes.ask(store=True)
        previous = {"previous_response_id": stored["id"], "max_output_tokens": 1500}
        await lanes.create("Go on", **previous, store=True)
        for _ in range(3):
            await lanes.create("Again", max_output_tokens=1500)
        await lanes.create("Beside", max_output_tokens=1500, stream_id="other")
        await lanes.until("response.output_text.delta")
    await this.until(lambda: this.sessions.stats().live_turns == 0)
    await this.until(lambda: num_sessions(this) == 1)
    async with lanes_of(this) as lanes:
        after = await lanes.ask("Go on", previous_response_id=stored["id"])
        assert cached(after) in (total(stored), total(stored) - 1)


@served()
async def test_a_socket_that_closes_leaves_nothing_that_is_not_stored(this: Served) -> None:
    records = turns_of(this).store.records
    with held_checks() as is_over:
        async with lanes_of(this) as lanes:
            first = await lanes.ask()
            previous = {"previous_response_id": first["id"]}
            await lanes.create("Go on", **previous, max_output_tokens=1500)
            await lanes.create("Beside", stream_id="checked", text=JSON_OBJECT)
            await lanes.until("response.output_text.delta")
        is_over.set()
        await this.until(lambda: this.sessions.stats().live_turns == 0)
        await this.until(lambda: num_sessions(this) == 0)
    assert not len(records)
    async with lanes_of(this) as lanes:
        await lanes.create(max_output_tokens=1500)
        await lanes.until("response.output_text.delta")
        this.engine.die(will_restart=True)
        await lanes.until("response.failed")
        await this.until(lambda: not len(records))
    await this.until(lambda: num_sessions(this) == 0)


@served(responses_ws=False)
async def test_the_mode_can_be_switched_off(this: Served) -> None:
    with pytest.raises(InvalidStatus) as refused:
        async with lanes_of(this):
            pass
    assert refused.value.response.status_code == 426


@served()
async def test_a_drain_ends_the_socket_and_invites_back(this: Served) -> None:
    async with lanes_of(this) as lanes:
        await lanes.create(max_output_tokens=4000)
        await lanes.until("response.output_text.delta")
        await this.sessions.drain(0.0)
        end = await lanes.until("response.incomplete")
        assert end["response"]["status"] == "cancelled"
        refused = await lanes.ask()
        assert (refused["status"], code_of(refused)) == (503, "server_draining")
        assert refused["error"]["headers"] == {"retry-after": "1"}
        await this.sockets.end_all(CloseCode.RESTART)
        with pytest.raises(ConnectionClosed):
            await lanes.receive()
        assert lanes.socket.close_code == CloseCode.RESTART


@served(keys=KeyRing.of("secret"))
async def test_a_socket_needs_the_key(this: Served) -> None:
    for options in ({}, {"additional_headers": {"authorization": "Bearer wrong"}}):
        with pytest.raises(InvalidStatus) as refused:
            async with lanes_of(this, **options):
                pass
        assert refused.value.response.status_code == 401
    async with lanes_of(this, additional_headers={"authorization": "Bearer secret"}) as lanes:
        assert (await lanes.ask())["status"] == "incomplete"
    async with lanes_of(this, subprotocols=["responses", "bearer.secret"]) as lanes:
        assert lanes.socket.subprotocol == "responses"
        assert (await lanes.ask())["status"] == "incomplete"
