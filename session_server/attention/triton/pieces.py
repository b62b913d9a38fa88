"""Cut the rows of a forward into pieces, between which states are left. Pure; needs no Triton."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from session_server.attention.base import Span
from session_server.attention.recurrent import moves_of

PIECE_COLUMNS: Final = 5
"""First token of the row, first token of the piece and its end, all in the batch; the page of the
state before the row, and the page for the state after the piece, `NO_PAGE` to leave none."""

NO_PAGE: Final = -1
"""No page at all: the padding page is written, by probes."""

CHUNK: Final = 16
"""The most tokens of a piece, the fewest that a matrix product wants: what a program keeps of more
beside a state spills out of its registers."""

MAX_STEPS: Final = 8
"""A row whose pieces have no more tokens goes from token to token: a chunk costs as much as some
steps, however few tokens it has."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """Describe what the kernels walk.

    `table`: int32 [pieces, 5], in flat order. `rows`: int32 [rows, 2], the first piece of each row
    and their end; the first `num_stepped` go from token to token, the others by chunks.
    """

    table: NDArray[np.int32]
    rows: NDArray[np.int32]
    num_stepped: int


def cut_rows(spans: Sequence[Span], max_steps: int) -> Pieces:
    """Cut the rows of a batch, which follow each other.

    `max_steps`: the most tokens between two states of a row that goes from token to token.
    """
    segments = []
    for span in spans:
        moves, begin = moves_of(span), span.offset
        for length, page in moves.targets:
            end = span.offset + length - span.start
            segments.append((span.offset, begin, end, moves.source, page))
            begin = end
    table = _cut(np.array(segments, np.int32))
    firsts = np.flatnonzero(np.diff(table[:, 0], prepend=-1))
    rows = np.stack((firsts, np.append(firsts[1:], len(table))), axis=1).astype(np.int32)
    longest = np.maximum.reduceat(table[:, 2] - table[:, 1], firsts)
    is_chunked = longest > max_steps
    return Pieces(table, rows[is_chunked.argsort(kind="stable")], int((~is_chunked).sum()))


def cut_graph(num_rows: int, max_row_tokens: int) -> Pieces:
    """Give each of so many rows a piece for each of its tokens; the table is to be filled."""
    table = np.zeros((num_rows * max_row_tokens, PIECE_COLUMNS), np.int32)
    firsts = np.arange(0, len(table), max_row_tokens)
    rows = np.stack((firsts, firsts + max_row_tokens), axis=1).astype(np.int32)
    return Pieces(table, rows, num_rows)


def _cut(segments: NDArray[np.int32]) -> NDArray[np.int32]:
    """Cut what lies between states into pieces, the last of which leaves the state."""
    counts = -(-(segments[:, 2] - segments[:, 1]) // CHUNK)
    pieces = segments.repeat(counts, axis=0)
    before = counts.cumsum() - counts
    pieces[:, 1] += (np.arange(len(pieces)) - before.repeat(counts)) * CHUNK
    ends = pieces[:, 1] + CHUNK
    pieces[ends < pieces[:, 2], 4] = NO_PAGE
    pieces[:, 2] = np.minimum(pieces[:, 2], ends)
    return pieces
