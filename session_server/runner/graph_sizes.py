"""Choose the sizes of batches that graphs are captured for. Pure; needs no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class GraphSize:
    """Bound the batches that a graph computes: rows, and the tokens of each."""

    max_row_tokens: int
    num_rows: int

    @property
    def num_tokens(self) -> int:
        """Return the tokens of the graph."""
        return self.num_rows * self.max_row_tokens

    def holds(self, num_rows: int, max_row_tokens: int) -> bool:
        """Return whether a batch of so many rows fits, each of up to so many tokens."""
        return max_row_tokens <= self.max_row_tokens and num_rows <= self.num_rows


def bucket_sizes(largest: int) -> tuple[int, ...]:
    """Return the numbers of rows that are captured: powers of two up to 8, then multiples of 8, and
    of 16 from 64 on; the last is at least `largest`."""
    small = [size for size in (1, 2, 4, 8) if size < 2 * largest]
    middle = [*range(16, min(largest, 64) + 8, 8)] if largest > 8 else []
    return (*small, *middle, *(range(80, largest + 16, 16) if largest > 64 else ()))


def graph_sizes(largest: int, num_drafts: int) -> tuple[GraphSize, ...]:
    """Return what is captured for batches of up to `largest` rows: of one token each, and of what
    a forward computes that verifies up to `num_drafts` drafts."""
    lengths = (1,) if num_drafts == 0 else (1, 1 + num_drafts)
    return tuple(GraphSize(n, rows) for n in lengths for rows in bucket_sizes(largest))
