"""A heap that is swept a little with each push: its order, its size and its work."""

from __future__ import annotations

from random import Random

import pytest

from cache.lazy_heap import SWEPT_PER_PUSH, LazyHeap
from tests.cache.work import count_calls


def test_items_come_in_order_while_others_are_removed_and_pushed_again() -> None:
    random, heap, plain = Random(3), LazyHeap[int](), dict[int, tuple[int, int]]()
    for number in range(6_000):
        item = random.randrange(300)
        if random.random() < 0.3:
            heap.remove(item)
            plain.pop(item, None)
        else:
            plain[item] = (random.randrange(50), number)
            heap.push(item, *plain[item])
        assert heap.first() == min(plain, key=plain.__getitem__, default=None)
        assert heap.priority(item) == plain.get(item, (None,))[0]


def test_stale_entries_do_not_pile_up_and_no_push_drops_many() -> None:
    def most_calls(num_items: int) -> int:
        heap = LazyHeap[int]()
        heap.push(-1, -1, 0)  # stays in front, so the others are swept and not dropped there
        calls = []
        for number in range(3 * num_items + 4000):
            calls.append(count_calls(lambda n=number: heap.push(n % num_items, n, n)))
        assert len(heap) <= 3 * num_items + 64
        return max(calls)

    for num_items in (10, 3000):
        assert most_calls(num_items) < 6 * SWEPT_PER_PUSH


@pytest.mark.parametrize("order", ["first to last", "last to first", "at random", "first kept"])
def test_neither_a_removal_nor_what_follows_it_drops_many(order: str) -> None:
    num_items = 8000
    items = list(range(num_items))
    if order == "last to first":
        items.reverse()
    elif order == "at random":
        Random(5).shuffle(items)
    elif order == "first kept":
        items = [*items[1:], 0]
    heap = LazyHeap[int]()
    for number in range(num_items):
        heap.push(number, number, 0)
    num_calls = [count_calls(lambda each=item: heap.remove(each)) for item in items]
    num_calls.append(count_calls(heap.first))
    heap.push(0, 0, 0)
    assert max(num_calls) < 8 * SWEPT_PER_PUSH
    assert len(heap) < 2 * SWEPT_PER_PUSH


def test_of_the_stale_entries_no_more_than_a_part_come_to_the_front_at_once() -> None:
    num_items = 8000
    heap = LazyHeap[int]()
    for number in range(num_items):
        heap.push(number, number, 0)
    for number in range(1, num_items // 2):
        heap.remove(number)
    heap.remove(0)
    assert count_calls(heap.first) < 2 * num_items // 4
    assert heap.first() == num_items // 2


def test_a_heap_of_few_items_has_few_stale_entries() -> None:
    heap, most = LazyHeap[int](), 0
    heap.push(-1, -1, 0)  # stays in front, so the other is swept and not dropped there
    for number in range(5000):
        heap.push(0, number, number)
        most = max(most, len(heap))
    assert most <= 32


def test_most_pushes_sweep_nothing() -> None:
    heap = LazyHeap[int]()
    heap.push(-1, -1, 0)  # stays in front, so the others are swept and not dropped there
    calls = [count_calls(lambda n=number: heap.push(n % 600, n, n)) for number in range(12_000)]
    assert sum(num_calls > SWEPT_PER_PUSH for num_calls in calls) < len(calls) / 8


def test_a_sweep_drops_what_is_no_longer_valid() -> None:
    valid = set(range(5000))
    heap = LazyHeap[int](valid.__contains__)
    for number in range(5000):
        heap.push(number, -number, 0)
    valid -= set(range(1, 5000))
    for number in range(12_000):
        heap.push(0, -10_000 - number, 0)
    assert heap.priority(4999) is None
    assert len(heap) < 4000
