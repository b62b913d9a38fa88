"""Bugs that other servers have had, each as the shortest story that shows it.

The first letter is the family: L leak, D double free, A aliasing, R race, G off by one,
X starvation. Every page is recounted after every step.
"""

from __future__ import annotations

import pytest

from cache.types import SessionId, TurnId
from session_server.core.commands import CancelTurn, CloseSession
from session_server.core.events import (
    FinishReason,
    PrefillProgressed,
)
from tests.engine.bench import Bench, Stage

PROMPT = tuple(1 + i % 31 for i in range(20))


def cancel(name: str, num_outputs: int | None) -> CancelTurn:
    return CancelTurn(turn_id=TurnId(name), num_outputs=num_outputs)


def close(name: str) -> CloseSession:
    return CloseSession(session_id=SessionId(name))


def distinct(seed: int, length: int) -> tuple[int, ...]:
    return tuple(1 + (seed * 13 + i * (seed + 3)) % 31 for i in range(length))


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
