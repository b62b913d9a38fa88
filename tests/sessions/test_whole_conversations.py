"""Turns that send the whole conversation: what stays of the history, token for token."""

from __future__ import annotations

from collections import Counter
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import example, given, settings

from session_server.core.session_events import (
    ChatInput,
    ConversationItem,
    Message,
    Outcome,
    SessionRewound,
    TurnCompleted,
)
from session_server.sessions.journal import JournalLimits
from session_server.sessions.quotas import SessionLimits
from tests.depth import at_depth
from tests.sessions.world import OWNER, World, cancelled, completed, turn

APPENDING = ("chatml", "llama3", "alternating")
REWRITING = ("counting", "moving_system", "thinking")


def whole(*messages: Message) -> ChatInput:
    return ChatInput(messages, is_whole=True)


def user(text: str) -> Message:
    return Message("user", text)


def items(world: World, session: str) -> tuple[ConversationItem, ...]:
    return world.manager.snapshot(OWNER, session).items


def said(world: World, session: str) -> tuple[Message, ...]:
    return tuple(Message(item.role, item.content) for item in items(world, session))


def run(
    world: World, session: str, name: str, *messages: Message, **options: Any
) -> tuple[Message, Outcome]:
    """Send a whole conversation; return the answer as a message, and the outcome."""
    outcome = completed(world.run(session, turn(name, whole(*messages), **options))).outcome
    return Message("assistant", outcome.text), outcome


def built_by_turns(world: World, *messages: Message, answers: int, **options: Any) -> str:
    """A new session that comes to the same conversation turn by turn: one for each of the first
    `answers` answers, then one with all that is left."""
    session = world.open()
    pending: list[Message] = []
    number = 0
    for message in messages:
        if message.role == "assistant" and number < answers:
            number += 1
            chat = ChatInput(tuple(pending))
            end = completed(world.run(session, turn(f"by turns {number}", chat, **options)))
            assert end.outcome.text == message.content
            pending = []
        else:
            pending.append(message)
    world.run(session, turn("by turns", ChatInput(tuple(pending)), **options))
    return session


@pytest.mark.parametrize("kind", APPENDING)
def test_a_conversation_sent_whole_has_the_tokens_of_one_sent_by_turns(kind: str) -> None:
    with World(kind) as world:
        session = world.open()
        conversation: list[Message] = []
        total = 0
        for index in range(6):
            conversation.append(user(f"Hello {index}, how are you?"))
            answer, outcome = run(world, session, str(index), *conversation, max_tokens=9)
            if index:
                assert outcome.usage.cached_tokens in {total, total - 1}
            total = outcome.usage.total_tokens
            conversation.append(answer)
        assert said(world, session) == tuple(conversation)
        same = built_by_turns(world, *conversation[:-1], answers=5, max_tokens=9)
        assert world.history(session) == world.history(same)


@pytest.mark.parametrize("kind", REWRITING)
def test_where_the_template_rewrites_history_it_is_rendered_and_cut_where_it_differs(
    kind: str,
) -> None:
    with World(kind) as world:
        session = world.open()
        conversation: list[Message] = []
        for index in range(4):
            conversation.append(user(f"Hello {index}"))
            answer, outcome = run(world, session, str(index), *conversation, stop=("zz",))
            conversation.append(answer)
        assert outcome.usage.cached_tokens > 0
        assert said(world, session) == tuple(conversation)
        same = built_by_turns(world, *conversation[:-1], answers=3, stop=("zz",))
        assert world.history(session) == world.history(same)


def test_an_answer_said_again_replaces_the_one_before() -> None:
    with World() as world:
        session = world.open()
        first, one = run(world, session, "1", user("Hello"), max_tokens=9)
        total = one.usage.total_tokens
        run(world, session, "2", user("Hello"), first, user("And?"), max_tokens=9)
        _, again = run(world, session, "3", user("Hello"), first, user("And?"), max_tokens=9)
        assert again.usage.cached_tokens == again.usage.input_tokens - 1
        assert len(items(world, session)) == 4
        other, changed = run(world, session, "4", user("Hello"), first, user("Or?"))
        assert total - 1 <= changed.usage.cached_tokens < changed.usage.input_tokens
        assert said(world, session) == (user("Hello"), first, user("Or?"), other)


def test_an_edited_beginning_leaves_nothing_of_what_followed() -> None:
    with World() as world:
        session = world.open(messages=(Message("system", "Be brief."),))
        system, other = Message("system", "Be brief."), Message("system", "Be long.")
        first, _ = run(world, session, "1", system, user("Hello"))
        run(world, session, "2", system, user("Hello"), first, user("And?"))
        answer, _ = run(world, session, "3", other, user("Hello"))
        assert said(world, session) == (other, user("Hello"), answer)
        fresh = built_by_turns(world, other, user("Hello"), answers=0)
        assert world.history(session) == world.history(fresh)


def test_an_answer_that_the_client_changed_is_rendered_as_it_says() -> None:
    with World() as world:
        session = world.open()
        first, _ = run(world, session, "1", user("Hello"), max_tokens=9)
        second, _ = run(world, session, "2", user("Hello"), first, user("And?"), max_tokens=9)
        edited = Message("assistant", "I never said that.")
        asked = (user("Hello"), first, user("And?"), edited, user("Why?"))
        run(world, session, "3", *asked, max_tokens=9)
        assert second.content not in world.decode(world.history(session))
        same = built_by_turns(world, *asked, answers=1, max_tokens=9)
        assert world.history(session) == world.history(same)


def test_an_answer_at_the_end_is_sent_as_a_message() -> None:
    with World() as world:
        session = world.open()
        first, _ = run(world, session, "1", user("Hello"))
        second, _ = run(world, session, "2", user("Hello"), first)
        same = built_by_turns(world, user("Hello"), first, answers=0)
        assert world.history(session) == world.history(same)
        run(world, session, "3", user("Hello"), first, second, user("And?"))
        completed(world.run(same, turn("3", "And?")))
        assert world.history(session) == world.history(same)
        run(world, session, "4", user("Hello"), first, user("Or?"))
        same = built_by_turns(world, user("Hello"), first, user("Or?"), answers=0)
        assert world.history(session) == world.history(same)


def test_what_raw_input_has_said_is_no_message() -> None:
    with World("counting") as world:
        session = world.open()
        first, _ = run(world, session, "1", user("Hello"), stop=("zz",))
        world.run(session, turn("2", (60, 61)))
        answer, _ = run(world, session, "3", user("Hello"), first, user("And?"), stop=("zz",))
        assert said(world, session) == (user("Hello"), first, user("And?"), answer)
        completed(world.run(session, turn("4")))  # known again, so turns go on


def test_an_end_token_that_the_template_replaced_is_replaced_once() -> None:
    with World() as world:
        other = world.control("<|endoftext|>")[0]
        world.engine.next_token = lambda _: other
        session = world.open()
        first, _ = run(world, session, "1", user("Hello"), max_tokens=3, ignore_eos=True)
        for name in ("2", "3", "4"):
            asked = (user("Hello"), first, user(f"And {name}?"))
            run(world, session, name, *asked, max_tokens=1, ignore_eos=True)
            text = world.decode(world.history(session))
            assert f"<|endoftext|><|endoftext|><|im_end|>\n<|im_start|>user\nAnd {name}" in text


def test_input_that_was_only_read_is_rendered_once() -> None:
    with World() as world:
        session = world.open()
        first, _ = run(world, session, "1", user("Hello"))
        asked = (user("Hello"), first, user("Read this."))
        run(world, session, "2", *asked, max_tokens=0)
        assert said(world, session) == asked
        run(world, session, "3", *asked, user("And?"))
        same = built_by_turns(world, *asked, user("And?"), answers=1)
        assert world.history(session) == world.history(same)
        completed(world.run(session, turn("4", "More")))  # a turn that appends
        assert world.decode(world.history(session)).count("Read this.") == 1


def test_a_turn_canceled_without_a_trace_leaves_what_its_conversation_would_have_replaced() -> None:
    with World() as world:
        session = world.open()
        run(world, session, "1", user("Hello"))
        before = (world.history(session), items(world, session))
        world.submit(session, turn("2", whole(user("Other")), max_tokens=50, ignore_eos=True))
        for _ in range(4):
            world.engine.step()
            world.engine.deliver()
        world.manager.cancel(OWNER, session, "2", keep_partial=False)
        world.engine.run()
        assert not cancelled(world.end_of(session, "2")).kept_partial
        assert (world.history(session), items(world, session)) == before


def test_a_repeated_turn_is_answered_from_its_record_when_its_answer_was_replaced() -> None:
    limits = SessionLimits(journal=JournalLimits(max_bytes=1))
    with World(limits=limits) as world:
        session = world.open()
        first, _ = run(world, session, "1", user("Hello"))
        asked = turn("2", whole(user("Hello"), first, user("And?")))
        said_first = completed(world.run(session, asked))
        run(world, session, "3", user("Hello"), first, user("Or?"))
        run(world, session, "4", user("Hello"), first, user("Or what?"))
        end = world.submit(session, asked).end
        assert isinstance(end, TurnCompleted)
        assert end.outcome.item_id == said_first.outcome.item_id
        assert (end.outcome.text, end.outcome.usage) == ("", said_first.outcome.usage)


@pytest.mark.parametrize("kind", [*APPENDING, *REWRITING])
def test_bytes_counted_are_those_of_what_is_left(kind: str) -> None:
    with World(kind) as world:
        session = world.open()
        conversation: list[Message] = []
        for index in range(5):
            conversation.append(user(f"Hello {index}"))
            answer, _ = run(world, session, str(index), *conversation)
            conversation.append(answer)
        for index in range(5):
            run(world, session, f"again {index}", user("Short"))
        counted = world.manager._sessions.get(OWNER, session).num_bytes
        fresh = world.open()
        for index in range(10):
            run(world, fresh, str(index), user("Short"))
        assert counted - world.manager._sessions.get(OWNER, fresh).num_bytes < 2000


@pytest.mark.parametrize("kind", REWRITING)
def test_where_answers_shrink_when_rendered_again_an_edit_goes_on(kind: str) -> None:
    with World(kind) as world:
        session = world.open(history="template")
        first, _ = run(world, session, "1", user("Hello"), max_tokens=60, ignore_eos=True)
        second, _ = run(world, session, "2", user("Hello"), first, user("And?"))
        run(world, session, "3", user("Hello"), first, user("Or?"))
        run(world, session, "4", user("Hello"), first, user("And?"), second, user("So?"))
        world.manager.edits.rewind(OWNER, session, items(world, session)[1].id)
        answer, _ = run(world, session, "5", user("Hello"), first, user("Next"))
        assert said(world, session) == (user("Hello"), first, user("Next"), answer)


def test_messages_that_are_there_already_stay_the_items_they_are() -> None:
    system = Message("system", "Be brief.")
    with World() as world:
        session = world.open(messages=(system,))
        opening = items(world, session)[0]
        answer, _ = run(world, session, "1", system, user("Hello"))
        assert items(world, session)[0].id == opening.id
        assert not any(isinstance(e, SessionRewound) for e in world.entries(session))
        read = (system, user("Hello"), answer, user("Read this."))
        run(world, session, "2", *read, max_tokens=0)
        kept = items(world, session)
        run(world, session, "3", *read)
        assert items(world, session)[:4] == kept[:4]
        assert not any(isinstance(e, SessionRewound) for e in world.entries(session))
        run(world, session, "4", system, user("Hello"), answer, user("Other."))
        rewound = [e for e in world.entries(session) if isinstance(e, SessionRewound)]
        assert [e.to_item for e in rewound] == [kept[2].id]


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["ask", "ask", "again", "edit user", "edit answer", "read", "drop"]),
        st.integers(0, 9),
    ),
    min_size=6,
    max_size=16,
)
EACH = [("ask", 3), ("again", 3), ("edit answer", 1), ("edit user", 2), ("read", 5), ("drop", 1)]
"""A history that has every operation: chance may leave one out."""


@pytest.mark.parametrize("kind", APPENDING)
def test_any_history_of_edits_has_the_tokens_of_a_session_without_them(kind: str) -> None:
    """Each conversation is compared with a session that came to it without detours."""
    reached: Counter[str] = Counter()
    with World(kind) as world:

        @settings(max_examples=at_depth(25, proof=300), deadline=None, database=None)
        @given(OPERATIONS)
        @example(EACH)
        def edits(operations: list[tuple[str, int]]) -> None:
            session = world.open()
            talk: list[Message] = []
            is_own: list[bool] = []  # said by the server, and not changed since
            for number, (operation, place) in enumerate(operations):
                index = place % len(talk) if talk else 0
                match operation:
                    case "ask" | "read":
                        if not talk or talk[-1].role == "assistant":
                            talk.append(user(f"Say {number} please."))
                            is_own.append(False)
                    case "again" if talk and talk[-1].role == "assistant":
                        talk.pop()
                        is_own.pop()
                    case "edit user" | "edit answer" if talk:
                        role = "user" if operation == "edit user" else "assistant"
                        places = [at for at, message in enumerate(talk) if message.role == role]
                        if not places:
                            continue
                        index = places[place % len(places)]
                        talk[index] = Message(role, f"Edit {number}.")
                        is_own[index] = False
                        del is_own[index + 1 :], talk[index + 1 :]
                    case "drop":
                        del is_own[index:], talk[index:]
                    case _:
                        continue
                if not talk:
                    continue
                if talk[-1].role == "assistant":
                    talk.append(user(f"And {number}?"))
                    is_own.append(False)
                max_tokens = 0 if operation == "read" else place
                reached[operation] += 1
                answer, _ = run(world, session, str(number), *talk, max_tokens=max_tokens)
                own = [place for place, is_said in enumerate(is_own) if is_said]
                changed = [
                    place
                    for place, message in enumerate(talk)
                    if message.role == "assistant" and not is_own[place]
                ]
                reached["an answer that was changed"] += bool(changed)
                assert said(world, session)[: len(talk)] == tuple(talk)
                num_kept = own[-1] + 1 if own else 0
                check_equal(world, session, talk, num_kept, max_tokens=max_tokens)
                if max_tokens:
                    talk.append(answer)
                    is_own.append(True)
            world.manager.close(OWNER, session)

        edits()
    missing = {"ask", "again", "edit user", "edit answer", "read", "drop"} - set(reached)
    assert not missing
    assert reached["an answer that was changed"] > 0


def check_equal(
    world: World, session: str, talk: list[Message], num_kept: int, *, max_tokens: int
) -> None:
    """Up to the last answer that is still the server's own the tokens are those it was said
    behind; what follows is one render."""
    fresh = world.open()
    if num_kept:
        base = world.history(session)[: items(world, session)[num_kept - 1].end_len]
        # The template's own end of turn may have replaced the one that was said.
        world.run(fresh, turn("base", base, max_tokens=0))
    rest = ChatInput(tuple(talk[num_kept:]))
    world.run(fresh, turn("rest", rest, max_tokens=max_tokens))
    assert world.history(fresh) == world.history(session)
    world.manager.close(OWNER, fresh)
