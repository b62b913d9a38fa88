"""OpenAI's Responses as the `openai` package speaks them, every answer and event validated."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from session_server.core.owner import ANONYMOUS
from session_server.core.sampling import Grammar
from session_server.core.session_events import TurnDelta
from session_server.sessions.quotas import QuotaLimits
from session_server.sessions.response_turns import ResponseTurns
from session_server.sessions.responses import ResponseContent
from session_server.sessions.resting import MAX_RESTING
from session_server.text.grammar_worker import GrammarWorker
from tests.web.serving import DEADLINE_S, WORD, Served, served, serving, small_journal

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
FIRST_EVENTS = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
]
LAST_EVENTS = [
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
]


@contextlib.asynccontextmanager
async def client_of(this: Served, **options: Any) -> AsyncIterator[AsyncOpenAI]:
    """The SDK, which raises where an answer is not what its types say."""
    http = DefaultAsyncHttpxClient(trust_env=False)
    options = {"max_retries": 0, "api_key": "none", "timeout": DEADLINE_S} | options
    async with AsyncOpenAI(
        base_url=f"{this.url}/v1", http_client=http, _strict_response_validation=True, **options
    ) as client:
        yield client


async def ask(client: AsyncOpenAI, said: Any, **options: Any) -> Response:
    options = {"model": "paper", "max_output_tokens": 4} | options
    response: Response = await client.responses.create(input=said, **options)
    return response


async def stream(client: AsyncOpenAI, said: Any, **options: Any) -> list[Any]:
    options = {"model": "paper", "max_output_tokens": 4} | options
    events = await client.responses.create(input=said, stream=True, **options)
    return [checked(event) async for event in events]


def checked(event: Any) -> Any:
    """An event that is exactly what the SDK's types say."""
    EVENT.validate_python(event.to_dict(), strict=True)
    return event


def cached(response: Response) -> int:
    assert response.usage is not None
    return response.usage.input_tokens_details.cached_tokens


def total(response: Response) -> int:
    assert response.usage is not None
    return response.usage.total_tokens


def session_of(response: Response) -> str:
    assert response.model_extra is not None
    session_id: str = response.model_extra["session_id"]
    return session_id


JSON_OBJECT: Any = {"format": {"type": "json_object"}}


def num_sessions(this: Served) -> int:
    return this.sessions.stats().sessions


def turns_of(this: Served) -> ResponseTurns:
    turns: ResponseTurns = this.app.state.responses
    return turns


def state_of(this: Served, response_id: str) -> str:
    found = turns_of(this).store.find(ANONYMOUS, response_id, scope=None)
    return found.content.state


@served()
async def test_a_response_is_what_the_sdk_expects(this: Served) -> None:
    async with client_of(this) as client:
        response = await ask(
            client,
            "Hello",
            instructions="Be brief.",
            metadata={"a": "b"},
            temperature=0,
            user="me",
            prompt_cache_key="k",
        )
        assert response.status == "incomplete"
        assert response.incomplete_details is not None
        assert response.incomplete_details.reason == "max_output_tokens"
        assert response.output_text == this.sessions.text.tokenizer.decode([WORD] * 4)
        assert (response.metadata, response.user, response.temperature) == ({"a": "b"}, "me", 0)
        assert response.usage is not None
        assert response.usage.output_tokens == 4
        assert response._request_id == response.id
        turn = await this.http.get(f"/v1/sessions/{session_of(response)}/turns/{response.id}")
        assert turn.json()["text"] == response.output_text
        again = await client.responses.retrieve(response.id)
        assert again.to_dict() == response.to_dict()


@served()
async def test_a_stream_has_the_events_that_the_sdk_knows(this: Served) -> None:
    async with client_of(this) as client:
        events = await stream(client, [{"role": "user", "content": "Hello"}])
        deltas = [event for event in events if event.type == "response.output_text.delta"]
        kinds = [event.type for event in events]
        middle = ["response.output_text.delta"] * len(deltas)
        assert kinds == [*FIRST_EVENTS, *middle, *LAST_EVENTS, "response.incomplete"]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        text = "".join(event.delta for event in deltas)
        assert text == events[-1].response.output_text
        stored = await client.responses.retrieve(events[-1].response.id)
        assert stored.to_dict() == events[-1].response.to_dict()
        async with client.responses.stream(model="paper", input="Hello", max_output_tokens=3) as it:
            async for _ in it:
                pass
            final = it._raw_stream  # the accumulator has asserted the order of events
            assert final is not None


@served()
async def test_a_conversation_goes_on_where_it_ended_token_for_token(this: Served) -> None:
    async with client_of(this) as client:
        before: Response | None = None
        for index in range(4):
            said = f"Hello {index}"
            previous = None if before is None else before.id
            response = await ask(client, said, previous_response_id=previous, instructions="Be.")
            if before is not None:
                assert cached(response) in (total(before), total(before) - 1)
                assert session_of(response) == session_of(before)
            before = response
        assert num_sessions(this) == 1
        assert len(turns_of(this)._resting.of(ANONYMOUS)) == 1


@served()
async def test_an_earlier_response_is_gone_on_from_in_a_fork(this: Served) -> None:
    async with client_of(this) as client:
        first = await ask(client, "Hello", max_output_tokens=40)
        second = await ask(client, "And then?", previous_response_id=first.id)
        other = await ask(client, "Or else?", previous_response_id=first.id)
        assert session_of(other) != session_of(second) == session_of(first)
        one, two = (this.sessions.history(ANONYMOUS, session_of(each)) for each in (second, other))
        assert one[: total(first) - 1] == two[: total(first) - 1]
        both = [
            await ask(client, "Go on.", previous_response_id=each.id) for each in (second, other)
        ]
        assert [session_of(each) for each in both] == [session_of(second), session_of(other)]


@served()
async def test_two_that_go_on_from_one_at_once_both_do(this: Served) -> None:
    async with client_of(this) as client:
        first = await ask(client, "Hello")
        this.is_held = True
        both = [
            asyncio.create_task(ask(client, said, previous_response_id=first.id))
            for said in ("one", "two")
        ]
        await this.until(lambda: this.sessions.stats().live_turns == 2)
        this.is_held = False
        one, two = await asyncio.gather(*both)
        assert len({session_of(first), session_of(one), session_of(two)}) == 2


@contextlib.contextmanager
def held_checks() -> Iterator[asyncio.Event]:
    """Checks of grammars end when this is set; every grammar is fine."""
    is_over, known = asyncio.Event(), set[Grammar]()

    async def check(_: GrammarWorker, grammar: Grammar) -> None:
        await is_over.wait()
        known.add(grammar)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GrammarWorker, "check", check)
        patch.setattr(GrammarWorker, "knows", lambda _, grammar: grammar in known)
        yield is_over


@served()
async def test_a_response_whose_grammar_is_checked_goes_on_from_what_it_named(
    this: Served,
) -> None:
    async with client_of(this) as client:
        first = await ask(client, "Hello")
        previous = {"previous_response_id": first.id}
        with held_checks() as is_over:
            held = asyncio.create_task(ask(client, "one", **previous, text=JSON_OBJECT))
            await asyncio.sleep(0.05)
            other = await ask(client, "one", **previous)
            is_over.set()
            late = await held
        assert late.usage is not None
        assert other.usage is not None
        assert late.usage.input_tokens == other.usage.input_tokens
        assert session_of(late) != session_of(other)


@served()
async def test_instructions_are_not_inherited(this: Served) -> None:
    async with client_of(this) as client:
        first = await ask(client, "Hello", instructions="Be brief.")
        for instructions in ("Be long.", None):
            changed = await ask(
                client, "Again", previous_response_id=first.id, instructions=instructions
            )
            items = await this.http.get(f"/v1/sessions/{session_of(changed)}/items")
            said = [(item["role"], item["content"]) for item in items.json()["data"]]
            opening = [] if instructions is None else [("system", instructions)]
            assert said[: len(opening) + 1] == [*opening, ("user", "Hello")]
            assert said[-2] == ("user", "Again")
            assert all(content != "Be brief." for _, content in said)


@served()
async def test_a_response_whose_session_is_gone_is_rendered_anew(this: Served) -> None:
    async with client_of(this) as client:
        first = await ask(client, "Hello", instructions="Be brief.")
        second = await ask(client, "More", previous_response_id=first.id, instructions="Be brief.")
        await this.http.delete(f"/v1/sessions/{session_of(second)}")
        third = await ask(client, "Yet", previous_response_id=second.id, instructions="Be brief.")
        items = await this.http.get(f"/v1/sessions/{session_of(third)}/items")
        roles = [item["role"] for item in items.json()["data"]]
        assert roles == ["system", "user", "assistant", "user", "assistant", "user", "assistant"]
        await client.responses.delete(first.id)
        await this.http.delete(f"/v1/sessions/{session_of(third)}")
        with pytest.raises(openai.BadRequestError) as refused:
            await ask(client, "Yet", previous_response_id=second.id)
        assert refused.value.code == "previous_response_not_found"


async def go_back(this: Served, session_id: str, items: list[dict[str, Any]]) -> None:
    await this.http.post(f"/v1/sessions/{session_id}/rewind", json={"to_item": items[-2]["id"]})


async def say_otherwise(this: Served, session_id: str, items: list[dict[str, Any]]) -> None:
    path = f"/v1/sessions/{session_id}/items/{items[-1]['id']}"
    await this.http.patch(path, json={"content": "I will not say."})


async def answer_again(this: Served, session_id: str, items: list[dict[str, Any]]) -> None:
    await go_back(this, session_id, items)
    body = {"input": [], "sampling": {"max_tokens": 3}}
    await this.http.post(f"/v1/sessions/{session_id}/turns", json=body)


@pytest.mark.parametrize("change", [go_back, say_otherwise, answer_again])
def test_what_others_change_in_its_session_is_not_what_a_response_has_said(change: Any) -> None:
    @served()
    async def test(this: Served) -> None:
        async with client_of(this) as client:
            first = await ask(client, "Hello")
            unchanged = await ask(client, "More", previous_response_id=first.id, store=False)
            items = await this.http.get(f"/v1/sessions/{session_of(first)}/items")
            await change(this, session_of(first), items.json()["data"])
            second = await ask(client, "More", previous_response_id=first.id)
            said = await this.http.get(f"/v1/sessions/{session_of(second)}/items")
            assert said.json()["data"][1]["content"] == first.output_text
            assert second.output_text == unchanged.output_text

    test()


@served()
async def test_what_is_not_stored_is_unknown_and_leaves_nothing(this: Served) -> None:
    async with client_of(this) as client:
        kept = await ask(client, "Hello")
        for previous in (None, kept.id):
            lost = await ask(client, "Hello", store=False, previous_response_id=previous)
            with pytest.raises(openai.NotFoundError):
                await client.responses.retrieve(lost.id)
            with pytest.raises(openai.BadRequestError) as refused:
                await ask(client, "Go on", previous_response_id=lost.id)
            assert refused.value.code == "previous_response_not_found"
            assert refused.value.param == "previous_response_id"
        assert num_sessions(this) == 1
        assert len(turns_of(this).store.records) == 1
        after = await ask(client, "Go on", previous_response_id=kept.id)
        assert cached(after) in (total(kept), total(kept) - 1)


@served()
async def test_a_background_response_outlives_its_client(this: Served) -> None:
    async with client_of(this) as client:
        options: dict[str, Any] = {"background": True, "max_output_tokens": 30}
        events = await client.responses.create(model="paper", input="Hello", stream=True, **options)
        seen = []
        async for event in events:
            seen.append(event)
            if len(seen) == 7:
                break
        await events.close()
        response_id = seen[0].response.id
        rest = await client.responses.retrieve(response_id, stream=True, starting_after=6)
        later = [checked(event) async for event in rest]
        numbers = [event.sequence_number for event in (*seen, *later)]
        assert numbers == list(range(len(numbers)))
        deltas = [e.delta for e in (*seen, *later) if e.type == "response.output_text.delta"]
        whole = await client.responses.retrieve(response_id)
        assert "".join(deltas) == whole.output_text
        every = await client.responses.retrieve(response_id, stream=True)
        again = [checked(event) async for event in every]
        assert [e.to_dict() for e in again] == [e.to_dict() for e in (*seen, *later)]
        none = await client.responses.retrieve(response_id, stream=True, starting_after=1000)
        assert [event async for event in none] == []


@served()
async def test_events_are_read_again_when_the_session_is_gone(this: Served) -> None:
    async with client_of(this) as client:
        events = await stream(client, "Hello", max_output_tokens=20)
        last = events[-1].response
        await this.http.delete(f"/v1/sessions/{session_of(last)}")
        again = await client.responses.retrieve(last.id, stream=True)
        kept = [checked(event) async for event in again]
        assert [e.sequence_number for e in kept] == list(range(len(kept)))
        assert kept[-1].response.output_text == last.output_text
        rest = await client.responses.retrieve(last.id, stream=True, starting_after=9)
        (end,) = [checked(event) async for event in rest]
        assert (end.type, end.sequence_number) == ("response.incomplete", 10)
        assert end.response.to_dict() == last.to_dict()


def test_a_reader_overtaken_by_the_journal_gets_the_whole_end() -> None:
    async def run() -> None:
        async with serving(limits=small_journal(8)) as this, client_of(this) as client:
            options: dict[str, Any] = {"background": True, "max_output_tokens": 40}
            made = await ask(client, "Hello", **options)
            assert made.status == "in_progress"
            await this.until(lambda: state_of(this, made.id) == "said")
            events = await client.responses.retrieve(made.id, stream=True)
            seen = [checked(event) async for event in events]
            assert [e.sequence_number for e in seen] == list(range(len(seen)))
            deltas = [e.delta for e in seen if e.type == "response.output_text.delta"]
            assert "".join(deltas) == seen[-1].response.output_text
            rest = await client.responses.retrieve(made.id, stream=True, starting_after=30)
            (end,) = [checked(event) async for event in rest]
            assert (end.type, end.sequence_number) == ("response.incomplete", 31)

    asyncio.run(run())


@served()
async def test_a_client_that_leaves_cancels_and_leaves_no_trace(this: Served) -> None:
    async with client_of(this) as client:
        first = await ask(client, "Hello")
        options: dict[str, Any] = {"max_output_tokens": 1000, "previous_response_id": first.id}
        events = await client.responses.create(model="paper", input="?", stream=True, **options)
        seen = [await anext(events) for _ in range(6)]
        await events.close()
        await this.until(lambda: this.sessions.stats().live_turns == 0)
        gone = await client.responses.retrieve(seen[0].response.id)
        assert gone.status == "cancelled"
        with pytest.raises(openai.BadRequestError, match="left nothing"):
            await ask(client, "Go on", previous_response_id=gone.id)
        again = await ask(client, "Again", previous_response_id=first.id)
        assert session_of(again) == session_of(first)
        assert cached(again) in (total(first), total(first) - 1)
        assert num_sessions(this) == 1


@served()
async def test_a_canceled_response_keeps_what_it_said(this: Served) -> None:
    async with client_of(this) as client:
        made = await ask(client, "Hello", background=True, max_output_tokens=1500)
        journal = this.sessions.journal(ANONYMOUS, session_of(made))

        def has_said() -> bool:
            return any(isinstance(each.entry, TurnDelta) for each in journal.read(0))

        await this.until(has_said)
        with pytest.raises(openai.BadRequestError, match="has not ended"):
            await ask(client, "Go on", previous_response_id=made.id)
        ended = await client.responses.cancel(made.id)
        assert ended.status == "cancelled"
        assert ended.output_text
        assert (await client.responses.cancel(made.id)).to_dict() == ended.to_dict()
        after = await ask(client, "Go on", previous_response_id=made.id)
        assert session_of(after) == session_of(made)


@served()
async def test_input_that_is_only_computed_can_be_gone_on_from(this: Served) -> None:
    async with client_of(this) as client:
        warm = await ask(client, "Hello " * 20, extra_body={"generate": False})
        assert (warm.status, warm.output) == ("completed", [])
        asked = await ask(client, "And?", previous_response_id=warm.id)
        assert cached(asked) > 20
        assert session_of(asked) == session_of(warm)


@served()
async def test_input_items_are_listed_in_pages(this: Served) -> None:
    said = [
        {"role": "system", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Hi."}]},
        {"role": "user", "content": "Bye"},
    ]
    async with client_of(this) as client:
        response = await ask(client, said)
        newest = await client.responses.input_items.list(response.id, limit=3)
        assert [item.role for item in newest.data] == ["user", "assistant", "user"]
        every = [item async for item in newest]
        assert len(every) == 4
        oldest = await client.responses.input_items.list(response.id, order="asc")
        assert [item.id for item in oldest.data] == [item.id for item in reversed(every)]


@served()
async def test_input_tokens_are_counted_as_the_turn_will_count_them(this: Served) -> None:
    async with client_of(this) as client:
        count = await client.responses.input_tokens.count(
            model="paper", input="Hello", instructions="Be brief."
        )
        first = await ask(client, "Hello", instructions="Be brief.")
        assert first.usage is not None
        assert count.input_tokens == first.usage.input_tokens
        for instructions in ("Be brief.", "Be long."):
            count = await client.responses.input_tokens.count(
                model="paper", input="Go", previous_response_id=first.id, instructions=instructions
            )
            second = await ask(
                client, "Go", previous_response_id=first.id, instructions=instructions
            )
            assert second.usage is not None
            assert count.input_tokens == second.usage.input_tokens


@served()
async def test_logprobs_are_given_where_they_are_asked_for(this: Served) -> None:
    async with client_of(this) as client:
        events = await stream(
            client, "Hello", include=["message.output_text.logprobs"], top_logprobs=2
        )
        deltas = [e for e in events if e.type == "response.output_text.delta"]
        assert sum(len(e.logprobs) for e in deltas) == 4
        part = events[-1].response.output[0].content[0]
        assert len(part.logprobs) == 4
        assert part.logprobs[0].token == deltas[0].logprobs[0].token


@served()
async def test_what_is_not_offered_is_refused_by_name(this: Served) -> None:
    wrong: dict[str, Any] = {
        "truncation": "auto",
        "prompt": {"id": "p"},
        "context_management": [{"type": "compaction"}],
        "moderation": {"model": "m"},
    }
    async with client_of(this) as client:
        for name, value in wrong.items():
            with pytest.raises(openai.BadRequestError) as refused:
                await ask(client, "Hello", **{name: value})
            assert refused.value.code == "unsupported_operation"
            assert str(refused.value.param).startswith(name)
        image = [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]
        with pytest.raises(openai.BadRequestError) as refused:
            await ask(client, image)
        assert refused.value.param == "input[0].content[0].type"
        unknown = [{"type": "function_call_output", "call_id": "call_x", "output": "1"}]
        with pytest.raises(openai.BadRequestError, match="No tool call found"):
            await ask(client, unknown)
        with pytest.raises(openai.NotFoundError) as missing:
            await ask(client, "Hello", model="other")
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as long:
            await ask(client, "Hello " * 20_000)
        assert long.value.code == "context_length_exceeded"
        assert num_sessions(this) == 0
        assert len(turns_of(this).store.records) == 0


@served()
async def test_a_deleted_response_is_gone_and_so_is_its_session(this: Served) -> None:
    async with client_of(this) as client:
        first = await ask(client, "Hello")
        second = await ask(client, "More", previous_response_id=first.id)
        await client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(first.id)
        third = await ask(client, "More", previous_response_id=second.id)
        assert session_of(third) == session_of(second)
        for response in (second, third):
            await client.responses.delete(response.id)
        assert num_sessions(this) == 0
        with pytest.raises(openai.NotFoundError):
            await client.responses.delete(first.id)
        running = await ask(client, "Hello", background=True, max_output_tokens=1500)
        await client.responses.delete(running.id)
        await this.until(lambda: this.sessions.stats().live_turns == 0)
        assert len(turns_of(this).store.records) == 0


@served()
async def test_a_response_that_another_replica_runs_is_shown_and_asked_for_there(
    this: Served,
) -> None:
    async with client_of(this) as client:
        made = await ask(client, "Hello", max_output_tokens=3)
        stored = turns_of(this).store.find(ANONYMOUS, made.id, scope=None)
        # As it is read here: what the other one has written before it told its client of it.
        stored.content = ResponseContent(stored.content.body, "running", running_in=7)
        stored.runs_at = "http://there:30000"
        found = await client.responses.retrieve(made.id)
        assert (found.status, found.output, found.usage) == ("in_progress", [], None)
        for answer in (
            await this.http.get(f"/v1/responses/{made.id}?stream=true"),
            await this.http.post(f"/v1/responses/{made.id}/cancel"),
            await this.http.delete(f"/v1/responses/{made.id}"),
        ):
            assert answer.status_code == 409
            error = answer.json()["error"]
            assert error["code"] == "session_moved"
            assert "http://there:30000" in error["message"]
        assert turns_of(this).store.records.is_kept(stored)


def test_responses_make_room_for_each_other() -> None:
    async def run() -> None:
        quotas = QuotaLimits(sessions=3, history_bytes=1 << 20)
        async with serving(quotas=quotas) as this, client_of(this) as client:
            made = [await ask(client, f"Hello {index} " * 100) for index in range(8)]
            assert num_sessions(this) == 3
            after = await ask(client, "Go on", previous_response_id=made[0].id)
            assert after.usage is not None
            assert after.usage.input_tokens > 300  # rendered anew
            store = turns_of(this).store.records
            for index in range(160):
                await ask(client, f"Hello {index} " * 100)
                assert store.budget.total <= store.budget.limit
            assert len(store) < 160
            with pytest.raises(openai.NotFoundError):
                await client.responses.retrieve(made[1].id)
            for response_id in list(store._by_owner[ANONYMOUS]):
                await client.responses.delete(response_id)
            assert store.budget.total == 0

    asyncio.run(run())


def test_the_oldest_session_at_rest_closes() -> None:
    async def run() -> None:
        async with serving() as this, client_of(this) as client:
            made = [await ask(client, "Hi", max_output_tokens=1) for _ in range(MAX_RESTING + 2)]
            assert num_sessions(this) == MAX_RESTING
            # One that somebody has used by its id is theirs.
            await this.http.patch(f"/v1/sessions/{session_of(made[-1])}", json={"ttl_s": 60})
            for _ in range(MAX_RESTING):
                await ask(client, "Hi", max_output_tokens=1)
            assert (await this.http.get(f"/v1/sessions/{session_of(made[-1])}")).is_success
            again = await ask(client, "Go on", previous_response_id=made[0].id)
            assert session_of(again) != session_of(made[0])

    asyncio.run(run())
