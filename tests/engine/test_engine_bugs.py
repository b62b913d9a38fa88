"""Bugs that other servers have had, each as the shortest story that shows it.

The first letter is the family: L leak, D double free, A aliasing, R race, G off by one,
X starvation. Every page is recounted after every step.
"""

from __future__ import annotations

import pytest

from cache.types import SessionId, SlotState, TurnId
from session_server.core.commands import CancelTurn, CloseSession
from session_server.core.events import (
    FinishReason,
    PrefillProgressed,
    SessionGone,
    TurnFailed,
    TurnFinished,
)
from tests.engine.bench import Bench, Stage

PROMPT = tuple(1 + i % 31 for i in range(20))


def cancel(name: str, num_outputs: int | None) -> CancelTurn:
    return CancelTurn(turn_id=TurnId(name), num_outputs=num_outputs)


def close(name: str) -> CloseSession:
    return CloseSession(session_id=SessionId(name))


def distinct(seed: int, length: int) -> tuple[int, ...]:
    return tuple(1 + (seed * 13 + i * (seed + 3)) % 31 for i in range(length))


# Leaks


def test_l3_a_turn_that_asks_many_steps_for_admission_takes_one_lock() -> None:
    bench = Bench(Stage(num_pages=10, chunk_tokens=64, num_rows=2))
    first, second = bench.open("first"), bench.open("second")
    bench.run(bench.submit_command(second, "warm", PROMPT[:9], max_tokens=1))
    bench.run(
        bench.submit_command(first, "a", distinct(1, 22), max_tokens=12),
        bench.submit_command(second, "b", PROMPT[:12], base_len=10, max_tokens=8),
    )
    bench.expect("a", distinct(1, 22))
    assert isinstance(bench.turns[TurnId("b")].end, TurnFinished)
    bench.close_all()


def test_l4_a_turn_cancelled_before_it_got_a_row_leaves_nothing() -> None:
    bench = Bench(Stage(num_rows=1, max_running=1))
    first, second = bench.open("first"), bench.open("second")
    bench.step(bench.submit_command(first, "a", PROMPT))
    bench.step(bench.submit_command(second, "b", PROMPT))
    bench.step(cancel("b", None))
    end = bench.finished("b")
    assert (end.reason, end.history_len, end.num_outputs) == (FinishReason.CANCELLED, 0, 0)
    bench.run()
    bench.close_all()


@pytest.mark.parametrize("keep", [None, 0])
def test_l6_a_chunk_that_lands_after_its_turn_was_cancelled_is_dropped(keep: int | None) -> None:
    bench = Bench(Stage(chunk_tokens=4))
    session_id = bench.open("s")
    bench.step(bench.submit_command(session_id, "t", PROMPT))
    bench.settle()
    bench.step()
    bench.step(cancel("t", keep))
    assert bench.finished("t").history_len == (0 if keep is None else len(PROMPT))
    bench.run()
    assert bench.engine.counters.overshoots > 0
    bench.close_all()


def test_l8_three_hundred_cancelled_turns_leave_an_empty_engine() -> None:
    bench = Bench(Stage(num_in_flight=2, max_running=8))
    sessions = [bench.open(f"s{i}") for i in range(10)]
    for i in range(300):
        name = f"t{i}"
        bench.step(bench.submit_command(sessions[i % 10], name, distinct(i, 5), max_tokens=50))
        if len(bench.runner) and i % 3:
            bench.settle()
        bench.step(cancel(name, None))
        assert bench.finished(name).reason is FinishReason.CANCELLED
    bench.run()
    bench.close_all()


def test_l11_a_rejected_second_turn_does_not_keep_the_session_from_closing() -> None:
    bench = Bench()
    session_id = bench.open("s")
    bench.step(bench.submit_command(session_id, "a", PROMPT))
    bench.step(bench.submit_command(session_id, "b", PROMPT))
    assert bench.failed("b").code == "session_busy"
    bench.step(close("s"))
    assert SessionGone in [type(event) for event in bench.events]
    bench.run()
    bench.close_all()


# Double frees


def test_d1_the_overshoot_of_a_finished_turn_frees_nothing_twice() -> None:
    bench = Bench(Stage(page_size=1))
    session_id = bench.open("s")
    outputs = [17, 4]  # whatever is said; the stop is set on the third
    bench.run(bench.submit_command(session_id, "probe", PROMPT, max_tokens=6))
    said = bench.tokens("probe")
    stop = next(t for t in said if said.index(t) >= len(outputs))
    bench.run(
        bench.submit_command(
            session_id, "t", PROMPT, base_len=0, max_tokens=50, stop_token_ids=(stop,)
        )
    )
    end = bench.finished("t")
    assert (end.reason, end.matched_token) == (FinishReason.STOP, stop)
    assert bench.tokens("t") == said[: said.index(stop) + 1]
    assert bench.engine.counters.overshoots == 1
    bench.close_all()


def test_d2_a_turn_cancelled_in_flight_is_not_finished_by_its_result() -> None:
    bench = Bench()
    session_id = bench.open("s")
    bench.step(bench.submit_command(session_id, "t", PROMPT[:4], max_tokens=1))
    bench.step(cancel("t", 0))
    bench.run()
    ends = [e for e in bench.events if isinstance(e, TurnFinished | TurnFailed)]
    assert [end.turn_id for end in ends] == ["t"]
    bench.close_all()


# Aliasing


def test_a1_a_row_freed_and_taken_while_an_older_launch_reads_it_is_not_disturbed() -> None:
    bench = Bench(Stage(num_rows=2, num_pages=8, chunk_tokens=64))
    doomed, other = bench.open("doomed"), bench.open("other")
    bench.step(bench.submit_command(doomed, "a", distinct(1, 12), max_tokens=20))
    bench.step(bench.submit_command(other, "b", distinct(2, 8), max_tokens=8))
    bench.settle()
    bench.step(close("doomed"))
    fresh = bench.open("fresh")
    bench.step(bench.submit_command(fresh, "c", distinct(3, 15), max_tokens=4))
    bench.run()
    bench.expect("b", distinct(2, 8))
    bench.expect("c", distinct(3, 15))
    bench.close_all()


def test_a5_a_replaced_last_token_is_not_found_under_the_old_ones_pages() -> None:
    bench = Bench(Stage(page_size=4))
    session_id = bench.open("s")
    bench.run(bench.submit_command(session_id, "a", PROMPT[:5], max_tokens=4))
    history = PROMPT[:5] + tuple(bench.tokens("a"))
    for cut in (8, 7, 5, 4, 1):
        replaced = (*history[:cut], 1 + history[cut] % 30)
        name = f"cut{cut}"
        bench.run(
            bench.submit_command(session_id, name, replaced[cut:], base_len=cut, max_tokens=5)
        )
        bench.expect(name, replaced)
        history = replaced + tuple(bench.tokens(name))
    bench.close_all()


def test_a6_two_turns_with_one_prefix_in_one_step_do_not_read_what_is_not_written() -> None:
    bench = Bench(Stage(chunk_tokens=64))
    one, two = bench.open("one"), bench.open("two")
    bench.run(bench.submit_command(one, "a", PROMPT), bench.submit_command(two, "b", (*PROMPT, 3)))
    bench.expect("a", PROMPT)
    bench.expect("b", (*PROMPT, 3))
    assert bench.finished("b").cached_tokens == 0
    assert bench.cache.num_repoints > 0
    bench.close_all()


def test_a8_a_token_that_lands_after_its_turn_was_retracted_is_not_applied() -> None:
    bench = Bench(Stage(num_pages=12, chunk_tokens=64, num_in_flight=2))
    old, young = bench.open("old"), bench.open("young")
    bench.step(bench.submit_command(old, "a", distinct(1, 8), max_tokens=40))
    bench.step(bench.submit_command(young, "b", distinct(2, 8), max_tokens=30))
    bench.run()
    assert bench.finished("b").num_retractions > 0
    assert bench.engine.counters.overshoots > 0
    bench.expect("a", distinct(1, 8))
    bench.expect("b", distinct(2, 8))
    bench.close_all()


def test_a13_what_a_nan_forward_wrote_is_never_matched_by_another_turn() -> None:
    bench = Bench(Stage(chunk_tokens=8))
    sick, well = bench.open("sick"), bench.open("well")
    bench.step(bench.submit_command(sick, "a", PROMPT))
    bench.settle()
    bench.runner.faults.nan_turns.add(TurnId("a"))
    bench.run()
    failed = bench.failed("a")
    assert (failed.code, failed.history_len) == ("numerical_error", 0)
    bench.run(bench.submit_command(well, "b", (*PROMPT, 5)))
    bench.expect("b", (*PROMPT, 5))
    bench.run(bench.submit_command(sick, "retry", PROMPT))
    bench.expect("retry", PROMPT)
    bench.close_all()


def test_a14_a_turn_retracted_and_then_cancelled_leaves_no_half_turn() -> None:
    bench = Bench(Stage(num_pages=12, chunk_tokens=64))
    old, young = bench.open("old"), bench.open("young")
    bench.run(bench.submit_command(young, "warm", distinct(2, 3), max_tokens=2))
    history = distinct(2, 3) + tuple(bench.tokens("warm"))
    bench.step(bench.submit_command(old, "a", distinct(1, 17), max_tokens=30))
    bench.step(
        bench.submit_command(young, "b", distinct(4, 7), base_len=len(history), max_tokens=20)
    )
    while bench.cache.slot(young).state is not SlotState.COLD or not bench.tokens("b"):
        bench.settle()
    bench.step(cancel("b", None))
    assert bench.finished("b").history_len == len(history)
    bench.run()
    bench.run(bench.submit_command(young, "c", (9, 9), base_len=len(history)))
    bench.expect("c", (*history, 9, 9))
    bench.close_all()


def test_a15_a_rolled_back_chunk_is_not_under_the_next_turn() -> None:
    bench = Bench(Stage(chunk_tokens=8))
    session_id = bench.open("s")
    bench.step(bench.submit_command(session_id, "a", PROMPT))
    bench.settle()
    bench.step(cancel("a", None))
    other = distinct(9, 11)
    bench.run(bench.submit_command(session_id, "b", other))
    bench.expect("b", other)
    assert bench.finished("b").prompt_tokens == len(other)
    bench.close_all()


def test_a16_a_turn_that_is_too_long_is_refused_and_the_session_is_intact() -> None:
    bench = Bench(Stage(num_pages=100, max_context_len=64))
    session_id = bench.open("s")
    bench.run(bench.submit_command(session_id, "a", PROMPT, max_tokens=3))
    history = PROMPT + tuple(bench.tokens("a"))
    before = bench.cache.slot(session_id)
    room = 64 - len(history)
    too_long = bench.submit_command(session_id, "b", (1,) * room, base_len=len(history))
    bench.run(too_long)
    failed = bench.failed("b")
    assert (failed.code, failed.history_len) == ("context_too_long", len(history))
    assert bench.cache.slot(session_id) == before
    bench.run(bench.submit_command(session_id, "c", (1,) * (room - 1), base_len=len(history)))
    bench.expect("c", history + (1,) * (room - 1))
    assert len(bench.tokens("c")) == 1
    bench.close_all()


# Alignment


@pytest.mark.parametrize("page_size", [1, 2, 4, 16])
def test_g_every_residue_of_history_input_and_chunk(page_size: int) -> None:
    residues = sorted({1, page_size - 1, page_size, page_size + 1, 2 * page_size, 3} - {0})
    for chunk_tokens in {1, max(1, page_size - 1), page_size, page_size + 1, 64}:
        stage = Stage(page_size=page_size, chunk_tokens=chunk_tokens, num_pages=400 // page_size)
        bench = Bench(stage)
        for first in residues:
            for second in residues:
                name = f"{first}-{second}"
                session_id = bench.open(name)
                prompt = distinct(first, first)
                bench.run(bench.submit_command(session_id, f"a{name}", prompt, max_tokens=2))
                bench.expect(f"a{name}", prompt)
                history = prompt + tuple(bench.tokens(f"a{name}"))
                new = distinct(second + 5, second)
                bench.run(
                    bench.submit_command(
                        session_id, f"b{name}", new, base_len=len(history), max_tokens=2
                    )
                )
                bench.expect(f"b{name}", history + new)
                cached = bench.finished(f"b{name}").cached_tokens
                assert len(history) - 1 <= cached <= len(history)
                bench.run(close(name))
        bench.close_all()


@pytest.mark.parametrize("length", [4, 8, 16])
def test_g6_a_prompt_that_the_tree_holds_whole_still_computes_its_last_token(length: int) -> None:
    bench = Bench(Stage(page_size=4))
    one, two = bench.open("one"), bench.open("two")
    bench.run(bench.submit_command(one, "a", PROMPT[:length]))
    bench.run(bench.submit_command(two, "b", PROMPT[:length]))
    assert bench.tokens("b") == bench.tokens("a")
    assert bench.finished("b").cached_tokens == length - 4
    bench.close_all()


# Starvation


@pytest.mark.parametrize("num_in_flight", [1, 2])
def test_x1_many_sessions_on_a_pool_that_holds_few_all_get_their_answers(
    num_in_flight: int,
) -> None:
    bench = Bench(Stage(num_pages=20, num_in_flight=num_in_flight, chunk_tokens=32))
    histories: dict[str, tuple[int, ...]] = {}
    for turn in range(3):
        commands = []
        for i in range(30):
            name, new = f"s{i}", distinct(i + turn, 6)
            history = histories.setdefault(name, ())
            if turn == 0:
                bench.open(name)
            commands.append(
                bench.submit_command(
                    SessionId(name), f"{name}.{turn}", new, base_len=len(history), max_tokens=3
                )
            )
            histories[name] = history + new
        bench.run(*commands)
        for name, prompt in histories.items():
            bench.expect(f"{name}.{turn}", prompt)
            histories[name] = prompt + tuple(bench.tokens(f"{name}.{turn}"))
    assert bench.engine.counters.coolings > 0
    bench.close_all()


def test_x2_a_session_that_fills_the_pool_ends_with_length_and_does_not_hang() -> None:
    bench = Bench(Stage(num_pages=10, max_context_len=256))
    session_id = bench.open("s")
    bench.run(bench.submit_command(session_id, "t", PROMPT, max_tokens=500))
    end = bench.finished("t")
    assert end.reason is FinishReason.LENGTH
    assert end.history_len == bench.engine.max_turn_len == 40
    bench.expect("t", PROMPT)
    bench.close_all()


def test_x3_turns_that_wait_hold_no_pages_so_no_two_wait_for_each_other() -> None:
    bench = Bench(Stage(num_pages=12, chunk_tokens=64))
    sessions = [bench.open(f"s{i}") for i in range(4)]
    for i, session_id in enumerate(sessions):
        bench.run(bench.submit_command(session_id, f"warm{i}", distinct(i, 10), max_tokens=1))
    bench.run(
        *(
            bench.submit_command(session_id, f"t{i}", distinct(i + 9, 12), max_tokens=20)
            for i, session_id in enumerate(sessions)
        )
    )
    for i in range(4):
        bench.expect(f"t{i}", distinct(i + 9, 12))
    bench.close_all()


def test_x4_a_prompt_beyond_the_pool_is_refused_and_blocks_nobody() -> None:
    bench = Bench(Stage(num_pages=6, max_context_len=256))
    one, two = bench.open("one"), bench.open("two")
    bench.run(
        bench.submit_command(one, "big", (1,) * 24), bench.submit_command(two, "small", PROMPT)
    )
    assert bench.failed("big").code == "context_too_long"
    bench.expect("small", PROMPT)
    bench.run(bench.submit_command(one, "fits", (1,) * 23, max_tokens=9))
    assert bench.finished("fits").num_outputs == 1
    bench.close_all()


def test_x6_those_who_stream_get_a_token_in_every_forward_beside_a_long_prompt() -> None:
    bench = Bench(Stage(num_pages=200, chunk_tokens=16, num_in_flight=1))
    stream, hog = bench.open("stream"), bench.open("hog")
    bench.step(bench.submit_command(stream, "a", PROMPT[:3], max_tokens=40))
    bench.settle()
    bench.step(bench.submit_command(hog, "b", distinct(1, 200), max_tokens=1))
    while TurnId("b") in bench.turns and bench.turns[TurnId("b")].end is None:
        said = len(bench.tokens("a"))
        bench.settle()
        assert len(bench.tokens("a")) == said + 1
    bench.run()
    bench.close_all()


def test_x7_one_maximal_prompt_does_not_hold_up_others_first_tokens() -> None:
    bench = Bench(Stage(num_pages=200, chunk_tokens=16, num_in_flight=1))
    hog = bench.open("hog")
    bench.step(bench.submit_command(hog, "hog", distinct(1, 250), max_tokens=1))
    for i in range(5):
        session_id = bench.open(f"s{i}")
        bench.step(bench.submit_command(session_id, f"t{i}", distinct(i, 6), max_tokens=2))
        steps = bench.engine.counters.steps
        while not bench.tokens(f"t{i}"):
            bench.settle()
        assert bench.engine.counters.steps - steps <= 2
    assert bench.turns[TurnId("hog")].end is None
    bench.run()
    bench.expect("hog", distinct(1, 250))
    bench.close_all()


def test_x9_a_long_prompt_goes_on_while_short_ones_keep_coming() -> None:
    bench = Bench(Stage(num_pages=300, chunk_tokens=16, num_in_flight=1, max_running=4))
    hog = bench.open("hog")
    bench.step(bench.submit_command(hog, "hog", distinct(1, 200), max_tokens=1))
    for i in range(60):
        session_id = bench.open(f"s{i}")
        bench.step(bench.submit_command(session_id, f"t{i}", distinct(i, 12), max_tokens=1))
        bench.settle()
    progress = [e.computed for e in bench.events if isinstance(e, PrefillProgressed)]
    assert bench.turns[TurnId("hog")].end is not None or max(progress) > 100
    bench.run()
    bench.expect("hog", distinct(1, 200))
    bench.close_all()
