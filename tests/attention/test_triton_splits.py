"""Into how many splits histories are cut for the kernels in Triton, what they write, and that the
merge reads nothing else."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from session_server.attention.base import AttentionRule, DeviceRows, Span
from session_server.attention.triton import tiles
from session_server.attention.triton.tiles import (
    MAX_PARTIAL_BYTES,
    MAX_SPLITS,
    MIN_SPLIT_LEN,
    Launch,
    Tiling,
    choose_num_splits,
)
from tests.oracle.device import DEVICE

pytest.importorskip("triton", reason="triton has no wheel for this machine")

from session_server.attention.reference import ReferenceBackend
from session_server.attention.triton.backend import TritonBackend
from tests.attention.test_triton import BATCHES, COMPUTED, FAMILIES, POOL, World

LLAMA_8B = Tiling(AttentionRule(32, 1.0), 8, 128, itemsize=2, num_sms=132)
LLAMA_70B = Tiling(AttentionRule(64, 1.0), 8, 128, itemsize=2, num_sms=132)
DEEPSEEK = Tiling(AttentionRule(128, 1.0), 1, 512, itemsize=2, num_sms=132)
LONG = 131_072


def launches(tiling: Tiling, *rows: tuple[int, int]) -> tuple[Launch, ...]:
    """How rows are launched. `rows`: (start, number of new tokens) of each, fewest tokens first."""
    spans, offset = [], 0
    for index, (start, num_tokens) in enumerate(rows, 1):
        spans.append(Span(index, start, num_tokens, offset))
        offset += num_tokens
    return tiling.cut(spans)[1]


def splits(tiling: Tiling, *rows: tuple[int, int]) -> int:
    """The splits of rows that are one launch."""
    (launch,) = launches(tiling, *rows)
    return launch.num_splits


def partial_bytes(tiling: Tiling, launch: Launch) -> int:
    """What a launch writes for the merge; nothing if it is not split."""
    num_tokens = launch.end_token - launch.first_token
    each = tiling.rule.num_heads * (tiling.value_dim + 1) * 4
    return launch.num_splits * num_tokens * each if launch.num_splits > 1 else 0


def test_a_history_is_split_while_multiprocessors_are_idle_and_each_has_enough_to_do() -> None:
    assert splits(LLAMA_8B, (100_000, 1)) == 32
    assert splits(LLAMA_8B, (1_100, 1)) == 4
    assert splits(LLAMA_8B, (MIN_SPLIT_LEN - 2, 1)) == 1
    assert choose_num_splits(1 << 20, 1_000, split_bytes=1) == MAX_SPLITS


def test_what_keeps_all_multiprocessors_busy_is_not_split() -> None:
    assert splits(LLAMA_8B, *[(8_000, 1)] * 40) == 1
    assert splits(LLAMA_8B, *[(LONG, 1)] * 64) == 1
    assert splits(LLAMA_8B, (LONG, 2048)) == splits(LLAMA_8B, (LONG, 8192)) == 1
    assert splits(LLAMA_8B, (LONG, 512)) == 2, "it has 128 programs"


def test_one_long_history_is_split_though_short_ones_keep_multiprocessors_busy() -> None:
    assert splits(LLAMA_8B, *[(1_000, 1)] * 63, (LONG, 1)) == 16
    assert splits(LLAMA_8B, *[(1_000, 1)] * 511, (LONG, 1)) == 4, "they take longer"


@pytest.mark.parametrize(
    ("factor", "expected"), [(1 / 8, 8), (1 / 8 + 2**-20, 4), (1 / 2, 2), (1, 1), (2, 1)]
)
def test_splits_write_no_more_than_they_may(factor: float, expected: int) -> None:
    split_bytes = int(MAX_PARTIAL_BYTES * factor)
    assert choose_num_splits(LONG, MIN_SPLIT_LEN, split_bytes) == expected


@pytest.mark.parametrize("tiling", [LLAMA_8B, LLAMA_70B, DEEPSEEK], ids=["8b", "70b", "latent"])
def test_no_launch_writes_more_than_it_may(tiling: Tiling) -> None:
    """Chunks on a long history, by themselves and behind short rows; rows that verify drafts, of
    which one is long."""
    cut = [launches(tiling, (LONG, n)) for n in (1, 5, 170, 512, 2048, 8192)]
    cut += [launches(tiling, *[(100, n)] * 63, (LONG, n)) for n in (1, 5, 17, 170)]
    graphs = [(rows, n) for rows in (1, 8, 64, 1024) for n in (1, 5, 17)]
    cut += [(tiling.cut_graph(*size, LONG)[1],) for size in graphs]
    taken = [partial_bytes(tiling, launch) for each in cut for launch in each]
    assert max(taken) <= MAX_PARTIAL_BYTES
    assert max(taken) > MAX_PARTIAL_BYTES / 4, "the bound is near"


def test_a_graph_is_split_for_one_long_history_among_short_ones() -> None:
    """Whoever captures it does not know which they are."""
    assert LLAMA_8B.cut_graph(1, 1, LONG)[1].num_splits == 32
    assert LLAMA_8B.cut_graph(64, 1, LONG)[1].num_splits == LONG // tiles.MAX_SPLIT_LEN
    assert LLAMA_8B.cut_graph(64, 1, 8_192)[1].num_splits == 2
    assert DEEPSEEK.cut_graph(64, 1, LONG)[1].num_splits == 4, "it may write no more"


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """What `new_empty` gives for a shape from now on, full of NaN."""
    made: list[Tensor] = []
    new_empty: Callable[..., Tensor] = Tensor.new_empty

    def full_of_nan(self: Tensor, shape: object, **kwargs: object) -> Tensor:
        empty = new_empty(self, shape, **kwargs)
        if isinstance(shape, tuple):  # Triton's interpreter asks for a number
            made.append(empty.fill_(math.nan))
        return empty

    monkeypatch.setattr(Tensor, "new_empty", full_of_nan)
    return made


ROWS = [(3, 1), (260, 1), (0, 2), (2 * MIN_SPLIT_LEN - 1, 3), (700, 3)]


# The merge reads the sums of what is padded, too, and numpy says so.
@pytest.mark.filterwarnings("ignore:All-NaN slice encountered")
@pytest.mark.parametrize("family", ["llama", "gpt-oss, global", "latent, few heads"])
def test_in_a_graph_a_split_that_sees_nothing_writes_nothing_and_none_reads_it(
    family: str, made: list[Tensor]
) -> None:
    """The graph is of more rows and tokens, and of a longer history, than the batch."""
    num_rows, most, dtype = 7, 4, COMPUTED[0]
    world = World(FAMILIES[family], 16, ROWS, dtype, computed=dtype)
    rule, num_tokens, size = world.layers.rule, world.num_tokens, num_rows * most
    graph = TritonBackend(world.pool, world.table, rule).plan_graph(num_rows, most, 100_000)
    by_row = torch.zeros((5 + most, num_rows), dtype=torch.int64)
    for index, span in enumerate(world.meta.spans):
        by_row[:4, index] = torch.tensor((span.row, span.start, span.num_tokens, span.offset))
    graph.refresh(DeviceRows.of(by_row.to(DEVICE)))
    slots = torch.zeros(size, dtype=torch.int64, device=DEVICE)
    slots[:num_tokens] = world.meta.slot_mapping[POOL]
    q, kv = world.noise(size, rule.num_heads), world.kv(size)
    sinks = world.noise(1, rule.num_heads)[0, :, 0] if world.layers.has_sinks else None

    said = graph.plan({POOL: slots}).attend(0, q, kv, sinks)[:num_tokens]
    reference = ReferenceBackend(world.pool, world.table, rule).plan(world.meta)
    expected = reference.attend(0, q[:num_tokens], kv[:num_tokens], sinks)
    expected = expected.view(num_tokens, rule.num_heads, -1)
    value_dim = world.layers.head_dim - world.layers.rope_dim
    rtol, atol = (1e-5, 2e-5) if dtype == torch.float32 else (2e-2, 2e-2)
    torch.testing.assert_close(
        said.view(num_tokens, rule.num_heads, -1), expected[..., :value_dim], rtol=rtol, atol=atol
    )

    parts, lse = next(pair for pair in itertools.pairwise(made) if pair[0].dim() == 4)
    assert parts.shape[:2] == lse.shape[:2] == (graph.launch.num_splits, size)
    assert graph.launch.num_splits >= 16
    spans, first = world.meta.spans, MIN_SPLIT_LEN * torch.arange(graph.launch.num_splits)[:, None]
    sees = first <= torch.cat([torch.arange(span.start, span.end) for span in spans])
    # All tokens of a row are one tile here: what one of them sees is written for all.
    has_some = first < torch.tensor([span.end for span in spans for _ in range(span.num_tokens)])
    assert {2, 3} <= {*sees.sum(0).tolist()}, "some see more than one"
    assert (sees != has_some).any()
    parts, lse = parts.cpu(), lse.cpu()[:, :num_tokens]
    assert not parts[:, :num_tokens][has_some].isnan().any()
    assert parts[:, :num_tokens][~has_some].isnan().all()
    assert parts[:, num_tokens:].isnan().all()
    assert lse[~sees].eq(-math.inf).all()
    assert lse[sees].isfinite().all()


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt-oss, global", "latent, few heads"])
@pytest.mark.usefixtures("made")
def test_without_a_graph_what_no_split_wrote_is_not_read_either(family: str) -> None:
    rows = [*BATCHES["everything at once"], (2 * MIN_SPLIT_LEN + 77, 1)]
    World(FAMILIES[family], 16, rows, COMPUTED[0], computed=COMPUTED[0]).assert_alike()
