"""Specs, capacities and the rules of each kind of layer."""

from __future__ import annotations

import numpy as np
import pytest

from cache.components import components_of
from cache.int_buffer import IntBuffer
from cache.spec import CacheSpec, LayerGroup, LayerKind
from cache.types import PoolName, pages_for
from tests.cache.work import count_calls

GROUP = LayerGroup(PoolName("full"), LayerKind.FULL, (0, 1, 2), 2, 16, 2)
LATENT = LayerGroup(
    PoolName("latent"), LayerKind.LATENT, tuple(range(27)), 1, 576, 2, qk_rope_head_dim=64
)
"""DeepSeek-V2-Lite in halves."""
WINDOW = LayerGroup(PoolName("window"), LayerKind.WINDOW, (3,), 1, 4, 4, window=6)


def test_groups_of_one_pool_are_one_component() -> None:
    other = LayerGroup(PoolName("full"), LayerKind.FULL, (3,), 4, 16, 2)
    assert [c.pool for c in components_of(CacheSpec((GROUP, other), 16))] == ["full"]


@pytest.mark.parametrize("group", [GROUP, LATENT], ids=["full", "latent"])
def test_positions_kept_alone_are_reused_and_cut_anywhere_and_all_read(group: LayerGroup) -> None:
    (component,) = components_of(CacheSpec((group,), 16))
    assert component.continuable_len(np.array([3, 4, 9], np.int32), 41) == 41
    assert component.first_page(1000) == 0
    assert not component.is_bounded


def test_a_window_reads_its_own_position_and_those_right_before() -> None:
    (window,) = components_of(CacheSpec((WINDOW,), 4))
    assert window.is_bounded
    # Six positions: a query at 9 reads 4 to 9, one at 8 reads 3 to 8.
    assert [window.first_page(length) for length in (0, 5, 8, 9, 12, 13)] == [0, 0, 0, 1, 1, 2]


@pytest.mark.parametrize(
    ("entries", "length", "reachable"),
    [
        ([1, 2, 3, 4], 16, 16),
        ([0, 0, 3, 4], 16, 16),
        ([0, 0, 0, 4], 16, 0),
        ([1, 2, 0, 4], 16, 8),
        ([1, 2, 0, 4, 5], 18, 18),
        ([1, 2, 3, 0], 14, 12),
        ([0, 2, 3, 0], 13, 12),
        ([0, 2, 0, 4], 15, 0),
    ],
)
def test_a_window_goes_on_only_where_all_of_it_is_there(
    entries: list[int], length: int, reachable: int
) -> None:
    (window,) = components_of(CacheSpec((WINDOW,), 4))
    assert window.continuable_len(np.array(entries, np.int32), length) == reachable


STATE = LayerGroup(PoolName("state"), LayerKind.RECURRENT, (4,), 0, 0, 4, state_shapes=((2,),))


@pytest.mark.parametrize("group", [WINDOW, STATE], ids=["window", "state"])
def test_a_hole_as_long_as_the_history_is_passed_in_a_few_looks(group: LayerGroup) -> None:
    (component,) = components_of(CacheSpec((group,), 1))
    entries = np.zeros(10_000, np.int32)
    entries[:20] = 7
    assert component.continuable_len(entries, 10_000) == 20
    assert component.continuable_len(entries[20:], 10_000, first=20) == 0
    assert count_calls(lambda: component.continuable_len(entries, 10_000)) < 60


def test_a_pool_has_layers_of_one_kind_and_window() -> None:
    other = LayerGroup(PoolName("window"), LayerKind.WINDOW, (4,), 1, 4, 4, window=7)
    with pytest.raises(ValueError, match="different kinds"):
        components_of(CacheSpec((WINDOW, other), 4))


def test_a_page_costs_k_and_v_of_all_layers() -> None:
    assert CacheSpec((GROUP,), 16).bytes_per_page == 2 * 3 * 2 * 16 * 2 * 16


def test_a_latent_page_costs_one_row_per_layer_and_position() -> None:
    assert LATENT.bytes_per_token == 27 * (512 + 64) * 2
    expanded = 27 * 16 * (192 + 128) * 2
    assert expanded / LATENT.bytes_per_token == pytest.approx(80 / 9)


@pytest.mark.parametrize(("num_tokens", "pages"), [(0, 0), (1, 1), (4, 1), (5, 2)])
def test_tokens_are_held_in_whole_pages(num_tokens: int, pages: int) -> None:
    assert pages_for(num_tokens, 4) == pages


def test_a_buffer_holds_what_was_appended_and_not_cut() -> None:
    buffer = IntBuffer([1, 2])
    for value in range(100):
        buffer.append([value, value])
    buffer.truncate(4)
    buffer.append([9])
    assert buffer.view().tolist() == [1, 2, 0, 0, 9]
    assert buffer.view(1, 3).tolist() == [2, 0]


@pytest.mark.parametrize(("length", "capacity"), [(257, 1024), (256, 1024), (255, 510), (0, 8)])
def test_a_buffer_that_is_cut_gives_its_memory_back(length: int, capacity: int) -> None:
    buffer = IntBuffer(range(1024))
    buffer.truncate(length)
    owner = buffer.view().base
    assert owner is not None
    assert owner.nbytes == 4 * capacity
    assert buffer.view().tolist() == list(range(length))


def test_nobody_writes_through_a_view() -> None:
    view = IntBuffer([1]).view()
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 2
