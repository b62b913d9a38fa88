"""`PageCopies`: copy published pages out of the pools and back, while everything goes on.

What goes out is copied, not moved: its pages stay in the tree, locked until the copy is complete,
so that nothing can overwrite them and turns may use them meanwhile. What comes in is in nobody's
reach until it is complete and verified: its pages are booked as SPILL and then enter the tree like
any others that were published, in one call. If that fails, they are freed.

A copy is made outside of the stream of forwards. The caller orders a copy that writes only when
every forward launched before `begin_in` has been settled: such a forward may still write a page for
its previous holder.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from cache.errors import NotWorthIt, OutOfPages
from cache.room import Room
from cache.stores import KVStores
from cache.transit import PageRange, Transit, TransitId
from cache.types import NULL_PAGE, Holder, Namespace, Tokens


class Wanted(Protocol):
    """Say what could come in."""

    def longest_len(self, start: int) -> int:
        """Return the longest length, in whole pages, that a forward can continue from once the
        pages behind `start` have come in; at most `start` if there is nothing."""

    def is_worth(self, start: int, end: int) -> bool:
        """Return whether the tokens [start, end) should come in rather than be computed."""


class PageCopies:
    """Begin and end copies of the pages of one cache."""

    def __init__(self, stores: KVStores, room: Room, *, num_begun: int = 0) -> None:
        self._stores, self.room = stores, room
        self.num_begun = num_begun

    @property
    def num_under_way(self) -> int:
        """Return the number of copies that keep pages from being used."""
        return len(self._stores.transits)

    def begin_out(
        self, namespace: Namespace, tokens: Tokens, start: int, max_len: int
    ) -> Transit | None:
        """Lock the published pages of `tokens` until `end_out`; return those that hold the next
        `max_len` positions from `start` on, both whole pages.

        They end where the tree ends, or where a window has lost a page. None if that leaves none.
        """
        stores, page_size = self._stores, self._stores.page_size
        receipt = stores.tree.lock_root(namespace)
        held = stores.tree.advance(receipt, stores.tree.match_after(receipt, tokens))
        if receipt.length <= start:
            stores.tree.unlock(receipt)
            return None
        end, pages = min(receipt.length, start + max_len), {}
        for component in stores.components:
            # Of a bounded pool only what a forward at the end of all that is locked.
            first = max(start // page_size, component.first_page(receipt.length))
            ids = held[component.pool][first : end // page_size]
            pages[component.pool] = PageRange(min(first, end // page_size), np.array(ids, np.int32))
        return self._enter(Transit(self._next(), receipt, start, end, pages))

    def end_out(self, transit: Transit) -> bool:
        """Unlock the pages of a copy that is complete; return whether it may be used. It may not
        if it was voided meanwhile."""
        if self._stores.transits.pop(transit.number, None) is None:
            return False
        self._note(transit)
        self._stores.tree.unlock(transit.receipt)
        return True

    def begin_in(
        self, namespace: Namespace, tokens: Tokens, wanted: Wanted, *, is_ahead: bool = False
    ) -> Transit | None:
        """Take pages for what `wanted` finds of `tokens` behind what the tree has of them. The
        caller writes them and calls `end_in`.

        Free, tail and evictable pages are taken, and no session is cooled. What is copied
        `is_ahead` of a plan takes none that a tenant's minimum keeps.

        Returns:
            None if nothing is found that the tree lacks.

        Raises:
            OutOfPages: a pool has too few pages; nothing was changed.
            NotWorthIt: what is found is not worth it; nothing was changed.
        """
        stores = self._stores
        receipt = stores.tree.lock_root(namespace)
        stores.tree.advance(receipt, stores.tree.match_after(receipt, tokens))
        start, page_size = receipt.length, stores.page_size
        end = wanted.longest_len(start)
        spans = {
            each.pool: (max(start // page_size, each.first_page(end)), end // page_size)
            for each in stores.components
        }
        counts = {stores.ledgers[pool]: last - first for pool, (first, last) in spans.items()}
        try:
            if end <= start:
                raise OutOfPages("nothing is wanted")
            if not wanted.is_worth(start, end):
                raise NotWorthIt(start, end)
            if is_ahead:
                self.room.check_unguarded(counts)
            self.room.make(counts)
        except (OutOfPages, NotWorthIt):
            stores.tree.unlock(receipt)
            if end <= start:
                return None
            raise
        pages = {}
        for pool, (first, last) in spans.items():
            ids = stores.allocators[pool].acquire(last - first, Holder.SPILL)
            pages[pool] = PageRange(first, np.array(ids, np.int32))
        transit = Transit(self._next(), receipt, start, end, pages, tokens[start:end].copy())
        return self._enter(transit)

    def end_in(self, transit: Transit, *, is_whole: bool) -> bool:
        """Publish the pages of a copy that is complete and verified, or free them; return whether
        they were published."""
        stores = self._stores
        if stores.transits.pop(transit.number, None) is None:
            self._free_fenced(transit)
            return False
        self._note(transit)
        if is_whole:
            self._publish(transit)
        else:
            for pool, each in transit.pages.items():
                stores.allocators[pool].release(each.pages.tolist(), Holder.SPILL)
        stores.tree.unlock(transit.receipt)
        return is_whole

    def abandon_in(self, transit: Transit) -> None:
        """Give up a copy that may still be written: nobody gets its pages before `end_in`."""
        stores = self._stores
        if stores.transits.pop(transit.number, None) is None:
            return  # a rebuild has fenced them already
        self._note(transit)
        for pool, each in transit.pages.items():
            stores.ledgers[pool].transfer(len(each.pages), Holder.SPILL, Holder.FENCED)
        fenced = {pool: each.pages.tolist() for pool, each in transit.pages.items()}
        stores.fenced[transit.number] = fenced
        stores.tree.unlock(transit.receipt)

    def void_out(self) -> None:
        """Unlock the pages of every copy on its way out, because their content is in doubt: none of
        the copies may be used."""
        for transit in [each for each in self._stores.transits.values() if not each.is_incoming]:
            self.end_out(transit)

    def _publish(self, transit: Transit) -> None:
        stores, tokens = self._stores, transit.tokens
        assert tokens is not None, "only what comes in is published"
        first, num_pages = transit.start // stores.page_size, len(tokens) // stores.page_size
        ours = {}
        for pool, each in transit.pages.items():
            stores.ledgers[pool].transfer(len(each.pages), Holder.SPILL, Holder.ACTIVE)
            missing = [NULL_PAGE] * (each.first - first)
            ours[pool] = missing + each.pages.tolist()
            assert len(ours[pool]) == num_pages, "what comes in ends with its last page"
        for pool, known in stores.tree.insert(transit.receipt, tokens, ours).items():
            # Somebody has computed the same meanwhile: the tree keeps one copy.
            twice = [mine for mine, its in zip(ours[pool], known, strict=False) if mine != its]
            stores.allocators[pool].release(filter(None, twice), Holder.ACTIVE)

    def _free_fenced(self, transit: Transit) -> None:
        """Free the pages that were fenced because this copy still wrote them."""
        if transit.is_incoming and transit.number in self._stores.fenced:
            for pool, ids in self._stores.fenced.pop(transit.number).items():
                self._stores.allocators[pool].release(ids, Holder.FENCED)

    def _enter(self, transit: Transit) -> Transit:
        self._stores.transits[transit.number] = transit
        self._note(transit)
        return transit

    def _note(self, transit: Transit) -> None:
        self._stores.changes.record_session(transit.name)

    def _next(self) -> TransitId:
        self.num_begun += 1
        return TransitId(self.num_begun)
