"""Calls of functions in OpenAI's Responses, over both transports."""

from __future__ import annotations

import itertools
import json
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI
from openai.types.responses import Response

from tests.sessions.paper_engine import PaperEngine
from tests.web.serving import Served
from tests.web.test_responses import cached, checked, session_of, total
from tests.web.test_responses_socket import code_of, lanes_of
from tests.web.test_tools import CALL, THOUGHT, held_to, say, talks

TOOL: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "description": "What it is like outside.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": True,
}


async def ask(client: AsyncOpenAI, said: Any, **options: Any) -> Response:
    options = {"model": "paper", "tools": [TOOL], "max_output_tokens": 400} | options
    response: Response = await client.responses.create(input=said, **options)
    return response


def output_of(call: Any) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call.call_id, "output": "Rain."}


@talks("thinking_tools")
async def test_a_loop_of_calls_goes_on_token_for_token(
    this: Served[PaperEngine], client: AsyncOpenAI
) -> None:
    say(this, THOUGHT + CALL)
    first = await ask(client, "What is the weather in Oslo?")
    assert first.status == "completed"
    thought, call = first.output
    assert (thought.type, call.type) == ("reasoning", "function_call")
    assert thought.content is not None
    assert thought.content[0].text == "I should look."
    assert json.loads(call.arguments) == {"city": "Oslo"}
    assert [tool.to_dict() for tool in first.tools] == [TOOL]
    say(this, "It rains.")
    second = await ask(client, [output_of(call)], previous_response_id=first.id)
    assert second.output_text == "It rains."
    assert session_of(second) == session_of(first)
    assert cached(second) >= total(first) - 1
    with pytest.raises(openai.BadRequestError, match="No tool call found"):
        await ask(client, [output_of(call)], previous_response_id=second.id)
    # A client that keeps its own items sends all of them.
    whole = [
        {"role": "user", "content": "What is the weather in Oslo?"},
        *(item.to_dict() for item in first.output),
        output_of(call),
    ]
    say(this, "It rains.")
    assert (await ask(client, whole)).output_text == "It rains."
    items = (await this.http.get(f"/v1/sessions/{session_of(second)}/items")).json()["data"]
    assert [item["role"] for item in items] == ["user", "assistant", "tool", "assistant"]
    say(this, "Without.")
    third = await ask(client, "Never mind.", previous_response_id=second.id, tools=[])
    assert third.output_text == "Without."


@talks("thinking_tools")
async def test_a_call_is_streamed_in_pieces(this: Served[PaperEngine], client: AsyncOpenAI) -> None:
    say(this, THOUGHT + "Let me see." + CALL + CALL.replace("Oslo", "Rome"))
    stream = await client.responses.create(
        model="paper", input="Weather?", tools=[TOOL], stream=True, max_output_tokens=400
    )
    events = [checked(event) async for event in stream]
    final = events[-1].response
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [item.type for item in final.output] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
    ]
    calls = final.output[2:]
    assert len({call.call_id for call in calls}) == 2
    for index, call in enumerate(calls, 2):
        pieces = [
            event.delta
            for event in events
            if event.type == "response.function_call_arguments.delta"
            and event.output_index == index
        ]
        assert "".join(pieces) == call.arguments
    done = [e for e in events if e.type == "response.output_item.done"]
    assert [e.item.to_dict() for e in done] == [item.to_dict() for item in final.output]
    stored = await client.responses.retrieve(final.id)
    assert stored.to_dict() == final.to_dict()
    again = await client.responses.retrieve(final.id, stream=True)
    assert [e.to_dict() async for e in again] == [e.to_dict() for e in events]


@talks("thinking_tools")
async def test_a_response_completes_once(this: Served[PaperEngine], client: AsyncOpenAI) -> None:
    seconds = itertools.count(1000)
    object.__setattr__(this.services, "wall_clock_s", lambda: next(seconds))
    say(this, "It rains.")
    stream = await client.responses.create(model="paper", input="Weather?", stream=True)
    events = [event.to_dict() async for event in stream]
    response: Any = events[-1]["response"]
    assert (await client.responses.retrieve(response["id"])).to_dict() == response
    again = await client.responses.retrieve(response["id"], stream=True)
    assert [event.to_dict() async for event in again] == events


@talks("thinking_tools")
async def test_a_loop_of_calls_over_a_socket(
    this: Served[PaperEngine], client: AsyncOpenAI
) -> None:
    async with lanes_of(this) as lanes:
        options = {"tools": [TOOL], "max_output_tokens": 400}
        say(this, CALL)
        first = await lanes.ask("Weather?", **options)
        (call,) = (item for item in first["output"] if item["type"] == "function_call")
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": "Rain."}
        say(this, "It rains.")
        second = await lanes.ask([output], previous_response_id=first["id"], **options)
        assert second["output"][-1]["content"][0]["text"] == "It rains."
        wrong = {"type": "web_search"}
        error = await lanes.ask("Weather?", tools=[wrong])
        assert (code_of(error), error["error"]["param"]) == ("invalid_request", "tools[0].type")


@talks("thinking_tools")
async def test_tool_choice_none_makes_calls_text(
    this: Served[PaperEngine], client: AsyncOpenAI
) -> None:
    say(this, CALL)
    response = await ask(client, "Weather?", tool_choice="none")
    assert [item.type for item in response.output] == ["message"]


@talks("hermes")
async def test_an_answer_with_a_form_may_call_instead(
    this: Served[PaperEngine], client: AsyncOpenAI
) -> None:
    options: dict[str, Any] = {"text": {"format": {"type": "json_object"}}}
    for said, kind in ((CALL, "function_call"), ("{}", "message")):
        say(this, said)
        response = await ask(client, "Weather?", **options)
        assert [item.type for item in response.output] == [kind]
        grammar = held_to(this)
        assert grammar is not None
        assert grammar.text == '{"type":"object"}'
        assert '{"const": "weather"}' in grammar.calls


@talks("hermes")
async def test_an_answer_that_must_call_is_held_to_calls(
    this: Served[PaperEngine], client: AsyncOpenAI
) -> None:
    weather = {"type": "function", "name": "weather"}
    asked: list[Any] = ["required", weather]
    for choice in asked:
        say(this, CALL)
        response = await ask(client, "Weather?", tool_choice=choice)
        assert [item.type for item in response.output] == ["function_call"]
        shown = response.to_dict()["tool_choice"]
        assert shown == choice
        grammar = held_to(this)
        assert grammar is not None
        assert '{"const": "weather"}' in grammar.calls
    async with lanes_of(this) as lanes:
        say(this, CALL)
        options = {"tools": [TOOL], "max_output_tokens": 400, "tool_choice": weather}
        first = await lanes.ask("Weather?", **options)
        assert [item["type"] for item in first["output"]] == ["function_call"]
        assert held_to(this) == grammar
        error = await lanes.ask("Weather?", **options | {"tools": []})
        assert (code_of(error), error["error"]["param"]) == ("invalid_request", "tool_choice")
    wrong: list[dict[str, Any]] = [
        {"tool_choice": {"type": "function", "name": "time"}},
        {"tool_choice": "required", "tools": []},
    ]
    for options in wrong:
        with pytest.raises(openai.BadRequestError) as refused:
            await ask(client, "Weather?", **options)
        assert refused.value.param == "tool_choice"
    with pytest.raises(openai.BadRequestError) as refused:
        await ask(client, "Weather?", tool_choice={"type": "web_search_preview"})
    assert refused.value.param == "tool_choice.type"


@talks("hermes")
async def test_one_call_at_most(this: Served[PaperEngine], client: AsyncOpenAI) -> None:
    say(this, CALL + CALL.replace("Oslo", "Rome"))
    response = await ask(client, "Weather?", parallel_tool_calls=False)
    (call,) = response.output
    assert call.type == "function_call"
    assert json.loads(call.arguments) == {"city": "Oslo"}
    assert (response.status, response.parallel_tool_calls) == ("completed", False)


@talks("chatml")
async def test_a_response_of_a_model_that_takes_no_tools_has_none(
    this: Served[PaperEngine], client: AsyncOpenAI
) -> None:
    first = await ask(client, "Hello")
    assert first.tools == []
    second = await ask(client, "And?", previous_response_id=first.id)
    assert session_of(second) == session_of(first)
    assert cached(second) >= total(first) - 1
    counted = [
        await client.responses.input_tokens.count(model="paper", input="Hello", **options)
        for options in ({}, {"tools": [TOOL]})
    ]
    assert counted[0] == counted[1]
    async with lanes_of(this) as lanes:
        assert (await lanes.ask("Hello", tools=[TOOL], max_output_tokens=4))["tools"] == []
    with pytest.raises(openai.BadRequestError) as refused:
        await ask(client, "Hello", tool_choice="required")
    assert (refused.value.code, refused.value.param) == ("unsupported_operation", "tool_choice")
