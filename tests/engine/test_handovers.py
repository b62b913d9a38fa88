"""Sessions that move while their KV is written: each is told of in time, whoever else waits."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from cache.tiers.segment import Segment
from session_server.core.tier_orders import Refusal, TierResult, WriteFile
from session_server.engine.tiers.handovers import HANDOVER_S, Handovers
from session_server.engine.tiers.store import TierStore
from tests.cache.work import count_calls
from tests.engine.test_tier_store import Stock
from tests.engine.test_tier_walks import WIDE, added, beginning

NUMBER = 300


class World:
    """Sessions that move, each with a segment that is to be written; `told`: those that were told
    of."""

    def __init__(self, directory: Path, number: int) -> None:
        tree = Stock(directory, host=WIDE).store.tree
        self.store = TierStore(tree, host_bytes=WIDE, disk_bytes=WIDE, is_shared=True)
        self.handovers = Handovers(self.store)
        self.told: list[int] = []
        self.segments = [added(self.store, beginning(), seed) for seed in range(number)]

    def add(self, number: int, segment: Segment | None, now_s: float = 0.0) -> None:
        self.handovers.add(segment, now_s, partial(self.told.append, number))

    def add_all(self) -> None:
        for number, segment in enumerate(self.segments):
            self.add(number, segment)

    def write_one(self, refusal: Refusal | None = None) -> None:
        """Write what comes next, in a step."""
        self.store.write_ahead()
        (order,) = self.store.orders.take()
        assert isinstance(order, WriteFile)
        self.store.orders.handle(TierResult(order.number, 0.0, refusal))
        self.handovers.advance(0.0)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path, 4)


def test_the_work_of_a_step_does_not_grow_with_the_sessions_that_wait(tmp_path: Path) -> None:
    def work(number: int) -> int:
        world = World(tmp_path, number)
        world.add_all()
        calls = count_calls(world.write_one)
        assert len(world.told) == 1
        calls += count_calls(lambda: world.handovers.due_s)
        while len(world.told) < number:
            world.write_one()
        assert sorted(world.told) == [*range(number)]
        return calls

    few, many = work(NUMBER), work(4 * NUMBER)
    assert many <= few * 1.1


def test_a_session_is_told_of_once_what_it_has_is_written_or_will_not_be(world: World) -> None:
    world.add_all()
    for number in reversed(range(4)):  # what was used last is written first
        world.write_one(Refusal.FAILED if number == 0 else None)
        assert world.told == [*range(3, number - 1, -1)]
    world.add(7, world.segments[1])
    world.handovers.advance(0.0)
    assert world.told[-1] == 7, "it was written before"


def test_a_session_whose_segment_is_dropped_waits_no_more(world: World) -> None:
    world.add_all()
    world.store.drop(world.segments[1])
    world.handovers.advance(0.0)
    assert world.told == [1]
    world.store.clear()
    world.handovers.advance(0.0)
    assert sorted(world.told) == [0, 1, 2, 3]
    assert world.handovers.due_s is None


def test_of_sessions_that_end_in_one_segment_each_waits_for_its_own_time(world: World) -> None:
    for number in range(3):
        world.add(number, world.segments[0], now_s=0.5 * number)
    assert world.handovers.due_s == HANDOVER_S
    world.handovers.advance(HANDOVER_S + 0.5)
    assert world.told == [0, 1]
    assert world.handovers.due_s == HANDOVER_S + 1.0
    world.store.drop(world.segments[0])
    world.handovers.advance(HANDOVER_S + 0.5)
    assert world.told == [0, 1, 2]


def test_a_session_without_segments_waits_for_nothing(world: World) -> None:
    world.add(5, None)
    assert world.told == [5]
    assert world.handovers.due_s is None


def test_one_that_comes_while_its_segment_is_written_is_told_with_the_others(world: World) -> None:
    world.add(0, world.segments[3])
    world.store.write_ahead()
    (order,) = world.store.orders.take()
    assert isinstance(order, WriteFile)
    world.add(1, world.segments[3])
    world.store.drop(world.segments[3])
    world.handovers.advance(0.0)
    assert world.told == [0, 1]
    world.store.orders.handle(TierResult(order.number, 0.0))
    world.handovers.advance(0.0)
    assert world.told == [0, 1]
