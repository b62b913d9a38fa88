"""`Restoring`: copy KV back into the pools, ahead of the turn that reads it.

A turn of a cold session whose KV lies outside of the pools waits for the copy instead of computing
it again. The copy begins when the turn is submitted if there are pages that nobody needs, else when
the turn is admitted and pages were found for it. A waiting turn holds none of them: they are in the
tree once the copy is complete. Others pass it meanwhile.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, Literal, NamedTuple

from cache.errors import NotWorthIt, OutOfPages
from cache.session_cache import SessionAwareCache
from cache.tiers.segment_tree import Path
from cache.transit import Transit
from cache.types import Namespace, SessionId, SlotState, Tokens
from session_server.core.tier_orders import (
    CopyIn,
    FoundFile,
    ReadPart,
    Refusal,
    TierResult,
    reads_disk,
)
from session_server.engine.in_flight import InFlight
from session_server.engine.tiers.costs import Load, Route
from session_server.engine.tiers.order_book import Continue
from session_server.engine.tiers.spilling import Spilling
from session_server.engine.tiers.store import TierStore

CopyEnd = Literal["over", "no pages"]
"""Whether a copy has ended, whatever came of it, or was never begun because there were no pages."""

Then = Callable[[CopyEnd], None]

_AHEAD_DIVISOR: Final = 4
"""Part of the pages into which sessions are copied back before anybody has found pages for their
turns."""

_PLANNED_DIVISOR: Final = 2
"""Part of the pages into which the other sessions are copied back. More of them would push each
other out again before a turn has them."""


@dataclass(frozen=True, slots=True)
class _Wanted:
    """Say what of a path can be copied back, and whether that is worth it."""

    store: TierStore
    path: Path

    def longest_len(self, start: int) -> int:
        return self.store.tree.continuable_len(self.path, start)

    def is_worth(self, start: int, end: int) -> bool:
        return self.store.costs.is_worth(end - start, self.load(start, end))

    def load(self, start: int, end: int) -> Load:
        """Return the bytes that are moved for the tokens [start, end)."""
        num_copied = num_read = 0
        for part in self.path.parts:
            content, last = part.segment.content, min(part.end, end)
            num_tokens = last - max(start, content.start)
            if num_tokens > 0:
                num_copied += int(content.num_bytes * num_tokens / len(content.tokens))
                num_read += 0 if part.segment.in_host else content.num_bytes
        return {Route.IN: num_copied} | ({Route.READ: num_read} if num_read else {})


class _Room(Enum):
    """Say for what pages are taken."""

    AHEAD = auto()
    """Nobody has found pages for it yet."""

    PLANNED = auto()
    """Pages were found for the turn that waits for it."""


class _Unused(NamedTuple):
    """Count pages that were copied back for a session until a turn has them."""

    room: _Room
    num_pages: int


@dataclass(frozen=True, slots=True)
class _Wish:
    """Name what is to be copied back."""

    session_id: SessionId
    namespace: Namespace
    tokens: Tokens
    room: _Room


@dataclass(frozen=True, slots=True, eq=False)
class _Copy:
    """Describe a copy that was begun.

    `num_forwards`: the last forward that may write its pages for whoever had them before.
    `num_clears`: how often all was dropped before. `num_bytes`: of its pages. `used_ns`: when what
    it reads was used last.
    """

    session_id: SessionId
    path: Path
    transit: Transit
    parts: tuple[ReadPart, ...]
    used_ns: int
    num_bytes: int
    num_forwards: int
    num_clears: int

    @property
    def reads_disk(self) -> bool:
        """Return whether it waits for the disk."""
        return reads_disk(self.parts)


class Restoring:
    """Copy sessions back. At most one copy per session is under way."""

    def __init__(
        self,
        cache: SessionAwareCache,
        store: TierStore,
        *,
        spilling: Spilling,
        in_flight: InFlight,
    ) -> None:
        self._cache, self._store, self._spilling = cache, store, spilling
        self._in_flight = in_flight
        self._page_size = cache.spec.page_size
        self._waiting: dict[SessionId, list[Then]] = {}
        """Sessions that are copied, and what is done when that has ended."""

        self._unused: dict[SessionId, _Unused] = {}
        self._num_unused: Counter[_Room] = Counter()
        self._deferred: OrderedDict[SessionId, _Wish] = OrderedDict()
        """Sessions that are copied once those before them have been used, in order."""

        self._num_clears = 0
        self._num_pages = max(each.pages for each in cache.accounts().values())
        self._held: deque[_Copy] = deque()
        """Copies that wait for forwards."""

    def begin(
        self, session_id: SessionId, tokens: Tokens, then: Then | None, *, is_ahead: bool
    ) -> bool:
        """Begin to copy back what the pools lack of `tokens`, int32 [n], the context that a turn of
        a cold session may reuse.

        Args:
            session_id: the session.
            tokens: see above.
            then: called once, see `CopyEnd`; None: nobody waits, so it counts as used at its end.
            is_ahead: nobody has found pages for it yet.

        Returns:
            Whether the session is copied, now or later, so that `then` will be called.
        """
        waiting = [] if then is None else [then]
        if session_id in self._waiting:
            self._waiting[session_id] += waiting
            return True
        slot = self._cache.slot(session_id)
        if slot.state is not SlotState.COLD or len(tokens) < self._page_size:
            return False
        self.note_used(session_id)
        room = _Room.AHEAD if is_ahead else _Room.PLANNED
        wish = _Wish(session_id, slot.namespace, tokens, room)
        has_room = self._has_room(wish)
        if is_ahead and not has_room:
            return False
        path = self._path_of(wish)
        if not has_room and (path.parts or self._store.is_unread(path.next_name)):
            self._deferred[session_id] = wish
        elif not self._begin(wish, path):
            self._store.counts.lookups += not is_ahead and self._is_missing(wish)
            return False
        self._store.counts.lookups += 1
        self._waiting[session_id] = waiting
        return True

    def begin_deferred(self) -> None:
        """Begin what had to wait until others were used. O(1) while there is no room."""
        while self._deferred:
            session_id, wish = next(iter(self._deferred.items()))
            if not self._has_room(wish):
                return
            del self._deferred[session_id]
            if not self._begin(wish, self._path_of(wish)):
                # The pages that were found for it may have gone to others since.
                self._finish(session_id, "no pages")

    def note_used(self, session_id: SessionId) -> None:
        """Note that a turn has what was copied back, or wants it no more."""
        unused = self._unused.pop(session_id, None)
        if unused is not None:
            self._num_unused[unused.room] -= unused.num_pages

    def forget(self, session_id: SessionId) -> None:
        """Forget a session whose turn has ended, or that is about to be closed."""
        self.note_used(session_id)
        if self._deferred.pop(session_id, None) is not None:
            self._finish(session_id)

    def clear(self) -> None:
        """Use nothing that is on its way: it may be wrong."""
        self._num_clears += 1

    def release(self) -> None:
        """Order the copies whose pages no forward can write any more."""
        num_settled = self._in_flight.num_forwards - len(self._in_flight)
        while self._held and self._held[0].num_forwards <= num_settled:
            self._order(self._held.popleft())

    def give_up_held(self) -> None:
        """Go on without what would be read from a disk that does not answer, and is not ordered."""
        given_up = [copy for copy in self._held if copy.reads_disk]
        self._held = deque(copy for copy in self._held if not copy.reads_disk)
        for copy in given_up:
            self._cache.copies.end_in(copy.transit, is_whole=False)
            self._store.counts.failed_copies += 1
            self._finish(copy.session_id)

    def _has_room(self, wish: _Wish) -> bool:
        num_unused, is_ahead = self._num_unused[wish.room], wish.room is _Room.AHEAD
        if not is_ahead and num_unused == 0:
            return True
        most = self._num_pages // (_AHEAD_DIVISOR if is_ahead else _PLANNED_DIVISOR)
        return num_unused + len(wish.tokens) // self._page_size <= most

    def _is_missing(self, wish: _Wish) -> bool:
        """Return whether the pools lack KV that the session had before."""
        num_had = min(self._cache.slot(wish.session_id).num_tokens, len(wish.tokens))
        num_pages = max(0, num_had - 1) // self._page_size  # the last token has no KV
        match = self._cache.peek(wish.tokens, wish.namespace)
        return num_pages * self._page_size > match.matched_len

    def _path_of(self, wish: _Wish) -> Path:
        return self._store.find_readable(wish.namespace, wish.tokens)

    def _begin(self, wish: _Wish, path: Path) -> bool:
        """Copy a session, or read first what the disk has of it; return False if it is not."""
        if self._store.is_unread(path.next_name):
            self._store.find_files(wish.namespace, wish.tokens, path, lambda: self._go_on(wish))
        elif not self._copy(wish, path):
            return False
        num_pages = len(wish.tokens) // self._page_size
        self._unused[wish.session_id] = _Unused(wish.room, num_pages)
        self._num_unused[wish.room] += num_pages
        return True

    def _go_on(self, wish: _Wish) -> None:
        """Copy what was found on disk, or end."""
        is_there = wish.session_id in self._cache
        if not (is_there and self._copy(wish, self._path_of(wish))):
            self._finish(wish.session_id)

    def _finish(self, session_id: SessionId, end: CopyEnd = "over") -> None:
        waiting = self._waiting.pop(session_id)
        if not waiting:
            self.note_used(session_id)
        for then in waiting:
            then(end)

    def _copy(self, wish: _Wish, path: Path) -> bool:
        store, wanted, is_ahead = self._store, _Wanted(self._store, path), wish.room is _Room.AHEAD
        try:
            transit = self._cache.copies.begin_in(
                wish.namespace, wish.tokens, wanted, is_ahead=is_ahead
            )
        except OutOfPages:
            return False
        except NotWorthIt as refusal:
            load = wanted.load(refusal.start, refusal.end)
            store.costs.forgive(refusal.end - refusal.start, load)
            return False
        if transit is None:
            return False
        num_pages = {pool: len(each.pages) for pool, each in transit.pages.items()}
        copy = _Copy(
            session_id=wish.session_id,
            path=path,
            transit=transit,
            parts=self._parts(path, transit),
            used_ns=store.touch(part.segment for part in path.parts),
            num_bytes=store.tree.page_bytes_of(num_pages),
            num_forwards=self._in_flight.num_forwards,
            num_clears=self._num_clears,
        )
        self._held.append(copy)
        return True

    def _order(self, copy: _Copy) -> None:
        self._store.orders.add(
            lambda number: CopyIn(number, copy.parts, copy.used_ns),
            lambda result: self._end(copy, result),
            give_up=(lambda: self._give_up(copy)) if copy.reads_disk else None,
        )

    def _parts(self, path: Path, transit: Transit) -> tuple[ReadPart, ...]:
        """Return what to read for the pages of a copy: each of them once."""
        parts, page_size = [], self._page_size
        for part in path.parts:
            segment = part.segment
            pages = {}
            for pool, wanted in transit.pages.items():
                has_first, has_end = segment.content.spans.get(pool, (0, 0))
                first = max(wanted.first, has_first)
                end = min(wanted.end, has_end, part.end // page_size)
                if first < end:
                    ids = wanted.pages[first - wanted.first : end - wanted.first]
                    pages[pool] = (first - has_first, ids)
            if pages:
                found = None if segment.in_host else FoundFile.of(segment.content)
                parts.append(ReadPart(segment.number, found, pages))
        num_read = sum(len(ids) for part in parts for _, ids in part.pages.values())
        num_wanted = sum(len(each.pages) for each in transit.pages.values())
        assert num_read == num_wanted, "every page that comes in is read once"
        return tuple(parts)

    def _count(self, copy: _Copy, result: TierResult) -> None:
        counts, costs, transit = self._store.counts, self._store.costs, copy.transit
        counts.restored_tokens += transit.end - transit.start
        counts.restored_bytes += copy.num_bytes
        counts.restore_ms += result.seconds * 1e3
        counts.hits += 1
        costs.note_copy(Route.READ, result.read_bytes, result.read_s)
        costs.note_copy(Route.IN, copy.num_bytes, result.seconds - result.read_s)

    def _end(self, copy: _Copy, result: TierResult) -> None:
        store, transit = self._store, copy.transit
        is_whole = result.refusal is None and self._num_clears == copy.num_clears
        if self._cache.copies.end_in(transit, is_whole=is_whole):
            self._count(copy, result)
            segments = [part.segment for part in copy.path.parts]
            last = [each for each in segments if each.content.start < transit.end][-1]
            if copy.session_id in self._cache and store.tree.get(last.number) is last:
                self._spilling.note_restored(copy.session_id, last)
        elif not is_whole:
            store.counts.failed_copies += 1
        self._refuse(result)
        self._finish(copy.session_id)

    def _give_up(self, copy: _Copy) -> Continue:
        """Go on without a copy that may still be made, into pages that nobody gets meanwhile."""
        self._cache.copies.abandon_in(copy.transit)
        self._store.counts.failed_copies += 1
        self._finish(copy.session_id)
        return lambda result: self._end_late(copy, result)

    def _end_late(self, copy: _Copy, result: TierResult) -> None:
        self._cache.copies.end_in(copy.transit, is_whole=False)
        self._store.costs.note_copy(Route.READ, result.read_bytes, result.read_s)
        self._refuse(result)

    def _refuse(self, result: TierResult) -> None:
        """Drop a segment whose file was not what it should be."""
        refusal, number = result.refusal, result.wrong_segment
        if refusal in (Refusal.WRONG, Refusal.GONE) and number is not None:
            segment = self._store.tree.get(number)
            if segment is not None:
                self._store.refuse_file(segment, refusal)
