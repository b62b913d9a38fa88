"""Several answers of one prompt: what a client sees of them, and what they leave."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from session_server.core.owner import ANONYMOUS
from session_server.sessions.quotas import QuotaLimits
from tests.web.serving import DEADLINE_S, WORD, Served, served, serving
from tests.web.test_chat_completions import (
    HELLO,
    ask,
    cached,
    client_of,
    num_sessions,
    session_of,
    stream,
    text_of,
)

NAMES: list[dict[str, Any]] = [{}, {"extra_body": {"session_id": "mine"}}]


@served()
async def test_choices_are_whole_and_leave_one_session(this: Served) -> None:
    async with client_of(this) as client:
        for options in NAMES:
            completion = await ask(client, HELLO, n=3, logprobs=True, **options)
            assert [choice.index for choice in completion.choices] == [0, 1, 2]
            for choice in completion.choices:
                assert choice.finish_reason == "length"
                assert choice.message.content == this.sessions.text.tokenizer.decode([WORD] * 4)
                assert choice.logprobs is not None
                assert len(choice.logprobs.content or []) == 4
            usage = completion.usage
            assert usage is not None
            assert usage.completion_tokens == 12
            assert usage.total_tokens == usage.prompt_tokens + 12
            history = [*HELLO, {"role": "assistant", "content": text_of(completion)}]
            items = await this.http.get(f"/v1/sessions/{session_of(completion)}/items")
            assert [item["content"] for item in items.json()["data"]] == [
                message["content"] for message in history
            ]
            more = await ask(client, [*history, *HELLO], **options)
            assert session_of(more) == session_of(completion)
            assert cached(more) >= usage.prompt_tokens + 3
        assert num_sessions(this) == len(NAMES)


@served()
async def test_choices_are_streamed_beside_each_other(this: Served) -> None:
    async with client_of(this) as client:
        options = {"include_usage": True, "continuous_usage_stats": True}
        *chunks, last = await stream(client, HELLO, n=3, max_tokens=9, stream_options=options)
        said = this.sessions.text.tokenizer.decode([WORD] * 9)
        order = [chunk.choices[0].index for chunk in chunks]
        for index in range(3):
            of_choice = [c.choices[0] for c in chunks if c.choices[0].index == index]
            assert of_choice[0].delta.role == "assistant"
            assert "".join(choice.delta.content or "" for choice in of_choice) == said
            reasons = [choice.finish_reason for choice in of_choice]
            assert reasons == [None] * (len(of_choice) - 1) + ["length"]
        assert order.index(2) < len(order) - 1 - order[::-1].index(1)  # interleaved
        assert last.choices == []
        assert last.usage is not None
        assert last.usage.completion_tokens == 27
        counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage is not None]
        assert counts == sorted(counts)
        assert len({chunk.id for chunk in (*chunks, last)}) == 1
        assert num_sessions(this) == 1


@served()
async def test_a_client_that_leaves_cancels_every_choice(this: Served) -> None:
    async with client_of(this) as client:
        for is_streamed in (False, True):
            asking = asyncio.create_task(
                (stream if is_streamed else ask)(client, HELLO, n=4, max_tokens=3000)
            )
            await this.until(lambda: this.sessions.stats().live_turns == 4)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            await this.until(lambda: num_sessions(this) == 0)
            assert this.sessions.stats().live_turns == 0


def test_a_choice_without_room_fails_the_call_and_leaves_nothing() -> None:
    async def check() -> None:
        quotas = QuotaLimits(owner_sessions=2)
        async with serving(quotas=quotas) as this, client_of(this) as client:
            with pytest.raises(openai.RateLimitError):
                await ask(client, HELLO, n=3, max_tokens=3000)
            with pytest.raises(openai.APIError) as failed:
                await stream(client, HELLO, n=3, max_tokens=3000)
            assert failed.value.code == "quota_exceeded"
            await this.until(lambda: num_sessions(this) == 0)
            assert len((await ask(client, HELLO, n=2)).choices) == 2

    asyncio.run(asyncio.wait_for(check(), DEADLINE_S))


@served()
async def test_a_failing_first_answer_fails_the_call(this: Served) -> None:
    async with client_of(this) as client:
        this.is_held = True
        both = [asyncio.create_task(how(client, HELLO, n=3)) for how in (ask, stream)]
        await this.until(lambda: this.sessions.stats().live_turns == 2)
        this.engine.die()
        for failed in await asyncio.gather(*both, return_exceptions=True):
            assert isinstance(failed, openai.APIError)
            assert failed.code == "engine_restarting"
        await this.until(lambda: num_sessions(this) == 0)


@served()
async def test_appended_choices_answer_behind_what_the_session_held(this: Served) -> None:
    async with client_of(this) as client:
        session_id = await this.open(instructions="Be brief.")
        append: dict[str, Any] = {"extra_body": {"session_params": {"id": session_id}}}
        first = await ask(client, HELLO, n=2, **append)
        second = await ask(client, HELLO, n=2, max_tokens=1, **append)
        assert first.usage is not None
        assert cached(second) >= first.usage.prompt_tokens + 3
        items = (await this.http.get(f"/v1/sessions/{session_id}/items")).json()["data"]
        assert [item["role"] for item in items] == ["system", *["user", "assistant"] * 2]
        assert this.sessions.get(ANONYMOUS, session_id).num_turns == 2
        assert num_sessions(this) == 1
