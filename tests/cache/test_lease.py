"""The lease: lengths that follow from what it holds, and pages that continue each other."""

from __future__ import annotations

import numpy as np
import pytest

from cache.errors import AuditFailed, OutOfRows
from cache.lease import KVLease
from cache.session_cache import SessionAwareCache
from tests.cache.headroom import headroom
from tests.cache.kv_world import NAMESPACES, POOL, make_cache
from tests.cache.two_sessions import PROMPT, A, B, make_world


@pytest.fixture
def cache() -> SessionAwareCache:
    return make_cache(4)


def test_a_new_lease_holds_a_row_and_nothing_else(cache: SessionAwareCache) -> None:
    lease = KVLease(cache.inspect().stores, NAMESPACES[0])
    assert (lease.protected_len, lease.computed_len, lease.capacity_len) == (0, 0, 0)
    assert headroom(cache).free_rows == 3


def test_no_row_means_no_lock_either(cache: SessionAwareCache) -> None:
    leases = [KVLease(cache.inspect().stores, NAMESPACES[0]) for _ in range(4)]
    with pytest.raises(OutOfRows):
        KVLease(cache.inspect().stores, NAMESPACES[1])
    assert [namespace for namespace, _ in cache.inspect().stores.tree.roots()] == [NAMESPACES[0]]
    for lease in leases:
        lease.release()
    assert not list(cache.inspect().stores.tree.roots())


@pytest.mark.parametrize(("to_len", "missing"), [(0, 0), (1, 1), (4, 1), (5, 2), (9, 3)])
def test_capacity_is_bought_in_pages(cache: SessionAwareCache, to_len: int, missing: int) -> None:
    lease = KVLease(cache.inspect().stores, NAMESPACES[0])
    assert lease.missing_pages(to_len).get(POOL, 0) == missing
    lease.grow(to_len)
    assert lease.capacity_len == 4 * missing
    assert lease.grow(to_len) == []


def test_a_parked_lease_does_not_publish(cache: SessionAwareCache) -> None:
    lease = KVLease(cache.inspect().stores, NAMESPACES[0])
    lease.grow(4)
    lease.computed_len = 4
    lease.park()
    with pytest.raises(AuditFailed):
        lease.publish(np.arange(4, dtype=np.int32))


def test_a_lease_changes_hands_once(cache: SessionAwareCache) -> None:
    lease = KVLease(cache.inspect().stores, NAMESPACES[0])
    with pytest.raises(AuditFailed):
        lease.lend()
    lease.park()
    with pytest.raises(AuditFailed):
        lease.park()


def test_sessions_that_take_turns_keep_one_extent_each() -> None:
    cache = make_cache(4, num_pages=1025, num_rows=8, allocation="extent")
    leases = [KVLease(cache.inspect().stores, NAMESPACES[0]) for _ in range(8)]
    for to_len in range(10, 200, 10):
        for lease in leases:
            lease.grow(to_len)
    for lease in leases:
        pages = lease.private_pages(POOL)
        assert list(pages) == list(range(pages[0], pages[0] + len(pages)))


def test_E5_a_turn_names_only_its_new_pages_however_long_the_history() -> None:
    world = make_world(4, num_pages=400)
    for _ in range(20):
        history_len = len(world.histories[A])
        loan = world.begin(A, PROMPT)
        assert loan.table_writes == ()
        writes = world.cache.grow(world.turns[A].turn_id, history_len + len(PROMPT))
        world.device.apply(writes)
        assert sum(len(write.pages) for write in writes) <= len(PROMPT) // 4 + 1
        world.step(A, 64)
        world.end(A, len(world.turns[A].tokens))
    slot = world.cache.inspect().slots[A]
    assert slot.lease is not None
    assert len(world.cache.inspect().stores.tree.path(slot.lease.receipt)) == 1, (
        "one edge, not one per turn"
    )


def test_retracting_gives_back_what_was_said() -> None:
    world = make_world()
    for session_id in (A, B):
        world.begin(session_id, PROMPT)
        world.step(session_id, 64)
        world.step(session_id, 1)
    loan = world.turns[A].loan
    assert (loan.computed_len, loan.capacity_len) == (11, 12)
    promised = loan.retractable_pages()[POOL]
    before = headroom(world.cache).pages(POOL)
    world.retract(A)
    assert headroom(world.cache).pages(POOL) == before + promised == before + 1
