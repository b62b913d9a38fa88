"""`Shortage`: the pages and rows that a turn lacks, and which sessions can give them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec

from cache.types import SessionId

PoolPages = tuple[int, ...]
"""Pages of every pool, in one order throughout a view."""


class ReclaimableSession(Protocol):
    """Describe a parked session that pressure may cool."""

    @property
    def session_id(self) -> SessionId: ...

    @property
    def freed_pages(self) -> PoolPages:
        """Return the pages that cooling it makes free or evictable.

        A lower bound: sessions that share a prefix do not count the shared pages.
        """


class ReclaimableTotal(msgspec.Struct, frozen=True, gc=False):
    """Count the reclaimable sessions, and sum their `freed_pages`."""

    num_sessions: int
    freed_pages: PoolPages


class Shortage:
    """Track the pages and rows that a need lacks while sessions are asked for them.

    `asked`: sessions in the order they were asked. Of these, `cooled` reduce the shortage, and
    `skipped` hold nothing of what is short.
    """

    def __init__(self, pages: PoolPages, needed: PoolPages, num_rows: int = 0) -> None:
        """Start with the difference between the pages needed and there; `num_rows` are missing."""
        self._missing = [n - p for n, p in zip(needed, pages, strict=True)]
        self._num_rows = num_rows
        self.asked: list[ReclaimableSession] = []
        self.cooled: list[ReclaimableSession] = []
        self.skipped: list[ReclaimableSession] = []

    def __bool__(self) -> bool:
        """Return whether anything is still missing."""
        return self._num_rows > 0 or max(self._missing) > 0

    def can_be_met(self, num_rows: int, pages: PoolPages) -> bool:
        """Return whether so many more rows and pages would be enough."""
        enough = all(lack <= num for lack, num in zip(self._missing, pages, strict=True))
        return enough and self._num_rows <= num_rows

    def ask(self, session: ReclaimableSession) -> None:
        """Count what cooling a session frees, its row too, if that reduces the shortage."""
        self.asked.append(session)
        if self._num_rows > 0:
            self._take(session.freed_pages)
        elif not self.ask_pages(session.freed_pages):
            self.skipped.append(session)
            return
        self._num_rows -= 1
        self.cooled.append(session)

    def ask_pages(self, pages: PoolPages) -> bool:
        """Count pages if they reduce the shortage, and return whether they were counted.

        A session that shares all its pages reports none, though cooling all sessions that share
        them frees some. So one that reports no pages at all is counted.
        """
        pairs = zip(self._missing, pages, strict=True)
        if any(pages) and not any(lack > 0 and num > 0 for lack, num in pairs):
            return False
        self._take(pages)
        return True

    def _take(self, pages: PoolPages) -> None:
        self._missing = [lack - num for lack, num in zip(self._missing, pages, strict=True)]


def subtract_pages(pages: PoolPages, taken: PoolPages) -> PoolPages:
    """Return the difference, pool by pool."""
    return tuple(have - num for have, num in zip(pages, taken, strict=True))


def add_pages(first: PoolPages, rest: Iterable[PoolPages]) -> PoolPages:
    """Return the sum, pool by pool."""
    sums: Sequence[int] = first
    for pages in rest:
        sums = [a + b for a, b in zip(sums, pages, strict=True)]
    return tuple(sums)
