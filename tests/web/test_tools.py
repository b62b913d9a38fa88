"""Tools over a real socket: what the `openai` package and the native protocol see of one call."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionChunk

from session_server.core.commands import SubmitTurn
from session_server.core.owner import ANONYMOUS
from session_server.core.sampling import Grammar
from session_server.sessions.manager import SessionManager
from session_server.sessions.quotas import SessionLimits
from session_server.sessions.salts import TenantSalts
from tests.sessions.paper_engine import PaperEngine
from tests.sessions.world import model_text
from tests.web.serving import DEADLINE_S, Served, Wire, serving_over, small_journal
from tests.web.test_chat_completions import cached, client_of, session_of

HELLO: list[Any] = [{"role": "user", "content": "What is the weather in Oslo?"}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
THOUGHT = "<think>\nI should look.\n</think>\n\n"


def tool(name: str = "weather") -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def say(this: Served[PaperEngine], *texts: str) -> None:
    """Let the model say these next, each as an answer."""
    model = this.sessions.text
    ends = sorted(model.eos_token_ids)
    encoded = (model.tokenizer.encode_control(text) for text in texts)
    script = deque(token for ids in encoded for token in (*ids, ends[-1]))
    this.engine.next_token = lambda _context: script.popleft() if script else ends[-1]


@contextlib.asynccontextmanager
async def talking(
    kind: str, *, limits: SessionLimits | None = None
) -> AsyncIterator[tuple[Served[PaperEngine], AsyncOpenAI]]:
    text = model_text(kind)
    ends = tuple(sorted(text.eos_token_ids))
    engine = PaperEngine(vocab_size=len(text.tokenizer.vocabulary), eos_ids=ends)
    manager = SessionManager(engine, text, salts=TenantSalts(bytes(32)), limits=limits)
    async with serving_over(engine, manager) as this, client_of(this) as client:
        try:
            yield this, client
        finally:
            await text.grammars.close()  # its child talks to this loop, the next test has another


def talks(
    kind: str, **options: Any
) -> Callable[[Callable[[Served[PaperEngine], AsyncOpenAI], Awaitable[None]]], Callable[[], None]]:
    """Make a coroutine over a server of this kind of model a test."""

    def decorate(
        test: Callable[[Served[PaperEngine], AsyncOpenAI], Awaitable[None]],
    ) -> Callable[[], None]:
        async def check() -> None:
            async with asyncio.timeout(DEADLINE_S), talking(kind, **options) as (this, client):
                await test(this, client)

        @functools.wraps(test)
        def run() -> None:
            asyncio.run(check())

        del run.__wrapped__  # type: ignore[attr-defined]  # pytest would ask for its arguments
        return run

    return decorate


async def ask(client: AsyncOpenAI, messages: list[Any], **options: Any) -> Any:
    options = {"model": "paper", "tools": [tool()], "max_tokens": 400} | options
    return await client.chat.completions.create(messages=messages, **options)


def held_to(this: Served[PaperEngine]) -> Grammar | None:
    """The grammar of the turn submitted last."""
    *_, submitted = (each for each in this.engine.seen if isinstance(each, SubmitTurn))
    return submitted.sampling.grammar


def result_of(call: Any) -> dict[str, str]:
    return {"role": "tool", "tool_call_id": call.id, "content": "Rain."}


@talks("thinking_tools")
async def test_a_call_is_what_the_sdk_expects(
    this: Served[PaperEngine], client: AsyncOpenAI
) -> None:
    say(this, THOUGHT + CALL)
    completion = await ask(client, HELLO)
    choice = completion.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert choice.message.reasoning_content == "I should look."
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name) == ("function", "weather")
    assert json.loads(call.function.arguments) == {"city": "Oslo"}
    sent = choice.message.model_dump(exclude_none=True)
    say(this, "It rains.")
    second = await ask(client, [*HELLO, sent, result_of(call)])
    assert (second.choices[0].finish_reason, second.choices[0].message.content) == (
        "stop",
        "It rains.",
    )
    assert session_of(second) == session_of(completion)
    assert cached(second) >= completion.usage.total_tokens - 1
    del sent["reasoning_content"]  # few clients send it back
    say(this, "Still.")
    talk = [*HELLO, sent, result_of(call), {"role": "assistant", "content": "It rains."}]
    third = await ask(client, [*talk, {"role": "user", "content": "And now?"}])
    assert session_of(third) == session_of(completion)
    assert cached(third) >= second.usage.total_tokens - 1
    items = (await this.http.get(f"/v1/sessions/{session_of(third)}/items")).json()["data"]
    assert [item["role"] for item in items] == [
        "user",
        "assistant",
        "tool",
        "assistant",
        "user",
        "assistant",
    ]
    assert items[1]["reasoning"] == "I should look."
    assert items[1]["tool_calls"][0]["id"] == items[2]["tool_call_id"] == call.id
    assert "tool_calls" not in items[0]


@talks("thinking_tools")
async def test_a_streamed_call_is_assembled_by_the_sdk(
    this: Served[PaperEngine], client: AsyncOpenAI
) -> None:
    say(this, THOUGHT + "I look." + CALL + CALL.replace("Oslo", "Rome"))
    chunks: list[ChatCompletionChunk] = []
    async with client.chat.completions.stream(
        model="paper",
        messages=HELLO,
        tools=[tool()],  # type: ignore[list-item]  # a dict, as people write it
        max_tokens=400,
    ) as stream:
        chunks = [event.chunk async for event in stream if event.type == "chunk"]
        final = await stream.get_final_completion()
    choice = final.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I look."
    calls = choice.message.tool_calls
    assert calls is not None
    assert [json.loads(c.function.arguments)["city"] for c in calls] == ["Oslo", "Rome"]
    pieces = [d for c in chunks for d in c.choices[0].delta.tool_calls or ()]
    for index in (0, 1):
        first, *rest = [piece for piece in pieces if piece.index == index]
        assert first.id
        assert first.type == "function"
        assert first.function is not None
        assert first.function.name == "weather"
        assert all(piece.id is piece.type is None for piece in rest)
        assert all(piece.function is not None and piece.function.name is None for piece in rest)
    thought = [
        (chunk.choices[0].delta.model_extra or {}).get("reasoning_content") for chunk in chunks
    ]
    assert "".join(filter(None, thought)) == "I should look."


@talks("hermes", limits=small_journal(4))
async def test_a_reader_that_missed_pieces_gets_the_whole_call(
    this: Served[PaperEngine], client: AsyncOpenAI
) -> None:
    this.engine.tokens_per_step = 40
    say(this, CALL)
    chunks = [chunk async for chunk in await ask(client, HELLO, stream=True)]
    pieces = [d for c in chunks for d in c.choices[0].delta.tool_calls or ()]
    said = "".join(p.function.arguments or "" for p in pieces if p.function is not None)
    assert json.loads(said) == {"city": "Oslo"}
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


@talks("hermes")
async def test_tool_choice_none_makes_calls_text_and_other_tools_another_conversation(
    this: Served[PaperEngine], client: AsyncOpenAI
) -> None:
    say(this, CALL)
    completion = await ask(client, HELLO, tool_choice="none")
    assert completion.choices[0].message.content == CALL
    assert completion.choices[0].finish_reason == "stop"
    said = {"role": "assistant", "content": CALL}
    talk = [*HELLO, said, {"role": "user", "content": "And?"}]
    same = await ask(client, talk)
    assert session_of(same) == session_of(completion)
    other = await ask(client, talk, tools=[tool("time")])
    assert session_of(other) != session_of(completion)
    named: dict[str, Any] = {"extra_body": {"session_id": "mine"}}
    await ask(client, talk, **named)
    changed = await ask(client, talk, tools=[tool("time")], **named)
    text = this.sessions.text.tokenizer.decode(
        this.sessions.history(ANONYMOUS, "mine"), skip_special_tokens=False
    )
    assert '"name": "time"' in text
    assert text.count('"parameters"') == 1
    assert changed.choices[0].finish_reason == "stop"


@talks("hermes")
async def test_an_answer_that_must_call_is_held_to_the_notation_of_calls(
    this: Served[PaperEngine], client: AsyncOpenAI
) -> None:
    say(this, CALL)
    completion = await ask(client, HELLO, tool_choice="required")
    assert completion.choices[0].finish_reason == "tool_calls"
    grammar = held_to(this)
    assert grammar is not None
    assert '{"const": "weather"}' in grammar.calls
    say(this, CALL)
    form = {"type": "json_object"}
    both = await ask(client, HELLO, tool_choice="required", response_format=form)
    assert both.choices[0].finish_reason == "tool_calls", "a format is that of the text"
    named = {"type": "function", "function": {"name": "time"}}
    wrong: list[dict[str, Any]] = [
        {"tool_choice": named},
        {"tool_choice": "required", "tools": []},
    ]
    for options in wrong:
        with pytest.raises(openai.BadRequestError) as refused:
            await ask(client, HELLO, **options)
        assert refused.value.param == "tool_choice"


@talks("thinking_tools")
async def test_a_grammar_begins_behind_the_thought(
    this: Served[PaperEngine], client: AsyncOpenAI
) -> None:
    form = {"type": "json_object"}
    say(this, THOUGHT + "{}")
    first = await ask(client, HELLO, tools=[], response_format=form)
    assert (first.choices[0].message.reasoning_content, first.choices[0].message.content) == (
        "I should look.",
        "{}",
    )
    grammar = held_to(this)
    assert grammar is not None
    assert "\nbefore: (" in grammar.before
    assert grammar.text == '{"type":"object"}'
    say(this, THOUGHT + CALL)
    await ask(client, HELLO, tool_choice="required")
    called = held_to(this)
    assert called is not None
    assert called.before == grammar.before.replace("@answer", "@calls")
    raw = {"model": "paper", "prompt": "{", "max_tokens": 4, "guided_json": {}}
    (await this.http.post("/v1/completions", json=raw)).raise_for_status()
    without = held_to(this)
    assert without is not None
    assert without.before == "", "raw text has no thoughts"


@talks("thinking")
async def test_a_grammar_begins_behind_the_thought_that_the_template_opens(
    this: Served[PaperEngine], client: AsyncOpenAI
) -> None:
    say(this, "So.</think>{}")
    done = await ask(client, HELLO, tools=[], response_format={"type": "json_object"})
    assert (done.choices[0].message.reasoning_content, done.choices[0].message.content) == (
        "So.",
        "{}",
    )
    grammar = held_to(this)
    assert grammar is not None
    assert "\nbefore: thought\n" in grammar.before


@talks("hermes")
async def test_several_answers_call_each_for_itself(
    this: Served[PaperEngine], client: AsyncOpenAI
) -> None:
    spoken = this.sessions.text.tokenizer.encode_control(CALL)
    ends = sorted(this.sessions.text.eos_token_ids)

    def next_token(context: Any) -> int:
        """The call behind any prompt."""
        said = list(context)
        for length in range(min(len(spoken), len(said)), -1, -1):
            if said[len(said) - length :] == spoken[:length]:
                return spoken[length] if length < len(spoken) else ends[-1]
        raise AssertionError("nothing is a beginning of the call")

    this.engine.next_token = next_token
    for choice in ("auto", "required"):
        done = await ask(client, HELLO, n=3, tool_choice=choice)
        assert [each.index for each in done.choices] == [0, 1, 2]
        calls = [call for each in done.choices for call in each.message.tool_calls]
        assert len({call.id for call in calls}) == len(calls) == 3
        assert all(json.loads(each.function.arguments) == {"city": "Oslo"} for each in calls)
        assert {each.finish_reason for each in done.choices} == {"tool_calls"}
        arguments, reasons = ["", "", ""], ["", "", ""]
        async for chunk in await ask(client, HELLO, n=3, tool_choice=choice, stream=True):
            for each in chunk.choices:
                reasons[each.index] = each.finish_reason or reasons[each.index]
                for piece in each.delta.tool_calls or ():
                    arguments[each.index] += piece.function.arguments or ""
        assert [json.loads(each) for each in arguments] == [{"city": "Oslo"}] * 3
        assert reasons == ["tool_calls"] * 3


@talks("lfm2")
async def test_calls_that_are_no_json_are_held_to_their_schemas_too(
    this: Served[PaperEngine], client: AsyncOpenAI
) -> None:
    say(this, '<|tool_call_start|>[weather(city="Oslo")]<|tool_call_end|>')
    done = await ask(client, HELLO, tool_choice="required")
    (call,) = done.choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Oslo"}
    odd = tool()
    odd["function"]["parameters"]["minProperties"] = 1
    with pytest.raises(openai.BadRequestError) as refused:
        await ask(client, HELLO, tools=[odd], tool_choice="required")
    assert (refused.value.code, refused.value.param) == ("unsupported_operation", "tools")


@talks("thinking_tools")
async def test_an_answer_with_a_form_may_call_instead(
    this: Served[PaperEngine], client: AsyncOpenAI
) -> None:
    options: dict[str, Any] = {"response_format": {"type": "json_object"}}
    say(this, THOUGHT + CALL)
    called = (await ask(client, HELLO, **options)).choices[0]
    assert called.finish_reason == "tool_calls"
    several = held_to(this)
    assert several is not None
    assert several.text == '{"type":"object"}'
    assert '{"const": "weather"}' in several.calls
    assert "(@answer | @calls)" in several.before
    say(this, THOUGHT + "{}")
    done = (await ask(client, HELLO, parallel_tool_calls=False, **options)).choices[0]
    assert (done.finish_reason, done.message.content) == ("stop", "{}")
    single = held_to(this)
    assert single is not None
    assert ")*" in several.calls.splitlines()[0]
    assert ")*" not in single.calls.splitlines()[0]
    say(this, "{}")
    await ask(client, HELLO, tool_choice="none", **options)
    without = held_to(this)
    assert without is not None
    assert without.calls == ""


async def deltas_of(wire: Wire) -> AsyncIterator[dict[str, Any]]:
    """The deltas of a turn, and its end."""
    while True:
        frame = await wire.until("turn.delta", "turn.completed")
        yield frame
        if frame["type"] == "turn.completed":
            return


@talks("hermes")
async def test_the_native_protocol_says_the_same(
    this: Served[PaperEngine], client: AsyncOpenAI
) -> None:
    async with this.socket() as wire:
        say(this, "I look." + CALL)
        sampling = {"max_tokens": 400}
        await wire.send("turn.create", turn_id="1", input="Hi", tools=[tool()], sampling=sampling)
        deltas = [frame async for frame in deltas_of(wire)]
        end = deltas.pop()
        pieces = [piece for delta in deltas for piece in delta.get("tool_calls", ())]
        (call,) = end["item"]["tool_calls"]
        assert end["item"]["content"] == "I look." == "".join(each["text"] for each in deltas)
        assert json.loads(call["arguments"]) == {"city": "Oslo"}
        assert "".join(piece["arguments"] for piece in pieces) == call["arguments"]
        assert (pieces[0]["id"], pieces[0]["name"]) == (call["id"], "weather")
        assert all("id" not in piece and "name" not in piece for piece in pieces[1:])
        assert all("reasoning" not in frame for frame in (*deltas, end["item"]))
        say(this, "Rain.")
        result = {"role": "tool", "content": "Rain.", "tool_call_id": call["id"]}
        await wire.send("turn.create", turn_id="2", input=[result])
        end = await wire.until("turn.completed")
        assert end["item"]["content"] == "Rain."
        assert "tool_calls" not in end["item"]
        await wire.send("turn.create", turn_id="3", input="And?", tools=[tool("time")])
        error = (await wire.until("error"))["error"]
        assert (error["code"], error["param"]) == ("unsupported_operation", "tools")
        assert "session.rewind" in error["message"]
        session_id = wire.hello["session_id"]
    say(this, CALL)
    body = {"input": "Again", "tool_choice": "none", "sampling": {"max_tokens": 400}}
    answer = await this.http.post(f"/v1/sessions/{session_id}/turns", json=body)
    assert answer.json()["text"] == CALL
    first = (await this.http.get(f"/v1/sessions/{session_id}/turns/1")).json()
    assert first["item"]["tool_calls"] == [call]
    say(this, CALL)
    body |= {"tool_choice": "required", "turn_id": "held"}
    turns = f"/v1/sessions/{session_id}/turns"
    held = (await this.http.post(turns, json=body)).raise_for_status()
    assert held.json()["item"]["tool_calls"][0]["name"] == "weather"
    grammar = held_to(this)
    assert grammar is not None
    assert '{"const": "weather"}' in grammar.calls, "the tools of the conversation"
    assert (await this.http.post(turns, json=body)).json()["item"] == held.json()["item"]
    say(this, CALL)
    form = {"turn_id": "form", "tool_choice": "auto", "sampling": {"json_schema": "{}"}}
    (await this.http.post(turns, json=body | form)).raise_for_status()
    both = held_to(this)
    assert both is not None
    assert (both.text, both.calls) == ("{}", grammar.calls)
    say(this, "{}", "{}")
    raw = {"text": "x", "turn_id": "raw", "sampling": {"json_schema": "{}"}}
    go_on = {"continue": True, "turn_id": "go-on", "sampling": {"json_schema": "{}"}}
    for last in (raw, go_on):
        answer = await this.http.post(turns, json=last)
        assert answer.status_code == 200, answer.text
        alone = held_to(this)
        assert alone is not None
        assert (alone.calls, alone.before) == ("", "")
    say(this, CALL + CALL)
    one = {"turn_id": "one", "tool_choice": "auto", "parallel_tool_calls": False}
    first_only = (await this.http.post(turns, json=body | one)).json()
    assert len(first_only["item"]["tool_calls"]) == 1
    body |= {"turn_id": "time", "tool_choice": {"type": "function", "function": {"name": "time"}}}
    for wrong in (body, {"text": "x", "tool_choice": "required"}):
        refused = await this.http.post(turns, json=wrong)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tool_choice")
    copy = await this.open(
        messages=[
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "I look.", "tool_calls": [call]},
            result,
        ]
    )
    items = (await this.http.get(f"/v1/sessions/{copy}/items")).json()["data"]
    assert items[1]["tool_calls"] == [call]
    raw = await this.http.post(
        f"/v1/sessions/{session_id}/turns", json={"text": "x", "tools": [tool()]}
    )
    assert (raw.status_code, raw.json()["error"]["param"]) == (400, "tools")


@talks("chatml")
async def test_tools_of_a_model_that_takes_none_are_left_out_and_a_header_says_so(
    this: Served[PaperEngine], client: AsyncOpenAI
) -> None:
    create = client.chat.completions.with_raw_response.create
    options: dict[str, Any] = {"model": "paper", "messages": HELLO, "max_tokens": 4}
    plain = await create(**options)
    assert "x-left-out" not in plain.headers
    options["tools"] = [tool()]
    choices: tuple[dict[str, Any], ...] = ({}, {"tool_choice": "auto"}, {"tool_choice": "none"})
    for choice in choices:
        answer = await create(**options, **choice)
        assert answer.headers["x-left-out"] == "tools"
        assert answer.parse().usage.prompt_tokens == plain.parse().usage.prompt_tokens
    streamed = await create(**options, stream=True)
    assert streamed.headers["x-left-out"] == "tools"
    assert [chunk async for chunk in streamed.parse()]
    form = {"type": "json_schema", "json_schema": {"name": "f", "schema": {"const": 1}}}
    say(this, "1")
    await create(**options, response_format=form)
    held = held_to(this)
    assert held is not None
    assert held.calls == "", "the answer has the form and calls nothing"
    named = {"type": "function", "function": {"name": "weather"}}
    for must_call in ("required", named):
        with pytest.raises(openai.BadRequestError) as refused:
            await create(**options, tool_choice=must_call)
        assert (refused.value.code, refused.value.param) == ("unsupported_operation", "tool_choice")


@talks("hermes")
async def test_tools_of_a_model_that_takes_some_are_never_left_out(
    this: Served[PaperEngine], client: AsyncOpenAI
) -> None:
    create = client.chat.completions.with_raw_response.create
    answer = await create(model="paper", messages=HELLO, max_tokens=4, tools=[tool()])
    assert "x-left-out" not in answer.headers
