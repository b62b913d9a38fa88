"""A rollback leads to the lengths that its turn found, whatever the turn adopted or published."""

from __future__ import annotations

import pytest

from cache.types import SessionId
from tests.cache.kv_world import MIXTURES, Mixture, World, make_cache
from tests.cache.two_sessions import ALICE, PROMPT, A, B, run_turn


def make_world(page_size: int, mixture: Mixture, num_pages: int = 160) -> World:
    world = World(make_cache(page_size, num_pages=num_pages, mixture=mixture), page_size)
    world.open(A, ALICE)
    world.open(B, ALICE)
    return world


def lengths(world: World, session_id: SessionId) -> tuple[int, int, int, int]:
    slot = world.cache.slot(session_id)
    return slot.num_tokens, slot.protected_len, slot.committed_len, slot.allocated_len


@pytest.mark.parametrize("mixture", MIXTURES)
@pytest.mark.parametrize(("page_size", "committed_len"), [(16, 20), (64, 20), (4, 21)])
@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_a_rollback_restores_the_lengths_from_before_a_turn_that_adopted_published_pages(
    page_size: int, committed_len: int, num_steps: int, mixture: Mixture
) -> None:
    world = make_world(page_size, mixture)
    run_turn(world, A, [token % 3 for token in range(committed_len)], num_outputs=1)
    before, shared = lengths(world, A), [*world.histories[A], *PROMPT * 8]
    world.begin(B, shared)
    world.step(B, 200)
    loan = world.begin(A, shared[len(world.histories[A]) :])
    assert before[2] == committed_len < loan.cached_len, "the turn adopted what B published"
    for _ in range(num_steps):
        world.step(A, 64)
    world.end(A, before[0])
    world.check()
    assert lengths(world, A) == before
    assert run_turn(world, A, [0, 0, 0]) == committed_len


@pytest.mark.parametrize("mixture", MIXTURES)
def test_a_rollback_restores_the_page_that_publishing_replaced(mixture: Mixture) -> None:
    world = make_world(16, mixture)
    run_turn(world, A, PROMPT + [0] * 8, num_outputs=1)
    before, more = lengths(world, A), PROMPT * 3
    world.begin(A, more)
    world.begin(B, [*world.histories[A], *more])
    world.step(B, 64)
    world.step(A, 64)
    world.end(A, before[0])
    world.check()
    if "window" in mixture:
        # Its page is the only one that has the window there, so it was published, and B has it.
        assert lengths(world, A)[:3] == (before[0], 16, 16), "the whole pages before it stay"
        return
    assert lengths(world, A) == before
    assert run_turn(world, A, [0, 0, 0]) == before[2]


@pytest.mark.parametrize("mixture", MIXTURES)
def test_a_turn_that_computes_a_page_again_may_be_rolled_back_before_it_has(
    mixture: Mixture,
) -> None:
    world = make_world(16, mixture)
    run_turn(world, A, [token % 3 for token in range(36)], num_outputs=1)
    before = lengths(world, A)
    world.begin(A, PROMPT, max_reuse_len=7)
    world.end(A, before[0])
    world.check()
    assert lengths(world, A)[:3] == (before[0], before[1], before[1]), "its whole pages stay"


@pytest.mark.parametrize("mixture", MIXTURES)
def test_the_page_set_aside_can_be_given_up_for_a_rollback_to_whole_pages(
    mixture: Mixture,
) -> None:
    world = make_world(16, mixture)
    run_turn(world, A, [token % 3 for token in range(20)], num_outputs=1)
    before, shared = lengths(world, A), [*world.histories[A], *PROMPT * 8]
    world.begin(B, shared)
    world.step(B, 200)
    world.begin(A, shared[len(world.histories[A]) :])
    turn_id = world.turns[A].turn_id
    active = world.cache.accounts()[world.pool].active
    assert world.cache.release_rollback_page(turn_id)
    assert world.cache.accounts()[world.pool].active == active - 1
    assert not world.cache.release_rollback_page(turn_id), "it is freed once"
    world.check()
    world.cache.end_turn(turn_id, before[0])
    assert lengths(world, A)[:3] == (before[0], 16, 16)
