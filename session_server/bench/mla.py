"""Measure a decode step of latent attention while the history grows.

Layers have the sizes of DeepSeek-V2-Lite and random weights, attention only: a feed-forward costs
the same at every history and would hide how attention grows. Absorbed attention reads the latents
directly, on either backend. For comparison, the same layers expand the whole history to K and V in
every step, which is the cost of caching latents without absorbing queries.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from session_server.bench.latent_layers import WAYS, LatentLayers
from session_server.models.config import MlaConfig, RopeConfig

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


def measure_mla(load: MlaWorkload, *, on_step: Callable[[], None]) -> dict[str, Any]:
    """Time the workload and call `on_step` after each step.

    Histories and ways are interleaved, so that a noisy minute affects them alike.
    """
    layers = LatentLayers(
        load.mixer,
        hidden_size=load.hidden_size,
        num_layers=load.num_layers,
        max_history=max(load.histories),
        page_size=load.page_size,
    )
    times: dict[str, dict[int, list[float]]] = {
        way: {history: [] for history in load.histories} for way in WAYS
    }
    for step in range(load.num_steps + 1):
        for way, of_way in times.items():
            for history in load.histories:
                seconds = layers.step_s(way, history)
                if step:
                    of_way[history].append(seconds)
                on_step()
    return {
        "num_layers": load.num_layers,
        "hidden_size": load.hidden_size,
        "bytes_per_layer_token": layers.bytes_per_layer_token,
        "ways": {way: _figures(of_way) for way, of_way in times.items()},
    }


def _figures(times: dict[int, list[float]]) -> dict[str, dict[str, float]]:
    medians = {history: statistics.median(of_history) for history, of_history in times.items()}
    first = medians[min(medians)]
    return {
        str(history): {"median_ms": median * 1e3, "ratio": median / first}
        for history, median in medians.items()
    }
