"""Load a runner from a checkpoint's directory, in one call for a composition root."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final, Literal

import torch

from cache.spec import CacheSpec
from session_server.attention import triton
from session_server.attention.devices import is_here, no_cuda
from session_server.models.config import STATE_POOL, DTypeName, KvDTypeName, ModelConfig
from session_server.models.decoder import Decoder
from session_server.models.errors import DraftMismatch
from session_server.models.layers.linear import LinearFactory, make_linear
from session_server.models.registry import load_config
from session_server.runner import native
from session_server.runner.activations import RunnerMaker, measure_activations
from session_server.runner.capacity import CapacityPlan, MemoryLimits, free_bytes, measure_capacity
from session_server.runner.checkpoint import Progress
from session_server.runner.decode_graphs import CudaGraphs
from session_server.runner.graph_sizes import graph_sizes
from session_server.runner.layer_factories import LayerFactories
from session_server.runner.measured_weights import (
    HeldBytes,
    held_by_torch,
    held_by_triton,
    held_natively,
)
from session_server.runner.model_runner import ModelRunner
from session_server.runner.paged_decoder import (
    KV_DTYPES,
    TORCH_DTYPES,
    BackendName,
    ComputeBackend,
    resolve_backend,
)
from session_server.runner.quantization import QuantizationEffect, sequence_logits
from session_server.runner.weights import load_decoder, weight_bytes

Quantization = Literal["none", "int8", "int4"]
"""How the weights of linears are stored: in the dtype of the computation, or in codes."""

MAX_GRAPHS_FRACTION: Final = 0.5
"""Of the memory that weights, KV and activations leave on a device, what CUDA graphs may take."""

_Checkpoint = tuple[Path, ModelConfig]


@dataclass(frozen=True, slots=True)
class RunnerOptions:
    """Configure how a model runs. `num_rows`: sessions that can hold KV at the same time.

    `kv_dtype`: KV is stored in it; "auto" is the dtype of the computation. `max_context_len`: None
    for the model's own. `num_threads`: None for torch's choice. `quantize`: weights of linears are
    stored in 8 or 4 bits, by the native backend. `draft`: directory of the draft
    model's checkpoint.
    """

    page_size: int
    num_rows: int
    device: str = "auto"
    dtype: DTypeName | Literal["auto"] = "auto"
    kv_dtype: KvDTypeName | Literal["auto"] = "auto"
    max_context_len: int | None = None
    memory: MemoryLimits = field(default_factory=MemoryLimits)
    backend: BackendName = "auto"
    num_threads: int | None = None
    quantize: Quantization = "none"
    eos_token_ids: tuple[int, ...] = ()
    draft: Path | None = None


@dataclass(frozen=True, slots=True)
class LoadedRunner:
    """Hold a runner and what bookkeeping must know of it.

    `config`, `spec`: of the model; a draft model's KV uses the same pages. `plan` counts the bytes
    of both. `weights`: how linears are computed with, where the checkpoint has no codes of its own.
    `quantization`: what it cost; None without, or if the memory to compare is not there.
    """

    runner: ModelRunner
    config: ModelConfig
    spec: CacheSpec
    plan: CapacityPlan
    device: str
    dtype: DTypeName
    kv_dtype: KvDTypeName
    weights: native.WeightFormat
    draft_config: ModelConfig | None = None
    quantization: QuantizationEffect | None = None


@dataclass(frozen=True, slots=True)
class ResolvedOptions:
    """Hold `RunnerOptions` with every "auto" resolved for a model on this machine."""

    config: ModelConfig
    device: torch.device
    dtype: DTypeName
    kv_dtype: KvDTypeName
    weights: native.WeightFormat
    max_context_len: int
    num_rows: int
    backend: ComputeBackend

    def capacity(
        self, stored: CacheSpec, limits: MemoryLimits, make_runner: RunnerMaker | None = None
    ) -> CapacityPlan:
        """Plan how many pages to allocate for KV as in `stored`. `make_runner`: measures what
        `limits.largest` takes of an accelerator; None to leave that out.

        Raises:
            ValueError: memory for less than one page.
        """
        largest = limits.largest
        if make_runner is not None and largest is not None and self.device.type != "cpu":
            num_turns = min(largest.num_turns, self.num_rows)
            activation_bytes = measure_activations(
                replace(largest, num_turns=num_turns),
                make_runner,
                stored,
                device=self.device,
                max_context_len=self.max_context_len,
            )
            limits = replace(limits, activation_bytes=activation_bytes)
        return measure_capacity(
            stored,
            device=self.device,
            num_rows=self.num_rows,
            max_context_len=self.max_context_len,
            limits=limits,
        )


def resolve_options(
    config: ModelConfig, options: RunnerOptions, *, is_planned: bool = False
) -> ResolvedOptions:
    """Resolve the options for a model on this machine.

    `is_planned`: nothing will run, so a GPU that is named need not be here.

    Raises:
        ValueError: the device does not exist, or the backend does not run on it, or does not read
            KV of the dtype.
    """
    device = choose_device(options.device, is_planned=is_planned)
    is_cpu_by_default = options.device == "auto" and device.type == "cpu"
    if options.backend == "triton" and is_cpu_by_default and triton.why_not(device) is not None:
        raise ValueError(f"--attention-backend triton: {no_cuda()}")
    backend = resolve_backend(options.backend, device)
    if options.quantize != "none" and backend != "native":
        why = native.WHY_MISSING or f"the backend is {backend}, on {device}"
        raise ValueError(f"--quantize {options.quantize} needs the native kernels: {why}")
    dtype = choose_dtype(options.dtype, config.dtype, device, backend)
    kv_dtype = dtype if options.kv_dtype == "auto" else options.kv_dtype
    check_kv_dtype(kv_dtype, device, backend)
    return ResolvedOptions(
        config=config,
        device=device,
        dtype=dtype,
        kv_dtype=kv_dtype,
        weights=dtype if options.quantize == "none" else options.quantize,
        max_context_len=min(
            config.max_position_embeddings,
            options.max_context_len or config.max_position_embeddings,
        ),
        num_rows=options.num_rows,
        backend=backend,
    )


def load_runner(
    directory: Path, options: RunnerOptions, *, progress: Progress | None = None
) -> LoadedRunner:
    """Load a checkpoint and allocate its KV pools.

    Raises:
        ModelError: the checkpoint cannot be served, or not with this draft model; see
            `models.errors`.
        ValueError: the device does not exist, or memory for less than one page.
    """
    resolved = resolve_options(load_config(directory), options)
    config, device, dtype = resolved.config, resolved.device, resolved.dtype
    _set_num_threads(options.num_threads, resolved.backend)
    checkpoints = [(directory, config)]
    if options.draft is not None:
        checkpoints.append(draft_of((directory, config), options.draft, resolved.max_context_len))

    def load(source: Path, of: ModelConfig, stored_as: native.WeightFormat) -> Decoder:
        return load_decoder(
            source,
            of,
            device=device,
            dtype=TORCH_DTYPES[dtype],
            progress=progress,
            factories=layer_factories(resolved.backend, stored_as),
        )

    before = None
    if options.quantize != "none" and _fits_besides(config, device, TORCH_DTYPES[dtype]):
        before = sequence_logits(load(directory, config, dtype))
    decoder, *drafts = (load(source, of, resolved.weights) for source, of in checkpoints)
    effect = before if before is None else QuantizationEffect.of(before, sequence_logits(decoder))
    specs = [of.cache_spec(options.page_size, dtype, resolved.kv_dtype) for _, of in checkpoints]
    stored = CacheSpec(tuple(g for spec in specs for g in spec.groups), options.page_size)
    make_runner = partial(
        ModelRunner,
        decoder,
        specs[0],
        backend=resolved.backend,
        eos_token_ids=options.eos_token_ids,
        draft=drafts[0] if drafts else None,
    )
    plan = resolved.capacity(stored, options.memory, make_runner)
    return LoadedRunner(
        make_runner(plan.capacity),
        config,
        specs[0],
        plan,
        str(device),
        dtype,
        resolved.kv_dtype,
        resolved.weights,
        draft_config=checkpoints[1][1] if drafts else None,
        quantization=effect,
    )


def capture_graphs(
    loaded: LoadedRunner,
    largest: int,
    num_drafts: int,
    *,
    on_progress: Callable[[int, int], None],
) -> str:
    """Capture what a GPU computes in forwards of up to `largest` rows that decode, or verify up to
    `num_drafts` drafts each. Return what came of it, in words.

    `on_progress` is told how many are done, and of how many.
    """
    device, sizes = torch.device(loaded.device), graph_sizes(largest, num_drafts)
    before = free_bytes(device)
    left = max(0, before - loaded.plan.activation_bytes)
    api = CudaGraphs(device, int(left * MAX_GRAPHS_FRACTION))
    why_not = loaded.runner.capture_graphs(sizes, api, on_progress=on_progress)
    if why_not is not None:
        return f"every forward is launched kernel by kernel: {why_not}"
    taken_mib = (before - free_bytes(device)) / 2**20
    told = f"forwards of up to {largest} rows are CUDA graphs, in {taken_mib:.0f} MiB"
    graphs = loaded.runner.graphs
    if graphs is not None and graphs.left_out:
        told += (
            f"; {len(graphs.left_out)} of {len(sizes)} sizes had no room, which a lower "
            "--mem-fraction-static leaves"
        )
    return told


def layer_factories(backend: ComputeBackend, weights: native.WeightFormat) -> LayerFactories:
    """Return what creates the layers of a backend; see `linear_factory`."""
    linear = linear_factory(backend, weights)
    if backend != "triton":
        return LayerFactories(linear)
    from session_server.runner.triton.experts import stack_experts

    return LayerFactories(linear, stack_experts)


def keeps_mxfp4(backend: ComputeBackend, dtype: torch.dtype) -> bool:
    """Return whether experts in MXFP4 stay as they are; else they become numbers."""
    return backend == "triton" and dtype == torch.bfloat16


def linear_factory(backend: ComputeBackend, weights: native.WeightFormat) -> LinearFactory:
    """Return what creates the linears of a backend, `weights` being how native ones are stored."""
    if backend == "native":
        from session_server.runner.native.linear import NativeLinears

        return NativeLinears(weights)
    if backend == "triton":
        from session_server.runner.triton.linear import TritonLinears

        return TritonLinears()
    return make_linear


def linear_bytes(
    backend: ComputeBackend, weights: native.WeightFormat, device: torch.device
) -> HeldBytes:
    """Return what measures the linears that `linear_factory` creates."""
    if backend == "native":
        return held_natively(weights)
    return held_by_triton(device) if backend == "triton" else held_by_torch


def _fits_besides(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether memory is plenty for the weights of `dtype`, for as long as they are read."""
    return 2 * weight_bytes(config, device=device, dtype=dtype) < free_bytes(device)


def _set_num_threads(num_threads: int | None, backend: ComputeBackend) -> None:
    """Give the threads to whoever computes forwards: two pools would fight for the cores."""
    if num_threads is None:
        num_threads = torch.get_num_threads()
    if backend == "native":
        native.set_num_threads(num_threads)
        num_threads = 1
    torch.set_num_threads(num_threads)


def draft_of(model: _Checkpoint, draft_path: Path, max_context_len: int) -> _Checkpoint:
    """Return a draft model's checkpoint, which can draft for the model."""
    (path, of_model), of_draft = model, load_config(draft_path)
    cannot = f"the model in {draft_path} cannot draft for the one in {path}"
    if of_draft.vocab_size != of_model.vocab_size:
        raise DraftMismatch(
            f"{cannot}: it has {of_draft.vocab_size} tokens and not {of_model.vocab_size}"
        )
    if of_draft.max_position_embeddings < max_context_len:
        raise DraftMismatch(
            f"{cannot} over {max_context_len} tokens: its own context has "
            f"{of_draft.max_position_embeddings}; shorten the context to that"
        )
    if STATE_POOL in of_draft.pools:
        raise DraftMismatch(f"{cannot}: it has recurrent layers, whose states are not kept")
    for pool in of_draft.pools:
        # Its KV uses the model's page ids, and is released together with the model's.
        if pool not in of_model.pools:
            raise DraftMismatch(f"{cannot}: it has {pool} attention layers, which the other lacks")
        own, other = (of.mixer_of(pool).group((), of.dtype).window for of in (of_draft, of_model))
        if own > other:
            raise DraftMismatch(f"{cannot}: its window is {own} positions, more than {other}")
    return draft_path, of_draft


def choose_device(name: str, *, is_planned: bool = False) -> torch.device:
    """Return the named device; "auto" is the first CUDA device, or the CPU.

    `is_planned`: see `resolve_options`.

    Raises:
        ValueError: torch has no such device here.
    """
    if name == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"--device {name} is no device; known: auto, cpu, cuda, cuda:N") from None
    if not is_planned and not is_here(device):
        raise ValueError(f"--device {name}: {no_cuda()}")
    return device


def choose_dtype(
    name: DTypeName | Literal["auto"],
    of_checkpoint: DTypeName,
    device: torch.device,
    backend: ComputeBackend,
) -> DTypeName:
    """Return the named dtype; "auto" is the checkpoint's, except where something else is faster.

    A GPU computes a float32 checkpoint in bfloat16. torch on a CPU computes in float32: halves take
    it several times as long.
    """
    if name != "auto":
        return name
    if device.type == "cpu":
        return of_checkpoint if backend == "native" else "float32"
    return "bfloat16" if of_checkpoint == "float32" else of_checkpoint


def check_kv_dtype(name: KvDTypeName, device: torch.device, backend: ComputeBackend) -> None:
    """Refuse 8-bit floats where no kernel reads them.

    Raises:
        ValueError: the backend does not, or not on this device.
    """
    if KV_DTYPES[name].itemsize > 1:
        return
    flag = f"--kv-cache-dtype {name}"
    if backend != "triton":
        raise ValueError(
            f"{flag} needs the kernels of --attention-backend triton, and the backend is "
            f"{backend}, on {device}; ask for those on a GPU, or for bfloat16"
        )
    if name == "fp8_e4m3" and not triton.has_e4m3(device):
        raise ValueError(f"{flag} needs a GPU of compute capability 8.9; take fp8_e5m2 on this one")
