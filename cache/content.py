"""Level 3 of the memory check, the part of the books: which page is looked at, and who is to blame.

Looking is the device's work (`core.batch.Probe`). Here pages are chosen, and a verdict of "wrong"
is turned into violations.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from cache.checker import Violation
from cache.session_cache import SessionAwareCache
from cache.session_slot import SessionSlot
from cache.types import (
    NULL_PAGE,
    PoolName,
    RowId,
    SessionId,
    SlotState,
    StateMoves,
    Tokens,
    pages_for,
)

MAX_SKIPPED: Final = 16
"""Sessions that one choice of a page looks at: it happens between two forwards."""


@dataclass(frozen=True, slots=True)
class PageContent:
    """What a page of a session has to hold: KV of `tokens`, at positions from `start` on.

    `tokens`: int32 [n], a whole page of them or the valid part of the last one. `pages`: where
    they lie, per pool of positions. `states`: the recurrent state before them, and as its target
    the one kept after them, `NULL_PAGE` if none is; None where no layer has one.
    """

    session_id: SessionId
    row: RowId
    start: int
    tokens: Tokens
    pages: Mapping[PoolName, int]
    states: StateMoves | None = None


class PageScrubber:
    """Goes round all pages of all parked sessions; deterministic, without randomness or clock.

    A round takes one page of every session that is parked when it begins; the next round takes the
    page after it. So in as many rounds as the longest session has pages, no page is left out.
    Sessions begin at pages of their own choosing: those that share a beginning would otherwise
    show the same page one after another.

    A page is computed from those before it. Where a window has let go of them, the session's last
    page stands in for it; a session in which that cannot be computed either is passed over. So is
    one longer than its window at rest, as a rule: it holds what its next token reads, no more.
    After `MAX_SKIPPED` of them there is no page to look at this time.
    """

    def __init__(self) -> None:
        self._round = -1
        self._left: deque[SessionId] = deque()
        self._rechecks: deque[tuple[int, Mapping[PoolName, int]]] = deque()

    @property
    def has_rechecks(self) -> bool:
        """Whether pages wait that a fault elsewhere has put in doubt."""
        return bool(self._rechecks)

    def next(self, cache: SessionAwareCache) -> PageContent | None:
        """The next page to look at; None when there is none."""
        if (content := self._next_recheck(cache)) is not None:
            return content
        has_begun = False
        for _ in range(MAX_SKIPPED):
            if not self._left:
                if has_begun:
                    return None
                has_begun = True
                self._round += 1
                self._left.extend(cache.idle.session_ids())
            if self._left and (content := self._page_of(cache, self._left.popleft())) is not None:
                return content
        return None

    def attribute(self, cache: SessionAwareCache, content: PageContent) -> list[Violation]:
        """What it means that a page holds something else.

        Every session that has the page at the same place has the same pages before it and reads
        the same wrong content, so every one of them is in doubt. When none has it any more, it may
        still be published: then nobody is named. A wrong page makes those after it look wrong, too:
        earlier pages that sessions not named share are looked at next.
        """
        index = content.start // cache.spec.page_size
        end = content.start + len(content.tokens)
        text = f"positions {content.start} to {end} hold other KV than their tokens give"
        named = _holders(cache, index, content.pages)
        if not named:
            return [Violation(f"{content.session_id}, gone meanwhile: {text}")]
        for earlier in range(index):
            pages = _pages_at(cache, named[0], earlier)
            if len(_holders(cache, earlier, pages)) > len(named):
                self._rechecks.append((earlier, pages))
        return [Violation(f"{slot.session_id}: {text}", slot.session_id) for slot in named]

    def _next_recheck(self, cache: SessionAwareCache) -> PageContent | None:
        while self._rechecks:
            index, pages = self._rechecks.popleft()
            for slot in _holders(cache, index, pages):
                is_published = (index + 1) * cache.spec.page_size <= slot.cache_protected_len
                if is_published and (content := _content(cache, slot, index)) is not None:
                    return content
        return None

    def _page_of(self, cache: SessionAwareCache, session_id: SessionId) -> PageContent | None:
        """The page of a session whose turn it is in this round, or its last one."""
        slot = cache.inspect().slots.get(session_id)
        if slot is None or slot.state is not SlotState.PARKED or slot.kv_committed_len == 0:
            return None
        num_pages = pages_for(slot.kv_committed_len, cache.spec.page_size)
        index = (self._round + zlib.crc32(session_id.encode())) % num_pages
        return _content(cache, slot, index) or _content(cache, slot, num_pages - 1)


def _content(cache: SessionAwareCache, slot: SessionSlot, index: int) -> PageContent | None:
    """Page `index` of a slot: of a parked one, or a published page, which nobody writes either.

    None where it cannot be computed again: it was let go, or what its positions read was.
    """
    assert slot.lease is not None
    start = index * cache.spec.page_size
    pages = _pages_at(cache, slot, index)
    if not all(pages.values()) or slot.lease.rewound_len(start) < start:
        return None
    end = min(start + cache.spec.page_size, slot.kv_committed_len)
    tokens, states = slot.tokens.copy(start, end), slot.lease.kept_states(start, end)
    return PageContent(slot.session_id, slot.lease.row, start, tokens, pages, states)


def _pages_at(cache: SessionAwareCache, slot: SessionSlot, index: int) -> Mapping[PoolName, int]:
    assert slot.lease is not None
    rows, row = cache.inspect().stores.rows, slot.lease.row
    return {pool: int(rows.entries(pool, row)[index]) for pool in cache.paged_pools}


def _holders(
    cache: SessionAwareCache, index: int, pages: Mapping[PoolName, int]
) -> list[SessionSlot]:
    """The slots whose row has one of the pages at `index`."""
    stores, slots = cache.inspect()
    rows = stores.rows
    return [
        slot
        for slot in slots.values()
        if slot.lease is not None
        and any(
            page != NULL_PAGE and rows.entries(pool, slot.lease.row)[index] == page
            for pool, page in pages.items()
        )
    ]
