"""`InFlight`: the batches whose results are not settled yet, in launch order."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from cache.types import RowId, TableWrite
from session_server.core.batch import Batch, BatchRow, DecodeRows, Probe

Changes = tuple[tuple[TableWrite, ...], tuple[RowId, ...]]
"""What has changed since the batch before: writes to page tables, in order, and rows whose turn has
ended."""


class InFlight:
    """Number batches, and hold at most `max_forwards` of them until their results come.

    `num_forwards`: batches made since the engine started, probes included.
    """

    def __init__(self, max_forwards: int) -> None:
        self._max_forwards = max_forwards
        self._batches: deque[Batch] = deque()
        self.num_forwards = 0

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def is_full(self) -> bool:
        """Return whether a result must come before the next batch."""
        return len(self._batches) >= self._max_forwards

    def push(
        self,
        rows: Sequence[BatchRow],
        changes: Changes,
        probe: Probe | None = None,
        *,
        decoding: DecodeRows | None = None,
    ) -> Batch:
        """Return the next batch, which counts as in flight from now on."""
        assert not self.is_full
        self.num_forwards += 1
        table_writes, ended = changes
        batch = Batch(self.num_forwards, tuple(rows), table_writes, probe, decoding, ended)
        self._batches.append(batch)
        return batch

    def pop(self) -> Batch:
        """Remove and return the oldest batch, whose result has come."""
        return self._batches.popleft()
