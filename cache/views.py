"""Define the values that `SessionAwareCache` returns: made per call, owned by the caller. Only
`TurnLoan` is a live view."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from cache.lease import KVLease
from cache.pinned_quota import PinnedQuota
from cache.session_slot import SessionSlot, Tail
from cache.stores import KVStores
from cache.types import (
    Namespace,
    PoolName,
    Retention,
    RowId,
    SessionId,
    SlotState,
    StateMoves,
    TableWrite,
    TurnId,
)


@dataclass(frozen=True, slots=True, eq=False)
class TurnLoan:
    """Give read-only access to a turn's borrowed lease: its row and lengths as they are now, until
    the turn ends.

    `cached_len`: positions whose KV was valid when the lease was lent; computing starts there. The
    last `tail_len` of them were a tail. `table_writes`: entries of the row that the device did not
    have then.
    """

    _lease: KVLease
    cached_len: int
    table_writes: tuple[TableWrite, ...]
    tail_len: int = 0

    @property
    def row(self) -> RowId:
        """Return the row of the page table that attention reads."""
        return self._lease.row

    @property
    def computed_len(self) -> int:
        """Return the number of positions whose KV is valid."""
        return self._lease.computed_len

    @property
    def capacity_len(self) -> int:
        """Return the tokens that the turn's pages have room for."""
        return self._lease.capacity_len

    def num_private(self, pool: PoolName) -> int:
        """Return how many private pages of a pool the turn holds."""
        return self._lease.num_private(pool)

    def retractable_pages(self) -> Mapping[PoolName, int]:
        """Return the pages, per pool, that retracting the turn now would make free or evictable."""
        return self._lease.freed_pages()

    def state_moves(self, start: int, end: int, num_drafts: int = 0) -> StateMoves | None:
        """Return which states a forward over positions [start, end) reads and writes, the last
        `num_drafts` positions being drafts. Call `grow` before. None without a recurrent pool."""
        return self._lease.state_moves(start, end, num_drafts)


@dataclass(frozen=True, slots=True, eq=False)
class TailView:
    """Give read-only access to a session whose tail grows: its row and lengths as they are now,
    while `tail` is the one it has. `table_writes`: entries of the row that the device did not have
    when the tail began."""

    _lease: KVLease
    tail: Tail
    table_writes: tuple[TableWrite, ...]

    @property
    def row(self) -> RowId:
        """Return the row of the page table that attention reads."""
        return self._lease.row

    @property
    def computed_len(self) -> int:
        """Return the number of positions whose KV is valid."""
        return self._lease.computed_len

    def state_moves(self, start: int, end: int) -> StateMoves | None:
        """Return which states a forward over positions [start, end) reads and writes. Call
        `Tails.grow` before. None without a recurrent pool."""
        return self._lease.state_moves(start, end)


class Headroom(NamedTuple):
    """Count what could be handed out: pages that are free, of tails, or evictable and kept by no
    tenant's minimum, in the order of `SessionAwareCache.paged_pools`; and free rows."""

    pages: tuple[int, ...]
    num_rows: int

    @classmethod
    def of(
        cls, stores: KVStores, tails: Mapping[PoolName, int], guarded: Mapping[PoolName, int]
    ) -> Headroom:
        """Count it, with the pages of `tails` and those of `guarded`, which are kept."""
        ledgers = stores.paged.items()
        pages = [
            each.num_free + each.num_evictable + tails[pool] - guarded[pool]
            for pool, each in ledgers
        ]
        num_rows = stores.rows.num_free
        if stores.recurrent is not None:
            states = stores.ledgers[stores.recurrent.pool]
            # A row comes with its states: for those in quarantine, as many rows are of no use.
            num_rows += -states.num_quarantined * stores.rows.num_rows // (states.num_pages - 1)
        return cls(tuple(pages), num_rows)


class TurnLimits(NamedTuple):
    """Bound what one turn takes. `max_turn_pages`: the most pages that it holds at a time beyond
    those of its session, in the order of `SessionAwareCache.paged_pools`. `max_turn_len`: tokens
    of the longest context that a turn can reach if it has the pools to itself."""

    max_turn_pages: tuple[int, ...]
    max_turn_len: int

    @classmethod
    def of(
        cls, stores: KVStores, pinned: PinnedQuota, max_len: int, *, num_ahead: int
    ) -> TurnLimits:
        """Return the limits that follow from the sizes of the pools.

        Pages of the pinned quota are not available to a turn. A bounded pool that holds the window
        at a turn's start and the pages of its next forwards holds a turn of any length.
        `max_len`: tokens that a row can address. `num_ahead`: positions that may be launched and
        not settled.
        """
        row_pages, max_turn_pages = stores.rows.row_pages, []
        for component in stores.components:
            if component.pool not in stores.paged:
                continue  # every row comes with its own states
            most = component.running_pages(row_pages, num_ahead)
            usable = stores.ledgers[component.pool].num_pages - 1
            usable -= pinned.quota_pages[component.pool]
            if not component.is_bounded or component.parked_pages(row_pages) + most > usable:
                max_len = min(max_len, usable * stores.page_size)
            max_turn_pages.append(most)
        return cls(tuple(max_turn_pages), max_len)


class CacheParts(NamedTuple):
    """Hold the parts of a cache, for `cache.checker` and tests."""

    stores: KVStores
    slots: Mapping[SessionId, SessionSlot]


@dataclass(frozen=True, slots=True)
class ParkedSession:
    """Describe a parked session and the pages, per pool, that cooling it now would free.

    Pages shared with another parked session count for neither, so cooling both may free more.
    """

    session_id: SessionId
    freed_pages: Mapping[PoolName, int]


class SlotView(NamedTuple):
    """Describe one session at one moment. Lengths are tokens; `num_tokens` is the history's. The
    last `tail_len` of `committed_len` go with its tail."""

    session_id: SessionId
    namespace: Namespace
    retention: Retention
    state: SlotState
    borrower: TurnId | None
    num_tokens: int
    protected_len: int
    committed_len: int
    allocated_len: int
    tail_len: int
    protected_pages: Mapping[PoolName, int]
    private_pages: Mapping[PoolName, int]

    @classmethod
    def of(cls, slot: SessionSlot, pools: Iterable[PoolName]) -> SlotView:
        """Return a slot as it is now, with its pages in each of `pools`."""
        lease = slot.lease
        return cls(
            session_id=slot.session_id,
            namespace=slot.namespace,
            retention=slot.retention,
            state=slot.state,
            borrower=slot.borrower,
            num_tokens=slot.history_len,
            protected_len=slot.cache_protected_len,
            committed_len=slot.kv_committed_len,
            allocated_len=slot.kv_allocated_len,
            tail_len=lease.computed_len - lease.base_len if lease and slot.tail else 0,
            protected_pages={pool: lease.num_protected(pool) if lease else 0 for pool in pools},
            private_pages={pool: lease.num_private(pool) if lease else 0 for pool in pools},
        )


@dataclass(frozen=True, slots=True)
class TenantShare:
    """Tell what one tenant may count on; valid until the cache changes.

    `is_guarding`: whether the minimums of tenants are kept, see `ParkedQueue.is_guarding`.
    """

    tenant: str
    _stores: KVStores
    is_guarding: bool

    def lock_cost(self, evictable: Mapping[PoolName, int]) -> tuple[int, ...]:
        """Return the headroom that is gone, per paged pool, once so many of its evictable pages are
        locked."""
        tenants, pools = self._stores.tree.tenants, self._stores.paged
        if not self.is_guarding:
            return tuple([evictable[pool] for pool in pools])
        return tuple([tenants.lock_cost(self.tenant, pool, evictable[pool]) for pool in pools])

    @property
    def reserved_pages(self) -> tuple[int, ...]:
        """Return the pages, per paged pool, that other tenants lack of their minimums."""
        tenants = self._stores.tree.tenants
        mine = tenants[self.tenant].unheld
        return tuple([tenants.unheld[pool] - mine[pool] for pool in self._stores.paged])
