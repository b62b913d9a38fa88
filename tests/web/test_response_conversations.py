"""Conversations that clients of OpenAI's Responses keep by name."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from session_server.core.owner import ANONYMOUS
from session_server.core.session_events import Message
from session_server.protocol import response_items
from session_server.protocol.response_items import message_items
from session_server.sessions.kept_conversations import MAX_KEPT_ITEMS, ConversationEntry
from session_server.sessions.quotas import QuotaLimits
from session_server.web import responses
from tests.sessions.paper_engine import PaperEngine
from tests.web.serving import Served, served, serving
from tests.web.test_response_tools import ask as ask_with_tools
from tests.web.test_response_tools import output_of
from tests.web.test_responses import (
    JSON_OBJECT,
    ask,
    cached,
    client_of,
    held_checks,
    num_sessions,
    session_of,
    total,
    turns_of,
)
from tests.web.test_tools import CALL, say, talks

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]


def texts_of(page: Any) -> list[tuple[str, str]]:
    return [(item.role, item.content[0].text) for item in page.data]


@served()
async def test_a_conversation_grows_with_its_responses_token_for_token(this: Served) -> None:
    async with client_of(this) as client:
        made = await client.conversations.create(items=HELLO, metadata={"a": "b"})
        before = None
        for said in ("One", "Two", "Three"):
            response = await ask(client, said, conversation=made.id, instructions="Be brief.")
            assert response.conversation is not None
            assert response.conversation.id == made.id
            if before is not None:
                assert session_of(response) == session_of(before)
                assert cached(response) in (total(before), total(before) - 1)
            before = response
        page = await client.conversations.items.list(made.id, order="asc")
        assert [role for role, _ in texts_of(page)] == ["user"] + ["user", "assistant"] * 3
        assert before is not None
        assert page.data[-1].id == before.output[0].id
        assert page.data[-1].to_dict()["content"][0]["text"] == before.output_text
        assert num_sessions(this) == 1
        await client.conversations.delete(made.id)
        with pytest.raises(openai.NotFoundError):
            await client.conversations.retrieve(made.id)
        with pytest.raises(openai.NotFoundError) as missing:
            await ask(client, "Four", conversation=made.id)
        assert missing.value.code == "conversation_not_found"


@served()
async def test_the_tokens_of_a_conversation_are_counted_as_its_response_will_count_them(
    this: Served,
) -> None:
    async with client_of(this) as client:
        made = await client.conversations.create(items=HELLO)
        for said in ("One", "Two"):
            counted = await client.responses.input_tokens.count(input=said, conversation=made.id)
            response = await ask(client, said, conversation=made.id)
            assert response.usage is not None
            assert counted.input_tokens == response.usage.input_tokens
        with pytest.raises(openai.NotFoundError):
            await client.responses.input_tokens.count(input="Three", conversation="conv_unknown")


@served()
async def test_items_are_added_shown_and_deleted_and_the_next_response_knows(this: Served) -> None:
    async with client_of(this) as client:
        made = await client.conversations.create()
        assert made.metadata == {}
        first = await ask(client, "One", conversation={"id": made.id})
        added = await client.conversations.items.create(
            made.id,
            items=[
                {"role": "user", "content": "Between"},
                {"role": "assistant", "content": "Yes."},
            ],
        )
        assert texts_of(added) == [("user", "Between"), ("assistant", "Yes.")]
        shown = await client.conversations.items.retrieve(added.data[0].id, conversation_id=made.id)
        assert shown.to_dict() == added.data[0].to_dict()
        await client.conversations.items.delete(first.output[0].id, conversation_id=made.id)
        with pytest.raises(openai.NotFoundError):
            await client.conversations.items.retrieve(first.output[0].id, conversation_id=made.id)
        second = await ask(client, "Two", conversation=made.id)
        items = await this.http.get(f"/v1/sessions/{session_of(second)}/items")
        said = [item["content"] for item in items.json()["data"]]
        assert said == ["One", "Between", "Yes.", "Two", second.output_text]
        updated = await client.conversations.update(made.id, metadata={"c": "d"})
        assert updated.metadata == {"c": "d"}
        page = await client.conversations.items.list(made.id, limit=2)
        assert [item.id async for item in page] == [
            *(second.output[0].id, f"msg_{second.id.partition('_')[2]}_0"),
            *(item.id for item in reversed(added.data)),
            f"msg_{first.id.partition('_')[2]}_0",
        ]


@talks("thinking_tools")
async def test_calls_and_their_outputs_are_items(
    this: Served[PaperEngine], client: openai.AsyncOpenAI
) -> None:
    made = await client.conversations.create()
    say(this, CALL)
    first = await ask_with_tools(client, "Weather?", conversation=made.id)
    call = first.output[-1]
    say(this, "It rains.")
    second = await ask_with_tools(client, [output_of(call)], conversation=made.id)
    assert second.output_text == "It rains."
    assert cached(second) >= total(first) - 1
    page = await client.conversations.items.list(made.id, order="asc")
    kinds = [item.type for item in page.data]
    assert kinds == ["message", "function_call", "function_call_output", "message"]
    with pytest.raises(openai.BadRequestError, match="No tool call found"):
        await ask_with_tools(client, [output_of(call)], conversation=made.id)


@served()
async def test_one_response_at_a_time_goes_on_with_a_conversation(this: Served) -> None:
    async with client_of(this) as client:
        made = await client.conversations.create(items=HELLO)
        with pytest.raises(openai.BadRequestError, match="cannot both"):
            await ask(client, "One", conversation=made.id, previous_response_id="resp_x")
        this.is_held = True
        first = asyncio.create_task(ask(client, "One", conversation=made.id))
        await this.until(lambda: this.sessions.stats().live_turns == 1)
        with pytest.raises(openai.ConflictError):
            await ask(client, "Two", conversation=made.id)
        this.is_held = False
        kept = await first
        # What is canceled with its client is not said.
        stream = await client.responses.create(
            model="paper", input="Two", conversation=made.id, stream=True, max_output_tokens=1500
        )
        for _ in range(6):
            await anext(stream)
        await stream.close()
        await this.until(lambda: this.sessions.stats().live_turns == 0)
        after = await ask(client, "Three", conversation=made.id, store=False)
        assert session_of(after) == session_of(kept)
        page = await client.conversations.items.list(made.id, order="asc")
        assert [text for role, text in texts_of(page) if role == "user"] == [
            *("Hello", "One", "Three")
        ]
        await this.http.delete(f"/v1/sessions/{session_of(kept)}")
        anew = await ask(client, "Four", conversation=made.id)
        assert session_of(anew) != session_of(kept)


@served()
async def test_of_two_responses_that_begin_together_a_conversation_takes_one(this: Served) -> None:
    async with client_of(this) as client:
        made = await client.conversations.create()
        this.is_held = True
        with held_checks() as is_over:
            both = [
                asyncio.create_task(ask(client, said, conversation=made.id, text=JSON_OBJECT))
                for said in ("One", "Two")
            ]
            await asyncio.sleep(0.05)
            is_over.set()
            await this.until(lambda: any(task.done() for task in both))
            this.is_held = False
            ends = await asyncio.gather(*both, return_exceptions=True)
        assert [type(end) for end in ends].count(openai.ConflictError) == 1
        page = await client.conversations.items.list(made.id)
        assert len(page.data) == 2
        # One that is refused holds nothing up.
        with pytest.raises(openai.BadRequestError):
            await ask(client, "word " * 9000, conversation=made.id)
        await ask(client, "Three", conversation=made.id)


def test_conversations_are_bounded_and_the_one_unused_for_longest_goes() -> None:
    async def run() -> None:
        quotas = QuotaLimits(history_bytes=1 << 18)
        async with serving(quotas=quotas) as this, client_of(this) as client:
            records = turns_of(this).conversations.records
            items: list[Any] = [{"role": "user", "content": "Hello " * 400}]
            made = [await client.conversations.create(items=items) for _ in range(40)]
            assert records.budget.total <= records.budget.limit
            assert 0 < len(records) < 40
            with pytest.raises(openai.NotFoundError):
                await client.conversations.retrieve(made[0].id)
            large: list[Any] = [{"role": "user", "content": "Hello " * 20_000}]
            with pytest.raises(openai.APIStatusError) as refused:
                await client.conversations.items.create(made[-1].id, items=large)
            assert refused.value.status_code in (429, 503)
            for conversation_id in list(records._by_owner[ANONYMOUS]):
                await client.conversations.delete(conversation_id)
            assert records.budget.total == 0

    asyncio.run(run())


@served()
async def test_a_page_builds_the_items_that_it_shows(this: Served) -> None:
    num_built = 0

    def count(message: Message, *args: Any) -> Any:
        nonlocal num_built
        num_built += 1
        return message_items(message, *args)

    said: list[Any] = [{"role": "user", "content": str(index)} for index in range(200)]
    async with client_of(this) as client:
        made = await client.conversations.create()
        conversations = turns_of(this).conversations
        entries = [ConversationEntry(f"msg_{i}", Message("user", str(i))) for i in range(10_000)]
        conversations.append(conversations.find(ANONYMOUS, made.id), entries)
        asked = await ask(client, said)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(response_items, "message_items", count)
            patch.setattr(responses, "message_items", count)
            newest = await client.conversations.items.list(made.id, limit=5)
            assert num_built == 6
            after = newest.data[-1].id
            oldest = await client.conversations.items.list(made.id, order="asc", after=after)
            assert [text for _, text in texts_of(oldest)] == ["9996", "9997", "9998", "9999"]
            num_built = 0
            middle = await client.responses.input_items.list(asked.id, limit=5)
            middle = await client.responses.input_items.list(
                asked.id, limit=5, after=middle.data[-1].id
            )
            assert [text for _, text in texts_of(middle)] == ["194", "193", "192", "191", "190"]
            assert num_built <= 13
        for missing in ("msg_x", f"msg_{asked.id.partition('_')[2]}_200"):
            with pytest.raises(openai.NotFoundError):
                await client.responses.input_items.list(asked.id, after=missing)
            with pytest.raises(openai.NotFoundError):
                await client.conversations.items.list(made.id, after=missing)
        await client.conversations.items.delete("msg_4000", conversation_id=made.id)
        around = await client.conversations.items.list(made.id, after="msg_4001", limit=2)
        assert [item.id for item in around.data] == ["msg_3999", "msg_3998"]


@served()
async def test_a_conversation_has_so_many_items(this: Served) -> None:
    async with client_of(this) as client:
        made = await client.conversations.create()
        conversations = turns_of(this).conversations
        kept = conversations.find(ANONYMOUS, made.id)
        said = [
            ConversationEntry(f"msg_{i}", Message("user", "Hi")) for i in range(MAX_KEPT_ITEMS - 1)
        ]
        conversations.append(kept, said)
        await client.conversations.items.create(made.id, items=HELLO)
        with pytest.raises(openai.RateLimitError) as refused:
            await client.conversations.items.create(made.id, items=HELLO)
        assert refused.value.code == "quota_exceeded"
        assert len(kept.entries) == MAX_KEPT_ITEMS
        await client.conversations.items.delete("msg_0", conversation_id=made.id)
        await client.conversations.items.create(made.id, items=HELLO)
