"""A turn whose grammar is not compiled waits; others do not wait with it."""

from __future__ import annotations

import pytest

from cache.types import TurnId
from session_server.core.batch import CompileResult
from session_server.core.commands import CancelTurn, CloseSession
from session_server.core.errors import InvalidRequest
from session_server.core.events import FinishReason
from session_server.core.sampling import Grammar
from session_server.engine.scheduler import COMPILED_PER_RUNNING
from tests.engine.bench import Bench
from tests.scenarios.lines import distinct
from tests.sim.hand_engine import FakeGrammar, Sizes

GRAMMAR = Grammar("regex", "a+")


def slow(sizes: Sizes | None = None) -> Bench:
    """A bench whose grammars are compiled when the test says so."""
    bench = Bench(sizes)
    bench.hand.grammars.at_once = False
    return bench


def submit(bench: Bench, name: str, **sampling: object) -> None:
    session_id = bench.open(f"s-{name}")
    bench.step(bench.submit_command(session_id, name, (3, 4, 5), **sampling))


def test_others_run_while_a_grammar_is_compiled() -> None:
    bench = slow()
    submit(bench, "held", grammar=GRAMMAR)
    assert [request.turn_id for request in bench.hand.grammars.asked] == ["held"]
    submit(bench, "free")
    bench.run()
    assert bench.finished("free").reason is FinishReason.LENGTH
    assert not bench.turns[TurnId("held")].starts
    assert all(row.turn_id == "free" for batch in bench.batches for row in batch.rows)
    bench.hand.grammars.compile_all()
    bench.run()
    bench.expect("held", (3, 4, 5))
    (start,) = [
        row.sampling
        for batch in bench.batches
        for row in batch.rows
        if row.turn_id == "held" and row.sampling is not None
    ]
    assert start.grammar == FakeGrammar("a+")
    bench.close_all()


def test_a_grammar_that_is_refused_fails_its_turn_and_leaves_nothing() -> None:
    bench = slow()
    submit(bench, "bad", grammar=GRAMMAR)
    bench.hand.grammars.asked.clear()
    bench.hand.grammars.done.append(CompileResult(TurnId("bad"), InvalidRequest("no")))
    bench.run()
    assert bench.failed("bad").code == "invalid_request"
    assert bench.failed("bad").history_len == 0
    bench.close_all()


@pytest.mark.parametrize("is_asked", [True, False])
@pytest.mark.parametrize("closes", [True, False])
def test_a_turn_that_ends_while_it_waits_for_its_grammar_runs_never(
    is_asked: bool, closes: bool
) -> None:
    bench = slow(Sizes(max_running=1))
    names = ["gone"]
    if not is_asked:
        names = [*[f"first {i}" for i in range(COMPILED_PER_RUNNING)], "gone"]
    for name in names:
        submit(bench, name, grammar=GRAMMAR)
    asked = [request.turn_id for request in bench.hand.grammars.asked]
    assert ("gone" in asked) == is_asked
    if closes:
        bench.step(CloseSession(session_id=bench.hand.session_of(TurnId("gone"))))
    else:
        bench.step(CancelTurn(turn_id=TurnId("gone"), num_outputs=0))
    assert bench.finished("gone").reason is FinishReason.CANCELLED
    bench.hand.grammars.compile_all()
    bench.run()
    assert not bench.turns[TurnId("gone")].starts
    for name in names[:-1]:
        bench.expect(name, (3, 4, 5))
    bench.close_all()


def test_no_more_grammars_are_compiled_than_turns_may_use_soon() -> None:
    bench = slow(Sizes(max_running=2))
    names = [f"t{i}" for i in range(9)]
    for name in names:
        submit(bench, name, grammar=GRAMMAR)
    most = COMPILED_PER_RUNNING * 2
    assert [request.turn_id for request in bench.hand.grammars.asked] == names[:most]
    while not all(bench.turns[TurnId(name)].end for name in names):
        compiling = bench.engine.inspect().scheduler.compiling
        assert len(bench.hand.grammars.asked) + compiling.num_compiled <= most
        bench.hand.grammars.compile_all()
        bench.run()
    for name in names:
        bench.expect(name, (3, 4, 5))
    assert bench.engine.inspect().scheduler.compiling.num_compiled == 0
    bench.close_all()


@pytest.mark.parametrize("is_good", [True, False])
def test_turns_that_end_while_their_grammars_are_compiled_hold_their_places(is_good: bool) -> None:
    """Whoever cancels as fast as he asks does not have more compiled than anybody else."""
    bench = slow(Sizes(max_running=1))
    names = [f"t{i}" for i in range(10 * COMPILED_PER_RUNNING)]
    for name in names:
        submit(bench, name, grammar=GRAMMAR)
        bench.step(CancelTurn(turn_id=TurnId(name), num_outputs=0))
    grammars = bench.hand.grammars
    assert [request.turn_id for request in grammars.asked] == names[:COMPILED_PER_RUNNING]
    submit(bench, "last", grammar=GRAMMAR)
    if is_good:
        grammars.compile_all()
    else:
        error = InvalidRequest("no")
        grammars.done += [CompileResult(request.turn_id, error) for request in grammars.asked]
        grammars.asked.clear()
    bench.run()
    assert [request.turn_id for request in grammars.asked] == ["last"]
    grammars.compile_all()
    bench.run()
    bench.expect("last", (3, 4, 5))
    bench.close_all()


def test_a_turn_that_is_retracted_keeps_its_grammar() -> None:
    bench = Bench(Sizes(retract_interval=5))
    names = ("a", "b")
    sessions = [bench.open(f"of {name}") for name in names]
    bench.run(
        *(
            bench.submit_command(session, name, distinct(i, 9), max_tokens=24, grammar=GRAMMAR)
            for i, (session, name) in enumerate(zip(sessions, names, strict=True))
        )
    )
    starts = [
        row.sampling
        for batch in bench.batches
        for row in batch.rows
        if row.turn_id == "b" and row.sampling is not None
    ]
    assert len(starts) > 1, "it was retracted"
    assert all(start.grammar == FakeGrammar("a+") for start in starts)
    said = [len(start.outputs) for start in starts]
    assert said == sorted(said)
    assert said[-1] > 0, "what it has said goes with it"
    for i, name in enumerate(names):
        bench.expect(name, distinct(i, 9))
    bench.close_all()
