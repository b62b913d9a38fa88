"""Answers that think and call tools, in the notation of each family: parted once, and the same for
every reader."""

from __future__ import annotations

import json
from collections import deque
from typing import Any

import pytest
from msgspec import structs

from session_server.core.session_events import (
    ChatInput,
    Message,
    Outcome,
    TextInput,
    TextOptions,
    ToolCall,
    TurnCompleted,
    TurnDelta,
    TurnInput,
    TurnRequest,
)
from session_server.sessions.items import message_of
from session_server.sessions.journal import JournalLimits
from session_server.sessions.quotas import SessionLimits
from session_server.text.answer_pieces import CallCollector
from tests.sessions.world import OWNER, World, cancelled, completed, turn

ARGUMENTS = {"city": "Oslo", "days": 3}
WEATHER = json.dumps({"type": "function", "function": {"name": "weather", "parameters": {}}})
ONE = json.dumps(ARGUMENTS)

CALLS = {
    "hermes": f'<tool_call>\n{{"name": "weather", "arguments": {ONE}}}\n</tool_call>',
    "thinking_tools": f'<tool_call>\n{{"name": "weather", "arguments": {ONE}}}\n</tool_call>',
    "llama31": f'{{"name": "weather", "parameters": {ONE}}}',
    "mistral": f'[TOOL_CALLS] [{{"name": "weather", "arguments": {ONE}}}]',
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>"
    f"{ONE}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "lfm2": "<|tool_call_start|>[weather(city='Oslo', days=3)]<|tool_call_end|>",
}


def say(world: World, text: str) -> None:
    """Let the model say this next, and end its answer."""
    ends = sorted(world.text.eos_token_ids)
    script = deque([*world.text.tokenizer.encode_control(text), ends[-1]])
    world.engine.next_token = lambda _context: script.popleft() if script else ends[-1]


def ask(*messages: Message, tools: tuple[str, ...] = (WEATHER,), **options: Any) -> ChatInput:
    return ChatInput(messages or (Message("user", "Hello"),), tools=tools, **options)


def run(world: World, session: str, name: str, asked: TurnInput, **text: Any) -> Outcome:
    sampling = turn(name, max_tokens=400).sampling
    request = TurnRequest(name, asked, sampling, text=TextOptions(**text))
    return completed(world.run(session, request)).outcome


def deltas(world: World, session: str) -> list[TurnDelta]:
    return [entry for entry in world.entries(session) if isinstance(entry, TurnDelta)]


def assembled(pieces: list[TurnDelta]) -> tuple[str, str, tuple[ToolCall, ...]]:
    """What a client makes of the deltas."""
    calls: list[ToolCall] = []
    for piece in (call for delta in pieces for call in delta.tool_calls):
        if piece.index == len(calls):
            calls.append(ToolCall(piece.id, piece.name, ""))
        held = calls[piece.index]
        calls[piece.index] = structs.replace(held, arguments=held.arguments + piece.arguments)
    text, reasoning = (d.text for d in pieces), (d.reasoning for d in pieces)
    return "".join(text), "".join(reasoning), tuple(calls)


@pytest.mark.parametrize("kind", CALLS)
def test_a_call_is_heard_and_answered_token_exactly(kind: str) -> None:
    with World(kind) as world:
        session = world.open()
        say(world, CALLS[kind])
        outcome = run(world, session, "1", ask())
        (call,) = outcome.tool_calls
        assert (call.name, json.loads(call.arguments)) == ("weather", ARGUMENTS)
        assert len(call.id) == 9
        assert (outcome.text, outcome.reasoning) == ("", "")
        assert assembled(deltas(world, session)) == ("", "", outcome.tool_calls)
        item = world.manager.snapshot(OWNER, session).items[-1]
        assert message_of(item) == Message("assistant", "", tool_calls=(call,))
        history = world.history(session)
        result = Message("tool", "Rain.", tool_call_id=call.id)
        say(world, "Take an umbrella.")
        second = run(world, session, "2", ask(result, tools=()))
        assert second.text.strip() == "Take an umbrella."
        if kind != "mistral":  # whose tools move, so that all of it is rendered again
            assert world.history(session)[: len(history) - 1] == history[:-1]
            assert second.usage.cached_tokens >= len(history) - 2
        assert '"Oslo"' in world.decode(world.history(session)) or kind == "lfm2"
        spelled = ToolCall(call.id, call.name, '{"days":3.0,"city":"\\u004fslo"}')
        talk = (Message("user", "Hello"), Message("assistant", "", tool_calls=(spelled,)), result)
        again = ask(*talk, is_whole=True)
        say(world, "Take an umbrella.")
        third = run(world, session, "3", again)
        assert third.usage.input_tokens - third.usage.cached_tokens <= 2 or kind == "mistral"
        assert [each.content for each in world.manager.snapshot(OWNER, session).items] == [
            "Hello",
            "",
            "Rain.",
            third.text,
        ]


@pytest.mark.parametrize("kind", ["hermes", "mistral"])
def test_several_calls_and_a_text_before_them(kind: str) -> None:
    with World(kind) as world:
        session = world.open()
        one, two = ({"name": "weather", "arguments": {"city": c}} for c in ("Oslo", "Rome"))
        calls = {
            "hermes": "".join(f"\n<tool_call>{json.dumps(c)}</tool_call>" for c in (one, two)),
            "mistral": "[TOOL_CALLS]" + json.dumps([one, two]),
        }
        say(world, "Let me look." + calls[kind])
        outcome = run(world, session, "1", ask())
        assert outcome.text == "Let me look."
        assert [json.loads(c.arguments)["city"] for c in outcome.tool_calls] == ["Oslo", "Rome"]
        assert len({call.id for call in outcome.tool_calls}) == 2
        assert assembled(deltas(world, session)) == ("Let me look.", "", outcome.tool_calls)


@pytest.mark.parametrize("kind", ["hermes", "mistral"])
def test_where_one_call_is_wanted_a_second_one_ends_the_turn(kind: str) -> None:
    with World(kind) as world:
        session = world.open()
        one, two = ({"name": "weather", "arguments": {"city": c}} for c in ("Oslo", "Rome"))
        calls = {
            "hermes": "".join(f"\n<tool_call>{json.dumps(c)}</tool_call>" for c in (one, two)),
            "mistral": "[TOOL_CALLS]" + json.dumps([one, two]),
        }
        say(world, calls[kind] + "And more.")
        outcome = run(world, session, "1", ask(), is_one_call=True)
        (call,) = outcome.tool_calls
        assert json.loads(call.arguments) == {"city": "Oslo"}
        assert assembled(deltas(world, session)) == ("", "", outcome.tool_calls)
        assert "Rome" not in world.decode(world.history(session))
        result = Message("tool", "Rain.", tool_call_id=call.id)
        said = Message("assistant", "", tool_calls=(call,))
        say(world, "Rain.")
        whole = ask(Message("user", "Hello"), said, result, is_whole=True)
        assert run(world, session, "2", whole).text.strip() == "Rain."


def test_thoughts_are_not_text() -> None:
    with World("thinking_tools") as world:
        session = world.open()
        call = CALLS["thinking_tools"]
        say(world, f"<think>\nWhere? Oslo.\n</think>\n\nI look.\n{call}")
        first = run(world, session, "1", ask())
        assert (first.reasoning, first.text) == ("Where? Oslo.", "I look.")
        num_thought = len(world.text.tokenizer.encode_control("<think>\nWhere? Oslo."))
        assert abs(first.usage.reasoning_tokens - num_thought) <= 1
        assert assembled(deltas(world, session)) == (first.text, first.reasoning, first.tool_calls)
        said = Message("assistant", "I look.", tool_calls=first.tool_calls)
        result = Message("tool", "Rain.", tool_call_id=first.tool_calls[0].id)
        asked = (Message("user", "Hello"), said, result)
        say(world, "Rain.")
        run(world, session, "2", ask(*asked, is_whole=True))
        assert "Where? Oslo." in world.decode(world.history(session))
        rendered = world.open(history="template")
        say(world, f"<think>\nWhere? Oslo.\n</think>\n\nI look.\n{call}")
        first = run(world, rendered, "1", ask())
        result = Message("tool", "Rain.", tool_call_id=first.tool_calls[0].id)
        say(world, "Rain.")
        run(world, rendered, "2", ask(result, tools=()))
        assert "Where? Oslo." in world.decode(world.history(rendered))
        say(world, "Fine.")
        run(world, rendered, "3", ask(Message("user", "And?"), tools=()))
        assert "Where? Oslo." not in world.decode(world.history(rendered))


def test_a_prompt_that_opens_the_thoughts_needs_no_marker() -> None:
    with World("thinking") as world:
        session = world.open()
        say(world, "So.\n</think>\n\nFine.")
        outcome = run(world, session, "1", ask(tools=()))
        assert (outcome.reasoning, outcome.text) == ("So.", "Fine.")
        say(world, "Only a thought")
        outcome = run(world, session, "2", ask(tools=()))
        assert (outcome.reasoning, outcome.text) == ("Only a thought", "")


def test_calls_are_text_where_none_are_wanted_or_nothing_is_a_message() -> None:
    with World("hermes") as world:
        session = world.open()
        call = CALLS["hermes"]
        say(world, call)
        assert run(world, session, "1", ask(), may_call=False).text == call
        say(world, call)
        assert run(world, session, "2", TextInput("raw")).text == call
        plain = world.open()
        say(world, call)
        assert run(world, plain, "1", ask(tools=())).text == call


def test_stop_strings_are_those_of_the_text() -> None:
    with World("thinking_tools") as world:
        session = world.open()
        stop = ("Oslo", "zz")
        say(world, f"<think>Oslo?</think>I look.{CALLS['thinking_tools']}")
        outcome = run(world, session, "1", ask(), stop=stop)
        assert outcome.tool_calls
        say(world, "<think>Oslo?</think>It is Oslo. More.")
        end = world.run(session, turn("2", ask(tools=()), stop=stop, max_tokens=99))
        assert isinstance(end, TurnCompleted)
        assert (end.matched, end.outcome.text) == ("Oslo", "It is ")
        assert end.outcome.reasoning == "Oslo?"


@pytest.mark.parametrize("keep", [True, False])
def test_a_cancel_in_the_middle_of_a_call_keeps_what_was_heard(keep: bool) -> None:
    with World("hermes") as world:
        session = world.open()
        say(world, CALLS["hermes"])
        world.submit(session, turn("1", ask(), max_tokens=400))
        while not any(delta.tool_calls for delta in deltas(world, session)):
            world.engine.step()
            world.engine.deliver()
        running = world.manager.snapshot(OWNER, session).running
        assert running is not None
        assert running.said.tool_calls[0].name == "weather"
        world.manager.cancel(OWNER, session, "1", keep_partial=keep)
        world.engine.run()
        outcome = cancelled(world.end_of(session, "1")).outcome
        assert len(outcome.tool_calls) == keep
        if keep:
            assert assembled(deltas(world, session))[2] == outcome.tool_calls


def test_a_turn_that_the_journal_has_lost_still_has_its_calls() -> None:
    with World("hermes", limits=SessionLimits(journal=JournalLimits(max_bytes=1))) as world:
        session = world.open()
        say(world, CALLS["hermes"])
        outcome = run(world, session, "1", ask())
        say(world, "Fine.")
        run(world, session, "2", ask(tools=()))
        end = world.end_of(session, "1")
        assert end.outcome.tool_calls == outcome.tool_calls
        assert end.outcome.token_ids == ()


def test_no_token_costs_a_look_at_the_arguments_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    num_joined = 0
    calls = CallCollector.calls
    assert calls.fget is not None
    join = calls.fget

    def counted(self: CallCollector) -> tuple[ToolCall, ...]:
        nonlocal num_joined
        num_joined += 1
        found: tuple[ToolCall, ...] = join(self)
        return found

    monkeypatch.setattr(CallCollector, "calls", property(counted))
    with World("hermes") as world:
        session = world.open()
        numbers = []
        for number, days in enumerate((3, 200)):
            arguments = json.dumps({"days": list(range(days))})
            say(world, f'<tool_call>{{"name": "weather", "arguments": {arguments}}}</tool_call>')
            before = num_joined
            asked = turn(str(number), ask(), max_tokens=2000).sampling
            options = TextOptions(is_one_call=True)
            outcome = completed(
                world.run(session, TurnRequest(str(number), ask(), asked, text=options))
            ).outcome
            assert [call.arguments for call in outcome.tool_calls] == [arguments]
            numbers.append(num_joined - before)
        assert len(outcome.token_ids) > 500
        assert numbers[0] == numbers[1]
