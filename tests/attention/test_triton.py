"""The kernels in Triton against the reference: in Triton's interpreter, and on a GPU with
TEST_DEVICE=cuda, where their products are in halves too.

What no token may see is NaN: in pages that no row has, behind the end of every row, and before its
window.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from random import Random

import numpy as np
import pytest
import torch
from torch import Tensor

from cache.pool.mha import MhaPool
from cache.pool.mla import MlaPool
from cache.pool.page_table import PageTable
from cache.pool.storage import KvPool, PageFormat
from cache.spec import LayerGroup, LayerKind
from cache.types import NULL_PAGE, PoolName, RowId, TableWrite, pages_for
from session_server.attention.base import AttentionMeta, AttentionRule, Span
from session_server.attention.reference import ReferenceBackend
from session_server.attention.triton.tiles import MIN_SPLIT_LEN, Tiling, tile_shape
from tests.oracle.device import DEVICE

pytest.importorskip("triton", reason="triton has no wheel for this machine")

from session_server.attention.triton import launching
from session_server.attention.triton.backend import TritonBackend
from session_server.runner.paged_decoder import resolve_backend

POOL = PoolName("full")
LATENT_ROPE_DIM = 64
STORED = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True)
class Layers:
    """What one pool's layers are: `rope_dim` is not 0 where they are latent."""

    rule: AttentionRule
    num_kv_heads: int
    head_dim: int
    rope_dim: int = 0
    has_sinks: bool = False


GPT_OSS = Layers(AttentionRule(16, 0.125, window=128), 2, 64, has_sinks=True)
GEMMA = Layers(AttentionRule(4, 0.0625, window=40, softcap=5.0), 2, 256)
FAMILIES = {
    "llama": Layers(AttentionRule(8, 1 / math.sqrt(128)), 2, 128),
    "llama, one head": Layers(AttentionRule(1, 0.2), 1, 64),
    "qwen": Layers(AttentionRule(6, 1 / math.sqrt(128)), 1, 128),
    "mistral": Layers(AttentionRule(4, 0.1, window=20), 2, 128),
    "phi": Layers(AttentionRule(4, 0.1), 4, 96),
    "gemma": GEMMA,
    "gemma, global": replace(GEMMA, rule=replace(GEMMA.rule, window=None)),
    "gpt-oss": GPT_OSS,
    "gpt-oss, global": replace(GPT_OSS, rule=replace(GPT_OSS.rule, window=None)),
    "window of one": Layers(AttentionRule(2, 0.3, window=1), 2, 80),
    "deepseek": Layers(AttentionRule(16, 0.07), 1, 576, LATENT_ROPE_DIM),
    "latent, few heads": Layers(AttentionRule(3, 0.3), 1, 32, rope_dim=8),
}


class World:
    """A pool of noise, and rows whose pages are dealt out at random."""

    def __init__(
        self,
        layers: Layers,
        page_size: int,
        rows: list[tuple[int, int]],
        stored: torch.dtype,
        *,
        computed: torch.dtype = torch.float32,
    ) -> None:
        """`rows`: (start, number of new tokens) of each. `computed`: dtype of queries."""
        self.layers = layers
        self.computed = computed
        self.generator = torch.Generator().manual_seed(page_size + len(rows))
        rows = sorted(rows, key=lambda row: (row[1], row[0]))
        counts = [pages_for(sum(row), page_size) for row in rows]
        num_pages = sum(counts) + 3
        self.pool = self._pool(num_pages, page_size, stored)
        dealt = iter(Random(len(rows)).sample(range(1, num_pages), sum(counts)))
        self.table = PageTable(len(rows), max(counts), device=DEVICE)
        readable = torch.zeros(num_pages * page_size, dtype=torch.bool)
        spans, slots, offset = [], [], 0
        for index, ((start, num_tokens), count) in enumerate(zip(rows, counts, strict=True), 1):
            pages = np.array([next(dealt) for _ in range(count)], dtype=np.int32)
            of_row = torch.from_numpy(pages).long()[:, None] * page_size + torch.arange(page_size)
            of_row = of_row.flatten()
            first = layers.rule.first_visible(start)
            readable[of_row[first : start + num_tokens]] = True
            pages[: first // page_size] = NULL_PAGE  # released, as those before a window are
            self.table.apply(TableWrite(POOL, RowId(index), 0, pages))
            spans.append(Span(index, start, num_tokens, offset))
            slots.append(of_row[start : start + num_tokens])
            offset += num_tokens
        self.meta = AttentionMeta(tuple(spans), {POOL: torch.cat(slots).to(DEVICE)})
        self.num_tokens = offset
        everywhere = torch.arange(len(readable))
        self._write(everywhere.to(DEVICE), torch.nan)
        self._write(everywhere[readable].to(DEVICE), None)

    def _pool(self, num_pages: int, page_size: int, stored: torch.dtype) -> KvPool:
        layers = self.layers
        pages = PageFormat(
            num_pages=num_pages,
            page_size=page_size,
            dtype=stored,
            read_dtype=self.computed,
            device=DEVICE,
        )
        kind = LayerKind.LATENT if layers.rope_dim else LayerKind.FULL
        group = LayerGroup(
            POOL,
            kind,
            (0,),
            layers.num_kv_heads,
            layers.head_dim,
            stored.itemsize,
            qk_rope_head_dim=layers.rope_dim,
        )
        return MlaPool(group, pages) if layers.rope_dim else MhaPool(group, pages)

    def _write(self, slots: Tensor, value: float | None) -> None:
        kv = self.kv(len(slots))
        self.pool.write(0, slots, kv if value is None else torch.full_like(kv, value))

    def noise(self, num_tokens: int, heads: int) -> Tensor:
        noise = torch.randn((num_tokens, heads, self.layers.head_dim), generator=self.generator)
        return noise.to(DEVICE, self.computed)

    def kv(self, num_tokens: int) -> Tensor:
        """K and V of tokens; over latents both are the same."""
        if self.layers.rope_dim:
            return self.noise(num_tokens, 1).expand(-1, 2, -1)
        return self.noise(num_tokens, 2 * self.layers.num_kv_heads)

    def assert_alike(self) -> None:
        """Both backends attend to the same; over latents the kernels give the latent part only."""
        rule, num_heads = self.layers.rule, self.layers.rule.num_heads
        qkv = self.noise(self.num_tokens, num_heads)
        q, kv = qkv[:, :num_heads], self.kv(self.num_tokens)
        sinks = self.noise(1, num_heads)[0, :, 0] if self.layers.has_sinks else None
        mixed, expected = (
            factory(self.pool, self.table, rule)
            .plan(self.meta)
            .attend(0, q, kv, sinks)
            .view(self.num_tokens, num_heads, -1)
            for factory in (TritonBackend, ReferenceBackend)
        )
        value_dim = self.layers.head_dim - self.layers.rope_dim
        rtol, atol = (1e-5, 2e-5) if self.computed == torch.float32 else (2e-2, 2e-2)
        torch.testing.assert_close(mixed, expected[..., :value_dim], rtol=rtol, atol=atol)


COMPUTED = (torch.float32,) if DEVICE.type == "cpu" else (torch.bfloat16, torch.float16)
"""Triton's interpreter has no products in halves; on a GPU fp32 takes ten seconds to compile."""

HAS_E4M3 = DEVICE.type == "cpu" or torch.cuda.get_device_capability() >= (8, 9)

BATCHES = {
    "first tokens": [(0, 1), (0, 1)],
    "ragged decode": [(3, 1), (50, 1), (0, 1), (90, 1), (260, 1)],
    "a long history is split": [(2 * MIN_SPLIT_LEN + 77, 1)],
    "a long history under guesses is split": [(2 * MIN_SPLIT_LEN + 5, 5), (1, 5)],
    "a chunk": [(0, 70)],
    "a chunk on a history": [(75, 33)],
    "guesses, ragged": [(46, 4), (0, 2), (130, 5), (15, 3)],
    "everything at once": [(5, 1), (340, 1), (21, 12), (0, 2), (0, 40), (64, 65)],
}


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("computed", COMPUTED)
def test_every_family_attends_as_the_reference_does(
    computed: torch.dtype, family: str, batch: str
) -> None:
    World(FAMILIES[family], 16, BATCHES[batch], computed, computed=computed).assert_alike()


@pytest.mark.parametrize("stored", STORED[1:])
@pytest.mark.parametrize("family", ["mistral", "gpt-oss, global", "latent, few heads"])
def test_what_is_stored_in_fewer_bits_is_read_as_it_is(family: str, stored: torch.dtype) -> None:
    if stored == torch.float8_e4m3fn and not HAS_E4M3:
        pytest.skip("this GPU has no such dtype")
    batch = BATCHES["everything at once"]
    World(FAMILIES[family], 16, batch, stored, computed=COMPUTED[0]).assert_alike()


@pytest.mark.parametrize("page_size", [1, 2, 3, 8, 32, 64, 100, 256])
@pytest.mark.parametrize("family", ["qwen", "mistral", "latent, few heads"])
def test_pages_may_have_any_size(family: str, page_size: int) -> None:
    batch, dtype = BATCHES["everything at once"], COMPUTED[0]
    World(FAMILIES[family], page_size, batch, dtype, computed=dtype).assert_alike()


@pytest.mark.parametrize("family", ["llama", "gpt-oss", "latent, few heads"])
def test_compiling_all_launches_every_shape_and_changes_nothing(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = FAMILIES[family]
    world = World(layers, 16, BATCHES["ragged decode"], torch.float32)
    triton = TritonBackend(world.pool, world.table, layers.rule)
    launched: Counter[tuple[int, bool]] = Counter()
    run = launching.run

    def noted(kernel: object, grid: tuple[int, ...], *args: object, **constants: object) -> None:
        if "BLOCK_M" in constants:
            launched[constants["BLOCK_M"], constants["IS_SPLIT"]] += 1  # type: ignore[index]
        run(kernel, grid, *args, **constants)

    monkeypatch.setattr(launching, "run", noted)
    before = world.pool.storage.clone()
    triton.compile_all(has_sinks=layers.has_sinks)
    tiling = triton.tiling
    for num_tokens in range(1, 300):
        shape = tile_shape(num_tokens * tiling.group, tiling.value_dim, tiling.itemsize)
        assert {(shape.num_rows, False), (shape.num_rows, True)} <= launched.keys()
    assert torch.equal(world.pool.storage.nan_to_num(), before.nan_to_num())


def test_random_batches_reach_every_shape_of_tile() -> None:
    reached: Counter[object] = Counter()
    for seed in range(24):
        random = Random(seed)
        layers = random.choice([*FAMILIES.values()])
        rows = [
            (random.choice([0, 1, random.randint(0, 700)]), random.choice([1, 1, 1, 2, 5, 9, 70]))
            for _ in range(random.randint(1, 5))
        ]
        stored = random.choice(STORED if HAS_E4M3 else STORED[:3])
        page_size = random.choice([1, 16, 64, 256])
        world = World(layers, page_size, rows, stored, computed=COMPUTED[0])
        world.assert_alike()
        _, launches = TritonBackend(world.pool, world.table, layers.rule).tiling.cut(
            world.meta.spans
        )
        reached.update(launch.shape.num_rows for launch in launches)
        reached["split"] += any(launch.num_splits > 1 for launch in launches)
        reached["more than one launch"] += len(launches) > 1
    wanted = {16, 32, 64, 128, "split", "more than one launch"}
    assert all(reached[each] >= 2 for each in wanted), reached


def test_tiles_cover_every_query_row_once() -> None:
    tiling = Tiling(AttentionRule(6, 1.0), num_kv_heads=2, value_dim=128, itemsize=2, num_sms=132)
    spans = (Span(4, 9, 1, 0), Span(2, 0, 5, 1), Span(1, 30, 50, 6))
    table, launches = tiling.cut(spans)
    covered: Counter[tuple[int, int]] = Counter()
    for launch in launches:
        for row, _, num_tokens, _, first in table[launch.first : launch.end].tolist():
            last = min(first + launch.shape.num_rows, num_tokens * tiling.group)
            covered.update((row, index) for index in range(first, last))
    assert covered == {(s.row, index): 1 for s in spans for index in range(s.num_tokens * 3)}
    tokens = [(launch.first_token, launch.end_token) for launch in launches]
    assert tokens == [(0, 6), (6, 56)], "one and five tokens fill tiles of one shape"


def test_a_cpu_has_the_kernels_in_the_interpreter_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    assert resolve_backend("triton", cpu) == "triton"
    monkeypatch.setattr("triton.knobs.runtime.interpret", False)
    with pytest.raises(ValueError, match="--attention-backend triton: it runs on GPUs"):
        resolve_backend("triton", cpu)
    assert resolve_backend("triton", torch.device("cuda")) == "triton"
