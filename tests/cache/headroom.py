"""What a cache could hand out now."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from cache.session_cache import SessionAwareCache
from cache.types import PoolName


class Headroom(NamedTuple):
    """Pages that are free, pages that eviction or the end of tails could free, rows that are
    free."""

    free_pages: Mapping[PoolName, int]
    evictable_pages: Mapping[PoolName, int]
    free_rows: int

    def pages(self, pool: PoolName) -> int:
        """Return how many pages of one pool `grow` could take."""
        return self.free_pages[pool] + self.evictable_pages[pool]


def headroom(cache: SessionAwareCache) -> Headroom:
    """Return what the accounts say now."""
    accounts = cache.accounts()
    return Headroom(
        free_pages={pool: held.free for pool, held in accounts.items()},
        evictable_pages={
            pool: held.tree_evictable + cache.tails.num_pages[pool]
            for pool, held in accounts.items()
        },
        free_rows=cache.inspect().stores.rows.num_free,
    )
