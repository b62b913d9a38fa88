"""Chat Completions as the `openai` package speaks them, every answer validated strictly."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, AsyncStream, DefaultAsyncHttpxClient
from openai.types import Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from session_server.core.owner import ANONYMOUS
from session_server.core.session_events import TurnDelta
from session_server.sessions.conversations import MAX_UNNAMED
from session_server.sessions.quotas import QuotaLimits
from tests.web.serving import DEADLINE_S, WORD, Served, served, serving, small_journal

HELLO = [{"role": "user", "content": "Hello, how are you?"}]


@contextlib.asynccontextmanager
async def client_of(this: Served, **options: Any) -> AsyncIterator[AsyncOpenAI]:
    """The SDK, which raises where an answer is not what its types say."""
    http = DefaultAsyncHttpxClient(trust_env=False)
    options = {"max_retries": 0, "api_key": "none", "timeout": DEADLINE_S} | options
    async with AsyncOpenAI(
        base_url=f"{this.url}/v1",
        http_client=http,
        _strict_response_validation=True,
        **options,
    ) as client:
        yield client


async def ask(client: AsyncOpenAI, messages: list[Any], **options: Any) -> ChatCompletion:
    options = {"model": "paper", "max_tokens": 4} | options
    completion: ChatCompletion = await client.chat.completions.create(messages=messages, **options)
    return completion


async def stream(
    client: AsyncOpenAI, messages: list[Any], **options: Any
) -> list[ChatCompletionChunk]:
    options = {"model": "paper", "max_tokens": 4} | options
    chunks: AsyncStream[ChatCompletionChunk] = await client.chat.completions.create(
        messages=messages, stream=True, **options
    )
    return [chunk async for chunk in chunks]


def text_of(completion: ChatCompletion) -> str:
    content = completion.choices[0].message.content
    assert content is not None
    return content


def cached(completion: ChatCompletion) -> int:
    assert completion.usage is not None
    details = completion.usage.prompt_tokens_details
    assert details is not None
    assert details.cached_tokens is not None
    return details.cached_tokens


def session_of(completion: ChatCompletion | ChatCompletionChunk) -> str:
    assert completion.model_extra is not None
    session_id: str = completion.model_extra["session_id"]
    return session_id


def num_sessions(this: Served) -> int:
    return this.sessions.stats().sessions


async def talk(
    client: AsyncOpenAI, count: int, **options: Any
) -> tuple[list[Any], list[ChatCompletion]]:
    """A conversation sent whole each time, whose calls compute new tokens alone."""
    messages: list[Any] = []
    completions: list[ChatCompletion] = []
    total = 0
    for index in range(count):
        messages.append({"role": "user", "content": f"Hello {index}"})
        completion = await ask(client, messages, **options)
        assert completion.usage is not None
        assert cached(completion) in ({0} if index == 0 else {total, total - 1})
        total = completion.usage.total_tokens
        messages.append({"role": "assistant", "content": text_of(completion)})
        completions.append(completion)
    return messages, completions


@served()
async def test_a_completion_is_what_the_sdk_expects(this: Served) -> None:
    async with client_of(this) as client:
        completion = await ask(client, HELLO, seed=-5, user="me", metadata={"a": "b"}, store=True)
        choice = completion.choices[0]
        assert (completion.object, completion.model) == ("chat.completion", "paper")
        assert (choice.finish_reason, choice.logprobs) == ("length", None)
        assert text_of(completion) == this.sessions.text.tokenizer.decode([WORD] * 4)
        usage = completion.usage
        assert usage is not None
        assert usage.completion_tokens == 4
        assert usage.total_tokens == usage.prompt_tokens + 4
        assert usage.completion_tokens_details is not None
        assert completion._request_id == completion.id
        turn = await this.http.get(f"/v1/sessions/{session_of(completion)}/turns/{completion.id}")
        assert turn.json()["text"] == text_of(completion)
        timings = (completion.model_extra or {})["timings"]
        assert (timings["cache_n"], timings["predicted_n"]) == (0, 4)


@served()
async def test_a_stream_says_the_same_in_chunks(this: Served) -> None:
    async with client_of(this) as client:
        whole = await ask(client, HELLO)
        plain = await stream(client, HELLO)
        assert plain[0].choices[0].delta.role == "assistant"
        assert "".join(chunk.choices[0].delta.content or "" for chunk in plain) == text_of(whole)
        reasons = [chunk.choices[0].finish_reason for chunk in plain]
        assert reasons == [None] * (len(plain) - 1) + ["length"]
        assert all(chunk.usage is None for chunk in plain)
        assert len({chunk.id for chunk in plain}) == 1
        assert session_of(plain[0]) == session_of(plain[-1])
        *chunks, last = await stream(client, HELLO, stream_options={"include_usage": True})
        assert all(chunk.usage is None and chunk.choices for chunk in chunks)
        assert last.choices == []
        assert last.usage is not None
        assert last.usage.completion_tokens == 4
        options = {"include_usage": True, "continuous_usage_stats": True}
        every = await stream(client, HELLO, stream_options=options)
        counts = [chunk.usage.completion_tokens for chunk in every if chunk.usage is not None]
        assert len(counts) == len(every)
        assert counts == sorted(counts)
        assert every[-2].usage == every[-1].usage == last.usage or cached_of(every[-1]) > 0


def cached_of(chunk: ChatCompletionChunk) -> int:
    assert chunk.usage is not None
    assert chunk.usage.prompt_tokens_details is not None
    return chunk.usage.prompt_tokens_details.cached_tokens or 0


@served()
async def test_a_conversation_named_in_any_way_computes_new_tokens_alone(this: Served) -> None:
    async with client_of(this) as client:
        ways: list[dict[str, Any]] = [
            {"extra_body": {"session_id": "mine"}},
            {"prompt_cache_key": "a key of any form / with spaces"},
            {"extra_headers": {"X-Session-ID": "one"}},
            {"extra_headers": {"session-id": "two"}},
            {"extra_headers": {"x-claude-code-session-id": "three"}},
        ]
        ids = set()
        for way in ways:
            messages, completions = await talk(client, 3, **way)
            (session_id,) = {session_of(completion) for completion in completions}
            ids.add(session_id)
            items = (await this.http.get(f"/v1/sessions/{session_id}/items")).json()["data"]
            assert [item["content"] for item in items] == [each["content"] for each in messages]
        assert {"mine", "one", "two", "three"} < ids
        assert num_sessions(this) == len(ids) == len(ways)


@served()
async def test_a_conversation_without_a_name_is_found_by_what_was_said(this: Served) -> None:
    async with client_of(this) as client:
        messages, completions = await talk(client, 3)
        assert len({session_of(completion) for completion in completions}) == 1
        again = await ask(client, messages[:-1])
        assert text_of(again) == messages[-1]["content"]
        other, _ = await talk(client, 2)
        assert other == messages[:4]
        assert num_sessions(this) == 3
        goes_on = await ask(client, [*messages, {"role": "user", "content": "More"}])
        assert session_of(goes_on) in {session_of(each) for each in (*completions, again)}


@served()
async def test_two_calls_at_once_never_share_an_unnamed_session(this: Served) -> None:
    async with client_of(this) as client:
        messages, _ = await talk(client, 1)
        asked = [
            ask(client, [*messages, {"role": "user", "content": f"Branch {index}"}])
            for index in range(5)
        ]
        completions = await asyncio.gather(*asked)
        assert len({session_of(completion) for completion in completions}) == 5
        for index, completion in enumerate(completions):
            rest = [
                *messages,
                {"role": "user", "content": f"Branch {index}"},
                {"role": "assistant", "content": text_of(completion)},
                {"role": "user", "content": "And?"},
            ]
            last = await ask(client, rest)
            assert completion.usage is not None
            assert cached(last) >= completion.usage.total_tokens - 1


@served()
async def test_unnamed_sessions_are_no_more_than_may_rest(this: Served) -> None:
    async with client_of(this) as client:
        for index in range(MAX_UNNAMED + 5):
            await ask(client, [{"role": "user", "content": str(index)}], max_tokens=1)
        assert num_sessions(this) == MAX_UNNAMED == this.app.state.unnamed.num_at_rest(ANONYMOUS)
        for view in this.sessions.list(ANONYMOUS, limit=1000).sessions:
            this.sessions.close(ANONYMOUS, view.session_id)
        await ask(client, HELLO)
        assert num_sessions(this) == 1


def test_an_owner_at_its_limit_gets_room_from_its_own_unnamed_sessions() -> None:
    async def check() -> None:
        async with serving(quotas=QuotaLimits(sessions=3)) as this, client_of(this) as client:
            for index in range(6):
                await ask(client, [{"role": "user", "content": str(index)}])
            assert num_sessions(this) == 3
            for view in this.sessions.list(ANONYMOUS).sessions:
                this.sessions.close(ANONYMOUS, view.session_id)
            for index in range(3):
                await this.open(id=f"named{index}")
            with pytest.raises(openai.InternalServerError):
                await ask(client, HELLO)

    asyncio.run(asyncio.wait_for(check(), DEADLINE_S))


@served()
async def test_a_refused_call_leaves_no_session(this: Served) -> None:
    async with client_of(this) as client:
        long = [{"role": "user", "content": "word " * 5000}]
        for way in ({}, {"extra_body": {"session_id": "mine"}}):
            with pytest.raises(openai.UnprocessableEntityError) as refused:
                await ask(client, long, **way)
            assert refused.value.code == "context_too_long"
            assert num_sessions(this) == 0
        messages, _ = await talk(client, 2)
        with pytest.raises(openai.UnprocessableEntityError):
            await ask(client, [*messages, *long])
        assert num_sessions(this) == 1
        assert cached(await ask(client, [*messages, *HELLO])) > 0


@served()
async def test_a_named_session_is_waited_for_and_a_hint_is_not(this: Served) -> None:
    async with client_of(this) as client:
        this.is_held = True
        options: dict[str, Any] = {"extra_body": {"session_id": "mine"}}
        first = asyncio.create_task(ask(client, HELLO, **options))
        await this.until(lambda: this.sessions.stats().live_turns == 1)
        second = asyncio.create_task(ask(client, HELLO, **options))
        await this.until(lambda: this.sessions.stats().queued_turns == 1)
        hinted = asyncio.create_task(ask(client, HELLO, prompt_cache_key="mine"))
        await this.until(lambda: this.sessions.stats().live_turns == 2)
        this.is_held = False
        named = {session_of(await first), session_of(await second)}
        assert named == {"mine"}
        assert session_of(await hinted) != "mine"


@served()
async def test_messages_are_appended_to_an_open_session_when_the_client_says_so(
    this: Served,
) -> None:
    async with client_of(this) as client:
        session_id = await this.open(instructions="Be brief.")
        append: dict[str, Any] = {"extra_body": {"session_params": {"id": session_id, "rid": None}}}
        first = await ask(client, HELLO, **append)
        second = await ask(client, [{"role": "user", "content": "And?"}], **append)
        assert first.usage is not None
        assert cached(second) in (first.usage.total_tokens, first.usage.total_tokens - 1)
        items = (await this.http.get(f"/v1/sessions/{session_id}/items")).json()["data"]
        roles = [item["role"] for item in items]
        assert roles == ["system", "user", "assistant", "user", "assistant"]
        with pytest.raises(openai.BadRequestError, match="session id gone does not exist"):
            await ask(client, HELLO, extra_body={"session_params": {"id": "gone"}})
        both = {"session_id": "mine", "session_params": {"id": session_id}}
        with pytest.raises(openai.BadRequestError, match="cannot both be set"):
            await ask(client, HELLO, extra_body=both)


@served()
async def test_logprobs_are_those_of_the_tokens(this: Served) -> None:
    async with client_of(this) as client:
        whole = await ask(client, HELLO, logprobs=True, top_logprobs=2)
        logprobs = whole.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.content is not None
        assert len(logprobs.content) == 4
        word = this.sessions.text.tokenizer.decode([WORD])
        for token in logprobs.content:
            assert (token.token, token.bytes) == (word, list(word.encode()))
            assert math.isfinite(token.logprob)
        chunks = await stream(client, HELLO, logprobs=True, top_logprobs=2)
        streamed = [
            token
            for chunk in chunks
            if chunk.choices[0].logprobs is not None
            for token in chunk.choices[0].logprobs.content or []
        ]
        assert streamed == logprobs.content


@served()
async def test_what_is_not_offered_is_refused_by_name(this: Served) -> None:
    async with client_of(this) as client:
        image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
        refused: list[tuple[dict[str, Any], str]] = [
            ({"n": 2}, "n"),
            ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
            ({"response_format": {"type": "json_object"}}, "response_format"),
            ({"modalities": ["audio"]}, "modalities"),
            ({"top_logprobs": 2}, "top_logprobs"),
            ({"temperature": -1}, "temperature"),
            ({"messages": []}, "messages"),
            ({"messages": image}, "messages[0].content[0].type"),
            ({"messages": [{"role": "user"}]}, "messages[0].content"),
            ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
            ({"extra_body": {"min_tokens": 9}}, "min_tokens"),
        ]
        for options, param in refused:
            with pytest.raises(openai.BadRequestError) as raised:
                await ask(client, **({"messages": HELLO} | options))
            assert raised.value.param == param, raised.value
        assert num_sessions(this) == 0
        parts = [{"type": "text", "text": "Hello, "}, {"type": "text", "text": "how are you?"}]
        answer = await ask(
            client,
            [{"role": "user", "content": parts}],
            tools=[],
            response_format={"type": "text"},
            extra_body={"what_others_send": {"deep": [1]}},
        )
        assert cached(answer) == 0


@served()
async def test_models_are_shown_and_others_refused(this: Served) -> None:
    async with client_of(this) as client:
        assert [model.id async for model in client.models.list()] == ["paper"]
        model: Model = await client.models.retrieve("paper")
        assert model.id == "paper"
        for asking in (client.models.retrieve("gpt/9"), ask(client, HELLO, model="gpt-9")):
            with pytest.raises(openai.NotFoundError, match="paper is served") as missing:
                await asking
            assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
        with pytest.raises(openai.NotFoundError, match="/v1/chat/completions"):
            await client.embeddings.create(model="paper", input="x")


@served()
async def test_a_client_that_leaves_cancels_its_turn_and_its_prompt_stays_cached(
    this: Served,
) -> None:
    async with client_of(this) as client:
        messages, _ = await talk(client, 2)
        asked = [*messages, {"role": "user", "content": "A long question " * 20}]
        for is_streamed in (False, True):
            this.is_held = False
            asking = asyncio.create_task(
                (stream if is_streamed else ask)(client, asked, max_tokens=3000)
            )
            await this.until(lambda: this.sessions.stats().live_turns == 1)
            await this.until(lambda: _has_said_something(this))
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            await this.until(lambda: this.sessions.stats().live_turns == 0)
        assert num_sessions(this) == 1
        answer = await ask(client, asked)
        assert answer.usage is not None
        assert cached(answer) == answer.usage.prompt_tokens - 1


def _has_said_something(this: Served) -> bool:
    (view,) = this.sessions.list(ANONYMOUS).sessions
    journal = this.sessions.journal(ANONYMOUS, view.session_id)
    newest = journal.read(journal.last_seq - 1)
    return bool(newest) and isinstance(newest[-1].entry, TurnDelta)


@served()
async def test_a_turn_that_ends_with_its_session_is_an_error_and_one_that_is_canceled_is_short(
    this: Served,
) -> None:
    async with client_of(this) as client:
        options: dict[str, Any] = {"extra_body": {"session_id": "mine"}, "max_tokens": 3000}
        for is_streamed in (False, True):
            asking = asyncio.create_task((stream if is_streamed else ask)(client, HELLO, **options))
            await this.until(lambda: num_sessions(this) == 1)
            await this.until(lambda: _has_said_something(this))
            this.sessions.cancel(ANONYMOUS, "mine")
            answer = await asking
            last = answer[-1] if isinstance(answer, list) else answer
            assert last.choices[0].finish_reason == "length"
            asking = asyncio.create_task((stream if is_streamed else ask)(client, HELLO, **options))
            await this.until(lambda: this.sessions.stats().live_turns == 1)
            await this.until(lambda: _has_said_something(this))
            this.sessions.close(ANONYMOUS, "mine")
            with pytest.raises(openai.APIError, match="closed before"):
                await asking
            await this.until(lambda: num_sessions(this) == 0)


def test_a_stream_whose_reader_fell_behind_still_says_everything() -> None:
    async def check() -> None:
        async with serving(limits=small_journal(40)) as this, client_of(this) as client:
            this.is_held = True
            body = {"model": "paper", "messages": HELLO, "max_tokens": 400, "stream": True}
            asking = asyncio.create_task(
                this.http.post("/v1/chat/completions", json=body | {"logprobs": True})
            )
            await this.until(lambda: this.sessions.stats().live_turns == 1)
            for _ in range(402):  # without a turn of the event loop: the reader sees none of it
                this.engine.step()
                this.engine.deliver()
            this.is_held = False
            lines = [line[6:] for line in (await asking).text.split("\n\n") if line]
            assert lines[-1] == "[DONE]"
            chunks = [json.loads(line)["choices"][0] for line in lines[:-1]]
            whole = await ask(client, HELLO, max_tokens=400)
            assert "".join(chunk["delta"].get("content", "") for chunk in chunks) == text_of(whole)
            scores = [len(chunk["logprobs"]["content"]) for chunk in chunks if chunk["logprobs"]]
            assert sum(scores) == 400
            assert len(chunks) < 100

    asyncio.run(asyncio.wait_for(check(), DEADLINE_S))
