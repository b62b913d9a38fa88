"""`PinnedQuota`: count the pages of PINNED sessions, and bound how many are protected."""

from __future__ import annotations

from collections.abc import Mapping

from cache.errors import PinQuotaExceeded
from cache.stores import KVStores
from cache.types import PoolName, SessionId


class PinnedQuota:
    """Count pages per pool, and rows, of pinned sessions. Every call is O(pools).

    Admission rejects a turn whose context would exceed the quota. A running turn is never rejected:
    if its output grows past the quota, the session may be cooled once it is idle.
    """

    def __init__(self, num_pages: int, stores: KVStores) -> None:
        """Set the quota to `num_pages` of the largest pool, and the same fraction of every other.

        Raises:
            ValueError: the quota is the whole pool, so no other session could run.
        """
        usable = {pool: ledger.num_pages - 1 for pool, ledger in stores.paged.items()}
        most = max(usable.values())
        if not 0 <= num_pages < most:
            raise ValueError(f"a pinned quota of {num_pages} pages leaves none to others")
        self.quota_pages: Mapping[PoolName, int] = {
            pool: pages * num_pages // most for pool, pages in usable.items()
        }
        self._num_rows = stores.rows.num_rows
        self._components = [c for c in stores.components if c.pool in stores.paged]
        self._row_pages: dict[SessionId, int] = {}
        self._held = self.pages(0)

    @property
    def excess_pages(self) -> tuple[int, ...]:
        """Return the pages held beyond the quota of each pool; negative while there is room."""
        quotas = self.quota_pages.values()
        return tuple(held - quota for held, quota in zip(self._held, quotas, strict=True))

    def pages(self, num_pages: int) -> tuple[int, ...]:
        """Return the most pages of each pool that a parked session with a row of `num_pages`
        holds."""
        return tuple(component.parked_pages(num_pages) for component in self._components)

    def pages_of(self, session_id: SessionId) -> tuple[int, ...]:
        """Return the most pages of each pool that one pinned session holds while parked."""
        return self.pages(self._row_pages.get(session_id, 0))

    def check_room(self, session_id: SessionId, num_pages: int) -> None:
        """Raise `PinQuotaExceeded` unless the quota allows a row of `num_pages` for a session."""
        own, wanted = self.pages_of(session_id), self.pages(num_pages)
        for index, (pool, quota) in enumerate(self.quota_pages.items()):
            others = self._held[index] - own[index]
            if others + wanted[index] > quota:
                raise PinQuotaExceeded(
                    f"this pinned session needs {wanted[index]} {pool} pages, and others hold "
                    f"{others} of the {quota} that are kept for pinned ones"
                )
        # One row must remain for sessions that are not pinned.
        if len(self._row_pages) - (session_id in self._row_pages) >= self._num_rows - 1:
            raise PinQuotaExceeded("pinned sessions hold all rows but one")

    def set_row_pages(self, session_id: SessionId, num_pages: int | None) -> None:
        """Set how many pages the row of a pinned session has now; None without a row."""
        before, now = self.pages_of(session_id), self.pages(num_pages or 0)
        self._row_pages.pop(session_id, None)
        if num_pages is not None:
            self._row_pages[session_id] = num_pages
        sums = zip(self._held, before, now, strict=True)
        self._held = tuple(held - old + new for held, old, new in sums)
