"""Compute what serving a checkpoint needs, from its headers, without reading weights."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from cache.spec import CacheSpec
from session_server.attention.devices import is_here
from session_server.models.config import DTypeName, ModelConfig
from session_server.models.registry import load_config
from session_server.runner.capacity import CapacityPlan, free_bytes
from session_server.runner.loader import RunnerOptions, keeps_mxfp4, linear_bytes, resolve_options
from session_server.runner.measured_weights import StoredCodes
from session_server.runner.paged_decoder import TORCH_DTYPES
from session_server.runner.weights import expected_tensors, open_checkpoint, weight_bytes


@dataclass(frozen=True, slots=True)
class Survey:
    """Describe what `load_runner` would make of the same checkpoint with the same options.

    `stored_bytes`: of the files. `weight_bytes`: of the weights in memory, in `dtype` or as
    the codes that the backend keeps. `is_here`: whether the device is.
    """

    config: ModelConfig
    num_parameters: int
    stored_bytes: int
    weight_bytes: int
    device: str
    is_here: bool
    dtype: DTypeName
    spec: CacheSpec
    plan: CapacityPlan


def survey(directory: Path, options: RunnerOptions) -> Survey:
    """Read the configuration and the headers of the weights, and plan the memory.

    If `options.memory` does not give the free memory, it is what is free now minus the weights. If
    it does, the GPU that `options.device` names need not be here.

    Raises:
        ModelError: the checkpoint cannot be served; see `models.errors`.
        ValueError: the device does not exist, or memory for less than one page.
    """
    limits = options.memory
    is_planned = limits.free_bytes is not None
    resolved = resolve_options(load_config(directory), options, is_planned=is_planned)
    config = resolved.config
    checkpoint = open_checkpoint(directory, config)
    dtype = TORCH_DTYPES[resolved.dtype]
    names = checkpoint.tensors if keeps_mxfp4(resolved.backend, dtype) else ()
    in_memory = weight_bytes(
        config,
        device=resolved.device,
        dtype=dtype,
        held_bytes=linear_bytes(resolved.backend, resolved.weights, resolved.device),
        stored=StoredCodes(
            checkpoint.code_bits,
            checkpoint.is_fp8,
            names,
            rounds_inputs=config.quantization is not None and config.quantization.rounds_inputs,
        ),
    )
    if limits.free_bytes is None:
        limits = replace(limits, free_bytes=max(0, free_bytes(resolved.device) - in_memory))
    spec = config.cache_spec(options.page_size, resolved.dtype, resolved.kv_dtype)
    return Survey(
        config=config,
        num_parameters=sum(map(math.prod, expected_tensors(config).values())),
        stored_bytes=checkpoint.num_bytes,
        weight_bytes=in_memory,
        device=str(resolved.device),
        is_here=is_here(resolved.device),
        dtype=resolved.dtype,
        spec=spec,
        plan=resolved.capacity(spec, limits),
    )
