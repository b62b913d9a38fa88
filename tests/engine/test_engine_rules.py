"""How turns end, what is refused, what is reported."""

from __future__ import annotations

import dataclasses

import pytest

from cache.types import SessionId, TurnId
from session_server.core.commands import (
    CancelTurn,
    CloseSession,
    FlushCache,
    OpenSession,
    Shutdown,
)
from session_server.core.errors import WIRE_ERRORS
from session_server.core.events import (
    CacheFlushed,
    EngineStats,
    FinishReason,
    PrefillProgressed,
    PromptLogprobsComputed,
    SessionCooled,
    SessionRefused,
    TurnStarted,
)
from session_server.engine.config import EngineConfig
from session_server.engine.engine import Engine
from session_server.engine.settle import LOGPROBS_PER_EVENT
from session_server.engine.turn import TRANSITIONS, TurnState
from tests.engine.bench import POOL, Bench
from tests.sim.echo import EOS, replay, replay_scores
from tests.sim.hand_engine import Sizes

PROMPT = tuple(1 + i % 31 for i in range(20))


def prompt_whose_answer_has_eos(at: int) -> tuple[tuple[int, ...], int]:
    """A prompt and a seed whose output is EOS for the first time at index `at`."""
    for seed in range(2000):
        outputs = replay("a", PROMPT, seed=seed, max_new=at + 1)
        if outputs.index(EOS) == at if EOS in outputs else False:
            return PROMPT, seed
    raise AssertionError("no such seed")


# Ends


def test_eos_ends_a_turn_counts_as_output_and_stays_in_the_history() -> None:
    bench, (prompt, seed) = Bench(), prompt_whose_answer_has_eos(at=2)
    session_id = bench.open("s")
    bench.run(
        bench.submit_command(session_id, "t", prompt, seed=seed, max_tokens=9, ignore_eos=False)
    )
    end = bench.finished("t")
    assert (end.reason, end.matched_token, end.num_outputs) == (FinishReason.STOP, EOS, 3)
    assert end.history_len == len(prompt) + 3
    bench.close_all()


def test_before_min_tokens_eos_does_not_end_a_turn() -> None:
    bench, (prompt, seed) = Bench(), prompt_whose_answer_has_eos(at=2)
    session_id = bench.open("s")
    for name, min_tokens in (("three", 3), ("four", 4)):
        bench.run(
            bench.submit_command(
                session_id,
                name,
                prompt,
                seed=seed,
                max_tokens=6,
                min_tokens=min_tokens,
                ignore_eos=False,
            )
        )
    assert len(bench.tokens("three")) == 3
    assert len(bench.tokens("four")) > 3
    bench.close_all()


def test_ignore_eos_goes_on_and_a_stop_token_still_stops() -> None:
    bench, (prompt, seed) = Bench(), prompt_whose_answer_has_eos(at=1)
    session_id = bench.open("s")
    bench.run(bench.submit_command(session_id, "t", prompt, seed=seed, max_tokens=6))
    assert len(bench.tokens("t")) == 6
    bench.run(
        bench.submit_command(
            session_id, "u", prompt, seed=seed, max_tokens=6, stop_token_ids=(EOS,)
        )
    )
    assert bench.finished("u").matched_token == EOS
    bench.close_all()


@pytest.mark.parametrize("num_in_flight", [1, 2])
def test_max_tokens_zero_computes_the_prompt_and_says_nothing(num_in_flight: int) -> None:
    bench = Bench(Sizes(chunk_tokens=7, num_in_flight=num_in_flight))
    session_id = bench.open("s")
    bench.run(bench.submit_command(session_id, "t", PROMPT, max_tokens=0))
    end = bench.finished("t")
    assert (end.reason, end.num_outputs, end.history_len) == (FinishReason.LENGTH, 0, len(PROMPT))
    assert not any(row.sample for batch in bench.batches for row in batch.rows)
    bench.run(bench.submit_command(session_id, "u", (3,), base_len=len(PROMPT)))
    assert bench.finished("u").cached_tokens == len(PROMPT)
    bench.expect("u", (*PROMPT, 3))
    bench.close_all()


def test_a_turn_without_new_tokens_goes_on_from_the_history() -> None:
    bench = Bench()
    session_id = bench.open("s", tokens=PROMPT)
    bench.run(bench.submit_command(session_id, "t", (), base_len=len(PROMPT)))
    bench.expect("t", PROMPT)
    bench.run(bench.submit_command(session_id, "u", (), base_len=len(PROMPT)))
    assert bench.tokens("u") == bench.tokens("t")
    bench.close_all()


def test_a_turn_cancelled_while_it_waits_says_that_the_engine_has_nothing_of_it() -> None:
    bench = Bench(Sizes(max_running=1))
    busy, queued = bench.open("busy"), bench.open("queued", tokens=PROMPT[:5])
    bench.step(bench.submit_command(busy, "a", PROMPT))
    bench.step(bench.submit_command(queued, "b", PROMPT[5:], base_len=5))
    bench.step(CancelTurn(turn_id=TurnId("b"), num_outputs=0))
    end = bench.finished("b")
    assert (end.history_len, end.num_outputs, end.cached_tokens) == (5, 0, 0)
    bench.run(bench.submit_command(queued, "c", PROMPT[5:], base_len=5))
    bench.expect("c", PROMPT)
    bench.close_all()


def test_a_step_reports_progress_between_chunks_only() -> None:
    bench = Bench(Sizes(chunk_tokens=8))
    session_id = bench.open("s")
    bench.run(bench.submit_command(session_id, "t", PROMPT))
    progress = [e for e in bench.events if isinstance(e, PrefillProgressed)]
    assert [(e.computed, e.total) for e in progress] == [(8, 20), (16, 20)]
    bench.close_all()


@pytest.mark.parametrize(
    "num_scored", [LOGPROBS_PER_EVENT - 1, LOGPROBS_PER_EVENT, 2 * LOGPROBS_PER_EVENT + 1]
)
def test_prompt_logprobs_are_reported_with_each_chunk_in_events_of_a_bounded_size(
    num_scored: int,
) -> None:
    bench = Bench(Sizes(chunk_tokens=4 * LOGPROBS_PER_EVENT, num_pages=200, max_context_len=512))
    prompt = tuple(1 + i % 31 for i in range(num_scored))
    bench.run(bench.submit_command(bench.open("s"), "t", prompt, prompt_logprobs_from=0))
    sizes = [len(e.logprobs) for e in bench.events if isinstance(e, PromptLogprobsComputed)]
    full, rest = divmod(num_scored, LOGPROBS_PER_EVENT)
    assert sizes == [LOGPROBS_PER_EVENT] * full + ([rest] if rest else [])
    bench.close_all()


@pytest.mark.parametrize("chunk_tokens", [1, 7, 64])
@pytest.mark.parametrize("start", [0, 1, 6, 7, 8, 19, 20, 25])
def test_prompt_logprobs_cross_chunks_and_cached_history(chunk_tokens: int, start: int) -> None:
    bench = Bench(Sizes(chunk_tokens=chunk_tokens))
    session_id = bench.open("s")
    bench.run(bench.submit_command(session_id, "warm", PROMPT[:12], max_tokens=0))
    bench.run(
        bench.submit_command(session_id, "t", PROMPT[12:], base_len=12, prompt_logprobs_from=start)
    )
    seen = bench.turns[TurnId("t")]
    assert seen.prompt_logprobs == replay_scores("a", PROMPT, start)
    # Published pages are reused whole; one below the first wanted position is computed for it.
    reusable = min(12, max(0, start - 1))
    assert bench.finished("t").cached_tokens == reusable - reusable % bench.sizes.page_size
    bench.expect("t", PROMPT)
    bench.close_all()


def test_timings_add_up() -> None:
    bench = Bench(Sizes(chunk_tokens=8, num_in_flight=1))
    session_id = bench.open("s")
    bench.run(bench.submit_command(session_id, "t", PROMPT, max_tokens=4))
    timings = bench.finished("t").timings
    assert timings.num_steps == 6
    assert timings.forward_ms == pytest.approx(6.0)
    assert timings.queue_ms == 0
    assert timings.prefill_ms == timings.ttft_ms == pytest.approx(30.0)
    assert timings.decode_ms == pytest.approx(30.0)


# Faults


def test_a_poisonous_turn_fails_alone_and_its_neighbours_do_not_notice() -> None:
    bench = Bench(Sizes(chunk_tokens=64))
    names = ["a", "poison", "b", "c"]
    bench.runner.faults.poison_turns.add(TurnId("poison"))
    commands = []
    for i, name in enumerate(names):
        session_id = bench.open(name)
        commands.append(bench.submit_command(session_id, name, PROMPT[: 9 + i], max_tokens=6))
    bench.run(*commands)
    assert bench.failed("poison").code == "device_failed"
    for name, i in (("a", 0), ("b", 2), ("c", 3)):
        bench.expect(name, PROMPT[: 9 + i])
        assert len(bench.tokens(name)) == 6
    bench.close_all()


@pytest.mark.parametrize("step", range(1, 9))
def test_a_forward_that_fails_once_is_done_again(step: int) -> None:
    bench = Bench(Sizes(chunk_tokens=8))
    bench.runner.faults.fail_steps.add(step)
    one, two = bench.open("one"), bench.open("two")
    bench.run(
        bench.submit_command(one, "a", PROMPT, max_tokens=4, seed=2),
        bench.submit_command(two, "b", PROMPT[:11], max_tokens=5),
    )
    bench.expect("a", PROMPT, seed=2)
    bench.expect("b", PROMPT[:11])
    assert bench.finished("a").num_outputs == 4
    bench.close_all()


def test_every_code_a_turn_can_fail_with_is_a_wire_code() -> None:
    codes = {error.code for error in WIRE_ERRORS.values()}
    assert {"numerical_error", "device_failed", "server_busy", "context_too_long"} <= codes


# Refusals


def test_a_session_is_refused_when_it_is_open_or_no_more_fit() -> None:
    bench = Bench()
    bench.hand.engine = Engine(
        bench.cache, dataclasses.replace(bench.hand.settings, max_sessions=2)
    )
    bench.open("s")
    bench.open("s")
    bench.open("t", tokens=(1, 999))
    bench.open("u")
    bench.open("v")
    refusals = [e for e in bench.events if isinstance(e, SessionRefused)]
    assert [(e.session_id, e.code) for e in refusals] == [
        ("s", "session_exists"),
        ("t", "invalid_request"),
        ("v", "server_busy"),
    ]


def test_pinning_beyond_the_quota_is_refused() -> None:
    bench = Bench(Sizes(pinned_quota_pages=2))
    for name, num_tokens in (("fits", 8), ("too big", 9)):
        session_id = SessionId(name)
        bench.step(
            OpenSession(
                session_id=session_id, tenant_salt="a", tokens=PROMPT[:num_tokens], pinned=True
            )
        )
    refusal = bench.events[-1]
    assert isinstance(refusal, SessionRefused)
    assert (refusal.session_id, refusal.code) == ("too big", "quota_exceeded")
    assert refusal.message == (
        "this pinned session needs 3 full pages, and others hold 0 of the 2 that are kept for "
        "pinned ones: unpin or close one, or have the operator raise --pinned-fraction"
    )
    bench.run(bench.submit_command(SessionId("fits"), "t", (1, 2), base_len=8))
    assert bench.failed("t").code == "quota_exceeded"
    bench.run(bench.submit_command(SessionId("fits"), "u", (), base_len=8, max_tokens=1))
    bench.expect("u", PROMPT[:8])
    bench.close_all()


def test_the_queue_of_turns_has_a_bound() -> None:
    bench = Bench(Sizes(max_running=1, max_waiting=2))
    commands = []
    for i in range(5):
        commands.append(bench.submit_command(bench.open(f"s{i}"), f"t{i}", PROMPT))
    bench.run(*commands)
    assert [bench.failed(f"t{i}").code for i in (3, 4)] == ["server_busy"] * 2
    for i in range(3):
        bench.expect(f"t{i}", PROMPT)
    bench.close_all()


@pytest.mark.parametrize(
    ("base_len", "tokens", "code"),
    [
        (0, (), "invalid_request"),
        (4, (1,), "internal_inconsistency"),
        (-1, (1,), "internal_inconsistency"),
        (0, (32,), "invalid_request"),
        (0, (-1,), "invalid_request"),
    ],
)
def test_what_cannot_run_is_refused_before_it_touches_anything(
    base_len: int, tokens: tuple[int, ...], code: str
) -> None:
    bench = Bench()
    session_id = bench.open("s", tokens=(1, 2, 3))
    before = bench.cache.slot(session_id)
    bench.run(bench.submit_command(session_id, "t", tokens, base_len=base_len))
    assert bench.failed("t").code == code
    assert bench.cache.slot(session_id) == before
    assert not bench.batches
    bench.close_all()


# Order


def test_higher_priority_goes_first_and_equal_ones_in_order_of_arrival() -> None:
    bench = Bench(Sizes(max_running=1))
    commands = []
    for name, priority in (("a", 0), ("b", 0), ("high", 3), ("c", 0)):
        commands.append(
            bench.submit_command(
                bench.open(name), name, PROMPT[:5], priority=priority, max_tokens=2
            )
        )
    bench.run(*commands)
    assert [e.turn_id for e in bench.events if isinstance(e, TurnStarted)] == [
        "high",
        "a",
        "b",
        "c",
    ]
    bench.close_all()


def test_a_turn_of_low_priority_is_not_overtaken_for_ever() -> None:
    bench = Bench(Sizes(max_running=1, num_in_flight=1))
    bench.step(bench.submit_command(bench.open("low"), "low", PROMPT[:5], priority=-1))
    bench.step(CancelTurn(turn_id=TurnId("low"), num_outputs=None))
    bench.run()
    bench.step(bench.submit_command(bench.open("run"), "run", PROMPT[:5], max_tokens=200))
    bench.step(bench.submit_command(SessionId("low"), "waits", PROMPT[:5], priority=-1))
    bench.now_s += 11.0  # one level of priority is worth ten seconds
    bench.step(bench.submit_command(bench.open("new"), "new", PROMPT[:5], priority=0))
    bench.step(CancelTurn(turn_id=TurnId("run"), num_outputs=None))
    bench.run()
    assert [e.turn_id for e in bench.events if isinstance(e, TurnStarted)][-2:] == [
        "waits",
        "new",
    ]


def test_the_same_inputs_give_the_same_outputs() -> None:
    runs = []
    for _ in range(2):
        bench = Bench(Sizes(num_pages=20, chunk_tokens=16))
        sessions = [bench.open(f"s{i}") for i in range(6)]
        bench.run(
            *(
                bench.submit_command(session_id, f"t{i}", PROMPT[i:], max_tokens=9)
                for i, session_id in enumerate(sessions)
            )
        )
        runs.append((bench.events, [str(batch) for batch in bench.batches]))
    assert runs[0] == runs[1]


# Reports


def test_flush_waits_for_no_turn_and_touches_nothing_while_one_is_live() -> None:
    bench = Bench()
    session_id = bench.open("s")
    bench.step(bench.submit_command(session_id, "t", PROMPT))
    bench.step(FlushCache(request_id=1))
    assert bench.events[-1] == CacheFlushed(request_id=1, done=False)
    bench.run()
    bench.step(FlushCache(request_id=2))
    assert bench.events[-2:] == [
        SessionCooled(session_id=session_id),
        CacheFlushed(request_id=2, done=True),
    ]
    assert bench.cache.accounts()[POOL].free == bench.sizes.num_pages
    bench.close_all()


def test_stats_come_once_a_second_of_work_and_never_from_an_idle_engine() -> None:
    bench = Bench()
    session_id = bench.open("s")
    bench.run(bench.submit_command(session_id, "t", PROMPT, max_tokens=150))
    stats = [e for e in bench.events if isinstance(e, EngineStats)]
    assert len(stats) == int(bench.now_s) + 2
    assert [sample.running for sample in stats] == [1] * (len(stats) - 1) + [0]
    num_events = len(bench.events)
    bench.now_s += 100.0
    bench.step()
    assert len(bench.events) == num_events
    assert stats[-1].prompt_tokens == len(PROMPT)
    bench.close_all()


def test_a_turn_that_ends_without_another_step_is_not_shown_as_running_ever_after() -> None:
    bench = Bench()
    session_id = bench.open("s")
    bench.step(bench.submit_command(session_id, "t", PROMPT, max_tokens=50))
    samples = [e for e in bench.events if isinstance(e, EngineStats)]
    assert [sample.running + sample.waiting for sample in samples] == [1]
    bench.step(CancelTurn(turn_id=TurnId("t"), num_outputs=None))
    bench.run()
    samples = [e for e in bench.events if isinstance(e, EngineStats)]
    assert [sample.running + sample.waiting for sample in samples] == [1, 0]
    bench.close_all()


def test_shutdown_finishes_what_is_in_flight_and_launches_no_more() -> None:
    bench = Bench()
    session_id = bench.open("s")
    bench.step(bench.submit_command(session_id, "t", PROMPT, max_tokens=50))
    outcome = bench.step(Shutdown())
    assert outcome.batch is None
    assert not bench.engine.has_shut_down
    outcome = bench.settle()
    assert outcome.batch is None
    assert bench.engine.has_shut_down


# Small print


def test_settings_have_bounds() -> None:
    with pytest.raises(ValueError, match="chunk_tokens"):
        EngineConfig("m", 10, (), chunk_tokens=0)
    with pytest.raises(ValueError, match="num_in_flight"):
        EngineConfig("m", 10, (), num_in_flight=3)


def test_a_finished_turn_goes_nowhere_and_every_state_has_its_line() -> None:
    assert set(TRANSITIONS) == set(TurnState)
    assert TRANSITIONS[TurnState.FINISHED] == frozenset()


def test_closing_an_unknown_session_is_answered_and_changes_nothing() -> None:
    bench = Bench()
    bench.step(CloseSession(session_id=SessionId("nobody")))
    assert len(bench.events) == 1
    bench.close_all()


def test_a_turn_gives_up_the_page_kept_for_its_rollback_before_it_is_refused() -> None:
    bench = Bench(Sizes(num_pages=12, page_size=4, max_context_len=64))
    first, second = bench.open("first"), bench.open("second")
    bench.run(bench.submit_command(first, "a", PROMPT[:5], max_tokens=1))
    history = (*PROMPT[:5], *bench.tokens("a"))
    context = (*history, *PROMPT * 2)[:30]
    bench.run(bench.submit_command(second, "b", context, max_tokens=1))
    bench.run(CloseSession(session_id=second))
    more = context[len(history) :]
    # With 18 tokens its context fills all 12 pages, and the page it began in is a 13th.
    turn = bench.submit_command(first, "c", more, base_len=len(history), max_tokens=18)
    bench.run(turn)
    assert bench.turns[turn.turn_id].starts[0].cached_tokens == 28, "it adopted published pages"
    bench.expect("c", context)
    assert bench.finished("c").history_len == 48, "it filled the pool"
    bench.close_all()
