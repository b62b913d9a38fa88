"""`python -m tests.bench.kv_dtype`: compare a decode step with KV in 16 bits to one with fp32.

One model, fp32 weights, one row. The pages hold noise: content does not affect time, but the memory
reads do. Histories and dtypes are interleaved, so that a noisy minute affects them alike.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich.console import Console

from cache.types import RowId, TableWrite, TurnId, pages_for
from session_server.bench.checkpoint import RandomModel, write_random_checkpoint
from session_server.bench.harness import take_turns
from session_server.bench.sheet import Sheet
from session_server.core.batch import Batch, BatchRow, SamplingStart
from session_server.core.sampling import SamplingParams
from session_server.models.config import DTypeName
from session_server.runner.capacity import MemoryLimits
from session_server.runner.loader import LoadedRunner, RunnerOptions, load_runner

KV_DTYPES: Final[tuple[DTypeName, ...]] = ("float32", "bfloat16", "float16")

LONG_CONTEXT: Final = RandomModel(
    hidden_size=256,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=64,
    max_position_embeddings=20_000,
)

_ROW: Final = RowId(1)
_NO_TOKENS: Final = np.empty(0, np.int32)
_FEW_TOKENS: Final = 64
"""Room after the history: each measurement computes one token."""


@dataclass(frozen=True, slots=True)
class KvDtypeWorkload:
    """Configure one token per step, after each of `histories` positions on consecutive pages."""

    model: RandomModel = LONG_CONTEXT
    histories: tuple[int, ...] = (1024, 4096, 16_384)
    num_steps: int = 15
    page_size: int = 16

    @property
    def total_steps(self) -> int:
        """Return the steps of all dtypes, warm-up included."""
        return len(KV_DTYPES) * len(self.histories) * (self.num_steps + 1)


def measure(load: KvDtypeWorkload, *, on_step: Callable[[], None]) -> dict[str, Any]:
    """Time the workload and call `on_step` after each step."""
    with tempfile.TemporaryDirectory() as folder:
        directory = write_random_checkpoint(Path(folder), load.model)
        loaded = {dtype: _load_noise(directory, dtype, load) for dtype in KV_DTYPES}
    steps = {
        (history, dtype): partial(_step_s, of_dtype, history)
        for history in load.histories
        for dtype, of_dtype in loaded.items()
    }
    times = take_turns(steps, load.num_steps + 1, on_step)
    return {
        "bytes_per_token": {
            dtype: sum(group.bytes_per_token for group in of_dtype.spec.groups)
            for dtype, of_dtype in loaded.items()
        },
        # The first step of each warms up.
        "histories": {
            str(history): _figures({dtype: times[history, dtype][1:] for dtype in KV_DTYPES})
            for history in load.histories
        },
    }


SHEETS: Final = (
    Sheet(
        "decode step, fp32 weights, {bytes_per_token[float32]} B a token of KV in fp32 and "
        "{bytes_per_token[float16]} B in halves: ms (speed over fp32)",
        lambda report: report["histories"],
        ("history", "KV"),
        {"median": "{median_ms:.2f} ({speed:.2f})", "best": "{min_ms:.2f} ({speed_at_best:.2f})"},
    ),
)


def _load_noise(directory: Path, dtype: DTypeName, load: KvDtypeWorkload) -> LoadedRunner:
    """Load a runner with one row, whose history is noise."""
    num_tokens = max(load.histories) + _FEW_TOKENS
    options = RunnerOptions(
        page_size=load.page_size,
        num_rows=1,
        device="cpu",
        dtype="float32",
        kv_dtype=dtype,
        max_context_len=num_tokens,
        memory=MemoryLimits(max_total_tokens=num_tokens),
    )
    loaded = load_runner(directory, options)
    pages = np.arange(1, pages_for(num_tokens, load.page_size) + 1, dtype=np.int32)
    writes = tuple(TableWrite(name, _ROW, 0, pages) for name in loaded.runner.pools)
    loaded.runner.launch(Batch(0, (), writes)).wait()
    for pool in loaded.runner.pools.values():
        for page in pages.tolist():
            for part in pool.page(page, load.page_size):
                part.normal_()
    return loaded


def _step_s(loaded: LoadedRunner, history: int) -> float:
    """Return the seconds of one decode step after `history` positions."""
    row = BatchRow(
        turn_id=TurnId("measured"),
        attempt=0,
        row=_ROW,
        start=history,
        num_tokens=1,
        tokens=np.zeros(1, np.int32),
        sample=True,
        sampling=SamplingStart(SamplingParams(temperature=0.0), 0, 0, _NO_TOKENS, _NO_TOKENS),
    )
    started = time.perf_counter()
    result = loaded.runner.launch(Batch(1, (row,), ())).wait()
    seconds = time.perf_counter() - started
    assert result.error is None, result.error
    return seconds


def _figures(times: Mapping[DTypeName, list[float]]) -> dict[str, dict[str, float]]:
    """Return medians and minima, and the speed of each dtype relative to fp32 for both."""
    medians = {dtype: statistics.median(of_dtype) for dtype, of_dtype in times.items()}
    best = {dtype: min(of_dtype) for dtype, of_dtype in times.items()}
    return {
        dtype: {
            "median_ms": medians[dtype] * 1e3,
            "min_ms": best[dtype] * 1e3,
            "speed": medians["float32"] / medians[dtype],
            "speed_at_best": best["float32"] / best[dtype],
        }
        for dtype in times
    }


if __name__ == "__main__":
    report = measure(KvDtypeWorkload(), on_step=lambda: None)
    Console().print(*(sheet.table(report) for sheet in SHEETS))
