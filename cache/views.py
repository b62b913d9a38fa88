"""What the façade answers: frozen values, made per call, owned by the caller."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from cache.lease import KVLease
from cache.pinned_quota import PinnedQuota
from cache.session_slot import SessionSlot
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
    """A turn's borrowed lease, read-only: row and lengths are the lease's own, at any moment until
    the turn ends.

    `cached_len`: positions whose KV was there when it was lent; computing starts at it.
    `table_writes`: entries that the device did not know then.
    """

    _lease: KVLease
    cached_len: int
    table_writes: tuple[TableWrite, ...]

    @property
    def row(self) -> RowId:
        """The row that attention reads."""
        return self._lease.row

    @property
    def computed_len(self) -> int:
        """Positions whose KV is valid."""
        return self._lease.computed_len

    @property
    def capacity_len(self) -> int:
        """Tokens that the pages of the turn have room for."""
        return self._lease.capacity_len

    def num_private(self, pool: PoolName) -> int:
        """Return how many pages of a pool no other session can see."""
        return self._lease.num_private(pool)

    def retractable_pages(self) -> Mapping[PoolName, int]:
        """Return what retracting the turn would make free or evictable, per pool, now."""
        return self._lease.freed_pages()

    def state_moves(self, start: int, end: int, num_drafts: int = 0) -> StateMoves | None:
        """Return what a forward over [start, end), for which the turn has grown, does to a
        recurrent state; the last `num_drafts` positions are guesses. None without such a state."""
        return self._lease.state_moves(start, end, num_drafts)


class Headroom(NamedTuple):
    """What could be handed out: pages that are free or evictable, in the order of
    `SessionAwareCache.paged_pools`, and free rows."""

    pages: tuple[int, ...]
    num_rows: int


class TurnLimits(NamedTuple):
    """`most_pages`: what a turn adds at a time, at most, to the pages of its session, in the order
    of `SessionAwareCache.paged_pools`. `max_len`: the longest context that it may reach with the
    pools to itself."""

    most_pages: tuple[int, ...]
    max_len: int

    @classmethod
    def of(
        cls, stores: KVStores, pinned: PinnedQuota, max_len: int, *, num_ahead: int
    ) -> TurnLimits:
        """Return what the pools give.

        Pinned sessions may keep their quota. Where pools are bounded, a pool that holds what a turn
        reads at a time, along with the window that it began at, holds a turn of any length.

        Args:
            stores: the pools.
            pinned: the quota of pinned sessions.
            max_len: tokens that a row can address.
            num_ahead: positions that may be launched beyond what is settled.
        """
        row_pages, most_pages = stores.rows.row_pages, []
        for component in stores.components:
            if component.pool not in stores.paged:
                continue  # a row comes with its states
            most = component.running_pages(row_pages, num_ahead)
            usable = stores.ledgers[component.pool].num_pages - 1
            usable -= pinned.quota_pages[component.pool]
            if not component.is_bounded or component.parked_pages(row_pages) + most > usable:
                max_len = min(max_len, usable * stores.page_size)
            most_pages.append(most)
        return cls(tuple(most_pages), max_len)


class CacheParts(NamedTuple):
    """What a cache is made of, for `cache.checker` and for tests."""

    stores: KVStores
    slots: Mapping[SessionId, SessionSlot]


@dataclass(frozen=True, slots=True)
class ParkedSession:
    """A parked session and what cooling it gives back, per pool, now.

    Pages shared with another parked session count for neither, so cooling both may free more.
    """

    session_id: SessionId
    freed_pages: Mapping[PoolName, int]


class SlotView(NamedTuple):
    """One session at one moment. Lengths are tokens; `num_tokens` is the history's."""

    session_id: SessionId
    namespace: Namespace
    retention: Retention
    state: SlotState
    borrower: TurnId | None
    num_tokens: int
    protected_len: int
    committed_len: int
    allocated_len: int
    protected_pages: Mapping[PoolName, int]
    private_pages: Mapping[PoolName, int]

    @classmethod
    def of(cls, slot: SessionSlot, pools: Iterable[PoolName]) -> SlotView:
        """A slot as it is now, with its pages in each of `pools`."""
        lease = slot.lease
        return cls(
            session_id=slot.session_id,
            namespace=slot.namespace,
            retention=slot.retention,
            state=slot.state,
            borrower=slot.borrower,
            num_tokens=len(slot.tokens),
            protected_len=slot.cache_protected_len,
            committed_len=slot.kv_committed_len,
            allocated_len=slot.kv_allocated_len,
            protected_pages={pool: lease.num_protected(pool) if lease else 0 for pool in pools},
            private_pages={pool: lease.num_private(pool) if lease else 0 for pool in pools},
        )
