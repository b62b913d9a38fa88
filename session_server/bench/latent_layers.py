"""Run latent attention layers without a model, to measure the cost of a step."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import numpy as np
import torch
from torch import Tensor

from cache.pool.mla import MlaPool
from cache.pool.page_table import PageTable
from cache.pool.storage import PageFormat
from cache.types import RowId, TableWrite, pages_for
from session_server.attention.base import AttentionMeta, AttentionRule, BackendFactory, Span
from session_server.attention.cpu import CpuBackend
from session_server.attention.mla import MlaBackend, MlaShape
from session_server.attention.reference import ReferenceBackend
from session_server.models.config import MlaConfig
from session_server.models.layers.linear import make_linear
from session_server.models.layers.mla import MlaMixer, MlaWeights
from session_server.models.layers.norm import RmsNorm
from session_server.models.layers.rope import Rope

WAYS: Final[Mapping[str, tuple[BackendFactory, float | None]]] = MappingProxyType(
    {
        "absorbed, cpu": (CpuBackend, None),
        "absorbed, torch": (ReferenceBackend, None),
        "expanded": (ReferenceBackend, 0.0),
    }
)
"""The backend for absorbed attention, and the new tokens from which a span is expanded."""

_ROW: Final = 1


class LatentLayers:
    """Hold layers with random fp32 weights on the CPU, and one row whose history is noise."""

    def __init__(
        self,
        mixer: MlaConfig,
        *,
        hidden_size: int,
        num_layers: int,
        max_history: int,
        page_size: int,
    ) -> None:
        """Create the layers and fill the pool.

        Args:
            mixer: config of all layers.
            hidden_size: size of inputs and outputs.
            num_layers: number of layers.
            max_history: longest history of a step, in positions.
            page_size: of the pool.
        """
        self._mixer = mixer
        self._hidden_size = hidden_size
        self._page_size = page_size
        self._generator = torch.Generator().manual_seed(0)
        cpu = torch.device("cpu")
        group = mixer.group(tuple(range(num_layers)), "float32")
        num_pages = pages_for(max_history + 1, page_size)
        self._pool = MlaPool(
            group,
            PageFormat(
                num_pages=num_pages + 1,
                page_size=page_size,
                dtype=torch.float32,
                read_dtype=torch.float32,
                device=cpu,
            ),
        )
        pages = np.arange(1, num_pages + 1, dtype=np.int32)
        self._table = PageTable(_ROW, num_pages, device=cpu)
        self._table.apply(TableWrite(group.pool, RowId(_ROW), 0, pages))
        slot_mapping = torch.arange(page_size, (num_pages + 1) * page_size)
        for layer in range(num_layers):
            rows = self._noise(len(slot_mapping), 1, group.head_dim)
            self._pool.write(layer, slot_mapping, rows.expand(-1, 2, -1))
        self._rope = Rope(mixer.rope, mixer.qk_rope_head_dim, device=cpu)
        self._layers = [MlaMixer(mixer, layer, self._weights()) for layer in range(num_layers)]

    @property
    def bytes_per_layer_token(self) -> int:
        """Return the bytes of one position in one layer."""
        return self._pool.bytes_per_layer_token

    @torch.inference_mode()
    def step_s(self, way: str, history: int) -> float:
        """Return the seconds of one decode step after `history` positions, planning included.

        `way`: one of `WAYS`.
        """
        mixer, (factory, expand_from) = self._mixer, WAYS[way]
        backend = MlaBackend(
            self._pool,
            self._table,
            AttentionRule(mixer.num_heads, mixer.scale),
            MlaShape(mixer.qk_nope_head_dim, mixer.v_head_dim),
            absorbed=factory,
            expand_from=expand_from,
        )
        slot_mapping = {self._pool.name: torch.tensor([self._page_size + history])}
        meta = AttentionMeta((Span(_ROW, history, 1, 0),), slot_mapping)
        hidden = self._noise(1, self._hidden_size)
        started = time.perf_counter()
        plan, phases = backend.plan(meta), self._rope.phases(torch.tensor([history]))
        for layer in self._layers:
            hidden = hidden + layer(hidden, phases, plan)
        return time.perf_counter() - started

    def _weights(self) -> MlaWeights:
        mixer, hidden = self._mixer, self._hidden_size
        heads, stored = mixer.num_heads, mixer.kv_lora_rank + mixer.qk_rope_head_dim
        lowered = heads * (mixer.qk_nope_head_dim + mixer.qk_rope_head_dim) + stored
        return MlaWeights(
            down=make_linear(self._noise(lowered, hidden, std=hidden**-0.5)),
            query=None,
            norm=RmsNorm(torch.ones(mixer.kv_lora_rank), 1e-6),
            up=self._noise(
                heads, mixer.qk_nope_head_dim + mixer.v_head_dim, mixer.kv_lora_rank, std=0.05
            ),
            output=make_linear(self._noise(hidden, heads * mixer.v_head_dim, std=0.02)),
        )

    def _noise(self, *shape: int, std: float = 1.0) -> Tensor:
        return torch.randn(shape, generator=self._generator).mul_(std)
