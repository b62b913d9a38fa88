"""Rewinds, edits and forks: what the history is afterwards, and what the next turn computes."""

from __future__ import annotations

from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from session_server.core.errors import (
    InvalidRequest,
    ItemNotFound,
    QuotaExceeded,
    ServerBusy,
    SessionBusy,
    SessionClosing,
    SessionExists,
    UnsupportedOperation,
)
from session_server.core.session_events import (
    ChatInput,
    ConversationItem,
    ItemEdited,
    Message,
    SessionForked,
    SessionRewound,
    TextInput,
)
from session_server.sessions.journal import JournalLimits
from session_server.sessions.quotas import QuotaLimits, SessionLimits
from tests.depth import at_depth
from tests.sessions.test_footprint import kept_bytes
from tests.sessions.world import OWNER, World, completed, turn

APPENDING = ("chatml", "llama3", "alternating")
REWRITING = ("counting", "thinking")


def items(world: World, session: str) -> tuple[ConversationItem, ...]:
    return world.manager.snapshot(OWNER, session).items


def talk(world: World, session: str, count: int) -> None:
    for index in range(count):
        completed(world.run(session, turn(str(index), f"Hello {index}", max_tokens=5)))


@pytest.mark.parametrize("kind", [*APPENDING, *REWRITING])
def test_a_rewind_to_an_answer_is_as_if_nothing_had_followed(kind: str) -> None:
    with World(kind) as world:
        session, fresh = world.open(), world.open()
        talk(world, session, 4)
        answers = [item for item in items(world, session) if item.role == "assistant"]
        world.manager.edits.rewind(OWNER, session, answers[1].id)
        talk(world, fresh, 2)
        assert [item.content for item in items(world, session)] == [
            item.content for item in items(world, fresh)
        ]
        for each in (session, fresh):
            completed(world.run(each, turn("next", "And?")))
        assert world.history(session) == world.history(fresh)


@pytest.mark.parametrize("kind", [*APPENDING, *REWRITING])
def test_behind_a_rewind_to_a_question_it_is_answered_again(kind: str) -> None:
    with World(kind) as world:
        session, fresh = world.open(), world.open()
        talk(world, session, 3)
        question = items(world, session)[2]
        assert question.role == "user"
        world.manager.edits.rewind(OWNER, session, question.id)
        completed(world.run(session, turn("again", ChatInput(()), max_tokens=5)))
        talk(world, fresh, 2)
        assert world.history(session) == world.history(fresh)


def test_a_rewind_to_the_beginning_leaves_an_empty_session() -> None:
    with World() as world:
        session, fresh = world.open(messages=(Message("system", "Be brief."),)), world.open()
        talk(world, session, 2)
        assert world.manager.edits.rewind(OWNER, session, None).num_tokens == 0
        assert items(world, session) == ()
        assert world.entries(session)[-1] == SessionRewound(None, 0, 0)
        for each in (session, fresh):
            completed(world.run(each, turn("next", "Hello")))
        assert world.history(session) == world.history(fresh)


def test_a_rewind_keeps_the_kv_of_what_stays() -> None:
    with World() as world:
        session = world.open()
        talk(world, session, 3)
        first = items(world, session)[1]
        view = world.manager.edits.rewind(OWNER, session, first.id)
        assert view.num_tokens == first.end_len
        assert world.entries(session)[-1] == SessionRewound(first.id, first.end_len, first.end_len)
        usage = completed(world.run(session, turn("next"))).outcome.usage
        assert usage.cached_tokens in {first.end_len, first.end_len - 1}


def test_an_edited_question_is_asked_as_it_says_now() -> None:
    with World() as world:
        session, fresh = world.open(), world.open()
        talk(world, session, 3)
        question = items(world, session)[2]
        world.manager.edits.edit_item(OWNER, session, question.id, "Hello you")
        assert items(world, session)[-1].id == question.id
        assert isinstance(world.entries(session)[-1], ItemEdited)
        completed(world.run(session, turn("again", ChatInput(()), max_tokens=5)))
        talk(world, fresh, 1)
        completed(world.run(fresh, turn("you", "Hello you", max_tokens=5)))
        assert world.history(session) == world.history(fresh)


def test_one_goes_on_from_an_edited_answer() -> None:
    with World() as world:
        session = world.open()
        talk(world, session, 2)
        answer = items(world, session)[1]
        world.manager.edits.edit_item(OWNER, session, answer.id, "I say something else.")
        completed(world.run(session, turn("next", "Why?")))
        text = world.decode(world.history(session))
        assert "assistant\nI say something else.<|im_end|>\n<|im_start|>user\nWhy?" in text
        assert answer.content not in text
        assert [item.role for item in items(world, session)] == ["user", "assistant"] * 2


def test_what_was_read_and_not_answered_is_read_again_where_it_stays() -> None:
    with World() as world:
        session, fresh = world.open(), world.open()
        for each in (session, fresh):
            talk(world, each, 1)
            completed(world.run(each, turn("read", "Read this.", max_tokens=0)))
        completed(world.run(session, turn("more", "And this.", max_tokens=0)))
        kept = items(world, session)[2]
        world.manager.edits.rewind(OWNER, session, kept.id)
        for each in (session, fresh):
            completed(world.run(each, turn("raw", TextInput(" raw"))))
        assert world.history(session) == world.history(fresh)


def test_a_rewind_behind_raw_input_keeps_its_tokens() -> None:
    with World("counting") as world:
        session, fresh = world.open(), world.open()
        for each in (session, fresh):
            completed(world.run(each, turn("chat", "Hello", stop=("zz",))))
            completed(world.run(each, turn("raw", TextInput("raw text"), max_tokens=3)))
        completed(world.run(session, turn("more", TextInput(" and more"))))
        answer = items(world, session)[3]
        world.manager.edits.rewind(OWNER, session, answer.id)
        assert world.history(session) == world.history(fresh)
        raw = items(world, session)[2]
        with pytest.raises(UnsupportedOperation, match="raw input"):
            world.manager.edits.edit_item(OWNER, session, raw.id, "x")
        assert world.manager.edits.rewind(OWNER, session, raw.id).num_tokens == raw.end_len
        chat = items(world, session)[1]
        world.manager.edits.rewind(OWNER, session, chat.id)
        completed(world.run(session, turn("chat again", "And?")))  # messages are known again


@pytest.mark.parametrize("kind", [*APPENDING, *REWRITING])
def test_a_fork_has_the_history_and_a_life_of_its_own(kind: str) -> None:
    with World(kind) as world:
        session = world.open(metadata={"a": "b"}, ttl_s=60.0)
        talk(world, session, 3)
        whole = world.manager.edits.fork(OWNER, session)
        assert world.history(whole.session_id) == world.history(session)
        assert (whole.metadata, whole.ttl_s) == ({"a": "b"}, 60.0)
        assert world.entries(session)[-1] == SessionForked(whole.session_id, whole.num_tokens)
        answer = items(world, session)[1]
        early = world.manager.edits.fork(OWNER, session, at_item=answer.id, new_id="early")
        assert early.session_id == "early"
        assert len(items(world, "early")) == 2
        for each in (session, whole.session_id):
            completed(world.run(each, turn("next", "And?")))
        assert world.history(whole.session_id) == world.history(session)
        completed(world.run("early", turn("next", "Or?")))
        assert items(world, session)[-2].content == "And?"
        assert items(world, "early")[-2].content == "Or?"
        ids = [item.id for item in items(world, "early")]
        assert len(set(ids)) == len(ids)


def test_what_cannot_be_is_refused_and_changes_nothing() -> None:
    limits = SessionLimits(max_input_chars=100)
    with World(limits=limits) as world:
        session = world.open()
        talk(world, session, 2)
        before = (world.history(session), items(world, session), world.entries(session))
        answer = before[1][1].id
        manager = world.manager
        for param, change in (
            ("to_item", lambda: manager.edits.rewind(OWNER, session, "i_99")),
            ("item_id", lambda: manager.edits.edit_item(OWNER, session, "i_99", "x")),
            ("at_item", lambda: manager.edits.fork(OWNER, session, at_item="i_99")),
        ):
            with pytest.raises(ItemNotFound) as missing:
                change()
            assert missing.value.param == param
        with pytest.raises(InvalidRequest, match="exceeds 100 characters"):
            manager.edits.edit_item(OWNER, session, answer, "x" * 101)
        with pytest.raises(SessionExists):
            manager.edits.fork(OWNER, session, new_id=session)
        assert (world.history(session), items(world, session), world.entries(session)) == before
        world.submit(session, turn("runs", max_tokens=50))
        for change in (
            lambda: manager.edits.rewind(OWNER, session, answer),
            lambda: manager.edits.edit_item(OWNER, session, answer, "x"),
            lambda: manager.edits.fork(OWNER, session),
        ):
            with pytest.raises(SessionBusy, match="wait for its end, or cancel it"):
                change()
        manager.close(OWNER, session)
        with pytest.raises(SessionClosing):
            manager.edits.rewind(OWNER, session, answer)


def test_edits_and_forks_are_counted() -> None:
    quotas = QuotaLimits(history_bytes=60_000, sessions=2)
    with World(quotas=quotas) as world:
        session = world.open()
        talk(world, session, 2)
        answer = items(world, session)[1].id
        with pytest.raises((QuotaExceeded, ServerBusy)):
            world.manager.edits.edit_item(OWNER, session, answer, "x" * 70_000)
        world.manager.edits.edit_item(OWNER, session, answer, "x" * 20_000)
        counted = world.manager._sessions.get(OWNER, session).counted_bytes
        assert 20_000 < counted < 30_000
        world.manager.edits.rewind(OWNER, session, None)
        assert world.manager._sessions.get(OWNER, session).counted_bytes < 5_000
        world.manager.edits.fork(OWNER, session)
        with pytest.raises((QuotaExceeded, ServerBusy)):
            world.manager.edits.fork(OWNER, session)


def test_edits_leave_nothing_of_what_they_replace() -> None:
    with World() as world:
        session = world.open()
        talk(world, session, 1)
        answer = items(world, session)[1].id
        world.manager.edits.edit_item(OWNER, session, answer, "x" * 10_000)
        transcript = world.manager._sessions.get(OWNER, session).transcript
        before = kept_bytes(transcript)
        for index in range(30):
            world.manager.edits.edit_item(OWNER, session, answer, f"{index}".rjust(10_000))
        assert kept_bytes(transcript) - before < 10_000


@pytest.mark.parametrize("raw", [TextInput("raw"), None])
def test_raw_input_behind_messages_that_no_turn_has_read_begins_with_one_bos(
    raw: TextInput | None,
) -> None:
    with World("llama3") as world:
        bos = world.text.bos_token_id
        assert bos is not None
        session = world.open(messages=(Message("system", "Be brief."),))
        world.run(session, turn("1", raw or (bos, 60, 61)))
        assert world.history(session).count(bos) == 1
        world.manager.edits.rewind(OWNER, session, items(world, session)[0].id)
        world.run(session, turn("2", raw or (bos, 60, 61)))
        assert world.history(session).count(bos) == 1


def test_what_no_turn_could_render_is_not_edited() -> None:
    with World("counting") as world:
        session = world.open()
        world.run(session, turn("1", TextInput("raw"), max_tokens=3))
        with pytest.raises(UnsupportedOperation, match="could render"):
            world.manager.edits.edit_item(OWNER, session, items(world, session)[1].id, "x")
        world.run(session, turn("2", TextInput(" more"), max_tokens=3))
    with World("none") as world:
        session = world.open()
        world.run(session, turn("1", TextInput("raw"), max_tokens=3))
        with pytest.raises(UnsupportedOperation, match="could render"):
            world.manager.edits.edit_item(OWNER, session, items(world, session)[1].id, "x")


def test_an_edited_answer_is_not_told_as_what_the_turn_has_said() -> None:
    with World(limits=SessionLimits(journal=JournalLimits(max_bytes=1))) as world:
        session = world.open()
        asked = turn("1")
        world.run(session, asked)
        answer = items(world, session)[1]
        world.run(session, turn("2"))
        assert world.submit(session, asked).text == answer.content
        world.manager.edits.edit_item(OWNER, session, answer.id, "Never sampled.")
        view = world.submit(session, asked)
        assert (view.text, view.is_answer_lost) == ("", True)


def test_a_rewind_to_raw_input_leaves_no_token_of_the_template() -> None:
    with World() as world:
        session = world.open()
        end = world.control("<|endoftext|>")[0]
        world.run(session, turn("raw", (90, 73, 95, end), max_tokens=0))
        world.run(session, turn("chat"))
        world.manager.edits.rewind(OWNER, session, items(world, session)[0].id)
        assert world.history(session) == (90, 73, 95)


def test_a_fork_needs_room_for_what_it_holds() -> None:
    with World(quotas=QuotaLimits(history_bytes=35_000)) as world:
        session = world.open()
        talk(world, session, 1)
        world.run(session, turn("long", "word " * 700, max_tokens=1))
        answer = items(world, session)[1].id
        with pytest.raises((QuotaExceeded, ServerBusy)):
            world.manager.edits.fork(OWNER, session)
        assert world.manager.edits.fork(OWNER, session, at_item=answer).num_turns == 0


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["ask", "ask", "rewind", "edit", "fork", "read"]), st.integers(0, 99)
    ),
    min_size=4,
    max_size=14,
)


@pytest.mark.parametrize("kind", APPENDING)
def test_any_changes_lead_to_what_a_new_session_would_have(kind: str) -> None:
    """A session built from its own tokens and items goes on alike, whatever led there."""
    reached: Counter[str] = Counter()
    with World(kind) as world:

        @settings(max_examples=at_depth(30, proof=400), deadline=None, database=None)
        @given(STEPS)
        def changes(steps: list[tuple[str, int]]) -> None:
            session = world.open()
            for number, (step, place) in enumerate(steps):
                found = items(world, session)
                match step:
                    case "ask" | "read":
                        size = 0 if step == "read" else 1 + place % 7
                        ended = found and found[-1].role != "assistant"
                        if kind == "alternating" and ended:
                            continue  # its template takes no two questions in a row
                        request = turn(f"{number}", f"Say {number}", max_tokens=size)
                        completed(world.run(session, request))
                    case "rewind" if found:
                        item = found[place % len(found)]
                        view = world.manager.edits.rewind(OWNER, session, item.id)
                        assert items(world, session)[-1] == item
                        assert view.num_tokens <= item.end_len
                    case "edit" if found:
                        item = found[place % len(found)]
                        world.manager.edits.edit_item(OWNER, session, item.id, f"Edit {number}.")
                        assert items(world, session)[-1].content == f"Edit {number}."
                    case "fork":
                        old, session = session, world.manager.edits.fork(OWNER, session).session_id
                        world.manager.close(OWNER, old)
                    case _:
                        continue
                reached[step] += 1
                check_goes_on(world, session)
            world.manager.close(OWNER, session)

        changes()
    assert not {"ask", "rewind", "edit", "fork", "read"} - set(reached)


def check_goes_on(world: World, session: str) -> None:
    """Behind an answer, the next turn appends what it would append to a session that was given the
    same tokens."""
    found = items(world, session)
    if not found or found[-1].role != "assistant" or found[-1].content.startswith("Edit"):
        return
    copy, same = world.manager.edits.fork(OWNER, session).session_id, world.open()
    completed(world.run(same, turn("base", world.history(copy), max_tokens=0)))
    for each in (copy, same):
        completed(world.run(each, turn("goes on", "And?", max_tokens=3)))
    assert world.history(copy) == world.history(same)
    text = world.decode(world.history(copy))
    assert all(item.content.strip() in text for item in found)
    for each in (copy, same):
        world.manager.close(OWNER, each)
