"""KV stored in halves by models that compute in fp32, against the fp32 logits of `transformers`.

Logits of these checkpoints have a standard deviation of about 0.9. What is stored is rounded to
2**-9 (bfloat16) or 2**-12 (float16) of its size; the largest difference of a logit was 0.036 and
0.005, and 0.2 where rounding sent a token to another expert.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from session_server.models.config import DTypeName
from session_server.runner.capacity import MemoryLimits
from session_server.runner.loader import RunnerOptions, load_runner
from session_server.runner.model_runner import ModelRunner
from session_server.runner.paged_decoder import BackendName
from tests.models.raw_configs import VOCAB_SIZE
from tests.oracle.checkpoints import FAMILIES, LAYERED_FAMILIES, reference_logits
from tests.oracle.conversations import Drive, Layout, capacity, conversations, pool_pages
from tests.oracle.oracle import Oracle, load
from tests.runner.rows import Rows

BOUNDS: dict[DTypeName, float] = {"bfloat16": 0.05, "float16": 0.01}
ROUTED_BOUND = 0.3
"""Of a logit of a model with experts, at most."""

ROUTED = (
    "gpt_oss",
    "qwen3_moe",
    "deepseek_v2_lite",
    "deepseek_v2",
    "deepseek_v3",
    "granitemoehybrid",
)
LAYOUTS: list[tuple[int, int, BackendName, Layout]] = [
    (1, 1, "native", Layout.SCATTERED),
    (1, 1, "cpu", Layout.SCATTERED),
    (16, 7, "native", Layout.RUNS),
    (4, 7, "torch", Layout.RUNS),
    (16, 64, "cpu", Layout.RUNS),
    (256, 64, "cpu", Layout.CONSECUTIVE),
]
CASES = list(zip((*FAMILIES, *LAYERED_FAMILIES), itertools.cycle(LAYOUTS), strict=False))


@pytest.mark.parametrize("kv_dtype", BOUNDS)
@pytest.mark.parametrize(("family", "layout"), CASES, ids=str)
def test_logits_stay_close_to_those_of_full_precision(
    family: str,
    layout: tuple[int, int, BackendName, Layout],
    kv_dtype: DTypeName,
    oracle: Oracle,
) -> None:
    page_size, chunk, backend, order = layout
    decoder = load(oracle.directory(family))
    config = decoder.config
    spec = config.cache_spec(page_size, "float32", kv_dtype)
    runner = ModelRunner(decoder, spec, capacity(config, page_size), backend=backend)
    assert {pool.dtype for pool in runner.pools.values()} == {getattr(torch, kv_dtype)}
    sessions = conversations(seed=7, vocab_size=VOCAB_SIZE)
    Drive(runner, page_size, chunk, pool_pages(config, order, page_size)).run(sessions)
    bound = ROUTED_BOUND if family in ROUTED else BOUNDS[kv_dtype]
    for session in sessions:
        computed = session.tokens[: session.num_computed]
        expected = reference_logits(oracle.directory(family), computed)
        seen = torch.stack([session.logits[position] for position in range(len(computed))]).cpu()
        worst = (seen - expected).abs().max().item()
        assert 1e-5 < worst <= bound


@pytest.mark.parametrize("backend", ["native", "cpu", "torch"])
@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gpt_oss", "deepseek_v2"])
def test_what_was_computed_together_makes_no_difference(
    family: str, backend: BackendName, checkpoints: dict[str, Path]
) -> None:
    """New tokens see each other as they are stored, not as they were before."""
    tokens = np.random.default_rng(3).integers(3, VOCAB_SIZE, 60, dtype=np.int32)

    def last_logits(chunk: int, kv_dtype: DTypeName) -> torch.Tensor:
        options = RunnerOptions(
            page_size=4,
            num_rows=2,
            device="cpu",
            kv_dtype=kv_dtype,
            max_context_len=128,
            memory=MemoryLimits(max_total_tokens=256),
            backend=backend,
        )
        rows = Rows(load_runner(checkpoints[family], options).runner, 4)
        for start in range(0, len(tokens) - chunk, chunk):
            rows.run(rows.row(1, tokens[start : start + chunk], start=start))
        last = rows.row(1, tokens[-chunk:], start=len(tokens) - chunk)
        return rows.runner.logits(rows.batch(last))[0]

    whole = last_logits(60, "bfloat16")
    rounded_by = (whole - last_logits(60, "float32")).abs().max()
    for chunk in (1, 4, 20):
        assert (last_logits(chunk, "bfloat16") - whole).abs().max() < rounded_by / 10
