"""`IdleLine`: parked sessions that pressure may cool, the least recently used first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from cache.pinned_quota import PinnedQuota
from cache.session_slot import SessionSlot
from cache.types import Retention, SessionId
from cache.views import IdleSession


class IdleLine:
    """A session enters when its turn ends and leaves when its next one begins or its KV goes.

    RECLAIMABLE sessions come first. PINNED ones follow, and only while together they hold more than
    their quota: the quota is what pinning protects.
    """

    __slots__ = ("_pinned", "_quota", "_reclaimable")

    def __init__(self, quota: PinnedQuota) -> None:
        self._quota = quota
        self._reclaimable: OrderedDict[SessionId, SessionSlot] = OrderedDict()
        self._pinned: OrderedDict[SessionId, SessionSlot] = OrderedDict()

    def enter(self, slot: SessionSlot) -> None:
        """Put a session at the end."""
        self._part(slot)[slot.session_id] = slot

    def leave(self, slot: SessionSlot) -> None:
        """Take a session out; one that is not in the line stays out."""
        self._part(slot).pop(slot.session_id, None)

    def __iter__(self) -> Iterator[IdleSession]:
        """Those to cool, in order; lazy. Do not change the cache while iterating."""
        for slot in self._reclaimable.values():
            yield _idle_session(slot)
        excess = self._quota.excess_pages
        for slot in self._pinned.values():
            if max(excess) <= 0:
                return
            held = self._quota.pages_of(slot.session_id)
            excess = tuple(a - b for a, b in zip(excess, held, strict=True))
            yield _idle_session(slot)

    def session_ids(self) -> list[SessionId]:
        """All sessions that rest, those that may not be cooled too."""
        return [*self._reclaimable, *self._pinned]

    def _part(self, slot: SessionSlot) -> OrderedDict[SessionId, SessionSlot]:
        return self._pinned if slot.retention is Retention.PINNED else self._reclaimable


def _idle_session(slot: SessionSlot) -> IdleSession:
    assert slot.lease is not None, "idle slots hold a lease"
    return IdleSession(slot.session_id, slot.lease.freed_pages())
