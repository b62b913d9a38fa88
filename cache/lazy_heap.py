"""`LazyHeap`: order items by priority, the smallest first, with removal in O(1).

The entry of an item that was removed or pushed again stays in the heap as a stale one. A sweep
drops stale entries once they may outnumber the others, or once removals have left some, a few with
each push and removal: from the end of the heap's list, so that what is left of it is a heap at any
time.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable
from typing import Final, Generic, TypeVar

_Item = TypeVar("_Item", bound=Hashable)

SWEPT_PER_PUSH: Final = 16
"""Entries that a sweep looks at with each push, and stale ones that are dropped in front with each
push and removal: a few microseconds."""

SWEPT_PER_REMOVAL: Final = 4
"""Entries that a sweep looks at with each removal. So at most half of the entries are stale ones
that a removal may bring to the front, where whoever asks for the first item drops them."""

_MIN_BOUND: Final = 16
"""Entries that a heap may have beyond twice those that a sweep has left, and stale ones that
removals leave without a sweep. There are heaps for each tenant, most of them with few items, so
what is stale must be in proportion."""


class LazyHeap(Generic[_Item]):
    """Hold at most one entry per item that is not stale."""

    def __init__(self, is_valid: Callable[[_Item], bool] = lambda _: True) -> None:
        """`is_valid`: whether a sweep keeps an item that was not removed."""
        self._is_valid = is_valid
        self._entries: dict[_Item, tuple[int, int, _Item]] = {}
        self._rest: list[tuple[int, int, _Item]] = []
        self._swept: list[tuple[int, int, _Item]] = []
        self._is_sweeping = self._is_crowded = False
        self._bound = _MIN_BOUND

    def __len__(self) -> int:
        """Return the number of entries, stale ones included."""
        return len(self._rest) + len(self._swept)

    def push(self, item: _Item, priority: int, tie: int) -> None:
        """Enter an item, in place of its entry before. `tie` orders those of equal priority."""
        entry = self._entries[item] = (priority, tie, item)
        heapq.heappush(self._swept if self._is_sweeping else self._rest, entry)
        self._is_crowded |= len(self) > self._bound
        if self._is_sweeping or self._is_crowded:
            self._sweep(SWEPT_PER_PUSH)
        self._drop_front()

    def priority(self, item: _Item) -> int | None:
        """Return the priority of an item; None if it has no entry."""
        entry = self._entries.get(item)
        return entry[0] if entry is not None else None

    def remove(self, item: _Item) -> None:
        """Remove an item, if it has an entry."""
        if self._entries.pop(item, None) is None:
            return
        if self._is_sweeping or len(self) - len(self._entries) > _MIN_BOUND:
            self._sweep(SWEPT_PER_REMOVAL)
        self._drop_front()

    def first(self) -> _Item | None:
        """Return the first item, or None if there is none. Amortized O(log items)."""
        for heap in (self._swept, self._rest):
            while heap and self._entries.get(heap[0][2]) is not heap[0]:
                heapq.heappop(heap)
        fronts = [heap[0] for heap in (self._swept, self._rest) if heap]
        return min(fronts)[2] if fronts else None

    def first_that(self, is_wanted: Callable[[_Item], bool], num_tried: int) -> _Item | None:
        """Return the first item that is wanted; None if none of the first `num_tried` is.
        O(log items) for each that it looks at."""
        passed: list[tuple[int, int, _Item]] = []
        found = None
        while len(passed) < num_tried and (item := self.first()) is not None:
            if is_wanted(item):
                found = item
                break
            entry = self._entries[item]
            heapq.heappop(self._swept if self._swept and self._swept[0] is entry else self._rest)
            passed.append(entry)
        for entry in passed:
            heapq.heappush(self._swept if self._is_sweeping else self._rest, entry)
        return found

    def _drop_front(self) -> None:
        """Drop a few stale entries in front, as they arise."""
        for heap in (self._swept, self._rest):
            for _ in range(SWEPT_PER_PUSH):
                if not heap or self._entries.get(heap[0][2]) is heap[0]:
                    break
                heapq.heappop(heap)

    def _sweep(self, num_entries: int) -> None:
        """Look at a few entries, and end with a new bound once all were looked at."""
        for _ in range(min(num_entries, len(self._rest))):
            entry = self._rest.pop()
            item = entry[2]
            if self._entries.get(item) is not entry:
                continue
            if self._is_valid(item):
                heapq.heappush(self._swept, entry)
            else:
                del self._entries[item]
        self._is_sweeping = bool(self._rest)
        if not self._is_sweeping:
            self._rest, self._swept = self._swept, self._rest
            # What removals have emptied may be filled again: it is not swept for that.
            least = 0 if self._is_crowded else self._bound
            self._bound = max(least, 2 * len(self._rest) + _MIN_BOUND)
            self._is_crowded = False
