"""`PageAllocator`: allocate and free the pages of one pool.

Pages are allocated from *extents*, so that a session's pages are consecutive where possible:
attention over consecutive pages reads a strided view, over scattered pages it gathers (on CPUs 6 to
12 times slower). Free pages form a coalesced map of extents. A session that grows takes the page
after its last one. A new run starts in the middle of the largest extent, so that the session before
it and the new one both have room to grow. Every call costs O(pages named + log extents).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from cache.errors import AuditFailed, OutOfPages
from cache.lazy_heap import LazyHeap
from cache.ledger import Ledger
from cache.types import NULL_PAGE, Holder, PageId, Pages


class PageAllocator:
    """Hold the free pages of one pool. Each call books the change in the pool's ledger."""

    def __init__(self, ledger: Ledger, free_list: type[Extents]) -> None:
        self.ledger = ledger
        # One byte per page: most calls name a page or two, for which numpy takes longer.
        self._is_free = bytearray(b"\x01") * ledger.num_pages
        self._is_free[NULL_PAGE] = 0
        self._free = free_list(ledger.num_pages)

    def acquire(self, num_pages: int, holder: Holder, after: PageId | None = None) -> list[int]:
        """Move free pages to the account of `holder`, consecutive to page `after` where possible.

        They hold what their previous holder wrote: the caller must write before it reads.

        Raises:
            OutOfPages: fewer than `num_pages` are free; nothing was taken.
        """
        if num_pages > self.ledger.num_free:
            raise OutOfPages(f"wanted {num_pages} pages, {self.ledger.num_free} free")
        pages = self._free.take(num_pages, after)
        is_free = self._is_free
        is_known_free = is_free[pages[0]] if num_pages == 1 else self._are_free(pages, num_pages)
        if not is_known_free:
            raise AuditFailed(f"{self.ledger.pool}: the free list named a page that is held")
        for page in pages:
            is_free[page] = 0
        self.ledger.transfer(num_pages, Holder.FREE, holder)
        return pages

    def release(self, pages: Iterable[int], holder: Holder) -> None:
        """Free pages that `holder` held.

        Raises:
            AuditFailed: one of them is free already, named twice, or the padding page.
        """
        released = sorted(pages)
        if not released:
            return
        is_free, last = self._is_free, NULL_PAGE
        for page in released:
            if page <= last or is_free[page]:
                raise AuditFailed(f"{self.ledger.pool}: released a page that was not held")
            last = PageId(page)
        self.ledger.transfer(len(released), holder, Holder.FREE)
        for page in released:
            is_free[page] = 1
        self._free.put_back(released)

    def count_free_pages(self) -> tuple[int, NDArray[np.int8]]:
        """Return how many pages the free list has, and how often it has each page of the pool.

        The counts are int8 [num_pages of the pool]. O(runs of free pages), and one pass in numpy.
        """
        starts, lengths = self._free.runs()
        num_pages = self.ledger.num_pages
        edges = np.zeros(num_pages + 1, np.int8)
        np.add.at(edges, np.clip(starts, 0, num_pages), 1)
        np.add.at(edges, np.clip(starts + lengths, 0, num_pages), -1)
        return int(lengths.sum()), np.cumsum(edges[:num_pages], dtype=np.int8)

    def _are_free(self, pages: list[int], num_pages: int) -> bool:
        return len(set(pages)) == num_pages and all(map(self._is_free.__getitem__, pages))


class Extents:
    """Keep maximal runs of free pages, by start, by end, and largest first."""

    def __init__(self, num_pages: int) -> None:
        self._length_at: dict[int, int] = {}
        self._start_before: dict[int, int] = {}
        # By end, which stays when a session takes pages at the start. That is done for every page
        # that a session grows by, so the entry keeps the length before it, until it comes first.
        self._largest: LazyHeap[int] = LazyHeap()
        self._add(NULL_PAGE + 1, num_pages - NULL_PAGE - 1)

    def take(self, num_pages: int, after: int | None) -> list[int]:
        """Remove and return free pages, consecutive to page `after` where possible."""
        taken: list[int] = []
        if after is not None and (length := self._length_at.get(after + 1, 0)):
            if num_pages < length:
                return self._shorten(after + 1, num_pages)
            self._cut(after + 1, 0, length, taken)
        while len(taken) < num_pages:
            start, length = self._find_largest()
            count = min(num_pages - len(taken), length)
            # No session ends before the first page, so none needs room to grow there.
            offset = 0 if start == NULL_PAGE + 1 else (length - count) // 2
            self._cut(start, offset, count, taken)
        return taken

    def put_back(self, pages: list[int]) -> None:
        """Add pages in ascending order, merged with the extents they touch."""
        start = end = pages[0]
        for page in pages:
            if page != end:
                self._join(start, end)
                start = page
            end = page + 1
        self._join(start, end)

    def runs(self) -> tuple[Pages, Pages]:
        """Return the starts and the lengths of all extents, int32 [num_runs] each."""
        num_runs = len(self._length_at)
        starts = np.fromiter(self._length_at.keys(), np.int32, num_runs)
        return starts, np.fromiter(self._length_at.values(), np.int32, num_runs)

    def _shorten(self, start: int, count: int) -> list[int]:
        """Remove and return the first pages of a longer extent."""
        length = self._length_at.pop(start)
        end = start + length
        if self._start_before.get(end) != start:
            raise AuditFailed("the starts and the ends of free extents disagree")
        self._start_before[end] = start + count
        self._length_at[start + count] = length - count
        return list(range(start, start + count))

    def _find_largest(self) -> tuple[int, int]:
        """Return the start and the length of the longest extent, of several the first."""
        while (end := self._largest.first()) is not None:
            start = self._start_before[end]
            if self._largest.priority(end) == start - end:
                return start, end - start
            self._largest.push(end, start - end, start)
        raise AuditFailed("nothing is free, though the ledger says so")

    def _cut(self, start: int, offset: int, count: int, taken: list[int]) -> None:
        """Move [start + offset, + count) of the extent at `start` to `taken`."""
        length = self._remove(start)
        taken.extend(range(start + offset, start + offset + count))
        self._add(start, offset)
        self._add(start + offset + count, length - offset - count)

    def _join(self, start: int, end: int) -> None:
        """Add the run [start, end), merged with the extents it touches."""
        if start in self._start_before:
            before = self._start_before[start]
            self._remove(before)
            start = before
        if end in self._length_at:
            end += self._remove(end)
        self._add(start, end - start)

    def _add(self, start: int, length: int) -> None:
        if length == 0:
            return
        self._length_at[start] = length
        self._start_before[start + length] = start
        self._largest.push(start + length, -length, start)

    def _remove(self, start: int) -> int:
        length = self._length_at.pop(start, 0)
        self._largest.remove(start + length)
        if self._start_before.pop(start + length, None) != start:
            raise AuditFailed("the starts and the ends of free extents disagree")
        return length
