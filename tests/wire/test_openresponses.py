"""The cases of the OpenResponses compliance list, under their ids, against a real server.

That of an image shows how one is refused: no model here sees any. Those of tools have a model whose
template takes them, and which says what the test has written.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from openai.types.responses import (
    CompactedResponse,
    Response,
    ResponsesServerEvent,
    ResponseStreamEvent,
)
from pydantic import TypeAdapter
from websockets.sync.client import ClientConnection, connect

from session_server.local_server import LocalServer
from tests.web.test_tools import CALL, say, talking

MODEL = "session-server-embedded"
STREAMED: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
RECEIVED: TypeAdapter[Any] = TypeAdapter(ResponsesServerEvent)
ENDS = {"response.completed", "response.incomplete", "response.failed", "error"}
Case = Callable[[LocalServer, httpx.Client], None]


def user(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": text}


def make(http: httpx.Client, status: int = 200, **body: Any) -> dict[str, Any]:
    """A response, or the error; valid as the SDK's type."""
    body = {"model": MODEL, "temperature": 0, "max_output_tokens": 40} | body
    answer = http.post("/v1/responses", json=body)
    assert answer.status_code == status, answer.text
    made: dict[str, Any] = answer.json()
    if status == 200:
        Response.model_validate(made, strict=True)
    return made


def text_of(response: dict[str, Any]) -> str:
    parts = [part for item in response["output"] for part in item.get("content", ())]
    return "".join(part["text"] for part in parts)


def compacted(http: httpx.Client, **body: Any) -> dict[str, Any]:
    """What stands for a conversation; valid as the SDK's type."""
    answer = http.post("/v1/responses/compact", json={"model": MODEL} | body)
    assert answer.status_code == 200, answer.text
    made: dict[str, Any] = answer.json()
    CompactedResponse.model_validate(made, strict=True)
    return made


@contextlib.contextmanager
def socket_to(server: LocalServer) -> Iterator[ClientConnection]:
    url = server.url.replace("http", "ws", 1) + "/v1/responses"
    with connect(url, proxy=None, compression=None) as socket:
        yield socket


def events_of(socket: ClientConnection, **fields: Any) -> list[dict[str, Any]]:
    """The events of a response made over a socket; valid as the SDK's types."""
    fields = {"model": MODEL, "temperature": 0, "max_output_tokens": 40, "store": False} | fields
    socket.send(json.dumps({"type": "response.create", **fields}))
    events: list[dict[str, Any]] = []
    while not events or events[-1]["type"] not in ENDS:
        events.append(json.loads(socket.recv(timeout=30)))
        RECEIVED.validate_python(events[-1], strict=True)
    return events


def ended(socket: ClientConnection, **fields: Any) -> dict[str, Any]:
    end = events_of(socket, **fields)[-1]
    assert end["type"] == "response.completed", end
    response: dict[str, Any] = end["response"]
    return response


def refused(socket: ClientConnection, **fields: Any) -> dict[str, Any]:
    end = events_of(socket, **fields)[-1]
    assert (end["type"], end["status"]) == ("error", 400), end
    error: dict[str, Any] = end["error"]
    return error


def basic_response(_: LocalServer, http: httpx.Client) -> None:
    made = make(http, input=[user("My name is Ada.")])
    assert (made["object"], made["status"]) == ("response", "completed")
    assert text_of(made)


def assistant_phase(_: LocalServer, http: httpx.Client) -> None:
    answer = {
        "type": "message",
        "role": "assistant",
        "phase": "final_answer",
        "content": [{"type": "output_text", "text": "Hello, Ada!"}],
    }
    assert text_of(make(http, input=[user("Hello."), answer, user("What is my name?")]))


def response_output_phase_schema(_: LocalServer, http: httpx.Client) -> None:
    made = make(http, input=[user("My name is Ada.")])
    phases = {item.get("phase") for item in made["output"]}
    assert phases <= {None, "commentary", "final_answer"}


def streaming_response(_: LocalServer, http: httpx.Client) -> None:
    body = {"model": MODEL, "input": [user("My name is Ada.")], "stream": True, "temperature": 0}
    events = []
    with http.stream("POST", "/v1/responses", json=body) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if "data: " in line]
    assert lines.pop() == "[DONE]"
    for line in lines:
        events.append(json.loads(line))
        STREAMED.validate_python(events[-1], strict=True)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-1]["type"] == "response.completed"
    deltas = (e["delta"] for e in events if e["type"] == "response.output_text.delta")
    assert "".join(deltas) == text_of(events[-1]["response"])


def websocket_response(server: LocalServer, _: httpx.Client) -> None:
    with socket_to(server) as socket:
        events = events_of(socket, input=[user("My name is Ada.")])
    assert events[0]["type"] == "response.created"
    assert text_of(events[-1]["response"])


def websocket_sequential_responses(server: LocalServer, _: httpx.Client) -> None:
    with socket_to(server) as socket:
        made = [ended(socket, input=[user(text)]) for text in ("My name is Ada.", "I am Bob.")]
    assert made[0]["id"] != made[1]["id"]


def websocket_continuation(server: LocalServer, _: httpx.Client) -> None:
    with socket_to(server) as socket:
        first = ended(socket, input=[user("My name is Ada.")])
        options = {"input": [user("What is my name?")], "previous_response_id": first["id"]}
        assert "Ada" in text_of(ended(socket, **options))


def websocket_reconnect_store_false_recovery(server: LocalServer, _: httpx.Client) -> None:
    with socket_to(server) as socket:
        first = ended(socket, input=[user("My name is Ada.")])
    question = user("What is my name?")
    with socket_to(server) as socket:
        error = refused(socket, input=[question], previous_response_id=first["id"])
        assert error["code"] == "previous_response_not_found"
        whole = [user("My name is Ada."), *first["output"], question]
        assert "Ada" in text_of(ended(socket, input=whole))


def websocket_previous_response_not_found(server: LocalServer, _: httpx.Client) -> None:
    with socket_to(server) as socket:
        error = refused(socket, input="Hello", previous_response_id="resp_nonexistent")
    assert error["code"] == "previous_response_not_found"
    assert error["param"] == "previous_response_id"


def websocket_failed_continuation_evicts_cache(server: LocalServer, _: httpx.Client) -> None:
    unknown = {"type": "function_call_output", "call_id": "call_unknown", "output": "1"}
    with socket_to(server) as socket:
        first = ended(socket, input=[user("My name is Ada.")])
        refused(socket, input=[unknown], previous_response_id=first["id"])
        options = {"input": [user("What is my name?")], "previous_response_id": first["id"]}
        assert refused(socket, **options)["code"] == "previous_response_not_found"


def websocket_generate_false(server: LocalServer, _: httpx.Client) -> None:
    with socket_to(server) as socket:
        first = ended(socket, input=[user("My name is Ada.")], generate=False)
        assert first["output"] == []
        options = {"input": [user("What is my name?")], "previous_response_id": first["id"]}
        assert text_of(ended(socket, **options))


def websocket_compact_new_chain(server: LocalServer, http: httpx.Client) -> None:
    first = make(http, input=[user("My name is Ada.")])
    talk = [user("My name is Ada."), *first["output"], user("Compress this conversation.")]
    window = compacted(http, input=talk)["output"]
    with socket_to(server) as socket:
        begun = ended(socket, input=[*window, user("What is my name?")], tools=[])
        assert begun["previous_response_id"] is None
        options = {"input": [user("And my city?")], "previous_response_id": begun["id"]}
        assert text_of(ended(socket, **options))
        items = http.get(f"/v1/sessions/{begun['session_id']}/items").json()["data"]
    assert [item["role"] for item in items] == ["user", "assistant"] * 3
    assert items[0]["content"] == "My name is Ada.\n\nCompress this conversation."
    assert items[1]["content"].startswith("Summary of our conversation so far:")
    assert items[2]["content"] == "What is my name?"


def system_prompt(_: LocalServer, http: httpx.Client) -> None:
    system = {"type": "message", "role": "system", "content": "Be brief."}
    assert make(http, input=[system, user("My name is Ada.")])["status"] == "completed"


def image_input(_: LocalServer, http: httpx.Client) -> None:
    content = [{"type": "input_image", "image_url": "data:image/png;base64,AA=="}]
    error = make(http, 400, input=[{"type": "message", "role": "user", "content": content}])
    assert error["error"]["code"] == "unsupported_operation"
    assert error["error"]["param"] == "input[0].content[0].type"


def multi_turn(_: LocalServer, http: httpx.Client) -> None:
    first = make(http, input=[user("My name is Ada.")])
    whole = [user("My name is Ada."), *first["output"], user("What is my name?")]
    assert "Ada" in text_of(make(http, input=whole))


def compact_response(_: LocalServer, http: httpx.Client) -> None:
    talk = [
        user("We agreed to launch on Tuesday and notify support first."),
        {
            "type": "message",
            "role": "assistant",
            "content": "Understood. The launch is Tuesday, with support notified beforehand.",
        },
    ]
    made = compacted(http, input=talk, prompt_cache_key="openresponses-compact-test")
    assert made["object"] == "response.compaction"
    assert [item["type"] for item in made["output"]] == ["compaction"]
    assert made["usage"]["output_tokens"] > 0


def compact_missing_model(_: LocalServer, http: httpx.Client) -> None:
    answer = http.post("/v1/responses/compact", json={"input": [user("Hello")]})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "model"


WEATHER: dict[str, Any] = {
    "input": [user("What's the weather like in San Francisco?")],
    "tools": [
        {
            "type": "function",
            "name": "weather",
            "description": "Get the current weather for a location",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        }
    ],
}


def answer_with_call(**options: Any) -> httpx.Response:
    """What a model answers that calls a tool."""

    async def run() -> httpx.Response:
        async with talking("thinking_tools") as (this, _):
            say(this, CALL)
            return await this.http.post("/v1/responses", json=WEATHER | options)

    return asyncio.run(run())


def tool_calling(_: LocalServer, __: httpx.Client) -> None:
    made = answer_with_call().json()
    Response.model_validate(made, strict=True)
    assert made["status"] == "completed"
    assert [item["type"] for item in made["output"]] == ["function_call"]


def tool_calling_streaming(_: LocalServer, __: httpx.Client) -> None:
    lines = answer_with_call(stream=True).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    for event in events:
        STREAMED.validate_python(event, strict=True)
    kinds = [event["type"] for event in events]
    assert "response.function_call_arguments.delta" in kinds
    assert "response.function_call_arguments.done" in kinds
    for kind in ("response.output_item.added", "response.output_item.done"):
        (item,) = (event["item"] for event in events if event["type"] == kind)
        assert item["type"] == "function_call"


CASES: dict[str, Case] = {
    case.__name__.replace("_", "-"): case
    for case in (
        basic_response,
        assistant_phase,
        response_output_phase_schema,
        streaming_response,
        websocket_response,
        websocket_sequential_responses,
        websocket_continuation,
        websocket_reconnect_store_false_recovery,
        websocket_previous_response_not_found,
        websocket_failed_continuation_evicts_cache,
        websocket_compact_new_chain,
        websocket_generate_false,
        system_prompt,
        tool_calling,
        tool_calling_streaming,
        image_input,
        multi_turn,
        compact_response,
        compact_missing_model,
    )
}


@pytest.mark.parametrize("name", CASES)
def test_openresponses(name: str, server: LocalServer, http: httpx.Client) -> None:
    CASES[name](server, http)


def test_a_summary_computes_only_what_is_new(http: httpx.Client) -> None:
    said = "My name is Ada. " * 20
    first = make(http, input=said, instructions="Be brief.")
    made = compacted(http, previous_response_id=first["id"])
    shared = made["usage"]["input_tokens_details"]["cached_tokens"]
    # A fork shares whole pages.
    assert shared == (first["usage"]["total_tokens"] - 1) // 16 * 16
    assert http.get(f"/v1/responses/{made['id']}").status_code == 404
