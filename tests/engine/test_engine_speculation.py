"""Speculation changes how many forwards a turn takes, and nothing else."""

from __future__ import annotations

import itertools

import pytest

from cache.types import TurnId
from session_server.core.batch import Batch, BatchRow, StepResult
from session_server.core.commands import CancelTurn, StopTurn
from session_server.core.events import FinishReason
from session_server.engine.config import Drafter
from tests.engine.bench import POOL, Bench
from tests.sim.device import EchoRunner
from tests.sim.echo import EOS, VOCAB_SIZE, EchoModel, replay
from tests.sim.hand_engine import Sizes

PROMPT = (3, 1, 4, 1, 5, 9, 2, 6)


def bench_of(num_drafts: int = 4, drafter: Drafter = Drafter.MODEL, **stage: int) -> Bench:
    return Bench(Sizes(num_drafts=num_drafts, drafter=drafter, **stage))


def rows_of(bench: Bench, turn_name: str) -> list[BatchRow]:
    rows = itertools.chain.from_iterable(batch.rows for batch in bench.batches)
    return [row for row in rows if row.turn_id == turn_name]


def step_until_verifying(bench: Bench, turn_name: str) -> BatchRow:
    """Step until a row with drafts of this turn is launched and not settled."""
    for _ in range(200):
        rows = rows_of(bench, turn_name)
        if rows and rows[-1].num_drafts and len(bench.runner):
            return rows[-1]
        if len(bench.runner):
            bench.settle()
        else:
            bench.step()
    raise AssertionError("no row had drafts")


@pytest.mark.parametrize("num_in_flight", [1, 2])
def test_fewer_forwards_say_the_same(num_in_flight: int) -> None:
    plain, bench = Bench(Sizes(num_in_flight=num_in_flight)), bench_of(num_in_flight=num_in_flight)
    for one in (plain, bench):
        session = one.open("s")
        one.run(one.submit_command(session, "t", PROMPT, max_tokens=40))
    assert bench.tokens("t") == plain.tokens("t")
    bench.expect("t", PROMPT)
    counters = bench.engine.counters
    assert counters.accepted_tokens > 15
    assert counters.draft_tokens > counters.accepted_tokens
    assert len(rows_of(bench, "t")) == len(rows_of(plain, "t")) - counters.accepted_tokens
    bench.close_all()


@pytest.mark.parametrize("num_in_flight", [1, 2])
def test_an_answer_that_repeats_is_guessed_from_itself(
    monkeypatch: pytest.MonkeyPatch, num_in_flight: int
) -> None:
    monkeypatch.setattr(EchoModel, "choose", lambda self, total, position, seed, last: position % 7)
    bench = bench_of(drafter=Drafter.NGRAM, num_in_flight=num_in_flight)
    session = bench.open("s")
    bench.run(bench.submit_command(session, "t", PROMPT, max_tokens=80))
    bench.expect("t", PROMPT)
    counters = bench.engine.counters
    assert counters.accepted_tokens == counters.draft_tokens > 40
    assert len(rows_of(bench, "t")) < 35
    bench.run(bench.submit_command(session, "u", (), base_len=len(PROMPT) + 80, max_tokens=20))
    assert len(rows_of(bench, "u")) < 8, "the history of the session is there from the first token"


def test_nobody_is_launched_again_before_drafts_are_verified(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A forward ahead without the turn that verifies would be half a forward."""
    repeats = 2  # the seed of the turn that says the same again and again

    monkeypatch.setattr(
        EchoModel,
        "choose",
        lambda self, total, position, seed, last: position % (7 if seed == repeats else VOCAB_SIZE),
    )
    bench = bench_of(drafter=Drafter.NGRAM)
    unsettled: list[Batch] = []
    num_ahead = 0

    def launch(batch: Batch) -> None:
        nonlocal num_ahead
        assert not any(row.num_drafts for b in unsettled for row in b.rows)
        num_ahead += bool(unsettled)
        unsettled.append(batch)
        EchoRunner.launch(bench.runner, batch)

    def execute() -> StepResult:
        unsettled.pop(0)
        return EchoRunner.execute(bench.runner)

    monkeypatch.setattr(bench.runner, "launch", launch)
    monkeypatch.setattr(bench.runner, "execute", execute)
    session, other = bench.open("s"), bench.open("o")
    bench.run(
        bench.submit_command(session, "t", PROMPT, max_tokens=150, seed=repeats),
        bench.submit_command(other, "u", (8, 8, 8), max_tokens=25, seed=1),
    )
    assert sum(row.num_drafts > 0 for row in rows_of(bench, "t")) > 10
    assert not any(row.num_drafts for row in rows_of(bench, "u"))
    assert num_ahead > 5, "while no turn has drafts, forwards overlap"
    beside = [{row.turn_id for row in batch.rows} for batch in bench.batches]
    assert all("t" in turns for turns in beside if "u" in turns)


@pytest.mark.parametrize("num_prompt", [8, 9, 10])
def test_a_row_has_states_for_a_prompt_in_flight_or_for_drafts_not_for_both(
    monkeypatch: pytest.MonkeyPatch, num_prompt: int
) -> None:
    """A position that is left of a prompt is known, so drafts could be verified behind it while its
    chunk is in flight."""
    bench = bench_of(num_in_flight=2, chunk_tokens=4)
    num_drafts: dict[bool, list[int]] = {False: [], True: []}

    def launch(batch: Batch) -> None:
        (row,) = batch.rows
        if row.num_tokens - row.num_drafts == 1:
            num_drafts[len(bench.runner) > 0].append(row.num_drafts)
        EchoRunner.launch(bench.runner, batch)

    monkeypatch.setattr(bench.runner, "launch", launch)
    prompt = tuple(range(1, num_prompt + 1))
    bench.run(bench.submit_command(bench.open("s"), "t", prompt, max_tokens=30))
    bench.expect("t", prompt)
    assert any(num_drafts[False])
    assert num_drafts[True] == ([0] if num_prompt == 9 else [])


@pytest.mark.parametrize("max_tokens", range(1, 12))
def test_drafts_never_reach_past_the_last_token(max_tokens: int) -> None:
    bench = bench_of(num_drafts=8)
    session = bench.open("s")
    bench.run(bench.submit_command(session, "t", PROMPT, max_tokens=max_tokens))
    assert len(bench.tokens("t")) == max_tokens
    last = max(row.start + row.num_tokens for row in rows_of(bench, "t"))
    assert last <= len(PROMPT) + max_tokens - 1
    bench.close_all()


def test_nothing_is_said_behind_a_stop_token_inside_a_draft() -> None:
    stopped_inside = 0
    for seed in range(40):
        bench = bench_of(num_drafts=8)
        session = bench.open("s")
        command = bench.submit_command(
            session, "t", PROMPT, max_tokens=60, seed=seed, ignore_eos=False
        )
        bench.run(command)
        said = replay("a", PROMPT, seed=seed, max_new=60)
        until = said.index(EOS) + 1 if EOS in said else 60
        assert bench.tokens("t") == said[:until]
        finished = bench.finished("t")
        assert finished.history_len == len(PROMPT) + until
        last = rows_of(bench, "t")[-1]
        stopped_inside += EOS in said and last.start + last.num_tokens > len(PROMPT) + until
        bench.run(bench.submit_command(session, "u", (7,), base_len=len(PROMPT) + until))
        bench.expect("u", PROMPT + tuple(said[:until]) + (7,))
        bench.close_all()
    assert stopped_inside > 3


def test_a_stop_token_before_min_tokens_is_an_ordinary_token() -> None:
    said = replay("a", PROMPT, seed=1, max_new=10)
    bench = bench_of(num_drafts=8)
    session = bench.open("s")
    command = bench.submit_command(
        session, "t", PROMPT, max_tokens=10, min_tokens=6, stop_token_ids=tuple(said[2:8])
    )
    bench.run(command)
    assert bench.tokens("t") == said[:6]
    assert bench.finished("t").matched_token == said[5]


def test_overshoot_does_not_survive_a_turn() -> None:
    """L1, G4: pages of rejected or unwanted drafts are free once the turn has ended."""
    for end in ("cancel", "stop", "rollback"):
        bench = bench_of(num_drafts=8, page_size=1)
        session = bench.open("s")
        bench.step(bench.submit_command(session, "t", PROMPT, max_tokens=40))
        row = step_until_verifying(bench, "t")
        turn_id, num_said = TurnId("t"), len(bench.tokens("t"))
        allocated = bench.cache.slot(session).allocated_len
        assert allocated >= row.start + row.num_tokens
        if end == "stop":
            bench.step(StopTurn(turn_id=turn_id, num_outputs=num_said))
        else:
            num_outputs = num_said if end == "cancel" else None
            bench.step(CancelTurn(turn_id=turn_id, num_outputs=num_outputs))
        slot = bench.cache.slot(session)
        kept = 0 if end == "rollback" else len(PROMPT) + num_said
        assert slot.num_tokens == kept
        assert slot.allocated_len <= kept
        accounts = bench.cache.accounts()[POOL]
        assert accounts.active == 0
        assert accounts.free >= bench.sizes.num_pages - kept
        bench.run()
        bench.close_all()


def test_a_turn_retracted_while_it_verifies_resumes_identically() -> None:
    bench = bench_of(num_pages=16, page_size=2, max_context_len=40)
    first, second = bench.open("a"), bench.open("b")
    bench.step(bench.submit_command(first, "old", PROMPT, max_tokens=22))
    bench.step(bench.submit_command(second, "young", (2, 7), max_tokens=26))
    bench.run()
    assert bench.engine.counters.retractions > 0
    assert bench.finished("young").reason is FinishReason.LENGTH
    bench.expect("old", PROMPT)
    bench.expect("young", (2, 7))
    bench.close_all()


def test_drafts_take_nobodys_pages() -> None:
    """A draft that would need a page nobody has left is cut, and nobody is retracted for it."""
    bench = bench_of(num_drafts=8, num_pages=16, page_size=4, max_context_len=64, num_rows=4)
    sessions = [bench.open(name) for name in "abc"]
    for name, session in zip("abc", sessions, strict=True):
        bench.step(bench.submit_command(session, name, (*PROMPT, ord(name) % 32), max_tokens=12))
    bench.run()
    assert bench.engine.counters.retractions == 0
    assert bench.engine.counters.draft_tokens > 0
    assert bench.engine.counters.shortfalls == 0
    for name in "abc":
        bench.expect(name, (*PROMPT, ord(name) % 32))
