"""Load a model over several ranks: rank 0's part here, the other parts in their processes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from cache.spec import CacheSpec, Capacity
from session_server.models.errors import ModelError
from session_server.models.registry import load_config
from session_server.parallel.messages import Allocate, LoadPart
from session_server.parallel.ranks import Ranks, SplitHead
from session_server.parallel.shard_reader import load_shard
from session_server.parallel.sharding import shard_config
from session_server.runner.capacity import MemoryLimits, free_bytes
from session_server.runner.checkpoint import Progress
from session_server.runner.loader import (
    LoadedRunner,
    RunnerOptions,
    choose_device,
    draft_of,
    resolve_options,
)
from session_server.runner.model_runner import ModelRunner
from session_server.runner.paged_decoder import TORCH_DTYPES


def torch_options(options: RunnerOptions, size: int) -> RunnerOptions:
    """Return the options for `size` ranks, where torch computes: our kernels cannot wait for other
    ranks in the middle of a layer.

    Raises:
        ValueError: the options ask for those kernels, or for devices that are not there.
    """
    flag = f"--tensor-parallel-size {size}"
    device = choose_device(options.device)
    is_ours = options.backend in ("native", "triton")
    if options.quantize != "none" or is_ours:
        asked = f"--attention-backend {options.backend}"
        asked = asked if is_ours else f"--quantize {options.quantize}"
        raise ValueError(f"{flag} is computed by torch, so {asked} cannot be used with it")
    if device.type == "cuda":
        if options.device not in ("auto", "cuda"):
            raise ValueError(f"{flag} uses the first {size} GPUs: give --device cuda")
        if (num_devices := torch.cuda.device_count()) < size:
            raise ValueError(f"{flag}: CUDA devices that torch sees: {num_devices}")
        device = torch.device("cuda", 0)
    is_auto = options.backend == "auto" and device.type == "cpu"
    return replace(options, device=str(device), backend="cpu" if is_auto else options.backend)


def load_ranks(
    directory: Path, options: RunnerOptions, size: int, *, progress: Progress | None = None
) -> tuple[LoadedRunner, Ranks]:
    """Start the other ranks, load a checkpoint over all of them, and allocate their KV pools.

    Raises:
        ModelError: the checkpoint cannot be served.
        ValueError: the model cannot be split, the options cannot be used, or memory for less than
            one page.
        RankLost: a rank ends.
    """
    shard_config(load_config(directory), size)  # refuses before a process is started
    options = torch_options(options, size)
    ranks = Ranks(size, torch.device(options.device))
    try:
        return load_over(ranks, directory, options, progress=progress), ranks
    except BaseException:
        ranks.close()
        raise


def load_over(
    ranks: Ranks, directory: Path, options: RunnerOptions, *, progress: Progress | None = None
) -> LoadedRunner:
    """Load a checkpoint over ranks that are there, in place of what they had before.

    `options`: those of `torch_options`. Raises what `load_ranks` raises.
    """
    size = ranks.group.shard.size
    resolved = resolve_options(load_config(directory), options)
    config, dtype, kv_dtype = resolved.config, resolved.dtype, resolved.kv_dtype
    checkpoints = [(directory, config)]
    if options.draft is not None:
        checkpoints.append(draft_of((directory, config), options.draft, resolved.max_context_len))
    parts = [shard_config(of, size) for _, of in checkpoints]
    num_threads = max(1, (options.num_threads or torch.get_num_threads()) // size)
    torch.set_num_threads(num_threads)
    directories = tuple(str(path) for path, _ in checkpoints)
    ranks.send(LoadPart(directories, dtype, kv_dtype, options.page_size, num_threads))
    try:
        decoder, *drafts = (
            load_shard(path, of, ranks.group, dtype=TORCH_DTYPES[dtype], progress=progress)
            for path, of in checkpoints
        )
    except (ModelError, ValueError):
        with suppress(ModelError, ValueError):
            ranks.await_loaded()  # they fail at the same tensor
        raise
    for index, each in enumerate((decoder, *drafts)):
        each.head = SplitHead(ranks, index, each.head, config.vocab_size)
    specs = [part.cache_spec(options.page_size, dtype, kv_dtype) for part in parts]
    stored = CacheSpec(tuple(g for spec in specs for g in spec.groups), options.page_size)
    own_part = partial(
        ModelRunner,
        decoder,
        specs[0],
        backend=resolved.backend,
        eos_token_ids=options.eos_token_ids,
        draft=drafts[0] if drafts else None,
    )
    make_runner = partial(_runner_over, ranks, own_part)
    # What forwards take here, all ranks leave free: this one also samples.
    plan = resolved.capacity(stored, _limits(options.memory, ranks), make_runner)
    return LoadedRunner(
        make_runner(plan.capacity),
        config,
        specs[0],
        plan,
        str(resolved.device),
        dtype,
        kv_dtype,
        resolved.weights,
        draft_config=checkpoints[1][1] if drafts else None,
    )


def _runner_over(
    ranks: Ranks, own_part: Callable[[Capacity], ModelRunner], capacity: Capacity
) -> ModelRunner:
    """Allocate memory on all ranks, `own_part` here, and lead them."""
    ranks.send(Allocate(capacity))
    runner = own_part(capacity)
    runner.lead(ranks)
    return runner


def _limits(given: MemoryLimits, ranks: Ranks) -> MemoryLimits:
    """Wait until every rank has loaded its part; return the limits of what each has left."""
    device, num_ranks = ranks.group.device, ranks.group.shard.size
    free = min(ranks.await_loaded(), free_bytes(device))
    if given.free_bytes is not None:
        return given
    # Ranks on CPUs share the memory of the host.
    return replace(given, free_bytes=free // num_ranks if device.type == "cpu" else free)
