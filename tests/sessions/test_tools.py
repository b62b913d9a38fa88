"""Conversations with tools: what is rendered, what stays of the history, what agrees."""

from __future__ import annotations

import json
from typing import Any

import pytest

from session_server.core.errors import InvalidRequest, ServerBusy, UnsupportedOperation
from session_server.core.session_events import ChatInput, ConversationItem, Message, ToolCall
from session_server.sessions.agreement import agrees, digests_of, next_digest
from session_server.sessions.quotas import QuotaLimits, SessionLimits
from tests.sessions.world import OWNER, World, completed, turn

APPENDING = ("hermes", "llama31", "lfm2", "deepseek")
RENDERING = ("mistral",)
CALL = ToolCall("abcdefghi", "weather", '{"city": "Oslo", "days": 3}')
CALLED = Message("assistant", "", tool_calls=(CALL,))
RESULT = Message("tool", "Rain.", tool_call_id=CALL.id)


def tool(name: str = "weather") -> str:
    return json.dumps({"type": "function", "function": {"name": name, "parameters": {}}})


def user(text: str) -> Message:
    return Message("user", text)


def chat(*messages: Message, tools: tuple[str, ...] = (tool(),), **options: Any) -> ChatInput:
    return ChatInput(messages, tools=tools, **options)


def whole(*messages: Message, tools: tuple[str, ...] = (tool(),)) -> ChatInput:
    return chat(*messages, tools=tools, is_whole=True)


@pytest.mark.parametrize("kind", APPENDING)
def test_turns_behind_the_first_keep_its_tools_and_append(kind: str) -> None:
    with World(kind) as world:
        session = world.open()
        end = completed(world.run(session, turn("1", chat(user("Hello")))))
        history = world.history(session)
        assert "weather" in world.decode(history)
        end = completed(world.run(session, turn("2", chat(RESULT, tools=()))))
        assert end.outcome.usage.cached_tokens >= len(history) - 2
        end = completed(world.run(session, turn("3", chat(user("And?")))))
        assert world.history(session)[: len(history) - 1] == history[:-1]
        assert world.decode(world.history(session)).count("weather") == 1
        view = world.manager.get(OWNER, session)
        assert view.history == "append"


@pytest.mark.parametrize("kind", RENDERING)
def test_where_tools_move_the_whole_conversation_is_rendered(kind: str) -> None:
    with World(kind) as world:
        session = world.open()
        assert world.manager.get(OWNER, session).history == "append"
        completed(world.run(session, turn("1", chat(user("Hello")))))
        completed(world.run(session, turn("2", chat(user("And?")))))
        assert world.manager.get(OWNER, session).history == "template"
        assert world.decode(world.history(session)).count("weather") == 1
        plain = world.open()
        completed(world.run(plain, turn("1", "Hello")))
        assert world.manager.get(OWNER, plain).history == "append"


@pytest.mark.parametrize("kind", [*APPENDING, *RENDERING])
def test_other_tools_need_the_beginning(kind: str) -> None:
    with World(kind) as world:
        session = world.open(messages=(Message("system", "Be brief."),))
        completed(world.run(session, turn("1", chat(user("Hello")))))
        with pytest.raises(UnsupportedOperation, match=r"session\.rewind") as refused:
            world.submit(session, turn("2", chat(user("And?"), tools=(tool("time"),))))
        assert refused.value.param == "tools"
        world.manager.edits.rewind(OWNER, session, None)
        completed(world.run(session, turn("3", chat(user("And?"), tools=(tool("time"),)))))
        text = world.decode(world.history(session))
        assert "time" in text
        assert "weather" not in text


def test_a_model_that_takes_no_tools_says_so() -> None:
    with World("chatml") as world:
        session = world.open()
        with pytest.raises(UnsupportedOperation, match="takes no tools"):
            world.submit(session, turn("1", chat(user("Hello"))))
        called = (user("Hello"), CALLED, RESULT)
        with pytest.raises(UnsupportedOperation, match="takes no tool calls"):
            world.submit(session, turn("2", chat(*called, tools=())))
        assert world.history(session) == ()
        completed(world.run(session, turn("3", chat(user("Hello"), tools=()))))
        with pytest.raises(UnsupportedOperation, match="takes no tools"):
            world.submit(session, turn("4", chat(user("And?"))))


@pytest.mark.parametrize("kind", [*APPENDING, *RENDERING])
def test_a_whole_conversation_agrees_with_the_same_tools_alone(kind: str) -> None:
    with World(kind) as world:
        session = world.open()
        first = completed(world.run(session, turn("1", whole(user("Hello"))))).outcome
        said = Message("assistant", first.text)
        talk = (user("Hello"), said, user("And?"))
        total = first.usage.total_tokens
        second = completed(world.run(session, turn("2", whole(*talk)))).outcome
        least = total - 2 if kind in APPENDING else 0
        assert least <= second.usage.cached_tokens <= total
        items = world.manager.snapshot(OWNER, session).items
        assert (items[1].id, items[1].content) == (first.item_id, first.text)
        for tools in ((tool("time"),), ()):
            world.run(session, turn(f"3 {len(tools)}", whole(*talk, tools=tools)))
            text = world.decode(world.history(session))
            assert ("weather" in text, "time" in text) == (False, bool(tools))
            fresh = world.open()
            world.run(fresh, turn("1", whole(*talk, tools=tools)))
            assert world.history(session) == world.history(fresh)


def item(message: Message) -> ConversationItem:
    return ConversationItem(
        id="i_1",
        turn_id="t",
        role=message.role,
        content=message.content,
        end_len=1,
        tool_calls=message.tool_calls,
        tool_call_id=message.tool_call_id,
        reasoning=message.reasoning,
    )


def called(arguments: str, *, name: str = "f", call_id: str = "c", reasoning: str = "") -> Message:
    calls = (ToolCall(call_id, name, arguments),)
    return Message("assistant", "Text.", tool_calls=calls, reasoning=reasoning)


@pytest.mark.parametrize(
    ("held", "sent", "same"),
    [
        (called('{"a": 1, "b": [2.0]}'), called('{"b":[2],"a":1.0}'), True),
        (called('{"a": "\\u00e9"}'), called('{"a":"é"}'), True),
        (called('{"a": 1}', reasoning="So."), called('{"a":1}'), True),
        (called('{"a": 1}', reasoning="So."), called('{"a":1}', reasoning="So."), True),
        (called('{"a": 1}', reasoning="So."), called('{"a":1}', reasoning="No."), False),
        (called('{"a": 1}'), called('{"a": 2}'), False),
        (called('{"a": 1}'), called('{"a": true}'), False),
        (called('{"a": 1}'), called('{"a": "1"}'), False),
        (called("{oops"), called("{oops"), True),
        (called("{oops"), called("{oops "), False),
        (called("[" * 5000), called("[" * 5001), False),
        (called("{}"), called("{}", name="g"), False),
        (called("{}"), called("{}", call_id="d"), False),
        (called("{}"), Message("assistant", "Text."), False),
        (RESULT, Message("tool", "Rain."), False),
    ],
)
def test_what_was_said_is_repeated_by_value(held: Message, sent: Message, same: bool) -> None:
    assert agrees(item(held), sent) == same
    if held.reasoning == sent.reasoning or not sent.reasoning:
        equal = digests_of([held], [tool()], hint="") == digests_of([sent], [tool()], hint="")
        assert equal == same


def test_digests_tell_conversations_apart() -> None:
    said = [user("ab"), Message("assistant", "c")]
    others = {
        tuple(digests_of(messages, tools, hint=hint))
        for messages, tools, hint in [
            (said, (), ""),
            (said, (tool(),), ""),
            (said, (tool(), tool()), ""),
            (said, (), tool()),
            ([user("a"), Message("assistant", "bc")], (), ""),
            ([user("ab"), Message("assistant", "c", tool_calls=(CALL,))], (), ""),
            ([user("ab"), Message("tool", "c", tool_call_id="x")], (), ""),
        ]
    }
    assert len(others) == 7


def test_parts_of_messages_belong_to_their_roles_and_are_bounded() -> None:
    limits = SessionLimits(max_tools=2, max_input_chars=200)
    with World("hermes", limits=limits) as world:
        session = world.open()
        for number, wrong in enumerate(
            [
                chat(Message("user", "x", tool_calls=(CALL,))),
                chat(Message("user", "x", reasoning="So.")),
                chat(Message("assistant", "x", tool_call_id="x")),
                chat(user("x"), tools=(tool(), tool("b"), tool("c"))),
                chat(Message("assistant", "", tool_calls=(CALL, CALL, CALL))),
                chat(user("x"), tools=(tool("x" * 200),)),
                chat(Message("assistant", "", reasoning="x" * 201)),
            ]
        ):
            with pytest.raises(InvalidRequest):
                world.submit(session, turn(str(number), wrong))
        completed(world.run(session, turn("ok", chat(user("x"), tools=(tool(), tool("b"))))))


def test_tools_and_calls_count_as_bytes_of_their_owner() -> None:
    with World("hermes", quotas=QuotaLimits(history_bytes=40_000)) as world:
        session = world.open()
        before = world.manager._sessions.get(OWNER, session).num_bytes
        completed(world.run(session, turn("1", chat(user("x"), tools=(tool("n" * 900),)))))
        one = world.manager._sessions.get(OWNER, session).num_bytes - before
        long = ToolCall("abcdefghi", "f", json.dumps({"a": "b" * 900}))
        talk = (Message("assistant", "", tool_calls=(long,)), user("And?"))
        completed(world.run(session, turn("2", chat(*talk, tools=()))))
        two = world.manager._sessions.get(OWNER, session).num_bytes - before
        assert one > 900
        assert two > one + 900
        huge = ToolCall("abcdefghi", "f", json.dumps({"a": "b" * 40_000}))
        talk = (Message("assistant", "", tool_calls=(huge,)), user("And?"))
        with pytest.raises(ServerBusy):
            world.submit(session, turn("3", chat(*talk, tools=())))


def test_forks_and_rewinds_keep_tools_and_edits_keep_calls() -> None:
    with World("hermes") as world:
        session = world.open()
        asked = (user("Hello"), CALLED, RESULT)
        completed(world.run(session, turn("1", chat(*asked))))
        fork = world.manager.edits.fork(OWNER, session).session_id
        completed(world.run(fork, turn("2", chat(user("And?"), tools=()))))
        assert world.decode(world.history(fork)).count('"function": {"name": "weather"') == 1
        items = world.manager.snapshot(OWNER, session).items
        world.manager.edits.edit_item(OWNER, session, items[1].id, "I ask.")
        completed(world.run(session, turn("3", chat(RESULT, tools=()))))
        text = world.decode(world.history(session))
        assert "I ask.\n<tool_call>" in text
        assert '"function": {"name": "weather"' in text


@pytest.mark.parametrize(
    ("said", "repeated", "is_same"),
    [
        ("[1e300, 2.0]", "[1.0e300,2]", True),
        ("[9007199254740993.0]", "[9007199254740992.0]", True),  # as floats
        ("[1e300]", "[2e300]", False),
    ],
)
def test_numbers_of_arguments_agree_however_large(
    said: str, repeated: str, *, is_same: bool
) -> None:
    one, other = (
        Message("assistant", "", tool_calls=(ToolCall("a", "f", arguments),))
        for arguments in (said, repeated)
    )
    assert (next_digest(b"", one) == next_digest(b"", other)) is is_same
