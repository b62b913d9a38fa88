"""Level 3 of the memory check: choose pages whose content is verified, and attribute wrong ones.

The device recomputes and compares a page (`core.batch.Probe`). Here pages are chosen, and a page
that differs is turned into violations of the sessions that have it.
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
"""Sessions that one choice of a page tries; bounded, because it runs between two forwards."""


@dataclass(frozen=True, slots=True)
class PageContent:
    """Describe what a page of a session must hold: KV of `tokens`, at positions from `start` on.

    `tokens`: int32 [n], a whole page or the valid part of the last one. `pages`: the page id per
    paged pool. `states`: the recurrent state before the tokens and, as its target, the one kept
    after them or `NULL_PAGE`; None without a recurrent pool.
    """

    session_id: SessionId
    row: RowId
    start: int
    tokens: Tokens
    pages: Mapping[PoolName, int]
    states: StateMoves | None = None


class PageScrubber:
    """Choose pages of parked sessions in turn; deterministic, without randomness or clock.

    A round takes one page of every session that is parked when the round begins; the next round
    takes the page after it. After as many rounds as the longest session has pages, every page was
    chosen. Each session starts at a page that depends on its id: otherwise sessions that share a
    prefix would offer the same page one after another.

    A page can be recomputed only from those before it. If a window pool has freed them, the last
    page of the session is chosen instead; if that cannot be recomputed either, the session is
    skipped. Most parked sessions longer than their window are: they hold only what the next token
    reads. After `MAX_SKIPPED` skipped sessions no page is chosen this time.
    """

    def __init__(self) -> None:
        self._round = -1
        self._left: deque[SessionId] = deque()
        self._rechecks: deque[tuple[int, Mapping[PoolName, int]]] = deque()

    @property
    def has_rechecks(self) -> bool:
        """Return whether pages wait to be checked because a page after them was wrong."""
        return bool(self._rechecks)

    def next(self, cache: SessionAwareCache) -> PageContent | None:
        """Return the next page to verify; None when there is none."""
        if (content := self._next_recheck(cache)) is not None:
            return content
        has_begun = False
        for _ in range(MAX_SKIPPED):
            if not self._left:
                if has_begun:
                    return None
                has_begun = True
                self._round += 1
                self._left.extend(cache.parked.session_ids())
            if self._left and (content := self._page_of(cache, self._left.popleft())) is not None:
                return content
        return None

    def attribute(self, cache: SessionAwareCache, content: PageContent) -> list[Violation]:
        """Return the violations of a page that holds other KV than its tokens give.

        Every session that has the page at the same index reads the wrong content, so each of them
        is named. If none has it any more, it may still be published: the violation names no
        session. A wrong page makes those after it look wrong, so earlier pages that further
        sessions share are verified next.
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
        """Return the page of a session that this round chooses, or its last page instead."""
        slot = cache.inspect().slots.get(session_id)
        if slot is None or slot.state is not SlotState.PARKED or slot.kv_committed_len == 0:
            return None
        num_pages = pages_for(slot.kv_committed_len, cache.spec.page_size)
        index = (self._round + zlib.crc32(session_id.encode())) % num_pages
        return _content(cache, slot, index) or _content(cache, slot, num_pages - 1)


def _content(cache: SessionAwareCache, slot: SessionSlot, index: int) -> PageContent | None:
    """Return page `index` of a slot. No turn may be writing it: the slot is parked, or the page is
    published.

    None if it cannot be recomputed: it was freed, or a page that its positions read was.
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
    """Return the slots whose row has one of the pages at `index`."""
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
