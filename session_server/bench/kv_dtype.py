"""Compare a decode step with KV stored in 16 bits to one with KV in fp32.

One model, fp32 weights, one row. The pages hold noise: content does not affect time, but the memory
reads do. Histories and dtypes are interleaved, so that a noisy minute affects them alike.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from cache.types import RowId, TableWrite, TurnId, pages_for
from session_server.bench.checkpoint import RandomModel, write_random_checkpoint
from session_server.core.batch import Batch, BatchRow, SamplingStart
from session_server.core.sampling import SamplingParams
from session_server.models.config import DTypeName
from session_server.runner.capacity import MemoryLimits
from session_server.runner.loader import RunnerOptions, load_runner

KV_DTYPES: Final[tuple[DTypeName, ...]] = ("float32", "bfloat16", "float16")

LONG_CONTEXT: Final = RandomModel(
    hidden_size=256, num_layers=4, num_heads=8, num_kv_heads=4, head_dim=64, context_len=20_000
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


def measure_kv_dtypes(load: KvDtypeWorkload, *, on_step: Callable[[], None]) -> dict[str, Any]:
    """Time the workload and call `on_step` after each step."""
    with tempfile.TemporaryDirectory() as folder:
        directory = write_random_checkpoint(Path(folder), load.model)
        rows = {dtype: _Row(directory, dtype, load) for dtype in KV_DTYPES}
    times: dict[int, dict[str, list[float]]] = {
        history: {dtype: [] for dtype in KV_DTYPES} for history in load.histories
    }
    for step in range(load.num_steps + 1):
        for history, of_history in times.items():
            for dtype, row in rows.items():
                seconds = row.step_s(history)
                if step:
                    of_history[dtype].append(seconds)
                on_step()
    return {
        "bytes_per_token": {dtype: row.bytes_per_token for dtype, row in rows.items()},
        "histories": {str(history): _figures(of) for history, of in times.items()},
    }


class _Row:
    """Hold a runner with one row whose history is noise."""

    def __init__(self, directory: Path, dtype: DTypeName, load: KvDtypeWorkload) -> None:
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
        self.bytes_per_token = sum(group.bytes_per_token for group in loaded.spec.groups)
        self._runner = loaded.runner
        pages = np.arange(1, pages_for(num_tokens, load.page_size) + 1, dtype=np.int32)
        writes = tuple(TableWrite(name, _ROW, 0, pages) for name in loaded.runner.pools)
        loaded.runner.launch(Batch(0, (), writes)).wait()
        for pool in loaded.runner.pools.values():
            for page in pages.tolist():
                for part in pool.page(page, load.page_size):
                    part.normal_()

    def step_s(self, history: int) -> float:
        """Return the seconds of one decode step after `history` positions."""
        greedy = SamplingStart(SamplingParams(temperature=0.0), 0, 0, _NO_TOKENS, _NO_TOKENS)
        row = BatchRow(
            turn_id=TurnId("measured"),
            attempt=0,
            row=_ROW,
            start=history,
            num_tokens=1,
            tokens=np.zeros(1, np.int32),
            sample=True,
            sampling=greedy,
        )
        batch = Batch(1, (row,), ())
        started = time.perf_counter()
        result = self._runner.launch(batch).wait()
        seconds = time.perf_counter() - started
        assert result.error is None, result.error
        return seconds


def _figures(times: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Return medians and minima, and the speed of each dtype relative to fp32 for both."""
    full = times["float32"]
    return {
        dtype: {
            "median_ms": statistics.median(of_dtype) * 1e3,
            "min_ms": min(of_dtype) * 1e3,
            "speed": statistics.median(full) / statistics.median(of_dtype),
            "speed_at_best": min(full) / min(of_dtype),
        }
        for dtype, of_dtype in times.items()
    }
