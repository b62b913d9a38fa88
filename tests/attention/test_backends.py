"""Every backend against softmax written out, over every way a row can lie in memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random

import numpy as np
import pytest
import torch
from torch import Tensor

from cache.pool.mha import MhaPool
from cache.pool.page_table import PageTable
from cache.spec import LayerGroup, LayerKind
from cache.types import PoolName, RowId, TableWrite, pages_for
from session_server.attention.base import AttentionMeta, BackendFactory, Span
from session_server.attention.cpu import (
    MAX_FOLDED_TOKENS,
    MAX_PADDED_BYTES,
    MIN_VIEW_BYTES,
    CpuBackend,
)
from session_server.attention.reference import ReferenceBackend

POOL = PoolName("full")
NUM_LAYERS = 2
KV_HEADS, GROUP, HEAD_DIM = 2, 3, 64
NUM_HEADS = KV_HEADS * GROUP
TOKEN_BYTES = 2 * KV_HEADS * HEAD_DIM * 4
VIEW_LEN = MIN_VIEW_BYTES // TOKEN_BYTES
PADDED_LEN = MAX_PADDED_BYTES // TOKEN_BYTES
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Row:
    """`runs`: lengths, in pages, of the pieces its pages lie in."""

    start: int
    num_tokens: int
    runs: tuple[int, ...]


class World:
    """A pool whose every page holds noise, and rows with a known past."""

    def __init__(self, rows: list[Row], page_size: int, *, seed: int = 0) -> None:
        self.random = Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.page_size = page_size
        # Fewest tokens first, among equals the shortest context: the order a runner makes.
        self.rows = sorted(rows, key=lambda row: (row.num_tokens, row.start))
        pages = self._place()
        num_pages = max(max(p) for p in pages) + 2
        group = LayerGroup(
            POOL, LayerKind.FULL, tuple(range(NUM_LAYERS)), KV_HEADS, HEAD_DIM, dtype_bytes=4
        )
        self.pool = MhaPool(
            group, page_size=page_size, num_pages=num_pages, dtype=torch.float32, device=CPU
        )
        every_slot = torch.arange(num_pages * page_size)
        for layer in range(NUM_LAYERS):
            self.pool.write(layer, every_slot, self.noise(len(every_slot), 2 * KV_HEADS))
        self.table = PageTable(len(rows), max(len(p) for p in pages), device=CPU)
        self.table.apply(
            TableWrite(POOL, RowId(i), 0, np.array(p, dtype=np.int32))
            for i, p in enumerate(pages, 1)
        )
        self.slots = [
            torch.tensor([page * page_size + i for page in row for i in range(page_size)])
            for row in pages
        ]
        self.meta = self._meta()

    def noise(self, num_tokens: int, heads: int) -> Tensor:
        return torch.randn((num_tokens, heads, HEAD_DIM), generator=self.generator)

    def _place(self) -> list[list[int]]:
        """Pages of each row; runs of all rows are dealt out in random order."""
        runs = [(i, n) for i, row in enumerate(self.rows) for n in row.runs]
        order = list(range(len(runs)))
        self.random.shuffle(order)
        first, starts = 1, {}
        for index in order:
            starts[index] = first
            first += runs[index][1] + 1  # a hole keeps neighbours apart
        pages: list[list[int]] = [[] for _ in self.rows]
        for index, (row, length) in enumerate(runs):
            pages[row] += range(starts[index], starts[index] + length)
        for row, of_row in zip(self.rows, pages, strict=True):
            assert len(of_row) >= pages_for(row.start + row.num_tokens, self.page_size)
        return pages

    def _meta(self) -> AttentionMeta:
        spans, slots, offset = [], [], 0
        for index, row in enumerate(self.rows):
            spans.append(Span(index + 1, row.start, row.num_tokens, offset))
            slots.append(self.slots[index][row.start : row.start + row.num_tokens])
            offset += row.num_tokens
        return AttentionMeta(tuple(spans), torch.cat(slots))

    def written_out(self, layer: int, q: Tensor) -> Tensor:
        """Softmax attention by its definition, in double precision, after the KV was written."""
        mixed = []
        for index, span in enumerate(self.meta.spans):
            slots = self.slots[index][: span.end]
            page_index, offset = slots // self.page_size, slots % self.page_size
            k, v = self.pool.gather(layer, torch.arange(self.pool.num_pages)).double()[
                :, :, page_index * self.page_size + offset
            ]
            k, v = (side.repeat_interleave(GROUP, dim=0) for side in (k, v))
            row_q = q[span.offset : span.offset + span.num_tokens].double().transpose(0, 1)
            scores = row_q @ k.transpose(1, 2) / math.sqrt(HEAD_DIM)
            seen = torch.arange(span.end) <= span.start + torch.arange(span.num_tokens)[:, None]
            scores = scores.masked_fill(~seen, -math.inf)
            mixed.append((scores.softmax(-1) @ v).transpose(0, 1).flatten(1))
        return torch.cat(mixed).float()


BIG = VIEW_LEN // 16 + 1
CASES = {
    "one token, nothing before": [Row(0, 1, (1,))],
    "one token on one run": [Row(70, 1, (5,))],
    "one token on long runs": [Row((2 * BIG + 1) * 16 - 3, 1, (BIG, BIG, 1))],
    "one token, long runs and crumbs": [Row((2 * BIG + 4) * 16 - 5, 1, (1, BIG, 2, BIG, 1))],
    "one token, last run long": [Row((BIG + 2) * 16 - 7, 1, (1, 1, BIG))],
    "a chunk, nothing before": [Row(0, 40, (1, 1, 1))],
    "a chunk on one run": [Row(35, 29, (4,))],
    "a chunk on a full page": [Row(32, 16, (1, 1, 1))],
    "a chunk on crumbs": [Row(75, 33, (2, 1, 1, 2, 1))],
    "a chunk on long runs and crumbs": [Row((BIG + 3) * 16 - 1, 17, (2, BIG, 3))],
    "a first chunk of one token beside a chunk": [Row(0, 1, (1,)), Row(0, 5, (1,))],
    "padded rows": [Row(3, 1, (1,)), Row(50, 1, (2, 2)), Row(0, 1, (1,)), Row(90, 1, (6,))],
    "a few tokens, nothing before": [Row(0, 5, (1,))],
    "a few tokens on one run": [Row(70, 5, (5,))],
    "a few tokens over a page boundary": [Row(46, 4, (3, 1))],
    "a few tokens on crumbs": [Row(75, 3, (2, 1, 1, 2, 1))],
    "a few tokens on long runs": [Row((2 * BIG + 1) * 16 - 3, 2, (BIG, BIG, 1))],
    "a few tokens, long runs and crumbs": [Row((2 * BIG + 4) * 16 - 9, 4, (1, BIG, 2, BIG, 1))],
    "the most and one more than are folded": [
        Row(30, MAX_FOLDED_TOKENS, (3, 1)),
        Row(5, MAX_FOLDED_TOKENS, (2,)),
        Row(30, MAX_FOLDED_TOKENS + 1, (3, 1)),
        Row(5, MAX_FOLDED_TOKENS + 1, (2,)),
    ],
    "padded rows of one, of three and of five tokens": [
        Row(3, 1, (1,)),
        Row(50, 1, (2, 2)),
        Row(0, 3, (1,)),
        Row(PADDED_LEN - 3, 3, (PADDED_LEN // 16,)),
        Row(PADDED_LEN - 2, 3, (PADDED_LEN // 16, 1)),
        Row(61, 5, (3, 2)),
        Row(11, 5, (1,)),
        Row(12, 5, (1, 1)),
    ],
    "padded, single and chunk": [
        Row(5, 1, (1,)),
        Row(20, 1, (1, 1)),
        Row(PADDED_LEN + 9, 1, (PADDED_LEN // 16 + 1,)),
        Row(PADDED_LEN + 40, 1, (3, PADDED_LEN // 16)),
        Row(21, 12, (2, 1)),
        Row(0, 2, (1,)),
    ],
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", [CpuBackend, ReferenceBackend])
def test_a_backend_computes_softmax_attention(backend: BackendFactory, name: str) -> None:
    world = World(CASES[name], page_size=16)
    assert_exact(world, backend)


@pytest.mark.parametrize("seed", range(40))
def test_random_batches_are_exact_at_any_page_size(seed: int) -> None:
    random = Random(seed)
    page_size = random.choice([1, 3, 8, 64])
    rows = []
    for _ in range(random.randint(1, 6)):
        num_tokens = random.choice([1, 1, 1, 2, 2, 5, 5, 9, 70])
        start = random.choice([0, 1, page_size, random.randint(0, 300)])
        left, runs = pages_for(start + num_tokens, page_size), []
        while left:
            runs.append(random.randint(1, left))
            left -= runs[-1]
        rows.append(Row(start, num_tokens, tuple(runs)))
    assert_exact(World(rows, page_size, seed=seed), CpuBackend)


def test_rows_do_not_see_what_other_holders_left_in_their_pages() -> None:
    few = [Row(3, 1, (2,)), Row(20, 1, (2,)), Row(5, 4, (2,)), Row(18, 4, (2,)), Row(7, 2, (2,))]
    rows = [*few, Row(5, MAX_FOLDED_TOKENS + 1, (3,))]
    world = World(rows, page_size=16)
    beyond = torch.cat(
        [slots[span.end :] for slots, span in zip(world.slots, world.meta.spans, strict=True)]
    )
    for layer in range(NUM_LAYERS):
        world.pool.write(layer, beyond, torch.full((len(beyond), 2 * KV_HEADS, HEAD_DIM), 1e30))
    assert_exact(world, CpuBackend)


def assert_exact(world: World, factory: BackendFactory) -> None:
    plan = factory(world.pool, world.table, num_heads=NUM_HEADS).plan(world.meta)
    num_tokens = len(world.meta.slots)
    for layer in range(NUM_LAYERS):
        qkv = world.noise(num_tokens, NUM_HEADS + 2 * KV_HEADS)
        mixed = plan.attend(layer, qkv[:, :NUM_HEADS], qkv[:, NUM_HEADS:])
        expected = world.written_out(layer, qkv[:, :NUM_HEADS])
        torch.testing.assert_close(mixed, expected, rtol=0, atol=1e-5)
