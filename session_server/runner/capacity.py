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
from cache.types import PoolName

CPU_FRACTION: Final = 0.25
"""Largest fraction of the host's available memory for KV; other processes need the rest."""

DEVICE_FRACTION: Final = 0.85
"""Fraction for KV of an accelerator's free memory after loading; activations need the rest."""

_MEMINFO: Final = Path("/proc/meminfo")
_CGROUP: Final = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class MemoryLimits:
    """Hold the operator's limits on KV memory; None for what is not limited.

    `fraction`: of the free memory. `max_total_tokens`: over all sessions. `bounded`: what pools
    whose use per session is bounded (windows, states) must have room for. `free_bytes`: plan with
    this instead of measuring.
    """

    fraction: float | None = None
    max_total_tokens: int | None = None
    bounded: BoundedPools = field(default_factory=BoundedPools)
    free_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class CapacityPlan:
    """Hold the capacity, its bytes by pool, and the reason for it, for the log."""

    capacity: Capacity
    pool_bytes: Mapping[PoolName, int]
    free_bytes: int
    reason: str

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
    `DEVICE_FRACTION` of the free memory suffice.

    Raises:
        ValueError: not even one page fits.
    """
    free = free_bytes(device) if limits.free_bytes is None else limits.free_bytes
    default = CPU_FRACTION if device.type == "cpu" else DEVICE_FRACTION
    fraction = default if limits.fraction is None else limits.fraction
    budget = int(free * fraction)
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
    reason = f"{fraction:.0%} of {free / 2**30:.3g} GiB free memory"
    if (max(capacity.num_pages.values()) - 1) * spec.page_size >= max_total_tokens:
        each = f"of {max_context_len:,} tokens need no more"
        reason = f"{num_rows:,} sessions (--max-resident-sessions) {each}"
        if limits.max_total_tokens is not None:
            reason = f"--max-total-tokens {max_total_tokens}"
    elif budget - sum(pool_bytes.values()) > spec.bytes_per_page:
        reason = f"room for the windows of {num_rows} sessions"
    return CapacityPlan(capacity, pool_bytes, free, reason)


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
