"""X: turns that could go on and do not."""

from __future__ import annotations

from cache.types import SessionId, TurnId
from session_server.core.events import FinishReason
from tests.engine.bench import Bench
from tests.mutants.guards import (
    FIRST_COME_TAKES_ALL,
    HOG_KEEPS_THE_DOOR,
    IDLE_KV_IS_PINNED,
    OUTPUT_OUTGROWS_POOL,
    REFUSES_NO_LONG_TURN,
    RESULTS_WAIT_FOR_THE_QUEUE,
    WAITING_KEEPS_KV,
)
from tests.mutants.in_scheduling import (
    EVERYBODY_IS_RETRACTED,
    OLDEST_HAS_NO_SHARE,
    PROMPTS_STOP_STREAMS,
)
from tests.scenarios.lines import PROMPT, distinct
from tests.scenarios.registry import scenario
from tests.sim.hand_engine import Sizes


@scenario("X1", IDLE_KV_IS_PINNED)
def test_x1_many_sessions_on_a_pool_that_holds_few_all_get_their_answers() -> None:
    for num_in_flight in (1, 2):
        bench = Bench(Sizes(num_pages=20, num_in_flight=num_in_flight, chunk_tokens=32))
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
                assert bench.finished(f"{name}.{turn}").num_outputs == 3
                histories[name] = prompt + tuple(bench.tokens(f"{name}.{turn}"))
        assert bench.engine.counters.coolings > 0
        bench.close_all()


@scenario("X2", OUTPUT_OUTGROWS_POOL)
def test_x2_a_session_that_fills_the_pool_ends_with_length_and_does_not_hang() -> None:
    bench = Bench(Sizes(num_pages=10, max_context_len=256))
    session_id = bench.open("s")
    bench.run(bench.submit_command(session_id, "t", PROMPT, max_tokens=500))
    end = bench.finished("t")
    assert end.reason is FinishReason.LENGTH
    assert end.history_len == bench.engine.max_turn_len == 40
    bench.expect("t", PROMPT)
    bench.close_all()


@scenario("X3", WAITING_KEEPS_KV)
def test_x3_turns_that_wait_hold_no_pages_so_no_two_wait_for_each_other() -> None:
    bench = Bench(Sizes(num_pages=12, chunk_tokens=64))
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
        assert bench.finished(f"t{i}").num_outputs == 20
        bench.expect(f"t{i}", distinct(i + 9, 12))
    bench.close_all()


@scenario("X4", REFUSES_NO_LONG_TURN)
def test_x4_a_prompt_beyond_the_pool_is_refused_and_blocks_nobody() -> None:
    bench = Bench(Sizes(num_pages=6, max_context_len=256))
    one, two = bench.open("one"), bench.open("two")
    bench.run(
        bench.submit_command(one, "big", (1,) * 24), bench.submit_command(two, "small", PROMPT)
    )
    assert bench.failed("big").code == "context_too_long"
    bench.expect("small", PROMPT)
    bench.run(bench.submit_command(one, "fits", (1,) * 23, max_tokens=9))
    assert bench.finished("fits").num_outputs == 1
    bench.close_all()


@scenario("X5", EVERYBODY_IS_RETRACTED)
def test_x5_who_lacks_a_page_takes_one_turn_s_pages_and_not_everybody_s() -> None:
    bench = Bench(Sizes(num_pages=40, chunk_tokens=64, num_in_flight=2))
    commands = []
    for i in range(5):
        session_id = bench.open(f"s{i}")
        commands.append(bench.submit_command(session_id, f"t{i}", distinct(i, 28), max_tokens=10))
    bench.run(*commands)
    ends = [bench.finished(f"t{i}") for i in range(5)]
    assert [end.num_retractions for end in ends] == [0, 0, 0, 0, 1]
    for i in range(5):
        bench.expect(f"t{i}", distinct(i, 28))
    bench.close_all()


@scenario("X6", PROMPTS_STOP_STREAMS)
def test_x6_those_who_stream_get_a_token_in_every_forward_beside_a_long_prompt() -> None:
    bench = Bench(Sizes(num_pages=200, chunk_tokens=16, num_in_flight=1))
    stream, hog = bench.open("stream"), bench.open("hog")
    bench.step(bench.submit_command(stream, "a", PROMPT[:3], max_tokens=40))
    bench.settle()
    bench.step(bench.submit_command(hog, "b", distinct(1, 200), max_tokens=1))
    while bench.turns[TurnId("b")].end is None:
        said = len(bench.tokens("a"))
        bench.settle()
        assert len(bench.tokens("a")) == said + 1
    bench.run()
    bench.close_all()


@scenario("X7", FIRST_COME_TAKES_ALL)
def test_x7_one_maximal_prompt_does_not_hold_up_others_first_tokens() -> None:
    bench = Bench(Sizes(num_pages=200, chunk_tokens=16, num_in_flight=1))
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


@scenario("X8", RESULTS_WAIT_FOR_THE_QUEUE)
def test_x8_an_end_frees_its_pages_also_while_the_head_of_the_queue_waits_for_them() -> None:
    bench = Bench(Sizes(num_pages=8, chunk_tokens=64))
    one, two = bench.open("one"), bench.open("two")
    bench.run(
        bench.submit_command(one, "holds", distinct(1, 24), max_tokens=3),
        bench.submit_command(two, "wants", distinct(2, 24), max_tokens=3),
    )
    for name, seed in (("holds", 1), ("wants", 2)):
        assert bench.finished(name).num_outputs == 3
        bench.expect(name, distinct(seed, 24))
    assert bench.engine.counters.retractions == 0
    bench.close_all()


@scenario("X9", OLDEST_HAS_NO_SHARE)
def test_x9_a_long_prompt_goes_on_while_short_ones_keep_coming() -> None:
    bench = Bench(
        Sizes(num_pages=900, num_rows=300, chunk_tokens=16, num_in_flight=1, max_running=64)
    )
    hog = bench.open("hog")
    bench.step(bench.submit_command(hog, "hog", distinct(1, 40), max_tokens=1))
    for i in range(20):
        commands = []
        for k in range(9):
            session_id = bench.open(f"s{i}.{k}", salt=f"{i}.{k}")
            commands.append(
                bench.submit_command(session_id, f"t{i}.{k}", distinct(i, 7), max_tokens=1)
            )
        bench.settle()
        bench.step(*commands)
    assert bench.tokens("hog"), "a share is two tokens of each forward"
    bench.expect("hog", distinct(1, 40))
    bench.run()
    bench.close_all()


@scenario("X9", HOG_KEEPS_THE_DOOR)
def test_x9_a_turn_is_admitted_while_a_long_prompt_takes_what_tokens_it_can() -> None:
    bench = Bench(Sizes(num_pages=200, chunk_tokens=16, num_in_flight=1))
    hog, late = bench.open("hog"), bench.open("late")
    bench.step(bench.submit_command(hog, "hog", distinct(1, 200), max_tokens=1))
    bench.settle()
    bench.step(bench.submit_command(late, "late", distinct(2, 60), max_tokens=1))
    for _ in range(2):
        bench.settle()
    assert bench.turns[TurnId("late")].starts
    bench.run()
    bench.expect("late", distinct(2, 60))
    bench.close_all()
