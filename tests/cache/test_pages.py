"""The page allocator: all or nothing, never page 0, and extents that grow."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest

from cache.errors import AuditFailed, OutOfPages
from cache.ledger import Ledger
from cache.pages import PageAllocator
from cache.types import Holder, PageId, PoolName
from tests.cache.free_lists import FREE_LISTS, Allocation, free_pages

ALLOCATIONS: list[Allocation] = ["extent", "lifo"]


def make(num_pages: int, allocation: Allocation = "extent") -> PageAllocator:
    return PageAllocator(Ledger(PoolName("full"), num_pages), FREE_LISTS[allocation])


def num_runs(pages: list[int]) -> int:
    return 1 + sum(b != a + 1 for a, b in pairwise(pages))


@pytest.mark.parametrize("allocation", ALLOCATIONS)
def test_all_pages_but_the_padding_page_are_handed_out_once(allocation: Allocation) -> None:
    allocator = make(20, allocation)
    pages = [page for _ in range(19) for page in allocator.acquire(1, Holder.ACTIVE)]
    assert sorted(pages) == list(range(1, 20))
    assert allocator.ledger.snapshot().active == 19


@pytest.mark.parametrize("allocation", ALLOCATIONS)
def test_too_many_pages_are_refused_and_none_is_taken(allocation: Allocation) -> None:
    allocator = make(5, allocation)
    with pytest.raises(OutOfPages):
        allocator.acquire(5, Holder.ACTIVE)
    assert allocator.ledger.num_free == 4
    assert free_pages(allocator).tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("allocation", ALLOCATIONS)
@pytest.mark.parametrize("wrong", [[3, 3], [0], [7]])
def test_D3_D4_a_page_named_twice_or_never_held_cannot_be_released(
    allocation: Allocation, wrong: list[int]
) -> None:
    allocator = make(9, allocation)
    held = allocator.acquire(8, Holder.ACTIVE)
    allocator.release([7], Holder.ACTIVE)
    with pytest.raises(AuditFailed):
        allocator.release(wrong, Holder.ACTIVE)
    allocator.release([page for page in held if page != 7], Holder.ACTIVE)
    assert free_pages(allocator).tolist() == list(range(1, 9))


@pytest.mark.parametrize("allocation", ALLOCATIONS)
def test_releasing_nothing_is_harmless(allocation: Allocation) -> None:
    make(4, allocation).release([], Holder.ACTIVE)


def test_a_session_grows_into_the_page_after_its_last() -> None:
    allocator = make(100)
    first = allocator.acquire(3, Holder.ACTIVE)
    other = allocator.acquire(3, Holder.ACTIVE)
    more = allocator.acquire(4, Holder.ACTIVE, after=PageId(first[-1]))
    assert num_runs(first + more) == 1
    assert not set(first + more) & set(other)


def test_fresh_runs_leave_each_other_room_to_grow() -> None:
    allocator = make(1025)
    sessions = [allocator.acquire(4, Holder.ACTIVE) for _ in range(16)]
    for _ in range(10):
        for pages in sessions:
            pages.extend(allocator.acquire(4, Holder.ACTIVE, after=PageId(pages[-1])))
    assert [num_runs(pages) for pages in sessions] == [1] * 16


def test_a_fragmented_pool_still_hands_out_everything_it_has() -> None:
    allocator = make(21)
    held = allocator.acquire(20, Holder.ACTIVE)
    allocator.release(held[::2], Holder.ACTIVE)
    assert sorted(allocator.acquire(10, Holder.ACTIVE)) == sorted(held[::2])


def test_released_neighbours_coalesce_into_one_extent() -> None:
    allocator = make(65)
    held = allocator.acquire(64, Holder.ACTIVE)
    shuffled = Random(3).sample(held, len(held))
    for page in shuffled:
        allocator.release([page], Holder.ACTIVE)
    assert num_runs(allocator.acquire(64, Holder.ACTIVE)) == 1


@pytest.mark.parametrize("allocation", ALLOCATIONS)
@pytest.mark.parametrize("seed", range(5))
def test_any_traffic_keeps_held_and_free_apart(allocation: Allocation, seed: int) -> None:
    allocator, random = make(60, allocation), Random(seed)
    held: list[list[int]] = []
    for _ in range(600):
        if held and random.random() < 0.5:
            pages = held.pop(random.randrange(len(held)))
            allocator.release(random.sample(pages, len(pages)), Holder.ACTIVE)
        else:
            wanted = random.randint(1, 9)
            after = PageId(random.choice(held)[-1]) if held else None
            if wanted <= allocator.ledger.num_free:
                held.append(allocator.acquire(wanted, Holder.ACTIVE, after=after))
        taken = [page for pages in held for page in pages]
        assert sorted([*taken, *free_pages(allocator).tolist()]) == list(range(1, 60))
