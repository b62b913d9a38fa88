"""The real cache with eyes: it counts what happened inside, and can be made to run out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import numpy as np

from cache.capacity import BoundedPools
from cache.changes import Changes
from cache.components import Component, RecurrentState
from cache.errors import AuditFailed, OutOfPages, OutOfRows, PinQuotaExceeded
from cache.ledger import Ledger
from cache.page_copies import PageCopies, Wanted
from cache.radix import RadixCache
from cache.radix_node import LockReceipt, MatchResult, PagesByPool, RadixNode, Walk
from cache.room import Room
from cache.session_cache import SessionAwareCache
from cache.session_slot import SessionSlot
from cache.stores import KVStores, StoreParts
from cache.tails import Tails
from cache.transit import Transit, TransitId
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
from cache.views import SlotView, TailView, TurnLoan
from tests.cache.free_lists import FREE_LISTS
from tests.sim.faults import Site
from tests.sim.hand_engine import Sizes

Strikes = Callable[[Site], bool]
"""Whether a fault strikes at a site, asked each time that it could."""


class WatchedTree(RadixCache):
    """Counts what shapes the tree, in pools of windows and of states apart."""

    __slots__ = ("_states", "_windows", "reached")

    def __init__(
        self,
        page_size: int,
        ledgers: Mapping[PoolName, Ledger],
        components: Sequence[Component],
        changes: Changes,
        *,
        reached: Counter[str],
    ) -> None:
        super().__init__(page_size, ledgers, components, changes)
        self.reached = reached
        states = [c.pool for c in components if isinstance(c, RecurrentState)]
        self._states = states[0] if states else None
        self._windows = frozenset(c.pool for c in components if c.is_bounded) - {*states}

    def advance(self, receipt: LockReceipt, match: MatchResult) -> PagesByPool:
        """See `RadixCache`."""
        if match.matched_len > 0:
            self.reached["match"] += 1
            self.reached["match of a window"] += bool(self._windows)
            self.reached["match of a snapshot"] += self._states is not None
        return super().advance(receipt, match)

    def insert(
        self, receipt: LockReceipt, tokens: Tokens, pages: Mapping[PoolName, Sequence[int]]
    ) -> PagesByPool:
        """See `RadixCache`."""
        found = super().insert(receipt, tokens, pages)
        self.reached["publish"] += 1
        self.reached["publish duplicate"] += any(found.values())
        for pool in self._windows:
            self.reached["tombstone published"] += NULL_PAGE in pages[pool]
            self.reached["tombstone filled"] += _has_filled(pages[pool], found[pool])
        if self._states is not None:
            mine, its = pages[self._states], found[self._states]
            self.reached["snapshot published"] += any(mine[len(its) :])
            self.reached["snapshot brought back"] += _has_filled(mine, its)
        return found

    def unpublish(self, receipt: LockReceipt, to_len: int, holder: Holder) -> PagesByPool:
        """See `RadixCache`."""
        taken = super().unpublish(receipt, to_len, holder)
        self.reached["published pages taken back"] += any(taken.values())
        if self._states is not None:
            self.reached["snapshot taken back"] += any(taken[self._states])
        return taken

    def evict(self, pool: PoolName, num_pages: int) -> PagesByPool:
        """See `RadixCache`."""
        num_guarded = self.tenants.guarded[pool]
        before = self._stakes(pool)
        evicted = super().evict(pool, num_pages)
        _check_givers(before, self._stakes(pool))
        self.reached["evict"] += any(evicted.values())
        self.reached["evict beside another tenant"] += len(self.tenants) > 1
        num_left = self.tenants.guarded[pool]
        self.reached["evict and spare a minimum"] += 0 < num_guarded <= num_left
        self.reached["evict from a minimum"] += num_left < num_guarded
        self.reached["tombstone"] += pool in self._windows and bool(evicted[pool])
        if self._states is not None:
            is_alone = pool == self._states
            name = "snapshot evicted" if is_alone else "snapshot evicted with its page"
            self.reached[name] += bool(evicted[self._states])
        return evicted

    def _stakes(self, pool: PoolName) -> dict[str, Stake]:
        """What each tenant has of a pool, by what docs/memory.md says of minimums."""
        accounts = dict(self.tenants.items())
        weights = [account.weight for account in accounts.values() if account.num_sessions]
        unit = self.tenants._unit or 1  # which of those it may be depends on what was before
        if len(weights) > 1 and not (sum(weights) <= unit <= 4 * sum(weights)):
            raise AuditFailed(f"weights of {sum(weights)} in all are parts of {unit}")
        num_usable = self._ledgers[pool].num_pages - 1 if len(weights) > 1 else 0
        return {
            tenant: Stake(
                held=account.held[pool],
                protected=account.protected[pool],
                minimum=num_usable * account.weight // (2 * unit) if account.num_sessions else 0,
                weight=account.weight,
            )
            for tenant, account in accounts.items()
        }

    def _match_result(self, receipt: LockReceipt | None, walk: Walk, matched: int) -> MatchResult:
        found = super()._match_result(receipt, walk, matched)
        if self._states is not None:
            self.reached["match cut back to a snapshot"] += found.matched_len < matched
        return found

    def _split(self, node: RadixNode, length: int) -> RadixNode:
        self.reached["node split"] += 1
        self.reached["locked node split"] += node.lock_ref > 0
        return super()._split(node, length)


def _check_givers(before: Mapping[str, Stake], after: Mapping[str, Stake]) -> None:
    """Who gives has more for its weight than whoever keeps what could be taken, and has its minimum
    still while anybody has more than that."""
    keepers = [stake for stake in after.values() if stake.num_spare > 0]
    for tenant, had in before.items():
        # Without a session a tenant is forgotten with its last page.
        num_given = had.held - (after[tenant].held if tenant in after else 0)
        if num_given > had.num_spare and keepers:
            raise AuditFailed(f"{tenant} gave {num_given} pages, of which {had.num_spare} to spare")
        for keeper in keepers:
            # In millionths, as finely as they are told apart.
            is_less = had.held / had.weight < keeper.held / keeper.weight - 2e-6
            if num_given > 0 and is_less:
                raise AuditFailed(
                    f"{tenant} gave {num_given} pages of {had}, and {keeper} has more"
                )


def window_pools(stores: KVStores) -> Iterator[PoolName]:
    """The pools whose pages a window passes."""
    return (p for p, c in stores.bounded.items() if c is not stores.recurrent)


def _has_filled(mine: Sequence[int], its: Sequence[int]) -> bool:
    """Whether a published page is the tree's now, where it knew the tokens before."""
    return any(page != NULL_PAGE and page == kept for page, kept in zip(mine, its, strict=False))


class Stake(NamedTuple):
    """Pages of a pool that a tenant has in the tree: all, and those that are locked; those that it
    is to keep; and what its share weighs."""

    held: int
    protected: int
    minimum: int
    weight: int

    @property
    def num_spare(self) -> int:
        """Pages that can be taken before its minimum."""
        return min(self.held - self.protected, max(0, self.held - self.minimum))


class WatchedTails(Tails):
    """Counts what becomes of drafts. `cache` is told of sessions whose pages changed hands."""

    def __init__(self, cache: WatchedCache, strikes: Strikes) -> None:
        super().__init__(cache.stores, cache.inspect().slots, cache.parked)
        self._cache, self._strikes = cache, strikes

    def begin(
        self, session_id: SessionId, base_len: int, tokens: Sequence[int] | Tokens
    ) -> TailView:
        """See `Tails`."""
        reached = self._cache.reached
        if self._strikes(Site.ALLOC_ROW):
            reached["fault alloc_row"] += 1
            raise OutOfRows("injected")
        before = self._slots[session_id].tail
        view = super().begin(session_id, base_len, tokens)
        self._cache.touched[session_id] = None
        reached["draft of a cold session"] += before is None and view.tail.made_resident
        reached["draft of a resident session"] += before is None and not view.tail.made_resident
        return view

    def grow(self, session_id: SessionId, to_len: int) -> list[TableWrite]:
        """See `Tails`."""
        self._cache.touched[session_id] = None
        if self._strikes(Site.ALLOC_PAGE):
            self._cache.reached["fault alloc_page"] += 1
            raise OutOfPages("injected")
        return super().grow(session_id, to_len)

    def take(self, slot: SessionSlot, to_len: int) -> int:
        """See `Tails`."""
        self._cache.reached["tail taken by a turn"] += slot.tail is not None
        return super().take(slot, to_len)

    def drop(self, session_id: SessionId) -> None:
        """See `Tails`."""
        self._cache.touched[session_id] = None
        super().drop(session_id)

    def forget(self, slot: SessionSlot) -> None:
        """See `Tails`. What was drafted is no part of the history."""
        start = slot.tail.start if slot.tail is not None else slot.history_len
        super().forget(slot)
        if slot.history_len != start:
            raise AuditFailed(f"{slot.session_id} has {slot.history_len} tokens, {start} were said")

    def reclaim(self, pool: PoolName, num_pages: int) -> None:
        """See `Tails`."""
        self._cache.reached["tails dropped for pages"] += self.num_pages[pool] > 0
        super().reclaim(pool, num_pages)


class WatchedCopies(PageCopies):
    """Sees that a session can go on from what has come in, to its end."""

    def __init__(self, cache: WatchedCache, *, num_begun: int) -> None:
        super().__init__(cache.stores, Room(cache.stores, cache.tails), num_begun=num_begun)
        self._cache = cache
        self._coming: dict[TransitId, tuple[Namespace, Tokens]] = {}

    def begin_in(
        self, namespace: Namespace, tokens: Tokens, wanted: Wanted, *, is_ahead: bool = False
    ) -> Transit | None:
        """See `PageCopies`."""
        transit = super().begin_in(namespace, tokens, wanted, is_ahead=is_ahead)
        if transit is not None:
            self._coming[transit.number] = (namespace, tokens[: transit.end].copy())
        return transit

    def end_in(self, transit: Transit, *, is_whole: bool) -> bool:
        """See `PageCopies`."""
        is_used = super().end_in(transit, is_whole=is_whole)
        namespace, tokens = self._coming.pop(transit.number, (None, None))
        if is_used and namespace is not None and tokens is not None:
            found = self._cache.peek(np.append(tokens, np.int32(0)), namespace)
            if found.matched_len < transit.end:
                text = f"{transit.end} positions came in, and {found.matched_len} can be used"
                raise AuditFailed(text)
        return is_used


class WatchedCache(SessionAwareCache):
    """`touched`: sessions whose pages changed hands since somebody looked."""

    def __init__(self, sizes: Sizes, *, strikes: Strikes, reached: Counter[str]) -> None:
        pinned_quota_pages = sizes.pinned_quota_pages
        super().__init__(
            sizes.layers.spec(sizes.page_size),
            sizes.capacity,
            pinned_quota_pages=pinned_quota_pages,
            parts=StoreParts(FREE_LISTS[sizes.allocation], partial(WatchedTree, reached=reached)),
        )
        self.reached = reached
        self.touched: dict[SessionId, None] = {}
        self._strikes = strikes
        self._of_turn: dict[TurnId, SessionId] = {}
        self._way_back: dict[TurnId, int] = {}
        self._pinned_quota_pages = pinned_quota_pages
        self._states_per_row = BoundedPools(num_drafts=sizes.num_drafts).states_per_row
        self._watch()

    @property
    def stores(self) -> KVStores:
        """What is behind the verbs."""
        return self.inspect().stores

    def open(
        self,
        session_id: SessionId,
        *,
        namespace: Namespace,
        tokens: Sequence[int] | Tokens = (),
        retention: Retention = Retention.RECLAIMABLE,
        tenant_weight: int | None = None,
    ) -> None:
        """See `SessionAwareCache`."""
        is_pinned = retention is Retention.PINNED
        with self._pinning(session_id, max(1, len(tokens)) if is_pinned else 0):
            super().open(
                session_id,
                namespace=namespace,
                tokens=tokens,
                retention=retention,
                tenant_weight=tenant_weight,
            )

    def begin_turn(
        self,
        session_id: SessionId,
        turn_id: TurnId,
        *,
        base_len: int,
        new_tokens: Sequence[int] | Tokens,
        max_reuse_len: int | None = None,
    ) -> TurnLoan:
        """See `SessionAwareCache`."""
        if self._strikes(Site.ALLOC_ROW):
            self.reached["fault alloc_row"] += 1
            raise OutOfRows("injected")
        slot = self.slot(session_id)
        is_pinned = slot.retention is Retention.PINNED
        # What a draft has computed or warmed is not the session's own.
        tail = self._slots[session_id].tail
        is_warmed = tail is not None and tail.made_resident
        committed_len = 0 if is_warmed else slot.committed_len - slot.tail_len
        with self._pinning(session_id, base_len + len(new_tokens) if is_pinned else 0):
            loan = super().begin_turn(
                session_id,
                turn_id,
                base_len=base_len,
                new_tokens=new_tokens,
                max_reuse_len=max_reuse_len,
            )
        if self.stores.recurrent is not None and base_len < committed_len:
            self.reached["rewound to a snapshot"] += 0 < loan.cached_len < base_len
        own_len = loan.cached_len - loan.tail_len
        if self.stores.recurrent is not None and base_len >= committed_len == own_len:
            self._way_back[turn_id] = own_len
        self._of_turn[turn_id] = session_id
        self.touched[session_id] = None
        return loan

    def grow(self, turn_id: TurnId, to_len: int, num_drafts: int = 0) -> list[TableWrite]:
        """See `SessionAwareCache`."""
        if self._strikes(Site.ALLOC_PAGE):
            self.reached["fault alloc_page"] += 1
            raise OutOfPages("injected")
        self._look_at_states(turn_id, to_len, num_drafts)
        return super().grow(turn_id, to_len, num_drafts)

    def record(
        self, turn_id: TurnId, computed_len: int, new_tokens: Sequence[int] = ()
    ) -> list[TableWrite]:
        """See `SessionAwareCache`."""
        before = [ledger.num_free for ledger in self._windows]
        writes = super().record(turn_id, computed_len, new_tokens)
        if before:
            after = [ledger.num_free for ledger in self._windows]
            self.reached["window released"] += after > before
        self._look_back(turn_id)
        return writes

    def end_turn(self, turn_id: TurnId, keep_len: int) -> list[TableWrite]:
        """See `SessionAwareCache`."""
        self._let_go(turn_id)
        with self._rolling_back(turn_id):
            return super().end_turn(turn_id, keep_len)

    def discard(self, turn_id: TurnId) -> list[TableWrite]:
        """See `SessionAwareCache`."""
        self._let_go(turn_id)
        self.reached["discard"] += 1
        with self._rolling_back(turn_id):
            return super().discard(turn_id)

    def retract(self, turn_id: TurnId) -> Tokens:
        """See `SessionAwareCache`."""
        self._let_go(turn_id)
        self.reached["retract"] += 1
        return super().retract(turn_id)

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

    def rebuild(self) -> list[SlotView]:
        """See `SessionAwareCache`. What is new is watched too."""
        resident = super().rebuild()
        self._watch()
        self._of_turn.clear()
        self._way_back.clear()
        self.touched.clear()
        return resident

    def evict_all(self) -> None:
        """Give up all that is published and that nobody holds, as a shortage would."""
        for pool, ledger in self.stores.ledgers.items():
            self.stores.evict(pool, ledger.num_evictable)

    def _watch(self) -> None:
        self.tails = WatchedTails(self, self._strikes)
        self.copies = WatchedCopies(self, num_begun=self.copies.num_begun)
        self._windows = tuple(self.stores.ledgers[pool] for pool in window_pools(self.stores))

    @contextmanager
    def _pinning(self, session_id: SessionId, num_tokens: int) -> Iterator[None]:
        """A pinned session asks for room for `num_tokens` (0: it is not pinned): the answer is
        what counting everybody's pages says."""
        is_over = num_tokens > 0 and self._is_beyond_quota(session_id, num_tokens)
        try:
            yield
        except PinQuotaExceeded:
            if not is_over:
                raise AuditFailed(f"{session_id} was refused a pin that has room") from None
            raise
        if is_over:
            raise AuditFailed(f"{session_id} was pinned beyond the quota")

    def _look_back(self, turn_id: TurnId) -> None:
        """A turn may be undone at any moment, though no state forgets a token: there is one where
        it began, or at the page before, when that was published and others may have it."""
        length = self._way_back.get(turn_id, 0)
        if not length:
            return
        lease = self._turns[turn_id].lease
        if lease.protected_len > length:
            length -= length % self.stores.page_size
        if lease.rewound_len(length) < length:
            raise AuditFailed(f"{turn_id} cannot be undone: no way back to {length} tokens")

    def _is_beyond_quota(self, session_id: SessionId, num_tokens: int) -> bool:
        page_size = self.stores.page_size
        others = [s for s in self.slots() if s.session_id != session_id]
        others = [s for s in others if s.retention is Retention.PINNED]
        # What a draft has warmed or made longer holds nothing of the quota.
        tails = {s.session_id: self._slots[s.session_id].tail for s in others}
        warmed = {session_id for session_id, tail in tails.items() if tail and tail.made_resident}
        others = [s for s in others if s.state is not SlotState.COLD and s.session_id not in warmed]
        if len(others) >= self.stores.rows.num_rows - 1:
            return True
        row_pages = [
            pages_for(slot.committed_len - slot.tail_len, page_size)
            if tails[slot.session_id]
            else slot.allocated_len // page_size
            for slot in others
        ]
        row_pages.append(pages_for(num_tokens, page_size))
        return any(
            sum(map(component.parked_pages, row_pages)) > self._quota(component.pool)
            for component in self.stores.components
            if component.pool in self.stores.paged
        )

    def _look_at_states(self, turn_id: TurnId, to_len: int, num_drafts: int) -> None:
        """A turn grows: a row comes with its states, so there is no shortage of them, however many
        others there are."""
        if self.stores.recurrent is None:
            return
        lease, ledger = (
            self._turns[turn_id].lease,
            self.stores.ledgers[self.stores.recurrent.pool],
        )
        num_missing = lease.states.num_missing(lease.computed_len, to_len, num_drafts)
        lengths = lease.states.lengths
        num_left = len(lease.states.pages) - sum(length > to_len for length in lengths)
        num_held = num_left + num_missing + lease.num_protected(self.stores.recurrent.pool)
        if num_held > self._states_per_row:
            raise AuditFailed(f"{turn_id} holds {num_held} states of {self._states_per_row}")
        if num_missing > ledger.num_free + ledger.num_evictable:
            raise AuditFailed(f"{turn_id} lacks {num_missing} states: {ledger.snapshot()}")
        self.reached["states of a row, all"] += num_held == self._states_per_row
        self.reached["state of a failed forward dropped"] += bool(lengths) and lengths[-1] > to_len

    @contextmanager
    def _rolling_back(self, turn_id: TurnId) -> Iterator[None]:
        """A turn ends, and may lead its session back to where a state was kept."""
        turn = self._turns[turn_id]
        computed_len = turn.lease.computed_len
        yield
        if self.stores.recurrent is None or turn.slot.lease is not turn.lease:
            return
        if 0 < turn.lease.computed_len < computed_len:
            is_own = turn.lease.computed_len > turn.lease.protected_len
            self.reached["rolled back to a state" if is_own else "rolled back to a snapshot"] += 1

    def _quota(self, pool: PoolName) -> int:
        usable = {name: ledger.num_pages - 1 for name, ledger in self.stores.paged.items()}
        return usable[pool] * self._pinned_quota_pages // max(usable.values())

    def _let_go(self, turn_id: TurnId) -> None:
        self.touched[self._of_turn.pop(turn_id)] = None
        self._way_back.pop(turn_id, None)
