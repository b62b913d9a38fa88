"""Launches that are not settled, in their order."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from cache.types import TableWrite
from session_server.core.batch import Batch, BatchRow, Probe


class Flight:
    """At most `max_launches` batches at a time; `num_launches` counts all there ever were."""

    def __init__(self, max_launches: int) -> None:
        self._max_launches = max_launches
        self._batches: deque[Batch] = deque()
        self.num_launches = 0

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def is_full(self) -> bool:
        """Whether nothing more can be launched before a result comes."""
        return len(self._batches) >= self._max_launches

    def launch(
        self,
        rows: Sequence[BatchRow],
        table_writes: tuple[TableWrite, ...],
        probe: Probe | None = None,
    ) -> Batch:
        """The next batch, in flight from now on."""
        assert not self.is_full, "a launch has room"
        self.num_launches += 1
        batch = Batch(self.num_launches, tuple(rows), table_writes, probe)
        self._batches.append(batch)
        return batch

    def land(self) -> Batch:
        """The oldest launch, whose result has come."""
        return self._batches.popleft()
