"""What a graph of a fixed size writes besides its batch.

A batch of few tokens a row is computed by the smallest graph that holds it, unless that pads too
much, by the rule of the runner. The graph has a place for every token that it could have, and
writes to what each place says: for those that a batch has no token for, page 0. Its places stay
from replay to replay, so what is not put there anew is what the batch before has left.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Final

from cache.types import NULL_ROW, RowId
from session_server.core.batch import Batch, GraphUse
from session_server.runner.graph_sizes import GraphSize, choose_size, graph_sizes

LARGEST: Final = 8
"""Rows of the largest graph: batches of more are computed without."""

NUM_DRAFTS: Final = 2

NUM_FREE: Final = 8
"""Tokens up to which a graph pads as it likes: few, so that some of these graphs may not."""

Place = tuple[RowId, int]
"""A row of the page tables, and a position."""

PADDING: Final[Place] = (RowId(NULL_ROW), 0)

_REACHED: Final[Mapping[GraphUse, str]] = {
    GraphUse.REPLAYED: "a batch in a graph",
    GraphUse.MANY_ROWS: "a batch in no graph",
    GraphUse.MANY_TOKENS: "a batch in no graph",
    GraphUse.MUCH_PADDING: "a batch that a graph would pad too much",
}


class GraphPlaces:
    """The places of every graph."""

    def __init__(self) -> None:
        self._places: Mapping[GraphSize, list[Place]] = {
            size: [PADDING] * size.num_tokens for size in graph_sizes(LARGEST, NUM_DRAFTS)
        }

    def padding_of(self, batch: Batch, reached: Counter[str]) -> list[Place]:
        """Put a batch in its graph, and return the places that it has no token for; none if no
        graph computes it. `reached` counts what batches came to."""
        places: list[Place] = []
        max_row_tokens = 0
        for row in batch.rows:
            places += [(row.row, row.start + i) for i in range(row.num_tokens)]
            max_row_tokens = max(max_row_tokens, row.num_tokens)
        size, use = choose_size(
            self._places,
            len(batch.rows),
            max_row_tokens,
            num_tokens=len(places),
            num_free=NUM_FREE,
        )
        reached[_REACHED[use]] += 1
        if size is None:
            return []
        held = self._places[size]
        held[: len(places)] = places
        self.pad(held, len(places))
        reached["a padded batch"] += len(places) < len(held)
        return held[len(places) :]

    def pad(self, held: list[Place], first: int) -> None:
        """Have the places from `first` on be nobody's."""
        held[first:] = [PADDING] * (len(held) - first)
