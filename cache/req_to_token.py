"""`ReqToTokenPool`: allocate rows, and hold the page table that attention reads.

A row belongs to one lease. Per pool, entry i of a row is the page that holds positions
[i * page_size, (i + 1) * page_size) of that session; entries past the row's pages are `NULL_PAGE`.
The host table is authoritative; each added entry is also returned as a `TableWrite`, to be applied
to the device's copy in launch order. Cleared entries are not sent: a forward reads only entries
below its own length, all of which were written since the row was allocated.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from cache.errors import AuditFailed, OutOfRows
from cache.types import NULL_PAGE, NULL_ROW, Pages, PoolName, RowId, TableWrite


class ReqToTokenPool:
    """Hold `num_rows` rows of `row_pages` entries per pool, and the padding row 0."""

    def __init__(self, num_rows: int, row_pages: int, pools: Iterable[PoolName]) -> None:
        self.num_rows = num_rows
        self.row_pages = row_pages
        # Zeros are `NULL_PAGE`, and mapped on first use: rows that are never used cost nothing.
        self._tables = {pool: np.zeros((num_rows + 1, row_pages), dtype=np.int32) for pool in pools}
        # Rows of a read-only array are read-only: marking each of them would cost more.
        self._readable = {pool: table.view() for pool, table in self._tables.items()}
        for table in self._readable.values():
            table.flags.writeable = False
        self._is_held = bytearray(num_rows + 1)
        self._free_rows = list(range(num_rows, NULL_ROW, -1))
        # Per row: the range of entries that changed since `begin_changes`, and one past the last
        # entry that was ever written, so that a check need not read the whole row.
        self._changed = [(row_pages, 0)] * (num_rows + 1)
        self._written_end = [0] * (num_rows + 1)

    @property
    def num_free(self) -> int:
        """Return how many rows `alloc` can allocate now."""
        return len(self._free_rows)

    def alloc(self) -> RowId:
        """Allocate an empty row.

        Raises:
            OutOfRows: all are held; nothing was taken.
        """
        if not self._free_rows:
            raise OutOfRows(f"all {self.num_rows} rows are held")
        row = self._free_rows.pop()
        if self._is_held[row] or row == NULL_ROW:
            raise AuditFailed(f"row {row} was in the free list and held")
        self._is_held[row] = 1
        self.begin_changes(RowId(row))
        return RowId(row)

    def free(self, row: RowId) -> None:
        """Free a row. Its owner must have cleared its entries.

        Raises:
            AuditFailed: the row is not held, or still names pages.
        """
        if not self._is_held[row]:
            raise AuditFailed(f"row {row} is not held")
        end = self._written_end[row]
        if any(np.count_nonzero(table[row, :end]) for table in self._tables.values()):
            raise AuditFailed(f"row {row} is freed while it names pages")
        self._is_held[row] = 0
        self._free_rows.append(row)

    def write(
        self, pool: PoolName, row: RowId, start: int, pages: Sequence[int] | Pages
    ) -> TableWrite:
        """Fill the empty entries [start, start + len(pages)) of a row.

        Raises:
            AuditFailed: an entry is live, or lies past the row: it would be lost silently.
        """
        entries = self._entries(pool, row, start, len(pages))
        # Nearly every call names one page, for which numpy's loops would take most of the time.
        is_one = len(pages) == 1
        if entries[0] if is_one else np.count_nonzero(entries):
            raise AuditFailed(f"row {row} of {pool}: a live entry would be overwritten")
        if is_one:
            entries[0] = pages[0]
        else:
            entries[:] = pages
        return TableWrite(pool, row, start, entries.copy())

    def repoint(
        self, pool: PoolName, row: RowId, start: int, pages: Sequence[int] | Pages
    ) -> TableWrite:
        """Replace the live entries [start, start + len(pages)) of a row.

        Raises:
            AuditFailed: an entry is empty, or lies past the row.
        """
        entries = self._entries(pool, row, start, len(pages))
        if np.count_nonzero(entries) < len(entries):
            raise AuditFailed(f"row {row} of {pool}: an empty entry cannot be re-pointed")
        entries[:] = pages
        return TableWrite(pool, row, start, entries.copy())

    def clear(self, pool: PoolName, row: RowId, start: int, end: int) -> None:
        """Empty the entries [start, end) of a row; nothing if `start >= end`."""
        if start < end:
            self._entries(pool, row, start, end - start)[:] = NULL_PAGE

    def begin_changes(self, row: RowId) -> None:
        """Reset the range that `changed` returns for a row."""
        self._changed[row] = (self.row_pages, 0)

    def changed(self, row: RowId) -> tuple[int, int]:
        """Return the range [start, end) of entries that changed since `begin_changes`, in any
        pool; empty when `start >= end`."""
        return self._changed[row]

    def written_end(self, row: RowId) -> int:
        """Return the end of the entries that were ever written; all after it are `NULL_PAGE`."""
        return self._written_end[row]

    def entries(self, pool: PoolName, row: RowId) -> Pages:
        """Return all entries of one row, int32 [row_pages], as a read-only view."""
        view: Pages = self._readable[pool][row]
        return view

    def is_held(self, row: RowId) -> bool:
        """Return whether a row is allocated."""
        return bool(self._is_held[row])

    def held_rows(self) -> list[int]:
        """Return the allocated rows, ascending."""
        return np.flatnonzero(np.frombuffer(self._is_held, np.bool_)).tolist()

    def free_rows(self) -> list[int]:
        """Return a copy of the free list, for audits."""
        return list(self._free_rows)

    def _entries(self, pool: PoolName, row: RowId, start: int, count: int) -> Pages:
        if not self._is_held[row] or start < 0 or start + count > self.row_pages:
            raise AuditFailed(
                f"row {row} of {pool}: entries [{start}, {start + count}) are not its own"
            )
        if count > 0:
            end = start + count
            changed_start, changed_end = self._changed[row]
            if start < changed_start or end > changed_end:
                self._changed[row] = (min(changed_start, start), max(changed_end, end))
            self._written_end[row] = max(self._written_end[row], end)
        table: Pages = self._tables[pool]
        return table[row, start : start + count]
