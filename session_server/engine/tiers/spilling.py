"""`Spilling`: copy what sessions at rest have published to host memory, before it has to go.

A session is spilled from the pools in the order in which pressure would cool it, and only what no
segment has yet. While the pools are far from full nothing is copied.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import Final

from cache.session_cache import SessionAwareCache
from cache.tiers.segment import Segment
from cache.tiers.segment_tree import Path
from cache.transit import Transit
from cache.types import SessionId, SlotState, Tokens
from session_server.core.tier_orders import CopyOut, TierResult
from session_server.engine.tiers.costs import Route
from session_server.engine.tiers.forgetting import Forgetting, Forgotten
from session_server.engine.tiers.store import TierStore

MAX_COPIES: Final = 2
"""Sessions that are copied at the same time."""

_MAX_TRIES: Final = 8
"""Times that a session may find no more room than before, until it is left as it is."""

_MIN_SEGMENTS: Final = 8
"""Segments that host memory has room for at least, if a page is no more."""

REST_S: Final = 30.0
"""Seconds that a session rests until it is copied where other servers may go on with it: this one
may be killed."""

_DIRTY_DIVISOR: Final = 4
"""Sessions are copied ahead of need while those at rest hold more than this part of the pages that
was not copied."""


@dataclass(slots=True)
class _Dirty:
    """Count the tokens of a session at rest that were not copied, the longest path that a try came
    to, and the tries since then. `used_ns`: when it came to rest."""

    num_tokens: int
    used_ns: int = 0
    reached_len: int = -1
    num_tries: int = 0

    def may_be_tried_again(self, reached_len: int) -> bool:
        """Note what a try came to. Two sessions that are longer than what there is room for would
        push each other out for ever."""
        self.num_tries = 0 if reached_len > self.reached_len else self.num_tries + 1
        self.reached_len = max(self.reached_len, reached_len)
        return self.num_tries < _MAX_TRIES


class Spilling:
    """Copy sessions at rest: while the store is draining all there are, those used last first."""

    def __init__(
        self,
        cache: SessionAwareCache,
        store: TierStore,
        forgetting: Forgetting,
        *,
        segment_bytes: int,
    ) -> None:
        """Begin with nothing to copy. `segment_bytes`: see `TierPolicy`."""
        self._cache, self._store, self._forgetting = cache, store, forgetting
        self._page_size = cache.spec.page_size
        num_pages = max(accounts.pages for accounts in cache.accounts().values())
        self._max_dirty = num_pages * self._page_size // _DIRTY_DIVISOR
        # In little memory too there is one to be written and one to be filled.
        segment_bytes = min(segment_bytes, store.host.max_bytes // _MIN_SEGMENTS)
        num_pages = max(1, segment_bytes // sum(store.tree.page_bytes.values()))
        self._max_len = num_pages * self._page_size
        self._dirty: OrderedDict[SessionId, _Dirty] = OrderedDict()
        """Sessions at rest with published tokens that were not copied; those at rest longest
        first."""

        self._num_dirty = 0
        self._last: dict[SessionId, Segment] = {}
        """The segment in which the copied history of a session ends."""

        self._copying: Counter[SessionId] = Counter()
        """Copies under way."""

        self.cuts: dict[SessionId, int] = {}
        """Tokens that no segment of a session goes past which has any before; see `WriteKV`."""

        self._full_at = -1
        """`_progress` when the last session found no room in host memory."""

    @property
    def _may_get_room(self) -> bool:
        """Return whether something in host memory may leave it soon that may not now."""
        return self._store.is_writing or self.is_copying or self._store.pace.is_spent

    @property
    def _is_waiting_for_room(self) -> bool:
        """Return whether nothing more may leave host memory than when a session found no room in
        it. Asking again in every step would read its history in every step."""
        return self._may_get_room and self._progress == self._full_at

    @property
    def _progress(self) -> int:
        """Return a number that grows whenever more may leave host memory: what was copied to it,
        and what was written to disk."""
        counts = self._store.counts
        return counts.spilled_bytes + counts.written_bytes + counts.failed_copies

    @property
    def is_copying(self) -> bool:
        """Return whether a session is being copied."""
        return bool(self._copying)

    @property
    def has_dirty(self) -> bool:
        """Return whether a session at rest was not copied."""
        return bool(self._dirty)

    def note_rest(self, session_id: SessionId) -> None:
        """Note that the turn of a session has ended."""
        self._forget_dirty(session_id)
        if session_id not in self._cache:
            return
        slot = self._cache.slot(session_id)
        last = self._store.tree.living(self._last.get(session_id))
        num_dirty = slot.protected_len - (last.content.end if last is not None else 0)
        # A history that was cut may be shorter than what was copied and still be another one.
        if slot.state is SlotState.PARKED and slot.protected_len > 0:
            used_ns = self._store.uses.next_use()
            self._set_dirty(session_id, _Dirty(max(num_dirty, self._page_size), used_ns))

    def note_turn(self, session_id: SessionId) -> None:
        """Note that a turn has borrowed a session."""
        self._forget_dirty(session_id)

    def cut_by(self, session_id: SessionId, base_len: int) -> Forgotten | None:
        """Return what is cut off a history that keeps its first tokens; None if nothing of that can
        be kept. O(1) if it is less than a page."""
        slot, page_size = self._cache.slot(session_id), self._page_size
        is_cut = base_len // page_size < slot.num_tokens // page_size
        if not is_cut or self._store.is_empty:
            return None
        tokens = self._cache.tokens(session_id, 0, slot.num_tokens)
        return Forgotten(slot.namespace, tokens, base_len)

    def note_cut(self, session_id: SessionId, cut: Forgotten) -> None:
        """Drop what was cut off a history: nobody knows these tokens any more."""
        last = self._store.tree.living(self._last.get(session_id))
        if last is not None and last.content.end > cut.num_kept:
            path = self._store.find(cut.namespace, cut.tokens[: cut.num_kept])
            self._set_last(session_id, path.parts[-1].segment if path.parts else None)
        self._forgetting.add(cut)

    def note_restored(self, session_id: SessionId, segment: Segment) -> None:
        """Note that the history of a session was found in segments that end with this one, or with
        what is known to follow it."""
        last = self._last.get(session_id)
        if last is None or self._store.tree.get(last.number) is not last:
            self._set_last(session_id, segment)

    def forget(self, session_id: SessionId, *, is_deleted: bool) -> None:
        """Forget a session that is about to be closed. One that `is_deleted` leaves nothing that
        only it had."""
        self._forget_dirty(session_id)
        last = self._last.pop(session_id, None)
        if last is not None:
            last.num_sessions -= 1
        if is_deleted and session_id in self._cache:
            namespace = self._cache.slot(session_id).namespace
            tokens = self._cache.tokens(session_id)
            self._forgetting.add(Forgotten(namespace, tokens, last=last))

    @property
    def _has_rested(self) -> bool:
        """Return whether a session has been at rest for long enough to be there for others."""
        rested_s = self._store.uses.now_s - REST_S
        return self._store.is_shared and next(iter(self._dirty.values())).used_ns <= rested_s * 1e9

    def advance(self) -> None:
        """Order copies that are due. O(1) while none is."""
        while self._dirty and len(self._copying) < MAX_COPIES:
            is_draining = self._store.writes.is_draining
            is_due = is_draining or self._num_dirty > self._max_dirty or self._has_rested
            if not is_due or self._is_waiting_for_room or self._store.pace.is_spent:
                return
            session_id = next(reversed(self._dirty) if is_draining else iter(self._dirty))
            if session_id in self._copying:
                return
            is_begun = self._begin(session_id)
            # One that is refused for good is the only one in a step, unless no other may come.
            if session_id in self._dirty or not (is_begun or is_draining):
                return

    def holds(self, session_id: SessionId) -> bool:
        """Return whether a session must be copied before it is cooled, and order that."""
        if session_id in self._copying:
            return True
        if session_id not in self._dirty:
            return False
        if len(self._copying) >= MAX_COPIES or self._store.pace.is_spent:
            return True  # it comes next
        if self._is_waiting_for_room:
            return False
        is_begun = self._begin(session_id)
        if session_id in self._dirty and self._store.pace.is_spent:
            return True  # the next step makes the rest of its room
        return is_begun and session_id in self._copying

    def copies(self, session_id: SessionId) -> bool:
        """Return whether a session is being copied, or may be once there is room for it, and order
        that."""
        return self.holds(session_id) or (session_id in self._dirty and self._may_get_room)

    def copy_now(self, session_id: SessionId) -> None:
        """Begin to copy a session that is about to lose its KV, whether or not that is due."""
        if session_id in self._dirty and session_id not in self._copying:
            self._begin(session_id, asks_disk=not self._store.is_shared)
        self._forget_dirty(session_id)

    def last_of(self, session_id: SessionId) -> Segment | None:
        """Return the segment in which the copied history of a session ends; None if there is
        none."""
        return self._store.tree.living(self._last.get(session_id))

    def _begin(self, session_id: SessionId, *, asks_disk: bool = True) -> bool:
        """Copy what no segment has of a session; return False if not all of it could be: it is to
        be tried again then where it is still dirty. `asks_disk`: a file that has more comes first.
        """
        store, cache = self._store, self._cache
        if not store.is_listed:
            return False
        slot = cache.slot(session_id)
        tokens = cache.tokens(session_id, 0, slot.protected_len)
        path = store.find(slot.namespace, tokens)
        if asks_disk and store.is_unread(path.next_name):
            self._copying[session_id] += 1
            store.find_files(slot.namespace, tokens, path, lambda: self._note_end(session_id))
            return True
        dirty = self._forget_dirty(session_id)
        store.touch((part.segment for part in path.parts), dirty.used_ns)
        if path.parts:
            self._set_last(session_id, path.parts[-1].segment)
        free_bytes = store.host.free_bytes
        while path.length < slot.protected_len:
            added = self._copy(session_id, tokens, path, used_ns=dirty.used_ns)
            if added is None:
                # A try that has made room, and was cut short, was not in vain.
                is_early = store.pace.is_spent and store.host.free_bytes > free_bytes
                if is_early or (self._may_get_room and dirty.may_be_tried_again(path.length)):
                    dirty.num_tokens = slot.protected_len - path.length
                    self._set_dirty(session_id, dirty)
                    self._full_at = -1 if store.pace.is_spent else self._progress
                break
            path = path.followed_by(added)
        return path.length >= slot.protected_len

    def _copy(
        self, session_id: SessionId, tokens: Tokens, path: Path, *, used_ns: int
    ) -> Segment | None:
        """Copy the next pages of a session behind a path; return None if they have no room, or it
        is not worth it."""
        store, copies = self._store, self._cache.copies
        namespace = self._cache.slot(session_id).namespace
        # Of a path the end gives way first: what follows one that is dropped is lost with it.
        used_ns -= len(path.parts)
        room_len = self.cuts.get(session_id, 0) - path.length
        max_len = min(self._max_len, room_len) if room_len > 0 else self._max_len
        transit = copies.begin_out(namespace, tokens, path.length, max_len)
        if transit is None:
            return None
        spans = {pool: (each.first, each.end) for pool, each in transit.pages.items()}
        added = tokens[path.length : transit.end]
        num_bytes = store.tree.bytes_of(added, spans)
        has_room = self._is_worth(len(added), num_bytes, used_ns) and store.make_room(num_bytes)
        # What gave way may have been the beginning of the same path.
        if not (has_room and store.tree.has(path)):
            copies.end_out(transit)
            return None
        segment = store.tree.add(namespace, path, added, spans)
        store.enter_host(segment, used_ns)
        self._set_last(session_id, segment)
        self._copying[session_id] += 1
        pages = {pool: each.pages for pool, each in transit.pages.items()}
        store.orders.add(
            lambda number: CopyOut(number, segment.number, pages),
            lambda result: self._end(session_id, segment, transit, result),
        )
        return segment

    def _is_worth(self, num_tokens: int, num_bytes: int, used_ns: int) -> bool:
        """Return whether a copy out and back takes less time than to compute the tokens. At the end
        what does not reach the disk is lost."""
        if self._store.writes.is_draining and not self._store.may_be_written(num_bytes, used_ns):
            return False
        costs, load = self._store.costs, {Route.OUT: num_bytes, Route.IN: num_bytes}
        is_worth = costs.is_worth(num_tokens, load)
        if not is_worth:
            costs.forgive(num_tokens, load)
        return is_worth

    def _end(
        self, session_id: SessionId, segment: Segment, transit: Transit, result: TierResult
    ) -> None:
        self._note_end(session_id)
        counts, is_whole = self._store.counts, result.refusal is None
        is_whole = self._cache.copies.end_out(transit) and is_whole
        if self._store.end_copy(segment, is_whole=is_whole):
            counts.spilled_tokens += len(segment.content.tokens)
            counts.spilled_bytes += segment.content.num_bytes
            counts.spill_ms += result.seconds * 1e3
            num_pages = {pool: len(each.pages) for pool, each in transit.pages.items()}
            num_bytes = self._store.tree.page_bytes_of(num_pages)
            self._store.costs.note_copy(Route.OUT, num_bytes, result.seconds)
        elif not is_whole:
            counts.failed_copies += 1

    def _note_end(self, session_id: SessionId) -> None:
        self._copying[session_id] -= 1
        if not self._copying[session_id]:
            del self._copying[session_id]

    def _set_dirty(self, session_id: SessionId, dirty: _Dirty) -> None:
        self._dirty[session_id] = dirty
        self._num_dirty += dirty.num_tokens

    def _forget_dirty(self, session_id: SessionId) -> _Dirty:
        dirty = self._dirty.pop(session_id, None) or _Dirty(0)
        self._num_dirty -= dirty.num_tokens
        return dirty

    def _set_last(self, session_id: SessionId, segment: Segment | None) -> None:
        """Replace the segment in which a session ends; drop what was cut off its history. None: all
        of it was."""
        before = self._last.pop(session_id, None)
        if segment is not None:
            self._last[session_id] = segment
            segment.num_sessions += 1
        if before is not None:
            before.num_sessions -= 1
            self._store.drop_unshared(before)
