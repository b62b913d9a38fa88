"""`python -m tests.bench.mla`: measure a decode step of latent attention while the history grows.

Layers have the sizes of DeepSeek-V2-Lite and random weights, attention only: a feed-forward costs
the same at every history and would hide how attention grows. Absorbed attention reads the latents
directly, on either backend. For comparison, the same layers expand the whole history to K and V in
every step, which is the cost of caching latents without absorbing queries.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from cache.pool.mla import MlaPool
from cache.pool.page_table import PageTable
from cache.pool.storage import PageFormat
from cache.types import RowId, TableWrite, pages_for
from session_server.attention.base import AttentionMeta, AttentionRule, BackendFactory, Span
from session_server.attention.cpu import CpuBackend
from session_server.attention.mla import MlaBackend, MlaShape
from session_server.attention.reference import ReferenceBackend
from session_server.bench.harness import take_turns
from session_server.bench.sheet import Sheet
from session_server.models.config import MlaConfig, RopeConfig
from session_server.models.layers.linear import make_linear
from session_server.models.layers.mla import MlaMixer, MlaWeights
from session_server.models.layers.norm import RmsNorm
from session_server.models.layers.rope import Rope

DEEPSEEK_V2_LITE: Final = MlaConfig(
    num_heads=16,
    kv_lora_rank=512,
    q_lora_rank=None,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    scale=192**-0.5,
    rope=RopeConfig(10_000.0),
)

WAYS: Final[Mapping[str, tuple[BackendFactory, float | None]]] = MappingProxyType(
    {
        "absorbed, cpu": (CpuBackend, None),
        "absorbed, torch": (ReferenceBackend, None),
        "expanded": (ReferenceBackend, 0.0),
    }
)
"""The backend for absorbed attention, and the new tokens from which a span is expanded."""

_ROW: Final = 1


@dataclass(frozen=True, slots=True)
class MlaWorkload:
    """Configure one token per step, after each of `histories` positions on consecutive pages."""

    mixer: MlaConfig = DEEPSEEK_V2_LITE
    hidden_size: int = 2048
    num_layers: int = 2
    histories: tuple[int, ...] = (256, 1024, 4096)
    num_steps: int = 15
    page_size: int = 16

    @property
    def total_steps(self) -> int:
        """Return the steps of all ways, warm-up included."""
        return len(WAYS) * len(self.histories) * (self.num_steps + 1)


def measure(load: MlaWorkload, *, on_step: Callable[[], None]) -> dict[str, Any]:
    """Time the workload and call `on_step` after each step."""
    layers = _LatentLayers(load)
    steps = {(way, n): partial(layers.step_s, way, n) for way in WAYS for n in load.histories}
    times = take_turns(steps, load.num_steps + 1, on_step)
    # The first step of each warms up.
    medians = {step: statistics.median(times[step][1:]) for step in steps}
    return {
        "num_layers": load.num_layers,
        "hidden_size": load.hidden_size,
        "bytes_per_layer_token": layers.pool.bytes_per_layer_token,
        "ways": {
            way: {
                str(history): {
                    "median_ms": medians[way, history] * 1e3,
                    "ratio": medians[way, history] / medians[way, min(load.histories)],
                }
                for history in load.histories
            }
            for way in WAYS
        },
    }


SHEETS: Final = (
    Sheet(
        "decode step of latent attention, {num_layers} layers, {bytes_per_layer_token} bytes per "
        "position",
        lambda report: report["ways"],
        ("", "history"),
        {"median ms": "{median_ms:.2f}", "ratio": "{ratio:.2f}"},
    ),
)


class _LatentLayers:
    """Hold layers with random fp32 weights on the CPU, and one row whose history is noise."""

    def __init__(self, load: MlaWorkload) -> None:
        mixer, page_size, cpu = load.mixer, load.page_size, torch.device("cpu")
        self._load = load
        self._generator = torch.Generator().manual_seed(0)
        num_pages = pages_for(max(load.histories) + 1, page_size)
        pages = np.arange(1, num_pages + 1, dtype=np.int32)
        page_format = PageFormat(
            num_pages=num_pages + 1,
            page_size=page_size,
            dtype=torch.float32,
            read_dtype=torch.float32,
            device=cpu,
        )
        self.pool = MlaPool(mixer.group(tuple(range(load.num_layers)), "float32"), page_format)
        self._table = PageTable(_ROW, num_pages, device=cpu)
        self._table.apply(TableWrite(self.pool.name, RowId(_ROW), 0, pages))
        for page in pages.tolist():
            for part in self.pool.page(page, page_size):
                part.normal_(generator=self._generator)
        self._rope = Rope(mixer.rope, mixer.qk_rope_head_dim, device=cpu)
        self._layers = [MlaMixer(mixer, n, self._weights()) for n in range(load.num_layers)]

    @torch.inference_mode()
    def step_s(self, way: str, history: int) -> float:
        """Return the seconds of one decode step after `history` positions, planning included."""
        mixer, (factory, expand_from) = self._load.mixer, WAYS[way]
        backend = MlaBackend(
            self.pool,
            self._table,
            AttentionRule(mixer.num_heads, mixer.scale),
            MlaShape(mixer.qk_nope_head_dim, mixer.v_head_dim),
            absorbed=factory,
            expand_from=expand_from,
        )
        slot_mapping = {self.pool.name: torch.tensor([self._load.page_size + history])}
        meta = AttentionMeta((Span(_ROW, history, 1, 0),), slot_mapping)
        hidden = self._noise(1, self._load.hidden_size)
        started = time.perf_counter()
        plan, phases = backend.plan(meta), self._rope.phases(torch.tensor([history]))
        for layer in self._layers:
            hidden = hidden + layer(hidden, phases, plan)
        return time.perf_counter() - started

    def _weights(self) -> MlaWeights:
        mixer, hidden = self._load.mixer, self._load.hidden_size
        heads, rank, nope = mixer.num_heads, mixer.kv_lora_rank, mixer.qk_nope_head_dim
        lowered = heads * (nope + mixer.qk_rope_head_dim) + rank + mixer.qk_rope_head_dim
        return MlaWeights(
            down=make_linear(self._noise(lowered, hidden, std=hidden**-0.5)),
            query=None,
            norm=RmsNorm(torch.ones(rank), 1e-6),
            up=self._noise(heads, nope + mixer.v_head_dim, rank, std=0.05),
            output=make_linear(self._noise(hidden, heads * mixer.v_head_dim, std=0.02)),
        )

    def _noise(self, *shape: int, std: float = 1.0) -> Tensor:
        return torch.randn(shape, generator=self._generator).mul_(std)


if __name__ == "__main__":
    report = measure(MlaWorkload(), on_step=lambda: None)
    Console().print(*(sheet.table(report) for sheet in SHEETS))
