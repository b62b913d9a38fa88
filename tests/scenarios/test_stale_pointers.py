"""S: what points to a place that has moved, or was true a moment ago."""

from __future__ import annotations

import pytest

from cache.errors import AuditFailed
from tests.cache.audit import audit
from tests.cache.two_sessions import ALICE, PROMPT, A, B, C, make_world, run_turn
from tests.engine.bench import Bench
from tests.mutants.guards import SECOND_UNLOCK_PASSES
from tests.mutants.in_radix import (
    EVICTION_IGNORES_LOCKS,
    LOCK_SKIPS_ITSELF,
    SPLIT_KEEPS_KEY,
    SPLIT_LOSES_LOCKS,
    SPLIT_ORPHANS_THE_UPPER,
    UNLOCK_FREES_THE_LAST_NODE,
)
from tests.mutants.in_scheduling import QUEUE_LATCHES_FULL
from tests.scenarios.lines import distinct
from tests.scenarios.registry import scenario
from tests.sim.hand_engine import Sizes


@scenario("S1", SPLIT_LOSES_LOCKS, SPLIT_ORPHANS_THE_UPPER)
def test_s1_a_split_under_a_session_leaves_its_lock_on_both_halves() -> None:
    world = make_world()
    run_turn(world, A, PROMPT)
    run_turn(world, B, [*PROMPT[:5], 0, 0, 0, 0, 0])
    world.check()
    world.close(A)
    world.check()
    run_turn(world, B, [2, 1])
    world.close_everything()


@scenario("S2", UNLOCK_FREES_THE_LAST_NODE)
def test_s2_a_conversation_cooled_again_and_again_gives_back_exactly_its_locks() -> None:
    world = make_world()
    world.open(C, ALICE)
    run_turn(world, B, PROMPT[:4])
    for session_id, first in ((A, [1]), (C, PROMPT)):
        run_turn(world, session_id, first, num_outputs=1)
        for _ in range(4):
            world.cool(session_id)
            world.check()
            run_turn(world, session_id, [2, 1, 0])
    world.close_everything()


@scenario("S2", SECOND_UNLOCK_PASSES)
def test_s2_a_lock_is_given_back_once() -> None:
    world = make_world()
    tree = world.cache.inspect().stores.tree
    run_turn(world, A, PROMPT)
    receipt = tree.lock_root(ALICE)
    tree.unlock(receipt)
    with pytest.raises(AuditFailed):
        tree.unlock(receipt)
    world.check()
    world.close_everything()


@scenario("S3", EVICTION_IGNORES_LOCKS)
def test_s3_what_a_session_has_locked_again_is_in_the_tree_when_it_lets_go() -> None:
    world = make_world(num_pages=11)
    world.open(C, ALICE)
    run_turn(world, A, PROMPT)
    world.cool(A)
    run_turn(world, C, [2] * 10)
    world.close(C)
    assert run_turn(world, A, [1], num_outputs=1) == 12, "locked again, and still the oldest leaf"
    run_turn(world, B, [0] * 15, num_outputs=1)
    assert world.marks["eviction"]
    world.close(A)
    world.close_everything()


@scenario("S4", LOCK_SKIPS_ITSELF)
def test_s4_the_node_a_session_ends_in_is_not_evicted() -> None:
    bench = Bench(Sizes(page_size=4, num_pages=12, chunk_tokens=64))
    parked, other = bench.open("parked"), bench.open("other")
    bench.run(bench.submit_command(parked, "a", distinct(1, 12), max_tokens=1))
    history = distinct(1, 12) + tuple(bench.tokens("a"))
    for i in range(4):
        bench.run(
            bench.submit_command(other, f"b{i}", distinct(i + 2, 13), base_len=0, max_tokens=1)
        )
        bench.expect(f"b{i}", distinct(i + 2, 13))
    bench.run(bench.submit_command(parked, "c", (5,), base_len=len(history), max_tokens=1))
    bench.expect("c", (*history, 5))
    assert bench.finished("c").cached_tokens >= 12
    bench.close_all()


@scenario("S5", SPLIT_KEEPS_KEY)
def test_s5_both_halves_of_a_split_are_found_evicted_and_found_again() -> None:
    world = make_world()
    run_turn(world, A, PROMPT)
    run_turn(world, B, [*PROMPT[:4], 0, 0, 0, 0, 0, 1])
    for session_id in (A, B):
        world.close(session_id)
    world.open(A, ALICE)
    assert run_turn(world, A, PROMPT, num_outputs=1) == 8
    world.close(A)
    world.cache.flush()
    audit(world.cache)
    world.open(A, ALICE)
    assert run_turn(world, A, PROMPT, num_outputs=1) == 0
    world.open(B, ALICE)
    world.close_everything()


@scenario("S6", QUEUE_LATCHES_FULL)
def test_s6_a_turn_that_fits_is_admitted_while_another_one_s_chunks_go_on() -> None:
    bench = Bench(Sizes(num_pages=100, chunk_tokens=8, num_in_flight=1))
    hog, small = bench.open("hog"), bench.open("small")
    bench.step(bench.submit_command(hog, "a", distinct(1, 120), max_tokens=1))
    bench.settle()
    bench.step(bench.submit_command(small, "b", distinct(2, 3), max_tokens=1))
    for _ in range(3):
        bench.settle()
    assert bench.tokens("b"), "admitted and answered within three forwards"
    assert not bench.tokens("a")
    bench.run()
    bench.expect("a", distinct(1, 120))
    bench.close_all()
