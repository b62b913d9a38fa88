"""Bounded pools: what a session holds, where a turn leads back to, and what is a match."""

from __future__ import annotations

import numpy as np
import pytest

from cache.types import Holder, SessionId, pages_for
from tests.cache.kv_world import (
    NAMESPACES,
    POOL,
    WINDOW,
    WINDOW_POOL,
    Mixture,
    World,
    make_cache,
)

SESSION = SessionId("s")
OTHER = SessionId("t")
FORGETTING: tuple[Mixture, ...] = ("full + window", "window")


def make_world(page_size: int, mixture: Mixture = "full + window", **sizes: int) -> World:
    world = World(make_cache(page_size, mixture=mixture, **sizes), page_size)
    world.open(SESSION, NAMESPACES[0])
    return world


def say(
    world: World, tokens: list[int], *, chunk: int = 5, session_id: SessionId = SESSION
) -> None:
    """A turn that computes its input in chunks and keeps it; nothing of its answer."""
    world.begin(session_id, tokens)
    turn = world.turns[session_id]
    end = len(turn.tokens)
    while turn.computed_len < end:
        world.step(session_id, 5)
        world.check()
    world.end(session_id, end)
    world.check()


def evict(world: World, num_pages: int) -> None:
    """Make room in the window's pool."""
    for pool, pages in world.cache.inspect().stores.tree.evict(WINDOW_POOL, num_pages).items():
        world.cache.inspect().stores.allocators[pool].release(pages, Holder.TREE)
    world.check()


def num_held(world: World, session_id: SessionId = SESSION) -> int:
    """Pages of the window's pool that a session keeps from everybody else."""
    slot = world.cache.slot(session_id)
    return slot.protected_pages[WINDOW_POOL] + slot.private_pages[WINDOW_POOL]


@pytest.mark.parametrize("mixture", FORGETTING)
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_session_of_fifty_windows_holds_one_and_two_pages(
    page_size: int, mixture: Mixture
) -> None:
    world = make_world(page_size, mixture, num_pages=400, max_context_len=400)
    for turn in range(50):
        say(world, [turn % 3] * WINDOW)
        assert num_held(world) <= pages_for(WINDOW, page_size) + 2
    assert world.cache.slot(SESSION).committed_len == 50 * WINDOW
    world.close_everything()


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_long_turn_holds_its_mark_its_window_and_its_chunk(page_size: int) -> None:
    world = make_world(page_size, num_pages=400, max_context_len=400)
    say(world, [1] * 30)
    world.begin(SESSION, [2] * 200)
    accounts = world.cache.accounts
    while world.turns[SESSION].computed_len < 230:
        world.step(SESSION, 7)
        held = accounts()[WINDOW_POOL].active + accounts()[WINDOW_POOL].tree_protected
        assert held <= 2 * (pages_for(WINDOW, page_size) + 2) + pages_for(7, page_size)
    world.end(SESSION, 230)
    world.close_everything()


@pytest.mark.parametrize("length", range(17, 29))
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_turn_rolled_back_leaves_the_session_where_it_was(page_size: int, length: int) -> None:
    """At every residue of the page size, with the mark far behind the window of the turn."""
    world = make_world(page_size, num_pages=400, max_context_len=400)
    say(world, [1] * length)
    before = world.cache.slot(SESSION)
    world.begin(SESSION, [2] * 40)
    while world.turns[SESSION].computed_len < 60:
        world.step(SESSION, 9)
    world.end(SESSION, length)
    after = world.cache.slot(SESSION)
    assert after.committed_len == before.committed_len == length
    assert num_held(world) <= pages_for(WINDOW, page_size) + 2
    world.check()


def test_an_answer_cut_outside_of_every_window_goes_on_from_the_mark() -> None:
    world = make_world(4, num_pages=400, max_context_len=400)
    say(world, [1] * 20)
    world.begin(SESSION, [2] * 40)
    while world.turns[SESSION].computed_len < 60:
        world.step(SESSION, 9)
    world.end(SESSION, 40)
    slot = world.cache.slot(SESSION)
    assert slot.num_tokens == 40
    assert slot.committed_len == 20, "what the window had passed is computed again"
    say(world, [1, 2, 0])


def test_a_path_is_matched_as_far_as_its_last_window_is_there() -> None:
    world = make_world(4, num_pages=400, max_context_len=400)
    say(world, [1] * 16)
    say(world, [2] * 16)
    world.close(SESSION)
    history = np.array([1] * 16 + [2] * 16 + [0], np.int32)

    def matched_len(end: int) -> int:
        return world.cache.peek(history[:end], NAMESPACES[0]).matched_len

    # What the window passed while a turn ran was let go: a beginning ends where a turn did.
    assert [matched_len(end) for end in (33, 29, 17, 16)] == [32, 16, 16, 0]
    evict(world, 2)
    assert [matched_len(end) for end in (33, 29, 17)] == [32, 0, 0]
    assert world.cache.accounts()[POOL].tree_evictable == 8
    evict(world, 2)
    assert matched_len(33) == 0
    assert world.cache.accounts()[POOL].tree_evictable == 0, "an edge nobody can match is gone"


def test_who_computes_the_same_again_fills_the_tombstones() -> None:
    world = make_world(4, num_pages=400, max_context_len=400)
    say(world, [1] * 16)
    say(world, [2] * 16)
    evict(world, 2)
    free = world.cache.accounts()[WINDOW_POOL].free
    world.open(OTHER, NAMESPACES[0])
    say(world, [1] * 14, session_id=OTHER)
    world.check()
    assert world.cache.accounts()[WINDOW_POOL].free < free
    world.close_everything()


def test_a_tombstone_that_is_locked_is_filled_with_a_locked_page() -> None:
    """A lock ends at a whole page, and so begins a page before what a forward behind it reads."""
    world = make_world(4, num_pages=400, max_context_len=400)
    world.begin(SESSION, [1] * 44)
    while world.turns[SESSION].computed_len < 44:
        world.step(SESSION, 5)
    world.end(SESSION, 42)
    assert world.cache.slot(SESSION).committed_len == 42
    before = world.cache.accounts()[WINDOW_POOL].tree_protected
    world.open(OTHER, NAMESPACES[0])
    say(world, [1] * 38, session_id=OTHER)
    world.close(OTHER)
    assert world.cache.accounts()[WINDOW_POOL].tree_protected == before + 1
    world.check()
    world.close_everything()


def test_tombstones_that_a_cut_leaves_at_the_end_of_a_path_are_gone() -> None:
    """With windows alone nothing else would ever take the edge out, and its root would stay."""
    world = make_world(4, "window", num_pages=400, max_context_len=400)
    say(world, [1] * 20)
    world.open(OTHER, NAMESPACES[0])
    # The page of its mark is kept through the turn, and fills the first of three tombstones.
    say(world, [1] * 3, session_id=OTHER)
    say(world, [1] * 9 + [2] * 8, session_id=OTHER)
    world.close(SESSION)
    world.close(OTHER)
    evict(world, 4)
    world.open(SESSION, NAMESPACES[0])
    say(world, [1] * 8)
    world.close_everything()
