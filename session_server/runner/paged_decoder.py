"""Run a decoder together with its KV pools and attention backends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Final, Literal, cast

import torch
from torch import Tensor

from cache.pool.mha import MhaPool
from cache.pool.mla import MlaPool
from cache.pool.page_table import PageTable
from cache.pool.recurrent import StatePool
from cache.pool.storage import KvPool, PageFormat
from cache.spec import CacheSpec, Capacity, LayerGroup, LayerKind
from cache.types import PoolName
from session_server.attention import triton
from session_server.attention.base import (
    AttentionBackend,
    AttentionMeta,
    AttentionRule,
    BackendFactory,
    CapturableBackend,
    GraphPlan,
    RecurrentPlan,
    Span,
)
from session_server.attention.cpu import CpuBackend
from session_server.attention.mla import MlaBackend, MlaShape
from session_server.attention.recurrent import RecurrentBackend
from session_server.attention.reference import ReferenceBackend
from session_server.models.config import AttentionConfig, MlaConfig
from session_server.models.decoder import Decoder
from session_server.models.layers.moe import Experts, MixtureOfExperts, SerialExperts
from session_server.runner import native
from session_server.runner.decode_graphs import DecodeGraphs, GraphApi
from session_server.runner.graph_sizes import GraphSize
from session_server.runner.inputs import ForwardInputs

if TYPE_CHECKING:
    from session_server.attention.triton.recurrent import TritonRecurrentBackend
    from session_server.runner.native.decoder import NativeDecoder

Accompany = Callable[[ForwardInputs], AbstractContextManager[None]]
"""Begin a forward on other ranks; what it returns is entered while this rank computes."""

BackendName = Literal["auto", "native", "cpu", "torch", "triton"]

ComputeBackend = Literal["native", "cpu", "torch", "triton"]
"""What computes forwards: kernels of our own, or torch, with attention for CPUs or any device, or
by kernels for GPUs."""

TORCH_DTYPES: Final[Mapping[str, torch.dtype]] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
"""torch dtypes by their names in configurations."""

KV_DTYPES: Final[Mapping[str, torch.dtype]] = {
    **TORCH_DTYPES,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
"""Dtypes of pools by their names in layer groups."""


def resolve_backend(backend: BackendName, device: torch.device) -> ComputeBackend:
    """Return what computes forwards: for "auto" the fastest that this machine has.

    Raises:
        ValueError: "native" or "triton" is asked for, and was not built or installed, or does not
            run on the device; or the environment names kernels that this CPU does not have.
    """
    if backend == "auto":
        if device.type != "cpu":
            return "torch"
        backend = "native" if native.is_available() else "cpu"
    if backend == "native":
        if device.type != "cpu":
            raise ValueError(f"--attention-backend native runs on a CPU, not on {device}")
        if not native.is_available():
            raise ValueError(f"--attention-backend native: {native.WHY_MISSING}")
        native.cpu_name()  # a name that the environment has wrong is refused
    if backend == "triton" and (why := triton.why_not(device)) is not None:
        raise ValueError(f"--attention-backend triton: {why}")
    return backend


def _factory_of(backend: ComputeBackend) -> BackendFactory:
    """Return what creates the attention over a pool."""
    if backend == "triton":
        from session_server.attention.triton.backend import TritonBackend

        return TritonBackend
    return ReferenceBackend if backend == "torch" else CpuBackend


def _with_kernels(decoder: Decoder, backend: ComputeBackend) -> Decoder:
    """Return a decoder whose layers a backend computes between their products, too."""
    if backend != "triton":
        return decoder
    from session_server.runner.triton.fused import fused

    return fused(decoder)


class PagedDecoder:
    """Hold one model, its KV pools and the attention over each pool.

    A page table says which pages of a pool belong to a row. Decoders that share tables keep the KV
    of the same positions under the same page ids, each in memory of its own.
    """

    def __init__(
        self,
        decoder: Decoder,
        spec: CacheSpec,
        capacity: Capacity,
        *,
        tables: Mapping[PoolName, PageTable],
        backend: BackendName = "auto",
    ) -> None:
        """Allocate the pools of `spec`, which `decoder.config.cache_spec` made for the same dtype.

        `tables`: the page tables of at least all pools of positions. `backend`: of attention;
        "auto" is "cpu" on a CPU and "torch" elsewhere.

        Raises:
            torch.OutOfMemoryError: the device has less memory than the pool needs.
        """
        device = decoder.device
        if device.type == "cuda":
            # cuDNN makes a plan for every new length of a history, so for every token: 50 of 65 ms
            # of a step of an 8B model on an H100 (docs/benchmarks.md). The switch is process-wide.
            torch.backends.cuda.enable_cudnn_sdp(False)
        self.page_size = spec.page_size
        self.backend_name = resolve_backend(backend, device)
        self.decoder = decoder = _with_kernels(decoder, self.backend_name)
        self.pools: dict[PoolName, KvPool] = {}
        self.states: StatePool | None = None
        self._backends: dict[
            PoolName,
            AttentionBackend | MlaBackend | RecurrentBackend | TritonRecurrentBackend,
        ] = {}
        for group in spec.groups:
            if group.kind is LayerKind.RECURRENT:
                self.states = StatePool(group, num_pages=capacity.num_states, device=device)
                self._backends[group.pool] = self._recurrent(self.states)
                continue
            pages = PageFormat(
                num_pages=capacity.num_pages[group.pool],
                page_size=spec.page_size,
                dtype=KV_DTYPES[group.kv_dtype or decoder.dtype_name],
                read_dtype=decoder.dtype,
                device=device,
            )
            self._add(group, pages, tables[group.pool])
        self.graphs: DecodeGraphs | None = None
        self._max_context_len = capacity.max_context_len
        self._table_names = tuple(tables)
        self.accompany: Accompany = lambda _: nullcontext()
        self._native: NativeDecoder | None = None
        if self.backend_name == "native":
            from session_server.runner.native.decoder import NativeDecoder

            own = {name: tables[name] for name in self.pools}
            self._native = NativeDecoder(decoder, self.pools, self.states, own)

    def _add(self, group: LayerGroup, pages: PageFormat, table: PageTable) -> None:
        """Allocate a pool of positions and create its backend."""
        name, factory = group.pool, _factory_of(self.backend_name)
        mixer = self.decoder.config.mixer_of(name)
        if isinstance(mixer, MlaConfig):
            latents, rule = MlaPool(group, pages), AttentionRule(mixer.num_heads, mixer.scale)
            shape = MlaShape(mixer.qk_nope_head_dim, mixer.v_head_dim)
            self.pools[name] = latents
            self._backends[name] = MlaBackend(latents, table, rule, shape, absorbed=factory)
            return
        assert isinstance(mixer, AttentionConfig), "its pool has pages of positions"
        rule = AttentionRule(
            mixer.num_heads, mixer.scale, mixer.sliding_window, mixer.attn_logit_softcapping
        )
        self.pools[name] = MhaPool(group, pages)
        self._backends[name] = factory(self.pools[name], table, rule)

    def _recurrent(self, states: StatePool) -> RecurrentBackend | TritonRecurrentBackend:
        """Create the backend over a pool of states."""
        if self.backend_name != "triton":
            return RecurrentBackend(states)
        from session_server.attention.triton.recurrent import TritonRecurrentBackend

        return TritonRecurrentBackend(states, self.decoder.dtype)

    def reserve(self, num_tokens: int) -> int:
        """Allocate what forwards of up to so many tokens work in, and return its bytes; 0 where
        torch allocates it forward by forward.

        Raises:
            MemoryError: the system has less.
        """
        return 0 if self._native is None else self._native.reserve(num_tokens)

    def compile_kernels(self) -> None:
        """Compile the kernels that forwards may launch, where they are compiled on this machine."""
        if self.backend_name != "triton":
            return
        for name in self.pools:
            has_sinks = getattr(self.decoder.config.mixer_of(name), "has_sinks", False)
            cast(CapturableBackend | MlaBackend, self._backends[name]).compile_all(
                has_sinks=has_sinks
            )
        if self.states is not None:
            self._compile_recurrent(self.states.name)
        self._compile_experts()

    def _compile_recurrent(self, name: PoolName) -> None:
        """Compile the kernels of recurrent layers, all of one kind, by running one."""
        decoder = self.decoder
        mixer = next(layer.mixer for layer, _, pool in decoder.layers if pool == name)

        def mix(num_tokens: int, plan: RecurrentPlan) -> None:
            hidden = decoder.embedding.new_zeros((num_tokens, decoder.config.hidden_size))
            mixer(hidden, hidden, plan)

        cast("TritonRecurrentBackend", self._backends[name]).compile_all(mix)

    def _compile_experts(self) -> None:
        from session_server.runner.triton.experts import GroupedExperts

        grouped = (each for each in self._experts() if isinstance(each, GroupedExperts))
        for experts in {each.compiled_for: each for each in grouped}.values():
            experts.compile_all(self.decoder.config.hidden_size, self.decoder.dtype)

    def _experts(self) -> Iterator[Experts]:
        """Yield the experts of each layer that has some."""
        for layer, _, _ in self.decoder.layers:
            if isinstance(layer.ffn, MixtureOfExperts):
                yield layer.ffn.experts

    def compute_padding(self) -> Tensor:
        """Compute one token in the padding page, which nobody reads: [1, hidden]."""
        zeros = torch.zeros(1, dtype=torch.int64, device=self.decoder.device)
        attention = AttentionMeta((Span(0, 0, 1, 0),), dict.fromkeys(self._backends, zeros))
        plans = {name: backend.plan(attention) for name, backend in self._backends.items()}
        return self.decoder.forward(zeros, zeros, attention=plans, logits_indices=zeros)

    def capture_graphs(
        self, sizes: Sequence[GraphSize], api: GraphApi, on_progress: Callable[[GraphSize], None]
    ) -> str | None:
        """Capture graphs for forwards of these sizes. Return why not, if so; see
        `DecodeGraphs.capture`."""
        backends = self._backends
        if any(isinstance(each, SerialExperts) for each in self._experts()):
            return "the host counts which experts are chosen"
        if self.backend_name != "triton":
            return f"the backend {self.backend_name} plans each batch on the host"

        def plans(size: GraphSize) -> dict[PoolName, GraphPlan]:
            of_size = (size.num_rows, size.max_row_tokens)
            return {
                name: cast(CapturableBackend, backend).plan_graph(*of_size, self._longest(name))
                for name, backend in backends.items()
            }

        graphs = DecodeGraphs(self.decoder, plans, pools=self._table_names, api=api)
        graphs.capture(sizes, on_progress=on_progress)
        self.graphs = graphs
        return None

    def _longest(self, name: PoolName) -> int:
        """Return how many positions of a row a forward may read from a pool: as many as its pages
        have, page 0 excluded, if a row could address more."""
        pool = self.pools.get(name)
        if pool is None:  # of states
            return self._max_context_len
        return min(self._max_context_len, (pool.num_pages - 1) * pool.page_size)

    def forward(self, inputs: ForwardInputs, logits_indices: Tensor) -> Tensor:
        """Compute every token of a forward and write its KV; the page tables hold their pages.

        Returns:
            [n, hidden], normalized for the LM head, of the tokens `logits_indices`, int64 [n].
        """
        if self._native is not None:
            return self._native.forward(inputs, logits_indices)
        with self.accompany(inputs):
            if self.graphs is not None and not inputs.is_probe:
                hidden = self.graphs.forward(inputs.packed)
                if hidden is not None:
                    return hidden.index_select(0, logits_indices)
            attention, backends = inputs.attention, self._backends.items()
            plans = {name: backend.plan(attention) for name, backend in backends}
            return self.decoder.forward(
                inputs.token_ids, inputs.positions, attention=plans, logits_indices=logits_indices
            )

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute the scores of the next token: [n, hidden] -> float32 [n, vocab]."""
        return (self.decoder if self._native is None else self._native).logits(hidden)
