"""No call of the tiers walks what grows with segments: counted in calls, at two sizes."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from cache.tiers.segment import Segment, first_chain, tenant_tag
from cache.tiers.segment_tree import Path as TreePath
from cache.tiers.segment_tree import PathPart
from session_server.core.tier_orders import Refusal, TierResult
from session_server.engine.tiers import pace as pace_module
from session_server.engine.tiers.forgetting import Forgetting, Forgotten
from session_server.engine.tiers.store import TierStore
from tests.cache.kv_world import POOL
from tests.cache.work import count_calls
from tests.engine.test_tier_bounds import drain, is_on_disk
from tests.engine.test_tier_store import ALICE, PAGE_SIZE, SEGMENT, Stock, path

SIZES = (3000, 12_000)
"""More than one step lets go of, and four times as many."""

WIDE = 1 << 40


def beginning() -> TreePath:
    return TreePath((), 0, first_chain(ALICE), None)


def behind(segment: Segment) -> TreePath:
    content = segment.content
    part = PathPart(segment, content.end)
    return TreePath((part,), content.end, content.end_chain, None)


def known(store: TierStore) -> TierStore:
    """The disk had nothing."""
    (order,) = store.orders.take()
    store.orders.handle(TierResult(order.number, 0.0))
    while store.has_more:
        store.advance()
    return store


def added(store: TierStore, place: TreePath, seed: int, num_pages: int = 1) -> Segment:
    """A segment in host memory that may be written."""
    tokens = np.arange(seed, seed + num_pages * PAGE_SIZE, dtype=np.int32)
    first = place.length // PAGE_SIZE
    segment = store.tree.add(ALICE, place, tokens, {POOL: (first, first + num_pages)})
    store.enter_host(segment, store.uses.next_use())
    segment.in_host = True
    store.writes.add(segment)
    return segment


def followed(store: TierStore, number: int) -> Segment:
    """A segment that so many follow."""
    first = added(store, beginning(), 0)
    for seed in range(number):
        added(store, behind(first), seed)
    return first


def assert_equal(work: Callable[[int], int]) -> None:
    """The work is the same at both sizes, but for the depth of a heap."""
    few, many = map(work, SIZES)
    assert many <= few * 1.1


def test_a_segment_is_dropped_with_all_that_follow_a_slice_at_a_time(tmp_path: Path) -> None:
    def work(number: int) -> int:
        store = Stock(tmp_path, host=WIDE).store
        first = followed(store, number)
        num_calls = count_calls(lambda: store.drop(first))
        assert store.find(ALICE, np.arange(8, dtype=np.int32)).length == 0
        most = num_calls
        while store.has_more:
            assert store.violations() == []
            most = max(most, count_calls(store.advance))
        assert (len(store.tree), store.host.num_bytes, len(store.writes)) == (0, 0, 0)
        assert store.counts.dropped_segments == number + 1
        return most

    assert_equal(work)


def test_many_short_histories_are_forgotten_a_slice_at_a_time(tmp_path: Path) -> None:
    def work(number: int) -> int:
        store = known(Stock(tmp_path, host=WIDE, disk=WIDE).store)
        added(store, beginning(), 0)
        forgetting = Forgetting(store)
        for seed in range(1, number + 1):
            tokens = np.arange(seed, seed + PAGE_SIZE, dtype=np.int32)
            forgetting.add(Forgotten(ALICE, tokens))
        most = 0
        while forgetting.has_more:
            most = max(most, count_calls(forgetting.advance))
        return most

    assert_equal(work)


def test_what_the_disk_has_no_room_for_is_passed_over_a_slice_at_a_time(tmp_path: Path) -> None:
    def work(number: int) -> int:
        store = known(Stock(tmp_path, host=WIDE, disk=WIDE).store)
        segments = [added(store, beginning(), seed) for seed in range(number)]
        store.disk.change(tenant_tag("b"), store.disk.max_bytes)
        store.writes.is_draining = True
        most = count_calls(store.write_ahead)
        while store.has_more:
            most = max(most, count_calls(store.advance))
        assert all(each.is_refused for each in segments)
        return most

    assert_equal(work)


def test_what_could_not_be_written_is_tried_again_a_slice_at_a_time(tmp_path: Path) -> None:
    def work(number: int) -> int:
        store = known(Stock(tmp_path, host=WIDE, disk=WIDE).store)
        segments = [added(store, beginning(), seed) for seed in range(number)]
        for each in segments[1:]:
            store.writes.remove(each)
            store.writes.fail(each)
        store.writes.is_draining = True
        store.write_ahead()
        (order,) = store.orders.take()
        most = count_calls(lambda: store.orders.handle(TierResult(order.number, 0.0)))
        while store.has_more:
            most = max(most, count_calls(store.advance))
        assert segments[0].on_disk
        assert not any(each.is_refused for each in segments)
        return most

    assert_equal(work)


def test_room_for_one_large_segment_is_made_a_slice_at_a_time(tmp_path: Path) -> None:
    def work(number: int) -> int:
        store = Stock(tmp_path, host=WIDE).store
        for seed in range(number):
            added(store, beginning(), seed)
        store.host.max_bytes = wanted = store.host.num_bytes
        most, num_calls = 0, 0
        while not (has_room := []):
            most = max(most, count_calls(lambda: has_room.append(store.make_room(wanted))))
            num_calls += 1
            if has_room[0]:
                break
            assert store.pace.is_spent, "else it would not be tried again"
            assert store.violations() == []
            store.advance()
        assert num_calls > number // pace_module.NUM_PER_STEP
        return most

    assert_equal(work)


# What is left of what was dropped


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step lets go of nothing but what is dropped itself."""
    monkeypatch.setattr(pace_module, "NUM_PER_STEP", 1)


@pytest.mark.usefixtures("slow")
def test_what_is_copied_again_before_it_was_let_go_of_stays(tmp_path: Path) -> None:
    stock = Stock(tmp_path, host=20 * SEGMENT, disk=20 * SEGMENT)
    stock.carry()
    tokens = path(1, 4)
    stock.put(tokens)
    drain(stock)
    assert len(stock.names) == 4
    stock.store.drop(stock.store.find(ALICE, tokens).parts[0].segment)
    assert len(stock.store.tree) > len(stock.store.tree.segments()), "some of it waits"
    stock.begin(tokens)
    assert stock.store.violations() == []
    stock.carry()
    drain(stock)
    stock.assert_bounded()
    assert stock.store.find(ALICE, tokens).length == len(tokens)
    assert stock.read(tokens).refusal is None
    assert is_on_disk(stock, 1)
    assert len(stock.names) == 4


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("seed", range(40))
def test_whatever_happens_meanwhile_nothing_is_left(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    stock = Stock(tmp_path, host=6 * SEGMENT, disk=9 * SEGMENT)
    waiting = []
    for _ in range(120):
        match draw.randrange(6):
            case 0 | 1:
                stock.begin(path(draw.randrange(4), draw.randint(1, 4)))
            case 2 if parts := stock.store.find(ALICE, path(draw.randrange(4), 4)).parts:
                stock.store.drop(draw.choice(parts).segment)
            case 3 if segments := stock.store.tree.segments():
                stock.store.refuse_file(
                    draw.choice(segments), draw.choice((Refusal.WRONG, Refusal.GONE))
                )
            case 4:
                stock.store.writes.is_draining = not stock.store.writes.is_draining
                stock.store.write_ahead()
            case _:
                stock.store.advance()
        waiting += stock.store.orders.take()
        while waiting and draw.randrange(3):
            stock.finish(waiting.pop(0))
            waiting += stock.store.orders.take()
        assert stock.store.violations() == []
    while waiting:
        stock.finish(waiting.pop(0))
        waiting += stock.store.orders.take()
    stock.carry()
    stock.assert_bounded()
    for each in [each for each in stock.store.tree.segments() if each.parent is None]:
        stock.store.drop(each)
    stock.carry()
    assert not stock.store.tree.segments()
    assert not stock.carrier._segments
