"""Every backend against softmax written out, over every way a row can lie in memory.

What no token may see is NaN in these pools, the page that stands for released ones included:
whoever looks there is found out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from random import Random

import numpy as np
import pytest
import torch
from torch import Tensor

from cache.pool.mha import MhaPool
from cache.spec import LayerGroup, LayerKind
from cache.types import NULL_PAGE, PoolName, RowId, TableWrite, pages_for
from session_server.attention.base import AttentionMeta, AttentionRule, BackendFactory, Span
from session_server.attention.cpu import (
    MAX_CAST_BYTES,
    MAX_FOLDED_TOKENS,
    MAX_PADDED_BYTES,
    MIN_VIEW_BYTES,
    CpuBackend,
)
from session_server.attention.reference import ReferenceBackend
from tests.attention.paging import cpu_pages, slots_of, table_of

POOL = PoolName("full")
NUM_LAYERS = 2
KV_HEADS, GROUP, HEAD_DIM = 2, 3, 64
NUM_HEADS = KV_HEADS * GROUP
TOKEN_BYTES = 2 * KV_HEADS * HEAD_DIM * 4
VIEW_LEN = MIN_VIEW_BYTES // TOKEN_BYTES
PADDED_LEN = MAX_PADDED_BYTES // TOKEN_BYTES


PLAIN = AttentionRule(NUM_HEADS, 1 / math.sqrt(HEAD_DIM))


@dataclass(frozen=True)
class Kind:
    """What a family's layers do."""

    rule: AttentionRule = PLAIN
    has_sinks: bool = False


KINDS = {
    "full": Kind(),
    "scale of its own": Kind(replace(PLAIN, scale=0.2)),
    "window": Kind(replace(PLAIN, window=20)),
    "window of one": Kind(replace(PLAIN, window=1)),
    "window of views": Kind(replace(PLAIN, window=2 * VIEW_LEN)),
    "softcap": Kind(replace(PLAIN, softcap=1.5, scale=0.4)),
    "softcap, window": Kind(replace(PLAIN, softcap=1.5, scale=0.4, window=33)),
    "sinks": Kind(has_sinks=True),
    "sinks, window": Kind(replace(PLAIN, window=16), has_sinks=True),
}


@dataclass(frozen=True)
class Row:
    """`runs`: lengths, in pages, of the pieces its pages lie in."""

    start: int
    num_tokens: int
    runs: tuple[int, ...]


class World:
    """A pool whose every page holds noise, and rows with a known past."""

    def __init__(
        self,
        rows: list[Row],
        page_size: int,
        kind: Kind = KINDS["full"],
        *,
        seed: int = 0,
        stored: torch.dtype = torch.float32,
    ) -> None:
        self.kind = kind
        self.random = Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.page_size = page_size
        # Fewest tokens first, among equals the shortest context: the order a runner makes.
        self.rows = sorted(rows, key=lambda row: (row.num_tokens, row.start))
        pages = self._place()
        num_pages = max(max(p) for p in pages) + 2
        group = LayerGroup(
            POOL, LayerKind.FULL, tuple(range(NUM_LAYERS)), KV_HEADS, HEAD_DIM, stored.itemsize
        )
        self.pool = MhaPool(group, cpu_pages(num_pages, page_size, stored))
        every_slot = torch.arange(num_pages * page_size)
        for layer in range(NUM_LAYERS):
            self.pool.write(layer, every_slot, self.noise(len(every_slot), 2 * KV_HEADS))
        self.table = table_of(POOL, pages)
        self.slots = slots_of(pages, page_size)
        self.meta = self._meta()
        self.sinks = self.noise(1, NUM_HEADS)[0, :, 0] if kind.has_sinks else None
        if kind.rule.window is not None:
            self._release()

    def _release(self) -> None:
        """Make unreadable what lies before every row's window."""
        gone = [torch.arange(self.page_size)]
        for slots, span in zip(self.slots, self.meta.spans, strict=True):
            first = self.kind.rule.first_visible(span.start)
            pages = np.full(first // self.page_size, NULL_PAGE, dtype=np.int32)
            self.table.apply(TableWrite(POOL, RowId(span.row), 0, pages))
            gone.append(slots[:first])
        self.fill(torch.cat(gone), math.nan)

    def fill(self, slots: Tensor, value: float) -> None:
        for layer in range(NUM_LAYERS):
            self.pool.write(layer, slots, torch.full((len(slots), 2 * KV_HEADS, HEAD_DIM), value))

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
        return AttentionMeta(tuple(spans), {POOL: torch.cat(slots)})

    def written_out(self, layer: int, q: Tensor) -> Tensor:
        """Softmax attention by its definition, in double precision, after the KV was written."""
        mixed, rule = [], self.kind.rule
        for index, span in enumerate(self.meta.spans):
            first = rule.first_visible(span.start)
            slots = self.slots[index][first : span.end]
            page_index, offset = slots // self.page_size, slots % self.page_size
            k, v = self.pool.gather(layer, torch.arange(self.pool.num_pages)).double()[
                :, :, page_index * self.page_size + offset
            ]
            k, v = (side.repeat_interleave(GROUP, dim=0) for side in (k, v))
            row_q = q[span.offset : span.offset + span.num_tokens].double().transpose(0, 1)
            scores = row_q @ k.transpose(1, 2) * rule.scale
            if rule.softcap is not None:
                scores = rule.softcap * torch.tanh(scores / rule.softcap)
            keys, queries = torch.arange(first, span.end), torch.arange(span.start, span.end)
            seen = keys <= queries[:, None]
            if rule.window is not None:
                seen &= keys > queries[:, None] - rule.window
            weights = scores.exp() * seen
            total = weights.sum(-1, keepdim=True)
            if self.sinks is not None:
                total += self.sinks.double().exp().view(-1, 1, 1)
            mixed.append((weights / total @ v).transpose(0, 1).flatten(1))
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


CAST_PAGES = MAX_CAST_BYTES // TOKEN_BYTES // 16
LONG_CASES = {
    "one token on runs cast in pieces": [Row((3 * CAST_PAGES + 2) * 16, 1, (3 * CAST_PAGES + 3,))],
    "a few tokens behind a run cast in pieces": [Row(CAST_PAGES * 16, 3, (CAST_PAGES + 1,))],
    "a chunk on runs cast in pieces": [Row(2 * CAST_PAGES * 16 - 5, 40, (1, 2 * CAST_PAGES + 3))],
}
"""Where KV is stored in another dtype."""


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", [CpuBackend, ReferenceBackend])
def test_a_backend_computes_softmax_attention(
    backend: BackendFactory, kind: str, name: str
) -> None:
    assert_exact(World(CASES[name], 16, KINDS[kind]), backend)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", [*CASES, *LONG_CASES])
@pytest.mark.parametrize("kind", ["full", "window of views", "softcap, window", "sinks"])
@pytest.mark.parametrize("backend", [CpuBackend, ReferenceBackend])
def test_what_is_stored_in_halves_is_attended_to_exactly(
    backend: BackendFactory, kind: str, name: str, stored: torch.dtype
) -> None:
    """New tokens too: they are seen as they are stored."""
    rows = {**CASES, **LONG_CASES}[name]
    assert_exact(World(rows, 16, KINDS[kind], stored=stored), backend)


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
    kind = random.choice(list(KINDS.values()))
    stored = random.choice([torch.float32, torch.float32, torch.bfloat16])
    assert_exact(World(rows, page_size, kind, seed=seed, stored=stored), CpuBackend)


def test_a_token_reads_the_pages_of_its_window_and_no_others() -> None:
    """Whatever the length of the history: the cost of a step is that of the window."""
    kind = Kind(replace(PLAIN, window=40))
    for start in (50, 500, 2000):
        world = World([Row(start, 1, (pages_for(start + 1, 16),))], 16, kind)
        plan = CpuBackend(world.pool, world.table, kind.rule).plan(world.meta)
        (row,) = plan.parts
        (views,) = row.history.views
        assert {view.shape[2] for view in views} == {40}


def test_rows_do_not_see_what_other_holders_left_in_their_pages() -> None:
    few = [Row(3, 1, (2,)), Row(20, 1, (2,)), Row(5, 4, (2,)), Row(18, 4, (2,)), Row(7, 2, (2,))]
    rows = [*few, Row(5, MAX_FOLDED_TOKENS + 1, (3,))]
    world = World(rows, page_size=16)
    beyond = torch.cat(
        [slots[span.end :] for slots, span in zip(world.slots, world.meta.spans, strict=True)]
    )
    world.fill(beyond, 1e30)
    assert_exact(world, CpuBackend)


def assert_exact(world: World, factory: BackendFactory) -> None:
    plan = factory(world.pool, world.table, world.kind.rule).plan(world.meta)
    num_tokens = len(world.meta.slot_mapping[POOL])
    for layer in range(NUM_LAYERS):
        qkv = world.noise(num_tokens, NUM_HEADS + 2 * KV_HEADS)
        mixed = plan.attend(layer, qkv[:, :NUM_HEADS], qkv[:, NUM_HEADS:], world.sinks)
        expected = world.written_out(layer, qkv[:, :NUM_HEADS])
        torch.testing.assert_close(mixed, expected, rtol=0, atol=1e-5)
