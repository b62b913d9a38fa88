"""`ParkedQueue`: order the parked sessions that pressure may cool, least recently used first."""

from __future__ import annotations

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
    """

    def __init__(self, stores: KVStores, quota: PinnedQuota) -> None:
        self._quota = quota
        self._page_size = stores.page_size
        self._reclaimable = _RetentionQueue(stores)
        self._pinned = _RetentionQueue(stores)

    def add(self, slot: SessionSlot) -> None:
        """Append a session."""
        queue = self._pinned if slot.retention is Retention.PINNED else self._reclaimable
        queue.slots[slot.session_id] = slot
        queue.count(slot, +1)

    def add_first(self, slot: SessionSlot) -> None:
        """Insert a session before all others: it is the first to be cooled, PINNED or not."""
        queue = self._reclaimable
        queue.slots[slot.session_id] = slot
        queue.slots.move_to_end(slot.session_id, last=False)
        queue.count(slot, +1)

    def remove(self, slot: SessionSlot) -> None:
        """Remove a session, if it is queued."""
        queue = self._queue(slot)
        if queue.slots.pop(slot.session_id, None) is not None:
            queue.count(slot, -1)

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
        queue.count(slot, -1)
        yield
        queue.count(slot, +1)
        if queue is self._pinned:
            lease, page_size = _lease(slot), self._page_size
            held_len = lease.capacity_len if slot.tail is None else lease.base_len
            self._quota.set_row_pages(slot.session_id, pages_for(held_len, page_size))

    def __iter__(self) -> Iterator[ParkedSession]:
        """Yield the sessions to cool, in order. Do not change the cache while iterating."""
        yield from map(_parked_session, self._reclaimable.slots.values())
        yield from map(_parked_session, self._pinned_beyond_quota())

    def count(self) -> tuple[int, Mapping[PoolName, int]]:
        """Return the number of sessions that may be cooled, and the sum of their `freed_pages`.

        O(pools), plus O(pinned sessions to cool) while those exceed their quota.
        """
        num_sessions = len(self._reclaimable.slots)
        freed_pages = self._reclaimable.freed_pages()
        for slot in self._pinned_beyond_quota():
            num_sessions += 1
            for pool, num_pages in _freed_pages(slot).items():
                freed_pages[pool] += num_pages
        return num_sessions, freed_pages

    def reclaimable(self, session_id: SessionId) -> ParkedSession | None:
        """Return one session; None if it is not queued, or is PINNED and not only a draft warmed
        it."""
        slot = self._reclaimable.slots.get(session_id)
        return None if slot is None else _parked_session(slot)

    def session_ids(self) -> list[SessionId]:
        """Return all parked sessions, including those that may not be cooled."""
        return [*self._reclaimable.slots, *self._pinned.slots]

    def _pinned_beyond_quota(self) -> Iterator[SessionSlot]:
        excess = self._quota.excess_pages
        for slot in self._pinned.slots.values():
            if max(excess) <= 0:
                return
            held = self._quota.pages_of(slot.session_id)
            excess = tuple(a - b for a, b in zip(excess, held, strict=True))
            yield slot

    def _queue(self, slot: SessionSlot) -> _RetentionQueue:
        """Return the queue that a session is in, if it is queued."""
        return self._pinned if slot.session_id in self._pinned.slots else self._reclaimable


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
