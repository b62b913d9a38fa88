"""The checker finds what it is for: each way the structures can disagree, by name."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from cache.checker import find_violations
from cache.errors import AuditFailed
from cache.session_cache import SessionAwareCache
from cache.types import Holder, SessionId
from tests.cache.audit import audit
from tests.cache.damage import (
    LENT,
    PARKED,
    detach_a_locked_node,
    fall_behind_the_lock,
    forget_active_pages,
    forget_the_borrower,
    forget_what_was_published,
    free_a_held_page,
    hang_a_node_under_another_key,
    hold_a_row_of_another,
    invent_a_free_page,
    leak_a_row,
    list_a_free_page_twice,
    lock_once_too_often,
    lose_a_free_page,
    lose_a_lock,
    lose_a_private_page,
    lose_the_last_free_row,
    misbook_a_page,
    point_a_row_elsewhere,
    publish_other_tokens,
    run_ahead_of_the_history,
    share_a_page,
    write_the_padding_row,
)
from tests.cache.free_lists import free_pages
from tests.cache.kv_world import NAMESPACES, POOL, World, make_cache


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


BREAKS: list[tuple[Callable[[SessionAwareCache], None], str]] = [
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
    (lose_the_last_free_row, "free and held ones are not all"),
    (run_ahead_of_the_history, "ahead of a history"),
    (fall_behind_the_lock, "protected, committed, allocated"),
    (forget_what_was_published, "a whole page was not published"),
    (forget_the_borrower, "borrower None"),
    (lose_a_free_page, "do not sum"),
    (invent_a_free_page, "do not sum"),
    (forget_active_pages, "the ledger says"),
    (list_a_free_page_twice, "two holders"),
    (hold_a_row_of_another, "the lease holds"),
]


@pytest.mark.parametrize(
    ("damage", "text"), BREAKS, ids=lambda value: getattr(value, "__name__", "")
)
def test_the_audit_names(
    world: World, damage: Callable[[SessionAwareCache], None], text: str
) -> None:
    damage(world.cache)
    with pytest.raises(AuditFailed, match=text):
        audit(world.cache)


def test_checking_changes_nothing(world: World) -> None:
    before = world.fingerprint()
    for level in (0, 1, 2):
        assert find_violations(world.cache, level) == []
    assert world.fingerprint() == before


def test_a_violation_names_the_session_to_quarantine(world: World) -> None:
    point_a_row_elsewhere(world.cache)
    assert {v.session_id for v in find_violations(world.cache, 1)} == {PARKED}
    world.quarantine(PARKED)
    audit(world.cache)


def test_level_1_looks_at_the_one_slot_it_is_asked_for(world: World) -> None:
    point_a_row_elsewhere(world.cache)
    assert find_violations(world.cache, 1, LENT) == []
    assert find_violations(world.cache, 1, PARKED)
    assert find_violations(world.cache, 1, SessionId("gone")) == []


def test_level_0_sees_the_sums_alone(world: World) -> None:
    point_a_row_elsewhere(world.cache)
    assert find_violations(world.cache, 0) == []
    world.cache.inspect().stores.ledgers[POOL]._accounts[Holder.FREE] += 1
    assert find_violations(world.cache, 0)


def test_the_recount_does_not_ask_the_ledger(world: World) -> None:
    ledger = world.cache.inspect().stores.ledgers[POOL]
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
        free_pages(world.cache.inspect().stores.allocators[POOL]), np.arange(1, 33, dtype=np.int32)
    )
