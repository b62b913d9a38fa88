"""Drafts of turns to come: computed while nobody else needs the forward, kept as far as they hold,
and paid for by nobody."""

from __future__ import annotations

import itertools
from random import Random

import pytest

from cache.types import SessionId, SlotState, TurnId
from session_server.core.batch import RowResult, StepResult
from session_server.core.commands import (
    CancelTurn,
    CloseSession,
    DraftInput,
    DropDraft,
    FlushCache,
    OpenSession,
)
from session_server.core.events import InputDrafted, TurnFinished
from tests.depth import at_depth
from tests.engine.bench import POOL, Bench
from tests.scenarios.lines import distinct
from tests.sim.hand_engine import Sizes
from tests.sim.layers import Layers, Mixture

_IDS = itertools.count()

PROMPT = (3, 1, 4, 1, 5, 9, 2, 6, 5, 3)
TYPED = (5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4)


def draft(session_id: SessionId, base_len: int, tokens: tuple[int, ...]) -> DraftInput:
    draft_id = TurnId(f"draft-{next(_IDS)}")
    return DraftInput(session_id=session_id, draft_id=draft_id, base_len=base_len, tokens=tokens)


def drafted(bench: Bench) -> list[InputDrafted]:
    return [event for event in bench.events if isinstance(event, InputDrafted)]


def talk(bench: Bench, session_id: SessionId, name: str = "first") -> tuple[int, ...]:
    """Run one turn; return the history after it."""
    bench.run(bench.submit_command(session_id, name, PROMPT))
    return (*PROMPT, *bench.tokens(name))


@pytest.mark.parametrize("mixture", list(Mixture))
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("chunk_tokens", [3, 64])
def test_what_is_typed_key_by_key_is_computed_once(
    mixture: Mixture, page_size: int, chunk_tokens: int
) -> None:
    layers = Layers(mixture, window=8)
    bench = Bench(Sizes(layers=layers, page_size=page_size, chunk_tokens=chunk_tokens))
    session_id = bench.open("s")
    history = talk(bench, session_id)
    before = bench.cache.accounts()
    for end in range(1, len(TYPED) + 1):
        bench.run(draft(session_id, len(history), TYPED[:end]))
        last = drafted(bench)[-1]
        assert last.processed == last.total == len(history) + end
    bench.run(draft(session_id, len(history), (*TYPED[:9], 7, 7)))
    said = (*TYPED[:9], 7, 1, 2)
    command = bench.submit_command(session_id, "second", said, base_len=len(history))
    bench.run(command)
    bench.expect("second", history + said)
    (start,) = bench.turns[TurnId("second")].starts
    if mixture in (Mixture.FULL, Mixture.LATENT):
        assert start.cached_tokens == len(history) + 10
        assert drafted(bench)[-1].kept == len(history) + 9
    assert start.drafted_tokens >= start.cached_tokens - len(history)
    assert bench.finished("second").history_len == len(history) + len(said) + 4
    if mixture is Mixture.FULL:
        assert before[POOL].tree_protected <= bench.cache.accounts()[POOL].tree_protected
    bench.close_all()


@pytest.mark.parametrize("mixture", list(Mixture))
def test_an_abandoned_draft_leaves_no_trace(mixture: Mixture) -> None:
    bench = Bench(Sizes(layers=Layers(mixture, window=8)))
    session_id = bench.open("s")
    history = talk(bench, session_id)
    before, slot = bench.cache.accounts(), bench.cache.slot(session_id)
    bench.run(draft(session_id, len(history), TYPED))
    assert bench.cache.accounts() != before
    bench.run(DropDraft(session_id=session_id))
    assert bench.cache.accounts() == before
    assert bench.cache.slot(session_id) == slot
    bench.close_all()


def test_a_turn_that_comes_while_a_chunk_is_in_flight_goes_on_without_it() -> None:
    bench = Bench()
    session_id = bench.open("s")
    history = talk(bench, session_id)
    assert bench.step(draft(session_id, len(history), TYPED)).batch is not None
    command = bench.submit_command(session_id, "second", TYPED, base_len=len(history))
    bench.run(command)
    bench.expect("second", history + TYPED)
    assert not drafted(bench), "the turn took its place"
    bench.close_all()


def test_a_newer_draft_waits_for_the_chunk_of_the_one_before() -> None:
    bench = Bench()
    session_id = bench.open("s")
    history = talk(bench, session_id)
    bench.step(draft(session_id, len(history), TYPED[:5]))
    newest = draft(session_id, len(history), (*TYPED[:4], 1, 2))
    bench.run(newest)
    (answer,) = drafted(bench)
    assert answer.draft_id == newest.draft_id
    assert answer.kept == len(history) + 4
    assert answer.total == len(history) + 6


@pytest.mark.parametrize("error", ["device", "nan"])
def test_a_draft_whose_forward_fails_is_dropped_and_nobody_notices(error: str) -> None:
    bench = Bench()
    session_id, other = bench.open("s"), bench.open("t")
    history = talk(bench, session_id)
    bench.run(bench.submit_command(other, "fast", PROMPT, max_tokens=1))
    before = bench.cache.slot(session_id)
    bench.step(bench.submit_command(other, "long", TYPED, base_len=11, max_tokens=20))
    outcome = bench.step(draft(session_id, len(history), TYPED), results=(bench.runner.execute(),))
    assert outcome.batch is not None
    assert len(outcome.batch.rows) == 2, "beside a turn that decodes"
    result = bench.runner.execute()
    if error == "device":
        result = StepResult(step=result.step, rows=(), forward_s=0.0, error="refused")
    else:
        broken = RowResult((), (), (), finite=False)
        result = StepResult(step=result.step, rows=(result.rows[0], broken), forward_s=0.0)
    bench.step(results=(result,))
    bench.run()
    assert bench.cache.slot(session_id) == before
    assert drafted(bench)[-1].processed == 0
    assert isinstance(bench.turns[TurnId("long")].end, TurnFinished)
    bench.close_all()


def test_drafts_that_make_no_sense_are_answered_and_change_nothing() -> None:
    bench = Bench()
    session_id = bench.open("s")
    history = talk(bench, session_id)
    before = bench.cache.accounts()
    unknown = SessionId("nobody")
    for command in (
        draft(unknown, 0, TYPED),
        draft(session_id, len(history) + 1, TYPED),
        draft(session_id, len(history), (1 << 30,)),
        draft(session_id, 0, ()),
        draft(session_id, len(history), TYPED * 40),
    ):
        bench.run(command)
        assert drafted(bench)[-1].draft_id == command.draft_id
        assert drafted(bench)[-1].processed == 0
    bench.step(bench.submit_command(session_id, "second", TYPED, base_len=len(history)))
    bench.run(draft(session_id, len(history), TYPED))
    assert drafted(bench)[-1].processed == 0, "not while a turn of the session runs"
    bench.run(DropDraft(session_id=unknown))
    assert before[POOL].pages == bench.cache.accounts()[POOL].pages
    bench.close_all()


def test_a_draft_goes_with_its_session_and_with_a_flush() -> None:
    bench = Bench()
    session_id, other = bench.open("s"), bench.open("t")
    history = talk(bench, session_id)
    bench.run(draft(session_id, len(history), TYPED), draft(other, 0, TYPED))
    bench.run(FlushCache(request_id=1))
    assert bench.cache.slot(session_id).state is SlotState.COLD
    bench.step(draft(session_id, len(history), TYPED))
    bench.run(CloseSession(session_id=session_id))
    bench.close_all()


def test_a_turn_that_is_canceled_leaves_what_the_draft_found() -> None:
    bench = Bench()
    session_id = bench.open("s")
    history = talk(bench, session_id)
    bench.run(draft(session_id, len(history), TYPED))
    bench.step(bench.submit_command(session_id, "second", TYPED, base_len=len(history)))
    bench.settle()
    bench.run(CancelTurn(turn_id=TurnId("second"), num_outputs=None))
    assert bench.finished("second").history_len == len(history)
    assert bench.cache.slot(session_id).num_tokens == len(history)
    bench.run(bench.submit_command(session_id, "third", (1, 2, 3), base_len=len(history)))
    bench.expect("third", (*history, 1, 2, 3))
    bench.close_all()


def test_turns_never_wait_for_memory_that_drafts_hold() -> None:
    """Drafts fill the pool; turns that fill it too run as if there were none."""
    sizes = Sizes(num_pages=40, num_rows=8, max_running=4, page_size=4)
    plain, busy = Bench(sizes), Bench(sizes)
    for bench in (plain, busy):
        sessions = [bench.open(f"s{i}") for i in range(8)]
        if bench is busy:
            bench.run(*(draft(s, 0, distinct(i, 20)) for i, s in enumerate(sessions[4:])))
            assert bench.cache.tails.num_pages[POOL] >= 15
        turns = [
            bench.submit_command(s, f"t{i}", distinct(i + 50, 24), max_tokens=6)
            for i, s in enumerate(sessions[:4])
        ]
        bench.run(*turns)
    for i in range(4):
        mine, its = busy.finished(f"t{i}"), plain.finished(f"t{i}")
        assert (mine.num_retractions, mine.timings.num_steps) == (
            its.num_retractions,
            its.timings.num_steps,
        )
        busy.expect(f"t{i}", distinct(i + 50, 24))
    busy.close_all()


def test_a_thousand_sessions_that_draft_delay_no_turn_by_more_than_one_chunk() -> None:
    """A running turn is in every forward; a new one is in the next that is planned, and at most
    one forward of drafts is before that."""
    sizes = Sizes(
        num_pages=6000, num_rows=1100, max_running=8, chunk_tokens=64, max_context_len=128
    )
    bench = Bench(sizes)
    names = [SessionId(f"d{number}") for number in range(1000)]
    bench.step(*(OpenSession(session_id=name, tenant_salt=name, tokens=()) for name in names))
    speaker = bench.open("speaker")

    def drafts(length: int) -> list[DraftInput]:
        return [draft(name, 0, distinct(i, length)) for i, name in enumerate(names)]

    bench.step(*drafts(30))
    assert bench.hand.num_launched == 1, "no second forward of drafts behind the first"
    assert bench.step().batch is None
    came = len(bench.batches)
    outcome = bench.step(bench.submit_command(speaker, "turn", PROMPT, max_tokens=12))
    assert outcome.batch is not None
    assert any(row.turn_id == "turn" for row in outcome.batch.rows), "it waits for one forward"
    for _ in range(60):
        if bench.turns[TurnId("turn")].end is not None:
            break
        if not bench.step().is_blocked:
            continue
        bench.settle()
    assert bench.turns[TurnId("turn")].end is not None
    mine = [b for b in bench.batches[came:] if any(r.turn_id == "turn" for r in b.rows)]
    assert len(mine) == 12
    assert bench.batches[came : came + 12] == mine, "it is in every forward"
    for batch in mine:
        num_drafted = sum(r.num_tokens for r in batch.rows if r.turn_id != "turn")
        assert num_drafted <= sizes.chunk_tokens // 8


def test_every_draft_of_a_crowd_is_answered_where_no_page_is_free() -> None:
    bench = Bench(Sizes(num_pages=8, num_rows=8, page_size=4))
    first = bench.open("first")
    bench.run(draft(first, 0, distinct(0, 32)))
    names = [bench.open(f"s{number}") for number in range(300)]
    bench.run(*(draft(name, 0, TYPED) for name in names))
    assert len(drafted(bench)) == 301
    assert not drafted(bench)[-1].processed
    bench.close_all()


@pytest.mark.parametrize("mixture", list(Mixture))
def test_any_order_of_drafts_and_turns_gives_the_answers_without_drafts(mixture: Mixture) -> None:
    for seed in range(at_depth(1, proof=60)):
        random = Random(seed)
        sizes = Sizes(
            layers=Layers(mixture, window=8),
            page_size=random.choice([1, 4, 16]),
            num_pages=random.choice([40, 64]),
            chunk_tokens=random.choice([4, 16, 64]),
            num_rows=random.choice([3, 6]),
            num_in_flight=random.choice([1, 2]),
            retract_interval=random.choice([0, 0, 5]),
        )
        bench = Bench(sizes)
        sessions = {bench.open(f"s{i}"): () for i in range(5)}
        for number in range(12):
            session_id = random.choice(list(sessions))
            history: tuple[int, ...] = sessions[session_id]
            new: tuple[int, ...] = ()
            for _ in range(random.randint(0, 8)):
                new = new[: random.randint(0, len(new))]
                new += tuple(random.randint(1, 9) for _ in range(random.randint(1, 5)))
                bench.step(draft(session_id, len(history), new))
                other = random.choice(list(sessions))
                bench.step(draft(other, len(sessions[other]), new))
                if random.random() < 0.5 and len(bench.runner):
                    bench.settle()
                if random.random() < 0.1:
                    bench.step(DropDraft(session_id=other))
            new = (*new, 1)
            command = bench.submit_command(
                session_id, f"t{number}", new, base_len=len(history), max_tokens=3
            )
            bench.run(command)
            bench.expect(f"t{number}", history + new)
            sessions[session_id] = (*history, *new, *bench.tokens(f"t{number}"))
        bench.close_all()
