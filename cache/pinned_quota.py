"""`PinnedQuota`: what PINNED sessions hold, and how much of it pinning protects."""

from __future__ import annotations

from cache.errors import PinQuotaExceeded
from cache.types import SessionId


class PinnedQuota:
    """Pages (per pool) and rows of pinned sessions; every call is O(1).

    Admission refuses what would exceed the quota. A turn that is running is never refused a page
    for it: what its answer grows past the quota may be cooled when the session is idle.
    """

    __slots__ = ("_num_pages", "_pages", "num_rows", "quota_pages")

    def __init__(self, quota_pages: int, num_rows: int) -> None:
        self.quota_pages = quota_pages
        self.num_rows = num_rows
        self._pages: dict[SessionId, int] = {}
        self._num_pages = 0

    @property
    def excess_pages(self) -> int:
        """Pages held beyond the quota; negative while there is room."""
        return self._num_pages - self.quota_pages

    def pages_of(self, session_id: SessionId) -> int:
        """Pages that one pinned session holds."""
        return self._pages.get(session_id, 0)

    def refuse_beyond(self, session_id: SessionId, num_pages: int) -> None:
        """Ask whether one session may hold `num_pages`, the others staying as they are.

        Raises:
            PinQuotaExceeded: it may not.
        """
        others = self._num_pages - self.pages_of(session_id)
        if others + num_pages > self.quota_pages:
            raise PinQuotaExceeded(
                f"{num_pages} pages for a pinned session, {others} of {self.quota_pages} held"
            )
        # Whatever the quota, one row stays for those that are not pinned.
        if len(self._pages) - (session_id in self._pages) >= self.num_rows - 1:
            raise PinQuotaExceeded("pinned sessions hold all rows but one")

    def note(self, session_id: SessionId, num_pages: int | None) -> None:
        """What a pinned session holds now; None without a row."""
        self._num_pages -= self._pages.pop(session_id, 0)
        if num_pages is not None:
            self._pages[session_id] = num_pages
            self._num_pages += num_pages
