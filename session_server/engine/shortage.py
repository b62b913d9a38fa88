"""What one need lacks in the pools, and who is worth asking for it: pure, no cache, no clock."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec

from cache.types import SessionId

PoolPages = tuple[int, ...]
"""Pages of every pool, in one order throughout a view."""


class ReclaimableSession(Protocol):
    """A parked session that pressure may cool."""

    @property
    def session_id(self) -> SessionId: ...

    @property
    def freed_pages(self) -> PoolPages:
        """Pages that cooling it makes free or evictable; a lower bound, since sessions that
        share a prefix each report it as not theirs to give."""
        ...


class ReclaimableTotal(msgspec.Struct, frozen=True, gc=False):
    """How many idle sessions there are, and the sum of their `freed_pages`."""

    num_sessions: int
    freed_pages: PoolPages


class Shortage:
    """Pages and rows that a need lacks, and what those who were asked would give.

    `asked`: idle sessions in the order they were asked, of which `cooled` ease the shortage and
    `skipped` have nothing of what is short.
    """

    def __init__(self, pages: PoolPages, needed: PoolPages, num_rows: int = 0) -> None:
        """`num_rows`: rows that it lacks."""
        self._missing = [n - p for n, p in zip(needed, pages, strict=True)]
        self._num_rows = num_rows
        self.asked: list[ReclaimableSession] = []
        self.cooled: list[ReclaimableSession] = []
        self.skipped: list[ReclaimableSession] = []

    def __bool__(self) -> bool:
        """Whether anything is still lacking."""
        return self._num_rows > 0 or max(self._missing) > 0

    def can_be_met(self, num_rows: int, pages: PoolPages) -> bool:
        """Whether so many rows and pages would be enough."""
        enough = all(lack <= num for lack, num in zip(self._missing, pages, strict=True))
        return enough and self._num_rows <= num_rows

    def ask(self, session: ReclaimableSession) -> None:
        """Let an idle session give what it has, if that helps; cooling frees its row too."""
        self.asked.append(session)
        if self._num_rows > 0:
            self._take(session.freed_pages)
        elif not self.ask_pages(session.freed_pages):
            self.skipped.append(session)
            return
        self._num_rows -= 1
        self.cooled.append(session)

    def ask_pages(self, pages: PoolPages) -> bool:
        """Take pages if they help, and tell.

        Who shares all its pages reports none at all, though others like it and it together have
        some to give: it is worth asking.
        """
        pairs = zip(self._missing, pages, strict=True)
        if any(pages) and not any(lack > 0 and num > 0 for lack, num in pairs):
            return False
        self._take(pages)
        return True

    def _take(self, pages: PoolPages) -> None:
        self._missing = [lack - num for lack, num in zip(self._missing, pages, strict=True)]


def subtract_pages(pages: PoolPages, taken: PoolPages) -> PoolPages:
    """The difference, pool by pool."""
    return tuple(have - num for have, num in zip(pages, taken, strict=True))


def add_pages(first: PoolPages, rest: Iterable[PoolPages]) -> PoolPages:
    """The sum, pool by pool."""
    sums: Sequence[int] = first
    for pages in rest:
        sums = [a + b for a, b in zip(sums, pages, strict=True)]
    return tuple(sums)
