"""Latent attention, absorbed, expanded and mixed, against its definition with K and V made of the
whole history.
"""

from __future__ import annotations

import math
from random import Random

import pytest
import torch
from torch import Tensor

from cache.pool.mla import MlaPool
from cache.spec import LayerGroup, LayerKind
from cache.types import PoolName, pages_for
from session_server.attention.base import AttentionMeta, AttentionRule, BackendFactory, Span
from session_server.attention.cpu import MAX_FOLDED_TOKENS, CpuBackend
from session_server.attention.mla import BLOCK_LEN, MlaBackend, MlaShape, min_expanded_tokens
from session_server.attention.reference import ReferenceBackend
from tests.attention.paging import cpu_pages, slots_of, table_of

POOL = PoolName("latent")
NUM_LAYERS = 2
ROPE_DIM = 8
BACKENDS = [CpuBackend, ReferenceBackend]

SHAPE = MlaShape(qk_nope_head_dim=12, v_head_dim=10)
RULE = AttentionRule(num_heads=3, scale=0.3)
RANK = 24
MIN_EXPANDED = math.ceil(min_expanded_tokens(kv_lora_rank=RANK, qk_nope_head_dim=12, v_head_dim=10))


class World:
    """A pool whose every page holds noise, and rows with a known past on random runs of pages."""

    def __init__(
        self,
        rows: list[tuple[int, int]],
        page_size: int,
        *,
        kv_lora_rank: int = RANK,
        seed: int = 0,
        stored: torch.dtype = torch.float32,
    ) -> None:
        """`rows`: (start, number of new tokens) of each."""
        self.generator = torch.Generator().manual_seed(seed)
        self.page_size, self.kv_lora_rank = page_size, kv_lora_rank
        rows = sorted(rows, key=lambda row: (row[1], sum(row)))
        pages = self._deal([pages_for(sum(row), page_size) for row in rows], Random(seed))
        num_pages = max(max(of_row) for of_row in pages) + 2
        group = LayerGroup(
            POOL,
            LayerKind.LATENT,
            tuple(range(NUM_LAYERS)),
            num_kv_heads=1,
            head_dim=kv_lora_rank + ROPE_DIM,
            dtype_bytes=stored.itemsize,
            qk_rope_head_dim=ROPE_DIM,
        )
        self.pool = MlaPool(group, cpu_pages(num_pages, page_size, stored))
        slots = torch.arange(num_pages * page_size)
        for layer in range(NUM_LAYERS):
            self.write(layer, slots, self.noise(len(slots), kv_lora_rank + ROPE_DIM))
        self.table = table_of(POOL, pages)
        self.slots = slots_of(pages, page_size)
        spans, offset = [], 0
        for row, (start, num_tokens) in enumerate(rows, 1):
            spans.append(Span(row, start, num_tokens, offset))
            offset += num_tokens
        slots = torch.cat([self.slots[span.row - 1][span.start : span.end] for span in spans])
        self.meta = AttentionMeta(tuple(spans), {POOL: slots})

    @staticmethod
    def _deal(counts: list[int], random: Random) -> list[list[int]]:
        """Pages of every row in runs of random length, dealt out in random order with holes."""
        runs: list[tuple[int, int]] = []
        for row, count in enumerate(counts):
            left = count
            while left:
                runs.append((row, random.randint(1, left)))
                left -= runs[-1][1]
        order = random.sample(range(len(runs)), len(runs))
        first, starts = 1, {}
        for index in order:
            starts[index] = first
            first += runs[index][1] + random.randint(0, 1)
        pages: list[list[int]] = [[] for _ in counts]
        for index, (row, length) in enumerate(runs):
            pages[row] += range(starts[index], starts[index] + length)
        return pages

    def noise(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def write(self, layer: int, slots: Tensor, rows: Tensor) -> None:
        self.pool.write(layer, slots, rows.unsqueeze(1).expand(-1, 2, -1))

    def assert_exact(self, factory: BackendFactory, shape: MlaShape = SHAPE) -> None:
        plan = MlaBackend(self.pool, self.table, RULE, shape, absorbed=factory).plan(self.meta)
        num_tokens = len(self.meta.slot_mapping[POOL])
        for layer in range(NUM_LAYERS):
            q = self.noise(num_tokens, RULE.num_heads, shape.qk_nope_head_dim + ROPE_DIM)
            rows = self.noise(num_tokens, self.kv_lora_rank + ROPE_DIM)
            up = (
                self.noise(
                    RULE.num_heads, shape.qk_nope_head_dim + shape.v_head_dim, self.kv_lora_rank
                )
                / 4
            )
            mixed = plan.attend(layer, q, rows, up)
            expected = self._written_out(layer, q, up, shape)
            torch.testing.assert_close(mixed, expected, rtol=0, atol=3e-5)

    def _written_out(self, layer: int, q: Tensor, up: Tensor, shape: MlaShape) -> Tensor:
        """By definition, in double precision, after the rows were written."""
        latents, rope_keys = (
            part[layer, 0] for part in pages_of(self.pool, range(self.pool.num_pages))
        )
        mixed = []
        for span in self.meta.spans:
            slots = self.slots[span.row - 1][: span.end]
            expanded = torch.einsum("hor,lr->hlo", up.double(), latents[slots].double())
            k, v = expanded.split((shape.qk_nope_head_dim, shape.v_head_dim), dim=-1)
            rope = rope_keys[slots].double().expand(RULE.num_heads, -1, -1)
            own = q[span.offset : span.offset + span.num_tokens].double().transpose(0, 1)
            scores = own @ torch.cat((k, rope), dim=-1).mT * RULE.scale
            seen = torch.arange(span.end) <= span.start + torch.arange(span.num_tokens)[:, None]
            weights = scores.masked_fill(~seen, -math.inf).softmax(-1)
            mixed.append((weights @ v).transpose(0, 1).flatten(1))
        return torch.cat(mixed).float()


def pages_of(pool: MlaPool, pages: range) -> tuple[Tensor, Tensor]:
    """Latents and rotary keys of whole pages, [layers, 1, slots, elements]."""
    parts = [pool.page(page, pool.page_size) for page in pages]
    latents, rope_keys = (torch.cat(of_page, dim=2) for of_page in zip(*parts, strict=True))
    return latents, rope_keys


CASES = {
    "one token, nothing before": [(0, 1)],
    "one token": [(70, 1)],
    "short rows of one token": [(3, 1), (50, 1), (0, 1), (90, 1)],
    "rows of one token, one of them long": [(3, 1), (50, 1), (9000, 1)],
    "a few tokens": [(33, 5)],
    "as many tokens as are absorbed": [(100, MIN_EXPANDED - 1)],
    "the fewest tokens that are expanded": [(100, MIN_EXPANDED)],
    "an expanded chunk, nothing before": [(0, 40)],
    "an expanded chunk of one block's end": [(BLOCK_LEN - 40, 40)],
    "an expanded chunk across blocks": [(BLOCK_LEN - 7, 50), (2 * BLOCK_LEN + 3, 50)],
    "an expanded chunk longer than a block": [(300, 2 * BLOCK_LEN)],
    "everything at once": [(3, 1), (40, 1), (61, 1), (5, 4), (0, 4), (70, 12), (0, 33), (200, 64)],
}


@pytest.mark.parametrize("page_size", [1, 16, 256])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("factory", BACKENDS)
def test_latent_attention_is_what_its_definition_gives(
    factory: BackendFactory, name: str, page_size: int
) -> None:
    World(CASES[name], page_size).assert_exact(factory)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("factory", BACKENDS)
def test_latents_stored_in_halves_are_attended_to_exactly(
    factory: BackendFactory, name: str, stored: torch.dtype
) -> None:
    World(CASES[name], 16, stored=stored).assert_exact(factory)


@pytest.mark.parametrize("seed", range(20))
def test_random_batches_are_exact_at_any_page_size(seed: int) -> None:
    random = Random(seed)
    page_size = random.choice([1, 3, 8, 64, 256])
    rows = [
        (random.choice([0, 1, page_size, random.randint(0, 700)]), random.choice([1, 1, 2, 9, 70]))
        for _ in range(random.randint(1, 6))
    ]
    World(rows, page_size, seed=seed).assert_exact(BACKENDS[seed % 2])


@pytest.mark.parametrize("factory", BACKENDS)
def test_chunks_of_a_latent_that_is_cheaper_to_read_are_absorbed(factory: BackendFactory) -> None:
    """Beyond what is folded, beside single tokens, with and without history."""
    shape = MlaShape(qk_nope_head_dim=20, v_head_dim=20)
    assert min_expanded_tokens(kv_lora_rank=20, qk_nope_head_dim=20, v_head_dim=20) == math.inf
    rows = [(40, 1), (130, MAX_FOLDED_TOKENS + 1), (0, 60), (75, 60)]
    World(rows, 8, kv_lora_rank=20).assert_exact(factory, shape)


def test_expanding_pays_from_where_the_multiplications_say() -> None:
    deepseek = min_expanded_tokens(kv_lora_rank=512, qk_nope_head_dim=128, v_head_dim=128)
    assert deepseek == pytest.approx(170.7, abs=0.1)

    def absorbed(num_tokens: float, num_others: int) -> float:
        pairs = num_tokens * num_others + num_tokens**2 / 2
        return num_tokens * 512 * 256 + pairs * (2 * 512 + 64)

    def expanded(num_tokens: float, num_others: int) -> float:
        pairs = num_tokens * num_others + num_tokens**2 / 2
        return (num_others + num_tokens) * 512 * 256 + pairs * (256 + 64)

    long = 1 << 20
    assert expanded(deepseek * 0.99, long) > absorbed(deepseek * 0.99, long)
    assert expanded(deepseek, long) < absorbed(deepseek, long)


@pytest.mark.parametrize("factory", BACKENDS)
def test_rows_do_not_see_what_other_holders_left_in_their_pages(factory: BackendFactory) -> None:
    world = World([(3, 1), (20, 1), (5, 4), (18, 4), (7, MIN_EXPANDED), (30, 64)], page_size=16)
    beyond = torch.cat(
        [slots[span.end :] for slots, span in zip(world.slots, world.meta.spans, strict=True)]
    )
    for layer in range(NUM_LAYERS):
        world.write(layer, beyond, torch.full((len(beyond), RANK + ROPE_DIM), math.nan))
    world.assert_exact(factory)


def test_long_runs_are_read_where_they_lie() -> None:
    world = World([(40, 1)], page_size=16)
    views = world.pool.run(3, 9)
    assert len(views) == 2 * NUM_LAYERS
    for view in views:
        assert view.shape == (1, 1, 9, RANK + ROPE_DIM)
        assert view.untyped_storage().data_ptr() == world.pool.storage.untyped_storage().data_ptr()


def test_a_position_is_stored_once() -> None:
    pool = World([(40, 1)], page_size=16).pool
    assert pool.bytes_per_layer_token == (RANK + ROPE_DIM) * 4
    assert pool.num_bytes == NUM_LAYERS * pool.num_pages * 16 * (RANK + ROPE_DIM) * 4
