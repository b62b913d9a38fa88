"""A path whose beginning gives way: what is counted for host memory and disk is what is there."""

from __future__ import annotations

import numpy as np

from cache.components import components_of
from cache.spec import LayerKind
from cache.tiers.segment import Segment
from cache.tiers.segment_tree import SegmentTree
from cache.types import Namespace
from session_server.core.tier_orders import Forget, ListFiles, Refusal, TierResult, WriteFile
from session_server.engine.tiers.store import TierStore
from tests.sim.layers import POOLS, Layers

PAGE_SIZE = 4
ONE_SEGMENT = 5000
"""Bytes that have room for a segment of one page, and for no second one."""

NAMESPACE = Namespace("salt", "echo")


class Tiers:
    """A store whose orders are answered by hand; segments of one page follow each other."""

    def __init__(self, *, host_bytes: int, disk_bytes: int) -> None:
        spec = Layers().spec(PAGE_SIZE)
        tree = SegmentTree(PAGE_SIZE, spec.pool_bytes_per_page, components_of(spec))
        self.store = TierStore(tree, host_bytes=host_bytes, disk_bytes=disk_bytes)
        self.store.start()
        self.answer()
        while self.store.has_more:
            self.store.advance()

    def add(self, num_pages: int) -> Segment:
        """Copy the last of so many pages of a path to host memory."""
        store, tokens = self.store, np.arange(num_pages * PAGE_SIZE, dtype=np.int32)
        path = store.find(NAMESPACE, tokens)
        spans = {POOLS[LayerKind.FULL]: (num_pages - 1, num_pages)}
        added = tokens[path.length :]
        assert store.make_room(store.tree.bytes_of(added, spans))
        segment = store.tree.add(NAMESPACE, path, added, spans)
        store.enter_host(segment, store.uses.next_use())
        store.end_copy(segment, is_whole=True)
        return segment

    def answer(self, refusal: Refusal | None = None) -> list[WriteFile]:
        """Carry out what was ordered, and return what was written."""
        written = []
        for order in self.store.orders.take():
            match order:
                case ListFiles(number=number):
                    self.store.orders.handle(TierResult(number, 0.0))
                case WriteFile(number=number):
                    written.append(order)
                    self.store.orders.handle(TierResult(number, 0.0, refusal))
                case _:
                    pass
        return written


def test_a_file_that_gives_way_to_one_that_follows_it_takes_that_with_it() -> None:
    tiers = Tiers(host_bytes=ONE_SEGMENT, disk_bytes=ONE_SEGMENT)
    store = tiers.store
    parent = tiers.add(1)
    assert tiers.answer(), "host memory is nearly full"
    child = tiers.add(2)
    assert not parent.in_host
    assert parent.on_disk
    # The disk has room for one of them.
    tiers.answer()
    assert store.tree.get(child.number) is None
    assert (store.host.num_segments, store.host.num_bytes) == (0, 0)
    assert (store.disk.num_segments, store.disk.num_bytes) == (0, 0)


def test_what_the_disk_did_not_take_is_written_once_it_takes_something() -> None:
    tiers = Tiers(host_bytes=4 * ONE_SEGMENT, disk_bytes=10 * ONE_SEGMENT)
    first, second = tiers.add(1), tiers.add(2)
    tiers.store.writes.is_draining = True
    tiers.store.write_ahead()
    written = tiers.answer(Refusal.FAILED)
    assert [order.segment for order in written] == [first.number]
    tiers.store.writes.is_draining = True
    tiers.store.write_ahead()
    assert [order.segment for order in tiers.answer()] == [second.number]
    assert second.on_disk
    tiers.store.writes.is_draining = True
    tiers.store.write_ahead()
    assert [order.segment for order in tiers.answer()] == [first.number]
    assert first.on_disk


def test_all_that_is_dropped_at_once_is_one_order() -> None:
    tiers = Tiers(host_bytes=4 * ONE_SEGMENT, disk_bytes=0)
    dropped = [tiers.add(length).number for length in (1, 2, 3)]
    tiers.store.drop(tiers.store.tree.segments()[0])
    assert tiers.store.orders.take() == [Forget(segments=tuple(dropped))]
    tiers.add(1)
    tiers.store.clear()
    assert tiers.store.orders.take() == [Forget(all_segments=True)]
