"""Choose the sizes of batches that graphs are captured for. Pure; needs no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from session_server.core.batch import GraphUse

NUM_FREE_TOKENS: Final = 256
"""Tokens up to which a graph may pad as it likes. So few take no longer than one: a GPU multiplies
some 150 to 300 numbers of 16 bits in the time that it reads one from its memory, which is what a
forward does with every weight of dense layers."""

MAX_PADDED: Final = 2
"""How many times the tokens of a batch a larger graph computes at most: what it pads takes no
longer than the batch itself."""


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


def choose_size(
    sizes: Iterable[GraphSize],
    num_rows: int,
    max_row_tokens: int,
    *,
    num_tokens: int,
    num_free: int = NUM_FREE_TOKENS,
) -> tuple[GraphSize | None, GraphUse]:
    """Return the size of the graph that computes a batch, and why none does if so.

    Args:
        sizes: those that are captured.
        num_rows: rows of the batch.
        max_row_tokens: tokens of the row that has most.
        num_tokens: tokens of all rows.
        num_free: tokens up to which a graph may pad as it likes.
    """
    sizes = tuple(sizes)
    holding = [size for size in sizes if size.holds(num_rows, max_row_tokens)]
    if not holding:
        is_short = any(size.max_row_tokens >= max_row_tokens for size in sizes)
        return None, GraphUse.MANY_ROWS if is_short else GraphUse.MANY_TOKENS
    smallest = min(holding, key=lambda size: size.num_tokens)
    if smallest.num_tokens > max(num_free, MAX_PADDED * num_tokens):
        return None, GraphUse.MUCH_PADDING
    return smallest, GraphUse.REPLAYED
