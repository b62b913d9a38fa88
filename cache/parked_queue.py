"""`ParkedQueue`: order the parked sessions that pressure may cool. Those of the tenant that has
most come first, of each the least recently used."""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from cache.lease import KVLease
from cache.lock_owners import Tally
from cache.pinned_quota import PinnedQuota
from cache.session_slot import SessionSlot
from cache.stores import KVStores
from cache.types import PoolName, Retention, SessionId, pages_for
from cache.views import ParkedSession


class _RetentionQueue:
    """Hold the parked sessions of one retention, and the sum of the pages cooling would free."""

    def __init__(self, stores: KVStores) -> None:
        self._stores = stores
        self._tally = Tally()
        self._num_private: Counter[PoolName] = Counter()
        self.slots: OrderedDict[SessionId, SessionSlot] = OrderedDict()

    def count(self, slot: SessionSlot, sign: int) -> None:
        """Add a session to the sum; with sign -1 subtract it."""
        lease = _lease(slot)
        self._stores.tree.tally(lease.receipt, self._tally if sign > 0 else None)
        for pool in self._stores.paged:
            self._num_private[pool] += sign * (lease.num_private(pool) - _tail_pages(slot, pool))

    def freed_pages(self) -> dict[PoolName, int]:
        published = self._stores.tree.tallied_pages(self._tally)
        return {pool: published[pool] + self._num_private[pool] for pool in self._stores.paged}


class ParkedQueue:
    """Queue sessions from the end of a turn to the start of the next, or until their KV is dropped.

    RECLAIMABLE sessions come first, and before them those that only a tail keeps from being cold.
    PINNED sessions follow, and only while together they hold more
    pages than the pinned quota: pinning protects no more than the quota.

    The tenant that has most for its weight comes first, and those that have no more than their
    minimum last: cooling them frees a row and no page while minimums are guarded.
    """

    def __init__(self, stores: KVStores, quota: PinnedQuota) -> None:
        self._stores = stores
        self._quota = quota
        self._reclaimable: dict[str, _RetentionQueue] = {}
        self._tenants: dict[SessionId, str] = {}
        """Of those in `_reclaimable`, whose they are."""

        self._pinned = _RetentionQueue(stores)

    def add(self, slot: SessionSlot) -> None:
        """Append a session."""
        is_pinned = slot.retention is Retention.PINNED
        queue = self._pinned if is_pinned else self._line_of(slot)
        queue.slots[slot.session_id] = slot
        queue.count(slot, +1)

    def add_first(self, slot: SessionSlot) -> None:
        """Insert a session before all others of its tenant: it is the first to be cooled, PINNED or
        not."""
        queue = self._line_of(slot)
        queue.slots[slot.session_id] = slot
        queue.slots.move_to_end(slot.session_id, last=False)
        queue.count(slot, +1)

    def remove(self, slot: SessionSlot) -> None:
        """Remove a session, if it is queued."""
        queue = self._queue(slot)
        if queue is None:
            return
        del queue.slots[slot.session_id]
        queue.count(slot, -1)
        tenant = self._tenants.pop(slot.session_id, None)
        if tenant is not None and not queue.slots:
            del self._reclaimable[tenant]
            self._stores.tree.tenants.set_parked(tenant, is_parked=False)

    def remove_cold(self, slot: SessionSlot) -> None:
        """Remove a session that gives up its lease: PINNED, it holds nothing of the quota."""
        self.remove(slot)
        if slot.retention is Retention.PINNED:
            self._quota.set_row_pages(slot.session_id, None)

    @contextmanager
    def changing(self, slot: SessionSlot) -> Iterator[None]:
        """Let the block change the lease of a queued session, which keeps its place. The quota
        counts what it holds then, without the pages of a tail."""
        queue = self._queue(slot)
        assert queue is not None, "only a queued session changes in its place"
        queue.count(slot, -1)
        yield
        queue.count(slot, +1)
        if queue is self._pinned:
            lease, page_size = _lease(slot), self._stores.page_size
            held_len = lease.capacity_len if slot.tail is None else lease.base_len
            self._quota.set_row_pages(slot.session_id, pages_for(held_len, page_size))

    def __iter__(self) -> Iterator[ParkedSession]:
        """Yield the sessions to cool, in order. Do not change the cache while iterating."""
        if self._stores.tree.tenants.num_present > 1:
            yield from self._in_rotation()
        else:
            for queue in self._reclaimable.values():
                yield from map(_parked_session, queue.slots.values())
        yield from map(_parked_session, self._pinned_beyond_quota())

    def count(self) -> tuple[int, Mapping[PoolName, int]]:
        """Return the number of sessions that may be cooled, and the sum of their `freed_pages`.

        O(pools) per tenant with such sessions, of which there are no more than rows, plus O(pinned
        sessions to cool) while those exceed their quota.
        """
        num_sessions = len(self._tenants)
        freed_pages = dict.fromkeys(self._stores.paged, 0)
        is_guarding = self.is_guarding
        for tenant, queue in self._reclaimable.items():
            for pool, num_pages in queue.freed_pages().items():
                most = self._excess(tenant, pool) if is_guarding else num_pages
                freed_pages[pool] += min(num_pages, most)
        for slot in self._pinned_beyond_quota():
            num_sessions += 1
            for pool, num_pages in _freed_pages(slot).items():
                freed_pages[pool] += num_pages
        return num_sessions, freed_pages

    @property
    def is_guarding(self) -> bool:
        """Return whether the minimums of tenants are kept. They are while several turns run, of
        which one can give way, or a session is parked whose tenant has more than its minimum.
        Otherwise the one turn that runs, or waits, may have everything. O(pools).
        """
        tenants, rows = self._stores.tree.tenants, self._stores.rows
        if tenants.num_present <= 1:
            return False
        num_lent = rows.num_rows - rows.num_free - len(self._tenants) - len(self._pinned.slots)
        return num_lent > 1 or any(tenants.num_giving[pool] for pool in self._stores.paged)

    def guarded_pages(self) -> Mapping[PoolName, int]:
        """Return the evictable pages that minimums of tenants keep, per pool."""
        guarded = self._stores.tree.tenants.guarded
        if not any(guarded.values()) or self.is_guarding:
            return guarded
        return dict.fromkeys(guarded, 0)

    def reclaimable(self, session_id: SessionId) -> ParkedSession | None:
        """Return one session; None if it is not queued, or is PINNED and not only a draft warmed
        it."""
        tenant = self._tenants.get(session_id)
        if tenant is None:
            return None
        return _parked_session(self._reclaimable[tenant].slots[session_id])

    def session_ids(self) -> list[SessionId]:
        """Return all parked sessions, including those that may not be cooled."""
        queues = (*self._reclaimable.values(), self._pinned)
        return [session_id for queue in queues for session_id in queue.slots]

    def _in_rotation(self) -> Iterator[ParkedSession]:
        """Yield the reclaimable sessions of several tenants. O(log tenants) each, after the first,
        and each counts as cooled for the next."""
        is_guarding = self.is_guarding
        order: list[tuple[bool, float, int, _Giver]] = []
        for number, (tenant, queue) in enumerate(self._reclaimable.items()):
            giver = _Giver(self._stores, tenant, iter(queue.slots.values()))
            heapq.heappush(order, (not giver.has_excess, -giver.load, number, giver))
        while order:
            _, _, number, giver = heapq.heappop(order)
            if (slot := next(giver.slots, None)) is None:
                continue
            freed = _freed_pages(slot)
            given = giver.give(freed)
            heapq.heappush(order, (not giver.has_excess, -giver.load, number, giver))
            yield ParkedSession(slot.session_id, given if is_guarding else freed)

    def _excess(self, tenant: str, pool: PoolName) -> int:
        return max(0, self._stores.tree.tenants.excess(tenant, pool))

    def _pinned_beyond_quota(self) -> Iterator[SessionSlot]:
        excess = self._quota.excess_pages
        for slot in self._pinned.slots.values():
            if max(excess) <= 0:
                return
            held = self._quota.pages_of(slot.session_id)
            excess = tuple(a - b for a, b in zip(excess, held, strict=True))
            yield slot

    def _line_of(self, slot: SessionSlot) -> _RetentionQueue:
        """Return the queue of a session's tenant, where it is about to enter."""
        tenant = self._tenants[slot.session_id] = slot.namespace.tenant
        if tenant not in self._reclaimable:
            self._reclaimable[tenant] = _RetentionQueue(self._stores)
            self._stores.tree.tenants.set_parked(tenant, is_parked=True)
        return self._reclaimable[tenant]

    def _queue(self, slot: SessionSlot) -> _RetentionQueue | None:
        """Return the queue that a session is in; None if it is not queued."""
        if slot.session_id in self._pinned.slots:
            return self._pinned
        tenant = self._tenants.get(slot.session_id)
        return None if tenant is None else self._reclaimable[tenant]


class _Giver:
    """Track what a tenant still has in the tree while its sessions are counted as cooled."""

    def __init__(self, stores: KVStores, tenant: str, slots: Iterator[SessionSlot]) -> None:
        tenants = stores.tree.tenants
        account = tenants[tenant]
        self.slots = slots
        self._usable = {
            p: (each.num_pages - 1) * account.weight for p, each in stores.paged.items()
        }
        self._held = {pool: account.held[pool] for pool in stores.paged}
        self._excess = {pool: max(0, tenants.excess(tenant, pool)) for pool in stores.paged}

    @property
    def has_excess(self) -> bool:
        """Return whether it has more than its minimum of some pool."""
        return any(self._excess.values())

    @property
    def load(self) -> float:
        """Return the part that it holds of the pool of which it holds most, for its weight."""
        return max(held / self._usable[pool] for pool, held in self._held.items())

    def give(self, freed: Mapping[PoolName, int]) -> dict[PoolName, int]:
        """Count pages as given; return those of them that its minimum does not keep."""
        given = {pool: min(num_pages, self._excess[pool]) for pool, num_pages in freed.items()}
        for pool, num_pages in freed.items():
            self._excess[pool] -= given[pool]
            self._held[pool] -= num_pages
        return given


def _parked_session(slot: SessionSlot) -> ParkedSession:
    return ParkedSession(slot.session_id, _freed_pages(slot))


def _freed_pages(slot: SessionSlot) -> Mapping[PoolName, int]:
    """Return what cooling frees, without the pages of a tail, which are headroom as they are."""
    freed = _lease(slot).freed_pages()
    return {pool: num_pages - _tail_pages(slot, pool) for pool, num_pages in freed.items()}


def _tail_pages(slot: SessionSlot, pool: PoolName) -> int:
    return 0 if slot.tail is None else slot.tail.pages[pool]


def _lease(slot: SessionSlot) -> KVLease:
    assert slot.lease is not None, "idle slots hold a lease"
    return slot.lease
