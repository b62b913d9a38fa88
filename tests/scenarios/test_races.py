"""R: two things happen at once, and one undoes the other. In engine and cache."""

from __future__ import annotations

import pytest

from cache.errors import SlotBusy
from cache.types import Namespace, SlotState, TurnId
from session_server.core.commands import StopTurn
from session_server.core.events import FinishReason, SessionGone
from session_server.engine.config import Drafter
from tests.engine.bench import Bench
from tests.mutants.guards import (
    CANCEL_BY_PREFIX,
    CANCEL_WAITS_FOR_THE_DEVICE,
    COOLS_WHAT_IS_LENT,
    LAUNCH_SHARES_HISTORY,
    LIMIT_OUTLIVES_ITS_TURN,
    REFUSAL_CLEARS_MARKER,
    SAMPLER_OUTLIVES_ITS_TURN,
    STOP_KEEPS_OVERSHOOT,
)
from tests.mutants.in_leases import (
    CLOSE_FREES_AT_ONCE,
    OVERSHOOT_STAYS,
)
from tests.mutants.in_scheduling import (
    SENT_TWICE_RUNS_TWICE,
    SESSION_STAYS_BUSY,
)
from tests.mutants.in_settling import (
    CANCEL_KEEPS_INPUT,
    CANCEL_KEEPS_UNHEARD,
)
from tests.scenarios.lines import PROMPT, cancel, close, distinct
from tests.scenarios.registry import scenario
from tests.sim.hand_engine import Sizes


@scenario("R1", REFUSAL_CLEARS_MARKER)
def test_r1_neither_a_rejected_turn_nor_the_one_after_it_disturbs_the_first() -> None:
    bench = Bench()
    session_id = bench.open("s")
    bench.step(bench.submit_command(session_id, "a", PROMPT, max_tokens=6))
    for name in ("b", "c"):
        bench.settle()
        bench.step(bench.submit_command(session_id, name, (1, 2)))
        assert bench.failed(name).code == "session_busy"
    bench.run()
    bench.expect("a", PROMPT)
    assert len(bench.tokens("a")) == 6
    bench.close_all()


@scenario("R2", SESSION_STAYS_BUSY)
def test_r2_a_turn_cancelled_in_the_queue_frees_its_session_for_the_next() -> None:
    bench = Bench(Sizes(max_running=1))
    busy, queued = bench.open("busy"), bench.open("queued")
    bench.step(bench.submit_command(busy, "a", PROMPT))
    bench.step(bench.submit_command(queued, "b", PROMPT))
    bench.step(cancel("b", 0))
    bench.run(bench.submit_command(queued, "c", PROMPT[:7]))
    assert bench.finished("c").num_outputs == 4
    bench.expect("c", PROMPT[:7])
    bench.close_all()


@scenario("R3", CANCEL_KEEPS_UNHEARD, CANCEL_KEEPS_INPUT)
def test_r3_cancel_at_any_step_and_an_immediate_next_turn_sees_the_exact_history() -> None:
    for page_size in (1, 4, 16):
        for num_in_flight in (1, 2):
            for num_steps in range(14):
                for num_kept in (None, 1, 99):
                    stage = Sizes(page_size=page_size, num_in_flight=num_in_flight, chunk_tokens=7)
                    cancel_and_go_on(stage, num_steps, num_kept)


def cancel_and_go_on(stage: Sizes, num_steps: int, num_kept: int | None) -> None:
    """Cancel in mid-turn what the client has heard but for `num_kept` tokens, and ask again."""
    bench = Bench(stage)
    session_id = bench.open("s", tokens=PROMPT[:6])
    bench.step(bench.submit_command(session_id, "a", PROMPT[6:], base_len=6, max_tokens=7))
    for _ in range(num_steps):
        if len(bench.runner):
            bench.settle()
    said = tuple(bench.tokens("a"))
    kept = None if num_kept is None else min(num_kept, len(said))
    bench.step(cancel("a", kept))
    end = bench.finished("a")
    history = PROMPT + said
    if end.reason is FinishReason.CANCELLED:
        history = PROMPT[:6] if kept is None else PROMPT + said[:kept]
    assert end.history_len == len(history)
    bench.step(bench.submit_command(session_id, "b", (5, 6), base_len=len(history)))
    bench.run()
    bench.expect("b", (*history, 5, 6))
    bench.close_all()


@scenario("R4", SENT_TWICE_RUNS_TWICE)
def test_r4_a_turn_id_that_is_sent_twice_is_one_turn() -> None:
    bench = Bench()
    session_id = bench.open("s")
    command = bench.submit_command(session_id, "t", PROMPT, max_tokens=6)
    bench.step(command)
    bench.settle()
    bench.step(command, command)
    bench.run()
    bench.expect("t", PROMPT)
    assert len(bench.tokens("t")) == 6
    bench.close_all()


@scenario("R5", COOLS_WHAT_IS_LENT)
def test_r5_a_session_that_got_busy_after_it_was_chosen_is_not_cooled() -> None:
    bench = Bench()
    session_id = bench.open("s")
    bench.run(bench.submit_command(session_id, "a", PROMPT))
    history = (*PROMPT, *bench.tokens("a"))
    chosen = [idle.session_id for idle in bench.cache.parked]
    bench.step(bench.submit_command(session_id, "b", (7,), base_len=len(history)))
    for victim in chosen:
        with pytest.raises(SlotBusy):
            bench.cache.cool(victim)
    assert bench.cache.slot(session_id).state is SlotState.LENT
    bench.run()
    bench.expect("b", (*history, 7))
    bench.close_all()


@scenario("R6", CLOSE_FREES_AT_ONCE)
def test_r6_a_session_can_be_closed_at_any_step_and_twice() -> None:
    for num_steps in range(8):
        bench = Bench(Sizes(chunk_tokens=7))
        session_id = bench.open("s")
        bench.step(bench.submit_command(session_id, "t", PROMPT, max_tokens=3))
        for _ in range(num_steps):
            if len(bench.runner):
                bench.settle()
        bench.step(close("s"), close("s"))
        assert bench.turns[TurnId("t")].end is not None
        assert len([e for e in bench.events if isinstance(e, SessionGone)]) == 2
        bench.step(bench.submit_command(session_id, "late", PROMPT))
        assert bench.failed("late").code == "session_not_found"
        bench.open("s", salt="b")
        bench.run(bench.submit_command(session_id, "again", PROMPT))
        bench.expect("again", PROMPT)
        bench.close_all()


@scenario("R6", CLOSE_FREES_AT_ONCE)
def test_r6_the_cache_defers_a_close_and_a_second_one_changes_nothing() -> None:
    bench = Bench()
    session_id = bench.open("s")
    cache, turn_id = bench.cache, TurnId("t")
    cache.begin_turn(session_id, turn_id, base_len=0, new_tokens=PROMPT)
    cache.grow(turn_id, len(PROMPT))
    cache.record(turn_id, len(PROMPT))
    assert not cache.close(session_id)
    assert not cache.close(session_id)
    with pytest.raises(SlotBusy):
        cache.begin_turn(session_id, TurnId("u"), base_len=0, new_tokens=(1,))
    cache.end_turn(turn_id, len(PROMPT))
    assert session_id not in cache
    assert cache.close(session_id)
    cache.open(session_id, namespace=Namespace("a", "echo"))
    bench.close_all()


@scenario("R8", CANCEL_BY_PREFIX)
def test_r8_a_cancel_names_one_turn_exactly() -> None:
    bench = Bench()
    one, two = bench.open("one"), bench.open("two")
    bench.step(
        bench.submit_command(one, "t1", PROMPT), bench.submit_command(two, "t12", PROMPT[:9])
    )
    bench.run(cancel("t1", None), cancel("", None), cancel("t", None))
    assert bench.finished("t1").reason is FinishReason.CANCELLED
    assert bench.finished("t12").reason is FinishReason.LENGTH
    bench.close_all()


@scenario("R10", LAUNCH_SHARES_HISTORY)
def test_r10_what_was_launched_does_not_change_under_the_device() -> None:
    bench, history = Bench(Sizes(chunk_tokens=8)), distinct(1, 20)
    session_id = bench.open("s", tokens=history)
    bench.step(bench.submit_command(session_id, "a", PROMPT, base_len=20, repetition_penalty=1.1))
    launched = str(bench.batches[-1])
    assert "array" in launched
    bench.step(cancel("a", None))
    bench.step(bench.submit_command(session_id, "b", distinct(5, 20), base_len=20))
    assert str(bench.batches[0]) == launched
    bench.run()
    bench.expect("b", (*history, *distinct(5, 20)))
    bench.close_all()


@scenario("R11", SAMPLER_OUTLIVES_ITS_TURN, LIMIT_OUTLIVES_ITS_TURN)
def test_r11_each_turn_has_its_own_limits_and_its_own_sampler() -> None:
    bench = Bench()
    session_id = bench.open("s")
    bench.run(bench.submit_command(session_id, "a", PROMPT, max_tokens=2, seed=3))
    bench.expect("a", PROMPT, seed=3)
    history = PROMPT + tuple(bench.tokens("a"))
    bench.run(
        bench.submit_command(session_id, "b", (7,), base_len=len(history), max_tokens=9, seed=4)
    )
    bench.expect("b", (*history, 7), seed=4)
    assert [len(bench.tokens(name)) for name in "ab"] == [2, 9]
    bench.close_all()


@scenario("R12", STOP_KEEPS_OVERSHOOT)
def test_r12_a_stop_string_found_while_later_tokens_are_in_flight_cuts_the_history() -> None:
    bench = Bench()
    session_id = bench.open("s")
    bench.step(bench.submit_command(session_id, "t", PROMPT[:5], max_tokens=60))
    while len(bench.tokens("t")) < 5:
        bench.settle()
    bench.step(StopTurn(turn_id=TurnId("t"), num_outputs=3))
    end = bench.finished("t")
    assert (end.reason, end.num_outputs, end.history_len) == (FinishReason.STOP, 3, 8)
    history = PROMPT[:5] + tuple(bench.tokens("t")[:3])
    bench.run(bench.submit_command(session_id, "next", (2,), base_len=8))
    bench.expect("next", (*history, 2))
    assert bench.finished("next").cached_tokens == len(history)
    bench.close_all()


@scenario("R12", CANCEL_WAITS_FOR_THE_DEVICE, OVERSHOOT_STAYS)
def test_r12_a_cancel_while_drafts_are_verified_frees_the_session_at_once() -> None:
    for num_kept in (None, 0, 99):
        bench = Bench(Sizes(num_drafts=4, drafter=Drafter.MODEL))
        session_id = bench.open("s")
        bench.step(bench.submit_command(session_id, "t", PROMPT, max_tokens=60))
        while not (len(bench.runner) and bench.batches[-1].rows[0].num_drafts):
            bench.settle()
        said = tuple(bench.tokens("t"))
        bench.step(cancel("t", num_kept))
        assert bench.finished("t").reason is FinishReason.CANCELLED
        history = () if num_kept is None else PROMPT + said[:num_kept]
        assert bench.cache.slot(session_id).committed_len <= len(history)
        num_batches = len(bench.batches)
        bench.run()
        assert len(bench.batches) == num_batches
        assert bench.engine.counters.overshoots == 1
        bench.run(bench.submit_command(session_id, "next", (2,), base_len=len(history)))
        bench.expect("next", (*history, 2))
        bench.close_all()
