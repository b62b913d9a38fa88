"""What a graph of a fixed size writes besides its batch.

A batch of few tokens a row is computed by the smallest graph that holds it. The graph has a place
for every token that it could have, and writes to what each place says: for those that a batch has
no token for, page 0. Its places stay from replay to replay, so what is not put there anew is what
the batch before has left.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Final

from cache.types import NULL_ROW, RowId
from session_server.core.batch import Batch
from session_server.runner.graph_sizes import GraphSize, graph_sizes

LARGEST: Final = 8
"""Rows of the largest graph: batches of more are computed without."""

NUM_DRAFTS: Final = 2

Place = tuple[RowId, int]
"""A row of the page tables, and a position."""

PADDING: Final[Place] = (RowId(NULL_ROW), 0)


class GraphPlaces:
    """The places of every graph."""

    def __init__(self) -> None:
        sizes = sorted(graph_sizes(LARGEST, NUM_DRAFTS))
        self._places: Mapping[GraphSize, list[Place]] = {
            size: [PADDING] * size.num_tokens for size in sizes
        }

    def padding_of(self, batch: Batch, reached: Counter[str]) -> list[Place]:
        """Put a batch in its graph, and return the places that it has no token for; none if no
        graph computes it. `reached` counts what batches came to."""
        places: list[Place] = []
        max_row_tokens = 0
        for row in batch.rows:
            places += [(row.row, row.start + i) for i in range(row.num_tokens)]
            max_row_tokens = max(max_row_tokens, row.num_tokens)
        for size, held in self._places.items():
            if size.holds(len(batch.rows), max_row_tokens):
                held[: len(places)] = places
                self.pad(held, len(places))
                reached["a batch in a graph"] += 1
                reached["a padded batch"] += len(places) < len(held)
                return held[len(places) :]
        reached["a batch in no graph"] += 1
        return []

    def pad(self, held: list[Place], first: int) -> None:
        """Have the places from `first` on be nobody's."""
        held[first:] = [PADDING] * (len(held) - first)
