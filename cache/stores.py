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
from cache.transit import Transit, TransitId
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
    `transits`: pages on their way. `fenced`: per copy that was under way when the stores were
    replaced, the pages that it may still write.
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
    transits: dict[TransitId, Transit]
    fenced: dict[TransitId, Mapping[PoolName, list[int]]]

    @classmethod
    def empty(
        cls,
        spec: CacheSpec,
        capacity: Capacity,
        parts: StoreParts,
        *,
        changes: Changes,
        before: KVStores | None = None,
    ) -> KVStores:
        """Create stores in which every page is free, in quarantine or fenced.

        `changes` is shared with earlier stores of the same cache. `before`: those that these
        replace. Its accounts may be wrong: ids that are no page of the pool, or come twice, are
        passed over.
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
        known_bad = {} if before is None else before.quarantined
        withheld = {
            pool: _withhold(allocators[pool], known_bad.get(pool, ()), Holder.QUARANTINE)
            for pool in pools
        }
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
            transits={},
            fenced={} if before is None else _fence(allocators, before),
        )

    def evict(self, pool: PoolName, num_pages: int) -> None:
        """Free as many unlocked published pages of one pool, least recently used first."""
        if num_pages <= 0:
            return
        for name, pages in self.tree.evict(pool, num_pages).items():
            self.allocators[name].release(pages, Holder.TREE)


def _withhold(allocator: PageAllocator, pages: Iterable[int], holder: Holder) -> list[int]:
    """Move free pages to the account of `holder`; return those that are free pages of the pool."""
    ledger = allocator.ledger
    withheld = sorted({page for page in pages if NULL_PAGE < page < ledger.num_pages})
    if withheld:
        free = allocator.acquire(ledger.num_free, Holder.ACTIVE)
        withheld = sorted(set(free).intersection(withheld))
        allocator.release(set(free).difference(withheld), Holder.ACTIVE)
        ledger.transfer(len(withheld), Holder.ACTIVE, holder)
    return withheld


def _fence(
    allocators: Mapping[PoolName, PageAllocator], before: KVStores
) -> dict[TransitId, Mapping[PoolName, list[int]]]:
    """Keep the pages that a copy may still write from being used until it has ended."""
    written = {
        number: {pool: each.pages.tolist() for pool, each in transit.pages.items()}
        for number, transit in before.transits.items()
        if transit.is_incoming
    }
    return {
        number: {
            pool: _withhold(allocators[pool], ids, Holder.FENCED) for pool, ids in pages.items()
        }
        for number, pages in (before.fenced | written).items()
    }
