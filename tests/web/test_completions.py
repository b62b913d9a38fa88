"""The older Completions as the `openai` package speaks them."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI
from openai.types import Completion

from session_server.core.owner import ANONYMOUS
from session_server.web.completions import TextForm
from tests.web.serving import WORD, Served, served
from tests.web.test_chat_completions import client_of, num_sessions

PROMPT = "Once upon a time"


async def ask(client: AsyncOpenAI, prompt: Any = PROMPT, **options: Any) -> Completion:
    options = {"model": "paper", "max_tokens": 4} | options
    completion: Completion = await client.completions.create(prompt=prompt, **options)
    return completion


async def stream(client: AsyncOpenAI, prompt: Any = PROMPT, **options: Any) -> list[Completion]:
    options = {"model": "paper", "max_tokens": 4} | options
    chunks: Any = await client.completions.create(prompt=prompt, stream=True, **options)
    return [chunk async for chunk in chunks]


@served()
async def test_texts_and_ids_are_continued(this: Served) -> None:
    async with client_of(this) as client:
        word = this.sessions.text.tokenizer.decode([WORD])
        ids = this.sessions.text.tokenizer.encode_control(PROMPT)
        for prompt, count in [(PROMPT, 1), (ids, 1), ([PROMPT, "And"], 2), ([ids, ids[:2]], 2)]:
            completion = await ask(client, prompt, n=2)
            assert [choice.index for choice in completion.choices] == list(range(2 * count))
            assert {choice.text for choice in completion.choices} == {word * 4}
            assert {choice.finish_reason for choice in completion.choices} == {"length"}
            usage = completion.usage
            assert usage is not None
            assert usage.completion_tokens == 8 * count
            assert usage.prompt_tokens_details is not None
            if count == 1:
                assert usage.prompt_tokens == len(ids)
        default = await ask(client, max_tokens=None, stop=[word * 3])
        assert default.choices[0].text == ""
        assert default.choices[0].finish_reason == "stop"
        assert num_sessions(this) == 0


@served()
async def test_a_stream_says_the_same(this: Served) -> None:
    # In the SDK's own types every chunk says why the answer ended, which OpenAI's do not either.
    async with client_of(this, is_strict=False) as client:
        word = this.sessions.text.tokenizer.decode([WORD])
        options = {"include_usage": True}
        *chunks, last = await stream(
            client, [PROMPT, "And"], n=2, echo=True, stream_options=options
        )
        for index in range(4):
            of_choice = [c.choices[0] for c in chunks if c.choices[0].index == index]
            expected = (PROMPT if index < 2 else "And") + word * 4
            assert "".join(choice.text for choice in of_choice) == expected
            assert of_choice[-1].finish_reason == "length"
        assert last.choices == []
        assert last.usage is not None
        assert last.usage.completion_tokens == 16
        assert num_sessions(this) == 0


@served()
async def test_logprobs_have_the_older_shape(this: Served) -> None:
    async with client_of(this) as client:
        word = this.sessions.text.tokenizer.decode([WORD])
        whole = (await ask(client, logprobs=2)).choices[0].logprobs
        assert whole is not None
        assert whole.tokens == [word] * 4
        assert whole.text_offset == [len(word) * index for index in range(4)]
        assert all(top[word] <= 0 for top in whole.top_logprobs or [])
        assert len(whole.token_logprobs or []) == 4
        assert (await ask(client)).choices[0].logprobs is None
        chunks = await this.http.post(
            "/v1/completions", json={"prompt": PROMPT, "max_tokens": 4, "logprobs": 0}
        )
        assert chunks.json()["choices"][0]["logprobs"]["tokens"] == [word] * 4


@served()
async def test_a_prompt_is_appended_to_an_open_session(this: Served) -> None:
    async with client_of(this) as client:
        session_id = await this.open()
        append = {"extra_body": {"session_params": {"id": session_id}}}
        first = await ask(client, **append)
        second = await ask(client, " and", **append)
        assert first.usage is not None
        assert second.usage is not None
        assert second.usage.prompt_tokens > first.usage.total_tokens
        assert (second.model_extra or {})["session_id"] == session_id
        assert this.sessions.get(ANONYMOUS, session_id).num_turns == 2
        with pytest.raises(openai.BadRequestError, match="session id gone does not exist"):
            await ask(client, extra_body={"session_params": {"id": "gone"}})


@served()
async def test_what_is_not_offered_or_does_not_fit_is_refused(this: Served) -> None:
    async with client_of(this) as client:
        session_id = await this.open()
        refused: list[tuple[dict[str, Any], str]] = [
            ({"suffix": "The end"}, "suffix"),
            ({"extra_body": {"bad_words": ["no"]}}, "bad_words"),
            ({"best_of": 3}, "best_of"),
            ({"n": 17}, "n"),
            ({"extra_body": {"session_id": "mine"}}, "session_id"),
            ({"echo": True, "logprobs": 1, "n": 2}, "echo"),
            ({"echo": True, "extra_body": {"session_params": {"id": session_id}}}, "echo"),
            ({"prompt": ["a", 1]}, "prompt"),
            ({"prompt": []}, "prompt"),
            ({"prompt": ["a"] * 65, "n": 2}, "prompt"),
            ({"prompt": "word " * 5000}, "prompt"),
            ({"prompt": [PROMPT, [1]]}, "prompt"),
            ({"max_tokens": -1}, "max_tokens"),
        ]
        for options, param in refused:
            with pytest.raises(openai.BadRequestError) as raised:
                await ask(client, **options)
            assert raised.value.param == param, raised.value
        with pytest.raises(openai.BadRequestError):
            await ask(client, [PROMPT, "word " * 5000])
        await this.until(lambda: num_sessions(this) == 1)
        assert this.sessions.stats().live_turns == 0


@served()
async def test_a_client_that_leaves_cancels_all(this: Served) -> None:
    async with client_of(this) as client:
        asking = asyncio.create_task(ask(client, [PROMPT, "And"], n=2, max_tokens=3000))
        await this.until(lambda: this.sessions.stats().live_turns == 4)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await this.until(lambda: num_sessions(this) == 0)


@served()
async def test_many_answers_are_made_one_at_a_time(this: Served) -> None:
    """Each in an iteration of the event loop of its own: its echo and its scores."""
    iteration, tasks = 0, set[asyncio.Task[None]]()
    decoded: list[int] = []
    scored: list[int] = []

    async def count() -> None:
        nonlocal iteration
        while True:
            iteration += 1
            await asyncio.sleep(0)

    tokenizer = this.sessions.text.tokenizer
    decode, logprobs = tokenizer.decode, TextForm.logprobs

    def counted_decode(ids: Any, **options: Any) -> str:
        if ids == (WORD, WORD):
            decoded.append(iteration)
        return decode(ids, **options)

    async def counted_logprobs(self: TextForm, *args: Any) -> Any:
        scored.append(iteration)
        return await logprobs(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        async with client_of(this) as client:
            tasks.add(asyncio.create_task(count()))
            patch.setattr(TextForm, "logprobs", counted_logprobs)
            echoed = [[WORD, WORD]] * 128
            with pytest.MonkeyPatch.context() as echoes:
                echoes.setattr(tokenizer, "decode", counted_decode)
                said = await ask(client, echoed, max_tokens=1, echo=True, logprobs=0)
        assert len(said.choices) == 128 == len(set(scored))
        assert len(decoded) == 128 == len(set(decoded))
        for task in tasks:
            task.cancel()
