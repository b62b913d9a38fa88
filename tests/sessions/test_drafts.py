"""Drafts of turns to come: what is typed so far goes to the engine, and nothing of it stays."""

from __future__ import annotations

import asyncio

import pytest

from session_server.core.commands import DraftInput, DropDraft, SubmitTurn
from session_server.core.errors import (
    ContextTooLong,
    EngineRestarting,
    EngineUnavailable,
    InvalidRequest,
    QuotaExceeded,
    SessionClosing,
    SessionServerError,
)
from session_server.core.session_events import TokenInput, TurnInput
from session_server.sessions.quotas import QuotaLimits, SessionLimits
from session_server.sessions.views import DraftView
from tests.sessions.world import OWNER, World, completed, turn

SENTENCE = "Where is my city? I have lost it."


class Typing:
    """One client that types in one session."""

    def __init__(self, world: World, session_id: str) -> None:
        self.world, self.session_id = world, session_id
        self.answers: list[DraftView | SessionServerError] = []

    def type(self, content: str | TurnInput | tuple[int, ...], draft_id: str = "d") -> None:
        async def submit() -> None:
            drafts, request = self.world.manager.drafts, turn(draft_id, content)
            drafts.submit(OWNER, self.session_id, request, self.answers.append)

        self.world.do(submit())

    def abandon(self) -> None:
        self.world.manager.drafts.abandon(OWNER, self.session_id)

    @property
    def last(self) -> DraftView:
        answer = self.answers[-1]
        assert isinstance(answer, DraftView), answer
        return answer


def drafts_of(world: World) -> list[DraftInput]:
    return [command for command in world.engine.seen if isinstance(command, DraftInput)]


def test_a_sentence_typed_key_by_key_is_cached_when_its_turn_comes() -> None:
    with World() as world:
        session_id = world.open()
        world.run(session_id, turn("t1", "Hello"))
        typing = Typing(world, session_id)
        for end in range(1, len(SENTENCE) + 1):
            typing.type(SENTENCE[:end], f"d{end}")
            world.engine.run()
            assert typing.last.draft_id == f"d{end}"
            assert typing.last.processed == typing.last.total
        before = world.history(session_id)
        usage = completed(world.run(session_id, turn("t2", SENTENCE))).outcome.usage
        assert typing.last.total == usage.input_tokens, "a draft is rendered as its turn is"
        assert usage.cached_tokens == usage.input_tokens - 1
        assert 0 < usage.drafted_tokens <= usage.cached_tokens
        assert world.history(session_id)[: len(before)] == before


def test_a_session_whose_kv_is_given_up_has_no_draft_that_waits() -> None:
    with World() as world:
        session_id = world.open()
        typing = Typing(world, session_id)
        typing.type(SENTENCE)
        world.manager.edits.retention.cool(OWNER, session_id)
        assert typing.last == DraftView("d", 0, 0, 0)
        world.engine.run()
        typing.type(SENTENCE, "d2")
        world.engine.run()
        assert [typing.last.draft_id, typing.last.processed] == ["d2", typing.last.total]


@pytest.mark.parametrize("kind", ["chatml", "thinking"])
def test_answers_are_those_without_drafts(kind: str) -> None:
    said = []
    for is_drafting in (False, True):
        with World(kind) as world:
            session_id = world.open()
            typing = Typing(world, session_id)
            for number in range(4):
                if is_drafting:
                    for end in (3, 9, 5, 12):
                        typing.type(SENTENCE[:end])
                        world.engine.run()
                    if number == 2:
                        typing.abandon()
                world.run(session_id, turn(f"t{number}", SENTENCE[: 10 + number], seed=number))
            said.append(world.history(session_id))
    assert said[0] == said[1]


def test_only_the_newest_draft_is_answered_with_what_was_computed() -> None:
    with World() as world:
        typing = Typing(world, world.open())
        typing.type("Wh", "d1")
        typing.type("Whe", "d2")
        assert typing.answers == [DraftView("d1", 0, 0, 0)]
        world.engine.run()
        assert [answer.draft_id for answer in typing.answers] == ["d1", "d2"]  # type: ignore[union-attr]
        assert typing.last.kept > 0, "the first was computed all the same"


def test_a_draft_while_a_turn_runs_is_held_until_its_end() -> None:
    with World() as world:
        session_id = world.open()
        typing = Typing(world, session_id)
        world.submit(session_id, turn("t1", "Hello"))
        typing.type("And", "d1")
        typing.type("And then", "d2")
        assert not drafts_of(world)
        world.engine.run()
        assert len(drafts_of(world)) == 1
        assert typing.last.draft_id == "d2"
        assert typing.last.processed == typing.last.total


def test_a_turn_takes_the_place_of_a_draft() -> None:
    with World() as world:
        session_id = world.open()
        typing = Typing(world, session_id)
        typing.type("Hel", "d1")
        world.submit(session_id, turn("t1", "Hello"))
        assert typing.answers == [DraftView("d1", 0, 0, 0)]
        world.engine.run()
        assert len(typing.answers) == 1
        kinds = [type(command) for command in world.engine.seen]
        assert kinds.index(DraftInput) < kinds.index(SubmitTurn)


def test_an_abandoned_draft_leaves_no_trace() -> None:
    with World() as world:
        session_id = world.open()
        world.run(session_id, turn("t1", "Hello"))
        typing = Typing(world, session_id)
        before = world.history(session_id), world.entries(session_id)
        held = world.manager._quotas.turn_bytes.total
        typing.type(SENTENCE)
        world.engine.run()
        assert world.manager._quotas.turn_bytes.total > held
        typing.abandon()
        typing.abandon()
        world.engine.run()
        assert (world.history(session_id), world.entries(session_id)) == before
        assert world.manager._quotas.turn_bytes.total == held
        drops = [each for each in world.engine.seen if isinstance(each, DropDraft)]
        assert len(drops) == 1
        usage = completed(world.run(session_id, turn("t2", SENTENCE))).outcome.usage
        assert usage.drafted_tokens == 0


def test_a_draft_that_cannot_be_is_answered_with_the_reason() -> None:
    with World(max_turn_len=64) as world:
        typing = Typing(world, world.open())
        typing.type("word " * 40)
        world.spin()
        assert isinstance(typing.answers[-1], ContextTooLong)
        with pytest.raises(InvalidRequest):
            typing.type((1 << 30,))
        with pytest.raises(ContextTooLong):
            typing.type(TokenInput(tuple([1] * 100)))
        assert world.manager._quotas.turn_bytes.total == 0


def test_drafts_are_bounded_like_turns() -> None:
    with World(quotas=QuotaLimits(turn_bytes=20_000)) as world:
        typing = Typing(world, world.open())
        typing.type("Hello")
        with pytest.raises(SessionServerError):
            typing.type("x" * 20_000)
    with World(quotas=QuotaLimits(owner_input_tokens_per_min=60)) as world:
        typing = Typing(world, world.open())
        for end in range(1, 4 * len(SENTENCE)):
            typing.type((SENTENCE * 4)[:end])
            world.engine.run()
            if isinstance(typing.answers[-1], QuotaExceeded):
                break
        else:
            raise AssertionError("a client may draft without end")
        assert len(typing.answers) > 10, "no token is charged twice"


def test_a_session_that_closes_ends_its_draft() -> None:
    with World() as world:
        session_id = world.open()
        typing = Typing(world, session_id)
        typing.type("Hello", "d1")
        world.manager.close(OWNER, session_id)
        assert typing.answers == [DraftView("d1", 0, 0, 0)]
        world.engine.run()
        assert world.manager._quotas.turn_bytes.total == 0
        other = world.open()
        typing = Typing(world, other)
        world.submit(other, turn("t1"))
        world.manager.close(OWNER, other)
        with pytest.raises(SessionClosing):
            typing.type("Hello")


def test_an_engine_that_dies_takes_drafts_with_it_and_the_next_one_computes_them() -> None:
    with World() as world:
        session_id = world.open()
        world.run(session_id, turn("t1", "Hello"))
        typing = Typing(world, session_id)
        typing.type("And", "d1")
        world.engine.die()
        world.engine.deliver()
        assert isinstance(lost := typing.answers[-1], EngineRestarting)
        assert "send the draft again" in lost.message
        with pytest.raises(EngineUnavailable):
            typing.type("And", "d2")
        world.engine.come_up()
        world.engine.deliver()
        typing.type("And", "d3")
        world.engine.run()
        assert typing.last.draft_id == "d3"
        usage = completed(world.run(session_id, turn("t2", "And then"))).outcome.usage
        assert usage.drafted_tokens > 0


def test_a_history_that_is_edited_while_a_draft_is_tokenized_is_read_again() -> None:
    """And what was typed meanwhile does not keep the earlier draft from the engine."""
    with World(limits=SessionLimits(inline_input_chars=8)) as world:
        session_id = world.open()
        world.submit(session_id, turn("t1", "Hello"))
        world.engine.run()
        typing = Typing(world, session_id)
        typing.type(SENTENCE[:20], "d1")
        typing.type(SENTENCE, "d2")
        world.manager.edits.rewind(OWNER, session_id, None)
        assert typing.answers == [DraftView("d1", 0, 0, 0)]
        for _ in range(5000):
            world.do(asyncio.sleep(0.001))
            world.engine.run()
            if len(typing.answers) == 2:
                break
        assert typing.last.draft_id == "d2"
        assert typing.last.kept == 0, "the draft of the history before was not sent"
        world.submit(session_id, turn("t2", SENTENCE))
        world.engine.run()
        usage = completed(world.end_of(session_id, "t2")).outcome.usage
        assert usage.cached_tokens == typing.last.total - 1
        assert world.manager._quotas.turn_bytes.total == 0
