"""The checker finds what it is for: each way the structures can disagree, by name."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from cache import AuditFailed, SessionId, audit, find_violations
from cache.lease import KVLease
from cache.radix import RadixNode
from cache.types import Holder, PageId
from tests.cache.kv_world import NAMESPACES, POOL, World, make_cache

PARKED, LENT = SessionId("parked"), SessionId("lent")


@pytest.fixture
def world() -> World:
    """One parked and one lent session, each with a published edge and a private page."""
    world = World(make_cache(4), 4)
    for number, session_id in enumerate((PARKED, LENT)):
        world.open(session_id, NAMESPACES[0])
        world.begin(session_id, [number] * 6)
        world.step(session_id, 64)
    world.end(PARKED, 7)
    audit(world.cache)
    return world


def lease_of(world: World, session_id: SessionId) -> KVLease:
    (slot,) = world.cache.inspect_slots(session_id)
    assert slot.lease is not None
    return slot.lease


def node_of(world: World, session_id: SessionId) -> RadixNode:
    return world.cache.stores.tree.path(lease_of(world, session_id).receipt)[-1]


def lose_a_private_page(world: World) -> None:
    lease_of(world, LENT)._private[POOL].pop()


def share_a_page(world: World) -> None:
    lease_of(world, LENT)._private[POOL][0] = lease_of(world, PARKED)._private[POOL][0]


def free_a_held_page(world: World) -> None:
    world.cache.stores.allocators[POOL]._free.give([lease_of(world, LENT)._private[POOL][0]])


def misbook_a_page(world: World) -> None:
    world.cache.stores.ledgers[POOL].transfer(1, Holder.ACTIVE, Holder.SESSION_HELD)


def lose_a_lock(world: World) -> None:
    node_of(world, LENT).lock_count -= 1


def lock_once_too_often(world: World) -> None:
    node_of(world, PARKED).lock_count += 1


def detach_a_locked_node(world: World) -> None:
    node = node_of(world, LENT)
    assert node.parent is not None
    del node.parent.children[node.key]


def hang_a_node_under_another_key(world: World) -> None:
    node = node_of(world, LENT)
    assert node.parent is not None
    node.parent.children[b"other"] = node.parent.children.pop(node.key)


def publish_other_tokens(world: World) -> None:
    node_of(world, PARKED).tokens._data[3] += 1


def point_a_row_elsewhere(world: World) -> None:
    lease = lease_of(world, PARKED)
    world.cache.stores.rows.repoint(POOL, lease.row, 0, [PageId(30)])


def write_the_padding_row(world: World) -> None:
    world.cache.stores.rows._tables[POOL][0, 0] = 9


def leak_a_row(world: World) -> None:
    world.cache.stores.rows.alloc()


def run_ahead_of_the_history(world: World) -> None:
    lease_of(world, PARKED).computed_len = 8


def fall_behind_the_lock(world: World) -> None:
    lease_of(world, PARKED).computed_len = 3


def forget_the_borrower(world: World) -> None:
    next(world.cache.inspect_slots(LENT)).borrower = None


BREAKS: list[tuple[Callable[[World], None], str]] = [
    (lose_a_private_page, "with none"),
    (share_a_page, "two holders"),
    (free_a_held_page, "two holders"),
    (misbook_a_page, "the ledger says"),
    (lose_a_lock, "counts 0 locks"),
    (lock_once_too_often, "counts 2 locks"),
    (detach_a_locked_node, "not in the tree"),
    (hang_a_node_under_another_key, "not its first page"),
    (publish_other_tokens, "other tokens than the history"),
    (point_a_row_elsewhere, "the lease holds"),
    (write_the_padding_row, "padding row"),
    (leak_a_row, "leases have"),
    (run_ahead_of_the_history, "ahead of a history"),
    (fall_behind_the_lock, "protected, committed, allocated"),
    (forget_the_borrower, "borrower None"),
]


@pytest.mark.parametrize(
    ("damage", "text"), BREAKS, ids=lambda value: getattr(value, "__name__", "")
)
def test_the_audit_names(world: World, damage: Callable[[World], None], text: str) -> None:
    damage(world)
    with pytest.raises(AuditFailed, match=text):
        audit(world.cache)


def test_checking_changes_nothing(world: World) -> None:
    before = world.fingerprint()
    for level in (0, 1, 2):
        assert find_violations(world.cache, level) == []
    assert world.fingerprint() == before


def test_a_violation_names_the_session_to_quarantine(world: World) -> None:
    point_a_row_elsewhere(world)
    assert {v.session_id for v in find_violations(world.cache, 1)} == {PARKED}
    world.quarantine(PARKED)
    audit(world.cache)


def test_level_1_looks_at_the_one_slot_it_is_asked_for(world: World) -> None:
    point_a_row_elsewhere(world)
    assert find_violations(world.cache, 1, LENT) == []
    assert find_violations(world.cache, 1, PARKED)
    assert find_violations(world.cache, 1, SessionId("gone")) == []


def test_level_0_sees_the_sums_alone(world: World) -> None:
    point_a_row_elsewhere(world)
    assert find_violations(world.cache, 0) == []
    world.cache.stores.ledgers[POOL]._accounts[Holder.FREE] += 1
    assert find_violations(world.cache, 0)


def test_the_recount_does_not_ask_the_ledger(world: World) -> None:
    ledger = world.cache.stores.ledgers[POOL]
    ledger._accounts[Holder.FREE] -= 1
    ledger._accounts[Holder.ACTIVE] += 1
    assert ledger.is_balanced()
    with pytest.raises(AuditFailed, match="recounted"):
        audit(world.cache)


def test_audit_is_the_same_for_idle_and_busy(world: World) -> None:
    world.end(LENT, 0)
    audit(world.cache)
    world.close_everything()
    assert np.array_equal(
        world.cache.stores.allocators[POOL].free_pages(), np.arange(1, 33, dtype=np.int32)
    )
