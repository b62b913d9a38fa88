"""The façade under pressure: cooling, pinning, flushing, quarantine."""

from __future__ import annotations

import inspect

import pytest

from cache import room
from cache.errors import PinQuotaExceeded, SlotBusy
from cache.session_cache import SessionAwareCache
from cache.types import Retention, SlotState, TurnId
from tests.cache.headroom import headroom
from tests.cache.kv_world import POOL, World, make_cache
from tests.cache.two_sessions import ALICE, PROMPT, A, B, C, make_world, run_turn


@pytest.fixture
def world() -> World:
    return make_world()


def test_idle_sessions_come_least_recently_used_first() -> None:
    world = make_world()
    world.open(C, ALICE)
    for session_id in (A, B, C, A):
        run_turn(world, session_id, [len(session_id)] * 5)
    assert [idle.session_id for idle in world.cache.parked] == [B, C, A]


def test_cooling_is_worth_only_what_nobody_else_has_locked(world: World) -> None:
    run_turn(world, A, PROMPT[:8], num_outputs=1)
    world.begin(B, PROMPT[:8])
    world.step(B, 64)
    (idle,) = world.cache.parked
    assert idle.freed_pages == {POOL: 0}


def test_an_eviction_leaves_a_sixteenth_of_the_pool_free() -> None:
    world = make_world(1, num_pages=481)
    run_turn(world, A, [1] * 470, num_outputs=8)
    world.close(A)
    assert headroom(world.cache).free_pages[POOL] == 10
    run_turn(world, B, [2] * 10, num_outputs=1)
    assert headroom(world.cache).free_pages[POOL] == 480 // 16


@pytest.mark.parametrize(("num_ahead", "num_free"), [(19, 29), (20, 30), (21, 30)])
def test_one_eviction_goes_only_so_far_beyond_what_is_taken(
    monkeypatch: pytest.MonkeyPatch, num_ahead: int, num_free: int
) -> None:
    monkeypatch.setattr(room, "EVICTED_AHEAD", num_ahead)
    world = make_world(1, num_pages=481)
    run_turn(world, A, [1] * 470, num_outputs=8)
    world.close(A)
    run_turn(world, B, [2] * 10, num_outputs=1)
    assert headroom(world.cache).free_pages[POOL] == num_free


def test_cooling_a_cold_session_is_harmless(world: World) -> None:
    world.cache.cool(A)
    assert world.cache.slot(A).state is SlotState.COLD


def pinned_world() -> World:
    world = World(make_cache(4, num_pages=20, pinned_quota_pages=6), 4)
    world.open(A, ALICE, retention=Retention.PINNED)
    world.open(B, ALICE)
    return world


def test_pinned_sessions_are_not_offered_for_cooling() -> None:
    world = pinned_world()
    run_turn(world, A, PROMPT)
    run_turn(world, B, PROMPT)
    assert [idle.session_id for idle in world.cache.parked] == [B]


def test_a_turn_that_would_exceed_the_pinned_quota_is_refused_before_anything_changes() -> None:
    world = pinned_world()
    run_turn(world, A, PROMPT)
    before = world.fingerprint()
    with pytest.raises(PinQuotaExceeded):
        world.cache.begin_turn(A, TurnId("t"), base_len=13, new_tokens=[1] * 12)
    assert world.fingerprint() == before
    assert run_turn(world, A, [1] * 6) == 12


def test_what_pinned_sessions_grow_past_the_quota_can_be_cooled() -> None:
    world = pinned_world()
    run_turn(world, A, PROMPT, num_outputs=20)
    assert [idle.session_id for idle in world.cache.parked] == [A]


def test_pinning_is_refused_when_the_quota_is_used_up() -> None:
    world = pinned_world()
    run_turn(world, A, PROMPT * 2, num_outputs=4)
    with pytest.raises(PinQuotaExceeded):
        world.cache.open(C, namespace=ALICE, retention=Retention.PINNED)
    with pytest.raises(PinQuotaExceeded):
        make_world().cache.open(C, namespace=ALICE, retention=Retention.PINNED)
    world.close(A)
    world.cache.open(C, namespace=ALICE, retention=Retention.PINNED)


def test_pinned_sessions_leave_one_row_to_the_others() -> None:
    world = World(make_cache(4, num_rows=2, pinned_quota_pages=20), 4)
    for session_id in (A, B):
        world.open(session_id, ALICE, retention=Retention.PINNED)
    run_turn(world, A, PROMPT)
    with pytest.raises(PinQuotaExceeded, match="all rows but one"):
        world.begin(B, PROMPT)


def test_a_quota_of_the_whole_pool_is_refused() -> None:
    with pytest.raises(ValueError, match="leaves none to others"):
        make_cache(4, num_pages=20, pinned_quota_pages=19)


def test_a_full_pool_keeps_a_reserve_free_so_that_extents_come_back() -> None:
    world = make_world(num_pages=65)
    for number in range(4):
        run_turn(world, A, [number] * 64, num_outputs=1)
        world.rewind(A, 0)
    assert world.marks["eviction"] == 1
    assert headroom(world.cache).free_pages[POOL] == 65 // 16


def test_flushing_empties_the_tree_and_keeps_the_histories(world: World) -> None:
    run_turn(world, A, PROMPT)
    world.cache.flush()
    assert headroom(world.cache).free_pages == {POOL: 32}
    assert run_turn(world, A, [1]) == 0


def test_flushing_is_refused_while_a_turn_runs(world: World) -> None:
    world.begin(A, PROMPT)
    with pytest.raises(SlotBusy):
        world.cache.flush()


# Quarantine


@pytest.mark.parametrize("is_running", [True, False])
def test_quarantined_pages_are_never_used_again_and_the_tokens_stay(is_running: bool) -> None:
    world = make_world()
    run_turn(world, A, PROMPT)
    lease = world.cache.inspect().slots[A].lease
    assert lease is not None
    held = set(world.cache.inspect().stores.rows.entries(POOL, lease.row).tolist())
    if is_running:
        world.begin(A, PROMPT)
        world.step(A, 64)
    world.quarantine(A)
    world.check()
    assert world.cache.slot(A).state is SlotState.COLD
    assert len(world.cache.tokens(A)) == 13
    assert held - {0} <= set(world.cache.inspect().stores.quarantined[POOL])
    assert run_turn(world, A, PROMPT) == 0


def test_a_session_that_shares_with_a_quarantined_one_keeps_its_pages(world: World) -> None:
    run_turn(world, A, PROMPT)
    run_turn(world, B, [*PROMPT[:8], 2, 2])
    world.quarantine(A)
    world.check()
    assert run_turn(world, B, [1]) == 12


# Shape


def test_a_verb_has_no_more_than_six_parameters() -> None:
    for name, verb in inspect.getmembers(SessionAwareCache, inspect.isfunction):
        assert len(inspect.signature(verb).parameters) - 1 <= 6, name
