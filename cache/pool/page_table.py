"""Mirror the page table for the runner, on the host and on the device.

`cache.req_to_token` owns the table and emits `TableWrite` deltas; they arrive with each batch and
are applied here in launch order. The device copy changes on the forward's own stream, so a page
that moves from one row to another is written only after every earlier forward has read it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cache.pool.upload import upload
from cache.types import NULL_ROW, PoolName, TableWrite

PageRun = tuple[int, int]
"""(first page, number of pages): pages that follow each other in memory and in the row."""


class PageTable:
    """Hold the pages of every row of one pool; unwritten entries and row 0 are the padding page."""

    def __init__(self, num_rows: int, max_pages: int, *, device: torch.device) -> None:
        """Create an empty table.

        Args:
            num_rows: rows, the padding row 0 excluded.
            max_pages: entries per row.
            device: where the mirror lies; on the CPU it shares the host's memory.
        """
        self.host: NDArray[np.int32] = np.zeros((num_rows + 1, max_pages), dtype=np.int32)
        self.device_pages: Tensor = torch.from_numpy(self.host).to(device)
        # Runs of a row stay valid until the row is written: in 15 of 16 decode steps at page size
        # 16 nothing is, and the scan is skipped.
        self._runs: dict[int, tuple[tuple[int, int], tuple[PageRun, ...]]] = {}

    def apply(self, *writes: TableWrite) -> None:
        """Apply the deltas of a batch, in order; they reach a device in one copy."""
        for write in writes:
            assert write.row != NULL_ROW, "the padding row is never written"
            self.host[write.row, write.start : write.start + len(write.pages)] = write.pages
            self._runs.pop(write.row, None)
        device, num_columns = self.device_pages.device, self.host.shape[1]
        if device.type == "cpu" or not writes:
            return
        firsts = [write.row * num_columns + write.start for write in writes]
        cells = [first + np.arange(len(w.pages)) for first, w in zip(firsts, writes, strict=True)]
        index = np.concatenate(cells)
        # The host's pages, not those of the deltas: a cell that is written twice is one value.
        changed = upload(torch.from_numpy(np.stack((index, self.host.ravel()[index]))), device)
        self.device_pages.view(-1).index_copy_(0, changed[0], changed[1].to(torch.int32))

    def pages(self, row: int, end: int, *, first: int = 0) -> NDArray[np.int32]:
        """Return entries [first, end) of a row on the host, int32; a view of the current state."""
        return self.host[row, first:end]

    def runs(self, row: int, end: int, *, first: int = 0) -> tuple[PageRun, ...]:
        """Return entries [first, end) of a row as maximal runs of consecutive pages, in order."""
        known = self._runs.get(row)
        if known is not None and known[0] == (first, end):
            return known[1]
        pages = self.host[row, first:end]
        breaks = np.flatnonzero(np.diff(pages) != 1) + 1
        starts = [0, *breaks.tolist()]
        ends = [*starts[1:], len(pages)]
        runs = tuple((int(pages[a]), b - a) for a, b in zip(starts, ends, strict=True))
        self._runs[row] = ((first, end), runs)
        return runs


def apply_writes(tables: Mapping[PoolName, PageTable], writes: Sequence[TableWrite]) -> None:
    """Apply the deltas of a batch to the tables of their pools."""
    if writes:
        for pool, table in tables.items():
            table.apply(*[write for write in writes if write.pool == pool])
