"""The kernels of recurrent states in Triton against torch: in Triton's interpreter, and on a GPU
with TEST_DEVICE=cuda, where chunks are in fewer bits.

What no row may read is NaN: every page that is not the state before one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from cache.pool.page_table import PageTable
from cache.pool.recurrent import StatePool
from cache.spec import Capacity, LayerGroup, LayerKind
from cache.types import NULL_PAGE, NULL_ROW, PoolName, StateMoves
from session_server.attention.base import AttentionMeta, DeviceRows, Recurrence, RecurrentPlan, Span
from session_server.attention.recurrent import RecurrentBackend
from session_server.models.layers.gated_delta import DeltaRule
from session_server.models.layers.mamba2 import StateSpace
from session_server.models.registry import load_config
from session_server.runner.paged_decoder import PagedDecoder
from session_server.runner.weights import load_decoder
from tests.depth import at_depth
from tests.oracle.checkpoints import RECURRENT_FAMILIES, write_checkpoint
from tests.oracle.device import DEVICE

pytest.importorskip("triton", reason="triton has no wheel for this machine")

from session_server.attention.triton import launching
from session_server.attention.triton.pieces import CHUNK, MAX_STEPS, NO_PAGE, cut_rows
from session_server.attention.triton.recurrent import (
    TritonRecurrentBackend,
    TritonRecurrentGraphPlan,
)

DTYPE = torch.float32 if DEVICE.type == "cpu" else torch.bfloat16
"""Of models; fp32 has no chunks on a GPU."""


@dataclass(frozen=True)
class Layers:
    """What one pool's layers are: `state` is that of their heads, () where they convolve alone."""

    channels: int
    width: int
    rule: Recurrence | None = None
    state: tuple[int, ...] = ()
    num_keys: int = 1
    has_bias: bool = False

    def inputs(self, num_tokens: int, noise: Noise) -> tuple[Tensor, ...]:
        """What a recurrence takes; some of it lies in other columns of the same rows."""
        heads, rows, columns = self.state
        decay = -noise(num_tokens, heads).abs()
        if isinstance(self.rule, StateSpace):
            both = noise(num_tokens, 2 * self.num_keys * columns).split(self.num_keys * columns, 1)
            write, read = (side.view(num_tokens, self.num_keys, columns) for side in both)
            return noise(num_tokens, heads, rows), decay, write, read
        q, k = (noise(num_tokens, self.num_keys, rows) for _ in range(2))
        q, k = (functional.normalize(side, dim=-1) for side in (q, k))
        all_columns = noise(num_tokens, heads * columns + 5)
        v = all_columns[:, 5:].view(num_tokens, heads, columns)
        # Keys that are alike, hardly forgotten and written over: what a chunk has to undo is most.
        k = functional.normalize(k + 3 * k[:1], dim=-1)
        return q, k, v, 0.1 * decay, 0.8 + 0.2 * noise(num_tokens, heads).sigmoid()


FAMILIES = {
    "lfm2": Layers(20, 3),
    "lfm2, odd sizes": Layers(301, 2, has_bias=True),
    "granite": Layers(24, 4, StateSpace(), (3, 8, 16), has_bias=True),
    "granite, groups": Layers(9, 4, StateSpace(), (4, 40, 5), num_keys=2),
    "qwen": Layers(24, 4, DeltaRule(), (4, 16, 16), num_keys=2),
    "qwen, odd sizes": Layers(7, 4, DeltaRule(), (2, 5, 36), num_keys=2),
}

LONG = CHUNK + 3

BATCHES: dict[str, list[tuple[bool, tuple[int, ...]]]] = {
    "first tokens": [(True, (1,)), (True, (1,))],
    "decode": [(False, (1,)), (True, (1,)), (False, (1,))],
    "guesses": [(False, (1, 2)), (True, (1, 2, 3)), (False, tuple(range(1, MAX_STEPS + 3)))],
    "a few tokens": [(False, (2,)), (True, (MAX_STEPS,)), (False, (3, MAX_STEPS + 3))],
    "chunks": [(True, (2 * CHUNK,)), (False, (LONG + CHUNK,))],
    "chunks that leave states": [(False, (CHUNK, CHUNK + 1, LONG))],
    "everything at once": [
        (False, (1,)),
        (True, (1,)),
        (False, (1, 2, 3)),
        (True, (MAX_STEPS + 1,)),
        (False, (5, LONG)),
    ],
}
"""By row: whether it begins a session, and after how many tokens it leaves a state."""


class Noise:
    """Draw tensors."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator).to(DEVICE)


class World:
    """A pool whose pages are dealt out at random, and rows that go on from some of them."""

    def __init__(self, layers: Layers, rows: list[tuple[bool, tuple[int, ...]]], seed: int = 0):
        rows = sorted(rows, key=lambda row: row[1][-1])
        self.layers, self.noise = layers, Noise(seed)
        num_pages = sum(len(lengths) + 1 for _, lengths in rows) + 2
        dealt = iter(Random(seed).sample(range(1, num_pages), num_pages - 1))
        spans: list[Span] = []
        self.num_tokens = 0
        for row, (is_fresh, lengths) in enumerate(rows, 1):
            start = 0 if is_fresh else 10 * row
            targets = tuple((start + length, next(dealt)) for length in lengths)
            moves = StateMoves(NULL_PAGE if is_fresh else next(dealt), targets)
            spans.append(Span(row, start, lengths[-1], self.num_tokens, moves))
            self.num_tokens += lengths[-1]
        self.meta = AttentionMeta(tuple(spans), {})
        shapes = ((layers.width - 1, layers.channels), layers.state)
        group = LayerGroup(
            PoolName("state"), LayerKind.RECURRENT, (0, 1), 0, 0, 4,
            state_shapes=shapes if layers.state else shapes[:1],
        )  # fmt: skip
        self.pools = [StatePool(group, num_pages=num_pages, device=DEVICE) for _ in range(2)]
        read = [moves.source for span in spans if (moves := span.states) and moves.source]
        for ours, theirs in zip(*(pool.parts[1] for pool in self.pools), strict=True):
            ours.fill_(torch.nan)
            ours[read] = self.noise(len(read), *ours.shape[1:])
            theirs.copy_(ours)

    def assert_alike(self) -> None:
        """Both plans say the same, and leave the same states in the same pages."""
        ours, theirs = self.pools
        self.assert_same(
            TritonRecurrentBackend(ours, DTYPE).plan(self.meta),
            RecurrentBackend(theirs).plan(self.meta),
        )

    def assert_same(self, ours: RecurrentPlan, theirs: RecurrentPlan) -> None:
        layers, noise, num_tokens = self.layers, self.noise, self.num_tokens
        x = noise(num_tokens, layers.channels + 3)[:, 3:]
        taps = noise(layers.width, layers.channels)
        bias = noise(layers.channels) if layers.has_bias else None
        ours_said, said = (plan.convolve(1, x, taps, bias) for plan in (ours, theirs))
        torch.testing.assert_close(ours_said, said, rtol=1e-5, atol=1e-5)
        if layers.rule is not None:
            inputs = layers.inputs(num_tokens, noise)
            ours_said, said = (plan.recur(1, layers.rule, *inputs) for plan in (ours, theirs))
            assert said.isfinite().all()
            torch.testing.assert_close(ours_said, said, **TOLERANCE)
        for ours_left, left in zip(*(pool.parts[1] for pool in self.pools), strict=True):
            torch.testing.assert_close(ours_left[1:], left[1:], equal_nan=True, **TOLERANCE)
        for pool in self.pools:
            assert not any(part.any() for part in pool.parts[0]), "another layer was written"


TOLERANCE: dict[str, float] = (
    {"rtol": 1e-5, "atol": 5e-5} if DEVICE.type == "cpu" else {"rtol": 1e-2, "atol": 1e-2}
)


@pytest.mark.parametrize("batch", at_depth(["everything at once"], proof=[*BATCHES]))
@pytest.mark.parametrize("family", FAMILIES)
def test_every_batch_goes_on_as_torch_does(family: str, batch: str) -> None:
    World(FAMILIES[family], BATCHES[batch]).assert_alike()


@pytest.mark.parametrize("seed", range(at_depth(1, proof=60)))
def test_random_batches_go_on_as_torch_does(seed: int) -> None:
    random = Random(seed)
    rows = []
    for _ in range(random.randint(1, 4)):
        num_tokens = random.choice([1, 1, 2, 5, 9, LONG, at_depth(LONG, proof=4 * CHUNK)])
        lengths = random.sample(range(1, num_tokens + 1), random.randint(1, min(4, num_tokens)))
        is_fresh = random.choice([False, True])
        rows.append((is_fresh, tuple(sorted({*lengths, num_tokens}))))
    World(random.choice([*FAMILIES.values()]), rows, seed).assert_alike()


def test_fp32_goes_from_token_to_token_where_products_are_rounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launching, "IS_INTERPRETED", False)
    world = World(FAMILIES["qwen"], [(True, (1,)), (False, (2, LONG))])
    ours, theirs = world.pools
    plan = TritonRecurrentBackend(ours, torch.float32).plan(world.meta)
    assert plan.num_stepped == 2
    assert TritonRecurrentBackend(ours, torch.bfloat16).plan(world.meta).num_stepped == 1
    world.assert_same(plan, RecurrentBackend(theirs).plan(world.meta))


@pytest.mark.parametrize("seed", range(20))
def test_pieces_cover_every_token_once_and_each_row_has_its_own(seed: int) -> None:
    random = Random(seed)
    spans, offset, left = [], 0, {}
    for row in range(1, random.randint(2, 6)):
        num_tokens = random.choice([1, 2, MAX_STEPS, CHUNK, 100])
        lengths = {*random.sample(range(1, num_tokens + 1), random.randint(1, num_tokens))}
        targets = tuple(
            (7 + length, row * 200 + length) for length in sorted({*lengths, num_tokens})
        )
        left |= {page: offset + length - 7 for length, page in targets}
        spans.append(Span(row, 7, num_tokens, offset, StateMoves(row, targets)))
        offset += num_tokens
    pieces = cut_rows(spans, MAX_STEPS)
    table = pieces.table.tolist()
    assert [token for _, begin, end, _, _ in table for token in range(begin, end)] == [
        *range(offset)
    ]
    assert {page: end for _, _, end, _, page in table if page != NO_PAGE} == left
    assert max(end - begin for _, begin, end, _, _ in table) <= CHUNK
    of_rows = {}
    for index, (first, last) in enumerate(pieces.rows.tolist()):
        own = table[first:last]
        assert len({(start, source) for start, _, _, source, _ in own}) == 1
        of_rows[own[0][3]] = (own[0][1], own[-1][2])
        longest = max(end - begin for _, begin, end, _, _ in own)
        assert (index < pieces.num_stepped) == (longest <= MAX_STEPS)
    assert of_rows == {span.row: (span.offset, span.offset + span.num_tokens) for span in spans}


@pytest.mark.parametrize("family", at_depth(["qwen"], proof=[*FAMILIES]))
@pytest.mark.parametrize("most", [1, 3])
def test_a_plan_that_is_refreshed_on_the_device_goes_on_as_a_new_one(
    family: str, most: int
) -> None:
    """Of rows of one token, and of up to three; more rows than there are, and none of them read."""
    plan: TritonRecurrentGraphPlan | None = None
    for lengths in ((1, most), (most, 1, most)):
        rows = [(bool(row % 2), tuple(range(1, n + 1))) for row, n in enumerate(lengths)]
        world = World(FAMILIES[family], rows, seed=len(lengths))
        by_row = torch.zeros((5 + most, 4), dtype=torch.int64)
        by_row[5:] = -1
        for row, span in enumerate(world.meta.spans):
            assert span.states is not None
            pages = [page for _, page in span.states.targets]
            told = (span.row, span.start, span.num_tokens, span.offset, span.states.source, *pages)
            by_row[: len(told), row] = torch.tensor(told)
        if plan is None:
            plan = TritonRecurrentBackend(world.pools[0], DTYPE).plan_graph(4, most, 64)
        plan = replace(plan, pool=world.pools[0])
        plan.refresh(DeviceRows.of(by_row.to(DEVICE)))
        world.assert_same(plan, RecurrentBackend(world.pools[1]).plan(world.meta))


def test_a_convolution_in_halves_rounds_its_outputs_alone() -> None:
    """The inputs it leaves are those it was given, and torch's own convolution says the same."""
    world = World(Layers(40, 4), [(True, (1,)), (True, (2, CHUNK + 1))])
    pool, noise = world.pools[0], world.noise
    x, taps = noise(world.num_tokens, 40).bfloat16(), noise(4, 40).bfloat16()
    said = TritonRecurrentBackend(pool, DTYPE).plan(world.meta).convolve(1, x, taps, None)
    for span in world.meta.spans:
        own = x[span.offset : span.offset + span.num_tokens].float()
        padded = functional.pad(own.t(), (3, 0))
        whole = functional.conv1d(padded[None], taps.float().t()[:, None], groups=40)[0].t()
        of_row = said[span.offset : span.offset + span.num_tokens]
        torch.testing.assert_close(of_row, whole.bfloat16(), rtol=2**-7, atol=1e-5)
        assert span.states is not None
        for length, page in span.states.targets:
            assert pool.parts[1][0][page].equal(padded.t()[length : length + 3])


RECURRING = {
    "granitemoehybrid": ["advance_state_space"],
    "qwen3_5_text": ["advance_delta_rule"],
}


@pytest.mark.parametrize("family", at_depth(["granitemoehybrid"], proof=[*RECURRENT_FAMILIES]))
def test_no_batch_compiles_what_was_not_compiled_before(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model: what its kernels are launched with, but for tensors, is compiled into them."""
    config = load_config(write_checkpoint(family, tmp_path))
    decoder = load_decoder(tmp_path, config, device=DEVICE, dtype=DTYPE)
    spec = config.cache_spec(16, decoder.dtype_name)
    pages = {group.pool: 9 for group in spec.groups}
    tables = {name: PageTable(2, 8, device=DEVICE) for name in config.pools}
    capacity = Capacity(pages, 2, 128, num_states=4)
    model = PagedDecoder(decoder, spec, capacity, tables=tables, backend="triton")
    pool = model.states
    assert pool is not None
    launched: set[tuple[object, ...]] = set()

    def noted(kernel: Any, grid: tuple[int, ...], *args: object, **constants: object) -> None:
        told = [each.dtype if isinstance(each, Tensor) else each for each in args]
        launched.add((kernel.fn.__name__, *told, *constants.items()))

    monkeypatch.setattr(launching, "run", noted)
    model.compile_kernels()
    compiled = launched.copy()
    launched.clear()
    backend = TritonRecurrentBackend(pool, DTYPE)
    mixers = [layer.mixer for layer, _, name in decoder.layers if name == pool.name]
    for num_tokens in (1, 2, MAX_STEPS + 1, 3 * CHUNK):
        x = torch.zeros((num_tokens, config.hidden_size), dtype=DTYPE, device=DEVICE)
        plan = backend.plan(AttentionMeta((Span(NULL_ROW, 0, num_tokens, 0),), {}))
        for mixer in mixers:
            mixer(x, x, plan)
    assert launched <= compiled
    names = {"convolve_pieces", *RECURRING.get(family, ())}
    assert {str(each[0]) for each in launched} == names
