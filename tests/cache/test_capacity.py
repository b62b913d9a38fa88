"""A budget becomes pages: how it is split between pools."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.capacity import BoundedPools, plan_capacity
from cache.spec import CacheSpec, Capacity, LayerGroup, LayerKind
from cache.types import PoolName

FULL = LayerGroup(PoolName("full"), LayerKind.FULL, (0, 1), 2, 16, 2)
LATENT = LayerGroup(
    PoolName("latent"), LayerKind.LATENT, tuple(range(27)), 1, 576, 2, qk_rope_head_dim=64
)
WINDOW = LayerGroup(PoolName("window"), LayerKind.WINDOW, (2, 3, 4), 2, 16, 2, window=64)
MIXED = CacheSpec((FULL, WINDOW), 16)
PER_ROW = 4 + 1 + 2 * 4 + 1 + 1
"""Pages: a window at rest and the page begun, two windows and the two pages at their ends."""

AHEAD = 64 // 16 - 1
"""Pages beyond those for one position."""


def plan(spec: CacheSpec, budget_bytes: int, ratio: float | None = None, **more: int) -> Capacity:
    sizes = {"num_rows": 8, "max_context_len": 4096, "num_ahead": 64} | more
    room = BoundedPools(sizes.pop("num_ahead"), window_ratio=ratio)
    return plan_capacity(spec, budget_bytes=budget_bytes, bounded=room, **sizes)


def cost(spec: CacheSpec, capacity: Capacity) -> int:
    return sum(num * spec.pool_bytes_per_page[pool] for pool, num in capacity.num_pages.items())


def test_one_pool_takes_all() -> None:
    assert plan(CacheSpec((LATENT,), 64), 7 * 64 * LATENT.bytes_per_token).num_pages == {
        "latent": 7
    }


def test_a_budget_buys_whole_pages_and_no_more_than_asked() -> None:
    spec = CacheSpec((FULL,), 16)
    budget = 10 * spec.bytes_per_page + 1
    assert plan(spec, budget).num_pages == {"full": 10}
    assert plan(spec, budget, max_total_tokens=33).num_pages == {"full": 4}


@pytest.mark.parametrize("ratio", [None, 0.5])
def test_a_budget_for_padding_alone_is_refused(ratio: float | None) -> None:
    with pytest.raises(ValueError, match="raise --mem-fraction-static"):
        plan(MIXED, MIXED.bytes_per_page, ratio)


def test_a_pool_has_the_pages_of_all_groups_in_it() -> None:
    twice = CacheSpec((FULL, replace(FULL, layers=(7,))), 16)
    assert twice.pool_bytes_per_page == {"full": 16 * 3 * 2 * 2 * 16 * 2}


def test_what_windows_cannot_need_goes_to_full_attention() -> None:
    capacity = plan(MIXED, 3000 * MIXED.bytes_per_page)
    needed = 1 + 8 * PER_ROW + AHEAD
    assert capacity.num_pages["window"] == needed
    assert MIXED.pool_bytes_per_page == {"full": 4096, "window": 6144}
    assert capacity.num_pages["full"] == 3000 + (3000 - needed) * 6144 // 4096


def test_windows_take_no_more_than_half_of_the_budget() -> None:
    pages = plan(MIXED, 120 * MIXED.bytes_per_page).num_pages
    assert pages["window"] == 1 + 60 * MIXED.bytes_per_page // 6144
    assert pages["full"] > 120 > pages["window"]


def test_in_the_least_of_memory_windows_have_what_one_turn_needs_or_pools_are_equal() -> None:
    one_turn = PER_ROW + AHEAD
    assert plan(MIXED, 20 * MIXED.bytes_per_page).num_pages == {"full": 21, "window": one_turn + 1}
    assert plan(MIXED, 15 * MIXED.bytes_per_page).num_pages == {"full": 15, "window": 15}


def test_short_contexts_need_no_more_than_themselves() -> None:
    capacity = plan(MIXED, 3000 * MIXED.bytes_per_page, max_context_len=48)
    assert capacity.num_pages["window"] == 1 + 8 * 3


def test_windows_alone_take_what_they_can_need() -> None:
    spec = CacheSpec((WINDOW,), 16)
    assert plan(spec, 3000 * spec.bytes_per_page).num_pages == {"window": 1 + 8 * PER_ROW + AHEAD}
    assert plan(spec, 9 * spec.bytes_per_page).num_pages == {"window": 9}


def test_the_operator_decides_how_large_windows_are() -> None:
    capacity = plan(MIXED, 3000 * MIXED.bytes_per_page, 0.25)
    assert capacity.num_pages["window"] == capacity.num_pages["full"] // 4
    assert cost(MIXED, capacity) <= 3000 * MIXED.bytes_per_page
    equal = plan(MIXED, 3000 * MIXED.bytes_per_page, 1.0)
    assert equal.num_pages == {"full": 3000, "window": 3000}


@given(
    budget_pages=st.integers(2, 5000),
    ratio=st.one_of(st.none(), st.floats(0.01, 1.0)),
    sizes=st.fixed_dictionaries(
        {"num_rows": st.integers(1, 100), "max_context_len": st.integers(1, 5000)},
        optional={"max_total_tokens": st.integers(1, 100_000)},
    ),
)
def test_a_split_stays_within_its_budget_and_leaves_no_page_of_full_attention_unbought(
    budget_pages: int, ratio: float | None, sizes: dict[str, int]
) -> None:
    budget = budget_pages * MIXED.bytes_per_page
    capacity = plan(MIXED, budget, ratio, **sizes)
    pages, spent = capacity.num_pages, cost(MIXED, capacity)
    assert 2 <= pages["window"] <= pages["full"]
    assert spent <= budget
    most = sizes.get("max_total_tokens", float("inf"))
    assert (pages["full"] - 1) * 16 >= most or budget - spent < 2 * MIXED.bytes_per_page
