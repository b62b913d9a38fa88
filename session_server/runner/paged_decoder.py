"""Run a decoder together with its KV pools and attention backends."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, Literal

import torch
from torch import Tensor

from cache.pool.mha import MhaPool
from cache.pool.mla import MlaPool
from cache.pool.page_table import PageTable
from cache.pool.recurrent import StatePool
from cache.pool.storage import KvPool, PageFormat
from cache.spec import CacheSpec, Capacity, LayerKind
from cache.types import PoolName
from session_server.attention.base import AttentionBackend, AttentionRule, BackendFactory
from session_server.attention.cpu import CpuBackend
from session_server.attention.mla import MlaBackend, MlaShape
from session_server.attention.recurrent import RecurrentBackend
from session_server.attention.reference import ReferenceBackend
from session_server.models.config import AttentionConfig, MlaConfig
from session_server.models.decoder import Decoder
from session_server.runner.inputs import ForwardInputs

BackendName = Literal["auto", "cpu", "torch"]

TORCH_DTYPES: Final[Mapping[str, torch.dtype]] = MappingProxyType(
    {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
)
"""torch dtypes by their names in configurations and layer groups."""

_BACKENDS: Final[Mapping[str, BackendFactory]] = MappingProxyType(
    {"cpu": CpuBackend, "torch": ReferenceBackend}
)

_POOLS: Final[Mapping[LayerKind, type[MhaPool] | type[MlaPool]]] = MappingProxyType(
    {LayerKind.FULL: MhaPool, LayerKind.WINDOW: MhaPool, LayerKind.LATENT: MlaPool}
)


class PagedDecoder:
    """Hold one model, its KV pools and the attention over each pool.

    A page table says which pages of a pool belong to a row. Decoders that share tables keep the KV
    of the same positions under the same page ids, each in memory of its own.
    """

    __slots__ = ("_backends", "backend_name", "decoder", "page_size", "pools", "states")

    def __init__(
        self,
        decoder: Decoder,
        spec: CacheSpec,
        capacity: Capacity,
        *,
        tables: Mapping[PoolName, PageTable],
        backend: BackendName = "auto",
    ) -> None:
        """Allocate the pools.

        Args:
            decoder: the model; decides device and dtype.
            spec: made by `decoder.config.cache_spec` for the same dtype; gives the dtype of KV.
            capacity: number of pages.
            tables: the page table of at least every pool of `spec`.
            backend: of attention; "auto" is "cpu" on a CPU and "torch" elsewhere.

        Raises:
            torch.OutOfMemoryError: the device has less memory than the pool needs.
        """
        device = decoder.device
        self.decoder = decoder
        self.page_size = spec.page_size
        self.pools: Mapping[PoolName, KvPool] = MappingProxyType(
            {
                group.pool: _POOLS[group.kind](
                    group,
                    PageFormat(
                        num_pages=capacity.num_pages[group.pool],
                        page_size=spec.page_size,
                        dtype=TORCH_DTYPES[group.kv_dtype or decoder.dtype_name],
                        read_dtype=decoder.dtype,
                        device=device,
                    ),
                )
                for group in spec.groups
                if group.kind is not LayerKind.RECURRENT
            }
        )
        self.states = next(
            (
                StatePool(group, num_pages=capacity.num_states, device=device)
                for group in spec.groups
                if group.kind is LayerKind.RECURRENT
            ),
            None,
        )
        self.backend_name = backend
        if backend == "auto":
            self.backend_name = "cpu" if device.type == "cpu" else "torch"
        self._backends: dict[PoolName, AttentionBackend | MlaBackend | RecurrentBackend] = {
            name: self._backend(pool, tables[name]) for name, pool in self.pools.items()
        }
        if self.states is not None:
            self._backends[self.states.name] = RecurrentBackend(self.states)

    def _backend(self, pool: KvPool, table: PageTable) -> AttentionBackend | MlaBackend:
        factory, mixer = _BACKENDS[self.backend_name], self.decoder.config.mixer_of(pool.name)
        if isinstance(mixer, MlaConfig):
            assert isinstance(pool, MlaPool), "latents lie in a pool of their own kind"
            rule = AttentionRule(mixer.num_heads, mixer.scale)
            shape = MlaShape(mixer.qk_nope_head_dim, mixer.v_head_dim)
            return MlaBackend(pool, table, rule, shape, absorbed=factory)
        assert isinstance(mixer, AttentionConfig), "its pool has pages of positions"
        rule = AttentionRule(
            mixer.num_heads, mixer.scale, mixer.sliding_window, mixer.attn_logit_softcapping
        )
        return factory(pool, table, rule)

    def forward(self, inputs: ForwardInputs, logits_indices: Tensor) -> Tensor:
        """Compute every token of a forward and write its KV.

        Args:
            inputs: the page tables already hold their pages.
            logits_indices: int64 [n], the tokens whose hidden state is returned.

        Returns:
            [n, hidden], normalized for the LM head.
        """
        return self.decoder.forward(
            inputs.token_ids,
            inputs.positions,
            attention={
                name: backend.plan(inputs.attention) for name, backend in self._backends.items()
            },
            logits_indices=logits_indices,
        )
