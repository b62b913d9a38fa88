"""Ways to break the structures of a cache behind its back, for two sessions of it."""

from __future__ import annotations

from cache.lease import KVLease
from cache.radix_node import RadixNode
from cache.session_cache import SessionAwareCache
from cache.types import Holder, PageId, SessionId
from tests.cache.free_lists import free_pages
from tests.cache.kv_world import POOL

PARKED, LENT = SessionId("parked"), SessionId("lent")
"""Each with a published edge and a private page."""


def lease_of(cache: SessionAwareCache, session_id: SessionId) -> KVLease:
    slot = cache.inspect().slots[session_id]
    assert slot.lease is not None
    return slot.lease


def node_of(cache: SessionAwareCache, session_id: SessionId) -> RadixNode:
    return cache.inspect().stores.tree.path(lease_of(cache, session_id).receipt)[-1]


def lose_a_private_page(cache: SessionAwareCache) -> None:
    lease_of(cache, LENT)._private[POOL].pop()


def share_a_page(cache: SessionAwareCache) -> None:
    lease_of(cache, LENT)._private[POOL][0] = lease_of(cache, PARKED)._private[POOL][0]


def free_a_held_page(cache: SessionAwareCache) -> None:
    cache.inspect().stores.allocators[POOL]._free.put_back(
        [lease_of(cache, LENT)._private[POOL][0]]
    )


def misbook_a_page(cache: SessionAwareCache) -> None:
    cache.inspect().stores.ledgers[POOL].transfer(1, Holder.ACTIVE, Holder.SESSION_HELD)


def lose_a_lock(cache: SessionAwareCache) -> None:
    node_of(cache, LENT).lock_ref -= 1


def lock_once_too_often(cache: SessionAwareCache) -> None:
    node_of(cache, PARKED).lock_ref += 1


def detach_a_locked_node(cache: SessionAwareCache) -> None:
    node = node_of(cache, LENT)
    assert node.parent is not None
    del node.parent.children[node.key]


def hang_a_node_under_another_key(cache: SessionAwareCache) -> None:
    node = node_of(cache, LENT)
    assert node.parent is not None
    node.parent.children[b"other"] = node.parent.children.pop(node.key)


def publish_other_tokens(cache: SessionAwareCache) -> None:
    node_of(cache, PARKED).tokens._data[3] += 1


def point_a_row_elsewhere(cache: SessionAwareCache) -> None:
    lease = lease_of(cache, PARKED)
    cache.inspect().stores.rows.repoint(POOL, lease.row, 0, [PageId(30)])


def write_the_padding_row(cache: SessionAwareCache) -> None:
    cache.inspect().stores.rows._tables[POOL][0, 0] = 9


def leak_a_row(cache: SessionAwareCache) -> None:
    cache.inspect().stores.rows.alloc()


def lose_the_last_free_row(cache: SessionAwareCache) -> None:
    free = cache.inspect().stores.rows._free_rows
    free.remove(max(free))


def run_ahead_of_the_history(cache: SessionAwareCache) -> None:
    lease_of(cache, PARKED).computed_len = 8


def fall_behind_the_lock(cache: SessionAwareCache) -> None:
    lease_of(cache, PARKED).computed_len = 3


def forget_what_was_published(cache: SessionAwareCache) -> None:
    lease_of(cache, PARKED).receipt.length = 0


def forget_the_borrower(cache: SessionAwareCache) -> None:
    cache.inspect().slots[LENT].borrower = None


def lose_a_free_page(cache: SessionAwareCache) -> None:
    cache.inspect().stores.ledgers[POOL]._accounts[Holder.FREE] -= 1


def invent_a_free_page(cache: SessionAwareCache) -> None:
    cache.inspect().stores.ledgers[POOL]._accounts[Holder.FREE] += 1


def forget_active_pages(cache: SessionAwareCache) -> None:
    accounts = cache.inspect().stores.ledgers[POOL]._accounts
    accounts[Holder.FREE] += accounts[Holder.ACTIVE]
    accounts[Holder.ACTIVE] = 0


def list_a_free_page_twice(cache: SessionAwareCache, index: int = -1) -> None:
    allocator = cache.inspect().stores.allocators[POOL]
    allocator._free.put_back([int(free_pages(allocator)[index])])


def hold_a_row_of_another(cache: SessionAwareCache) -> None:
    lease_of(cache, LENT).row = lease_of(cache, PARKED).row
