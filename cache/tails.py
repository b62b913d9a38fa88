"""`Tails`: compute ahead, behind the histories of sessions at rest, what their next turns may read.

A tail is a guess: the tokens that the next turn would have if it came now. Its KV lies in private
pages behind the history of a parked session, which nobody has borrowed. The turn that comes keeps
what agrees with its own tokens (`SessionAwareCache.begin_turn`). A tail takes free pages and rows
only, and whoever else needs pages takes those of the oldest tails first: to everybody else they
are as good as free. Nothing of a tail is published, and one that is dropped leaves the session as
it was.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from cache.errors import OutOfPages
from cache.lease import KVLease
from cache.parked_queue import ParkedQueue
from cache.session_slot import SessionSlot, Tail
from cache.stores import KVStores
from cache.types import PoolName, SessionId, SlotState, TableWrite, Tokens, pages_for
from cache.views import TailView


class Tails:
    """Hold the tails of all sessions. `num_pages`: of each paged pool, the pages of tails alone."""

    def __init__(
        self, stores: KVStores, slots: Mapping[SessionId, SessionSlot], parked: ParkedQueue
    ) -> None:
        self._stores, self._slots, self._parked = stores, slots, parked
        self._oldest_first: OrderedDict[SessionId, Tail] = OrderedDict()
        """Of those that hold a page."""

        self.num_pages: Counter[PoolName] = Counter(dict.fromkeys(stores.paged, 0))

    def begin(
        self, session_id: SessionId, base_len: int, tokens: Sequence[int] | Tokens
    ) -> TailView:
        """Cut the history of a session at rest to `base_len`, and let `tokens` be its tail. What
        they have in common with the tail before stays computed.

        A cold session takes a free row and locks what the tree has of its history; it is then the
        first to be cooled.

        Raises:
            SlotBusy: a turn has borrowed it. OutOfRows: it is cold, and no row is free.
            HistoryMismatch: the history is shorter than `base_len`.
        """
        slot = self._slots[session_id]
        slot.check_not_busy()
        slot.check_history_len(base_len)
        if slot.tail is not None and slot.tail.start != base_len:
            self.drop(session_id)
        self._note_change(slot)
        writes: list[TableWrite] = []
        if is_cold := slot.lease is None:
            writes = self._make_resident(slot, base_len)
        kept_len = slot.common_len(base_len, tokens)
        with self._changing(slot) as lease:
            if slot.tail is None:
                lease.mark(base_len, base_len)
                slot.tail = Tail(base_len, is_cold, dict.fromkeys(self._stores.paged, 0))
            else:
                lease.cut(kept_len)
            slot.tokens.truncate(kept_len)
            slot.tokens.append(tokens[kept_len - base_len :])
        if session_id in self._oldest_first:
            self._oldest_first.move_to_end(session_id)
        return TailView(lease, slot.tail, tuple(writes))

    def grow(self, session_id: SessionId, to_len: int) -> list[TableWrite]:
        """Allocate pages for positions up to `to_len` of a session with a tail.

        Raises:
            OutOfPages: a pool has too few free pages; nothing was changed.
        """
        slot, stores = self._slots[session_id], self._stores
        missing = _lease(slot).missing_pages(to_len)
        for pool, count in missing.items():
            ledger = stores.ledgers[pool]
            # Every row comes with its states, but snapshots may have them.
            num_evictable = 0 if pool in stores.paged else ledger.num_evictable
            if count > ledger.num_free + num_evictable:
                raise OutOfPages(f"{pool}: {count} pages for a tail are not free")
        if stores.recurrent is not None:
            ledger = stores.ledgers[stores.recurrent.pool]
            stores.evict(ledger.pool, missing[ledger.pool] - ledger.num_free)
        self._note_change(slot)
        with self._changing(slot) as lease:
            return lease.grow(to_len)

    def record(self, session_id: SessionId, tail: Tail, computed_len: int) -> bool:
        """Record that KV is valid up to `computed_len`; return False, with nothing changed, if the
        session has this tail no longer."""
        if not self.has(session_id, tail):
            return False
        slot = self._slots[session_id]
        self._note_change(slot)
        with self._changing(slot) as lease:
            lease.advance(computed_len)
        return True

    def has(self, session_id: SessionId, tail: Tail) -> bool:
        """Return whether a session still has this tail."""
        slot = self._slots.get(session_id)
        return slot is not None and slot.tail is tail

    def take(self, slot: SessionSlot, to_len: int) -> int:
        """Let a turn that has borrowed the lease keep the tail up to `to_len`; return how many
        positions it keeps, 0 without a tail."""
        if slot.tail is None:
            return 0
        self.forget(slot)
        lease = _lease(slot)
        lease.cut(to_len)
        return max(0, lease.computed_len - lease.base_len)

    def drop(self, session_id: SessionId) -> None:
        """Drop the tail of a session, if it has one: the session is as it was before."""
        slot = self._slots.get(session_id)
        if slot is None or slot.tail is None:
            return
        tail, lease = slot.tail, _lease(slot)
        self._note_change(slot)
        with self._parked.changing(slot):
            lease.rewind(lease.base_len)
            self.forget(slot)
            lease.unmark()
        if tail.made_resident or lease.num_pages == 0:  # it would only occupy a row
            self._parked.remove_cold(slot)
            lease.release()
            slot.lease = None
            slot.move_to(SlotState.COLD)

    def reclaim(self, pool: PoolName, num_pages: int) -> None:
        """Drop tails, oldest first, until `num_pages` of their pages of a pool are free, or none
        has any."""
        dropped = []
        for session_id, tail in self._oldest_first.items():
            if num_pages <= 0:
                break
            if held := tail.pages.get(pool, 0):
                num_pages -= held
                dropped.append(session_id)
        for session_id in dropped:
            self.drop(session_id)

    def forget(self, slot: SessionSlot) -> None:
        """Stop counting the tail of a slot, if it has one, and drop its tokens; its pages go with
        the lease or stay in it."""
        if slot.tail is not None:
            self.num_pages.subtract(slot.tail.pages)
            self._oldest_first.pop(slot.session_id, None)
            slot.forget_tail()

    def _make_resident(self, slot: SessionSlot, base_len: int) -> list[TableWrite]:
        slot.lease = lease = KVLease(self._stores, slot.namespace)
        writes = lease.extend_match(slot.tokens.view(0, base_len))
        lease.park()
        slot.move_to(SlotState.PARKED)
        self._parked.add_first(slot)
        return writes

    def _note_change(self, slot: SessionSlot) -> None:
        self._stores.changes.record_session(slot.session_id)
        self._stores.changes.version += 1  # `kept_len` of this session changes

    @contextmanager
    def _changing(self, slot: SessionSlot) -> Iterator[KVLease]:
        """Let the block change the lease of a slot, which has a tail afterwards; count its pages
        again."""
        with self._parked.changing(slot):
            lease = _lease(slot)
            yield lease
            assert slot.tail is not None
            self.num_pages.subtract(slot.tail.pages)
            first = pages_for(lease.base_len, self._stores.page_size)
            slot.tail.pages = {p: lease.num_private_from(p, first) for p in self._stores.paged}
            self.num_pages.update(slot.tail.pages)
            if any(slot.tail.pages.values()):
                self._oldest_first.setdefault(slot.session_id, slot.tail)
            else:
                self._oldest_first.pop(slot.session_id, None)


def _lease(slot: SessionSlot) -> KVLease:
    assert slot.lease is not None, "a tail needs a lease"
    return slot.lease
