"""The real cache with eyes: it counts what happened inside, and can be made to run out."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from cache.errors import AuditFailed, OutOfPages, OutOfRows, PinQuotaExceeded
from cache.pages import Allocation
from cache.radix import RadixCache
from cache.radix_node import LockReceipt, MatchResult, PagesByPool, RadixNode
from cache.session_cache import SessionAwareCache
from cache.spec import CacheSpec, Capacity
from cache.stores import KVStores
from cache.types import (
    NULL_PAGE,
    Holder,
    Namespace,
    PoolName,
    Retention,
    SessionId,
    SlotState,
    TableWrite,
    Tokens,
    TurnId,
    pages_for,
)
from cache.views import SlotView, TurnLoan
from session_server.sim.faults import Site

Strikes = Callable[[Site], bool]
"""Whether a fault strikes at a site, asked each time that it could."""


class WatchedTree(RadixCache):
    """Counts what shapes the tree."""

    __slots__ = ("_forgetful", "reached")

    def __init__(self, stores: KVStores, reached: Counter[str]) -> None:
        super().__init__(stores.page_size, stores.ledgers, stores.components)
        self.reached = reached
        self._forgetful = frozenset(component.pool for component in stores.forgetful)

    def advance(self, receipt: LockReceipt, match: MatchResult) -> PagesByPool:
        """See `RadixCache`."""
        self.reached["match"] += match.matched_len > 0
        if self._forgetful:
            self.reached["match of a window"] += match.matched_len > 0
        return super().advance(receipt, match)

    def insert(
        self, receipt: LockReceipt, tokens: Tokens, pages: Mapping[PoolName, Sequence[int]]
    ) -> PagesByPool:
        """See `RadixCache`."""
        found = super().insert(receipt, tokens, pages)
        self.reached["publish"] += 1
        self.reached["publish duplicate"] += any(found.values())
        for pool in self._forgetful:
            pairs = zip(pages[pool], found[pool], strict=False)
            self.reached["tombstone published"] += NULL_PAGE in pages[pool]
            self.reached["tombstone filled"] += any(mine and mine == its for mine, its in pairs)
        return found

    def take_back(self, receipt: LockReceipt, to_len: int, holder: Holder) -> PagesByPool:
        """See `RadixCache`."""
        taken = super().take_back(receipt, to_len, holder)
        self.reached["published pages taken back"] += any(taken.values())
        return taken

    def evict(self, pool: PoolName, num_pages: int) -> PagesByPool:
        """See `RadixCache`."""
        evicted = super().evict(pool, num_pages)
        self.reached["evict"] += any(evicted.values())
        self.reached["tombstone"] += pool in self._forgetful and bool(evicted[pool])
        return evicted

    def _split(self, node: RadixNode, length: int) -> RadixNode:
        self.reached["node split"] += 1
        self.reached["locked node split"] += node.lock_count > 0
        return super()._split(node, length)


class WatchedCache(SessionAwareCache):
    """`touched`: sessions whose pages changed hands since somebody looked."""

    def __init__(
        self,
        spec: CacheSpec,
        capacity: Capacity,
        *,
        pinned_quota_pages: int,
        allocation: Allocation,
        strikes: Strikes,
        reached: Counter[str],
    ) -> None:
        super().__init__(
            spec, capacity, pinned_quota_pages=pinned_quota_pages, allocation=allocation
        )
        self.reached = reached
        self.touched: dict[SessionId, None] = {}
        self._strikes = strikes
        self._of_turn: dict[TurnId, SessionId] = {}
        self._pinned_quota_pages = pinned_quota_pages
        tree = WatchedTree(self.stores, reached)
        self.stores = dataclasses.replace(self.stores, tree=tree)

    def open(
        self,
        session_id: SessionId,
        *,
        namespace: Namespace,
        tokens: Sequence[int] | Tokens = (),
        retention: Retention = Retention.RECLAIMABLE,
    ) -> None:
        """See `SessionAwareCache`."""
        is_pinned = retention is Retention.PINNED
        with self._pinning(session_id, max(1, len(tokens)) if is_pinned else 0):
            super().open(session_id, namespace=namespace, tokens=tokens, retention=retention)

    def begin_turn(
        self,
        session_id: SessionId,
        turn_id: TurnId,
        *,
        base_len: int,
        new_tokens: Sequence[int] | Tokens,
        now: float,
        max_reuse_len: int | None = None,
    ) -> TurnLoan:
        """See `SessionAwareCache`."""
        if self._strikes(Site.ALLOC_ROW):
            self.reached["fault alloc_row"] += 1
            raise OutOfRows("injected")
        is_pinned = self.slot(session_id).retention is Retention.PINNED
        with self._pinning(session_id, base_len + len(new_tokens) if is_pinned else 0):
            loan = super().begin_turn(
                session_id,
                turn_id,
                base_len=base_len,
                new_tokens=new_tokens,
                now=now,
                max_reuse_len=max_reuse_len,
            )
        self._of_turn[turn_id] = session_id
        self.touched[session_id] = None
        return loan

    def grow(self, turn_id: TurnId, to_len: int) -> list[TableWrite]:
        """See `SessionAwareCache`."""
        if self._strikes(Site.ALLOC_PAGE):
            self.reached["fault alloc_page"] += 1
            raise OutOfPages("injected")
        return super().grow(turn_id, to_len)

    def record(
        self, turn_id: TurnId, computed_len: int, new_tokens: Sequence[int] = ()
    ) -> list[TableWrite]:
        """See `SessionAwareCache`."""
        windows = [component.pool for component in self.stores.forgetful]
        before = [self.stores.ledgers[pool].num_free for pool in windows]
        writes = super().record(turn_id, computed_len, new_tokens)
        after = [self.stores.ledgers[pool].num_free for pool in windows]
        self.reached["window released"] += after > before
        return writes

    def end_turn(self, turn_id: TurnId, keep_len: int, *, now: float) -> list[TableWrite]:
        """See `SessionAwareCache`."""
        self._let_go(turn_id)
        return super().end_turn(turn_id, keep_len, now=now)

    def discard(self, turn_id: TurnId, *, now: float) -> None:
        """See `SessionAwareCache`."""
        self._let_go(turn_id)
        self.reached["discard"] += 1
        super().discard(turn_id, now=now)

    def retract(self, turn_id: TurnId, *, now: float) -> Tokens:
        """See `SessionAwareCache`."""
        self._let_go(turn_id)
        self.reached["retract"] += 1
        return super().retract(turn_id, now=now)

    def cool(self, session_id: SessionId) -> None:
        """See `SessionAwareCache`."""
        self.touched[session_id] = None
        self.reached["cool"] += 1
        super().cool(session_id)

    def close(self, session_id: SessionId) -> bool:
        """See `SessionAwareCache`."""
        is_gone = super().close(session_id)
        self.reached["close deferred"] += not is_gone
        return is_gone

    @contextmanager
    def _pinning(self, session_id: SessionId, num_tokens: int) -> Iterator[None]:
        """A pinned session asks for room for `num_tokens` (0: it is not pinned): the answer is
        what counting everybody's pages says."""
        page_size, others = self.stores.page_size, list[SlotView]()
        if num_tokens:
            others = [s for s in self.slots() if s.session_id != session_id]
            others = [s for s in others if s.retention is Retention.PINNED]
        num_rows = sum(slot.state is not SlotState.COLD for slot in others)
        row_pages = [slot.allocated_len // page_size for slot in others]
        row_pages.append(pages_for(num_tokens, page_size))
        is_over = any(
            sum(map(component.parked_pages, row_pages)) > self._quota(component.pool)
            for component in self.stores.components
        )
        is_over = num_tokens > 0 and (is_over or num_rows >= self.stores.rows.num_rows - 1)
        try:
            yield
        except PinQuotaExceeded:
            if not is_over:
                raise AuditFailed(f"{session_id} was refused a pin that has room") from None
            raise
        if is_over:
            raise AuditFailed(f"{session_id} was pinned beyond the quota")

    def _quota(self, pool: PoolName) -> int:
        usable = {name: ledger.num_pages - 1 for name, ledger in self.stores.ledgers.items()}
        return usable[pool] * self._pinned_quota_pages // max(usable.values())

    def _let_go(self, turn_id: TurnId) -> None:
        self.touched[self._of_turn.pop(turn_id)] = None
