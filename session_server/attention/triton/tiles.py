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
"""What a program should have of a history, while there are splits: all rows of a step wait for the
longest, however many programs the others keep busy."""

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


def choose_num_splits(num_programs: int, longest: int, num_sms: int) -> int:
    """Return among how many programs each history is split at most, a power of two.

    As many as fill a device of `num_sms` multiprocessors twice, or as a history needs of which a
    program should not have more than `MAX_SPLIT_LEN` positions, though others are short. A program
    has `MIN_SPLIT_LEN` of them or more; of a short history some have none.

    Args:
        num_programs: what the launch has without splits.
        longest: positions of its longest history.
        num_sms: multiprocessors of the device.
    """
    wanted = max(2 * num_sms // num_programs, longest // MAX_SPLIT_LEN)
    wanted = min(wanted, longest // MIN_SPLIT_LEN, MAX_SPLITS)
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
            longest = max(span.end - self.rule.first_visible(span.start) for span in alike)
            num_splits = choose_num_splits(len(table) * self.num_kv_heads, longest, self.num_sms)
            end, last = first + len(table), alike[-1]
            tokens = (alike[0].offset, last.offset + last.num_tokens)
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
        num_splits = choose_num_splits(len(table) * self.num_kv_heads, longest, self.num_sms)
        return table, Launch(shape, 0, len(table), 0, num_rows * max_row_tokens, num_splits)

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
