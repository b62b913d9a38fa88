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
from session_server.sessions.quotas import QuotaLimits, SessionLimits
from session_server.sessions.resting import MAX_RESTING
from tests.web.serving import DEADLINE_S, WORD, Served, served, serving, small_journal

HELLO = [{"role": "user", "content": "Hello, how are you?"}]
FUNCTION = {"type": "function", "function": {"name": "f"}}


@contextlib.asynccontextmanager
async def client_of(
    this: Served, *, is_strict: bool = True, **options: Any
) -> AsyncIterator[AsyncOpenAI]:
    """The SDK, which raises where an answer is not what its types say."""
    http = DefaultAsyncHttpxClient(trust_env=False)
    options = {"max_retries": 0, "api_key": "none", "timeout": DEADLINE_S} | options
    async with AsyncOpenAI(
        base_url=f"{this.url}/v1",
        http_client=http,
        _strict_response_validation=is_strict,
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
            {"extra_body": {"session_id": "a name of any form / with spaces"}},
            {"prompt_cache_key": "key"},
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
        assert "mine" in ids
        assert num_sessions(this) == len(ids) == len(ways)


@served()
async def test_conversations_that_share_a_hint_do_not_disturb_each_other(this: Served) -> None:
    async with client_of(this) as client:
        named = await this.open(id="key", instructions="Never lost.")
        hint: dict[str, Any] = {"prompt_cache_key": "key"}
        title = [{"role": "user", "content": "Find a title."}]
        messages, completions = await talk(client, 1, **hint)
        for index in range(3):
            await ask(client, title, **hint)
            messages.append({"role": "user", "content": f"More {index}"})
            completion = await ask(client, messages, **hint)
            usage = completions[-1].usage
            assert usage is not None
            assert cached(completion) >= usage.total_tokens - 1
            messages.append({"role": "assistant", "content": text_of(completion)})
            completions.append(completion)
        assert len({session_of(completion) for completion in completions}) == 1
        items = (await this.http.get(f"/v1/sessions/{named}/items")).json()["data"]
        assert [item["content"] for item in items] == ["Never lost."]


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
async def test_an_answer_asked_for_again_and_a_branch_are_forks(this: Served) -> None:
    async with client_of(this) as client:
        messages, completions = await talk(client, 3)
        kept = completions[1].usage
        assert kept is not None
        again = await ask(client, messages[:-1])
        branch = await ask(client, [*messages[:4], {"role": "user", "content": "A branch " * 9}])
        sessions = {session_of(each) for each in (completions[0], again, branch)}
        assert len(sessions) == 3
        base = this.sessions.history(ANONYMOUS, session_of(completions[0]))[: kept.total_tokens]
        for session_id in sessions:
            history = this.sessions.history(ANONYMOUS, session_id)
            assert history[: len(base) - 1] == base[:-1]
        goes_on = await ask(client, [*messages, {"role": "user", "content": "More"}])
        assert session_of(goes_on) in {session_of(completions[0]), session_of(again)}
        apart = await ask(client, messages[:-1], prompt_cache_key="another conversation")
        assert session_of(apart) not in sessions


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
        for index in range(MAX_RESTING + 5):
            await ask(client, [{"role": "user", "content": str(index)}], max_tokens=1)
        assert (
            num_sessions(this) == MAX_RESTING == len(this.app.state.unnamed.resting.of(ANONYMOUS))
        )
        for view in (await this.sessions.list(ANONYMOUS, limit=1000)).sessions:
            this.sessions.close(ANONYMOUS, view.session_id)
        await ask(client, HELLO)
        assert num_sessions(this) == 1


def test_sessions_that_nobody_knows_by_name_make_room_for_others() -> None:
    async def check() -> None:
        quotas = QuotaLimits(sessions=3, history_bytes=60_000)
        async with serving(quotas=quotas) as this, client_of(this) as client:
            for index in range(6):
                await ask(client, [{"role": "user", "content": str(index)}])
            assert num_sessions(this) == 3
            await ask(client, HELLO, extra_body={"session_id": "mine"})
            await this.open(id="other")
            for index in range(20):  # bytes run out before sessions do
                await ask(client, [{"role": "user", "content": f"word {index} " * 150}])
            for view in (await this.sessions.list(ANONYMOUS)).sessions:
                if view.session_id not in ("mine", "other"):
                    this.sessions.close(ANONYMOUS, view.session_id)
            await this.open(id="third")
            with pytest.raises(openai.InternalServerError):
                await ask(client, HELLO)

    asyncio.run(asyncio.wait_for(check(), DEADLINE_S))


@served()
async def test_a_session_that_somebody_uses_by_its_id_is_theirs(this: Served) -> None:
    async with client_of(this) as client:
        messages, completions = await talk(client, 1)
        session_id = session_of(completions[0])
        this.is_held = True
        by_id: dict[str, Any] = {"extra_body": {"session_id": session_id}}
        running = asyncio.create_task(
            ask(client, [*messages, {"role": "user", "content": "Mine"}], **by_id)
        )
        await this.until(lambda: this.sessions.stats().live_turns == 1)
        asked = [*messages, {"role": "user", "content": "Another"}]
        unnamed = asyncio.create_task(ask(client, asked))
        await this.until(lambda: this.sessions.stats().live_turns == 2)
        this.is_held = False
        assert session_of(await unnamed) != session_id
        for index in range(MAX_RESTING + 1):
            await ask(client, [{"role": "user", "content": str(index)}], max_tokens=1)
        assert session_of(await running) == session_id
        assert this.sessions.get(ANONYMOUS, session_id).num_turns == 2


@served()
async def test_an_attached_session_and_one_reopened_are_not_taken(this: Served) -> None:
    async with client_of(this) as client:
        messages, completions = await talk(client, 1)
        asked = [*messages, {"role": "user", "content": "And?"}]
        session_id = session_of(completions[0])
        async with this.socket(session_id):
            other = await ask(client, asked)
            assert session_of(other) != session_id
        again, completions = await talk(client, 1, prompt_cache_key="again")
        session_id = session_of(completions[0])
        this.sessions.close(ANONYMOUS, session_id)
        await this.open(id=session_id)
        asked = [*again, {"role": "user", "content": "And?"}]
        assert session_of(await ask(client, asked, prompt_cache_key="again")) != session_id
        assert this.sessions.get(ANONYMOUS, session_id).num_turns == 0


@served()
async def test_a_refused_call_leaves_no_session(this: Served) -> None:
    async with client_of(this) as client:
        long = [{"role": "user", "content": "word " * 5000}]
        for way in ({}, {"extra_body": {"session_id": "mine"}}):
            with pytest.raises(openai.BadRequestError) as refused:
                await ask(client, long, **way)
            assert (refused.value.code, refused.value.param) == (
                "context_length_exceeded",
                "messages",
            )
            assert num_sessions(this) == 0
        messages, _ = await talk(client, 2)
        with pytest.raises(openai.BadRequestError):
            await ask(client, [*messages, *long])
        assert num_sessions(this) == 1
        assert cached(await ask(client, [*messages, *HELLO])) > 0


@served()
async def test_calls_of_one_name_wait_behind_each_other(this: Served) -> None:
    async with client_of(this) as client:
        this.is_held = True
        options: dict[str, Any] = {"extra_body": {"session_id": "mine"}}
        first = asyncio.create_task(ask(client, HELLO, **options))
        await this.until(lambda: this.sessions.stats().live_turns == 1)
        second = asyncio.create_task(ask(client, HELLO, **options))
        await this.until(lambda: this.sessions.stats().queued_turns == 1)
        hinted = asyncio.create_task(ask(client, HELLO, prompt_cache_key="mine"))
        await this.until(lambda: this.sessions.stats().live_turns == 2)
        assert this.sessions.stats().queued_turns == 1
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
async def test_a_queued_call_that_does_not_fit_when_its_time_comes_is_told_so(
    this: Served,
) -> None:
    async with client_of(this) as client:
        session_id = await this.open()
        append: dict[str, Any] = {"extra_body": {"session_params": {"id": session_id}}}
        this.is_held = True
        first = asyncio.create_task(ask(client, HELLO, max_tokens=4000, **append))
        await this.until(lambda: this.sessions.stats().live_turns == 1)
        long = [{"role": "user", "content": "word " * 300}]
        rest = [asyncio.create_task(how(client, long, **append)) for how in (ask, stream)]
        await this.until(lambda: this.sessions.stats().queued_turns == 2)
        this.is_held = False
        await first
        for failed in await asyncio.gather(*rest, return_exceptions=True):
            assert isinstance(failed, openai.APIError)
            assert failed.code == "context_length_exceeded"


@served()
async def test_what_is_not_offered_is_refused_by_name(this: Served) -> None:
    async with client_of(this) as client:
        image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
        refused: list[tuple[dict[str, Any], str]] = [
            ({"n": 17}, "n"),
            ({"tools": [FUNCTION], "tool_choice": "required"}, "tool_choice"),
            ({"tools": [FUNCTION], "tool_choice": FUNCTION}, "tool_choice"),
            ({"response_format": {"type": "grammar"}}, "response_format.type"),
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


@served()
async def test_the_first_call_of_an_unnamed_conversation_may_end_in_any_way(this: Served) -> None:
    async with client_of(this) as client:
        named = asyncio.create_task(
            ask(client, HELLO, max_tokens=3000, extra_body={"session_id": "innocent"})
        )
        await this.until(lambda: num_sessions(this) == 1)

        def unnamed_id() -> str:
            views = [session.view() for session in this.sessions._sessions]
            return next(view.session_id for view in views if view.session_id != "innocent")

        for end in ("leaves", "is canceled", "is closed"):
            asking = asyncio.create_task(stream(client, HELLO, max_tokens=3000))
            await this.until(lambda: num_sessions(this) == 2)
            await this.until(lambda: this.sessions.stats().live_turns == 2)
            match end:
                case "leaves":
                    asking.cancel()
                case "is canceled":
                    this.sessions.cancel(ANONYMOUS, unnamed_id())
                case _:
                    this.sessions.close(ANONYMOUS, unnamed_id())
            await asyncio.gather(asking, return_exceptions=True)
            await this.until(lambda: num_sessions(this) == 1)
        this.sessions.cancel(ANONYMOUS, "innocent")
        assert (await named).choices[0].finish_reason == "length"
        both = [asyncio.create_task(ask(client, HELLO, max_tokens=3000)) for _ in range(2)]
        await this.until(lambda: this.sessions.stats().live_turns == 2)
        this.engine.die()
        for failed in await asyncio.gather(*both, return_exceptions=True):
            assert isinstance(failed, openai.InternalServerError)
            assert failed.code == "engine_restarting"
        await this.until(lambda: num_sessions(this) == 1)
        waits = asyncio.create_task(ask(client, HELLO))
        await this.until(lambda: num_sessions(this) == 2)
        this.sessions.close(ANONYMOUS, unnamed_id())
        assert isinstance((await asyncio.gather(waits, return_exceptions=True))[0], openai.APIError)
        this.engine.come_up()
        assert cached(await ask(client, HELLO)) == 0


@served()
async def test_a_client_that_leaves_is_not_waited_for_though_others_read_its_session(
    this: Served,
) -> None:
    async with client_of(this) as client:
        name: dict[str, Any] = {"extra_body": {"session_id": "mine"}}
        left = asyncio.create_task(ask(client, HELLO, max_tokens=3900, **name))
        await this.until(lambda: this.sessions.stats().live_turns == 1)
        await this.until(lambda: _has_said_something(this))
        waits = asyncio.create_task(ask(client, HELLO, **name))
        await this.until(lambda: this.sessions.stats().queued_turns == 1)
        left.cancel()
        answer = await waits
        assert answer.usage is not None
        assert answer.usage.prompt_tokens < 100
        assert this.sessions.get(ANONYMOUS, "mine").num_turns == 2


def test_a_name_whose_first_call_is_refused_stays_for_those_who_joined() -> None:
    async def check() -> None:
        limits = SessionLimits(inline_input_chars=2000)
        async with serving(limits=limits) as this, client_of(this) as client:
            name: dict[str, Any] = {"extra_body": {"session_id": "mine"}}
            long = [{"role": "user", "content": "word " * 5000}]
            first = asyncio.create_task(ask(client, long, **name))
            await this.until(lambda: num_sessions(this) == 1)
            second = await ask(client, HELLO, **name)
            assert session_of(second) == "mine"
            with pytest.raises(openai.BadRequestError):
                await first
            assert num_sessions(this) == 1

    asyncio.run(asyncio.wait_for(check(), DEADLINE_S))


@served()
async def test_a_call_that_finds_too_many_readers_starts_nothing(this: Served) -> None:
    async with client_of(this) as client, contextlib.AsyncExitStack() as stack:
        await this.open(id="mine")
        refused = None
        while refused is None:
            events = this.http.stream("GET", "/v1/sessions/mine/events")
            answer = await stack.enter_async_context(events)
            refused = None if answer.status_code == 200 else answer
        with pytest.raises(openai.InternalServerError, match="readers of this session"):
            await ask(client, HELLO, extra_body={"session_id": "mine"})
        assert this.sessions.get(ANONYMOUS, "mine").num_turns == 0
        assert this.sessions.stats().live_turns == 0


def test_an_answer_that_was_replaced_before_it_was_read_is_an_error() -> None:
    async def check() -> None:
        async with serving(limits=small_journal(8)) as this, client_of(this) as client:
            this.is_held = True
            name: dict[str, Any] = {"extra_body": {"session_id": "mine"}}
            first = asyncio.create_task(ask(client, HELLO, max_tokens=300, **name))
            await this.until(lambda: this.sessions.stats().live_turns == 1)
            other = [{"role": "user", "content": "Another beginning"}]
            second = asyncio.create_task(ask(client, other, max_tokens=300, **name))
            await this.until(lambda: this.sessions.stats().queued_turns == 1)
            for _ in range(700):  # without a turn of the event loop: nobody reads
                this.engine.step()
                this.engine.deliver()
            this.is_held = False
            with pytest.raises(openai.NotFoundError, match="replaced"):
                await first
            assert len(text_of(await second)) > 300

    asyncio.run(asyncio.wait_for(check(), DEADLINE_S))


@served()
async def test_readers_are_told_what_a_whole_conversation_replaces(this: Served) -> None:
    async with client_of(this) as client:
        name: dict[str, Any] = {"extra_body": {"session_id": "mine"}}
        messages, _ = await talk(client, 2, **name)
        async with this.socket("mine") as wire:
            items = (await this.http.get("/v1/sessions/mine/items")).json()["data"]
            await ask(client, [*messages[:2], {"role": "user", "content": "Or?"}], **name)
            rewound = await wire.until("session.rewound")
            assert rewound["to_item"] == items[1]["id"]
            assert rewound["tokens"] == items[1]["end_len"]
            await wire.until("turn.completed")


@served(allowed_origins=("https://page.example",))
async def test_a_page_may_use_the_sdk(this: Served) -> None:
    asked = "authorization,content-type,x-stainless-lang,x-stainless-retry-count"
    preflight = {
        "origin": "https://page.example",
        "access-control-request-method": "POST",
        "access-control-request-headers": asked,
    }
    answer = await this.http.options("/v1/chat/completions", headers=preflight)
    assert answer.status_code == 200, answer.text


def _has_said_something(this: Served) -> bool:
    (view, *_) = (session.view() for session in this.sessions._sessions)
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
