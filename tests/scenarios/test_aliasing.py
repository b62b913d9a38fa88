"""A: a page or a row that is read by one who should not, or holds what it should not."""

from __future__ import annotations

from cache.types import SlotState, TurnId
from session_server.core.commands import StopTurn
from session_server.core.events import FinishReason
from session_server.engine.config import Drafter
from tests.engine.bench import Bench
from tests.mutants.guards import WINDOW_PAGE_STAYS_IN_ROW
from tests.mutants.in_books import DELTA_IS_A_VIEW, PADDING_ROW_IS_FREE
from tests.mutants.in_leases import (
    CANCELLED_PROMPT_IS_PUBLISHED,
    CLOSE_FREES_AT_ONCE,
    CUT_HISTORY_KEEPS_KV,
    FAILED_FORWARD_IS_KEPT,
    HISTORY_IS_NOT_CUT,
    REWIND_KEEPS_LENGTH,
)
from tests.mutants.in_radix import UNDO_IGNORES_OTHER_LOCKS
from tests.mutants.in_scheduling import (
    LATE_RESULT_IS_APPLIED,
    PADDING_COUNTS_AS_ROOM,
    PROMPT_IS_PUBLISHED_AT_LAUNCH,
    RETRACTED_TURN_IS_SETTLED,
    TOKENS_ARE_NOT_CHECKED,
    TOO_LONG_IS_ADMITTED,
)
from tests.mutants.in_settling import (
    NAN_IS_SETTLED,
    RESULTS_BY_RANK,
    RETRACTED_COUNTS_AS_KEPT,
)
from tests.mutants.in_states import GUESSES_LEAVE_ONE_STATE
from tests.scenarios.lines import PROMPT, cancel, close, distinct
from tests.scenarios.registry import scenario
from tests.sim.echo import VOCAB_SIZE
from tests.sim.hand_engine import Sizes
from tests.sim.layers import Layers, Mixture


@scenario("A1", DELTA_IS_A_VIEW)
def test_a1_a_row_freed_and_taken_while_an_older_forward_reads_it_is_not_disturbed() -> None:
    bench = Bench(Sizes(num_rows=2, num_pages=8, chunk_tokens=64))
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


@scenario("A2", CLOSE_FREES_AT_ONCE)
def test_a2_a_session_closed_in_mid_decode_hands_its_pages_on_when_its_turn_has_ended() -> None:
    bench = Bench(Sizes(num_rows=1, num_pages=5, chunk_tokens=64))
    doomed, heir = bench.open("doomed"), bench.open("heir")
    bench.step(bench.submit_command(doomed, "a", distinct(1, 12), max_tokens=9))
    while len(bench.tokens("a")) < 3:
        bench.settle()
    bench.step(close("doomed"), bench.submit_command(heir, "b", distinct(2, 14), max_tokens=4))
    assert bench.finished("a").reason is FinishReason.CANCELLED
    bench.run()
    bench.expect("b", distinct(2, 14))
    bench.close_all()


@scenario("A2", UNDO_IGNORES_OTHER_LOCKS)
def test_a2_a_turn_undone_leaves_others_the_pages_they_share_with_it() -> None:
    bench = Bench(Sizes(page_size=4, chunk_tokens=64))
    first, second = bench.open("first"), bench.open("second")
    bench.step(bench.submit_command(first, "a", PROMPT, max_tokens=30))
    bench.settle()
    bench.step(bench.submit_command(second, "b", PROMPT[:9], max_tokens=12))
    bench.settle()
    bench.step(cancel("a", None))
    bench.run()
    assert bench.finished("b").cached_tokens == 8
    bench.expect("b", PROMPT[:9])
    bench.close_all()


@scenario("A4", PADDING_ROW_IS_FREE)
def test_a4_as_many_sessions_as_there_are_rows_run_at_once_and_none_has_row_zero() -> None:
    bench = Bench(Sizes(num_rows=4, max_running=4, num_pages=40))
    commands = [
        bench.submit_command(bench.open(f"s{i}"), f"t{i}", distinct(i, 5), max_tokens=6)
        for i in range(4)
    ]
    bench.run(*commands)
    rows = {row.row for batch in bench.batches for row in batch.rows}
    assert rows == {1, 2, 3, 4}
    assert max(len(batch.rows) for batch in bench.batches) == 4
    for i in range(4):
        bench.expect(f"t{i}", distinct(i, 5))
    bench.close_all()


@scenario("A4", PADDING_COUNTS_AS_ROOM)
def test_a4_the_padding_page_is_not_counted_as_room_for_a_turn() -> None:
    bench = Bench(Sizes(num_pages=6, page_size=4, max_context_len=64))
    session_id = bench.open("s")
    assert bench.engine.max_turn_len == 24
    bench.run(bench.submit_command(session_id, "t", PROMPT, max_tokens=50))
    assert bench.finished("t").history_len == 24
    bench.expect("t", PROMPT)
    bench.close_all()


@scenario("A5", CUT_HISTORY_KEEPS_KV)
def test_a5_a_replaced_last_token_is_not_found_under_the_old_ones_pages() -> None:
    bench = Bench(Sizes(page_size=4))
    session_id = bench.open("s")
    bench.run(bench.submit_command(session_id, "a", PROMPT[:5], max_tokens=4))
    history = PROMPT[:5] + tuple(bench.tokens("a"))
    for cut in (8, 7, 5, 4, 1):
        replaced = (*history[:cut], 1 + history[cut] % 30, 7, 8)
        name = f"cut{cut}"
        bench.run(
            bench.submit_command(session_id, name, replaced[cut:], base_len=cut, max_tokens=5)
        )
        bench.expect(name, replaced)
        history = replaced + tuple(bench.tokens(name))
    bench.close_all()


@scenario("A6", PROMPT_IS_PUBLISHED_AT_LAUNCH)
def test_a6_two_turns_with_one_prefix_in_one_step_do_not_read_what_is_not_written() -> None:
    bench = Bench(Sizes(chunk_tokens=64))
    one, two = bench.open("one"), bench.open("two")
    bench.run(bench.submit_command(one, "a", PROMPT), bench.submit_command(two, "b", (*PROMPT, 3)))
    bench.expect("a", PROMPT)
    bench.expect("b", (*PROMPT, 3))
    assert bench.finished("b").cached_tokens == 0
    assert len(bench.batches[0].rows) == 2
    later = [write for batch in bench.batches[1:] for write in batch.table_writes]
    assert any(write.start == 0 for write in later), "one of them goes on with the other's pages"
    bench.close_all()


@scenario("A7", CANCELLED_PROMPT_IS_PUBLISHED)
def test_a7_pages_of_a_prompt_that_was_never_computed_are_not_matched() -> None:
    bench = Bench(Sizes(page_size=4, chunk_tokens=8))
    gone, asked, empty = bench.open("gone"), bench.open("asked"), bench.open("empty")
    bench.step(bench.submit_command(gone, "a", PROMPT))
    bench.settle()
    bench.step()
    bench.step(cancel("a", 0))
    bench.step(close("gone"))
    bench.run(bench.submit_command(asked, "b", (*PROMPT, 9)))
    assert bench.finished("b").cached_tokens == 8, "one chunk was there"
    bench.expect("b", (*PROMPT, 9))
    bench.run(bench.submit_command(empty, "c", (*PROMPT, 9)))
    bench.expect("c", (*PROMPT, 9))
    bench.close_all()


@scenario("A8", RETRACTED_TURN_IS_SETTLED)
def test_a8_a_token_that_lands_after_its_turn_was_retracted_is_not_applied() -> None:
    bench = Bench(Sizes(num_pages=12, chunk_tokens=64, num_in_flight=2))
    old, young = bench.open("old"), bench.open("young")
    bench.step(bench.submit_command(old, "a", distinct(1, 8), max_tokens=40))
    bench.step(bench.submit_command(young, "b", distinct(2, 8), max_tokens=30))
    bench.run()
    assert bench.finished("b").num_retractions > 0
    assert bench.engine.counters.overshoots > 0
    bench.expect("a", distinct(1, 8))
    bench.expect("b", distinct(2, 8))
    bench.close_all()


@scenario("A8", LATE_RESULT_IS_APPLIED)
def test_a8_a_token_that_lands_behind_a_forward_that_failed_is_not_applied() -> None:
    for failing in range(1, 9):
        bench = Bench(Sizes(chunk_tokens=8, num_in_flight=2))
        bench.runner.faults.fail_steps.add(failing)
        session_id = bench.open("s")
        bench.run(bench.submit_command(session_id, "t", PROMPT, max_tokens=8))
        bench.expect("t", PROMPT)
        assert len(bench.tokens("t")) == 8
        assert bench.engine.counters.overshoots == 1
        bench.close_all()


@scenario("A10", GUESSES_LEAVE_ONE_STATE)
def test_a10_a_turn_goes_on_from_the_state_after_its_last_accepted_draft() -> None:
    layers = Layers(Mixture.FULL_AND_RECURRENT)
    bench = Bench(Sizes(layers=layers, num_drafts=4, drafter=Drafter.MODEL))
    session_id = bench.open("s")
    bench.run(bench.submit_command(session_id, "t", PROMPT, max_tokens=60))
    bench.expect("t", PROMPT)
    counters = bench.engine.counters
    assert counters.draft_tokens > counters.accepted_tokens > 0
    bench.close_all()


@scenario("A12", TOKENS_ARE_NOT_CHECKED)
def test_a12_a_token_outside_the_vocabulary_is_refused_and_others_do_not_notice() -> None:
    bench = Bench()
    good, bad = bench.open("good"), bench.open("bad")
    bench.run(
        bench.submit_command(bad, "a", (1, VOCAB_SIZE)), bench.submit_command(good, "b", PROMPT)
    )
    assert bench.failed("a").code == "invalid_request"
    bench.expect("b", PROMPT)
    bench.run(bench.submit_command(bad, "c", (1, VOCAB_SIZE - 1)))
    bench.expect("c", (1, VOCAB_SIZE - 1))
    bench.close_all()


@scenario("A13", NAN_IS_SETTLED)
def test_a13_what_a_nan_forward_wrote_is_never_matched_by_another_turn() -> None:
    bench = Bench(Sizes(chunk_tokens=8))
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


@scenario("A13", FAILED_FORWARD_IS_KEPT)
def test_a13_what_a_nan_turn_computed_of_the_history_is_not_kept_either() -> None:
    bench = Bench(Sizes(page_size=4, chunk_tokens=8))
    sick = bench.open("sick", tokens=PROMPT[:18])
    bench.step(bench.submit_command(sick, "a", PROMPT[18:], base_len=18))
    bench.settle()
    assert bench.cache.slot(sick).committed_len == 8
    bench.runner.faults.nan_turns.add(TurnId("a"))
    bench.run()
    assert bench.failed("a").code == "numerical_error"
    assert bench.cache.slot(sick).committed_len == 0
    bench.run(bench.submit_command(sick, "b", (7, 7), base_len=18))
    bench.expect("b", (*PROMPT[:18], 7, 7))
    bench.close_all()


@scenario("A14", RETRACTED_COUNTS_AS_KEPT)
def test_a14_a_turn_retracted_and_then_cancelled_leaves_no_half_turn() -> None:
    for keeps in (False, True):
        bench = Bench(Sizes(num_pages=12, chunk_tokens=64))
        old, young = bench.open("old"), bench.open("young")
        bench.run(bench.submit_command(young, "warm", distinct(2, 3), max_tokens=2))
        history = distinct(2, 3) + tuple(bench.tokens("warm"))
        bench.step(bench.submit_command(old, "a", distinct(1, 17), max_tokens=30))
        bench.step(
            bench.submit_command(young, "b", distinct(4, 7), base_len=len(history), max_tokens=20)
        )
        while bench.cache.slot(young).state is not SlotState.COLD or not bench.tokens("b"):
            bench.settle()
        bench.step(cancel("b", len(bench.tokens("b")) if keeps else None))
        # What it had said is the server's to send again: the engine has let go of it.
        assert bench.finished("b").history_len == len(history)
        bench.run()
        bench.run(bench.submit_command(young, "c", (9, 9), base_len=len(history)))
        bench.expect("c", (*history, 9, 9))
        bench.close_all()


@scenario("A15", REWIND_KEEPS_LENGTH, HISTORY_IS_NOT_CUT)
def test_a15_a_rolled_back_chunk_is_not_under_the_next_turn() -> None:
    bench = Bench(Sizes(page_size=4, chunk_tokens=8))
    session_id = bench.open("s")
    bench.run(bench.submit_command(session_id, "warm", PROMPT[:5], max_tokens=2))
    history = PROMPT[:5] + tuple(bench.tokens("warm"))
    for name, base_len in (("a", 7), ("b", 6), ("c", 3)):
        bench.step(bench.submit_command(session_id, f"gone {name}", PROMPT, base_len=base_len))
        bench.settle()
        assert bench.cache.slot(session_id).committed_len > base_len
        bench.step(cancel(f"gone {name}", None))
        # The turn after it builds on one token less still.
        other = history[: base_len - 1] + distinct(base_len, 6)
        bench.run(
            bench.submit_command(session_id, name, other[base_len - 1 :], base_len=base_len - 1)
        )
        bench.expect(name, other)
        history = other + tuple(bench.tokens(name))
    bench.close_all()


@scenario("A16", TOO_LONG_IS_ADMITTED)
def test_a16_a_turn_that_is_too_long_is_refused_and_the_session_is_intact() -> None:
    bench = Bench(Sizes(num_pages=100, max_context_len=64))
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


@scenario("A17", WINDOW_PAGE_STAYS_IN_ROW)
def test_a17_what_a_window_let_go_of_is_somebody_elses_and_no_row_names_it() -> None:
    """Two pools, so that one session's positions lie under different numbers in each of them; the
    window's is so small that its pages change hands all the time."""
    layers = Layers(Mixture.FULL_AND_WINDOW, window=8, window_pages=14)
    bench = Bench(Sizes(page_size=4, num_pages=100, chunk_tokens=8, layers=layers))
    names = [f"s{i}" for i in range(4)]
    prompts = [distinct(i, 30 + i) for i in range(4)]
    bench.run(
        *(
            bench.submit_command(bench.open(name), f"{name}.a", prompt, max_tokens=30)
            for name, prompt in zip(names, prompts, strict=True)
        )
    )
    for name, prompt in zip(names, prompts, strict=True):
        bench.expect(f"{name}.a", prompt)
        assert len(bench.tokens(f"{name}.a")) == 30
    bench.close_all()


@scenario("A18", RESULTS_BY_RANK)
def test_a18_answers_are_not_swapped_when_turns_leave_the_batch_in_flight() -> None:
    bench = Bench(Sizes(num_in_flight=2, max_running=8))
    commands = [
        bench.submit_command(bench.open(f"s{i}"), f"t{i}", distinct(i, 5 + i), max_tokens=12)
        for i in range(6)
    ]
    bench.step(*commands)
    while len(bench.tokens("t5")) < 3:
        bench.settle()
    bench.step(
        cancel("t0", None),
        StopTurn(turn_id=TurnId("t2"), num_outputs=1),
        cancel("t3", len(bench.tokens("t3"))),
    )
    bench.run()
    for i in range(6):
        bench.expect(f"t{i}", distinct(i, 5 + i))
    assert [len(bench.tokens(f"t{i}")) for i in (1, 4, 5)] == [12, 12, 12]
    bench.close_all()
