"""Turns that go on from the last answer: the same tokens, text and item as an answer never cut."""

from __future__ import annotations

from typing import Any

import pytest

from session_server.core.commands import SubmitTurn
from session_server.core.errors import InvalidRequest, SessionServerError
from session_server.core.session_events import (
    ChatInput,
    ContinueInput,
    ConversationItem,
    Message,
    TextInput,
    TextOptions,
    TurnDelta,
)
from session_server.sessions.answer import Answer
from session_server.sessions.prompt import NUM_TAIL, Continued, Prompt
from tests.sessions.test_rewinds import APPENDING, REWRITING
from tests.sessions.world import OWNER, World, cancelled, completed, turn

MORE = ContinueInput()
QUESTIONS = [f"Hello {index}" for index in range(8)]


def items(world: World, session: str) -> tuple[ConversationItem, ...]:
    return world.manager.snapshot(OWNER, session).items


def said(item: ConversationItem) -> tuple[str, str, str, str, int]:
    return item.id, item.role, item.content, item.reasoning, item.end_len


@pytest.mark.parametrize("kind", [*APPENDING, *REWRITING])
@pytest.mark.parametrize("is_raw", [False, True])
def test_a_continued_answer_is_one_that_was_never_cut(kind: str, *, is_raw: bool) -> None:
    num_cut = 0
    with World(kind) as world:
        for question in QUESTIONS:
            whole, parts = world.open(), world.open()
            content = TextInput(question) if is_raw else ChatInput((Message("user", question),))
            for session in (whole, parts):
                world.run(session, turn("t0", content, max_tokens=3))
            expected = completed(world.run(whole, turn("t1", content, max_tokens=9))).outcome
            first = completed(world.run(parts, turn("t1", content, max_tokens=4)))
            if first.reason == "stop":
                continue
            num_cut += 1
            rest = completed(world.run(parts, turn("t2", MORE, max_tokens=5))).outcome
            assert world.history(parts) == world.history(whole)
            assert list(map(said, items(world, parts))) == list(map(said, items(world, whole)))
            assert (rest.text, rest.item_id) == (expected.text, first.outcome.item_id)
            assert first.outcome.token_ids + rest.token_ids == expected.token_ids
            deltas = [e for e in world.entries(parts) if isinstance(e, TurnDelta)]
            assert "".join(d.text for d in deltas if d.turn_id != "t0") == expected.text
            for session in (whole, parts):  # and what follows is the same too
                world.run(session, turn("t3", content, max_tokens=3))
            assert world.history(parts) == world.history(whole)
            assert world.manager.turn(OWNER, parts, "t2").text == expected.text
    assert num_cut > 2


def test_nothing_is_rendered_and_an_end_of_turn_is_taken_away(world: World) -> None:
    ended = None
    for question in QUESTIONS * 3:
        session = world.open()
        end = completed(world.run(session, turn("t1", question + " again", max_tokens=60)))
        if end.reason == "stop":
            ended = end
            break
    assert ended is not None
    history = world.history(session)
    completed(world.run(session, turn("t2", MORE, max_tokens=1)))
    sent = [command for command in world.engine.seen if isinstance(command, SubmitTurn)][-1]
    assert sent.base_len + len(sent.tokens) == len(history) - 1
    assert len(sent.tokens) == 1
    assert world.history(session) == history  # the model ends it again
    (answer,) = [item for item in items(world, session) if item.role == "assistant"]
    assert answer.content == ended.outcome.text


@pytest.mark.parametrize("kind", [*APPENDING, "counting"])
def test_an_edited_answer_is_what_the_next_one_begins_with(kind: str) -> None:
    with World(kind) as world:
        session = world.open()
        world.run(session, turn("t0", "Hello", max_tokens=3))
        end = completed(world.run(session, turn("t1", "And?", max_tokens=3)))
        item_id = end.outcome.item_id
        world.manager.edits.edit_item(OWNER, session, item_id, "My own words")
        grown = completed(world.run(session, turn("t2", MORE, max_tokens=5))).outcome
        assert grown.item_id == item_id
        assert grown.text.startswith("My own words")
        assert len(grown.text) > len("My own words")
        history = world.decode(world.history(session))
        context = world.decode(world.history(session)[: grown.usage.input_tokens])
        assert context.endswith("My own words")
        assert history.count("My own words") == 1
        assert [item.role for item in items(world, session)] == ["user", "assistant"] * 2
        world.run(session, turn("t3", "Go on", max_tokens=3))
        again = world.decode(world.history(session))
        assert again.startswith(context.rstrip()) or kind == "counting"


def test_a_rewound_answer_goes_on_and_a_queued_turn_continues_what_runs(world: World) -> None:
    session, whole = world.open(), world.open()
    first = completed(world.run(session, turn("t1", "Hello", max_tokens=4)))
    world.run(session, turn("t2", "And?"))
    world.manager.edits.rewind(OWNER, session, first.outcome.item_id)
    world.submit(session, turn("t3", MORE, max_tokens=2))
    world.submit(session, turn("t4", MORE, max_tokens=3))
    world.engine.run()
    expected = completed(world.run(whole, turn("t1", "Hello", max_tokens=9)))
    assert completed(world.end_of(session, "t4")).outcome.text == expected.outcome.text
    assert world.history(session) == world.history(whole)


@pytest.mark.parametrize("keep_partial", [False, True])
def test_a_canceled_continuation_keeps_what_it_says(world: World, *, keep_partial: bool) -> None:
    session = world.open()
    end = completed(world.run(session, turn("t1", "Hello", max_tokens=4)))
    before = world.history(session)
    world.submit(session, turn("t2", MORE, max_tokens=50))
    for _ in range(3):
        world.engine.step()
        world.engine.deliver()
    world.manager.cancel(OWNER, session, "t2", keep_partial=keep_partial)
    world.engine.run()
    assert cancelled(world.end_of(session, "t2")).kept_partial is keep_partial
    (_, answer) = items(world, session)
    assert answer.id == end.outcome.item_id
    if keep_partial:
        assert len(world.history(session)) > len(before)
        assert answer.content.startswith(end.outcome.text)
    else:
        assert world.history(session) == before
        assert answer.content == end.outcome.text


def test_what_ends_with_no_answer_cannot_be_continued(world: World) -> None:
    prefilled = world.open(messages=(Message("user", "Hello"),))
    world.run(prefilled, turn("t1", "And?", max_tokens=0))
    alone = world.open(messages=(Message("assistant", "Hello"),))
    answered = world.open()
    world.run(answered, turn("t1", "Hello"))
    options: dict[str, Any] = {"max_tokens": 5}
    for session in (world.open(), prefilled, alone, answered):
        if session == answered:
            options = {"max_tokens": 0}
        history = world.history(session)
        with pytest.raises(SessionServerError) as refused:
            world.submit(session, turn("t2", MORE, **options))
        assert isinstance(refused.value, InvalidRequest)
        assert refused.value.param == "continue"
        assert world.history(session) == history
    given = world.open(messages=(Message("user", "Hello"), Message("assistant", "I am")))
    grown = completed(world.run(given, turn("t1", MORE)))
    assert grown.outcome.text.startswith("I am")


@pytest.mark.parametrize("kind", ["chatml", "llama3"])
def test_characters_and_spaces_are_whole_across_the_cut(kind: str) -> None:
    with World(kind) as world:
        text = " Größe 😀 — 語\n ende"
        ids = tuple(world.text.tokenizer.encode_content(text))

        def answer(continued: Continued | None) -> Answer:
            prompt = Prompt(0, ids, (), "", generate=True, continued=continued)
            return Answer(world.text, TextOptions(), prompt, end_ids=(), min_tokens=0)

        def speak(of: Answer, tokens: tuple[int, ...]) -> Message:
            of.feed(tokens, ())
            of.finish()
            return of.message

        whole = speak(answer(None), ids)
        for cut in range(len(ids) + 1):
            before = speak(answer(None), ids[:cut])
            tail = ids[max(0, cut - NUM_TAIL) : cut]
            first = Continued("i_1", before, tail, is_rendered=True, is_raw=True)
            assert speak(answer(first), ids[cut:]) == whole


def test_reasoning_goes_on_as_reasoning_and_text_as_text() -> None:
    with World("thinking") as world:
        ids = world.control("<think>first this, then that</think>hello to you")

        def answer(continued: Continued | None) -> Answer:
            prompt = Prompt(0, (), (), None, generate=True, continued=continued)
            return Answer(world.text, TextOptions(), prompt, end_ids=(), min_tokens=0)

        def speak(of: Answer, tokens: tuple[int, ...]) -> Message:
            of.feed(tokens, ())
            of.finish()
            return of.message

        whole = speak(answer(None), ids)
        assert whole.reasoning
        wrong = []
        for cut in range(len(ids) + 1):
            before = speak(answer(None), ids[:cut])
            tail = ids[max(0, cut - NUM_TAIL) : cut]
            first = Continued("i_1", before, tail, is_rendered=True, is_raw=False)
            if speak(answer(first), ids[cut:]) != whole:
                wrong.append((cut, world.decode(ids[:cut]), speak(answer(first), ids[cut:])))
        assert not wrong
