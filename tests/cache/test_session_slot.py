"""The slot: lending by reference, derived lengths, and its states."""

from __future__ import annotations

import pytest

from cache.errors import SlotBusy
from cache.int_buffer import IntBuffer
from cache.lease import KVLease
from cache.session_slot import TRANSITIONS, SessionSlot
from cache.stores import KVStores
from cache.types import Retention, SessionId, SlotState, TurnId
from tests.cache.kv_world import NAMESPACES, POOL, make_cache

TURN, OTHER = TurnId("turn"), TurnId("other")


@pytest.fixture
def stores() -> KVStores:
    return make_cache(4).inspect().stores


@pytest.fixture
def slot(stores: KVStores) -> SessionSlot:
    """A cold slot that was just given a lease with two private pages of four tokens."""
    slot = SessionSlot(SessionId("s"), NAMESPACES[0], Retention.RECLAIMABLE)
    slot.tokens.append([1, 2, 3, 4, 5, 6])
    slot.lease = KVLease(stores, NAMESPACES[0])
    slot.lease.grow(6)
    slot.lease.computed_len = 5
    return slot


def test_L3_restoring_is_idempotent_and_lends_the_lease_itself(slot: SessionSlot) -> None:
    lease = slot.restore_to_req(TURN)
    before = (lease.row, lease.num_pages, lease.computed_len, lease.protected_len)
    assert slot.restore_to_req(TURN) is lease is slot.lease
    assert (lease.row, lease.num_pages, lease.computed_len, lease.protected_len) == before


def test_R1_another_turn_is_refused_and_the_borrower_stays(slot: SessionSlot) -> None:
    slot.restore_to_req(TURN)
    with pytest.raises(SlotBusy):
        slot.restore_to_req(OTHER)
    assert slot.borrower == TURN
    assert slot.state is SlotState.LENT


def test_D7_activity_is_derived_from_the_borrower(slot: SessionSlot) -> None:
    assert not slot.is_active
    slot.restore_to_req(TURN)
    assert slot.is_active
    slot.end_loan()
    assert not slot.is_active
    with pytest.raises(AttributeError):
        setattr(slot, "is_active", True)  # noqa: B010 -- mypy knows that it has no setter


def test_lengths_are_read_from_the_lease(slot: SessionSlot) -> None:
    assert (slot.cache_protected_len, slot.kv_committed_len, slot.kv_allocated_len) == (0, 5, 8)
    cold = SessionSlot(SessionId("c"), NAMESPACES[0], Retention.RECLAIMABLE)
    assert (cold.cache_protected_len, cold.kv_committed_len, cold.kv_allocated_len) == (0, 0, 0)


def test_G1_only_whole_pages_are_protected(slot: SessionSlot) -> None:
    assert slot.lease is not None
    slot.restore_to_req(TURN)
    slot.lease.publish(slot.tokens.view(0, 5))
    assert (slot.cache_protected_len, slot.kv_committed_len) == (4, 5)


def test_private_pages_change_accounts_when_the_lease_changes_hands(
    slot: SessionSlot, stores: KVStores
) -> None:
    ledger = stores.ledgers[POOL]
    slot.restore_to_req(TURN)
    assert (ledger.snapshot().active, ledger.snapshot().session_held) == (2, 0)
    slot.end_loan()
    assert (ledger.snapshot().active, ledger.snapshot().session_held) == (0, 2)


@pytest.mark.parametrize("source", SlotState)
@pytest.mark.parametrize("target", SlotState)
def test_only_the_transitions_of_the_table_happen(
    slot: SessionSlot, source: SlotState, target: SlotState
) -> None:
    slot.state = source
    if target in TRANSITIONS[source]:
        slot.move_to(target)
        assert slot.state is target
    else:
        with pytest.raises(AssertionError):
            slot.move_to(target)


def test_a_copy_of_the_log_is_the_callers_own() -> None:
    log = IntBuffer([1, 2, 3])
    copy = log.copy(1)
    log.truncate(0)
    log.append([7, 7, 7])
    assert copy.tolist() == [2, 3]
