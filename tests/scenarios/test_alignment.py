"""G: lengths that are not whole pages, and counts that are one too many or too few."""

from __future__ import annotations

from itertools import product

import pytest

from cache.types import SessionId
from session_server.core.commands import ReportMemory, SubmitTurn
from session_server.core.events import FinishReason, MemoryReported
from session_server.engine.config import Drafter, MemoryCheck
from tests.depth import IS_PROOF
from tests.engine.bench import Bench
from tests.mutants.guards import (
    PARTIAL_PAGE_IS_PUBLISHED,
    QUOTE_ROUNDS_UP,
    WINDOW_PAGE_STAYS_PRIVATE,
)
from tests.mutants.in_leases import (
    REWIND_FREES_THE_CUT_PAGE,
    REWIND_KEEPS_LENGTH,
    WHOLE_PROMPT_IS_REUSED,
)
from tests.mutants.in_radix import (
    MATCH_ENDS_IN_A_PAGE,
)
from tests.mutants.in_settling import (
    REJECTED_GUESSES_COUNT,
)
from tests.scenarios.lines import PROMPT, cancel, close, distinct
from tests.scenarios.registry import scenario
from tests.sim.hand_engine import Sizes
from tests.sim.layers import Layers, Mixture

WINDOW = 8


@pytest.mark.parametrize(
    ("page_size", "num_drafts"),
    [*product((1, 2, 4), (0, 1, 2, 4)), (16, 0), (16, 3)],
)
def test_g_every_residue_of_history_input_chunk_and_drafts(page_size: int, num_drafts: int) -> None:
    is_all = page_size < 16 or IS_PROOF
    num_played = play_residues(page_size, num_drafts, is_all=is_all)
    assert num_played == (page_size**3 if is_all else page_size**2)


def play_residues(page_size: int, num_drafts: int, *, is_all: bool) -> int:
    """A turn on every length of history, of input and of chunk modulo the page, each rolled back
    to the very history it began with; the number of turns.

    Every two of the lengths meet; if `is_all`, every three.
    """
    num_played = 0
    lengths = range(page_size + 1, 2 * page_size + 1)
    for chunk_tokens in lengths:
        bench = Bench(
            Sizes(
                page_size=page_size,
                num_pages=20 + 120 // page_size,
                chunk_tokens=chunk_tokens,
                num_in_flight=1,
                num_drafts=num_drafts,
                drafter=Drafter.MODEL,
                memory_check=MemoryCheck.WARN if page_size == 16 else MemoryCheck.STRICT,
            )
        )
        for history_len in lengths:
            name = f"of {history_len}"
            session_id = bench.open(name)
            prompt = distinct(history_len, history_len - 1)
            bench.run(bench.submit_command(session_id, name, prompt, max_tokens=1))
            history = prompt + tuple(bench.tokens(name))
            for input_len in lengths:
                if not is_all and (chunk_tokens + history_len + input_len) % page_size:
                    continue
                turn = f"{input_len} on {history_len}"
                command = bench.submit_command(
                    session_id,
                    turn,
                    distinct(input_len + 5, input_len),
                    base_len=history_len,
                    max_tokens=9,
                )
                play_and_undo(bench, command, history)
                num_played += 1
            bench.run(close(name))
        bench.run(ReportMemory(request_id=1, full=True))
        assert [e for e in bench.events if isinstance(e, MemoryReported)][-1].checks.recent == ()
        if num_drafts:
            assert bench.engine.counters.accepted_tokens > 0
        bench.close_all()
    return num_played


def play_and_undo(bench: Bench, command: SubmitTurn, history: tuple[int, ...]) -> None:
    """One turn that says three tokens, and is cancelled as if it had never been."""
    turn = command.turn_id
    bench.step(command)
    while len(bench.tokens(turn)) < 3:
        bench.settle()
    bench.step(cancel(turn, None))
    bench.run()
    bench.expect(turn, history + command.tokens)
    assert len(history) - 1 <= bench.turns[turn].starts[0].cached_tokens <= len(history)


@scenario("G1", PARTIAL_PAGE_IS_PUBLISHED, QUOTE_ROUNDS_UP)
def test_g1_only_whole_pages_are_protected_whatever_the_length() -> None:
    for length in range(1, 14):
        bench = Bench(Sizes(page_size=4, num_pages=8, chunk_tokens=64))
        session_id = bench.open("s")
        bench.run(bench.submit_command(session_id, "a", distinct(3, length), max_tokens=2))
        slot = bench.cache.slot(session_id)
        assert slot.protected_len == slot.committed_len // 4 * 4
        history = distinct(3, length) + tuple(bench.tokens("a"))
        room = 32 - len(history) - 1
        # The turn needs every page of the pool: one that is counted twice would be missing.
        bench.run(bench.submit_command(session_id, "b", distinct(4, room), base_len=len(history)))
        bench.expect("b", history + distinct(4, room))
        assert bench.finished("b").history_len == 32
        assert bench.finished("b").cached_tokens == len(history) - 1
        bench.close_all()


@scenario("G2", WINDOW_PAGE_STAYS_PRIVATE)
def test_g2_a_cut_below_the_window_frees_each_page_once() -> None:
    """A turn far ahead of its mark is cut at many lengths, and the next one goes on from there."""
    for layers in (Layers(Mixture.FULL_AND_WINDOW, WINDOW), Layers(Mixture.WINDOW, WINDOW)):
        bench = Bench(Sizes(page_size=4, num_pages=40, chunk_tokens=7, layers=layers))
        for kept in range(0, 30, 3):
            name = f"s{kept}"
            session_id = bench.open(name)
            prompt = distinct(kept, 21)
            command = bench.submit_command(session_id, f"{name}.a", prompt, max_tokens=40)
            bench.step(command)
            while len(bench.tokens(f"{name}.a")) < 30:
                bench.settle()
            bench.run(cancel(f"{name}.a", kept))
            history = prompt + tuple(bench.tokens(f"{name}.a")[:kept])
            assert bench.finished(f"{name}.a").history_len == len(history)
            back = len(history) - kept // 2
            again = bench.submit_command(session_id, f"{name}.b", distinct(1, 5), base_len=back)
            bench.run(again)
            bench.expect(f"{name}.b", history[:back] + distinct(1, 5))
            bench.run(close(name))
        bench.close_all()


@scenario("G3", REWIND_FREES_THE_CUT_PAGE)
def test_g3_after_hundreds_of_turns_every_page_is_still_accounted_for() -> None:
    for page_size in (2, 4, 16):
        bench = Bench(Sizes(page_size=page_size, num_pages=160 // page_size, chunk_tokens=32))
        for i in range(120):
            name = f"s{i % 7}"
            session_id = bench.open(name) if i < 7 else SessionId(name)
            held_len = bench.cache.slot(session_id).num_tokens
            base_len = held_len if held_len < 60 else i % 11
            base = tuple(bench.cache.tokens(session_id, 0, base_len).tolist())
            new = distinct(i, 1 + i % 9)
            bench.run(
                bench.submit_command(
                    session_id, f"{name}.{i}", new, base_len=base_len, max_tokens=i % 6
                )
            )
            bench.expect(f"{name}.{i}", base + new)
        assert bench.engine.counters.coolings > 0
        bench.close_all()


@scenario("G4", REWIND_KEEPS_LENGTH, REJECTED_GUESSES_COUNT)
def test_g4_however_a_turn_ends_its_history_and_its_kv_are_one_length() -> None:
    for num_drafts, num_in_flight, end in product((0, 3), (1, 2), ("length", "stop", "cancel")):
        for num_outputs in range(1, 7):
            stage = Sizes(num_in_flight=num_in_flight, num_drafts=num_drafts, drafter=Drafter.MODEL)
            end_and_go_on(stage, end, num_outputs)


def end_and_go_on(stage: Sizes, end: str, num_outputs: int) -> None:
    """A turn that ends after some outputs, and one that builds on exactly those."""
    probe = Bench(stage)
    probe.run(probe.submit_command(probe.open("s"), "t", PROMPT[:5], max_tokens=num_outputs))
    said = tuple(probe.tokens("t"))
    bench = Bench(stage)
    session_id = bench.open("s")
    stops = said[-1:] if end == "stop" else ()
    limit = num_outputs if end == "length" else 50
    bench.step(
        bench.submit_command(session_id, "t", PROMPT[:5], max_tokens=limit, stop_token_ids=stops)
    )
    while end == "cancel" and len(bench.tokens("t")) < num_outputs:
        bench.settle()
    bench.run(*([cancel("t", num_outputs)] if end == "cancel" else []))
    finished = bench.finished("t")
    kept = tuple(bench.tokens("t"))[: finished.num_outputs]
    assert finished.reason is FinishReason(end if end != "cancel" else "cancelled")
    assert kept == said[: len(kept)]
    assert finished.history_len == 5 + len(kept)
    slot = bench.cache.slot(session_id)
    assert slot.num_tokens - 1 <= slot.committed_len <= slot.num_tokens
    bench.run(bench.submit_command(session_id, "u", (3,), base_len=finished.history_len))
    bench.expect("u", (*PROMPT[:5], *kept, 3))
    assert bench.finished("u").cached_tokens == slot.committed_len
    bench.close_all()


@scenario("G5", MATCH_ENDS_IN_A_PAGE)
def test_g5_a_hit_that_ends_past_a_page_boundary_computes_the_rest() -> None:
    for page_size, first_len in product((2, 4, 16), range(1, 36)):
        bench = Bench(Sizes(page_size=page_size, num_pages=200 // page_size))
        one, two = bench.open("one"), bench.open("two")
        prompt = distinct(7, first_len)
        bench.run(bench.submit_command(one, "a", prompt, max_tokens=3))
        bench.run(bench.submit_command(two, "b", (*prompt, 9, 9, 9)))
        bench.expect("b", (*prompt, 9, 9, 9))
        assert bench.finished("b").cached_tokens == first_len // page_size * page_size
        bench.close_all()


@scenario("G6", WHOLE_PROMPT_IS_REUSED)
def test_g6_a_prompt_that_the_tree_holds_whole_still_computes_its_last_token() -> None:
    for length in (4, 8, 16):
        bench = Bench(Sizes(page_size=4))
        one, two = bench.open("one"), bench.open("two")
        bench.run(bench.submit_command(one, "a", PROMPT[:length]))
        bench.run(bench.submit_command(two, "b", PROMPT[:length]))
        assert bench.tokens("b") == bench.tokens("a")
        assert bench.finished("b").cached_tokens == length - 4
        bench.close_all()
