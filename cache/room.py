"""`Room`: free pages for somebody who needs them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from cache.errors import OutOfPages
from cache.ledger import Ledger
from cache.lockstep import LOW_WATER_DIVISOR
from cache.stores import KVStores
from cache.tails import Tails

EVICTED_AHEAD: Final = 256
"""Pages that are evicted at most beyond those that are taken: about a millisecond."""

_HIGH_WATER_DIVISOR: Final = 16
"""Eviction begins when less than 1/32 of a pool would be free and continues to 1/16. Evicting page
by page on demand would also hand out single pages, so that no session had consecutive ones: under
churn the mean run was 1.3 pages long that way and is 2.7 this way."""


class Room:
    """Take pages from tails, oldest first, and from the tree, before a pool is exhausted."""

    def __init__(self, stores: KVStores, tails: Tails) -> None:
        self._stores, self._tails = stores, tails

    def make(self, wanted: Mapping[Ledger, int]) -> None:
        """Free so many pages of each pool.

        Raises:
            OutOfPages: a pool has too few free and evictable pages, those of tails included;
                nothing was changed.
        """
        stores, tails = self._stores, self._tails
        for ledger, count in wanted.items():
            if count > ledger.num_free + ledger.num_evictable + tails.num_pages[ledger.pool]:
                raise OutOfPages(f"{ledger.pool}: wanted {count} pages of {ledger.snapshot()}")
        for ledger, count in wanted.items():
            if count > ledger.num_free:
                tails.reclaim(ledger.pool, count - ledger.num_free)
        for ledger, count in wanted.items():
            if ledger.num_free - count < ledger.num_pages // LOW_WATER_DIVISOR:
                num_ahead = min(
                    ledger.num_pages // _HIGH_WATER_DIVISOR - ledger.num_free, EVICTED_AHEAD
                )
                # What a tenant's minimum keeps is not evicted ahead.
                num_spare = ledger.num_evictable - stores.tree.tenants.guarded[ledger.pool]
                num_spare = max(num_spare, count - ledger.num_free)
                stores.evict(ledger.pool, min(count + num_ahead, num_spare))

    def check_unguarded(self, wanted: Mapping[Ledger, int]) -> None:
        """Check that so many pages of each pool are there beside those that minimums keep.

        Raises:
            OutOfPages: they are not.
        """
        tenants = self._stores.tree.tenants
        if tenants.num_present < 2:
            return
        for ledger, count in wanted.items():
            num_spare = ledger.num_free + ledger.num_evictable + self._tails.num_pages[ledger.pool]
            if count > num_spare - tenants.guarded[ledger.pool]:
                raise OutOfPages(f"{ledger.pool}: wanted {count} pages that no minimum keeps")
