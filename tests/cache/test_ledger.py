"""Accounts of one pool."""

from __future__ import annotations

import dataclasses

import pytest

from cache.errors import AuditFailed
from cache.ledger import Ledger
from cache.types import Holder, PoolName

POOL = PoolName("full")


def test_a_new_pool_is_free_but_for_the_padding_page() -> None:
    accounts = Ledger(POOL, 10).snapshot()
    assert (accounts.free, accounts.reserved, accounts.pages) == (9, 1, 10)


def test_every_transfer_keeps_the_sum() -> None:
    ledger = Ledger(POOL, 10)
    ledger.transfer(5, Holder.FREE, Holder.ACTIVE)
    ledger.transfer(3, Holder.ACTIVE, Holder.TREE)
    ledger.protect(2)
    values = dataclasses.asdict(ledger.snapshot())
    del values["pool"]
    assert values.pop("pages") == sum(values.values())
    assert ledger.is_balanced()


def test_an_overdrawn_account_fails_at_the_wrong_call_and_moves_nothing() -> None:
    ledger = Ledger(POOL, 4)
    before = ledger.snapshot()
    with pytest.raises(AuditFailed, match="4 pages FREE -> ACTIVE, 3 are there"):
        ledger.transfer(4, Holder.FREE, Holder.ACTIVE)
    assert ledger.snapshot() == before


def test_a_negative_transfer_is_refused() -> None:
    with pytest.raises(AuditFailed):
        Ledger(POOL, 4).transfer(-1, Holder.FREE, Holder.ACTIVE)


@pytest.mark.parametrize(
    "holders", [(Holder.RESERVED, Holder.FREE), (Holder.FREE, Holder.RESERVED)]
)
def test_the_padding_page_never_changes_hands(holders: tuple[Holder, Holder]) -> None:
    with pytest.raises(AuditFailed):
        Ledger(POOL, 4).transfer(1, *holders)


def test_locked_tree_pages_cannot_leave_the_tree() -> None:
    ledger = Ledger(POOL, 10)
    ledger.transfer(4, Holder.FREE, Holder.TREE)
    ledger.protect(3)
    with pytest.raises(AuditFailed):
        ledger.transfer(2, Holder.TREE, Holder.FREE)
    ledger.unprotect(1)
    ledger.transfer(2, Holder.TREE, Holder.FREE)
    assert ledger.num_evictable == 0


def test_no_more_pages_are_protected_or_exposed_than_there_are() -> None:
    ledger = Ledger(POOL, 10)
    ledger.transfer(2, Holder.FREE, Holder.TREE)
    with pytest.raises(AuditFailed):
        ledger.protect(3)
    ledger.protect(2)
    with pytest.raises(AuditFailed):
        ledger.unprotect(3)


def test_a_pool_of_nothing_but_padding_is_refused() -> None:
    with pytest.raises(ValueError, match="beside the padding page"):
        Ledger(POOL, 1)
