"""Memory becomes pages, and what the operator says is heard."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cache.spec import CacheSpec, LayerGroup, LayerKind
from session_server.models.config import FULL_POOL
from session_server.runner import capacity
from session_server.runner.capacity import (
    CPU_FRACTION,
    CapacityPlan,
    MemoryLimits,
    free_bytes,
    measure_capacity,
)

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)


def plan(
    limits: MemoryLimits,
    *,
    num_rows: int = 8,
    context_len: int = 1000,
    device: torch.device = CPU,
) -> CapacityPlan:
    group = LayerGroup(FULL_POOL, LayerKind.FULL, (0, 1), 2, 8, dtype_bytes=4)
    return measure_capacity(
        CacheSpec((group,), page_size=16),
        device=device,
        num_rows=num_rows,
        max_context_len=context_len,
        limits=limits,
    )


def test_every_row_can_hold_a_full_context_when_memory_allows() -> None:
    made = plan(MemoryLimits())
    assert made.capacity.num_pages[FULL_POOL] == 8 * 1000 // 16 + 1
    assert made.capacity.num_rows == 8
    assert made.capacity.max_context_len == 1000
    assert made.kv_bytes == made.capacity.num_pages[FULL_POOL] * 16 * 2 * 2 * 2 * 8 * 4
    assert made.reason.startswith("8 sessions (--max-resident-sessions) of 1,000 tokens")
    assert plan(MemoryLimits(max_total_tokens=112)).reason == "--max-total-tokens 112"


def test_a_host_keeps_most_of_its_memory() -> None:
    made = plan(MemoryLimits(), num_rows=1 << 20, context_len=1 << 20)
    assert made.kv_bytes <= made.free_bytes * CPU_FRACTION
    assert made.kv_bytes > made.free_bytes * CPU_FRACTION * 0.99
    assert "25% of" in made.reason


def test_the_operator_bounds_tokens() -> None:
    made = plan(MemoryLimits(max_total_tokens=100))
    assert made.capacity.num_pages[FULL_POOL] == 7 + 1


def test_the_operator_bounds_memory() -> None:
    limits = MemoryLimits(fraction=0.01)
    made = plan(limits, num_rows=1 << 20, context_len=1 << 20)
    assert made.kv_bytes <= made.free_bytes * 0.01


def test_memory_for_less_than_a_page_is_refused() -> None:
    with pytest.raises(ValueError, match="raise --mem-fraction-static"):
        plan(MemoryLimits(fraction=1e-9))


def test_on_an_accelerator_activations_and_page_tables_come_before_kv() -> None:
    free, rows, context_len = 1 << 30, 1023, 1 << 16
    limits = MemoryLimits(free_bytes=free, activation_bytes=100 << 20)
    made = plan(limits, num_rows=rows, context_len=context_len, device=CUDA)
    assert made.table_bytes == 1024 * (context_len // 16) * 4
    left = free - (100 << 20) - made.table_bytes
    assert 0.84 * left < made.kv_bytes <= 0.85 * left
    assert "free memory beside page tables and activations" in made.reason
    unmeasured = replace(limits, activation_bytes=None)
    made = plan(unmeasured, num_rows=rows, context_len=context_len, device=CUDA)
    assert made.activation_bytes == 0
    assert made.reason.endswith("page tables; activations are measured at start")
    on_host = plan(unmeasured, num_rows=rows, context_len=context_len)
    assert on_host.table_bytes == 0


def test_nothing_left_for_kv_says_what_to_lower() -> None:
    forward = MemoryLimits(free_bytes=1 << 30, activation_bytes=1 << 30)
    with pytest.raises(ValueError, match=r"forward takes 1 GiB .* lower --chunked-prefill-size"):
        plan(forward, device=CUDA)
    with pytest.raises(ValueError, match=r"^page tables take 8 GiB of 1 GiB .* --context-length"):
        plan(MemoryLimits(free_bytes=1 << 30), num_rows=1 << 15, context_len=1 << 20, device=CUDA)


def test_free_memory_is_between_nothing_and_everything() -> None:
    assert 1 << 20 < free_bytes(CPU) < 1 << 50


@pytest.mark.parametrize(("limit", "expected"), [("1000\n", 600), ("300", 0), ("max", 5000)])
def test_a_container_has_what_its_limit_leaves(
    limit: str, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "memory.max").write_text(limit)
    (tmp_path / "memory.current").write_text("400\n")
    monkeypatch.setattr(capacity, "_CGROUP", tmp_path)
    monkeypatch.setattr(capacity, "_available_host_bytes", lambda: 5000)
    assert capacity.free_bytes(torch.device("cpu")) == expected
