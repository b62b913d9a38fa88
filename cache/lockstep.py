"""`Lockstep`: turns that compute and sample one token each per forward, changed by one number.

Most steps only add a position and a token to every running turn. While nothing else changes any of
them, their leases share a count of those positions: a lease's length is a number of its own plus
that count. Such a step costs one addition, and one append per turn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from cache.counted_length import SharedCount
from cache.pinned_quota import PinnedQuota
from cache.session_slot import SessionSlot
from cache.stores import KVStores
from cache.types import Retention, TableWrite
from cache.views import Headroom

LOW_WATER_DIVISOR: Final = 32
"""Pages are evicted when less than 1/32 of a pool would be free."""


class Lockstep:
    """Grow and record several turns together. Made by `SessionAwareCache.step_together`.

    Its `grow` and `record` stand for those of the cache, while it `is_current`.
    """

    def __init__(
        self,
        slots: Sequence[SessionSlot],
        stores: KVStores,
        *,
        headroom: Callable[[], Headroom],
        quota: PinnedQuota,
    ) -> None:
        self._slots, self._stores = slots, stores
        self._headroom, self._quota = headroom, quota
        self._version = stores.changes.turn_version
        self._count = SharedCount()
        self._tails = [slot.tokens.tail for slot in slots]
        # Slots by the step at which their pages are full, and at which they complete a page: a step
        # looks only at those that are due.
        self._full: dict[int, list[SessionSlot]] = {}
        self._passing: dict[int, list[SessionSlot]] = {}
        self._private: list[Sequence[int]] = []
        for slot in slots:
            lease = slot.lease
            assert lease is not None, "a running turn has a lease"
            assert lease.computed_len < len(slot.tokens), "KV of a token needs the token"
            lease.count_with(self._count)
            self._private += lease.private_lists
            self._full.setdefault(lease.capacity_len - lease.computed_len, []).append(slot)
            if stores.bounded:
                left = stores.page_size - lease.computed_len % stores.page_size
                self._passing.setdefault(left, []).append(slot)
        self._num_private = sum(map(len, self._private))

    @property
    def is_current(self) -> bool:
        """Return whether no other verb has changed a turn since it was made."""
        return self._version == self._stores.changes.turn_version

    def grow(self, num_ahead: int) -> list[TableWrite] | None:
        """Allocate the pages that turns need for the position `num_ahead` past their lengths.

        Return None, with nothing changed, where pages would have to be evicted for that, or are
        kept for minimums of tenants.
        """
        step, stores = self._count.value + num_ahead, self._stores
        if (count := len(self._full.get(step, ()))) == 0:
            return []
        for ledger in stores.paged.values():
            if ledger.num_free - count < ledger.num_pages // LOW_WATER_DIVISOR:
                return None
        if count > min(self._headroom().pages):
            return None
        slots = self._full.pop(step)
        writes: list[TableWrite] = []
        for slot in slots:
            lease = slot.lease
            assert lease is not None, "a running turn has a lease"
            writes += lease.grow(lease.computed_len + num_ahead + 1)
            if slot.retention is Retention.PINNED:
                self._quota.set_row_pages(slot.session_id, lease.num_pages)
        self._record_changes(slots)
        self._full.setdefault(step + stores.page_size, []).extend(slots)
        self._num_private += count * len(stores.paged)
        return writes

    def record(self, tokens: Sequence[int]) -> None:
        """Record one position and one token of each turn, in order."""
        assert self.is_current, "its turns have changed"
        assert len(tokens) == len(self._tails), "one token for each turn"
        step = self._count.value + 1
        assert sum(map(len, self._private)) == self._num_private, "KV grows within its pages"
        assert min(self._full) >= step, "KV grows within its pages"
        deque(map(list.append, self._tails, tokens), maxlen=0)
        self._count.value = step
        self._record_changes(self._slots)
        if slots := self._passing.pop(step, None):
            for slot in slots:
                assert slot.lease is not None, "a running turn has a lease"
                slot.lease.release_passed(slot.lease.computed_len - 1)
            self._passing.setdefault(step + self._stores.page_size, []).extend(slots)

    def _record_changes(self, slots: Sequence[SessionSlot]) -> None:
        if (changes := self._stores.changes).is_watched:
            for slot in slots:
                changes.record_session(slot.session_id)
