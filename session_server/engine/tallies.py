"""`Tallies`: how large forwards were, and what became of drafts of the input."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field

from session_server.core.batch import Batch, GraphUse
from session_server.core.events import SIZE_BOUNDS, SizeCounts


@dataclass(slots=True)
class SizeTally:
    """Count sizes by `SIZE_BOUNDS`."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(SIZE_BOUNDS) + 1))
    total: int = 0

    def add(self, size: int) -> None:
        """Count one more."""
        self.counts[bisect_left(SIZE_BOUNDS, size)] += 1
        self.total += size

    def report(self) -> SizeCounts:
        """Return what was counted so far."""
        return SizeCounts(tuple(self.counts), self.total)


@dataclass(slots=True)
class Tallies:
    """Count what forwards computed, in plain sums and in sizes.

    `batch_rows`: rows of each forward. `prefill_tokens`: positions of prompts, of each forward that
    computed any. `input_draft_tokens`: positions computed for drafts of the input;
    `used_draft_tokens`: those that a turn then did not compute. `graph_uses`: forwards by how they
    were computed, where CUDA graphs are captured.
    """

    batch_rows: SizeTally = field(default_factory=SizeTally)
    prefill_tokens: SizeTally = field(default_factory=SizeTally)
    input_draft_tokens: int = 0
    used_draft_tokens: int = 0
    graph_uses: Counter[GraphUse] = field(default_factory=Counter)

    def add_forward(self, batch: Batch) -> int:
        """Count a forward, unless it has no rows; return its positions of prompts."""
        if batch.decoding is not None:
            self.batch_rows.add(len(batch.decoding))
            return 0
        if not batch.listed:
            return 0
        num_prefill = 0
        for row in batch.listed:
            num_certain = row.num_tokens - row.num_drafts
            if num_certain > 1 or not row.sample:
                num_prefill += num_certain
        self.batch_rows.add(len(batch.listed))
        if num_prefill:
            self.prefill_tokens.add(num_prefill)
        return num_prefill
