"""Segments in host memory and in real files: bounds to the byte, who gives way, and that nothing is
left of what was dropped, whenever that happens.
"""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from cache.components import components_of
from cache.pool.page_copy import PagedTensor
from cache.tiers.segment import Segment, tenant_tag
from cache.tiers.segment_tree import SEGMENT_BYTES, SegmentTree
from cache.tiers.segment_tree import Path as TreePath
from cache.types import Namespace, Tokens
from session_server.core.kv_place import KV_REFUSED as REFUSED
from session_server.core.tier_orders import (
    CopyIn,
    CopyOut,
    FoundFile,
    ReadPart,
    Refusal,
    TierOrder,
    TierResult,
)
from session_server.engine.tiers import store as store_module
from session_server.engine.tiers.disk_account import QUOTA_HOLD_S
from session_server.engine.tiers.room_watch import RoomWatch
from session_server.engine.tiers.store import TierStore
from session_server.engine.tiers.unread_files import UNREAD_FILE_BYTES
from session_server.runner import segment_files
from session_server.runner.kv_carrier import KvCarrier
from session_server.runner.kv_directory import OWNER
from session_server.runner.segment_files import SegmentFiles, file_name
from session_server.runner.segment_format import Layout, PoolLayout
from tests.cache.kv_world import POOL, make_spec

PAGE_SIZE = 4
PAGE_BYTES = 1 << 12
SEGMENT_PAGES = 2
SEGMENT = SEGMENT_BYTES + SEGMENT_PAGES * (PAGE_BYTES + 4 * PAGE_SIZE)
ALICE, BOB = Namespace("alice", "model", "a"), Namespace("bob", "model", "b")


class Stock:
    """A store whose orders a real carrier carries out when it is told to."""

    def __init__(self, directory: Path, *, host: int, disk: int = 0) -> None:
        """Room for so many bytes."""
        self.memory = torch.zeros((64, PAGE_BYTES), dtype=torch.uint8)
        self.memory[:] = torch.arange(64, dtype=torch.uint8)[:, None]
        tensor = PagedTensor(self.memory, 0)
        layout = Layout(PAGE_SIZE, {POOL: PoolLayout((tensor.shape_of(0),), 0, is_whole=True)}, "m")
        self.directory = directory
        self.other_bytes, self.disk_bytes = 0, 1 << 40
        self.files = SegmentFiles(directory, layout, statvfs=lambda _: self.statvfs())
        self.carrier = KvCarrier({POOL: [tensor]}, self.files)
        spec = make_spec(PAGE_SIZE)
        tree = SegmentTree(PAGE_SIZE, self.carrier.page_bytes, components_of(spec))
        self.store = TierStore(tree, host_bytes=host, disk_bytes=disk)
        self.store.start()
        self.room_watch = RoomWatch(self.store)
        self.num_read = 0

    def carry(self, *, at_most: int = 1000) -> None:
        """Carry out orders and what comes of them."""
        while (orders := self.store.orders.take()) or self.store.has_more:
            for order in orders:
                self.finish(order)
                at_most -= 1
            self.store.advance()
            assert at_most > 0, "orders without end"

    def measure(self, now_s: float) -> None:
        """Have the disk asked for its room if it is time to, and do what comes of that."""
        self.store.uses.set(now_s)
        self.room_watch.ask(now_s)
        self.carry()

    @property
    def file_bytes(self) -> int:
        """What files take of the disk."""
        return sum((self.directory / name).stat().st_size for name in self.names)

    def statvfs(self) -> os.statvfs_result:
        """What the disk says of itself. Others have `other_bytes` of its `disk_bytes`."""
        free = max(0, self.disk_bytes - self.other_bytes - self.file_bytes)
        return os.statvfs_result((1, 1, self.disk_bytes, free, free, 0, 0, 0, 0, 255))

    def finish(self, order: TierOrder) -> None:
        """Carry out one order."""
        result = self.carrier.prepare(order).run()
        if result is not None:
            self.store.orders.handle(result)

    def begin(self, tokens: Tokens, namespace: Namespace = ALICE) -> Segment | None:
        """Order the copy of what no segment has of a path; return its last segment."""
        path, segment = self.store.find(namespace, tokens), None
        while path.length < len(tokens):
            added = tokens[path.length : path.length + SEGMENT_PAGES * PAGE_SIZE]
            first = path.length // PAGE_SIZE
            spans = {POOL: (first, first + len(added) // PAGE_SIZE)}
            num_bytes = self.store.tree.bytes_of(added, spans)
            if not (self.store.make_room(num_bytes) and self.store.tree.has(path)):
                return None
            segment = self.store.tree.add(namespace, path, added, spans)
            self.store.enter_host(segment, self.store.uses.next_use())
            self._order_copy(segment, num_bytes)
            path = path.followed_by(segment)
        return segment

    def put(self, tokens: Tokens, namespace: Namespace = ALICE) -> Segment | None:
        """The same, and carry it out."""
        segment = self.begin(tokens, namespace)
        self.carry()
        return segment

    def look(self, tokens: Tokens, namespace: Namespace = ALICE) -> int:
        """Look for a path on disk too; return how much of it can be read."""
        path = self.store.find(namespace, tokens)
        if self.store.is_unread(path.next_name):
            self.store.find_files(namespace, tokens, path, lambda: None)
            self.carry()
        return self.store.find_readable(namespace, tokens).length

    def read(self, tokens: Tokens, namespace: Namespace = ALICE) -> TierResult:
        """Copy a path back, to page 40."""
        parts = []
        for part in self.store.find(namespace, tokens).parts:
            segment = part.segment
            found = None if segment.in_host else FoundFile.of(segment.content)
            pages = np.arange(40, 40 + SEGMENT_PAGES, dtype=np.int32)
            parts.append(ReadPart(segment.number, found, {POOL: (0, pages)}))
        results: list[TierResult] = []
        self.store.orders.add(lambda number: CopyIn(number, tuple(parts), 0), results.append)
        self.carry()
        return results[0]

    @property
    def names(self) -> set[str]:
        """Files that are there."""
        return {name for name in os.listdir(self.directory) if name not in (REFUSED, OWNER)}

    def assert_bounded(self) -> None:
        """Neither tier has more than it may, and everything there is counted."""
        store = self.store
        in_host = [each for each in store.tree.segments() if each in store.host]
        on_disk = [each for each in store.tree.segments() if each in store.disk]
        assert store.host.num_bytes == sum(each.content.num_bytes for each in in_host)
        assert store.host.num_bytes <= store.host.max_bytes
        num_read = sum(each.content.num_bytes for each in on_disk)
        assert store.disk.num_bytes == num_read + store._unread.num_bytes
        assert set(self.carrier._segments) == {each.number for each in in_host}
        known = {file_name(each.content.file_id) for each in on_disk}
        unread = {file_name(file_id) for file_id, _ in store._unread._files.values()}
        assert self.names == known | unread
        assert self.file_bytes <= store.disk.num_bytes <= store.disk.max_bytes

    def assert_empty(self) -> None:
        """Nothing is anywhere."""
        self.assert_bounded()
        assert not self.names
        assert not self.carrier._segments
        assert (
            len(self.store.tree)
            == self.store.host.num_segments
            == self.store.disk.num_segments
            == 0
        )

    def _order_copy(self, segment: Segment, num_bytes: int) -> None:
        num_pages = len(segment.content.tokens) // PAGE_SIZE
        pages = {POOL: np.arange(1, 1 + num_pages, dtype=np.int32)}

        def end(result: TierResult) -> None:
            self.store.end_copy(segment, is_whole=result.refusal is None)

        self.store.orders.add(lambda n: CopyOut(n, segment.number, pages), end)


def path(seed: int, num_segments: int = 1) -> Tokens:
    """Tokens of whole segments."""
    size = num_segments * SEGMENT_PAGES * PAGE_SIZE
    return np.random.default_rng(seed).integers(0, 1000, size, np.int32)


# Host memory


@pytest.mark.parametrize(("room", "most"), [(3 * SEGMENT, 3), (3 * SEGMENT - 1, 2), (SEGMENT, 1)])
def test_host_memory_takes_what_it_has_room_for_to_the_byte(
    tmp_path: Path, room: int, most: int
) -> None:
    stock = Stock(tmp_path, host=room)
    for seed in range(6):
        assert stock.put(path(seed)) is not None
        stock.assert_bounded()
        kept = [other for other in range(seed + 1) if stock.look(path(other))]
        assert kept == list(range(max(0, seed + 1 - most), seed + 1))


def test_what_has_no_room_at_all_pushes_nobody_out(tmp_path: Path) -> None:
    stock = Stock(tmp_path, host=SEGMENT - 1, disk=10 * SEGMENT)
    stock.carry()
    assert stock.put(path(1)) is None
    stock.assert_empty()


def test_who_has_most_gives_way_and_of_that_what_was_used_longest_ago(tmp_path: Path) -> None:
    stock = Stock(tmp_path, host=4 * SEGMENT)
    stock.put(path(0), BOB)
    for seed in (1, 2, 3):
        stock.put(path(seed))
    stock.store.touch(part.segment for part in stock.store.find(ALICE, path(1)).parts)
    stock.put(path(4), BOB)
    assert [bool(stock.look(path(seed))) for seed in (1, 2, 3)] == [True, False, True]
    assert stock.look(path(0), BOB)
    assert stock.look(path(4), BOB)
    stock.assert_bounded()


def test_of_a_path_the_end_gives_way_before_the_beginning(tmp_path: Path) -> None:
    stock = Stock(tmp_path, host=4 * SEGMENT)
    long = path(1, 3)
    stock.put(long)
    stock.store.touch(part.segment for part in stock.store.find(ALICE, long).parts)
    stock.put(path(2))
    for seed, left in ((3, 2), (4, 1)):
        stock.put(path(seed), BOB)
        assert stock.look(long) == left * SEGMENT_PAGES * PAGE_SIZE
    stock.assert_bounded()


def test_a_beginning_that_goes_takes_what_follows_with_it(tmp_path: Path) -> None:
    stock = Stock(tmp_path, host=4 * SEGMENT)
    stock.put(path(1, 3))
    first = stock.store.find(ALICE, path(1, 3)).parts[0].segment
    stock.store.drop(first)
    stock.carry()
    stock.assert_empty()
    assert stock.store.counts.dropped_segments == 3


# Disk


def test_what_is_on_disk_leaves_host_memory_and_is_read_from_there(tmp_path: Path) -> None:
    stock = Stock(tmp_path, host=2 * SEGMENT, disk=10 * SEGMENT)
    stock.carry()
    for seed in range(6):
        assert stock.put(path(seed)) is not None
        stock.assert_bounded()
    assert all(stock.look(path(seed)) for seed in range(6))
    segment = stock.store.find(ALICE, path(0)).parts[0].segment
    assert segment.on_disk
    assert not segment.in_host
    assert stock.read(path(0)).refusal is None
    assert torch.equal(stock.memory[40:42], stock.memory[1:3])


def test_on_a_full_disk_what_was_used_longest_ago_gives_way(tmp_path: Path) -> None:
    stock = Stock(tmp_path, host=2 * SEGMENT, disk=3 * SEGMENT)
    stock.carry()
    for seed in range(8):
        assert stock.put(path(seed)) is not None
        stock.assert_bounded()
    kept = [seed for seed in range(8) if stock.look(path(seed))]
    assert kept[-2:] == [6, 7]
    assert 3 <= len(kept) <= 5
    assert stock.store.disk.num_bytes == 3 * SEGMENT


def test_a_disk_that_takes_nothing_costs_nothing_but_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = Stock(tmp_path, host=2 * SEGMENT, disk=10 * SEGMENT)
    stock.carry()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(segment_files, "_write_all", full)
    for seed in range(5):
        assert stock.put(path(seed)) is not None
        stock.assert_bounded()
    assert stock.store.counts.failed_copies > 0
    assert stock.store.disk.num_bytes == 0
    monkeypatch.undo()
    stock.measure(QUOTA_HOLD_S)
    for seed in range(5, 9):
        stock.put(path(seed))
    assert stock.store.disk.num_bytes > 0, "there is space again"
    stock.assert_bounded()


def test_before_the_end_what_everybody_has_is_written(tmp_path: Path) -> None:
    stock = Stock(tmp_path, host=10 * SEGMENT, disk=20 * SEGMENT)
    for seed in range(4):
        stock.put(path(seed))
    stock.put(path(4), BOB)
    assert not stock.names, "there is room"
    for _ in range(5):
        stock.store.writes.is_draining = True
        stock.store.write_ahead()
        stock.carry()
    assert len(stock.names) == 5
    stock.assert_bounded()


def test_before_the_end_what_the_disk_has_no_room_for_is_passed_over(tmp_path: Path) -> None:
    """Nothing is being written then, which is how the engine sees that it may end."""
    stock = Stock(tmp_path, host=10 * SEGMENT, disk=SEGMENT - 1)
    stock.carry()
    stock.put(path(1))
    small = stock.put(path(2)[:PAGE_SIZE])
    assert small is not None
    stock.store.writes.is_draining = True
    stock.store.write_ahead()
    assert stock.store.is_writing
    stock.carry()
    assert small.on_disk
    stock.assert_bounded()


def test_what_comes_when_the_time_of_an_end_has_passed_pushes_nothing_out(tmp_path: Path) -> None:
    stock = Stock(tmp_path, host=SEGMENT, disk=SEGMENT)
    stock.carry()
    written = stock.put(path(1), BOB)
    stock.carry()
    assert written is not None
    assert written.on_disk
    stock.store.writes.is_draining = True
    stock.store.writes.end()
    late = stock.put(path(2))
    stock.carry()
    assert late is not None
    assert (late.on_disk, written.on_disk, len(stock.names)) == (False, True, 1)
    stock.assert_bounded()


# Files from before


@pytest.fixture
def before(tmp_path: Path) -> Path:
    """Files of six paths, the first of them used last; the last one has two segments."""
    stock = Stock(tmp_path, host=10 * SEGMENT, disk=20 * SEGMENT)
    stock.carry()
    for seed in range(5):
        stock.put(path(seed))
    stock.put(path(5, 2))
    while not all(each.on_disk for each in stock.store.tree.segments()):
        stock.store.writes.is_draining = True
        stock.store.write_ahead()
        stock.carry()
    names = [stock.store.find(ALICE, path(seed)).parts[0].segment for seed in range(6)]
    stock.files.touch([each.content.file_id for each in names], time.monotonic_ns())
    assert len(stock.names) == 7
    return tmp_path


def test_files_from_before_are_found_when_they_are_looked_for(before: Path) -> None:
    stock = Stock(before, host=4 * SEGMENT, disk=20 * SEGMENT)
    stock.carry()
    assert len(stock.store.tree) == 0
    stock.assert_bounded()
    assert stock.look(path(5, 2)) == 2 * SEGMENT_PAGES * PAGE_SIZE
    assert stock.look(path(5, 2), BOB) == 0
    assert stock.read(path(5, 2)).refusal is None
    stock.assert_bounded()


def test_files_from_before_are_found_before_they_are_listed(before: Path) -> None:
    stock = Stock(before, host=4 * SEGMENT, disk=20 * SEGMENT)
    tokens = path(1)
    stock.store.find_files(ALICE, tokens, stock.store.find(ALICE, tokens), lambda: None)
    listing, finding = stock.store.orders.take()
    stock.finish(finding)
    stock.finish(listing)
    stock.carry()
    assert stock.store.find(ALICE, tokens).length == len(tokens)
    stock.assert_bounded()


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EMFILE, ""),
        OSError(errno.ENFILE, ""),
        OSError(errno.ENOMEM, ""),
        MemoryError(),
    ],
)
def test_a_file_that_cannot_be_opened_now_is_found_later(
    before: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def refuse(*_: object, **__: object) -> int:
        raise error

    stock = Stock(before, host=4 * SEGMENT, disk=20 * SEGMENT)
    stock.carry()
    names = stock.names
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        assert stock.look(path(1)) == 0
    assert stock.names == names
    assert stock.store.counts.refused_files == 0
    assert stock.look(path(1)) == len(path(1))
    stock.assert_bounded()


def test_a_file_that_is_deleted_while_the_disk_is_listed_is_counted_no_more(before: Path) -> None:
    stock = Stock(before, host=4 * SEGMENT, disk=20 * SEGMENT)
    tokens = path(1)
    stock.store.find_files(ALICE, tokens, stock.store.find(ALICE, tokens), lambda: None)
    listing, finding = stock.store.orders.take()
    listed = stock.carrier.prepare(listing).run()
    assert listed is not None
    stock.finish(finding)
    stock.store.drop(stock.store.find(ALICE, tokens).parts[0].segment)
    stock.store.orders.handle(listed)
    stock.carry()
    stock.assert_bounded()


def half_read(before: Path) -> tuple[Stock, Tokens, TreePath]:
    """A path of two files, of which the first was read."""
    stock = Stock(before, host=4 * SEGMENT, disk=20 * SEGMENT)
    stock.carry()
    tokens = path(5, 2)
    stock.look(tokens[: len(tokens) // 2])
    return stock, tokens, stock.store.find(ALICE, tokens)


def test_a_file_whose_path_goes_while_it_is_looked_for_hangs_nowhere(before: Path) -> None:
    stock, tokens, found = half_read(before)
    assert 0 < found.length < len(tokens)
    stock.store.find_files(ALICE, tokens, found, lambda: None)
    stock.store.drop(found.parts[0].segment)
    stock.carry()
    assert stock.store.find(ALICE, tokens).length == 0
    assert stock.store.violations() == []
    stock.assert_bounded()


@pytest.mark.parametrize("room", [4, 2])
def test_of_files_that_have_no_room_any_more_those_used_longest_ago_go(
    before: Path, room: int
) -> None:
    stock = Stock(before, host=4 * SEGMENT, disk=room * SEGMENT)
    stock.carry()
    stock.assert_bounded()
    # Each counts as more than it will once it was read: by a header.
    kept = [seed < room - 1 for seed in range(5)]
    assert [bool(stock.look(path(seed))) for seed in range(5)] == kept
    stock.assert_bounded()


def test_no_more_files_are_kept_than_can_be_known(
    before: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "MAX_INDEX_BYTES", 4 * UNREAD_FILE_BYTES)
    stock = Stock(before, host=4 * SEGMENT, disk=20 * SEGMENT)
    stock.carry()
    assert len(stock.names) <= 4
    stock.assert_bounded()
    for seed in range(10, 16):
        stock.put(path(seed))
        assert len(stock.names) <= 4
        stock.assert_bounded()


def test_a_disk_whose_files_cannot_be_listed_is_not_used(
    before: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = Stock(before, host=2 * SEGMENT, disk=20 * SEGMENT)

    def dead(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "scandir", dead)
    stock.carry()
    num_files = len(stock.names)
    for seed in range(10, 15):
        assert stock.put(path(seed)) is not None
    assert len(stock.names) == num_files
    assert stock.look(path(14)) == len(path(14))
    stock.store.clear()
    stock.carry()
    assert len(stock.store.tree) == 0


# Files that are refused


def test_a_file_that_is_refused_when_it_is_found_is_counted_and_asked_for_no_more(
    before: Path,
) -> None:
    stock = Stock(before, host=4 * SEGMENT, disk=20 * SEGMENT)
    stock.carry()
    tokens = path(1)
    found = stock.store.find(ALICE, tokens)
    name = found.next_name
    assert name is not None
    spoil(before / file_name(name + found.chain + tenant_tag(ALICE.tenant)), at=20)
    assert stock.look(tokens) == 0
    assert stock.store.counts.refused_files == 1
    assert not stock.store.is_unread(name)
    stock.assert_bounded()


def test_a_file_that_is_refused_half_way_gives_what_lies_before(before: Path) -> None:
    _, tokens, found = half_read(before)
    assert found.next_name is not None
    spoil(before / file_name(found.next_name + found.chain + tenant_tag(ALICE.tenant)), at=20)
    again = Stock(before, host=4 * SEGMENT, disk=20 * SEGMENT)
    again.carry()
    assert again.look(tokens) == len(tokens) // 2
    assert again.store.counts.refused_files == 1
    assert again.look(tokens) == len(tokens) // 2
    assert again.store.counts.refused_files == 1
    again.assert_bounded()


def test_a_file_that_is_refused_when_it_is_read_goes_with_all_that_follows(before: Path) -> None:
    stock = Stock(before, host=4 * SEGMENT, disk=20 * SEGMENT)
    stock.carry()
    tokens = path(5, 2)
    assert stock.look(tokens) == len(tokens)
    first = stock.store.find(ALICE, tokens).parts[0].segment
    spoil(before / file_name(first.content.file_id), at=-1)
    result = stock.read(tokens)
    assert result.refusal is Refusal.WRONG
    assert result.wrong_segment == first.number
    stock.store.refuse_file(first, result.refusal)
    stock.carry()
    assert stock.store.counts.refused_files == 1
    assert stock.look(tokens) == 0
    assert len(stock.names) == 5
    stock.assert_bounded()
    stock.put(tokens)
    assert stock.look(tokens) == len(tokens), "it is computed and copied again"


def spoil(file: Path, at: int) -> None:
    """Change a byte."""
    raw = bytearray(file.read_bytes())
    raw[at] ^= 1
    file.write_bytes(raw)


# What is dropped while it is on its way


@pytest.mark.parametrize("num_carried", range(9))
@pytest.mark.parametrize("how", ["drop", "clear"])
def test_nothing_is_left_of_what_is_dropped_whenever_that_happens(
    tmp_path: Path, num_carried: int, how: str
) -> None:
    """Orders are carried out one by one; the rest of them after the drop."""
    stock = Stock(tmp_path, host=3 * SEGMENT, disk=10 * SEGMENT)
    stock.carry()
    stock.begin(path(1, 3))
    first = stock.store.find(ALICE, path(1, 3)).parts[0].segment
    waiting = stock.store.orders.take()
    for _ in range(num_carried):
        stock.store.writes.is_draining = True
        stock.store.write_ahead()
        waiting += stock.store.orders.take()
        if waiting:
            stock.finish(waiting.pop(0))
    if how == "drop":
        stock.store.drop(first)
    else:
        stock.store.clear()
    waiting += stock.store.orders.take()
    while waiting:
        stock.finish(waiting.pop(0))
        waiting += stock.store.orders.take()
    stock.assert_empty()
    assert stock.put(path(1, 3)) is not None
    stock.assert_bounded()


def test_what_is_dropped_while_it_is_written_can_be_written_again(tmp_path: Path) -> None:
    stock = Stock(tmp_path, host=2 * SEGMENT, disk=10 * SEGMENT)
    stock.carry()
    segment = stock.put(path(1))
    assert segment is not None
    stock.store.writes.is_draining = True
    stock.store.write_ahead()
    writing = stock.store.orders.take()
    stock.store.drop(segment)
    stock.begin(path(1))
    for order in [*writing, *stock.store.orders.take()]:
        stock.finish(order)
    stock.carry()
    while stock.store.find(ALICE, path(1)).parts[0].segment.on_disk is False:
        stock.store.writes.is_draining = True
        stock.store.write_ahead()
        stock.carry()
    stock.assert_bounded()
    assert stock.read(path(1)).refusal is None


def test_what_is_found_or_listed_while_everything_is_dropped_does_not_come_in(
    before: Path,
) -> None:
    stock = Stock(before, host=4 * SEGMENT, disk=20 * SEGMENT)
    stock.store.find_files(ALICE, path(1), stock.store.find(ALICE, path(1)), lambda: None)
    stock.store.clear()
    stock.carry()
    stock.assert_empty()
    assert stock.store.is_listed
    assert stock.store.counts.refused_files == 0
