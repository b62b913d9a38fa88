"""`IdleLine`: parked sessions that pressure may cool, the least recently used first."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from cache.lease import KVLease
from cache.lock_owners import Tally
from cache.pinned_quota import PinnedQuota
from cache.session_slot import SessionSlot
from cache.stores import KVStores
from cache.types import PoolName, Retention, SessionId
from cache.views import ParkedSession


class _Part:
    """Sessions of one retention, and what cooling each of them gives back, in sum."""

    __slots__ = ("_num_private", "_stores", "_tally", "slots")

    def __init__(self, stores: KVStores) -> None:
        self._stores = stores
        self._tally = Tally()
        self._num_private: Counter[PoolName] = Counter()
        self.slots: OrderedDict[SessionId, SessionSlot] = OrderedDict()

    def count(self, slot: SessionSlot) -> None:
        lease = _lease(slot)
        self._stores.tree.tally(lease.receipt, self._tally)
        for pool in self._stores.paged:
            self._num_private[pool] += lease.num_private(pool)

    def uncount(self, slot: SessionSlot) -> None:
        lease = _lease(slot)
        self._stores.tree.tally(lease.receipt, None)
        for pool in self._stores.paged:
            self._num_private[pool] -= lease.num_private(pool)

    def freed_pages(self) -> dict[PoolName, int]:
        published = self._stores.tree.tallied_pages(self._tally)
        return {pool: published[pool] + self._num_private[pool] for pool in self._stores.paged}


class IdleLine:
    """A session enters when its turn ends and leaves when its next one begins or its KV goes.

    RECLAIMABLE sessions come first. PINNED ones follow, and only while together they hold more than
    their quota: the quota is what pinning protects.
    """

    __slots__ = ("_pinned", "_quota", "_reclaimable")

    def __init__(self, stores: KVStores, quota: PinnedQuota) -> None:
        self._quota = quota
        self._reclaimable = _Part(stores)
        self._pinned = _Part(stores)

    def add(self, slot: SessionSlot) -> None:
        """Put a session at the end."""
        part = self._part(slot)
        part.slots[slot.session_id] = slot
        part.count(slot)

    def remove(self, slot: SessionSlot) -> None:
        """Take a session out; one that is not in the line stays out."""
        part = self._part(slot)
        if part.slots.pop(slot.session_id, None) is not None:
            part.uncount(slot)

    @contextmanager
    def changing(self, slot: SessionSlot) -> Iterator[None]:
        """Let the lease of a session change that keeps its place."""
        part = self._part(slot)
        part.uncount(slot)
        yield
        part.count(slot)

    def __iter__(self) -> Iterator[ParkedSession]:
        """Those to cool, in order; lazy. Do not change the cache while iterating."""
        yield from map(_parked_session, self._reclaimable.slots.values())
        yield from map(_parked_session, self._pinned_beyond_quota())

    def count(self) -> tuple[int, Mapping[PoolName, int]]:
        """Return how many sessions there are to cool, and what they report to give back, in sum.

        O(pools), and O(pinned sessions to cool) while those are beyond their quota.
        """
        num_sessions = len(self._reclaimable.slots)
        freed_pages = self._reclaimable.freed_pages()
        for slot in self._pinned_beyond_quota():
            num_sessions += 1
            for pool, num_pages in _lease(slot).freed_pages().items():
                freed_pages[pool] += num_pages
        return num_sessions, freed_pages

    def reclaimable(self, session_id: SessionId) -> ParkedSession | None:
        """Return one session as it is in the line; None if it is not, or is PINNED."""
        slot = self._reclaimable.slots.get(session_id)
        return None if slot is None else _parked_session(slot)

    def session_ids(self) -> list[SessionId]:
        """All sessions that rest, those that may not be cooled too."""
        return [*self._reclaimable.slots, *self._pinned.slots]

    def _pinned_beyond_quota(self) -> Iterator[SessionSlot]:
        excess = self._quota.excess_pages
        for slot in self._pinned.slots.values():
            if max(excess) <= 0:
                return
            held = self._quota.pages_of(slot.session_id)
            excess = tuple(a - b for a, b in zip(excess, held, strict=True))
            yield slot

    def _part(self, slot: SessionSlot) -> _Part:
        return self._pinned if slot.retention is Retention.PINNED else self._reclaimable


def _parked_session(slot: SessionSlot) -> ParkedSession:
    return ParkedSession(slot.session_id, _lease(slot).freed_pages())


def _lease(slot: SessionSlot) -> KVLease:
    assert slot.lease is not None, "idle slots hold a lease"
    return slot.lease
