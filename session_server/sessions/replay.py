"""One bound over the journals of all sessions: bytes and age. The oldest entries go first.

A heap holds each journal once, under the time of its oldest entry or an earlier one: a journal
that has dropped entries by itself since is put back under its present time when it comes up. So
finding the oldest entry of all costs O(log n) per entry that is dropped, however many sessions
there are, and nothing while there is room.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from typing import Final, Protocol
from weakref import ref

OVERSIZE_GRACE_S: Final = 10.0
"""How long an entry larger than its journal's bound is kept for those who read now."""


class Droppable(Protocol):
    """A journal as its bounds see it. `is_listed` belongs to `Replay`."""

    is_listed: bool

    @property
    def oldest_s(self) -> float | None:
        """Return when its oldest entry was written; None if it has none that may be dropped."""
        ...

    @property
    def num_entries(self) -> int:
        """Return how many entries it holds."""
        ...

    def drop_oldest(self) -> None:
        """Drop its oldest entry, and say so by `Replay.remove`."""
        ...

    def trim(self) -> None:
        """Drop what exceeds its own bound, its newest entry too."""
        ...


class Replay:
    """The journals of all sessions, held weakly: one that nobody reads any more is gone."""

    def __init__(self, *, max_bytes: int, max_age_s: float) -> None:
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._num_bytes = 0
        self._serials = itertools.count()
        self._oldest: list[tuple[float, int, ref[Droppable]]] = []
        self._oversize: deque[tuple[float, ref[Droppable]]] = deque()

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all journals."""
        return self._num_bytes

    def add(self, journal: Droppable, num_bytes: int) -> None:
        """Count an entry that `journal` has just written, and make room for it.

        Every other entry may be dropped for it; it stays.
        """
        self._num_bytes += num_bytes
        if not journal.is_listed:
            self._list(journal)
        is_spared = False
        while self._num_bytes > self._max_bytes and self._oldest:
            found = self._pop_oldest()
            if found is journal and found.num_entries == 1:
                is_spared = True
            elif found is not None:
                found.drop_oldest()
                self._list(found)
        if is_spared:
            self._list(journal)

    def remove(self, num_bytes: int) -> None:
        """Count bytes no more that a journal has dropped, or that go with it."""
        self._num_bytes -= num_bytes

    def trim_later(self, journal: Droppable, now_s: float) -> None:
        """Have a journal trimmed whose newest entry exceeds its bound, once it was read."""
        self._oversize.append((now_s + OVERSIZE_GRACE_S, ref(journal)))

    def forget_old(self, now_s: float) -> None:
        """Drop what is too old or too large; looks at nothing that is not due."""
        while self._oversize and self._oversize[0][0] <= now_s:
            journal = self._oversize.popleft()[1]()
            if journal is not None:
                journal.trim()
        while self._oldest and now_s - self._oldest[0][0] > self._max_age_s:
            found = self._pop_oldest()
            if found is not None:
                found.drop_oldest()
                self._list(found)

    def _pop_oldest(self) -> Droppable | None:
        """Take the first journal off the heap if it holds the oldest entry of all; put it back
        under its present time and return None if it does not."""
        at_s, _, weak = heapq.heappop(self._oldest)
        journal = weak()
        if journal is None:
            return None
        journal.is_listed = False
        if journal.oldest_s == at_s:
            return journal
        self._list(journal)
        return None

    def _list(self, journal: Droppable) -> None:
        oldest_s = journal.oldest_s
        journal.is_listed = oldest_s is not None
        if oldest_s is not None:
            heapq.heappush(self._oldest, (oldest_s, next(self._serials), ref(journal)))
