"""Plan how much KV fits into the free memory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import torch

from cache.capacity import BoundedPools, plan_capacity
from cache.spec import CacheSpec, Capacity
from cache.types import PoolName, pages_for

CPU_FRACTION: Final = 0.25
"""Largest fraction of the host's available memory for KV; other processes need the rest."""

DEVICE_FRACTION: Final = 0.85
"""Fraction for KV of what weights, activations and page tables leave of an accelerator; CUDA graphs
and what the allocator cannot use need the rest."""

TABLE_ENTRY_BYTES: Final = 4
"""Of one page in a page table, int32."""

_MEMINFO: Final = Path("/proc/meminfo")
_CGROUP: Final = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class LargestForward:
    """Bound the forwards that a scheduler makes.

    `chunk_tokens`: of prompts and of drafts, over all turns. `num_turns`: each has one token on
    top. `num_drafts`: of one turn; `makes_drafts`: a draft model makes them.
    """

    chunk_tokens: int
    num_turns: int
    num_drafts: int = 0
    makes_drafts: bool = False


@dataclass(frozen=True, slots=True)
class MemoryLimits:
    """Hold the operator's limits on KV memory; None for what is not limited.

    `fraction`: of the free memory. `max_total_tokens`: over all sessions. `bounded`: what pools
    whose use per session is bounded (windows, states) must have room for. `free_bytes`: plan with
    this instead of measuring. `largest`: the forwards that an accelerator must have room for beside
    KV; `activation_bytes`: what they take, None before it is measured.
    """

    fraction: float | None = None
    max_total_tokens: int | None = None
    bounded: BoundedPools = field(default_factory=BoundedPools)
    free_bytes: int | None = None
    largest: LargestForward | None = None
    activation_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class CapacityPlan:
    """Hold the capacity, its bytes by pool, and the reason for it, for the log.

    `activation_bytes`, `table_bytes`: what forwards and page tables take of `free_bytes` beside KV;
    0 on a CPU.
    """

    capacity: Capacity
    pool_bytes: Mapping[PoolName, int]
    free_bytes: int
    reason: str
    activation_bytes: int = 0
    table_bytes: int = 0

    @property
    def kv_bytes(self) -> int:
        """Return the bytes of all pools."""
        return sum(self.pool_bytes.values())


def measure_capacity(
    spec: CacheSpec,
    *,
    device: torch.device,
    num_rows: int,
    max_context_len: int,
    limits: MemoryLimits,
) -> CapacityPlan:
    """Decide how many pages to allocate; call it after the weights are loaded.

    Without limits the pool holds `num_rows` contexts of full length, if `CPU_FRACTION` or
    `DEVICE_FRACTION` of the free memory suffice. On an accelerator, activations and page tables
    come first. A CPU keeps most of its memory for them, and of tables only what is written.

    Raises:
        ValueError: not even one page fits.
    """
    free = free_bytes(device) if limits.free_bytes is None else limits.free_bytes
    is_host = device.type == "cpu"
    default = CPU_FRACTION if is_host else DEVICE_FRACTION
    fraction = default if limits.fraction is None else limits.fraction
    tables = 0 if is_host else table_bytes(spec, num_rows, max_context_len)
    activations = limits.activation_bytes or 0
    left = free - activations - tables
    if left <= 0:
        raise ValueError(_nothing_left(free, activations, tables))
    budget = int(left * fraction)
    max_total_tokens = limits.max_total_tokens or num_rows * max_context_len
    capacity = plan_capacity(
        spec,
        budget_bytes=budget,
        num_rows=num_rows,
        max_context_len=max_context_len,
        max_total_tokens=max_total_tokens,
        bounded=limits.bounded,
    )
    sizes = spec.pool_bytes_per_page
    pool_bytes = {pool: num * sizes[pool] for pool, num in capacity.pool_pages(spec).items()}
    reason = f"{fraction:.0%} of {_gib(left)} free memory"
    if not is_host:
        reason += " beside page tables"
        is_measured = limits.activation_bytes is not None
        reason += " and activations" if is_measured else "; activations are measured at start"
    if (max(capacity.num_pages.values()) - 1) * spec.page_size >= max_total_tokens:
        each = f"of {max_context_len:,} tokens need no more"
        reason = f"{num_rows:,} sessions (--max-resident-sessions) {each}"
        if limits.max_total_tokens is not None:
            reason = f"--max-total-tokens {max_total_tokens}"
    elif budget - sum(pool_bytes.values()) > spec.bytes_per_page:
        reason = f"room for the windows of {num_rows} sessions"
    return CapacityPlan(capacity, pool_bytes, free, reason, activations, tables)


def table_bytes(spec: CacheSpec, num_rows: int, max_context_len: int) -> int:
    """Return the bytes of all page tables: one for each pool of positions, with a row more than
    `num_rows`, for padding."""
    num_entries = (num_rows + 1) * pages_for(max_context_len, spec.page_size)
    return len(spec.paged_bytes_per_page) * num_entries * TABLE_ENTRY_BYTES


def _nothing_left(free: int, activations: int, tables: int) -> str:
    forward = f"the largest forward takes {_gib(activations)} and " if activations else ""
    return (
        f"{forward}page tables take {_gib(tables)} of {_gib(free)} free memory, which leaves "
        "nothing for KV: lower --chunked-prefill-size or --max-running-requests for forwards, "
        "--max-resident-sessions or --context-length for page tables"
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.3g} GiB"


def says_out_of_memory(error: str) -> bool:
    """Return whether an error of torch, of a library or of the driver is for want of memory."""
    return any(sign in error for sign in ("out of memory", "ALLOC_FAILED"))


def free_bytes(device: torch.device) -> int:
    """Return the free memory of an accelerator or of this host, container limits included."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what loading has given back is free, too
        return int(torch.cuda.mem_get_info(device)[0])
    return free_host_bytes()


def free_host_bytes() -> int:
    """Return the free memory of this host, container limits included."""
    return min((_available_host_bytes(), *_cgroup_headroom()))


def _available_host_bytes() -> int:
    if _MEMINFO.is_file():
        for line in _MEMINFO.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _cgroup_headroom() -> tuple[int, ...]:
    """Return the bytes left under a container's limit (cgroup v2); empty if there is none."""
    limit, used = _CGROUP / "memory.max", _CGROUP / "memory.current"
    if not (limit.is_file() and used.is_file()):
        return ()
    text = limit.read_text(encoding="ascii").strip()
    return () if text == "max" else (max(0, int(text) - int(used.read_text(encoding="ascii"))),)
