"""Cut the rows of a forward into tiles: what one Triton program works on. Pure; needs no Triton."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from session_server.attention.base import AttentionRule, Span

TILE_COLUMNS: Final = 5
"""Table row, start, number of new tokens, offset in the batch, first query row of the tile."""

MIN_ROWS: Final = 16
"""The fewest query rows of a tile, which a matrix product wants; fewer are padded."""

MIN_SPLIT_LEN: Final = 256
"""The fewest positions of a split: below, merging costs more than the other programs save."""

MAX_SPLIT_LEN: Final = 4096
"""What a program of a graph should have of a history, while there are splits. Who captures a graph
does not know its batches: in one, all rows may wait for a history that is longer than any other."""

MAX_PARTIAL_BYTES: Final = 128 << 20
"""What the splits of one launch may write for the merge: float32, of every token and head. To fill
132 multiprocessors twice takes up to 17 MiB; more is for one long history among short ones."""

MAX_SPLITS: Final = 64


@dataclass(frozen=True, slots=True)
class TileShape:
    """Say how much a program holds at once: query rows and keys, and the threads it has."""

    num_rows: int
    num_keys: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class Launch:
    """Describe one launch: tiles [first, end) of a table, all of one shape.

    They are of tokens [first_token, end_token) of the batch. `num_splits`: programs that share the
    history of a tile.
    """

    shape: TileShape
    first: int
    end: int
    first_token: int
    end_token: int
    num_splits: int


def tile_shape(num_rows: int, value_dim: int, itemsize: int) -> TileShape:
    """Return the shape of tiles for spans of so many query rows.

    What limits it are registers and shared memory: a program keeps [rows, value_dim] in float32,
    and some blocks of keys and values in the dtype that they are multiplied in.

    Args:
        num_rows: query rows of a span.
        value_dim: elements of a value.
        itemsize: bytes of an element that is multiplied.
    """
    most = 128 if value_dim <= 128 else 64 if value_dim <= 256 else 32
    num_keys = 64 if value_dim <= 128 else 32
    if itemsize == 4:
        most, num_keys = 16, 32 if value_dim <= 128 else 16
    rows = min(max(MIN_ROWS, 1 << (num_rows - 1).bit_length()), most)
    num_warps = 8 if rows * value_dim > 64 * 128 or value_dim > 256 else 4
    return TileShape(rows, num_keys, num_warps, num_stages=2 if value_dim > 128 else 3)


def every_shape(group: int, value_dim: int, itemsize: int) -> tuple[TileShape, ...]:
    """Return all shapes that tiles of a pool can have."""
    rows = (1 << power for power in range(12))
    shapes = (tile_shape(num_rows, value_dim, itemsize) for num_rows in rows if num_rows >= group)
    smallest = tile_shape(group, value_dim, itemsize)
    return tuple(dict.fromkeys((smallest, *shapes)))


def choose_num_splits(longest: int, of_program: int, split_bytes: int) -> int:
    """Return among how many programs each history is split at most, a power of two.

    As many as the longest history needs of which no program should have more than `of_program`
    positions, but none has fewer than `MIN_SPLIT_LEN` before the history ends: of a short one some
    programs have none. What they write stays within `MAX_PARTIAL_BYTES`.

    Args:
        longest: positions of the launch's longest history.
        of_program: positions.
        split_bytes: what one split of all tokens of the launch writes.
    """
    wanted = longest // max(of_program, MIN_SPLIT_LEN)
    wanted = min(wanted, MAX_SPLITS, MAX_PARTIAL_BYTES // split_bytes)
    return 1 << max(0, wanted.bit_length() - 1)


@dataclass(frozen=True, slots=True)
class Tiling:
    """Cut spans of one model's layers. `itemsize`: bytes of an element that is multiplied."""

    rule: AttentionRule
    num_kv_heads: int
    value_dim: int
    itemsize: int
    num_sms: int

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.rule.num_heads // self.num_kv_heads

    def cut(self, spans: Sequence[Span]) -> tuple[NDArray[np.int32], tuple[Launch, ...]]:
        """Return the table of all tiles, int32 [tiles, 5], and the launches over it.

        `spans`: in flat order, those of fewest tokens first.
        """
        tables: list[NDArray[np.int32]] = []
        launches: list[Launch] = []
        first = 0
        for shape, alike in self._alike(spans):
            table = self._table(alike, shape)
            tokens = (alike[0].offset, alike[-1].offset + alike[-1].num_tokens)
            num_splits = self._num_splits(alike, shape, tokens[1] - tokens[0])
            end = first + len(table)
            launches.append(Launch(shape, first, end, *tokens, num_splits))
            tables.append(table)
            first = end
        return np.concatenate(tables), tuple(launches)

    def cut_graph(
        self, num_rows: int, max_row_tokens: int, longest: int
    ) -> tuple[NDArray[np.int32], Launch]:
        """Return the table and the launch of so many rows, of up to `max_row_tokens` tokens and
        `longest` positions each; all but the table's last column is to be filled."""
        shape = tile_shape(max_row_tokens * self.group, self.value_dim, self.itemsize)
        table = self._table([Span(0, 0, max_row_tokens, 0)] * num_rows, shape)
        if self.rule.window is not None:
            longest = min(longest, self.rule.window + max_row_tokens - 1)
        share = self._share(len(table) * longest)
        num_tokens = num_rows * max_row_tokens
        num_splits = choose_num_splits(
            longest, min(share, MAX_SPLIT_LEN), self._split_bytes(num_tokens)
        )
        return table, Launch(shape, 0, len(table), 0, num_tokens, num_splits)

    def _num_splits(self, alike: Sequence[Span], shape: TileShape, num_tokens: int) -> int:
        """Return the splits of a launch. A program should have what a multiprocessor has of it
        anyway: then none waits for one long history among short ones, and many long ones, which
        keep all of them busy, are not split."""
        longest = num_walked = 0
        for span in alike:
            length = span.end - self.rule.first_visible(span.start)
            longest = max(longest, length)
            num_walked += length * self._num_tiles(span.num_tokens, shape)
        return choose_num_splits(longest, self._share(num_walked), self._split_bytes(num_tokens))

    def _share(self, num_walked: int) -> int:
        """Return how many positions a program has if all do the same, and there are two on each
        multiprocessor. `num_walked`: those of all tiles, for one KV head."""
        return num_walked * self.num_kv_heads // (2 * self.num_sms)

    def _split_bytes(self, num_tokens: int) -> int:
        """Return what one split writes: a value of each token and head, and the sum it is divided
        by, in float32."""
        return num_tokens * self.rule.num_heads * (self.value_dim + 1) * 4

    def _num_tiles(self, num_tokens: int, shape: TileShape) -> int:
        """Return the tiles of a span."""
        return -(-num_tokens * self.group // shape.num_rows)

    def _alike(self, spans: Sequence[Span]) -> Iterator[tuple[TileShape, list[Span]]]:
        """Return spans that follow each other and have tiles of one shape."""
        shapes = itertools.groupby(
            spans,
            lambda span: tile_shape(span.num_tokens * self.group, self.value_dim, self.itemsize),
        )
        return ((shape, list(alike)) for shape, alike in shapes)

    def _table(self, spans: list[Span], shape: TileShape) -> NDArray[np.int32]:
        described = np.array([(s.row, s.start, s.num_tokens, s.offset) for s in spans], np.int32)
        counts = -(-described[:, 2] * self.group // shape.num_rows)
        table = np.empty((counts.sum(), TILE_COLUMNS), dtype=np.int32)
        table[:, :-1] = described.repeat(counts, axis=0)
        before = counts.cumsum() - counts
        table[:, -1] = (np.arange(len(table)) - before.repeat(counts)) * shape.num_rows
        return table
