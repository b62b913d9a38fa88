"""Whole forwards by the kernels against those that torch computes, layer by layer."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Final

import numpy as np
import pytest
import torch
from torch import Tensor

from cache.spec import Capacity
from cache.types import Tokens
from session_server.models.bounds import MAX_CONV_WIDTH
from session_server.models.config import DTypeName
from session_server.models.registry import load_config
from session_server.runner.loader import layer_factories
from session_server.runner.model_runner import ModelRunner
from session_server.runner.native import _native
from session_server.runner.paged_decoder import ComputeBackend
from session_server.runner.weights import load_decoder
from tests.depth import cases
from tests.oracle.checkpoints import FAMILIES, LAYERED_FAMILIES, write_checkpoint
from tests.runner.rows import Rows

ALL_FAMILIES: Final = (*FAMILIES, *LAYERED_FAMILIES)
CPUS: Final = tuple(_native.cpus())
DTYPES: Final = (
    ("bfloat16", None),
    ("float16", None),
    ("float32", "bfloat16"),
    ("float32", "float16"),
)
"""Of the computation and of the stored KV; None for the same."""

NUM_ROWS: Final = 6
MAX_LEN: Final = 320
LENGTHS: Final = (1, 2, 17, 64, 70, 100)
"""Of the first chunks of as many rows; two that follow have one token and several."""

LIKENESS: Final = {"float32": 1 - 1e-6, "bfloat16": 0.995, "float16": 0.9995}
"""Least cosine of logits: torch rounds activations to the dtype, the kernels do not."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    return {family: write_checkpoint(family, root / family) for family in ALL_FAMILIES}


def rows_of(
    checkpoint: Path,
    backend: ComputeBackend,
    *,
    page_size: int = 16,
    dtype: DTypeName = "float32",
    kv_dtype: DTypeName | None = None,
) -> Rows:
    config = load_config(checkpoint)
    decoder = load_decoder(
        checkpoint,
        config,
        device=torch.device("cpu"),
        dtype=getattr(torch, dtype),
        factories=layer_factories(backend, dtype),
    )
    pages_per_row = MAX_LEN // page_size
    capacity = Capacity(
        dict.fromkeys(config.pools, 1 + NUM_ROWS * pages_per_row),
        NUM_ROWS,
        MAX_LEN,
        num_states=1 + 2 * NUM_ROWS,
    )
    spec = config.cache_spec(page_size, dtype, kv_dtype)
    runner = ModelRunner(decoder, spec, capacity, backend=backend)
    return Rows(runner, page_size, pages_per_row=pages_per_row)


def tokens_of(count: int, seed: int) -> Tokens:
    return np.random.default_rng(seed).integers(5, 60, count).astype(np.int32)


def logits_of(rows: Rows) -> Tensor:
    """Prompts of all lengths together, then chunks and single tokens on them, in company."""
    prompts = [tokens_of(length, length) for length in LENGTHS]
    first = rows.batch(*(rows.row(i, prompt) for i, prompt in enumerate(prompts, 1)))
    lengths = itertools.cycle((1, 1, 9, 40))
    further = rows.batch(
        *(
            rows.row(i, tokens_of(count, 100 + i), start=length)
            for i, length, count in zip(range(1, 7), LENGTHS, lengths, strict=False)
        )
    )
    return torch.cat((rows.runner.logits(first), rows.runner.logits(further)))


def assert_alike(ours: Tensor, theirs: Tensor, dtype: str) -> None:
    assert ours.isfinite().all()
    assert torch.cosine_similarity(ours, theirs).min() >= LIKENESS[dtype]
    if dtype == "float32":
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("cpu", "family", "page_size"), cases(CPUS, ALL_FAMILIES, (1, 16, 64)), indirect=["cpu"]
)
def test_logits_are_those_that_torch_computes(
    checkpoints: dict[str, Path], cpu: str, family: str, page_size: int
) -> None:
    native, torch_rows = (
        logits_of(rows_of(checkpoints[family], backend, page_size=page_size))
        for backend in ("native", "cpu")
    )
    assert_alike(native, torch_rows, "float32")


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_forwards_work_in_what_was_reserved_for_so_many_tokens(
    checkpoints: dict[str, Path], family: str
) -> None:
    rows = rows_of(checkpoints[family], "native")
    reserved = rows.runner.reserve(sum(LENGTHS))
    assert reserved > 0
    logits_of(rows)
    assert rows.runner.reserve(1) == reserved
    assert rows.runner.reserve(2 * sum(LENGTHS)) > reserved


@pytest.mark.parametrize(
    ("family", "width"),
    [
        ("lfm2", "conv_L_cache"),
        ("granitemoehybrid", "mamba_d_conv"),
        ("qwen3_5_text", "linear_conv_kernel_dim"),
    ],
)
def test_the_widest_convolutions_are_those_that_torch_computes(
    tmp_path: Path, family: str, width: str
) -> None:
    checkpoint = write_checkpoint(family, tmp_path / family, **{width: MAX_CONV_WIDTH})
    native, torch_rows = (logits_of(rows_of(checkpoint, backend)) for backend in ("native", "cpu"))
    assert_alike(native, torch_rows, "float32")


@pytest.mark.parametrize(
    ("cpu", "family", "dtypes"), cases(CPUS, ALL_FAMILIES, DTYPES), indirect=["cpu"]
)
def test_halves_are_near_to_what_torch_makes_of_them(
    checkpoints: dict[str, Path], cpu: str, family: str, dtypes: tuple[DTypeName, DTypeName | None]
) -> None:
    dtype, kv_dtype = dtypes
    native, torch_rows = (
        logits_of(rows_of(checkpoints[family], backend, dtype=dtype, kv_dtype=kv_dtype))
        for backend in ("native", "cpu")
    )
    assert_alike(native, torch_rows, dtype if kv_dtype is None else kv_dtype)


@pytest.mark.parametrize(
    ("cpu", "threads", "family"), cases(CPUS, (1, 3), ALL_FAMILIES), indirect=["cpu", "threads"]
)
def test_company_and_threads_change_no_bit(
    checkpoints: dict[str, Path], cpu: str, threads: int, family: str
) -> None:
    """The same chunks alone, and together in another order on other threads."""
    alone, together = (rows_of(checkpoints[family], "native") for _ in range(2))
    prompts = [tokens_of(length, length) for length in LENGTHS]
    chunks = [tokens_of(count, 50 + count) for count in (1, 1, 1, 5, 23, 1)]
    expected: list[Tensor] = []
    for i, (prompt, chunk) in enumerate(zip(prompts, chunks, strict=True), 1):
        expected.append(alone.runner.logits(alone.batch(alone.row(i, prompt))))
        row = alone.row(i, chunk, start=len(prompt))
        expected.append(alone.runner.logits(alone.batch(row)))
    order = [3, 1, 6, 2, 5, 4]
    firsts = together.batch(*(together.row(i, prompts[i - 1]) for i in order))
    of_prompts = together.runner.logits(firsts)
    nexts = (together.row(i, chunks[i - 1], start=len(prompts[i - 1])) for i in order)
    of_chunks = together.runner.logits(together.batch(*nexts))
    for place, i in enumerate(order):
        assert torch.equal(of_prompts[place], expected[2 * i - 2][0])
        assert torch.equal(of_chunks[place], expected[2 * i - 1][0])


@pytest.mark.parametrize(("cpu", "family"), cases(CPUS, ALL_FAMILIES), indirect=["cpu"])
def test_chunks_of_several_tokens_change_no_bit(
    checkpoints: dict[str, Path], cpu: str, family: str
) -> None:
    """97 and 3, 51 and 49: the last tile of a chunk has one token with some groups of heads."""
    tokens = tokens_of(100, 3)
    expected = logits_behind(rows_of(checkpoints[family], "native"), tokens, (100,))
    for chunks in ((97, 3), (51, 49), (33, 25, 42)):
        actual = logits_behind(rows_of(checkpoints[family], "native"), tokens, chunks)
        assert torch.equal(actual, expected), chunks


def logits_behind(rows: Rows, tokens: Tokens, chunks: tuple[int, ...]) -> Tensor:
    """Logits behind the last of `tokens`, computed in chunks of these sizes."""
    rows.compute(1, tokens, chunks[:-1])
    start = sum(chunks[:-1])
    return rows.runner.logits(rows.batch(rows.row(1, tokens[start:], start=start)))
