"""Pages of a tensor are copied to host memory and back as they are, wherever they lie."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cache.pool import page_copy
from cache.pool.page_copy import PagedTensor, host_memory, runs_of
from tests.oracle.device import DEVICE

NUM_PAGES = 12
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.uint8)
SHAPES = ((NUM_PAGES, 3, 2), (2, NUM_PAGES, 3), (2, 3, NUM_PAGES, 5))
ORDERS: tuple[list[int], ...] = (
    [],
    [5],
    [1, 2, 3, 4],
    [11, 10, 9],
    [1, 2, 7, 8, 9, 3],
    [0, 2, 4, 6],
)


def tensor_of(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Random bytes, as a tensor."""
    size = torch.zeros(0, dtype=dtype).element_size()
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, (*shape[:-1], shape[-1] * size), np.uint8)
    return torch.from_numpy(data).view(dtype).to(DEVICE)


def pages_of(pages: Sequence[int]) -> np.ndarray:
    return np.array(pages, np.int32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("block_pages", [1, 2, 100])
def test_pages_go_out_and_come_back_to_others(
    dtype: torch.dtype,
    shape: tuple[int, ...],
    block_pages: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    axis = shape.index(NUM_PAGES)
    for number, order in enumerate(ORDERS):
        storage = tensor_of(shape, dtype, number)
        paged = PagedTensor(storage, axis)
        monkeypatch.setattr(page_copy, "BLOCK_BYTES", block_pages * paged.page_bytes)
        before = storage.view(torch.uint8).clone()
        (host,) = host_memory([paged.shape_of(len(order))], is_pinned=DEVICE.type == "cuda")
        paged.copy_out(pages_of(order), host)
        index = torch.tensor(order, dtype=torch.long, device=DEVICE)
        assert torch.equal(torch.from_numpy(host), before.index_select(axis, index).cpu())
        assert torch.equal(storage.view(torch.uint8), before)
        # Back, all but the first, to pages of another order.
        targets = Random(number).sample(range(NUM_PAGES), max(0, len(order) - 1))
        paged.copy_in(host, 1, pages_of(targets))
        expected = before.clone()
        for source, target in zip(order[1:], targets, strict=True):
            expected.select(axis, target).copy_(before.select(axis, source))
        assert torch.equal(storage.view(torch.uint8), expected), "others are as they were"


def test_a_page_has_its_bytes_of_every_layer() -> None:
    paged = PagedTensor(tensor_of((2, NUM_PAGES, 3), torch.bfloat16, 0), 1)
    assert paged.page_bytes == 2 * 3 * 2
    assert paged.shape_of(5) == (2, 5, 6)


@given(pages=st.lists(st.integers(0, 8), max_size=12))
def test_runs_are_the_longest_that_follow_each_other(pages: list[int]) -> None:
    runs = list(runs_of(pages_of(pages)))
    assert [first + i for _, first, count in runs for i in range(count)] == pages
    assert [at for at, _, _ in runs] == [sum(r[2] for r in runs[:i]) for i in range(len(runs))]
    for (_, first, count), (_, following, _) in pairwise(runs):
        assert first + count != following


@pytest.mark.parametrize("is_pinned", [False, True] if DEVICE.type == "cuda" else [False])
def test_host_memory_is_there_until_the_last_of_its_arrays_is_gone(is_pinned: bool) -> None:
    shapes = [(2, 3), (0, 4), (1 << 20,), (5, 0, 2), (9,)]
    arrays = host_memory(shapes, is_pinned=is_pinned)
    assert [array.shape for array in arrays] == shapes
    for number, array in enumerate(arrays):
        array[:] = number
    assert [set(array.ravel().tolist()) for array in arrays] == [{0}, set(), {2}, set(), {4}]
    last = arrays.pop()
    del arrays, array
    assert set(last.tolist()) == {4}
    assert host_memory([(0,)], is_pinned=is_pinned)[0].shape == (0,)
    assert host_memory([], is_pinned=is_pinned) == []


def test_more_host_memory_than_there_is_is_refused() -> None:
    with pytest.raises(MemoryError):
        host_memory([(1 << 52,)], is_pinned=False)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="nobody counts mappings here")
def test_many_segments_are_few_mappings() -> None:
    """A process that has as many as its kernel allows cannot even start a thread."""
    before = len(Path("/proc/self/maps").read_bytes().splitlines())
    held = [host_memory([(3, 1 << 12)], is_pinned=False) for _ in range(2000)]
    assert len(Path("/proc/self/maps").read_bytes().splitlines()) < before + len(held) // 10
