"""What a cache could hand out now."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import NamedTuple

from cache.session_cache import SessionAwareCache
from cache.types import PoolName


class Headroom(NamedTuple):
    """Pages that are free, pages that eviction or the end of tails could free, rows that are free,
    and those of them for which there are states that are not in quarantine."""

    free_pages: Mapping[PoolName, int]
    evictable_pages: Mapping[PoolName, int]
    free_rows: int
    usable_rows: int

    def pages(self, pool: PoolName) -> int:
        """Return how many pages of one pool `grow` could take."""
        return self.free_pages[pool] + self.evictable_pages[pool]


def headroom(cache: SessionAwareCache) -> Headroom:
    """Return what the accounts say now."""
    accounts, stores = cache.accounts(), cache.inspect().stores
    usable_rows = stores.rows.num_free
    if stores.recurrent is not None:
        states = accounts[stores.recurrent.pool]
        usable_rows -= ceil(stores.rows.num_rows * states.quarantine / (states.pages - 1))
    return Headroom(
        free_pages={pool: held.free for pool, held in accounts.items()},
        evictable_pages={
            pool: held.tree_evictable + cache.tails.num_pages[pool]
            for pool, held in accounts.items()
        },
        free_rows=stores.rows.num_free,
        usable_rows=usable_rows,
    )
