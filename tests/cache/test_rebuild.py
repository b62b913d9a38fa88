"""Beginning the books again: what stays, what goes, and that nothing wrong is trusted."""

from __future__ import annotations

import pytest

from cache.errors import UnknownSession
from cache.types import Holder, Retention, SessionId, SlotState, TurnId
from tests.cache import damage
from tests.cache.audit import audit
from tests.cache.headroom import headroom
from tests.cache.kv_world import NAMESPACES, POOL, World, make_cache
from tests.cache.two_sessions import ALICE, PROMPT, A, B, make_world, run_turn

PINNED = SessionId("pinned")


@pytest.fixture
def world() -> World:
    """A has a turn behind it, B is in the middle of one."""
    world = make_world()
    run_turn(world, A, PROMPT)
    world.begin(B, [0, *PROMPT])
    world.step(B, 64)
    return world


def test_histories_stay_and_nothing_else(world: World) -> None:
    history = world.cache.tokens(A).tolist()
    resident = world.cache.rebuild()
    assert {view.session_id: view.committed_len for view in resident} == {A: 12, B: 11}
    audit(world.cache)
    assert world.cache.tokens(A).tolist() == history
    assert len(world.cache.tokens(B)) == 0, "as it was before its turn"
    assert {view.state for view in world.cache.slots()} == {SlotState.COLD}
    accounts = world.cache.accounts()[POOL]
    assert accounts.free == accounts.pages - 1
    assert headroom(world.cache).free_rows == world.cache.inspect().stores.rows.num_rows


def test_a_loan_is_over_and_its_turn_can_borrow_again(world: World) -> None:
    turn_id = world.turns[B].turn_id
    world.cache.rebuild()
    with pytest.raises(UnknownSession):
        world.cache.end_turn(turn_id, 0)
    loan = world.cache.begin_turn(B, turn_id, base_len=0, new_tokens=PROMPT)
    assert loan.cached_len == 0
    world.cache.grow(turn_id, len(PROMPT))
    world.cache.record(turn_id, len(PROMPT))
    world.cache.end_turn(turn_id, len(PROMPT))
    audit(world.cache)


def test_a_closing_session_is_gone(world: World) -> None:
    assert not world.cache.close(B)
    assert {view.session_id for view in world.cache.rebuild()} == {A, B}
    assert B not in world.cache
    assert A in world.cache
    audit(world.cache)


def test_a_slot_whose_loan_is_nowhere_written_is_cold_too(world: World) -> None:
    world.cache._turns.clear()
    world.cache.rebuild()
    assert world.cache.slot(B).borrower is None
    world.cache.begin_turn(B, TurnId("next"), base_len=0, new_tokens=PROMPT)


def test_quarantined_pages_stay_out_however_the_list_was_broken(world: World) -> None:
    world.cache.quarantine(A)
    condemned = set(world.cache.inspect().stores.quarantined[POOL])
    world.cache.inspect().stores.quarantined[POOL].extend([0, -3, 10_000, *condemned])
    world.cache.rebuild()
    audit(world.cache)
    ledger = world.cache.inspect().stores.ledgers[POOL]
    assert set(world.cache.inspect().stores.quarantined[POOL]) == condemned
    allocator = world.cache.inspect().stores.allocators[POOL]
    assert ledger.num_free == ledger.num_pages - 1 - len(condemned)
    assert condemned.isdisjoint(allocator.acquire(ledger.num_free, Holder.ACTIVE))


def test_a_pinned_session_pins_nothing_until_it_runs_again() -> None:
    world = World(make_cache(4, pinned_quota_pages=5), 4)
    world.open(PINNED, ALICE, retention=Retention.PINNED)
    run_turn(world, PINNED, PROMPT)
    before = world.cache._pinned.excess_pages
    world.cache.rebuild()
    assert world.cache._pinned.excess_pages == (-5,) < before
    loan = world.cache.begin_turn(PINNED, TurnId("again"), base_len=0, new_tokens=[1])
    world.cache.grow(TurnId("again"), 1)
    assert loan.cached_len == 0
    assert world.cache._pinned.excess_pages == (-4,)


def test_after_any_damage_the_books_balance() -> None:
    breaks = [getattr(damage, name) for name in dir(damage) if "_a_" in name or "_the_" in name]
    assert len(breaks) >= 12
    for break_books in breaks:
        world = World(make_cache(4), 4)
        for number, session_id in enumerate((damage.PARKED, damage.LENT)):
            world.open(session_id, NAMESPACES[0])
            world.begin(session_id, [number] * 6)
            world.step(session_id, 64)
        world.end(damage.PARKED, 7)
        break_books(world.cache)
        world.cache.rebuild()
        audit(world.cache)
        assert world.cache.tokens(damage.PARKED).tolist() == world.histories[damage.PARKED]
