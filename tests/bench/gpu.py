"""`python -m tests.bench.gpu`: what a step of a random model in the shape of Qwen3-8B costs.

Decode and prefill against the bytes they must read and the operations they must do, at the rates
that this device is measured to have; decode against `generate` of `transformers`; and how much of a
step the device computes. The weights are made on the device, and the KV of histories is noise:
neither changes the time. Each part prints its rows as soon as it has them, so a run that is cut
short has told what it knew. Needs msgspec and transformers, nothing of the web.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from cache.spec import Capacity
from cache.types import RowId, TableWrite, TurnId, pages_for
from session_server.core.batch import (
    Batch,
    BatchRow,
    DecodeRows,
    PendingStep,
    SamplingStart,
    StepResult,
)
from session_server.core.sampling import SamplingParams
from session_server.models.registry import load_config
from session_server.runner.checkpoint import WeightSource
from session_server.runner.decode_graphs import CudaGraphs
from session_server.runner.graph_sizes import graph_sizes
from session_server.runner.model_runner import ModelRunner
from session_server.runner.paged_decoder import BackendName
from session_server.runner.weights import build_decoder, weight_bytes

SHAPES: Final[dict[str, dict[str, Any]]] = {
    "8b": {
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 12_288,
        "vocab_size": 151_936,
    },
    "tiny": {
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 256,
        "vocab_size": 2048,
    },
}
"""Qwen3-8B, and one to try the benchmark with."""

PAGE_SIZE: Final = 16
NUM_STEPS: Final = 24
WARM_UP: Final = 4
_NO_TOKENS: Final = np.zeros(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Rates of a device: bytes read and written by a large copy, operations of a bf16 product."""

    bytes_per_s: float
    flops_per_s: float


class RandomWeights(WeightSource):
    """Normal noise of standard deviation 0.02, made on the device; gains of norms are ones."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        """Create the source; it has every tensor that is asked for."""
        self.dtype = dtype
        self._device = device

    def has(self, name: str) -> bool:
        """Return whether the checkpoint has a tensor of that name: no spelling but the usual."""
        del name
        return False

    def take_as(self, dtype: torch.dtype, name: str, *shape: int) -> Tensor:
        """Return noise, or ones."""
        tensor = torch.empty(shape, dtype=dtype, device=self._device)
        return tensor.fill_(1.0) if name.endswith("norm.weight") else tensor.normal_(0.0, 0.02)


class Bench:
    """A runner whose rows have histories of noise, and the steps it is timed with."""

    def __init__(
        self,
        config: dict[str, Any],
        device: torch.device,
        *,
        num_rows: int,
        max_len: int,
        backend: BackendName,
    ) -> None:
        """Make the model and pools for `num_rows` rows of `max_len` tokens in all."""
        self.device = device
        self.config = config
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(config))
            parsed = load_config(Path(folder))
        decoder = build_decoder(parsed, RandomWeights(device, dtype))
        spec = parsed.cache_spec(PAGE_SIZE, decoder.dtype_name)
        self.num_pages = pages_for(max_len, PAGE_SIZE) + num_rows
        num_pages = dict.fromkeys(parsed.pools, self.num_pages + 1)
        capacity = Capacity(num_pages, num_rows, max_len)
        self.runner = ModelRunner(decoder, spec, capacity, backend=backend)
        for pool in self.runner.pools.values():
            for part in pool.run(0, pool.num_pages * PAGE_SIZE):
                part.normal_()
        # The embedding is read by rows, the head as a whole.
        num_embedded = parsed.vocab_size * parsed.hidden_size * dtype.itemsize
        self.num_weight_bytes = weight_bytes(parsed, device=device, dtype=dtype) - num_embedded
        self.num_weights = self.num_weight_bytes // dtype.itemsize
        self.kv_bytes = spec.bytes_per_page // PAGE_SIZE
        self._step = 0

    def place(self, num_rows: int, length: int) -> None:
        """Give each row pages for `length` tokens, scattered over the pool."""
        of_row = pages_for(length, PAGE_SIZE)
        assert of_row * num_rows <= self.num_pages, "the pool has room"
        order = np.random.default_rng(0).permutation(self.num_pages).astype(np.int32) + 1
        writes = tuple(
            TableWrite(pool, RowId(row + 1), 0, order[row * of_row : (row + 1) * of_row])
            for pool in self.runner.pools
            for row in range(num_rows)
        )
        self._launch((), writes).wait()

    def prefill(self, start: int, num_tokens: int) -> StepResult:
        """Compute `num_tokens` new tokens of one row behind `start`, and sample one."""
        tokens = np.random.default_rng(1).integers(0, self.config["vocab_size"], num_tokens)
        return self._launch([self._row(1, start, tokens.astype(np.int32), begins=True)]).wait()

    def begin(self, num_rows: int, history: int) -> None:
        """Compute one token of every row, so that what follows is sampled on the device."""
        token = np.ones(1, dtype=np.int32)
        rows = [self._row(row, history, token, begins=True) for row in range(1, num_rows + 1)]
        self._launch(rows).wait()

    def decode(self, num_rows: int, position: int) -> PendingStep:
        """Launch one decode step of all rows."""
        ids = np.arange(1, num_rows + 1, dtype=np.int32)
        names = tuple(TurnId(f"t{row}") for row in range(1, num_rows + 1))
        starts = np.full(num_rows, position, dtype=np.int32)
        self._step += 1
        decoding = DecodeRows(names, (0,) * num_rows, ids, starts, None)
        return self.runner.launch(Batch(self._step, (), (), decoding=decoding))

    def _row(self, row: int, start: int, tokens: Any, *, begins: bool) -> BatchRow:
        params = SamplingParams(temperature=0.0)
        return BatchRow(
            turn_id=TurnId(f"t{row}"),
            attempt=0,
            row=RowId(row),
            start=start,
            num_tokens=1 if tokens is None else len(tokens),
            tokens=tokens,
            sample=True,
            sampling=SamplingStart(params, 0, 0, _NO_TOKENS, _NO_TOKENS) if begins else None,
        )

    def _launch(self, rows: Iterable[BatchRow], writes: tuple[TableWrite, ...] = ()) -> PendingStep:
        self._step += 1
        return self.runner.launch(Batch(self._step, tuple(rows), writes))


def ceilings(device: torch.device) -> Ceilings:
    """Measure what the device can do: the floors below are in these rates."""
    is_gpu = device.type == "cuda"
    data = torch.empty((1 << 31) if is_gpu else (1 << 24), dtype=torch.bfloat16, device=device)
    data.normal_()
    copied = torch.empty_like(data)
    rate = 2 * data.nbytes / _median_s(partial(copied.copy_, data), device, 10)
    size = 8192 if is_gpu else 512
    a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    return Ceilings(rate, 2 * size**3 / _median_s(partial(torch.matmul, a, b), device, 10))


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _median_s(call: Callable[[], Any], device: torch.device, num_times: int) -> float:
    times = []
    for _ in range(num_times + 2):
        _synchronize(device)
        began = time.perf_counter()
        call()
        _synchronize(device)
        times.append(time.perf_counter() - began)
    return statistics.median(times[2:])


class Sheet:
    """Collect figures, and write all so far after each row: a run may be cut short."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._rows: list[dict[str, Any]] = []

    def add(self, part: str, **figures: float) -> None:
        """Add one row of a part."""
        self._rows.append({"part": part, **figures})
        if self._path is not None:
            self._path.write_text(json.dumps(self._rows, indent=1) + "\n", "utf-8")


def decode(bench: Bench, limits: Ceilings, cases: list[tuple[int, int]], sheet: Sheet) -> None:
    """Time decode steps, one at a time and two in flight, as the server runs them."""
    print(
        "\n| decode rows | history | lockstep ms | overlapped ms | floor ms | x floor | tokens/s |"
    )
    print("|---|---|---|---|---|---|---|", flush=True)
    for num_rows, history in cases:
        bench.place(num_rows, history + 3 * NUM_STEPS)
        bench.begin(num_rows, history)
        position = history + 1
        lockstep = []
        for _ in range(NUM_STEPS):
            began = time.perf_counter()
            result = bench.decode(num_rows, position).wait()
            lockstep.append(time.perf_counter() - began)
            assert result.error is None, result.error
            position += 1
        ahead = bench.decode(num_rows, position)
        ends = []
        for _ in range(NUM_STEPS):
            position += 1
            nexts = bench.decode(num_rows, position)
            ahead.wait()
            ends.append(time.perf_counter())
            ahead = nexts
        ahead.wait()
        overlapped = statistics.median(np.diff(ends[WARM_UP:]))
        floor = (bench.num_weight_bytes + num_rows * history * bench.kv_bytes) / limits.bytes_per_s
        plain = statistics.median(lockstep[WARM_UP:])
        print(
            f"| {num_rows} | {history:,} | {plain * 1e3:.2f} | {overlapped * 1e3:.2f} "
            f"| {floor * 1e3:.2f} | {overlapped / floor:.2f} | {num_rows / overlapped:,.0f} |",
            flush=True,
        )
        sheet.add(
            "decode",
            rows=num_rows,
            history=history,
            lockstep_ms=plain * 1e3,
            overlapped_ms=overlapped * 1e3,
            floor_ms=floor * 1e3,
        )


def prefill(bench: Bench, limits: Ceilings, cases: list[tuple[int, int]], sheet: Sheet) -> None:
    """Time the new tokens of a turn behind a history."""
    attended = 4 * bench.config["num_attention_heads"] * bench.config["head_dim"]
    attended *= bench.config["num_hidden_layers"]
    print("\n| new tokens | history | ms | tokens/s | floor ms | x floor |")
    print("|---|---|---|---|---|---|", flush=True)
    for num_tokens, history in cases:
        bench.place(1, history + num_tokens)
        times = []
        for _ in range(7):
            began = time.perf_counter()
            result = bench.prefill(history, num_tokens)
            times.append(time.perf_counter() - began)
            assert result.error is None, result.error
        head = bench.config["vocab_size"] * bench.config["hidden_size"]
        work = 2 * (bench.num_weights - head) * num_tokens + 2 * head
        work += attended * num_tokens * (history + num_tokens / 2)
        num_bytes = bench.num_weight_bytes + history * bench.kv_bytes
        floor = max(work / limits.flops_per_s, num_bytes / limits.bytes_per_s)
        seconds = statistics.median(times[2:])
        print(
            f"| {num_tokens:,} | {history:,} | {seconds * 1e3:.2f} | {num_tokens / seconds:,.0f} "
            f"| {floor * 1e3:.2f} | {seconds / floor:.2f} |",
            flush=True,
        )
        sheet.add(
            "prefill",
            tokens=num_tokens,
            history=history,
            ms=seconds * 1e3,
            floor_ms=floor * 1e3,
        )


def profile(bench: Bench, cases: list[tuple[int, int]], sheet: Sheet) -> None:
    """Say how long the device computes in a step, in how many kernels, and where the host waits.

    Two steps are in flight, as the server has them; the share of the time in which the device
    computes is that of all kernels in the time from the first to the last.
    """
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiled

    num_steps = 4
    for num_rows, history in cases:
        bench.place(num_rows, history + 3 * NUM_STEPS)
        bench.begin(num_rows, history)
        for position in range(history + 1, history + 4):
            bench.decode(num_rows, position).wait()
        _synchronize(bench.device)
        with profiled(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            ahead = bench.decode(num_rows, history + 4)
            for position in range(history + 5, history + 4 + num_steps):
                nexts = bench.decode(num_rows, position)
                ahead.wait()
                ahead = nexts
            ahead.wait()
        kernels: Counter[str] = Counter()
        times: Counter[str] = Counter()
        ranges = []
        for event in profiler.events():
            if event.device_type == torch.autograd.DeviceType.CUDA:
                kernels[event.name] += 1
                times[event.name] += event.device_time
                ranges.append((event.time_range.start, event.time_range.end))
        busy_ms = sum(times.values()) / num_steps / 1e3
        whole_ms = (max(r[1] for r in ranges) - min(r[0] for r in ranges)) if ranges else 0.0
        share = busy_ms * num_steps * 1e3 / whole_ms if whole_ms else 0.0
        print(
            f"\n{num_rows} rows behind {history:,}: {busy_ms:.2f} ms of a step on the device, in "
            f"{sum(kernels.values()) / num_steps:.0f} kernels and copies; it computes in "
            f"{share:.0%} of the time"
        )
        sheet.add("profile", rows=num_rows, history=history, busy_ms=busy_ms, busy_share=share)
        for name, total in times.most_common(14):
            print(
                f"  {total / num_steps / 1e3:8.3f} ms {kernels[name] / num_steps:7.1f}x {name[:96]}"
            )
        if bench.device.type == "cuda":
            _print_waits(bench, num_rows, history + 4 + num_steps)
        sys.stdout.flush()


def _print_waits(bench: Bench, num_rows: int, position: int) -> None:
    """Print the lines of a launch that wait for the device."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step = bench.decode(num_rows, position)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    step.wait()
    lines = Counter(f"{Path(w.filename).name}:{w.lineno}" for w in caught)
    print(f"  waits in one launch: {sum(lines.values())}", dict(lines.most_common(8)))


def of_transformers(
    config: dict[str, Any],
    device: torch.device,
    num_tokens: int,
    *,
    cases: list[tuple[int, int]],
    sheet: Sheet,
) -> None:
    """Time `generate` of `transformers` at decode."""
    import transformers

    settings = transformers.AutoConfig.for_model(**config)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(settings, dtype=dtype).eval()
    model.generation_config.eos_token_id = None  # so that every call says all it is asked for
    print(
        "\n| transformers | rows | history | ms a step | tokens/s |\n|---|---|---|---|---|",
        flush=True,
    )
    for num_rows, history in cases:
        prompts = torch.randint(3, config["vocab_size"], (num_rows, history), device=device)
        asked = {"attention_mask": torch.ones_like(prompts), "do_sample": False}
        calls = [
            partial(model.generate, prompts, **asked, max_new_tokens=n, pad_token_id=0)
            for n in (num_tokens, 1)
        ]
        long, short = (_median_s(call, device, 1) for call in calls)
        step = (long - short) / (num_tokens - 1)
        print(f"| generate | {num_rows} | {history:,} | {_rate(step, num_rows)} |", flush=True)
        sheet.add("transformers", rows=num_rows, history=history, ms=step * 1e3)


def _rate(step_s: float, num_rows: int) -> str:
    return f"{step_s * 1e3:.2f} | {num_rows / step_s:,.0f}"


def main() -> None:
    """Measure on the device that is there."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--parts", default="decode,prefill,profile,transformers")
    parser.add_argument("--attention-backend", choices=("torch", "triton"), default="torch")
    parser.add_argument("--cuda-graph-max-bs", type=int, default=64)
    parser.add_argument("--json", type=Path, help="write the figures to this file, too")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    is_tiny, sheet = args.shape == "tiny", Sheet(args.json)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        **SHAPES[args.shape],
        "max_position_embeddings": 40_960,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    limits = ceilings(device)
    print(
        f"{name}, torch {torch.__version__}: reads {limits.bytes_per_s / 1e12:.2f} TB/s, "
        f"bf16 product {limits.flops_per_s / 1e12:.0f} TFLOP/s",
        flush=True,
    )
    parts = args.parts.split(",")
    if "transformers" in parts:
        # Before a runner exists, which switches cuDNN's attention off for the process.
        cases = [(1, 64), (4, 64)] if is_tiny else [(1, 512), (16, 512)]
        of_transformers(config, device, 8 if is_tiny else 48, cases=cases, sheet=sheet)
        gc.collect()
    began = time.perf_counter()
    max_len = 4_096 if is_tiny else 147_456
    bench = Bench(config, device, num_rows=64, max_len=max_len, backend=args.attention_backend)
    _synchronize(device)
    print(f"model and pools made in {time.perf_counter() - began:.1f} s", flush=True)
    if device.type == "cuda" and args.cuda_graph_max_bs:
        began = time.perf_counter()
        sizes = graph_sizes(args.cuda_graph_max_bs, num_drafts=0)
        why_not = bench.runner.capture_graphs(sizes, CudaGraphs(device))
        seconds = time.perf_counter() - began
        print(f"graphs: {why_not or f'captured in {seconds:.1f} s'}", flush=True)
    if "decode" in parts:
        many = [
            (1, 512),
            (1, 4096),
            (1, 32_768),
            (4, 512),
            (16, 512),
            (16, 4096),
            (64, 512),
            (64, 2048),
        ]
        decode(bench, limits, [(1, 64), (4, 64)] if is_tiny else many, sheet)
    if "prefill" in parts:
        turns = [(64, 0), (64, 4096), (64, 32_768), (512, 0), (512, 4096), (2048, 0), (2048, 4096)]
        prefill(bench, limits, [(64, 0), (64, 512)] if is_tiny else turns, sheet)
    if "profile" in parts:
        profile(bench, [(1, 64)] if is_tiny else [(1, 512), (16, 4096)], sheet)


if __name__ == "__main__":
    main()
