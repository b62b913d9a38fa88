"""`KVStores`: hold the structures that own every page, row and published token of one server."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from cache.changes import Changes
from cache.components import Component, RecurrentState, components_of
from cache.ledger import Ledger
from cache.pages import Extents, PageAllocator
from cache.radix import RadixCache
from cache.req_to_token import ReqToTokenPool
from cache.spec import CacheSpec, Capacity
from cache.types import NULL_PAGE, Holder, PoolName, pages_for


@dataclass(frozen=True, slots=True)
class StoreParts:
    """Choose the free list of each pool and the tree; tests bring their own."""

    free_list: type[Extents] = Extents
    tree: Callable[..., RadixCache] = RadixCache


@dataclass(frozen=True, slots=True)
class KVStores:
    """Hold the stores of one cache.

    `bounded`: the components of bounded pools. `recurrent`: the one of them whose pages are states,
    if any. `paged`: the ledgers of all pools but the recurrent one. `quarantined`: per pool, the
    pages that are never used again. `changes`: records changes, for recounts made in slices.
    """

    page_size: int
    components: tuple[Component, ...]
    bounded: Mapping[PoolName, Component]
    recurrent: RecurrentState | None
    ledgers: Mapping[PoolName, Ledger]
    paged: Mapping[PoolName, Ledger]
    allocators: Mapping[PoolName, PageAllocator]
    rows: ReqToTokenPool
    tree: RadixCache
    quarantined: Mapping[PoolName, list[int]]
    changes: Changes

    @classmethod
    def empty(
        cls,
        spec: CacheSpec,
        capacity: Capacity,
        parts: StoreParts,
        *,
        changes: Changes,
        quarantined: Mapping[PoolName, Iterable[int]] | None = None,
    ) -> KVStores:
        """Create stores in which every page is free or in quarantine.

        `changes` is shared with earlier stores of the same cache. `quarantined` comes from accounts
        that may be wrong: ids that are no page of the pool, or come twice, are passed over.
        """
        components = components_of(spec)
        recurrent = [c for c in components if isinstance(c, RecurrentState)]
        others = [c for c in components if c not in recurrent]
        # With windows beside states, a match that one cuts would have to be checked by the other.
        if recurrent and (len(recurrent) > 1 or not others or any(c.is_bounded for c in others)):
            raise ValueError("states of one kind are kept, beside layers that keep every position")
        pools = [component.pool for component in components]
        num_pages = capacity.pool_pages(spec)
        ledgers = {pool: Ledger(pool, num_pages[pool]) for pool in pools}
        allocators = {pool: PageAllocator(ledgers[pool], parts.free_list) for pool in pools}
        row_pages = pages_for(capacity.max_context_len, spec.page_size)
        known_bad = quarantined or {}
        withheld = {pool: _quarantine(allocators[pool], known_bad.get(pool, ())) for pool in pools}
        return cls(
            page_size=spec.page_size,
            components=components,
            bounded={c.pool: c for c in components if c.is_bounded},
            recurrent=recurrent[0] if recurrent else None,
            ledgers=ledgers,
            paged={c.pool: ledgers[c.pool] for c in components if c not in recurrent},
            allocators=allocators,
            rows=ReqToTokenPool(capacity.num_rows, row_pages, pools),
            tree=parts.tree(spec.page_size, ledgers, components, changes),
            quarantined=withheld,
            changes=changes,
        )

    def evict(self, pool: PoolName, num_pages: int) -> None:
        """Free as many unlocked published pages of one pool, least recently used first."""
        if num_pages <= 0:
            return
        for name, pages in self.tree.evict(pool, num_pages).items():
            self.allocators[name].release(pages, Holder.TREE)


def _quarantine(allocator: PageAllocator, pages: Iterable[int]) -> list[int]:
    """Move pages of an all-free pool to quarantine; return those that are pages of the pool."""
    ledger = allocator.ledger
    quarantined = sorted({page for page in pages if NULL_PAGE < page < ledger.num_pages})
    if quarantined:
        taken = allocator.acquire(ledger.num_free, Holder.ACTIVE)
        allocator.release(set(taken).difference(quarantined), Holder.ACTIVE)
        ledger.transfer(len(quarantined), Holder.ACTIVE, Holder.QUARANTINE)
    return quarantined
