"""Recurrent layers: what a session keeps, where it leads back to, and what is a match."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cache.capacity import BoundedPools, plan_capacity
from cache.errors import AuditFailed, OutOfPages
from cache.session_cache import SessionAwareCache
from cache.spec import STATES_PER_ROW, CacheSpec, Capacity
from cache.types import Holder, SessionId, StateMoves
from tests.cache.audit import audit
from tests.cache.kv_world import (
    FULL_GROUP,
    NAMESPACES,
    STATE_GROUP,
    STATE_POOL,
    WINDOW_GROUP,
    WINDOW_POOL,
    World,
    make_cache,
)

SESSION = SessionId("s")
OTHER = SessionId("t")
PAGE_SIZES = (1, 4, 16)


def make_world(page_size: int, **sizes: int) -> World:
    sizes = {"num_pages": 200, "max_context_len": 200, **sizes}
    world = World(make_cache(page_size, mixture="full + recurrent", **sizes), page_size)
    world.open(SESSION, NAMESPACES[0])
    return world


def run(world: World, num_tokens: int, *, session_id: SessionId = SESSION, chunk: int = 7) -> None:
    """Compute so many positions of a turn."""
    turn = world.turns[session_id]
    end = turn.computed_len + num_tokens
    while turn.computed_len < end:
        world.step(session_id, min(chunk, end - turn.computed_len))
        world.check()


def say(world: World, tokens: list[int], *, session_id: SessionId = SESSION) -> None:
    """A turn that computes its input and keeps it; nothing of its answer."""
    loan = world.begin(session_id, tokens)
    end = len(world.turns[session_id].tokens)
    run(world, end - loan.cached_len, session_id=session_id)
    world.end(session_id, end)
    world.check()


def num_held(world: World, session_id: SessionId = SESSION) -> int:
    """States that a session keeps from everybody else."""
    slot = world.cache.slot(session_id)
    return slot.protected_pages[STATE_POOL] + slot.private_pages[STATE_POOL]


def evict(world: World) -> None:
    """Take all snapshots that may go."""
    ledger = world.cache.inspect().stores.ledgers[STATE_POOL]
    evicted = world.cache.inspect().stores.tree.evict(STATE_POOL, ledger.num_evictable)
    for pool, pages in evicted.items():
        world.cache.inspect().stores.allocators[pool].release(pages, Holder.TREE)
    world.check()


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_a_session_keeps_two_states_however_long_it_is(page_size: int) -> None:
    world = make_world(page_size)
    for turn in range(30):
        say(world, [turn % 3] * 6)
        assert 1 <= num_held(world) <= 2
    assert world.cache.slot(SESSION).committed_len == 180
    world.close_everything()


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_a_running_turn_never_keeps_more_than_a_row_comes_with(page_size: int) -> None:
    """With two launches ahead of what is settled, each over the end of a page."""
    world = make_world(page_size)
    say(world, [1] * 21)
    world.begin(SESSION, [2] * 100)
    turn_id, accounts = world.turns[SESSION].turn_id, world.cache.accounts
    for computed_len in range(21, 90, 17):
        for ahead in (computed_len + 17, computed_len + 34):
            world.cache.grow(turn_id, ahead)
        held = accounts()[STATE_POOL]
        assert held.active + held.tree_protected <= STATES_PER_ROW
        audit(world.cache)
        world.cache.record(turn_id, computed_len + 17)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_what_forgotten_launches_would_have_left_is_free_again(page_size: int) -> None:
    """A forward that failed is computed again, with more positions than it had."""
    world = make_world(page_size)
    say(world, [1] * 21)
    world.begin(SESSION, [2] * 100)
    turn_id = world.turns[SESSION].turn_id
    before = num_held(world)
    for ahead in (38, 55):
        world.cache.grow(turn_id, ahead)
    assert num_held(world) > before
    world.cache.forget_launches(turn_id)
    assert num_held(world) == before
    audit(world.cache)
    world.cache.grow(turn_id, 90)
    lease = world.cache.inspect().slots[SESSION].lease
    assert lease is not None
    assert {38, 55}.isdisjoint(lease.states.lengths)
    world.cache.record(turn_id, 90)
    audit(world.cache)


@pytest.mark.parametrize("length", range(17, 34))
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_a_turn_rolled_back_leaves_the_state_it_began_with(page_size: int, length: int) -> None:
    """At every residue of the page size; the turn has published its prompt."""
    world = make_world(page_size)
    say(world, [1] * length)
    before = world.cache.inspect().slots[SESSION]
    assert before.lease is not None
    state = before.lease.state_at(length)
    world.begin(SESSION, [2] * 40)
    run(world, 45, chunk=9)
    world.end(SESSION, length)
    world.check()
    after = world.cache.inspect().slots[SESSION]
    assert after.lease is not None
    assert (after.kv_committed_len, after.lease.state_at(length)) == (length, state)
    assert num_held(world) <= 2
    say(world, [0, 1])


def test_an_answer_cut_between_states_goes_on_from_the_last_one_before() -> None:
    world = make_world(16)
    say(world, [1] * 20)
    world.begin(SESSION, [2] * 10)
    run(world, 25)
    world.end(SESSION, 45)
    # Of 45 tokens computed the last was not kept, and the state after 32 was published.
    assert world.cache.slot(SESSION).committed_len == 45
    world.begin(SESSION, [0] * 2)
    run(world, 5)
    world.end(SESSION, 47)
    assert world.cache.slot(SESSION).committed_len == 45, "a turn leads back to its mark"
    assert world.cache.slot(SESSION).num_tokens == 47
    world.rewind(SESSION, 40)
    assert world.cache.slot(SESSION).committed_len == 32, "a session to its last snapshot"
    say(world, [1, 2, 0])


def test_a_session_that_comes_back_goes_on_from_its_last_snapshot() -> None:
    world = make_world(16)
    say(world, [1] * 39)
    world.cool(SESSION)
    assert world.begin(SESSION, [2]).cached_len == 32


def test_a_match_without_a_state_at_its_end_is_cut_back() -> None:
    world = make_world(4)
    say(world, [1] * 18)
    say(world, [2] * 15)
    world.close(SESSION)
    history = np.array([1] * 18 + [2] * 15 + [0], np.int32)

    def matched_len(end: int) -> int:
        return world.cache.peek(history[:end], NAMESPACES[0]).matched_len

    # Turns ended after 18 and 33 tokens.
    assert [matched_len(end) for end in (34, 33, 32, 17, 16)] == [32, 32, 16, 16, 0]
    evict(world)
    assert matched_len(34) == 0
    assert world.cache.accounts()[STATE_POOL].tree_evictable == 0


def test_who_computes_the_same_again_brings_the_snapshot_back() -> None:
    world = make_world(4)
    say(world, [1] * 16)
    say(world, [2] * 16)
    evict(world)
    world.open(OTHER, NAMESPACES[0])
    say(world, [1] * 16, session_id=OTHER)
    history = np.array([1] * 17, np.int32)
    assert world.cache.peek(history, NAMESPACES[0]).matched_len == 16
    world.close_everything()


def test_a_fork_shares_the_snapshot_and_leaves_it_as_it_is() -> None:
    world = make_world(16)
    say(world, [1] * 39)
    world.fork(SESSION, OTHER)
    assert world.begin(OTHER, [2] * 9).cached_len == 32
    run(world, 16, session_id=OTHER)
    world.end(OTHER, 48)
    say(world, [0] * 5)
    world.close_everything()


def test_a_forward_reads_one_state_and_writes_others() -> None:
    world = make_world(16)
    loan = world.begin(SESSION, [1] * 60)
    cache, turn_id = world.cache, world.turns[SESSION].turn_id
    cache.grow(turn_id, 20)
    first = loan.state_moves(0, 20)
    cache.grow(turn_id, 32)
    second = loan.state_moves(20, 32)
    assert isinstance(first, StateMoves)
    assert isinstance(second, StateMoves)
    assert first.source == 0, "a session begins at zero"
    assert [length for length, _ in first.targets] == [16, 20]
    assert second.source == first.targets[-1][1], "the next launch goes on before this is settled"
    assert [length for length, _ in second.targets] == [32]
    pages = [page for moves in (first, second) for _, page in moves.targets]
    assert len(set(pages)) == 3
    with pytest.raises(AuditFailed):
        loan.state_moves(7, 20)


def test_a_forward_that_failed_is_launched_again_from_the_same_state() -> None:
    world = make_world(16)
    say(world, [1] * 5)
    loan = world.begin(SESSION, [2] * 50)
    cache, turn_id = world.cache, world.turns[SESSION].turn_id
    for end in (25, 45):
        cache.grow(turn_id, end)
    before = loan.state_moves(5, 25)
    cache.grow(turn_id, 12)
    again = loan.state_moves(5, 12)
    assert before is not None
    assert again is not None
    assert before.source == again.source
    cache.record(turn_id, 12)
    slot = cache.inspect().slots[SESSION]
    assert slot.lease is not None
    assert slot.lease.states.lengths == [5, 12], "what the failed launches left is void"
    audit(cache)


def test_growing_fails_before_it_takes_anything_when_states_are_short() -> None:
    world = make_world(4, num_states=3)
    world.begin(SESSION, [1] * 30)
    turn_id = world.turns[SESSION].turn_id
    world.cache.grow(turn_id, 5)
    before = world.fingerprint()
    with pytest.raises(OutOfPages):
        world.cache.grow(turn_id, 10)
    assert world.fingerprint() == before


def test_states_in_quarantine_are_counted_and_never_used_again() -> None:
    world = make_world(16)
    say(world, [1] * 39)
    world.quarantine(SESSION)
    world.check()
    assert world.cache.accounts()[STATE_POOL].quarantine == 2
    say(world, [2] * 3)
    world.close_everything()


def test_the_checker_misses_no_state() -> None:
    world = make_world(16)
    say(world, [1] * 39)
    slot = world.cache.inspect().slots[SESSION]
    assert slot.lease is not None
    slot.lease.states.keep_only(0, Holder.SESSION_HELD)
    with pytest.raises(AuditFailed, match="states after"):
        audit(world.cache)


@pytest.mark.parametrize("num_right", range(4))
def test_a_forward_with_guesses_leaves_a_state_after_each_of_them(num_right: int) -> None:
    """Over the end of a page, as it happens: what wrong ones left is overwritten, or goes."""
    world = make_world(4)
    say(world, [1] * 6)
    loan = world.begin(SESSION, [2] * 8)
    cache, turn_id = world.cache, world.turns[SESSION].turn_id
    slot = cache.inspect().slots[SESSION]
    assert slot.lease is not None
    cache.grow(turn_id, 10, 3)
    moves = loan.state_moves(6, 10, 3)
    assert moves is not None
    assert [length for length, _ in moves.targets] == [7, 8, 9, 10]
    assert len({moves.source, *(page for _, page in moves.targets)}) == 5
    computed_len = 7 + num_right
    cache.record(turn_id, computed_len)
    assert slot.lease.state_at(computed_len) == moves.targets[num_right][1]
    audit(cache)
    cache.grow(turn_id, computed_len + 1)
    going_on = loan.state_moves(computed_len, computed_len + 1)
    assert going_on is not None
    assert going_on.source == moves.targets[num_right][1]
    cache.record(turn_id, computed_len + 1)
    whole = computed_len + 1 - (computed_len + 1) % 4
    # That of its mark, those two, and a whole page's own if they are not the same.
    assert slot.lease.states.lengths == sorted({6, whole, computed_len + 1})
    audit(cache)


def test_states_stand_beside_pages_of_positions_and_are_of_one_kind() -> None:
    capacity = Capacity({WINDOW_POOL: 9}, 2, 64, num_states=9)
    for groups in ((STATE_GROUP,), (WINDOW_GROUP, STATE_GROUP)):
        with pytest.raises(ValueError, match="beside layers that keep every position"):
            SessionAwareCache(CacheSpec(groups, 4), capacity)


def test_every_row_comes_with_the_states_it_may_hold() -> None:
    group = replace(STATE_GROUP, layers=(3, 4), state_shapes=((2, 3), (10,)))
    spec = CacheSpec((FULL_GROUP, group), 4)
    per_row = STATES_PER_ROW * 2 * 16 * 4
    assert spec.bytes_per_state == 2 * 16 * 4
    assert spec.bytes_per_page == FULL_GROUP.bytes_per_token * 4
    budget = 3 * per_row + 2 * 16 * 4 + 20 * spec.bytes_per_page
    made = plan_capacity(spec, budget_bytes=budget, num_rows=3, max_context_len=64)
    assert made == Capacity({FULL_GROUP.pool: 20}, 3, 64, 3 * STATES_PER_ROW + 1)
    guessing = BoundedPools(num_drafts=5)
    made = plan_capacity(
        spec, budget_bytes=2 * budget, num_rows=3, max_context_len=64, bounded=guessing
    )
    assert made.num_states == 3 * (STATES_PER_ROW + 2) + 1
    # States may take half, so fewer rows are left.
    tight = plan_capacity(spec, budget_bytes=4 * per_row, num_rows=50, max_context_len=64)
    assert tight.num_rows == 2
    with pytest.raises(ValueError, match="recurrent states of one session"):
        plan_capacity(spec, budget_bytes=2 * per_row - 1, num_rows=50, max_context_len=64)


def test_a_turn_without_recurrent_layers_moves_no_state() -> None:
    world = World(make_cache(), 4)
    world.open(SESSION, NAMESPACES[0])
    loan = world.begin(SESSION, [1, 2])
    assert loan.state_moves(0, 2) is None
