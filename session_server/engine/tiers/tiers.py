"""`Tiers`: KV outside of the pools, as the rest of the engine sees it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cache.components import components_of
from cache.session_cache import SessionAwareCache
from cache.tiers.segment_tree import SegmentTree
from cache.types import Namespace, SessionId, SlotState, Tokens
from session_server.core.tier_orders import TierOrder, TierResult
from session_server.engine.config import TierPolicy
from session_server.engine.in_flight import InFlight
from session_server.engine.tiers.erasing import ThenGone
from session_server.engine.tiers.forgetting import Forgetting, Forgotten
from session_server.engine.tiers.handovers import Handovers
from session_server.engine.tiers.restoring import Restoring, Then
from session_server.engine.tiers.room_watch import RoomWatch
from session_server.engine.tiers.spilling import Spilling
from session_server.engine.tiers.store import TierStore
from session_server.engine.tiers.write_through import ThenWritten, WriteThrough, WrittenFiles


class Tiers:
    """Keep KV in host memory and on disk, and bring it back. Without room for any, do nothing.

    What is here may be lost at any time without losing more than time: a turn computes what is not
    there.
    """

    def __init__(self, cache: SessionAwareCache, policy: TierPolicy, in_flight: InFlight) -> None:
        spec = cache.spec
        page_bytes = policy.page_bytes or spec.pool_bytes_per_page
        tree = SegmentTree(spec.page_size, page_bytes, components_of(spec))
        self.store = TierStore(
            tree,
            host_bytes=policy.host_bytes,
            disk_bytes=policy.disk_bytes,
            is_shared=policy.is_shared,
        )
        self._handovers = Handovers(self.store)
        self._forgetting = Forgetting(self.store)
        self._spilling = Spilling(
            cache, self.store, self._forgetting, segment_bytes=policy.segment_bytes
        )
        self._restoring = Restoring(cache, self.store, spilling=self._spilling, in_flight=in_flight)
        self._write_through = WriteThrough(cache, self.store, self._spilling)
        self._room_watch = RoomWatch(self.store)
        self._cache = cache
        self._is_on = policy.host_bytes > 0
        self.has_more = False
        """Whether another step has work that is done in slices."""

        self._drain_s, self._drain_until_s = policy.drain_s, 0.0
        if self._is_on:
            self.store.start()

    # What happens to sessions

    def note_turn(self, session_id: SessionId) -> None:
        """Note that a turn has borrowed a session, or that it was cooled."""
        if self._is_on:
            self._write_through.forget(session_id)
            self._spilling.note_turn(session_id)
            self._restoring.note_used(session_id)

    def cut_by(self, session_id: SessionId, base_len: int) -> Forgotten | None:
        """Return what a turn or draft is about to cut off the history of a session, for `note_cut`;
        None if nothing of that can be kept."""
        return self._spilling.cut_by(session_id, base_len) if self._is_on else None

    def note_cut(self, session_id: SessionId, cut: Forgotten | None) -> None:
        """Drop what a turn or draft has cut off a history, as far as nobody else has it."""
        if cut is not None:
            self._spilling.note_cut(session_id, cut)

    def note_draft(self, session_id: SessionId) -> None:
        """Note that a draft of a session has begun, or that none is wanted any more."""
        if self._is_on:
            self._restoring.note_used(session_id)

    def note_cooling(self, session_id: SessionId) -> None:
        """Begin to copy a session that is about to be cooled, whether or not that is due."""
        if self._is_on:
            self._restoring.note_used(session_id)
            self._spilling.copy_now(session_id)

    def note_rest(self, session_id: SessionId) -> None:
        """Note that the turn of a session has ended."""
        if self._is_on:
            self._restoring.forget(session_id)
            self._spilling.note_rest(session_id)

    def hand_over(self, session_id: SessionId, now_s: float, then: Callable[[], object]) -> None:
        """Have a session that is about to be closed written where another server looks for it;
        call `then` once it is, or cannot be within `HANDOVER_S`."""
        last = self._spilling.last_of(session_id) if self._is_on else None
        self._handovers.add(last, now_s, then)

    def note_close(self, session_id: SessionId, *, is_deleted: bool) -> None:
        """Note that a session is about to be closed. One that `is_deleted` leaves nothing that only
        it had."""
        if self._is_on:
            self._write_through.forget(session_id)
            self._restoring.forget(session_id)
            self._spilling.forget(session_id, is_deleted=is_deleted)

    def forget(
        self, namespace: Namespace, tokens: Tokens, num_kept: int, then: ThenGone | None
    ) -> None:
        """Drop what nobody else has of a session that is not open, behind its first tokens; `then`
        is called once that is gone, or cannot be."""
        if self._is_on:
            self._forgetting.add(Forgotten(namespace, tokens, num_kept, then=then))
        elif then is not None:
            then(True)

    def write(self, session_id: SessionId, then: ThenWritten, *, cut: int) -> None:
        """Write what a session at rest has published to disk, and call `then` once with what is
        there. `cut`: see `WriteKV`."""
        if self._is_on:
            self._write_through.begin(session_id, then, cut=cut)
        else:
            then(WrittenFiles())

    def expect(self, files: Sequence[tuple[bytes, int]]) -> None:
        """Take note of files that another engine has written to the directory of this one."""
        if self._is_on:
            self.store.expect(files)

    def measure(self, namespace: Namespace, tokens: Tokens, then: Callable[[int], None]) -> None:
        """Call `then` once with how many of the first tokens are kept outside of the pools, after
        looking for files that nobody has read yet."""
        if not self._is_on:
            then(0)
            return
        path = self.store.find_readable(namespace, tokens)
        if self.store.is_unread(path.next_name):
            found = self.store.find_readable
            self.store.find_files(
                namespace, tokens, path, lambda: then(found(namespace, tokens).length)
            )
        else:
            then(path.length)

    def holds(self, session_id: SessionId) -> bool:
        """Return whether a session must not be cooled yet, because it is being copied first."""
        return self._is_on and self._spilling.holds(session_id)

    def may_restore(self, session_id: SessionId) -> bool:
        """Return whether `restore` is worth a call: the pools have nothing of the session."""
        return self._is_on and self._cache.slot(session_id).state is SlotState.COLD

    def restore(self, session_id: SessionId, tokens: Tokens, then: Then, *, is_ahead: bool) -> bool:
        """Bring back what the pools lack of `tokens`, see `Restoring.begin`."""
        return self._is_on and self._restoring.begin(session_id, tokens, then, is_ahead=is_ahead)

    def warm(self, session_id: SessionId) -> None:
        """Bring back what the pools lack of a session, if there is room ahead of all turns."""
        if self.may_restore(session_id):
            tokens = self._cache.tokens(session_id)
            self._restoring.begin(session_id, tokens, None, is_ahead=True)

    def begin_deferred(self) -> None:
        """Copy back sessions that had to wait for others. O(1) while none can be."""
        self._restoring.begin_deferred()

    def clear(self) -> None:
        """Drop everything."""
        if self._is_on:
            self.store.clear()
            self._forgetting.clear()
            self._restoring.clear()
            self._write_through.clear()

    # Steps

    @property
    def is_draining(self) -> bool:
        """Return whether sessions at rest are still being written to disk, or what was deleted is
        being dropped, after `drain`. Nothing is written to a disk that does not answer."""
        # After a `clear` no segment is left, and nothing of it is to be forgotten.
        has_files = bool(self.store.tree) and self.store.pace.has_dropped
        if self._forgetting.has_more or has_files:
            return True
        if self._forgetting.is_erasing and not self.store.writes.is_over:
            return True
        if not self.store.writes.is_draining or self.store.orders.disk_watch.is_silent:
            return False
        if self.store.pace.is_spent or self.store.writes.may_try_again:
            return True
        is_busy = self._spilling.has_dirty or self._spilling.is_copying or self.store.is_writing
        return is_busy or self.store.is_giving_way

    def drain(self, now_s: float) -> None:
        """Write to disk what is there, if there is one, within `TierPolicy.drain_s`."""
        self.store.writes.is_draining = self._is_on and self.store.has_disk
        self._drain_until_s = now_s + self._drain_s

    @property
    def due_s(self) -> float | None:
        """Return when there is something to do though nothing comes; None: never."""
        if not self._is_on:
            return None
        drain_until_s = self._drain_until_s if self.is_draining else None
        due = (
            self.store.orders.disk_watch.due_s,
            self._room_watch.due_s,
            self._handovers.due_s,
            drain_until_s,
        )
        return min((each for each in due if each is not None), default=None)

    def take(self, results: Sequence[TierResult], now_s: float) -> None:
        """Handle results of orders, and go on without those of a disk that does not answer."""
        if not self._is_on:
            return
        orders = self.store.orders
        for result in results:
            orders.disk_watch.answer(result.number, now_s)
            orders.handle(result)
        if orders.disk_watch.falls_silent(now_s):
            self._restoring.give_up_held()
            orders.give_up()

    def take_orders(self, now_s: float) -> Sequence[TierOrder]:
        """Return what is to be done now. O(1) while nothing is."""
        if not self._is_on:
            return ()
        self.store.uses.set(now_s)
        was_spent = self.store.pace.is_spent
        self.store.advance()
        self._forgetting.advance()
        if self.store.writes.is_draining and now_s >= self._drain_until_s:
            self.store.writes.end()
        self._spilling.advance()
        self._write_through.advance()
        if self.store.writes.is_hurried:
            # After those that are copied: of what they found some may be written again.
            self.store.write_ahead()
        self._restoring.release()
        self._room_watch.ask(now_s)
        self._handovers.advance(now_s)
        self.has_more = was_spent or self._forgetting.has_more or self.store.has_more
        orders = self.store.orders.take()
        for order in orders:
            self.store.orders.disk_watch.ask(order, now_s)
        return orders
