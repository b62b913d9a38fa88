"""Conversations that their client lets the model sum up, and items that are given by their ids."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import msgspec
import openai
import pytest
from openai import AsyncOpenAI
from openai.types.responses import CompactedResponse

from session_server.core.commands import CancelTurn
from session_server.core.errors import InvalidRequest
from session_server.core.session_events import Message
from session_server.protocol.compaction import (
    MAX_KEPT_BYTES,
    decode_window,
    encode_window,
    num_summary_tokens,
    window_of,
)
from session_server.protocol.response_items import MAX_REFERENCED_CHARS
from tests.sessions.paper_engine import PaperEngine
from tests.web.serving import Served, served
from tests.web.test_response_tools import TOOL, output_of
from tests.web.test_response_tools import ask as ask_with_tools
from tests.web.test_responses import ask, client_of, num_sessions, session_of, total, turns_of
from tests.web.test_responses_socket import code_of, lanes_of
from tests.web.test_tools import CALL, THOUGHT, say, talks

SUMMARY = "Summary of our conversation so far:\n\n"


async def compact(client: AsyncOpenAI, **options: Any) -> CompactedResponse:
    made: CompactedResponse = await client.responses.compact(model="paper", **options)
    CompactedResponse.model_validate(made.to_dict(), strict=True)
    return made


def window_in(made: CompactedResponse) -> list[tuple[str, str]]:
    (item,) = made.output
    assert item.type == "compaction"
    return [(m.role, m.content) for m in decode_window(item.encrypted_content, "")]


def content_of(*said: Any) -> str:
    return "compaction.v1:" + base64.b64encode(msgspec.msgpack.encode(said)).decode()


async def said_in(this: Served[Any], session_id: str) -> list[tuple[str, str]]:
    items = (await this.http.get(f"/v1/sessions/{session_id}/items")).json()["data"]
    return [(item["role"], item["content"]) for item in items]


@talks("thinking_tools")
async def test_a_conversation_goes_on_from_what_the_model_wrote(
    this: Served[PaperEngine], client: AsyncOpenAI
) -> None:
    options: dict[str, Any] = {"instructions": "Be brief."}
    say(this, THOUGHT + CALL)
    first = await ask_with_tools(client, "I am Ada. What is the weather?", **options)
    say(this, "It rains in Oslo.")
    second = await ask_with_tools(
        client, [output_of(first.output[-1])], previous_response_id=first.id, **options
    )
    say(this, THOUGHT + "Ada asked for the weather; it rains in Oslo.")
    made = await compact(client, previous_response_id=second.id)
    usage = made.usage
    # It runs behind what was said, with the same tools and instructions, and leaves nothing.
    assert usage.input_tokens > total(second)
    other = await compact(client, previous_response_id=second.id, instructions="Be brief. " * 50)
    assert other.usage.input_tokens > usage.input_tokens
    assert usage.output_tokens_details.reasoning_tokens > 0
    assert (num_sessions(this), len(turns_of(this).store.records)) == (1, 2)
    window = [
        ("user", "I am Ada. What is the weather?"),
        ("assistant", SUMMARY + "Ada asked for the weather; it rains in Oslo."),
    ]
    assert window_in(made) == window
    question = {"role": "user", "content": "Who am I?"}
    items = [*(item.to_dict() for item in made.output), question]
    say(this, "Ada.")
    third = await ask_with_tools(client, items)
    whole = [*window, ("user", "Who am I?"), ("assistant", "Ada.")]
    assert await said_in(this, session_of(third)) == whole
    # On a socket it begins a chain of its own, from which others go on.
    async with lanes_of(this) as lanes:
        say(this, "You are Ada.")
        fourth = await lanes.ask(items, max_output_tokens=400)
        say(this, "You are welcome.")
        last = await lanes.ask("Thanks.", previous_response_id=fourth["id"], max_output_tokens=400)
        assert fourth["output"][0]["content"][0]["text"] == "You are Ada."
        assert (await said_in(this, last["session_id"]))[:2] == window
    say(this, "Ada asked who she is.")
    again = await compact(client, input=items)
    assert window_in(again) == [
        ("user", "I am Ada. What is the weather?\n\nWho am I?"),
        ("assistant", SUMMARY + "Ada asked who she is."),
    ]
    late = [*items, output_of(first.output[-1])]
    with pytest.raises(openai.BadRequestError, match="No tool call found"):
        await ask_with_tools(client, late)


@talks("thinking_tools")
async def test_thoughts_without_an_answer_are_the_summary(
    this: Served[PaperEngine], client: AsyncOpenAI
) -> None:
    say(this, "<think>\nIt is about Ada.")
    made = await compact(client, input="I am Ada.")
    assert window_in(made)[-1] == ("assistant", SUMMARY + "It is about Ada.")


@talks("alternating")
async def test_a_template_whose_roles_must_alternate_takes_it(
    this: Served[PaperEngine], client: AsyncOpenAI
) -> None:
    say(this, "Ada wants to go on.")
    talk: list[Any] = [
        {"role": "user", "content": "I am Ada."},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "Go on."},
    ]
    made = await compact(client, input=talk)
    say(this, "Yes?")
    options: dict[str, Any] = {"max_output_tokens": 40}
    items = [*(item.to_dict() for item in made.output), {"role": "user", "content": "Who?"}]
    assert (await ask(client, items, **options)).output_text == "Yes?"


@served()
async def test_what_cannot_be_compacted_is_refused(this: Served) -> None:
    system: Any = {"role": "system", "content": "x" * (MAX_KEPT_BYTES + 1)}
    wrong: list[tuple[dict[str, Any], str | None]] = [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": [system]}, "input"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"previous_response_id": "resp_none"}, "previous_response_id"),
        ({"input": "Hello " * 20_000}, "input"),
        # There is room for the conversation, but for no summary.
        ({"input": "word " * (this.services.max_context - 150)}, "input"),
    ]
    async with client_of(this) as client:
        for options, param in wrong:
            with pytest.raises(openai.BadRequestError) as refused:
                await compact(client, **options)
            assert refused.value.param == param, options
        assert refused.value.code == "context_length_exceeded"
        with pytest.raises(openai.NotFoundError) as other:
            await client.responses.compact(model="other", input="Hello")
        assert other.value.code == "model_not_found"
        answer = await this.http.post("/v1/responses/compact", json={"input": "Hello"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")
        assert num_sessions(this) == 0


@served()
async def test_a_summary_is_bounded_and_ends_with_its_client(this: Served[PaperEngine]) -> None:
    async with client_of(this) as client:
        made = await compact(client, input="Hello")
        assert made.usage.output_tokens == num_summary_tokens(this.services.max_context)
        assert num_sessions(this) == 0
        this.is_held = True
        task = asyncio.create_task(compact(client, input="Hello"))
        await this.until(lambda: this.sessions.stats().live_turns == 1)
        task.cancel()
        seen = this.engine.seen
        await this.until(lambda: any(isinstance(each, CancelTurn) for each in seen))
        this.is_held = False
        await this.until(lambda: num_sessions(this) == 0)
        this.is_held = True
        answer = asyncio.create_task(compact(client, input="Hello"))
        await this.until(lambda: this.sessions.stats().live_turns == 1)
        (session,) = (await this.http.get("/v1/sessions")).json()["data"]
        path = f"/v1/sessions/{session['id']}/turns/{session['running_turn']}/cancel"
        canceled = await this.http.post(path, json={"keep_partial": True})
        assert canceled.is_success, canceled.text
        this.is_held = False
        with pytest.raises(openai.APIStatusError, match="canceled"):
            await answer


@pytest.mark.parametrize(
    "content",
    [
        "x",
        "compaction.v1:",
        "compaction.v1:=",
        "compaction.v2:" + content_of(["user", "a"]).partition(":")[2],
        content_of(["user", "a"]).partition(":")[2],
        content_of(["tool", "a"]),
        content_of(["user", b"\xff"]),
        content_of("user", "a"),
        content_of(*[["user", "a"]] * 4),
        content_of(["user", "a"]) + "AAAA",
    ],
)
def test_what_is_no_window_is_refused(content: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        list(decode_window(content, "input[1].encrypted_content"))
    assert refused.value.param == "input[1].encrypted_content"


@served()
async def test_a_wrong_compaction_is_refused_everywhere(this: Served) -> None:
    items: list[Any] = [
        {"role": "user", "content": "Hello"},
        {"type": "compaction", "encrypted_content": "gAAAAA"},
    ]
    async with client_of(this) as client, lanes_of(this) as lanes:
        for made in (
            ask(client, items),
            compact(client, input=items),
            client.responses.input_tokens.count(model="paper", input=items),
            client.conversations.create(items=items),
        ):
            with pytest.raises(openai.BadRequestError) as refused:
                await made
            assert refused.value.param == "input[1].encrypted_content"
        error = await lanes.ask(items)
        assert code_of(error) == "invalid_request"
        kept = {"type": "compaction", "encrypted_content": content_of(["user", "Hi"])}
        conversation = await client.conversations.create(items=[kept])  # type: ignore[list-item]
        page = await client.conversations.items.list(conversation.id)
        assert page.data[0].to_dict()["content"] == [{"type": "input_text", "text": "Hi"}]


def test_a_window_keeps_the_newest_messages_of_the_user() -> None:
    talk = [
        Message("system", "One."),
        Message("developer", "Two."),
        Message("user", "a" * 50),
        Message("system", "Three."),
        Message("user", "é" * 20),
        Message("assistant", "Yes."),
        Message("user", "c" * 20),
    ]
    window = window_of(talk, " So. ", context_len=100)
    assert window == (
        Message("system", "One.\n\nTwo."),
        Message("user", "é" * 20 + "\n\n" + "c" * 20),
        Message("assistant", SUMMARY + "So."),
    )
    assert tuple(decode_window(encode_window(window), "")) == window
    (asked, _) = window_of(talk[2:3], "So.", context_len=49)
    assert asked == Message("user", "What has been said so far?")
    long = [Message("user", "x" * 1000)] * 1000
    (kept, _) = window_of(long, "So.", context_len=1 << 20)
    assert len(kept.content.replace("\n\n", "")) == MAX_KEPT_BYTES // 1000 * 1000


@talks("thinking_tools")
async def test_items_are_given_by_their_ids(this: Served[PaperEngine], client: AsyncOpenAI) -> None:
    def reference(item_id: str) -> dict[str, str]:
        return {"type": "item_reference", "id": item_id}

    say(this, THOUGHT + CALL + CALL.replace("Oslo", "Rome"))
    first = await ask_with_tools(client, [{"role": "user", "content": "Hot?"}])
    asked = await client.responses.input_items.list(first.id)
    thought, *calls = (item.id or "" for item in first.output)
    outputs = [output_of(call) for call in first.output[1:]]
    given = [reference(item_id) for item_id in (asked.data[0].id, thought, *calls)]
    say(this, "It rains.")
    second = await ask_with_tools(client, [*given, *outputs])
    assert second.output_text == "It rains."
    said = [item.to_dict() for item in first.output]
    say(this, "It rains.")
    whole = await ask_with_tools(client, [{"role": "user", "content": "Hot?"}, *said, *outputs])
    assert whole.usage is not None
    assert second.usage is not None
    assert whole.usage.input_tokens == second.usage.input_tokens
    # Those of what was sent, by what it was sent with.
    sent = await client.responses.input_items.list(second.id, order="asc")
    ids = [item.id async for item in sent]
    counted = [
        await client.responses.input_tokens.count(model="paper", input=items, tools=[TOOL])  # type: ignore[list-item, arg-type]
        for items in ([reference(item_id) for item_id in ids], [*given, *outputs])
    ]
    assert counted[0] == counted[1]
    conversation = await client.conversations.create(items=[{"role": "user", "content": "Hi"}])
    (kept,) = (await client.conversations.items.list(conversation.id)).data
    copy = await client.conversations.create(items=[reference(kept.to_dict()["id"])])  # type: ignore[list-item]
    assert (await client.conversations.items.list(copy.id)).data[0].to_dict()["content"] == (
        kept.to_dict()["content"]
    )
    async with lanes_of(this) as lanes:
        say(this, "It rains.")
        mine = await lanes.ask("Hi", max_output_tokens=400)
        say(this, "It rains.")
        known = await lanes.ask([reference(mine["output"][0]["id"])], max_output_tokens=400)
        assert known["status"] == "completed"
        suffix = first.id.partition("_")[2]
        unknown = [f"msg_{suffix}_9", f"fc_{suffix}_2", "msg_", "", mine["output"][0]["id"]]
        for item_id in unknown:
            with pytest.raises(openai.NotFoundError) as missing:
                await ask_with_tools(client, [reference(item_id)])
            assert missing.value.param == "input[0].id"
        error = await lanes.ask([reference("msg_none")])
        assert (error["status"], error["error"]["param"]) == (404, "input[0].id")
    large = [{"role": "user", "content": "x" * (MAX_REFERENCED_CHARS // 4)}]
    conversation = await client.conversations.create(items=large)  # type: ignore[arg-type]
    (kept,) = (await client.conversations.items.list(conversation.id)).data
    with pytest.raises(openai.BadRequestError, match="References") as refused:
        await ask_with_tools(client, [reference(kept.to_dict()["id"])] * 5)
    assert refused.value.param == "input[4]"
