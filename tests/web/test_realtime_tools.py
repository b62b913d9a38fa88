"""Calls of functions in OpenAI's Realtime, as a model says them."""

from __future__ import annotations

import json
from typing import Any

from openai import AsyncOpenAI

from tests.sessions.paper_engine import PaperEngine
from tests.web.realtime_client import realtime, usage
from tests.web.serving import Served
from tests.web.test_tools import CALL, THOUGHT, held_to, say, talks

TOOL = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
LONG: dict[str, Any] = {"max_output_tokens": 400}


@talks("thinking_tools")
async def test_a_call_is_an_item_and_its_output_is_answered(
    this: Served[PaperEngine], client: AsyncOpenAI
) -> None:
    async with realtime(this.url) as wire:
        await wire.send("session.update", session={"tools": [TOOL]})
        assert (await wire.until("session.updated"))["session"]["tools"] == [TOOL]
        await wire.say("What is the weather in Oslo?")
        say(this, THOUGHT + CALL)
        response = await wire.answer(**LONG)
        (call,) = response["output"]
        assert (call["type"], call["name"], call["status"]) == (
            "function_call",
            "weather",
            "completed",
        )
        assert json.loads(call["arguments"]) == {"city": "Oslo"}
        pieces = [event["delta"] for event in wire.events if "delta" in event]
        assert "".join(pieces) == call["arguments"]
        done = [e for e in wire.events if e["type"] == "response.function_call_arguments.done"]
        assert [(each["name"], each["call_id"]) for each in done] == [("weather", call["call_id"])]
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": "Rain."}
        await wire.send("conversation.item.create", item=output)
        assert (await wire.until("conversation.item.done"))["item"]["output"] == "Rain."
        say(this, "It rains.")
        second = await wire.answer(**LONG)
        assert second["status"] == "completed"
        assert second["output"][0]["content"][0]["text"] == "It rains."
        total = usage(response)[2]
        assert usage(second)[1] in (total, total - 1)


@talks("hermes")
async def test_text_and_calls_of_one_answer_are_items_in_order(
    this: Served[PaperEngine], client: AsyncOpenAI
) -> None:
    async with realtime(this.url) as wire:
        await wire.say("What is the weather?")
        say(this, "I look.\n" + CALL + CALL)
        response = await wire.answer(tools=[TOOL], **LONG)
        kinds = [item["type"] for item in response["output"]]
        assert kinds == ["message", "function_call", "function_call"]
        calls = response["output"][1:]
        for call in calls:
            output = {"type": "function_call_output", "call_id": call["call_id"], "output": "Rain."}
            await wire.send("conversation.item.create", item=output)
        say(this, "It rains.")
        second = await wire.answer(tools=[TOOL], **LONG)
        total = usage(response)[2]
        assert usage(second)[1] in (total, total - 1)
        items = await this.http.get(f"/v1/sessions/{wire.events[0]['session']['id']}/items")
        roles = [item["role"] for item in items.json()["data"]]
        assert roles == ["user", "assistant", "tool", "tool", "assistant"]
    session_id = await this.open()
    async with this.socket(session_id) as native:
        weather = {"type": "function", "function": {k: TOOL[k] for k in ("name", "parameters")}}
        say(this, CALL)
        question = [{"role": "user", "content": "What is the weather?"}]
        end = await native.turn("t1", input=question, tools=[weather], max_tokens=400)
        (native_call,) = end["item"]["tool_calls"]
    async with realtime(this.url, f"?session_id={session_id}") as wire:
        output = {"type": "function_call_output", "output": "Rain."}
        await wire.send("conversation.item.create", item={**output, "call_id": native_call["id"]})
        say(this, "It rains.")
        third = await wire.answer(tools=[TOOL], **LONG)
        total = end["usage"]["total_tokens"]
        assert usage(third)[1] in (total, total - 1)


@talks("hermes")
async def test_without_calls_a_call_is_text(this: Served[PaperEngine], client: AsyncOpenAI) -> None:
    async with realtime(this.url) as wire:
        await wire.say("What is the weather?")
        say(this, CALL)
        response = await wire.answer(tools=[TOOL], tool_choice="none", **LONG)
        assert [item["type"] for item in response["output"]] == ["message"]


@talks("hermes")
async def test_an_answer_that_must_call_is_held_to_calls(
    this: Served[PaperEngine], client: AsyncOpenAI
) -> None:
    named = {"type": "function", "name": "weather"}
    async with realtime(this.url) as wire:
        await wire.send("session.update", session={"tools": [TOOL], "tool_choice": "required"})
        assert (await wire.until("session.updated"))["session"]["tool_choice"] == "required"
        await wire.say("What is the weather?")
        for options in ({}, {"tool_choice": named}):
            say(this, CALL)
            response = await wire.answer(**options, **LONG)
            assert [item["type"] for item in response["output"]] == ["function_call"]
            grammar = held_to(this)
            assert grammar is not None
            assert '{"const": "weather"}' in grammar.calls
        await wire.send("response.create", response={"tool_choice": {**named, "name": "time"}})
        error = (await wire.until("error"))["error"]
        assert error["param"] == "tool_choice"
        say(this, CALL + CALL)
        response = await wire.answer(tool_choice="auto", parallel_tool_calls=False, **LONG)
        assert [item["type"] for item in response["output"]] == ["function_call"]
        assert response["status"] == "completed"
        say(this, "Hello.")
        response = await wire.answer(tool_choice="auto", **LONG)
        assert [item["type"] for item in response["output"]] == ["message"]
        assert held_to(this) is None


@talks("chatml")
async def test_a_session_of_a_model_that_takes_no_tools_has_none(
    this: Served[PaperEngine], client: AsyncOpenAI
) -> None:
    async with realtime(this.url) as wire:
        await wire.send("session.update", session={"tools": [TOOL]})
        assert (await wire.until("session.updated"))["session"]["tools"] == []
        await wire.say("Hello")
        assert (await wire.answer(**LONG))["status"] == "completed"
        assert (await wire.answer(tools=[TOOL], **LONG))["status"] == "completed"
        required = {"tools": [TOOL], "tool_choice": "required"}
        await wire.send("response.create", response=required)
        assert (await wire.until("error"))["error"]["param"] == "tool_choice"
