"""Level 3 of the memory check, the part of the books: which page is looked at, and who is to blame.

Looking is the device's work (`core.batch.Probe`). Here pages of parked sessions are chosen, and a
verdict of "wrong" is turned into violations.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from cache.checker import Violation
from cache.session_cache import SessionAwareCache
from cache.types import PoolName, RowId, SessionId, SlotState, Tokens, pages_for


@dataclass(frozen=True, slots=True)
class PageContent:
    """What a page of a parked session has to hold: KV of `tokens`, at positions from `start` on.

    `tokens`: int32 [n], a whole page of them or the valid part of the last one. `pages`: where
    they lie, per pool.
    """

    session_id: SessionId
    row: RowId
    start: int
    tokens: Tokens
    pages: Mapping[PoolName, int]


class Rotation:
    """Goes round all pages of all parked sessions; deterministic, without randomness or clock.

    A round takes one page of every session that is parked when it begins; the next round takes the
    page after it. So in as many rounds as the longest session has pages, no page is left out.
    Sessions begin at pages of their own choosing: those that share a beginning would otherwise
    show the same page one after another.
    """

    def __init__(self) -> None:
        self._round = -1
        self._left: Iterator[SessionId] = iter(())

    def next(self, cache: SessionAwareCache) -> PageContent | None:
        """The next page to look at; None when no parked session has any."""
        content = self._next_of_round(cache)
        if content is None:
            self._round += 1
            slots = cache.inspect_slots()
            parked = [slot.session_id for slot in slots if slot.state is SlotState.PARKED]
            self._left = iter(parked)
            content = self._next_of_round(cache)
        return content

    def _next_of_round(self, cache: SessionAwareCache) -> PageContent | None:
        for session_id in self._left:
            num_pages = _num_parked_pages(cache, session_id)
            if num_pages:
                index = (self._round + zlib.crc32(session_id.encode())) % num_pages
                return content_of(cache, session_id, index)
        return None


def content_of(cache: SessionAwareCache, session_id: SessionId, index: int) -> PageContent:
    """Page `index` of a parked session."""
    (slot,) = cache.inspect_slots(session_id)
    lease, stores = slot.lease, cache.stores
    assert slot.state is SlotState.PARKED, "nobody writes the pages of a parked session"
    assert lease is not None
    start = index * stores.page_size
    end = min(start + stores.page_size, lease.computed_len)
    return PageContent(
        session_id=session_id,
        row=lease.row,
        start=start,
        tokens=slot.tokens.copy(start, end),
        pages={pool: int(stores.rows.entries(pool, lease.row)[index]) for pool in stores.ledgers},
    )


def blame(cache: SessionAwareCache, content: PageContent) -> list[Violation]:
    """What it means that a page holds something else.

    Every session that has the page at the same place has the same tokens before it and reads the
    same wrong content, so every one of them is in doubt. When none has it any more, it may still be
    published: then nobody is named.
    """
    stores, index = cache.stores, content.start // cache.stores.page_size
    end = content.start + len(content.tokens)
    text = f"positions {content.start} to {end} hold other KV than their tokens give"
    holders = [
        slot.session_id
        for slot in cache.inspect_slots()
        if slot.lease is not None
        and any(
            stores.rows.entries(pool, slot.lease.row)[index] == page
            for pool, page in content.pages.items()
        )
    ]
    if not holders:
        return [Violation(f"{content.session_id}, gone meanwhile: {text}")]
    return [Violation(f"{name}: {text}", name) for name in holders]


def _num_parked_pages(cache: SessionAwareCache, session_id: SessionId) -> int:
    slot = next(cache.inspect_slots(session_id), None)
    if slot is None or slot.state is not SlotState.PARKED:
        return 0
    return pages_for(slot.kv_committed_len, cache.stores.page_size)
